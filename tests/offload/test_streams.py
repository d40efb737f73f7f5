"""Streams: blocks arrive, are changed and go back as if all of them were in memory."""

import tempfile
import threading
import time
from collections.abc import Sequence

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from mics_fn.errors import FileError
from mics_fn.offload import Block, Scratch, cuts, empty, store, stream
from mics_fn.offload import scratch as _scratch
from mics_fn.offload.scratch import PAGE, block_bytes

MIB = 2**20


def moments(numel: int, *dtypes: torch.dtype) -> list[Tensor]:
    gen = torch.Generator().manual_seed(numel)
    return [torch.randn(numel, generator=gen).to(dtype) for dtype in dtypes]


def blocks_of(reads: Sequence[Tensor], writes: Sequence[Tensor]) -> list[Block]:
    """The blocks of flat tensors of one length."""
    parts = cuts(len(reads[0]), [x.dtype.itemsize for x in reads], MIB)
    return [Block([x[a:b] for x in reads], [x[a:b] for x in writes], (a, b)) for a, b in parts]


def change(block: Block, tensors: list[Tensor]) -> None:
    """Something that depends on the block, on all its tensors and on their order."""
    total = sum(x.float() for x in tensors)
    for i, x in enumerate(tensors):
        x.mul_(0.5).add_(total * (i + 1)).add_(block.key[0])


def changed(tensors: list[Tensor], parts: list[tuple[int, int]]) -> list[Tensor]:
    """The twin of a stream, in memory."""
    made = [x.clone() for x in tensors]
    for a, b in parts:
        change(Block([], (), (a, b)), [x[a:b] for x in made])
    return made


@pytest.mark.parametrize("numel", [0, 1023, 300_001])
@pytest.mark.parametrize("beside", [False, True])
def test_in_place_and_beside(scratch: Scratch, numel: int, beside: bool):
    plain = moments(numel, torch.float32, torch.bfloat16, torch.float64)
    kept: Sequence[Tensor] = [store(x, scratch) for x in plain]
    for threads in (1, 3, 7):
        new = [empty(scratch, x.shape, x.dtype) for x in plain] if beside else kept
        blocks = blocks_of(kept, new)
        for block, tensors in stream(blocks, MIB, threads=threads):
            change(block, tensors)
        if beside:  # the old state stays as it was
            assert all(torch.equal(a, b) for a, b in zip(kept, plain, strict=True))
        plain, kept = changed(plain, [block.key for block in blocks]), new
        assert all(torch.equal(a, b) for a, b in zip(kept, plain, strict=True))


pieces = st.lists(st.integers(0, 70_000), min_size=1, max_size=6)


@settings(max_examples=30)
@example([1350, 57], 1, False, True)  # the first one ends in the last page, and is written last
@given(pieces, st.integers(1, 4), st.booleans(), st.booleans())
def test_pieces_of_one_extent(lengths: list[int], threads: int, direct: bool, backwards: bool):
    """Parts that begin and end anywhere, side by side in pages and in units of checksums."""
    with tempfile.TemporaryDirectory() as folder:
        scratch = Scratch(folder, direct=direct)
        x = torch.arange(float(sum(lengths)))
        kept = store(x, scratch)
        parts = kept.split(lengths)
        blocks = [Block([part], [part]) for part in parts]
        for _, (part,) in stream(blocks[:: -1 if backwards else 1], 2 * MIB, threads=threads):
            part.add_(1)
        assert torch.equal(kept, x + 1)


@given(st.integers(0, 10**7), st.lists(st.sampled_from([1, 2, 4, 8]), min_size=1, max_size=4))
def test_cuts(numel: int, sizes: list[int]):
    for host_bytes in (MIB, 3 * MIB + 1, 64 * MIB):
        parts = cuts(numel, sizes, host_bytes)
        assert [0, *(b for _, b in parts)] == [*(a for a, _ in parts), numel]
        for a, b in parts:
            assert sum(-(-(b - a) * size // PAGE) * PAGE for size in sizes) <= block_bytes(
                host_bytes
            )
            assert all(a * size % PAGE == 0 for size in sizes)


def test_a_disk_that_hangs(scratch: Scratch, monkeypatch: pytest.MonkeyPatch):
    kept = [store(torch.ones(1000), scratch) for _ in range(8)]
    hangs, before = threading.Event(), threading.active_count()
    monkeypatch.setattr(_scratch, "_move", lambda *_: hangs.wait(20))
    monkeypatch.setattr(_scratch, "TIMEOUT_S", 0.3)
    begun = time.monotonic()
    with pytest.raises(FileError, match="longer than 0.3 s") as caught:
        list(stream([Block([x]) for x in kept]))
    assert time.monotonic() - begun < 5
    assert caught.value.path == str(scratch.folder)
    hangs.set()
    while threading.active_count() > before and time.monotonic() - begun < 20:
        time.sleep(0.01)
    assert threading.active_count() == before

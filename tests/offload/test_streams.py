"""Streams: blocks arrive, are changed and go back as if all of them were in memory."""

import threading
import time
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from mics_fn.errors import DonatedError, FileError, PlanError
from mics_fn.offload import (
    Block,
    Scratch,
    cuts,
    empty,
    read,
    renewed,
    store,
    stream,
    streaming,
)
from mics_fn.offload.scratch import PAGE, UNIT

MIB = 2**20


def moments(numel: int, *dtypes: torch.dtype) -> list[Tensor]:
    gen = torch.Generator().manual_seed(numel)
    return [torch.randn(numel, generator=gen).to(dtype) for dtype in dtypes]


def blocks_of(
    reads: Sequence[Tensor], writes: Sequence[Tensor] | None = None, host_bytes: int = MIB
) -> list[Block]:
    """The blocks of flat tensors of one length."""
    found = []
    for a, b in cuts(len(reads[0]), [x.dtype.itemsize for x in reads], host_bytes):
        into = [x[a:b] for x in writes] if writes else ()
        found.append(Block([x[a:b] for x in reads], into, (a, b)))
    return found


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


NUMELS = [0, 1, 1023, 4096, 65536, 300_001]
DTYPES = [(torch.float32,), (torch.float32, torch.bfloat16), (torch.float64,) * 3]


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("numel", NUMELS)
def test_in_place(scratch: Scratch, numel: int, dtypes: tuple[torch.dtype, ...]):
    plain = moments(numel, *dtypes)
    kept: Sequence[Tensor] = [store(x, scratch) for x in plain]
    for threads in (1, 3, 7):
        old, kept = kept, renewed(kept)
        blocks = blocks_of(kept, kept)
        plain = changed(plain, [block.key for block in blocks])
        for block, tensors in stream(blocks, MIB, threads=threads):
            change(block, tensors)
        assert all(torch.equal(a, b) for a, b in zip(kept, plain, strict=True))
        with pytest.raises(DonatedError):
            read(old[0])


@pytest.mark.parametrize("numel", [1, 300_001])
def test_elsewhere(scratch: Scratch, numel: int):
    """The old state stays as it was."""
    plain = moments(numel, torch.float32, torch.float32)
    kept = [store(x, scratch) for x in plain]
    new = [empty(scratch, x.shape, x.dtype) for x in plain]
    blocks = blocks_of(kept, new)
    for block, tensors in stream(blocks, MIB):
        change(block, tensors)
    wanted = changed(plain, [block.key for block in blocks])
    assert all(torch.equal(a, b) for a, b in zip(kept, plain, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(new, wanted, strict=True))


def test_what_is_only_read_or_only_written(scratch: Scratch):
    x = torch.arange(200_000.0)
    kept, made = store(x, scratch), empty(scratch, x.shape, x.dtype)
    parts = cuts(len(x), [4, 4], MIB)
    blocks = [Block([kept[a:b], None], [None, made[a:b]], (a, b)) for a, b in parts]
    for _, (source, into) in stream(blocks, MIB):
        into.copy_(source).mul_(3)
        source.zero_()
    assert torch.equal(kept, x)
    assert torch.equal(made, 3 * x)


pieces = st.lists(st.integers(0, 70_000), min_size=1, max_size=6)


@settings(max_examples=30)
@example([1350, 57], 1, False, True)  # the first one ends in the last page, and is written last
@given(pieces, st.integers(1, 4), st.booleans(), st.booleans())
def test_pieces_of_one_extent(lengths: list[int], threads: int, direct: bool, backwards: bool):
    """Parts that begin and end anywhere, side by side in pages and in units of checksums."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        scratch = Scratch(folder, direct=None if direct else False)
        x = torch.arange(float(sum(lengths)))
        (kept,) = renewed([store(x, scratch)])
        parts = kept.split(lengths)
        blocks = [Block([part], [part]) for part in parts]
        for _, (part,) in stream(blocks[:: -1 if backwards else 1], 2 * MIB, threads=threads):
            part.add_(1)
        assert torch.equal(kept, x + 1)
        scratch.close()


@given(st.integers(0, 10**7), st.lists(st.sampled_from([1, 2, 4, 8]), min_size=1, max_size=4))
def test_cuts(numel: int, sizes: list[int]):
    for host_bytes in (MIB, 3 * MIB + 1, 64 * MIB):
        parts = cuts(numel, sizes, host_bytes)
        assert [0, *(b for _, b in parts)] == [*(a for a, _ in parts), numel]
        for a, b in parts:
            assert sum(
                -(-(b - a) * size // PAGE) * PAGE for size in sizes
            ) <= streaming.block_bytes(host_bytes)
            assert all(a * size % PAGE == 0 for size in sizes)
    assert all(a * size % UNIT == 0 for a, _ in cuts(numel, sizes, 64 * MIB) for size in sizes)


def test_nothing_to_do(scratch: Scratch):
    assert list(stream([])) == []
    kept = store(torch.empty(0), scratch)
    assert [len(tensors[0]) for _, tensors in stream([Block([kept], [kept])])] == [0]


def test_blocks_are_taken_as_they_are_needed(scratch: Scratch):
    """A generator of blocks is asked for `SLOTS` of them ahead, and no more."""
    kept, asked = [store(torch.full((3,), float(i)), scratch) for i in range(20)], []

    def blocks():
        for x in kept:
            asked.append(x)
            yield Block([x])

    for i, (_, (x,)) in enumerate(stream(blocks())):
        assert x.tolist() == [i] * 3
        assert len(asked) <= min(20, i + streaming.SLOTS)


def test_no_thread_is_left(scratch: Scratch):
    kept = [store(torch.ones(1000), scratch) for _ in range(30)]
    before = threading.active_count()

    def leave(how: str) -> None:
        found = stream([Block([x], [x]) for x in kept])
        for i, _ in enumerate(found):
            if i == 5 and how == "break":
                break
            if i == 5 and how == "raise":
                raise ValueError("of the caller")
            if i == 5 and how == "close":
                found.close()  # pyright: ignore[reportAttributeAccessIssue]
                break

    for how in ("to the end", "break", "close"):
        leave(how)
        assert threading.active_count() == before
    with pytest.raises(ValueError, match="of the caller"):
        leave("raise")
    assert threading.active_count() == before


def test_blocks_that_are_refused(scratch: Scratch):
    small, large = store(torch.ones(3), scratch), store(torch.ones(MIB), scratch)
    (new,) = renewed([store(torch.ones(3), scratch)])
    for blocks, said in (
        ([Block([large])], "a block of 4194304 bytes, with slots of 262144"),
        ([Block([torch.ones(3)])], "not stored"),  # pyright: ignore
        ([Block([None])], "not stored"),
        ([Block([small], [large])], "would be written to"),
        ([Block([small]), Block([small]), Block([None, small], [new, None, None])], "longer"),
    ):
        with pytest.raises((PlanError, ValueError), match=said):
            list(stream(blocks, MIB))
    with pytest.raises(PlanError, match="host_bytes=5"):
        list(stream([], 5))
    assert torch.equal(small, torch.ones(3))


def test_overlap(scratch: Scratch, monkeypatch: pytest.MonkeyPatch):
    """While the caller has a block, the next ones arrive, and all before it are written."""
    kept, reads, writes = [store(torch.ones(1000), scratch) for _ in range(16)], [], []
    moved: Callable[..., None] = streaming._Stream._move

    def noted(self, slot, done, coming):
        moved(self, slot, done, coming)
        writes.extend([done] if done is not None else [])
        reads.extend([coming] if coming is not None else [])

    monkeypatch.setattr(streaming._Stream, "_move", noted)
    for i, _ in enumerate(stream([Block([x], [x]) for x in kept])):
        limit = time.monotonic() + 20
        while len(reads) < min(16, i + streaming.SLOTS) or len(writes) < i:
            assert time.monotonic() < limit
            time.sleep(0.001)
    assert len(writes) == 16


def test_a_disk_that_hangs(scratch: Scratch, monkeypatch: pytest.MonkeyPatch):
    kept = [store(torch.ones(1000), scratch) for _ in range(8)]
    hangs, before = threading.Event(), threading.active_count()
    monkeypatch.setattr(streaming._Stream, "_move", lambda *_: hangs.wait(20))
    begun = time.monotonic()
    with pytest.raises(FileError, match="longer than 0.3 s") as caught:
        list(stream([Block([x]) for x in kept], timeout_s=0.3))
    assert time.monotonic() - begun < 5
    assert caught.value.path == str(scratch.path)
    hangs.set()
    while threading.active_count() > before and time.monotonic() - begun < 20:
        time.sleep(0.01)
    assert threading.active_count() == before

"""Scratch files and what can happen to them: no wrong value, no file in the way, no thread left."""

import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from children import in_child
from disks import broken
from torch import Tensor

from mics_fn import testing
from mics_fn.errors import FileError
from mics_fn.offload import Block, Scratch, empty, read, store, stream

MIB = 2**20


def kept_in(scratch: Scratch, count: int = 12, numel: int = 30_000) -> list[Any]:
    return [store(torch.full((numel,), float(i)), scratch, f"w{i}") for i in range(count)]


def intact(kept: Sequence[Tensor], plus: float = 0.0) -> bool:
    return all(bool((read(x) == i + plus).all()) for i, x in enumerate(kept))


def step(kept: Sequence[Tensor], new: Sequence[Tensor], **options: Any) -> None:
    """Each tensor plus one goes to another place."""
    pairs = zip(kept, new, strict=True)
    for _, (x,) in stream([Block([a], [b]) for a, b in pairs], MIB, **options):
        x.add_(1)


def test_a_killed_run_leaves_nothing(tmp_path: Path):
    def dies() -> None:
        kept = kept_in(Scratch(tmp_path))
        with testing.inject(None, 0, "offload: write w5", "kill"):
            step(kept, kept)

    assert in_child(dies) == -signal.SIGKILL
    assert not list(tmp_path.iterdir())


# Disks that are full, or fail.


@pytest.mark.parametrize("after", [0, 5, 11])
@pytest.mark.parametrize("fault", ["cannot read", "cannot write"])
def test_a_broken_disk(scratch: Scratch, fault: str, after: int):
    kept, before = kept_in(scratch), threading.active_count()
    new = [empty(scratch, x.shape, x.dtype, leaf=f"new{i}") for i, x in enumerate(kept)]
    expected = pytest.raises(FileError, match=r"(?s)(w|new)\d+: \[Errno 5\].*fix: ")
    with broken(fault, after), expected as caught:
        step(kept, new)
    assert caught.value.path == str(scratch.folder)
    assert threading.active_count() == before
    assert intact(kept)
    step(kept, new)
    assert intact(new, 1.0)


# Ctrl-C.


def test_ctrl_c_leaves_no_thread(scratch: Scratch):
    def interrupted() -> None:
        kept, before = kept_in(scratch, 30), threading.active_count()
        new = [empty(scratch, x.shape, x.dtype) for x in kept]
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
        stopped = 0
        for trial in range(30):
            begun = time.monotonic()
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.0006 * (1 + trial))
                step(kept, new)
                time.sleep(0.1)
            except KeyboardInterrupt:
                stopped += 1
            assert time.monotonic() - begun < 5
            limit = time.monotonic() + 2
            while threading.active_count() > before and time.monotonic() < limit:
                time.sleep(0.001)
            assert threading.active_count() == before
        assert stopped > 15  # a few are lost in finalizers, as Python has it
        assert intact(kept)
        step(kept, new)
        assert intact(new, 1.0)

    assert in_child(interrupted) == 0


# Memory.


def test_memory(tmp_path: Path):
    """A state of 48 MiB goes through 8 MiB, and takes no more of the process."""

    def streams() -> None:
        scratch = Scratch(tmp_path)
        kept = [empty(scratch, (6 * MIB,), torch.float32) for _ in range(2)]
        parts = [slice(a, a + MIB // 4) for a in range(0, 6 * MIB, MIB // 4)]
        blocks = [Block([x[part] for x in kept], [x[part] for x in kept]) for part in parts]
        before = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")
        for _ in range(2):
            for _, tensors in stream(blocks, 8 * MIB):
                for x in tensors:
                    x.fill_(1.0)
        assert resident("VmHWM") - before < 8 * MIB + 10 * MIB

    assert in_child(streams) == 0


def resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name))

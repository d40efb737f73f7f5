"""Scratch files and what can happen to them: no wrong value, no file in the way, no thread left."""

import errno
import gc
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from children import in_child
from torch import Tensor

from mics_fn import checkpoint, make_groups, testing
from mics_fn.errors import CheckpointNotFound, FileError
from mics_fn.offload import (
    Block,
    Scratch,
    empty,
    read,
    renewed,
    store,
    stream,
)
from mics_fn.offload import (
    scratch as ownership,
)
from mics_fn.offload import scratch as scratch_module
from mics_fn.offload.scratch import UNIT

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


def files_in(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


# Processes that die, and others that live.


def test_a_killed_run_leaves_a_file_that_nobody_takes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    def dies() -> None:
        scratch = Scratch(tmp_path, "states")
        kept = renewed(kept_in(scratch))
        with testing.inject(None, 0, "offload: write w5", "kill"):
            step(kept, kept)

    assert in_child(dies) == -signal.SIGKILL
    (left,) = files_in(tmp_path)
    assert checkpoint.steps(tmp_path) == []
    with pytest.raises(CheckpointNotFound):
        checkpoint.load(tmp_path, {}, make_groups(1))
    with caplog.at_level(logging.WARNING, "mics_fn"):
        scratch = Scratch(tmp_path, "states")
    assert f"removed {tmp_path / left}" in caplog.text
    assert files_in(tmp_path) == [scratch.path.name]
    assert intact(kept_in(scratch))


def test_files_of_living_processes_stay(tmp_path: Path):
    scratch = Scratch(tmp_path)
    kept = kept_in(scratch)

    def another() -> None:
        mine = Scratch(tmp_path)
        assert files_in(tmp_path) == sorted([mine.path.name, scratch.path.name])
        assert intact(kept)
        scratch.close()  # which in a forked process leaves the file of its parent
        gc.collect()

    assert in_child(another) == 0
    assert scratch.path.exists()
    assert intact(kept)


ENDS = """
import sys, torch
from mics_fn.offload import Scratch, store
x = store(torch.ones(3), Scratch(sys.argv[1]))
raise ValueError("of the program")
"""


def test_a_process_removes_its_files_at_its_end(tmp_path: Path):
    ended = subprocess.run(
        [sys.executable, "-c", ENDS, str(tmp_path)], capture_output=True, text=True, timeout=100
    )
    assert "ValueError: of the program" in ended.stderr
    assert "Traceback" not in ended.stderr.partition("ValueError: of the program")[2]
    assert files_in(tmp_path) == []


def test_what_is_not_ours_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Others' files with that ending, links, pipes, folders, and files of another machine."""
    (tmp_path / "notes.scratch").write_text("mine")
    (tmp_path / "folder.scratch").mkdir()
    os.mkfifo(tmp_path / "pipe.scratch")
    with monkeypatch.context() as patch:
        patch.setattr(ownership, "_machine", lambda: {"host": "elsewhere", "boot": "other"})
        far = Scratch(tmp_path, "far")
    shutil.copy(far.path, tmp_path / "copy.scratch")  # which nobody has locked
    (tmp_path / "link.scratch").symlink_to(tmp_path / "copy.scratch")
    before = files_in(tmp_path)
    scratch = Scratch(tmp_path)
    assert files_in(tmp_path) == sorted([*before, scratch.path.name])
    assert (tmp_path / "notes.scratch").read_text() == "mine"


# Disks that are full, or fail.


@contextmanager
def small_disk(folder: Path, nbytes: int) -> Iterator[Path]:
    """A file system of so many bytes, where this process may mount one."""
    folder.mkdir()
    options = f"size={nbytes}"
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", folder], check=False)
    if done.returncode:
        pytest.skip("no right to mount a file system")
    try:
        yield folder
    finally:
        gc.collect()
        subprocess.run(["umount", "-l", folder], check=True)


def test_a_full_disk(tmp_path: Path):
    """What does not fit is refused before anything changes; what is there can still be stepped."""
    with small_disk(tmp_path / "small", 3 * MIB) as folder:
        scratch = Scratch(folder)
        kept = kept_in(scratch)  # 1.5 MB
        with pytest.raises(FileError, match=r"(?s)no room for .*more.*w: .*No space left") as e:
            [empty(scratch, (400_000,), torch.float32, leaf="w") for _ in range(2)]
        assert (e.value.path, e.value.leaf) == (str(scratch.path), "w")
        assert intact(kept)
        new = renewed(kept)
        step(new, new)
        assert intact(new, 1.0)
        new[6:], kept[:] = [], []
        gc.collect()
        (rest,) = [store(torch.ones(150_000), scratch)]  # in the room of the others
        assert intact(new, 1.0)
        assert torch.equal(rest, torch.ones(150_000))
        del rest, scratch, new


def failing(monkeypatch: pytest.MonkeyPatch, name: str, after: int) -> None:
    """From some call on, reads or writes fail as those of a broken disk do."""
    real, calls = getattr(scratch_module, name), []

    def fails(*args: Any) -> None:
        calls.append(args)
        if len(calls) > after:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(*args)

    monkeypatch.setattr(scratch_module, name, fails)


@pytest.mark.parametrize("after", [0, 5, 11])
@pytest.mark.parametrize("name", ["read_all", "write_all"])
def test_a_broken_disk(scratch: Scratch, monkeypatch: pytest.MonkeyPatch, name: str, after: int):
    kept, before = kept_in(scratch), threading.active_count()
    new = [empty(scratch, x.shape, x.dtype, leaf=f"new{i}") for i, x in enumerate(kept)]
    with monkeypatch.context() as patch:
        failing(patch, name, after)
        with pytest.raises(FileError, match=r"(?s)(w|new)\d+: \[Errno 5\].*fix: ") as caught:
            step(kept, new)
    assert caught.value.path == str(scratch.path)
    assert threading.active_count() == before
    assert intact(kept)
    step(kept, new)
    assert intact(new, 1.0)


def test_what_was_written_in_part_is_not_read(scratch: Scratch, monkeypatch: pytest.MonkeyPatch):
    (kept,) = renewed([store(torch.zeros(4 * UNIT), scratch, "w")])
    with monkeypatch.context() as patch:
        failing(patch, "write_all", 0)
        with pytest.raises(FileError):
            list(stream([Block([kept[UNIT : 2 * UNIT]], [kept[UNIT : 2 * UNIT]])], 2 * MIB))
    assert torch.equal(kept[:UNIT], torch.zeros(UNIT))
    for part in (kept, kept[UNIT : UNIT + 5]):
        with pytest.raises(FileError, match="never written, or not to the end"):
            read(part)


# Files that change under us.


def overwrite(path: Path, at: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(data)


def flip(path: Path, kept: list[Any], at: int) -> None:
    place = kept[3].extent.offset + at
    with open(path, "rb") as file:
        file.seek(place)
        (value,) = file.read(1)
    overwrite(path, place, bytes([value ^ 16]))


CHANGES: dict[str, Callable[[Path, list[Any], bytes], Any]] = {
    "a flipped bit": lambda path, kept, old: flip(path, kept, 119_999),
    "a lost page": lambda path, kept, old: overwrite(path, kept[3].extent.offset, bytes(4096)),
    "cut off": lambda path, kept, old: os.truncate(path, kept[3].extent.offset + 5000),
    "an older copy": lambda path, kept, old: overwrite(path, 0, old),
    "taken over": lambda path, kept, old: overwrite(path, 0, b"mine".ljust(4096)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_file(scratch: Scratch, change: str):
    kept = kept_in(scratch)
    old = scratch.path.read_bytes()
    kept = renewed(kept)
    step(kept, kept)
    assert intact(kept, 1.0)
    CHANGES[change](scratch.path, kept, old)
    for use in (lambda: intact(kept, 1.0), lambda: list(stream([Block([x]) for x in kept], MIB))):
        with pytest.raises(FileError, match=r"(?s)(w3: |w0: ).*load a checkpoint") as caught:
            use()
        assert caught.value.path == str(scratch.path)
        assert caught.value.leaf in ("w0", "w3")


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
        fill = [Block([None, None], [x[part] for x in kept]) for part in parts]
        before = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")
        for _ in range(2):
            for _, tensors in stream(fill, 8 * MIB):
                for x in tensors:
                    x.fill_(1.0)
            kept = renewed(kept)
            fill = [Block([x[part] for x in kept], [x[part] for x in kept]) for part in parts]
        scratch.close()
        assert resident("VmHWM") - before < 8 * MIB + 10 * MIB

    assert in_child(streams) == 0


def resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name))

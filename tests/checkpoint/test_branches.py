"""Steps that are replaced or damaged: which ones count, and when they are removed."""

import errno
import logging
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from children import in_child
from hypothesis import given
from hypothesis import strategies as st
from steps import load_at, save_at

import mics_fn as mf
from mics_fn import checkpoint
from mics_fn.checkpoint.directory import Attempt, Folder, divided
from mics_fn.errors import FileError


def save_all(folder: Path, *steps: int, **how: Any) -> None:
    groups = mf.make_groups(1)
    for step in steps:
        save_at(folder, step, groups, **how)


def load_here(folder: Path, step: int | None = None, **how: Any) -> int:
    return load_at(folder, mf.make_groups(1), step, **how)


def damage(folder: Path, step: int) -> Path:
    """Flip a bit of a value of a step."""
    (file,) = folder.glob(f"step-{step:08d}*/rank-00000.safetensors")
    data = bytearray(file.read_bytes())
    data[-5] ^= 4
    file.write_bytes(data)
    return file


@contextmanager
def without_files(monkeypatch: pytest.MonkeyPatch, folder: str) -> Iterator[None]:
    """The system has no file left to open in a folder of this name."""
    plain = os.open

    def opened(path: Any, *args: Any, **kwargs: Any) -> int:
        if Path(os.fsdecode(path)).parent.name == folder:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), path)
        return plain(path, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", opened)
        yield


def stale() -> Any:
    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))


def test_a_file_that_the_system_cannot_read_is_no_reason_to_go_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_all(tmp_path, 2, 4, 6)
    with without_files(monkeypatch, "step-00000006"):
        with pytest.raises(FileError, match="Too many open files") as raised:
            load_here(tmp_path, on_corrupt="previous")
        assert raised.value.damaged is False
        with pytest.raises(FileError, match="Too many open files"):
            checkpoint.verify(tmp_path)
    with monkeypatch.context() as patch:
        left, plain = iter(range(1, 3)), os.preadv
        patch.setattr(os, "preadv", lambda *args: plain(*args) if next(left, None) else stale())
        with pytest.raises(FileError, match="Stale file handle") as raised:
            load_here(tmp_path, on_corrupt="previous")
        assert raised.value.damaged is False
    assert load_here(tmp_path, on_corrupt="previous") == 6


def test_a_run_goes_on_from_before_a_damaged_step(tmp_path: Path, caplog: Any) -> None:
    save_all(tmp_path, 2, 4, 6, 8)
    for step in (6, 8):
        damage(tmp_path, step)
    with caplog.at_level(logging.WARNING, "mics_fn"):
        assert load_here(tmp_path, on_corrupt="previous") == 4
    assert "step 8 is refused" in caplog.text
    assert "step 6 is refused" in caplog.text
    save_all(tmp_path, 5, overwrite="newer", keep=2)
    assert (load_here(tmp_path), checkpoint.steps(tmp_path)) == (5, [4, 5])


def test_two_steps_can_be_loaded_after_a_rollback(tmp_path: Path) -> None:
    how = {"overwrite": "newer", "keep": 2}
    save_all(tmp_path, 10, 20, 30)
    save_all(tmp_path, 5, **how)
    assert checkpoint.steps(tmp_path) == [5]
    assert checkpoint.latest(tmp_path) == load_here(tmp_path) == 5
    assert load_here(tmp_path, 30) == 30  # replaced, and still there
    damage(tmp_path, 5)
    with pytest.raises(FileError):
        load_here(tmp_path, on_corrupt="previous")
    save_all(tmp_path, 5, **how)
    assert load_here(tmp_path) == 5
    assert load_here(tmp_path, 30) == 30
    save_all(tmp_path, 7, **how)
    assert checkpoint.steps(tmp_path) == [5, 7]
    left = sorted(path.name for path in tmp_path.iterdir() if not path.name.startswith("."))
    assert [name[:13] for name in left] == ["step-00000005", "step-00000007"]
    save_all(tmp_path, 30, **how)
    assert checkpoint.steps(tmp_path) == [7, 30]


def test_replaced_steps_do_not_count_if_they_cannot_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    how = {"overwrite": "newer", "keep": 2}
    save_all(tmp_path, 2, 4, 6, 8)
    plain = os.rename

    def failing(path: Any, *args: Any) -> None:
        if "step-00000008" in os.fsdecode(path):
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        plain(path, *args)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", failing)
        with caplog.at_level(logging.WARNING, "mics_fn"):
            save_all(tmp_path, 3, **how)
        assert "cannot remove" in caplog.text
        assert "step-00000008" in caplog.text
        assert checkpoint.latest(tmp_path) == load_here(tmp_path) == 3
        save_all(tmp_path, 5, 7, 9, 11, **how)
        assert checkpoint.steps(tmp_path) == [2, 3, 5, 7, 9, 11]
    save_all(tmp_path, 13, **how)
    assert checkpoint.steps(tmp_path) == [11, 13]
    assert not list(tmp_path.glob("step-00000008*"))


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 6)), unique=True, max_size=12))
def test_a_step_counts_unless_a_later_branch_has_one_at_or_below_it(
    found: list[tuple[int, int]],
) -> None:
    attempts = [Attempt(branch, step, Path(f"{branch}-{step}")) for branch, step in found]
    want = {
        step: Path(f"{branch}-{step}")
        for branch, step in found
        if not any(b > branch and s <= step for b, s in found)
    }
    counting, replaced = divided(sorted(attempts, reverse=True))
    assert counting == want
    assert list(counting) == sorted(want, reverse=True)
    assert set(replaced) <= {step for _, step in found}


def test_a_fork_does_not_keep_the_lock(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.begin(1, "never")
    child = os.fork()
    if child == 0:  # which lives on and has no part in this
        time.sleep(30)
        os._exit(0)
    assert not in_child(lambda: pytest.raises(FileError, Folder(tmp_path).begin, 1, "never"))
    folder.abandon()
    assert not in_child(lambda: Folder(tmp_path).begin(1, "never"))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)

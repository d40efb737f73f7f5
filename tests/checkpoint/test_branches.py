"""Steps that are replaced or refused: which ones count, and when they are removed."""

import errno
import logging
import os
import signal
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import mics_fn as mf
from mics_fn import checkpoint
from mics_fn.checkpoint.directory import MAX_STEP, Folder
from mics_fn.errors import (
    FileError,
    PlanError,
)


def state_at(step: int) -> dict[str, Any]:
    return {"w": torch.arange(500.0) + step, "step": step}


def save_at(folder: Path, *steps: int, **how: Any) -> None:
    groups = mf.make_groups(1)
    for step in steps:
        checkpoint.save(folder, state_at(step), groups, step=step, **how)


def load_at(folder: Path, step: int | None = None, **how: Any) -> int:
    found = checkpoint.load(folder, state_at(0), mf.make_groups(1), step=step, **how)
    assert torch.equal(found.state["w"], state_at(found.step)["w"])
    return found.step


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
    save_at(tmp_path, 2, 4, 6)
    with without_files(monkeypatch, "step-00000006"):
        with pytest.raises(FileError, match="Too many open files") as raised:
            load_at(tmp_path, on_corrupt="previous")
        assert raised.value.damaged is False
        with pytest.raises(FileError, match="Too many open files"):
            checkpoint.verify(tmp_path)
    with monkeypatch.context() as patch:
        left, plain = iter(range(1, 5)), os.preadv
        patch.setattr(os, "preadv", lambda *args: plain(*args) if next(left, None) else stale())
        with pytest.raises(FileError, match="Stale file handle") as raised:
            load_at(tmp_path, on_corrupt="previous")
        assert raised.value.damaged is False
    assert load_at(tmp_path, on_corrupt="previous") == 6


def test_no_save_removes_what_was_refused(tmp_path: Path, caplog: Any) -> None:
    save_at(tmp_path, 2, 4, 6, 8)
    content = {step: damage(tmp_path, step).read_bytes() for step in (6, 8)}
    with caplog.at_level(logging.WARNING, "mics_fn"):
        assert load_at(tmp_path, on_corrupt="previous") == 4
    assert "step 8 is refused" in caplog.text
    assert "step 6 is refused" in caplog.text
    for step in (5, 6, 7, 9):
        save_at(tmp_path, step, overwrite="newer", keep=2)
    assert checkpoint.steps(tmp_path) == [7, 9]
    kept = {path.parent.name[:22]: path.read_bytes() for path in tmp_path.glob(".refused-*/rank*")}
    assert kept == {f".refused-step-0000000{step}": found for step, found in content.items()}
    assert "step-00000006 was found to be damaged, and is now" in caplog.text


def test_a_step_that_can_be_read_after_all_is_an_ordinary_one(tmp_path: Path) -> None:
    save_at(tmp_path, 2, 4)
    damage(tmp_path, 4)
    assert load_at(tmp_path, on_corrupt="previous") == 2
    damage(tmp_path, 4)  # the bit flips back
    assert load_at(tmp_path) == 4
    save_at(tmp_path, 6, 8, keep=2)
    assert checkpoint.steps(tmp_path) == [6, 8]
    assert not list(tmp_path.glob(".refused-*"))


@pytest.mark.parametrize("commit", ["rename", "file"])
def test_two_steps_can_be_loaded_after_a_rollback(tmp_path: Path, commit: Any) -> None:
    how = {"overwrite": "newer", "keep": 2, "commit": commit}
    save_at(tmp_path, 10, 20, 30)
    save_at(tmp_path, 5, **how)
    assert checkpoint.steps(tmp_path) == [5]
    assert checkpoint.latest(tmp_path) == load_at(tmp_path) == 5
    assert load_at(tmp_path, 30) == 30  # replaced, and still there
    damage(tmp_path, 5)
    with pytest.raises(FileError):
        load_at(tmp_path, on_corrupt="previous")
    save_at(tmp_path, 5, **how)
    assert load_at(tmp_path) == 5
    assert len(list(tmp_path.glob("step-*"))) == 2
    save_at(tmp_path, 7, **how)
    assert checkpoint.steps(tmp_path) == [5, 7]
    left = sorted(path.name for path in tmp_path.iterdir() if not path.name.startswith("."))
    assert [name[:13] for name in left] == ["step-00000005", "step-00000007"]
    save_at(tmp_path, 30, **how)
    assert checkpoint.steps(tmp_path) == [7, 30]


@pytest.mark.parametrize("commit", ["rename", "file"])
def test_replaced_steps_do_not_count_if_they_cannot_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any, commit: Any
) -> None:
    how = {"overwrite": "newer", "keep": 2, "commit": commit}
    save_at(tmp_path, 2, 4, 6, 8, commit=commit)
    names = {"rename": os.rename, "unlink": os.unlink}

    def failing(name: str) -> Any:
        def call(path: Any, *args: Any, **kwargs: Any) -> None:
            if "step-00000008" in os.fsdecode(path):
                raise OSError(errno.EIO, os.strerror(errno.EIO), path)
            names[name](path, *args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        for name in names:
            patch.setattr(os, name, failing(name))
        with caplog.at_level(logging.WARNING, "mics_fn"):
            save_at(tmp_path, 3, **how)
        assert "cannot remove" in caplog.text
        assert "step-00000008" in caplog.text
        assert checkpoint.latest(tmp_path) == load_at(tmp_path) == 3
        save_at(tmp_path, 5, 7, 9, 11, **how)
        assert checkpoint.steps(tmp_path) == [2, 3, 5, 7, 9, 11]
    save_at(tmp_path, 13, **how)
    assert checkpoint.steps(tmp_path) == [11, 13]
    assert not list(tmp_path.glob("step-00000008*"))


def test_a_cut_mark_of_a_commit_hides_no_step(tmp_path: Path) -> None:
    save_at(tmp_path, 1, 2, commit="file")
    os.truncate(tmp_path / "step-00000002" / "COMMITTED", 63)
    with pytest.raises(FileError, match="COMMITTED"):
        load_at(tmp_path)
    save_at(tmp_path, 3, commit="file")
    assert checkpoint.steps(tmp_path) == [1, 2, 3]


def test_a_rank_that_still_writes_does_not_make_an_abandoned_step_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, plain = Folder(tmp_path), os.unlink
    path = folder.begin(1, "never", "file")

    def unlink(name: Any, *args: Any, **kwargs: Any) -> None:
        plain(name, *args, **kwargs)
        if Path(name).name == "BY_FILE" and path.is_dir():
            (path / "rank-00001.safetensors").write_bytes(b"late")

    def refuse(name: Any, *args: Any) -> None:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP), name)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", unlink)
        patch.setattr(os, "rename", refuse)
        folder.abandon()
    assert checkpoint.steps(tmp_path) == []
    save_at(tmp_path, 1)
    assert load_at(tmp_path) == 1


def test_a_store_that_cannot_rename_folders_keeps_what_was_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rename(path: Any, *args: Any) -> None:
        if Path(path).is_dir():
            raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP), path)
        plain(path, *args)

    def sync(number: int) -> None:
        if stat.S_ISDIR(os.fstat(number).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        plain_sync(number)

    plain, plain_sync = os.rename, os.fsync
    monkeypatch.setattr(os, "rename", rename)
    monkeypatch.setattr(os, "fsync", sync)
    how = {"overwrite": "newer", "keep": 2, "commit": "file"}
    save_at(tmp_path, 2, 4, 6, **how)
    assert checkpoint.steps(tmp_path) == [4, 6]
    damage(tmp_path, 6)
    assert load_at(tmp_path, on_corrupt="previous") == 4
    save_at(tmp_path, 5, 7, 9, **how)
    assert load_at(tmp_path) == 9
    assert checkpoint.steps(tmp_path) == [6, 7, 9]
    assert (tmp_path / "step-00000006" / "MANIFEST.json").exists()


def test_the_highest_step_is_an_ordinary_one_and_a_higher_one_is_refused(tmp_path: Path) -> None:
    save_at(tmp_path, MAX_STEP)
    assert load_at(tmp_path) == MAX_STEP
    with pytest.raises(PlanError, match="expected at most"):
        save_at(tmp_path, MAX_STEP + 1)


def test_a_lock_lasts_until_the_save_ends_whoever_reads_its_file(tmp_path: Path) -> None:
    first, second = Folder(tmp_path), Folder(tmp_path)
    first.begin(1, "never", "rename")
    (tmp_path / ".lock").read_bytes()
    child = os.fork()
    if child == 0:  # which lives on and has no part in this
        time.sleep(30)
        os._exit(0)
    with pytest.raises(FileError, match="another job saves"):
        second.begin(1, "never", "rename")
    first.abandon()
    second.begin(1, "never", "rename")
    second.abandon()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)

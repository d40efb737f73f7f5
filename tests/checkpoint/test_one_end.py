"""A save has one end: its errors are typed and of all ranks, and whoever reads waits for it."""

import errno
import os
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import Layout, groups_of
from children import in_child
from steps import at, trainer_in

import mics_fn as mf
from mics_fn import checkpoint
from mics_fn.errors import DesyncError, FileError

TWO = Layout((2,), 2)


def state_at(step: int) -> dict[str, Any]:
    return {"w": torch.arange(500.0) + step, "step": step}


def save_here(path: Path) -> None:
    checkpoint.save(path, state_at(1), mf.make_groups(1), step=1)


def test_a_folder_that_cannot_be_looked_at_is_a_typed_error(tmp_path: Path, monkeypatch) -> None:
    def gone(path: Any = ".") -> Any:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), path)

    for verb in (save_here, checkpoint.latest, checkpoint.verify):
        with monkeypatch.context() as patch:
            patch.setattr(os, "listdir", gone)
            with pytest.raises(FileError, match="Stale file handle"):
                verb(tmp_path)


def without_threads(layout: Layout, folder: str) -> list[int]:
    """One rank can start no thread, so it writes at once."""
    groups, plain = groups_of(layout), threading.Thread.start

    def start(self: threading.Thread) -> None:
        if self.name == "mics_fn save" and groups.rank:
            raise RuntimeError("can't start new thread")
        plain(self)

    threading.Thread.start = start
    try:
        checkpoint.start_save(folder, state_at(2), groups, step=2).wait()
    finally:
        threading.Thread.start = plain
    checkpoint.save(folder, state_at(3), groups, step=3)
    return checkpoint.steps(folder)


def test_a_rank_without_a_thread_saves_all_the_same(ranks, tmp_path: Path) -> None:
    assert ranks(2).run(without_threads, TWO, str(tmp_path)) == [[2, 3]] * 2


def torn(layout: Layout, folder: str) -> list[str]:
    """One rank is a step ahead of the other, and both save it as the same one."""
    groups, found = groups_of(layout), list[str]()
    shards = mf.shard({"w": torch.ones(6)}, groups)
    state = mf.init_state(shards, mf.optim.sgd(0.1))
    for each in (replace(state, step=4 + groups.rank), {"train": replace(state, step=groups.rank)}):
        with pytest.raises(DesyncError) as caught:
            checkpoint.save(folder, each, groups, step=5)
        found.append(str(caught.value))
    return [*found, *map(str, checkpoint.steps(folder))]


def test_a_torn_state_is_not_saved(ranks, tmp_path: Path) -> None:
    one, two = ranks(2).run(torn, TWO, str(tmp_path))
    assert one == two
    assert "ranks disagree on the step\n  rank 0: step 4\n  rank 1: step 5" in one[0]
    assert "same_step(state, groups, heal=True)" in one[0]
    assert "rank 0: train.step 0\n  rank 1: train.step 1" in one[1]
    assert len(one) == 2, "nothing was committed"


def swapped(layout: Layout, folder: str) -> str:
    """Save two states, each on all ranks, and then one of them on each rank."""
    groups = groups_of(layout)
    states = [mf.shard({"w": torch.ones(n)}, groups) for n in (4, 6)]
    for i, state in enumerate(states):
        checkpoint.save(f"{folder}/{i}", state, groups, step=1)
    with pytest.raises(DesyncError) as caught:
        checkpoint.save(f"{folder}/2", states[groups.rank], groups, step=1)
    return str(caught.value)


def test_states_that_were_saved_before_are_compared_again(ranks, tmp_path: Path) -> None:
    one, two = ranks(2).run(swapped, TWO, str(tmp_path))
    assert one == two
    assert "first difference: w\n  rank 0: w (4,) float32\n  rank 1: w (6,) float32" in one


def slow(point: str, seconds: float = 0.1) -> AbstractContextManager[None]:
    """A block in which each save takes so long at a point, and then goes on."""
    return at(point, lambda: time.sleep(seconds))


READERS: dict[str, Callable[[str, mf.Groups], int | None]] = {
    "latest": lambda path, _: checkpoint.latest(path),
    "steps": lambda path, _: max(checkpoint.steps(path)),
    "verify": lambda path, _: checkpoint.verify(path).step,
    "load": lambda path, groups: checkpoint.load(path, state_at(0), groups).step,
    "Trainer": lambda path, groups: trainer_in(path, groups).state.step,
}


def read_while_saved(layout: Layout, folder: str, slow_rank: int, point: str) -> dict[str, Any]:
    """What each reader finds while a save is under way, by each name of the folder."""
    groups, found = groups_of(layout), dict[str, Any]()
    seconds = 0.1 if groups.rank == slow_rank else 0.0
    for i, name in enumerate(READERS):
        path = f"{folder}/{point}-{slow_rank}-{i}"
        if groups.rank == 0:
            os.makedirs(path)
            os.symlink(path, f"{path}-link")
        spelling = (path, os.path.relpath(path), f"{path}-link")[i % 3]
        with slow(point, seconds):
            if name == "Trainer":
                trainer_in(path, groups).step(torch.ones(1, 2))
            else:
                checkpoint.start_save(path, state_at(1), groups, step=1)
            found[f"{name} by {spelling}"] = READERS[name](spelling, groups)
    return found


@pytest.mark.parametrize(("slow_rank", "point"), [(1, "save: write"), (0, "save: commit")])
@pytest.mark.short("0-save: commit")
def test_whoever_reads_waits_for_what_this_process_saves(
    ranks, tmp_path: Path, slow_rank: int, point: str
) -> None:
    for found in ranks(2).run(read_while_saved, TWO, str(tmp_path), slow_rank, point):
        assert found == dict.fromkeys(found, 1)


def read_after_failure(layout: Layout, folder: str) -> list[Any]:
    """What readers find of a save that fails on one rank, and of which nobody was told."""
    groups, found = groups_of(layout), list[Any]()
    checkpoint.save(folder, state_at(1), groups, step=1)

    def fail() -> None:
        time.sleep(0.1)
        if groups.rank:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with at("save: write", fail):
        checkpoint.start_save(folder, state_at(2), groups, step=2)
        for name in ("latest", "steps", "verify", "load", "load"):
            try:
                found.append(READERS[name](folder, groups))
            except FileError as error:
                found.append(str(error))
    return found


def test_a_save_that_failed_is_told_once_to_all_ranks_that_load(ranks, tmp_path: Path) -> None:
    one, two = ranks(2).run(read_after_failure, TWO, str(tmp_path))
    assert one == two
    assert one[:3] == [1, 1, 1], "these are called by one rank, which only logs it"
    assert "No space left on device" in one[3]
    assert "on rank 1" in one[3]
    assert one[4] == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # this process has threads
def test_a_fork_does_not_wait_for_the_saves_of_its_parent(tmp_path: Path) -> None:
    def child() -> None:
        started = time.monotonic()
        assert checkpoint.latest(tmp_path) is None
        with pytest.raises(FileError, match="the process that this one was forked"):
            pending.wait()
        assert time.monotonic() - started < 0.5

    with slow("save: write", 1.0):
        pending = checkpoint.start_save(tmp_path, state_at(1), mf.make_groups(1), step=1)
        assert in_child(child, 20) == 0
        assert checkpoint.latest(tmp_path) == 1

"""Errors of the system at odd places of a save: typed ones, which all ranks raise together."""

import errno
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import Layout, groups_of

import mics_fn as mf
from mics_fn import checkpoint
from mics_fn.checkpoint import agreeing
from mics_fn.errors import CheckpointError, CheckpointWriteError, TornStepError
from mics_fn.lab.ranks.pool import RankPool

Pools = Callable[[int], RankPool]
TWO = Layout((2,), 2)


def state_at(step: int) -> dict[str, Any]:
    return {"w": torch.arange(500.0) + step, "step": step}


def test_a_file_system_that_does_not_tell_its_room_is_a_typed_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(path: Any) -> Any:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), path)

    monkeypatch.setattr(os, "statvfs", gone)
    with pytest.raises(CheckpointWriteError, match="Stale file handle"):
        checkpoint.save(tmp_path, state_at(1), mf.make_groups(1), step=1)


@pytest.mark.parametrize("verb", [checkpoint.steps, checkpoint.latest, checkpoint.verify])
def test_a_folder_that_cannot_be_read_is_a_typed_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: Any
) -> None:
    def refused(path: Any = ".") -> Any:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    monkeypatch.setattr(os, "listdir", refused)
    with pytest.raises(CheckpointError, match="Permission denied"):
        verb(tmp_path)


def fails_on_one_rank(layout: Layout, folder: str) -> list[Any]:
    """One rank has no memory for what it writes, then no thread; then all goes well."""
    groups, found, plain = groups_of(layout), list[Any](), agreeing.on_bytes
    start = threading.Thread.start

    def without_memory(*args: Any) -> Any:
        raise MemoryError("no memory")

    def without_threads(self: threading.Thread) -> None:
        if self.name == "mics_fn save":
            raise RuntimeError("can't start new thread")
        start(self)

    if groups.rank == 1:
        agreeing.on_bytes = without_memory
    for begin in (checkpoint.save, checkpoint.start_save):
        try:
            pending: Any = begin(folder, state_at(1), groups, step=1)
            if begin is checkpoint.start_save:
                pending.wait()
        except CheckpointError as error:
            found.append(str(error))
    agreeing.on_bytes = plain
    found.append([] if groups.rank else sorted(os.listdir(folder)))
    if groups.rank == 1:
        threading.Thread.start = without_threads
    try:
        checkpoint.start_save(folder, state_at(2), groups, step=2).wait()
    finally:
        threading.Thread.start = start
    checkpoint.save(folder, state_at(3), groups, step=3)
    return [*found, checkpoint.steps(folder)]


def test_what_fails_on_one_rank_after_the_start_is_an_error_of_all(
    ranks: Pools, tmp_path: Path
) -> None:
    one, two = ranks(2).run(fails_on_one_rank, TWO, str(tmp_path))
    assert one[:2] == two[:2]
    assert "no memory" in one[0]
    assert "on rank 1" in one[1]
    assert one[2:] == [[".lock"], [2, 3]]


def torn(layout: Layout, folder: str) -> list[str]:
    """One rank is a step ahead of the other, and both save it as the same one."""
    groups, found = groups_of(layout), list[str]()
    shards = mf.shard({"w": torch.ones(6)}, groups)
    state = mf.init_state(shards, mf.optim.sgd(0.1))
    for each in (replace(state, step=4 + groups.rank), {"train": replace(state, step=groups.rank)}):
        with pytest.raises(TornStepError) as caught:
            checkpoint.save(folder, each, groups, step=5)
        found.append(str(caught.value))
    return [*found, *map(str, checkpoint.steps(folder))]


def test_a_torn_state_is_not_saved(ranks: Pools, tmp_path: Path) -> None:
    one, two = ranks(2).run(torn, TWO, str(tmp_path))
    assert one == two
    text = "save: ranks differ in their steps\n  rank 0: step=4\n  rank 1: step=5\n  fix: "
    assert one[0].startswith(text)
    assert "rank 0: ['train'].step=0\n  rank 1: ['train'].step=1" in one[1]
    assert len(one) == 2, "nothing was committed"

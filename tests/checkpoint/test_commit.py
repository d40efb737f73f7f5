"""What was committed is never lost: kills at any moment, and at each operation of a save."""

import errno
import gc
import os
import resource
import shutil
import signal
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from children import in_child
from jobs import Ended, run_job
from steps import Recorder, at, check_step, save_at, state_at
from torch.multiprocessing.reductions import StorageWeakRef

import mics_fn as mf
from mics_fn import checkpoint, spans, tree
from mics_fn.errors import FileError
from tests.stress.kills import KillsConfig, measure_kills, render_kills


@pytest.mark.parametrize(
    ("kills", "lanes"),
    [(2, 2), pytest.param(60, 2, marks=[pytest.mark.thorough, pytest.mark.limit(600)])],
)
def test_no_step_is_lost_when_ranks_are_killed(kills: int, lanes: int) -> None:
    config = KillsConfig(kills, seed=kills, lanes=lanes)
    figures = measure_kills(config)
    assert figures["missed"] == [], render_kills(figures, config)
    assert figures["found"]["kills"] == kills
    assert figures["found"]["inside"] >= kills / 2


@pytest.mark.parametrize(
    "kind", ["pruning", pytest.param("rolled back", marks=pytest.mark.thorough)]
)
def test_a_kill_at_any_operation_loses_nothing(tmp_path: Path, kind: str) -> None:
    groups = mf.make_groups(1)
    how: dict[str, Any] = {"keep": 2} if kind == "pruning" else {"overwrite": "newer"}
    step = 4 if kind == "pruning" else 2

    def save(folder: Path, deadly: int) -> None:
        def kill(number: int, write: Callable[[], Any]) -> None:
            if number == deadly:
                write()
                os.kill(os.getpid(), signal.SIGKILL)

        Recorder(kill).install(setattr)
        save_at(folder, step, groups, **how)

    killed, plain = 0, tmp_path / "plain"
    plain.mkdir()
    for before in (1, 2, 3):
        save_at(plain, before, groups)
    for deadly in range(200):
        folder = shutil.copytree(plain, tmp_path / f"{deadly}")
        status = in_child(lambda: save(folder, deadly))  # noqa: B023
        if status == 0:
            break
        assert status == -signal.SIGKILL
        killed += 1
        newest = checkpoint.latest(folder)
        assert newest in (3, step), deadly
        check_step(folder, newest, groups)
        save_at(folder, step, groups, **{**how, "overwrite": "newer"})
        check_step(folder, step, groups)
        left = [x for x in os.listdir(folder) if not x.startswith(".epoch-")]
        assert len(left) == len(checkpoint.steps(folder)), left
    assert killed >= 9
    check_step(folder, step, groups)


def test_the_disk_has_each_thing_before_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups, folder = mf.make_groups(1), tmp_path / "new" / "jobs"
    for step in (1, 2, 3, 4):
        recorder = Recorder()
        with monkeypatch.context() as patch:
            recorder.install(patch.setattr)
            save_at(folder, step, groups, keep=None if step < 4 else 2)
        if step == 1:  # also a new folder, with all above it
            synced = [path for name, path in recorder.did if name == "fsync"]
            assert {str(tmp_path), str(folder.parent), str(folder)} <= set(synced)
    did = [(name, Path(path).name) for name, path in recorder.did]
    synced = [path for name, path in did if name == "fsync"]
    part, manifest = "rank-00000.safetensors", "MANIFEST.json"
    order = [("fsync", part), ("open", manifest), ("write", manifest), ("fsync", manifest)]
    temporary = next(path for _, path in did if path.startswith(".tmp-"))
    order += [("fsync", temporary), ("rename", temporary), ("fsync", "jobs")]
    at = -1
    for each in order:
        at = did.index(each, at + 1)  # which raises where it does not come after the last one
    assert synced[-1] == "jobs"
    first = "rename", "step-00000001"
    gone = [i for i, x in enumerate(did) if x[0] in ("unlink", "rmdir") or x == first]
    assert min(gone) > at


def test_what_is_written_can_be_read_by_those_whom_the_umask_lets(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        save_at(tmp_path, 1, mf.make_groups(1))
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.glob("step-*/*")}
    assert set(modes.values()) == {0o640}, modes


# A save that fails: the same error on all ranks, and nothing else has changed.

# Errors come within a second on a quiet machine, and at the limit after 200.
TIMEOUT_S, SOON_S = 200.0, 20.0


def made() -> mf.Groups:
    mf.init_distributed(device="cpu", timeout_s=TIMEOUT_S)
    return mf.make_groups(2, timeout_s=TIMEOUT_S, heartbeat_s=TIMEOUT_S / 2)


def left_in(folder: Any) -> int:
    """Entries of a folder that are no steps."""
    return len(os.listdir(folder)) - len(checkpoint.steps(folder)) - 1  # and the sign of its owner


def error_of(call: Callable[[], Any]) -> tuple[str, str, float]:
    """What a call raises, and how long it takes."""
    started = time.monotonic()
    try:
        call()
    except (FileError, KeyboardInterrupt) as error:
        return type(error).__name__, str(error), time.monotonic() - started
    return "", "", 0.0


def values(found: list[Ended]) -> list[Any]:
    """What the ranks of a job returned."""
    assert not [each for each in found if each.error], found
    return [each.value for each in found]


# Disks that are full.


def fill_up(rank: int, folder: str, sizes: list[int]) -> list[Any]:
    """Saves while the files of one rank may not grow beyond some size."""
    groups, rows = made(), []
    save_at(folder, 1, groups)
    good, before = 1, resource.getrlimit(resource.RLIMIT_FSIZE)
    for i, size in enumerate(sizes):
        if rank == i % groups.world_size:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
        found = error_of(lambda: save_at(folder, good + 1, groups, background=bool(i % 3)))  # noqa: B023
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        good += not found[0]
        groups.partition.check_open()
        rows.append((*found, checkpoint.latest(folder) == good, left_in(folder) if not rank else 0))
    save_at(folder, good + 1, groups, keep=2)
    check_step(folder, good + 1, groups)
    counts = len(os.listdir("/proc/self/fd")), threading.active_count()
    groups.close()
    return [rows, counts]


@pytest.mark.parametrize("count", [6, pytest.param(24, marks=pytest.mark.thorough)])
def test_a_full_disk_is_the_same_error_on_all_ranks(tmp_path: Path, count: int) -> None:
    sizes = [12_000 * i // count for i in range(count)]
    found = values(run_job(4, fill_up, str(tmp_path), sizes, limit_s=100.0))
    rows = list(zip(*(rows for rows, _ in found), strict=True))
    failed = 0
    for size, ranks in zip(sizes, rows, strict=True):
        assert len({(kind, text) for kind, text, *_ in ranks}) == 1, size
        kind, text, *_ = ranks[0]
        failed += bool(kind)
        assert kind in ("", "FileError"), text
        assert not kind or str(tmp_path) in text
        assert max(seconds for _, _, seconds, *_ in ranks) < SOON_S
        assert all(newest for *_, newest, _ in ranks), size
        assert sum(left for *_, left in ranks) == 0, size
    assert failed >= count / 2
    assert max(threads for _, (_, threads) in found) < 20


# Disks that fail.


@pytest.mark.parametrize(
    ("times", "apart"), [(1, False), pytest.param(10**6, True, marks=pytest.mark.thorough)]
)
def test_each_operation_may_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int, apart: bool
) -> None:
    groups, failed, plain = mf.make_groups(1), 0, tmp_path / "plain"
    for step in (1, 2):
        save_at(plain, step, groups)
    for first in range(0, 100, 1 + apart):
        folder = shutil.copytree(plain, tmp_path / f"{first}")

        def fail(number: int, _: Any) -> None:
            if first <= number < first + times:  # noqa: B023
                raise OSError(errno.EIO, "Input/output error")

        recorder = Recorder(fail)
        with monkeypatch.context() as patch:
            recorder.install(patch.setattr)
            how: dict[str, Any] = {"background": apart, "keep": 2}
            kind, text, _ = error_of(lambda: save_at(folder, 3, groups, **how))  # noqa: B023
        if len(recorder.did) <= first:
            break
        failed += bool(kind)
        assert kind in ("", "FileError"), (first, text)
        assert not kind or ("Input/output error" in text and str(folder) in text)
        if times == 1:  # a disk that is gone for good keeps what was the last to be there
            assert checkpoint.latest(folder) == (2 if kind else 3), first
        save_at(folder, 3, groups, overwrite="newer", keep=2)
        check_step(folder, 3, groups)
        assert left_in(folder) == 0, (first, os.listdir(folder))
        assert checkpoint.steps(folder) == [2, 3]
    assert failed >= 5 / (1 + apart)


def test_a_finished_save_keeps_nothing_of_the_state(tmp_path: Path) -> None:
    groups = mf.make_groups(1)
    for step, apart in ((1, False), (2, True)):
        state = state_at(step, groups)
        leaves = [x for x in tree.flatten(state)[0] if isinstance(x, torch.Tensor)]
        kept = [StorageWeakRef(x.untyped_storage()) for x in leaves]
        save = checkpoint.start_save if apart else checkpoint.save
        pending: Any = save(tmp_path, state, groups, step=step)
        while apart and not pending.done:
            time.sleep(0.01)
        del state, leaves
        gc.collect()
        assert all(storage.expired() for storage in kept), step


# Interrupts, and ends of processes.


def interrupted(rank: int, folder: str, who: list[int], where: str) -> Any:
    groups = made()
    save_at(folder, 1, groups)

    def interrupt() -> None:
        signal.raise_signal(signal.SIGINT)

    def later() -> None:
        threading.Timer(0.05, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        time.sleep(0.4)  # on the thread that commits, while the main one waits for it

    act = {"save: write": interrupt, "save: commit": later}[where]
    with at(where, act) if rank in who else nullcontext():
        found = error_of(lambda: save_at(folder, 2, groups))
    save_at(folder, 3, groups)  # all ranks can, whatever each of them was told
    check_step(folder, 3, groups)
    save_at(folder, 4, groups, background=True)
    check_step(folder, 4, groups)
    groups.close()
    return found


@pytest.mark.parametrize("who", [[1], pytest.param([0, 1, 2, 3], marks=pytest.mark.thorough)])
def test_ctrl_c_in_a_save(tmp_path: Path, who: list[int]) -> None:
    found = values(run_job(4, interrupted, str(tmp_path), who, "save: write"))
    for rank, (kind, text, seconds) in enumerate(found):
        assert seconds < SOON_S
        assert kind == ("KeyboardInterrupt" if rank in who else "FileError"), text
        assert rank in who or "KeyboardInterrupt" in text
    assert 2 not in checkpoint.steps(tmp_path)


def test_ctrl_c_while_a_save_is_waited_for(tmp_path: Path) -> None:
    found = values(run_job(2, interrupted, str(tmp_path), [0], "save: commit"))
    assert [kind for kind, *_ in found] == ["KeyboardInterrupt", ""]
    assert checkpoint.steps(tmp_path) == [1, 2, 3, 4]  # the thread went on


def leave(rank: int, folder: str, how: str) -> Any:
    groups, seconds = made(), 0.3 + 0.1 * rank
    spans.observers.append(lambda x: time.sleep(seconds) if x.name == "save: write" else None)
    pending = checkpoint.start_save(folder, state_at(1, groups), groups, step=1)
    assert not pending.done
    if how == "closes":
        groups.close()
        assert pending.done
        return checkpoint.latest(folder)
    if how == "raises" and rank == 1:
        raise KeyError("an error of the program")
    if how == "raises":
        pending.wait()
    return None


@pytest.mark.parametrize("how", ["closes", "exits", "raises"])
def test_a_save_under_way_is_committed_whatever_the_program_does(tmp_path: Path, how: str) -> None:
    found = run_job(2, leave, str(tmp_path), how)
    assert [each.status for each in found] == [0, 0]
    assert [each.error for each in found] == ["", "KeyError" if how == "raises" else ""]
    assert checkpoint.verify(tmp_path).step == 1
    if how == "closes":
        assert [each.value for each in found] == [1, 1]


def killed(rank: int, folder: str, who: int, where: str, apart: bool) -> Any:
    groups = made()
    save_at(folder, 1, groups)
    if rank == who:
        spans.observers.append(
            lambda point: os.kill(os.getpid(), signal.SIGKILL) if point.name == where else None
        )
    return error_of(lambda: save_at(folder, 2, groups, background=apart))


@pytest.mark.parametrize(
    ("who", "where", "apart"), [(0, "save: commit", False), (1, "save: write", True)]
)
def test_a_rank_that_is_killed_in_a_save_is_named(
    tmp_path: Path, who: int, where: str, apart: bool
) -> None:
    found = run_job(2, killed, str(tmp_path), who, where, apart)
    for rank, each in enumerate(found):
        if rank == who:
            assert each.status == -signal.SIGKILL
            continue
        kind, text, seconds = each.value
        assert kind == "FileError"
        assert f"rank {who} is gone" in text
        assert seconds < SOON_S
    assert checkpoint.latest(tmp_path) == 1
    groups = mf.make_groups(1)
    save_at(tmp_path, 2, groups)
    check_step(tmp_path, 2, groups)
    assert left_in(tmp_path) == 0


def test_a_step_that_is_not_the_newest_is_refused(tmp_path: Path) -> None:
    groups = mf.make_groups(1)
    save_at(tmp_path, 5, groups)
    for step in (4, 5):
        with pytest.raises(FileError, match="step 5"):
            save_at(tmp_path, step, groups)
    with pytest.raises(FileError, match="File exists"):
        save_at(tmp_path / "step-00000005" / "MANIFEST.json", 1, groups)
    assert checkpoint.steps(tmp_path) == [5]

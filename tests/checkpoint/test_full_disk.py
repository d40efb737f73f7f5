"""A save that fails: the same error on all ranks, and nothing else has changed."""

import ctypes
import errno
import gc
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import Layout, groups_of
from jobs import Ended, run_job
from torch.multiprocessing.reductions import StorageWeakRef

import mics_fn as mf
from mics_fn import checkpoint, optim, spans, tree
from mics_fn.checkpoint import saving
from mics_fn.checkpoint.directory import Folder
from mics_fn.checkpoint.snapshot import Snapshot
from mics_fn.errors import FileError
from mics_fn.lab.ranks.pool import RankPool

Pools = Callable[[int], RankPool]
OPERATIONS = ("open", "write", "pwrite", "ftruncate", "fsync", "rename", "mkdir", "unlink", "rmdir")
COMMITS = ["rename", "file"]
LAYOUT = Layout((2, 2), 2)
NOBODY = 65534
# Errors come within a second on a quiet machine, and at the limit after 200.
TIMEOUT_S, SOON_S = 200.0, 20.0


def made() -> mf.Groups:
    mf.init_distributed(device="cpu", timeout_s=TIMEOUT_S)
    return mf.make_groups(2, timeout_s=TIMEOUT_S, heartbeat_s=TIMEOUT_S / 2)


def state_at(step: int, groups: mf.Groups) -> Any:
    """A state that is a function of the step."""
    params = mf.shard({"w": torch.arange(9000.0), "b": torch.arange(7.0)}, groups)
    return {"params": tree.map_leaves(lambda x: x + step, params), "seen": torch.full((3,), step)}


def save_at(folder: Any, step: int, groups: mf.Groups, *, apart: bool = False, **how: Any) -> None:
    state = state_at(step, groups)
    if apart:
        checkpoint.start_save(folder, state, groups, step=step, **how).wait()
    else:
        checkpoint.save(folder, state, groups, step=step, **how)


def check_step(folder: Any, step: int, groups: mf.Groups) -> None:
    """The newest step is this one, and right to the bit."""
    found = checkpoint.load(folder, state_at(0, groups), groups)
    assert found.step == step == checkpoint.latest(folder)
    pairs = zip(tree.flatten(found.state)[0], tree.flatten(state_at(step, groups))[0], strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def left_in(folder: Any) -> int:
    """Entries of a folder that are no steps."""
    return len(os.listdir(folder)) - len(checkpoint.steps(folder)) - 1  # and the lock


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


@contextmanager
def at(name: str, act: Callable[[], Any]) -> Iterator[None]:
    """A block in which something is done at the first point of a name."""

    def observe(point: Any) -> None:
        if point.name == name:
            spans.observers.remove(observe)
            act()

    spans.observers.append(observe)
    try:
        yield
    finally:
        if observe in spans.observers:
            spans.observers.remove(observe)


# Disks that are full.


def fill_up(rank: int, folder: str, sizes: list[int]) -> list[Any]:
    """Saves while the files of one rank may not grow beyond some size."""
    groups, rows = made(), []
    save_at(folder, 1, groups)
    good, before = 1, resource.getrlimit(resource.RLIMIT_FSIZE)
    for i, size in enumerate(sizes):
        if rank == i % groups.world_size:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
        how: dict[str, Any] = {"apart": bool(i % 3), "commit": COMMITS[i % 2]}
        found = error_of(lambda: save_at(folder, good + 1, groups, **how))  # noqa: B023
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        good += not found[0]
        groups.partition.check_open()
        rows.append((*found, checkpoint.latest(folder) == good, left_in(folder) if not rank else 0))
    save_at(folder, good + 1, groups, keep=2)
    check_step(folder, good + 1, groups)
    counts = len(os.listdir("/proc/self/fd")), threading.active_count()
    groups.close()
    return [rows, counts]


@pytest.mark.parametrize("count", [8, pytest.param(16, marks=pytest.mark.thorough)])
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


def small_disk(rank: int, folder: str) -> Any:
    groups = made()
    state = mf.shard({"w": torch.zeros(60_000)}, groups)
    checkpoint.save(folder, state, groups, step=1, keep=2)
    found = []
    for step in range(2, 8):
        found.append(error_of(lambda: checkpoint.save(folder, state, groups, step=step)))  # noqa: B023
        if found[-1][0]:
            break
    newest = checkpoint.latest(folder)
    assert checkpoint.verify(folder).step == newest
    groups.close()
    return [kind for kind, *_ in found], found[-1][1], newest


def on_a_small_disk(folder: str) -> list[Any]:
    """Ranks that share a disk of 1 MB, which nobody else sees."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(0x00020000) or libc.mount(None, b"/", None, 0x44000, None):
        return []
    if libc.mount(b"none", folder.encode(), b"tmpfs", 0, b"size=1m"):
        return []
    return values(run_job(4, small_disk, folder))


def test_a_disk_that_fills_up(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(write, repr(on_a_small_disk(str(tmp_path / "disk"))).encode())
        finally:
            os._exit(0)
    os.close(write)
    with open(read, "rb") as pipe:
        found: list[Any] = eval(pipe.read() or b"['died']")
    os.waitpid(pid, 0)
    if not found:
        pytest.skip("only root mounts")
    kinds, text, newest = found[0]
    assert all(each == found[0] for each in found)
    assert kinds[-1] == "FileError"
    assert newest == len(kinds) >= 2
    assert "bytes" in text


# No right to write.


def write_as_nobody(rank: int, folder: str) -> Any:
    groups = made()
    save_at(folder, 1, groups)
    groups.partition.check_open()
    os.seteuid(NOBODY)
    found = [error_of(lambda: save_at(folder, 2, groups, apart=a)) for a in (False, True)]  # noqa: B023
    check_step(folder, 1, groups)
    found += [error_of(lambda: save_at(f"{folder}/new", 2, groups))]
    os.seteuid(0)
    save_at(folder, 2, groups)
    check_step(folder, 2, groups)
    groups.close()
    return [(kind, text) for kind, text, _ in found]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes somebody else")
def test_without_the_right_to_write_all_ranks_say_so(tmp_path: Path) -> None:
    for path in [tmp_path, *tmp_path.parents]:
        if not path.stat().st_mode & 0o001 and path.stat().st_uid == os.geteuid():
            path.chmod(path.stat().st_mode | 0o011)
    (tmp_path / "jobs").mkdir(mode=0o755)
    found = values(run_job(4, write_as_nobody, str(tmp_path / "jobs")))
    assert all(each == found[0] for each in found)
    for kind, text in found[0]:
        assert kind == "FileError"
        assert "Permission denied" in text
        assert "rank 0" in text


# Disks that fail.


class Failing:
    """Functions of `os` that fail, from one operation on, so many times."""

    def __init__(self, first: int, times: int) -> None:
        self.first, self.times, self.did = first, times, 0

    def watched(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.did += 1
            if self.first < self.did <= self.first + self.times:
                raise OSError(errno.EIO, "Input/output error")
            return plain(*args, **kwargs)

        return call


@pytest.mark.parametrize("commit", COMMITS)
@pytest.mark.parametrize(
    ("times", "apart"),
    [
        (1, False),
        pytest.param(10**6, True, marks=pytest.mark.thorough),
    ],
)
def test_each_operation_may_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, commit: str, times: int, apart: bool
) -> None:
    groups, failed = mf.make_groups(1), 0
    for first in range(0, 100, 1 + apart):
        folder = tmp_path / f"{first}"
        for step in (1, 2):
            save_at(folder, step, groups, commit=COMMITS[step % 2])
        failing = Failing(first, times)
        with monkeypatch.context() as patch:
            for name in OPERATIONS:
                patch.setattr(os, name, failing.watched(getattr(os, name)))
            how: dict[str, Any] = {"apart": apart, "commit": commit, "keep": 2}
            kind, text, _ = error_of(lambda: save_at(folder, 3, groups, **how))  # noqa: B023
        if failing.did <= first:
            break
        failed += bool(kind)
        assert kind in ("", "FileError"), (first, text)
        assert not kind or ("Input/output error" in text and str(folder) in text)
        if times == 1:  # a disk that is gone for good keeps what was the last to be there
            assert checkpoint.latest(folder) == (2 if kind else 3), first
        again = {"overwrite": "newer", "commit": commit, "keep": 2}
        save_at(folder, 3, groups, **again)
        check_step(folder, 3, groups)
        assert left_in(folder) == 0, (first, os.listdir(folder))
        assert checkpoint.steps(folder) == [2, 3]
    assert failed >= 5 / (1 + apart)


def fail_to_sync(layout: Layout, folder: str) -> list[Any]:
    """One rank after the other cannot bring its file to the disk, and at last the first one."""
    groups, found, plain = groups_of(layout), [], os.fsync
    save_at(folder, 1, groups)
    for odd in range(groups.world_size):

        def fail(number: int) -> None:
            raise OSError(errno.EIO, "Input/output error")

        os.fsync = fail if groups.rank == odd else plain
        try:
            for apart in (False, True):
                found.append(error_of(lambda: save_at(folder, 2, groups, apart=apart)))  # noqa: B023
                check_step(folder, 1, groups)
        finally:
            os.fsync = plain
    save_at(folder, 2, groups)
    check_step(folder, 2, groups)
    return found


def test_one_rank_that_cannot_write_fails_the_save_of_all(ranks: Pools, tmp_path: Path) -> None:
    found = ranks(4).run(fail_to_sync, LAYOUT, str(tmp_path))
    for i, each in enumerate(zip(*found, strict=True)):
        assert {(kind, text) for kind, text, _ in each} == {each[0][:2]}
        assert each[0][0] == "FileError"
        assert f"on rank {i // 2}" in each[0][1]
        assert "nothing came within" not in each[0][1]
    assert left_in(tmp_path) == 0


# While training goes on.


def steps_until_due(layout: Layout, folder: str) -> Any:
    """A save fails on one rank, and all hear of it after the same step; also without asking."""
    groups, plain = groups_of(layout), saving.write_part

    def fail(path: Path, tensors: Any) -> Any:
        time.sleep(0.1 * groups.rank)
        if groups.rank == 2:
            raise OSError(errno.EIO, "Input/output error")
        return plain(path, tensors)

    saving.write_part = fail
    try:
        pending = checkpoint.start_save(folder, state_at(1, groups), groups, step=1)
        step = 0
        while not pending.due():
            step += 1
            mf.unshard(mf.shard({"w": torch.ones(4)}, groups), groups)  # ranks take steps together
            assert not Folder(folder).committed()
            assert step < 20_000
        first = error_of(pending.wait)
        checkpoint.start_save(folder, state_at(1, groups), groups, step=1)
        second = error_of(lambda: save_at(folder, 1, groups))
    finally:
        saving.write_part = plain
    save_at(folder, 1, groups)
    check_step(folder, 1, groups)
    return step, first[:2], second[:2]


def test_all_ranks_hear_of_a_failed_save_after_the_same_step(ranks: Pools, tmp_path: Path) -> None:
    found = ranks(4).run(steps_until_due, LAYOUT, str(tmp_path))
    assert all(each == found[0] for each in found)
    step, first, second = found[0]
    assert step >= 1
    for kind, text in (first, second):
        assert kind == "FileError"
        assert "on rank 2" in text
        assert "Input/output error" in text


def change_at_once(layout: Layout, folder: str) -> None:
    groups = groups_of(layout)
    params = mf.shard({"w": torch.arange(90.0), "b": torch.ones(7)}, groups)
    state = mf.init_state(params, optim.adamw(0.1), buffers={"mean": torch.ones(5)})
    kept = [torch.as_tensor(x).clone() for x in tree.flatten(state)[0]]
    plain = saving.write_part

    def late(path: Path, tensors: Any) -> Any:
        time.sleep(0.05)
        return plain(path, tensors)

    saving.write_part = late
    try:
        pending = checkpoint.start_save(folder, state, groups, step=1)
        for x in tree.flatten(state.buffers)[0]:
            x.zero_()
        grads = tree.map_leaves(torch.ones_like, state.params)
        state = mf.opt_step(state, grads, donate=True)
        pending.wait()
    finally:
        saving.write_part = plain
    found = checkpoint.load(folder, state, groups).state
    assert found.step == 0
    for x, y in zip(tree.flatten(found)[0], kept, strict=True):
        assert torch.equal(torch.as_tensor(x), y)


def test_what_changes_after_start_save_is_not_what_is_saved(ranks: Pools, tmp_path: Path) -> None:
    ranks(4).run(change_at_once, LAYOUT, str(tmp_path))


def fail_to_copy(layout: Layout, folder: str) -> Any:
    groups, plain = groups_of(layout), Snapshot.copied

    def fail(self: Any, tensors: Any) -> Any:
        raise MemoryError("no room for the copy")

    if groups.rank == 1:
        Snapshot.copied = fail
    try:
        found = error_of(lambda: save_at(folder, 1, groups, apart=True))
    finally:
        Snapshot.copied = plain
    save_at(folder, 1, groups, apart=True)
    check_step(folder, 1, groups)
    return found


def test_a_copy_that_fails_on_one_rank_fails_the_save_of_all(ranks: Pools, tmp_path: Path) -> None:
    found = ranks(4).run(fail_to_copy, LAYOUT, str(tmp_path))
    assert {each[:2] for each in found} == {found[0][:2]}
    assert "no room for the copy" in found[0][1]
    assert "nothing came within" not in found[0][1]


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
    if rank in who:
        with at(where, act):
            found = error_of(lambda: save_at(folder, 2, groups))
    else:
        found = error_of(lambda: save_at(folder, 2, groups))
    save_at(folder, 3, groups)  # all ranks can, whatever each of them was told
    check_step(folder, 3, groups)
    save_at(folder, 4, groups, apart=True)
    check_step(folder, 4, groups)
    groups.close()
    return found


@pytest.mark.parametrize("who", [[1], [0, 1, 2, 3]])
def test_ctrl_c_in_a_save(tmp_path: Path, who: list[int]) -> None:
    found = values(run_job(4, interrupted, str(tmp_path), who, "save: write"))
    for rank, (kind, text, seconds) in enumerate(found):
        assert seconds < SOON_S
        assert kind == ("KeyboardInterrupt" if rank in who else "FileError"), text
        assert rank in who or "KeyboardInterrupt" in text
    assert 2 not in checkpoint.steps(tmp_path)


def test_ctrl_c_while_a_save_is_waited_for(tmp_path: Path) -> None:
    found = values(run_job(4, interrupted, str(tmp_path), [0], "save: commit"))
    assert [kind for kind, *_ in found] == ["KeyboardInterrupt", "", "", ""]
    assert checkpoint.steps(tmp_path) == [1, 2, 3, 4]  # the thread went on


def slow_write(seconds: float) -> None:
    """Make files of this process take so long."""
    plain = saving.write_part

    def late(path: Path, tensors: Any) -> Any:
        time.sleep(seconds)
        return plain(path, tensors)

    saving.write_part = late


def leave(rank: int, folder: str, how: str) -> Any:
    groups = made()
    slow_write(0.3 + 0.1 * rank)
    pending = checkpoint.start_save(folder, state_at(1, groups), groups, step=1)
    assert not pending.done
    if how == "closes":
        groups.close()
        assert pending.done
        return checkpoint.latest(folder)
    if how == "raises" and rank == 2:
        raise KeyError("an error of the program")
    if how == "raises":
        pending.wait()
    return None


@pytest.mark.parametrize("how", ["closes", "exits", "raises"])
def test_a_save_under_way_is_committed_whatever_the_program_does(tmp_path: Path, how: str) -> None:
    found = run_job(4, leave, str(tmp_path), how)
    assert [each.status for each in found] == [0] * 4
    assert [each.error for each in found] == ["", "", "KeyError" if how == "raises" else "", ""]
    assert checkpoint.verify(tmp_path).step == 1
    if how == "closes":
        assert [each.value for each in found] == [1] * 4


def killed(rank: int, folder: str, who: int, where: str, apart: bool) -> Any:
    groups = made()
    save_at(folder, 1, groups)
    if rank == who:
        spans.observers.append(
            lambda point: os.kill(os.getpid(), signal.SIGKILL) if point.name == where else None
        )
    return error_of(lambda: save_at(folder, 2, groups, apart=apart))


@pytest.mark.parametrize(
    ("who", "where", "apart"), [(0, "save: commit", False), (3, "save: write", True)]
)
def test_a_rank_that_is_killed_in_a_save_is_named(
    tmp_path: Path, who: int, where: str, apart: bool
) -> None:
    found = run_job(4, killed, str(tmp_path), who, where, apart)
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


def test_two_jobs_do_not_share_a_folder(tmp_path: Path) -> None:
    groups = mf.make_groups(1)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            with at("save: commit", lambda: (os.write(write, b"x"), time.sleep(20))):
                save_at(tmp_path, 1, groups)
        finally:
            os._exit(0)
    try:
        assert os.read(read, 1) == b"x"
        for apart in (False, True):
            with pytest.raises(FileError) as raised:
                save_at(tmp_path, 1, groups, apart=apart)
            assert f"host {socket.gethostname()}, process {pid}" in str(raised.value)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    save_at(tmp_path, 1, groups)  # the lock ended with the process that had it
    check_step(tmp_path, 1, groups)
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


def many_saves(layout: Layout, folder: str, count: int) -> Any:
    """What a process holds after some saves, and after many of them."""
    groups, looks = groups_of(layout), []
    plain, odd = saving.write_part, OSError(errno.EIO, "Input/output error")

    def fail(path: Path, tensors: Any) -> Any:
        raise odd

    for i in range(2 * count):
        saving.write_part = fail if i % 5 == 4 and groups.rank == 1 else plain
        error_of(lambda: save_at(folder, i, groups, apart=bool(i % 2), keep=2))  # noqa: B023
        if i in (count - 1, 2 * count - 1):
            looks.append(_look(folder))
    saving.write_part = plain
    deadline = time.monotonic() + 5
    while looks[1] > looks[0] and time.monotonic() < deadline:  # others open files for a moment
        time.sleep(0.05)
        looks[1] = _look(folder)
    return looks


def _look(folder: str) -> tuple[int, int, int]:
    """Open files, threads, and entries of the folder."""
    gc.collect()
    files = len(os.listdir("/proc/self/fd"))
    return files, threading.active_count(), len(os.listdir(folder))


def test_nothing_grows(ranks: Pools, tmp_path: Path) -> None:
    for half, whole in ranks(4).run(many_saves, LAYOUT, str(tmp_path), 20):
        assert whole <= half

"""How groups end: destroyed in order, or given up without the others when an error leaves them."""

import gc
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing, nullcontext, suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mics_fn import _torch
from mics_fn.collectives import levels
from mics_fn.collectives.levels import start_all_gather
from mics_fn.errors import GroupsError, PeerFailed, first_line
from mics_fn.faults.journal import _GRACE_S, Watcher, without_a_word
from mics_fn.faults.monitor import MONITOR
from mics_fn.groups import Groups, make_groups, reports_step, withdraw_all
from mics_fn.optim import init_state, sgd
from mics_fn.shards import gather, shard
from mics_fn.store import poll


def wait_or_raise() -> None:
    """Rank 0 raises with a gather under way, which no other rank joins; the others wait."""
    with make_groups(timeout_s=30) as groups:
        if dist.get_rank() == 0:
            start_all_gather(groups.hierarchy.route, torch.ones(4))
            raise KeyError("mine")
        levels.collect(groups.partition, torch.ones(1))


def leave_by_an_error() -> tuple[str, float, int]:
    started = time.monotonic()
    with pytest.raises((KeyError, PeerFailed)) as caught:
        wait_or_raise()
    text = str(caught.value)
    del caught
    gc.collect()  # nothing that is dropped now may wait for the others either
    return text, time.monotonic() - started, alive()


def alive() -> int:
    """How many process groups there are on this rank."""
    return len(_torch.groups_named(None))


def test_a_rank_that_raises_ends_at_once_and_the_others_soon(ranks):
    before = ranks(3).run(alive)
    first, *others = ranks(3).run(leave_by_an_error)
    assert first[0] == "'mine'"
    assert first[1] < 10, "to make groups and to end them, which waits for nobody for 30"
    for text, seconds, _ in others:
        assert text.startswith("rank 0 left its groups: KeyError: 'mine'\n")
        assert "  this rank waits for all-gather over 'partition' (comparison, 4 bytes)\n" in text
        assert seconds < 10
    assert [left for *_, left in (first, *others)] == before


ABORTED = """
import ctypes, sys, time, datetime, mics_fn as mf, torch.distributed as dist
from mics_fn import _torch
libc, store = ctypes.CDLL(None), dist.HashStore()
for _ in range(3):  # each sleeps for as many seconds as the exit code says, when Python is gone
    libc.on_exit(libc.sleep, None)
def abort(group):
    store.wait(["nothing"], datetime.timedelta(seconds=1.5))  # it waits in C++
groups = mf.make_groups()
_torch.abort, _torch.LIVE_GROUPS = abort, [mine := object()]
groups.state.own("mine", mine)
groups.state.abort()
_torch.LIVE_GROUPS.clear()
raise KeyError("mine")
"""


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no on_exit")
def test_a_process_does_not_end_before_its_groups_are_aborted():
    """Python would end a thread that comes back from C++ after it, and that ends C++ by -6."""
    ended = subprocess.run([sys.executable, "-c", ABORTED], capture_output=True, timeout=100)
    assert (ended.returncode, b"KeyError: 'mine'" in ended.stderr) == (1, True), ended.stderr


class FakeGroup:
    """A process group that says what was done to it."""

    def __init__(self, hangs: bool = False) -> None:
        self.goes_on, self.ended = threading.Event(), ""
        if not hangs:
            self.goes_on.set()

    def end(self, how: str) -> None:
        self.ended = how
        self.goes_on.wait()


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Groups, list[Any]]]:
    """Groups of one rank that own fake process groups."""
    monkeypatch.setattr(_torch, "LIVE_GROUPS", live := [])
    monkeypatch.setattr(_torch, "abort", lambda group: group.end("aborted"))
    monkeypatch.setattr(dist, "destroy_process_group", lambda group: group.end("destroyed"))

    def make(*hangs: bool) -> tuple[Groups, list[Any]]:
        groups, owned = make_groups(), [FakeGroup(hang) for hang in hangs]
        live[:] = owned
        for group in owned:
            groups.state.own(f"{id(group)}", group)  # pyright: ignore[reportArgumentType]
        return groups, owned

    return make


def test_a_device_that_waits_for_a_lost_rank_is_freed_and_the_next_call_says_why(fakes: Any):
    groups, owned = fakes(False, False)
    life, watch = groups.state, Watcher(groups.state, MONITOR)
    life.on_device, life.standing = True, {3: without_a_word(3, "killed")}
    life.key = "they have met"
    for _ in range(2):  # collectives may still end by themselves
        watch.pass_time(_GRACE_S / 2)
    assert (life.aborted, life.failed) == (False, None)
    watch.pass_time(_GRACE_S / 2)
    for _ in range(2):
        watch.pass_time(2 * _GRACE_S)
    assert life.aborted
    assert poll(lambda: all(group.ended for group in owned), 1, time.monotonic() + 5)
    assert [group.ended for group in owned] == ["aborted"] * 2
    with pytest.raises(PeerFailed, match="rank 3 is gone") as error:
        groups.partition.process_group()
    assert "waits for a result of its device" in str(error.value)
    with pytest.raises(GroupsError, match="rank 3 is gone"):
        groups.partition.process_group()


@pytest.mark.parametrize(
    ("error", "end"),
    [
        (None, "destroyed"),
        (SystemExit(0), "destroyed"),
        (SystemExit("no data"), "aborted"),
        (ValueError("no"), "aborted"),
        (KeyboardInterrupt(), "aborted"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("how", ["with", "finally"])
def test_an_error_destroys_nothing(fakes: Any, error: BaseException | None, end: str, how: str):
    groups, owned = fakes(False, False)
    told: list[Any] = []
    groups.state.watch.announce = lambda *error, **how: told.append(error)
    block = groups if how == "with" else closing(groups)  # which calls it in a `finally`
    with pytest.raises(type(error)) if error is not None else nullcontext(), block:
        if error is not None:
            raise error
    assert bool(told) == (end == "aborted")
    with pytest.raises(GroupsError, match="is used after its groups were closed"):
        groups.partition.process_group()
    groups.close()  # later, as in a `finally`: nothing
    assert [group.ended for group in owned] == [end] * 2


def fail_and_close(how: str) -> tuple[str, Any]:
    """Rank 1 fails and closes its groups, or closes them although nothing failed; rank 0 waits."""
    if how == "in order, amid another error":  # with which the job has nothing to do
        try:
            raise ImportError("an optional module")
        except ImportError:
            return fail_and_close("in order")
    groups = make_groups(timeout_s=20)
    state = init_state(shard({"w": torch.ones(4)}, groups), sgd(0.1))

    def step(fails: bool) -> None:
        with reports_step(groups.state, 1):
            if fails:
                raise KeyError("mine")
            gather(state.params, groups)

    if dist.get_rank() == 0:
        with pytest.raises((PeerFailed, GroupsError)) as caught:
            step(False)
        groups.close()
        return first_line(caught.value), getattr(caught.value, "rank", None)
    with suppress(KeyError):
        try:
            if how in ("told and caught", "withdrawn"):
                with suppress(KeyError):
                    step(True)
            if how == "withdrawn":
                withdraw_all()
            if how == "in a finally":  # of a loader, say, in a loop of one's own
                raise KeyError("mine")
        finally:
            groups.close()
    return "", None


_CLOSED = "a call that rank 1 will not make, since it closed its groups"


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("told and caught", "rank 1 failed: KeyError: 'mine'"),
        ("in a finally", "rank 1 left its groups: KeyError: 'mine'"),
        ("withdrawn", _CLOSED),
        ("in order", _CLOSED),
        ("in order, amid another error", _CLOSED),
    ],
)
def test_closing_does_not_hide_an_error(ranks, how: str, text: str):
    found = ranks(2).run(fail_and_close, how)[0]
    assert found == (text, None if text == _CLOSED else 1)


def test_groups_that_cannot_be_aborted_in_time_are_left(fakes: Any):
    groups, owned = fakes(False, True, True, False)
    started = time.monotonic()
    with pytest.raises(ValueError, match="mine"), groups:
        raise ValueError("mine")
    assert time.monotonic() - started < 1.5
    assert [group.ended for group in owned] == ["aborted"] * 4, "all at once, whichever hangs"
    for group in owned:
        group.goes_on.set()

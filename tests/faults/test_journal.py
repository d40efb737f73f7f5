"""What ranks say of failures, and what each of them hears; the threads are in test_peers.py."""

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from covering import examples
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from mics_fn.errors import PeerFailed, PlanError
from mics_fn.faults import heartbeat, monitor
from mics_fn.faults.heartbeat import Peer, Process
from mics_fn.faults.journal import Failure, Journal, Watcher
from mics_fn.faults.monitor import Monitor
from mics_fn.groups import GroupState, communicator
from mics_fn.store import Calls, Stuck


def said(rank: int, *, final: bool, because: int | None = None) -> Failure:
    return Failure(rank, "raised", f"rank {rank}", made={}, issued={}, final=final, because=because)


WORDS = st.tuples(
    st.integers(0, 2), st.sampled_from(["fails", "ends", "goes on", "gives up"]), st.integers(0, 2)
)


@examples(15, 100)
@given(st.lists(WORDS, max_size=25))
def test_all_ranks_read_the_same_whoever_reads_when(words: Any):
    """A rank goes on only if no other one has given up on it, and the other way round."""
    store: Any = HashStore()
    ranks = [Journal("key") for _ in range(3)]
    given_up, gone_on = set[int](), set[int]()
    for rank, word, other in words:
        if word in ("fails", "ends"):
            ranks[rank].say(store, said(rank, final=word == "ends"))
            gone_on.discard(rank)
            if word == "ends":
                given_up.add(rank)
        elif word == "goes on":
            assert ranks[rank].withdraw(store, rank) == (rank not in given_up)
            if rank not in given_up:
                gone_on.add(rank)
        elif other in ranks[rank].standing or ranks[rank].read(store) is None:
            stood = other in ranks[other].standing and other not in gone_on
            assert ranks[rank].make_final(store, other) == (stood or other in given_up)
            if stood:
                given_up.add(other)
    for journal in ranks:
        journal.read(store)
    found = [{r: each.final for r, each in journal.standing.items()} for journal in ranks]
    assert found[0] == found[1] == found[2]
    assert {r for r, final in found[0].items() if final} == given_up


def racing(store: Any, *meanwhile: Any) -> Any:
    """A store in which something else happens just before the first write."""
    first = list(meanwhile)

    def compare_set(*args: str) -> bytes:
        if first:
            first.pop()()
        return store.compare_set(*args)

    return SimpleNamespace(check=store.check, get=store.get, add=store.add, compare_set=compare_set)


@pytest.mark.parametrize("first", ["goes on", "gives up"])
def test_of_two_ranks_at_once_the_one_that_writes_first_is_right(first: str):
    store: Any = HashStore()
    culprit, other, third = (Journal("key") for _ in range(3))
    culprit.say(store, said(0, final=False))
    went_on, gave_up = [], []
    if first == "goes on":
        race = racing(store, lambda: went_on.append(culprit.withdraw(store, 0)))
        gave_up.append(other.make_final(race, 0))
    else:
        race = racing(store, lambda: gave_up.append(other.make_final(store, 0)))
        went_on.append(culprit.withdraw(race, 0))
    assert (went_on, gave_up) == ([first == "goes on"], [first == "gives up"])
    for journal in (culprit, other, third):
        journal.read(store)
        assert [each.final for each in journal.standing.values()] == [True] * gave_up[0]


def test_a_rank_that_fails_in_two_ways_failed_in_the_first():
    store: Any = HashStore()
    one, other = Journal("key"), Journal("key")
    one.say(store, said(1, final=False))
    assert other.say(store, Failure(1, "killed", "rank 1 is gone"))
    one.read(store)
    assert one.standing == other.standing
    (failure,) = one.standing.values()
    assert (failure.kind, failure.text, failure.final) == ("raised", "rank 1", True)
    assert not other.say(store, Failure(1, "silent", "rank 1 is silent"))


def sign(number: int, process: Process | None = None, since: int = 1) -> str:
    return f"{since} {number} {(process or Process.own()).name}"


@pytest.mark.parametrize(
    ("ranks", "every_s", "least_s"), [(64, 0.25, 0.75), (1024, 0.25, 0.75), (16_384, 4.0, 12.0)]
)
def test_signs_of_life_come_so_often(ranks: int, every_s: float, least_s: float) -> None:
    assert heartbeat.interval_s(ranks) == every_s
    assert monitor.limit_s(least_s, ranks) == least_s
    with pytest.raises(PlanError, match=f"signs of life come every {every_s:g} s"):
        monitor.limit_s(least_s * 0.99, ranks)


@pytest.mark.parametrize(("host", "most_s"), [("another host", 2.0), ("", 1.0)])
def test_silence_is_added_up_from_the_ticks_of_the_reader(host: str, most_s: float):
    """One that waits for a processor has twice the time."""
    peer, reader = Peer(), Process(host, 1, "") if host else Process.own()
    peer.observe(sign(1), reader, 0.25)
    for _ in range(7):
        peer.observe(sign(1), reader, 0.25)
    assert (peer.silent_s, peer.is_silent(most_s), peer.is_silent(0.8)) == (1.75, False, True)
    peer.observe(sign(2), reader, 0.25)
    assert (peer.silent_s, peer.count) == (0.0, 2)


def test_silence_before_a_meeting_is_forgotten_and_the_end_of_a_process_is_not():
    watching: Any = Monitor()
    own, told = Process.own(), list[Any]()
    ended = Process(own.host, own.pid, "1")  # another one has its number
    state = GroupState((0, 1, 2), 0, key="groups")
    watching._peers = peers = {1: Peer(), 2: Peer()}
    watching._states = {state: SimpleNamespace(say=print, pass_time=lambda passed_s: None)}
    watching._request = SimpleNamespace(done=SimpleNamespace(is_set=lambda: False))
    watching._store_thread = thread = SimpleNamespace(lost=None, own=None)
    thread.ask = lambda call: told.append(call.args[0].rank)
    for _ in range(9):
        peers[1].observe(sign(1, process=Process("elsewhere", 7, "1")), own, 0.25)
        peers[2].observe(sign(1, process=ended), own, 0.25)
    assert peers[1].is_silent(1.5)
    peers[1].dead = peers[2].dead = True
    for members in ({}, {2: 2}):  # then another process is a member
        state.members = members
        watching.begin(state)
        assert not peers[1].is_silent(0.0)
        assert not peers[1].dead, "its next silence is found again"
        watching._iterate(thread, 0.25)
    assert told == [2]


def test_a_process_that_ended_is_seen_although_its_parent_has_not_looked():
    peers, own = {1: Peer(), 2: Peer()}, Process.own()

    def child() -> Process:
        pid = os.fork()
        if pid == 0:
            signal.pause()
        started = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
        return Process(own.host, pid, started)

    def hear(rank: int, process: Process) -> None:
        peers[rank].observe(sign(1, process=process), own, 0.25)

    hear(2, Process(own.host, os.getpid(), "1"))
    assert peers[2].has_ended(), "another process has its number now"
    for _ in range(2):  # the second one takes the place of the first
        hear(1, process := child())
        assert not peers[1].has_ended()
        os.kill(process.pid, signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert peers[1].has_ended()
        os.waitpid(process.pid, 0)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []

    def announce_all(error: BaseException, *, final: bool = False, kind: str = "") -> None:
        found.append((error, final))

    monkeypatch.setattr(communicator, "announce_all", announce_all)
    return found


def test_an_uncaught_error_is_told_before_it_is_shown(told, monkeypatch):
    error, shown = ValueError("mine"), []
    monkeypatch.setattr(sys, "excepthook", lambda *args: shown.append((args, list(told))))
    monitor.listen.__wrapped__()
    sys.excepthook(ValueError, error, None)
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    sys.excepthook(ValueError, error, None)
    assert told == [(error, True), (error, False)], "a person at a prompt goes on"
    assert shown[0] == ((ValueError, error, None), told[:1])


def test_an_error_in_a_cell_is_told_and_the_next_cell_may_go_on(told, monkeypatch):
    hooks: dict[str, Any] = {}
    shell = SimpleNamespace(events=SimpleNamespace(register=hooks.__setitem__))
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    assert [monitor.limit_s(None, n) for n in (8, 16_384)] == [10.0, 12.0]
    monitor.listen.__wrapped__()
    error = ValueError("mine")
    for each in (None, error):
        hooks["post_run_cell"](SimpleNamespace(error_in_exec=each))
    assert told == [(error, False)]


def watched(withdraws: bool = True) -> GroupState:
    """Groups whose ranks let this one withdraw what it says, or do not."""
    state = GroupState((0, 1), 0)
    state.watch = Watcher(state, SimpleNamespace(bounded=lambda call, default: withdraws))
    return state


def raised(state: GroupState, made: dict[str, int]) -> None:
    state.channel.calls = [Calls() for _ in made]
    for calls, (key, number) in zip(state.channel.calls, made.items(), strict=True):
        calls.key, calls.number = key, number
    state.watch.announce(ValueError("all ranks"), final=False)


def test_what_ended_some_groups_does_not_end_others(monkeypatch: pytest.MonkeyPatch):
    lost, other = (watched(withdraws) for withdraws in (False, True))
    monkeypatch.setattr(communicator, "OPEN", {lost, other})
    for life in (lost, other):
        raised(life, {})
    communicator.withdraw_all(other)
    assert other.failed is None
    assert str(lost.failed).startswith("PeerFailed: rank 0 failed: ValueError: all ranks")
    lost = watched(withdraws=False)
    monkeypatch.setattr(communicator, "OPEN", {lost})
    raised(lost, {})
    with pytest.raises(PeerFailed, match="rank 0 failed"):
        communicator.withdraw_all(lost)


def test_a_rank_that_is_late_after_an_error_of_all_is_not_given_up():
    life = watched()
    for made in ({"a": 3}, {"a": 4}):  # the same error again, which the other has not met yet
        raised(life, made)
    waits = [Stuck("a", 5, (0, 1), "a reduction")]
    late = Failure(1, "raised", "rank 1 failed", made={"a": 3}, issued={"a": 3}, final=False)
    life.standing = {1: late}
    life.watch.check(waits, 1.0)
    life.standing = {1: replace(late, made={"a": 2})}  # it raised where this rank did not
    with pytest.raises(PeerFailed, match="rank 1 failed"):
        life.watch.check(waits, 1.0)

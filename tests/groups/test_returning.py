"""What a process finds in the store that takes a lost rank's place, and what others know of it."""

import os
import signal
import subprocess
import sys
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from mics_fn.groups import rendezvous
from mics_fn.groups.peers import LocalProcesses, Peers, Process, heartbeat_of
from mics_fn.groups.rendezvous import Rejoining, rejoin_error, some_rank_lives

VERB = "reset"


def new_store() -> Any:
    return dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]


def key_of(call: int, ranks: range) -> str:
    return f"mics_fn/{rendezvous._digest(ranks, VERB)}/{call}"


@given(ended=st.integers(0, 4), entered=st.integers(0, 2), wrote=st.booleans())
def test_counting_goes_on_at_the_last_verdict(ended: int, entered: int, wrote: bool) -> None:
    """Whatever a lost process had begun, the next meeting is the one that the others enter."""
    store, ranks = new_store(), range(3)
    for call in range(1, ended + 1):
        store.set(f"{key_of(call, ranks)}/verdict", '{"found": 1}')
    digest = rendezvous._digest(ranks, VERB)
    store.add(rendezvous._calls(digest, 1), ended + entered)
    if wrote and entered:
        store.set(f"{key_of(ended + entered, ranks)}/1", "[]")
    assert rendezvous.take_over(store, ranks, 1, VERB) == ended
    assert rendezvous._enter(store, ranks, 1, VERB)["call"] == ended + 1
    if entered:
        assert not store.check([f"{key_of(ended + entered, ranks)}/1"])


def test_what_a_meeting_agreed_on_is_found_again() -> None:
    store, ranks = new_store(), range(2)
    assert rendezvous.past(store, ranks, VERB, 1) is None
    store.set(f"{key_of(1, ranks)}/verdict", '{"found": 7}')
    store.set(f"{key_of(2, ranks)}/verdict", '{"error": "PlanError", "text": "no"}')
    assert rendezvous.past(store, ranks, VERB, 1) == (key_of(1, ranks), 7)
    assert rendezvous.past(store, ranks, VERB, 2) is None
    assert rendezvous.past(store, range(3), VERB, 1) is None


def started(store: Any, verb: str = "init_distributed") -> None:
    store.set(f"mics_fn/{rendezvous._digest(range(4), verb)}/1/verdict", '{"found": null}')
    store.add(rendezvous._calls(rendezvous._digest(range(4), verb), 1), 1)


def as_another() -> Any:
    return mock.patch.object(Process, "own", return_value=Process("host", 1, "2"))


def test_who_comes_back() -> None:
    store, here = new_store(), Rejoining()
    assert here.arrive(store, 1, 4, lambda start: True) is None  # the first process
    started(store)
    assert here.arrive(store, 1, 4, lambda start: True) is None  # the same one
    with as_another(), mock.patch.dict(os.environ):
        os.environ.pop("TORCHELASTIC_RUN_ID", None)
        seen: list[int] = []
        assert Rejoining().arrive(store, 1, 4, lambda start: bool(seen.append(start) or 1)) == 1
        assert seen == [1]
        assert not here.rejoins


@pytest.mark.parametrize(
    ("begun", "lives", "env"),
    [(False, True, {}), (True, False, {}), (True, True, {"TORCHELASTIC_RUN_ID": "none"})],
)
def test_who_starts_with_the_others(begun: bool, lives: bool, env: dict[str, str]) -> None:
    """There is no job yet, or nobody is left of it, or torchrun starts all ranks."""
    store = new_store()
    Rejoining().arrive(store, 1, 4, lambda start: True)
    if begun:
        started(store)
    with as_another(), mock.patch.dict(os.environ, env):
        assert Rejoining().arrive(store, 1, 4, lambda start: lives) is None


def test_calls_are_found_in_their_order() -> None:
    store, here = new_store(), Rejoining()
    started(store, "make_groups")
    assert here.meeting(store, range(4), "make_groups") is None
    here.rejoins = True
    assert here.meeting(store, range(4), "make_groups") is not None
    assert here.meeting(store, range(4), "make_groups") is None  # a second call was never made
    assert here.meeting(store, range(1), "make_groups") is None


def test_signs_of_life() -> None:
    store = new_store()
    for rank in range(3):
        store.set(heartbeat_of(rank), "1")
    reads = [0]

    class Moving:
        def check(self, keys: list[str]) -> bool:
            return store.check(keys)

        def get(self, key: str) -> bytes:
            reads[0] += 1
            return b"%d" % (reads[0] > 5) if key == heartbeat_of(2) else store.get(key)

    assert some_rank_lives(Moving(), 0, 3)
    with mock.patch("mics_fn.groups.rendezvous._SIGN_S", 0.05):
        assert not some_rank_lives(store, 0, 3)


def test_the_error_says_what_to_call() -> None:
    error = rejoin_error("Trainer.step", 3)
    assert (error.rank, error.kind) == (3, "returned")
    assert "rank 3 was lost, and this process has taken its place" in str(error)
    assert "trainer.reset()" in str(error)


def test_another_process_of_a_rank_is_told() -> None:
    peers, own = Peers(), Process("elsewhere", 1, "1")
    peer, before = peers.hear(2, "1 open host 10 5", own, 0.25)
    assert (before, peer.name, peers.gone([2])) == ("", "host 10 5", [])
    assert peer.mark_gone()
    assert not peer.mark_gone()
    assert peers.gone([1, 2]) == [2]
    assert peers.hear(2, "2 open host 10 5", own, 0.25)[1] == ""  # it was late
    assert peers.hear(2, "1 open host 11 6", own, 0.25)[1] == "host 10 5"
    assert peers.gone([2]) == []
    assert peers.silent([2], 0.1) == []
    peers.hear(2, "1 open host 11 6", own, 0.25)
    assert peers.silent([2, 3], 0.1) == [2]


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
def test_the_process_before_is_watched_no_more() -> None:
    near = LocalProcesses()

    def child() -> tuple[subprocess.Popen, Process]:
        made = subprocess.Popen(["sleep", "30"])
        with open(f"/proc/{made.pid}/stat") as file:
            return made, Process("", made.pid, file.read().rpartition(")")[2].split()[19])

    (first, process), (second, other) = child(), child()
    near.add(1, process)
    files = len(os.listdir("/proc/self/fd"))
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert near.ended() == [1]
    near.add(1, other)
    assert near.ended() == []
    assert len(os.listdir("/proc/self/fd")) == files
    second.kill()
    second.wait()
    assert near.ended() == [1]
    near.forget()

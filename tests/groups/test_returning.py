"""What a process finds in the store that takes a lost rank's place, and what others know of it."""

import os
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from covering import examples
from hypothesis import given
from hypothesis import strategies as st

from mics_fn.groups import rendezvous
from mics_fn.groups.peers import Peers, Process, heartbeat_of
from mics_fn.groups.rendezvous import Rejoining, some_rank_lives

VERB = "reset"


def new_store() -> Any:
    return dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]


def key_of(call: int, ranks: range) -> str:
    return f"mics_fn/{rendezvous._digest(ranks, VERB)}/{call}"


@examples(20, 60)
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


@pytest.mark.parametrize(
    ("begun", "lives", "env", "start"),
    [
        (True, True, {}, 1),
        (False, True, {}, None),  # there is no job yet
        (True, False, {}, None),  # nobody is left of it
        (True, True, {"TORCHELASTIC_RUN_ID": "none"}, None),  # torchrun starts all ranks
    ],
)
def test_who_comes_back(begun: bool, lives: bool, env: dict[str, str], start: int | None) -> None:
    store, here = new_store(), Rejoining()
    assert here.arrive(store, 1, 4, lambda start: True) is None  # the first process
    if begun:
        started(store)
    assert here.arrive(store, 1, 4, lambda start: True) is None  # the same one
    another = mock.patch.object(Process, "own", return_value=Process("host", 1, "2"))
    with another, mock.patch.dict(os.environ):
        os.environ.pop("TORCHELASTIC_RUN_ID", None)
        os.environ |= env
        assert Rejoining().arrive(store, 1, 4, lambda start: lives and start == 1) == start


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

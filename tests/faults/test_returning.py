"""What a process finds in the store that takes a lost rank's place, and what others know of it."""

import os
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from covering import examples
from hypothesis import given
from hypothesis import strategies as st

from mics_fn.faults import rejoin
from mics_fn.faults.heartbeat import Process
from mics_fn.faults.rejoin import Rejoining
from mics_fn.groups import rendezvous

VERB = "reset"


def new_store() -> Any:
    return dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]


def key_of(call: int, ranks: range) -> str:
    return f"{rendezvous.prefix_of(ranks, VERB)}/{call}"


@examples(20, 60)
@given(ended=st.integers(0, 4), entered=st.integers(0, 2), wrote=st.booleans())
def test_counting_goes_on_at_the_last_verdict(ended: int, entered: int, wrote: bool):
    """Whatever a lost process had begun, the next meeting is the one that the others enter."""
    store, ranks = new_store(), range(3)
    for call in range(1, ended + 1):
        store.set(f"{key_of(call, ranks)}/verdict", '{"found": 1}')
    store.add(f"{rendezvous.prefix_of(ranks, VERB)}/calls/1", ended + entered)
    if wrote and entered:
        store.set(f"{key_of(ended + entered, ranks)}/1", "[]")
    assert rejoin.take_over(store, ranks, 1, VERB) == ended
    assert rendezvous._enter(store, ranks, VERB, 1) == key_of(ended + 1, ranks)
    if entered:
        assert not store.check([f"{key_of(ended + entered, ranks)}/1"])


def started(store: Any) -> None:
    prefix = rendezvous.prefix_of(range(4), "init_distributed")
    store.set(f"{prefix}/1/verdict", '{"found": null}')
    store.add(f"{prefix}/calls/1", 1)


@pytest.mark.parametrize(
    ("begun", "lives", "env", "start"),
    [
        (True, True, {}, 1),
        (False, True, {}, None),  # there is no job yet
        (True, False, {}, None),  # nobody is left of it
        (True, True, {"TORCHELASTIC_RUN_ID": "none"}, None),  # torchrun starts all ranks
    ],
)
def test_who_comes_back(begun: bool, lives: bool, env: dict[str, str], start: int | None):
    store, here = new_store(), Rejoining()
    assert here.join(store, 1, 4, lambda start: True) is None  # the first process
    if begun:
        started(store)
    assert here.join(store, 1, 4, lambda start: True) is None  # the same one
    another = mock.patch.object(Process, "own", return_value=Process("host", 1, "2"))
    with another, mock.patch.dict(os.environ):
        os.environ.pop("TORCHELASTIC_RUN_ID", None)
        os.environ |= env
        assert Rejoining().join(store, 1, 4, lambda start: lives and start == 1) == start

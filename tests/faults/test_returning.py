"""What a process finds in the store that takes a lost rank's place, and what others know of it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from covering import examples
from hypothesis import given
from hypothesis import strategies as st

from mics_fn.faults.heartbeat import BoundedStore, Process, StoreThread
from mics_fn.faults.rejoin import joined
from mics_fn.groups import startup
from mics_fn.store import Replaced, claim

VERB = "reset"


@contextmanager
def new_store() -> Iterator[BoundedStore]:
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    thread = StoreThread(store)
    yield BoundedStore(thread, 5.0, lambda lost: lost)
    thread.end()


def key_of(call: int, ranks: range) -> str:
    return f"{startup.prefix_of(ranks, VERB)}/{call}"


@examples(20, 60)
@given(ended=st.integers(0, 4), begun=st.integers(0, 2), wrote=st.booleans())
def test_counting_goes_on_at_the_last_verdict(ended: int, begun: int, wrote: bool):
    """Whatever a lost process had begun, the next meeting is the one that the others enter."""
    ranks, said = range(3), '{"found": 1, "members": [], "epoch": 1}'
    with new_store() as store:
        for call in range(1, ended + 1):
            store.set(f"{key_of(call, ranks)}/verdict", said)
        store.set(f"{startup.prefix_of(ranks, VERB)}/calls/1", f"1 {ended + begun}")
        if wrote and begun:
            store.set(f"{key_of(ended + begun, ranks)}/1", "1 []")
        store.since = 2
        assert startup.entered(store, ranks, VERB, 1) == ended
        assert startup._next(store, ranks, VERB, 1) == ended + 1
        if begun:
            assert not store.check([f"{key_of(ended + begun, ranks)}/1"])


def started(store: Any) -> None:
    prefix = startup.prefix_of(range(4), "init_distributed")
    store.set(f"{prefix}/1/verdict", '{"found": null, "members": [], "epoch": 1}')
    store.set(f"{prefix}/calls/1", "1 1")


@pytest.mark.parametrize(
    ("begun", "env", "start"),
    [
        (True, {}, 1),
        (False, {}, None),  # there is no job yet
        (True, {"TORCHELASTIC_RUN_ID": "none"}, None),  # torchrun starts all ranks
    ],
)
def test_who_comes_back(begun: bool, env: dict[str, str], start: int | None):
    with new_store() as store, mock.patch.dict(os.environ):
        os.environ.pop("TORCHELASTIC_RUN_ID", None)
        assert joined(store, 1, 4) is None  # the first process
        if begun:
            started(store)
        assert joined(store, 1, 4) is None  # the same one
        os.environ |= env
        with mock.patch.object(Process, "own", return_value=Process("host", 1, "2")):
            assert joined(store, 1, 4) == start
        assert store.since == 2
        with pytest.raises(Replaced):
            claim(store, "mics_fn/process/1", 1, "of the first one, which thaws")

"""What a process finds in the store that takes a lost rank's place, and what others know of it."""

import math
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

from mics_fn.faults import monitor
from mics_fn.faults.heartbeat import BoundedStore, Process, Replaced, StoreThread, claim
from mics_fn.faults.monitor import joined
from mics_fn.groups import startup

VERB = "reset"


@contextmanager
def new_store() -> Iterator[BoundedStore]:
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    thread = StoreThread(store)
    yield BoundedStore(thread, 5.0, lambda lost: lost)
    thread.end()


def started(store: Any) -> None:
    prefix = startup.prefix_of(range(4), "init_distributed")
    store.set(f"{prefix}/1/verdict", '{"found": null, "members": [], "epoch": 1}')
    store.set(f"{prefix}/last", "1")


@examples(20, 60)
@given(ended=st.integers(0, 4), begun=st.booleans())
def test_counting_goes_on_at_the_last_verdict(ended: int, begun: bool):
    """Whatever a lost process had begun, the next meeting is the one that the others enter."""
    with new_store() as store:
        told: Any = {"verb": VERB, "timeout_s": 1.0, "deadline": math.inf}
        for call in range(1, ended + 1):
            meeting = startup.meet(store, range(1), 0, call, lambda found: found[0], **told)
            assert monitor.past(store, range(1), VERB, call) == meeting._replace(members={})
        key = startup.prefix_of(range(1), VERB)
        if begun:
            store.set(f"{key}/{ended + 1}/0", '1 "of the process that was lost"')
        store.since = 2
        assert startup.last_of(store, range(1), VERB) == ended
        meeting = startup.meet(store, range(1), 0, "mine", lambda found: found[0], **told)
        assert meeting == (f"{key}/{ended + 1}", "mine", {0: 2})


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

"""Ranks that disagree, or do not come: every rank hears who and what, soon, and can try again."""

import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from mics_fn.errors import CollectiveError, DesyncError, MicsError, PlanError
from mics_fn.groups.make import make_groups
from mics_fn.groups.topology import Topology


@contextmanager
def launched(env: dict[str, str], hosts: str = "") -> Iterator[None]:
    """The launcher's variables replaced, and this rank's host: one letter a rank."""
    kept = {name: value for name, value in os.environ.items() if name != "LOCAL_WORLD_SIZE"}
    host = hosts[dist.get_rank()] if hosts else "here"
    with (
        mock.patch.dict(os.environ, kept | env, clear=True),
        mock.patch.object(socket, "gethostname", return_value=host),
    ):
        yield


def attempt(
    kwargs_of_rank: list[dict[str, Any]], env: list[dict[str, str]] | None = None, hosts: str = ""
) -> Any:
    """The error of this rank's make_groups, and how long it took."""
    rank, started = dist.get_rank(), time.monotonic()
    try:
        with launched(env[rank] if env else {}, hosts):
            make_groups(**{"timeout_s": 20, **kwargs_of_rank[rank]}).close()
    except MicsError as error:
        return type(error), str(error), time.monotonic() - started
    return None, "", time.monotonic() - started


def same_error(results: list[Any], within_s: float = 5.0) -> tuple[type, str]:
    """The error that all ranks have in common."""
    assert all(seconds < within_s for *_, seconds in results)
    assert len({result[:2] for result in results}) == 1, results
    return results[0][:2]


@pytest.mark.parametrize(
    ("kwargs", "env", "hosts", "text"),
    [
        ({}, {}, "aaab", "of one size, one after the other\n  ranks 0-2: hostnames a\n"),
        ({"node_size": 3}, {}, "", "ranks 0-2: node_size=3 0\n  rank 3: node_size=3 1\n"),
        ({"topology": Topology((2, 4))}, {}, "", "topology node 2 x rank 4 has 8 ranks, the job "),
        ({"topology": Topology((2, 2)), "node_size": 2}, {}, "", "and node_size= are both given"),
        ({"partition_size": 3}, {}, "", "partition_size=3 does not fit 4 ranks"),
        ({"timeout_s": 0}, {}, "", "make_groups: timeout_s=0, expected a finite number above 0"),
        ({"ranks": [0, 0, 1, 2, 3]}, {}, "", "are not distinct ranks of a world of 4"),
        ({"ranks": [0, 1, 2, 4]}, {}, "", "are not distinct ranks of a world of 4"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_everywhere(ranks, kwargs, env, hosts, text):
    kind, said = same_error(ranks(4).run(attempt, [kwargs] * 4, [env] * 4, hosts))
    assert kind is PlanError
    assert text in said


TOPOLOGY = Topology((2, 2))


@pytest.mark.parametrize(
    ("given", "env", "lines"),
    [
        (  # 3 fits no world of 4: it must not fail on rank 1 alone while the others wait
            [{"node_size": 2}, {"node_size": 3}, {"node_size": 2}, {"node_size": 2}],
            [{}] * 4,
            ["node_size: 2 on ranks 0, 2, 3; 3 on rank 1"],
        ),
        (
            [{}] * 4,
            [{"LOCAL_WORLD_SIZE": "2"}] * 3 + [{}],
            ["node_size: found by LOCAL_WORLD_SIZE=2 on ranks 0-2; found by hostnames on rank 3"],
        ),
        (
            [{"heartbeat_s": 20.0}, {"topology": TOPOLOGY}, {"heartbeat_s": 20.0}, {}],
            [{}] * 4,
            [
                "node_size: found by hostnames on ranks 0, 2, 3; None on rank 1",
                "topology: None on ranks 0, 2, 3; node 2 x rank 2 on rank 1",
                "heartbeat_s: 20.0 on ranks 0, 2; None on ranks 1, 3",
            ],
        ),
    ],
)
def test_ranks_that_disagree_hear_of_what(ranks, given, env, lines):
    kind, text = same_error(ranks(4).run(attempt, given, env))
    names = ", ".join(line.partition(":")[0] for line in lines)
    first, *said, _ = text.splitlines()
    assert (kind, first) == (DesyncError, f"make_groups: ranks disagree on {names}")
    assert said == [f"  {line}" for line in lines]


def test_ranks_that_disagree_on_the_ranks(ranks):
    """Each set lacks some, as two ranks wait elsewhere; then the counts of both are in step."""
    short: dict[str, Any] = {"timeout_s": 0.5}
    found = ranks(4).run(attempt, [short, short | {"ranks": [0, 1]}, short, short])
    assert [kind for kind, *_ in found] == [CollectiveError] * 4
    missing = [text.partition(" did not call it")[0] for _, text, _ in found]
    assert missing == [f"make_groups: rank {rank}" for rank in (1, 0, 1, 1)]
    again = [{"ranks": [0, 1]}] * 2 + [{"ranks": [rank]} for rank in (2, 3)]
    for given in ([{}] * 4, again):
        assert [result[0] for result in ranks(4).run(attempt, given)] == [None] * 4


def come_late(missing: int) -> Any:
    if dist.get_rank() == missing:
        return None
    return attempt([{"timeout_s": 0.5}] * 4)


@pytest.mark.parametrize("missing", [0, 3])
def test_a_rank_that_does_not_come(ranks, missing: int):
    results = ranks(4).run(come_late, missing)
    assert results.pop(missing) is None
    assert same_error(results, within_s=3.0) == (
        CollectiveError,
        f"make_groups: rank {missing} did not call it within 0.5 s\n"
        "  expected: ranks 0-3\n"
        "  fix: call make_groups on all of these ranks, equally often and in the same order",
    )
    # Counts are in step again, so that the same ranks can try again.
    assert [result[0] for result in ranks(4).run(attempt, [{}] * 4)] == [None] * 4


def interrupted(at: int) -> float:
    if dist.get_rank() != at:
        return 0.0
    before, started = signal.signal(signal.SIGALRM, signal.default_int_handler), time.monotonic()
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with pytest.raises(KeyboardInterrupt):
            make_groups(timeout_s=30)
    finally:
        signal.signal(signal.SIGALRM, before)
    return time.monotonic() - started


@pytest.mark.parametrize("at", [0, 1])
def test_an_interrupt_while_waiting_stops_it_at_once(ranks, at: int):
    assert ranks(2).run(interrupted, at)[at] < 1.5
    assert [result[0] for result in ranks(2).run(attempt, [{}] * 2)] == [None] * 2

"""Ranks that disagree, or do not come: every rank hears who and what, soon, and can try again."""

import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from mics_fn.errors import CollectiveError, DesyncError, MicsError, PlanError
from mics_fn.groups import rendezvous
from mics_fn.groups.make import make_groups
from mics_fn.groups.topology import Topology
from mics_fn.lab.ranks.pool import RankPool

Pools = Callable[[int], RankPool]
LAUNCHER = ("LOCAL_WORLD_SIZE", "SLURM_STEP_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE")
LAUNCHER += ("SLURM_TASKS_PER_NODE",)


@contextmanager
def launched(env: dict[str, str], hosts: str = "") -> Iterator[None]:
    """The launcher's variables replaced, and this rank's host: one letter a rank."""
    kept = {name: value for name, value in os.environ.items() if name not in LAUNCHER}
    host = hosts[dist.get_rank()] if hosts else "here"
    with (
        mock.patch.dict(os.environ, kept | env, clear=True),
        mock.patch.object(socket, "gethostname", return_value=host),
    ):
        yield


def attempt(kwargs_of_rank: list[dict[str, Any]], env: list[dict[str, str]] | None = None) -> Any:
    """The error of this rank's make_groups, and how long it took."""
    rank, started = dist.get_rank(), time.monotonic()
    try:
        with launched(env[rank] if env else {}):
            make_groups(**{"timeout_s": 20, **kwargs_of_rank[rank]}).close()
    except MicsError as error:
        return type(error), str(error), time.monotonic() - started
    return None, "", time.monotonic() - started


def same_error(results: list[Any], within_s: float = 5.0) -> tuple[type, str]:
    """The error that all ranks have in common."""
    assert all(seconds < within_s for *_, seconds in results)
    assert len({result[:2] for result in results}) == 1, results
    return results[0][:2]


def refused(kwargs: dict[str, Any], env: dict[str, str], hosts: str = "") -> Any:
    started = time.monotonic()
    with launched(env, hosts), pytest.raises(MicsError) as caught:
        make_groups(**{"timeout_s": 20, **kwargs})
    return type(caught.value), str(caught.value), time.monotonic() - started


@pytest.mark.parametrize(
    ("kwargs", "env", "hosts", "text"),
    [
        (
            {},
            {},
            "aaab",
            "make_groups: nodes hold different numbers of these ranks, by hostnames\n"
            "  3 on one node: ranks 0-2\n"
            "  1 on one node: rank 3\n"
            "  fix: use equally many ranks of every node, or pass node_size= or topology=",
        ),
        (
            {},
            {"SLURM_TASKS_PER_NODE": "3,1"},
            "",
            "make_groups: nodes hold different numbers of these ranks, by "
            "SLURM_TASKS_PER_NODE=3,1\n"
            "  3 on one node: ranks 0-2\n"
            "  1 on one node: rank 3\n"
            "  fix: use equally many ranks of every node, or pass node_size= or topology=",
        ),
        (
            {},
            {},
            "abab",
            "make_groups: ranks of one node are not next to each other\n"
            "  one node, by hostnames: ranks 0, 2\n"
            "  fix: order ranks= by node, or pass node_size= or topology=",
        ),
        (
            {},
            {"LOCAL_WORLD_SIZE": "2"},
            "abab",
            "make_groups: LOCAL_WORLD_SIZE=2 puts ranks 0, 1 on one node\n"
            "  but they run on a, b\n"
            "  fix: start ranks node by node (Slurm: --distribution=block), or pass node_size=",
        ),
        (
            {"node_size": 3},
            {},
            "",
            "make_groups: node_size=3 does not divide the world of 4 ranks\n"
            "  sizes that work: 1, 2, 4\n"
            "  fix: pass one of these as node_size=",
        ),
        (
            {"topology": Topology((2, 4))},
            {},
            "",
            "make_groups: topology node 2 x rank 4 has 8 ranks, the job has 4\n"
            "  fix: give sizes whose product is the number of ranks",
        ),
        (
            {"topology": Topology((2, 2)), "node_size": 2},
            {},
            "",
            "make_groups: topology= and node sizes are both given\n"
            "  fix: pass topology= alone, or node_size= and nodes_per_rack=",
        ),
        (
            {"partition_size": 3},
            {"LOCAL_WORLD_SIZE": "2"},
            "",
            "partition_size=3 does not divide the world of 4 ranks\n"
            "  world: 4 ranks = node 2 x rank 2\n"
            "  sizes that work: 1, 2, 4\n"
            "  fix: pass one of these as partition_size=",
        ),
        (
            {"timeout_s": 0},
            {},
            "",
            "make_groups: timeout_s=0 is not a time limit\n  fix: pass seconds above 0",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_refused_everywhere(
    ranks: Pools, kwargs: dict[str, Any], env: dict[str, str], hosts: str, text: str
) -> None:
    assert same_error(ranks(4).run(refused, kwargs, env, hosts)) == (PlanError, text)


def six_of_eight() -> str:
    mine = list(range(6)) if dist.get_rank() < 6 else [6, 7]
    try:
        with make_groups(2, ranks=mine, topology=Topology((2, len(mine) // 2)), timeout_s=20):
            return "fine"
    except PlanError as error:
        return str(error)


def test_a_partition_group_that_would_cross_a_node(ranks: Pools) -> None:
    text = (
        "partition_size=2 crosses a node in the middle: "
        "ranks 2, 3 would be one group, but a node has 3 ranks\n"
        "  world: 6 ranks = node 2 x rank 3\n"
        "  sizes that work: 1, 3, 6\n"
        "  fix: pass one of these as partition_size="
    )
    assert ranks(8).run(six_of_eight) == [text] * 6 + ["fine"] * 2


def own_error(ranks_given: list[int]) -> str:
    with pytest.raises(PlanError) as caught:
        make_groups(ranks=ranks_given, timeout_s=20)
    return str(caught.value)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            [0, 0],
            "make_groups: ranks=[0, 0] are not distinct ranks of a world of 2\n"
            "  fix: give each of 0 to 1 at most once",
        ),
        (
            [0, 1, 2],
            "make_groups: ranks=[0, 1, 2] are not distinct ranks of a world of 2\n"
            "  fix: give each of 0 to 1 at most once",
        ),
        (
            [],
            "make_groups: rank 1 is not one of ranks=[]\n"
            "  fix: pass on each rank the ranks that it shares groups with, itself included",
        ),
    ],
)
def test_ranks_that_are_none(ranks: Pools, given: list[int], text: str) -> None:
    assert ranks(2).run(own_error, given)[1] == text


def test_ranks_that_disagree_on_partition_size(ranks: Pools) -> None:
    given = [{"partition_size": 2}, {"partition_size": 2}, {"partition_size": 4}, {}]
    assert same_error(ranks(4).run(attempt, given)) == (
        DesyncError,
        "make_groups: ranks disagree on partition_size\n"
        "  partition_size: 2 on ranks 0, 1; 4 on rank 2; None on rank 3\n"
        "  fix: pass the same partition_size= on every rank",
    )


def test_ranks_that_disagree_on_node_size(ranks: Pools) -> None:
    # 3 fits no world of 4: it must not fail on rank 1 alone while the others wait.
    given = [{"node_size": 2}, {"node_size": 3}, {"node_size": 2}, {"node_size": 2}]
    assert same_error(ranks(4).run(attempt, given)) == (
        DesyncError,
        "make_groups: ranks disagree on node_size\n"
        "  node_size: 2 on ranks 0, 2, 3; 3 on rank 1\n"
        "  fix: pass the same node_size= on every rank",
    )


def test_ranks_that_disagree_on_the_limit_of_silence(ranks: Pools) -> None:
    given = [{"heartbeat_s": 20}, {"heartbeat_s": 20.0}, {"heartbeat_s": 30.0}, {}]
    assert same_error(ranks(4).run(attempt, given)) == (
        DesyncError,
        "make_groups: ranks disagree on heartbeat_s\n"
        "  heartbeat_s: 20.0 on ranks 0, 1; 30.0 on rank 2; None on rank 3\n"
        "  fix: pass the same heartbeat_s= on every rank",
    )


def test_ranks_that_find_different_node_sizes(ranks: Pools) -> None:
    env = [{"LOCAL_WORLD_SIZE": "2"}] * 3 + [{}]
    assert same_error(ranks(4).run(attempt, [{}] * 4, env)) == (
        DesyncError,
        "make_groups: ranks disagree on node_size\n"
        "  node_size: found by LOCAL_WORLD_SIZE=2 on ranks 0-2; found by hostnames on rank 3\n"
        "  fix: launch all ranks in the same way, or pass the same node_size= on every rank",
    )


def test_ranks_that_disagree_on_several_things(ranks: Pools) -> None:
    given = [{}, {"timeout_s": 21.5, "topology": Topology((2, 1))}]
    assert same_error(ranks(2).run(attempt, given)) == (
        DesyncError,
        "make_groups: ranks disagree on node_size, topology, timeout_s\n"
        "  node_size: found by hostnames on rank 0; None on rank 1\n"
        "  topology: None on rank 0; node 2 x rank 1 on rank 1\n"
        "  timeout_s: 20.0 on rank 0; 21.5 on rank 1\n"
        "  fix: launch all ranks in the same way, or pass the same node_size= on every rank; "
        "pass the same topology= on every rank; pass the same timeout_s= on every rank",
    )


def test_equal_numbers_of_different_types_agree(ranks: Pools) -> None:
    given = [{"timeout_s": 20}, {"timeout_s": 20.0}]
    assert [result[0] for result in ranks(2).run(attempt, given)] == [None] * 2


@pytest.mark.parametrize("others", [[0, 1], [1, 0]], ids=str)
def test_ranks_that_disagree_on_the_ranks(ranks: Pools, others: list[int]) -> None:
    given: list[dict[str, Any]] = [{}, {"ranks": others}, {}, {}]
    assert same_error(ranks(4).run(attempt, given)) == (
        DesyncError,
        "make_groups: ranks disagree on which ranks share the groups\n"
        "  rank 0: ranks [0, 1, 2, 3]\n"
        f"  rank 1: ranks {others}\n"
        "  fix: pass the same ranks= or mesh= on all of these ranks",
    )
    # Counts are in step again, for both sets of ranks.
    again = [{"ranks": others}] * 2 + [{"ranks": [rank]} for rank in (2, 3)]
    for given in ([{}] * 4, again):
        assert [result[0] for result in ranks(4).run(attempt, given)] == [None] * 4


def test_ranks_of_which_each_waits_for_another(ranks: Pools) -> None:
    given: list[dict[str, Any]] = [{}, {"ranks": [1, 2, 0]}, {}, {}]
    kind, text = same_error(ranks(4).run(attempt, given))
    assert kind is DesyncError
    assert "rank 1: ranks [1, 2, 0]\n" in text  # either rank 0 or rank 1 publishes first


class TwoPublish(dict):
    """A store in which a second rank publishes to all keys after the first has done so to one."""

    def __init__(self, second: Callable[[Any], None]) -> None:
        super().__init__()
        self.second: Callable[[Any], None] | None = second

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        assert expected == ""
        stands = self.setdefault(key, desired)
        second, self.second = self.second, None
        if second is not None:
            second(self)
        return stands.encode()


@pytest.mark.parametrize("orders", [("ab", "ab"), ("ab", "ba"), ("ba", "ab")], ids=str)
def test_two_ranks_that_publish_at_two_keys_publish_one_verdict(orders: tuple[str, str]) -> None:
    first, second = ({"error": "desync", "text": f"by {name}"} for name in ("one", "two"))
    store: Any = TwoPublish(lambda store: rendezvous._publish(store, [*orders[1]], second))
    rendezvous._publish(store, [*orders[0]], first)
    assert store == {f"{place}/verdict": json.dumps(first) for place in "ab"}


def come_late(missing: int) -> Any:
    if dist.get_rank() == missing:
        return None
    return attempt([{"timeout_s": 0.5}] * 4)


@pytest.mark.parametrize("missing", [0, 3])
def test_a_rank_that_does_not_come(ranks: Pools, missing: int) -> None:
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


class Interrupted(BaseException):
    pass


def interrupted(at: int) -> float:
    def stop(*_: object) -> None:
        raise Interrupted

    if dist.get_rank() != at:
        return 0.0
    before, started = signal.signal(signal.SIGALRM, stop), time.monotonic()
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with pytest.raises(Interrupted):
            make_groups(timeout_s=30)
    finally:
        signal.signal(signal.SIGALRM, before)
    return time.monotonic() - started


@pytest.mark.parametrize("at", [0, 1])
def test_an_interrupt_while_waiting_stops_it_at_once(ranks: Pools, at: int) -> None:
    assert ranks(2).run(interrupted, at)[at] < 1.5
    assert [result[0] for result in ranks(2).run(attempt, [{}] * 2)] == [None] * 2

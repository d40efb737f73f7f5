"""Rank arithmetic: partitions of the world, chunk order on plain lists, refusals with numbers."""

import re
import time
from collections.abc import Callable
from itertools import product
from math import prod
from typing import Any

import pytest
from covering import examples
from hypothesis import given
from hypothesis import strategies as st

from mics_fn.errors import PlanError
from mics_fn.groups.topology import Plan, Topology, plan_groups, valid_partition_sizes

topologies = (
    st.lists(st.integers(1, 5), min_size=1, max_size=5)
    .filter(lambda sizes: prod(sizes) <= 100)
    .map(lambda sizes: Topology(tuple(sizes)))
)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    topology = draw(topologies)
    return plan_groups(topology, draw(st.sampled_from(valid_partition_sizes(topology))))


def units(topology: Topology) -> list[int]:
    """Ranks in one rank, one node, one rack, ..., the world."""
    return [prod(topology.sizes[i:]) for i in range(len(topology.sizes), -1, -1)]


def fits(topology: Topology, p: int) -> bool:
    """By the definition: no machine and no group stand half in each other."""
    groups = [set(range(i, i + p)) for i in range(0, topology.world_size, p)]
    for unit in units(topology):
        for start in range(0, topology.world_size, unit):
            machine = set(range(start, start + unit))
            if not all(g <= machine or machine <= g or not g & machine for g in groups):
                return False
    return topology.world_size % p == 0


@examples(30, 100)
@given(plans())
def test_groups_partition_the_world_and_cross_once(plan: Plan):
    world, p = list(range(plan.world_size)), plan.partition_size
    rows = [plan.replication_group(position) for position in range(p)]
    assert list(sum(plan.partition_groups, ())) == world
    assert {len(group) for group in plan.partition_groups} == {plan.partition_size}
    assert len(plan.partition_groups) == plan.num_replicas
    assert sorted(sum(rows, ())) == world
    for replicas, group in product(rows, plan.partition_groups):
        assert len(set(replicas) & set(group)) == 1
    for group in rows:
        assert len({plan.chunk(position) for position in group}) == 1
    for group in plan.partition_groups:
        order = plan.chunk_order(group[0])
        assert sorted(order) == list(group)
        assert [plan.chunk(i) for i in order] == list(range(plan.partition_size))


@examples(30, 100)
@given(plans())
def test_level_groups_partition_and_stay_inside_their_machine(plan: Plan):
    assert prod(plan.level_sizes) == plan.partition_size
    assert 1 not in plan.level_sizes
    by_name = dict(zip(plan.topology.names, units(plan.topology)[:0:-1], strict=True))
    for level, (name, size) in enumerate(zip(plan.level_names, plan.level_sizes, strict=True)):
        groups = {plan.level_group(i, level) for i in range(plan.world_size)}
        assert sorted(sum(groups, ())) == list(range(plan.world_size))
        for group in groups:
            assert [plan.coords(i)[level] for i in group] == list(range(size))
            others = {plan.coords(i)[:level] + plan.coords(i)[level + 1 :] for i in group}
            assert len(others) == 1
            assert len({plan.partition_group(i) for i in group}) == 1
            assert len({i // by_name[name] for i in group}) == 1


@examples(30, 100)
@given(plans())
def test_hierarchical_gather_in_place_ends_in_chunk_order(plan: Plan):
    held = {i: [plan.chunk(i)] for i in range(plan.world_size)}
    for level in range(len(plan.level_sizes)):  # outermost first, each a plain concatenation
        held = {i: sum((held[j] for j in plan.level_group(i, level)), []) for i in held}
    assert all(chunks == list(range(plan.partition_size)) for chunks in held.values())


@examples(30, 100)
@given(topologies)
def test_a_size_is_refused_exactly_when_it_does_not_fit(topology: Topology):
    sizes = [p for p in range(1, topology.world_size + 1) if fits(topology, p)]
    assert list(valid_partition_sizes(topology)) == sizes
    for p in range(-2, topology.world_size + 2):
        if p in sizes:
            assert plan_groups(topology, p).partition_size == p
        else:
            with pytest.raises(PlanError, match=r"sizes that work: 1\b"):
                plan_groups(topology, p)


def test_chunk_numbers_run_innermost_level_first():
    plan = plan_groups(Topology((2, 2, 2)), 8)
    assert plan.coords(6) == (1, 1, 0)
    assert [plan.chunk(i) for i in range(8)] == [0, 4, 2, 6, 1, 5, 3, 7]


def test_sixteen_thousand_ranks():
    started = time.perf_counter()
    plan = plan_groups(Topology((16, 128, 8)), 1024)
    assert (len(plan.partition_groups), plan.partition_size) == (16, 1024)
    assert plan.level_group(5000, 0) == tuple(4096 + 8 * i for i in range(128))
    assert len(set(plan.chunk_order(5000))) == 1024
    assert len(str(plan)) < 500
    assert time.perf_counter() - started < 1.0


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: plan_groups(Topology((3, 4)), 5), "5 does not fit 12 ranks = node 3 x rank 4"),
        (lambda: plan_groups(Topology((3, 4)), True), "partition_size=True does not fit"),
        (
            lambda: plan_groups(Topology((2, 3, 4)), 8),
            "partition_size=8 does not fit 24 ranks = rack 2 x node 3 x rank 4\n"
            "  fix: pass one of the sizes that work: 1, 2, 4, 12, 24",
        ),
        (lambda: Topology.of(8, 3), "node_size=3 does not divide 8"),
        (lambda: Topology((2, 0)), "Topology: sizes[1]=0, expected an int of at least 1"),
        (lambda: Topology((2, 2), ("node", "node")), "names ('node', 'node') do not name"),
        (lambda: Topology((2, 2), ("flat", "rank")), "names ('flat', 'rank') do not name"),
    ],
)
def test_what_does_not_fit_is_refused(make: Callable[[], Any], text: str):
    with pytest.raises(PlanError, match=re.escape(text)):
        make()


def test_a_position_beyond_the_world_has_no_coordinates():
    with pytest.raises(IndexError):
        plan_groups(8, 4).coords(8)

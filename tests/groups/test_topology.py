"""Rank arithmetic: partitions of the world, chunk order on plain lists, refusals with numbers."""

import time
from itertools import product
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mics_fn.errors import PlanError
from mics_fn.groups.topology import (
    Plan,
    Topology,
    chunk_of,
    fold_ranks,
    plan_groups,
    valid_partition_sizes,
)

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


@given(plans())
def test_partition_groups_partition_the_world(plan: Plan) -> None:
    assert sum(plan.partition_groups, ()) == tuple(range(plan.world_size))
    assert {len(group) for group in plan.partition_groups} == {plan.partition_size}
    assert len(plan.partition_groups) == plan.num_replicas


@given(plans())
def test_replication_groups_cross_each_partition_group_once(plan: Plan) -> None:
    assert sorted(sum(plan.replication_groups, ())) == list(range(plan.world_size))
    for replicas, group in product(plan.replication_groups, plan.partition_groups):
        assert len(set(replicas) & set(group)) == 1
    for group in plan.replication_groups:
        assert len({plan.chunk(position) for position in group}) == 1


@given(plans())
def test_level_groups_partition_and_agree(plan: Plan) -> None:
    assert prod(plan.level_sizes) == plan.partition_size
    assert 1 not in plan.level_sizes
    for level, size in enumerate(plan.level_sizes):
        groups = {plan.level_group(i, level) for i in range(plan.world_size)}
        assert sorted(sum(groups, ())) == list(range(plan.world_size))
        for group in groups:
            assert [plan.coords(i)[level] for i in group] == list(range(size))
            others = {plan.coords(i)[:level] + plan.coords(i)[level + 1 :] for i in group}
            assert len(others) == 1
            assert len({plan.partition_group(i) for i in group}) == 1


@given(plans())
def test_an_inner_level_stays_inside_its_machine(plan: Plan) -> None:
    by_name = dict(zip(plan.topology.names, units(plan.topology)[:0:-1], strict=True))
    for level, name in enumerate(plan.level_names):
        for position in range(plan.world_size):
            machines = {i // by_name[name] for i in plan.level_group(position, level)}
            assert len(machines) == 1


@given(plans())
def test_hierarchical_gather_in_place_ends_in_chunk_order(plan: Plan) -> None:
    held = {i: [plan.chunk(i)] for i in range(plan.world_size)}
    for level in range(len(plan.level_sizes)):  # outermost first, each a plain concatenation
        held = {i: sum((held[j] for j in plan.level_group(i, level)), []) for i in held}
    assert all(chunks == list(range(plan.partition_size)) for chunks in held.values())


@given(plans(), st.data())
def test_chunk_order_lists_the_holders_of_each_chunk(plan: Plan, data: st.DataObject) -> None:
    position = data.draw(st.integers(0, plan.world_size - 1))
    order = plan.chunk_order(position)
    assert sorted(order) == list(plan.partition_group(position))
    assert [plan.chunk(i) for i in order] == list(range(plan.partition_size))
    assert position in order


@given(topologies)
def test_valid_partition_sizes_are_those_that_fit(topology: Topology) -> None:
    sizes = [p for p in range(1, topology.world_size + 1) if fits(topology, p)]
    assert list(valid_partition_sizes(topology)) == sizes


@given(topologies, st.integers(-2, 110))
def test_a_size_is_refused_exactly_when_it_does_not_fit(topology: Topology, p: int) -> None:
    if p in valid_partition_sizes(topology):
        assert plan_groups(topology, p).partition_size == p
    else:
        with pytest.raises(PlanError, match=r"sizes that work: 1\b"):
            plan_groups(topology, p)


def test_chunk_numbers_run_innermost_level_first() -> None:
    assert [chunk_of(c, (2, 4)) for c in product(range(2), range(4))] == [0, 2, 4, 6, 1, 3, 5, 7]
    plan = plan_groups(Topology((2, 2, 2)), 8)
    assert plan.coords(6) == (1, 1, 0)
    assert [plan.chunk(i) for i in range(8)] == [0, 4, 2, 6, 1, 5, 3, 7]
    assert plan.chunk_order(0) == (0, 4, 2, 6, 1, 5, 3, 7)


def test_two_nodes_of_four() -> None:
    plan = plan_groups(Topology((2, 4)), 2)
    assert plan.partition_groups == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert plan.replication_groups == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert (plan.level_names, plan.level_sizes) == (("rank",), (2,))
    whole = plan_groups(Topology((2, 4)), 8)
    assert (whole.level_names, whole.level_sizes) == (("node", "rank"), (2, 4))
    assert whole.level_group(6, 0) == (2, 6)
    assert whole.level_group(6, 1) == (4, 5, 6, 7)


def test_levels_of_size_one_are_left_out() -> None:
    assert plan_groups(Topology((2, 4)), 1).level_sizes == ()
    assert plan_groups(Topology((2, 1, 3)), 6).level_names == ("rack", "rank")
    assert plan_groups(Topology((1, 4)), 4).level_names == ("rank",)
    assert plan_groups(1, 1).chunk_order(0) == (0,)


def test_names_by_depth() -> None:
    names = [Topology((2,) * depth).names for depth in (1, 2, 3, 5)]
    assert names[:3] == [("rank",), ("node", "rank"), ("rack", "node", "rank")]
    assert names[3] == ("level0", "level1", "rack", "node", "rank")
    assert Topology((2, 2), ("host", "gpu")).names == ("host", "gpu")


def test_plans_are_values() -> None:
    plan = plan_groups(Topology((2, 4)), 4)
    assert plan == plan_groups(Topology([2, 4]), 4)  # pyright: ignore[reportArgumentType]
    assert len({plan, plan_groups(Topology((2, 4)), 4), plan_groups(8, 4)}) == 2
    with pytest.raises(AttributeError):
        plan.partition_size = 2  # pyright: ignore[reportAttributeAccessIssue]


def test_sixteen_thousand_ranks() -> None:
    started = time.perf_counter()
    plan = plan_groups(Topology((16, 128, 8)), 1024)
    assert len(plan.partition_groups) == 16
    assert len(plan.replication_groups) == 1024
    assert plan.level_group(5000, 0) == tuple(4096 + 8 * i for i in range(128))
    assert len(set(plan.chunk_order(5000))) == 1024
    assert len(str(plan)) < 500
    assert time.perf_counter() - started < 1.0


def test_a_plan_prints() -> None:
    assert str(plan_groups(Topology((2, 2, 2)), 4)) == (
        "8 ranks = rack 2 x node 2 x rank 2\n"
        "  partition groups (2 of 4): 0-3 | 4-7\n"
        "  levels of each, outermost first: node 2 x rank 2\n"
        "  replication groups (4 of 2): 0, 4 | 1, 5 | 2, 6 | 3, 7"
    )
    assert str(plan_groups(4, 1)) == (
        "4 ranks = rank 4\n"
        "  partition groups (4 of 1): 0 | 1 | 2 | 3\n"
        "  levels of each, outermost first: none, a rank is a whole replica\n"
        "  replication groups (1 of 4): 0-3"
    )


def test_a_large_plan_prints_shortened() -> None:
    assert str(plan_groups(Topology((2048, 8)), 8)) == (
        "16384 ranks = node 2048 x rank 8\n"
        "  partition groups (2048 of 8): 0-7 | 8-15 | 16-23 | ... | 16376-16383\n"
        "  levels of each, outermost first: rank 8\n"
        "  replication groups (8 of 2048): 0, 8, 16, ..., 16376 | 1, 9, 17, ..., 16377 | "
        "2, 10, 18, ..., 16378 | 3, 11, 19, ..., 16379 | 4, 12, 20, ..., 16380 | "
        "5, 13, 21, ..., 16381 | 6, 14, 22, ..., 16382 | 7, 15, 23, ..., 16383"
    )
    assert fold_ranks([7]) == "7"


WORLD_12 = "\n  world: 12 ranks = node 3 x rank 4\n  sizes that work: 1, 2, 4, 12"
WORLD_24 = "\n  world: 24 ranks = rack 2 x node 3 x rank 4\n  sizes that work: 1, 2, 4, 12, 24"
FIX = "\n  fix: pass one of these as partition_size="
NO_INT = " is not an int of at least 1"


@pytest.mark.parametrize(
    ("sizes", "p", "text"),
    [
        ((3, 4), 5, f"5 does not divide the world of 12 ranks{WORLD_12}"),
        ((3, 4), 0, f"0{NO_INT}{WORLD_12}"),
        ((3, 4), -4, f"-4{NO_INT}{WORLD_12}"),
        ((3, 4), 24, f"24 does not divide the world of 12 ranks{WORLD_12}"),
        ((3, 4), 4.0, f"4.0{NO_INT}{WORLD_12}"),
        ((3, 4), True, f"True{NO_INT}{WORLD_12}"),
        ((3, 4), "4", f"'4'{NO_INT}{WORLD_12}"),
        (
            (3, 4),
            6,
            "6 crosses a node in the middle: ranks 0-5 would be one group, but a node has 4 ranks"
            + WORLD_12,
        ),
        (
            (3, 4),
            3,
            "3 crosses a node in the middle: ranks 3-5 would be one group, but a node has 4 ranks"
            + WORLD_12,
        ),
        (
            (2, 3, 4),
            8,
            "8 crosses a rack in the middle: ranks 8-15 would be one group, but a rack has 12 ranks"
            + WORLD_24,
        ),
    ],
)
def test_refused_partition_sizes(sizes: tuple[int, ...], p: int, text: str) -> None:
    with pytest.raises(PlanError) as caught:
        plan_groups(Topology(sizes), p)
    assert str(caught.value) == f"partition_size={text}{FIX}"


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (
            (8, 3),
            "node_size=3 does not divide the world of 8 ranks\n  sizes that work: 1, 2, 4, 8\n"
            "  fix: pass one of these as node_size=",
        ),
        (
            (8, 2, 3),
            "nodes_per_rack=3 does not divide the 4 nodes\n  sizes that work: 1, 2, 4\n"
            "  fix: pass one of these as nodes_per_rack=",
        ),
        ((8, None, 2), f"node_size=None{NO_INT}"),
        ((8.0,), f"Topology: sizes[0]=8.0{NO_INT}"),
        ((0,), f"Topology: sizes[0]=0{NO_INT}"),
        ((8, True), f"node_size=True{NO_INT}"),
    ],
)
def test_refused_topologies_of_equal_nodes(args: tuple, text: str) -> None:
    with pytest.raises(PlanError) as caught:
        Topology.of(*args)
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("sizes", "names", "text"),
    [
        ((2, 0), (), f"Topology: sizes[1]=0{NO_INT}"),
        ((2.5, 2), (), f"Topology: sizes[0]=2.5{NO_INT}"),
        (
            (2, 2),
            ("node",),
            "Topology: names ('node',) do not name 2 sizes (2, 2)\n"
            "  fix: pass one distinct name per size, and not 'flat', or no names",
        ),
        (
            (2, 2),
            ("node", "node"),
            "Topology: names ('node', 'node') do not name 2 sizes (2, 2)\n"
            "  fix: pass one distinct name per size, and not 'flat', or no names",
        ),
        (
            (2, 2),
            ("flat", "rank"),
            "Topology: names ('flat', 'rank') do not name 2 sizes (2, 2)\n"
            "  fix: pass one distinct name per size, and not 'flat', or no names",
        ),
    ],
)
def test_refused_topologies(sizes: tuple, names: tuple[str, ...], text: str) -> None:
    with pytest.raises(PlanError) as caught:
        Topology(sizes, names)
    assert str(caught.value) == text


@pytest.mark.parametrize("position", [-1, 8])
def test_a_position_outside_the_world_is_refused(position: int) -> None:
    plan = plan_groups(Topology((2, 4)), 4)
    for ask in (plan.partition_group, plan.replication_group, plan.coords, plan.chunk):
        with pytest.raises(PlanError) as caught:
            ask(position)
        assert str(caught.value) == f"position {position} is outside the world of 8 ranks"

"""Process groups on real gloo ranks: members, sources of sizes, agreement, and their end."""

import time
from math import prod
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from test_meetings import launched
from torch.distributed.device_mesh import init_device_mesh

from mics_fn import _torch
from mics_fn.errors import GroupsError, PeerFailed, PlanError
from mics_fn.groups.communicator import Comm, Hooks, Watch, hooks
from mics_fn.groups.make import Groups, make_groups
from mics_fn.groups.topology import Topology, plan_groups
from mics_fn.shards import gather, reduce_grads, shard


def comms_of(groups: Groups) -> list[Comm]:
    levels = [level for h in (groups.hierarchy, groups.flat) for level in h.route.levels]
    return [c for level in levels for c in (level.gather, level.reduce)] + [
        groups.partition,
        groups.replicas,
    ]


def heard(comm: Comm) -> tuple[int, ...]:
    """Who is in a communicator, and in which order: by communicating over it."""
    if comm.size == 1:
        return comm.ranks
    mine = torch.tensor([dist.get_rank()])
    out = [torch.empty_like(mine) for _ in comm.ranks]
    dist.all_gather(out, mine, group=comm.process_group())
    return tuple(int(other) for other in out)


def look(
    kwargs: dict[str, Any],
    env: dict[str, str] | None = None,
    hosts: str = "",
    mesh: tuple[tuple[int, ...], tuple[str, ...], tuple[str, ...]] | None = None,
) -> dict[str, Any]:
    """Make groups, use every communicator, close; what this rank saw."""
    if mesh is not None:
        shape, names, part = mesh
        kwargs = kwargs | {"mesh": init_device_mesh("cpu", shape, mesh_dim_names=names)[part]}
    before = len(_torch.groups_named(None))
    with launched(env or {}, hosts), make_groups(timeout_s=20, **kwargs) as groups:
        for comm in comms_of(groups):
            assert heard(comm) == comm.ranks, comm
            assert comm.ranks[comm.rank] == groups.rank == dist.get_rank()
            assert comm.timeout_s == 20
        assert str(groups.device) == "cpu"
        route = groups.hierarchy.route
        seen = {
            "facts": groups.describe(),
            "ranks": groups.ranks,
            "levels": [level.gather.ranks for level in route.levels],
            "reduce": [level.reduce.ranks for level in route.levels],
            "names": [level.name for level in route.levels],
            "place": (route.sizes, route.coords, route.chunk),
            "flat": [level.gather.ranks for level in groups.flat.route.levels],
            "same": groups.flat is groups.hierarchy,
            "partition": groups.partition.ranks,
            "replicas": groups.replicas.ranks,
            "made": len(_torch.groups_named(None)) - before,
            "topology": str(groups.plan.topology),
        }
    assert len(_torch.groups_named(None)) == before
    return seen


LAYOUTS = [((1,), 1), ((1, 2), 2), ((2, 2), 1), ((2, 2), 4), ((2, 4), 4), ((2, 2, 2), 8)]


@pytest.mark.parametrize(("sizes", "p"), LAYOUTS)
def test_members_are_those_of_the_plan(ranks, sizes: tuple[int, ...], p: int):
    plan, n = plan_groups(Topology(sizes), p), prod(sizes)
    for rank, seen in enumerate(
        ranks(n).run(look, {"partition_size": p, "topology": plan.topology})
    ):
        members = [plan.level_group(rank, level) for level in range(len(plan.level_sizes))]
        assert seen["levels"] == seen["reduce"] == members
        assert seen["names"] == list(plan.level_names)
        assert seen["place"] == (plan.level_sizes, plan.coords(rank), plan.chunk(rank))
        assert seen["flat"] == ([plan.chunk_order(rank)] if p > 1 else [])
        assert seen["same"] == (len(members) < 2)
        assert seen["partition"] == plan.chunk_order(rank)
        assert seen["replicas"] == plan.replication_group(rank)
        # Gathers and reductions each, the flat pair where it is another, and hop 2 if it is one.
        flat = 2 if len(members) > 1 else 0
        assert seen["made"] == 2 * len(members) + flat + (p < n)


TWO = "LOCAL_WORLD_SIZE"


@pytest.mark.parametrize(
    ("kwargs", "env", "hosts", "topology", "p"),
    [
        ({}, {TWO: "2"}, "", "node 2 x rank 2", 2),
        ({}, {}, "aabb", "node 2 x rank 2", 2),
        ({}, {}, "aaaa", "node 1 x rank 4", 4),
        ({"node_size": 2, "partition_size": 4}, {TWO: "4"}, "", "node 2 x rank 2", 4),
    ],
    ids=str,
)
def test_node_sizes_come_from_what_is_given_or_found(ranks, kwargs, env, hosts, topology, p):
    for seen in ranks(4).run(look, kwargs, env, hosts):
        assert (seen["topology"], seen["facts"].split()[1]) == (topology, f"p={p}")


@pytest.mark.parametrize(
    ("kwargs", "shape", "names", "part", "partition", "replicas"),
    [
        ({"node_size": 2, "partition_size": 4}, (4,), ("dp",), ("dp",), (0, 2, 1, 3), (3,)),
        ({"node_size": 4}, (2, 2), ("r", "s"), ("r", "s"), (2, 3), (1, 3)),
        (
            {"ranks": [2, 3, 0, 1], "node_size": 2, "partition_size": 4},
            *[None] * 3,
            (2, 0, 3, 1),
            (3,),
        ),
        ({"partition_size": 4}, (4, 2), ("dp", "tp"), ("dp",), (1, 5, 3, 7), (3,)),
        ({}, (2, 2, 2), ("r", "s", "tp"), ("r", "s"), (1, 3), (3, 7)),
        ({}, (2, 4), ("pp", "dp"), ("dp",), (0, 1, 2, 3), (3,)),
    ],
    ids=str,
)
def test_a_mesh_or_ranks_in_an_order_of_their_own(
    ranks, kwargs: Any, shape: Any, names: Any, part: Any, partition: Any, replicas: Any
):
    """As rank 3 sees it; those of other dimensions, such as tensor parallelism, stay outside."""
    n, mesh = prod(shape or (4,)), shape and (shape, names, part)
    seen = ranks(n).run(look, kwargs, {"LOCAL_WORLD_SIZE": "4" if n == 8 else "2"}, "", mesh)[3]
    assert (seen["partition"], seen["replicas"]) == (partition, replicas)
    assert {*partition, *replicas} <= {*seen["ranks"]}


def side_by_side() -> list[tuple[int, ...]]:
    """Beside other people's groups, of some ranks; closed in another order than they were made."""
    mine = [2, 3] if dist.get_rank() > 1 else None
    extra: Any = mine and dist.new_group(mine, use_local_synchronization=True)
    first = make_groups(2, timeout_s=20)
    with make_groups(4, node_size=2, timeout_s=20) as other:
        seen = [heard(c) for c in (first.partition, other.partition, first.replicas)]
        first.close()
        with make_groups(2, timeout_s=20) as third:
            seen += [heard(third.partition), heard(other.partition)]
    if extra is not None:
        dist.destroy_process_group(extra)
    return seen


def test_groups_side_by_side(ranks):
    found = ranks(4).run(side_by_side)[3]
    assert found == [(2, 3), (0, 2, 1, 3), (1, 3), (2, 3), (0, 2, 1, 3)]


def one_makes(how: str) -> Any:
    """Rank 1 is late, or fails, in its last group, where the others have made all of theirs."""
    new_group, ended, timeout_s = _torch.new_group, [], 1 if how == "too late" else 20

    def last(*args: Any, **kwargs: Any) -> Any:
        assert kwargs["timeout_s"] > timeout_s, "torch, whose limit this is, names nobody"
        group = new_group(*args, **kwargs)
        if dist.get_rank() == 1 and kwargs["purpose"] == "mics_fn replicas":
            time.sleep(3 if how == "too late" else 0.3)
            if how == "fails":
                dist.destroy_process_group(group)
                raise RuntimeError("connection refused")
        ended.append(time.monotonic())
        return group

    before, text = len(_torch.groups_named(None)), ""
    with mock.patch.object(_torch, "new_group", last):
        try:
            make_groups(2, timeout_s=timeout_s).close()
        except (GroupsError, PeerFailed) as error:
            text = str(error)
    return text, ended[-1], time.monotonic(), len(_torch.groups_named(None)) - before


def test_no_rank_goes_on_before_all_have_their_groups(ranks):
    found = ranks(4).run(one_makes, "late")
    assert [text for text, *_ in found] == [""] * 4
    assert min(gone for _, _, gone, _ in found) >= max(ended for _, ended, _, _ in found)


@pytest.mark.parametrize("how", ["fails", "too late"])
def test_a_rank_that_does_not_get_its_groups_fails_all(ranks, how: str):
    what = own = "rank 1 did not make all groups within 1 s"
    if how == "fails":
        own = "rank 1 cannot make 'replicas' of ranks 1, 3"
    found = ranks(4).run(one_makes, how)
    assert found[1][0].startswith(f"make_groups: {own}\n")
    for text, *_ in (found[0], *found[2:]):
        cause, *waits, _ = text.split("\n")
        assert cause == f"rank 1 left its groups: GroupsError: make_groups: {own}"
        assert waits in ([], [f"  this rank waits for make_groups: {what}"])
    assert [left for *_, left in found] == [0] * 4
    least = min(gone - ended for _, ended, gone, _ in found[2:])
    assert least < (5 if how == "fails" else 2.5), "they hear of it, or wait no longer than allowed"


def test_a_world_of_one_without_distributed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    with make_groups() as groups:
        assert (groups.world_size, groups.partition_size, groups.num_replicas) == (1, 1, 1)
        assert groups.flat is groups.hierarchy
        with pytest.raises(GroupsError, match="'replicas' holds rank 0 alone"):
            groups.replicas.process_group()
    assert not dist.is_initialized()
    with pytest.raises(PlanError, match="partition_size=2 does not fit 1 ranks"):
        make_groups(2)


def without_faults() -> list[Any]:
    """What verbs give where nothing has filled the hooks of groups."""
    filled = vars(hooks).copy()
    vars(hooks).update(vars(Hooks()))
    try:
        with make_groups(2, timeout_s=20) as groups:
            shards = shard({"w": torch.arange(6.0)}, groups)
            grads = reduce_grads({"w": torch.ones(6)}, groups, like=shards)
            alone = type(groups.state.watch) is Watch
            return [gather(shards, groups)["w"].tolist(), gather(grads, groups)["w"].sum(), alone]
    finally:
        vars(hooks).update(filled)


def test_verbs_work_without_what_is_done_about_faults(ranks):
    for values, total, alone in ranks(2).run(without_faults):
        assert (values, float(total), alone) == ([*range(6)], 6.0, True)

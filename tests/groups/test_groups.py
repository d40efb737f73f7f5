"""Process groups on real gloo ranks: members, sources of sizes, agreement, and their end."""

import re
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from test_rendezvous import launched
from torch.distributed.device_mesh import init_device_mesh

from mics_fn import _torch
from mics_fn.errors import GroupsError, MicsError, PeerFailed, PlanError
from mics_fn.groups.communicator import Comm, Traffic
from mics_fn.groups.make import Groups, make_groups
from mics_fn.groups.topology import Topology, plan_groups
from mics_fn.lab.ranks.pool import RankPool, run_ranks

Pools = Callable[[int], RankPool]


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
    before = _torch.num_process_groups()
    with launched(env or {}, hosts), make_groups(timeout_s=20, **kwargs) as groups:
        for comm in comms_of(groups):
            assert heard(comm) == comm.ranks, comm
            assert comm.ranks[comm.rank] == groups.rank == dist.get_rank()
            assert comm.timeout_s == 20
        seen = {
            "facts": groups.describe(),
            "ranks": groups.ranks,
            "levels": [level.gather.ranks for level in groups.hierarchy.route.levels],
            "reduce": [level.reduce.ranks for level in groups.hierarchy.route.levels],
            "names": [level.name for level in groups.hierarchy.route.levels],
            "sizes": groups.hierarchy.route.sizes,
            "coords": groups.hierarchy.route.coords,
            "chunk": groups.hierarchy.route.chunk,
            "flat": [level.gather.ranks for level in groups.flat.route.levels],
            "same": groups.flat is groups.hierarchy,
            "partition": groups.partition.ranks,
            "replicas": groups.replicas.ranks,
            "device": str(groups.device),
            "made": _torch.num_process_groups() - before,
            "topology": str(groups.plan.topology),
        }
    assert _torch.num_process_groups() == before
    return seen


KINDS = ("gather", "reduce")
LAYOUTS = [
    (1, (1,), 1),
    (2, (2, 1), 1),
    (2, (1, 2), 2),
    (2, (2, 1), 2),
    (4, (2, 2), 1),
    (4, (2, 2), 2),
    (4, (2, 2), 4),
    (4, (4,), 4),
    (8, (2, 4), 4),
    (8, (2, 4), 8),
    (8, (2, 2, 2), 4),
    (8, (2, 2, 2), 8),
]


@pytest.mark.parametrize(("n", "sizes", "p"), LAYOUTS)
def test_members_are_those_of_the_plan(
    ranks: Pools, n: int, sizes: tuple[int, ...], p: int
) -> None:
    plan = plan_groups(Topology(sizes), p)
    for rank, seen in enumerate(
        ranks(n).run(look, {"partition_size": p, "topology": plan.topology})
    ):
        members = [plan.level_group(rank, level) for level in range(len(plan.level_sizes))]
        assert seen["levels"] == seen["reduce"] == members
        assert (seen["sizes"], seen["names"]) == (plan.level_sizes, list(plan.level_names))
        assert (seen["coords"], seen["chunk"]) == (plan.coords(rank), plan.chunk(rank))
        assert seen["flat"] == ([plan.chunk_order(rank)] if p > 1 else [])
        assert seen["same"] == (len(members) < 2)
        assert seen["partition"] == plan.chunk_order(rank)
        assert seen["replicas"] == plan.replication_group(rank)
        # Gathers and reductions each, the flat pair where it is another, two of hop 2 if it is one.
        flat = 2 if len(members) > 1 else 0
        assert seen["made"] == 2 * len(members) + flat + 2 * (p < n)


def made_groups(kwargs: dict[str, Any]) -> list[tuple[str, tuple[int, ...]]]:
    made, new_group = [], _torch.new_group

    def record(ranks: Any, **options: Any) -> Any:
        made.append((options["purpose"], tuple(ranks)))
        return new_group(ranks, **options)

    with mock.patch.object(_torch, "new_group", record):
        make_groups(timeout_s=20, **kwargs).close()
    return made


def test_a_rank_makes_its_own_groups_in_one_order(ranks: Pools) -> None:
    sixth = ranks(8).run(made_groups, {"partition_size": 4, "topology": Topology((2, 2, 2))})[6]
    assert sixth == [
        ("mics_fn gather node", (4, 6)),
        ("mics_fn reduce node", (4, 6)),
        ("mics_fn gather rank", (6, 7)),
        ("mics_fn reduce rank", (6, 7)),
        ("mics_fn reduce flat", (4, 6, 5, 7)),
        ("mics_fn replicas", (2, 6)),
        ("mics_fn replicas, second", (2, 6)),
    ]


def replica_of_hostile_names() -> list[Any]:
    """Groups whose levels are called as communicators are; and a replica's hop 2, alone."""
    topology = Topology((2, 2, 2), ("x", "replicas", "replicas, second"))
    with make_groups(4, topology=topology, timeout_s=20) as groups:
        second, alone = groups.replicas.second, groups.replica.replicas
        assert second is not None
        return [second.name, second.ranks, alone.size, alone.second, *groups.communicators]


def test_levels_may_have_the_names_of_communicators(ranks: Pools) -> None:
    kinds = [f"{kind} {name}" for name in ("replicas", "replicas, second") for kind in KINDS]
    want = ["replicas", (2, 6), 1, None, *kinds, "partition", "replicas"]
    assert ranks(8).run(replica_of_hostile_names)[6] == want


def test_groups_of_one_make_nothing(ranks: Pools) -> None:
    assert ranks(1).run(made_groups, {}) == [[]]
    assert ranks(2).run(made_groups_alone) == [[], []]
    only_hop_2 = [("mics_fn replicas", (0, 1)), ("mics_fn replicas, second", (0, 1))]
    assert ranks(2).run(made_groups, {"partition_size": 1}) == [only_hop_2, only_hop_2]


def made_groups_alone() -> list[tuple[str, tuple[int, ...]]]:
    return made_groups({"ranks": [dist.get_rank()]})


SLURM = [
    {"SLURM_NTASKS_PER_NODE": "2"},
    {"SLURM_TASKS_PER_NODE": "2(x2)"},
    {"SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_NTASKS_PER_NODE": "4"},
]


@pytest.mark.parametrize("env", [{"LOCAL_WORLD_SIZE": "2"}, *SLURM], ids=str)
def test_node_size_from_the_launcher(ranks: Pools, env: dict[str, str]) -> None:
    for seen in ranks(4).run(look, {}, env):
        assert (seen["topology"], seen["facts"]) == ("node 2 x rank 2", "n=4 p=2 levels=rank:2")


@pytest.mark.parametrize(
    ("hosts", "topology"), [("aabb", "node 2 x rank 2"), ("aaaa", "node 1 x rank 4")]
)
def test_node_size_from_hostnames(ranks: Pools, hosts: str, topology: str) -> None:
    for seen in ranks(4).run(look, {}, {}, hosts):
        assert seen["topology"] == topology


def test_given_sizes_go_before_what_is_found(ranks: Pools) -> None:
    env = {"LOCAL_WORLD_SIZE": "4"}
    for seen in ranks(4).run(look, {"node_size": 2, "partition_size": 4}, env):
        assert seen["facts"] == "n=4 p=4 levels=node:2,rank:2"
    for seen in ranks(4).run(look, {"node_size": 1, "nodes_per_rack": 2}, env):
        assert seen["topology"] == "rack 2 x node 2 x rank 1"


def test_a_whole_mesh(ranks: Pools) -> None:
    one = ranks(4).run(
        look, {"node_size": 2, "partition_size": 4}, {}, "", ((4,), ("dp",), ("dp",))
    )
    assert {seen["facts"] for seen in one} == {"n=4 p=4 levels=node:2,rank:2"}
    shape = ((2, 2), ("replicate", "shard"), ("replicate", "shard"))
    two = ranks(4).run(look, {"node_size": 4}, {}, "", shape)
    assert [seen["partition"] for seen in two] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert [seen["replicas"] for seen in two] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    assert {seen["device"] for seen in two} == {"cpu"}


def test_tensor_parallel_ranks_stay_outside(ranks: Pools) -> None:
    part = ((4, 2), ("dp", "tp"), ("dp",))
    results = ranks(8).run(look, {"partition_size": 4}, {"LOCAL_WORLD_SIZE": "4"}, "", part)
    for rank, seen in enumerate(results):
        assert seen["ranks"] == tuple(range(rank % 2, 8, 2))
        assert seen["topology"] == "node 2 x rank 2"
        assert seen["levels"] == [
            (rank % 4, rank % 4 + 4),
            (rank // 4 * 4 + rank % 2, rank // 4 * 4 + rank % 2 + 2),
        ]
        for name in ("partition", "replicas"):
            assert {other % 2 for other in seen[name]} == {rank % 2}


def test_two_data_parallel_dimensions_beside_a_tensor_parallel_one(ranks: Pools) -> None:
    part = ((2, 2, 2), ("replicate", "shard", "tp"), ("replicate", "shard"))
    for rank, seen in enumerate(ranks(8).run(look, {}, {"LOCAL_WORLD_SIZE": "8"}, "", part)):
        assert seen["partition"] == (rank // 4 * 4 + rank % 2, rank // 4 * 4 + rank % 2 + 2)
        assert seen["replicas"] == (rank % 4, rank % 4 + 4)


def test_pipeline_stages_as_the_outer_dimension(ranks: Pools) -> None:
    part = ((2, 4), ("pp", "dp"), ("dp",))
    for rank, seen in enumerate(ranks(8).run(look, {}, {"LOCAL_WORLD_SIZE": "4"}, "", part)):
        assert seen["partition"] == tuple(range(rank // 4 * 4, rank // 4 * 4 + 4))


def mesh_of_three() -> str:
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("a", "b", "c"))
    with pytest.raises(PlanError) as caught:
        make_groups(mesh=mesh, timeout_s=20)
    return str(caught.value)


def test_a_mesh_of_three_dimensions_needs_a_size(ranks: Pools) -> None:
    assert set(ranks(4).run(mesh_of_three)) == {
        "make_groups: no shard dimension in a mesh of 3 dimensions ('a', 'b', 'c')\n"
        "  fix: pass partition_size=, or a 2-D part such as mesh['replicate', 'shard']"
    }


def test_explicit_ranks_in_their_own_order(ranks: Pools) -> None:
    kwargs = {"ranks": [2, 3, 0, 1], "node_size": 2, "partition_size": 4}
    for rank, seen in enumerate(ranks(4).run(look, kwargs)):
        assert seen["partition"] == (2, 0, 3, 1)
        assert seen["levels"][1] == ((2, 3) if rank > 1 else (0, 1))


def make_and_close(times: int) -> int:
    for _ in range(times):
        with make_groups(2, node_size=1, timeout_s=20) as groups:
            for comm in comms_of(groups):
                assert heard(comm) == comm.ranks
    return _torch.num_process_groups()


def test_groups_can_be_made_and_closed_many_times(ranks: Pools) -> None:
    assert len(set(ranks(2).run(make_and_close, 12))) == 1


def two_at_a_time() -> list[tuple[int, ...]]:
    with make_groups(2, timeout_s=20) as one, make_groups(4, node_size=2, timeout_s=20) as other:
        return [heard(c) for c in (one.partition, other.partition, one.replicas)]


def test_two_groups_side_by_side(ranks: Pools) -> None:
    assert ranks(4).run(two_at_a_time)[3] == [(2, 3), (0, 2, 1, 3), (1, 3)]


def closed_in_another_order(partition_size: int) -> list[tuple[int, ...]]:
    def made() -> Groups:
        return make_groups(partition_size, node_size=1, timeout_s=20)

    first, second = made(), made()
    first.close()
    with second, made() as third:
        return [heard(third.partition), heard(second.replicas)]


def test_groups_may_be_closed_before_later_ones(ranks: Pools) -> None:
    assert ranks(2).run(closed_in_another_order, 2) == [[(0, 1), (rank,)] for rank in range(2)]


def after_a_group_of_some() -> Any:
    mine = [2, 3] if dist.get_rank() > 1 else None
    extra: Any = mine and dist.new_group(mine, use_local_synchronization=True)
    with make_groups(2, node_size=2, timeout_s=20) as groups:
        seen = [heard(groups.partition), heard(groups.replicas)]
    if extra is not None:
        dist.destroy_process_group(extra)
    return seen


def test_ranks_may_have_made_other_groups_before(ranks: Pools) -> None:
    assert ranks(4).run(after_a_group_of_some)[3] == [(2, 3), (1, 3)]


def fail_at(number: int) -> Any:
    new_group, calls = _torch.new_group, []

    def fail(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) == number:
            raise RuntimeError("connection refused\nmore")
        return new_group(*args, **kwargs)

    before = _torch.num_process_groups()
    with mock.patch.object(_torch, "new_group", fail), pytest.raises(MicsError) as caught:
        make_groups(2, timeout_s=20)
    return str(caught.value), _torch.num_process_groups() - before, len(calls)


def test_a_failure_halfway_leaves_no_group_behind(ranks: Pools) -> None:
    text = (
        "make_groups: rank 2 cannot make 'replicas' of ranks 0, 2\n"
        "  connection refused\n"
        "  fix: look at these ranks' own errors, then call make_groups again on all"
    )
    found = ranks(4).run(fail_at, 3)
    assert {(left, calls) for _, left, calls in found} == {(0, 3)}
    for rank, (said, _, _) in enumerate(found):  # its own error, or that of a rank before it
        own = text.replace("rank 2", f"rank {rank}").replace("0, 2", "1, 3" if rank % 2 else "0, 2")
        other = r"rank (\d) left its groups: GroupsError: make_groups: rank \1 cannot make"
        assert said == own or re.match(other, said), said


def one_makes(how: str) -> Any:
    """Rank 1 is late, or fails, in its last group, where the others have made all of theirs."""
    new_group, ended = _torch.new_group, []

    def last(*args: Any, **kwargs: Any) -> Any:
        group = new_group(*args, **kwargs)
        if dist.get_rank() == 1 and kwargs["purpose"] == "mics_fn replicas, second":
            time.sleep(3 if how == "too late" else 0.3)
            if how == "fails":
                dist.destroy_process_group(group)
                raise RuntimeError("connection refused")
        ended.append(time.monotonic())
        return group

    before, text = _torch.num_process_groups(), ""
    with mock.patch.object(_torch, "new_group", last):
        try:
            make_groups(2, timeout_s=1 if how == "too late" else 20).close()
        except (GroupsError, PeerFailed) as error:
            text = str(error)
    return text, ended[-1], time.monotonic(), _torch.num_process_groups() - before


def test_no_rank_goes_on_before_all_have_their_groups(ranks: Pools) -> None:
    found = ranks(4).run(one_makes, "late")
    assert [text for text, *_ in found] == [""] * 4
    assert min(gone for _, _, gone, _ in found) >= max(ended for _, ended, _, _ in found)


@pytest.mark.parametrize("how", ["fails", "too late"])
def test_a_rank_that_does_not_get_its_groups_fails_all(ranks: Pools, how: str) -> None:
    fix = "  fix: look at these ranks' own errors, then call make_groups again on all"
    what = {
        "fails": "rank 1 could not make its groups",
        "too late": "rank 1 did not make all groups within 1 s",
    }[how]
    own = what
    if how == "fails":
        own = "rank 1 cannot make 'replicas, second' of ranks 1, 3\n  connection refused"
    found = ranks(4).run(one_makes, how)
    assert found[1][0] == f"make_groups: {own}\n{fix}"
    for text, *_ in (found[0], *found[2:]):
        cause, waits, _ = text.split("\n")
        assert cause == f"rank 1 left its groups: GroupsError: make_groups: {own}".split("\n")[0]
        assert waits == f"  this rank waits for make_groups: {what}"
    assert [left for *_, left in found] == [0] * 4
    least = min(gone - ended for _, ended, gone, _ in found[2:])
    assert least < (5 if how == "fails" else 2.5), "they hear of it, or wait no longer than allowed"


def use_after_close() -> list[str]:
    groups = make_groups(2, node_size=2, ranks=[0, 1], timeout_s=20)
    assert groups.replicas.size == 1
    assert not groups.closed
    groups.close()
    groups.close()
    assert groups.closed
    assert groups.hierarchy.closed
    texts = []
    for comm in (groups.hierarchy.route.levels[0].gather, groups.partition, groups.replicas):
        with pytest.raises(GroupsError) as caught:
            comm.process_group()
        texts.append(str(caught.value))
    return [*texts, repr(groups)]


def test_groups_used_after_close(ranks: Pools) -> None:
    fix = "\n  fix: keep them open, or call make_groups again"
    assert ranks(2).run(use_after_close)[1] == [
        f"'gather rank' of ranks 0, 1 is used after its groups were closed{fix}",
        f"'partition' of ranks 0, 1 is used after its groups were closed{fix}",
        f"'replicas' of ranks 1 is used after its groups were closed{fix}",
        "Groups(n=2 p=2 levels=rank:2, rank 1, cpu, closed)",
    ]


def use_after_shutdown() -> str:
    groups = make_groups(timeout_s=20)
    dist.destroy_process_group()
    with pytest.raises(GroupsError) as caught:
        groups.partition.process_group()
    groups.close()
    return str(caught.value)


def test_groups_used_after_shutdown() -> None:
    assert run_ranks(use_after_shutdown, 2)[0] == (
        "'partition' is used after torch.distributed was shut down\n"
        "  fix: close the groups before destroy_process_group(), make new ones after init"
    )


def printed() -> tuple[str, str]:
    with make_groups(4, topology=Topology((2, 2, 2)), timeout_s=20) as groups:
        return repr(groups), str(groups)


def test_groups_print_readably(ranks: Pools) -> None:
    assert ranks(8).run(printed)[5] == (
        "Groups(n=8 p=4 levels=node:2,rank:2, rank 5, cpu)",
        "n = 8 in 2 partition groups of p = 4, on cpu\n"
        "  this is rank 5, which keeps chunk 2 of 4\n"
        "  partition group: 4-7; levels outermost first:\n"
        "    node 2: 5, 7\n"
        "    rank 2: 4, 5\n"
        "  replication group: 1, 5",
    )


def test_a_world_of_one_without_distributed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    with make_groups() as groups:
        assert (groups.world_size, groups.partition_size, groups.num_replicas) == (1, 1, 1)
        assert groups.hierarchy.route.levels == ()
        assert groups.flat is groups.hierarchy
        assert (groups.hierarchy.route.size, groups.hierarchy.route.chunk) == (1, 0)
        assert repr(groups.hierarchy) == "Hierarchy(one rank, chunk 0 of 1)"
        assert groups.device == torch.get_default_device()
        assert groups.partition.group is groups.replicas.group is None
        with pytest.raises(GroupsError, match="'replicas' holds rank 0 alone"):
            groups.replicas.process_group()
    assert not dist.is_initialized()
    with pytest.raises(PlanError, match="partition_size=2 does not divide the world of 1 ranks"):
        make_groups(2)


def limits_of_torch() -> list[float]:
    seen: list[float] = []
    new_group = _torch.new_group

    def noted(*args: Any, timeout_s: float, **options: Any) -> Any:
        seen.append(timeout_s)
        return new_group(*args, timeout_s=timeout_s, **options)

    with mock.patch.object(_torch, "new_group", noted), make_groups(2, timeout_s=30):
        return seen


def test_waits_of_ranks_end_before_those_of_torch_which_name_nobody(ranks: Pools):
    for seen in ranks(4).run(limits_of_torch):
        assert seen
        assert min(seen) > 30


def test_traffic_is_a_ledger() -> None:
    traffic = Traffic()
    assert str(traffic) == "nothing sent"
    traffic.add("gather rank", 1000)
    traffic.add("gather rank", 24)
    traffic.add("replicas", 0)
    before = traffic.snapshot()
    assert before == {"gather rank": (2, 1024), "replicas": (1, 0)}
    assert (
        str(traffic) == "gather rank: 1,024 bytes sent in 2 calls\nreplicas: 0 bytes sent in 1 call"
    )
    traffic.clear()
    assert (traffic.snapshot(), len(before)) == ({}, 2)

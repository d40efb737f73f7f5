"""`make_groups`: create the process groups of this rank.

Which ranks form a group is arithmetic, in `topology.py`. Creating the groups is an effect, and it
hangs if ranks differ, so they first compare their arguments, in `startup.py`.
"""

import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from mics_fn import _torch, checks, errors, spans
from mics_fn.groups import startup
from mics_fn.groups.communicator import GroupState, Maker, check_fork, hooks, withdraw_all
from mics_fn.groups.groups import Groups, Hierarchy, Level, Route
from mics_fn.groups.topology import FLAT, Plan, Topology, check_count, plan_groups
from mics_fn.store import Channel


@dataclass(frozen=True)
class Recipe:
    """What makes groups once more for another life; it refers to nothing of those before."""

    maker: Maker
    create: Callable[[Maker], Groups]
    first: str  # the key of the first of all these groups, which a rank that comes back also knows


def make_groups(
    partition_size: int | None = None,
    *,
    node_size: int | None = None,
    nodes_per_rack: int | None = None,
    topology: Topology | None = None,
    mesh: DeviceMesh | None = None,
    ranks: Sequence[int] | None = None,
    device: str | torch.device | None = None,
    backend: str | None = None,
    timeout_s: float = 600.0,
    heartbeat_s: float | None = None,
    mean_over: int | None = None,
    whole: bool = False,
) -> Groups:
    """Create the process groups of this rank. All ranks of the job call it with equal arguments.

    A process without torch.distributed is a world of one rank. One that takes the place of a lost
    rank waits for nobody, and gets groups that move no data until `reset`.

    Args:
      partition_size: number of ranks that share one replica. None takes the last dimension of a 2-D
        `mesh` (replicate, shard), else the number of the job's ranks on one node.
      node_size: number of ranks of the world on one node. None takes it from LOCAL_WORLD_SIZE
        (torchrun), else it counts equal host names.
      nodes_per_rack: number of the job's nodes in one rack, if racks matter.
      topology: how the job's ranks are wired, instead of `node_size` and `nodes_per_rack`.
      mesh: a `DeviceMesh`, or its data-parallel part: `mesh["dp"]`, `mesh["replicate", "shard"]`.
        The groups cover its ranks only, and never those of tensor or pipeline parallelism.
      ranks: global ranks of the job by position, instead of `mesh`; None takes all.
      device: where tensors live. None takes that of `mesh`, else the current accelerator if the
        default group has its backend, else the CPU; in a world of one, torch's default device.
      backend: of the new groups; None takes that of the default group for `device`.
      timeout_s: bound in seconds of this call, and later of every wait on these groups: on the CPU
        the host raises after it; on accelerators it is the limit of the backend's watchdog, which
        ends the process. The slowest rank may load data or write files for that long.
      heartbeat_s: a rank that gives no sign of life for so many seconds has failed, and the others
        raise PeerFailed; at least 0.75, twice that beyond 128 ranks, and more beyond 128 hosts.
        None takes 10 where a person is at a prompt, else 60, or more beyond 5,000 hosts. A rank may
        hold its interpreter for almost as long, as some loaders and compilers do. Below 15 names of
        hosts must be found fast: the store of torch looks for that of each rank that connects.
      mean_over: number of ranks that gradients are averaged over; None takes those of these groups.
        Expert leaves live on fewer ranks than there are losses: their gradient on a rank is a sum
        over tokens that other ranks sent, while the loss is a mean over all data-parallel ranks.
        Pass the number of the latter for them. Parameters and buffers are still averaged over the
        ranks of the groups.
      whole: whether ranks outside `mesh` or `ranks` hold no part of this model, as in a separate
        job. By default they are taken for ranks of tensor, pipeline or expert parallelism, and what
        needs the norm of the whole gradient refuses these groups.

    Returns:
      Frozen `Groups`, which a `with` block closes at its end.

    Communication: a few small messages through the store of torch.distributed, and while the groups
      are open two more each quarter of a second, by a thread. On an accelerator a barrier on each
      communicator, which connects its ranks; only the gathers of `Groups.flat` are connected at
      their first use, by all ranks of a partition group. If the default group is bound to a device
      (`device_id=`), NCCL splits it: then all ranks of the world must make their groups at the same
      time, and use `flat` for the first time together.

    Memory: the buffers of NCCL, for each communicator.

    Raises:
      PlanError: sizes do not fit together; the text lists sizes that would.
      DesyncError: ranks disagree on an argument or on what they found; names ranks and values.
      GroupsError: torch.distributed is not initialised, some rank cannot create a group, or several
        ranks use one accelerator without gloo, and with the same NCCL_HOSTID or none.
      CollectiveError: some rank of the job did not call it in time.
      PeerFailed: a rank of the job failed meanwhile, or the rank that holds the store.

    Example:
      >>> with make_groups() as groups:
      ...     groups
      Groups(n=1 p=1 levels=none, rank 0, cpu)

    References: MiCS, Zhang et al., VLDB 2022, arXiv:2205.00119.
    """
    check_fork("make_groups")
    checks.number("make_groups", "timeout_s", timeout_s, above=0, below=1e8)
    started = startup.require_distributed()
    if spans.observers:
        spans.passing("start: make_groups")
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if started else (0, 1)
    universe = startup.universe_of(ranks, mesh, rank, world_size)
    if mesh is not None and partition_size is None:
        partition_size = _shard_dim(mesh)
    chosen, served_by = startup.device_and_backend(device, mesh, backend)
    startup.own_failures(served_by, begun=started and "nccl" in dist.get_backend_config())
    state = GroupState(universe, rank, whole=whole or len(universe) == world_size)
    state.on_device, state.timeout_s = _torch.is_async(chosen), timeout_s
    state.heartbeat_s = hooks.limit_s(heartbeat_s, len(universe))
    node = _node_of(rank, node_size, topology)
    facts = {"partition_size": partition_size, "node_size": node_size, "topology": topology}
    facts |= {"nodes_per_rack": nodes_per_rack, "device": chosen.type, "backend": served_by}
    facts |= {"timeout_s": float(timeout_s), "heartbeat_s": heartbeat_s and float(heartbeat_s)}
    facts |= {"mean_over": mean_over, "whole": whole}
    if node_size is None and topology is None:
        facts["node_size"] = f"found by {node.partition(' ')[0]}"
    store, found, deadline = None, 1, time.monotonic() + timeout_s
    try:
        before = hooks.agreed_before(universe, rank, timeout_s)
        if before is not None:
            state.key, found, state.rejoining = before.key, before.verdict, True
        elif len(universe) > 1:
            store = hooks.join(state, timeout_s)
            spot = startup.spot_of(chosen, alone=served_by != "gloo")
            mine = [{name: str(value) for name, value in facts.items()}, node, spot]
            wait = {"timeout_s": timeout_s, "check": partial(state.watch.check, ())}
            wait |= {"verb": "make_groups"}
            judge = partial(startup.judged, "make_groups")
            meeting = startup.meet(store, universe, rank, mine, judge, **wait)
            state.watch.begin(meeting)
            found = meeting.verdict
        if mean_over is not None:
            check_count(mean_over, "make_groups: mean_over")
        wired = _topology_of(topology, len(universe), found, node_size, nodes_per_rack)
        plan = plan_groups(wired, wired.sizes[-1] if partition_size is None else partition_size)
        maker = Maker(universe, rank, served_by, timeout_s, deadline, store, state=state)
        return _create(plan, maker, chosen, mean_over)
    except BaseException:
        state.watch.close()
        raise


def _shard_dim(mesh: DeviceMesh) -> int | None:
    """The partition size that a mesh implies, by the (replicate, shard) convention."""
    if mesh.ndim > 2:
        names = mesh.mesh_dim_names
        what = f"make_groups: no shard dimension in a mesh of {mesh.ndim} dimensions {names}"
        fix = "pass partition_size=, or a 2-D part such as mesh['replicate', 'shard']"
        raise errors.PlanError(what, fix=fix)
    return mesh.size(1) if mesh.ndim == 2 else None


def _topology_of(
    topology: Topology | None,
    num_ranks: int,
    found: int,
    node_size: int | None,
    nodes_per_rack: int | None,
) -> Topology:
    """How the job's ranks are wired; all ranks were given the same."""
    if topology is None:
        return Topology.of(num_ranks, found, nodes_per_rack)
    if node_size is not None or nodes_per_rack is not None:
        fix = "pass topology= alone, or node_size= and nodes_per_rack="
        raise errors.PlanError("make_groups: topology= and node sizes are both given", fix=fix)
    if topology.world_size != num_ranks:
        what = f"topology {topology} has {topology.world_size} ranks, the job has {num_ranks}"
        fix = "give sizes whose product is the number of ranks"
        raise errors.PlanError(f"make_groups: {what}", fix=fix)
    return topology


def _node_of(rank: int, node_size: int | None, topology: Topology | None) -> str:
    """The node of this rank: by the argument, by the launcher's variable, or by its host name."""
    if topology is not None:
        return "one of topology="
    if node_size is not None:
        check_count(node_size, "make_groups: node_size")
        return f"node_size={node_size} {rank // node_size}"
    size = os.environ.get("LOCAL_WORLD_SIZE")
    if size is not None:
        return f"LOCAL_WORLD_SIZE={size} {rank // int(size)}"
    return f"hostnames {socket.gethostname()}"


def _create(plan: Plan, maker: Maker, device: torch.device, mean_over: int | None) -> Groups:
    """Create the groups that this rank is a member of, in the same order on every rank."""
    position = maker.ranks.index(maker.rank)
    coords, chunk, order = plan.coords(position), plan.chunk(position), plan.chunk_order(position)
    state = maker.state
    fresh = replace(maker, state=state.fresh(), store=None, channel=Channel())
    state.recipe = Recipe(fresh, lambda made: _create(plan, made, device, mean_over), state.key)
    channel = _channel(maker, tuple(maker.ranks[at] for at in order))
    maker = replace(maker, channel=channel)
    with maker.together():
        levels = tuple(
            _level(maker, name, plan.level_group(position, i))
            for i, name in enumerate(plan.level_names)
        )
        one_level = levels
        if len(levels) > 1:
            flat_level = _level(maker, FLAT, order, lazy=True)
            one_level = (replace(flat_level, reach=levels[0].name),)
        partition = maker.comm("partition", order) if len(order) == 1 else one_level[0].reduce
        partition = replace(partition, name="partition")  # in the ledger
        rows = plan.replication_group(position)
        replicas, second = maker.comm("replicas", rows), maker.comm("replicas, second", rows)
    factor = 1.0 if mean_over is None else len(maker.ranks) / mean_over
    more = {"grad_factor": factor, "names": plan.topology.names}
    route = Route(levels, coords, chunk, **more)
    if _torch.is_async(device) and not state.rejoining:
        flat_reduce = [] if one_level is levels else [partition]
        maker.warm_up([*route.comms, *flat_reduce, replicas, second], device)
    replicas = replace(replicas, second=replace(second, name="replicas"))  # in the ledger
    hierarchy = flat = Hierarchy(route, device, partition, channel)
    if one_level is not levels:
        route = Route(one_level, (chunk,), chunk, **more)
        flat = Hierarchy(route, device, partition, channel)
    return Groups(
        plan=plan,
        ranks=maker.ranks,
        rank=maker.rank,
        position=position,
        hierarchy=hierarchy,
        flat=flat,
        partition=partition,
        replicas=replicas,
        device=device,
        timeout_s=maker.timeout_s,
        traffic=maker.traffic,
        state=state,
        mean_over=mean_over,
    )


def _level(maker: Maker, name: str, positions: Sequence[int], *, lazy: bool = False) -> Level:
    """A level over these positions, ordered by coordinate; `lazy` is for gathers."""
    gather = maker.comm(f"gather {name}", positions, lazy=lazy)
    return Level(name, gather, maker.comm(f"reduce {name}", positions))


def _channel(maker: Maker, ranks: tuple[int, ...]) -> Channel:
    """The channel of a partition group, which every wait for a collective consults."""
    state, make = maker.state, Channel if maker.store is None else Channel.of_several
    facts = state.key, ranks, maker.rank, maker.timeout_s, len(maker.ranks)
    channel: Any = make(maker.store, *facts)
    state.channel = channel
    channel.check, channel.timeout_error = state.watch.check, state.watch.timeout_error
    channel.fail, channel.explain = state.fail, state.watch.explained
    channel.withdraw = partial(withdraw_all, state)
    return channel

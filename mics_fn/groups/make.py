"""`make_groups`: create the process groups of this rank.

Which ranks form a group is arithmetic, in `topology.py`. Creating the groups is an effect, and it
hangs if ranks differ, so they first compare their arguments, in `rendezvous.py`.
"""

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from mics_fn import _device, checks, errors, spans
from mics_fn.groups import distributed
from mics_fn.groups.communicator import Maker
from mics_fn.groups.environment import node_of
from mics_fn.groups.group_state import GroupState, check_fork, hooks, withdraw_all
from mics_fn.groups.groups import Groups, Hierarchy, Level, Route
from mics_fn.groups.rendezvous import meet_once
from mics_fn.groups.topology import FLAT, Plan, Topology, plan_groups
from mics_fn.schedules import Channel


@dataclass(frozen=True)
class Recipe:
    """What makes groups once more for another life; it refers to nothing of those before."""

    maker: Maker
    create: Callable[[Maker], Groups]
    first: str  # the key of the first of all these groups, which a rank that comes back also knows


# What ranks tell each other before they make groups, and what must be equal or distinct there.


class Location(NamedTuple):
    """The node that a rank runs on."""

    node: str  # equal on ranks that share a node
    source: str  # what `node` follows from, for errors
    host: str  # empty if the user defines what a node is


def judged(found: Mapping[int, Any]) -> int:
    """Check the facts, the location and the device of each rank; return the size of a node.

    Raises:
      DesyncError: facts differ; the text has the values and who has them.
      GroupsError: several ranks use one device.
      PlanError: nodes hold unequal numbers of ranks, or ranks of a node are not next to each other.
    """
    facts, locations, spots = {}, {}, {}
    for rank, (mine, location, spot) in found.items():
        facts[rank], locations[rank] = mine, Location(*location)
        spots[rank] = distributed.Spot(*spot)
    _compare(facts)
    distributed.check_distinct("make_groups", spots)
    return node_size_of(locations)


def _compare(found: Mapping[int, Mapping[str, str]]) -> None:
    """Raise DesyncError if a fact differs between ranks."""
    names, lines = [], []
    for name in next(iter(found.values())):
        values = {rank: facts[name] for rank, facts in found.items()}
        if len(set(values.values())) > 1:
            holders = errors.by_value(values)
            texts = [f"{value} on {errors.name_ranks(ranks)}" for value, ranks in holders]
            names.append(name)
            lines.append(f"{name}: {'; '.join(texts)}")
    if names:
        what = f"make_groups: ranks disagree on {', '.join(names)}"
        fix = f"pass the same {'=, '.join(names)}= on every rank"
        found_by = "launch all ranks in the same way, or " if "node_size" in names else ""
        raise errors.DesyncError(what, lines, found_by + fix)


def node_size_of(locations: Mapping[int, Location]) -> int:
    """The number of these ranks on each node.

    Raises:
      PlanError: nodes hold unequal numbers of ranks, or ranks of a node are not next to each other.

    >>> node_size_of({rank: Location(str(rank // 2), "node_size=2", "") for rank in range(4)})
    2
    """
    nodes: dict[str, list[int]] = {}
    hosts: dict[str, set[str]] = {}
    last = None
    for rank, (node, source, host) in locations.items():
        if node in nodes and node != last:
            lines = [f"one node, by {source}: {errors.name_ranks([*nodes[node], rank])}"]
            fix = "order ranks= by node, or pass node_size= or topology="
            raise errors.PlanError(
                "make_groups: ranks of one node are not next to each other", lines, fix
            )
        nodes.setdefault(node, []).append(rank)
        hosts.setdefault(node, set()).add(host)
        last = node
    source = next(iter(locations.values())).source
    for node, names in hosts.items():
        if len(names) > 1:
            what = f"make_groups: {source} puts {errors.name_ranks(nodes[node])} on one node"
            fix = "start ranks node by node (Slurm: --distribution=block), or pass node_size="
            raise errors.PlanError(what, [f"but they run on {', '.join(sorted(names))}"], fix)
    if len(set(map(len, nodes.values()))) > 1:
        what = f"make_groups: nodes hold different numbers of these ranks, by {source}"
        lines = [
            f"{len(ranks)} on one node: {errors.name_ranks(ranks)}" for ranks in nodes.values()
        ]
        fix = "use equally many ranks of every node, or pass node_size= or topology="
        raise errors.PlanError(what, (lines if len(lines) <= 8 else [*lines[:8], "..."]), fix)
    return len(nodes[last or ""])


@checks.named_options("make_groups")
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
        (torchrun) or Slurm's tasks per node, else it counts equal host names.
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
    started = distributed.require_distributed()
    if spans.observers:
        spans.passing("start: make_groups")
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if started else (0, 1)
    universe = distributed.universe_of(ranks, mesh, rank, world_size)
    if mesh is not None and partition_size is None:
        partition_size = _shard_dim(mesh)
    chosen, served_by = distributed.device_and_backend(device, mesh, backend)
    distributed.own_failures(served_by, begun=started and "nccl" in dist.get_backend_config())
    given = {"partition_size": partition_size, "node_size": node_size, "topology": topology}
    given |= {"nodes_per_rack": nodes_per_rack, "device": chosen.type, "backend": served_by}
    given |= {"timeout_s": timeout_s, "heartbeat_s": heartbeat_s, "mean_over": mean_over}
    given["whole"] = whole
    problem = _problem(given, len(universe), world_size)
    here = _location(rank, None if problem else node_size, known=bool(problem or topology))
    state = GroupState(universe, rank, whole=whole or len(universe) == world_size)
    state.on_device, state.timeout_s = _device.is_async(chosen), 600.0 if problem else timeout_s
    state.heartbeat_s = 60.0 if problem else hooks.limit_s(heartbeat_s, len(universe))
    store, found, deadline = None, 1, time.monotonic() + state.timeout_s
    try:
        before = hooks.agreed_before(universe, rank, timeout_s) if problem is None else None
        if before is not None:
            state.key, found, state.rejoining = before.key, before.verdict, True
        elif len(universe) > 1:
            store = hooks.join(state, state.timeout_s)
            spot = distributed.spot_of(chosen, alone=served_by != "gloo")
            wait = {"timeout_s": state.timeout_s, "check": partial(state.watch.check, ())}
            mine = [_facts(given, here), here, spot]
            meeting = meet_once(store, universe, rank, mine, judged, verb="make_groups", **wait)
            state.watch.begin(meeting)
            found = meeting.verdict
        if problem is not None:  # raised only now, so that ranks with other arguments raise as well
            raise problem
        wired = topology or Topology.of(len(universe), found, nodes_per_rack)
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


def _check_limits(timeout_s: Any, heartbeat_s: Any) -> None:
    """Raise PlanError unless these are seconds above 0."""
    given = {"timeout_s": timeout_s} | ({} if heartbeat_s is None else {"heartbeat_s": heartbeat_s})
    for name, limit in given.items():
        if not isinstance(limit, int | float) or limit is True or not 0 < limit < 1e8:
            text = f"{name}={limit!r} is not a time limit"
            raise errors.PlanError(text, fix="pass seconds above 0")


def _problem(given: Mapping[str, Any], num_ranks: int, world_size: int) -> errors.PlanError | None:
    """What is wrong with the arguments, in words that are equal for equal arguments."""
    mean_over, topology, node_size = given["mean_over"], given["topology"], given["node_size"]
    try:
        _check_limits(given["timeout_s"], given["heartbeat_s"])
        hooks.limit_s(given["heartbeat_s"], num_ranks)
        if mean_over is not None and (type(mean_over) is not int or mean_over < 1):
            fix = "pass the number of data-parallel ranks whose losses are averaged"
            raise errors.PlanError(f"mean_over={mean_over!r} is not a positive int", fix=fix)
        if not isinstance(topology, Topology | None):
            what, fix = checks.given("topology", topology), "pass Topology((2, 8)) or the like"
            raise errors.PlanError(f"{what}, expected a Topology", fix=fix)
        if topology is None:
            if node_size is not None:
                Topology.of(world_size, node_size)
        elif node_size is not None or given["nodes_per_rack"] is not None:
            fix = "pass topology= alone, or node_size= and nodes_per_rack="
            raise errors.PlanError("topology= and node sizes are both given", fix=fix)
        elif topology.world_size != num_ranks:
            what = f"topology {topology} has {topology.world_size} ranks, the job has {num_ranks}"
            raise errors.PlanError(what, fix="give sizes whose product is the number of ranks")
    except errors.PlanError as error:
        return errors.PlanError(f"make_groups: {error}")
    return None


def _location(rank: int, node_size: int | None, *, known: bool) -> Location:
    """The node of this rank, by `node_size`, by the launcher's variables, or by its host name."""
    if known:
        return Location("", "topology=", "")
    if node_size is not None:
        return Location(str(rank // node_size), f"node_size={node_size}", "")
    host = socket.gethostname()
    node, source = node_of(os.environ, rank) or (host, "hostnames")
    return Location(str(node), source, host)


def _facts(given: Mapping[str, Any], here: Location) -> dict[str, str]:
    """What ranks must agree on, by the name of the argument."""
    facts = {}
    for name, value in given.items():
        seconds = float(value) if isinstance(value, int) and name.endswith("_s") else value
        facts[name] = str(seconds)
    if here.host:
        facts["node_size"] = f"found by {here.source}"
    return facts


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
    if _device.is_async(device) and not state.rejoining:
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

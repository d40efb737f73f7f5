"""`make_groups`: create the process groups of this rank.

Which ranks form a group is arithmetic, in `topology.py`. Creating the groups is an effect, and it
hangs if ranks differ, so they first compare their arguments, in `startup.py`.
"""

import os
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from mics_fn import _torch, checks, spans
from mics_fn.errors import GroupsError, PeerFailed, PlanError, first_line, name_ranks
from mics_fn.groups import startup
from mics_fn.groups.bounded_group import bound_group
from mics_fn.groups.communicator import SECOND, Comm, GroupState, check_fork, hooks
from mics_fn.groups.groups import Groups, Hierarchy, Level, Model, Route, no_cut
from mics_fn.groups.topology import FLAT, Plan, Topology, plan_groups
from mics_fn.store import Channel, poll
from mics_fn.threads import bounded

_APART = ("mesh", "ranks")  # arguments that ranks compare by what follows from them
Rule = Callable[[str], int | None]


class Parts(NamedTuple):
    """How the ranks of a job hold a model in parts.

    Args:
      dp_ranks: the data-parallel ranks of each part, in the order of parts, stage by stage.
      count: number of parts.
      cut: the dim along which a leaf is cut, from its path.
      mesh_names: names of torch's groups along the parts, and along the stages; "" for none.
    """

    dp_ranks: tuple[tuple[int, ...], ...]
    count: int
    cut: Rule
    mesh_names: Sequence[str] = ("", "")


def make_groups(
    partition_size: int | None = None,
    *,
    node_size: int | None = None,
    topology: Topology | None = None,
    mesh: DeviceMesh | None = None,
    ranks: Sequence[int] | None = None,
    device: str | torch.device | None = None,
    backend: str | None = None,
    timeout_s: float = 600.0,
    heartbeat_s: float | None = None,
    mean_over: int | None = None,
    whole: bool = False,
    model: str | None = None,
    stages: str | None = None,
    cut: str | Rule | None = None,
) -> Groups:
    """Create the process groups of this rank. All ranks of the job call it with equal arguments.

    A process without torch.distributed is a world of one rank. One that takes the place of a lost
    rank waits for nobody, and gets groups that move no data until `reset`.

    Args:
      partition_size: number of ranks that share one replica. None takes the last dimension of a 2-D
        `mesh` (replicate, shard), else the number of the job's ranks on one node.
      node_size: number of ranks of the world on one node. None takes it from LOCAL_WORLD_SIZE
        (torchrun), else it counts equal host names.
      topology: how the job's ranks are wired, instead of `node_size`, as where racks matter.
      mesh: a `DeviceMesh`, or a part of one: `mesh["dp"]`, `mesh["replicate", "shard"]`, and with
        `model` or `stages` the dimensions that these name besides. The groups cover its ranks only.
      ranks: global ranks of the job by position, instead of `mesh`; None takes all.
      device: where tensors live. None takes that of `mesh`, else the current accelerator if the
        default group has its backend, else the CPU; in a world of one, torch's default device.
      backend: of the new groups; None takes that of the default group for `device`.
      timeout_s: bound in seconds of this call, and later of every wait on these groups: on the CPU
        the host raises after it; on accelerators it is the limit of the backend's watchdog, which
        ends the process. The slowest rank may load data or write files for that long.
      heartbeat_s: a rank that gives no sign of life for so many seconds has failed, and the others
        raise PeerFailed; at least 0.75, and more beyond 1,024 ranks. None takes 10 where a person
        is at a prompt, else 60. A rank may hold its interpreter for almost as long, as some loaders
        and compilers do. Below 15 names of hosts must be found fast: the store of torch looks for
        that of each rank that connects.
      mean_over: number of ranks that gradients are averaged over; None takes those of these groups.
        Expert leaves live on fewer ranks than there are losses: their gradient on a rank is a sum
        over tokens that other ranks sent, while the loss is a mean over all data-parallel ranks.
        Pass the number of the latter for them. Parameters and buffers are still averaged over the
        ranks of the groups.
      whole: whether ranks outside `mesh` or `ranks` hold no part of this model, as in a separate
        job. By default they are taken for ranks of tensor, pipeline or expert parallelism, and what
        needs the norm of the whole gradient refuses these groups.
      model: the dimension of `mesh` over which leaves are cut, by tensor or expert parallelism. The
        groups then cover all parts: norms, verdicts, failures, resets and saves are of all of them.
      stages: the dimension of `mesh` over which a pipeline's stages lie, each with its own leaves.
      cut: which leaves are cut over `model`, and along which dim: a text as in "*.up.*: 0;
        *.down.weight: 1", of which the last match counts, or a function from path to dim or None.
        A DTensor is cut as its placements say. Others are copies: all parts have the same.

    Returns:
      Frozen `Groups`, which a `with` block closes at its end.

    Communication: a few small messages through the store of torch.distributed, and while the groups
      are open two more each quarter of a second, by a thread. On an accelerator a barrier on each
      communicator, which connects its ranks; only the gathers of `Groups.flat` are connected at
      their first use, by all ranks of a partition group, and the second one of hop 2 by what makes
      a tree whose hop 2 sends codes. If the default group is bound to a device
      (`device_id=`), NCCL splits it: then all ranks of the world must make their groups at the same
      time.

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
    given = dict(locals())  # all ranks compare them
    check_fork("make_groups")
    checks.number("make_groups", "timeout_s", timeout_s, above=0, below=1e8)
    started = require_distributed()
    if spans.observers:
        spans.passing("start: make_groups")
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if started else (0, 1)
    dp_ranks, sizes, count = dp_ranks_of(ranks, mesh, rank, world_size, model, stages)
    own_ranks = dp_ranks[0] if len(dp_ranks) == 1 else next(x for x in dp_ranks if rank in x)
    partition_size = sizes[1] if partition_size is None and len(sizes) == 2 else partition_size
    job, rule = tuple(chain.from_iterable(dp_ranks)), cut_rule(cut) if cut else no_cut
    if len(dp_ranks) > 1:  # one that takes another dimension for `model` meets the others, too
        job, given["dp_ranks"] = tuple(sorted(job)), dp_ranks
    chosen, served_by, problem = device_and_backend(device, mesh, backend)
    startup.own_failures(served_by, begun=started and "nccl" in dist.get_backend_config())
    state = GroupState(job, rank, on_device=_torch.is_async(chosen), timeout_s=timeout_s)
    state.heartbeat_s = hooks.limit_s(heartbeat_s, len(job))
    state.whole, state.backend = whole or len(job) == world_size, served_by
    node = _node_of(rank, node_size, topology)
    if node_size is None and topology is None:
        given["node_size"] = f"found by {node.partition(' ')[0]}"
    given["cut"] = "a function" if callable(cut) else cut
    given |= {"partition_size": partition_size, "device": chosen.type, "backend": served_by}
    compared = {name: str(value) for name, value in given.items() if name not in _APART}
    mine = startup.facts_of(compared, chosen, problem, node)
    deadline = time.monotonic() + timeout_s
    try:
        judge = partial(startup.judged, "make_groups", dp_ranks=dp_ranks)
        store, found = _agreed(state, mine, deadline, judge)
        checks.integer("make_groups", "mean_over", mean_over, optional=True)
        if topology is not None:
            _check_topology(topology, len(own_ranks), node_size)
        wired = topology or Topology.of(len(own_ranks), found)
        plan = plan_groups(wired, wired.sizes[-1] if partition_size is None else partition_size)
        how: Any = {"plan": plan, "ranks": own_ranks, "device": chosen, "mean_over": mean_over}
        if model is not None or stages is not None:
            mesh_names = [_torch.name_in_mesh(mesh, dim) for dim in (model, stages)]
            how["parts"] = Parts(dp_ranks, count, rule, mesh_names)
        state.recipe = partial(_create, **how)
        return state.recipe(state, store, deadline)
    except BaseException:
        state.watch.close()
        raise


def _agreed(state: GroupState, mine: startup.Facts, deadline: float, judge: Any) -> tuple[Any, int]:
    """Meet the other ranks, or find what they agreed on; return the store and a node's size."""
    before = hooks.agreed_before(state.ranks, state.rank, state.timeout_s)
    if before is not None:
        judge({state.rank: mine})  # whether it has its device
        state.key, state.rejoining = before.key, True
        return None, before.verdict
    if len(state.ranks) == 1:
        return None, judge({state.rank: mine})
    store = hooks.join(state)
    how: Any = {"verb": "make_groups", "timeout_s": state.timeout_s, "deadline": deadline}
    how["check"] = partial(state.watch.check, ())
    meeting = startup.meet(store, state.ranks, state.rank, mine, judge, **how)
    state.watch.begin(meeting)
    return store, meeting.verdict


def require_distributed() -> bool:
    """Whether torch.distributed is initialised; a world of one rank does not need it.

    Raises:
      GroupsError: several ranks were launched, but it is not initialised.
    """
    if dist.is_available() and dist.is_initialized():
        return True
    source = startup.launcher_of(os.environ)
    if source is not None and os.environ.get("WORLD_SIZE") != "1":
        what = f"make_groups: {source} started several ranks, without torch.distributed"
        raise GroupsError(what, fix="call mics_fn.init_distributed() first")
    return False


def dp_ranks_of(
    ranks: Sequence[int] | None,
    mesh: DeviceMesh | None,
    rank: int,
    world_size: int,
    model: str | None = None,
    stages: str | None = None,
) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...], int]:
    """The global ranks of a job: those of each part of the model, by position, stage by stage.

    Returns:
      They; the sizes of the data-parallel dimensions of the mesh, () without one; and the number
      of parts.

    Raises:
      PlanError: they are not distinct ranks of the world, or this rank is not one of them; or the
        mesh has other dimensions.
    """
    if mesh is not None and ranks is not None:
        raise PlanError("make_groups: ranks= and mesh= are both given", fix="pass one")
    names = mesh.mesh_dim_names or () if mesh is not None else ()
    over = [*filter(None, (stages, model))]
    if len({*over}) < len(over) or not {*over} <= {*names}:
        what = f"make_groups: model={model!r}, stages={stages!r}: the mesh has dims {names}"
        raise PlanError(what, fix="pass mesh=, with names of two of its dimensions")
    sizes, count, every = (), 1, [list(range(world_size) if ranks is None else ranks)]
    if mesh is not None:
        # The tensor of a sub-mesh holds only the ranks that share this rank's other coordinates.
        first = [names.index(name) for name in over]
        rest = [i for i in range(mesh.ndim) if i not in first]
        sizes = tuple(mesh.size(i) for i in rest)
        count = mesh.size(names.index(model)) if model is not None else 1
        every = mesh.mesh.permute(*first, *rest).reshape(-1, prod(sizes)).tolist()
        if len(sizes) > 2:
            what = f"make_groups: no shard dimension in a mesh of dimensions {names}"
            raise PlanError(what, fix="pass mesh['replicate', 'shard'], or name model= and stages=")
    found = [*chain.from_iterable(every)]
    known = set(found) & set(range(world_size))
    if len(known) < len(found) or rank not in known:
        what = f"make_groups: ranks={found} are not distinct ranks of a world of {world_size}"
        raise PlanError(what, fix="pass each rank of the job once, this one too")
    return tuple(map(tuple, every)), sizes, count


def cut_rule(cut: str | Rule) -> Rule:
    """The dim along which a leaf is cut over the parts of a model, from its path; None for a copy.

    >>> rule = cut_rule("*.up.*: 0; *.down.weight: 1")
    >>> rule("mlp.up.bias"), rule("mlp.down.weight"), rule("norm.weight")
    (0, 1, None)
    """
    if callable(cut):
        return cut
    pairs = list[tuple[str, int]]()
    for clause in filter(None, map(str.strip, cut.split(";"))):
        pattern, _, dim = map(str.strip, clause.rpartition(":"))
        if not (pattern and dim.isdecimal()):
            what = f"make_groups: cut={cut!r} has no pattern, or no dim, in {clause!r}"
            raise PlanError(what, fix="write pattern: dim; as in '*.up.*: 0; *.down.weight: 1'")
        pairs.append((pattern, int(dim)))
    return lambda path: next((dim for x, dim in reversed(pairs) if checks.matches(x, path)), None)


def device_and_backend(
    device: str | torch.device | None, mesh: DeviceMesh | None, backend: str | None
) -> tuple[torch.device, str, str]:
    """The device of the groups, the backend that serves it, and why they cannot use it."""
    begun = dist.is_initialized()
    config = (backend or dist.get_backend_config()) if begun else ""
    if device is None:
        default = "auto" if begun else torch.get_default_device()
        device = default if mesh is None else mesh.device_type
    chosen, problem = startup.choose_device(device, config=config)
    if not begun or backend is not None:
        return chosen, config, problem
    # A config such as "cpu:gloo,cuda:nccl" names one backend per device. Groups that are made for
    # one of them keep torch from creating idle communicators for the others.
    served_by = startup.backends_of(config).get(chosen.type, "")
    if not served_by:
        problem = problem or f"the default group serves {config}, not {chosen.type}"
    return chosen, served_by, problem


def _check_topology(topology: Topology, num_ranks: int, node_size: int | None) -> None:
    """Raise PlanError unless a topology has all ranks; all ranks were given the same."""
    if node_size is not None:
        raise PlanError("make_groups: topology= and node_size= are both given", fix="pass one")
    if topology.world_size != num_ranks:
        what = f"topology {topology} has {topology.world_size} ranks, the job has {num_ranks}"
        raise PlanError(f"make_groups: {what}", fix="give sizes whose product is that number")


def _node_of(rank: int, node_size: int | None, topology: Topology | None) -> str:
    """The node of this rank: by the argument, by the launcher's variable, or by its host name."""
    if topology is not None:
        return "one of topology="
    if node_size is not None:
        checks.integer("make_groups", "node_size", node_size)
        return f"node_size={node_size} {rank // node_size}"
    size = os.environ.get("LOCAL_WORLD_SIZE")
    if size is None:
        return f"hostnames {socket.gethostname()}"
    return f"LOCAL_WORLD_SIZE={size} {rank // int(size)}"


def imagined(plan: Plan, *, on_device: bool) -> Groups:
    """The groups of the first rank of any plan, without processes: nothing can be sent over them.

    For whoever computes what the verbs would do there, how much they would send, and where.

    Args:
      plan: every group of the world.
      on_device: whether collectives would be done by an accelerator.
    """
    ranks, device = tuple(range(plan.world_size)), torch.device("cpu")
    made = _create(GroupState(ranks), None, 0.0, plan, ranks, device, None)
    made.state.on_device = on_device
    return made


def _create(
    state: GroupState,
    store: Any,
    deadline: float,
    plan: Plan,
    ranks: tuple[int, ...],
    device: torch.device,
    mean_over: int | None,
    parts: Parts | None = None,
) -> Groups:
    """Create the groups that this rank is a member of, in the same order on every rank."""
    state.first = state.first or state.key
    position = ranks.index(state.rank)
    at = lambda positions: tuple(ranks[i] for i in positions)  # noqa: E731
    chunk, order = plan.chunk(position), at(plan.chunk_order(position))
    rows = at(plan.replication_group(position))
    make = Channel if store is None else Channel.of_several
    channel: Any = make(store, state.key, order, state.rank, state.timeout_s, len(state.ranks))
    channel.check, channel.watch, state.channel = state.watch.check, state.watch, channel
    made = list[Comm]()
    comm = partial(_comm, state, made)

    def level(name: str, ranks: tuple[int, ...], reach: str = "") -> Level:
        return Level(name, comm(f"gather {name}", ranks), comm(f"reduce {name}", ranks), reach)

    levels = one_level = tuple(
        level(name, at(plan.level_group(position, i))) for i, name in enumerate(plan.level_names)
    )
    if len(levels) > 1:
        one_level = (level(FLAT, order, reach=levels[0].name),)
    partition = one_level[0].reduce if levels else comm("partition", order)
    partition = replace(partition, name="partition")  # in the ledger
    replicas, second = comm("replicas", rows), comm("replicas, second", rows)
    model, bounds = _model(comm, parts, replicas) if parts else (None, ())
    made = [x for x in made if x.group and (x.name not in SECOND or x.name in state.completed)]
    if store is not None:
        _make_all(state, store, made, deadline)
    if state.on_device:
        _warm_up(state, [comm for comm in made if comm.name != f"gather {FLAT}"], device)
    for put_in_place in bounds:
        put_in_place()
    factor = 1.0 if mean_over is None else len(ranks) / mean_over
    more = {"grad_factor": factor, "names": plan.topology.names}
    replicas = replace(replicas, second=replace(second, name="replicas"))  # in the ledger
    shared: Any = {"device": device, "partition": partition, "channel": channel}
    shared["whole"] = model is None
    route = Route(levels, plan.coords(position), chunk, **more)
    hierarchy = flat = Hierarchy(route, **shared)
    if one_level is not levels:
        flat = Hierarchy(Route(one_level, (chunk,), chunk, **more), **shared)
    where = {"ranks": ranks, "rank": state.rank, "position": position, "device": device}
    comms = {"hierarchy": hierarchy, "flat": flat, "partition": partition, "replicas": replicas}
    known = {"timeout_s": state.timeout_s, "traffic": state.traffic, "state": state}
    return Groups(plan, **where, **comms, **known, model=model)


def _model(comm: Any, parts: Parts, replicas: Comm) -> tuple[Model, list[Callable[[], None]]]:
    """The communicators of a model in parts, and what puts them in the place of a mesh's groups."""
    state, dp_ranks, count = replicas.state, parts.dp_ranks, parts.count
    ranks = next(ranks for ranks in dp_ranks if state.rank in ranks)
    (stage, part), position = divmod(dp_ranks.index(ranks), count), ranks.index(state.rank)
    mine = dp_ranks[stage * count :][:count]
    if count > 1:
        same = tuple(x[ranks.index(rank)] for x in mine for rank in replicas.ranks)
        second = replace(comm("copies, second", same), name="copies")  # in the ledger
        replicas = replace(comm("copies", same), second=second)
    own = comm("parts", tuple(x[position] for x in mine))
    others = comm("stages", tuple(x[position] for x in dp_ranks[part::count]))
    bounds = list[Callable[[], None]]()
    for name, axis in zip(parts.mesh_names, (own, others), strict=True):
        if name and axis.size > 1:
            # After a reset, since that of the mesh may have ended in the middle of a call.
            renewed = state.key != state.first and comm(f"mesh {axis.name}", axis.ranks)
            bounds.append(partial(bound_group, name, axis, renewed or None))
    return Model(dp_ranks, own, others, replicas, parts.cut if count > 1 else no_cut), bounds


def _comm(state: GroupState, made: list[Comm], name: str, ranks: tuple[int, ...]) -> Comm:
    """A communicator of these ranks, without its process group; it is appended to `made`."""
    alone = len(ranks) == 1 or state.rejoining
    # Groups of one purpose are disjoint, so one member tells them apart.
    group = "" if alone else f"{state.key}/{name}/{ranks[0]}"
    calls, place = state.channel.calls_of(name, ranks), ranks.index(state.rank)
    comm = Comm(name, ranks, place, group, state.timeout_s, state, calls=calls)
    state.forgets.append(comm.queue.clear)
    made.append(comm)
    return comm


def complete(comm: Comm, device: torch.device) -> None:
    """Connect a communicator that `make_groups` left out, once; all its ranks call it.

    Raises:
      GroupsError: it cannot be made.
    """
    state = comm.state
    if not comm.group or comm.purpose in state.completed:
        return
    state.completed.append(comm.purpose)
    check = partial(state.watch.check, (), missing=comm.ranks)
    try:
        _make_group(state, comm, time.monotonic() + state.timeout_s, check)
    except BaseException as error:
        state.abandon(error)
        raise
    if state.on_device:
        _warm_up(state, [comm], device)


_FIX = "look at these ranks' own errors, then call make_groups again on all"


def _make_all(state: GroupState, store: Any, comms: Sequence[Comm], deadline: float) -> None:
    """Make process groups, in one order on all ranks; if one rank fails, all do.

    A rank that went on alone and closed its groups would break connections that others are still
    making.

    Communication: the connections of gloo, and a few small messages to the store.

    Raises:
      GroupsError: torch cannot make one, or another rank failed, or did not finish in time.
    """
    made, check = f"{state.key}/made", partial(state.watch.check, (), missing=state.ranks)
    try:
        for comm in comms:
            _make_group(state, comm, deadline, check)
        store.set(f"{made}/{state.rank}", "")
        store.add(made, 1)
        all_made = lambda: store.add(made, 0) == len(state.ranks)  # noqa: E731
        if not poll(all_made, len(state.ranks), deadline, check):
            ranks = state.ranks[:1024]
            missing = [rank for rank in ranks if not store.check([f"{made}/{rank}"])]
            raise state.watch.explained(_overdue(state, missing), wait=True)
    except BaseException as error:
        state.abandon(error)
        raise


def _make_group(
    state: GroupState, comm: Comm, deadline: float, check: Callable[[float], None]
) -> None:
    # Waits and the monitor keep the limit, and name who is behind; torch's must not come first.
    options = {"timeout_s": 2 * state.timeout_s, "backend": state.backend, "name": comm.group}
    make = partial(_torch.new_group, comm.ranks, **options, purpose=f"mics_fn {comm.name}")
    try:  # gloo connects the members here, in C++
        group = bounded(make, deadline, check) if state.backend == "gloo" else make()
        state.own(comm.group, group)
    except BaseException as error:
        _torch.drop_connection()
        if isinstance(error, TimeoutError):
            for group in _torch.groups_named(comm.group):
                state.own(comm.group, group)
            raise _overdue(state, [state.rank]) from error
        if isinstance(error, PeerFailed) or not isinstance(error, RuntimeError | ValueError):
            raise
        failed = _failed("make", comm, error)
        raise state.watch.explained(failed, wait=isinstance(error, RuntimeError)) from error


def _warm_up(state: GroupState, comms: Iterable[Comm], device: torch.device) -> None:
    """Connect the members of these communicators now, and not inside the first backward.

    Every rank passes them in the order in which they were made. The groups of one purpose are
    disjoint, so each rank is in one group at a time, and the one that is furthest behind never
    waits for a rank that is behind it.

    Raises:
      GroupsError: the backend cannot connect them.
    """
    for comm in comms:
        try:
            _torch.warm_up(comm.process_group(), device)
        except RuntimeError as error:
            state.abandon(error)
            raise _failed("connect", comm, error) from error


def _overdue(state: GroupState, ranks: Sequence[int]) -> GroupsError:
    what = f"{name_ranks(ranks)} did not make all groups within {state.timeout_s:g} s"
    return GroupsError(f"make_groups: {what}", fix=_FIX)


def _failed(did: str, comm: Comm, error: Exception) -> GroupsError:
    what = f"rank {comm.ranks[comm.rank]} cannot {did} '{comm.name}' of {name_ranks(comm.ranks)}"
    return GroupsError(f"make_groups: {what}", [first_line(error)], _FIX)

"""`Groups`: the ranks that share a replica, and those that hold the same shard, as one value.

[Note: placements] Shards are cut over all levels of a route. A run keeps what it gathered over the
first `outer_params` levels until its end, and only gathers over the other levels again. Over the
first `outer_grads` levels, gradients are reduced once per step, as the sum over its micro-steps.

[Note: mean over more ranks] Some leaves, such as experts, live on fewer ranks than there are
losses, and the gradient of such a leaf sums over tokens that other ranks sent. With `mean_over=n`,
hop 1 multiplies its mean by s / n, where s is the number of ranks of these groups, so that in
effect it divides the sum by n. This happens wherever a full gradient becomes shards, and nowhere
else: hop 2 stays a plain mean, which serves parameters too and can be repeated.

[Note: models in parts] With tensor or expert parallelism several ranks hold one model together:
some leaves are cut, and each rank has one part of them. In a pipeline each stage has other leaves.
All of these ranks are one job, whose failures, verdicts, resets and saves are common. A leaf that
is cut lives on groups of the ranks that have the same part. Any other leaf of such a model has only
more replicas: it lives on `Groups.copies`, whose partition groups are the same, and whose replicas
are those in all parts. So hop 2 keeps copies equal to the bit, and no verb knows of parts but those
that add up over all of a model, such as its norm.
"""

import sys
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mics_fn import _torch
from mics_fn.errors import GroupsError, message
from mics_fn.groups.communicator import Comm, GroupState, Traffic
from mics_fn.groups.topology import Plan, Topology, chunk_of, fold_ranks
from mics_fn.store import Channel

# `Buffers`: memory that collectives use again from step to step.

_PATIENCE = 16  # a buffer that nobody took during `_PATIENCE * made` takes is let go


class _Free(NamedTuple):
    """A free buffer; those of one size are taken in the order in which they were given back."""

    where: str  # its device
    nbytes: int
    since: int  # when it was given back, by the clock of its pool: no two are equal
    raw: Tensor  # 1D, uint8
    event: torch.Event | None  # what its next user waits for


class Buffers:
    """A pool of memory that collectives take and give back, so that every step uses the same.

    The system would map fresh memory of this size page by page each time. A free buffer serves any
    dtype and shape that needs at most its bytes. If all free ones are too small, the new one takes
    the place of the largest, so there are never more buffers than were in use at once. Which buffer
    is taken depends only on the order of takes and gives: of those of one size the one that was
    given back first. On an accelerator its next user waits, on its stream, for the work that was
    queued on the current stream when the buffer was given back; the host asks for nothing.

    Example:
      >>> buffers = Buffers()
      >>> first = buffers.take((2, 3), torch.float32, torch.device("cpu"))
      >>> buffers.give(first)
      >>> buffers.take((5,), torch.float32, torch.device("cpu")).data_ptr() == first.data_ptr()
      True
      >>> buffers.made
      1
    """

    def __init__(self) -> None:
        self.made = 0  # how many buffers were allocated
        self._clock = 0  # of takes and gives
        self._free: list[_Free] = []  # sorted
        self._streams: dict[int, torch.Stream] = {}  # where memory was made, by its address

    def take(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, *, exact: bool = False
    ) -> Tensor:
        """An uninitialised tensor in the smallest free buffer that is large enough, else a new one.

        Args:
          shape, dtype, device: of the tensor.
          exact: only a buffer of its own size will do, as for tensors that are kept for long.
        """
        nbytes = prod(shape) * dtype.itemsize
        if not nbytes:
            return torch.empty(shape, dtype=dtype, device=device)
        self._clock += 1
        where = str(_torch.with_index(device))
        at = bisect_left(self._free, (where, nbytes))
        size = self._free[at][:2] if at < len(self._free) else ("", 0)
        if size[0] == where and (size[1] == nbytes or not exact):
            raw = _ready(self._free.pop(at))
        else:
            if not exact and at and self._free[at - 1].where == where:  # it is too small
                self.let_go(_ready(self._free.pop(at - 1)))
            oldest = self._clock - 2 * _PATIENCE * self.made  # such as one of a model that is gone
            self._keep(lambda free: free.since >= oldest)
            self.made += 1
            raw = torch.empty(nbytes, dtype=torch.uint8, device=device)
            if _torch.is_async(device):
                self._streams[raw.data_ptr()] = _torch.current_stream(device)
        return raw[:nbytes].view(dtype).view(shape)

    def provide(self, nbytes: int, device: torch.device) -> None:
        """Have one free buffer of this size in bytes, and let go of all others."""
        size = (str(_torch.with_index(device)), nbytes)
        kept = next((free for free in self._free if free[:2] == size), None)
        self._keep(lambda free: free is kept)
        if nbytes and kept is None:
            self.give(self.take((nbytes,), torch.uint8, device, exact=True))

    def _keep(self, keeps: Callable[[_Free], bool]) -> None:
        """Let go of all other free buffers."""
        for free in self._free:
            if not keeps(free):
                self.let_go(_ready(free))
        self._free = [free for free in self._free if keeps(free)]

    def let_go(self, raw: Tensor) -> None:
        """Before a buffer is freed, and not given back: order that after the current stream."""
        stream = self._streams.pop(raw.data_ptr(), None)
        if stream is not None and stream != (current := _torch.current_stream(raw.device)):
            stream.wait_stream(current)

    @property
    def waiting_bytes(self) -> int:
        """Bytes of the free buffers."""
        return sum(each.nbytes for each in self._free)

    def give(self, tensor: Tensor) -> None:
        """Give back a tensor that nobody uses any more; queued work may still use it."""
        if not tensor.numel() or _torch.has_no_data(tensor):
            return
        with _torch.without_torch_func():  # a run may end inside of it
            raw = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            raw = raw.set_(tensor.untyped_storage())
        device = raw.device
        event = _torch.record(device) if _torch.is_async(device) else None
        self._clock += 1
        insort(self._free, _Free(str(device), raw.nbytes, self._clock, raw, event))


def _ready(free: _Free) -> Tensor:
    """The memory of a free buffer for work that is queued from now on."""
    if free.event is not None:
        _torch.wait(free.raw.device, free.event)
    return free.raw


# `Hierarchy`: the levels that data crosses inside a partition group, and the memory it reuses.

_DISK_TIMEOUT_S = 600.0  # of a chunk that is brought from a file


def _adds(comm: Comm) -> str:
    """How reductions add up, as text for digests; nothing if the backend decides."""
    return " in fixed order" if comm.fixed_order else ""


@dataclass(frozen=True, eq=False)
class Level:
    """One level of a route. It has two communicators, so that gathers and reductions overlap."""

    name: str
    gather: Comm
    reduce: Comm
    reach: str = ""  # the outermost level of the topology that it crosses; "" means its own name


@dataclass(frozen=True, eq=False)
class Route:
    """The levels that data crosses, outermost (slowest link) first, and this rank's place in each.

    The route of a partition group of one rank has no levels.
    """

    levels: tuple[Level, ...] = ()
    coords: tuple[int, ...] = ()  # this rank's place in each level
    chunk: int = 0  # number of the chunk that this rank keeps
    outer_params: int = 0  # outer levels over which a run gathers once; see [Note: placements]
    outer_grads: int = 0  # outer levels over which gradients are reduced once per step
    grad_factor: float = 1.0  # see [Note: mean over more ranks]
    names: tuple[str, ...] = ()  # all levels of the topology, outermost first
    _splits: dict[int, Any] = field(default_factory=dict, init=False, repr=False)

    def split(self, count: int) -> tuple["Route", "Route"]:
        """Two routes: the outermost `count` levels, and the others."""
        if count not in self._splits:
            first, rest = slice(0, count), slice(count, None)
            self._splits[count] = self._part(first), self._part(rest)
        return self._splits[count]

    def _part(self, part: slice) -> "Route":
        coords, levels = self.coords[part], self.levels[part]
        place = {"coords": coords, "chunk": chunk_of(coords, self.sizes[part])}
        return replace(self, levels=levels, **place, outer_params=0, outer_grads=0)

    def levels_to(self, last: str) -> int:
        """How many levels there are from the outermost to a named one; all if the name is empty."""
        if not last or not self.levels:
            return len(self.levels)
        end = self.names.index(last)
        return sum(self.names.index(level.reach or level.name) <= end for level in self.levels)

    @cached_property
    def gathers(self) -> tuple[Comm, ...]:
        """The communicators that a gather uses, in order."""
        return tuple(level.gather for level in self.levels)

    @cached_property
    def reductions(self) -> tuple[Comm, ...]:
        """The communicators that a reduction uses, in order: the innermost level first."""
        return tuple(level.reduce for level in reversed(self.levels))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of ranks in each level."""
        return tuple(level.gather.size for level in self.levels)

    @cached_property
    def size(self) -> int:
        """Number of ranks in the partition group."""
        return prod(self.sizes)

    @cached_property
    def facts(self) -> str:
        """Levels and placement, which must be equal on every rank, as text for digests."""
        parts = [",".join(f"{level.name}:{level.gather.size}" for level in self.levels) or "none"]
        for what, outer in (("params", self.outer_params), ("grads", self.outer_grads)):
            if outer:
                parts.append(f"{what} over {self.split(outer)[1].size}")
        if self.grad_factor != 1.0:
            parts.append(f"gradients times {self.grad_factor:g}")
        return " ".join(parts) + (_adds(self.levels[0].reduce) if self.levels else "")


@dataclass(frozen=True, eq=False)
class Pools:
    """Memory that the verbs over one hierarchy reuse from step to step."""

    reducing: Buffers = field(default_factory=Buffers)  # full gradients, in verbs that wait
    fetched: Buffers = field(default_factory=Buffers)  # gathered buckets
    outer: Buffers = field(default_factory=Buffers)  # buckets gathered over the outer levels only
    # A chunk never shares a larger buffer, so an optimizer always sees it as one tensor.
    chunks: Buffers = field(default_factory=Buffers)
    codes: Buffers = field(default_factory=Buffers)  # what travels in the place of parameters
    # Of sums of gradients: how buckets are reduced, where, and free memory elsewhere.
    sums: dict[Any, Any] = field(default_factory=dict)

    @property
    def waiting_bytes(self) -> int:
        """Bytes that these pools hold between two steps."""
        pools = (self.reducing, self.fetched, self.outer, self.chunks, self.codes)
        ring = self.sums.get("ring")
        return sum(pool.waiting_bytes for pool in pools) + (ring.nbytes if ring else 0)


@dataclass(frozen=True, eq=False, repr=False)
class Hierarchy:
    """One partition group: its route, the memory of its verbs, and its channel for messages.

    It has the properties of `Groups` with a single replica, so that a verb takes either. Only hop 2
    needs `Groups`.

    Args:
      route: its levels, and this rank's place in each.
      device: where tensors live.
      partition: control messages inside the partition group.
      channel: messages of its ranks through the store.
      pools: memory that verbs use again.
      agreed: what was compared before: digests of trees, and buckets that were gathered.
      whole: whether it holds a whole model, and not one of its parts.

    Example:
      >>> hierarchy = make_groups(1).hierarchy
      >>> hierarchy, hierarchy.partition_size, hierarchy.ranks
      (Hierarchy(none, chunk 0 of 1), 1, (0,))
    """

    route: Route
    device: torch.device
    partition: Comm
    channel: Channel = field(default_factory=Channel)
    pools: Pools = field(default_factory=Pools)
    agreed: set = field(default_factory=set)
    whole: bool = True

    @classmethod
    def of_one(cls, device: torch.device) -> "Hierarchy":
        """A partition group of one rank, without `Groups`."""
        return cls(Route(), device, Comm.of_one("partition"))

    @property
    def hierarchy(self) -> "Hierarchy":
        """Itself, as `Groups.hierarchy`."""
        return self

    @property
    def state(self) -> GroupState:
        """The shared state of its groups."""
        return self.partition.state

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks of the partition group."""
        return self.partition.ranks

    stacked_ranks = ranks  # as `Groups.stacked_ranks`, for one replica

    @property
    def partition_size(self) -> int:
        """Number of ranks that share one replica."""
        return self.route.size

    num_replicas = 1  # it knows no other replicas
    independent, model = False, None
    origin = copies = stage = hierarchy  # of all of which the partition groups are the same

    @property
    def axes(self) -> tuple[Comm, ...]:
        """As `Groups.axes`, for one replica."""
        return (self.partition,)

    num_pieces = partition_size

    @cached_property
    def replicas(self) -> Comm:
        """A communicator of this rank alone."""
        return Comm.of_one("replicas", self.state)

    @cached_property
    def fetch_queue(self) -> Comm:
        """Queue of copies from host memory and files: a communicator of this rank alone."""
        return Comm.of_one("fetches", self.state, _DISK_TIMEOUT_S)

    @cached_property
    def sum_queue(self) -> Comm:
        """The same for sums of gradients, since a fetch must not wait for a reduction."""
        return Comm.of_one("fetches of sums", self.state, _DISK_TIMEOUT_S)

    def describe(self) -> str:
        """The facts that must be equal on every rank, as text for digests."""
        return self.route.facts

    def __repr__(self) -> str:
        return f"Hierarchy({self.describe()}, chunk {self.route.chunk} of {self.route.size})"


def no_cut(path: str) -> int | None:
    """The rule by which no leaf is cut."""
    return None


class Model(NamedTuple):
    """The ranks that hold a model in parts; see [Note: models in parts].

    Args:
      dp_ranks: the data-parallel ranks of each part, in the order of parts, stage by stage.
      parts: the ranks that hold the other parts of what this rank has.
      stages: those that hold other leaves.
      copies: hop 2 of leaves that every part has a copy of.
      cut: the dim along which a leaf is cut, from its path; None for a copy.
    """

    dp_ranks: tuple[tuple[int, ...], ...]
    parts: Comm
    stages: Comm
    copies: Comm
    cut: Callable[[str], int | None]


@dataclass(frozen=True, eq=False, repr=False)
class Groups:
    """The process groups of one data-parallel job, as this rank sees them; made by `make_groups`.

    It is a context manager. At its end it closes the groups; left by an exception it abandons them,
    which does not wait for the other ranks, and these hear of it where they wait for this one.
    Printing and comparing never communicate.

    Args:
      plan: every group of the job, in positions.
      ranks: global rank of each position.
      rank: this rank, global.
      position: of this rank in `ranks`.
      hierarchy: the partition group of this rank, in its levels.
      flat: the same ranks and chunk order in one level.
      partition: control messages inside the partition group.
      replicas: the replication group of this rank, for hop 2.
      device: where tensors live.
      timeout_s: bound in seconds of each wait.
      traffic: the ledger of bytes that this rank sent.
      state: what is in flight, and what `close` destroys.
      independent: whether other replicas of the job step on their own; see `replica`.
      agreed: digests of trees that were compared before.
      derive: what made these of the groups that `make_groups` gave, in order; see `reset`.
      model: over which ranks the model is cut; None where each replica has all of it.
      of: the groups that these are the `copies` of.

    Example:
      >>> with make_groups(1) as groups:
      ...     print(groups)
      n = 1 in 1 partition group of p = 1, on cpu
        this is rank 0, which keeps chunk 0 of 1
        partition group: 0; levels outermost first: none
        replication group: 0
      >>> groups.closed
      True
    """

    plan: Plan
    ranks: tuple[int, ...]
    rank: int
    position: int
    hierarchy: Hierarchy
    flat: Hierarchy
    partition: Comm
    replicas: Comm
    device: torch.device
    timeout_s: float
    traffic: Traffic
    state: GroupState
    independent: bool = False
    agreed: set = field(default_factory=set)
    derive: tuple[Callable[[Any], Any], ...] = ()
    model: Model | None = None
    of: "Groups | None" = None
    _derived: dict[Any, "Groups"] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def world_size(self) -> int:
        """Number of ranks of the job."""
        return len(self.ranks)

    @cached_property
    def partition_size(self) -> int:
        """Number of ranks that share one replica."""
        return self.plan.partition_size

    @cached_property
    def num_replicas(self) -> int:
        """Number of complete replicas."""
        return len(self.ranks) // self.plan.partition_size

    @cached_property
    def stacked_ranks(self) -> list[int]:
        """All global ranks by stage, part and partition group, in the order of `partition`."""
        home, groups = self.plan.partition_group(self.position), self.plan.partition_groups
        places = [self.ranks.index(rank) - home[0] for rank in self.partition.ranks]
        starts = [group[0] for group in groups]
        return [ranks[at + place] for ranks in self.dp_ranks for at in starts for place in places]

    @property
    def dp_ranks(self) -> Sequence[tuple[int, ...]]:
        """The data-parallel ranks of each part of the model, this rank's among them."""
        return (self.ranks,) if self.model is None else self.model.dp_ranks

    @cached_property
    def all_ranks(self) -> tuple[int, ...]:
        """All global ranks of `dp_ranks`, in an order that is the same on each of them."""
        return tuple(chain.from_iterable(self.dp_ranks))

    @cached_property
    def place(self) -> int:
        """The number of this rank in `all_ranks`."""
        return self.all_ranks.index(self.rank)

    @cached_property
    def axes(self) -> tuple[Comm, ...]:
        """Communicators that together reach all ranks that have a part of these leaves."""
        model = self.model
        return (self.partition, self.replicas, *((model.parts, model.stages) if model else ()))

    @cached_property
    def num_pieces(self) -> int:
        """In how many ranks the leaves are that have no replica of the same."""
        return len(self.stacked_ranks) // self.num_replicas

    @cached_property
    def copies(self) -> "Groups":
        """Groups of leaves that each part of the model has a copy of; these if there are no parts.

        See [Note: models in parts].
        """
        model = self.model
        if model is None or model.parts.size == 1:
            return self
        plan, parts = self.plan, model.parts.size
        wired = Topology((parts, *plan.topology.sizes), ("part", *plan.topology.names))
        stages = zip(*[iter(model.dp_ranks)] * parts, strict=True)
        dp_ranks = tuple(tuple(chain.from_iterable(stage)) for stage in stages)
        alone = Comm.of_one("parts", self.state, self.timeout_s)
        return replace(
            self,
            derive=(*self.derive, lambda made: made.copies),
            plan=Plan(wired, plan.partition_size),
            ranks=next(ranks for ranks in dp_ranks if self.rank in ranks),
            position=self.position + model.parts.rank * len(self.ranks),
            replicas=model.copies,
            model=model._replace(dp_ranks=dp_ranks, parts=alone, cut=no_cut),
            of=self,
            agreed=set(),
        )

    @property
    def origin(self) -> "Groups":
        """The groups that were given, where these are the copies of a model in parts."""
        return self.of or self

    @cached_property
    def stage(self) -> "Groups":
        """These groups without other stages of a pipeline, which have other leaves."""
        model = self.model
        if model is None or model.stages.size == 1:
            return self
        count = len(model.dp_ranks) // model.stages.size
        own = model.dp_ranks[model.stages.rank * count :][:count]
        alone = Comm.of_one("stages", self.state, self.timeout_s)
        derive = (*self.derive, lambda made: made.stage)
        return replace(self, derive=derive, model=model._replace(dp_ranks=own, stages=alone))

    @cached_property
    def replica(self) -> "Groups":
        """Groups of this rank's replica alone, as if it were the whole job.

        [Note: a replica alone] Replicas that step on their own need no case of their own in any
        verb. Their steps are given these groups, whose replication group is one rank, so that hop 2
        does nothing, as in any job with one replica.
        """
        if self.num_replicas == 1:
            return self
        plan, own, model = self.plan, self.plan.partition_group(self.position), self.model
        if model is not None:  # its copies are in this replica alone
            ranks = tuple(tuple(x[position] for position in own) for x in model.dp_ranks)
            model = model._replace(dp_ranks=ranks, copies=model.parts)
        return replace(
            self,
            derive=(*self.derive, lambda made: made.replica),
            model=model,
            plan=Plan(Topology(plan.level_sizes or (1,), plan.level_names), plan.partition_size),
            ranks=tuple(self.ranks[position] for position in own),
            position=own.index(self.position),
            replicas=Comm.of_one("replicas", self.state, self.timeout_s),
            independent=True,
            agreed=set(),
        )

    def derived(self, steps: tuple[Callable[[Any], Any], ...]) -> "Groups":
        """What steps make of these groups, which `make_groups` made; each once."""
        if not steps:
            return self
        if steps not in self._derived:
            self._derived[steps] = steps[-1](self.derived(steps[:-1]))
        return self._derived[steps]

    def without_replicas(self) -> "Groups":
        """Groups of this rank's replica alone, for which hop 2 does nothing.

        Gradients that verbs reduce over them have hop 1 behind them. What is left is a mean over
        `replicas`, which may then be taken in a way of one's own; see `communicators`.
        """
        return self.replica

    @property
    def communicators(self) -> dict[str, Comm]:
        """By its purpose, each communicator on which this rank moves data.

        "gather NAME" and "reduce NAME" are the two of each level of a partition group, "partition"
        is for control messages over all of it, and "replicas" for hop 2; in groups of a model in
        parts there are "parts" and "stages", too. Each has `name`, `ranks`
        (global ones in its order), `rank` (this rank's place among them) and `size`. Every rank is
        in one of each purpose. `collectives.start` runs a collective of one's own on them.

        Not listed is the second communicator of hop 2, which gathers codes: it has the ranks of
        "replicas", and `traffic` counts what it sends under that name, too.
        """
        levels = self.hierarchy.route.levels
        found = [comm for level in levels for comm in (level.gather, level.reduce)]
        return {comm.name: comm for comm in (*found, *self.axes)}

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self.state.closed

    def close(self) -> None:
        """Destroy the process groups, whose later use raises GroupsError. Closing twice is fine.

        While an exception is handled, as in a `finally`, and after an error in a step without
        another call, it abandons them, as a `with` block does, and others read of that error.

        Communication: on NCCL, all ranks of a group wait for each other and for what is under way.
        """
        self.state.close(sys.exception())

    def __enter__(self) -> "Groups":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.state.close(error)

    def describe(self) -> str:
        """The facts that must be equal on every rank, as text for digests."""
        route = self.hierarchy.route
        text = f"n={self.world_size} p={self.partition_size} levels={route.facts}"
        if self.model is not None:
            text += f" parts={self.model.parts.size} stages={self.model.stages.size}"
        return text if route.levels else text + _adds(self.replicas)

    def __repr__(self) -> str:
        state = ", closed" if self.closed else ""
        return f"Groups({self.describe()}, rank {self.rank}, {self.device}{state})"

    def __str__(self) -> str:
        count, route = self.num_replicas, self.hierarchy.route
        levels = [f"{x.name} {x.gather.size}: {fold_ranks(x.gather.ranks)}" for x in route.levels]
        own = f"{fold_ranks(self.partition.ranks)}; levels outermost first:"
        lines = [
            f"this is rank {self.rank}, which keeps chunk {route.chunk} of {route.size}",
            f"partition group: {own} {', '.join(levels) or 'none'}",
            f"replication group: {fold_ranks(self.replicas.ranks)}",
        ]
        counted = f"{count} partition group{'s' * (count != 1)} of p = {route.size}"
        return message(f"n = {self.world_size} in {counted}, on {self.device}", lines)


def require_replicas(verb: str, homes: Iterable[Groups | Hierarchy]) -> None:
    """Raise GroupsError unless all of these know the other replicas, which hierarchies do not."""
    for home in homes:
        if isinstance(home, Hierarchy):
            raise GroupsError(f"{verb}: got a hierarchy, needs groups", fix="pass groups")


Home = Groups | Hierarchy  # the groups of a leaf, as the verbs take them


def current(home: Any) -> Any:
    """What has taken the place of groups in a `reset`, as often as there was one; else the same."""
    while isinstance(home, Groups) and home.state.follows is not None:
        home = home.state.follows.derived(home.derive)
    return home

"""`Hierarchy`: the levels that data crosses inside a partition group, and the memory it reuses.

[Note: placements] Shards are cut over all levels of a route. A run keeps what it gathered over the
first `hold` levels until its end, and only gathers over the other levels again. Over the first
`late` levels, gradients are reduced once per step, as the sum over its micro-steps.

[Note: mean over more ranks] Some leaves, such as experts, live on fewer ranks than there are
losses, and the gradient of such a leaf sums over tokens that other ranks sent. With `mean_over=n`,
hop 1 multiplies its mean by s / n, where s is the number of ranks of these groups, so that in
effect it divides the sum by n. This happens wherever a full gradient becomes shards, and nowhere
else: hop 2 stays a plain mean, which serves parameters too and can be repeated.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any

import torch

from mics_fn.groups.buffers import Buffers, Ring
from mics_fn.groups.communicator import Comm
from mics_fn.groups.life import Life
from mics_fn.groups.topology import chunk_of
from mics_fn.schedules import Channel

_DISK_TIMEOUT_S = 600.0  # of a chunk that is brought from a file


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
    hold: int = 0  # outer levels over which a run gathers once; see [Note: placements]
    late: int = 0  # outer levels over which gradients are reduced once per step
    grad_factor: float = 1.0  # see [Note: mean over more ranks]
    names: tuple[str, ...] = ()  # all levels of the topology, outermost first

    @cached_property
    def _splits(self) -> dict[int, tuple["Route", "Route"]]:
        return {}

    def split(self, count: int) -> tuple["Route", "Route"]:
        """Two routes: the outermost `count` levels, and the others."""
        if count not in self._splits:
            halves = (slice(0, count), slice(count, None))
            self._splits[count] = tuple(  # pyright: ignore[reportArgumentType]
                replace(
                    self,
                    levels=self.levels[half],
                    coords=self.coords[half],
                    chunk=chunk_of(self.coords[half], self.sizes[half]),
                    hold=0,
                    late=0,
                )
                for half in halves
            )
        return self._splits[count]

    @property
    def comms(self) -> list[Comm]:
        """The two communicators of each level, in the order in which they were made."""
        return [comm for level in self.levels for comm in (level.gather, level.reduce)]

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
        for what, outer in (("params", self.hold), ("grads", self.late)):
            if outer:
                parts.append(f"{what} over {self.split(outer)[1].size}")
        if self.grad_factor != 1.0:
            parts.append(f"gradients times {self.grad_factor:g}")
        adds = self.levels[0].reduce.adds if self.levels else ""
        return " ".join(parts) + adds


@dataclass(frozen=True, eq=False)
class Pools:
    """Memory that the verbs over one hierarchy reuse from step to step."""

    reducing: Buffers = field(default_factory=Buffers)  # full gradients, in verbs that wait
    hops: Ring = field(default_factory=Ring)  # the same, during backward
    fetched: Buffers = field(default_factory=Buffers)  # gathered buckets
    held: Buffers = field(default_factory=Buffers)  # buckets gathered over the outer levels only
    # A chunk never shares a larger buffer, so an optimizer always sees it as one tensor.
    chunks: Buffers = field(default_factory=Buffers)
    codes: Buffers = field(default_factory=Buffers)  # what travels in the place of parameters
    sums: dict[Any, Any] = field(default_factory=dict)  # free memory for gradients elsewhere

    @property
    def waiting_bytes(self) -> int:
        """Bytes that these pools hold between two steps."""
        pools = (self.reducing, self.fetched, self.held, self.chunks, self.codes)
        return self.hops.nbytes + sum(pool.waiting_bytes for pool in pools)


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
      agreed: digests of trees that were compared before.

    Example:
      >>> hierarchy = make_groups(1).hierarchy
      >>> hierarchy, hierarchy.partition_size, hierarchy.ranks
      (Hierarchy(one rank, chunk 0 of 1), 1, (0,))
    """

    route: Route
    device: torch.device
    partition: Comm
    channel: Channel = field(default_factory=Channel)
    pools: Pools = field(default_factory=Pools)
    agreed: set = field(default_factory=set)

    @classmethod
    def of_one(cls, device: torch.device) -> "Hierarchy":
        """A partition group of one rank, without `Groups`."""
        return cls(Route(), device, Comm.of_one("partition", 0))

    @property
    def hierarchy(self) -> "Hierarchy":
        """Itself, as `Groups.hierarchy`."""
        return self

    @property
    def life(self) -> Life:
        """The shared state of its groups."""
        return self.partition.life

    @property
    def closed(self) -> bool:
        """Whether its groups were closed."""
        return self.partition.closed

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
    apart = False

    @cached_property
    def replicas(self) -> Comm:
        """A communicator of this rank alone."""
        return Comm.of_one("replicas", self.partition.ranks[self.partition.rank], self.life)

    @cached_property
    def elsewhere(self) -> Comm:
        """What brings chunks from host memory and from files: a communicator of this rank alone."""
        return self._of_one("elsewhere")

    @cached_property
    def sums_elsewhere(self) -> Comm:
        """The same for sums of gradients, since a fetch must not wait for a reduction."""
        return self._of_one("sums elsewhere")

    def _of_one(self, name: str) -> Comm:
        own = self.partition.ranks[self.partition.rank]
        return replace(Comm.of_one(name, own, self.life), timeout_s=_DISK_TIMEOUT_S)

    def describe(self) -> str:
        """The facts that must be equal on every rank, as text for digests."""
        return self.route.facts

    def __repr__(self) -> str:
        levels = " x ".join(f"{level.name} {level.gather.size}" for level in self.route.levels)
        return f"Hierarchy({levels or 'one rank'}, chunk {self.route.chunk} of {self.route.size})"

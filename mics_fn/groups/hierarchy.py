"""The levels of a partition group: the route that data takes, and what verbs keep along it.

[Note: placements] Shards are cut over all levels of a route. What a run gathered over the first
`hold` levels it keeps to its end, so that it gathers only over the others again. Of a step's
gradients only the sum over micro-steps is reduced over the first `late` levels.

[Note: mean over more ranks] Leaves that live on fewer ranks than there are losses, such as experts,
have gradients that sum over tokens of other ranks too. With `mean_over=n` hop 1 multiplies its mean
by the ranks of these groups over n, so that their sum is divided by n. That happens wherever a full
gradient becomes shards, and nowhere else: hop 2 stays a plain mean, of parameters as well, and can
be repeated.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod

import torch

from mics_fn.groups.buffers import Buffers, Slots
from mics_fn.groups.communicator import Comm, Life
from mics_fn.groups.topology import chunk_of
from mics_fn.schedules import Channel

MOST_FULL = 3  # buckets of gradients in hop 1 at a time: one on each link, and one being packed


@dataclass(frozen=True, eq=False)
class Level:
    """One hop of a route; two communicators, so that gathers and reductions can overlap."""

    name: str
    gather: Comm
    reduce: Comm


@dataclass(frozen=True, eq=False)
class Route:
    """The levels that data crosses, outermost (slowest link) first, and this rank's place on them.

    A partition group of one rank has a route without levels.
    """

    levels: tuple[Level, ...] = ()
    coords: tuple[int, ...] = ()  # this rank's place at each level
    chunk: int = 0  # number of the chunk that this rank keeps
    hold: int = 0  # outer levels over which a run gathers once; see [Note: placements]
    late: int = 0  # outer levels over which only the sum over micro-steps is reduced
    grad_factor: float = 1.0  # see [Note: mean over more ranks]

    @cached_property
    def _splits(self) -> dict[int, tuple["Route", "Route"]]:
        return {}

    def split(self, count: int) -> tuple["Route", "Route"]:
        """The outermost `count` levels and the others, as routes of their own."""
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
    def sizes(self) -> tuple[int, ...]:
        """Ranks at each level."""
        return tuple(level.gather.size for level in self.levels)

    @cached_property
    def size(self) -> int:
        """Ranks in the partition group."""
        return prod(self.sizes)

    @cached_property
    def facts(self) -> str:
        """Its levels and placement, the same on every rank, for digests."""
        parts = [",".join(f"{level.name}:{level.gather.size}" for level in self.levels) or "none"]
        for what, outer in (("params", self.hold), ("grads", self.late)):
            if outer:
                parts.append(f"{what} over {self.split(outer)[1].size}")
        if self.grad_factor != 1.0:
            parts.append(f"gradients times {self.grad_factor:g}")
        if any(level.reduce.fixed_order for level in self.levels):
            parts.append("in fixed order")
        return " ".join(parts)


@dataclass(frozen=True, eq=False)
class Pools:
    """Memory that the verbs over one hierarchy use again, step after step."""

    reducing: Buffers = field(default_factory=Buffers)  # full gradients of verbs that wait
    slots: Slots = field(default_factory=lambda: Slots(MOST_FULL))  # of those that overlap backward
    fetched: Buffers = field(default_factory=Buffers)  # gathered buckets
    held: Buffers = field(default_factory=Buffers)  # what a run keeps of them over inner levels
    # A chunk never shares a larger buffer, so an optimizer always sees it as one tensor.
    chunks: Buffers = field(default_factory=Buffers)

    @property
    def waiting_bytes(self) -> int:
        """Memory that waits for the next step between two of them."""
        pools = (self.reducing, self.fetched, self.held, self.chunks)
        return self.slots.nbytes + sum(pool.waiting_bytes for pool in pools)


@dataclass(frozen=True, eq=False, repr=False)
class Hierarchy:
    """A partition group as the verbs inside it need it: its route, its memory, its messages.

    It answers the questions that verbs ask of `Groups`, as groups of one replica would, so that
    they take either. Only hop 2 needs `Groups`.
    """

    route: Route
    device: torch.device
    partition: Comm  # control messages inside the partition group
    channel: Channel = field(default_factory=Channel)  # of its ranks, through the store
    pools: Pools = field(default_factory=Pools)
    agreed: set = field(default_factory=set)  # trees that its ranks agreed on before

    @classmethod
    def of_one(cls, device: torch.device) -> "Hierarchy":
        """A partition group of one rank that belongs to no groups."""
        return cls(Route(), device, Comm.of_one("partition", 0))

    @property
    def hierarchy(self) -> "Hierarchy":
        """Itself."""
        return self

    @property
    def life(self) -> Life:
        """That of the groups that it belongs to."""
        return self.partition.life

    @property
    def closed(self) -> bool:
        """Whether the groups that it belongs to were closed."""
        return self.partition.closed

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks of the partition group."""
        return self.partition.ranks

    stacked_ranks = ranks  # in the order in which `collect_all` has them

    @property
    def partition_size(self) -> int:
        """Ranks that share one replica."""
        return self.route.size

    @property
    def num_replicas(self) -> int:
        """One: of others it does not know."""
        return 1

    @cached_property
    def replicas(self) -> Comm:
        """This rank alone."""
        return Comm.of_one("replicas", self.partition.ranks[self.partition.rank], self.life)

    def describe(self) -> str:
        """The facts that are the same on every rank, for digests."""
        return self.route.facts

    def __repr__(self) -> str:
        levels = " x ".join(f"{level.name} {level.gather.size}" for level in self.route.levels)
        return f"Hierarchy({levels or 'one rank'}, chunk {self.route.chunk} of {self.route.size})"

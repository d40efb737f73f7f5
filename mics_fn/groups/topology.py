"""Rank arithmetic: which ranks form which group, for any world, without processes or devices.

Positions number the ranks of one data-parallel job, from 0 to n - 1; if the job is the whole world,
they are the global ranks. Sizes and coordinates are written outermost (slowest link) first.

[Note: chunk order] In a partition group, the rank with coordinates (x0, ..., xL) keeps chunk
xL * (n0 * ... * nL-1) + ... + x1 * n0 + x0: chunks are numbered innermost level first. A gather
that takes the outermost level first then fills one contiguous run of the output in each level, so
every level is a plain all-gather that writes in place. A reduce-scatter is the reverse.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from math import prod

from mics_fn.errors import PlanError, message, name_ranks

FLAT = "flat"  # the name of all levels as one, in communicators and in the ledger
_NAMES = ("rack", "node", "rank")
_SHOWN = 8  # a printed plan shortens longer lists of groups, or of members of a group


@dataclass(frozen=True)
class Topology:
    """How ranks are wired: one size and one name per level, outermost (slowest link) first.

    Args:
      sizes: number of ranks in a node last, of nodes in a rack before it, and so on; their product
        is the number of ranks.
      names: one per size; by default "rank", "node" and "rack" from the innermost level outwards,
        and "level0", "level1", ... for further levels. "flat" stands for all levels as one, and
        cannot be the name of one of them.

    Raises:
      PlanError: a size is not a positive int, names do not match sizes, or one is "flat".

    Example:
      >>> topology = Topology((2, 4))
      >>> topology.world_size, topology.names, str(topology)
      (8, ('node', 'rank'), 'node 2 x rank 4')
    """

    sizes: tuple[int, ...]
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        sizes = tuple(self.sizes)
        for i, size in enumerate(sizes):
            if type(size) is not int or size < 1:
                raise PlanError(f"Topology: sizes[{i}]={size!r}, expected an int of at least 1")
        extra = tuple(f"level{i}" for i in range(len(sizes) - len(_NAMES)))
        names = tuple(self.names) or (extra + _NAMES)[-len(sizes) :]
        if not len(names) == len(sizes) == len(set(names) - {FLAT}):
            what = f"Topology: names {names} do not name {len(sizes)} sizes {sizes}"
            raise PlanError(what, fix=f"pass one name per size, and not {FLAT!r}, or none")
        object.__setattr__(self, "sizes", sizes)
        object.__setattr__(self, "names", names)

    @classmethod
    def of(cls, world_size: int, node_size: int | None = None) -> "Topology":
        """The topology of equal nodes; None: one flat node.

        Raises:
          PlanError: the number does not divide that of ranks.

        Example:
          >>> print(Topology.of(24, node_size=4))
          node 6 x rank 4
        """
        if node_size is None:
            return cls((world_size,))
        if node_size < 1 or world_size % node_size:
            what = f"node_size={node_size} does not divide {world_size}"
            raise PlanError(what, fix="pass a number that does")
        return cls((world_size // node_size, node_size))

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return prod(self.sizes)

    def __str__(self) -> str:
        return _by_level(self.names, self.sizes)


@dataclass(frozen=True)
class Plan:
    """Every group of a world, as positions, computed on demand; made by `plan_groups`.

    Args:
      topology: how ranks are wired.
      partition_size: number of ranks that share one replica.

    Raises:
      PlanError: the size does not fit; the text lists sizes that would.

    Example:
      >>> plan = plan_groups(Topology((2, 4)), 4)
      >>> plan.num_replicas, plan.partition_group(5), plan.replication_group(5)
      (2, (4, 5, 6, 7), (1, 5))
    """

    topology: Topology
    partition_size: int
    # Of the levels of a partition group, outermost first, without levels of size 1; () if p = 1.
    level_names: tuple[str, ...] = field(init=False, compare=False, repr=False)
    level_sizes: tuple[int, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        sizes = valid_partition_sizes(self.topology)
        if type(self.partition_size) is not int or self.partition_size not in sizes:
            what = f"partition_size={self.partition_size!r} does not fit {self.world_size} ranks"
            fix = f"pass one of the sizes that work: {', '.join(map(str, sizes))}"
            raise PlanError(f"{what} = {self.topology}", fix=fix)
        names, taken, remaining = [], [], self.partition_size
        wired = zip(reversed(self.topology.names), reversed(self.topology.sizes), strict=True)
        for name, size in wired:
            if remaining > 1 and size > 1:
                names.append(name)
                taken.append(min(size, remaining))
                remaining //= taken[-1]
        object.__setattr__(self, "level_names", tuple(reversed(names)))
        object.__setattr__(self, "level_sizes", tuple(reversed(taken)))

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.topology.world_size

    @property
    def num_replicas(self) -> int:
        """Number of partition groups, each of which holds one whole replica."""
        return self.world_size // self.partition_size

    @cached_property
    def partition_groups(self) -> tuple[tuple[int, ...], ...]:
        """Runs of contiguous positions, each of which holds one complete replica."""
        p = self.partition_size
        return tuple(tuple(range(i, i + p)) for i in range(0, self.world_size, p))

    def partition_group(self, position: int) -> tuple[int, ...]:
        """The partition group that `position` is in, ascending."""
        return self.partition_groups[position // self.partition_size]

    def replication_group(self, position: int) -> tuple[int, ...]:
        """The positions that hold the same shard as `position`, ascending."""
        p = self.partition_size
        return tuple(range(range(self.world_size)[position] % p, self.world_size, p))

    def coords(self, position: int) -> tuple[int, ...]:
        """Coordinates of `position` inside its partition group, one per level."""
        place, coords = range(self.world_size)[position] % self.partition_size, []
        for size in reversed(self.level_sizes):
            place, x = divmod(place, size)
            coords.append(x)
        return tuple(reversed(coords))

    def chunk(self, position: int) -> int:
        """The number of the chunk that `position` keeps; see [Note: chunk order]."""
        return chunk_of(self.coords(position), self.level_sizes)

    def level_group(self, position: int, level: int) -> tuple[int, ...]:
        """The positions that differ from `position` in `level` only, ordered by that coordinate."""
        stride, size = prod(self.level_sizes[level + 1 :]), self.level_sizes[level]
        first = position - self.coords(position)[level] * stride
        return tuple(range(first, first + size * stride, stride))

    def chunk_order(self, position: int) -> tuple[int, ...]:
        """The partition group of `position`, ordered by the chunks that its members keep."""
        return tuple(sorted(self.partition_group(position), key=self.chunk))

    def __str__(self) -> str:
        p, replicas = self.partition_size, self.num_replicas
        levels = _by_level(self.level_names, self.level_sizes) or "none, a rank is a whole replica"
        partition = [fold_ranks(group) for group in self.partition_groups]
        rows = [fold_ranks(self.replication_group(i)) for i in range(p)]
        lines = [
            f"partition groups ({replicas} of {p}): {_shortened(' | ', partition)}",
            f"levels of each, outermost first: {levels}",
            f"replication groups ({p} of {replicas}): {_shortened(' | ', rows)}",
        ]
        return message(f"{self.world_size} ranks = {self.topology}", lines)


def plan_groups(topology: Topology | int, partition_size: int) -> Plan:
    """Partition groups, replication groups and levels of a world; pure arithmetic.

    Args:
      topology: how ranks are wired, or the number of ranks of one flat node.
      partition_size: number of ranks that share one replica. It must divide the ranks of a node, or
        be a whole number of nodes that divides a rack, and so on: a group never crosses the border
        of a node in its middle.

    Returns:
      A frozen `Plan`.

    Raises:
      PlanError: the size does not fit; the text lists sizes that would.

    Example:
      >>> print(plan_groups(Topology((2, 4)), 4))
      8 ranks = node 2 x rank 4
        partition groups (2 of 4): 0-3 | 4-7
        levels of each, outermost first: rank 4
        replication groups (4 of 2): 0, 4 | 1, 5 | 2, 6 | 3, 7

    References: MiCS, Zhang et al., VLDB 2022, arXiv:2205.00119.
    """
    wired = topology if isinstance(topology, Topology) else Topology.of(topology)
    return Plan(wired, partition_size)


def chunk_of(coords: Sequence[int], sizes: Sequence[int]) -> int:
    """Number of the chunk that a rank keeps, innermost level first; see [Note: chunk order].

    >>> [chunk_of((x0, x1), (2, 3)) for x0 in range(2) for x1 in range(3)]
    [0, 2, 4, 1, 3, 5]
    """
    chunk = 0
    for x, size in zip(reversed(coords), reversed(sizes), strict=True):
        chunk = chunk * size + x
    return chunk


@lru_cache(maxsize=64)
def valid_partition_sizes(topology: Topology) -> tuple[int, ...]:
    """All partition sizes that fit a topology, ascending.

    >>> valid_partition_sizes(Topology((3, 4)))
    (1, 2, 4, 12)
    """
    fits, unit = set(), 1
    for size in reversed(topology.sizes):
        fits.update(unit * d for d in range(1, size + 1) if size % d == 0)
        unit *= size
    return tuple(sorted(fits))


def fold_ranks(ranks: Sequence[int]) -> str:
    """Ranks as short text: runs are folded, and long lists are shortened.

    >>> fold_ranks(range(4, 8)), fold_ranks(range(0, 4096, 8))
    ('4-7', '0, 8, 16, ..., 4088')
    """
    return _shortened(", ", name_ranks(ranks).partition(" ")[2].split(", "))


def _shortened(between: str, parts: list[str]) -> str:
    return between.join(parts if len(parts) <= _SHOWN else [*parts[:3], "...", parts[-1]])


def _by_level(names: Sequence[str], sizes: Sequence[int]) -> str:
    return " x ".join(f"{name} {size}" for name, size in zip(names, sizes, strict=True))

"""Flat buckets as arithmetic: which leaf lies where, and which part of it a chunk holds.

[Note: flat buckets] The leaves of a bucket lie in one padded 1D buffer of `numel` elements, which
is cut into `parts` equal, contiguous chunks. Each rank of a partition group keeps one of them; the
route of its groups says which. A leaf's local piece is the part of its range that lies in the
chunk, and may be empty. A gather is then an all-gather whose output *is* the parameters, as views.
Padding lies between leaves and behind them. It is never part of a leaf, so it never reaches a
result. A `Bucket` does not depend on the rank that holds it, so structures compare across ranks.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from math import prod
from typing import NamedTuple

import torch

from mics_fn.errors import PlanError
from mics_fn.tree import digest, natural

ALIGN_BYTES = 16  # for vector loads and NCCL; the size of most leaves is a multiple of it anyway
BUCKET_BYTES = 25 * 2**20


@dataclass(frozen=True)
class Bucket:
    """Leaves that travel in one collective.

    Args:
      index: its number among the buckets of its tree.
      dtype: of the shards of all its leaves.
      parts: number of chunks, which is the size p of the partition group.
      shapes: the leaves' full shapes, in the order in which they lie in the buffer.
      offsets: where each leaf begins, in elements.
      numel: length of the buffer in elements, padding included; a multiple of `parts`.
      trainable: whether its leaves get gradients.
      compute: dtype of the full leaves, in which a gather sends them; default `dtype`.
      reduce: dtype in which gradients travel; default `dtype`.
      accumulate: dtype of their sum over micro-steps; default `reduce`, but at least float32.
      names: some of the leaves' paths and a digest of all, so that trees of one layout differ.
    """

    index: int
    dtype: torch.dtype
    parts: int
    shapes: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]
    numel: int
    trainable: bool = True
    compute: torch.dtype = None  # pyright: ignore[reportAssignmentType]
    reduce: torch.dtype = None  # pyright: ignore[reportAssignmentType]
    accumulate: torch.dtype = None  # pyright: ignore[reportAssignmentType]
    names: str = ""

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "compute", self.compute or self.dtype)
        put(self, "reduce", self.reduce or self.dtype)
        least = torch.promote_types(self.reduce, torch.float32)
        put(self, "accumulate", self.accumulate or least)

    @property
    def chunk(self) -> int:
        """Elements of each rank's chunk, padding included."""
        return self.numel // self.parts

    @property
    def nbytes(self) -> int:
        """Bytes of the gathered buffer, padding included."""
        return self.numel * self.compute.itemsize

    @cached_property
    def exact(self) -> "Bucket":
        """This bucket with `compute` and `reduce` set to its own dtype, so that nothing rounds."""
        plain = replace(self, compute=self.dtype, reduce=self.dtype)
        return self if plain == self else _one_of(plain)

    @cached_property
    def _text(self) -> str:
        facts = [str(getattr(self, f.name)) for f in fields(self)]
        return f"bucket {self.index} ({self.names}; layout {_short(facts)})"

    def __str__(self) -> str:
        """What ranks compare before they move it."""
        return self._text

    @cached_property
    def numels(self) -> tuple[int, ...]:
        """Elements of each leaf."""
        return tuple(prod(shape) for shape in self.shapes)

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, f.name) for f in fields(self)))

    # A bucket is part of every leaf's structure: its hash is computed once, and equality tries
    # identity first.

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Bucket) or self._hash != other._hash:
            return False
        return all(getattr(self, f.name) == getattr(other, f.name) for f in fields(self))


class Piece(NamedTuple):
    """What one chunk holds of one leaf; lengths in elements."""

    start: int  # in the chunk
    length: int
    origin: int  # in the flattened leaf


# The other three dtypes of a leaf, as in `Bucket`: compute, reduce, accumulate.
Travel = tuple[torch.dtype | None, torch.dtype | None, torch.dtype | None]


class LeafSpec(NamedTuple):
    """What `plan_buckets` needs to know about a leaf."""

    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: int
    trainable: bool
    group: Hashable  # leaves of different groups never share a bucket
    travel: Travel = (None, None, None)


def plan_buckets(
    leaves: Sequence[LeafSpec],
    *,
    bucket_bytes: int = BUCKET_BYTES,
    order: Callable[[str], object] | None = None,
) -> list[tuple[Bucket, int]]:
    """Decide which leaves share a bucket, and where each of them lies in it.

    Args:
      leaves: the leaves, in tree order.
      bucket_bytes: a bucket is closed before it would grow past this size. A leaf that is larger
        gets a bucket of its own.
      order: sort key of a path. By default numbers in paths compare as numbers, so that `layers.2`
        comes before `layers.10`.

    Returns:
      For each leaf its bucket and its slot in that bucket.

    Raises:
      PlanError: `bucket_bytes` is not a positive number.

    Example:
      >>> spec = LeafSpec("w", (3, 2), torch.float32, 2, True, None)
      >>> [(bucket, slot)] = plan_buckets([spec])
      >>> bucket.numel, bucket.chunk, slot
      (8, 4, 0)
    """
    if not bucket_bytes > 0:
        raise PlanError(f"bucket_bytes={bucket_bytes} must be above 0")
    key = order or natural
    ranked = sorted(range(len(leaves)), key=lambda i: (key(leaves[i].path), i))  # pyright: ignore
    open_buckets: dict[Hashable, list[int]] = {}
    open_bytes: dict[Hashable, int] = {}
    closed: list[list[int]] = []
    for i in ranked:
        leaf = leaves[i]
        kind = (leaf.dtype, leaf.parts, leaf.trainable, leaf.group, leaf.travel)
        nbytes = prod(leaf.shape) * leaf.dtype.itemsize
        if kind not in open_buckets or open_bytes[kind] + nbytes > bucket_bytes:
            open_buckets[kind], open_bytes[kind] = [], 0
            closed.append(open_buckets[kind])
        open_buckets[kind].append(i)
        open_bytes[kind] += nbytes
    found: dict[int, tuple[Bucket, int]] = {}
    for index, members in enumerate(closed):
        bucket = _lay_out(index, [leaves[i] for i in members])
        found.update({i: (bucket, slot) for slot, i in enumerate(members)})
    return [found[i] for i in range(len(leaves))]


def _lay_out(index: int, leaves: Sequence[LeafSpec]) -> Bucket:
    first = leaves[0]
    compute, reduce, accumulate = first.travel
    smallest = min(dtype.itemsize for dtype in (first.dtype, compute, reduce) if dtype)
    align = max(1, ALIGN_BYTES // smallest)
    offsets, end = [], 0
    for leaf in leaves:
        offsets.append(end)
        end += -(-prod(leaf.shape) // align) * align
    whole = first.parts * align
    bucket = Bucket(
        index=index,
        dtype=first.dtype,
        parts=first.parts,
        shapes=tuple(leaf.shape for leaf in leaves),
        offsets=tuple(offsets),
        numel=-(-end // whole) * whole,
        trainable=first.trainable,
        compute=compute or first.dtype,
        reduce=reduce or first.dtype,
        accumulate=accumulate,  # pyright: ignore[reportArgumentType]
        names=_named([leaf.path for leaf in leaves]),
    )
    return _one_of(bucket)


def _named(paths: Sequence[str]) -> str:
    """Paths of leaves as a short text, which is another one for other paths.

    >>> _named(["w"]), _named(["a", "b", "c"])
    ('w', 'a, b, ..., paths 13e22856')
    """
    if len(paths) < 3:
        return ", ".join(paths)
    return f"{paths[0]}, {paths[1]}, ..., paths {_short(paths)}"


def _short(texts: Sequence[str]) -> str:
    return digest(texts).hex()[:8]


@lru_cache(maxsize=4096)
def _one_of(bucket: Bucket) -> Bucket:
    """The first bucket equal to this one, so that comparing them is comparing identities."""
    return bucket


@lru_cache(maxsize=4096)
def pieces(bucket: Bucket, chunk: int) -> tuple[Piece, ...]:
    """What chunk number `chunk` holds of each leaf of the bucket; length 0 if it holds nothing.

    >>> [(bucket, _)] = plan_buckets([LeafSpec("w", (6,), torch.float32, 2, True, None)])
    >>> pieces(bucket, 0), pieces(bucket, 1)
    ((Piece(start=0, length=4, origin=0),), (Piece(start=0, length=2, origin=4),))
    """
    low, high = chunk * bucket.chunk, (chunk + 1) * bucket.chunk
    found = []
    for offset, numel in zip(bucket.offsets, bucket.numels, strict=True):
        start, stop = max(low, offset), min(high, offset + numel)
        if start < stop:
            found.append(Piece(start - low, stop - start, start - offset))
        else:
            found.append(Piece(0, 0, 0))
    return tuple(found)


@lru_cache(maxsize=4096)
def gaps(bucket: Bucket) -> tuple[tuple[int, int], ...]:
    """The ranges of padding in the full buffer, as (start, length) in elements."""
    ends = [0, *(o + n for o, n in zip(bucket.offsets, bucket.numels, strict=True))]
    starts = [*bucket.offsets, bucket.numel]
    return tuple((end, start - end) for end, start in zip(ends, starts, strict=True) if start > end)

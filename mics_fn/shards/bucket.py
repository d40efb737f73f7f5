"""Flat buckets as arithmetic: which leaf lies where, and which part of it a chunk holds.

[Note: flat buckets] The leaves of a bucket lie in one padded 1D buffer of `numel` elements, which
is cut into `parts` equal, contiguous chunks. Each rank of a partition group keeps one of them; the
route of its groups says which. A leaf's local piece is the part of its range that lies in the
chunk, and may be empty. A gather is then an all-gather whose output *is* the parameters, as views.
A `Bucket` does not depend on the rank that holds it, so structures compare across ranks.

Padding lies between leaves and behind them. It is never part of a leaf, so it never reaches a
result, but it is kept and sent as elements of leaves are. A leaf begins at a multiple of 16 bytes
in each dtype in which it travels, and of the longest block of the codes that it is kept or sent as,
which is a power of two. The buffer ends at `parts` times such a multiple. So a leaf of 5 elements
takes 8 in float32, and 256 with `hop2=int8[256]`: long blocks suit large leaves.
"""

import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache, partial
from math import prod
from typing import Any, NamedTuple

import torch

from mics_fn.collectives import SHORT_NAMES, Codec, Wire
from mics_fn.tree import digest, natural

BUCKET_BYTES = 25 * 2**20
ALIGN_BYTES = 16  # for vector loads and NCCL; the size of most leaves is a multiple of it anyway


@dataclass(frozen=True)
class Formats:
    """The dtypes and codes that a leaf is kept, computed and sent in.

    Args:
      dtype: of the shards.
      compute: dtype of the full leaf, in which a gather sends it; default `dtype`.
      reduce: dtype in which gradients travel; default `dtype`.
      accumulate: dtype of their sum over micro-steps; default `reduce`, but at least float32.
      gather: what travels in gathers; None means values in `compute`.
      hop1: what travels in hop 1; None means values in `reduce`.
      hop2: what travels in hop 2, or in which dtype; None means values in `reduce`.
      state: the codes that moments are kept as; None means values in `dtype`.
      codes: the codes that a leaf is kept as, which gathers send; None means values. Such leaves
        are frozen, and float32 is their dtype: it holds what codes stand for.
    """

    dtype: torch.dtype
    compute: torch.dtype = None  # pyright: ignore[reportAssignmentType]
    reduce: torch.dtype = None  # pyright: ignore[reportAssignmentType]
    accumulate: torch.dtype = None  # pyright: ignore[reportAssignmentType]
    gather: Wire | None = None
    hop1: Wire | None = None
    hop2: Codec | torch.dtype | None = None
    state: Codec | None = None
    codes: Codec | None = None

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "compute", self.compute or self.dtype)
        put(self, "reduce", self.reduce or self.dtype)
        least = torch.promote_types(self.reduce, torch.float32)
        put(self, "accumulate", self.accumulate or least)

    @property
    def align(self) -> int:
        """Elements that leaves are aligned to, of which all others are divisors.

        In a block of codes the largest element sets the scale, so no block has parts of two leaves.
        """
        least = min(self.dtype.itemsize, self.compute.itemsize, self.reduce.itemsize)
        coded = (self.gather, self.hop1, self.hop2, self.state, self.codes)
        blocks = [x.block for x in coded if isinstance(x, Wire | Codec)]
        return max(1, ALIGN_BYTES // least, *blocks)

    @property
    def formats(self) -> "Formats":
        """These alone, also of a bucket."""
        return Formats(*(getattr(self, field.name) for field in fields(Formats)))

    def __str__(self) -> str:
        """The dtype, and what differs from it."""
        found = {field.name: getattr(self, field.name) for field in fields(Formats)}
        own = found.pop("dtype")
        return ", ".join([_text(own), *_texts({n: x for n, x in found.items() if x != own})])


def _text(value: Any) -> str:
    return SHORT_NAMES.get(value, f"{value}")


def _texts(found: Mapping[str, Any]) -> list[str]:
    return [f"{name}={_text(value)}" for name, value in found.items() if value is not None]


_BUCKETS: weakref.WeakValueDictionary[tuple, "Bucket"] = weakref.WeakValueDictionary()


class _Unique(type):
    """Makes equal buckets one object, so that comparing them is comparing identities."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        made = super().__call__(*args, **kwargs)
        return _BUCKETS.setdefault(tuple(made.facts().values()), made)


@dataclass(frozen=True, eq=False, kw_only=True)
class Bucket(Formats, metaclass=_Unique):
    """Leaves that travel in one collective, all of the same formats.

    Args:
      index: its number among the buckets of its tree.
      parts: number of chunks, which is the size p of the partition group.
      shapes: the leaves' full shapes, in the order in which they lie in the buffer.
      offsets: where each leaf begins, in elements.
      numel: length of the buffer in elements, padding included; a multiple of `parts`.
      trainable: whether its leaves get gradients.
      names: some of the leaves' paths and a digest of all, so that trees of one layout differ.
    """

    index: int
    parts: int
    shapes: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]
    numel: int
    trainable: bool = True
    names: str = ""

    __hash__ = object.__hash__
    __eq__ = object.__eq__  # pyright: ignore[reportAssignmentType]

    def facts(self) -> dict[str, Any]:
        """Its fields."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def __reduce__(self) -> tuple:
        return partial(Bucket, **self.facts()), ()

    @cached_property
    def chunk(self) -> int:
        """Elements of each rank's chunk, padding included."""
        return self.numel // self.parts

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the gathered buffer, padding included."""
        return self.numel * self.compute.itemsize

    @cached_property
    def exact(self) -> "Bucket":
        """This bucket with `compute` and `reduce` set to its own dtype, so that nothing rounds."""
        sent = {"gather": None, "hop1": None, "hop2": None}
        return replace(self, compute=self.dtype, reduce=self.dtype, **sent)

    @cached_property
    def uncoded(self) -> "Bucket":
        """This bucket, which sends values in the place of codes, in the dtypes that it has."""
        hop2 = None if isinstance(self.hop2, Codec) else self.hop2
        return replace(self, gather=None, hop1=None, hop2=hop2)

    @cached_property
    def hop2_format(self) -> torch.dtype | Codec:
        """What hop 2 sends: values in a dtype, or codes."""
        return self.hop2 or self.reduce

    @cached_property
    def gather_wire(self) -> Wire | None:
        """What a gather sends in the place of values: the codes that leaves are kept as, if any."""
        return self.gather if self.codes is None else Wire(self.codes)

    @cached_property
    def wires(self) -> str:
        """What travels where that is not a value in `compute` or `reduce`, as text."""
        return ", ".join(_texts({"gather": self.gather, "hop1": self.hop1, "hop2": self.hop2}))

    @cached_property
    def _title(self) -> str:
        layout = short_digest(map(str, self.facts().values()))
        return f"bucket {self.index} ({self.names}; layout {layout})"

    def __str__(self) -> str:
        """What ranks compare before they move it."""
        return self._title

    @cached_property
    def title(self) -> str:
        """Its number, its first leaf and how many there are, for `inspection.watch`."""
        first = self.names.partition(", ")[0]
        more = " ..." if ", " in self.names else ""
        count = f" ({len(self.shapes)} leaves)" if len(self.shapes) > 1 else ""
        return f"bucket {self.index}: {first}{more}{count}"

    @cached_property
    def numels(self) -> tuple[int, ...]:
        """Elements of each leaf."""
        return tuple(prod(shape) for shape in self.shapes)


def short_digest(texts: Iterable[str]) -> str:
    """Eight hex digits of a digest of these texts."""
    return digest(texts).hex()[:8]


# Ranges of elements: the part of a bucket that a chunk holds of each leaf, and padding.


class Piece(NamedTuple):
    """What one chunk holds of one leaf; lengths in elements."""

    start: int  # in the chunk
    length: int
    origin: int  # in the flattened leaf


@lru_cache(maxsize=4096)
def pieces(bucket: Bucket, chunk: int) -> tuple[Piece, ...]:
    """What chunk number `chunk` holds of each leaf of the bucket; length 0 if it holds nothing.

    >>> how = {"shapes": ((6,),), "offsets": (0,), "numel": 8}
    >>> bucket = Bucket(torch.float32, index=0, parts=2, **how)
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


# Which leaves share a bucket, and where in it each of them lies.


class LeafSpec(NamedTuple):
    """What `plan_buckets` needs to know about a leaf."""

    path: str
    shape: tuple[int, ...]
    formats: Formats
    parts: int
    trainable: bool = True
    group: Hashable = None  # leaves of different groups never share a bucket


def plan_buckets(
    leaves: Sequence[LeafSpec],
    *,
    bucket_bytes: int = BUCKET_BYTES,
    order: Callable[[str], object] | None = None,
    bucket: Callable[[str], object] | None = None,
) -> list[tuple[Bucket, int]]:
    """Decide which leaves share a bucket, and where each of them lies in it.

    Args:
      leaves: the leaves, in tree order.
      bucket_bytes: a bucket is closed before it would grow past this size. A leaf that is larger
        gets a bucket of its own.
      order: sort key of a path. By default numbers in paths compare as numbers, so that `layers.2`
        comes before `layers.10`.
      bucket: key of a path. Of leaves that could share a bucket, neighbours share one only if their
        keys are equal. By default all are.

    Returns:
      For each leaf its bucket and its slot in that bucket.

    Example:
      >>> spec = LeafSpec("w", (3, 2), Formats(torch.float32), 2)
      >>> [(bucket, slot)] = plan_buckets([spec])
      >>> bucket.numel, bucket.chunk, slot
      (8, 4, 0)
    """
    keys: list[Any] = [(order or natural)(leaf.path) for leaf in leaves]
    ranked = sorted(range(len(leaves)), key=lambda i: (keys[i], i))
    last: dict[Hashable, tuple[list[int], int, object]] = {}  # members, bytes and key, by kind
    every: list[list[int]] = []
    for i in ranked:
        leaf = leaves[i]
        kind = (leaf.formats, leaf.parts, leaf.trainable, leaf.group)
        own = None if bucket is None else bucket(leaf.path)
        size = prod(leaf.shape) * leaf.formats.dtype.itemsize
        members, nbytes, key = last.get(kind, ([], 0, own))
        if not members or nbytes + size > bucket_bytes or key != own:
            members, nbytes = [], 0
            every.append(members)
        members.append(i)
        last[kind] = members, nbytes + size, own
    found: dict[int, tuple[Bucket, int]] = {}
    for index, members in enumerate(every):
        made = _bucket_from(index, [leaves[i] for i in members])
        found.update({i: (made, slot) for slot, i in enumerate(members)})
    return [found[i] for i in range(len(leaves))]


def _bucket_from(index: int, leaves: Sequence[LeafSpec]) -> Bucket:
    first, align = leaves[0], leaves[0].formats.align
    offsets, end = [], 0
    for leaf in leaves:
        offsets.append(end)
        end += -(-prod(leaf.shape) // align) * align
    whole = first.parts * align
    return Bucket(
        index=index,
        parts=first.parts,
        shapes=tuple(leaf.shape for leaf in leaves),
        offsets=tuple(offsets),
        numel=-(-end // whole) * whole,
        trainable=first.trainable,
        names=_named([leaf.path for leaf in leaves]),
        **vars(first.formats),
    )


def _named(paths: Sequence[str]) -> str:
    """Paths of leaves as a short text, different for different paths.

    >>> _named(["w"]), _named(["a", "b", "c"])
    ('w', 'a, b, ..., paths 13e22856')
    """
    if len(paths) < 3:
        return ", ".join(paths)
    return f"{paths[0]}, {paths[1]}, ..., paths {short_digest(paths)}"


def with_parts(bucket: Bucket, parts: int) -> Bucket:
    """The bucket of the same leaves in groups of another size.

    >>> [(bucket, _)] = plan_buckets([LeafSpec("w", (6,), Formats(torch.float32), 1)])
    >>> bucket.numel, with_parts(bucket, 4).numel
    (8, 16)
    """
    whole, end = parts * bucket.align, bucket.offsets[-1] + bucket.numels[-1]
    return replace(bucket, parts=parts, numel=-(-end // whole) * whole)

"""Flat buckets as arithmetic: which leaf lies where, and which part of it a chunk holds.

[Note: flat buckets] The leaves of a bucket lie in one padded 1D buffer of `numel` elements, which
is cut into `parts` equal, contiguous chunks. Each rank of a partition group keeps one of them; the
route of its groups says which. A leaf's local piece is the part of its range that lies in the
chunk, and may be empty. A gather is then an all-gather whose output *is* the parameters, as views.
Padding lies between leaves and behind them. It is never part of a leaf, so it never reaches a
result. A `Bucket` does not depend on the rank that holds it, so structures compare across ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from math import prod
from typing import Any

import torch

from mics_fn.collectives import SHORT_NAMES, Codec, Wire
from mics_fn.tree import digest

BUCKET_BYTES = 25 * 2**20
NEWER = ("gather", "hop1", "hop2", "state", "codes")  # a bucket's text names those that are set


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
      gather: what travels in gathers; None means values in `compute`.
      hop1: what travels in hop 1; None means values in `reduce`.
      hop2: what travels in hop 2, or in which dtype; None means values in `reduce`.
      state: the codes that moments of its leaves are kept as; None means values in `dtype`.
      codes: the codes that its leaves are kept as, which gathers send; None means values. Such
        leaves are frozen, and float32 is their dtype: it holds what codes stand for.
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
    gather: Wire | None = None
    hop1: Wire | None = None
    hop2: Wire | torch.dtype | None = None
    state: Codec | None = None
    codes: Codec | None = None

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
        wires = {"gather": None, "hop1": None, "hop2": None}
        plain = replace(self, compute=self.dtype, reduce=self.dtype, **wires)
        return self if plain == self else one_of(plain)

    @cached_property
    def uncoded(self) -> "Bucket":
        """This bucket, which sends values in the place of codes, in the dtypes that it has."""
        hop2 = None if isinstance(self.hop2, Wire) else self.hop2
        plain = replace(self, gather=None, hop1=None, hop2=hop2)
        return self if plain == self else one_of(plain)

    @property
    def mean_wire(self) -> torch.dtype | Codec:
        """What hop 2 sends: values in a dtype, or codes."""
        if isinstance(self.hop2, Wire):
            return self.hop2.codec  # pyright: ignore[reportReturnType]
        return self.hop2 or self.reduce

    @property
    def gather_wire(self) -> Wire | None:
        """What a gather sends in the place of values: the codes that leaves are kept as, if any."""
        return self.gather if self.codes is None else Wire(self.codes)

    @cached_property
    def wires(self) -> str:
        """What travels where that is not a value in `compute` or `reduce`, as text."""
        named = {"gather": self.gather, "hop1": self.hop1, "hop2": self.hop2}
        found = {name: wire for name, wire in named.items() if wire is not None}
        return ", ".join(f"{name}={SHORT_NAMES.get(w, w)}" for name, w in found.items())  # pyright: ignore

    @cached_property
    def _text(self) -> str:
        named = [f.name for f in fields(self) if f.name not in NEWER]
        facts = [*(str(getattr(self, name)) for name in named), *filter(None, [self.wires])]
        facts += [f"state={self.state}"] if self.state else []
        facts += [f"codes={self.codes}"] if self.codes else []
        return f"bucket {self.index} ({self.names}; layout {short_digest(facts)})"

    def __str__(self) -> str:
        """What ranks compare before they move it."""
        return self._text

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

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, f.name) for f in fields(self)))

    def __reduce__(self) -> tuple:  # without its hash, which another process computes otherwise
        return _bucket_of, tuple(getattr(self, f.name) for f in fields(self))

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


def short_digest(texts: Sequence[str]) -> str:
    """Eight hex digits of a digest of these texts."""
    return digest(texts).hex()[:8]


@lru_cache(maxsize=4096)
def one_of(bucket: Bucket) -> Bucket:
    """The first bucket equal to this one, so that comparing them is comparing identities."""
    return bucket


def _bucket_of(*facts: Any) -> Bucket:
    return one_of(Bucket(*facts))

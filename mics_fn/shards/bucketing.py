"""Which leaves share a bucket, and where in it each of them lies.

See [Note: flat buckets] in `bucket`. A bucket begins and ends its leaves on borders that suit all
dtypes in which it travels, and on those of the blocks of all codes that it is kept or sent as.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from math import lcm, prod
from typing import Any, NamedTuple

import torch

from mics_fn.collectives import Codec, Wire
from mics_fn.errors import PlanError, message
from mics_fn.shards.bucket import BUCKET_BYTES, NEWER, Bucket, one_of, short_digest
from mics_fn.tree import natural

ALIGN_BYTES = 16  # for vector loads and NCCL; the size of most leaves is a multiple of it anyway

# The other three dtypes of a leaf, as in `Bucket`: compute, reduce, accumulate.
Travel = tuple[torch.dtype | None, torch.dtype | None, torch.dtype | None]
# What travels in the place of values: gather, hop1, hop2.
Sent = tuple[Wire | None, Wire | None, Wire | torch.dtype | None]


class LeafSpec(NamedTuple):
    """What `plan_buckets` needs to know about a leaf."""

    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: int
    trainable: bool
    group: Hashable  # leaves of different groups never share a bucket
    travel: Travel = (None, None, None)
    sent: Sent = (None, None, None)
    state: Codec | None = None
    codes: Codec | None = None


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

    Raises:
      PlanError: the keys of `order` cannot be compared.

    Example:
      >>> spec = LeafSpec("w", (3, 2), torch.float32, 2, True, None)
      >>> [(bucket, slot)] = plan_buckets([spec])
      >>> bucket.numel, bucket.chunk, slot
      (8, 4, 0)
    """
    keys: list[Any] = [(order or natural)(leaf.path) for leaf in leaves]
    try:
        ranked = sorted(range(len(leaves)), key=lambda i: (keys[i], i))
    except TypeError as error:
        fix = "let order= give numbers only, or texts only"
        text = "order= gives keys that cannot be compared with each other"
        raise PlanError(message(text, [f"{error}"], fix)) from error
    open_buckets: dict[Hashable, list[int]] = {}
    open_bytes: dict[Hashable, int] = {}
    open_keys: dict[Hashable, object] = {}
    closed: list[list[int]] = []
    for i in ranked:
        leaf = leaves[i]
        kind = (leaf.dtype, leaf.parts, leaf.trainable, leaf.group, *leaf[6:])
        nbytes = prod(leaf.shape) * leaf.dtype.itemsize
        own = None if bucket is None else bucket(leaf.path)
        full = open_bytes.get(kind, 0) + nbytes > bucket_bytes
        if kind not in open_buckets or full or open_keys[kind] != own:
            open_buckets[kind], open_bytes[kind], open_keys[kind] = [], 0, own
            closed.append(open_buckets[kind])
        open_buckets[kind].append(i)
        open_bytes[kind] += nbytes
    found: dict[int, tuple[Bucket, int]] = {}
    for index, members in enumerate(closed):
        made = _lay_out(index, [leaves[i] for i in members])
        found.update({i: (made, slot) for slot, i in enumerate(members)})
    return [found[i] for i in range(len(leaves))]


def _lay_out(index: int, leaves: Sequence[LeafSpec]) -> Bucket:
    first = leaves[0]
    (compute, reduce, accumulate), codes = first.travel, (*first.sent, first.state, first.codes)
    align = _align(codes, first.dtype, compute, reduce)
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
        **dict(zip(NEWER, codes, strict=True)),  # pyright: ignore[reportArgumentType]
    )
    return one_of(bucket)


def _align(wires: Sequence[Any], *dtypes: torch.dtype | None) -> int:
    """Elements that leaves are aligned to, in each of these dtypes and of these codes.

    In a block of codes the largest element sets the scale, so no block has parts of two leaves.
    """
    blocks: Any = [wire.block for wire in wires if isinstance(wire, Wire | Codec)]
    return lcm(max(1, ALIGN_BYTES // min(dtype.itemsize for dtype in dtypes if dtype)), *blocks)


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

    >>> [(bucket, _)] = plan_buckets([LeafSpec("w", (6,), torch.float32, 1, True, None)])
    >>> bucket.numel, with_parts(bucket, 4).numel
    (8, 16)
    """
    codes = (bucket.gather, bucket.hop1, bucket.hop2, bucket.state, bucket.codes)
    align = _align(codes, bucket.dtype, bucket.compute, bucket.reduce)
    whole, end = parts * align, bucket.offsets[-1] + bucket.numels[-1]
    return one_of(replace(bucket, parts=parts, numel=-(-end // whole) * whole))

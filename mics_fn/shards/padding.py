"""Blocks of codes that would pad buckets out of all proportion: they are refused, or warned of.

A leaf begins on a border of the blocks of all codes that it is kept or sent as, so it is padded to
a multiple of all their lengths. Where none of these is a multiple of the others, as 256 and 250,
that is far more than any of them. Where blocks are longer than most leaves it is much as well.
"""

import warnings
from collections.abc import Iterable, Sequence
from math import lcm

from mics_fn.collectives import Codec, Wire
from mics_fn.errors import PlanError, message
from mics_fn.shards.bucket import NEWER, Bucket
from mics_fn.shards.bucketing import LeafSpec

_MOST = 2  # times the elements of the leaves
_SMALL = 2**16  # elements of padding that are no harm


def check_blocks(verb: str, leaves: Sequence[LeafSpec]) -> None:
    """Raise PlanError if a leaf has codes whose blocks do not fit into each other.

    Args:
      verb: for errors.
      leaves: the leaves.

    Raises:
      PlanError: of the lengths of blocks of a leaf, none is a multiple of all others.
    """
    known = set()
    for leaf in leaves:
        fields = (*leaf.sent, leaf.state, leaf.codes)
        if fields in known:
            continue
        known.add(fields)
        blocks = _blocks(fields)
        if blocks and lcm(*blocks.values()) > max(blocks.values()):
            text = f"{verb}: blocks of different lengths for {leaf.path} do not fit into each other"
            most = lcm(*blocks.values())
            lines = [_text(fields), f"it would be padded to a multiple of {most:,} elements"]
            fix = "choose lengths of which the longest is a multiple of the others, as 64 and 256"
            raise PlanError(message(text, lines, fix))


def warn_of_padding(verb: str, buckets: Iterable[Bucket], stacklevel: int) -> None:
    """Warn if a bucket is much larger than its leaves because of the blocks of its codes.

    Args:
      verb: for the text.
      buckets: the buckets of a tree; the worst of them is named.
      stacklevel: as for `warnings.warn`, counted from the caller.
    """
    worst, most = None, float(_MOST)
    for bucket in buckets:
        fields = [getattr(bucket, name) for name in NEWER]
        blocks, own = _blocks(fields), sum(bucket.numels)
        # The end of a bucket is padded for each rank, which is no more than a block for each.
        padded = bucket.numel - bucket.parts * max(blocks.values(), default=0)
        if own and blocks and padded - own > _SMALL and padded > most * own:
            worst, most = (bucket, fields), padded / own
    if worst is not None:
        bucket, fields = worst
        lines = [
            f"bucket {bucket.index} ({bucket.names}): {_text(fields)}",
            f"memory, transfers and the optimizer's states take {most:.1f} times as much",
        ]
        fix = "choose shorter blocks, or leave small leaves out by a pattern"
        text = f"{verb}: blocks of codes are longer than most leaves, which are padded to them"
        warnings.warn(message(text, lines, fix), stacklevel=stacklevel + 1)


def _blocks(fields: Sequence[object]) -> dict[str, int]:
    """The lengths of the blocks of what a leaf is sent and kept as, by field; see `NEWER`."""
    found = {}
    for name, value in zip(NEWER, fields, strict=True):
        if isinstance(value, Wire | Codec) and value.block:
            found[name] = value.block
    return found


def _text(fields: Sequence[object]) -> str:
    """The fields that have blocks, as they are written in a `Precision`."""
    values: dict[str, object] = dict(zip(NEWER, fields, strict=True))
    blocks = _blocks(fields)
    return ", ".join(f"{'param' if n == 'codes' else n}={values[n]}" for n in blocks)

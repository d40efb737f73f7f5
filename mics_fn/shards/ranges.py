"""Ranges of elements: the part of a bucket that a chunk holds of each leaf, and padding."""

from functools import lru_cache
from typing import NamedTuple

from mics_fn.shards.bucket import Bucket


class Piece(NamedTuple):
    """What one chunk holds of one leaf; lengths in elements."""

    start: int  # in the chunk
    length: int
    origin: int  # in the flattened leaf


@lru_cache(maxsize=4096)
def pieces(bucket: Bucket, chunk: int) -> tuple[Piece, ...]:
    """What chunk number `chunk` holds of each leaf of the bucket; length 0 if it holds nothing.

    >>> bucket = Bucket(0, torch.float32, 2, ((6,),), (0,), 8)
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

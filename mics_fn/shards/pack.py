"""Moves leaves into and out of flat buffers, by views if possible.

See [Note: flat buckets] in `shards.bucket`. Under `vmap` tensors have leading batch dims: a piece
then has shape (*batch, length), and a full leaf (*batch, *shape).
"""

from collections import deque
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from mics_fn import _torch
from mics_fn.errors import LeafError, message
from mics_fn.groups import Buffers
from mics_fn.offload import is_apart
from mics_fn.shards.bucket import Bucket
from mics_fn.shards.elsewhere import brought, copied_to, is_elsewhere, whole_stored
from mics_fn.shards.ranges import gaps, pieces


@lru_cache(maxsize=4096)
def _chunk_sizes(bucket: Bucket, chunk: int) -> tuple[int, ...]:
    """Lengths that split a chunk into (padding, piece, padding, piece, ..., padding)."""
    sizes, end = [], 0
    for piece in pieces(bucket, chunk):
        start = piece.start if piece.length else end
        sizes += [start - end, piece.length]
        end = start + piece.length
    return (*sizes, bucket.chunk - end)


@lru_cache(maxsize=4096)
def _full_sizes(bucket: Bucket) -> tuple[int, ...]:
    """Lengths that split the full buffer into (leaf, padding, leaf, padding, ...)."""
    ends = (*bucket.offsets[1:], bucket.numel)
    sizes = zip(bucket.offsets, bucket.numels, ends, strict=True)
    return tuple(size for start, n, end in sizes for size in (n, end - start - n))


def split_chunk(bucket: Bucket, chunk: int, flat: Tensor) -> list[Tensor]:
    """The pieces of a chunk, by slot, as views of `flat` (*batch, bucket.chunk)."""
    return list(flat.split_with_sizes(_chunk_sizes(bucket, chunk), -1)[1:-1:2])


def split_full(bucket: Bucket, flat: Tensor) -> list[Tensor]:
    """The full leaves, by slot, as views of `flat` (*batch, bucket.numel)."""
    batch = flat.shape[:-1]
    leaves = flat.split_with_sizes(_full_sizes(bucket), -1)[::2]
    return [leaf.view((*batch, *s)) for leaf, s in zip(leaves, bucket.shapes, strict=True)]


def whole_chunk(bucket: Bucket, chunk: int, data: Sequence[Tensor | None]) -> Tensor | None:
    """The chunk that the pieces are views of, without a copy; None if they are not such views.

    The storage must have exactly the size of the chunk, so that an in-place update of the result
    changes only these pieces and their padding.
    """
    base, first = None, None
    if any(is_apart(tensor) for tensor in data):
        return None
    for piece, tensor in zip(pieces(bucket, chunk), data, strict=True):
        if not piece.length or tensor is None:
            continue
        if tensor.ndim != 1 or tensor.storage_offset() != piece.start or tensor.stride(0) != 1:
            return None
        if first is None:
            base, first = _torch.storage_id(tensor), tensor
            if tensor.untyped_storage().nbytes() != bucket.chunk * tensor.itemsize:
                return None
        elif _torch.storage_id(tensor) != base:
            return None
    return None if first is None else first.detach().as_strided((bucket.chunk,), (1,), 0)


def pack_chunk(
    bucket: Bucket,
    chunk: int,
    data: Sequence[Tensor | None],
    *,
    batch: Sequence[int] = (),
    device: torch.device,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Pieces, by slot, as one chunk (*batch, bucket.chunk): a view if possible, else a copy.

    Those that lie elsewhere are brought to the device. A piece that is None counts as zeros, and
    the padding of a copy is zero. The default of `dtype` is that of the shards.
    """
    dtype = dtype or bucket.dtype
    found = whole_chunk(bucket, chunk, data)
    if found is not None:
        return brought(found, device).to(dtype)
    flat = torch.zeros((*batch, bucket.chunk), dtype=dtype, device=device)
    if any(x is not None and is_elsewhere(x, device) for x in data):
        deque(copied_to(flat, bucket, chunk, data), maxlen=0)
        return flat
    views = split_chunk(bucket, chunk, flat)
    _copy([(v, d) for v, d in zip(views, data, strict=True) if d is not None and d.numel()])
    return flat


def zero_padding(bucket: Bucket, chunk: int, flat: Tensor) -> Tensor:
    """A chunk (bucket.chunk,) whose padding is zero, so that it sets no scale of a block of codes.

    Padding is not part of any value, so it is overwritten in place, unseen by autograd.
    """
    sizes = _chunk_sizes(bucket, chunk)
    if any(sizes[::2]):
        flat = flat.clone() if flat.is_inference() else flat
        _torch.foreach_zero([x for x in flat.data.split_with_sizes(sizes)[::2] if x.numel()])
    return flat


def copied_with_zeros(
    memory: Tensor, bucket: Bucket, chunk: int, data: Sequence[Any]
) -> Iterator[None]:
    """`copied_to`, after which padding is zero, so that it sets no scale of a block of codes."""
    yield from copied_to(memory, bucket, chunk, data)
    zero_padding(bucket, chunk, memory)


def standing_for(bucket: Bucket, chunk: int, data: Sequence[Any]) -> Tensor:
    """A tensor of the size of a chunk whose pieces lie elsewhere: the chunk, if it is one tensor.

    Else one without data of its own, since a gather compares between ranks how much it moves.
    """
    found = whole_stored(bucket, chunk, data)
    if found is None:
        found = whole_chunk(bucket, chunk, data)
    if found is not None:
        return found
    first = next(x for x in data if x is not None)
    return torch.empty((), dtype=first.dtype).expand(bucket.chunk)


def pack_full(
    bucket: Bucket,
    leaves: Sequence[Tensor | None],
    *,
    batch: Sequence[int] = (),
    device: torch.device,
    dtype: torch.dtype | None = None,
    buffers: "Buffers | None" = None,
    out: Tensor | None = None,
) -> Tensor:
    """Full leaves, by slot, copied into one buffer (*batch, bucket.numel).

    The buffer is `out` if that is given, else one taken from `buffers`. A leaf that is None counts
    as zeros, and padding is zero. The default of `dtype` is that of the shards.
    """
    shape, dtype = (*batch, bucket.numel), dtype or bucket.dtype
    flat = (buffers or Buffers()).take(shape, dtype, device) if out is None else out
    views = split_full(bucket, flat)
    empty = [v for v, leaf in zip(views, leaves, strict=True) if leaf is None]
    empty += [flat.narrow(-1, start, length) for start, length in gaps(bucket)]
    if empty:
        _torch.foreach_zero(empty)
    _copy([(v, d) for v, d in zip(views, leaves, strict=True) if d is not None and d.numel()])
    return flat


def dense(tensor: Tensor) -> Tensor:
    """The tensor in strided memory; a sparse gradient becomes a dense one."""
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


def refuse_sparse(grad: Tensor) -> None:
    """Raise LeafError for a sparse gradient, as a hook: torch cannot pass it through a view."""
    if grad.layout is not torch.strided:
        text = "gather: the gradient of a parameter is sparse, which a group of one rank only views"
        fix = "use defer(shards, groups, on_demand()), or leave out sparse=True"
        raise LeafError(message(text, fix=fix))


def _copy(pairs: list[tuple[Tensor, Tensor]]) -> None:
    if pairs:
        _torch.foreach_copy([to for to, _ in pairs], [dense(source) for _, source in pairs])

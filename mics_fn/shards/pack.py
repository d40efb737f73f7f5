"""Moving leaves in and out of flat buffers, by views where that is possible.

See [Note: flat buckets] in `layout`.

Tensors may carry leading batch dims (under `vmap`): a piece is then (*batch, length), a full leaf
(*batch, *shape).
"""

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from mics_fn import _torch
from mics_fn.errors import LeafError, message
from mics_fn.layout import Bucket, gaps, pieces

_BLOCK = 2**16  # elements that are widened at a time: their wide copies fit in the caches
_PATIENCE = 16  # takes of each buffer that there ever was, until one that nobody took is let go


@lru_cache(maxsize=4096)
def _chunk_sizes(bucket: Bucket, chunk: int) -> tuple[int, ...]:
    """Lengths that split a chunk in (padding, piece, padding, piece, ..., padding)."""
    sizes, end = [], 0
    for piece in pieces(bucket, chunk):
        start = piece.start if piece.length else end
        sizes += [start - end, piece.length]
        end = start + piece.length
    return (*sizes, bucket.chunk - end)


@lru_cache(maxsize=4096)
def _full_sizes(bucket: Bucket) -> tuple[int, ...]:
    """Lengths that split the full buffer in (leaf, padding, leaf, padding, ...)."""
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
    """The chunk whose views the pieces are, if they are that, without a copy; else None.

    Only a storage of exactly the chunk's size counts, so that an in-place update of the result can
    touch nothing but these pieces and their padding.
    """
    base, first = None, None
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
    """Pieces, by slot, as one chunk (*batch, bucket.chunk): a view if it can be one, else a copy.

    A piece that is None counts as zeros; padding of a copy is zero. `dtype` is that of the shards
    unless given.
    """
    dtype = dtype or bucket.dtype
    found = whole_chunk(bucket, chunk, data)
    if found is not None:
        return found.to(dtype)
    flat = torch.zeros((*batch, bucket.chunk), dtype=dtype, device=device)
    views = split_chunk(bucket, chunk, flat)
    _copy([(v, d) for v, d in zip(views, data, strict=True) if d is not None and d.numel()])
    return flat


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
    """Full leaves, by slot, copied to one buffer (*batch, bucket.numel): `out`, or of `buffers`.

    A leaf that is None counts as zeros; padding is zero. `dtype` is that of the shards unless
    given.
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
    """The tensor in rows of memory, as no sparse gradient is."""
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


def refuse_sparse(grad: Tensor) -> None:
    """Raise LeafError, as a hook of a view, which torch takes no sparse gradient through."""
    if grad.layout is not torch.strided:
        text = "gather: the gradient of a parameter is sparse, which a group of one rank only views"
        raise LeafError(message(text, fix="pass schedule=on_demand(), or leave out sparse=True"))


def _copy(pairs: list[tuple[Tensor, Tensor]]) -> None:
    if pairs:
        _torch.foreach_copy([to for to, _ in pairs], [dense(source) for _, source in pairs])


def mean_of(parts: Tensor, out: Tensor, in_order: bool = False) -> None:
    """The mean of the rows of `parts` goes to `out`, summed in float32 or wider for 16 bits."""
    wide = torch.promote_types(parts.dtype, torch.float32)
    if in_order:  # which a sum over a dim is not: there the order depends on the element's place
        total = parts[0].to(wide, copy=True)
        for part in parts[1:]:
            total.add_(part)
        out.copy_(total.div_(len(parts)))
    elif parts.dtype.itemsize == 2 or out.dtype != parts.dtype:
        out.copy_(parts.sum(0, dtype=wide).div_(len(parts)))
    else:
        torch.sum(parts, 0, out=out).div_(len(parts))


def mean_of_two(a: Tensor, b: Tensor, out: Tensor) -> None:
    """a + (b - a)/2 goes to `out`, which may be the memory of either; as wide as in `mean_of`."""
    if out.dtype == a.dtype and a.dtype.itemsize != 2:
        torch.lerp(a, b, 0.5, out=out)
        return
    wide = torch.promote_types(a.dtype, torch.float32)
    # Block by block on the host: wide copies stay in its caches, and take no memory to speak of.
    block = _BLOCK if a.device.type == "cpu" else max(1, a.numel())
    for x, y, mean in zip(a.split(block), b.split(block), out.split(block), strict=True):
        if mean.dtype == wide:
            mean.copy_(x).lerp_(y.to(wide), 0.5)
        elif wide == a.dtype:
            mean.copy_(torch.lerp(x, y, 0.5))
        else:
            mean.copy_(x.to(wide).lerp_(y.to(wide), 0.5))


class Buffers:
    """Memory that collectives take and give back, so that step after step uses the same.

    Fresh memory of this size would be mapped in anew each time, page by page. Buffers that wait for
    their next use fit any dtype and shape of at most their size. On CUDA one that is given back is
    next used after what its giver's stream had been given until then.

    Args:
      keep: how many may wait; None for all.

    Example:
      >>> buffers = Buffers()
      >>> first = buffers.take((2, 3), torch.float32, torch.device("cpu"))
      >>> buffers.give(first)
      >>> buffers.take((5,), torch.float32, torch.device("cpu")).data_ptr() == first.data_ptr()
      True
      >>> buffers.made
      1
    """

    def __init__(self, keep: int | None = None) -> None:
        self.keep = keep
        self.made = 0  # buffers that were new
        self._takes = 0
        # 1D, uint8; the event to wait for; and how many were taken before it was given back.
        self._free: list[tuple[Tensor, Any, int]] = []

    def take(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, exact: bool = False
    ) -> Tensor:
        """An uninitialised tensor: in the smallest free buffer that is large enough, else new.

        With `exact` only in one of just its size, as for what is kept for long.
        """
        nbytes = prod(shape) * dtype.itemsize
        self._takes += 1
        fits = [
            (event is not None and not event.query(), raw.nbytes, i)
            for i, (raw, event, _) in enumerate(self._free)
            if raw.device == device and (raw.nbytes == nbytes if exact else raw.nbytes >= nbytes)
        ]
        # One buffer that is still read would make its next user wait; two can take turns.
        if not nbytes or not fits or (len(fits) == 1 and fits[0][0] and not exact):
            if nbytes:
                self._let_go()
                self.made += 1
            return torch.empty(shape, dtype=dtype, device=device)
        raw, event, _ = self._free.pop(min(fits)[2])
        if event is not None:
            torch.cuda.current_stream(device).wait_event(event)
        return raw[:nbytes].view(dtype).view(shape)

    def _let_go(self) -> None:
        """Forget buffers that nobody takes any more, such as those of a model that is gone."""
        since = self._takes - _PATIENCE * self.made
        self._free = [
            (raw, event, given)
            for raw, event, given in self._free
            if given >= since or (event is not None and not event.query())
        ]

    @property
    def waiting_bytes(self) -> int:
        """Bytes of those that wait for their next use."""
        return sum(raw.nbytes for raw, _, _ in self._free)

    def give(self, tensor: Tensor) -> None:
        """Give back a tensor that nobody reads or writes any more, later work on CUDA excepted."""
        if not tensor.numel() or _torch.is_hollow(tensor):
            return
        storage = tensor.untyped_storage()
        raw = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        event = torch.cuda.current_stream(tensor.device).record_event() if tensor.is_cuda else None
        self._free.append((raw, event, self._takes))
        if self.keep is not None and len(self._free) > self.keep:
            self._free.sort(key=lambda waiting: -waiting[0].nbytes)
            del self._free[self.keep :]


class Slots:
    """A few pairs of buffers that take turns by place: how many there are follows from no clock.

    Args:
      count: how many pairs.

    Example:
      >>> slots = Slots(2)
      >>> pair = slots.pair(4, (3,), torch.float32, torch.device("cpu"))
      >>> [buffer.shape for buffer in pair], slots.made
      ([torch.Size([3]), torch.Size([3])], 1)
    """

    def __init__(self, count: int) -> None:
        self.count, self.made = count, 0
        self.users: list[Any] = [None] * count  # whoever was given a pair last
        self._raw: list[tuple[Tensor, Tensor] | None] = [None] * count

    @property
    def nbytes(self) -> int:
        """Bytes of all pairs that there are."""
        return sum(2 * pair[0].nbytes for pair in self._raw if pair is not None)

    def pair(
        self, place: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Two uninitialised tensors, the memory of place `place % count`."""
        nbytes, at = prod(shape) * dtype.itemsize, place % self.count
        raw = self._raw[at]
        if raw is None or raw[0].nbytes < nbytes or raw[0].device != device:
            # At once as large as any before, so that sizes do not grow step by step.
            size = max([nbytes, *(pair[0].nbytes for pair in self._raw if pair is not None)])
            empty = {"dtype": torch.uint8, "device": device}
            raw = self._raw[at] = (torch.empty(size, **empty), torch.empty(size, **empty))
            self.made += 1
        first, second = (buffer[:nbytes].view(dtype).view(shape) for buffer in raw)
        return first, second

"""Moves leaves into and out of flat buffers, by views if possible.

See [Note: flat buckets] in `shards.bucket`. Under `vmap` tensors have leading batch dims: a piece
then has shape (*batch, length), and a full leaf (*batch, *shape).

[Note: kept codes] A rank keeps its chunk of such a bucket as one row of bytes, the codes of all
blocks and then their scales, and a piece is a `Coded` that is a part of it. A gather sends this row
as it is, and each rank decodes all rows, its own too, in the dtype of computation. Leaves and
chunks begin on borders of blocks. So a block has elements of one leaf and one rank alone, and what
is decoded does not depend on how many ranks share a leaf.

Ops on such a piece decode it to float32, which holds exactly what codes stand for: a code has at
most 8 significant bits, and a scale 8. Coding these values again gives the same bytes, so `set`,
and whatever else reads values and writes them back, changes no other leaf.

[Note: elsewhere] Where a piece lies changes neither its leaf nor its bucket. A piece on the host of
an accelerator is a tensor there, in locked memory; one in a file is a stored tensor. Both are
brought to the device where a verb packs them, which is before they are cast or sent, so full values
have the same bits. Where codes travel they are made of what was brought, once in a run, and sent
again by later fetches. The leaves of one bucket may lie in different places: then each is brought
by itself, and where all lie in one place their chunk is brought as one tensor.

On the CPU host memory is the memory that computes, and nothing is elsewhere but what is in files.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import starmap
from typing import Any

import torch
from torch import Tensor

from mics_fn import _torch, offload
from mics_fn.collectives import Codec
from mics_fn.errors import LeafError, PlanError
from mics_fn.groups import Buffers
from mics_fn.shards.bucket import Bucket, pieces

# Frozen leaves that are kept as codes: `param=int4[64]` of a `Precision`.


def has_codes(data: Any) -> bool:
    """Whether a tensor is a part of a row of codes, as that of a frozen leaf may be."""
    return offload.is_coded(data) and type(data.codes.codec) is Codec


def coded_pieces(bucket: Bucket, chunk: int, flat: Tensor, names: Sequence[str]) -> list[Tensor]:
    """The pieces of a chunk, by slot, as codes.

    Args:
      bucket: the bucket, which says as which codes.
      chunk: the number of the chunk.
      flat: its values, float32, with zeros where padding is.
      names: paths of the leaves, for errors.

    Raises:
      LeafError: a value is not finite.
    """
    codec: Any = bucket.codes
    whole = offload.coded(flat, codec, None, ", ".join(names[:2]))
    spans = pieces(bucket, chunk)
    found = [whole[piece.start : piece.start + piece.length] for piece in spans]
    if bool(whole.codes.tops.isfinite().all()):
        return found
    for name, piece in zip(names, spans, strict=True):
        check_finite(name, codec, flat.narrow(0, piece.start, piece.length))
    return found


def check_finite(what: str, codec: Codec, values: Tensor) -> None:
    """Raise LeafError if values that are to be kept as codes are not all finite."""
    if not bool(values.isfinite().all()):
        text = f"{what} has a value that is not finite, which param={codec} cannot hold"
        fix = "keep this leaf as values: give param= behind a pattern that leaves it out"
        raise LeafError(text, fix=fix)


def check_kept_place(verb: str, bucket: Bucket, place: str) -> None:
    """Raise PlanError if leaves that are kept as codes are to lie elsewhere."""
    if bucket.codes is not None and place != offload.DEVICE:
        text = f"{verb}: leaves that are kept as codes lie on the device, not on {place}"
        lines = [f"bucket {bucket.index} ({bucket.names}): param={bucket.codes}"]
        raise PlanError(text, lines, "give param= or where= a pattern that leaves these out")


def kept_row(bucket: Bucket, chunk: int, data: Sequence[Any]) -> Tensor | None:
    """The codes of a chunk as the row of bytes that a gather sends; None if it makes one.

    Args:
      bucket: the bucket.
      chunk: the number of the chunk.
      data: the pieces, by slot; None for a leaf that the tree lacks.

    Returns:
      The row if the pieces are parts of one, as `shard` makes them. Values of others, coded again,
      give the same bytes.

    Raises:
      LeafError: a piece is values in the place of codes, which a gather would round.
    """
    given: list[Any] = [_torch.unwrapped(x) if isinstance(x, Tensor) else x for x in data]
    some = [x for x in given if x is not None]
    if bucket.codes is None or not bucket.chunk or any(map(_torch.has_no_data, some)):
        return None
    for x in some:
        if not has_codes(x) or x.codes.codec != bucket.codes:
            kind = x.codes.codec if has_codes(x) else x.dtype
            text = f"a leaf of bucket {bucket.index} ({bucket.names}) is {kind}, not {bucket.codes}"
            raise LeafError(text, fix="keep the leaf that shard gave; set() changes its values")
    row, pairs = some[0].codes.row, zip(pieces(bucket, chunk), given, strict=True)
    own = [(piece, x) for piece, x in pairs if x is not None and piece.length]
    together = all(x.codes.row is row and x.start == piece.start for piece, x in own)
    return row if together and len(row) == bucket.codes.nbytes(bucket.chunk) else None


# Pieces that lie elsewhere than on the device that computes: in host memory, or in a file.


def must_fetch(data: Tensor, device: torch.device) -> bool:
    """Return whether a tensor must be fetched to a device before ops can use it."""
    if _torch.has_no_data(data):
        return False
    placed = data.numel() > 0 and isinstance(_torch.unwrapped(data), offload.Placed)
    return data.device != device or placed


def any_to_fetch(leaves: Sequence[Any], home: Any) -> bool:
    """Whether the data of a leaf lie elsewhere than on the device of its groups.

    Args:
      leaves: any; what was donated is passed over.
      home: their groups. Without any, only what is in files or kept as codes counts.
    """
    for leaf in leaves:
        x: Any = leaf.data if leaf._donated is None else None
        if not isinstance(x, Tensor):
            continue
        device = x.device if home is None else home.device
        if type(x) in _torch.PLAIN and x.device == device and not _torch.is_wrapped(x):
            continue  # as most are
        if has_codes(x) or must_fetch(x, device):  # codes on all ranks, even where empty
            return True
    return False


def fetched_to(data: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor on a device: itself if it is there, else a copy, through which gradients go back.

    What is kept as codes is decoded in `dtype`, which says nothing about other tensors.
    """
    own: Any = _torch.unwrapped(data)
    if has_codes(own):
        return own.plain(dtype or data.dtype)
    if not must_fetch(data, device):
        return data
    if isinstance(_torch.unwrapped(data), offload.Placed):
        data = data.clone()  # an op on it reads it
    return data if data.device == device else data.to(device, non_blocking=True)


def copied_to(
    memory: Tensor, bucket: Bucket, chunk: int, data: Sequence[Any], zeros: bool = False
) -> Iterator[None]:
    """Copy the pieces of a bucket, by slot, into the memory of its chunk, part by part.

    Args:
      memory: of the whole chunk, on the device, in any dtype. Padding in it is left as it is.
      bucket: the bucket.
      chunk: the number of the chunk.
      data: the pieces; None for a leaf that the tree lacks.
      zeros: make padding zero at the end, so that it sets no scale of a block of codes.
    """
    whole = whole_in_file(bucket, chunk, data)
    if whole is not None:
        yield from offload.transfer(whole, memory)
    for piece, source in zip(pieces(bucket, chunk), data, strict=True):
        if whole is None and source is not None and piece.length:
            yield from offload.transfer(source, memory.narrow(-1, piece.start, piece.length))
    if zeros:
        zero_padding(bucket, chunk, memory)


def whole_in_file(bucket: Bucket, chunk: int, data: Sequence[Any]) -> offload.FileTensor | None:
    """The chunk in a file of which the pieces are parts; None if they are not parts of one."""
    first: Any = None
    for piece, x in zip(pieces(bucket, chunk), data, strict=True):
        if not piece.length or x is None:
            continue
        if not offload.in_file(x) or x.ndim > 1 or x.start != piece.start * x.dtype.itemsize:
            return None
        first = x if first is None else first
        if x.extent is not first.extent or x.dtype != first.dtype:
            return None
    if first is None or first.extent.nbytes < bucket.chunk * first.dtype.itemsize:
        return None
    like = torch.empty(bucket.chunk, dtype=first.dtype, device="meta")
    return offload.FileTensor(first.extent, 0, like, first.device, first.leaf)


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
def _starts(bucket: Bucket, chunk: int) -> tuple[list[int], tuple[int, ...]]:
    """The slots of which a chunk has a part, and where in it each begins."""
    found = {slot: x.start for slot, x in enumerate(pieces(bucket, chunk)) if x.length}
    return list(found), tuple(found.values())


@lru_cache(maxsize=4096)
def _padding(bucket: Bucket) -> list[tuple[int, int]]:
    """Where padding begins in the full buffer, and how long it is."""
    ends = (*bucket.offsets[1:], bucket.numel)
    found = zip(bucket.offsets, bucket.numels, ends, strict=True)
    return [(start + n, end - start - n) for start, n, end in found if end > start + n]


@lru_cache(maxsize=4096)
def geometries(bucket: Bucket) -> list[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """Shape, strides and begin of each full leaf in the full buffer, by slot."""
    strides = [torch.empty(shape, device="meta").stride() for shape in bucket.shapes]
    return list(zip(bucket.shapes, strides, bucket.offsets, strict=True))


def split_chunk(bucket: Bucket, chunk: int, flat: Tensor) -> list[Tensor]:
    """The pieces of a chunk, by slot, as views of `flat` (*batch, bucket.chunk)."""
    return list(flat.split_with_sizes(_chunk_sizes(bucket, chunk), -1)[1:-1:2])


def split_full(bucket: Bucket, flat: Tensor) -> list[Tensor]:
    """The full leaves, by slot, as views of `flat` (*batch, bucket.numel)."""
    if flat.ndim == 1 and flat.is_contiguous():
        places = geometries(bucket)
        if begin := int(flat.storage_offset()):
            places = [(shape, strides, begin + at) for shape, strides, at in places]
        return list(starmap(flat.as_strided, places))
    parts = zip(bucket.shapes, bucket.offsets, bucket.numels, strict=True)
    return [flat.narrow(-1, at, n).view(*flat.shape[:-1], *shape) for shape, at, n in parts]


def whole_chunk(bucket: Bucket, chunk: int, data: Sequence[Tensor | None]) -> Tensor | None:
    """The chunk that the pieces are views of, without a copy; None if they are not such views.

    The storage must have exactly the size of the chunk, so that an in-place update of the result
    changes only these pieces and their padding.
    """
    slots, starts = _starts(bucket, chunk)
    own: list[Any] = list(map(data.__getitem__, slots))
    kinds = set(map(type, own))
    if type(None) in kinds:
        starts = tuple([start for start, x in zip(starts, own, strict=True) if x is not None])
        own = [x for x in own if x is not None]
    for kind in kinds:
        if issubclass(kind, offload.Placed):
            return None
    begins, storages = tuple(map(Tensor.storage_offset, own)), set(map(_torch.storage_id, own))
    if begins != starts or len(storages) != 1:
        return None
    first = own[0]
    nbytes = bucket.chunk * first.itemsize
    if set(map(Tensor.stride, own)) != {(1,)} or first.untyped_storage().nbytes() != nbytes:
        return None
    return first.detach().as_strided((bucket.chunk,), (1,), 0)


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
        found = found if found.device == device else found.to(device, non_blocking=True)
        return found.to(dtype)
    flat = torch.zeros((*batch, bucket.chunk), dtype=dtype, device=device)
    if any(x is not None and must_fetch(x, device) for x in data):
        deque(copied_to(flat, bucket, chunk, data), maxlen=0)
        return flat
    _copy(split_chunk(bucket, chunk, flat), data)
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


def standing_for(bucket: Bucket, chunk: int, data: Sequence[Any]) -> Tensor:
    """Return a placeholder for a chunk with pieces in host memory or files.

    Else one without data of its own, since a gather compares between ranks how much it moves.
    """
    found = whole_in_file(bucket, chunk, data)
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
    empty = _copy(split_full(bucket, flat), leaves)
    empty += [flat.narrow(-1, start, length) for start, length in _padding(bucket)]
    if empty:
        _torch.foreach_zero(empty)
    return flat


def dense(value: Any) -> Any:
    """The tensor in strided memory, as a sparse gradient becomes; any other value as it is."""
    if isinstance(value, Tensor) and value.layout is not torch.strided:
        return value.to_dense()
    return value


def _copy(views: Sequence[Tensor], values: Sequence[Tensor | None]) -> list[Tensor]:
    """Copy values into views of a buffer; return the views that get none."""
    into, given, empty = [], [], []
    for view, value in zip(views, values, strict=True):
        if value is None:
            empty.append(view)
        elif value.numel():
            into.append(view)
            given.append(dense(value))
    if into:
        _torch.foreach_copy(into, given)
    return empty


# Called with a bucket and this rank's own gradients of it, packed, before others are added; with
# None where a new sum of its gradients begins.
watchers: list[Callable[[Bucket, Tensor | None], None]] = []


def observe(bucket: Bucket, packed: Tensor | None) -> None:
    """Let watchers see this rank's own gradients of a bucket."""
    for watch in watchers:
        watch(bucket, packed)

"""Pieces that lie elsewhere than on the device that computes: in host memory, or in a file.

[Note: elsewhere] Where a piece lies changes neither its leaf nor its bucket. A piece on the host of
an accelerator is a tensor there, in locked memory; one in a file is a stored tensor. Both are
brought to the device where a verb packs them, which is before they are cast or sent, so full values
have the same bits. Where codes travel they are made of what was brought, once in a run, and sent
again by later fetches. The leaves of one bucket may lie in different places: then each is brought
by itself, and where all lie in one place their chunk is brought as one tensor.

On the CPU host memory is the memory that computes, and nothing is elsewhere but what is in files.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from mics_fn import _torch
from mics_fn.offload import Stored, copied_into, is_apart, is_stored, read
from mics_fn.shards.bucket import Bucket
from mics_fn.shards.kept import has_codes
from mics_fn.shards.leaf import is_donated
from mics_fn.shards.ranges import pieces


def is_elsewhere(data: Tensor, device: torch.device) -> bool:
    """Whether a tensor has to be brought to a device before ops there can compute with it."""
    if _torch.has_no_data(data):
        return False
    return data.device != device or (is_apart(_torch.unwrapped(data)) and data.numel() > 0)


def any_elsewhere(leaves: Sequence[Any], home: Any) -> bool:
    """Whether the piece of a leaf lies elsewhere than on the device of its groups.

    Args:
      leaves: of one bucket; what was donated is passed over.
      home: their groups. Without any, only what is in files counts.
    """
    held = [None if is_donated(leaf) else leaf.data for leaf in leaves]
    tensors = [x for x in held if isinstance(x, Tensor)]
    if any(map(has_codes, tensors)):  # on all ranks, even where all pieces are empty
        return True
    return any(is_elsewhere(x, x.device if home is None else home.device) for x in tensors)


def brought(data: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor on a device: itself if it is there, else a copy, through which gradients go back.

    What is kept as codes is decoded in `dtype`, which says nothing about other tensors.
    """
    own: Any = _torch.unwrapped(data)
    if has_codes(own):
        return own.decoded(dtype or data.dtype)
    if not is_elsewhere(data, device):
        return data
    if is_apart(_torch.unwrapped(data)):
        data = data.clone()  # an op on it reads it
    return data if data.device == device else data.to(device, non_blocking=True)


def copied_to(memory: Tensor, bucket: Bucket, chunk: int, data: Sequence[Any]) -> Iterator[None]:
    """Copy the pieces of a bucket, by slot, into the memory of its chunk, part by part.

    Args:
      memory: of the whole chunk, on the device, in any dtype. Padding in it is left as it is.
      bucket: the bucket.
      chunk: the number of the chunk.
      data: the pieces; None for a leaf that the tree lacks.
    """
    whole = whole_stored(bucket, chunk, data)
    if whole is not None:
        yield from _filled(memory, whole)
        return
    for piece, source in zip(pieces(bucket, chunk), data, strict=True):
        if source is not None and piece.length:
            yield from _filled(memory.narrow(-1, piece.start, piece.length), source)


def _filled(memory: Tensor, source: Tensor) -> Iterator[None]:
    """Copy a tensor into memory: from a file in parts, from the host as one."""
    if isinstance(source, Stored) and source.ndim == 1:
        yield from copied_into(memory, source)
        return
    # A copy between devices that also casts would cast on the host, which waits for it.
    memory.copy_(read(source).to(memory.device, non_blocking=True))
    yield


def whole_stored(bucket: Bucket, chunk: int, data: Sequence[Any]) -> Stored | None:
    """The stored chunk of which the pieces are parts; None if they are not parts of one."""
    first: Any = None
    for piece, x in zip(pieces(bucket, chunk), data, strict=True):
        if not piece.length or x is None:
            continue
        if not is_stored(x) or x.ndim > 1 or x.start != piece.start * x.dtype.itemsize:
            return None
        x.check()
        first = x if first is None else first
        if x.extent is not first.extent or x.dtype != first.dtype:
            return None
    if first is None or first.extent.nbytes < bucket.chunk * first.dtype.itemsize:
        return None
    like = torch.empty(bucket.chunk, dtype=first.dtype, device="meta")
    return Stored(first.extent, 0, like, first.device, first.leaf)

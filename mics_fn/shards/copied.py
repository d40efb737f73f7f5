"""Shards in a pickle, and their deep copies: each chunk once, however many leaves are views of it.

A view in a pickle brings the whole storage with it. So leaves refer to one object per chunk, which
is found by its storage for as long as a pickler or a copy holds it, and come back as views of one
chunk again. A piece that does not lie in a chunk of its own is copied by itself.
"""

from typing import Any
from weakref import WeakValueDictionary

from torch import Tensor

from mics_fn import _torch
from mics_fn.errors import LeafError, message
from mics_fn.offload import is_coded, read


class Memory:
    """A chunk as one tensor, which all leaves in it refer to.

    Args:
      flat: all of it.
    """

    def __init__(self, flat: Tensor) -> None:
        self.flat = flat


_MEMORIES: WeakValueDictionary[tuple, Memory] = WeakValueDictionary()


def parts_of(leaf: Any) -> tuple[Any, ...]:
    """The arguments of `from_parts` for a leaf with a bucket.

    Raises:
      LeafError: its piece was computed under autograd or inside torch.func, which cannot be kept.
    """
    x: Tensor = leaf.data
    if _torch.is_wrapped(x) or x.grad_fn is not None:
        text = f"{leaf!r} is computed from a tensor that requires a gradient, and cannot be copied"
        raise LeafError(message(text, fix="detach it first, or copy what it was computed from"))
    if is_coded(x):
        return type(leaf), *_of_codes(x), False, leaf.bucket, leaf.slot
    x = read(x)  # a copy is in memory, wherever this leaf lives
    place: Any = (x.storage_offset(), x.shape, x.stride())
    if leaf.bucket is None or _torch.has_no_data(x):
        memory = Memory(x.detach())
    elif x.untyped_storage().nbytes() == leaf.bucket.chunk * x.itemsize:
        key = _torch.storage_id(x), x.dtype
        memory = _MEMORIES.get(key)
        if memory is None:
            flat = x.detach().as_strided((leaf.bucket.chunk,), (1,), 0)
            memory = _MEMORIES.setdefault(key, Memory(flat))
    else:
        x = x.detach().clone()
        memory, place = Memory(x), (0, x.shape, x.stride())
    return type(leaf), memory, place, leaf.data.requires_grad, leaf.bucket, leaf.slot


def _of_codes(x: Any) -> tuple[Memory, tuple | None]:
    """The memory of a coded piece, and where in it the piece begins."""
    row = x.codes.row
    if row is None:
        return Memory(x), None
    key = _torch.storage_id(row), row.dtype
    memory = _MEMORIES.get(key)
    if memory is None:
        memory = _MEMORIES.setdefault(key, Memory(x.whole()))
    return memory, (x.start, x.shape, x.stride())


def from_parts(
    kind: Any, memory: Memory, place: tuple | None, variable: bool, bucket: Any, slot: int
) -> Any:
    """The leaf of these parts."""
    if place is None:
        return kind(memory.flat, bucket, slot)
    start, shape, stride = place
    data = memory.flat.as_strided(shape, stride, start)
    return kind(data.requires_grad_(variable), bucket, slot)

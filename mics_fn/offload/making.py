"""How stored tensors are made: without values, from a tensor, or as heirs of those to overwrite."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mics_fn import _device, points
from mics_fn.collectives import needs_derivative, refuse_derivative
from mics_fn.errors import PlanError, message
from mics_fn.offload.apart import like_of
from mics_fn.offload.coded_tensors import is_coded
from mics_fn.offload.scratch import Scratch
from mics_fn.offload.space import padded
from mics_fn.offload.stored import Stored, is_stored, read
from mics_fn.offload.transfer import aligned

_AT_ONCE = 4 * 2**20  # bytes of host memory through which `store` writes


def empty(
    scratch: Scratch,
    shape: Any,
    dtype: torch.dtype,
    *,
    leaf: str = "",
    device: torch.device | str = "cpu",
) -> Stored:
    """A stored tensor whose values are not set yet, for `stream` to write to.

    Args:
      scratch: the file that it lies in.
      shape, dtype: of the tensor.
      leaf: its path, for error texts.
      device: where ops on it compute.

    Returns:
      A `Stored`, which cannot be read before it is written.

    Raises:
      OffloadError: the disk has not so much room.

    Example:
      >>> from tempfile import TemporaryDirectory
      >>> with TemporaryDirectory() as folder:
      ...     x = offload.empty(offload.Scratch(folder), (3,), torch.float32, leaf="w")
      ...     for block, (part,) in offload.stream([offload.Block([None], [x])]):
      ...         part[:] = 2.0
      ...     print(x + 0)
      ...     del x, block
      tensor([2., 2., 2.])
    """
    like = torch.empty(shape, dtype=dtype, device="meta")
    extent = scratch.reserve(like.numel() * like.itemsize, leaf)
    return Stored(extent, 0, like, torch.device(device), leaf)


def store(tensor: Tensor, scratch: Scratch, leaf: str = "") -> Stored:
    """A copy of a tensor in a scratch file.

    Args:
      tensor: a tensor on any device, stored or not.
      scratch: the file.
      leaf: its path, for error texts.

    Returns:
      A `Stored`.

    Memory: 4 MiB.

    Raises:
      OffloadError: the disk has not so much room, or cannot be written.
      LeafError: a derivative is asked for, which ends at a file.

    Example:
      >>> from tempfile import TemporaryDirectory
      >>> with TemporaryDirectory() as folder:
      ...     x = offload.store(torch.ones(2, 3), offload.Scratch(folder))
      ...     print(x.shape, x[1].sum())
      ...     del x
      torch.Size([2, 3]) tensor(3.)
    """
    refuse_derivative("store", [] if tensor.is_leaf else [tensor], "store outside of torch.func")
    made = empty(scratch, tensor.shape, tensor.dtype, leaf=leaf, device=tensor.device)
    flat = tensor.detach().reshape(-1)
    scratch.begin_writes(leaf)
    if points.observers:
        points.passing(f"offload: write {leaf}".rstrip(), None, [flat])
    nbytes, size = made.size_bytes, tensor.dtype.itemsize
    memory = aligned(min(_AT_ONCE, made.reaches()), tensor.device)
    for low in range(0, nbytes, _AT_ONCE):
        high = min(nbytes, low + _AT_ONCE)
        part = memory[: high - low].view(tensor.dtype)
        part.copy_(flat[low // size : high // size])
        made.extent.write(low, memory[: padded(high - low)], leaf)
    return made


def laid_like(new: Sequence[Tensor], old: Sequence[Tensor]) -> list[Tensor]:
    """Tensors, each as another one: on its device, in locked memory, in its file, or as codes.

    Those whose old values lie in one part of a file lie in one again, in the same way. What is in
    its place stays, and where a derivative is asked for, which ends at a file, all stays.

    Args:
      new: the tensors.
      old: those whose places they take.

    Memory: for each part of a file as much as it takes, one after the other.

    Raises:
      OffloadError: the disk has not so much room, or cannot be written.
    """
    if needs_derivative(new):
        return list(new)
    out, far = list(new), dict[int, Any]()
    for i, (x, was) in enumerate(zip(new, old, strict=True)):
        if is_coded(was):
            out[i] = x if is_coded(x) else was.coded(x)  # pyright: ignore
        elif not is_stored(was):
            out[i] = _beside(x, was)
        elif not is_stored(x) or _file_of(x) is not _file_of(was):
            far[i] = was
    files = dict[Scratch, Scratch]()
    for members in _by_part(far):
        likes = [far[i] for i in members]
        for i, made in zip(members, _again([out[i] for i in members], likes, files), strict=True):
            out[i] = made
    return out


def _file_of(x: Any) -> Scratch:
    return x.extent.scratch


def _beside(x: Tensor, was: Tensor) -> Tensor:
    """A tensor in memory as that of another one is."""
    same = x.device == was.device
    if is_stored(x) or (same and (x.is_pinned() or not was.is_pinned())):
        return read(x)
    if _device.is_async(was.device):
        return x.to(was.device)
    device = torch.accelerator.current_accelerator() if same else x.device
    memory = _device.host_buffer(x.nbytes, device or x.device)
    return memory.view(x.dtype).view(x.shape).copy_(x)


def _by_part(stored: dict[int, Any]) -> list[list[int]]:
    """Numbers of tensors that lie in one part of a file, and do not overlap."""
    rows: dict[int, list[tuple[int, list[int]]]] = {}
    for i, x in sorted(stored.items(), key=lambda item: item[1].start):
        mine, end = rows.setdefault(id(x.extent), []), x.start + x.size_bytes
        fit = next((k for k, (reached, _) in enumerate(mine) if reached <= x.start), len(mine))
        mine[fit : fit + 1] = [(end, [*(mine[fit][1] if fit < len(mine) else ()), i])]
    return [members for mine in rows.values() for _, members in mine]


def _again(
    values: Sequence[Tensor], likes: Sequence[Any], files: dict[Scratch, Scratch]
) -> list[Stored]:
    """Copies of tensors, in one new part of a file, which is laid out as that of others."""
    extent, old = likes[0].extent, likes[0].extent.scratch
    if old not in files:
        files[old] = old.usable()
    pairs = list(zip(values, likes, strict=True))
    if any((x.dtype, x.shape) != (was.dtype, was.shape) for x, was in pairs):
        return [store(x, files[old], was.leaf) for x, was in pairs]
    whole = aligned(extent.nbytes).zero_()
    for x, was in pairs:
        part = whole[was.start : was.start + was.size_bytes]
        part.view(x.dtype).view(x.shape).copy_(x.detach())
    made = store(whole, files[old], extent.leaf).extent
    return [Stored(made, was.start, like_of(was), was.device, was.leaf) for was in likes]


def renewed(values: Sequence[Tensor]) -> list[Tensor]:
    """The same parts of files as new values, to be overwritten; tensors in memory as they are.

    Args:
      values: whatever is to live on. All other values that share bytes with one of them are void,
        and so are these.

    Returns:
      The new values, in this order.

    Raises:
      DonatedError: one of them was given away before.
      PlanError: a save under way reads one of them.

    Example:
      >>> from tempfile import TemporaryDirectory
      >>> with TemporaryDirectory() as folder:
      ...     x = offload.store(torch.ones(2), offload.Scratch(folder))
      ...     (new,) = offload.renewed([x])
      ...     print(new + 1)
      ...     del x, new
      tensor([2., 2.])
    """
    given = [x for x in values if type(x) is Stored]
    for x in given:
        x.check()
        if x.extent.is_held:
            fix = "wait() for that save, or write to a new tensor, which empty() makes"
            text = f"renewed: {x.lies_in()} is read by a save under way"
            raise PlanError(message(text, fix=fix))
    for x in given:
        x.extent.give_away(x.start, x.start + x.size_bytes)
    return [
        Stored(x.extent, x.start, like_of(x), x.device, x.leaf) if type(x) is Stored else x
        for x in values
    ]

"""Tensors that lie in a file: any op that reads one gives what the file holds.

[Note: stored tensors] A `Stored` is apart; see [Note: tensors apart] in `apart`. An op on it reads
the file. What is stored changes only by `stream`, which writes blocks of a file, and then under a
new value. The old one belongs to a state that was given away, so using it raises `DonatedError`.

[Note: held parts] A save that is under way reads the parts of files that its state lay in when it
began. Meanwhile steps go on, and with `donate=True` they would write there. So the save holds these
parts: a step finds them held, and writes to new parts instead, as it does without `donate`. The old
ones are free again when the save ends. Nothing is copied, and what is held keeps its bits; whoever
writes there all the same gets an error.
"""

import mmap
import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from mics_fn import _device, _torch, spans
from mics_fn.collectives import needs_derivative, refuse_derivative
from mics_fn.errors import DonatedError, PlanError
from mics_fn.offload.apart import Apart, Coded, is_coded, like_of
from mics_fn.offload.scratch import UNIT, Extent, Scratch, aligned, padded


class Stored(Apart):
    """A dense tensor in a scratch file. `empty` and `store` make one, and `read` reads it.

    An op on it reads the file, and gives a tensor with memory. Views are stored tensors, too.

    Example:
      >>> from tempfile import TemporaryDirectory
      >>> with TemporaryDirectory() as folder:
      ...     x = offload.store(torch.arange(4.0), offload.Scratch(folder))
      ...     print(isinstance(x[1:], offload.Stored), x[1:] * 2)
      ...     del x
      True tensor([2., 4., 6.])
    """

    noun = "a stored tensor"
    how_to_change = "write through stream(), or move() it to the device first"
    extent: Extent
    start: int  # where it begins in its extent, in bytes
    _generation: int

    @staticmethod
    def __new__(
        cls: type, extent: Extent, start: int, like: Tensor, device: torch.device, leaf: str = ""
    ) -> Any:
        """A part of an extent.

        Args:
          extent: the part of a file that it lies in.
          start: where it begins there, in bytes.
          like: a dense tensor on meta with its shape and dtype.
          device: the one that ops on it compute on.
          leaf: its path, for error texts.
        """
        geometry = tuple(like.shape), tuple(like.stride()), 0
        self = _torch.wrapper_without_data(cls, geometry, like.dtype, device)
        self.extent, self.start, self.leaf = extent, start, leaf or extent.leaf
        self._generation = extent.generation
        return self

    def __repr__(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        kind = f"{self.dtype}".removeprefix("torch.")
        return f"Stored(shape={tuple(self.shape)}, {kind}, in {self.extent.scratch.path})"

    def lies_in(self) -> str:
        """Its leaf, its shape and its file, for error texts."""
        which = f"{self.leaf}, " if self.leaf else ""
        return f"{which}shape {tuple(self.shape)} in {self.extent.scratch.path}"

    @property
    def size_bytes(self) -> int:
        """The bytes of its values."""
        return self.numel() * self.dtype.itemsize

    def part(self, start: int, like: Tensor) -> "Stored":
        """The elements from `start` on, with the shape of `like`."""
        at = self.start + start * self.dtype.itemsize
        return Stored(self.extent, at, like, self.device, self.leaf)

    def plain(self) -> Tensor:
        """What the file holds, in new memory, on its device."""
        self.check()
        self.extent.scratch.check(self.leaf)
        with _torch.without_torch_func():  # what a file holds is a constant
            memory = aligned(self.reaches())
            self.extent.read(self.start, memory[: self.reaches()], self.leaf)
            made = memory[: self.size_bytes].view(self.dtype).view(self.shape)
            return made.to(self.device)

    def reaches(self) -> int:
        """The bytes to move for it: in whole pages where the rest of its last page is its own."""
        size, extent = self.size_bytes, self.extent
        at_end = self.start + size == extent.length
        whole = self.start + padded(size) == extent.nbytes
        return padded(size) if at_end and whole else size

    def check(self) -> None:
        """Raise DonatedError if the memory behind it was donated."""
        if self.extent.was_given(self.start, self.start + self.size_bytes, self._generation):
            text = f"offload: {self.lies_in()} was overwritten by a step that was given it"
            raise DonatedError(text, fix="use the new state, or pass donate=False")


def is_stored(value: Any) -> bool:
    """Whether a value is a tensor that lies in a file.

    Args:
      value: anything.

    Returns:
      A bool.

    Example:
      >>> offload.is_stored(torch.ones(2))
      False
    """
    return type(value) is Stored


def read(value: Tensor) -> Tensor:
    """Return values of a file or of codes in new memory; other tensors unchanged.

    Args:
      value: a tensor.

    Returns:
      A tensor with memory.

    Memory: that of the tensor.

    Raises:
      FileError: the file cannot be read, or others have changed it.
      DonatedError: a step was given it, and has overwritten it.

    Example:
      >>> from tempfile import TemporaryDirectory
      >>> with TemporaryDirectory() as folder:
      ...     x = offload.store(torch.ones(2), offload.Scratch(folder))
      ...     print(offload.read(x))
      ...     del x
      tensor([1., 1.])
    """
    return value.plain() if isinstance(value, Apart) else value


# Copies between stored tensors and memory, portion by portion, through a small buffer.

PORTION_BYTES = 4 * 2**20
_KEPT: list[Tensor] = []  # buffers of one portion that nobody uses, since making one takes time


def copied_into(memory: Tensor, value: Stored) -> Iterator[None]:
    """Copy a stored tensor, and cast it if need be; each portion is done when this yields.

    Args:
      memory: 1D, of the same length, of any dtype and on any device.
      value: 1D.

    Memory: 4 MiB for each copy under way, of which one stays.

    Raises:
      FileError: the file cannot be read, or others have changed it.
      DonatedError: a step was given it, and has overwritten it.
    """
    value.extent.scratch.check(value.leaf)
    for low, part, staging in _portions(value):
        part.extent.read(part.start, staging[: part.reaches()], part.leaf)
        found = staging[: part.size_bytes].view(value.dtype)
        memory.narrow(0, low, len(found)).copy_(found)
        yield


def copied_from(memory: Tensor, value: Stored) -> Iterator[None]:
    """Overwrite a stored tensor in place if its old values are not needed; else copy."""
    value.extent.scratch.begin_writes(value.leaf)
    for low, part, staging in _portions(value):
        found = staging[: part.size_bytes].view(value.dtype)
        found.copy_(memory.narrow(0, low, len(found)))
        part.extent.write(part.start, staging[: part.reaches()], part.leaf)
        yield


def _portions(value: Stored) -> Iterator[tuple[int, Stored, Tensor]]:
    """The parts of a stored tensor: their first elements, and memory through which they travel."""
    try:
        staging = _KEPT.pop()
    except IndexError:
        staging = aligned(PORTION_BYTES)
    step = PORTION_BYTES // value.dtype.itemsize
    for low in range(0, value.numel(), step):
        part: Stored = value[low : low + step]  # pyright: ignore[reportAssignmentType]
        part.check()
        yield low, part, staging
    _KEPT[:] = [staging]


# How stored tensors are made: without values, from a tensor, or as heirs of those to overwrite.

_AT_ONCE = 4 * 2**20  # bytes of host memory through which `store` writes


def empty(
    scratch: Scratch,
    shape: Any,
    dtype: torch.dtype,
    *,
    leaf: str = "",
    device: torch.device | str = "cpu",
) -> Stored:
    """Allocate a stored tensor without values, for `stream` to write.

    Args:
      scratch: the file that it lies in.
      shape, dtype: of the tensor.
      leaf: its path, for error texts.
      device: where ops on it compute.

    Returns:
      A `Stored`, which cannot be read before it is written.

    Raises:
      FileError: the disk has not so much room.

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
      FileError: the disk has not so much room, or cannot be written.
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
    if spans.observers:
        spans.passing(f"offload: write {leaf}".rstrip(), None, [flat])
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
      FileError: the disk has not so much room, or cannot be written.
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
            raise PlanError(f"renewed: {x.lies_in()} is read by a save under way", fix=fix)
    for x in given:
        x.extent.give_away(x.start, x.start + x.size_bytes)
    return [
        Stored(x.extent, x.start, like_of(x), x.device, x.leaf) if type(x) is Stored else x
        for x in values
    ]


# Stored tensors of which a part at a time is read or set, for those who save and load them.

_FILLED_AT_ONCE = 64 * UNIT  # bytes that are compared at once


def mapped(x: Stored) -> Tensor:
    """The values of a stored tensor on the host, to be read soon: the system reads what is touched.

    Args:
      x: the tensor, which must not be written meanwhile.

    Returns:
      A tensor whose memory is the file's. It must not be written to.

    Memory: none that the system cannot take back.

    Raises:
      FileError: others have changed the file, or its values.
      DonatedError: the tensor was given away.
    """
    x.check()
    if not x.numel():
        return torch.empty(x.shape, dtype=x.dtype)
    scratch, leaf, extent = x.extent.scratch, x.leaf, x.extent
    scratch.check(leaf)
    # In whole units, so that all of it can be compared with checksums.
    low = x.start // UNIT * UNIT
    high = min(extent.nbytes, -(-(x.start + x.size_bytes) // UNIT) * UNIT)
    before = (extent.offset + low) % mmap.ALLOCATIONGRANULARITY
    with scratch.named("read", leaf):
        file = os.open(scratch.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            how = {"flags": mmap.MAP_SHARED, "prot": mmap.PROT_READ}
            at = extent.offset + low - before
            view = mmap.mmap(file, before + high - low, **how, offset=at)
        finally:
            os.close(file)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that it cannot be written to
        raw = torch.frombuffer(view, dtype=torch.uint8)[before:]
    for first in range(low, high, _FILLED_AT_ONCE):
        extent.compare(first, raw[first - low : min(high, first + _FILLED_AT_ONCE) - low], leaf)
    return raw[x.start - low :][: x.size_bytes].view(x.dtype).view(x.shape)


def unset_like(x: Any) -> Apart:
    """A tensor in the same file, or of the same kind of codes, whose values `set_part` sets."""
    if isinstance(x, Coded):
        return x.unset()
    made = empty(x.extent.scratch, x.shape, x.dtype, leaf=x.leaf, device=x.device)
    x.extent.scratch.begin_writes(x.leaf)
    return made


def set_part(x: Any, low: int, values: Tensor) -> None:
    """Set elements of a tensor in a file or of codes before its first read.

    Args:
      x: a part of what `unset_like` has made, such as a leaf; each element is set once.
      low: the first element, of the flattened tensor.
      values: on the host.
    """
    if isinstance(x, Coded):
        x.fill(low, values.reshape(-1))
    elif values.numel():
        raw = values.contiguous().view(-1).view(torch.uint8)
        x.extent.write(x.start + low * x.dtype.itemsize, raw, x.leaf)


# `Hold`: parts of files that are read while the program goes on, so that nobody overwrites
# them.


class Hold:
    """Keeps parts of files as they are, until `release`, or until nobody refers to it.

    Args:
      values: tensors; what is not stored is passed over.

    Example:
      >>> from tempfile import TemporaryDirectory
      >>> with TemporaryDirectory() as folder:
      ...     x = offload.store(torch.ones(2), offload.Scratch(folder))
      ...     hold = offload.Hold([x])
      ...     before = offload.is_held(x)
      ...     hold.release()
      ...     print(before, offload.is_held(x))
      ...     del x
      True False
    """

    def __init__(self, values: Iterable[Any]) -> None:
        stored = (x for x in values if is_stored(x))
        self._extents: dict[int, Extent] = {id(x.extent): x.extent for x in stored}
        for extent in self._extents.values():
            extent.holders.add(self)

    def release(self) -> None:
        """Let them be overwritten."""
        for extent in self._extents.values():
            extent.holders.discard(self)
        self._extents = {}


def is_held(value: Any) -> bool:
    """Whether a tensor lies in a part of a file that must not be overwritten now.

    Args:
      value: anything; what is not stored is not held.

    Returns:
      A bool.
    """
    return is_stored(value) and value.extent.is_held

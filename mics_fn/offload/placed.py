"""`Where` says where leaves live, as a value; a `Placed` tensor lies in a file, or as codes.

[Note: placed tensors] A tensor that is `Placed` has a shape, a dtype and a device, and no memory
that holds its values as they are. An op on it takes its values into new memory and computes with
those, below autograd, as ops on deferred parameters do. A view that is one stretch of the same
elements is placed itself. An op that would write raises. What lies in host memory is a tensor of
torch, which an op on the device cannot read without a copy.

A tensor in a file changes by `stream`, `transfer` and `fill` alone, which write blocks of the file.

[Note: locked parts] A save that is under way reads the parts of files that its state lay in when it
began. Meanwhile steps go on, and with `donate=True` they would write there. So the save holds these
parts: a step finds them held, and writes to new parts instead, as it does without `donate`. The old
ones are free again when the save ends. Nothing is copied, and what is held keeps its bits; whoever
writes there all the same gets an error.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from mics_fn import _torch, checks, spans, tree
from mics_fn.collectives import needs_derivative, refuse_derivative
from mics_fn.errors import PlanError
from mics_fn.offload.scratch import HOST_BYTES, LEAST_HOST_BYTES, Extent, Scratch, aligned, padded
from mics_fn.read_only import ReadOnly

# `Where`: the places of parameters, states and gradients, as a value with a text.

KINDS = ("device", "host", "disk")
_FIELDS = ("params", "states", "grads")
# A pattern, and its fields or a place.
_OVERRIDE = re.compile(r"(?!disk:)([^=]*?):\s*((?:\w+\s*=|device|host|disk:).*)", re.DOTALL)


@dataclass(frozen=True)
class Place:
    """Where a tensor lies: on the device that computes, in host memory, or in a file.

    Args:
      kind: "device", "host" (locked memory, where a device can copy from it by itself) or "disk".
      folder: of the scratch files, for "disk"; "" otherwise. Each rank has files of its own there,
        so a disk of the node is best. A relative one is made absolute here.

    Raises:
      PlanError: there is no such place, or the folder is missing or not wanted.

    Example:
      >>> Place.parse("disk:/nvme/run1")
      Place(kind='disk', folder='/nvme/run1')
    """

    kind: Literal["device", "host", "disk"]
    folder: str = ""

    def __post_init__(self) -> None:
        checks.choice("Place", "kind", self.kind, *KINDS)
        if bool(self.folder) != (self.kind == "disk"):
            expected = "a folder" if self.kind == "disk" else f"none for {self.kind!r}"
            checks.refuse("Place", "folder", self.folder, expected, "write it as disk:/nvme/run1")
        there = os.path.abspath(self.folder) if self.folder else ""
        object.__setattr__(self, "folder", there)

    @classmethod
    def parse(cls, text: str) -> "Place":
        """Read "device", "host" or "disk:FOLDER".

        Raises:
          PlanError: it is none of these.
        """
        kind, _, folder = text.strip().partition(":")
        return cls(kind, folder.strip())  # pyright: ignore[reportArgumentType]

    def seen_from(self, device: torch.device) -> "Place":
        """The same place for tensors of a device; on the CPU the host is the device."""
        here = self.kind == "host" and not _torch.is_async(device)
        return DEVICE if here else self

    def __str__(self) -> str:
        return f"{self.kind}:{self.folder}" if self.folder else self.kind


DEVICE = Place("device")


class Places(NamedTuple):
    """The places of one leaf.

    Args:
      params: of its shard.
      states: of the optimizer's states and masters.
      grads: of the sum of its gradients over micro-steps.

    Example:
      >>> where("states=host").at("w").states
      Place(kind='host', folder='')
    """

    params: Place
    states: Place
    grads: Place


@dataclass(frozen=True)
class Where:
    """Where leaves live. `str` gives a canonical text, which `parse` reads.

    Args:
      params: place of the shards that are gathered from; None means the device.
      states: place of the optimizer's states and masters; None means the device.
      grads: place of the sum of gradients over micro-steps; None means the device.
      overrides: pairs of a pattern and a `Where`. The places that this one sets replace those above
        for leaves whose whole path matches, as in `Precision`; the last one counts.
      host_bytes: host memory through which data of files travel, on each rank; at least 1 MiB.

    Raises:
      PlanError: a place is not a `Place`.

    Example:
      >>> where = Where.parse("states=disk:/nvme/run1, params=host; *norm*: states=device")
      >>> str(where.at("h.0.norm.weight").states), str(where.at("w").states)
      ('device', 'disk:/nvme/run1')
    """

    params: Place | None = None
    states: Place | None = None
    grads: Place | None = None
    overrides: tuple[tuple[str, "Where"], ...] = ()  # any iterable of pairs is taken
    host_bytes: int = HOST_BYTES

    def __post_init__(self) -> None:
        found = tuple(checks.checked_override(x, Where, marks=";=") for x in self.overrides)
        object.__setattr__(self, "overrides", found)
        checks.integer("Where", "host_bytes", self.host_bytes, LEAST_HOST_BYTES)

    @classmethod
    def parse(cls, text: str) -> "Where":
        """Read the text form; `parse(str(where))` equals `where`.

        A text is `field=place, ...`, followed by `; pattern: field=place, ...` for each override. A
        place without a field means `states`. `host_bytes=` may stand among the first fields.

        Raises:
          PlanError: a clause does not give a place for a field, or gives two for the same one.
        """
        base: dict[str, Any] | None = None
        overrides = []
        for clause in filter(None, map(str.strip, text.split(";"))):
            found = _OVERRIDE.fullmatch(clause)
            if found:
                overrides.append((found[1].strip(), cls(**_fields_in(clause, found[2]))))
            elif base is None and not overrides:
                base = _fields_in(clause, clause)
            else:
                fix = "write overrides as in '*norm*: states=device', after the rest"
                raise PlanError(f"where: no pattern in {clause!r}", fix=fix)
        return cls(**(base or {}), overrides=tuple(overrides))

    def __str__(self) -> str:
        own = [f"{name}={place}" for name, place in self._fields()]
        if self.host_bytes != HOST_BYTES:
            own.append(f"host_bytes={self.host_bytes}")
        parts = [", ".join(own)] if own else []
        return "; ".join([*parts, *(f"{p}: {where}" for p, where in self.overrides)])

    def _fields(self) -> list[tuple[str, Place]]:
        return [(name, getattr(self, name)) for name in _FIELDS if getattr(self, name) is not None]

    def at(self, path: str) -> Places:
        """The places of one leaf."""
        found = dict(self._fields())
        for pattern, where in self.overrides:
            if checks.matches(pattern, path):
                found.update(where._fields())
        return Places(*(found.get(name, DEVICE) for name in _FIELDS))

    @property
    def patterns(self) -> list[str]:
        """The patterns of its overrides."""
        return [pattern for pattern, _ in self.overrides]

    @cached_property
    def moved(self) -> set[str]:
        """The fields in which a leaf may lie elsewhere than on the device."""
        every = [self, *(where for _, where in self.overrides)]
        return {name for each in every for name, place in each._fields() if place != DEVICE}


def where(value: "Where | str | None" = "", *, host_bytes: int | str | None = None) -> Where:
    """Where parameters, states and gradients live, as a value.

    Args:
      value: a `Where`, or its text: `field=place, ...` with the fields `params`, `states` and
        `grads` and the places `device`, `host` and `disk:FOLDER`, followed by `; pattern:
        field=place` for leaves whose path matches. "" leaves everything on the device.
      host_bytes: host memory on each rank through which data of files travel, in bytes or a text
        such as "1GiB"; None keeps that of `value`, by default 64 MiB.

    Returns:
      A `Where`.

    Raises:
      PlanError: the text has no such form, or a place does not exist.

    Example:
      >>> str(where("states=disk:/nvme/run1,params=host", host_bytes="128MiB"))
      'params=host, states=disk:/nvme/run1, host_bytes=134217728'
    """
    found = where_of(value)
    if host_bytes is None:
        return found
    nbytes = checks.nbytes("where", "host_bytes", host_bytes, LEAST_HOST_BYTES)
    return replace(found, host_bytes=nbytes)


def where_of(value: Where | str | None) -> Where:
    """The `Where` that an argument means: one, its text, or None for the device."""
    if not value:
        return ON_DEVICE
    return Where.parse(value) if isinstance(value, str) else value


def _fields_in(clause: str, fields: str) -> dict[str, Any]:
    """The fields that a clause of a text sets, with their places."""
    found: dict[str, Any] = {}
    for part in filter(None, map(str.strip, fields.split(","))):
        name, equals, value = map(str.strip, part.partition("="))
        name, value = (name, value) if equals else ("states", part)
        if name in found or name not in (*_FIELDS, "host_bytes"):
            text = f"where: {part!r} in {clause!r} gives no place for another field"
            raise PlanError(text, [f"fields are {', '.join(_FIELDS)}, host_bytes"])
        is_size = name == "host_bytes"
        found[name] = checks.nbytes("where", name, value) if is_size else Place.parse(value)
    return found


ON_DEVICE = Where()


# Tensors whose values do not lie in memory as they are: in a file here, as codes in `codes`.

aten = torch.ops.aten


class Placed(ReadOnly):
    """A dense tensor whose values lie in a file or as codes; see [Note: placed tensors]."""

    leaf: str  # its path, for error texts
    size_bytes: Any  # what it takes where it lies
    plain: Any  # fetches its values into new memory, on its device
    part: Any  # selects the elements from a `start` on, with the shape of a tensor `like`
    unset: Any  # allocates a tensor of its kind beside it, whose values `fill` sets
    # Sets the elements of what `unset` gave from `low` on to `values`, each once before it is read.
    fill: Any

    def copied(self) -> Tensor:
        """Copy it into new memory: its values, or its codes if it has such."""
        return self.plain()

    @classmethod
    def __torch_dispatch__(  # pyright: ignore
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func in _ANSWERS:
            return _ANSWERS[func](*args)
        views = func in _VIEWS or _torch.op_views(func)
        return (_view if views else _compute)(func, args, kwargs or {})


def is_placed(value: Any) -> bool:
    """Whether a value is a tensor that lies in a file, or as codes.

    Args:
      value: anything.

    Returns:
      A bool.

    Example:
      >>> offload.is_placed(torch.ones(2))
      False
    """
    return isinstance(value, Placed)


def like_of(value: Tensor) -> Tensor:
    """Make a tensor on meta with the shape and dtype of a dense one."""
    return torch.empty(value.shape, dtype=value.dtype, device="meta")


def _compute(func: Any, args: tuple, kwargs: dict) -> Any:
    """Run an op on plain tensors, unless it writes to a placed one."""
    given = _torch.op_arguments(func, args, kwargs)
    for x in tree.flatten([given.get(name) for name in _torch.op_writes(func)])[0]:
        if isinstance(x, Placed):
            raise x.refusal(f"{func}: writes to")
    args, kwargs = tree.map_leaves(read, (args, kwargs))
    return func(*args, **kwargs)


@torch.inference_mode(mode=False)  # in which nothing is a view of tensors from outside
def _view(func: Any, args: tuple, kwargs: dict) -> Any:
    """Return a view of a placed tensor: placed if it is one contiguous range."""
    value = args[0]
    if not isinstance(value, Placed):
        return _compute(func, args, kwargs)
    made = func(like_of(value), *args[1:], **kwargs)
    several = isinstance(made, list | tuple)
    views = list(made) if several else [made]
    if not all(view.is_contiguous() and view.dtype == value.dtype for view in views):
        return _compute(func, args, kwargs)
    parts = [value.part(int(view.storage_offset()), view) for view in views]
    return parts if several else parts[0]


_VIEWS = (aten._unsafe_view.default, aten._reshape_alias.default)  # whose schemas do not say so
# Called for the two parts of a dual tensor; a placed one counts as having its own memory.
_ANSWERS: dict[Any, Callable[..., bool]] = {
    aten._has_same_storage_numel.default: lambda *_: True,
    aten.is_same_size.default: lambda a, b: a.shape == b.shape,
}


class FileTensor(Placed):
    """A dense tensor in a scratch file. `empty` and `store` make one, and `read` reads it.

    An op on it reads the file, and gives a tensor with memory. Views lie in the file, too.

    Example:
      >>> from tempfile import TemporaryDirectory
      >>> with TemporaryDirectory() as folder:
      ...     x = offload.store(torch.arange(4.0), offload.Scratch(folder))
      ...     print(isinstance(x[1:], offload.FileTensor), x[1:] * 2)
      True tensor([2., 4., 6.])
    """

    noun = "a tensor in a file"
    how_to_change = "write through stream(), or move() it to the device first"
    extent: Extent
    start: int  # where it begins in its extent, in bytes

    @staticmethod
    def __new__(
        cls: type, extent: Extent, start: int, like: Tensor, device: torch.device, leaf: str = ""
    ) -> Any:
        """Make a tensor of a part of an extent.

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
        return self

    def __repr__(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        kind = f"{self.dtype}".removeprefix("torch.")
        return f"FileTensor(shape={tuple(self.shape)}, {kind}, in {self.extent.scratch.folder})"

    def where_text(self) -> str:
        """Its leaf, its shape and its folder, for error texts."""
        which = f"{self.leaf}, " if self.leaf else ""
        return f"{which}shape {tuple(self.shape)} in {self.extent.scratch.folder}"

    @property
    def size_bytes(self) -> int:
        """The bytes of its values."""
        return self.numel() * self.dtype.itemsize

    def part(self, start: int, like: Tensor) -> "FileTensor":
        """Select the elements from `start` on, with the shape of `like`."""
        at = self.start + start * self.dtype.itemsize
        return FileTensor(self.extent, at, like, self.device, self.leaf)

    def plain(self) -> Tensor:
        """Read the file into new memory, on its device."""
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

    def unset(self) -> "FileTensor":
        """Allocate a tensor in the same file."""
        leaf, device = self.leaf, self.device
        return empty(self.extent.scratch, self.shape, self.dtype, leaf=leaf, device=device)

    def fill(self, low: int, values: Tensor) -> None:
        """Write elements."""
        if values.numel():
            raw = values.contiguous().view(-1).view(torch.uint8)
            self.extent.write(self.start + low * self.dtype.itemsize, raw, self.leaf)

    def mapped(self) -> Tensor:
        """Map its values, to be read soon, into memory that must not be written.

        The tensor must not be written meanwhile. Memory: none that the system cannot take back.
        """
        if not self.numel():
            return torch.empty(self.shape, dtype=self.dtype)
        raw = self.extent.view(self.start, self.size_bytes, self.leaf)
        return raw.view(self.dtype).view(self.shape)


def in_file(value: Any) -> bool:
    """Whether a value is a tensor that lies in a file.

    Args:
      value: anything.

    Returns:
      A bool.

    Example:
      >>> offload.in_file(torch.ones(2))
      False
    """
    return type(value) is FileTensor


def read(value: Tensor) -> Tensor:
    """Fetch values of a file or of codes into new memory; other tensors are given unchanged.

    Args:
      value: a tensor.

    Returns:
      A tensor with memory.

    Memory: that of the tensor.

    Raises:
      FileError: the file cannot be read.

    Example:
      >>> from tempfile import TemporaryDirectory
      >>> with TemporaryDirectory() as folder:
      ...     x = offload.store(torch.ones(2), offload.Scratch(folder))
      ...     print(offload.read(x))
      tensor([1., 1.])
    """
    return value.plain() if isinstance(value, Placed) else value


# How tensors get to a place: one scratch file per folder, room in it, and copies there and back.

PORTION_BYTES = 4 * 2**20  # of host memory through which a copy travels
_CPU = torch.device("cpu")
_SCRATCHES = WeakValueDictionary[Any, Scratch]()


def scratch_in(folder: str, host_bytes: int) -> Scratch:
    """Return the scratch file of this process in a folder; it is made for the first tensor."""
    key = os.getpid(), folder, host_bytes  # a forked process must not write to the same file
    found = _SCRATCHES.get(key)
    if found is None:
        found = _SCRATCHES[key] = Scratch(folder, host_bytes=host_bytes)
    return found


def empty(
    scratch: Scratch,
    shape: Any,
    dtype: torch.dtype,
    *,
    leaf: str = "",
    device: torch.device | str = "cpu",
) -> FileTensor:
    """Allocate a tensor in a file, without values.

    Args:
      scratch: the file that it lies in.
      shape, dtype: of the tensor.
      leaf: its path, for error texts.
      device: where ops on it compute.

    Returns:
      A `FileTensor`, which is to be written before it is read.

    Raises:
      FileError: the disk has not so much room.

    Example:
      >>> from tempfile import TemporaryDirectory
      >>> with TemporaryDirectory() as folder:
      ...     x = offload.empty(offload.Scratch(folder), (3,), torch.float32, leaf="w")
      ...     for block, (part,) in offload.stream([offload.Block([None], [x])]):
      ...         part[:] = 2.0
      ...     print(x + 0)
      tensor([2., 2., 2.])
    """
    like = torch.empty(shape, dtype=dtype, device="meta")
    extent = scratch.reserve(like.numel() * like.itemsize, leaf)
    return FileTensor(extent, 0, like, torch.device(device), leaf)


def store(tensor: Tensor, scratch: Scratch, leaf: str = "") -> FileTensor:
    """Copy a tensor into a scratch file.

    Args:
      tensor: a tensor on any device, in a file or not.
      scratch: the file.
      leaf: its path, for error texts.

    Returns:
      A `FileTensor`.

    Memory: 4 MiB.

    Raises:
      FileError: the disk has not so much room, or cannot be written.
      LeafError: a derivative is asked for, which ends at a file.

    Example:
      >>> from tempfile import TemporaryDirectory
      >>> with TemporaryDirectory() as folder:
      ...     x = offload.store(torch.ones(2, 3), offload.Scratch(folder))
      ...     print(x.shape, x[1].sum())
      torch.Size([2, 3]) tensor(3.)
    """
    refuse_derivative("store", [] if tensor.is_leaf else [tensor], "store outside of torch.func")
    made = empty(scratch, tensor.shape, tensor.dtype, leaf=leaf, device=tensor.device)
    flat = tensor.detach().reshape(-1)
    if spans.observers:
        spans.passing(f"offload: write {leaf}".rstrip(), None, [flat])
    for _ in transfer(flat, made.view(-1)):
        pass
    return made


def transfer(source: Tensor, goal: Tensor) -> Iterator[None]:
    """Copy a tensor from one place to another and cast it; each portion is done when this yields.

    Args:
      source: 1D, on a device, on the host, in a file or of codes.
      goal: 1D, of the same length; in a file only if it is `FileTensor`.

    Memory: 4 MiB for each copy from or to a file, of which one stays.

    Raises:
      FileError: the file cannot be read or written.
    """
    file: Any = goal if isinstance(goal, FileTensor) else source
    if not isinstance(file, FileTensor):
        # A copy between devices that also casts would cast on the host, which waits for it.
        here = read(source)
        casts = _torch.is_async(here.device)
        here = here.to(goal.dtype) if casts else here.to(goal.device, non_blocking=True)
        goal.copy_(here, non_blocking=True)
        yield
        return
    scratch = file.extent.scratch
    staging = scratch.take(PORTION_BYTES, _CPU)
    step = PORTION_BYTES // file.dtype.itemsize
    for low in range(0, file.numel(), step):
        part: Any = file[low : low + step]
        memory = staging[: part.reaches()]
        found = staging[: part.size_bytes].view(file.dtype)
        if file is goal:
            found.copy_(source[low : low + step])
            part.extent.write(part.start, memory, part.leaf)
        else:
            part.extent.read(part.start, memory, part.leaf)
            goal.narrow(0, low, len(found)).copy_(found)
        yield
    scratch.give(staging)


def empty_at(
    place: Place, shape: Any, dtype: torch.dtype, device: torch.device, host_bytes: int, leaf: str
) -> Tensor:
    """Allocate a tensor at a place.

    Args:
      place: where.
      shape, dtype: of the tensor.
      device: the one that computes with it.
      host_bytes: of the `Where` that the place comes from.
      leaf: its path, for error texts.
    """
    if place.kind == "disk":
        scratch = scratch_in(place.folder, host_bytes)
        return empty(scratch, shape, dtype, leaf=leaf, device=device)
    if place == DEVICE:
        return torch.empty(shape, dtype=dtype, device=device)
    size = torch.Size(shape)
    return _torch.host_buffer(size.numel() * dtype.itemsize, device).view(dtype).view(size)


def place_tensor(x: Any, place: Place, device: torch.device, host_bytes: int, leaf: str) -> Tensor:
    """Copy a tensor to a place, and into memory of its own; the same tensor if it is there.

    Args:
      x: the tensor.
      place, device, host_bytes, leaf: as for `empty_at`.
    """
    if place == DEVICE:
        return read(x).to(device)
    if place.kind == "disk":
        if in_file(x) and x.extent.scratch.folder == Path(place.folder):
            return x
        return store(x, scratch_in(place.folder, host_bytes), leaf)
    if x.is_cpu and not isinstance(x, Placed):
        return x
    return empty_at(place, x.shape, x.dtype, device, host_bytes, leaf).copy_(x)


def placed_like(new: Sequence[Tensor], old: Sequence[Tensor]) -> list[Tensor]:
    """Place tensors each as another one: on its device, in locked memory, in its file, or as codes.

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
    out, by_extent = list(new), dict[Extent, list[int]]()
    for i, (x, was) in enumerate(zip(new, old, strict=True)):
        if not isinstance(was, FileTensor):
            other = isinstance(x, Placed) or isinstance(was, Placed) or x.device != was.device
            if other or (was.is_pinned() and not x.is_pinned()):
                out[i] = _beside(x, was)
        elif not (isinstance(x, FileTensor) and x.extent.scratch is was.extent.scratch):
            by_extent.setdefault(was.extent, []).append(i)
    for extent, members in by_extent.items():
        found = _beside_in_file(extent, [out[i] for i in members], [old[i] for i in members])
        for i, made in zip(members, found, strict=True):
            out[i] = made
    return out


def _beside(x: Tensor, was: Any) -> Tensor:
    """Place a tensor in memory as that of another one is, or as codes."""
    if isinstance(was, Placed):
        return x if isinstance(x, Placed) else was.coded(x)  # pyright: ignore
    x = read(x)
    if not was.is_pinned():
        return x.to(was.device)
    device = torch.accelerator.current_accelerator() if x.is_cpu else x.device
    memory = _torch.host_buffer(x.nbytes, device or x.device)
    return memory.view(x.dtype).view(x.shape).copy_(x)


def _beside_in_file(extent: Extent, new: Sequence[Tensor], old: Sequence[Any]) -> list[Any]:
    """Write tensors to a new part of a file, in the places that others have in theirs."""
    pairs = list(zip(new, old, strict=True))
    starts = [was.start for was in old if was.numel()]
    alike = all((x.dtype, x.shape) == (was.dtype, was.shape) for x, was in pairs)
    if not alike or len({*starts}) < len(starts):
        return [store(x, extent.scratch, was.leaf) for x, was in pairs]
    whole = aligned(extent.nbytes).zero_()
    for x, was in pairs:
        part = whole[was.start : was.start + was.size_bytes]
        part.view(x.dtype).view(x.shape).copy_(x.detach())
    made = store(whole, extent.scratch, extent.leaf).extent
    return [FileTensor(made, was.start, like_of(was), was.device, was.leaf) for was in old]


# `ReadLock`: parts of files that are read meanwhile, so that nobody overwrites them.


class ReadLock:
    """Keeps parts of files as they are, until `release`, or until nobody refers to it.

    Args:
      values: tensors; what is not in a file is passed over.

    Example:
      >>> from tempfile import TemporaryDirectory
      >>> with TemporaryDirectory() as folder:
      ...     x = offload.store(torch.ones(2), offload.Scratch(folder))
      ...     hold = offload.ReadLock([x])
      ...     before = offload.is_locked(x)
      ...     hold.release()
      ...     print(before, offload.is_locked(x))
      True False
    """

    def __init__(self, values: Iterable[Any]) -> None:
        self._extents = {x.extent for x in values if in_file(x)}
        for extent in self._extents:
            extent.holders.add(self)

    def release(self) -> None:
        """Let them be overwritten."""
        for extent in self._extents:
            extent.holders.discard(self)
        self._extents = set()


def is_locked(value: Any) -> bool:
    """Whether a tensor lies in a part of a file that must not be overwritten now.

    Args:
      value: anything; what is not in a file is not held.

    Returns:
      A bool.
    """
    return in_file(value) and value.extent.is_locked

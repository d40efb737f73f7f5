"""Tensors without memory of their own, in files or as codes, and how tensors get to a place.

[Note: absent tensors] An `Absent` tensor has a shape, a dtype, strides and a device, and no memory
that holds its values as they are: a `Placed` one lies in a file or as codes, and a `Deferred` one
(in the wing `deferred`) is cut over ranks. An op on it computes with its values, below autograd, so
that this needs no hooks and works under `torch.func`. A view is computed from metadata alone and is
absent itself; of one that is placed, if it is one stretch of the same elements. An op that would
write raises. What lies in host memory is a tensor of torch, which an op on the device cannot read
without a copy.

A tensor in a file changes by `stream`, `transfer` and `fill` alone, which write blocks of the file.

[Note: locked parts] A save that is under way reads the parts of files that its state lay in when it
began. Meanwhile steps go on, and with `donate=True` they would write there. So the save holds these
parts: a step finds them held, and writes to new parts instead, as it does without `donate`. The old
ones are free again when the save ends. Nothing is copied, and what is held keeps its bits; whoever
writes there all the same gets an error.

What follows is about codes. A block of values becomes a byte for each and one float32 `top`, which
is the largest magnitude of the block. So that magnitude has no rounding, and it follows changes of
a part in ten million, as the second moment of AdamW needs, which changes by a thousandth in a step.

[Note: rounding at random] Between two codes lies more than most steps change, so rounding to
nearest would leave a moment where it is for ever. Here a value is rounded up with the probability
of its distance from the code below, so its mean over steps is right. The random number comes from
the bits of the value itself: ranks, buckets and parts of a column have no influence, and the same
step gives the same bits. A value that is a code already stays one.

[Note: roots] A second moment is never negative and goes into an update by its root, so the root is
what is coded. One that is not zero never becomes zero, or an update would be divided by `eps`
alone: its code is at least the least one. Roots are at least 2**-45, so that no square of a code is
lost below the normal numbers of float32; `eps` of any use is far above.

So a root that is smaller than the least code counts as larger than it is, and the step of its
element becomes smaller by the same factor. The least code is 1/127 of the largest root of a block.
Where gradients of one block differ by more than a hundred times, as those of rows of an embedding
may, choose shorter blocks.

[Note: two kinds of codes] Moments change in every step, so they are rounded at random and have the
scales above: a `MomentCodec`. Frozen parameters are coded once, as what travels is: to nearest,
with the scales of `collectives.Codec`. Either way all codes of a chunk are one row of bytes; that
of frozen parameters is sent by a gather as it is. Values decoded to float32 are exact, and coding
them again gives the same row.

[Note: coded tensors] The blocks of a `Coded` begin with the memory, so whoever packs leaves into it
begins each on the border of a block. It changes only by `write`, in whole blocks, and by `fill`,
which takes values part by part and codes them once all of them are there.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partialmethod
from threading import Lock
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from mics_fn import _torch, spans
from mics_fn.collectives import Codec, needs_derivative, refuse_derivative
from mics_fn.errors import LeafError
from mics_fn.offload.scratch import DEVICE, DISK, PAGE, Extent, Scratch, aligned, padded

# Tensors without memory: an op gets their values, and a view is one of them again.

aten = torch.ops.aten
Geometry = tuple[tuple[int, ...], tuple[int, ...], int]  # size, stride, offset; in elements


class Absent(torch.Tensor):
    """A dense tensor without memory, whose values are fetched at an op that needs them.

    Ops can read it, and nothing can write to it.
    """

    geometry: Any  # its size and strides, and where in its own elements it begins
    plain: Any  # fetches its values
    view_with: Any  # gives the view of its elements that has a geometry
    # Whether what reads it gets a view only if that is one contiguous range.
    in_one_range: ClassVar[bool] = True
    # What the schema of an op is not enough to choose.
    handlers: ClassVar[dict[Any, Callable[..., Any]]]
    __torch_function__ = _torch.no_torch_function
    noun = "a gathered parameter"  # what it is, for error texts
    how_to_change = "change parameters between steps, in the shards; or write to a clone()"
    how_to_compile = "clone() it before, which reads it"

    @classmethod
    def __torch_dispatch__(  # pyright: ignore
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        handle = cls.handlers.get(func)
        if handle is None:
            changes = refuse_writes if _torch.op_writes(func) else compute
            # Of these, `to` may give a copy on another device.
            views = func.is_view and not _torch.op_takes(func, "device")
            handle = cls.handlers[func] = view if views else changes
        return handle(cls, func, args, kwargs or {})

    @classmethod
    def fetch(cls, found: Sequence[Any]) -> Sequence[range]:
        """Prepare for `plain` of all arguments of an op; give the memory of what stays there."""
        return ()

    def where_text(self) -> str:
        """What and where it is, for error texts."""
        return f"shape {tuple(self.shape)}"

    def refusal(self, what: str, fix: str = "") -> LeafError:
        """The error for something that cannot be done with this tensor."""
        text = f"{what} {self.noun}, {self.where_text()}"
        return LeafError(text, fix=fix or self.how_to_change)

    def __tensor_flatten__(self) -> Any:
        """Raise LeafError: torch.compile calls this, and would trace nothing."""
        what = "torch.compile: a tensor without memory enters a compiled region:"
        raise self.refusal(what, self.how_to_compile)

    __tensor_unflatten__ = __tensor_flatten__  # torch looks for both or neither

    @property
    def data(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The same tensor without a gradient."""
        return self.detach()

    @data.setter
    def data(self, value: Any) -> None:
        raise self.refusal(".data = writes to")

    @property
    def grad(self) -> Tensor | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """As for any tensor that is not a leaf of autograd: None unless it retains its gradient."""
        return torch.Tensor.grad.__get__(self)  # pyright: ignore

    @grad.setter
    def grad(self, value: Any) -> None:
        if value is not None:
            raise self.refusal(".grad = would be lost on", "give gradients to opt_step, as shards")

    def register_post_accumulate_grad_hook(self, hook: Any) -> Any:
        """Raises LeafError, since no `grad` is accumulated."""
        raise self.refusal("no gradient is accumulated in", "use register_hook, on the full one")

    def is_shared(self) -> bool:
        """Whether other processes share its memory, which is never so."""
        return False

    def numpy(self, *, force: bool = False) -> Any:
        """A copy as an array; read-only, since a write to it would reach no parameter."""
        array = (self.detach() if force else self).clone().numpy(force=force)
        array.flags.writeable = False
        return array

    def tolist(self) -> Any:
        """The values as lists."""
        return self.detach().clone().tolist()

    def __format__(self, spec: str) -> str:
        return format(self.detach().clone(), spec) if spec else repr(self)

    def __copy__(self) -> Tensor:
        return self  # neither of them can be written to

    def copied(self) -> Tensor:
        """Copy its values, or its codes if it has such, into new memory."""
        return self.detach().clone()

    def __deepcopy__(self, memo: dict) -> Tensor:
        return self.copied()


# These methods never reach an op: torch would answer them by writing to a value that is then lost,
# by an error about fake tensors, or by reading from an invalid address. For an in-place change of a
# view that a Function made, autograd has a less helpful error.
_WRITES = "apply_ map_ map2_ resize_ resize_as_ __iadd__ __isub__ __imul__ __itruediv__ __imod__"
_WRITES += " __ifloordiv__ __ipow__ __iand__ __ior__ __ixor__ __ilshift__ __irshift__ __idiv__"
_REFUSED = {name: (f"{name} writes to", "") for name in _WRITES.split()}
_CLONE = "pass a clone(), which has memory of its own"
for _name in ("data_ptr", "untyped_storage", "storage", "share_memory_", "__dlpack__"):
    _REFUSED[_name] = f"{_name} asks for the memory of", _CLONE
_REFUSED["__reduce_ex__"] = "torch.save and pickle want the memory of", "save shards, or a clone()"


def _refuse(self: Absent, what: str, fix: str, *args: Any, **kwargs: Any) -> Any:
    raise self.refusal(what, fix)


for _name, _why in _REFUSED.items():
    setattr(Absent, _name, partialmethod(_refuse, *_why))


def search(cls: type, values: Iterable[Any], found: list[Any]) -> list[Any]:
    """Append to `found` the tensors of a class among an op's arguments, also those in lists."""
    for value in values:
        kind = type(value)
        if kind is cls:
            found.append(value)
        elif kind is list or kind is tuple:
            search(cls, value, found)
    return found


def _replace(cls: type, value: Any) -> Any:
    """Put values in the place of tensors of a class in an argument of an op."""
    kind = type(value)
    if kind is cls:
        return value.plain()
    if kind is list or kind is tuple:
        return kind([_replace(cls, each) for each in value])
    return value


def compute(cls: type[Absent], func: Any, args: tuple, kwargs: dict) -> Any:
    """Run an op on values."""
    found = search(cls, args, [])
    if kwargs:
        search(cls, kwargs.values(), found)
    memory = cls.fetch(found)
    if kwargs:
        kwargs = {name: _replace(cls, value) for name, value in kwargs.items()}
    return _own(func(*_replace(cls, args), **kwargs), memory)


def _own(out: Any, memory: Sequence[range]) -> Any:
    """Return the result of an op in memory of its own, since some ops return their input."""
    kind = type(out)
    if kind is Tensor and memory:
        if out.layout is not torch.strided:  # its parts may lie in the memory of its inputs
            return out.clone()
        at = out.data_ptr()
        for part in memory:
            if at in part and out.numel():
                return out.clone()
    elif kind is tuple or kind is list:
        return kind([_own(each, memory) for each in out])
    return out


def view(cls: type[Absent], func: Any, args: tuple, kwargs: dict) -> Any:
    """Return a view of an absent tensor, computed from its metadata alone."""
    value = args[0]
    if type(value) is not cls:
        return compute(cls, func, args, kwargs)
    rest = tuple([tuple(a) if type(a) is list else a for a in args[1:]])
    own = value.geometry, value.dtype, cls.in_one_range
    found = _geometries(func, rest, tuple(kwargs.items()), *own)
    if found is None:
        return compute(cls, func, args, kwargs)
    made = list(map(value.view_with, found[0]))
    return made if found[1] else made[0]


@lru_cache(maxsize=20_000)
@torch.inference_mode(mode=False)  # in which nothing is a view of tensors from outside
def _geometries(
    func: Any, rest: tuple, kwargs: tuple, own: Geometry, dtype: torch.dtype, in_one_range: bool
) -> tuple[list[Geometry], bool] | None:
    """Find what a view op gives, and whether that is a list; None if it has another dtype."""
    size, stride, offset = own
    extent = offset + 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True) if n)
    base = torch.empty(extent, dtype=dtype, device="meta").as_strided(size, stride, offset)
    out = func(base, *rest, **dict(kwargs))
    several = isinstance(out, list | tuple)
    metas = list(out) if several else [out]
    if any(m.dtype != dtype or m.is_neg() or m.is_conj() for m in metas):
        return None
    if in_one_range and not all(m.is_contiguous() for m in metas):
        return None
    return [(tuple(m.shape), m.stride(), int(m.storage_offset())) for m in metas], several


def refuse_writes(cls: type[Absent], func: Any, args: tuple, kwargs: dict) -> Any:
    """Raise LeafError for an op that writes to an absent tensor, and compute others."""
    given = _torch.op_arguments(func, args, kwargs)
    written = search(cls, [given.get(name) for name in _torch.op_writes(func)], [])
    if written:
        raise written[0].refusal(f"{func}: writes to")
    return compute(cls, func, args, kwargs)


Absent.handlers = {
    aten._unsafe_view.default: view,  # whose schemas do not say so
    aten._reshape_alias.default: view,
    # Called for the two parts of a dual tensor before anything is fetched. An absent one counts as
    # having memory of its own.
    aten._has_same_storage_numel.default: lambda cls, func, args, kwargs: True,
    aten.is_same_size.default: lambda cls, func, args, kwargs: args[0].shape == args[1].shape,
}


# Tensors whose values do not lie in memory as they are: in a file, or as codes.


class Placed(Absent):
    """A dense tensor whose values lie in a file or as codes."""

    handlers = dict(Absent.handlers)
    leaf: str  # its path, for error texts
    size_bytes: Any  # what it takes where it lies
    part: Any  # selects the elements from a `start` on, with the shape of a tensor `like`
    unset: Any  # allocates a tensor of its kind beside it, whose values `fill` sets
    # Sets the elements of what `unset` gave from `low` on to `values`, each once before it is read.
    fill: Any

    @property
    def geometry(self) -> Geometry:
        """Its size and strides; it begins with its elements."""
        return tuple(self.shape), self.stride(), 0

    @torch.inference_mode(mode=False)
    def view_with(self, geometry: Geometry) -> Any:
        """Select a range of its elements."""
        size, _, start = geometry
        return self.part(start, torch.empty(size, dtype=self.dtype, device="meta"))


def like_of(value: Tensor) -> Tensor:
    """Make a tensor on meta with the shape and dtype of a dense one."""
    return torch.empty(value.shape, dtype=value.dtype, device="meta")


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
        return f"{self.leaf}, shape {tuple(self.shape)} in {self.extent.scratch.folder}"

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
            memory = aligned(self.size_bytes)
            self.move(self.extent.read, memory)
            made = memory[: self.size_bytes].view(self.dtype).view(self.shape)
            return made.to(self.device)

    def move(self, how: Callable[..., None], memory: Tensor) -> None:
        """Read or write its bytes, in whole pages where the rest of its last page is its own.

        Args:
          how: `read` or `write` of its extent.
          memory: of whole pages, that begins with its bytes.
        """
        size = self.size_bytes
        if self.start % PAGE == 0 and self.start + size == self.extent.length:
            size = padded(size)
        how(self.start, memory[:size], self.leaf)

    def unset(self) -> "FileTensor":
        """Allocate a tensor in the same file."""
        return empty(
            self.extent.scratch, self.shape, self.dtype, leaf=self.leaf, device=self.device
        )

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
        raw = self.extent.view(self.start, self.size_bytes)
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


# Codes at rest: the arithmetic that keeps moments of an optimizer in a byte each.

_LARGEST = 127.0  # of the codes; the least one above zero is 1
_ROOT, _TOP = 2.0**-45, 2.0**-100  # the least root, and the least `top`
_HASH = -1640531535  # 2**32 divided by the golden ratio, as an odd int32


@dataclass(frozen=True)
class MomentCodec(Codec):
    """How moments become bytes; see [Note: two kinds of codes].

    In a row the `top` of each block, in float32, comes before the codes of all.

    Args:
      name, block: as for `Codec`.
      root: whether the roots of values are coded.
    """

    root: bool = False

    def nbytes(self, n: int) -> int:
        """Bytes of the codes of so many values, in whole blocks."""
        return n + n // self.block * 4

    def blocks(self, row: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """Views of a row of so many values: the codes of each block, and its `top`."""
        count = n // self.block
        return row[4 * count :].view(count, self.block), row[: 4 * count].view(torch.float32).view(
            -1, 1
        )

    def encode_blocks(self, values: Tensor, elements: Tensor, tops: Tensor) -> None:
        """Write the codes of values (blocks, length), float32."""
        x, above = values.clone(), None
        if self.root:
            above = (x > 0).to(torch.float32)
            x.sqrt_().clamp_(min=_ROOT).mul_(above)
        largest = torch.maximum(x.amax(1, keepdim=True), x.amin(1, keepdim=True).neg_())
        # What is not finite makes its whole block NaN.
        torch.add(largest, largest * 0, out=tops).clamp_(min=_TOP)
        x.mul_(_LARGEST / tops)
        random = x.view(torch.int32).mul(_HASH).bitwise_right_shift_(16)  # -2**15 to 2**15 - 1
        x.add_(random, alpha=2.0**-16 * (1 - 2.0**-10)).round_()
        if above is not None:
            x = torch.maximum(x, above)
        elements.view(torch.int8).copy_(x.nan_to_num_(0.0))

    def decode_blocks(self, elements: Tensor, tops: Tensor, out: Tensor) -> None:
        """Write the values of such codes to `out` (blocks, length), float32."""
        out.copy_(elements.view(torch.int8)).div_(_LARGEST).mul_(tops)
        if self.root:
            out.mul_(out)


class CodedMemory:
    """The memory of coded values, in whole blocks: zeros, or what lies in a row.

    Args:
      codec: kind and length of blocks; a `Codec` of what a gather sends, or a `MomentCodec`.
      numel: how many values there are at least.
      device: of the memory.
      row: the bytes of so many values; None makes it.

    `elements`, uint8 (blocks, bytes of a block), and `tops` (blocks, 1), which are bfloat16 scales
    or float32 largest magnitudes, are views of the row.
    """

    def __init__(self, codec: Codec, numel: int, device: Any, row: Tensor | None = None) -> None:
        numel = -(-numel // codec.block) * codec.block
        if row is None:
            row = torch.zeros(codec.nbytes(numel), dtype=torch.uint8, device=device)
        self.codec, self.row, self.numel = codec, row, numel
        self.elements, self.tops = codec.blocks(row, numel)
        # Values that are not coded yet, by their start, with how many are there.
        self.incoming: dict[int, tuple[Tensor, int]] = {}


_DETACH = "pass detached values, outside of torch.func: rounding to codes has no derivative"
_AT_ONCE = 2**16  # elements, so that what is computed with stays in the caches
_COMING = Lock()  # several threads fill a tensor


class Coded(Placed):
    """A float32 tensor kept as codes. `coded` makes one, and `read` decodes it.

    An op on it decodes what it needs, and gives a tensor with values.

    Example:
      >>> x = offload.coded(torch.tensor([2.0, -2.0, 0.0, 0.0]), collectives.Codec("int8", 4))
      >>> x, x + 1
      (Coded(shape=(4,), int8[4]), tensor([ 3., -1.,  1.,  1.]))
    """

    noun = "a coded tensor"
    how_to_change = "use set(), or compute with a clone()"
    codes: CodedMemory
    start: int  # the element of its memory at which it begins

    @staticmethod
    def __new__(cls: type, codes: CodedMemory, start: int, like: Tensor, leaf: str = "") -> Any:
        """Some elements of a memory.

        Args:
          codes: the memory.
          start: the element at which it begins.
          like: a dense float32 tensor with its shape.
          leaf: its path, for error texts.
        """
        geometry = tuple(like.shape), tuple(like.stride()), 0
        self = _torch.wrapper_without_data(cls, geometry, like.dtype, codes.row.device)
        self.codes, self.start, self.leaf = codes, start, leaf
        return self

    def __repr__(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return f"Coded(shape={tuple(self.shape)}, {self.codes.codec})"

    @property
    def size_bytes(self) -> int:
        """The bytes of its codes, and of the scale of each of its blocks."""
        return self.bytes_of(self.numel())

    def bytes_of(self, numel: int) -> int:
        """The bytes of so many elements."""
        length, tops = self.codes.codec.block, self.codes.tops.itemsize
        codes = -(-numel * self.codes.elements.shape[1] // length)
        return codes + tops * -(-numel // length)

    def part(self, start: int, like: Tensor) -> "Coded":
        """The elements from `start` on, with the shape of `like`."""
        return Coded(self.codes, self.start + start, like, self.leaf)

    def plain(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Its values in a dtype, in new memory; moments are decoded in float32 alone."""
        with _torch.without_torch_func():  # codes are constants
            (first, last), length = self.blocks(), self.codes.codec.block
            out = torch.empty((last - first, length), dtype=dtype, device=self.device)
            for low, high in _pieces(first, last, length):
                codes = self.codes.elements[low:high], self.codes.tops[low:high]
                self.codes.codec.decode_blocks(*codes, out[low - first : high - first])
            begin = self.start % length
            return out.view(-1)[begin : begin + self.numel()].view(self.shape)

    def blocks(self) -> tuple[int, int]:
        """The first of its blocks, and the end of them."""
        length = self.codes.codec.block
        first = self.start // length
        return first, max(first, -(-(self.start + self.numel()) // length))

    def part_codes(self) -> list[Tensor]:
        """Views of the codes of its blocks and of their scales, both 1D."""
        first, last = self.blocks()
        return [x[first:last].view(-1) for x in (self.codes.elements, self.codes.tops)]

    def write(self, low: int, values: Tensor) -> None:
        """Code values.

        Args:
          low: the element at which they go, on the border of a block.
          values: float32, whole blocks or up to the end of the memory, and only padding beyond what
            belongs to this tensor.
        """
        verb = "opt_step" if isinstance(self.codes.codec, MomentCodec) else "shard"
        refuse_derivative(verb, [values], _DETACH)
        length = self.codes.codec.block
        begin, count = (self.start + low) // length, -(-values.numel() // length)
        for a, b in _pieces(0, count, length):
            some = values[a * length : b * length]
            missing = (b - a) * length - some.numel()
            some = torch.cat([some, some.new_zeros(missing)]) if missing else some
            goal = slice(begin + a, begin + b)
            into = self.codes.elements[goal], self.codes.tops[goal]
            self.codes.codec.encode_blocks(some.view(b - a, length), *into)

    def fill(self, low: int, values: Tensor) -> None:
        """Set some elements of a new tensor; all of them are coded once the last ones are there."""
        with _COMING:  # each of several threads sets elements of its own
            incoming = self.codes.incoming
            memory, there = incoming.pop(self.start, (None, 0))
            memory = torch.empty(self.numel(), device=self.device) if memory is None else memory
            memory[low : low + values.numel()] = values.reshape(-1)
            if there + values.numel() < self.numel():
                incoming[self.start] = memory, there + values.numel()
            else:
                self.write(0, memory)

    def unset(self) -> "Coded":
        """Zeros of the same kind in memory of their own."""
        return self._beside(self.numel(), 0)

    def _beside(self, numel: int, start: int) -> "Coded":
        """A tensor like it in new memory of so many elements, from one of them on."""
        codes = CodedMemory(self.codes.codec, numel, self.device)
        return Coded(codes, start, like_of(self), self.leaf)

    def within(self, row: Tensor) -> "Coded":
        """The same elements of another row of codes, which has as many bytes."""
        codes = CodedMemory(self.codes.codec, self.codes.numel, row.device, row)
        return Coded(codes, self.start, like_of(self), self.leaf)

    def coded(self, values: Tensor) -> "Coded":
        """Other values as codes of the same kind; they are zero where padding is."""
        made = self.unset()
        made.write(0, values.detach())
        return made

    def copied(self) -> "Coded":
        """The same codes in memory of their own, of whole blocks."""
        (first, last), length = self.blocks(), self.codes.codec.block
        made = self._beside((last - first) * length, self.start % length)
        for to, part in zip(made.part_codes(), self.part_codes(), strict=True):
            to.copy_(part)
        return made


def is_coded(value: Any) -> bool:
    """Whether a value is a tensor that is kept as codes.

    Args:
      value: anything.

    Returns:
      A bool.

    Example:
      >>> offload.is_coded(torch.ones(2))
      False
    """
    return type(value) is Coded


def coded(values: Tensor, codec: Codec, root: bool | None = False, leaf: str = "") -> Coded:
    """A tensor as codes; see [Note: two kinds of codes].

    Args:
      values: float32; a row of blocks, of which the last one may be shorter.
      codec: kind and length of blocks.
      root: whether the roots of moments are coded, which are not negative then; None for frozen
        parameters, which become the codes that a gather sends.
      leaf: its path, for error texts.

    Returns:
      A `Coded`. Where it is read, values differ from those given by at most the distance between
      two codes; and it is exact where they were decoded from codes of this kind.

    Memory: `codec.nbytes(n)` bytes; of moments one for each element, and 4 for each block.

    Raises:
      LeafError: a derivative is asked for.

    Example:
      >>> x = offload.coded(torch.tensor([1.0, -0.5, 0.0, 0.0]), collectives.Codec("int8", 4))
      >>> x.size_bytes, offload.read(x)[0]
      (8, tensor(1.))
    """
    codec = codec if root is None else MomentCodec(codec.name, codec.block, root)
    codes = CodedMemory(codec, values.numel(), values.device)
    made = Coded(codes, 0, like_of(values), leaf)
    made.write(0, values.reshape(-1))
    return made


def _pieces(first: int, last: int, length: int) -> list[tuple[int, int]]:
    """Stretches of blocks that are computed with at once."""
    step = max(1, _AT_ONCE // length)
    return [(low, min(last, low + step)) for low in range(first, last, step)]


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
    scratch: Scratch, shape: Any, dtype: torch.dtype, *, leaf: str = "", device: torch.device = _CPU
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
      ...     for block, (part,) in offload.stream([offload.Block([x], [x])]):
      ...         part[:] = 2.0
      ...     print(x + 0)
      tensor([2., 2., 2.])
    """
    like = torch.empty(shape, dtype=dtype, device="meta")
    extent = scratch.reserve(like.numel() * like.itemsize, leaf)
    return FileTensor(extent, 0, like, device, leaf)


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
        found = staging[: part.size_bytes].view(file.dtype)
        if file is goal:
            found.copy_(source[low : low + step])
            part.move(part.extent.write, staging)
        else:
            part.move(part.extent.read, staging)
            goal.narrow(0, low, len(found)).copy_(found)
        yield
    scratch.give(staging)


def empty_at(
    place: str, shape: Any, dtype: torch.dtype, device: torch.device, host_bytes: int, leaf: str
) -> Tensor:
    """Allocate a tensor at a place.

    Args:
      place: where, which is not the device.
      shape, dtype: of the tensor.
      device: the one that computes with it.
      host_bytes: of the `Where` that the place comes from.
      leaf: its path, for error texts.
    """
    if place.startswith(DISK):
        scratch = scratch_in(place.removeprefix(DISK), host_bytes)
        return empty(scratch, shape, dtype, leaf=leaf, device=device)
    return host_tensor(torch.Size(shape), dtype, device)


def host_tensor(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate a tensor in host memory, from which a device can copy by itself."""
    return _torch.host_buffer(shape.numel() * dtype.itemsize, device).view(dtype).view(shape)


def unset_like(x: Any, device: torch.device) -> Tensor:
    """Allocate a tensor where another one lies, which is not on this device."""
    return x.unset() if isinstance(x, Placed) else host_tensor(x.shape, x.dtype, device)


def place_tensor(x: Any, place: str, device: torch.device, host_bytes: int, leaf: str) -> Tensor:
    """Copy a tensor to a place, and into memory of its own; the same tensor if it is there.

    Args:
      x: the tensor.
      place, device, host_bytes, leaf: as for `empty_at`.
    """
    if place == DEVICE:
        return read(x).to(device)
    if place.startswith(DISK):
        folder = place.removeprefix(DISK)
        if in_file(x) and f"{x.extent.scratch.folder}" == folder:
            return x
        return store(x, scratch_in(folder, host_bytes), leaf)
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
            out[i] = _beside(x, was)
        elif not (isinstance(x, FileTensor) and x.extent.scratch is was.extent.scratch):
            by_extent.setdefault(was.extent, []).append(i)
    for extent, members in by_extent.items():
        found = _beside_in_file(extent, [out[i] for i in members], [old[i] for i in members])
        for i, made in zip(members, found, strict=True):
            out[i] = made
    return out


def _beside(x: Tensor, was: Any) -> Tensor:
    """Place a tensor in memory as that of another one is, or as codes; itself if it is there."""
    if isinstance(was, Placed):
        return x if isinstance(x, Placed) else was.coded(x)  # pyright: ignore
    x = read(x)
    if x.device == was.device and (x.is_pinned() or not was.is_pinned()):
        return x
    if not was.is_pinned():
        return x.to(was.device)
    device = torch.accelerator.current_accelerator() if x.is_cpu else x.device
    return host_tensor(x.shape, x.dtype, device or x.device).copy_(x)


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
    return in_file(value) and bool(value.extent.holders)

"""Tensors that are kept as codes, a byte or less for each value.

A block of values becomes a byte for each and one float32 `top`, which is the largest magnitude of
the block. So that magnitude has no rounding, and it follows changes of a part in ten million, as
the second moment of AdamW needs, which changes by a thousandth in a step.

[Note: rounding at random] Between two codes lies more than most steps change, so rounding to
nearest would leave a moment where it is for ever. Here a value is rounded up with the probability
of its distance from the code below, so its mean over steps is right. The random number comes from
the bits of the value itself: ranks, buckets and parts of a column have no influence, and the same
step gives the same bits. A value that is a code already stays one. Below 2**-6 of fp8, which has
no normal numbers there, rounding is to nearest.

[Note: roots] A second moment is never negative and goes into an update by its root, so the root is
what is coded. One that is not zero never becomes zero, or an update would be divided by `eps`
alone: its code is at least the least one. Roots are at least 2**-45, so that no square of a code is
lost below the normal numbers of float32; `eps` of any use is far above.

So a root that is smaller than the least code counts as larger than it is, and the step of its
element becomes smaller by the same factor. With int8 the least code is 1/127 of the largest root of
the block, with fp8 1/229,376. Where gradients of one block differ by more than a hundred times, as
those of rows of an embedding may, fp8 is the better choice, or shorter blocks.

[Note: two kinds of codes] Moments change in every step, so they are rounded at random and have the
scales above: a `MomentCodec`. Frozen parameters are coded once, as what travels is: to nearest,
with the scales of `collectives.Codec`. Either way all codes of a chunk are one row of bytes; that
of frozen parameters is sent by a gather as it is. Values decoded to float32 are exact, and coding
them again gives the same row.

[Note: coded tensors] A `Coded` is a placed tensor; see `placed`. Its blocks begin
with the memory, so whoever packs leaves into it begins each on the border of a block. It changes
only by `write`, in whole blocks, and by `fill`, which takes values part by part and codes them once
all of them are there. What the memory consists of comes first.
"""

from dataclasses import dataclass
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mics_fn import _torch
from mics_fn.collectives import Codec, refuse_derivative
from mics_fn.offload.placed import Placed, like_of

# Codes at rest: the arithmetic that keeps moments of an optimizer in a byte each.

_TOPS = {"int8": 127.0, "fp8": 448.0}
_LEAST = {"int8": 1.0, "fp8": 2.0**-9}  # codes above zero
_ROOT, _TOP = 2.0**-45, 2.0**-100  # the least root, and the least `top`
_KINDS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
_HASH = -1640531535  # 2**32 divided by the golden ratio, as an odd int32
_MANTISSA = 2**20  # what float32 has below the three bits of mantissa that fp8 has


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
        return row[4 * count :].view(count, -1), row[: 4 * count].view(torch.float32).view(-1, 1)

    def encode_blocks(self, values: Tensor, elements: Tensor, tops: Tensor) -> None:
        """Write the codes of values (blocks, length), float32."""
        top, x, above = _TOPS[self.name], values.clone(), None
        if self.root:
            above = (x > 0).to(torch.float32)
            x.sqrt_().clamp_(min=_ROOT).mul_(above)
        largest = torch.maximum(x.amax(1, keepdim=True), x.amin(1, keepdim=True).neg_())
        # What is not finite makes its whole block NaN.
        torch.add(largest, largest * 0, out=tops).clamp_(min=_TOP)
        x.mul_(top / tops)
        random = x.view(torch.int32).mul(_HASH).bitwise_right_shift_(16)  # -2**15 to 2**15 - 1
        if self.name == "int8":
            x.add_(random, alpha=2.0**-16 * (1 - 2.0**-10)).round_()
        else:
            bits = random.add_(2**15).mul_(16).add_(8).add_(x.view(torch.int32))
            x = bits.bitwise_and_(-_MANTISSA).view(torch.float32)
        if above is not None:
            x = torch.maximum(x, above.mul_(_LEAST[self.name]))
        elements.view(_KINDS[self.name]).copy_(x.nan_to_num_(0.0))

    def decode_blocks(self, elements: Tensor, tops: Tensor, out: Tensor) -> None:
        """Write the values of such codes to `out` (blocks, length), float32."""
        out.copy_(elements.view(_KINDS[self.name])).div_(_TOPS[self.name]).mul_(tops)
        if self.root:
            out.mul_(out)


class CodedMemory(NamedTuple):
    """The memory of coded values: codes and their scales, in blocks.

    Args:
      codec: kind and length of blocks; a `Codec` of what a gather sends, or a `MomentCodec`.
      row: all of it, as bytes, of which the next two are views.
      elements: uint8 (blocks, bytes of a block).
      tops: (blocks, 1): bfloat16 scales, or float32, the largest magnitude of each block.
      incoming: values that are not coded yet, by their start, with how many are there.
    """

    codec: Codec
    row: Tensor
    elements: Tensor
    tops: Tensor
    incoming: dict[int, tuple[Tensor, int]]

    @classmethod
    def of_row(cls, codec: Codec, row: Tensor, numel: int) -> "CodedMemory":
        """The codes of so many values, in whole blocks, that lie in a row."""
        return cls(codec, row, *codec.blocks(row, numel), {})

    @classmethod
    def zeros(cls, codec: Codec, numel: int, device: torch.device) -> "CodedMemory":
        """The codes of so many zeros, filled up to whole blocks."""
        whole = -(-numel // codec.block) * codec.block
        row = torch.zeros(codec.nbytes(whole), dtype=torch.uint8, device=device)
        return cls.of_row(codec, row, whole)

    def unset(self, numel: int) -> "CodedMemory":
        """Memory of the same kind for so many elements, whose values are to be written."""
        return CodedMemory.zeros(self.codec, numel, self.row.device)


# Tensors whose values lie in memory as codes: any op that reads one decodes what it needs.

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

    def plain(self) -> Tensor:
        """Its values, decoded."""
        return self.decoded(torch.float32)

    def decoded(self, dtype: torch.dtype) -> Tensor:
        """Its values in a dtype, in new memory; moments are decoded in float32 alone."""
        with _torch.without_torch_func():  # codes are constants
            (first, last), length = self.blocks(), self.codes.codec.block
            out = torch.empty((last - first, length), dtype=dtype, device=self.device)
            for low, high in _pieces(first, last, length):
                codes = self.codes.elements[low:high], self.codes.tops[low:high]
                self.codes.codec.decode_blocks(*codes, out[low - first : high - first])
            begin = self.start - first * length
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
            into = (
                self.codes.elements[begin + a : begin + b],
                self.codes.tops[begin + a : begin + b],
            )
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
        return Coded(self.codes.unset(self.numel()), 0, like_of(self), self.leaf)

    def whole(self) -> "Coded":
        """All of the memory that it is a part of."""
        numel = len(self.codes.elements) * self.codes.codec.block
        return Coded(self.codes, 0, torch.empty(numel, device="meta"), self.leaf)

    def within(self, row: Tensor) -> "Coded":
        """The same elements of another row of codes, which has as many bytes."""
        codes = CodedMemory.of_row(self.codes.codec, row, self.whole().numel())
        return Coded(codes, self.start, like_of(self), self.leaf)

    def coded(self, values: Tensor) -> "Coded":
        """Other values as codes of the same kind; they are zero where padding is."""
        made = self.unset()
        made.write(0, values.detach())
        return made

    def copied(self) -> "Coded":
        """The same codes in memory of their own, of whole blocks."""
        (first, last), length = self.blocks(), self.codes.codec.block
        codes = self.codes.unset((last - first) * length)
        codes.elements.copy_(self.codes.elements[first:last])
        codes.tops.copy_(self.codes.tops[first:last])
        return Coded(codes, self.start - first * length, like_of(self), self.leaf)

    def __deepcopy__(self, memo: dict) -> "Coded":
        return self.copied()

    def __reduce_ex__(self, protocol: Any) -> tuple:
        own = self.copied()
        numel = len(own.codes.elements) * own.codes.codec.block
        memory = own.codes.codec, own.codes.row, numel
        return _from_parts, (memory, own.start, tuple(self.shape), self.leaf)


def _from_parts(memory: tuple[Any, Tensor, int], start: int, shape: tuple, leaf: str) -> Coded:
    return Coded(CodedMemory.of_row(*memory), start, torch.empty(shape, device="meta"), leaf)


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


def coded(values: Tensor, codec: Codec, root: bool = False, leaf: str = "") -> Coded:
    """A tensor as codes.

    Args:
      values: float32; a row of blocks, of which the last one may be shorter.
      codec: "int8" or "fp8", and the length of a block.
      root: whether the roots of values are coded, which are not negative then.
      leaf: its path, for error texts.

    Returns:
      A `Coded`. Where it is read, values differ from those given by at most the distance between
      two codes; and it is exact where they were decoded from codes of this kind.

    Memory: a byte for each element, in whole blocks, and 4 bytes for each block.

    Raises:
      LeafError: a derivative is asked for.

    Example:
      >>> x = offload.coded(torch.tensor([1.0, -0.5, 0.0, 0.0]), collectives.Codec("int8", 4))
      >>> x.size_bytes, offload.read(x)[0]
      (8, tensor(1.))
    """
    refuse_derivative("coded", [values], _DETACH)
    codes = CodedMemory.zeros(
        MomentCodec(codec.name, codec.block, root), values.numel(), values.device
    )
    made = Coded(codes, 0, like_of(values), leaf)
    made.write(0, values.reshape(-1))
    return made


def as_codes(values: Tensor, codec: Codec, leaf: str = "") -> Coded:
    """Frozen values as the codes that a gather sends; see [Note: two kinds of codes].

    Args:
      values: float32 (n,), in whole blocks.
      codec: kind and length of blocks.
      leaf: the path of what they are, for error texts.

    Memory: `codec.nbytes(n)` bytes.
    """
    codes = CodedMemory.zeros(codec, values.numel(), values.device)
    made = Coded(codes, 0, like_of(values), leaf)
    made.write(0, values)
    return made


def _pieces(first: int, last: int, length: int) -> list[tuple[int, int]]:
    """Stretches of blocks that are computed with at once."""
    step = max(1, _AT_ONCE // length)
    return [(low, min(last, low + step)) for low in range(first, last, step)]

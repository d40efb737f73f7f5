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
scales of `codes`. Frozen parameters are coded once, as what travels is: to nearest, with the scales
of `collectives.Codec`. All codes of a chunk are one row of bytes then, which a gather sends as it
is. Values decoded to float32 are exact, and coding them again gives the same row.

[Note: coded tensors] A `Coded` is a placed tensor; see `placed`. Its blocks begin
with the memory, so whoever packs leaves into it begins each on the border of a block. It changes
only by `write`, in whole blocks, and by `fill`, which takes values part by part and codes them once
all of them are there. What the memory consists of comes first.
"""

from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mics_fn import _torch
from mics_fn.collectives import Codec, refuse_derivative
from mics_fn.offload.placed import Placed

# Codes at rest: the arithmetic that keeps moments of an optimizer in a byte each.

_TOPS = {"int8": 127.0, "fp8": 448.0}
_LEAST = {"int8": 1.0, "fp8": 2.0**-9}  # codes above zero
_ROOT, _TOP = 2.0**-45, 2.0**-100  # the least root, and the least `top`
_HASH = -1640531535  # 2**32 divided by the golden ratio, as an odd int32
_MANTISSA = 2**20  # what float32 has below the three bits of mantissa that fp8 has
AT_REST = tuple(_TOPS)  # names of codecs


def encode(codec: Codec, root: bool, values: Tensor, codes: Tensor, tops: Tensor) -> None:
    """Write the codes of blocks.

    Args:
      codec: kind and length of blocks.
      root: whether roots are coded.
      values: float32 (blocks, length), which are overwritten.
      codes: uint8 of this shape, for the result.
      tops: float32 (blocks, 1), for the result.
    """
    top, x, above = _TOPS[codec.name], values, None
    if root:
        above = (x > 0).to(torch.float32)
        x.sqrt_().clamp_(min=_ROOT).mul_(above)
    largest = torch.maximum(x.amax(1, keepdim=True), x.amin(1, keepdim=True).neg_())
    # What is not finite makes its whole block NaN.
    torch.add(largest, largest * 0, out=tops).clamp_(min=_TOP)
    x.mul_(top / tops)
    random = x.view(torch.int32).mul(_HASH).bitwise_right_shift_(16)  # -2**15 to 2**15 - 1
    if codec.name == "int8":
        x.add_(random, alpha=2.0**-16 * (1 - 2.0**-10)).round_()
    else:
        bits = random.add_(2**15).mul_(16).add_(8).add_(x.view(torch.int32))
        x = bits.bitwise_and_(-_MANTISSA).view(torch.float32)
    if above is not None:
        x = torch.maximum(x, above.mul_(_LEAST[codec.name]))
    kind: Any = torch.int8 if codec.name == "int8" else torch.float8_e4m3fn
    codes.view(kind).copy_(x.nan_to_num_(0.0))


def decode(codec: Codec, root: bool, codes: Tensor, tops: Tensor, out: Tensor) -> None:
    """Write the values of codes.

    Args:
      codec, root: as for `encode`.
      codes: uint8 (blocks, length).
      tops: float32 (blocks, 1).
      out: float32 of the shape of the codes.
    """
    kind: Any = torch.int8 if codec.name == "int8" else torch.float8_e4m3fn
    out.copy_(codes.view(kind)).div_(_TOPS[codec.name]).mul_(tops)
    if root:
        out.mul_(out)


# The memory of coded tensors: codes and their scales, in blocks.


class CodedMemory(NamedTuple):
    """The memory of coded values; see [Note: two kinds of codes].

    Args:
      codec: kind and length of blocks.
      root: whether the roots of values are coded.
      elements: uint8 (blocks, bytes of a block).
      tops: (blocks, 1): float32, the largest magnitude of each block; with a row bfloat16, scales.
      coming: values that are not coded yet, by their start, with how many are there.
      row: all of it as a row of bytes that travels, of which the others are views; None for codes
        of moments.
    """

    codec: Codec
    root: bool
    elements: Tensor
    tops: Tensor
    incoming: dict[int, tuple[Tensor, int]]
    row: Tensor | None = None

    @classmethod
    def zeros(cls, codec: Codec, root: bool, numel: int, device: torch.device) -> "CodedMemory":
        """The codes of so many zeros, in whole blocks."""
        length: Any = codec.block
        blocks = -(-numel // length)
        elements = torch.zeros((blocks, length), dtype=torch.uint8, device=device)
        return cls(codec, root, elements, torch.zeros((blocks, 1), device=device), {})

    @classmethod
    def of_row(cls, codec: Codec, row: Tensor, numel: int) -> "CodedMemory":
        """The codes of so many values, in whole blocks, that lie in a row."""
        return cls(codec, False, *codec.blocks(row, numel), {}, row)

    @property
    def length(self) -> int:
        """Elements of a block."""
        found: Any = self.codec.block
        return found

    def unset(self, numel: int) -> "CodedMemory":
        """Memory of the same kind for so many elements, whose values are to be written."""
        if self.row is None:
            return CodedMemory.zeros(self.codec, self.root, numel, self.elements.device)
        whole = -(-numel // self.length) * self.length
        row = self.row.new_zeros(self.codec.nbytes(whole))
        return CodedMemory.of_row(self.codec, row, whole)

    def blocks(self, first: int, last: int) -> "CodedMemory":
        """A copy of some blocks."""
        elements, tops = self.elements[first:last], self.tops[first:last]
        if self.row is None:
            return self._replace(elements=elements.clone(), tops=tops.clone(), incoming={})
        made = self.unset((last - first) * self.length)
        made.elements[: last - first].copy_(elements)
        made.tops[: last - first].copy_(tops)
        return made

    def encode(self, first: int, values: Tensor) -> None:
        """Write the codes of values (blocks, length), float32, from a block on."""
        into = (x[first : first + len(values)] for x in (self.elements, self.tops))
        if self.row is None:
            encode(self.codec, self.root, values.clone(), *into)
        else:
            self.codec.encode_blocks(values, *into)

    def decode(self, first: int, last: int, out: Tensor) -> None:
        """Write the values of some blocks to `out`: float32, with a row of any float dtype."""
        elements, tops = self.elements[first:last], self.tops[first:last]
        if self.row is None:
            decode(self.codec, self.root, elements, tops, out)
        else:
            self.codec.decode_blocks(elements, tops, out)


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
          like: a dense float32 tensor on meta with its shape.
          leaf: its path, for error texts.
        """
        geometry = tuple(like.shape), tuple(like.stride()), 0
        self = _torch.wrapper_without_data(cls, geometry, like.dtype, codes.elements.device)
        self.codes, self.start, self.leaf = codes, start, leaf
        return self

    def __repr__(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return f"Coded(shape={tuple(self.shape)}, {self.codes.codec})"

    @property
    def memory(self) -> list[Tensor]:
        """Its codes, and the `top` of each block."""
        return [self.codes.elements, self.codes.tops]

    @property
    def size_bytes(self) -> int:
        """The bytes of its codes, and of the `top` of each of its blocks."""
        return self.bytes_of(self.numel())

    def bytes_of(self, numel: int) -> int:
        """The bytes of so many elements."""
        length, tops = self.codes.length, self.codes.tops.itemsize
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
            first, last = self.blocks()
            length = self.codes.length
            out = torch.empty((last - first, length), dtype=dtype, device=self.device)
            for low, high in _pieces(first, last, length):
                self.codes.decode(low, high, out[low - first : high - first])
            begin = self.start - first * length
            return out.view(-1)[begin : begin + self.numel()].view(self.shape)

    def blocks(self) -> tuple[int, int]:
        """The first of its blocks, and the end of them."""
        length = self.codes.length
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
        verb = "opt_step" if self.codes.row is None else "shard"
        refuse_derivative(verb, [values], _DETACH)
        length = self.codes.length
        first, full = (self.start + low) // length, values.numel() // length
        whole = values[: full * length].view(full, length)
        for a, b in _pieces(0, full, length):
            self.codes.encode(first + a, whole[a:b])
        rest = values[full * length :]
        if rest.numel():
            last = rest.new_zeros((1, length))
            last[0, : rest.numel()] = rest
            self.codes.encode(first + full, last)

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
        codes = self.codes.unset(self.numel())
        return Coded(codes, 0, torch.empty(self.shape, device="meta"), self.leaf)

    def whole(self) -> "Coded":
        """All of the memory that it is a part of."""
        numel = len(self.codes.elements) * self.codes.length
        return Coded(self.codes, 0, torch.empty(numel, device="meta"), self.leaf)

    def within(self, row: Tensor) -> "Coded":
        """The same elements of another row of codes, which has as many bytes."""
        codes = CodedMemory.of_row(self.codes.codec, row, self.whole().numel())
        return Coded(codes, self.start, torch.empty(self.shape, device="meta"), self.leaf)

    def coded(self, values: Tensor) -> "Coded":
        """Other values as codes of the same kind; they are zero where padding is."""
        made = self.unset()
        made.write(0, values.detach())
        return made

    def copied(self) -> "Coded":
        """The same codes in memory of their own, of whole blocks."""
        first, last = self.blocks()
        start = self.start - first * self.codes.length
        like = torch.empty(self.shape, device="meta")
        return Coded(self.codes.blocks(first, last), start, like, self.leaf)

    def __deepcopy__(self, memo: dict) -> "Coded":
        return self.copied()

    def __reduce_ex__(self, protocol: Any) -> tuple:
        own = self.copied()
        codec, root, elements, tops, _, row = own.codes
        parts = (codec, root, elements, tops) if row is None else (codec, row, len(elements))
        return _from_parts, (parts, own.start, tuple(self.shape), self.leaf)


def _from_parts(parts: tuple, start: int, shape: tuple, leaf: str) -> Coded:
    if len(parts) == 4:
        codes = CodedMemory(*parts, {})
    else:
        codec, row, blocks = parts
        codes = CodedMemory.of_row(codec, row, blocks * codec.block)
    return Coded(codes, start, torch.empty(shape, device="meta"), leaf)


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
    codes = CodedMemory.zeros(codec, root, values.numel(), values.device)
    made = Coded(codes, 0, torch.empty(values.shape, device="meta"), leaf)
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
    row = torch.empty(codec.nbytes(values.numel()), dtype=torch.uint8, device=values.device)
    made = Coded(CodedMemory.of_row(codec, row, values.numel()), 0, values.to("meta"), leaf)
    made.write(0, values)
    return made


def _pieces(first: int, last: int, length: int) -> list[tuple[int, int]]:
    """Stretches of blocks that are computed with at once."""
    step = max(1, _AT_ONCE // length)
    return [(low, min(last, low + step)) for low in range(first, last, step)]

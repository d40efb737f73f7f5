"""Tensors whose values lie in memory as codes: any op that reads one decodes what it needs.

[Note: coded tensors] A `Coded` is apart; see [Note: tensors apart] in `apart`. Its blocks begin
with the memory, so whoever lays leaves into it begins each on the border of a block. It changes
only by `write`, in whole blocks, and by `fill`, which takes values part by part and codes them once
all of them are there. What the memory consists of is in `memories`.
"""

from threading import Lock
from typing import Any

import torch
from torch import Tensor

from mics_fn import _torch
from mics_fn.collectives import Codec, refuse_derivative
from mics_fn.offload.apart import Apart
from mics_fn.offload.memories import Codes

_DETACH = "pass detached values, outside of torch.func: rounding to codes has no derivative"
_AT_ONCE = 2**16  # elements, so that what is computed with stays in the caches
_COMING = Lock()  # several threads fill a tensor


class Coded(Apart):
    """A float32 tensor kept as codes. `coded` makes one, and `read` decodes it.

    An op on it decodes what it needs, and gives a tensor with values.

    Example:
      >>> x = offload.coded(torch.tensor([2.0, -2.0, 0.0, 0.0]), collectives.Codec("int8", 4))
      >>> x, x + 1
      (Coded(shape=(4,), int8[4]), tensor([ 3., -1.,  1.,  1.]))
    """

    noun = "a coded tensor"
    how_to_change = "use set(), or compute with a clone()"
    codes: Codes
    start: int  # the element of its memory at which it begins

    @staticmethod
    def __new__(cls: type, codes: Codes, start: int, like: Tensor, leaf: str = "") -> Any:
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
            coming = self.codes.coming
            memory, there = coming.pop(self.start, (None, 0))
            memory = torch.empty(self.numel(), device=self.device) if memory is None else memory
            memory[low : low + values.numel()] = values
            if there + values.numel() < self.numel():
                coming[self.start] = memory, there + values.numel()
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
        codes = Codes.of_row(self.codes.codec, row, self.whole().numel())
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
        codes = Codes(*parts, {})
    else:
        codec, row, blocks = parts
        codes = Codes.of_row(codec, row, blocks * codec.block)
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
    codes = Codes.zeros(codec, root, values.numel(), values.device)
    made = Coded(codes, 0, torch.empty(values.shape, device="meta"), leaf)
    made.write(0, values.reshape(-1))
    return made


def as_codes(values: Tensor, codec: Codec, leaf: str = "") -> Coded:
    """Frozen values as the codes that a gather sends; see [Note: two kinds of codes] in `memories`.

    Args:
      values: float32 (n,), in whole blocks.
      codec: kind and length of blocks.
      leaf: the path of what they are, for error texts.

    Memory: `codec.nbytes(n)` bytes.
    """
    row = torch.empty(codec.nbytes(values.numel()), dtype=torch.uint8, device=values.device)
    made = Coded(Codes.of_row(codec, row, values.numel()), 0, values.to("meta"), leaf)
    made.write(0, values)
    return made


def _pieces(first: int, last: int, length: int) -> list[tuple[int, int]]:
    """Stretches of blocks that are computed with at once."""
    step = max(1, _AT_ONCE // length)
    return [(low, min(last, low + step)) for low in range(first, last, step)]

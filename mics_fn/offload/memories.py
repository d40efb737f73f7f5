"""The memory of coded tensors: codes and their scales, in blocks.

[Note: two kinds of codes] Moments change in every step, so they are rounded at random and have the
scales of `codes`. Frozen parameters are coded once, as what travels is: to nearest, with the scales
of `collectives.Codec`. All codes of a chunk are one row of bytes then, which a gather sends as it
is. Values decoded to float32 are exact, and coding them again gives the same row.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from mics_fn.collectives import Codec
from mics_fn.offload.codes import decode, encode


class Codes(NamedTuple):
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
    coming: dict[int, tuple[Tensor, int]]
    row: Tensor | None = None

    @classmethod
    def zeros(cls, codec: Codec, root: bool, numel: int, device: torch.device) -> "Codes":
        """The codes of so many zeros, in whole blocks."""
        length: Any = codec.block
        blocks = -(-numel // length)
        elements = torch.zeros((blocks, length), dtype=torch.uint8, device=device)
        return cls(codec, root, elements, torch.zeros((blocks, 1), device=device), {})

    @classmethod
    def of_row(cls, codec: Codec, row: Tensor, numel: int) -> "Codes":
        """The codes of so many values, in whole blocks, that lie in a row."""
        return cls(codec, False, *codec.blocks(row, numel), {}, row)

    @property
    def length(self) -> int:
        """Elements of a block."""
        found: Any = self.codec.block
        return found

    def unset(self, numel: int) -> "Codes":
        """Memory of the same kind for so many elements, whose values are to be written."""
        if self.row is None:
            return Codes.zeros(self.codec, self.root, numel, self.elements.device)
        whole = -(-numel // self.length) * self.length
        row = self.row.new_zeros(self.codec.nbytes(whole))
        return Codes.of_row(self.codec, row, whole)

    def blocks(self, first: int, last: int) -> "Codes":
        """A copy of some blocks."""
        elements, tops = self.elements[first:last], self.tops[first:last]
        if self.row is None:
            return self._replace(elements=elements.clone(), tops=tops.clone(), coming={})
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

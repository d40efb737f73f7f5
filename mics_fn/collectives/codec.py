"""Codecs: float values as 8 or 4 bits each, with a scale for every block of them.

A row of n values becomes one row of bytes: the codes of all blocks in order, a zero byte if their
number is odd, and then a bfloat16 scale for each block. If n is not a multiple of the length of a
block, the last block is shorter. `int4` puts elements 2i and 2i + 1 into the low and the high half
of byte i, each plus 8; the high half of an odd last byte is 0.

`blocks` has the arithmetic and its bounds.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mics_fn import checks
from mics_fn.checks import refuse_derivative
from mics_fn.collectives import blocks
from mics_fn.collectives.blocks import KINDS, Rows
from mics_fn.errors import LeafError, PlanError

_FORM = re.compile(r"\s*(\w+)\s*(?:\[\s*([1-9][0-9]{0,8})\s*\])?\s*")
_BLOCKS = [2**n for n in range(1, 17)]  # lengths, so that of several the longest suits all
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_ALLOWED = "float32, bfloat16, float16 or float64"
_FIX = "write it as in 'int8[256]', with a power of two from 2 to 65536"
_DETACH = "pass detached values, outside of torch.func: rounding to codes has no derivative"


@dataclass(frozen=True)
class Codec:
    """How float values become bytes: a kind of code, and the length of the blocks with a scale.

    A block of values is divided by its scale, the largest magnitude / `top` in bfloat16, and each
    quotient is rounded to nearest: to an integer of at most 127 (int8) or 7 (int4), or to a float8
    e4m3 of at most 448 (fp8). The scale is at least 2**-126. For float32 values x and a scale s,
    what is decoded to float32 differs from x by at most

    - int8, int4: s * (1/2 + 2**-15);
    - fp8: max(|x| / 16, s * 2**-10) * (1 + 2**-20).

    A zero is decoded as 0. NaN or infinity anywhere makes its whole block NaN; other blocks do not
    notice. A finite block stays finite, up to the largest value of a dtype. Float64 values are
    rounded to float32 first, where those beyond its range become infinite. Encoding what was
    decoded to float32 gives the same bytes again.

    Args:
      name: "int8", "int4" or "fp8".
      block: elements that share a scale, a power of two from 2 to 65536; 0 means 256, for int4 64.

    Raises:
      PlanError: there is no such codec.

    Example:
      >>> codec = collectives.Codec.parse("int8")
      >>> str(codec), codec.nbytes(1000)
      ('int8[256]', 1008)
      >>> codec.decode(codec.encode(torch.tensor([0.0, 1.0, -127.0])), 3, torch.float32)
      tensor([   0.,    1., -127.])
    """

    name: str
    block: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "block", self.block or KINDS[self.name].block)
        if self.block not in _BLOCKS:
            checks.refuse("Codec", "block", self.block, "a power of two from 2 to 65536", _FIX)

    @classmethod
    def parse(cls, text: str) -> "Codec":
        """Read the text form, such as "int8[256]" or "int8"; `parse(str(codec))` equals `codec`.

        Raises:
          PlanError: the text names no codec.
        """
        found = _FORM.fullmatch(text)
        if not found or found[1] not in KINDS:
            what = f"Codec.parse: {text!r} is not a codec"
            raise PlanError(what, [f"there are {', '.join(KINDS)}"], _FIX)
        return cls(found[1], int(found[2] or KINDS[found[1]].block))

    def __str__(self) -> str:
        return f"{self.name}[{self.block}]"

    def nbytes(self, n: int) -> int:
        """Bytes of the codes and scales of a row of n values; an even number.

        The codes take n bytes (int4: half of that), rounded up to an even number, and the scales 2
        bytes for each block, the shorter last one included.
        """
        checks.integer(f"{self}.nbytes", "n", n, 0)
        codes = self._code_bytes(n)
        return codes + codes % 2 + 2 * -(-n // self.block)

    def encode(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Values as bytes.

        Args:
          x: (*batch, n) of float32, bfloat16, float16 or float64; each row by itself.
          out: the bytes are written to it; uint8 (*batch, nbytes(n)), in other memory.

        Returns:
          `out`, or new uint8 (*batch, nbytes(n)). They are a function of the values alone.

        Memory: about 1 MiB beside the result on the CPU.

        Raises:
          LeafError: `x` is not of that kind, or a derivative is asked for.
        """
        verb = f"{self}.encode"
        _check_values(verb, "x", x)
        refuse_derivative(verb, [x], _DETACH)
        n = x.shape[-1]
        shape = (*x.shape[:-1], self.nbytes(n))
        if out is None:
            out = torch.empty(shape, dtype=torch.uint8, device=x.device)
        if x.numel():
            rows = _matrix(out)
            blocks.encode_rows(self.name, self.block, x.reshape(-1, n), self._split(rows, n))
        return out

    def decode(
        self, codes: Tensor, n: int, dtype: torch.dtype, out: Tensor | None = None
    ) -> Tensor:
        """The values of bytes that `encode` made.

        Args:
          codes: uint8 (*batch, nbytes(n)).
          n: values of a row.
          dtype: float32, bfloat16, float16 or float64.
          out: the values are written to it; (*batch, n) of that dtype, in other memory.

        Returns:
          `out`, or new values (*batch, n).

        Memory: about 1 MiB beside the result on the CPU.

        Raises:
          LeafError: `codes` or `dtype` is not of that kind, or a derivative is asked for.
          PlanError: `n` is not of that kind.
        """
        verb = f"{self}.decode"
        rows = self._rows(verb, "codes", codes, n)
        shape = (*codes.shape[:-1], n)
        if out is None:
            out = torch.empty(shape, dtype=dtype, device=codes.device)
        _check_values(verb, "out", out)
        refuse_derivative(verb, [out], _DETACH)
        if out.numel():
            blocks.decode_rows(self.name, self.block, rows, _matrix(out))
        return out

    def decode_mean(self, parts: Sequence[Tensor], own: Tensor | None, out: Tensor) -> Tensor:
        """The mean of decoded parts and of parts that were not coded, in one pass.

        Parts are added in float32 (float64 if `out` is) in the order in which they are given, after
        `own`. So ranks that give the same parts in the same order get the same bits, and a rank
        whose own part has a place among the others puts it there, into `parts`. A sum beyond the
        range of float32 is infinite, even if the mean is inside of it: that of two values of 3e38.

        Args:
          parts: codes, uint8 (*batch, nbytes(n)), or values of any float dtype here, (*batch, n).
          own: values that come first; None for none.
          out: the mean is written to it; (*batch, n). It may be `own` or one of `parts`, but not
            overlap them in another way.

        Returns:
          `out`.

        Memory: about 1.5 MiB on the CPU.

        Raises:
          LeafError: a part or `out` is not of that kind, or a derivative is asked for.
        """
        verb = f"{self}.decode_mean"
        _check_values(verb, "out", out)
        given = [*([] if own is None else [("own", own)])]
        given += [(f"parts[{i}]", part) for i, part in enumerate(parts)]
        read = [self._part(verb, name, part, out) for name, part in given]
        refuse_derivative(verb, [out, *(part for _, part in given)], _DETACH)
        if out.numel():
            blocks.mean_rows(self.name, self.block, read, _matrix(out))
        return out

    def blocks(self, codes: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """Views of one row of `n` values in whole blocks: the codes of each, and its scale.

        Args:
          codes: uint8 (nbytes(n),), at an even place.
          n: values of the row, a multiple of the length of a block.

        Returns:
          uint8 (blocks, bytes of a block), and bfloat16 (blocks, 1).
        """
        end, count = self._code_bytes(n), n // self.block
        elements, scales = codes[:end], codes[end + end % 2 :].view(torch.bfloat16)
        return elements.view(count, self._code_bytes(self.block)), scales.view(count, 1)

    def encode_blocks(self, values: Tensor, elements: Tensor, scales: Tensor) -> None:
        """Write the codes of values (blocks, length) to what `blocks` gave of as many."""
        rows = Rows(elements.view(1, -1), elements.view(1, -1)[:, :0], scales.view(1, -1))
        blocks.encode_rows(self.name, self.block, values.view(1, -1), rows)

    def decode_blocks(self, elements: Tensor, scales: Tensor, out: Tensor) -> None:
        """Write the values of such codes to `out` (blocks, length), of any float dtype."""
        rows = Rows(elements.view(1, -1), elements.view(1, -1)[:, :0], scales.view(1, -1))
        blocks.decode_rows(self.name, self.block, rows, out.view(1, -1))

    def _code_bytes(self, n: int) -> int:
        """Bytes of n codes, without padding."""
        return -(-n * KINDS[self.name].bits // 8)

    def _split(self, rows: Tensor, n: int) -> Rows:
        """Views of the codes of rows, and of their scales; a byte between them becomes 0."""
        end = self._code_bytes(n)
        return Rows(
            rows[:, :end],
            rows[:, end : end + end % 2],
            rows[:, end + end % 2 :].view(torch.bfloat16),
        )

    def _rows(self, verb: str, name: str, codes: Tensor, n: int) -> Rows:
        """Codes that are read, as rows; a copy where they do not lie at even places."""
        width = self.nbytes(n)
        if codes.dtype != torch.uint8 or not codes.ndim or codes.shape[-1] != width:
            lines = [f"got {codes.dtype} {tuple(codes.shape)}"]
            lines += [f"expected torch.uint8 (..., {width}) for {n} values"]
            fix = "pass what encode of the same codec gave, and the n of that"
            raise LeafError(f"{verb}: {name} are not such codes", lines, fix)
        rows = codes.detach().reshape(math.prod(codes.shape[:-1]), width)
        if not rows.numel():
            return Rows(rows, rows, rows)  # nothing is read
        rows = rows if _even(rows) else rows.clone(memory_format=torch.contiguous_format)
        return self._split(rows, n)

    def _part(self, verb: str, name: str, part: Any, out: Tensor) -> Rows | Tensor:
        """A part of a mean as a matrix."""
        n, batch = out.shape[-1], tuple(out.shape[:-1])
        if part.dtype == torch.uint8:
            return self._rows(verb, name, part, n)
        _check_values(verb, name, part)
        return part.detach().reshape(math.prod(batch), n)


def _check_values(verb: str, name: str, x: Any) -> None:
    """Raise LeafError unless a value is a float tensor with at least one dim."""
    if x.dtype not in _FLOATS or not x.ndim:
        lines = [f"got {x.dtype} {tuple(x.shape)}", f"expected {_ALLOWED}, of at least 1 dim"]
        raise LeafError(f"{verb}: {name} cannot be coded", lines)


def _matrix(x: Tensor) -> Tensor:
    """The same memory as rows."""
    return x.detach().view(-1, x.shape[-1])


def _even(rows: Tensor) -> bool:
    """Whether all rows of bytes begin at an even place, so that their scales lie on bfloat16."""
    return rows.storage_offset() % 2 == 0 and rows.stride(0) % 2 == 0 and rows.stride(1) == 1

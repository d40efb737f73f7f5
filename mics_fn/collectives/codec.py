"""Codes in the place of values: float values as 8 or 4 bits each, with a scale for every block.

`sent_codes` sends them. Checksums, which ranks compare in the place of values, are here too.

A row of n values becomes one row of bytes: the codes of all blocks in order, and then a bfloat16
scale for each block. If n is not a multiple of the length of a block, zeros fill up the last one.
`int4` puts elements 2i and 2i + 1 into the low and the high half of byte i, each plus 8.

There is one expression for each direction, and one for a mean of parts. On the CPU it takes a band
of 2**17 elements after the other, so that its temporaries stay in caches and memory is read and
written once. Elsewhere it takes all at once, in several passes. All devices give the same scales,
and the same codes up to the last bit of a division.

[Note: no clamp] The scale of a block is its largest magnitude divided by `top`, rounded to the
nearest bfloat16, which has 8 significant bits. Rounding changes it by a factor of 1 + 2**-8 at
most. So the largest quotient lies between 126.5058 and 127.4961 where `top` is 127, between 6.97
and 7.03 where it is 7, and between 446.2 and 449.8 where it is 448. All of these round to `top`
itself. So no code has to be clamped, and a decoded block has the same scale again. For the largest
float32 the scale is rounded down in all three cases, so no finite block overflows in float32. Nor
does a scale of fp8 times 2**8: the largest is 2**119.2.

[Note: the least scale] A scale is at least 2**-126, the least normal float32. Then its inverse is
finite, a block of zeros needs no case of its own, and no product is lost where a processor flushes
subnormal numbers to zero.

[Note: exact products] A code times a scale has at most 15 significant bits, so that a float32 holds
it exactly. So the bits of a decoded value, and of a mean, do not depend on how a device fuses or
orders multiplications; only additions round, and theirs is the order of the parts.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from mics_fn import checks
from mics_fn.errors import PlanError

SHORT_NAMES = {
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float64: "f64",
}


class CodeFormat(NamedTuple):
    """How one element is coded.

    Args:
      bits: number of bits of a code.
      top: the largest code.
      block: the usual length of a block.
    """

    bits: int
    top: float
    block: int


KINDS = {
    "int8": CodeFormat(8, 127.0, 256),
    "int4": CodeFormat(4, 7.0, 64),
    "fp8": CodeFormat(8, 448.0, 256),
}
_FORM = re.compile(r"\s*(\w+)\s*(?:\[\s*([1-9][0-9]{0,8})\s*\])?\s*")
_BLOCKS = [2**n for n in range(2, 17)]  # lengths, so that of several the longest suits all
_FIX = "write it as in 'int8[256]', with a power of two from 4 to 65536"
_DETACH = "pass detached values, outside of torch.func: rounding to codes has no derivative"

Blocks = tuple[Tensor, ...]  # of a row: its values, or its codes and their scales; a block per row


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
      block: elements that share a scale, a power of two from 4 to 65536; 0 means 256, for int4 64.

    Raises:
      PlanError: there is no such codec.

    Example:
      >>> codec = collectives.Codec.parse("int8")
      >>> str(codec), codec.nbytes(1024)
      ('int8[256]', 1032)
      >>> codec.decode(codec.encode(torch.tensor([0.0, 1.0, -127.0])), 3, torch.float32)
      tensor([   0.,    1., -127.])
    """

    name: str
    block: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "block", self.block or KINDS[self.name].block)
        if self.block not in _BLOCKS:
            checks.refuse("Codec", "block", self.block, "a power of two from 4 to 65536", _FIX)

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

    # Rows of bytes.

    def nbytes(self, n: int) -> int:
        """Bytes of the codes and scales of a row of n values, filled up to whole blocks."""
        return -(-n // self.block) * (self._code_bytes + 2)

    @property
    def _code_bytes(self) -> int:
        """Bytes of the codes of a block."""
        return self.block * KINDS[self.name].bits // 8

    def encode(self, x: Tensor) -> Tensor:
        """Values as bytes.

        Args:
          x: (*batch, n) of float32, bfloat16, float16 or float64; each row by itself.

        Returns:
          New uint8 (*batch, nbytes(n)). They are a function of the values alone.

        Memory: about 1 MiB beside the result on the CPU; a copy of a row that ends amid a block.

        Raises:
          LeafError: a derivative is asked for.
        """
        checks.refuse_derivative(f"{self}.encode", [x], _DETACH)
        shape = (*x.shape[:-1], self.nbytes(x.shape[-1]))
        out = torch.empty(shape, dtype=torch.uint8, device=x.device)
        if x.numel():
            rows = x.detach().reshape(-1, x.shape[-1]), out.view(-1, out.shape[-1])
            for values, codes in zip(*rows, strict=True):
                self.encode_row(values, codes)
        return out

    def decode(self, codes: Tensor, n: int, dtype: torch.dtype) -> Tensor:
        """The values of bytes that `encode` made.

        Args:
          codes: uint8 (*batch, nbytes(n)), at an even place.
          n: values of a row.
          dtype: float32, bfloat16, float16 or float64.

        Returns:
          New values (*batch, n).

        Memory: about 1 MiB beside the result on the CPU; a copy of a row that ends amid a block.

        Raises:
          LeafError: a derivative is asked for.
        """
        checks.refuse_derivative(f"{self}.decode", [codes], _DETACH)
        out = torch.empty(*codes.shape[:-1], n, dtype=dtype, device=codes.device)
        if out.numel():
            for row, values in zip(
                codes.reshape(-1, codes.shape[-1]), out.view(-1, n), strict=True
            ):
                self.decode_row([self.blocks(row, n)], values)
        return out

    def encode_row(self, values: Tensor, codes: Tensor) -> None:
        """Write the codes of some values to a row."""
        (blocks,) = self.blocks_of(values, len(values))
        self.encode_blocks(blocks, *self.blocks(codes, len(values)))

    def decode_row(self, parts: Sequence[Blocks], out: Tensor) -> None:
        """Write the mean of some parts, which may go on behind `out`, to that, which is 1D.

        Parts are added in float32 (float64 if `out` is) in the order in which they are given. So
        ranks that give the same parts in the same order get the same bits, and a rank puts its own
        part into its place among the others. A sum beyond the range of float32 is infinite, even if
        the mean is inside of it: that of two values of 3e38. `out` may be the memory of a part.
        """
        missing = -len(out) % self.block
        whole = functional.pad(out, (0, missing)) if missing else out
        self.decode_mean_blocks(parts, whole.view(-1, self.block))
        if missing:
            out.copy_(whole[: len(out)])

    # Whole blocks.

    def blocks(self, codes: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """Views of one row of `n` values in whole blocks: the codes of each, and its scale.

        Args:
          codes: uint8 (nbytes(n),), at an even place.
          n: values of the row.

        Returns:
          uint8 (blocks, bytes of a block), and bfloat16 (blocks, 1).
        """
        count = -(-n // self.block)
        elements, scales = codes.split([count * self._code_bytes, 2 * count])
        scales = scales.view(torch.bfloat16).view(count, 1)
        return elements.view(count, self._code_bytes), scales

    def blocks_of(self, part: Tensor, n: int) -> Blocks:
        """Blocks of a row of `n` values, or of the codes of so many."""
        if not part.dtype.is_floating_point:
            return self.blocks(part, n)
        missing = -n % self.block
        whole = functional.pad(part, (0, missing)) if missing else part
        return (whole.view(-1, self.block),)

    def encode_blocks(self, values: Tensor, elements: Tensor, scales: Tensor) -> None:
        """Write the codes of values (blocks, length) to what `blocks` gave of as many."""
        for band in _bands(values):
            elements[band], scales[band] = encoded(self.name, values[band])

    def decode_blocks(self, elements: Tensor, scales: Tensor, out: Tensor) -> None:
        """Write the values of such codes to `out` (blocks, length), of any float dtype."""
        self.decode_mean_blocks([(elements, scales)], out)

    def decode_mean_blocks(self, parts: Sequence[Blocks], out: Tensor) -> None:
        """Write the mean of parts, which are added in order, to `out` (blocks, length)."""
        for band in _bands(out):
            out[band] = mean(self.name, [[x[band] for x in part] for part in parts], out.dtype)


# The arithmetic, on blocks of values and of codes.

BAND = 2**17  # elements; their float32 take 512 KiB
FLOOR = 2.0**-126  # See [Note: the least scale].


def _bands(blocks: Tensor) -> list[slice]:
    """Ranges of blocks that are done at a time: all of them but on the CPU."""
    count, length = blocks.shape
    step = max(1, BAND // length if blocks.is_cpu else count)
    return [slice(i, min(i + step, count)) for i in range(0, count, step)]


def encoded(name: str, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The codes of blocks, as bytes, and their scales."""
    blocks = blocks.to(torch.float32)
    largest, least = blocks.amax(-1, keepdim=True), blocks.amin(-1, keepdim=True)
    # A factor, since CUDA divides by a number by multiplying with its inverse, and a CPU does not.
    wide = torch.maximum(largest, least.neg_()).mul_(1 / KINDS[name].top).clamp_(min=FLOOR)
    finite, scales = wide.isfinite(), wide.to(torch.bfloat16)
    quotient = torch.where(finite, blocks * scales.to(torch.float32).reciprocal(), 0.0)
    scales.masked_fill_(~finite, float("nan"))  # of which there is one
    if name == "fp8":
        return quotient.to(torch.float8_e4m3fn).view(torch.uint8), scales
    coded = quotient.round_().to(torch.int8)
    if name == "int8":
        return coded.view(torch.uint8), scales
    pairs = coded.add_(8).mul_(finite).view(torch.uint8).unflatten(-1, (-1, 2))
    return pairs[..., 0] | (pairs[..., 1] << 4), scales


def mean(name: str, parts: Sequence[Sequence[Tensor]], dtype: torch.dtype) -> Tensor:
    """The mean of parts, blocks of values or codes with their scales, added in order."""
    total: Any = None
    for part in parts:
        value = part[0] if len(part) == 1 else _values(name, *part)
        value = value.to(torch.promote_types(dtype, torch.float32))
        total = value if total is None else total + value
    return _narrowed(total / len(parts) if len(parts) > 1 else total, dtype)


def _values(name: str, elements: Tensor, scales: Tensor) -> Tensor:
    """The decoded values of blocks, as float32."""
    scale = scales.to(torch.float32)
    if name == "int8":
        read = elements.view(torch.int8).to(torch.float32)
    elif name == "fp8":
        # The bits of e4m3, moved to their places in a float16, are the same number times 2**-8.
        # torch's own conversion takes ten times as long.
        bits = elements.view(torch.int8).to(torch.int16).bitwise_left_shift_(7)
        bits.bitwise_and_(-0x4080)  # the sign, and the seven bits
        read, scale = bits.view(torch.float16).to(torch.float32), scale * 2.0**8
    else:
        read = torch.stack([elements & 15, elements >> 4], -1).flatten(-2).to(torch.float32) - 8
    return read.mul_(scale)


def _narrowed(wide: Tensor, dtype: torch.dtype) -> Tensor:
    """Values in a dtype, without infinities that only the rounding of a scale makes in 16 bits.

    These become the largest value of the dtype. Values of at least twice its largest power of two
    become infinite in it, as always: they were not in its range before they were coded, either.
    """
    largest = torch.finfo(dtype).max
    if dtype.itemsize != 2 or (wide.is_cpu and bool(wide.abs().amax() <= largest)):
        return wide.to(dtype)
    limit = 2.0**16 if dtype == torch.float16 else float("inf")
    return torch.where(wide.abs() < limit, wide.clamp(-largest, largest), wide).to(dtype)


# Where codes travel.


@dataclass(frozen=True)
class Wire:
    """What travels in the place of values, and on which levels.

    A gather sends codes of parameters, and hop 1 codes of gradients, on the named level of a route
    and on those outside of it, which are slower. All other levels send the values.

    Args:
      codec: makes bytes of values, and values of bytes.
      level: the innermost level on which they travel; "" means all.

    Example:
      >>> str(Wire(collectives.Codec.parse("int8[256]"), "node"))
      'int8[256]@node'
    """

    codec: Any
    level: str = ""

    @property
    def block(self) -> int:
        """Elements that share a scale."""
        return self.codec.block

    def __str__(self) -> str:
        return f"{self.codec}@{self.level}" if self.level else f"{self.codec}"

    def levels(self, route: Any) -> int:
        """How many levels of a `Route` it is used on, counted from the outermost."""
        return route.levels_to(self.level)


def check_level(wire: Wire, names: tuple[str, ...]) -> None:
    """Raise PlanError if a wire names a level that is not one of these."""
    if wire.level and wire.level not in names:
        fix = f"name one of {', '.join(names) or 'none'}, or leave out @{wire.level}"
        raise PlanError(f"precision: {wire} names a level that these groups do not have", fix=fix)


# What ranks compare in the place of a tensor.

_HASHED = 2**20  # elements at once


def checksum(tensor: Tensor) -> Tensor:
    """64 bits that depend on every bit of a tensor and its position; without a host sync on CUDA.

    >>> a, b = torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0])
    >>> bool(checksum(a) == checksum(a.clone())), bool(checksum(a) == checksum(b))
    (True, False)
    """
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    flat = torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = flat.view(kinds[flat.dtype.itemsize])
    total = torch.tensor(flat.numel(), dtype=torch.int64, device=flat.device)
    for block in bits.split(_HASHED):
        # Odd weights are invertible modulo 2**64, so a single changed value changes the sum.
        weights = _weights(flat.device)[: len(block)]
        total = total * 6364136223846793005 + (block.long() * weights).sum()
    return total


@cache
def _weights(device: torch.device) -> Tensor:
    return torch.arange(_HASHED, dtype=torch.int64, device=device) * 2862933555777941756 + 1

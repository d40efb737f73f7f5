"""Codecs: float values as 8 or 4 bits each, with a scale for every block of them.

A row of n values becomes one row of bytes: the codes of all blocks in order, a zero byte if their
number is odd, and then a bfloat16 scale for each block. If n is not a multiple of the length of a
block, the last block is shorter. `int4` puts elements 2i and 2i + 1 into the low and the high half
of byte i, each plus 8; the high half of an odd last byte is 0.

There is one expression for each direction, and one for a mean of parts. On the CPU it takes a band
of 2**17 elements after the other, so that its temporaries stay in caches and memory is read and
written once. On CUDA a compiler fuses it into one pass; where there is none it runs as it is. Both
give the same scales, and the same codes up to the last bit of a division.

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

[Note: what is compiled] Compiled functions take whole blocks, (rows, blocks, elements), of which
the last size is a constant: rows are filled up and cut before and after. With sizes that depend on
each other inside one kernel, Inductor of torch 2.11 fails for some codes.
"""

import importlib.util
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from mics_fn import _torch, checks
from mics_fn.checks import refuse_derivative
from mics_fn.errors import LeafError, PlanError, first_line, message


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


class Rows(NamedTuple):
    """Codes as matrices, a row for each row of values: views of the same bytes.

    Args:
      elements: the codes, as bytes.
      padding: a byte after an odd number of them, otherwise none.
      scales: bfloat16, one per block.
    """

    elements: Tensor
    padding: Tensor
    scales: Tensor


_FORM = re.compile(r"\s*(\w+)\s*(?:\[\s*([1-9][0-9]{0,8})\s*\])?\s*")
_BLOCKS = [2**n for n in range(1, 17)]  # lengths, so that of several the longest suits all
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
          LeafError: a derivative is asked for.
        """
        refuse_derivative(f"{self}.encode", [x], _DETACH)
        n = x.shape[-1]
        shape = (*x.shape[:-1], self.nbytes(n))
        if out is None:
            out = torch.empty(shape, dtype=torch.uint8, device=x.device)
        if x.numel():
            rows = out.detach().view(-1, out.shape[-1])
            encode_rows(self, x.reshape(-1, n), self._split(rows, n))
        return out

    def decode(
        self, codes: Tensor, n: int, dtype: torch.dtype, out: Tensor | None = None
    ) -> Tensor:
        """The values of bytes that `encode` made.

        Args:
          codes: uint8 (*batch, nbytes(n)), at an even place.
          n: values of a row.
          dtype: float32, bfloat16, float16 or float64.
          out: the values are written to it; (*batch, n) of that dtype, in other memory.

        Returns:
          `out`, or new values (*batch, n).

        Memory: about 1 MiB beside the result on the CPU.

        Raises:
          LeafError: these are no codes of `n` values, or a derivative is asked for.
        """
        if out is None:
            out = torch.empty(*codes.shape[:-1], n, dtype=dtype, device=codes.device)
        return self.decode_mean([codes], out)

    def decode_mean(self, parts: Sequence[Tensor], out: Tensor) -> Tensor:
        """The mean of decoded parts and of parts that were not coded, in one pass.

        Parts are added in float32 (float64 if `out` is) in the order in which they are given. So
        ranks that give the same parts in the same order get the same bits, and a rank puts its own
        part into its place among the others. A sum beyond the range of float32 is infinite, even if
        the mean is inside of it: that of two values of 3e38.

        Args:
          parts: codes, uint8 (*batch, nbytes(n)), or values of any float dtype here, (*batch, n).
          out: the mean is written to it; (*batch, n). It may be one of `parts`, but not overlap
            them in another way.

        Returns:
          `out`.

        Memory: about 1.5 MiB on the CPU.

        Raises:
          LeafError: a part is not of that kind, or a derivative is asked for.
        """
        refuse_derivative(f"{self}.decode", [out, *parts], _DETACH)
        if out.numel():
            rows = out.detach().view(-1, out.shape[-1])
            mean_rows(self, [self._part(part, out) for part in parts], rows)
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
        encode_rows(self, values.view(1, -1), rows)

    def decode_blocks(self, elements: Tensor, scales: Tensor, out: Tensor) -> None:
        """Write the values of such codes to `out` (blocks, length), of any float dtype."""
        rows = Rows(elements.view(1, -1), elements.view(1, -1)[:, :0], scales.view(1, -1))
        mean_rows(self, [rows], out.view(1, -1))

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

    def _part(self, part: Tensor, out: Tensor) -> Rows | Tensor:
        """A part of a mean, as matrices."""
        n = out.shape[-1]
        if part.dtype.is_floating_point:
            return part.detach().reshape(-1, n)
        if part.dtype != torch.uint8 or part.shape[-1] != self.nbytes(n):
            lines = [f"got {part.dtype} {tuple(part.shape)}"]
            lines += [f"expected torch.uint8 (..., {self.nbytes(n)}) for {n} values"]
            fix = "pass what encode of the same codec gave, and the n of that"
            raise LeafError(f"{self}.decode: these are not such codes", lines, fix)
        return self._split(part.detach().reshape(-1, part.shape[-1]), n)


# The arithmetic, on matrices of values and of codes.

BAND = 2**17  # elements; their float32 take 512 KiB
FLOOR = 2.0**-126  # See [Note: the least scale].


def encode_rows(codec: Codec, values: Tensor, codes: Rows) -> None:
    """Write the codes of a matrix of any float dtype; see `Codec.encode`."""
    encode = _fast(encoded, values.device)
    for band in _bands(values, codec.block):
        into, scales = band.codes(codec, codes)
        elements, found = encode(codec.name, band.whole(codec, values))
        into.copy_(elements.flatten(1)[:, : into.shape[1]])
        if codec.name == "int4" and (band.stop - band.start) % 2:
            into[:, -1].bitwise_and_(15)  # half a byte of padding
        scales.copy_(found)
    codes.scales.masked_fill_(codes.scales.isnan(), float("nan"))  # of which there is one
    codes.padding.zero_()


def mean_rows(codec: Codec, parts: Sequence[Rows | Tensor], out: Tensor) -> None:
    """Write the mean of parts, codes or values, added in order; see `Codec.decode_mean`."""
    average = _fast(mean, out.device)
    for band in _bands(out, codec.block):
        into = band.values(out)
        given = [band.whole(codec, part) for part in parts]
        into.copy_(average(codec.name, given, out.dtype).flatten(1)[:, : into.shape[1]])


class _Band(NamedTuple):
    """Some rows of a matrix of values, and some of their blocks."""

    top: int
    bottom: int
    start: int  # the element of a row at which the first block begins
    stop: int

    def values(self, x: Tensor) -> Tensor:
        return x[self.top : self.bottom, self.start : self.stop]

    def codes(self, codec: Codec, rows: Rows) -> tuple[Tensor, Tensor]:
        """The codes of the band, and their scales."""
        block, bits, own = codec.block, KINDS[codec.name].bits, slice(self.top, self.bottom)
        elements = rows.elements[own, self.start * bits // 8 : -(-self.stop * bits // 8)]
        return elements, rows.scales[own, self.start // block : -(-self.stop // block)]

    def whole(self, codec: Codec, part: Rows | Tensor) -> Any:
        """The values of the band as whole blocks, or the codes of these and their scales."""
        n = self.stop - self.start
        length = min(codec.block, n + n % 2)  # a single block needs no more than it has
        if isinstance(part, Tensor):
            return _blocks(self.values(part), length)
        elements, scales = self.codes(codec, part)
        return _blocks(elements, length * KINDS[codec.name].bits // 8), scales


def _bands(values: Tensor, block: int) -> Iterator[_Band]:
    """Bands that cover a matrix of values: all of it in one but on the CPU."""
    rows, n = values.shape
    if not _in_bands(values):
        yield _Band(0, rows, 0, n)
        return
    width = min(n, max(1, BAND // block) * block)
    height = max(1, BAND // width)
    for top in range(0, rows, height):
        for start in range(0, n, width):
            yield _Band(top, min(top + height, rows), start, min(start + width, n))


def _in_bands(x: Tensor) -> bool:
    """Whether ops are run one by one in caches, and not fused by a compiler."""
    return x.is_cpu


def _blocks(x: Tensor, length: int) -> Tensor:
    """A matrix as (rows, blocks, elements), with zeros after its end; see [Note: what is compiled].

    The compiler takes the length as a constant.
    """
    more = -x.shape[1] % length
    blocks = (functional.pad(x, (0, more)) if more else x).unflatten(1, (-1, length))
    return blocks if x.is_cpu else _torch.with_constant_size(blocks, 2)


# A compiler refuses to write to views of bytes as another dtype, so these return their results.


def encoded(name: str, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The codes of blocks, as bytes, and their scales."""
    blocks = blocks.to(torch.float32)
    largest, least = blocks.amax(-1, keepdim=True), blocks.amin(-1, keepdim=True)
    wide = torch.maximum(largest, least.neg_()).div_(KINDS[name].top).clamp_(min=FLOOR)
    finite, scale = wide.isfinite(), _to_bfloat16(wide)
    quotient = blocks * scale.reciprocal()
    if not _in_bands(blocks) or not bool(finite.all()):
        quotient = torch.where(finite, quotient, 0.0)
        scale = torch.where(finite, scale, float("nan"))
    scales = scale.squeeze(-1).to(torch.bfloat16)
    if name == "fp8":
        return quotient.to(torch.float8_e4m3fn).view(torch.uint8), scales
    coded = quotient.round_().to(torch.int8)
    if name == "int8":
        return coded.view(torch.uint8), scales
    return _pairs(coded.add_(8).mul_(finite).view(torch.uint8)), scales


def _to_bfloat16(scale: Tensor) -> Tensor:
    """Positive float32 values rounded to the nearest bfloat16, as float32.

    A compiler leaves out a conversion to bfloat16 and back, so the bits are rounded here.
    """
    bits = scale.view(torch.int32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).view(torch.float32)


def _pairs(codes: Tensor) -> Tensor:
    """Codes of 4 bits, a byte each, as two in a byte."""
    if _in_bands(codes):  # on a view of both at once
        both = codes.view(torch.int16)
        return (both >> 4).bitwise_or_(both).to(torch.uint8)
    pairs = codes.unflatten(2, (-1, 2))
    return pairs[..., 0] | (pairs[..., 1] << 4)


def mean(name: str, parts: Sequence[Tensor | tuple[Tensor, Tensor]], dtype: torch.dtype) -> Tensor:
    """The mean of parts, blocks of values or codes with their scales, added in order."""
    total: Any = None
    for part in parts:
        value = part if isinstance(part, Tensor) else _values(name, *part)
        value = value.to(torch.promote_types(dtype, torch.float32))
        total = value if total is None else total + value
    return _narrowed(total / len(parts) if len(parts) > 1 else total, dtype)


def _values(name: str, elements: Tensor, scales: Tensor) -> Tensor:
    """The decoded values of blocks, as float32."""
    scale = scales.to(torch.float32).unsqueeze(-1)
    if name == "int8":
        read = elements.view(torch.int8).to(torch.float32)
    elif _in_bands(elements):
        read, unit = _read_on_cpu(name, elements)
        scale = scale * unit
    elif name == "fp8":
        read = elements.view(torch.float8_e4m3fn).to(torch.float32)
    else:
        read = torch.stack([elements & 15, elements >> 4], -1).flatten(2).to(torch.float32) - 8
    return read.mul_(scale)


def _read_on_cpu(name: str, elements: Tensor) -> tuple[Tensor, float]:
    """Codes divided by a unit, and that unit, from views of two bytes."""
    if name == "fp8":
        # The bits of e4m3, moved to their places in a float16, are the same number times 2**-8.
        # torch's own conversion takes ten times as long.
        bits = elements.view(torch.int8).to(torch.int16).bitwise_left_shift_(7)
        bits.bitwise_and_(-0x4080)  # the sign, and the seven bits
        return bits.view(torch.float16).to(torch.float32), 2.0**8
    pairs = elements.to(torch.int16)
    pairs = (pairs << 4).bitwise_or_(pairs).bitwise_and_(0x0F0F)
    return pairs.view(torch.int8).sub_(8).to(torch.float32), 1.0


def _narrowed(wide: Tensor, dtype: torch.dtype) -> Tensor:
    """Values in a dtype, without infinities that only the rounding of a scale makes in 16 bits.

    These become the largest value of the dtype. Values of at least twice its largest power of two
    become infinite in it, as always: they were not in its range before they were coded, either.
    """
    largest = torch.finfo(dtype).max
    if dtype.itemsize != 2 or (_in_bands(wide) and bool(wide.abs().amax() <= largest)):
        return wide.to(dtype)
    limit = 2.0**16 if dtype == torch.float16 else float("inf")
    return torch.where(wide.abs() < limit, wide.clamp(-largest, largest), wide).to(dtype)


@cache
def _fast(whole: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """A function for a device: compiled on CUDA, where there is a compiler for it.

    Where the compiler fails, the function runs as it is from then on, which is said once.
    """
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return whole
    compiled = torch.compile(whole, dynamic=True)
    failed: list[bool] = []

    def fast(*args: Any) -> Any:
        if failed:
            return whole(*args)
        try:
            return compiled(*args)
        except Exception as error:
            if not _torch.is_of_compiler(error):
                raise
            failed.append(True)
            lines = ["codes take several passes over memory on this device", first_line(error)]
            text = message(f"torch.compile cannot compile {whole.__name__} of codes", lines)
            warnings.warn(text, stacklevel=2)
            return whole(*args)

    return fast

"""Blocks of values as codes, by one expression for each direction and one for a mean of parts.

On the CPU an expression takes a band of 2**17 elements after the other, so that its temporaries
stay in caches and memory is read and written once. On CUDA a compiler fuses it into one pass; where
there is none it runs as it is. Both give the same scales, and the same codes up to the last bit of
a division.

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
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from mics_fn import _torch
from mics_fn.errors import first_line, message

BAND = 2**17  # elements; their float32 take 512 KiB
FLOOR = 2.0**-126  # See [Note: the least scale].


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


def encode_rows(name: str, block: int, values: Tensor, codes: Rows) -> None:
    """Write the codes of a matrix of any float dtype; see `Codec.encode`."""
    encode = _fast(encoded, values.device)
    for band in _bands(values, block):
        given, n = band.values(values), band.stop - band.start
        into, scales = band.codes(name, block, codes)
        elements, found = encode(name, _blocks(given, _length(block, n)))
        into.copy_(elements.flatten(1)[:, : into.shape[1]])
        if name == "int4" and n % 2:
            into[:, -1].bitwise_and_(15)  # half a byte of padding
        scales.copy_(found)
    codes.scales.masked_fill_(codes.scales.isnan(), float("nan"))  # of which there is one
    codes.padding.zero_()


def decode_rows(name: str, block: int, codes: Rows, out: Tensor) -> None:
    """Write the values of codes to a matrix of any float dtype; see `Codec.decode`."""
    decode = _fast(decoded, out.device)
    for band in _bands(out, block):
        into = band.values(out)
        found = decode(name, *_whole(name, block, band, codes), out.dtype)
        into.copy_(found.flatten(1)[:, : into.shape[1]])


def mean_rows(name: str, block: int, parts: Sequence[Rows | Tensor], out: Tensor) -> None:
    """Write the mean of parts, codes or values, added in order; see `Codec.decode_mean`."""
    average = _fast(mean, out.device)
    for band in _bands(out, block):
        into = band.values(out)
        length = _length(block, into.shape[1])
        given = [
            _blocks(band.values(x), length)
            if isinstance(x, Tensor)
            else _whole(name, block, band, x)
            for x in parts
        ]
        into.copy_(average(name, given, out.dtype).flatten(1)[:, : into.shape[1]])


class _Band(NamedTuple):
    """Some rows of a matrix of values, and some of their blocks."""

    top: int
    bottom: int
    start: int  # the element of a row at which the first block begins
    stop: int

    def values(self, x: Tensor) -> Tensor:
        return x[self.top : self.bottom, self.start : self.stop]

    def codes(self, name: str, block: int, rows: Rows) -> tuple[Tensor, Tensor]:
        """The codes of the band, and their scales."""
        bits, own = KINDS[name].bits, slice(self.top, self.bottom)
        elements = rows.elements[own, self.start * bits // 8 : -(-self.stop * bits // 8)]
        return elements, rows.scales[own, self.start // block : -(-self.stop // block)]


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


def _length(block: int, n: int) -> int:
    """Elements of a block: an even number, of which a single block needs no more than it has."""
    return min(block, n + n % 2)


def _blocks(x: Tensor, length: int) -> Tensor:
    """A matrix as (rows, blocks, elements), with zeros after its end; see [Note: what is compiled].

    The compiler takes the length as a constant.
    """
    more = -x.shape[1] % length
    blocks = (functional.pad(x, (0, more)) if more else x).unflatten(1, (-1, length))
    return blocks if x.is_cpu else _torch.with_constant_size(blocks, 2)


def _whole(name: str, block: int, band: _Band, rows: Rows) -> tuple[Tensor, Tensor]:
    """The codes of a band as whole blocks, and their scales."""
    elements, scales = band.codes(name, block, rows)
    length = _length(block, band.stop - band.start)
    return _blocks(elements, length * KINDS[name].bits // 8), scales


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


def decoded(name: str, elements: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The values of blocks of codes, in a dtype."""
    return _narrowed(_values(name, elements, scales), dtype)


def mean(name: str, parts: Sequence[Tensor | tuple[Tensor, Tensor]], dtype: torch.dtype) -> Tensor:
    """The mean of parts, blocks of values or codes with their scales, added in order."""
    total: Any = None
    for part in parts:
        value = part if isinstance(part, Tensor) else _values(name, *part)
        value = value.to(torch.promote_types(dtype, torch.float32))
        total = value if total is None else total + value
    return _narrowed(total / len(parts), dtype)


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

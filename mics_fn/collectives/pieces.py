"""Codes on the CPU, in pieces that stay in its caches.

An encoding as one expression makes about five temporaries of the size of its input, and each of
them goes through memory. Here a piece of 2**16 elements takes all steps before the next one begins,
in scratch that is used again, so that memory is read once and written once.

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

from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import NamedTuple

import torch
from torch import Tensor

PIECE = 2**16  # elements; their float32 take 256 KiB
FLOOR = 2.0**-126  # See [Note: the least scale].
# Added to a float32 of less than 2**22, it rounds it to the nearest integer, halves to even, and
# leaves that integer in the low bits.
_ROUND = 1.5 * 2**23


class CodeFormat(NamedTuple):
    """How one element is coded.

    Args:
      bits: number of bits of a code.
      top: the largest code.
      block: the usual length of a block.
      unit: `_read` gives codes divided by this.
    """

    bits: int
    top: float
    block: int
    unit: float = 1.0


KINDS = {
    "int8": CodeFormat(8, 127.0, 256),
    "int4": CodeFormat(4, 7.0, 64),
    "fp8": CodeFormat(8, 448.0, 256, unit=256.0),
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


class Region(NamedTuple):
    """Blocks of one length: the full blocks of all rows, or the shorter last block of each.

    Its methods give the pieces of a matrix, as (rows, blocks, elements of a block): equally many,
    in the same order, for values, codes and scales.

    Args:
      start: the element of a row at which it begins.
      first: the number of its first block.
      blocks: how many a row has.
      size: elements of a block.
    """

    start: int
    first: int
    blocks: int
    size: int

    def values(self, x: Tensor) -> list[Tensor]:
        """The pieces of values."""
        return self._cut(x[:, self.start :], self.size)

    def codes(self, x: Tensor, bits: int) -> list[Tensor]:
        """The pieces of bytes that hold codes of so many bits."""
        return self._cut(x[:, self.start * bits // 8 :], (self.size * bits + 7) // 8)

    def scales(self, x: Tensor) -> list[Tensor]:
        """The pieces of scales, as (rows, blocks, 1)."""
        return self._cut(x[:, self.first :], 1)

    def _cut(self, x: Tensor, size: int) -> list[Tensor]:
        even = self.size + self.size % 2  # an odd block of int4 has half a byte of padding
        width = min(self.blocks, PIECE // even)
        blocks = x[:, : self.blocks * size].unflatten(1, (self.blocks, size))
        bands = blocks.split(PIECE // (width * even))
        return [piece for band in bands for piece in band.split(width, 1)]


def encode_rows(name: str, block: int, values: Tensor, codes: Rows) -> None:
    """Write the codes of a matrix of any float dtype; see `Codec.encode`."""
    scratch = _Scratch(values.numel())
    for region in _regions(values, block):
        views = region.values(values), region.codes(codes.elements, KINDS[name].bits)
        scales = region.scales(codes.scales)
        for given, elements, scale in zip(*views, scales, strict=True):
            wide = scratch.like("floats", given.shape)
            given = given if given.dtype == torch.float32 else wide.copy_(given)
            scale.copy_(scales_of(given, KINDS[name].top))
            torch.mul(given, scale.to(torch.float32).reciprocal_(), out=wide)
            _write(name, wide, elements, scratch)
    codes.padding.zero_()
    _blank(name, block, values, codes)


def decode_rows(name: str, block: int, codes: Rows, out: Tensor) -> None:
    """Write the values of codes to a matrix of any float dtype; see `Codec.decode`."""
    scratch, kind = _Scratch(out.numel()), KINDS[name]
    for region in _regions(out, block):
        given = region.codes(codes.elements, kind.bits), region.scales(codes.scales)
        for into, elements, scales in zip(region.values(out), *given, strict=True):
            wide, scale = _read(name, elements, scales, into.shape, scratch)
            if out.dtype.itemsize == 2:
                narrow(wide.mul_(scale), into, scale.amax() * (kind.top / kind.unit))
            else:
                torch.mul(wide, scale, out=into)


def mean_rows(name: str, block: int, parts: Sequence[Rows | Tensor], out: Tensor) -> None:
    """Write the mean of parts, codes or values, added in order; see `Codec.decode_mean`."""
    scratch = _Scratch(out.numel(), torch.promote_types(out.dtype, torch.float32))
    for region in _regions(out, block):
        given = [_views(name, region, part) for part in parts]
        for into, *pieces in zip(region.values(out), *given, strict=True):
            total = scratch.like("sums", into.shape)
            for i, (values, scales) in enumerate(pieces):
                if scales is None:
                    wide, scale = values, None
                else:
                    wide, scale = _read(name, values, scales, into.shape, scratch)
                _add(total, wide, scale, first=i == 0)
            if out.dtype.itemsize == 2:
                narrow(total.div_(len(parts)), into, total.abs().amax())
            else:
                torch.div(total, len(parts), out=into)


def _add(total: Tensor, values: Tensor, scale: Tensor | None, *, first: bool) -> None:
    """Add values, times their scale if they have one, to a sum; the first ones begin it."""
    if scale is None:
        if first:
            total.copy_(values)
        else:
            total.add_(values)
    elif first:
        torch.mul(values, scale, out=total)
    else:
        total.addcmul_(values, scale)


def scales_of(blocks: Tensor, top: float) -> Tensor:
    """The scale of each block, (..., 1), as float32 that is yet to be rounded to bfloat16."""
    largest, least = blocks.amax(-1, keepdim=True), blocks.amin(-1, keepdim=True)
    return torch.maximum(largest, least.neg_()).div_(top).clamp_(min=FLOOR)


def narrow(wide: Tensor, out: Tensor, largest: Tensor) -> None:
    """Round float32 values, of which `largest` is a bound, to a dtype of 16 bits."""
    if not bool(largest <= torch.finfo(out.dtype).max):  # NaN says nothing about other blocks
        wide = below_infinity(wide, out.dtype)
    out.copy_(wide)


def below_infinity(wide: Tensor, dtype: torch.dtype) -> Tensor:
    """Values without those that only the rounding of a scale lifts above the range of a dtype.

    These become the largest value of the dtype. Values of at least twice its largest power of two
    become infinite in it, as always: they were not in its range before they were coded, either.
    """
    largest = torch.finfo(dtype).max
    limit = 2.0**16 if dtype == torch.float16 else float("inf")
    return torch.where(wide.abs() < limit, wide.clamp(-largest, largest), wide)


def _regions(values: Tensor, block: int) -> list[Region]:
    """The regions of a matrix of values that are not empty."""
    count, rest = divmod(values.shape[1], block)
    found = [Region(0, 0, count, block), Region(count * block, count, 1, rest)]
    return [region for region in found if region.blocks and region.size]


def _views(
    name: str, region: Region, part: Rows | Tensor
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """The pieces of a part of a mean: of its values or codes, and of its scales or None."""
    if isinstance(part, Tensor):
        return zip(region.values(part), repeat(None))
    scales = region.scales(part.scales)
    return zip(region.codes(part.elements, KINDS[name].bits), scales, strict=True)


class _Scratch:
    """Memory for one piece at a time."""

    def __init__(self, numel: int, sums: torch.dtype | None = None) -> None:
        length = min(2 * numel, PIECE)  # twice, as an odd block has half a byte of padding
        dtypes = {"floats": torch.float32, "pairs": torch.int16, "shifted": torch.int16}
        dtypes |= {"sums": sums} if sums else {}
        self._flat = {k: torch.empty(length, dtype=dtype) for k, dtype in dtypes.items()}
        self._last: dict[str, Tensor] = {}

    def like(self, kind: str, shape: torch.Size) -> Tensor:
        """Uninitialized memory of one kind; nearly all pieces have the same shape."""
        last = self._last.get(kind)
        if last is None or last.shape != shape:
            last = self._last[kind] = self._flat[kind][: shape.numel()].view(shape)
        return last


def _write(name: str, wide: Tensor, elements: Tensor, scratch: _Scratch) -> None:
    """Round quotients to codes; overwrites them."""
    if name == "int8":
        elements.view(torch.int8).copy_(wide.round_())
    elif name == "fp8":
        elements.view(torch.float8_e4m3fn).copy_(wide)
    else:
        _write_pairs(wide, elements, scratch)


def _write_pairs(wide: Tensor, elements: Tensor, scratch: _Scratch) -> None:
    """Round quotients of int4 to codes plus 8, which are 1 to 15, two in a byte."""
    pairs, shifted = (scratch.like(kind, elements.shape) for kind in ("pairs", "shifted"))
    codes, n = pairs.view(torch.int8), wide.shape[2]
    whole = wide.add_(_ROUND + 8).view(torch.int32)
    if n % 2:
        codes[..., :n].copy_(whole)
        codes[..., n:].zero_()
    else:
        codes.copy_(whole)
    torch.bitwise_right_shift(pairs, 4, out=shifted)
    elements.copy_(pairs.bitwise_or_(shifted))


def _read(
    name: str, elements: Tensor, scales: Tensor, shape: torch.Size, scratch: _Scratch
) -> tuple[Tensor, Tensor]:
    """Codes as float32 of this shape, in scratch, and what these are to be multiplied by."""
    wide, scale = scratch.like("floats", shape), scales.to(torch.float32)
    if name == "int8":
        return wide.copy_(elements.view(torch.int8)), scale
    pairs = scratch.like("pairs", elements.shape)
    if name == "fp8":
        # The bits of e4m3, moved to their places in a float16, are the same number times 2**-8.
        # torch's own conversion takes ten times as long.
        pairs.copy_(elements.view(torch.int8))
        pairs.bitwise_left_shift_(7).bitwise_and_(-0x4080)  # the sign, and the seven bits
        return wide.copy_(pairs.view(torch.float16)), scale.mul_(KINDS[name].unit)
    shifted = scratch.like("shifted", elements.shape)
    pairs.copy_(elements)
    torch.bitwise_left_shift(pairs, 4, out=shifted)
    codes = pairs.bitwise_or_(shifted).bitwise_and_(0x0F0F).view(torch.int8).sub_(8)
    return wide.copy_(codes[..., : shape[2]]), scale


def _blank(name: str, block: int, values: Tensor, codes: Rows) -> None:
    """Give blocks that are not finite defined bytes: codes of 0, and one kind of NaN."""
    if bool(codes.scales.isfinite().all()):
        return
    for region in _regions(values, block):
        elements = region.codes(codes.elements, KINDS[name].bits)
        for piece, scales in zip(elements, region.scales(codes.scales), strict=True):
            bad = scales.isfinite().logical_not_()
            piece.masked_fill_(bad, 0)
            scales.masked_fill_(bad, float("nan"))

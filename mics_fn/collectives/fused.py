"""Codes as one expression each, which a compiler fuses into one pass on a CUDA device.

It computes what `pieces` does: the same scales, and the same quotients up to the last bit of a
division. Without a compiler the expressions run as they are, with their temporaries.
"""

import importlib.util
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mics_fn.collectives.pieces import KINDS, Rows, below_infinity, scales_of


def encode_rows(name: str, block: int, values: Tensor, codes: Rows) -> None:
    """Write the codes of a matrix of any float dtype; see `Codec.encode`."""
    elements, scales = _fast(encoded, values.device)(name, block, values)
    codes.elements.copy_(elements)
    codes.scales.copy_(scales).masked_fill_(scales.isnan(), float("nan"))  # of which there is one
    codes.padding.zero_()


def decode_rows(name: str, block: int, codes: Rows, out: Tensor) -> None:
    """Write the values of codes to a matrix of any float dtype; see `Codec.decode`."""
    elements, scales = codes.elements, codes.scales
    out.copy_(_fast(decoded, out.device)(name, block, elements, scales, out.shape[1], out.dtype))


def mean_rows(name: str, block: int, parts: Sequence[Rows | Tensor], out: Tensor) -> None:
    """Write the mean of parts, codes or values, added in order; see `Codec.decode_mean`."""
    given = [x if isinstance(x, Tensor) else (x.elements, x.scales) for x in parts]
    out.copy_(_fast(mean, out.device)(name, block, given, out.shape[1], out.dtype))


# A compiler refuses to write to views of bytes as another dtype, so these return their results.


def encoded(name: str, block: int, values: Tensor) -> tuple[Tensor, Tensor]:
    """The codes of a matrix, as bytes, and the scales of its blocks."""
    n = values.shape[1]
    blocks = _blocks(values.to(torch.float32), block)
    wide = scales_of(blocks, KINDS[name].top)
    finite, scale = wide.isfinite(), _to_bfloat16(wide)
    quotient = torch.where(finite, blocks * scale.reciprocal(), 0.0)
    scales = torch.where(finite, scale, float("nan")).squeeze(-1).to(torch.bfloat16)
    if name == "fp8":
        found = quotient.flatten(1)[:, :n].to(torch.float8_e4m3fn)
        return found.view(torch.uint8), scales
    coded = quotient.round().to(torch.int8)
    if name == "int8":
        return coded.flatten(1)[:, :n].view(torch.uint8), scales
    shifted = torch.where(finite, coded + 8, 0).flatten(1)[:, :n].to(torch.uint8)
    pairs = functional.pad(shifted, (0, n % 2)).unflatten(1, (-1, 2))
    return pairs[..., 0] | (pairs[..., 1] << 4), scales


def _to_bfloat16(scale: Tensor) -> Tensor:
    """Positive float32 values rounded to the nearest bfloat16, as float32.

    A compiler leaves out a conversion to bfloat16 and back, so the bits are rounded here.
    """
    bits = scale.view(torch.int32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).view(torch.float32)


def decoded(
    name: str, block: int, elements: Tensor, scales: Tensor, n: int, dtype: torch.dtype
) -> Tensor:
    """The values of codes, in a dtype."""
    wide = _values(name, block, elements, scales, n)
    return below_infinity(wide, dtype).to(dtype) if dtype.itemsize == 2 else wide.to(dtype)


def mean(
    name: str,
    block: int,
    parts: Sequence[Tensor | tuple[Tensor, Tensor]],
    n: int,
    dtype: torch.dtype,
) -> Tensor:
    """The mean of parts, values or codes with their scales, added in order, in a dtype."""
    total: Any = None
    for part in parts:
        value = part if isinstance(part, Tensor) else _values(name, block, *part, n)
        value = value.to(torch.promote_types(dtype, torch.float32))
        total = value if total is None else total + value
    found = total / len(parts)
    return below_infinity(found, dtype).to(dtype) if dtype.itemsize == 2 else found.to(dtype)


def _blocks(values: Tensor, block: int) -> Tensor:
    """A matrix as (rows, blocks, elements), with zeros after its end."""
    block = min(block, values.shape[1])  # a single block needs no zeros
    return functional.pad(values, (0, -values.shape[1] % block)).unflatten(1, (-1, block))


def _values(name: str, block: int, elements: Tensor, scales: Tensor, n: int) -> Tensor:
    """The decoded values of a matrix, as float32."""
    if name == "int4":
        pairs = torch.stack([elements & 15, elements >> 4], -1)
        read = pairs.flatten(1)[:, :n].to(torch.float32) - 8
    else:
        kind = torch.int8 if name == "int8" else torch.float8_e4m3fn
        read = elements.view(kind).to(torch.float32)
    scale = scales.to(torch.float32).unsqueeze(-1)
    return (_blocks(read, block) * scale).flatten(1)[:, :n]


@cache
def _fast(whole: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """A function for a device: compiled on CUDA, where there is a compiler for it."""
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        return torch.compile(whole, dynamic=True)
    return whole

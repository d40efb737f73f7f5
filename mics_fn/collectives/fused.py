"""Codes as one expression each, which a compiler fuses into one pass on a CUDA device.

It computes what `pieces` does: the same scales, and the same quotients up to the last bit of a
division. Without a compiler the expressions run as they are, with their temporaries.

[Note: what is compiled] Compiled functions take whole blocks, (rows, blocks, elements), of which
the last size is a constant: rows are filled up and cut before and after. With sizes that depend on
each other inside one kernel, Inductor of torch 2.11 fails for some codes.
"""

import importlib.util
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mics_fn import _torch
from mics_fn.collectives.pieces import KINDS, Rows, below_infinity, scales_of
from mics_fn.errors import first_line, message


def encode_rows(name: str, block: int, values: Tensor, codes: Rows) -> None:
    """Write the codes of a matrix of any float dtype; see `Codec.encode`."""
    n = values.shape[1]
    blocks = _blocks(values, _length(block, n))
    elements, scales = _fast(encoded, values.device)(name, blocks)
    codes.elements.copy_(elements.flatten(1)[:, : codes.elements.shape[1]])
    if name == "int4" and n % 2:
        codes.elements[:, -1].bitwise_and_(15)  # half a byte of padding
    codes.scales.copy_(scales).masked_fill_(scales.isnan(), float("nan"))  # of which there is one
    codes.padding.zero_()


def decode_rows(name: str, block: int, codes: Rows, out: Tensor) -> None:
    """Write the values of codes to a matrix of any float dtype; see `Codec.decode`."""
    part = _whole(name, block, codes, out.shape[1])
    found = _fast(decoded, out.device)(name, *part, out.dtype)
    out.copy_(found.flatten(1)[:, : out.shape[1]])


def mean_rows(name: str, block: int, parts: Sequence[Rows | Tensor], out: Tensor) -> None:
    """Write the mean of parts, codes or values, added in order; see `Codec.decode_mean`."""
    n = out.shape[1]
    given = [
        _blocks(x, _length(block, n)) if isinstance(x, Tensor) else _whole(name, block, x, n)
        for x in parts
    ]
    out.copy_(_fast(mean, out.device)(name, given, out.dtype).flatten(1)[:, :n])


def _length(block: int, n: int) -> int:
    """Elements of a block: an even number, of which a single block needs no more than it has."""
    return min(block, n + n % 2)


def _blocks(x: Tensor, length: int) -> Tensor:
    """A matrix as (rows, blocks, elements), with zeros after its end; see [Note: what is compiled].

    The compiler takes the length as a constant.
    """
    more = -x.shape[1] % length
    blocks = (functional.pad(x, (0, more)) if more else x).unflatten(1, (-1, length))
    return _torch.with_constant_size(blocks, 2)


def _whole(name: str, block: int, codes: Rows, n: int) -> tuple[Tensor, Tensor]:
    """Codes as whole blocks, and their scales."""
    return _blocks(codes.elements, _length(block, n) * KINDS[name].bits // 8), codes.scales


# A compiler refuses to write to views of bytes as another dtype, so these return their results.


def encoded(name: str, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The codes of blocks, as bytes, and their scales."""
    blocks = blocks.to(torch.float32)
    wide = scales_of(blocks, KINDS[name].top)
    finite, scale = wide.isfinite(), _to_bfloat16(wide)
    quotient = torch.where(finite, blocks * scale.reciprocal(), 0.0)
    scales = torch.where(finite, scale, float("nan")).squeeze(-1).to(torch.bfloat16)
    if name == "fp8":
        return quotient.to(torch.float8_e4m3fn).view(torch.uint8), scales
    coded = quotient.round().to(torch.int8)
    if name == "int8":
        return coded.view(torch.uint8), scales
    shifted = torch.where(finite, coded + 8, 0).to(torch.uint8).unflatten(2, (-1, 2))
    return shifted[..., 0] | (shifted[..., 1] << 4), scales


def _to_bfloat16(scale: Tensor) -> Tensor:
    """Positive float32 values rounded to the nearest bfloat16, as float32.

    A compiler leaves out a conversion to bfloat16 and back, so the bits are rounded here.
    """
    bits = scale.view(torch.int32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).view(torch.float32)


def decoded(name: str, elements: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The values of blocks of codes, in a dtype."""
    wide = _values(name, elements, scales)
    return below_infinity(wide, dtype).to(dtype) if dtype.itemsize == 2 else wide.to(dtype)


def mean(name: str, parts: Sequence[Tensor | tuple[Tensor, Tensor]], dtype: torch.dtype) -> Tensor:
    """The mean of parts, blocks of values or codes with their scales, added in order."""
    total: Any = None
    for part in parts:
        value = part if isinstance(part, Tensor) else _values(name, *part)
        value = value.to(torch.promote_types(dtype, torch.float32))
        total = value if total is None else total + value
    found = total / len(parts)
    return below_infinity(found, dtype).to(dtype) if dtype.itemsize == 2 else found.to(dtype)


def _values(name: str, elements: Tensor, scales: Tensor) -> Tensor:
    """The decoded values of blocks, as float32."""
    if name == "int4":
        read = torch.stack([elements & 15, elements >> 4], -1).flatten(2).to(torch.float32) - 8
    else:
        kind = torch.int8 if name == "int8" else torch.float8_e4m3fn
        read = elements.view(kind).to(torch.float32)
    return read * scales.to(torch.float32).unsqueeze(-1)


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

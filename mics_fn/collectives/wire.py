"""The arithmetic of means, what travels in the place of values, and checksums of tensors.

Where a `Wire` says so, a gather sends codes of parameters, and hop 1 codes of gradients, on the
named level of a route and on those outside of it, which are slower. All other levels send the
values. How codes are sent stands in the table `SENDERS`: a codec registers the functions that
levels call, as the folder `codes` does for its own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mics_fn.errors import PlanError

# The arithmetic of means: how parts from several ranks are added and divided.

_BLOCK = 2**16  # elements that are widened at a time, so that wide copies fit in the CPU's caches


def mean_of(parts: Tensor, out: Tensor, in_order: bool = False) -> None:
    """Write the mean of the rows of `parts` to `out`; 16-bit values are summed in float32.

    Args:
      parts: one row per rank.
      out: one row, of any float dtype.
      in_order: add the rows one after the other for every element.
    """
    wide = torch.promote_types(parts.dtype, torch.float32)
    if in_order:  # in `sum(0)` the order of additions depends on an element's position
        total = parts[0].to(wide, copy=True)
        for row in parts[1:]:
            total.add_(row)
        out.copy_(total.div_(len(parts)))
    elif parts.dtype.itemsize == 2 or out.dtype != parts.dtype:
        out.copy_(parts.sum(0, dtype=wide).div_(len(parts)))
    else:
        torch.sum(parts, 0, out=out).div_(len(parts))


def mean_of_two(a: Tensor, b: Tensor, out: Tensor) -> None:
    """Write a + (b - a)/2 to `out`, which may share memory with either; as wide as `mean_of`."""
    if out.dtype == a.dtype and a.dtype.itemsize != 2:
        torch.lerp(a, b, 0.5, out=out)
        return
    wide = torch.promote_types(a.dtype, torch.float32)
    # On the CPU wide copies are made block by block, so that they fit in its caches.
    block = _BLOCK if a.device.type == "cpu" else max(1, a.numel())
    for x, y, mean in zip(a.split(block), b.split(block), out.split(block), strict=True):
        mean.copy_(torch.lerp(x.to(wide), y.to(wide), 0.5))


def mean_factors(dtype: torch.dtype, count: int) -> tuple[float, float]:
    """Factors that make a sum a mean: multiply values by `before`, and their sum by `after`.

    In float16 neither factor is enough alone: the plain sum overflows early, and a value divided by
    `count` may become 0. So `before` is the largest power of two that is at most 1/sqrt(count).
    Sums then stay finite while values are below 65504 / (count * before), which lies between
    65504 / sqrt(count) and twice that. An overflow beyond it is noticed, and a dynamic loss scale
    adapts. A value that becomes 0 is not noticed, but no value of at least 2**-24 / before does.
    Other dtypes have at least the range of float32, and their `before` is 1.

    Args:
      dtype: the dtype in which the values are added.
      count: number of values.

    Returns:
      `(before, after)`; `before * after * count` is 1, exactly if `count` is a power of two.
    """
    # The smallest k with 4**k >= count.
    k = ((count - 1).bit_length() + 1) // 2 if dtype == torch.float16 else 0
    return 2.0**-k, 2.0**k / count


SHORT_NAMES = {
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float64: "f64",
}


class Sender(NamedTuple):
    """The functions by which levels send codes; arguments as those of `levels`, codes first.

    Args:
      spare_numel: of a `Wire`: elements of the second buffer of hop 1.
      scatter_steps: of a `Wire`: hop 1.
      mean_comms: the communicators of hop 2.
      mean_steps: of a codec: hop 2.
    """

    spare_numel: Callable[..., int]
    scatter_steps: Callable[..., Any]
    mean_comms: Callable[..., list[Any]]
    mean_steps: Callable[..., Any]


SENDERS: dict[type, Sender] = {}  # by the class of a codec


@dataclass(frozen=True)
class Wire:
    """What travels in the place of values, and on which levels.

    Args:
      codec: makes bytes of values, and values of bytes; `SENDERS` has its class.
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

    @property
    def sender(self) -> Sender:
        """How its codes are sent."""
        return SENDERS[type(self.codec)]

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

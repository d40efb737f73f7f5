"""The arithmetic of means: how parts from several ranks are added and divided."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mics_fn.errors import PlanError

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
        mean_by_rows(parts.unbind(), out, wide)
    elif parts.dtype.itemsize == 2 or out.dtype != parts.dtype:
        out.copy_(parts.sum(0, dtype=wide).div_(len(parts)))
    else:
        torch.sum(parts, 0, out=out).div_(len(parts))


def mean_by_rows(rows: Sequence[Tensor], out: Tensor, wide: torch.dtype) -> Tensor:
    """Write the mean of rows to `out`, added one after the other in a dtype."""
    total = rows[0].to(wide, copy=True)
    for row in rows[1:]:
        total.add_(row)
    return out.copy_(total.div_(len(rows)))


def mean_of_two(a: Tensor, b: Tensor, out: Tensor) -> None:
    """Write a + (b - a)/2 to `out`, which may share memory with either; as wide as `mean_of`."""
    if out.dtype == a.dtype and a.dtype.itemsize != 2:
        torch.lerp(a, b, 0.5, out=out)
        return
    wide = torch.promote_types(a.dtype, torch.float32)
    # On the CPU wide copies are made block by block, so that they fit in its caches.
    block = _BLOCK if a.device.type == "cpu" else max(1, a.numel())
    for x, y, mean in zip(a.split(block), b.split(block), out.split(block), strict=True):
        if mean.dtype == wide:
            mean.copy_(x).lerp_(y.to(wide), 0.5)
        elif wide == a.dtype:
            mean.copy_(torch.lerp(x, y, 0.5))
        else:
            mean.copy_(x.to(wide).lerp_(y.to(wide), 0.5))


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
    if count < 1:
        raise PlanError(f"mean_factors: count={count}, expected at least 1")
    # The smallest k with 4**k >= count.
    k = ((count - 1).bit_length() + 1) // 2 if dtype == torch.float16 else 0
    return 2.0**-k, 2.0**k / count

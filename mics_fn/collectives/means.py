"""The arithmetic of means: how parts from several ranks are added up."""

import torch
from torch import Tensor

from mics_fn.errors import PlanError

_BLOCK = 2**16  # elements that are widened at a time: their wide copies fit in the caches


def mean_of(parts: Tensor, out: Tensor, in_order: bool = False) -> None:
    """The mean of the rows of `parts` goes to `out`, summed in float32 or wider for 16 bits."""
    wide = torch.promote_types(parts.dtype, torch.float32)
    if in_order:  # which a sum over a dim is not: there the order depends on the element's place
        total = parts[0].to(wide, copy=True)
        for part in parts[1:]:
            total.add_(part)
        out.copy_(total.div_(len(parts)))
    elif parts.dtype.itemsize == 2 or out.dtype != parts.dtype:
        out.copy_(parts.sum(0, dtype=wide).div_(len(parts)))
    else:
        torch.sum(parts, 0, out=out).div_(len(parts))


def mean_of_two(a: Tensor, b: Tensor, out: Tensor) -> None:
    """a + (b - a)/2 goes to `out`, which may be the memory of either; as wide as in `mean_of`."""
    if out.dtype == a.dtype and a.dtype.itemsize != 2:
        torch.lerp(a, b, 0.5, out=out)
        return
    wide = torch.promote_types(a.dtype, torch.float32)
    # Block by block on the host: wide copies stay in its caches, and take no memory to speak of.
    block = _BLOCK if a.device.type == "cpu" else max(1, a.numel())
    for x, y, mean in zip(a.split(block), b.split(block), out.split(block), strict=True):
        if mean.dtype == wide:
            mean.copy_(x).lerp_(y.to(wide), 0.5)
        elif wide == a.dtype:
            mean.copy_(torch.lerp(x, y, 0.5))
        else:
            mean.copy_(x.to(wide).lerp_(y.to(wide), 0.5))


def mean_factors(dtype: torch.dtype, count: int) -> tuple[float, float]:
    """How to take a mean as `before` times each value, their sum, and `after` times that.

    With float16 neither factor alone will do: a plain sum overflows early, and a value divided by
    `count` may go to 0. So `before` is the power of two at or just below 1/sqrt(count). Sums then
    stay finite while values are below about 65504 / (count * before), which is 65504 / sqrt(count)
    or up to twice that; an overflow above is seen, and a dynamic scale mends it. A value that goes
    to 0 is not seen; none does that is at least 2**-24 / before. Other dtypes have at least the
    range of float32, and their `before` is 1.

    Args:
      dtype: in which the values are added.
      count: how many there are.

    Returns:
      `(before, after)`; `before * after * count` is 1, exactly so if `count` is a power of two.
    """
    if count < 1:
        raise PlanError(f"mean_factors: count={count}, expected at least 1")
    # The least k with 4**k >= count.
    k = ((count - 1).bit_length() + 1) // 2 if dtype == torch.float16 else 0
    return 2.0**-k, 2.0**k / count

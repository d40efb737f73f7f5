"""Codes at rest: the arithmetic that keeps moments of an optimizer in a byte each.

A block of values becomes a byte for each and one float32 `top`, which is the largest magnitude of
the block. So that magnitude has no rounding, and it follows changes of a part in ten million, as
the second moment of AdamW needs, which changes by a thousandth in a step.

[Note: rounding at random] Between two codes lies more than most steps change, so rounding to
nearest would leave a moment where it is for ever. Here a value is rounded up with the probability
of its distance from the code below, so its mean over steps is right. The random number comes from
the bits of the value itself: ranks, buckets and parts of a column have no influence, and the same
step gives the same bits. A value that is a code already stays one. Below 2**-6 of fp8, which has
no normal numbers there, rounding is to nearest.

[Note: roots] A second moment is never negative and goes into an update by its root, so the root is
what is coded. One that is not zero never becomes zero, or an update would be divided by `eps`
alone: its code is at least the least one. Roots are at least 2**-45, so that no square of a code is
lost below the normal numbers of float32; `eps` of any use is far above.

So a root that is smaller than the least code counts as larger than it is, and the step of its
element becomes smaller by the same factor. With int8 the least code is 1/127 of the largest root of
the block, with fp8 1/229,376. Where gradients of one block differ by more than a hundred times, as
those of rows of an embedding may, fp8 is the better choice, or shorter blocks.
"""

from typing import Any

import torch
from torch import Tensor

from mics_fn.collectives import Codec

_TOPS = {"int8": 127.0, "fp8": 448.0}
_LEAST = {"int8": 1.0, "fp8": 2.0**-9}  # codes above zero
_ROOT, _TOP = 2.0**-45, 2.0**-100  # the least root, and the least `top`
_HASH = -1640531535  # 2**32 divided by the golden ratio, as an odd int32
_MANTISSA = 2**20  # what float32 has below the three bits of mantissa that fp8 has
AT_REST = tuple(_TOPS)  # names of codecs


def encode(codec: Codec, root: bool, values: Tensor, codes: Tensor, tops: Tensor) -> None:
    """Write the codes of blocks.

    Args:
      codec: kind and length of blocks.
      root: whether roots are coded.
      values: float32 (blocks, length), which are overwritten.
      codes: uint8 of this shape, for the result.
      tops: float32 (blocks, 1), for the result.
    """
    top, x, above = _TOPS[codec.name], values, None
    if root:
        above = (x > 0).to(torch.float32)
        x.sqrt_().clamp_(min=_ROOT).mul_(above)
    largest = torch.maximum(x.amax(1, keepdim=True), x.amin(1, keepdim=True).neg_())
    # What is not finite makes its whole block NaN.
    torch.add(largest, largest * 0, out=tops).clamp_(min=_TOP)
    x.mul_(top / tops)
    random = x.view(torch.int32).mul(_HASH).bitwise_right_shift_(16)  # -2**15 to 2**15 - 1
    if codec.name == "int8":
        x.add_(random, alpha=2.0**-16 * (1 - 2.0**-10)).round_()
    else:
        bits = random.add_(2**15).mul_(16).add_(8).add_(x.view(torch.int32))
        x = bits.bitwise_and_(-_MANTISSA).view(torch.float32)
    if above is not None:
        x = torch.maximum(x, above.mul_(_LEAST[codec.name]))
    kind: Any = torch.int8 if codec.name == "int8" else torch.float8_e4m3fn
    codes.view(kind).copy_(x.nan_to_num_(0.0))


def decode(codec: Codec, root: bool, codes: Tensor, tops: Tensor, out: Tensor) -> None:
    """Write the values of codes.

    Args:
      codec, root: as for `encode`.
      codes: uint8 (blocks, length).
      tops: float32 (blocks, 1).
      out: float32 of the shape of the codes.
    """
    kind: Any = torch.int8 if codec.name == "int8" else torch.float8_e4m3fn
    out.copy_(codes.view(kind)).div_(_TOPS[codec.name]).mul_(tops)
    if root:
        out.mul_(out)

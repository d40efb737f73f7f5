"""A sum of squares whose bits do not depend on the order of its terms, nor on who adds which.

[Note: exact sums] Squares are divided by a power of two, the same on all ranks, so that they lie
below 1. Of each, the first 72 binary digits are taken as three integers of 24 bits, and integers
add up exactly in any order. So neither p nor threads, blocks or padding can change the sum. It is
off by less than 2**-72 of the largest square for each element, besides one rounding of the square
itself if gradients are in float64.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from mics_fn.collectives import collect
from mics_fn.groups import Home

_BITS, _DIGITS = 24, 3  # sums of int64 have room for 2**39 elements
_BLOCK = 2**18  # elements that are widened at a time


def sum_of_squares(home: Home, pieces: Sequence[Tensor]) -> Tensor:
    """The sum of the squares of all elements of a partition group; not finite if one of them is.

    Args:
      home: its groups.
      pieces: what this rank holds, without padding.

    Returns:
      A 0-dim float64 tensor, for which the host does not wait.

    Communication: two all-gathers over the partition group, of 8 bytes and of 24.

    Memory: a few blocks of 2 MiB.
    """
    return sums_of_squares(home, [pieces])[0]


def sums_of_squares(home: Home, rows: Sequence[Sequence[Tensor]]) -> Tensor:
    """Several such sums at once, each of the pieces in one row; as a 1D tensor.

    Communication: as one sum, times the number of rows.
    """
    held = [[piece for piece in row if piece.numel()] for row in rows]
    zero = torch.zeros((), dtype=torch.float64, device=home.device)
    most = [torch.stack([zero, *(x.abs().amax().double() for x in row)]).amax() for row in held]
    most = collect(home.partition, torch.stack(most), "norm").amax(0)
    # A number divided by its mantissa, below 1, is a power of two above it.
    units = torch.where(most > 0, most / torch.frexp(most).mantissa, 1.0)
    here = [_digits(row, unit) for row, unit in zip(held, units.unbind(), strict=True)]
    total = torch.zeros_like(most)
    for digit in reversed(collect(home.partition, torch.stack(here), "norm").sum(0).unbind(1)):
        total = (total + digit) / 2.0**_BITS
    return torch.where(most.isfinite(), total * units * units, most)


def _digits(pieces: Sequence[Tensor], unit: Tensor) -> Tensor:
    """The sum of squares as integers of 24 bits, the highest first, of elements below the unit."""
    digits = torch.zeros(_DIGITS, dtype=torch.int64, device=unit.device)
    for piece in pieces:
        for block in piece.split(_BLOCK):
            rest = (block.double() / unit).square_()
            for digit in digits.unbind():
                rest.mul_(2.0**_BITS)
                whole = rest.floor()
                digit += whole.long().sum()
                rest.sub_(whole)
    return digits

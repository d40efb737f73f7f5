"""Parts of a column that give the bits of the whole one.

[Note: lines] torch's kernels work on vectors of elements from the beginning of a tensor on, and on
the last few one by one, which may round in another way. So the bits of a step would depend on where
a column is cut. A *line* is 64 elements from the beginning of the column on, a multiple of every
vector. A part of a column is stepped line by line as in memory: a line that a cut divides is
computed in a small tensor that has its length, with the elements in their places. Columns whose
moments are codes are taken to end with a whole line, so that all of their elements are stepped as
those of lines are: their bits do not depend on where buckets and shards end.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor

from mics_fn import _torch

LINE = 64  # elements


class Stretch(NamedTuple):
    """Where a column lies in its run, in elements; it is stepped as if it went on by `more`."""

    start: int
    stop: int
    more: int = 0

    @property
    def full(self) -> int:
        """The end that it is stepped with."""
        return self.stop + self.more


class Part(NamedTuple):
    """A part of a column, as tensors to step on; `finish` takes the results where they belong."""

    tensors: tuple[Tensor, ...]
    finish: Callable[[], None]


def parts_of(
    stretch: Stretch, low: int, high: int, cut: Callable[[int, int], Sequence[Tensor]], written: int
) -> Iterator[Part]:
    """What lies of a column between two elements of its run.

    Args:
      stretch: the column.
      low, high: the range of the run.
      cut: gives the tensors of the column between two elements of the run.
      written: how many of them, from the first on, are written.
    """
    start, stop = max(low, stretch.start), min(high, stretch.stop)
    if start >= stop:
        return
    inner = stretch.start - (stretch.start - start) // LINE * LINE  # rounded up to whole lines
    until = stop if stop == stretch.full else stop - (stop - stretch.start) % LINE
    bounds = sorted({start, stop, min(inner, stop), max(until, start)})
    for a, b in pairwise(bounds):
        if (a, b) == (inner, until):
            yield Part(tuple(cut(a, b)), _nothing)
        else:
            yield _divided(stretch, a, cut(a, b), written)


def _divided(stretch: Stretch, start: int, given: Sequence[Tensor], written: int) -> Part:
    """A part of one line, in a tensor of the length of that line."""
    begin = start - (start - stretch.start) % LINE
    length, at, count = min(LINE, stretch.full - begin), start - begin, given[0].numel()
    whole = [x.new_zeros(length) for x in given]
    mine = [x.narrow(0, at, count) for x in whole]
    _torch.foreach_copy(mine, list(given))

    def finish() -> None:
        _torch.foreach_copy(list(given[:written]), mine[:written])

    return Part(tuple(whole), finish)


def _nothing() -> None:
    """Results are where they belong."""

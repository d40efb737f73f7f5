"""Which writer holds which elements of a tensor, as arithmetic; no rank plans for the others.

[Note: lines and cells] The tensors of a checkpoint lie on *lines*. A line is a bucket: the padded
flat buffer of its leaves, cut into p chunks, of which each of the r replicas writes an equal part.
So a line of n = p r equal *cells* has one cell for each rank, and each element is in one cell.
Everything that ranks hold in full lies on one more line, in bytes, which all ranks share. Where a
tensor begins on its line, and how long the line is, is all that has to be written down: which
writers have a range of a tensor follows from it, for the ranks that wrote as for those that read,
however many they are.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch

from mics_fn.init import DTYPES

BYTES_ALIGN = 16  # of a tensor on the line of bytes; a multiple of the size of every dtype
_AS_BYTES = ("complex32", "complex64", "complex128", "float4_e2m1fn_x2")
_AS_BYTES += ("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
# By name the dtypes that are saved; those that a file has no word for are saved as their bytes.
SAVED = {x: getattr(torch, x) for x in (*DTYPES.values(), *_AS_BYTES) if hasattr(torch, x)}


def in_file(dtype: torch.dtype, numel: int) -> tuple[torch.dtype, int]:
    """As which dtype, and as how many elements, a file has elements of a dtype.

    >>> in_file(torch.float32, 3), in_file(torch.complex128, 3)
    ((torch.float32, 3), (torch.uint8, 48))
    """
    as_bytes = f"{dtype}".removeprefix("torch.") in _AS_BYTES
    return (torch.uint8, numel * dtype.itemsize) if as_bytes else (dtype, numel)


@dataclass(frozen=True)
class Line:
    """A buffer that ranks write together.

    Args:
      length: its elements, or its bytes for tensors that ranks hold in full; a multiple of `parts`.
      parts: equal chunks.
      copies: ranks that share a chunk.
      home: number of the groups whose ranks these are; see `Manifest`.
    """

    length: int
    parts: int
    copies: int
    home: int = 0

    @property
    def cells(self) -> int:
        """Number of cells."""
        return self.parts * self.copies

    def bounds(self, cell: int) -> tuple[int, int]:
        """Where a cell begins and ends.

        >>> [Line(12, 2, 4).bounds(cell) for cell in range(8)][2:6]
        [(3, 4), (4, 6), (6, 7), (7, 9)]
        """
        part, copy = divmod(cell, self.copies)
        chunk = self.length // self.parts
        low = part * chunk + chunk * copy // self.copies
        return low, part * chunk + chunk * (copy + 1) // self.copies

    def cell_at(self, position: int) -> int:
        """The cell that has a position.

        >>> [Line(12, 2, 4).cell_at(position) for position in (3, 4, 5, 6)]
        [2, 3, 3, 4]
        """
        chunk = self.length // self.parts
        part, rest = divmod(position, chunk)
        return part * self.copies + ((rest + 1) * self.copies - 1) // chunk


@dataclass(frozen=True)
class Stored:
    """A tensor of a checkpoint.

    Args:
      name: its path in the state.
      dtype: the dtype of its elements.
      shape: its full shape.
      line: number of its line; -1 if each rank keeps its own value in full.
      offset: where it begins on the line.
      unit: how much of the line an element takes: 1, or its size on the line of bytes.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    line: int = -1
    offset: int = 0
    unit: int = 1

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)


class Slice(NamedTuple):
    """Elements of a flattened tensor that one writer holds."""

    cell: int
    start: int
    stop: int


def within(tensor: Stored, line: Line, cell: int) -> Slice | None:
    """What a cell holds of a tensor; None if it holds nothing.

    >>> line, tensor = Line(16, 2, 2), Stored("w", torch.float32, (3, 3), 0, offset=2)
    >>> [within(tensor, line, cell) for cell in range(3)][1:]
    [Slice(cell=1, start=2, stop=6), Slice(cell=2, start=6, stop=9)]
    """
    low, high = line.bounds(cell)
    start = max(0, -(-(low - tensor.offset) // tensor.unit))
    stop = min(tensor.numel, -(-(high - tensor.offset) // tensor.unit))
    return Slice(cell, start, stop) if start < stop else None


def covering(tensor: Stored, line: Line, start: int, stop: int) -> Iterator[Slice]:
    """The slices, whole, that have elements `start` to `stop` of a tensor.

    >>> list(covering(Stored("w", torch.float32, (9,), 0, offset=2), Line(16, 2, 2), 5, 7))
    [Slice(cell=1, start=2, stop=6), Slice(cell=2, start=6, stop=9)]
    """
    while start < stop:
        # An element of the line of bytes belongs to the cell in which it begins.
        cell = line.cell_at(tensor.offset + start * tensor.unit)
        found = within(tensor, line, cell)
        if found is None or found.stop <= start:
            raise ValueError(f"{tensor.name} does not lie on its line")
        yield found
        start = found.stop


def line_of_bytes(tensors: Sequence[tuple[str, torch.dtype, tuple[int, ...]]], ranks: int) -> Line:
    """The line of tensors that all ranks hold in full; see `places_in_bytes`."""
    end = sum(_padded(prod(shape) * dtype.itemsize) for _, dtype, shape in tensors)
    whole = ranks * BYTES_ALIGN
    return Line(max(whole, -(-end // whole) * whole), ranks, 1)


def places_in_bytes(
    tensors: Sequence[tuple[str, torch.dtype, tuple[int, ...]]], line: int
) -> list[Stored]:
    """Where tensors that all ranks hold in full lie on their line, one after the other."""
    found, end = [], 0
    for name, dtype, shape in tensors:
        found.append(Stored(name, dtype, shape, line, end, dtype.itemsize))
        end += _padded(prod(shape) * dtype.itemsize)
    return found


def _padded(nbytes: int) -> int:
    return -(-nbytes // BYTES_ALIGN) * BYTES_ALIGN

"""A program over memory: the ops that made a model, and which of them a piece of memory needs.

[Note: tape] While a model is recorded no op runs. What is kept of a tensor is where it lies: a
`View` of a cell, which is a piece of memory (what torch calls a storage). Views of views, `.data`
and swaps of parameters then need no care: they are other views of cells. Only ops that write are
on the tape. To know what a cell holds, walk back from its last write, and on to what each of those
ops read. A write over all of a cell that reads nothing of it ends the walk, so what a module's own
reset drew before somebody initialised it again is needed by nobody.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mics_fn import _torch


class NotRecorded(Exception):
    """A model's construction can not be recorded, or not be replayed; says at what it failed.

    Args:
      text: what, where.
      cell: what was being made.
    """

    def __init__(self, text: str, cell: int | None = None) -> None:
        super().__init__(text)
        self.cell = cell


@dataclass(frozen=True)
class View:
    """A tensor as a place in memory; stride and offset in elements."""

    cell: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def is_dense(self) -> bool:
        """Whether its elements lie side by side, in any order of dims, none of them twice."""
        expected = 1
        for stride, size in sorted(zip(self.stride, self.shape, strict=True)):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True


@dataclass
class Cell:
    """A piece of memory.

    Args:
      device: where it lies.
      nbytes: its length.
      value: what it holds before the first write, where it came from outside the tape.
      outside: whether code outside the tape can see it, so that no write may be put off.
      writes: the ops that write to it, ascending.
    """

    device: torch.device
    nbytes: int
    value: Tensor | None = None
    outside: bool = False
    writes: list[int] = field(default_factory=list)


class Op(NamedTuple):
    """One op that writes memory."""

    func: Any  # an OpOverload
    named: dict[str, Any]  # its arguments by name, tensors as `View`
    made: list[View | None]  # by output: a view of a cell that the op made, or None
    reads: tuple[int, ...]  # cells
    writes: dict[int, bool]  # cells, and whether all that was there before is lost
    generator: torch.Generator | None = None  # of random ops
    start: int | Tensor | None = None  # its state before: as after that op, or these bytes

    @property
    def cells(self) -> tuple[int, ...]:
        """All that it touches."""
        return (*self.reads, *self.writes)


class Part(NamedTuple):
    """The ops that some cells need."""

    ops: list[int]  # ascending
    partial: set[int]  # cells that these ops write to, but not all that they would hold


class Tape:
    """Cells and ops, in the order in which they were made.

    Example:
      >>> tape, cpu = Tape(), torch.device("cpu")
      >>> a, b = tape.cell(cpu, 8), tape.cell(cpu, 8)
      >>> for reads, writes in [((), {a: True}), ((a,), {a: False}), ((a,), {b: True})]:
      ...     tape.add(Op(None, {}, [], reads, writes))
      >>> tape.add(Op(None, {}, [], (), {a: True}))
      >>> tape.needed([b]).ops, tape.needed([a]).ops
      ([0, 1, 2], [3])
    """

    def __init__(self) -> None:
        self.cells: list[Cell] = []
        self.ops: list[Op] = []
        self.randoms: list[int] = []  # ops that draw random numbers
        self.finals: list[tuple[torch.Generator, int | Tensor]] = []  # states after the last op

    def cell(self, device: torch.device, nbytes: int, **fields: Any) -> int:
        """The number of a new cell."""
        self.cells.append(Cell(device, nbytes, **fields))
        return len(self.cells) - 1

    def add(self, op: Op) -> None:
        """Append an op."""
        index = len(self.ops)
        self.ops.append(op)
        for cell in op.writes:
            self.cells[cell].writes.append(index)
        if op.generator is not None:
            self.randoms.append(index)

    def needed(
        self, cells: Iterable[int], end: int | None = None, have: Mapping[int, int] | None = None
    ) -> Part | None:
        """The ops before `end` that what the cells then hold follows from.

        Args:
          cells: whose content is wanted.
          end: before which op; default after the last.
          have: cells whose content is there: as it was before which op.

        Returns:
          The ops; None if one of `have` is too new: an op among them needs what it held before.
        """
        walk = _Walk(self, have or {})
        for cell in cells:
            walk.want(cell, len(self.ops) if end is None else end)
        found, partial = [], set()
        while walk.queue:
            index = -heappop(walk.queue)
            if found and found[-1] == index:  # it writes to several of the cells
                continue
            found.append(index)
            op = self.ops[index]
            for cell, all_of_it in op.writes.items():
                walk.failed |= index < walk.have.get(cell, 0)  # it would be done twice
                if cell not in walk.live:
                    partial.add(cell)
                elif all_of_it:
                    walk.live.discard(cell)
                else:
                    walk.push(cell, index)
            for cell in op.reads:
                walk.want(cell, index)
        return None if walk.failed else Part(found[::-1], partial)

    def inputs_of(self, index: int) -> Part:
        """The ops that an op's inputs follow from, and the op itself."""
        part = self.needed(self.ops[index].reads, index)
        ops, partial = part or ([], set())  # without `have` there is always an answer
        return Part([*ops, index], partial | set(self.ops[index].writes))


class _Walk:
    """A walk back over a tape: which cells matter, and the ops to look at, the latest first."""

    def __init__(self, tape: Tape, have: Mapping[int, int]) -> None:
        self.tape, self.have = tape, have
        self.live: set[int] = set()
        self.queue: list[int] = []
        self.failed = False

    def want(self, cell: int, before: int) -> None:
        """A cell matters, as it was before an op."""
        writes = self.tape.cells[cell].writes
        if cell in self.have:
            place = bisect_left(writes, before)
            self.failed |= bisect_left(writes, self.have[cell]) > place
        if cell not in self.live:
            self.live.add(cell)
            self.push(cell, before)

    def push(self, cell: int, before: int) -> None:
        """Look at the last write before an op, unless what it left is there."""
        writes = self.tape.cells[cell].writes
        place = bisect_left(writes, before)
        if place and writes[place - 1] >= self.have.get(cell, 0):
            heappush(self.queue, -writes[place - 1])


def geometry(x: Tensor) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Shape, strides and offset, in elements."""
    return tuple(x.shape), x.stride(), int(x.storage_offset())


def place(x: Tensor) -> tuple:
    """The same for tensors that are the same memory, seen alike."""
    return _torch.storage_id(x), *geometry(x)

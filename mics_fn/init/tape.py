"""A program over memory: the ops that made a model, and which of them a tensor needs.

[Note: tape] While a model is recorded no op runs. What is kept of a tensor is a `View`: where it
lies in a storage, the piece of memory that torch calls by this name. Views of views, `.data` and
swaps of parameters then need no special care, because each of them is another view of a storage.
Only ops that write are on the tape. To learn what a storage holds, walk back from the last write to
it, and from there to whatever each of those ops read. A write that covers a whole storage and reads
nothing of it ends the walk, so the draws of a module's own reset are skipped when other
code initialises it again.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any, NamedTuple

import torch
from torch import Tensor


class NotRecorded(Exception):
    """The construction of a model cannot be recorded or replayed; the text says where it failed.

    Args:
      text: what failed, and where.
      storage: what was being made.
    """

    def __init__(self, text: str, storage: int | None = None) -> None:
        super().__init__(text)
        self.storage = storage


@dataclass(frozen=True)
class View:
    """A tensor as a place in a storage of the tape; stride and offset count elements."""

    storage: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @classmethod
    def of(cls, x: Tensor, storage: int) -> "View":
        """The view that a tensor is of the storage with this number."""
        return cls(storage, tuple(x.shape), x.stride(), int(x.storage_offset()), x.dtype)

    def on(self, memory: Any) -> Tensor:
        """The tensor that this view is of a storage of torch."""
        empty = torch.empty(0, dtype=self.dtype, device=memory.device)
        return empty.set_(memory, self.offset, self.shape, self.stride)

    def covers(self, nbytes: int) -> bool:
        """Whether its elements fill so many bytes, in any order of dims, and none of them twice."""
        expected = 1
        for stride, size in sorted(zip(self.stride, self.shape, strict=True)):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return expected * self.dtype.itemsize == nbytes


@dataclass
class Storage:
    """A piece of memory on the tape.

    Args:
      device: where it lies.
      nbytes: its length.
      value: what it holds before the first write, if it was made outside the tape.
      outside: whether code outside the tape can see it, so that no write to it may be delayed.
      writes: the indices of the ops that write to it, ascending.
    """

    device: torch.device
    nbytes: int
    value: Tensor | None = None
    outside: bool = False
    writes: list[int] = field(default_factory=list)


class Op(NamedTuple):
    """One op that writes memory; storages are given by their numbers."""

    func: Any  # an OpOverload
    named: dict[str, Any]  # its arguments by name, tensors as `View`
    made: list[View | None]  # one per output: a view of a storage that the op made, or None
    reads: tuple[int, ...]
    writes: dict[int, bool]  # by storage: whether everything that was there before is lost
    generator: torch.Generator | None = None  # of a random op
    start: int | Tensor | None = None  # the generator's state before: that after an op, or bytes

    @property
    def storages(self) -> tuple[int, ...]:
        """All storages that it reads or writes."""
        return (*self.reads, *self.writes)


class Part(NamedTuple):
    """The ops that some storages need."""

    ops: list[int]  # ascending
    partial: set[int]  # storages that these ops write to without making all that they would hold


class Tape:
    """Storages and ops, in the order in which they were made.

    Example:
      >>> tape, cpu = Tape(), torch.device("cpu")
      >>> a, b = tape.new_storage(cpu, 8), tape.new_storage(cpu, 8)
      >>> for reads, writes in [((), {a: True}), ((a,), {a: False}), ((a,), {b: True})]:
      ...     tape.add(Op(None, {}, [], reads, writes))
      >>> tape.add(Op(None, {}, [], (), {a: True}))
      >>> tape.needed([b]).ops, tape.needed([a]).ops
      ([0, 1, 2], [3])
    """

    def __init__(self) -> None:
        self.storages: list[Storage] = []
        self.ops: list[Op] = []
        self.randoms: list[int] = []  # ops that draw random numbers
        self.finals: list[tuple[torch.Generator, int | Tensor]] = []  # states after the last op

    def new_storage(self, device: torch.device, nbytes: int, **fields: Any) -> int:
        """Add a storage; returns its number."""
        self.storages.append(Storage(device, nbytes, **fields))
        return len(self.storages) - 1

    def add(self, op: Op) -> None:
        """Append an op."""
        index = len(self.ops)
        self.ops.append(op)
        for storage in op.writes:
            self.storages[storage].writes.append(index)
        if op.generator is not None:
            self.randoms.append(index)

    def needed(
        self, storages: Iterable[int], end: int | None = None, have: Mapping[int, int] | None = None
    ) -> Part | None:
        """The ops that determine what some storages hold.

        Args:
          storages: whose content is wanted.
          end: the content as it is before this op; default after the last one.
          have: storages whose content is known, each as it was before the op of this index.

        Returns:
          The ops, or None if the content in `have` is too new: an op among them needs what the
          storage held before.
        """
        walk = _Walk(self, have or {})
        for storage in storages:
            walk.want(storage, len(self.ops) if end is None else end)
        found, partial = [], set()
        while walk.queue:
            index = -heappop(walk.queue)
            if found and found[-1] == index:  # it writes to several of the storages
                continue
            found.append(index)
            op = self.ops[index]
            for storage, replaced in op.writes.items():
                walk.failed |= index < walk.have.get(storage, 0)  # it would be done twice
                if storage not in walk.live:
                    partial.add(storage)
                elif replaced:
                    walk.live.discard(storage)
                else:
                    walk.push(storage, index)
            for storage in op.reads:
                walk.want(storage, index)
        return None if walk.failed else Part(found[::-1], partial)

    def inputs_of(self, index: int) -> Part:
        """An op, after the ops that determine its inputs."""
        part = self.needed(self.ops[index].reads, index)
        ops, partial = part or ([], set())  # without `have` there is always an answer
        return Part([*ops, index], partial | set(self.ops[index].writes))


class _Walk:
    """A walk back over a tape: which storages matter, and the ops to visit, the latest first."""

    def __init__(self, tape: Tape, have: Mapping[int, int]) -> None:
        self.tape, self.have = tape, have
        self.live: set[int] = set()
        self.queue: list[int] = []
        self.failed = False

    def want(self, storage: int, before: int) -> None:
        """Note that a storage matters as it was before an op."""
        writes = self.tape.storages[storage].writes
        if storage in self.have:
            place = bisect_left(writes, before)
            self.failed |= bisect_left(writes, self.have[storage]) > place
        if storage not in self.live:
            self.live.add(storage)
            self.push(storage, before)

    def push(self, storage: int, before: int) -> None:
        """Visit the last write before an op, unless its result is known."""
        writes = self.tape.storages[storage].writes
        place = bisect_left(writes, before)
        if place and writes[place - 1] >= self.have.get(storage, 0):
            heappush(self.queue, -writes[place - 1])

"""Sums of gradients that lie elsewhere than on the device: in host memory, or in files.

[Note: sums elsewhere] A bucket is reduced on the device, wherever its sum lies: the sum of earlier
passes comes to the part of the ring that the bucket has, the mean of hop 1 is added there by the
op that would add it in memory, and the sum goes back. So the bits are those of a sum in memory, and
what the device holds of all sums is a part of the ring. Copies have a queue of their own, on a
device a stream: they run beside backward, and beside the hops of other buckets. To and from files
a thread copies; on a device it is the host, which waits for the bucket.

The memory elsewhere belongs to the groups, and `release` gives it back to them for the next step,
as locking memory and making files take time.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from mics_fn import _device, _torch
from mics_fn.collectives import Steps, Task, mean_steps, scatter_steps
from mics_fn.deferred.packing import elements, free_slot, room_of, whole
from mics_fn.deferred.sum_of_passes import SumOfPasses
from mics_fn.groups import Comm, Slot
from mics_fn.offload import DEVICE, Place, Scratch, Stored, Where, copied_from, copied_into, empty
from mics_fn.shards import BucketUse, Opened, split_chunk

_PATIENCE = 16  # memory of a size that so many steps have not wanted is let go


class PlacedSum(SumOfPasses):
    """`SumOfPasses` of which some buckets lie elsewhere; see [Note: sums elsewhere].

    Args:
      places: of these buckets, each with a leaf that stands for it in errors.
      host_bytes: of the `Where` that they come from.
      args: as for `SumOfPasses`.

    Raises:
      OffloadError: a file cannot be made, or the disk has not so much room.
    """

    def __init__(self, places: Mapping[int, tuple[Place, str]], host_bytes: int, *args: Any):
        self._places, self._host_bytes = places, host_bytes
        super().__init__(*args)
        for pools in {id(x): x for x in (self.uses[i].hierarchy.pools for i in places)}.values():
            pools.sums.setdefault("free", _Free()).begin()
        self._away = {index: self._made_at(index, *found) for index, found in places.items()}

    def _made_at(self, index: int, place: Place, leaf: str) -> "_SumElsewhere":
        bucket = self.uses[index].bucket
        numel = bucket.numel // self.levels_now(self.uses[index].route).size
        size = max(self.dtype_of(bucket).itemsize, bucket.dtype.itemsize)
        count = (self.micro_steps - 1).bit_length() if self._in_tree else 1
        away = _SumElsewhere(self.uses[index], place, leaf, self._host_bytes)
        away.reserve(numel * size, max(1, count))
        return away

    def alone(self, index: int) -> bool:
        return index not in self._places and super().alone(index)

    def stays_there(self, index: int) -> bool:
        return index not in self._places and super().stays_there(index)

    def elsewhere(self, index: int) -> bool:
        return index in self._places

    def target(self, index: int, values: Sequence[Tensor | None]) -> Tensor | None:
        return None if index in self._places else super().target(index, values)

    def in_slot(self, index: int, slot: Slot) -> Tensor | None:
        return self._area(index, slot, 0) if slot.more and self.has_target else None

    def sum_sizes(self, index: int) -> tuple[int, ...]:
        if index not in self._places:
            return ()
        use, size = self.uses[index], self.dtype_of(self.uses[index].bucket).itemsize
        mine = use.bucket.numel // self.levels_now(use.route).size * size
        if self._in_tree:  # what was added up last, and what comes
            return mine, mine
        late = self.late_levels(use.route).size > 1
        return (mine, use.bucket.chunk * size) if late else (mine,)

    def _area(self, index: int, slot: Slot, number: int) -> Tensor:
        """One of the buffers of `sum_sizes`."""
        use = self.uses[index]
        numel = use.bucket.numel // self.levels_now(use.route).size
        return elements(slot.more[number], numel, self.dtype_of(use.bucket))

    def late_target(self, use: BucketUse, dtype: torch.dtype, slot: Slot) -> Tensor:
        if not slot.more:
            return super().late_target(use, dtype, slot)
        return elements(slot.more[1], use.bucket.chunk, dtype)

    def late_comms(self, index: int, out: Tensor) -> tuple[list[Comm], int]:
        late, levels = super().late_comms(index, out)
        if index not in self._places:
            return late, levels
        own, number = self._away[index].comm, self.passes
        if self._in_tree:
            ones = (number ^ (number + 1)).bit_length() - 1  # at the end of the number, in binary
            late = [*late, *[own] * ones]
        elif number:
            late = [own, *late]
        return [*late, own], len(late) + 1  # the slot is in use to the end

    def steps(self, index: int, full: Tensor, out: Tensor, slot: Slot) -> Steps:
        """The steps of `SumOfPasses`, and the copies of the sum to the device and back."""
        if index not in self._places:
            return super().steps(index, full, out, slot)
        use, away = self.uses[index], self._away[index]
        added = self._added_in_tree if self._in_tree else self._added
        add = added(index, out, slot)  # which reads now what it needs, since the steps run later
        dtype = use.bucket.dtype if self.last else self.dtype_of(use.bucket)
        now, bucket = self.levels_now(use.route), use.bucket

        def steps() -> Steps:
            spare = whole(slot.second, bucket.reduce)
            yield from scatter_steps(now, full, out, spare, bucket.hop1)
            total, depth = yield from add()
            self.totals[index] = []  # known, and elsewhere
            yield away.write(total, dtype, depth)
            free_slot(slot)
            return total

        return steps()

    def _added(self, index: int, out: Tensor, slot: Slot) -> Callable[[], Any]:
        """What comes between hop 1 and the way back: a sum, and in the last pass the mean."""
        use, number, last = self.uses[index], self.passes, self.last
        late, wire = self.late_levels(use.route), use.bucket.mean_wire

        def add() -> Any:
            self.totals.pop(index, None)
            if number:
                before = self._area(index, slot, 0)
                yield self._away[index].read(before)
                self.totals[index] = [before]
            (total,) = self._sum(index, [out], last)
            if late.size > 1:
                total = yield from self._late_steps(use, late, total, slot)
            if last:
                yield from mean_steps(use.replicas, total, wire, room_of(slot, total, wire))
            return total, 0

        return add

    def _added_in_tree(self, index: int, out: Tensor, slot: Slot) -> Callable[[], Any]:
        """`_added` for means in one tree: what `SumOfPasses._join` does in memory."""
        use, passes = self.uses[index], self.passes

        def add() -> Any:
            yield from mean_steps(use.replicas, out)
            total, number, depth = out, passes, passes.bit_count()
            while number % 2:
                number, depth = number // 2, depth - 1
                left = self._area(index, slot, depth % 2)
                yield self._away[index].read(left, depth)
                _torch.foreach_add([left], [total])
                _torch.foreach_div([left], 2)
                total = left
            return total, depth

        return add

    def pieces(self, index: int) -> list[Tensor]:
        """The pieces; of a bucket that lies elsewhere in new memory on the device, at each call."""
        if index not in self._places:
            return super().pieces(index)
        use = self.uses[index]
        chunk = self._away[index].brought(use.bucket.chunk, use.bucket.dtype)
        found = use.by_member(split_chunk(use.bucket, use.route.chunk, chunk))
        # Gradients that autograd gave are apart, and kernels round ends of long tensors otherwise.
        return [x.clone() for x in found] if use.alone else found

    def lying(self, index: int) -> list[Tensor]:
        if index not in self._places:
            return super().lying(index)
        use = self.uses[index]
        chunk = self._away[index].lying(use.bucket.chunk, use.bucket.dtype)
        return use.by_member(split_chunk(use.bucket, use.route.chunk, chunk))

    def release(self) -> None:
        """As in the base class, and give the memory elsewhere back."""
        super().release()
        for away in self._away.values():
            away.release()


class _Free:
    """Memory elsewhere that no step uses now; what many steps have not wanted is let go."""

    def __init__(self) -> None:
        self.files = WeakValueDictionary[str, Scratch]()  # by folder; kept by what lies in them
        self._rooms: dict[Any, list[Tensor]] = {}  # bytes, by their place and number
        self._wanted: dict[Any, int] = {}  # in which step each kind was last wanted
        self._steps = 0

    def begin(self) -> None:
        """Note that another step begins."""
        self._steps += 1
        for key in [k for k, last in self._wanted.items() if last + _PATIENCE < self._steps]:
            del self._rooms[key], self._wanted[key]

    def of(self, key: Any) -> list[Tensor]:
        """The free memory of a kind, as a list that the caller changes."""
        self._wanted[key] = self._steps
        return self._rooms.setdefault(key, [])


class _SumElsewhere:
    """Memory elsewhere for the sums of one bucket, by their depth, and the copies there and back.

    Args:
      use: the bucket.
      place: where.
      leaf: of the bucket, for errors.
      host_bytes: as for `Scratch`.
    """

    def __init__(self, use: BucketUse, place: Place, leaf: str, host_bytes: int) -> None:
        self._place, self._leaf, self._host_bytes = place, f"grads{leaf}", host_bytes
        self._home, self._free = use.home, use.hierarchy.pools.sums["free"]
        self.comm = use.hierarchy.sums_elsewhere
        self._rooms: list[Tensor] = []  # by depth: bytes
        self._key: Any = None  # of its memory in `_Free`

    def reserve(self, nbytes: int, count: int) -> None:
        """Take memory for so many sums, first what an earlier step has left."""
        self._key = self._place, nbytes
        free = self._free.of(self._key)
        while len(self._rooms) < count:
            self._rooms.append(free.pop() if free else self._made(nbytes))

    def _made(self, nbytes: int) -> Tensor:
        if self._place.kind == "host":
            return _device.host_buffer(nbytes, self._home.device)
        scratch = self._free.files.get(self._place.folder)
        if scratch is None:
            own = self._home.partition.ranks[self._home.partition.rank]
            folder, name = Path(self._place.folder), f"grads-rank{own}"
            scratch = Scratch(folder.absolute(), name, host_bytes=self._host_bytes)
            self._free.files[self._place.folder] = scratch
        kind = {"leaf": self._leaf, "device": self._home.device}
        return empty(scratch, (nbytes,), torch.uint8, **kind)

    def release(self) -> None:
        """Leave the memory to the next step."""
        if self._rooms:
            self._free.of(self._key).extend(self._rooms)
        self._rooms = []

    def lying(self, numel: int, dtype: torch.dtype, depth: int = 0) -> Tensor:
        """The sum of this depth, where it lies."""
        room: Any = self._rooms[depth]
        if isinstance(room, Stored):
            like = torch.empty(numel, dtype=dtype, device="meta")
            return Stored(room.extent, 0, like, room.device, room.leaf)
        return elements(room, numel, dtype)

    def write(self, total: Tensor, dtype: torch.dtype, depth: int = 0) -> Task:
        """The task that copies a sum there, in a dtype."""
        goal = self.lying(total.numel(), dtype, depth)
        return self._task("to", partial(_written, goal), total)

    def read(self, memory: Tensor, depth: int = 0) -> Task:
        """The task that brings a sum back to memory of its dtype."""
        return self._task(
            "from", partial(_read, self.lying(len(memory), memory.dtype, depth)), memory
        )

    def _task(self, way: str, parts: Callable[[Tensor], Iterator[None]], memory: Tensor) -> Task:
        op = f"the copy of the sum of {self._leaf} {way} {self._place}"
        return Task(self.comm, op, parts).to(memory)

    def brought(self, numel: int, dtype: torch.dtype) -> Tensor:
        """The sum at the end of the step, in new memory on the device."""
        memory = torch.empty(numel, dtype=dtype, device=self._home.device)
        for _ in _read(self.lying(numel, dtype), memory):
            pass
        return memory


def _written(goal: Any, memory: Tensor) -> Iterator[None]:
    if isinstance(goal, Stored):
        yield from copied_from(memory, goal)
        return
    # A copy between devices that also casts would cast on the host, which waits for it.
    goal.copy_(memory.to(goal.dtype), non_blocking=True)
    yield


def _read(source: Any, memory: Tensor) -> Iterator[None]:
    if isinstance(source, Stored):
        yield from copied_into(memory, source)
        return
    memory.copy_(source, non_blocking=True)
    yield


def places_of(where: Where, opened: Opened) -> dict[int, tuple[Place, str]]:
    """The buckets whose gradients lie elsewhere, with their places and a path of each.

    A bucket's gradients lie together, where those of its largest leaf should.
    """
    found = {}
    for index, use in enumerate(opened.uses):
        sizes = use.by_member(use.bucket.numels)
        if not use.bucket.trainable or not sizes or not use.bucket.chunk:
            continue
        leaf = opened.names(index)[sizes.index(max(sizes))]
        place = where.at(leaf).grads
        here = place.kind == "host" and not _device.is_async(use.home.device)
        if place != DEVICE and not here:  # on the CPU the host is the device
            found[index] = place, leaf
    return found

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
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from mics_fn import _device, tree
from mics_fn.collectives import Steps, Task, mean_steps, scatter_steps
from mics_fn.deferred.packing import elements, free_slot, room_of, whole
from mics_fn.deferred.sum_of_passes import SumOfPasses
from mics_fn.groups import Comm, Slot
from mics_fn.offload import DEVICE, Place, Scratch, Stored, Where, copied_from, copied_into, empty
from mics_fn.patterns import check_matched
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
        away = _SumElsewhere(self.uses[index], place, leaf, self._host_bytes)
        away.reserve(numel * size)
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
        return self._area(index, slot) if slot.more and self.has_target else None

    def sum_sizes(self, index: int) -> tuple[int, ...]:
        if index not in self._places:
            return ()
        use, size = self.uses[index], self.dtype_of(self.uses[index].bucket).itemsize
        mine = use.bucket.numel // self.levels_now(use.route).size * size
        late = self.late_levels(use.route).size > 1
        return (mine, use.bucket.chunk * size) if late else (mine,)

    def _area(self, index: int, slot: Slot) -> Tensor:
        """The first of the buffers of `sum_sizes`."""
        use = self.uses[index]
        numel = use.bucket.numel // self.levels_now(use.route).size
        return elements(slot.more[0], numel, self.dtype_of(use.bucket))

    def late_target(self, use: BucketUse, dtype: torch.dtype, slot: Slot) -> Tensor:
        if not slot.more:
            return super().late_target(use, dtype, slot)
        return elements(slot.more[1], use.bucket.chunk, dtype)

    def late_comms(self, index: int, out: Tensor) -> tuple[list[Comm], int]:
        late, levels = super().late_comms(index, out)
        if index not in self._places:
            return late, levels
        own = self._away[index].comm
        if self.passes:
            late = [own, *late]
        return [*late, own], len(late) + 1  # the slot is in use to the end

    def steps(self, index: int, full: Tensor, out: Tensor, slot: Slot) -> Steps:
        """The steps of `SumOfPasses`, and the copies of the sum to the device and back."""
        if index not in self._places:
            return super().steps(index, full, out, slot)
        use, away, bucket = self.uses[index], self._away[index], self.uses[index].bucket
        number, last = self.passes, self.last  # read now, since the steps run later
        dtype = bucket.dtype if last else self.dtype_of(bucket)
        now, late, wire = self.levels_now(use.route), self.late_levels(use.route), bucket.mean_wire

        def steps() -> Steps:
            spare = whole(slot.second, bucket.reduce)
            yield from scatter_steps(now, full, out, spare, bucket.hop1)
            self.totals.pop(index, None)
            if number:
                before = self._area(index, slot)
                yield away.read(before)
                self.totals[index] = [before]
            (total,) = self._sum(index, [out], last)
            if late.size > 1:
                total = yield from self._late_steps(use, late, total, slot)
            if last:
                yield from mean_steps(use.replicas, total, wire, room_of(slot, total, wire))
            self.totals[index] = []  # known, and elsewhere
            yield away.write(total, dtype)
            free_slot(slot)
            return total

        return steps()

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
    """Memory elsewhere for the sum of one bucket, and the copies there and back.

    Args:
      use: the bucket.
      place: where.
      leaf: of the bucket, for errors.
      host_bytes: as for `Scratch`.
    """

    def __init__(self, use: BucketUse, place: Place, leaf: str, host_bytes: int) -> None:
        self._place, self._leaf, self._host_bytes = place, tree.join("grads", leaf), host_bytes
        self._home, self._free = use.home, use.hierarchy.pools.sums["free"]
        self.comm = use.hierarchy.sums_elsewhere
        self._room: Any = None  # its bytes
        self._key: Any = None  # of its memory in `_Free`

    def reserve(self, nbytes: int) -> None:
        """Take memory for the sum, first what an earlier step has left."""
        self._key = self._place, nbytes
        free = self._free.of(self._key)
        self._room = free.pop() if free else self._made(nbytes)

    def _made(self, nbytes: int) -> Tensor:
        if self._place.kind == "host":
            return _device.host_buffer(nbytes, self._home.device)
        scratch = self._free.files.get(self._place.folder)
        if scratch is None:
            own = self._home.partition.ranks[self._home.partition.rank]
            folder, name = self._place.folder, f"grads-rank{own}"
            scratch = self._free.files[folder] = Scratch(folder, name, host_bytes=self._host_bytes)
        kind = {"leaf": self._leaf, "device": self._home.device}
        return empty(scratch, (nbytes,), torch.uint8, **kind)

    def release(self) -> None:
        """Leave the memory to the next step."""
        if self._room is not None:
            self._free.of(self._key).append(self._room)
        self._room = None

    def lying(self, numel: int, dtype: torch.dtype) -> Tensor:
        """The sum, where it lies."""
        room = self._room
        if isinstance(room, Stored):
            like = torch.empty(numel, dtype=dtype, device="meta")
            return Stored(room.extent, 0, like, room.device, room.leaf)
        return elements(room, numel, dtype)

    def write(self, total: Tensor, dtype: torch.dtype) -> Task:
        """The task that copies a sum there, in a dtype."""
        goal = self.lying(total.numel(), dtype)
        return self._task("to", partial(_written, goal), total)

    def read(self, memory: Tensor) -> Task:
        """The task that brings the sum back to memory of its dtype."""
        return self._task("from", partial(_read, self.lying(len(memory), memory.dtype)), memory)

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
    check_matched("GradSum: where", where.patterns, tree.spec_paths(opened.spec))
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

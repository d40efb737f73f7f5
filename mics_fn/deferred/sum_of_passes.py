"""The gradients of a step on their way to sums: what `GradSum` does with each of its passes.

[Note: in the memory of parameters] Where `Trainer` keeps all parameters, memory is fullest when the
last backward pass begins: everything is gathered. From then on a bucket that has its gradients is
of no use, and has just the size of what hop 1 packs. So they are packed there, and where nothing is
added and dtypes agree their mean stays there until the end of the step: neither the ring nor the
pool of sums needs memory for it. Beside that there is what arrives from other ranks, and gradients
in full while backward makes them.

An op that runs later, such as that of a hook or of a detached parameter, finds the bucket dropped.
It is fetched again once all ranks have said that they need it, and from the next run on it stays.
If some rank does not need it, all raise DesyncError; `keep_all()` keeps it from the first run on.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mics_fn import _torch, spans
from mics_fn.collectives import (
    Codec,
    Steps,
    mean_bytes,
    mean_comms,
    mean_steps,
    scatter_comms,
    scatter_steps,
)
from mics_fn.deferred.packing import elements, flat_pieces, free_slot, room_of, whole
from mics_fn.deferred.reduction import Reduction
from mics_fn.groups import Buffers, Comm, Route, Slot
from mics_fn.schedules import Run
from mics_fn.shards import Bucket, BucketUse, split_chunk

LetGo = Callable[[], Callable[[int], Tensor | None] | None]  # what a weak reference gives


class SumOfPasses(Reduction):
    """The gradients of all backward passes of a step: hop 1 of each, their mean, then hop 2.

    Args:
      uses, run: as for `Reduction`.
      micro_steps: the number of passes in the step.
      dtype: dtype of the sum; default the bucket's `accumulate`, which is at least float32.
      let_go: as `LiveBuckets.let_go`, if that is still there.
    """

    def __init__(
        self,
        uses: Sequence[BucketUse],
        run: Run,
        micro_steps: int,
        dtype: torch.dtype | None,
        let_go: LetGo,
    ) -> None:
        self.micro_steps, self._sum_dtype, self._let_go = micro_steps, dtype, let_go
        self.passes = 0  # that have ended
        self.totals: dict[int, list[Tensor]] = {}  # [chunk], or pieces without other ranks
        # What is given back at the end, with the kind that watchers are told.
        self._given: list[tuple[Buffers, Tensor, str]] = []
        super().__init__(uses, run)

    @property
    def last(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether this pass ends with hop 2."""
        return self.passes == self.micro_steps - 1

    @property
    def does(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """What ranks compare: those that accumulate more passes differ in the first already."""
        return f"reduction in pass {self.passes + 1} of {self.micro_steps}"

    def add(self, index: int, grads: Sequence[Tensor | None]) -> list[Tensor]:
        """As in the base class; see [Note: in the memory of parameters]."""
        if self.gets_room(index):
            let_go = self._let_go()
            room = None if let_go is None else let_go(index)
            if room is not None:
                self.own[index] = room.view(torch.uint8)
                self._give_back(self.uses[index].hierarchy.pools.fetched, room, "gathered")
        return super().add(index, grads)

    def _give_back(self, pool: Buffers, tensor: Tensor, kind: str) -> None:
        """Have memory in which gradients lie given back at the end of the step."""
        self._given.append((pool, tensor, kind))
        spans.holds(kind, (id(self), len(self._given)), tensor.nbytes)

    def end_pass(self) -> None:
        """Prepare for the next pass, once no bucket is missing."""
        super().end_pass()
        self.passes += 1

    def pieces(self, index: int) -> list[Tensor]:
        """A bucket's mean gradients, one per member, in the dtype of the shards."""
        use, dtype = self.uses[index], self.uses[index].bucket.dtype
        total = [t if t.dtype is dtype else t.to(dtype) for t in self.totals[index]]
        if self.alone(index):
            return total
        return use.by_member(split_chunk(use.bucket, use.route.chunk, total[0]))

    def elsewhere(self, index: int) -> bool:
        """Whether a bucket's sum lies elsewhere than on the device."""
        return False

    def lying(self, index: int) -> list[Tensor]:
        """`pieces` where they lie."""
        return self.pieces(index)

    def release(self) -> None:
        """Give the memory of the gradients back, for the next step."""
        for number, (buffers, tensor, kind) in enumerate(self._given, 1):
            buffers.give(tensor)
            spans.holds(kind, (id(self), number), 0)
        for index in self.totals:
            spans.holds("gradient shards", (id(self), -1 - index), 0)
        self._given, self.totals = [], {}

    def dtype_of(self, bucket: Bucket) -> torch.dtype:
        if self._sum_dtype is not None or self.micro_steps > 1:
            return self._sum_dtype or bucket.accumulate
        return torch.promote_types(bucket.dtype, bucket.reduce)  # nothing is added

    @property
    def has_target(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return not self.passes

    def levels_now(self, route: Route) -> Route:
        return route.split(route.late)[1]

    def late_levels(self, route: Route) -> Route:
        return route.split(route.late if self.last else 0)[0]

    def gets_room(self, index: int) -> bool:
        use, bucket = self.uses[index], self.uses[index].bucket
        sent = [x for x in (bucket.reduce, bucket.mean_wire) if isinstance(x, torch.dtype)]
        fits = max(dtype.itemsize for dtype in sent) <= bucket.compute.itemsize
        moves = self.levels_now(use.route).size > 1
        return self.last and moves and fits and self._run.lets_go(index)

    def stays_there(self, index: int) -> bool:
        use = self.uses[index]
        one = self.micro_steps == 1 and self.late_levels(use.route).size == 1
        kept = self.dtype_of(use.bucket) == use.bucket.reduce
        rounds = isinstance(use.bucket.hop2, torch.dtype)  # hop 2 sends a copy, which lies there
        return one and kept and not (rounds and use.replicas.size > 1)

    def target(self, index: int, values: Sequence[Tensor | None]) -> Tensor | None:
        use = self.uses[index]
        bucket, numel = use.bucket, use.bucket.numel // self.levels_now(use.route).size
        if not self.has_target:
            return None
        if index in self.own and self.stays_there(index):
            return elements(self.own[index], numel, bucket.reduce)
        return self._take(use, (numel,), self.dtype_of(bucket))

    def _take(self, use: BucketUse, shape: tuple[int], dtype: torch.dtype) -> Tensor:
        """Memory for a sum until the end of the step.

        If it went back earlier, the number of chunks would depend on timing.
        """
        pool = use.hierarchy.pools.chunks
        taken = pool.take(shape, dtype, use.hierarchy.device, exact=True)
        self._give_back(pool, taken, "gradient shards")
        return taken

    def late_target(self, use: BucketUse, dtype: torch.dtype, slot: Slot) -> Tensor:
        """Memory for the result of the late levels."""
        return self._take(use, (use.bucket.chunk,), dtype)

    def handed_out(self, use: BucketUse, out: Tensor | None) -> list[Tensor]:
        return []

    def add_alone(self, index: int, values: Sequence[Tensor | None]) -> list[Tensor]:
        use = self.uses[index]
        # torch may give one tensor as two gradients, so a sum needs memory of its own.
        written = self.micro_steps > 1 and self.has_target
        copy = written or self._divisor(use) != 1
        pieces = flat_pieces(use, values, self.dtype_of(use.bucket), copy=copy)
        total = self._sum(index, pieces, self.last)
        spans.holds("gradient shards", (id(self), -1 - index), sum(x.nbytes for x in total))
        return []

    def copies(self, use: BucketUse) -> bool:
        # A codec differs from every dtype.
        other = self.dtype_of(use.bucket) != use.bucket.mean_wire
        return self.last and other and use.replicas.size > 1

    def coded_bytes(self, use: BucketUse) -> int:
        wire, numel = use.bucket.mean_wire, use.bucket.chunk
        if not isinstance(wire, Codec) or not self.copies(use):
            return 0
        return mean_bytes(wire, numel, use.replicas.size)

    def late_comms(self, index: int, out: Tensor) -> tuple[list[Comm], int]:
        use = self.uses[index]
        if not self.last:
            return [], 0
        late = self.late_levels(use.route)
        comms = scatter_comms(late, out)
        hop_2 = mean_comms(use.replicas, out, use.bucket.mean_wire)
        return [*comms, *hop_2], len(late.levels) + (len(hop_2) if self.copies(use) else 0)

    def steps(self, index: int, full: Tensor, out: Tensor, slot: Slot) -> Steps:
        """Hop 1 and the sum over passes; in the last pass also the late levels and hop 2."""
        use, last = self.uses[index], self.last  # read now, since the steps run later
        now, late, copies = (
            self.levels_now(use.route),
            self.late_levels(use.route),
            self.copies(use),
        )
        reduce, hop1, wire = use.bucket.reduce, use.bucket.hop1, use.bucket.mean_wire

        def steps() -> Steps:
            yield from scatter_steps(now, full, out, whole(slot.second, reduce), hop1)
            (total,) = self._sum(index, [out], last)
            if late.size > 1:
                total = yield from self._late_steps(use, late, total, slot)
                self.totals[index] = [total]
            if not copies:
                free_slot(slot)
            if last:
                yield from mean_steps(use.replicas, total, wire, room_of(slot, total, wire))
            if copies:
                free_slot(slot)
            return total

        return steps()

    def _late_steps(self, use: BucketUse, late: Route, total: Tensor, slot: Slot) -> Steps:
        """Hop 1 over the levels that wait for the last pass, in the memory of the slot."""
        bucket = use.bucket
        copy = elements(slot.first, total.numel(), bucket.reduce)
        full = total if total.dtype == bucket.reduce else copy.copy_(total)
        mine = self.late_target(use, total.dtype, slot)
        spare = whole(slot.second, bucket.reduce)
        yield from scatter_steps(late, full.view(late.size, -1), mine, spare, bucket.hop1)
        return mine

    def _sum(self, index: int, values: list[Tensor], last: bool) -> list[Tensor]:
        """Add to a bucket's total; in the last pass it becomes the mean over passes."""
        divisor, total = self._divisor(self.uses[index]), self.totals.setdefault(index, values)
        if total is not values:
            _torch.foreach_add(total, values)
        if last and values and divisor != 1:
            _torch.foreach_div(total, divisor)
        return total

    def _divisor(self, use: BucketUse) -> float:
        """The divisor of the sum; see [Note: mean over more ranks] in `groups.hierarchy`."""
        return self.micro_steps / use.route.grad_factor

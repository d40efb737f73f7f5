"""Reductions that overlap backward: hop 1 once a bucket's gradients are complete, then hop 2.

[Note: reduced in one order] The order in which buckets become complete may differ between ranks,
for example if only some of them use a parameter. Buckets are reduced in one order that is the same
everywhere: a bucket that is complete early waits for those before it, and one that never becomes
complete is reduced as zeros at the end. So no rank can wait for a reduction that another one does
not do. Where these reductions come between fetches is a part of the run, which compares it: see
[Note: the same order of use] in `schedules.run`.

[Note: gradients in flight] A bucket's gradients are packed into a part of a ring of memory, with
room for what arrives from other ranks. They stay there until hop 1 is done, late levels included,
and so does the copy that hop 2 sends in another dtype. The next bucket waits until its part of the
ring is free. The ring has room for one bucket on each level and one that is being packed, by the
median of their sizes, but not for more bytes than the budget for gathered parameters; the largest
bucket always fits. Where hop 2 sends codes it counts as two levels, on two communicators: while a
bucket's codes are gathered, the next one's are exchanged. So full gradients take the memory of a
few buckets, whatever the size of the model, and how much does not depend on timing.

[Note: in the memory of parameters] Where `Trainer` keeps all parameters, memory is fullest when the
last backward pass begins: everything is gathered. From then on a bucket that has its gradients is
of no use, and has just the size of what hop 1 packs. So they are packed there, and where nothing is
added and dtypes agree their mean stays there until the end of the step: neither the ring nor the
pool of sums needs memory for it. Beside that there is what arrives from other ranks, and gradients
in full while backward makes them.

An op that runs later, such as that of a hook or of a detached parameter, finds the bucket dropped.
It is fetched again once all ranks have said that they need it, and from the next run on it stays.
If some rank does not need it, all raise DesyncError; `keep_all()` keeps it from the first run on.

[Note: sums elsewhere] A bucket is reduced on the device, wherever its sum lies: the sum of earlier
passes comes to the part of the ring that the bucket has, the mean of hop 1 is added there by the
op that would add it in memory, and the sum goes back. So the bits are those of a sum in memory, and
what the device holds of all sums is a part of the ring. Copies have a queue of their own, on a
device a stream: they run beside backward, and beside the hops of other buckets. To and from files
a thread copies; on a device it is the host, which waits for the bucket.

The memory elsewhere belongs to the groups, and `release` gives it back to them for the next step,
as locking memory and making files take time.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from statistics import median_low
from typing import Any

import torch
from torch import Tensor

from mics_fn import _device, _torch, spans, tree
from mics_fn.checks import check_matched
from mics_fn.collectives import (
    Codec,
    Pending,
    Steps,
    Task,
    mean_bytes,
    mean_comms,
    mean_steps,
    push_all,
    scatter_comms,
    scatter_steps,
    spare_numel,
)
from mics_fn.groups import LEAST_RING, Buffers, Comm, Ring, Route, Slot, ring_bytes
from mics_fn.offload import DEVICE, FileTensor, Place, Where, empty_at, in_file, transfer
from mics_fn.schedules import Run
from mics_fn.shards import Bucket, BucketUse, Opened, dense, note_origins, pack_full, split_chunk

# Packing a bucket's gradients, the memory that they lie in, and who still uses that memory.


def elements(raw: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    """The first elements of some memory."""
    return raw[: numel * dtype.itemsize].view(dtype)


def whole(raw: Tensor, dtype: torch.dtype) -> Tensor:
    """All elements that fit in some memory."""
    return elements(raw, raw.numel() // dtype.itemsize, dtype)


def mean_buffer(slot: Slot, levels: int) -> Tensor:
    """The buffer in which a mean is after so many levels that are not coded.

    NCCL reads one of the two and writes the other, alternately. From the first coded level on,
    codes lie in one of them, and values stay in the other.
    """
    return (slot.first, slot.second)[levels % 2 if _device.is_async(slot.first.device) else 0]


def room_of(slot: Slot, total: Tensor, wire: torch.dtype | Codec) -> Tensor:
    """Memory for what hop 2 sends: the total may lie where gradients were packed, but no codes."""
    if isinstance(wire, Codec):
        return slot.second
    return elements(slot.first, total.numel(), wire)


def free_slot(slot: Slot) -> None:
    """On an accelerator, let the next user of a slot wait for the current stream."""
    device = slot.first.device
    if _device.is_async(device):
        slot.until = partial(_device.wait, device, _device.record(device))


def pack(use: BucketUse, values: Sequence[Tensor | None], out: Tensor) -> None:
    """Pack a bucket's full gradients, one per member, into `out`."""
    with spans.span("pack", use.bucket, device=out.device):
        pack_full(use.bucket, use.by_slot(values), device=out.device, out=out)
        note_origins(use.bucket, out)


def flat_pieces(
    use: BucketUse, values: Sequence[Tensor | None], dtype: torch.dtype, *, copy: bool
) -> list[Tensor]:
    """A bucket's full gradients as rows in a dtype, one per member; zeros for those missing."""
    device = use.home.device
    flat = [
        torch.zeros(n, dtype=dtype, device=device) if value is None else value.reshape(n)
        for n, value in zip(use.by_member(use.bucket.numels), values, strict=True)
    ]
    same = not copy and all(x.dtype is dtype for x in flat)
    return flat if same else [x.to(dtype, copy=copy) for x in flat]


def holds_in_full(key: Hashable, values: Sequence[Any]) -> None:
    """Tell watchers of full gradients that wait to be packed; of none, that they are gone."""
    if spans.watchers:
        nbytes = sum(x.nbytes for x in values if x is not None)
        spans.holds("gradients in full", key, nbytes)


# Memory in a ring for gradients in flight: see [Note: gradients in flight] in `reduction`.


class Lending:
    """What each bucket of a reduction needs of a ring, and how much is lent at a time."""

    has_target = True  # whether in this pass the mean has memory of its own
    uses: Sequence[BucketUse]
    order: list[int]
    own: dict[int, Tensor]  # bytes to pack a bucket in, where its parameters were
    _run: Run
    _rooms: dict[int, tuple[int, int]]  # by ring: its bytes, and the most parts

    # Methods that `Reduction`, `SumOfPasses` and `PlacedSum` override.

    def alone(self, index: int) -> bool:
        """Whether a bucket is not packed, as there are no other ranks."""
        return self.uses[index].alone

    def dtype_of(self, bucket: Bucket) -> torch.dtype:
        """The dtype of the result of hop 1."""
        return bucket.dtype

    def levels_now(self, route: Route) -> Route:
        """The levels that are reduced in every pass, as soon as a bucket is complete."""
        return route

    def outer_levels(self, route: Route) -> Route:
        """The levels that are reduced after `levels_now` in this pass."""
        return Route()

    def gets_room(self, index: int) -> bool:
        """Whether a bucket is packed where its parameters were, unless these stay after all."""
        return False

    def stays_there(self, index: int) -> bool:
        """Whether the mean of a bucket that was packed there stays there too."""
        return False

    def copies(self, use: BucketUse) -> bool:
        """Whether hop 2 follows in another dtype or in codes, so that it sends a copy."""
        return False

    def coded_bytes(self, use: BucketUse) -> int:
        """Bytes of memory that codes of hop 2 take in this pass."""
        return 0

    def sum_sizes(self, index: int) -> tuple[int, ...]:
        """Bytes of further buffers that a bucket needs in this pass, for its sum over passes."""
        return ()

    # Arithmetic with these.

    def slot_sizes(self, index: int, own: bool) -> tuple[int, ...]:
        """Bytes of the buffers that a bucket needs in this pass; 0 if there is nothing.

        Args:
          index: the bucket.
          own: whether it is packed where its parameters were.
        """
        use = self.uses[index]
        bucket, device, dtype = use.bucket, use.home.device, self.dtype_of(use.bucket)
        now, late = self.levels_now(use.route), self.outer_levels(use.route)
        mine, same = bucket.numel // now.size, dtype == bucket.reduce
        packed = [0]
        if now.size > 1:
            packed.append(bucket.numel * bucket.reduce.itemsize)
        elif not self.has_target:
            packed.append(bucket.numel * dtype.itemsize)
        if late.size > 1 and not same:
            packed.append(mine * bucket.reduce.itemsize)
        codes, wire, sums = self.coded_bytes(use), bucket.mean_wire, self.sum_sizes(index)
        if self.copies(use) and isinstance(wire, torch.dtype):
            packed.append(mine // late.size * wire.itemsize)
        direct = same and self.has_target and not (own and self.stays_there(index))
        how = {"wire": bucket.hop1, "itemsize": bucket.reduce.itemsize}
        arriving = max(
            spare_numel(now, bucket.numel, device, direct=direct, **how),
            spare_numel(late, mine, device, direct=same, **how),
        )
        second = max(arriving * bucket.reduce.itemsize, codes)
        return 0 if own else max(packed), second, *sums

    def _room(self, ring: Ring) -> tuple[int, int]:
        """Bytes of a ring, and the most parts of it at a time; see [Note: gradients in flight]."""
        here = self._users(ring)
        uses, needs = [(i, self.uses[i]) for i in here], self._needs(here)
        count = 1 + max(
            len(self.levels_now(use.route).levels)
            + len(self.outer_levels(use.route).levels)
            + self.copies(use)
            + bool(self.coded_bytes(use))  # codes are exchanged, and gathered
            + bool(self.sum_sizes(i))
            for i, use in uses
        )
        few, budget = count * median_low(needs), self._run.policy.live_bytes
        if budget is not None:
            few = min(few, budget)
        return max(*needs, few, LEAST_RING), count

    def _users(self, ring: Ring) -> list[int]:
        """The buckets that are reduced in a ring."""
        found = [i for i in self.order if not self.alone(i)]
        return [i for i in found if self.uses[i].hierarchy.pools.hops is ring]

    def _needs(self, indexes: Sequence[int]) -> list[int]:
        """Bytes of a ring that each of these buckets needs in this pass."""
        return [ring_bytes(self.slot_sizes(i, self.gets_room(i))) for i in indexes]

    def _lend(self, index: int, device: torch.device) -> Slot:
        """Memory for a bucket's reduction; waits for those that still use it."""
        ring, own = self.uses[index].hierarchy.pools.hops, self.own.get(index)
        if id(ring) not in self._rooms:
            self._rooms[id(ring)] = self._room(ring)
        slot = ring.lend(self.slot_sizes(index, own is not None), *self._rooms[id(ring)], device)
        spans.holds("gradients in reductions", id(ring), ring.nbytes)
        slot.first = slot.first if own is None else own
        return slot


_Complete = tuple[list[Tensor | None], Tensor | None]  # full gradients, and memory for the mean
_STARTED: _Complete = ([], None)


class Reduction(Lending):
    """The gradients of one backward pass on their way to shards: hop 1 of each bucket.

    Args:
      uses: the buckets, frozen ones too.
      run: has the order of all their reductions and the budget, and hears of each before it starts.
    """

    last = False  # whether this pass ends with hop 2
    does = "hop 1"  # what ranks compare before they reduce a bucket

    def __init__(self, uses: Sequence[BucketUse], run: Run) -> None:
        self.uses, self._run = uses, run
        self.order = [i for i in run.order if uses[i].bucket.trainable]
        self._pendings: dict[int, list[Pending]] = {}  # by bucket, of every pass
        self._complete: dict[int, _Complete] = {}  # of this pass
        self._rooms: dict[int, tuple[int, int]] = {}  # by ring: its bytes, and the most parts
        self._slots: dict[int, Slot] = {}  # of each bucket in the latest pass
        self.own: dict[int, Tensor] = {}  # bytes to pack a bucket in, where its parameters were
        self._next = 0  # index in the order
        self._last_far = next((i for i in self.order[::-1] if not uses[i].alone), None)
        # Called before this rank sends its part of the step's last reduction.
        self.before_last: Callable[[], None] = lambda: None

    def add(self, index: int, grads: Sequence[Tensor | None]) -> list[Tensor]:
        """Add a bucket's full gradients, one per member, and start hop 1 in the agreed order.

        Returns:
          Its pieces, one per member, which have values only after `wait`; nothing if they are
          added to a sum.
        """
        use = self.uses[index]
        values = [None if grad is None else dense(grad) for grad in grads]
        alone = self.alone(index)
        holds_in_full((id(self), index), () if alone else values)
        if alone:
            pieces = self.add_alone(index, values)
            self._complete[index] = _STARTED
            self._issue()
            return pieces
        out = self.target(index, values)
        self._complete[index] = (values, out)
        self._issue()
        return self.handed_out(use, out)

    def has(self, index: int) -> bool:
        """Whether a bucket has got its gradients in this pass."""
        return index in self._complete

    def missing(self) -> list[int]:
        """Buckets that have got no gradient in this pass, in the order of reductions."""
        return [index for index in self.order if index not in self._complete]

    def fill_missing(self) -> None:
        """Reduce the buckets that got no gradient in this pass as zeros."""
        for index in self.missing():
            self.add(index, [None] * len(self.uses[index].members))

    def end_pass(self) -> None:
        """Prepare for the next pass, once no bucket is missing."""
        self._complete, self._rooms, self._next = {}, {}, 0

    def skip(self, index: int) -> None:
        """Mark a bucket as reduced elsewhere (under vmap), so that those behind it can start."""
        self._complete[index] = _STARTED
        self._issue()

    def wait(self) -> None:
        """Wait for all that was started; on an accelerator its stream waits, and not the host."""
        for index in list(self._pendings):
            self.wait_for(index)

    def wait_for(self, index: int) -> None:
        """Wait for one bucket."""
        for pending in self._pendings.get(index, ()):
            pending.wait()
        self._pendings[index] = []

    def done(self, index: int) -> bool:
        """Whether no wait is left for a bucket; on an accelerator, for the host."""
        return all(pending.finished for pending in self._pendings.get(index, ()))

    # Methods that `SumOfPasses` and `PlacedSum` override.

    def in_slot(self, index: int, slot: Slot) -> Tensor | None:
        """Memory in the slot for a mean, where `target` gives none."""
        return None

    def target(self, index: int, values: Sequence[Tensor | None]) -> Tensor | None:
        """Memory for the mean; None if it stays where it is until it is added to a sum."""
        use = self.uses[index]
        device = next((v.device for v in values if v is not None), use.home.device)
        return torch.empty(use.bucket.chunk, dtype=use.bucket.dtype, device=device)

    def handed_out(self, use: BucketUse, out: Tensor | None) -> list[Tensor]:
        """The pieces that autograd passes on."""
        if out is None:
            return []
        # Through `.data`, autograd does not see that values are written later as a change.
        pieces = [piece.data for piece in split_chunk(use.bucket, use.route.chunk, out)]
        return use.by_member(pieces)

    def add_alone(self, index: int, values: Sequence[Tensor | None]) -> list[Tensor]:
        """Hop 1 of a bucket without other ranks: gradients are their own mean, and not packed."""
        use = self.uses[index]
        copy = use.route.grad_factor != 1.0
        pieces = flat_pieces(use, values, self.dtype_of(use.bucket), copy=copy)
        if copy and pieces:
            _torch.foreach_div(pieces, 1 / use.route.grad_factor)
        return pieces

    def outer_comms(self, index: int, out: Tensor) -> tuple[list[Comm], int]:
        """Communicators of what follows hop 1 in this pass, and after how many the slot is free."""
        return [], 0

    def steps(self, index: int, full: Tensor, out: Tensor, slot: Slot) -> Steps:
        """The steps of a bucket's reduction, level by level."""
        use = self.uses[index]
        spare = whole(slot.second, use.bucket.reduce)
        yield from scatter_steps(use.route, full, out, spare, use.bucket.hop1)
        if use.route.grad_factor != 1.0:
            _torch.foreach_div([out], 1 / use.route.grad_factor)
        free_slot(slot)
        return out

    def _issue(self) -> None:
        """Start the next reductions in the order, up to the first bucket that is not complete."""
        while self._next < len(self.order):
            index = self.order[self._next]
            if (complete := self._complete.get(index)) is None:
                return
            self._complete[index] = _STARTED  # lets go of the full gradients
            if complete is not _STARTED:
                if not self.uses[index].alone:
                    self._run.reduce(index)
                self._start(index, *complete)
                holds_in_full((id(self), index), ())
            self._next += 1

    def _start(self, index: int, values: Sequence[Tensor | None], out: Tensor | None) -> None:
        if self.last and index == self._last_far:
            self.before_last()
        use = self.uses[index]
        bucket, now = use.bucket, self.levels_now(use.route)
        device = use.home.device if out is None else out.device
        push_all(use.home.life)
        if index in self._slots:
            self._slots[index].until()  # else a later pass could be added to the sum first
        slot = self._slots[index] = self._lend(index, device)
        out = self.in_slot(index, slot) if out is None else out
        if now.size > 1 or out is None:
            # Gradients that are not sent need no rounding.
            dtype = bucket.reduce if now.size > 1 else self.dtype_of(bucket)
            full = elements(slot.first, bucket.numel, dtype)
        else:
            full = out  # nothing is scattered, so they are packed where the mean goes
        pack(use, values, full)
        comms = scatter_comms(now, full := full.view(now.size, -1))
        if out is None:
            coded = bucket.hop1.levels(now) if bucket.hop1 else 0
            out = elements(mean_buffer(slot, len(comms) - coded), full.shape[1], full.dtype)
        late, levels = self.outer_comms(index, out)
        steps, keep = self.steps(index, full, out, slot), (full, out, slot.second)
        what = ("defer", self.does, bucket)
        pending = Pending(steps, [*comms, *late], keep=keep, device=device, what=what)
        self._pendings.setdefault(index, []).append(pending)
        if not _device.is_async(device):
            slot.until = partial(pending.wait_for, len(now.levels) + levels)


# The gradients of a step on their way to sums: what `GradSum` does with each of its passes.

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

    def outer_levels(self, route: Route) -> Route:
        return route.split(route.late if self.last else 0)[0]

    def gets_room(self, index: int) -> bool:
        use, bucket = self.uses[index], self.uses[index].bucket
        sent = [x for x in (bucket.reduce, bucket.mean_wire) if isinstance(x, torch.dtype)]
        fits = max(dtype.itemsize for dtype in sent) <= bucket.compute.itemsize
        moves = self.levels_now(use.route).size > 1
        return self.last and moves and fits and self._run.lets_go(index)

    def stays_there(self, index: int) -> bool:
        use = self.uses[index]
        one = self.micro_steps == 1 and self.outer_levels(use.route).size == 1
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

    def outer_target(self, use: BucketUse, dtype: torch.dtype, slot: Slot) -> Tensor:
        """Return memory for the result of the outer levels."""
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

    def outer_comms(self, index: int, out: Tensor) -> tuple[list[Comm], int]:
        use = self.uses[index]
        if not self.last:
            return [], 0
        late = self.outer_levels(use.route)
        comms = scatter_comms(late, out)
        hop_2 = mean_comms(use.replicas, out, use.bucket.mean_wire)
        return [*comms, *hop_2], len(late.levels) + (len(hop_2) if self.copies(use) else 0)

    def steps(self, index: int, full: Tensor, out: Tensor, slot: Slot) -> Steps:
        """Run hop 1 and sum over passes; in the last pass also the outer levels and hop 2."""
        use, last = self.uses[index], self.last  # read now, since the steps run later
        now, late, copies = (
            self.levels_now(use.route),
            self.outer_levels(use.route),
            self.copies(use),
        )
        reduce, hop1, wire = use.bucket.reduce, use.bucket.hop1, use.bucket.mean_wire

        def steps() -> Steps:
            yield from scatter_steps(now, full, out, whole(slot.second, reduce), hop1)
            (total,) = self._sum(index, [out], last)
            if late.size > 1:
                total = yield from self._outer_steps(use, late, total, slot)
                self.totals[index] = [total]
            if not copies:
                free_slot(slot)
            if last:
                yield from mean_steps(use.replicas, total, wire, room_of(slot, total, wire))
            if copies:
                free_slot(slot)
            return total

        return steps()

    def _outer_steps(self, use: BucketUse, late: Route, total: Tensor, slot: Slot) -> Steps:
        """Hop 1 over the levels that wait for the last pass, in the memory of the slot."""
        bucket = use.bucket
        copy = elements(slot.first, total.numel(), bucket.reduce)
        full = total if total.dtype == bucket.reduce else copy.copy_(total)
        mine = self.outer_target(use, total.dtype, slot)
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
        """The divisor of the sum; see [Note: mean over more ranks] in `groups.groups`."""
        return self.micro_steps / use.route.grad_factor


# Sums of gradients that lie elsewhere than on the device: in host memory, or in files.

_PATIENCE = 16  # memory of a size that so many steps have not wanted is let go


class PlacedSum(SumOfPasses):
    """`SumOfPasses` of which some buckets lie elsewhere; see [Note: sums elsewhere].

    Args:
      places: of these buckets, each with a leaf that stands for it in errors.
      host_bytes: of the `Where` that they come from.
      args: as for `SumOfPasses`.

    Raises:
      FileError: a file cannot be made, or the disk has not so much room.
    """

    def __init__(self, places: Mapping[int, tuple[Place, str]], host_bytes: int, *args: Any):
        self._places, self._host_bytes = places, host_bytes
        super().__init__(*args)
        for pools in {id(x): x for x in (self.uses[i].hierarchy.pools for i in places)}.values():
            pools.sums.setdefault("free", _Rooms()).begin()
        self._placed = {index: self._made_at(index, *found) for index, found in places.items()}

    def _made_at(self, index: int, place: Place, leaf: str) -> "_PlacedBucket":
        bucket = self.uses[index].bucket
        numel = bucket.numel // self.levels_now(self.uses[index].route).size
        size = max(self.dtype_of(bucket).itemsize, bucket.dtype.itemsize)
        return _PlacedBucket(self.uses[index], place, leaf, self._host_bytes, numel * size)

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
        late = self.outer_levels(use.route).size > 1
        return (mine, use.bucket.chunk * size) if late else (mine,)

    def _area(self, index: int, slot: Slot) -> Tensor:
        """The first of the buffers of `sum_sizes`."""
        use = self.uses[index]
        numel = use.bucket.numel // self.levels_now(use.route).size
        return elements(slot.more[0], numel, self.dtype_of(use.bucket))

    def outer_target(self, use: BucketUse, dtype: torch.dtype, slot: Slot) -> Tensor:
        if not slot.more:
            return super().outer_target(use, dtype, slot)
        return elements(slot.more[1], use.bucket.chunk, dtype)

    def outer_comms(self, index: int, out: Tensor) -> tuple[list[Comm], int]:
        late, levels = super().outer_comms(index, out)
        if index not in self._places:
            return late, levels
        own = self._placed[index].comm
        if self.passes:
            late = [own, *late]
        return [*late, own], len(late) + 1  # the slot is in use to the end

    def steps(self, index: int, full: Tensor, out: Tensor, slot: Slot) -> Steps:
        """The steps of `SumOfPasses`, and the copies of the sum to the device and back."""
        if index not in self._places:
            return super().steps(index, full, out, slot)
        use, placed, bucket = self.uses[index], self._placed[index], self.uses[index].bucket
        number, last = self.passes, self.last  # read now, since the steps run later
        dtype = bucket.dtype if last else self.dtype_of(bucket)
        now, late, wire = self.levels_now(use.route), self.outer_levels(use.route), bucket.mean_wire

        def steps() -> Steps:
            spare = whole(slot.second, bucket.reduce)
            yield from scatter_steps(now, full, out, spare, bucket.hop1)
            self.totals.pop(index, None)
            if number:
                before = self._area(index, slot)
                yield placed.read(before)
                self.totals[index] = [before]
            (total,) = self._sum(index, [out], last)
            if late.size > 1:
                total = yield from self._outer_steps(use, late, total, slot)
            if last:
                yield from mean_steps(use.replicas, total, wire, room_of(slot, total, wire))
            self.totals[index] = []  # known, and elsewhere
            yield placed.write(total, dtype)
            free_slot(slot)
            return total

        return steps()

    def pieces(self, index: int) -> list[Tensor]:
        """The pieces; of a bucket that lies elsewhere in new memory on the device, at each call."""
        if index not in self._places:
            return super().pieces(index)
        use = self.uses[index]
        chunk = self._placed[index].fetched(use.bucket.chunk, use.bucket.dtype)
        found = use.by_member(split_chunk(use.bucket, use.route.chunk, chunk))
        # Gradients that autograd gave are apart, and kernels round ends of long tensors otherwise.
        return [x.clone() for x in found] if use.alone else found

    def lying(self, index: int) -> list[Tensor]:
        if index not in self._places:
            return super().lying(index)
        use = self.uses[index]
        chunk = self._placed[index].lying(use.bucket.chunk, use.bucket.dtype)
        return use.by_member(split_chunk(use.bucket, use.route.chunk, chunk))

    def release(self) -> None:
        """As in the base class, and give the memory elsewhere back."""
        super().release()
        for placed in self._placed.values():
            placed.release()


class _Rooms:
    """Memory at places that no step uses now; what many steps have not wanted is let go."""

    def __init__(self) -> None:
        self._free: dict[Any, list[Tensor]] = {}  # by their place and bytes
        self._wanted: dict[Any, int] = {}  # in which step each kind was last wanted
        self._steps = 0

    def begin(self) -> None:
        """Note that another step begins."""
        self._steps += 1
        for key in [k for k, last in self._wanted.items() if last + _PATIENCE < self._steps]:
            del self._free[key], self._wanted[key]

    def of(self, key: Any) -> list[Tensor]:
        """The free memory of a kind, as a list that the caller changes."""
        self._wanted[key] = self._steps
        return self._free.setdefault(key, [])


class _PlacedBucket:
    """Memory at a place for the sum of one bucket, and the copies there and back.

    Args:
      use: the bucket.
      place: where.
      leaf: of the bucket, for errors.
      host_bytes: of the `Where` that the place comes from.
      nbytes: of the sum; first what an earlier step has left is taken.
    """

    def __init__(
        self, use: BucketUse, place: Place, leaf: str, host_bytes: int, nbytes: int
    ) -> None:
        self._place, self._leaf, self._device = place, tree.join("grads", leaf), use.home.device
        self.comm = use.hierarchy.sums_elsewhere
        self._free = use.hierarchy.pools.sums["free"].of((place, nbytes))
        self._room: Any = None  # bytes
        if self._free:
            self._room = self._free.pop()
        else:
            how = {"device": self._device, "host_bytes": host_bytes, "leaf": self._leaf}
            self._room = empty_at(place, (nbytes,), torch.uint8, **how)

    def release(self) -> None:
        """Leave the memory to the next step."""
        if self._room is not None:
            self._free.append(self._room)
        self._room = None

    def lying(self, numel: int, dtype: torch.dtype) -> Tensor:
        """The sum, where it lies."""
        room = self._room
        if in_file(room):
            like = torch.empty(numel, dtype=dtype, device="meta")
            return FileTensor(room.extent, 0, like, room.device, room.leaf)
        return elements(room, numel, dtype)

    def write(self, total: Tensor, dtype: torch.dtype) -> Task:
        """Return the task that stores a sum, in a dtype."""
        goal = self.lying(total.numel(), dtype)
        return self._task("to", lambda memory: transfer(memory, goal), total)

    def read(self, memory: Tensor) -> Task:
        """Return the task that fetches the sum into memory of its dtype."""
        source = self.lying(len(memory), memory.dtype)
        return self._task("from", partial(transfer, source), memory)

    def _task(self, way: str, parts: Callable[[Tensor], Iterator[None]], memory: Tensor) -> Task:
        op = f"the copy of the sum of {self._leaf} {way} {self._place}"
        return Task(self.comm, op, parts).to(memory)

    def fetched(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Fetch the sum at the end of the step, into new memory on the device."""
        memory = torch.empty(numel, dtype=dtype, device=self._device)
        for _ in transfer(self.lying(numel, dtype), memory):
            pass
        return memory


def places_of(where: Where, opened: Opened) -> dict[int, tuple[Place, str]]:
    """Return the buckets with gradients in host memory or files, with places and paths.

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
        place = place.seen_from(use.home.device)
        if place != DEVICE:
            found[index] = place, leaf
    return found

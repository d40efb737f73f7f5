"""Reductions that overlap backward: hop 1 once a bucket's gradients are complete, then hop 2.

[Note: reduced in one order] The order in which buckets become complete may differ between ranks,
for example if only some of them use a parameter. Buckets are reduced in one order that is the same
everywhere: a bucket that is complete early waits for those before it, and one that never becomes
complete is reduced as zeros at the end. So no rank can wait for a reduction that another one does
not do. Where these reductions come between fetches is a part of the run, which compares it: see
[Note: reductions between fetches] in `schedules.run`.

[Note: gradients in flight] A bucket's gradients are packed into a part of a ring of memory, with
room for what arrives from other ranks. They stay there until hop 1 is done, late levels included,
and so does the copy that hop 2 sends in another dtype. The next bucket waits until its part of the
ring is free. The ring has room for one bucket on each level and one that is being packed, by the
median of their sizes, but not for more bytes than the budget for gathered parameters; the largest
bucket always fits. So full gradients take the memory of a few buckets, whatever the size of the
model, and how much does not depend on timing.
"""

from collections.abc import Callable, Sequence
from functools import partial
from statistics import median_low

import torch
from torch import Tensor

from mics_fn import _device, _torch
from mics_fn.collectives import (
    Pending,
    Steps,
    push_all,
    scatter_comms,
    scatter_steps,
    spare_numel,
    wait_until,
)
from mics_fn.groups import LEAST_RING, Comm, Life, Ring, Route, Slot, ring_bytes
from mics_fn.schedules import Run
from mics_fn.shards import Bucket, BucketUse, dense, note_origins, pack_full, split_chunk

_Complete = tuple[list[Tensor | None], Tensor | None]  # full gradients, and memory for the mean
_STARTED: _Complete = ([], None)


class Reduction:
    """The gradients of one backward pass on their way to shards: hop 1 of each bucket.

    Args:
      uses: the buckets, frozen ones too.
      run: has the order of all their reductions and the budget, and hears of each before it starts.
    """

    has_target = True  # whether in this pass the mean has memory of its own
    last = False  # whether this pass ends with hop 2
    does = "hop 1"  # what ranks compare before they reduce a bucket

    def __init__(self, uses: Sequence[BucketUse], run: Run) -> None:
        self.uses, self._run = uses, run
        self.order = [i for i in run.order if uses[i].bucket.trainable]
        self._pendings: list[Pending] = []
        self._complete: dict[int, _Complete] = {}  # of this pass
        self._rooms: dict[int, tuple[int, int]] = {}  # by ring: its bytes, and the most parts
        self._slots: dict[int, Slot] = {}  # of each bucket in the latest pass
        self.own: dict[int, Tensor] = {}  # bytes to pack a bucket in, where its parameters were
        self._next = 0  # index in the order
        self._last_far = next((i for i in reversed(self.order) if not uses[i].alone), None)
        # Called before this rank sends its part of the step's last reduction.
        self.before_last: Callable[[], None] = lambda: None
        run.slack = self._slack()

    def add(self, index: int, grads: Sequence[Tensor | None]) -> list[Tensor]:
        """Take a bucket's full gradients, one per member, and start hop 1 when its turn has come.

        Returns:
          Its pieces, one per member, which have values only after `wait`; nothing if they are
          added to a sum.
        """
        use = self.uses[index]
        values = [None if grad is None else dense(grad) for grad in grads]
        if use.alone:
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
        self._complete, self._rooms = {}, {}
        self._next = 0
        self._run.slack = min(self._run.slack, self._slack())

    def skip(self, index: int) -> None:
        """Mark a bucket as reduced elsewhere (under vmap), so that those behind it can start."""
        self._complete[index] = _STARTED
        self._issue()

    def wait(self) -> None:
        """Wait for all that was started; on an accelerator its stream waits, and not the host."""
        for pending in self._pendings:
            pending.wait()
        self._pendings = []

    # Methods that `SumOfPasses` overrides.

    def dtype_of(self, bucket: Bucket) -> torch.dtype:
        """The dtype of the result of hop 1."""
        return bucket.dtype

    def levels_now(self, route: Route) -> Route:
        """The levels that are reduced in every pass, as soon as a bucket is complete."""
        return route

    def gets_room(self, index: int) -> bool:
        """Whether a bucket is packed where its parameters were, unless these stay after all."""
        return False

    def stays_there(self, use: BucketUse) -> bool:
        """Whether the mean of a bucket that was packed there stays there too."""
        return False

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
        pieces = self.flat_pieces(use, values, copy=use.route.grad_factor != 1.0)
        if use.route.grad_factor != 1.0 and pieces:
            _torch.foreach_div(pieces, 1 / use.route.grad_factor)
        return pieces

    def flat_pieces(
        self, use: BucketUse, values: Sequence[Tensor | None], *, copy: bool
    ) -> list[Tensor]:
        device, dtype = use.home.device, self.dtype_of(use.bucket)
        flat = [
            torch.zeros(n, dtype=dtype, device=device) if value is None else value.reshape(n)
            for n, value in zip(use.by_member(use.bucket.numels), values, strict=True)
        ]
        same = not copy and all(x.dtype is dtype for x in flat)
        return flat if same else [x.to(dtype, copy=copy) for x in flat]

    def late_levels(self, route: Route) -> Route:
        """The levels that are reduced after `levels_now` in this pass."""
        return Route()

    def late_comms(self, use: BucketUse, out: Tensor) -> tuple[list[Comm], int]:
        """Communicators of what follows hop 1 in this pass, and after how many the slot is free."""
        return [], 0

    def copies(self, use: BucketUse) -> bool:
        """Whether hop 2 follows in another dtype, so that it sends a copy."""
        return False

    def steps(self, index: int, full: Tensor, out: Tensor, slot: Slot) -> Steps:
        """The steps of a bucket's reduction, level by level."""
        use = self.uses[index]
        spare = slot.second.view(use.bucket.reduce)
        yield from scatter_steps(use.route, full, out, spare)
        if use.route.grad_factor != 1.0:
            _torch.foreach_div([out], 1 / use.route.grad_factor)
        self.free_slot(slot)
        return out

    def free_slot(self, slot: Slot) -> None:
        """On an accelerator, let the next user of a slot wait for the current stream."""
        device = slot.first.device
        if _device.is_async(device):
            slot.until = partial(_device.wait, device, _device.record(device))

    def slot_sizes(self, index: int, own: bool) -> tuple[int, int]:
        """Bytes of the two buffers that a bucket needs in this pass; 0 if there is nothing.

        Args:
          index: the bucket.
          own: whether it is packed where its parameters were.
        """
        use = self.uses[index]
        bucket, device, dtype = use.bucket, use.home.device, self.dtype_of(use.bucket)
        now, late = self.levels_now(use.route), self.late_levels(use.route)
        mine, same = bucket.numel // now.size, dtype == bucket.reduce
        packed = [0]
        if now.size > 1:
            packed.append(bucket.numel * bucket.reduce.itemsize)
        elif not self.has_target:
            packed.append(bucket.numel * dtype.itemsize)
        if late.size > 1 and not same:
            packed.append(mine * bucket.reduce.itemsize)
        if self.copies(use):
            packed.append(mine // late.size * bucket.reduce.itemsize)
        direct = same and self.has_target and not (own and self.stays_there(use))
        arriving = max(
            spare_numel(now, bucket.numel, device, direct=direct),
            spare_numel(late, mine, device, direct=same),
        )
        return 0 if own else max(packed), arriving * bucket.reduce.itemsize

    def _room(self, ring: Ring) -> tuple[int, int]:
        """Bytes of a ring, and the most parts of it at a time; see [Note: gradients in flight]."""
        here = self._users(ring)
        uses, needs = [self.uses[i] for i in here], self._needs(here)
        count = 1 + max(
            len(self.levels_now(use.route).levels)
            + len(self.late_levels(use.route).levels)
            + self.copies(use)
            for use in uses
        )
        few, budget = count * median_low(needs), self._run.policy.live_bytes
        if budget is not None:
            few = min(few, budget)
        return max(*needs, few, LEAST_RING), count

    def _users(self, ring: Ring) -> list[int]:
        """The buckets that are reduced in a ring."""
        found = [i for i in self.order if not self.uses[i].alone]
        return [i for i in found if self.uses[i].hierarchy.pools.hops is ring]

    def _needs(self, indexes: Sequence[int]) -> list[int]:
        """Bytes of a ring that each of these buckets needs in this pass."""
        return [ring_bytes(self.slot_sizes(i, self.gets_room(i))) for i in indexes]

    def _slack(self) -> int:
        """A reduction waits at most for the memory of the one so many places before it."""
        found, uses = [len(self.order)], [u for i in self.order if not (u := self.uses[i]).alone]
        for ring in {use.hierarchy.pools.hops for use in uses}:
            sizes = set(self._needs(self._users(ring)))
            room, count = self._room(ring)
            if count > 1:  # else nothing is sent in this pass
                # Parts of different sizes may leave a gap at the end of the ring.
                fit = room // max(1, *sizes) - (len(sizes) > 1)
                found.append(max(1, min(count, fit)))
        return min(found)

    def _lend(self, index: int, device: torch.device) -> Slot:
        """Memory for a bucket's reduction; waits for those that still use it."""
        ring, own = self.uses[index].hierarchy.pools.hops, self.own.get(index)
        if id(ring) not in self._rooms:
            self._rooms[id(ring)] = self._room(ring)
        slot = ring.lend(self.slot_sizes(index, own is not None), *self._rooms[id(ring)], device)
        slot.first = slot.first if own is None else own
        return slot

    def _issue(self) -> None:
        """Start the next reductions in the order, up to the first bucket that is not complete."""
        while self._next < len(self.order):
            index = self.order[self._next]
            if (complete := self._complete.get(index)) is None:
                return
            self._complete[index] = _STARTED  # lets go of the full gradients
            if complete is not _STARTED:
                self._run.reduce(index)
                self._start(index, *complete)
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
        if now.size > 1 or out is None:
            # Gradients that are not sent need no rounding.
            dtype = bucket.reduce if now.size > 1 else self.dtype_of(bucket)
            full = elements(slot.first, bucket.numel, dtype)
        else:
            full = out  # nothing is scattered, so they are packed where the mean goes
        pack_full(bucket, use.by_slot(values), device=device, out=full)
        note_origins(bucket, full)
        comms = scatter_comms(now, full := full.view(now.size, -1))
        if out is None:  # NCCL reads one of two buffers and writes the other, alternately
            at = len(comms) % 2 if _device.is_async(device) else 0
            out = elements((slot.first, slot.second)[at], full.shape[1], full.dtype)
        late, levels = self.late_comms(use, out)
        steps, keep = self.steps(index, full, out, slot), (full, out, slot.second)
        what = ("defer", self.does, bucket)
        pending = Pending(steps, [*comms, *late], keep=keep, device=device, what=what)
        self._pendings.append(pending)
        if not _device.is_async(device):
            slot.until = partial(_until_passed, use.home.life, pending, len(now.levels) + levels)


def elements(raw: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    """The first elements of some memory."""
    return raw[: numel * dtype.itemsize].view(dtype)


def _until_passed(life: Life, pending: Pending, levels: int) -> None:
    if not pending.passed(levels):
        wait_until(life, lambda: pending.passed(levels), pending)

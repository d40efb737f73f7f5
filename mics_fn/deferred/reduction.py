"""Reductions that overlap backward: hop 1 when a bucket's gradients are there, then hop 2.

[Note: reduced in one order] Buckets become ready in an order that may differ between ranks, as when
some use a parameter and others do not. They are reduced in one order that is the same everywhere:
a bucket that is ready early waits for those before it, and what never becomes ready is reduced as
zeros at the end. So no rank can wait for a reduction that another one does not do.

[Note: gradients in flight] A bucket's gradients are packed in one of a few slots of memory, where
they stay until hop 1 is done, over the late levels too; who comes next to that slot waits. So full
gradients take a few buckets' memory whatever the size of the model, and how much follows from no
clock. Where hop 2 sends a copy in another dtype it counts as well.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from mics_fn import _torch
from mics_fn.collectives import (
    Pending,
    Steps,
    mean_comms,
    mean_steps,
    push_all,
    scatter_comms,
    scatter_steps,
    wait_until,
)
from mics_fn.groups import Buffers, Groups, Hierarchy
from mics_fn.shards import Bucket, BucketUse, dense, pack_full, replicas_of, split_chunk

_Ready = tuple[list[Tensor | None], Tensor | None]  # full gradients, and where the mean goes
_STARTED: _Ready = ([], None)


class Reduction:
    """The gradients of one backward pass, on their way to shards: hop 1 of each bucket.

    Args:
      uses: the buckets, frozen ones too.
      order: of their reductions, all of them; the same on every rank.
    """

    micro_steps: int | None = None
    dtype: torch.dtype | None = None

    def __init__(self, uses: Sequence[BucketUse], order: Sequence[int]) -> None:
        self.bind(uses, order)

    def bind(self, uses: Sequence[BucketUse], order: Sequence[int]) -> None:
        """Learn whose gradients will come."""
        self.uses = uses
        self._order = [i for i in order if uses[i].bucket.trainable]
        self._totals: dict[int, list[Tensor]] = {}  # [chunk], or with one rank a piece a member
        self._pendings: list[Pending] = []
        self._given: list[tuple[Buffers, Tensor]] = []  # what to give back in the end
        self._pass = 0
        self._begin()

    def _begin(self) -> None:
        self._ready: dict[int, _Ready] = {}
        self._place = 0  # in the order

    @property
    def last(self) -> bool:
        """Whether this pass ends with hop 2."""
        return self.micro_steps is not None and self._pass == self.micro_steps - 1

    def add(self, index: int, grads: Sequence[Tensor | None]) -> list[Tensor]:
        """A bucket's full gradients are there, one a member.

        Returns:
          Its pieces, one a member, unless they are added to a sum. They have values only after
          `end` and `wait`.
        """
        use = self.uses[index]
        values = [None if grad is None else dense(grad) for grad in grads]
        if alone(use):
            return self._add_alone(index, values)
        out = self._out(use, values)
        self._ready[index] = (values, out)
        self._issue()
        if out is None or self.micro_steps is not None:
            return []
        # Autograd, which may go through them, is not to take what is written later for a change.
        pieces = [piece.data for piece in split_chunk(use.bucket, use.hierarchy.chunk, out)]
        return use.by_member(pieces)

    def missing(self) -> list[int]:
        """Buckets that got no gradient in this pass, in the order of reductions."""
        return [index for index in self._order if index not in self._ready]

    def end(self) -> None:
        """The pass is over: what is missing is reduced as zeros."""
        for index in self.missing():
            self.add(index, [None] * len(self.uses[index].members))
        self.end_of_pass()

    def end_of_pass(self) -> None:
        """The pass is over, and nothing is missing."""
        self._pass += 1
        self._begin()

    def skip(self, index: int) -> None:
        """A bucket is reduced by other means in this pass."""
        self._ready[index] = _STARTED
        self._issue()

    def wait(self) -> None:
        """Wait for everything that was started; on CUDA the current stream does."""
        for pending in self._pendings:
            pending.wait()
        self._pendings = []

    def _dtype(self, bucket: Bucket) -> torch.dtype:
        """Of what comes out of hop 1: of the sum over passes, if there is one."""
        if self.micro_steps is None:
            return bucket.dtype
        if self.dtype is not None or self.micro_steps > 1:
            return self.dtype or bucket.accumulate
        return torch.promote_types(bucket.dtype, bucket.reduce)  # there is nothing to add

    def _out(self, use: BucketUse, values: Sequence[Tensor | None]) -> Tensor | None:
        """Where the mean goes; None where it stays in the slot, to be added to a sum."""
        bucket, route = use.bucket, use.hierarchy
        if self.micro_steps is None:
            device = next((v.device for v in values if v is not None), route.device)
            return torch.empty(bucket.chunk, dtype=bucket.dtype, device=device)
        if self._pass:
            return None
        shape = (bucket.numel // self._now(route).size,)
        return route.chunks.take(shape, self._dtype(bucket), route.device, exact=True)

    def _now(self, route: Hierarchy) -> Hierarchy:
        """The levels that are reduced in every pass."""
        return route if self.micro_steps is None else route.split(route.late)[1]

    def _add_alone(self, index: int, values: list[Tensor | None]) -> list[Tensor]:
        """One rank: the gradient is its own mean, and nothing is packed."""
        use, pieces = self.uses[index], []
        device, dtype = use.hierarchy.device, self._dtype(use.bucket)
        for numel, value in zip(use.by_member(use.bucket.numels), values, strict=True):
            empty = value is None
            zeros = torch.zeros(numel, dtype=dtype, device=device) if empty else None
            # torch may hand out one tensor as two gradients: a sum needs memory of its own.
            summed = (self.micro_steps or 1) > 1 and not self._pass
            written = summed or self._divisor(use) != 1
            pieces.append(zeros if empty else value.reshape(numel).to(dtype, copy=written))
        self._ready[index] = _STARTED
        self._sum(index, pieces, self.last)
        self._issue()
        return pieces

    def _issue(self) -> None:
        """Start what is next in the order, as long as it is ready."""
        while self._place < len(self._order):
            index = self._order[self._place]
            ready = self._ready.get(index)
            if ready is None:
                return
            self._ready[index] = _STARTED  # so that the full gradients are not kept
            if ready is not _STARTED:
                self._start(index, *ready)
            self._place += 1

    def _start(self, index: int, values: Sequence[Tensor | None], out: Tensor | None) -> None:
        use = self.uses[index]
        route, bucket = use.hierarchy, use.bucket
        device, now = route.device if out is None else out.device, self._now(route)
        late = route.split(route.late)[0] if self.last else route.split(0)[0]
        push_all(route.life)
        # Hop 2 in another dtype sends a copy, which is one more buffer on its way.
        copies = self.last and replicas_of(use).size > 1 and self._dtype(bucket) != bucket.reduce
        stays = out is not None and now.size == late.size == 1  # nothing is scattered
        slot = self._place % route.slots.count
        used = slot if copies or not stays else None
        if used is not None:
            _until_free(route, used)
        if out is not None and stays:
            pair = (out, out)
        else:
            # What does not travel is not rounded.
            dtype = bucket.reduce if now.size > 1 else self._dtype(bucket)
            pair = route.slots.pair(slot, (bucket.numel,), dtype, device)
        first = pair[0] if out is None or now.size > 1 else out
        pack_full(bucket, use.by_slot(values), device=device, out=first)
        parts = [buffer.view(now.size, -1) for buffer in (first, pair[1])]
        comms = scatter_comms(now, parts[0])
        if out is None:  # NCCL reads one buffer of the pair and writes the other, in turns
            at = len(comms) % 2 if device.type == "cuda" else 0
            out = pair[at][: bucket.numel // now.size]
        comms += scatter_comms(late, out)
        levels = len(now.levels) + len(late.levels)
        if self.last:
            comms += mean_comms(replicas_of(use), out)
            levels = len(comms) if copies else levels
        steps = self._steps(index, parts, out, used)
        pending = Pending(steps, comms, keep=(*pair, out), device=device, purpose="reduce")
        self._pendings.append(pending)
        if used is not None and device.type != "cuda":
            route.slots.users[used] = pending, levels

    def _steps(self, index: int, parts: Sequence[Tensor], out: Tensor, slot: int | None) -> Steps:
        """Hop 1, the sum over passes, and in the last pass what is late, and hop 2."""
        use, last = self.uses[index], self.last  # as they are when this is started
        route, now = use.hierarchy, self._now(use.hierarchy)

        def steps() -> Steps:
            yield from scatter_steps(now, parts[0], out, parts[1])
            (total,) = self._sum(index, [out], last)
            if last:
                (total,) = self._totals[index] = [(yield from self._late_steps(use, total, slot))]
            if out.is_cuda and slot is not None:  # from here on the slot is free
                event = torch.cuda.current_stream(out.device).record_event()
                route.slots.users[slot] = event
            if last:
                self._given.append((route.chunks, total))
                yield from mean_steps(replicas_of(use), total, use.bucket.reduce)
            return total

        return steps()

    def _late_steps(self, use: BucketUse, total: Tensor, slot: int | None) -> Steps:
        """Hop 1 over the levels that wait for the last pass, in the memory of the slot."""
        route, bucket = use.hierarchy, use.bucket
        late, _ = route.split(route.late)
        if late.size == 1 or slot is None:
            return total
        full, spare = route.slots.pair(slot, total.shape, bucket.reduce, total.device)
        full = total if total.dtype == bucket.reduce else full.copy_(total)
        mine = route.chunks.take((bucket.chunk,), total.dtype, total.device, exact=True)
        yield from scatter_steps(late, full.view(late.size, -1), mine, spare)
        # Not before the end of the step, or how many chunks there are would follow a clock.
        self._given.append((route.chunks, total))
        return mine

    def _sum(self, index: int, values: list[Tensor], last: bool) -> list[Tensor]:
        """Add to the total, or make it; in the last pass it becomes the mean over passes."""
        single, divisor = self.micro_steps is None, self._divisor(self.uses[index])
        total = values if single else self._totals.setdefault(index, values)
        if total is not values:
            _torch.foreach_add(total, values)
        if (last or single) and values and divisor != 1:
            _torch.foreach_div(total, divisor)
        return total

    def _divisor(self, use: BucketUse) -> float:
        """What the sum over passes is divided by; see [Note: mean over more ranks] in
        `communicator`.
        """
        return (self.micro_steps or 1) / use.hierarchy.grad_factor


def _until_free(route: Hierarchy, slot: int) -> None:
    """Wait for the slot's last user; see [Note: gradients in flight]."""
    user = route.slots.users[slot]
    if isinstance(user, tuple):
        pending, levels = user
        if not pending.passed(levels):
            wait_until(route.life, lambda: pending.passed(levels))
    elif user is not None:
        torch.cuda.current_stream(route.device).wait_event(user)


def alone(use: BucketUse) -> bool:
    """Whether this rank's gradient is the mean already."""
    lonely = not isinstance(use.home, Groups) or use.home.replicas.size == 1
    return use.hierarchy.size == 1 and lonely

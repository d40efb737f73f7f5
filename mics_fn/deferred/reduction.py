"""Reductions that overlap backward: hop 1 once a bucket's gradients are complete, then hop 2.

[Note: reduced in one order] The order in which buckets become complete may differ between ranks,
for example if only some of them use a parameter. Buckets are reduced in one order that is the same
everywhere: a bucket that is complete early waits for those before it, and one that never becomes
complete is reduced as zeros at the end. So no rank can wait for a reduction that another one does
not do. Where these reductions come between fetches is a part of the run, which compares it: see
[Note: reductions between fetches] in `schedules.run`.

[Note: gradients in flight] A bucket's gradients are packed into one of a few slots of memory. They
stay there until hop 1 is done, late levels included, and the next bucket in that slot waits until
then. So full gradients take the memory of a few buckets, whatever the size of the model, and how
much does not depend on timing. If hop 2 sends a copy in another dtype, the copy counts as well.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from mics_fn import _device, _torch
from mics_fn.collectives import (
    Pending,
    Steps,
    push_all,
    scatter_comms,
    scatter_steps,
    wait_until,
)
from mics_fn.groups import Hierarchy, Route
from mics_fn.schedules import Run
from mics_fn.shards import Bucket, BucketUse, dense, pack_full, split_chunk

_Complete = tuple[list[Tensor | None], Tensor | None]  # full gradients, and memory for the mean
_STARTED: _Complete = ([], None)


class Reduction:
    """The gradients of one backward pass on their way to shards: hop 1 of each bucket.

    Args:
      uses: the buckets, frozen ones too.
      run: has the order of all their reductions, and hears of each before it starts.
    """

    def __init__(self, uses: Sequence[BucketUse], run: Run) -> None:
        self.uses, self._run = uses, run
        self.order = [i for i in run.order if uses[i].bucket.trainable]
        self._pendings: list[Pending] = []
        self._complete: dict[int, _Complete] = {}  # in this pass
        self._next = 0  # index in the order

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
        out = self.target(use, values)
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
        self._complete = {}
        self._next = 0

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

    def target(self, use: BucketUse, values: Sequence[Tensor | None]) -> Tensor | None:
        """Memory for the mean; None if it stays in the slot until it is added to a sum."""
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
        return [
            torch.zeros(numel, dtype=dtype, device=device)
            if value is None
            else value.reshape(numel).to(dtype, copy=copy)
            for numel, value in zip(use.by_member(use.bucket.numels), values, strict=True)
        ]

    def late_comms(self, use: BucketUse, out: Tensor, *, copies: bool) -> tuple[list, int]:
        """Communicators of what follows hop 1 in this pass, and after how many the slot is free."""
        return [], 0

    def copies(self, use: BucketUse) -> bool:
        """Whether hop 2 follows in another dtype, so that it sends a copy."""
        return False

    def late_size(self, route: Route) -> int:
        """The number of ranks in the levels that are reduced after `levels_now` in this pass."""
        return 1

    def steps(self, index: int, parts: Sequence[Tensor], out: Tensor, slot: int | None) -> Steps:
        """The steps of a bucket's reduction, level by level."""
        use = self.uses[index]
        yield from scatter_steps(use.route, parts[0], out, parts[1])
        if use.route.grad_factor != 1.0:
            _torch.foreach_div([out], 1 / use.route.grad_factor)
        self.free_slot(use, out, slot)
        return out

    def free_slot(self, use: BucketUse, out: Tensor, slot: int | None) -> None:
        if _device.is_async(out.device) and slot is not None:
            use.hierarchy.pools.slots.users[slot] = _device.record(out.device)

    def _issue(self) -> None:
        """Start the next reductions in the order, up to the first bucket that is not complete."""
        while self._next < len(self.order):
            index = self.order[self._next]
            complete = self._complete.get(index)
            if complete is None:
                return
            self._complete[index] = _STARTED  # lets go of the full gradients
            if complete is not _STARTED:
                self._run.reduce(index)
                self._start(index, *complete)
            self._next += 1

    def _start(self, index: int, values: Sequence[Tensor | None], out: Tensor | None) -> None:
        use = self.uses[index]
        bucket, slots = use.bucket, use.hierarchy.pools.slots
        device, now = use.home.device if out is None else out.device, self.levels_now(use.route)
        push_all(use.home.life)
        copies = self.copies(use)
        # If nothing is scattered, the gradients are packed where the mean goes.
        stays = out is not None and now.size == 1 and self.late_size(use.route) == 1
        slot = self._next % slots.count
        used = slot if copies or not stays else None
        if used is not None:
            _until_free(use.hierarchy, used)
        if out is not None and stays:
            pair = (out, out)
        else:
            # Gradients that are not sent need no rounding.
            dtype = bucket.reduce if now.size > 1 else self.dtype_of(bucket)
            pair = slots.pair(slot, (bucket.numel,), dtype, device)
        first = pair[0] if out is None or now.size > 1 else out
        pack_full(bucket, use.by_slot(values), device=device, out=first)
        parts = [buffer.view(now.size, -1) for buffer in (first, pair[1])]
        comms = scatter_comms(now, parts[0])
        if out is None:  # NCCL reads one buffer of the pair and writes the other, alternately
            at = len(comms) % 2 if _device.is_async(device) else 0
            out = pair[at][: bucket.numel // now.size]
        late, levels = self.late_comms(use, out, copies=copies)
        steps = self.steps(index, parts, out, used)
        keep = (*pair, out)
        pending = Pending(steps, [*comms, *late], keep=keep, device=device)
        self._pendings.append(pending)
        if used is not None and not _device.is_async(device):
            slots.users[used] = pending, len(now.levels) + levels


def _until_free(home: Hierarchy, slot: int) -> None:
    """Wait for the slot's last user; see [Note: gradients in flight]."""
    user = home.pools.slots.users[slot]
    if isinstance(user, tuple):
        pending, levels = user
        if not pending.passed(levels):
            wait_until(home.life, lambda: pending.passed(levels))
    elif user is not None:
        _device.wait(home.device, user)

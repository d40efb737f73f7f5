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
bucket always fits. Where hop 2 sends codes it counts as two levels, on two communicators: while a
bucket's codes are gathered, the next one's are exchanged. So full gradients take the memory of a
few buckets, whatever the size of the model, and how much does not depend on timing.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from mics_fn import _device, _torch
from mics_fn.collectives import (
    Pending,
    Steps,
    push_all,
    scatter_comms,
    scatter_steps,
    wait_all,
)
from mics_fn.deferred.lending import Lending
from mics_fn.deferred.packing import (
    elements,
    flat_pieces,
    free_slot,
    holds_in_full,
    mean_buffer,
    pack,
    until_passed,
    whole,
)
from mics_fn.groups import Comm, Slot
from mics_fn.schedules import Run
from mics_fn.shards import BucketUse, dense, split_chunk

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
        run.slack = self._slack()

    def add(self, index: int, grads: Sequence[Tensor | None]) -> list[Tensor]:
        """Take a bucket's full gradients, one per member, and start hop 1 when its turn has come.

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
        self._run.slack = min(self._run.slack, self._slack())

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
        wait_all(self._pendings.get(index, ()))
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

    def late_comms(self, index: int, out: Tensor) -> tuple[list[Comm], int]:
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
        late, levels = self.late_comms(index, out)
        steps, keep = self.steps(index, full, out, slot), (full, out, slot.second)
        what = ("defer", self.does, bucket)
        pending = Pending(steps, [*comms, *late], keep=keep, device=device, what=what)
        self._pendings.setdefault(index, []).append(pending)
        if not _device.is_async(device):
            slot.until = partial(until_passed, use.home.life, pending, len(now.levels) + levels)

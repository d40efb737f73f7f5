"""Reductions that overlap backward: hop 1 when a bucket's gradients are there, then hop 2.

[Note: reduced in one order] Buckets become complete in an order that may differ between ranks, as
when some use a parameter and others do not. They are reduced in one order that is the same
everywhere: a bucket that is complete early waits for those before it, and what never becomes
complete is reduced as zeros at the end. So no rank can wait for a reduction that another one does
not do.

[Note: gradients in flight] A bucket's gradients are packed in one of a few slots of memory, where
they stay until hop 1 is done, over the late levels too; whoever comes next to that slot waits. So
full gradients take a few buckets' memory whatever the size of the model, and how much depends on no
clock. Where hop 2 sends a copy in another dtype it counts as well.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from mics_fn import _torch
from mics_fn.collectives import (
    Pending,
    Steps,
    push_all,
    scatter_comms,
    scatter_steps,
    wait_until,
)
from mics_fn.groups import Hierarchy, Route
from mics_fn.shards import Bucket, BucketUse, dense, pack_full, split_chunk

_Complete = tuple[list[Tensor | None], Tensor | None]  # full gradients, and where the mean goes
_STARTED: _Complete = ([], None)


class Reduction:
    """The gradients of one backward pass on their way to shards: hop 1 of each bucket.

    Args:
      uses: the buckets, frozen ones too.
      order: of their reductions, all of them; the same on every rank.
    """

    def __init__(self, uses: Sequence[BucketUse], order: Sequence[int]) -> None:
        self.uses = uses
        self.order = [i for i in order if uses[i].bucket.trainable]
        self._pendings: list[Pending] = []
        self._complete: dict[int, _Complete] = {}  # in this pass
        self._place = 0  # in the order

    def add(self, index: int, grads: Sequence[Tensor | None]) -> list[Tensor]:
        """A bucket's full gradients are there, one per member.

        Returns:
          Its pieces, one per member, unless they are added to a sum. They have values only after
          `wait`.
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
        """Whether a bucket got its gradients in this pass."""
        return index in self._complete

    def missing(self) -> list[int]:
        """Buckets that got no gradient in this pass, in the order of reductions."""
        return [index for index in self.order if index not in self._complete]

    def fill_missing(self) -> None:
        """Reduce what got no gradient in this pass as zeros."""
        for index in self.missing():
            self.add(index, [None] * len(self.uses[index].members))

    def end_pass(self) -> None:
        """The pass is over, and nothing is missing."""
        self._complete = {}
        self._place = 0

    def skip(self, index: int) -> None:
        """Mark a bucket as reduced elsewhere (under vmap), so that those behind it can start."""
        self._complete[index] = _STARTED
        self._issue()

    def wait(self) -> None:
        """Wait for everything that was started; on CUDA the current stream does."""
        for pending in self._pendings:
            pending.wait()
        self._pendings = []

    # What a sum over passes does in another way.

    def dtype_of(self, bucket: Bucket) -> torch.dtype:
        """The dtype of what comes out of hop 1."""
        return bucket.dtype

    def levels_now(self, route: Route) -> Route:
        """The levels that are reduced in this pass as soon as a bucket is complete."""
        return route

    def target(self, use: BucketUse, values: Sequence[Tensor | None]) -> Tensor | None:
        """Where the mean goes; None where it stays in the slot, to be added to a sum."""
        device = next((v.device for v in values if v is not None), use.home.device)
        return torch.empty(use.bucket.chunk, dtype=use.bucket.dtype, device=device)

    def handed_out(self, use: BucketUse, out: Tensor | None) -> list[Tensor]:
        """The pieces that autograd passes on."""
        if out is None:
            return []
        # Autograd, which may go through them, is not to take what is written later for a change.
        pieces = [piece.data for piece in split_chunk(use.bucket, use.route.chunk, out)]
        return use.by_member(pieces)

    def add_alone(self, index: int, values: Sequence[Tensor | None]) -> list[Tensor]:
        """The gradients of a group of one rank are their own mean, and nothing is packed."""
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
        """What follows hop 1 of this pass: its communicators, and how many come before hop 2."""
        return [], 0

    def copies(self, use: BucketUse) -> bool:
        """Whether hop 2 follows in another dtype: it sends a copy, one more buffer on its way."""
        return False

    def late_size(self, route: Route) -> int:
        """Ranks of the levels that are reduced after those of `_now`."""
        return 1

    def steps(self, index: int, parts: Sequence[Tensor], out: Tensor, slot: int | None) -> Steps:
        """What a bucket's reduction does, level by level."""
        use = self.uses[index]
        yield from scatter_steps(use.route, parts[0], out, parts[1])
        if use.route.grad_factor != 1.0:
            _torch.foreach_div([out], 1 / use.route.grad_factor)
        self.free_slot(use, out, slot)
        return out

    def free_slot(self, use: BucketUse, out: Tensor, slot: int | None) -> None:
        if out.is_cuda and slot is not None:
            event = torch.cuda.current_stream(out.device).record_event()
            use.hierarchy.pools.slots.users[slot] = event

    def _issue(self) -> None:
        """Start what is next in the order, as long as it is complete."""
        while self._place < len(self.order):
            index = self.order[self._place]
            complete = self._complete.get(index)
            if complete is None:
                return
            self._complete[index] = _STARTED  # so that the full gradients are not kept
            if complete is not _STARTED:
                self._start(index, *complete)
            self._place += 1

    def _start(self, index: int, values: Sequence[Tensor | None], out: Tensor | None) -> None:
        use = self.uses[index]
        bucket, slots = use.bucket, use.hierarchy.pools.slots
        device, now = use.home.device if out is None else out.device, self.levels_now(use.route)
        push_all(use.home.life)
        copies = self.copies(use)
        # Nothing is scattered: the gradients are packed where they stay.
        stays = out is not None and now.size == 1 and self.late_size(use.route) == 1
        slot = self._place % slots.count
        used = slot if copies or not stays else None
        if used is not None:
            _until_free(use.hierarchy, used)
        if out is not None and stays:
            pair = (out, out)
        else:
            # What does not travel is not rounded.
            dtype = bucket.reduce if now.size > 1 else self.dtype_of(bucket)
            pair = slots.pair(slot, (bucket.numel,), dtype, device)
        first = pair[0] if out is None or now.size > 1 else out
        pack_full(bucket, use.by_slot(values), device=device, out=first)
        parts = [buffer.view(now.size, -1) for buffer in (first, pair[1])]
        comms = scatter_comms(now, parts[0])
        if out is None:  # NCCL reads one buffer of the pair and writes the other, in turns
            at = len(comms) % 2 if device.type == "cuda" else 0
            out = pair[at][: bucket.numel // now.size]
        late, levels = self.late_comms(use, out, copies=copies)
        steps = self.steps(index, parts, out, used)
        keep = (*pair, out)
        pending = Pending(steps, [*comms, *late], keep=keep, device=device, purpose="reduce")
        self._pendings.append(pending)
        if used is not None and device.type != "cuda":
            slots.users[used] = pending, len(now.levels) + levels


def _until_free(home: Hierarchy, slot: int) -> None:
    """Wait for the slot's last user; see [Note: gradients in flight]."""
    user = home.pools.slots.users[slot]
    if isinstance(user, tuple):
        pending, levels = user
        if not pending.passed(levels):
            wait_until(home.life, lambda: pending.passed(levels))
    elif user is not None:
        torch.cuda.current_stream(home.device).wait_event(user)

"""`GradSum`: the gradients of a whole step, added up over its micro-steps."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mics_fn import _torch
from mics_fn.collectives import Steps, mean_comms, mean_steps, scatter_comms, scatter_steps
from mics_fn.deferred.graph import Passes
from mics_fn.deferred.reduction import Reduction, elements
from mics_fn.errors import LeafError, TreeError, message
from mics_fn.groups import Buffers, Comm, Route, Slot
from mics_fn.schedules import Run
from mics_fn.shards import Bucket, BucketUse, Opened, refuse_derivative, split_chunk
from mics_fn.tree import Tree


class SumOfPasses(Reduction):
    """The gradients of all backward passes of a step: hop 1 of each, their mean, then hop 2.

    Args:
      uses, run: as for `Reduction`.
      micro_steps: the number of passes in the step.
      dtype: dtype of the sum; default the bucket's `accumulate`, which is at least float32.
    """

    def __init__(
        self,
        uses: Sequence[BucketUse],
        run: Run,
        micro_steps: int,
        dtype: torch.dtype | None,
    ) -> None:
        self.micro_steps, self._sum_dtype = micro_steps, dtype
        self.passes = 0  # that have ended
        self.totals: dict[int, list[Tensor]] = {}  # [chunk]; of one rank alone: pieces
        self._given: list[tuple[Buffers, Tensor]] = []  # to give back at the end
        super().__init__(uses, run)

    @property
    def last(self) -> bool:
        """Whether this pass ends with hop 2."""
        return self.passes == self.micro_steps - 1

    def end_pass(self) -> None:
        """Prepare for the next pass, once no bucket is missing."""
        super().end_pass()
        self.passes += 1

    def pieces(self, index: int) -> list[Tensor]:
        """A bucket's mean gradients, one per member, in the dtype of the shards."""
        use, dtype = self.uses[index], self.uses[index].bucket.dtype
        total = [t if t.dtype is dtype else t.to(dtype) for t in self.totals[index]]
        if use.alone:
            return total
        return use.by_member(split_chunk(use.bucket, use.route.chunk, total[0]))

    def release(self) -> None:
        """Give the memory of the gradients back, for the next step."""
        for buffers, tensor in self._given:
            buffers.give(tensor)
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

    def target(self, use: BucketUse, values: Sequence[Tensor | None]) -> Tensor | None:
        if not self.has_target:
            return None
        shape, home = (use.bucket.numel // self.levels_now(use.route).size,), use.hierarchy
        return home.pools.chunks.take(shape, self.dtype_of(use.bucket), home.device, exact=True)

    def handed_out(self, use: BucketUse, out: Tensor | None) -> list[Tensor]:
        return []

    def add_alone(self, index: int, values: Sequence[Tensor | None]) -> list[Tensor]:
        use = self.uses[index]
        # torch may give one tensor as two gradients, so a sum needs memory of its own.
        written = self.micro_steps > 1 and not self.passes
        pieces = self.flat_pieces(use, values, copy=written or self._divisor(use) != 1)
        self._sum(index, pieces, self.last)
        return []

    def copies(self, use: BucketUse) -> bool:
        other = self.dtype_of(use.bucket) != use.bucket.reduce
        return self.last and other and use.replicas.size > 1

    def late_comms(self, use: BucketUse, out: Tensor) -> tuple[list[Comm], int]:
        if not self.last:
            return [], 0
        late = self.late_levels(use.route)
        comms, hop_2 = scatter_comms(late, out), mean_comms(use.replicas, out)
        return [*comms, *hop_2], len(late.levels) + (len(hop_2) if self.copies(use) else 0)

    def steps(self, index: int, full: Tensor, out: Tensor, slot: Slot) -> Steps:
        """Hop 1 and the sum over passes; in the last pass also the late levels and hop 2."""
        use, last = self.uses[index], self.last  # read now, since the steps run later
        now, late, copies = (
            self.levels_now(use.route),
            self.late_levels(use.route),
            self.copies(use),
        )
        reduce = use.bucket.reduce

        def steps() -> Steps:
            yield from scatter_steps(now, full, out, slot.second.view(reduce))
            (total,) = self._sum(index, [out], last)
            if late.size > 1:
                total = yield from self._late_steps(use, late, total, slot)
                self.totals[index] = [total]
            if not copies:
                self.free_slot(slot)
            if last:
                self._given.append((use.hierarchy.pools.chunks, total))
                spare = elements(slot.first, total.numel(), reduce)
                yield from mean_steps(use.replicas, total, reduce, spare)
            if copies:
                self.free_slot(slot)
            return total

        return steps()

    def _late_steps(self, use: BucketUse, late: Route, total: Tensor, slot: Slot) -> Steps:
        """Hop 1 over the levels that wait for the last pass, in the memory of the slot."""
        bucket, pool = use.bucket, use.hierarchy.pools.chunks
        copy = elements(slot.first, total.numel(), bucket.reduce)
        full = total if total.dtype == bucket.reduce else copy.copy_(total)
        mine = pool.take((bucket.chunk,), total.dtype, total.device, exact=True)
        spare = slot.second.view(bucket.reduce)
        yield from scatter_steps(late, full.view(late.size, -1), mine, spare)
        # Given back at the end of the step: earlier, the number of chunks would depend on timing.
        self._given.append((pool, total))
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


class GradSum:
    """The gradients of a step: hop 1 of every pass, their mean over passes, then hop 2.

    Hop 1 of a bucket starts when its gradients are complete, and overlaps the rest of backward. In
    the last pass hop 2 of the bucket follows at once. Nothing waits before `grads` does.

    Args:
      micro_steps: the number of backward passes in the step.
      dtype: dtype of the sum over passes; default the bucket's `accumulate`, at least float32.

    Memory: this rank's shards of the gradients, and a few buckets in full.

    Raises:
      ValueError: `micro_steps` is not a positive int.

    Example:
      >>> groups = make_groups(1)
      >>> shards = shard({"w": torch.ones(2)}, groups)
      >>> total = GradSum(micro_steps=2)
      >>> with defer(shards, groups, on_demand(), into=total) as full:
      ...     for x in (1.0, 3.0):
      ...         total.backward((full["w"] * x).sum())
      >>> total.grads()["w"].data
      tensor([2., 2.])

    References: MiCS, Zhang et al., VLDB 2022, arXiv:2205.00119, section 3.4.
    """

    def __init__(self, micro_steps: int = 1, *, dtype: torch.dtype | None = None) -> None:
        if not isinstance(micro_steps, int) or micro_steps < 1:
            raise ValueError(f"GradSum: micro_steps={micro_steps}, expected an int of at least 1")
        self.micro_steps, self.dtype = micro_steps, dtype
        self._bound: _Bound | None = None
        self._running = False  # whether `backward` is running

    def expect(self, opened: Opened, run: Run) -> list[Tensor]:
        """Called by `defer`: prepare for the gradients of this tree, from this run.

        Returns:
          The pieces of the tree as leaves of autograd.
        """
        refuse_derivative("defer(into=)", (), "leave into= out inside torch.func")
        if self._bound is not None:
            text = "defer: into= is in use by another run"
            raise TreeError(message(text, fix="make a new GradSum for each step"))
        variables = [piece.detach().requires_grad_() for piece in opened.pieces]
        reduction = SumOfPasses(opened.uses, run, self.micro_steps, self.dtype)
        passes = Passes(variables, opened.uses, run)
        self._bound = _Bound(opened, run, variables, reduction, passes)
        return variables

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        """Run one backward pass and add its gradients to the sum.

        Args:
          loss: one number, of this rank's samples of the micro-step.
          retain_graph: keep what autograd saved, for another backward through the same loss.

        Communication: hop 1 of every bucket, those without a gradient as zeros; in the last pass
          hop 2 as well.

        Raises:
          TreeError: all passes are done, or no `defer(into=)` has named this value.
          LeafError: a block is recomputed by a backward of its own, unlike in the first step, so
            that a bucket's gradients come in several parts.
        """
        refuse_derivative("GradSum.backward", (), "call it outside of torch.func")
        bound = self._bound
        if bound is None or bound.reduction.passes == self.micro_steps:
            fix = "defer(..., into=) first, and give micro_steps= as many passes as there are"
            raise TreeError(message(f"GradSum.backward: {self._done()}", fix=fix))
        if loss.requires_grad and bound.variables:
            self._differentiate(bound, loss, retain_graph)
        reduction = bound.reduction
        bound.passes.end(loss, reduction.missing(), last=reduction.last)
        bound.run.end_pass(reduction.last)
        reduction.fill_missing()
        reduction.end_pass()

    def _done(self) -> str:
        done = 0 if self._bound is None else self._bound.reduction.passes
        return f"{done} of {self.micro_steps} passes are done"

    def _differentiate(self, bound: "_Bound", loss: Tensor, retain_graph: bool) -> None:
        self._running = True
        try:
            for index, grads in bound.passes.differentiate(loss, retain_graph).items():
                self.add(index, grads)
        except RuntimeError as error:
            if "backward through the graph a second time" not in f"{error}":
                raise
            text = "GradSum.backward: an earlier backward let go of what this loss needs"
            raise TreeError(message(text, fix="pass retain_graph=True to that one")) from error
        finally:
            self._running = False

    def add(self, index: int, grads: Sequence[Tensor | None]) -> None:
        """Called in backward with a bucket's full gradients, one per member.

        See [Note: a backward in backward] in `deferred.graph`.
        """
        bound = self._bound
        if bound is None or not self._running:
            if all(grad is None for grad in grads):
                return
            text = "defer(into=): another backward went through it than that of its GradSum"
            raise TreeError(message(text, fix="call total.backward(loss), not loss.backward()"))
        if bound.reduction.has(index):
            text = "backward: a bucket got gradients in two parts in one pass"
            fix = "use torch.utils.checkpoint, instead of a backward that runs in backward"
            raise LeafError(message(text, [f"bucket {index}"], fix))
        if not bound.passes.keeps(index, grads):
            bound.reduction.add(index, grads)

    def wait(self) -> None:
        """Wait for all reductions that were started; on CUDA the current stream waits for them."""
        if self._bound is not None:
            self._bound.reduction.wait()

    def grads(self) -> Tree:
        """The gradient of the loss averaged over passes and ranks, as a tree of shards.

        Returns:
          A tree for `opt_step`, valid until `release`.

        Communication: it waits for the reductions that `backward` started.

        Raises:
          TreeError: fewer than `micro_steps` passes are done.
          LeafError: no parameter got a gradient in any pass on any rank.
        """
        bound = self._bound
        if bound is None or bound.reduction.passes != self.micro_steps:
            fix = "call backward for each micro-step first"
            raise TreeError(message(f"GradSum.grads: {self._done()}", fix=fix))
        bound.reduction.wait()
        bound.passes.check()
        reduction = bound.reduction
        return bound.opened.rebuild({i: reduction.pieces(i) for i in reduction.totals})

    def release(self) -> None:
        """Give the memory of the gradients back, for the next step; they must not be read then."""
        if self._bound is not None:
            self._bound.reduction.release()


class _Bound(NamedTuple):
    """What belongs to the run whose gradients a `GradSum` takes."""

    opened: Opened
    run: Run
    variables: list[Tensor]  # the pieces, as leaves of autograd
    reduction: SumOfPasses
    passes: Passes

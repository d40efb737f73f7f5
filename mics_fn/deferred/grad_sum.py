"""`GradSum`: the gradients of a whole step, added up over its micro-steps."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mics_fn import checks
from mics_fn.deferred.graph import Passes, check_loss
from mics_fn.deferred.placed_sum import PlacedSum, places_of
from mics_fn.deferred.sum_of_passes import LetGo, SumOfPasses
from mics_fn.errors import LeafError, PlanError, TreeError, message
from mics_fn.offload import Where, where_of
from mics_fn.schedules import Run
from mics_fn.shards import Arrival, Opened, Sharded, check_dtype, forget_origins, refuse_derivative
from mics_fn.tree import Tree

_OTHER = message(
    "defer(into=): another backward went through it than that of its GradSum",
    fix="call total.backward(loss), not loss.backward()",
)


class GradSum:
    """The gradients of a step: hop 1 of every pass, their mean over passes, then hop 2.

    Hop 1 of a bucket starts when its gradients are complete, and overlaps the rest of backward. In
    the last pass hop 2 of the bucket follows at once. Nothing waits before `grads` does.

    Args:
      micro_steps: the number of backward passes in the step.
      dtype: dtype of the sum over passes; default the bucket's `accumulate`, at least float32.
      where: where the sum lies until it is stepped with, as `grads` of a `Where` says; see `where`.
        The gradients of a bucket lie together, where those of its largest leaf should.

    Memory: this rank's shards of the gradients, where `where` says, and a few buckets in full.

    Raises:
      PlanError: `micro_steps` is not a positive int, `dtype` is not a float dtype, or `where` is
        not a place, or says nothing about `grads`.

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

    def __init__(
        self,
        micro_steps: int = 1,
        *,
        dtype: torch.dtype | None = None,
        where: Where | str | None = None,
    ) -> None:
        checks.integer("GradSum", "micro_steps", micro_steps)
        if dtype is not None:
            check_dtype("GradSum", "dtype", dtype)
        self.micro_steps, self.dtype, self._where = micro_steps, dtype, _of_sums(where_of(where))
        self.before_last: Callable[[], None] = lambda: None  # see `Reduction`
        # Whether a pass counts nothing, so that its gradients are zeros whatever they are.
        self.void: bool | Tensor = False
        self.other_backward = _OTHER  # the error of a backward that is not that of this object
        self._bound: _Bound | None = None
        self._running = False  # whether `backward` is running
        self._released = False  # whether its memory was given back

    def expect(self, opened: Opened, run: Run, let_go: LetGo) -> list[Tensor]:
        """Called by `defer`: prepare for the gradients of this tree, from this run.

        Returns:
          The pieces of the tree as leaves of autograd.
        """
        refuse_derivative("defer(into=)", (), "leave into= out inside torch.func")
        if self._bound is not None:
            text = "defer: into= is in use by another run"
            raise TreeError(message(text, fix="make a new GradSum for each step"))
        variables = [piece.detach().requires_grad_() for piece in opened.pieces]
        how = (opened.uses, run, self.micro_steps, self.dtype, let_go)
        places = places_of(self._where, opened) if self._where.moves("grads") else {}
        host_bytes = self._where.host_bytes
        reduction = PlacedSum(places, host_bytes, *how) if places else SumOfPasses(*how)
        reduction.before_last = self.before_last
        forget_origins(use.bucket for use in opened.uses)  # of a step that was not judged
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
          LeafError: the loss is not one number; or a block is recomputed by a backward of its own,
            unlike in the first step, so that a bucket's gradients come in several parts.
        """
        refuse_derivative("GradSum.backward", (), "call it outside of torch.func")
        bound = self._bound
        if bound is None or bound.reduction.passes == self.micro_steps:
            fix = "defer(..., into=) first, and give micro_steps= as many passes as there are"
            raise TreeError(message(f"GradSum.backward: {self._done()}", fix=fix))
        check_loss("GradSum.backward", loss)
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
        bound.run.begin_backward()
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
            raise TreeError(self.other_backward)
        if self.void is not False:
            grads = [None if grad is None else self._emptied(grad) for grad in grads]
        if bound.reduction.has(index):
            text = "backward: a bucket got gradients in two parts in one pass"
            fix = "use torch.utils.checkpoint, instead of a backward that runs in backward"
            raise LeafError(message(text, [f"bucket {index}"], fix))
        if not bound.passes.keeps(index, grads):
            bound.reduction.add(index, grads)

    def _emptied(self, grad: Tensor) -> Tensor:
        if isinstance(self.void, Tensor):
            return grad.masked_fill(self.void, 0)
        return torch.zeros_like(grad)

    def wait(self) -> None:
        """Wait for all reductions that were started; on CUDA the current stream waits for them."""
        if self._bound is not None:
            self._bound.reduction.wait()

    def grads(self) -> Tree:
        """The gradient of the loss averaged over passes and ranks, as a tree of shards.

        Returns:
          A tree for `opt_step`, valid until `release`. All of it is on the device: what lies
          elsewhere is brought. `opt_step` and `Guard.judge` take this value itself, too, and then
          bring one bucket at a time.

        Communication: it waits for the reductions that `backward` started.

        Raises:
          TreeError: fewer than `micro_steps` passes are done, or it was released.
          LeafError: no parameter got a gradient in any pass on any rank.
        """
        bound = self._complete("grads")
        bound.reduction.wait()
        bound.passes.check()
        reduction = bound.reduction
        return bound.opened.rebuild({i: reduction.pieces(i) for i in reduction.totals})

    @property
    def elsewhere(self) -> bool:
        """Whether some of the sum lies elsewhere than on the device."""
        return self._bound is not None and isinstance(self._bound.reduction, PlacedSum)

    def lying(self) -> Tree:
        """`grads` with its pieces where they lie, valid until `release`: for tables of memory."""
        bound = self._complete("lying")
        bound.reduction.wait()
        return bound.opened.rebuild({i: bound.reduction.lying(i) for i in bound.reduction.totals})

    def arrival(self) -> Arrival:
        """The same gradients for `opt_step`, which takes each bucket once its hop 2 is done.

        Raises:
          TreeError, LeafError: as `grads`.
        """
        bound = self._complete("arrival")
        opened, reduction = bound.opened, bound.reduction
        if not bound.passes.reached:  # the step is refused unless other ranks have a gradient
            reduction.wait()
        bound.passes.check()
        trained = (i for i, leaf in enumerate(opened.leaves) if isinstance(leaf, Sharded))
        number = {i: k for k, i in enumerate(trained)}
        order = reduction.order

        def take(place: int) -> list[Tensor]:
            reduction.wait_for(order[place])
            return reduction.pieces(order[place])

        return Arrival(
            like=opened.rebuild({}),
            home=opened.homes[0],
            order=[[number[i] for i in opened.uses[index].members] for index in order],
            here=lambda k: not reduction.elsewhere(order[k]) and reduction.done(order[k]),
            take=take,
            whole=self.grads,
        )

    def _complete(self, verb: str) -> "_Bound":
        """What belongs to the run, once all of its passes are done."""
        bound = self._bound
        if bound is None or bound.reduction.passes != self.micro_steps:
            fix = "call backward for each micro-step first"
            raise TreeError(message(f"GradSum.{verb}: {self._done()}", fix=fix))
        if self._released:
            text = f"GradSum.{verb}: its memory was given back"
            raise TreeError(message(text, fix="call release() last"))
        return bound

    def release(self) -> None:
        """Give the memory of the gradients back, for the next step; they must not be read then."""
        if self._bound is not None:
            self._bound.reduction.release()
            self._released = True


def _of_sums(where: Where) -> Where:
    """The places of sums of gradients, after a check that some are given."""
    if where != Where() and not where.sets("grads"):
        text = f"GradSum: where='{where}' has no effect: it does not say where grads lie"
        raise PlanError(message(text, fix="write grads=, as in where='grads=host'"))
    return where


class _Bound(NamedTuple):
    """What belongs to the run whose gradients a `GradSum` takes."""

    opened: Opened
    run: Run
    variables: list[Tensor]  # the pieces, as leaves of autograd
    reduction: SumOfPasses
    passes: Passes

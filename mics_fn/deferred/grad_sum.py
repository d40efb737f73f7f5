"""`GradSum`: the gradients of a whole step, added up over its micro-steps.

[Note: a backward in backward] Reentrant checkpointing recomputes a block in backward and runs a
backward of its own through it. Then the gradients of a bucket come in several parts, of which none
is known to be the last; and autograd leaves out such a block where the graph has no other way from
it to the parameters. So it is refused: by a walk through the graph of the first pass, and of those
in which a bucket gets no gradient for the first time. Where a bucket does get a second part, that
is an error, too.

[Note: no gradient] The loss of a rank may use no parameter at all, for example if all its labels
are masked: its gradients are zeros. But if that is so on every rank, the step would train nothing.
Each such rank adds one to a count in the store before it ends the last pass. A rank's reductions
are done only after all other ranks have ended that pass, so it can read the final count then
without waiting for anyone.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mics_fn import _device, checks, shards
from mics_fn.deferred.reduction import LetGo, Reduction, places_of
from mics_fn.errors import LeafError, PlanError, message
from mics_fn.offload import Where, where_of
from mics_fn.schedules import Run
from mics_fn.tree import Tree

# Losses: one number, which depends on parameters that were given.


def check_loss(verb: str, loss: Any) -> None:
    """Raise LeafError unless a loss is one number, as a tensor."""
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return
    got = f"is {type(loss).__name__}"
    if isinstance(loss, Tensor):
        got = f"has shape {tuple(loss.shape)}"
    fix = "return a tensor: the mean() over samples, without item(), or the .loss of an output"
    raise LeafError(f"{verb}: the loss {got}, expected one number", fix=fix)


def strangers_of(loss: Tensor) -> list[nn.Parameter]:
    """Find Parameters of modules in the graph of a loss, which were not gathered.

    The walk takes a microsecond per node.

    Raises:
      LeafError: a block is recomputed by a backward of its own; see [Note: a backward in backward].
    """
    todo: list[Any] = [loss.grad_fn] if loss.grad_fn is not None else []
    seen, found = {None, *todo}, list[nn.Parameter]()
    while todo:
        node = todo.pop()
        # It is called `CheckpointFunction` in torch, DeepSpeed, Megatron and fairscale.
        if "Checkpoint" in node.name():
            text = "backward: a block is checkpointed with use_reentrant=True"
            raise LeafError(text, [f"its graph has a {node.name()}"], "use use_reentrant=False")
        variable = getattr(node, "variable", None)
        if isinstance(variable, nn.Parameter):
            found.append(variable)
        for following, _ in node.next_functions:
            if following not in seen:
                seen.add(following)
                todo.append(following)
    return found


def _depends_on(strangers: Sequence[Tensor]) -> str:
    """Describe what a loss depends on besides the parameters that it was given."""
    shapes = ", ".join(str(tuple(p.shape)) for p in strangers[:3])
    more = ", ..." if len(strangers) > 3 else ""
    return f"depends on Parameters that it was not given, of shape {shapes}{more}"


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
            shards.check_dtype("GradSum", "dtype", dtype)
        self._where = where if isinstance(where, Where) else where_of(where)
        if self._where.moved and "grads" not in self._where.moved:
            text = f"GradSum: where='{self._where}' has no effect: it does not say where grads lie"
            raise PlanError(text, fix="write grads=, as in where='grads=host'")
        self.micro_steps, self.dtype = micro_steps, dtype
        self.before_last: Callable[[], None] = lambda: None  # see `Reduction`
        # Whether a pass counts nothing, so that its gradients are zeros whatever they are.
        self.void: bool | Tensor = False
        self.other_backward = _OTHER  # the error of a backward that is not that of this object
        self._bound: _Bound | None = None
        self._running = False  # whether `backward` is running
        self._released = False  # whether its memory was given back

    def expect(self, opened: shards.Opened, run: Run, let_go: LetGo) -> list[Any]:
        """Called by `defer`: prepare for the gradients of this tree, from this run.

        Returns:
          The data of each leaf, pieces as leaves of autograd.
        """
        shards.refuse_derivative("defer(into=)", (), "leave into= out inside torch.func")
        if self._bound is not None:
            text = "defer: into= is in use by another run"
            raise LeafError(text, fix="make a new GradSum for each step")
        variables, full = [], list(opened.data)
        for i, leaf in enumerate(opened.leaves):
            if isinstance(leaf, shards.Sharded):
                full[i] = leaf.data.detach().requires_grad_()
                variables.append(full[i])
        places = places_of(self._where, opened) if "grads" in self._where.moved else None
        kinds = self.micro_steps, self.dtype, let_go, places, self._where.host_bytes
        reduction = Reduction(opened.uses, run, *kinds)
        reduction.before_last = self.before_last
        shards.forget_nonfinite(use.bucket for use in opened.uses)  # of a step that was not judged
        self._bound = _Bound(opened, run, variables, reduction)
        return full

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        """Run one backward pass and add its gradients to the sum.

        Args:
          loss: one number, of this rank's samples of the micro-step.
          retain_graph: keep what autograd saved, for another backward through the same loss.

        Communication: hop 1 of every bucket, those without a gradient as zeros; in the last pass
          hop 2 as well.

        Raises:
          LeafError: all passes are done, or no `defer(into=)` has named this value.
          LeafError: the loss is not one number; or a block is recomputed by a backward of its own.
        """
        shards.refuse_derivative("GradSum.backward", (), "call it outside of torch.func")
        bound = self._bound
        if bound is None or bound.reduction.passes == self.micro_steps:
            fix = "defer(..., into=) first, and give micro_steps= as many passes as there are"
            raise LeafError(f"GradSum.backward: {self._done()}", fix=fix)
        check_loss("GradSum.backward", loss)
        run, reduction = bound.run, bound.reduction
        if loss.requires_grad and bound.variables:
            run.begin_backward()
            if not run.learned.examined:
                run.learned.examined, bound.strangers = True, strangers_of(loss)
            self._running = True
            try:
                torch.autograd.grad(
                    loss, bound.variables, allow_unused=True, retain_graph=retain_graph
                )
            finally:
                self._running = False
        if not bound.reached:
            bound.note_unreached(loss)
        missing = reduction.missing()
        if loss.requires_grad and not run.learned.missed.issuperset(missing):
            run.learned.missed.update(missing)
            strangers_of(loss)
        run.end_pass()
        for index in missing:  # reduced as zeros
            reduction.add(index, [None] * len(bound.opened.uses[index].members))
        reduction.end_pass()

    def _done(self) -> str:
        done = 0 if self._bound is None else self._bound.reduction.passes
        return f"{done} of {self.micro_steps} passes are done"

    def add(self, index: int, grads: Sequence[Tensor | None]) -> None:
        """Called in backward with a bucket's full gradients, one per member."""
        bound = self._bound
        if bound is None or not self._running:
            if all(grad is None for grad in grads):
                return
            raise LeafError(self.other_backward)
        if self.void is not False:
            grads = [None if grad is None else self._emptied(grad) for grad in grads]
        bound.reached = bound.reached or any(grad is not None for grad in grads)
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
          LeafError: fewer than `micro_steps` passes are done, or it was released.
          LeafError: no parameter got a gradient in any pass on any rank.
        """
        bound = self._complete("grads")
        bound.reduction.wait()
        bound.check()
        reduction = bound.reduction
        return bound.opened.rebuild({i: reduction.pieces(i) for i in reduction.totals})

    @property
    def is_placed(self) -> bool:
        """Whether some of the sum lies elsewhere than on the device."""
        return self._bound is not None and bool(self._bound.reduction.placed)

    def in_place(self) -> Tree:
        """`grads` with its pieces where they lie, valid until `release`: for tables of memory."""
        bound = self._complete("in_place")
        bound.reduction.wait()
        reduction = bound.reduction
        return bound.opened.rebuild({i: reduction.in_place(i) for i in reduction.totals})

    def __grad_stream__(self) -> shards.GradStream:
        """Return the gradients for `opt_step`, which takes each bucket once its hop 2 is done.

        Raises:
          LeafError: as `grads`.
        """
        bound = self._complete("grads")
        opened, reduction = bound.opened, bound.reduction
        if not bound.reached:  # the step is refused unless other ranks have a gradient
            reduction.wait()
        bound.check()
        trained = (i for i, leaf in enumerate(opened.leaves) if isinstance(leaf, shards.Sharded))
        number = {i: k for k, i in enumerate(trained)}
        order = reduction.order

        def take(place: int) -> list[Tensor]:
            reduction.wait_for(order[place])
            return reduction.pieces(order[place])

        return shards.GradStream(
            like=opened.rebuild({}),
            home=opened.homes[0],
            order=[[number[i] for i in opened.uses[index].members] for index in order],
            here=lambda k: order[k] not in reduction.placed and reduction.done(order[k]),
            take=take,
        )

    def _complete(self, verb: str) -> "_Bound":
        """What belongs to the run, once all of its passes are done."""
        bound = self._bound
        if bound is None or bound.reduction.passes != self.micro_steps:
            fix = "call backward for each micro-step first"
            raise LeafError(f"GradSum.{verb}: {self._done()}", fix=fix)
        if self._released:
            raise LeafError(f"GradSum.{verb}: its memory was given back", fix="call release() last")
        return bound

    def release(self) -> None:
        """Give the memory of the gradients back, for the next step; they must not be read then."""
        if self._bound is not None:
            self._bound.reduction.release()
            self._released = True


@dataclass(eq=False)
class _Bound:
    """State of the run whose gradients a `GradSum` reduces."""

    opened: shards.Opened
    run: Run
    variables: list[Tensor]  # the pieces, as leaves of autograd
    reduction: Reduction
    reached: bool = False  # whether a gradient arose on this rank
    cause: str = ""  # why none did
    strangers: Sequence[Tensor] = ()  # in the first pass under this policy; nobody trains them

    def note_unreached(self, loss: Tensor) -> None:
        """Note why a pass gave no gradient here; in the last one, count it for all ranks."""
        if not loss.requires_grad:
            self.cause = "it requires no gradient: it was detached, or made under torch.no_grad()"
        elif strangers := strangers_of(loss):
            self.cause = f"it {_depends_on(strangers)}: it closes over another module"
        else:
            self.cause = "it requires a gradient, but depends on none of these parameters"
        if self.reduction.last and len(ranks := self._ranks()) > 1:
            self.run.tally(f"no gradient/{min(ranks)}", 1)

    def check(self) -> None:
        """Check, after all reductions, that this step trains something.

        Raises:
          LeafError: on all ranks, if no parameter got a gradient on any of them.
        """
        if self.reached and self.strangers:
            text = f"backward: the loss {_depends_on(self.strangers)}"
            lines = ["they get no gradient here; this is said once"]
            fix = "use the model that the loss function is given, or detach what is not trained"
            warnings.warn(message(text, lines, fix), stacklevel=3)
            self.strangers = ()
        if self.reached or not (ranks := self._ranks()):
            return
        _device.synchronize(self.opened.uses[0].home.device)  # only its stream waits for reductions
        n = len(ranks)
        if n == 1 or self.run.tally(f"no gradient/{min(ranks)}", 0) == n:
            who = f", on any of {n} ranks" if n > 1 else ""
            text = f"backward: the loss gave no parameter a gradient{who}"
            fix = "compute it from the model, or the parameters, that the loss function is given"
            raise LeafError(text, [self.cause], fix)

    def _ranks(self) -> Sequence[int]:
        """Return the ranks that reduce together; none where nothing is trained."""
        uses = [use for use in self.opened.uses if use.bucket.trainable and use.bucket.numel]
        return max((use.home.ranks for use in uses), key=len, default=())

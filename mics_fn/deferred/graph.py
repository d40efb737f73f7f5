"""Backward passes of a loss: how each must be run, and what missing gradients mean.

[Note: a backward in backward] Reentrant checkpointing recomputes a block in backward and runs a
backward of its own through it, which autograd allows only if the outer backward names no inputs.
Then the gradients of a bucket come in several parts, and it cannot be known which one is the last.
So they are added up, and reduced at the end of the pass.

[Note: no gradient] The loss of a rank may use no parameter at all, for example if all its labels
are masked: its gradients are zeros. But if that is so on every rank, the step would train nothing.
Each such rank adds one to a count in the store before it ends the last pass. A rank's reductions
are done only after all other ranks have ended that pass, so it can read the final count then
without waiting for anyone.
"""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mics_fn import _device
from mics_fn.errors import LeafError, message
from mics_fn.schedules import Run
from mics_fn.shards import BucketUse


def check_loss(verb: str, loss: Any) -> None:
    """Raise LeafError unless a loss is one number, as a tensor."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = f"has shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else _kind_of(loss)
        text = f"{verb}: the loss {got}, expected one number"
        raise LeafError(message(text, fix=_as_one_number(loss)))


def _kind_of(value: Any) -> str:
    """What is given for a loss, in words."""
    named = f" of {', '.join(map(str, list(value)[:4]))}" if isinstance(value, Mapping) else ""
    return f"is {'None' if value is None else type(value).__name__}{named}"


def _as_one_number(value: Any) -> str:
    """How a scalar tensor is made of what was given for a loss."""
    if isinstance(value, Tensor):
        return "take the mean() over its samples"
    if value is None:
        return "return the loss"
    if isinstance(value, float):
        return "return the tensor, without item() or float()"
    if isinstance(getattr(value, "loss", None), Tensor):
        return "return its .loss"
    if isinstance(value, Mapping | Sequence):
        return "return the loss alone, and append what else is to be seen to a list of your own"
    return "return a scalar tensor"


class Graph(NamedTuple):
    """What a walk through the graph of a loss has found."""

    recomputes: bool = False  # some node runs a backward of its own
    strangers: tuple[Tensor, ...] = ()  # Parameters of modules, which were not gathered

    @classmethod
    def of(cls, loss: Tensor) -> "Graph":
        """Walk the graph of a loss, which takes a microsecond per node."""
        todo: list[Any] = [loss.grad_fn] if loss.grad_fn is not None else []
        seen, recomputes, strangers = {None, *todo}, False, []
        while todo:
            node = todo.pop()
            # The node is called `CheckpointFunction` in torch, DeepSpeed, Megatron and fairscale.
            recomputes = recomputes or "Checkpoint" in node.name()
            variable = getattr(node, "variable", None)
            if isinstance(variable, nn.Parameter):
                strangers.append(variable)
            for following, _ in node.next_functions:
                if following not in seen:
                    seen.add(following)
                    todo.append(following)
        return cls(recomputes, tuple(strangers))

    def describe_strangers(self) -> str:
        """Its strangers in words."""
        shapes = ", ".join(str(tuple(p.shape)) for p in self.strangers[:3])
        more = ", ..." if len(self.strangers) > 3 else ""
        return f"depends on Parameters that it was not given, of shape {shapes}{more}"


def differentiate(
    loss: Tensor, variables: Sequence[Tensor], *, recomputes: bool, retain_graph: bool = False
) -> None:
    """Run backward for its effects; see [Note: a backward in backward]."""
    if recomputes:
        torch.autograd.backward(loss, retain_graph=retain_graph)
    else:
        torch.autograd.grad(loss, variables, allow_unused=True, retain_graph=retain_graph)


class Passes:
    """The backward passes of a step: how to run each, and what got no gradient in it.

    Args:
      variables: the tensors to differentiate with respect to.
      uses: the buckets.
      run: the run of the model.
    """

    def __init__(self, variables: Sequence[Tensor], uses: Sequence[BucketUse], run: Run) -> None:
        self._variables, self._run = variables, run
        homes = [use.home for use in uses if use.bucket.trainable and use.bucket.numel]
        # The ranks that reduce together.
        self._ranks: Sequence[int] = max((home.ranks for home in homes), key=len, default=())
        self._device = homes[0].device if homes else None
        self._reached: set[int] = set()
        self._held: dict[int, list[Tensor | None]] | None = None
        self._graph: Graph | None = None  # of the first pass under this policy
        self._cause = ""

    def differentiate(self, loss: Tensor, retain_graph: bool) -> dict[int, list[Tensor | None]]:
        """Run one pass; returns the gradients that were held until its end, by bucket."""
        learned = self._run.learned
        if learned.recomputes is None:
            self._graph = Graph.of(loss)
            learned.recomputes = self._graph.recomputes
        self._held = {} if learned.recomputes else None
        differentiate(
            loss, self._variables, recomputes=learned.recomputes, retain_graph=retain_graph
        )
        held, self._held = self._held, None
        return held or {}

    def keeps(self, index: int, grads: Sequence[Tensor | None]) -> bool:
        """Take note of a bucket's gradients; returns whether they are held until the pass ends."""
        if any(grad is not None for grad in grads):
            self._reached.add(index)
        if self._held is None:
            return False
        sums = self._held.setdefault(index, [None] * len(grads))
        for i, grad in enumerate(grads):
            if grad is not None:
                before = sums[i]
                sums[i] = grad if before is None else before + grad
        return True

    def end(self, loss: Tensor, missing: Sequence[int], *, last: bool) -> None:
        """Take note of the end of a pass, in which the `missing` buckets got no gradient.

        Raises:
          LeafError: a block was recomputed by a backward of its own, unlike in earlier passes.
        """
        learned = self._run.learned
        new = set(missing) - learned.missed
        learned.missed |= new
        if new and self._graph is None and loss.requires_grad and not learned.recomputes:
            learned.recomputes = Graph.of(loss).recomputes
            if learned.recomputes:
                text = "backward: a block is checkpointed with use_reentrant=True, unlike before"
                lines = [f"{self._run.name(min(new))} got no gradient"]
                raise LeafError(message(text, lines, "use use_reentrant=False, or step again"))
        if self._reached:
            return
        if not loss.requires_grad:
            self._cause = "it requires no gradient: it was detached, or made under torch.no_grad()"
        else:
            graph = self._graph or Graph.of(loss)
            self._cause = "it requires a gradient, but depends on none of these parameters"
            if graph.strangers:
                self._cause = f"it {graph.describe_strangers()}: it closes over another module"
        if last and len(self._ranks) > 1:
            self._run.tally(self._event(), 1)

    @property
    def reached(self) -> bool:
        """Whether a gradient arose on this rank, so that `check` has nothing to refuse."""
        return bool(self._reached)

    def check(self) -> None:
        """Check, after all reductions, that this step trains something.

        Raises:
          LeafError: on all ranks, if no parameter got a gradient on any of them.
        """
        if self._reached or not self._ranks:
            self._warn()
            return
        if self._device is not None:
            _device.synchronize(self._device)  # reductions are only waited for on its stream
        n = len(self._ranks)
        if n == 1 or self._run.tally(self._event(), 0) == n:
            who = f", on any of {n} ranks" if n > 1 else ""
            text = f"backward: the loss gave no parameter a gradient{who}"
            fix = "compute it from the model, or the parameters, that the loss function is given"
            raise LeafError(message(text, [self._cause], fix))

    def _event(self) -> str:
        return f"no gradient/{min(self._ranks)}"

    def _warn(self) -> None:
        """Warn once that the loss uses parameters which are not trained here."""
        learned = self._run.learned
        if self._graph is None or not self._graph.strangers or learned.said:
            return
        learned.said = True
        lines = ["they get no gradient here; this is said once"]
        fix = "use the model that the loss function is given, or detach what is not trained"
        text = message(f"backward: the loss {self._graph.describe_strangers()}", lines, fix)
        warnings.warn(text, stacklevel=4)

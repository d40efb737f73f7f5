"""The losses and buffers of the micro-steps of one step, and what the step makes of them.

[Note: buffers in one tree] Usually the buffers of a module go from one micro-step to the next, and
then their mean over ranks is taken. In `Trainer(deterministic="canonical")` every micro-step begins
with the buffers before the step, as each rank does, and the mean is over all micro-batches of all
ranks, in the tree in which gradients are averaged. So one micro-step on each of four ranks and four
micro-steps on one rank give the same.

[Note: memory and bits] On the CPU a product of matrices has other bits where a matrix does not
begin at a multiple of 16 bytes, as a part of a batch may. So "canonical" copies each micro-batch.
Parameters lie at such multiples in all layouts.
"""

from typing import Any

import torch
from torch import Tensor

from mics_fn.collectives import mean_in_tree, mean_over_ranks
from mics_fn.deferred import GradSum
from mics_fn.errors import PlanError, message
from mics_fn.groups import Groups
from mics_fn.optim import unfused
from mics_fn.shards import map_contents
from mics_fn.train.buffers import Values
from mics_fn.tree import Tree


class MicroSteps:
    """What the micro-steps of a step leave behind, each beginning with the buffers of the last one.

    Args:
      trainer: takes the step; the buffers of its state are not written to.
      total: takes the gradients.
    """

    def __init__(self, trainer: Any, total: GradSum) -> None:
        self._program, self._before = trainer.program, trainer.state.buffers
        self._total, self._scale, self._kind = total, trainer.guard.scale, self._program.buffers
        self._losses: list[Tensor] = []
        self._buffers = self._kind.copies(self._before)  # for the next one to write to

    def run(self, full: Tree, batch: Any) -> None:
        """One micro-step, forward and backward."""

        def backward(loss: Tensor) -> None:
            self._total.backward(self._scale.scale(loss))

        self._took(*self._program(full, self._buffers, batch, backward))

    def _took(self, loss: Tensor, buffers: Values) -> None:
        self._losses.append(loss)
        self._buffers = buffers

    def end(self, home: Groups) -> tuple[Tensor, Values]:
        """The loss of the step on this rank, and the buffers, before their mean over ranks."""
        return torch.stack(self._losses).mean(), self._buffers


class CanonicalMicroSteps(MicroSteps):
    """Micro-steps for `placement.canonical`; see [Note: buffers in one tree]."""

    def __init__(self, trainer: Any, total: GradSum) -> None:
        super().__init__(trainer, total)
        self._found: list[Values] = []

    def run(self, full: Tree, batch: Any) -> None:
        """One micro-step, on tensors of their own memory: see [Note: memory and bits]."""
        super().run(full, map_contents(_dense_copy, batch))

    def _took(self, loss: Tensor, buffers: Values) -> None:
        self._losses.append(loss)
        self._found.append(buffers)
        self._buffers = self._kind.copies(self._before)

    def end(self, home: Groups) -> tuple[Tensor, Values]:
        """The loss and the buffers of the step, averaged over ranks and then over micro-steps.

        They are rounded once, from float64; a later mean over ranks does not change them.

        Communication: a mean of all losses and of the buffers of all micro-steps.
        """
        names, after = self._kind.averaged, self._found[-1]
        rows = [
            torch.cat([x.double().flatten() for x in (loss, *(values[name] for name in names))])
            for loss, values in zip(self._losses, self._found, strict=True)
        ]
        means = mean_in_tree(mean_over_ranks(home, torch.stack(rows)).unbind())
        loss, *found = means.split([1, *(after[name].numel() for name in names)])
        for name, mean in zip(names, found, strict=True):
            after[name] = mean.view(after[name].shape).to(after[name].dtype)
        loss = loss.view(()).to(self._losses[0].dtype)
        return loss, self._kind.copies(after) if self._kind.shared else after


def _dense_copy(x: Any, _: str) -> Any:
    return x.clone(memory_format=torch.contiguous_format) if isinstance(x, Tensor) else x


def canonical_optimizer(trainer: Any, optimizer: Any) -> Any:
    """The optimizer of a `Trainer`: for "canonical", one that computes the same in any shards.

    Raises:
      PlanError: with these options it cannot give the same bits on other numbers of ranks.
    """
    text, steps, own = "", trainer.accumulate, "use 1, 2, 4, 8, ..."
    if trainer.deterministic != "canonical":
        return optimizer
    if steps & (steps - 1):
        text = f"accumulate={steps} is not a power of two"
    elif trainer.replica_sync.apart:
        text = f"replica_sync={trainer.replica_sync.name} lets each replica step on its own samples"
        own = "leave replica_sync out: replicas are then equal after every step"
    elif trainer.replica_sync.reduce is not None:
        text = f"replica_sync={trainer.replica_sync.name} adds up in a way of its own"
        own = "leave hop2 and replica_sync out: the mean over replicas is one tree"
    elif trainer.grad_dtype is not None:
        text, own = f"grad_dtype={trainer.grad_dtype}", "leave it out: gradients keep their dtype"
    if text:
        raise PlanError(message(f"Trainer: {text}, with deterministic='canonical'", fix=own))
    return unfused(optimizer)


def micro_steps(trainer: Any, total: GradSum) -> MicroSteps:
    """The micro-steps of a step of this trainer, whose gradients `total` takes."""
    kind = CanonicalMicroSteps if trainer.deterministic == "canonical" else MicroSteps
    return kind(trainer, total)

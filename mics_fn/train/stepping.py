"""One step of a `Trainer`: micro-steps, both hops, the guard, and the optimizer's step."""

import time
from typing import Any

import torch
from torch import Tensor

from mics_fn.deferred import GradSum, defer
from mics_fn.interrupts import Commit
from mics_fn.optim import same_step
from mics_fn.train.batch import cut, to_device
from mics_fn.train.buffers import Values
from mics_fn.train.loop import learning
from mics_fn.train.metrics import StepMetrics
from mics_fn.train.options import start_comparison
from mics_fn.train.writing import comes, overlaps, reduced, update, update_early, update_late
from mics_fn.tree import Tree


class MicroSteps:
    """What the micro-steps of a step leave behind, each beginning with the buffers of the last one.

    Args:
      trainer: takes the step; the buffers of its state are not written to.
      total: takes the gradients.
    """

    def __init__(self, trainer: Any, total: GradSum) -> None:
        self._program, self._total, self._scale = trainer.program, total, trainer.guard.scale
        self._losses: list[Tensor] = []
        self._buffers = self._program.buffers.copies(trainer.state.buffers)  # to write to

    def run(self, full: Tree, batch: Any) -> None:
        """One micro-step, forward and backward."""

        def backward(loss: Tensor) -> None:
            self._total.backward(self._scale.scale(loss))

        loss, self._buffers = self._program(full, self._buffers, batch, backward)
        self._losses.append(loss)

    def end(self) -> tuple[Tensor, Values]:
        """The loss of the step on this rank, and the buffers, before their mean over ranks."""
        return torch.stack(self._losses).mean(), self._buffers


def one_step(trainer: Any, batch: Any) -> StepMetrics:
    """Take a step on a batch, on all ranks together; see `Trainer.step`."""
    member = trainer.member
    if not member.compared:  # a state may have been put in its place since
        same_step(trainer.state, trainer.groups)
        member.compared = True
    started, guard, member.ready = time.perf_counter(), trainer.guard, None
    home, groups = member.home, trainer.replica_sync.groups(trainer.groups)
    batch = to_device(batch, home.device)
    parts = cut(batch, trainer.accumulate)
    state, counts = trainer.state, trainer.epochs.using(batch)
    drift = start_comparison(trainer, trainer.program.buffers.averaged)
    where = trainer.where if trainer.where.sets("grads") else None
    total = GradSum(len(parts), dtype=trainer.grad_dtype, where=where)
    commit = Commit()
    done = MicroSteps(trainer, total)
    total.before_last = commit.hold  # see [Note: commit] in `interrupts`
    with commit, learning(trainer.deterministic):
        with defer(state.params, groups, trainer.schedule, into=total) as full:
            for part in parts:
                done.run(full, part)
        del full  # else the update would copy shards that parameters share
        commit.hold()
        early, late = overlaps(trainer), comes(trainer)
        grads = None if early or late else reduced(trainer, total)
        if drift is not None:
            trainer.state = drift.finish(trainer.on_drift)
        loss, buffers = done.end()
        if early:
            verdict = update_early(trainer, total, buffers)
        elif late:
            verdict = update_late(trainer, total, buffers, commit)
        else:
            verdict = update(trainer, grads, buffers, commit)
        trainer.epochs.took()
        total.release()
    seconds = time.perf_counter() - started
    samples, tokens = (number * home.world_size for number in counts)
    found = verdict.norm, guard.scale.value, verdict.accept, verdict.spike, verdict.nonfinite
    return StepMetrics(trainer.state.step, loss, samples, tokens, seconds, *found)

"""One step of a `Trainer`: micro-steps, both hops, the guard, and the optimizer's step."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from mics_fn.deferred import GradSum, defer
from mics_fn.errors import MicsError, message
from mics_fn.groups import Groups
from mics_fn.interrupts import Commit
from mics_fn.optim import StepTotals, Verdict, same_step
from mics_fn.train.batch import cut, to_device
from mics_fn.train.buffers import Values
from mics_fn.train.loop import learning
from mics_fn.train.metrics import StepMetrics
from mics_fn.train.options import start_comparison
from mics_fn.train.weights import Weights, counted, weights_of
from mics_fn.train.writing import (
    comes,
    merge,
    overlaps,
    reduced,
    update,
    update_early,
    update_late,
)
from mics_fn.tree import Tree

_BACKWARD = message(
    "Trainer: the loss called backward(), which Trainer does once the loss is returned",
    fix="return the loss, and leave out backward(), zero_grad() and the optimizer's step()",
)


class MicroSteps:
    """What the micro-steps of a step leave behind, each beginning with the buffers of the last one.

    Args:
      trainer: takes the step; the buffers of its state are not written to.
      total: takes the gradients.
      weights: of the micro-steps; None if they are equal.
    """

    def __init__(self, trainer: Any, total: GradSum, weights: Weights | None) -> None:
        self._weights = weights
        self._program, self._total, self._scale = trainer.program, total, trainer.guard.scale
        self._losses: list[Tensor] = []
        total.other_backward = _BACKWARD
        self._buffers = self._program.buffers.copies(trainer.ahead.buffers)  # to write to

    def run(self, full: Tree, batch: Any) -> None:
        """One micro-step, forward and backward."""

        i, weights = len(self._losses), self._weights

        def backward(loss: Tensor) -> None:
            if weights is not None:
                self._total.void = weights.void[i]
                loss = loss * weights.factor(i, loss)
            self._total.backward(self._scale.scale(loss))

        loss, self._buffers = self._program(full, self._buffers, batch, backward)
        if weights is not None:
            loss = counted(loss, weights.void[i]) * weights.factor(i, loss)
        self._losses.append(loss)

    @property
    def dtype(self) -> torch.dtype:
        """That of the losses."""
        return self._losses[0].dtype

    def end(self) -> tuple[Tensor, Values]:
        """The loss of the step on this rank, and the buffers, before their mean over ranks."""
        return torch.stack(self._losses).mean(dtype=torch.float64), self._buffers


def one_step(trainer: Any, batch: Any) -> StepMetrics:
    """Take a step on a batch, on all ranks together; see `Trainer.step`."""
    member = trainer.member
    merge(trainer)  # where that of the last step was cut short
    if not member.compared:  # a state may have been put in its place since
        same_step(trainer.ahead, trainer.groups)
        member.compared = True
    started, guard, member.ready = time.perf_counter(), trainer.guard, None
    home, groups = member.home, trainer.replica_sync.groups(trainer.groups)
    batch = to_device(batch, home.device)
    parts = cut(batch, trainer.accumulate)
    state, counts = trainer.ahead, trainer.epochs.using(batch)
    drift = start_comparison(trainer, trainer.program.buffers.averaged)
    where = trainer.where if trainer.where.sets("grads") else None
    total = GradSum(len(parts), dtype=trainer.grad_dtype, where=where)
    commit = Commit()
    done = MicroSteps(trainer, total, weights_of(trainer, parts))
    total.before_last = commit.hold  # see [Note: commit] in `interrupts`
    with commit, learning(trainer.deterministic), _alike(home, commit):
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
        totals = StepTotals(home, loss, *counts, weighted=trainer.weight is not None)
        if early:
            verdict = update_early(trainer, total, buffers)
            totals.exchange()
        elif late:
            verdict = update_late(trainer, total, buffers, commit, totals)
        else:
            verdict = update(trainer, grads, buffers, commit, totals)
        merge(trainer)
        total.release()
    return metrics_of(
        trainer,
        totals,
        verdict,
        {
            "loss": totals.loss.to(done.dtype),
            "seconds": time.perf_counter() - started,
            "scale": guard.scale.value,
        },
    )


@contextmanager
def _alike(home: Groups, commit: Commit) -> Iterator[None]:
    """A block after whose last message ranks may be at other steps, if an error of one ends it.

    So these groups are finished then, and `reset` compares; an error of this library is raised
    before that, or on all ranks.
    """
    try:
        yield
    except BaseException as error:
        if commit.began and home.world_size > 1 and not isinstance(error, MicsError):
            home.life.finish(error)
        raise


def metrics_of(
    trainer: Any, totals: StepTotals, verdict: Verdict, known: dict[str, Any]
) -> StepMetrics:
    """The metrics of a step; of a masked one, what the host has to wait for is read later."""
    known |= {"grad_norm": verdict.norm, "spike": verdict.spike}
    step, skipped = trainer.ahead.step, verdict.next.skipped

    def rest() -> dict[str, Any]:
        refused = verdict.found_inf is not None and not totals.all_finite
        why = "a loss or a gradient is not finite" if refused else verdict.nonfinite
        return {
            "step": step - refused,
            "samples": totals.samples,
            "tokens": totals.tokens,
            "accepted": verdict.accept and not refused,
            "nonfinite": why,
            "skipped": skipped + refused,
        }

    if verdict.found_inf is not None:
        return StepMetrics.known_later(rest, **known)
    totals.warn_of_unequal()
    return StepMetrics(**known, **rest())

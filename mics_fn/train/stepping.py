"""The step of a `Trainer` as a pure function: options, a state and a batch to a state and metrics.

`train_step` is the page of the algorithm: it needs nothing else of a `Trainer`, and the page of
this wing shows how it is called. The state that is given is used up, as by `opt_step(donate=True)`.

[Note: steps that overlap hop 2] With `overlap_step=True` a bucket is stepped while others are still
reduced, so nothing may have to be known of all gradients before: no guard that has a limit or may
refuse, as the default one does; no mean of buffers; no hop 2 of one's own. A bucket that is written
cannot be taken back, so a step is refused as a whole only if all of it is known: this needs
`Guard(on_nonfinite="ignore")`. It has a price: if a rank fails in just these moments, others have
written a part of their states. `reset` then takes whole ones from replicas; if all had begun to
write, it raises LostStateError: go on from a checkpoint then.

A rank that cannot read its files has not written anything; what is lost in them it takes from a
replica, too.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from mics_fn import _torch, errors, optim, spans
from mics_fn.deferred import GradSum, defer
from mics_fn.groups import Groups
from mics_fn.offload import Where
from mics_fn.optim import Guard, StepTotals, TrainState, Verdict, opt_step
from mics_fn.schedules import keep_all
from mics_fn.shards import Writing, grad_stream
from mics_fn.train.program import Values, Weights, count, counted, cut, to_device, weight_of
from mics_fn.train.replicas import ReplicaSync, SyncState, every_step
from mics_fn.tree import Tree

# What stays as it is from step to step, what a step changes, and what it reports.


@dataclass(frozen=True)
class StepOptions:
    """Name what stays as it is from step to step.

    Args:
      program: a `ModuleProgram` or a `FunctionProgram`.
      groups: as for `shard`.
      home: the first of them, whose ranks share losses and buffers.
      accumulate, weight, replica_sync, where, overlap_step: as for `Trainer`.
      schedule: as for `defer`.
    """

    program: Any
    groups: Any
    home: Groups
    accumulate: int = 1
    weight: Callable[[Any], Tensor | float] | None = None
    replica_sync: ReplicaSync = field(default_factory=every_step)
    schedule: Any = field(default_factory=keep_all)
    where: Where = Where.parse(None)
    overlap_step: bool = False


class RunState(NamedTuple):
    """What a step changes; see `StepOptions` for what it does not."""

    train: TrainState
    sync: SyncState = SyncState(0)
    guard: Guard = Guard()


@dataclass(frozen=True)
class StepMetrics:
    """What a step reports. On an accelerator, to read a number that is no tensor may wait for it.

    Args:
      step: the number of optimizer steps after it.
      loss: 0-dim tensor on the device: the mean over micro-steps and ranks, by weight if there are
        weights.
      samples: samples on all ranks together.
      tokens: elements of the batch's first integer tensor with two or more dims, on all ranks
        together; 0 if there is none.
      seconds: host time of the call.
      grad_norm: 0-dim float64 tensor, the norm of the gradient before clipping; None if the guard
        does not need it, or cannot know it.
      scale: the factor that the loss was multiplied by.
      accepted: whether the step was taken; if not, only the guard has changed.
      spike: whether the norm was a spike.
      nonfinite: as in the guard's `Verdict`: which leaf was not finite, and where that arose. Of
        the first of such steps in a row an accelerator knows neither.
      skipped: how many steps its guard has refused so far.
    """

    step: int
    loss: Tensor
    samples: int
    tokens: int
    seconds: float
    grad_norm: Tensor | None
    scale: float
    accepted: bool
    spike: bool
    nonfinite: str | None
    skipped: int

    @classmethod
    def known_later(cls, rest: Callable[[], Mapping[str, Any]], **known: Any) -> "StepMetrics":
        """Metrics of which some values are asked for when the first of them is read."""
        found = object.__new__(cls)
        vars(found).update(known, rest=rest)
        return found

    if not TYPE_CHECKING:  # for which there is no other attribute

        def __getattr__(self, name: str) -> Any:  # of what is not known yet
            rest = vars(self).pop("rest", None)
            if rest is None:
                raise AttributeError(f"StepMetrics has no attribute {name!r}")
            vars(self).update(rest())
            return getattr(self, name)

    def __reduce__(self) -> Any:
        return StepMetrics, tuple([getattr(self, each.name) for each in fields(self)])


# The step.


class Judged(NamedTuple):
    """All that a rank needs to write a step without any other rank."""

    verdict: Verdict
    buffers: Values  # those after the step
    sync: SyncState  # if it is taken


@dataclass
class Between:
    """Say what a caller, such as a `Trainer`, does between the parts of a step.

    Args:
      block: called before the last gradients are sent.
      reduced: `reduced(total, state) -> state`, called with all gradients on their way; gives the
        state that is stepped.
      masks: `masks(state, grads)`, whether the step is launched before the host knows if it is
        taken.
      judged: `judged(state, judged, totals)`, called before the first write, behind which no other
        rank is needed.
      written: `written(state, merges=)`, called within the write; `merges` says whether a merge of
        replicas is left to do.
    """

    block: Callable[[], None] = lambda: None
    reduced: Callable[[GradSum, RunState], RunState] | None = None
    masks: Callable[[RunState, Any], bool] | None = None
    judged: Callable[[RunState, Judged, StepTotals], None] | None = None
    written: Callable[..., None] | None = None


NO_BACKWARD = errors.message(
    "Trainer: the loss called backward(), which Trainer does once the loss is returned",
    fix="return the loss, and leave out backward(), zero_grad() and the optimizer's step()",
)


def train_step(
    options: StepOptions, state: RunState, batch: Any, between: Between | None = None
) -> tuple[RunState, StepMetrics]:
    """Take one optimizer step on a batch, on all ranks together.

    Args:
      options: what stays as it is.
      state: the state before it; given away.
      batch: this rank's samples of the whole step.
      between: what else is done in it.

    Returns:
      The state after it, and what it reports.

    Communication: see `Trainer`.
    """
    between, started, scale = between or Between(), time.perf_counter(), state.guard.scale
    home, sync, weighted = options.home, options.replica_sync, options.weight is not None
    batch = to_device(batch, home.device)
    parts = cut(batch, options.accumulate) if options.accumulate > 1 else [batch]
    where = options.where if "grads" in options.where.moved else None
    total = GradSum(len(parts), where=where)
    total.other_backward, total.before_last = NO_BACKWARD, between.block
    # Gathers, forward and backward; hop 1 of each micro-step, and behind the last one hop 2.
    groups = options.groups
    if sync.independent or sync.reduce is not None:
        groups = sync.groups(groups)
    with defer(state.train.params, groups, options.schedule, into=total) as full:
        losses, buffers = micro_steps(options, state, total, full, parts)
    del full  # else the update would copy shards that parameters share
    between.block()
    if between.reduced is not None:
        state = between.reduced(total, state)
    # One message of 32 bytes: is all finite, how long is the gradient, what is the loss.
    totals = StepTotals(home, losses.mean(dtype=torch.float64), *count(batch), weighted=weighted)
    state, verdict, merges = update(options, state, total, buffers, totals, between)
    if merges:
        state = merge(options, state, between.written)
    total.release()
    known = {"loss": totals.loss.to(losses.dtype), "scale": scale.value}
    known |= {"seconds": time.perf_counter() - started}
    return state, metrics_of(state.train.step, totals, verdict, known)


def micro_steps(
    options: StepOptions, state: RunState, total: GradSum, full: Tree, parts: Sequence[Any]
) -> tuple[Tensor, Values]:
    """Run forward and backward of each micro-step, which begins with the buffers of the last one.

    Args:
      options, state: those of the step; buffers of the state are not written to.
      total: takes the gradients.
      full: deferred parameters.
      parts: the micro-batches.

    Returns:
      The losses of this rank, and the buffers, before their mean over ranks.
    """
    program, losses, buffers = options.program, list[Tensor](), state.train.buffers
    buffers = program.buffers.copies(buffers) if buffers else {}
    weights = None if options.weight is None else Weights(options, parts)
    for i, part in enumerate(parts):

        def backward(loss: Tensor, i: int = i) -> None:
            if weights is not None:
                total.void = weights.void[i]
                loss = loss * weights.factor(i, loss)
            total.backward(state.guard.scale.scale(loss))

        loss, buffers = program(full, buffers, part, backward)
        if weights is not None:
            loss = counted(loss, weights.void[i]) * weights.factor(i, loss)
        losses.append(loss)
    return torch.stack(losses), buffers


@torch.no_grad()
def update(
    options: StepOptions,
    state: RunState,
    total: GradSum,
    buffers: Values,
    totals: StepTotals,
    between: Between,
) -> tuple[RunState, Verdict, bool]:
    """Step on the gradients if the guard accepts them.

    Gradients elsewhere stay there until they are stepped; a step that overlaps still reduces all.

    Args:
      options, state: those of the step.
      total: all micro-steps; given away.
      buffers: as this rank computed them.
      totals: of this step.
      between: what else is done in it.

    Returns:
      The state after it, the verdict, and whether a merge of replicas is left to do.
    """
    sync, early = options.replica_sync, options.overlap_step
    if spans.watchers:  # a step that is refused ends here
        optim.record_memory(state.train)
    with Writing():
        grads, kept, after = total, state.sync, buffers
        if not early and total.placed and sync.reduce is None:
            total.wait()
            grad_stream(total)  # which raises where a step has no gradient
        elif not early:
            grads = total.grads()
        if sync.reduce is not None:
            grads, kept = sync.reduced(grads, kept, options.groups)
        how: dict[str, Any] = {"wait": between.masks is None or not between.masks(state, grads)}
        how["totals"] = None if early else totals  # else that message would wait for every hop 2
        verdict = state.guard.judge(grads, options.groups, donate=True, **how)
        if verdict.accept and options.program.buffers.averaged:
            over = options.home if sync.due(state.sync) else sync.groups(options.home)
            after = options.program.buffers.average(buffers, over)
        judged = Judged(verdict, after, kept)
        if between.judged is not None:
            between.judged(state, judged, totals)
        written, merges = write(options, state, judged)
        if between.written is not None:
            between.written(written, merges=merges)
    if early:
        totals.exchange()
        totals.fetch()
    return written, verdict, merges


@torch.no_grad()
def write(options: StepOptions, state: RunState, judged: Judged) -> tuple[RunState, bool]:
    """Write a step, for which no other rank is needed.

    Args:
      options, state: those of the step.
      judged: what is to be written.

    Returns:
      The state after it, and whether a merge of replicas is left to do.
    """
    (verdict, buffers, kept), sync, train = judged, options.replica_sync, state.train
    if verdict.accept:
        with optim.masked_by(verdict.found_inf):
            stepped = opt_step(train, verdict.grads, donate=True)
        train = replace(stepped, buffers=buffers)
    else:
        kept = state.sync
    merges = sync.independent and sync.due(kept)
    return RunState(train, replace(kept, step=kept.step + 1), verdict.next), merges


@torch.no_grad()
def merge(options: StepOptions, state: RunState, written: Any = None) -> RunState:
    """Merge replicas, which is left to do of a step; the state is whole until it is done.

    Communication: that of `ReplicaSync.after`.
    """
    (train, kept, _), sync = state, options.replica_sync
    with Writing():
        params, kept = sync.merged(train.params, kept, options.groups, donate=True)
        state = state._replace(train=replace(train, params=params), sync=kept)
        if written is not None:
            written(state, merges=False)
    return state


def can_overlap(options: StepOptions, guard: Guard) -> bool:
    """Whether nothing has to be known of all gradients before buckets are stepped.

    The mean of buffers comes before the step, and on the wire behind every hop 2.
    """
    means = bool(options.program.buffers.averaged) and options.home.world_size > 1
    return not (
        guard.decides
        or guard.max_norm is not None
        or means
        or options.replica_sync.reduce is not None
    )


def evaluated(options: StepOptions, loss: Tensor, batch: Any) -> Tensor:
    """The mean of losses of batches over ranks, by weight if there are weights.

    Communication: that of a `StepTotals`.
    """
    home, dtype, weight = options.home, loss.dtype, torch.ones((), dtype=torch.float64)
    if options.weight is not None:
        weight = weight_of(options.weight, batch, home.device)
        loss = counted(loss, weight == 0) * weight
    weighted = options.weight is not None
    totals = StepTotals(home, loss.double(), *count(batch), weighted=weighted)
    total = totals.exchange(weight.to(home.device))
    if not _torch.is_async(home.device):  # there only steps look, which need not wait for it
        totals.warn_of_unequal()
    return (totals.loss / total).to(dtype)


def metrics_of(
    step: int, totals: StepTotals, verdict: Verdict, known: dict[str, Any]
) -> StepMetrics:
    """The metrics of a step; of a masked one, what the host has to wait for is read later."""
    known |= {"grad_norm": verdict.norm, "spike": verdict.spike}
    masked, skipped = verdict.found_inf is not None, verdict.next.skipped

    def rest() -> dict[str, Any]:
        refused, aborted = totals.outcome() if masked else (False, False)
        _, samples, tokens = totals.of_all
        why = verdict.nonfinite
        if refused:
            why = "collectives were aborted" if aborted else "a loss or a gradient is not finite"
        found = {"step": step - refused, "samples": samples, "tokens": tokens, "nonfinite": why}
        return {**found, "accepted": verdict.accept and not refused, "skipped": skipped + refused}

    if masked:
        return StepMetrics.known_later(rest, **known)
    totals.warn_of_unequal()
    return StepMetrics(**known, **rest())

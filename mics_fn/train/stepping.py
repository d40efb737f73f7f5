"""One step of a `Trainer`: micro-steps, both hops, the guard, and the optimizer's step.

[Note: steps that overlap hop 2] With `overlap_step=True` a bucket is stepped while others are still
reduced, unless something has to be known of all gradients before: a guard with a limit or one that
may refuse, as the default one does; a mean of buffers; or a hop 2 of one's own. A bucket that is
written cannot be taken back, so a step is refused as a whole only if all of it is known: this needs
`Guard(on_nonfinite="ignore")`, and a `Trainer` without says so. It has a price: if a rank fails in
just these moments, others have written a part of their states. `reset` then takes whole ones from
replicas; if all had begun to write, it raises LostStateError: go on from a checkpoint then.

Where a guard has to see all, states elsewhere come meanwhile; see [Note: states come first] in
`optim.columns`. A rank that cannot read its files has not written anything then; what is lost in
them it takes from a replica, too.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mics_fn import _device, spans, tree
from mics_fn.collectives import collect_values
from mics_fn.deferred import GradSum, defer
from mics_fn.errors import MicsError, message
from mics_fn.groups import Groups
from mics_fn.interrupts import Commit
from mics_fn.offload import ON_DEVICE
from mics_fn.optim import (
    StepRefused,
    StepTotals,
    TrainState,
    Verdict,
    lazy_grads,
    masked_by,
    opt_step,
    record_memory,
    same_step,
)
from mics_fn.shards import Writing, grad_stream, is_leaf
from mics_fn.train import given
from mics_fn.train.loop import learning
from mics_fn.train.metrics import StepMetrics, Weights, counted
from mics_fn.train.program import Values, count, cut, to_device
from mics_fn.tree import Tree

# The end of a step of a `Trainer`: gradients are judged, and the step is written or refused.


def can_overlap(trainer: Any) -> bool:
    """Whether nothing has to be known of all gradients before buckets are stepped.

    The mean of buffers comes before the step, and on the wire behind every hop 2.
    """
    guard, ranks = trainer.guard, trainer.member.home.world_size
    limits = guard.max_norm is not None or guard.max_value is not None
    means = bool(trainer.program.buffers.averaged) and ranks > 1
    return not (guard.decides or limits or means or trainer.replica_sync.reduce is not None)


@torch.no_grad()
def update(
    trainer: Any, total: GradSum, buffers: Values, commit: Commit, totals: StepTotals
) -> Verdict:
    """Step on the gradients if the guard accepts them; states elsewhere are fetched meanwhile.

    Args:
      trainer: the `Trainer`, before the step.
      total: all micro-steps; given away.
      buffers: as this rank computed them.
      commit: holds signals while the step is written.
      totals: of this step.
    """
    if spans.watchers:  # a step that is refused ends here
        record_memory(trainer.ahead)
    early = trainer.overlap_step and can_overlap(trainer)
    judge = partial(_judged, trainer, total, buffers, commit, totals, early)
    if early or not trainer.where.moved & {"params", "states"}:
        ready = judge()
        write(trainer, ready)
    else:
        ready = _write_as_fetched(trainer, total, judge)
    if early:
        totals.exchange()
        totals.fetch()
    return ready.verdict


def _write_as_fetched(
    trainer: Any, total: GradSum, judge: Callable[[], given.Ready]
) -> given.Ready:
    """Judge and write a step on states elsewhere, which are fetched meanwhile."""
    found: list[given.Ready] = []

    def judged() -> Any:
        found.append(judge())
        if not found[0].verdict.accept:
            raise StepRefused
        trainer.member.ready = None  # from here on a part of it may be written
        return found[0].verdict.grads

    stepped = None
    with Writing():
        with suppress(StepRefused):
            stepped = opt_step(trainer.ahead, lazy_grads(total, judged), donate=True)
        write(trainer, found[0], stepped)
    return found[0]


def _judged(
    trainer: Any, total: GradSum, buffers: Values, commit: Commit, totals: StepTotals, early: bool
) -> given.Ready:
    """Check a step before it is written, and defer signals from then on.

    Gradients elsewhere stay there until they are stepped; with `early` all are still reduced.
    """
    sync, home, grads = trainer.replica_sync, trainer.member.home, total
    if not early and total.is_placed and sync.reduce is None:
        total.wait()
        grad_stream(total)  # which raises where a step has no gradient
    elif not early:
        grads = total.grads()
    finish_step(trainer)  # the guard counts steps in a row
    old = trainer.ahead
    grads, kept = sync.reduced(grads, trainer.sync_state, trainer.groups)
    sent = None if early else totals  # else that message would wait for every hop 2
    how = {"totals": sent, "wait": not can_be_masked(trainer, grads)}
    verdict = trainer.guard.judge(grads, trainer.groups, donate=True, **how)
    if verdict.accept:
        over = home if sync.due(trainer.sync_state) else sync.groups(home)
        buffers = trainer.program.buffers.average(buffers, over)
    masked, found_inf = None, verdict.found_inf
    if found_inf is not None:
        totals.mask(found_inf)
        counts = [x for x in tree.flatten(old.opt)[0] if not isinstance(x, Tensor)]
        masked = given.Masked(totals, counts, trainer.sync_state)
        for name, new in buffers.items():
            if new.shape == old.buffers[name].shape:
                new.copy_(torch.where(found_inf > 0, old.buffers[name], new))
    ready = given.Ready(verdict, buffers, kept, masked)
    if trainer.recoverable:  # see [Note: steps written together] in `resetting`
        trainer.member.ready = ready
        collect_values(home, torch.zeros(1, dtype=torch.int64, device=home.device))
    commit.write()  # no collective is left, but those of a merge
    return ready


@torch.no_grad()
def write(trainer: Any, ready: given.Ready, stepped: TrainState | None = None) -> None:
    """Write a step, for which no other rank is needed.

    Args:
      trainer: the `Trainer`, before the step.
      ready: what is to be written.
      stepped: the state after the optimizer's step, if that is done.
    """
    (verdict, buffers, kept, _), state, sync = ready, trainer.ahead, trainer.replica_sync
    trainer.member.ready = None
    with Writing():
        if verdict.accept:
            with masked_by(verdict.found_inf):
                after = opt_step(state, verdict.grads, donate=True) if stepped is None else stepped
            state = replace(after, buffers=buffers)
        kept = kept if verdict.accept else trainer.sync_state
        merges, member = sync.independent and sync.due(kept), trainer.member
        kept = replace(kept, step=kept.step + 1)
        # Between these nothing can interrupt; see [Note: between two instructions] in `interrupts`.
        trainer.ahead, trainer.sync_state, trainer.guard = state, kept, verdict.next
        member.merges, member.masked = merges, ready.masked


@torch.no_grad()
def merge(trainer: Any) -> None:
    """Merge replicas, if that is left to do of the last step; the state is whole until it is done.

    Communication: that of `ReplicaSync.after`.
    """
    if not trainer.member.merges:
        return
    state, kept, member = trainer.ahead, trainer.sync_state, trainer.member
    with Writing():
        found = trainer.replica_sync.merged(state.params, kept, trainer.groups, donate=True)
        state, kept = replace(state, params=found[0]), found[1]
        trainer.ahead, trainer.sync_state, member.merges = state, kept, False


def can_be_masked(trainer: Any, grads: Any) -> bool:
    """Whether a step can be launched before the host knows if it is to be taken.

    Where more than parameters, moments and buffers changes with a step, or a step writes without
    torch's fused kernels, the host waits. See [Note: masked steps] in `optim.optimizers`.
    """
    state, sync, device = trainer.ahead, trainer.replica_sync, trainer.member.home.device
    if not _device.is_async(device) or not state.transform.masked:
        return False
    if trainer.where.moved & {"params", "states"}:
        return False
    more = sync.independent or sync.reduce is not None or trainer.recoverable
    buckets = {getattr(x, "bucket", None) for x in tree.flatten(state.params, is_leaf)[0]}
    coded = any(x is not None and (x.state or x.codes) for x in buckets)
    more = more or coded or isinstance(grads, GradSum) or _device.abort_flag(device) is None
    return not more


def finish_step(trainer: Any) -> None:
    """Look whether the last step was taken, if it was masked, and take its counts back if not.

    The host waits for it. If a rank is lost, that ends when collectives are aborted.
    """
    masked, state, guard = trainer.member.masked, trainer.ahead, trainer.guard
    if masked is None:
        return
    refused, aborted = masked.totals.outcome()
    if aborted:  # the step is to be made again, with the same batch
        trainer.sync_state = masked.sync
    else:
        masked.totals.warn_of_unequal()
    if refused:
        leaves, spec = tree.flatten(state.opt)
        before = iter(masked.before)
        leaves = [x if isinstance(x, torch.Tensor) else next(before) for x in leaves]
        state = replace(state, step=state.step - 1, opt=spec.unflatten(leaves))
        guard = guard if aborted else guard.after_refusal()
    trainer.ahead, trainer.guard, trainer.member.masked = state, guard, None


_BACKWARD = message(
    "Trainer: the loss called backward(), which Trainer does once the loss is returned",
    fix="return the loss, and leave out backward(), zero_grad() and the optimizer's step()",
)


def micro_steps(
    trainer: Any, total: GradSum, full: Tree, parts: Sequence[Any], weights: Weights | None
) -> tuple[Tensor, Values]:
    """Run forward and backward of each micro-step, which begins with the buffers of the last one.

    Args:
      trainer: takes the step; the buffers of its state are not written to.
      total: takes the gradients.
      full: deferred parameters.
      parts: the micro-batches.
      weights: of the micro-steps; None if they are equal.

    Returns:
      The losses of this rank, and the buffers, before their mean over ranks.
    """
    program, losses = trainer.program, list[Tensor]()
    buffers = program.buffers.copies(trainer.ahead.buffers)
    for i, part in enumerate(parts):

        def backward(loss: Tensor, i: int = i) -> None:
            if weights is not None:
                total.void = weights.void[i]
                loss = loss * weights.factor(i, loss)
            total.backward(trainer.guard.scale.scale(loss))

        loss, buffers = program(full, buffers, part, backward)
        if weights is not None:
            loss = counted(loss, weights.void[i]) * weights.factor(i, loss)
        losses.append(loss)
    return torch.stack(losses), buffers


def one_step(trainer: Any, batch: Any) -> StepMetrics:
    """Take a step on a batch, on all ranks together; see `Trainer.step`."""
    member = trainer.member
    flag = _device.abort_flag(member.home.device) if _device.is_async(member.home.device) else None
    member.home.partition.check_open()  # a state may be lost because they have failed
    merge(trainer)  # where that of the last step was cut short
    if not member.compared:  # a state may have been put in its place since
        same_step(trainer.ahead, trainer.groups)
        member.compared = True
    started, guard, member.ready = time.perf_counter(), trainer.guard, None
    home, groups = member.home, trainer.replica_sync.groups(trainer.groups)
    batch = to_device(batch, home.device)
    parts = cut(batch, trainer.accumulate)
    state, counts = trainer.ahead, count(batch)
    drift = given.start_comparison(trainer, trainer.program.buffers.averaged)
    where = trainer.where if "grads" in trainer.where.moved else ON_DEVICE
    total = GradSum(len(parts), dtype=trainer.grad_dtype, where=where)
    commit = Commit()
    weights = None if trainer.weight is None else Weights(trainer, parts)
    total.other_backward = _BACKWARD
    total.before_last = commit.block  # see [Note: commit] in `interrupts`
    with commit, learning(trainer.deterministic), _alike(home, commit):
        with defer(state.params, groups, trainer.schedule, into=total) as full:
            losses, buffers = micro_steps(trainer, total, full, parts, weights)
        del full  # else the update would copy shards that parameters share
        commit.block()
        if drift is not None:
            total.wait()
            trainer.state = drift.finish(trainer.on_drift)
        loss = losses.mean(dtype=torch.float64)
        totals = StepTotals(home, loss, *counts, weighted=weights is not None)
        totals.flag = flag
        verdict = update(trainer, total, buffers, commit, totals)
        merge(trainer)
        total.release()
    known = {"loss": totals.loss.to(losses.dtype), "scale": guard.scale.value}
    known |= {"seconds": time.perf_counter() - started}
    return metrics_of(trainer, totals, verdict, known)


@contextmanager
def _alike(home: Groups, commit: Commit) -> Iterator[None]:
    """Context of a step; an error after its last message ends the groups.

    So these groups are finished then, and `reset` compares; an error of this library is raised
    before that, or on all ranks.
    """
    try:
        yield
    except BaseException as error:
        if commit.began and home.world_size > 1 and not isinstance(error, MicsError):
            home.state.finish(error)
        raise


def metrics_of(
    trainer: Any, totals: StepTotals, verdict: Verdict, known: dict[str, Any]
) -> StepMetrics:
    """The metrics of a step; of a masked one, what the host has to wait for is read later."""
    known |= {"grad_norm": verdict.norm, "spike": verdict.spike}
    step, skipped, masked = trainer.ahead.step, verdict.next.skipped, trainer.member.masked

    def rest() -> dict[str, Any]:
        refused, aborted = (False, False) if masked is None else totals.outcome()
        why = "a loss or a gradient is not finite" if refused else verdict.nonfinite
        why = "collectives were aborted" if aborted else why
        return {
            "step": step - refused,
            "samples": totals.samples,
            "tokens": totals.tokens,
            "accepted": verdict.accept and not refused,
            "nonfinite": why,
            "skipped": skipped + refused,
        }

    if masked is not None:
        return StepMetrics.known_later(rest, **known)
    totals.warn_of_unequal()
    return StepMetrics(**known, **rest())

"""Steps of a `Trainer`, and a loop of them: micro-steps, both hops, the guard, the optimizer.

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

import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils import deterministic as torch_deterministic

from mics_fn import _torch, faults, spans, tree
from mics_fn.collectives import collect_values, levels
from mics_fn.deferred import GradSum, defer
from mics_fn.errors import LeafError, MicsError, message
from mics_fn.faults import StopRequest, same_step
from mics_fn.groups import Groups, reports_step
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
)
from mics_fn.shards import Writing, grad_stream, is_leaf
from mics_fn.threads import Commit
from mics_fn.train.program import Values, count, cut, to_device
from mics_fn.train.replicas import SyncState
from mics_fn.tree import Tree

# What a step reports.


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


# This rank as a member of its job, which may go on with other processes after a fault.


class Masked(NamedTuple):
    """A step that a device may not have taken; see [Note: masked steps] in `optim.optimizers`."""

    totals: StepTotals  # they say whether it was
    before: list[Any]  # the leaves of the optimizer's state before it that are no tensors
    sync: SyncState  # before it


class Ready(NamedTuple):
    """All that a rank needs to write a step without any other rank."""

    verdict: Verdict
    buffers: Values  # those after the step
    sync: SyncState  # if it is taken
    masked: Masked | None = None  # if the host does not know yet whether it is


@dataclass(eq=False)
class Member:
    """What a `Trainer` knows of its job, besides what it trains; steps and `reset` change it.

    Args:
      home: the first of its groups, whose ranks share buffers and metrics.
      compared: whether all ranks are known to be at one step; replicas that are independent need
        not be.
      lost: whether this rank is to take its state from others.
      ready: what is left to do of a step that all ranks can write; None if nothing is.
      merges: whether the last step is written, and the merge of replicas after it is left to do.
      masked: the last step, as long as the host has not looked whether it was taken.
    """

    home: Groups
    compared: bool
    lost: bool
    ready: Ready | None = None
    merges: bool = False
    masked: Masked | None = None


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


def _write_as_fetched(trainer: Any, total: GradSum, judge: Callable[[], Ready]) -> Ready:
    """Judge and write a step on states elsewhere, which are fetched meanwhile."""
    found: list[Ready] = []

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
) -> Ready:
    """Check a step before it is written, and defer signals from then on.

    Gradients elsewhere stay there until they are stepped; with `early` all are still reduced.
    """
    sync, home, grads = trainer.replica_sync, trainer.member.home, total
    if not early and total.is_placed and sync.reduce is None:
        total.wait()
        grad_stream(total)  # which raises where a step has no gradient
    elif not early:
        grads = total.grads()
    if trainer.member.masked is not None:  # the guard counts steps in a row
        finish_step(trainer)
    old, kept = trainer.ahead, trainer.sync_state
    if sync.reduce is not None:
        grads, kept = sync.reduced(grads, kept, trainer.groups)
    sent = None if early else totals  # else that message would wait for every hop 2
    waits = not (_torch.is_async(home.device) and can_be_masked(trainer, grads))
    verdict = trainer.guard.judge(grads, trainer.groups, donate=True, totals=sent, wait=waits)
    if verdict.accept and trainer.program.buffers.averaged:
        over = home if sync.due(trainer.sync_state) else sync.groups(home)
        buffers = trainer.program.buffers.average(buffers, over)
    masked, found_inf = None, verdict.found_inf
    if found_inf is not None:
        totals.fetch(found_inf)
        counts = [x for x in tree.flatten(old.opt)[0] if not isinstance(x, Tensor)]
        masked = Masked(totals, counts, trainer.sync_state)
        for name, new in buffers.items():
            if new.shape == old.buffers[name].shape:
                new.copy_(torch.where(found_inf > 0, old.buffers[name], new))
    ready = Ready(verdict, buffers, kept, masked)
    if trainer.recoverable:  # see [Note: steps written together] in `resuming`
        trainer.member.ready = ready
        collect_values(home, torch.zeros(1, dtype=torch.int64, device=home.device))
    commit.write()  # no collective is left, but those of a merge
    return ready


@torch.no_grad()
def write(trainer: Any, ready: Ready, stepped: TrainState | None = None) -> None:
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
        # Between these nothing can interrupt; see [Note: between two instructions] in `threads`.
        trainer.ahead, trainer.sync_state, trainer.guard = state, kept, verdict.next
        member.merges, member.masked = merges, ready.masked


@torch.no_grad()
def merge(trainer: Any) -> None:
    """Merge replicas, which is left to do of the last step; the state is whole until it is done.

    Communication: that of `ReplicaSync.after`.
    """
    state, kept, member = trainer.ahead, trainer.sync_state, trainer.member
    with Writing():
        found = trainer.replica_sync.merged(state.params, kept, trainer.groups, donate=True)
        state, kept = replace(state, params=found[0]), found[1]
        trainer.ahead, trainer.sync_state, member.merges = state, kept, False


def can_be_masked(trainer: Any, grads: Any) -> bool:
    """Whether a step on an accelerator can be launched before the host knows if it is taken.

    Where more than parameters, moments and buffers changes with a step, or a step writes without
    torch's fused kernels, the host waits. See [Note: masked steps] in `optim.optimizers`.
    """
    state, sync, device = trainer.ahead, trainer.replica_sync, trainer.member.home.device
    if not state.transform.masked or trainer.where.moved & {"params", "states"}:
        return False
    more = sync.independent or sync.reduce is not None or trainer.recoverable
    buckets = {getattr(x, "bucket", None) for x in tree.flatten(state.params, is_leaf)[0]}
    coded = any(x is not None and (x.state or x.codes) for x in buckets)
    more = more or coded or isinstance(grads, GradSum) or _torch.abort_flag(device) is None
    return not more


def finish_step(trainer: Any) -> None:
    """Look whether the last step, which was masked, was taken, and take its counts back if not.

    The host waits for it. If a rank is lost, that ends when collectives are aborted.
    """
    masked, state, guard = trainer.member.masked, trainer.ahead, trainer.guard
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
        more = 0 if aborted else 1
        guard = replace(guard, in_row=guard.in_row + more, skipped=guard.skipped + more)
    trainer.ahead, trainer.guard, trainer.member.masked = state, guard, None


# Weights of losses: of how many things each is the mean.


class Weights:
    """The weights of the micro-batches of a step; see [Note: weighted means] in `levels`.

    Args:
      trainer: the `Trainer`, which has a weight.
      parts: this rank's micro-batches.

    Communication: 8 bytes over the partition group and over the replication group, under way while
      the first micro-step computes.
    """

    def __init__(self, trainer: Any, parts: Sequence[Any]) -> None:
        home = trainer.member.home
        home = home.replica if trainer.replica_sync.independent else home
        found = [weight_of(trainer.weight, part, home.device) for part in parts]
        self._values = torch.stack(found)
        self._mean = levels.start_mean_over_ranks(home, self._values.mean())
        self._factors: Tensor | None = None
        void = self._values == 0
        self.void = list(void) if _torch.is_async(home.device) else void.tolist()

    def factor(self, i: int, loss: Tensor) -> Tensor:
        """What the loss of a micro-step is multiplied by; NaN if all weights of all ranks are 0."""
        if self._factors is None:
            self._factors = self._values / self._mean.wait()
        return self._factors[i].to(torch.promote_types(loss.dtype, torch.float32))


def weight_of(weight: Callable[[Any], Any], batch: Any, device: torch.device) -> Tensor:
    """The weight of a batch, 0-dim and float64 on the device; the host does not wait for it.

    Raises:
      LeafError: it is not one number of at least 0.
    """
    found = weight(batch)
    one = isinstance(found, Tensor) and found.numel() == 1 and not found.is_complex()
    plain = isinstance(found, Real) and 0 <= float(found) < math.inf
    if not one and not plain:
        got = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else found
        text, fix = f"Trainer: weight gave {got!r:.80}", "return one number of at least 0"
        raise LeafError(text, fix=fix)
    if isinstance(found, Tensor):
        return found.detach().reshape(()).to(device, torch.float64, non_blocking=True)
    return torch.full((), float(found), dtype=torch.float64, device=device)


def counted(loss: Tensor, void: bool | Tensor) -> Tensor:
    """A loss, or 0 where it counts nothing."""
    return torch.where(torch.as_tensor(void, device=loss.device), 0.0, loss)


def evaluated(trainer: Any, loss: Tensor, batch: Any) -> Tensor:
    """The mean of losses of batches over ranks, by weight if there are weights.

    Communication: that of a `StepTotals`.
    """
    home, dtype, weight = trainer.member.home, loss.dtype, torch.ones((), dtype=torch.float64)
    if trainer.weight is not None:
        weight = weight_of(trainer.weight, batch, home.device)
        loss = counted(loss, weight == 0) * weight
    totals = StepTotals(home, loss.double(), *count(batch), weighted=trainer.weight is not None)
    total = totals.exchange(weight.to(home.device))
    if not _torch.is_async(home.device):  # there only steps look, which need not wait for it
        totals.warn_of_unequal()
    return (totals.loss / total).to(dtype)


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
    program, losses, buffers = trainer.program, list[Tensor](), trainer.ahead.buffers
    buffers = program.buffers.copies(buffers) if buffers else {}
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
    flag = _torch.abort_flag(member.home.device) if _torch.is_async(member.home.device) else None
    member.home.partition.check_open()  # a state may be lost because they have failed
    if member.merges:  # as that of the last step was cut short
        merge(trainer)
    if not member.compared:  # a state may have been put in its place since
        same_step(trainer.ahead, trainer.groups)
        member.compared = True
    started, guard, member.ready = time.perf_counter(), trainer.guard, None
    home, groups, sync = member.home, trainer.groups, trainer.replica_sync
    if sync.independent or sync.reduce is not None:
        groups = sync.groups(groups)
    batch = to_device(batch, home.device)
    parts = cut(batch, trainer.accumulate)
    state, counts = trainer.ahead, count(batch)
    drift = start_comparison(trainer, trainer.program.buffers.averaged)
    where = trainer.where if "grads" in trainer.where.moved else ON_DEVICE
    total = GradSum(len(parts), dtype=trainer.grad_dtype, where=where)
    commit = Commit()
    weights = None if trainer.weight is None else Weights(trainer, parts)
    total.other_backward = _BACKWARD
    total.before_last = commit.block  # see [Note: commit] in `threads`
    with commit, _in_step(trainer, commit):
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
        if member.merges:
            merge(trainer)
        total.release()
    known = {"loss": totals.loss.to(losses.dtype), "scale": guard.scale.value}
    known |= {"seconds": time.perf_counter() - started}
    return metrics_of(trainer, totals, verdict, known)


def start_comparison(trainer: Any, buffers: Sequence[str]) -> faults.Comparison | None:
    """Start to compare replicas if it is due before this step; None if it is not.

    Replicas that are independent are equal after a merge alone, and only in their parameters.

    Args:
      trainer: the `Trainer`, with its state.
      buffers: the names of those that are averaged over ranks.

    Communication: that of `same_replicas`.
    """
    if spans.observers:
        spans.passing("step", trainer.state.step + 1)
    sync, step, every = trainer.replica_sync, trainer.sync_state.step, trainer.check_replicas
    if sync.independent:
        every = -(-every // sync.every) * sync.every
    if not every or not step or step % every:
        return None
    names, whole = ([], False) if sync.independent else (buffers, True)
    return faults.Comparison("Trainer", trainer.state, trainer.groups, names, moments=whole)


@contextmanager
def _in_step(trainer: Any, commit: Commit) -> Iterator[None]:
    """Enter grad mode, and on request torch's deterministic mode; an interrupt restores both.

    Inside of torch's own contexts it may be raised when the mode is set and nobody is to reset it.
    An error after the last message of the step ends the groups, so that `reset` compares; one of
    this library is raised before that, or on all ranks.
    """
    before, mode = torch.is_grad_enabled(), torch.get_deterministic_debug_mode()
    tuned, settings = torch.backends.cudnn.benchmark, cast(Any, torch_deterministic)
    filled, home = settings.fill_uninitialized_memory, trainer.member.home
    try:
        torch.set_grad_enabled(True)
        if trainer.deterministic:
            torch.use_deterministic_algorithms(True)
            torch.backends.cudnn.benchmark = False
            # That mode would also write to all new memory, to reveal code that reads it too early.
            settings.fill_uninitialized_memory = False
        yield
    except BaseException as error:
        if commit.began and home.world_size > 1 and not isinstance(error, MicsError):
            home.state.finish(error)
        raise
    finally:
        torch.set_grad_enabled(before)
        if trainer.deterministic:
            torch.set_deterministic_debug_mode(mode)
            torch.backends.cudnn.benchmark = tuned
            settings.fill_uninitialized_memory = filled


def metrics_of(
    trainer: Any, totals: StepTotals, verdict: Verdict, known: dict[str, Any]
) -> StepMetrics:
    """The metrics of a step; of a masked one, what the host has to wait for is read later."""
    known |= {"grad_norm": verdict.norm, "spike": verdict.spike}
    step, skipped, masked = trainer.ahead.step, verdict.next.skipped, trainer.member.masked

    def rest() -> dict[str, Any]:
        refused, aborted = (False, False) if masked is None else totals.outcome()
        _, samples, tokens = totals.of_all
        why = "a loss or a gradient is not finite" if refused else verdict.nonfinite
        why = "collectives were aborted" if aborted else why
        return {
            "step": step - refused,
            "samples": samples,
            "tokens": tokens,
            "accepted": verdict.accept and not refused,
            "nonfinite": why,
            "skipped": skipped + refused,
        }

    if masked is not None:
        return StepMetrics.known_later(rest, **known)
    totals.warn_of_unequal()
    return StepMetrics(**known, **rest())


# Steps one after the other, over a loader.


def bar_of(steps: int) -> Any:
    """A progress bar; None if tqdm is not installed, and lines are shown."""
    with suppress(ImportError):
        from tqdm import tqdm

        return tqdm(total=steps, unit="step")


def show_progress(
    bar: Any, found: list[StepMetrics], steps: int, log_every: int, began: float
) -> None:
    """Show one more step of a run; the loss is read only every `log_every` steps."""
    if bar is not None:
        bar.update()
    done = len(found)
    if done % log_every and done != steps:
        return
    seconds, tokens = time.perf_counter() - began, sum(m.tokens for m in found)
    amount, unit = (tokens or sum(m.samples for m in found)), "tokens" if tokens else "samples"
    text = f"loss {found[-1].loss.item():.3f}, {amount / seconds:,.0f} {unit}/s"
    if bar is not None:
        bar.set_postfix_str(text)
    else:
        print(f"step {done}/{steps}: {text}", file=sys.stderr, flush=True)


def train_for(
    trainer: Any, loader: Iterable[Any], steps: int, log_every: int, stop: StopRequest | None
) -> list[StepMetrics]:
    """Take steps until there are so many, or all ranks stop after the same one; see `Trainer.fit`.

    Args:
      log_every: 0 shows nothing.
    """
    metrics, bar = list[StepMetrics](), bar_of(steps) if log_every else None
    began = time.perf_counter()
    home, passes = trainer.member.home, trainer.passes
    try:
        with (
            reports_step(home.state, trainer.state.step + 1),  # of the loader, or of what is shown
            closing(passes.batches(loader, home.device, home.world_size)) as batches,
        ):
            for _ in range(steps):
                batch = next(batches)
                passes.give(home.world_size * count(batch)[0], trainer.sync_state.step)
                metrics.append(trainer.step(batch))
                if log_every:
                    show_progress(bar, metrics, steps, log_every, began)
                if stop is not None and stop.due():
                    if trainer.checkpoint is not None:
                        trainer.checkpoint.save(trainer)
                    break
    except BaseException:
        passes.interrupted = True
        raise
    finally:
        if bar is not None:
            bar.close()
    if trainer.checkpoint is not None:
        trainer.checkpoint.close()
    return metrics

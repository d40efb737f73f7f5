"""Steps of a `Trainer`: micro-steps, both hops, the guard, the optimizer; and how ranks that have
come to different steps, or lost their state, come to one.

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

[Note: one step again] A step that some rank has completed was sent by all of them, so a rank may be
behind by what it had not written yet: parameters and optimizer state, or, if the step was refused,
only the scale and the watch of the guard. Ranks compare both numbers, that of steps and that of
steps with those that were refused. One that is behind takes what it lacks from a rank that is not.
Replicas that are independent have states of their own. If one of them is behind, for it the steps
that the others have taken count as refused; and a merge that has failed is made again. If a rank
has no state, or the ranks of a replica are at different steps, nobody holds what is missing.
Ranks that come back have nothing; see [Note: replicas are checkpoints].

[Note: replicas are checkpoints] Every rank of a replication group holds the same shards and the
same optimizer state. So a rank that was killed and comes back, or a whole partition group of them,
takes its part from one that still has it: each part travels once, over the links of hop 2. No step
is lost as long as one rank of each replication group holds the newest state. If none does, all
ranks raise LostStateError on groups that are good, and can go on from a state that was saved.

Leaves that are not trained do not travel: a rank that comes back has made them again, as its script
says. So they are compared between replicas, and all ranks raise if they are not the same.

[Note: steps written together] A rank that is killed in the last collectives of a step may have let
some ranks finish it and others not, and the newest state may then be nowhere in full. With
`recoverable=True` every rank says, before it writes a step, that it has all that it needs to do so,
and writes only once all have said it. If one is killed meanwhile, each of the others either has
written the step or can do so later, on new groups, from what it has kept.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils import deterministic as torch_deterministic

from mics_fn import _torch, errors, faults, optim, shards, spans, tree
from mics_fn.collectives import collect_bytes, collect_values
from mics_fn.deferred import GradSum, defer
from mics_fn.groups import Groups, current, placement, reports
from mics_fn.optim import Guard, StepTotals, TrainState, Verdict, opt_step
from mics_fn.shards import Writing, grad_stream
from mics_fn.spans import LOG
from mics_fn.threads import Commit
from mics_fn.train.program import Values, Weights, count, counted, cut, to_device, weight_of
from mics_fn.train.replicas import SyncState, has_own_state
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
        optim.record_memory(trainer.ahead)
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
            raise optim.StepRefused
        trainer.member.ready = None  # from here on a part of it may be written
        return found[0].verdict.grads

    stepped = None
    with Writing():
        with suppress(optim.StepRefused):
            stepped = opt_step(trainer.ahead, optim.lazy_grads(total, judged), donate=True)
        write(trainer, found[0], stepped)
    return found[0]


def _judged(
    trainer: Any, total: GradSum, buffers: Values, commit: Commit, totals: StepTotals, early: bool
) -> Ready:
    """Check a step before it is written, and defer signals from then on.

    Gradients elsewhere stay there until they are stepped; with `early` all are still reduced.
    """
    sync, home, grads = trainer.replica_sync, trainer.member.home, total
    if not early and total.placed and sync.reduce is None:
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
    if trainer.recoverable:  # see [Note: steps written together]
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
            with optim.masked_by(verdict.found_inf):
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
    buckets = {getattr(x, "bucket", None) for x in tree.flatten(state.params, shards.is_leaf)[0]}
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


_BACKWARD = errors.message(
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
        faults.same_step(trainer.ahead, trainer.groups)
        member.compared = True
    started, guard, member.ready = time.perf_counter(), trainer.guard, None
    home, groups, sync = member.home, trainer.groups, trainer.replica_sync
    if sync.independent or sync.reduce is not None:
        groups = sync.groups(groups)
    batch = to_device(batch, home.device)
    parts = cut(batch, trainer.accumulate)
    state, counts = trainer.ahead, count(batch)
    drift = start_comparison(trainer, trainer.program.buffers.averaged)
    where = trainer.where if "grads" in trainer.where.moved else None
    total = GradSum(len(parts), where=where)
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
    home, before = trainer.member.home, torch.is_grad_enabled()
    settings = torch.get_deterministic_debug_mode(), torch.backends.cudnn.benchmark
    settings += (cast(Any, torch_deterministic).fill_uninitialized_memory,)
    try:
        torch.set_grad_enabled(True)
        if trainer.deterministic:
            _set_deterministic("error", False, False)
        yield
    except BaseException as error:
        if commit.began and home.world_size > 1 and not isinstance(error, errors.MicsError):
            home.state.finish(error)
        raise
    finally:
        torch.set_grad_enabled(before)
        if trainer.deterministic:
            _set_deterministic(*settings)


def _set_deterministic(mode: int | str, benchmark: bool, fills: bool) -> None:
    """Set what decides whether torch's algorithms give equal bits.

    Its mode would also write to all new memory (`fills`), to reveal code that reads it too early.
    """
    torch.set_deterministic_debug_mode(mode)
    torch.backends.cudnn.benchmark = benchmark
    cast(Any, torch_deterministic).fill_uninitialized_memory = fills


def metrics_of(
    trainer: Any, totals: StepTotals, verdict: Verdict, known: dict[str, Any]
) -> StepMetrics:
    """The metrics of a step; of a masked one, what the host has to wait for is read later."""
    known |= {"grad_norm": verdict.norm, "spike": verdict.spike}
    step, skipped, masked = trainer.ahead.step, verdict.next.skipped, trainer.member.masked

    def rest() -> dict[str, Any]:
        refused, aborted = (False, False) if masked is None else totals.outcome()
        _, samples, tokens = totals.of_all
        why = verdict.nonfinite
        if refused:
            why = "collectives were aborted" if aborted else "a loss or a gradient is not finite"
        found = {"step": step - refused, "samples": samples, "tokens": tokens, "nonfinite": why}
        return {**found, "accepted": verdict.accept and not refused, "skipped": skipped + refused}

    if masked is not None:
        return StepMetrics.known_later(rest, **known)
    totals.warn_of_unequal()
    return StepMetrics(**known, **rest())


# What changes in a guard from step to step, as numbers that ranks and later runs take over.


def guard_numbers(guard: Guard) -> list[Any]:
    """What changes in a guard from step to step: of its scale, its own, and the norms it watches.

    JSON keeps every bit of them.
    """
    scale, norms = guard.scale, guard.spike and list(guard.spike.norms)
    return [scale.value, scale.good_steps, scale.overflows, guard.in_row, guard.skipped, norms]


def with_numbers(guard: Guard, numbers: Sequence[Any]) -> Guard:
    """The guard with what `guard_numbers` gave of one like it."""
    value, good_steps, overflows, in_row, skipped, norms = numbers
    spike = guard.spike and replace(guard.spike, norms=tuple(norms or ())[-guard.spike.window :])
    scale = replace(guard.scale, value=value, good_steps=good_steps, overflows=overflows)
    return replace(guard, scale=scale, spike=spike, in_row=in_row, skipped=skipped)


# What is compared for a `Trainer`: options that change numbers, and every K steps replicas.


def compare_options(trainer: Any) -> None:
    """Compare the options of a `Trainer`, which has its state, between ranks.

    Communication: that of `same_options`.

    Raises:
      DesyncError: ranks have other options.
    """
    params, guard = shards.reclaimed(trainer.state.params), trainer.guard
    guard.check_groups(params, trainer.groups)
    homes = list(dict.fromkeys(shards.homes_of("Trainer", trainer.groups, params)))
    several = any(home.world_size > 1 for home in homes)
    facts = _facts(trainer, shards.names(params), several) | {
        "deterministic": f"{trainer.deterministic}",
        "recoverable": f"{trainer.recoverable}",
        "placement": "; ".join(home.describe() for home in homes),
        "guard numbers": f"{guard_numbers(guard)}",
    }
    faults.same_options("Trainer", facts, homes)


def lasting_options(trainer: Any) -> dict[str, str]:
    """Return the options and versions that a resumed run must share, as texts by name.

    Where ranks are and what they hold at a time may differ: that changes only how sums are rounded.
    """
    paths = shards.names(trainer.state.params)
    return {**_facts(trainer, paths, several=False), **faults.versions()}


def _facts(trainer: Any, paths: Sequence[str], several: bool) -> dict[str, str]:
    """The options that ranks and later runs must share."""
    sync, guard, scale = trainer.replica_sync, trainer.guard, trainer.guard.scale
    changes = {*scale.CHANGING} - ({"value"} if scale.kind != "dynamic" else set())
    facts = {
        "accumulate": f"{trainer.accumulate}",
        "precision": f"{trainer.precision}" or "as given",
        "replica_sync": sync.name,
        "weight": "none" if trainer.weight is None else "a function",
    }
    texts = {f.name: f"{getattr(guard, f.name)}" for f in fields(guard) if f.repr}
    facts |= {f"guard {name}": text for name, text in texts.items() if name != "scale"}
    texts = {f.name: f"{getattr(scale, f.name)}" for f in fields(scale) if f.name not in changes}
    facts |= {f"guard scale {name}": text for name, text in texts.items()}
    outer = faults.texts_of(sync.facts or {}, paths)
    facts |= {f"outer {name}": text for name, text in outer.items()}
    return {**facts, **faults.optimizer_facts("Trainer", trainer.state.transform, paths, several)}


# Ranks that lack the newest state take it from their replicas, as those that come back do.


class Said(NamedTuple):
    """Report of a rank on new groups; JSON keeps every bit of it."""

    calls: int  # steps, including those that were refused
    step: int
    guard: list[Any]  # its `guard_numbers`
    back: bool  # whether its state is that of a process that has just begun
    cut: bool  # whether its state is lost, as a write of it was cut short
    ready: bool  # whether it has kept what it needs to write one more step
    merges: bool  # whether a merge of replicas is left to do of its last step
    passes: list[Any]  # what `DataPasses.report` gave

    @property
    def at(self) -> tuple[int, int]:
        """Return the calls and the steps that it has done."""
        return self.calls, self.step

    @property
    def lost(self) -> bool:
        """Whether it has no state."""
        return self.back or self.cut

    def __str__(self) -> str:
        if self.back:
            return "came back without a state"
        if self.cut:
            return "was cut short while it wrote a step"
        return f"step {self.step}, in {self.calls} calls{', before its merge' * self.merges}"


def reported_by_all(trainer: Any) -> dict[int, Said]:
    """Exchange the reports of all ranks, by global rank.

    Communication: two small all-gathers over each of the two groups.
    """
    mine = [
        trainer.sync_state.step,
        trainer.state.step,
        guard_numbers(trainer.guard),
        trainer.member.lost,
        shards.any_lost((trainer.state, trainer.sync_state)),
        trainer.member.ready is not None,
        trainer.member.merges,
        trainer.passes.report(trainer.sync_state.step),
    ]
    said = collect_bytes(trainer.member.home, json.dumps(mine).encode())
    return {rank: Said(*json.loads(text)) for rank, text in said.items()}


def at_one_step(trainer: Any, *, heal: bool) -> None:
    """Bring state, guard and place in the data to one step; see [Note: one step again].

    Args:
      trainer: the `Trainer`, on new groups.
      heal: whether a rank that is behind takes what it lacks from a replica.

    Raises:
      LostStateError, DesyncError: on all ranks; see `Trainer.reset`.
    """
    member, sync, found = trainer.member, trainer.replica_sync, reported_by_all(trainer)
    last = max(found.values(), key=lambda said: (not said.lost, said.at))
    order = attrgetter("calls" if sync.independent else "at")
    behind = [rank for rank, said in found.items() if said.lost or order(said) < order(last)]
    if sync.independent:
        _check_independent(member.home, found)
    else:
        ready = [rank for rank in behind if found[rank].ready and not found[rank].lost]
        ready = [rank for rank in ready if found[rank].calls == last.calls - 1]
        if member.home.rank in ready:
            write(trainer, member.ready)
        member.ready = None
        behind = [rank for rank in behind if rank not in ready]
    if behind and has_own_state(sync, trainer.sync_state):
        raise _lost(found, f"{sync.name} keeps a state on each rank that no other one has")
    if behind and not heal:
        fix = "pass heal=True, or go back to a state that all ranks have saved"
        raise _lost_state("ranks are at different steps", found, fix)
    if behind and member.home.position == 0:
        text = "reset: all go on at step %d, which %s did not have"
        LOG.warning(text, last.step, errors.name_ranks(behind))
    if member.home.rank in behind:
        trainer.sync_state = replace(trainer.sync_state, step=last.calls)
        trainer.guard = with_numbers(trainer.guard, last.guard)
    if not sync.independent:
        _take(trainer, found, last)
    elif member.home.rank in behind:
        trainer.state = replace(trainer.state, step=last.step)
    member.merges = last.merges
    if member.merges:
        merge(trainer)
    if any(said.passes[0] for said in found.values()):
        trainer.passes.go_on(trainer.sync_state.step)


def _take(trainer: Any, found: Mapping[int, Said], last: Said) -> None:
    """Let ranks take the state, and the place in the data, from those that have them."""
    member, home = trainer.member, trainer.member.home
    back, lost = member.lost, any(said.lost for said in found.values())
    if lost:
        compare_options(trainer)
    try:
        state = replace(trainer.state, step=faults.NO_STEP) if back else trainer.state
        trainer.state = faults.same_step(state, trainer.groups, heal=True)
    except errors.LostStateError:
        raise _lost(found, "some part of it is nowhere, or leaves are on several groups") from None
    if back:
        trainer.passes.take(last.passes)
        member.lost = False
    if lost and trainer.budget[0] == "auto":
        trainer.plan_memory()  # so that all plan the same
    if lost:
        with reports(errors.FileError):  # leaves may lie in files
            compared = faults.Comparison("Trainer.reset", trainer.state, home, [], moments=False)
        compared.finish("raise")


def _check_independent(home: Groups, found: Mapping[int, Said]) -> None:
    """Raise LostStateError if replicas with states of their own lack a part of one."""
    p, newest = home.partition_size, max(said.calls for said in found.values())
    replicas = [home.stacked_ranks[start : start + p] for start in range(0, len(found), p)]
    places = [{(found[rank].at, found[rank].merges) for rank in ranks} for ranks in replicas]
    merged = {said.merges for said in found.values() if said.calls == newest}
    if any(said.lost for said in found.values()):
        raise _lost(found, "replicas are independent, so each has a state of its own")
    if len(merged) > 1 or any(len(each) > 1 for each in places):
        raise _lost(found, "replicas are independent, and ranks of one are at different steps")


def _lost(found: Mapping[int, Said], why: str) -> errors.LostStateError:
    """Return the error of a state that no rank holds, with the saves to resume from."""
    what = "the newest state, as ranks are at different steps"
    if any(said.lost for said in found.values()):
        what = "the state that a lost rank had"
    newest = max(said.step for said in found.values())
    fix = f"put a state in its place that all ranks have saved, of step {newest} or before"
    fix += "; with checkpoint= the Trainer goes back to the newest by itself"
    return _lost_state(f"no replica holds {what}: {why}", found, fix)


def _lost_state(text: str, found: Mapping[int, Said], fix: str) -> errors.LostStateError:
    lines = errors.rank_lines({rank: f"{said}" for rank, said in found.items()})
    return errors.LostStateError(f"Trainer.reset: {text}", lines, fix)


_ATTEMPTS = 5  # as a rank may be lost while another one is healed


def renew(trainer: Any, *, heal: bool) -> None:
    """Put a `Trainer` on new groups, at one step; tries again if a rank is lost meanwhile.

    Where no replica holds what a rank lacks, all go back to the newest step that was saved.

    Args:
      trainer: the `Trainer`.
      heal: whether a rank that is behind takes what it lacks from a replica.

    Raises:
      LostStateError: see `Trainer.reset`.
    """
    member, saver = trainer.member, trainer.checkpoint
    for attempt in reversed(range(_ATTEMPTS)):
        new = faults.replaced([member.home, *tree.flatten(trainer.groups)[0]])
        trainer.groups, member.home = tree.map_leaves(new.get, trainer.groups), new[member.home]
        member.compared = False
        try:
            at_one_step(trainer, heal=heal)
            break
        except (errors.CollectiveError, errors.PeerFailed):
            if not attempt:
                raise
        except errors.LostStateError:
            # Whoever goes on puts a saved state in its place, and the next step compares it.
            member.lost, member.ready, member.merges = False, None, False
            if saver is not None and saver.begin(trainer):
                return
            raise
    member.compared = True
    if saver is not None:
        saver.reset(trainer)


def homes_for(groups: Any, params: Tree, deterministic: bool) -> tuple[Any, Groups]:
    """The groups of a tree, in a fixed order if `deterministic`; and the first of them."""
    homes = shards.homes_of("Trainer", groups, params, "params", Groups)
    if callable(groups):
        groups = tree.flatten(params, shards.is_leaf)[1].unflatten(homes)
    groups = tree.map_leaves(current, groups)
    if deterministic:
        new = {home: placement.fixed_order(home) for home in dict.fromkeys(homes)}
        groups, homes = tree.map_leaves(new.get, groups), [new[home] for home in homes]
    return groups, homes[0] if homes else groups

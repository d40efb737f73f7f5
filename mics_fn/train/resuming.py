"""How a `Trainer` goes on: from a replica after a fault, or from a save in another job.

What is saved is in two parts. The *state* is a tree of shards, tensors and numbers that is the
same on all ranks, up to who holds which piece, so that it can go on with other ranks. The *extra*
belongs to this rank: random states, the position in its data, and buffers that each rank computes
for itself.

[Note: one step again] A step that some rank has completed was sent by all of them, so a rank may be
behind by what it had not written yet: parameters and optimizer state, or, if the step was refused,
only the scale and the watch of the guard. Ranks compare both numbers, that of steps and that of
steps with those that were refused. One that is behind takes what it lacks from a rank that is not.
Replicas that are independent have states of their own: if a rank has no state, or is behind, nobody
holds what is missing. A merge that has failed is made again. Ranks that come back have nothing; see
[Note: replicas are checkpoints].

[Note: replicas are checkpoints] Every rank of a replication group holds the same shards and the
same optimizer state. So a rank that was killed and comes back, or a whole partition group of them,
takes its part from one that still has it: each part travels once, over the links of hop 2. No step
is lost as long as one rank of each replication group holds the newest state. If none does, all
ranks raise LostStateError on groups that are good, and can go on from a state that was saved.

Leaves that are not trained do not travel: a rank that comes back has made them again, as its script
says. So they are compared between replicas, and all ranks raise if they are not the same.
"""

import json
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields, replace
from typing import Any, Literal, NamedTuple

from torch import Tensor

from mics_fn import checkpoint, checks, errors, faults, shards, tree
from mics_fn.collectives import collect_bytes
from mics_fn.faults import comparing
from mics_fn.groups import reports
from mics_fn.optim import Guard
from mics_fn.shards import Writing
from mics_fn.spans import LOG
from mics_fn.train.loop import Position, put_back
from mics_fn.train.replicas import has_own_state
from mics_fn.train.stepping import write

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


# What is compared between ranks, and with a save: options that change numbers.


def compare_options(trainer: Any) -> None:
    """Compare the options of a `Trainer`, which has its state, between ranks.

    Communication: that of `same_options`.

    Raises:
      DesyncError: ranks have other options.
    """
    params, guard = shards.reclaimed(trainer.state.params), trainer.guard
    guard.check_groups(params, trainer.groups)
    homes = list(dict.fromkeys(shards.homes_of("Trainer", trainer.groups, params)))
    several = any(len(home.state.ranks) > 1 for home in homes)
    facts = _facts(trainer, shards.names(params), several) | {
        "deterministic": f"{trainer.deterministic}",
        "recoverable": f"{trainer.faults.recoverable}",
        "regions": ", ".join(trainer.program.regions) or "none",
        "placement": "; ".join(home.describe() for home in homes),
        "guard numbers": f"{guard_numbers(guard)}",
    }
    comparing.same_options("Trainer", facts, homes)


def lasting_options(trainer: Any) -> dict[str, str]:
    """Return the options and versions that a resumed run must share, as texts by name.

    Where ranks are and what they hold at a time may differ: that changes only how sums are rounded.
    """
    paths = shards.names(trainer.state.params)
    return {**_facts(trainer, paths, several=False), **comparing.versions()}


def _facts(trainer: Any, paths: Sequence[str], several: bool) -> dict[str, str]:
    """The options that ranks and later runs must share."""
    sync, guard, scale = trainer.options.replica_sync, trainer.guard, trainer.guard.scale
    changes = {*scale.CHANGING} - ({"value"} if scale.kind != "dynamic" else set())
    facts = {
        "accumulate": f"{trainer.options.accumulate}",
        "precision": f"{trainer.precision}" or "as given",
        "replica_sync": sync.name,
        "weight": "none" if trainer.options.weight is None else "a function",
    }
    texts = {f.name: f"{getattr(guard, f.name)}" for f in fields(guard) if f.repr}
    facts |= {f"guard {name}": text for name, text in texts.items() if name != "scale"}
    texts = {f.name: f"{getattr(scale, f.name)}" for f in fields(scale) if f.name not in changes}
    facts |= {f"guard scale {name}": text for name, text in texts.items()}
    outer = comparing.texts_of(sync.facts or {}, paths)
    facts |= {f"outer {name}": text for name, text in outer.items()}
    own = comparing.optimizer_facts("Trainer", trainer.state.transform, paths, several)
    return {**facts, **own}


# Ranks that lack the newest state take it from their replicas, as those that come back do.


class Said(NamedTuple):
    """Report of a rank on new groups; JSON keeps every bit of it."""

    calls: int  # steps, including those that were refused
    step: int
    guard: list[Any]  # its `guard_numbers`
    lost: str  # why it has no state; "" if it has one
    ready: bool  # whether it has kept what it needs to write one more step
    merges: bool  # whether a merge of replicas is left to do of its last step
    passes: list[Any]  # what `DataPasses.report` gave

    @property
    def at(self) -> tuple[int, int]:
        """Return the calls and the steps that it has done."""
        return self.calls, self.step

    def __str__(self) -> str:
        before = ", before its merge" * self.merges
        return self.lost or f"step {self.step}, in {self.calls} calls{before}"


def reported_by_all(trainer: Any) -> dict[int, Said]:
    """Exchange the reports of all ranks, by global rank.

    Communication: two small all-gathers over each of the two groups.
    """
    state = trainer.state  # first: whether its last step was taken decides the others
    member, sync, lost = trainer.member, trainer.sync_state, ""
    if shards.any_lost((state, sync)):
        lost = "was cut short while it wrote a step"
    if member.lost:
        lost = "came back without a state"
    mine = [sync.step, state.step, guard_numbers(trainer.guard), lost]
    mine += [member.ready is not None, member.merges, trainer.passes.report(sync.step)]
    said = collect_bytes(trainer.options.home, json.dumps(mine).encode())
    return {rank: Said(*json.loads(text)) for rank, text in said.items()}


def at_one_step(trainer: Any, *, heal: bool) -> None:
    """Bring state, guard and place in the data to one step; see [Note: one step again].

    Args:
      trainer: the `Trainer`, on new groups.
      heal: whether a rank that is behind takes what it lacks from a replica.

    Raises:
      LostStateError, DesyncError: on all ranks; see `Trainer.reset`.
    """
    member, sync, home = trainer.member, trainer.options.replica_sync, trainer.options.home
    found = reported_by_all(trainer)
    last = max(found.values(), key=lambda said: (not said.lost, said.at))
    # Each of replicas that are independent refuses steps on its own.
    part = slice(1 if sync.independent else 2)
    behind = [rank for rank, said in found.items() if said.lost or said.at[part] < last.at[part]]
    if sync.independent and (behind or len({said.merges for said in found.values()}) > 1):
        raise _lost(found, "replicas are independent, so each has a state of its own")
    ready = [rank for rank in behind if found[rank].ready and not found[rank].lost]
    ready = [rank for rank in ready if found[rank].calls == last.calls - 1]
    if home.rank in ready:
        with Writing():
            trainer._put(write(trainer.options, trainer.run, member.ready)[0])
    member.ready = None
    behind = [rank for rank in behind if rank not in ready]
    if behind and has_own_state(sync, trainer.sync_state):
        raise _lost(found, f"{sync.name} keeps a state on each rank that no other one has")
    if behind and not heal:
        raise _lost(found, "heal=False takes nothing from a replica")
    if behind and home.position == 0:
        text = "reset: all go on at step %d, which %s did not have"
        LOG.warning(text, last.step, errors.name_ranks(behind))
    if home.rank in behind:
        trainer.sync_state = replace(trainer.sync_state, step=last.calls)
        trainer.guard = with_numbers(trainer.guard, last.guard)
    if not sync.independent:
        _take(trainer, found, last)
    if last.merges:
        trainer._merge()
    if any(said.passes[0] for said in found.values()):
        trainer.passes.go_on(trainer.sync_state.step)


def _take(trainer: Any, found: Mapping[int, Said], last: Said) -> None:
    """Let ranks take the state, and the place in the data, from those that have them."""
    member, lost = trainer.member, any(said.lost for said in found.values())
    if lost:
        compare_options(trainer)
    try:
        state = replace(trainer.state, step=faults.NO_STEP) if member.lost else trainer.state
        trainer.state = faults.same_step(state, trainer.groups, heal=True)
    except errors.LostStateError:
        raise _lost(found, "some part of it is nowhere, or leaves are on several groups") from None
    if member.lost:
        trainer.passes.take(last.passes)
        member.lost = False
    if lost:
        if trainer.budget[0] == "auto":
            trainer.plan_memory()  # so that all plan the same
        with reports(errors.FileError):  # leaves may lie in files
            home = trainer.options.home
            compared = faults.Comparison("Trainer.reset", trainer.state, home, [], moments=False)
        compared.finish()


def _lost(found: Mapping[int, Said], why: str) -> errors.LostStateError:
    """Return the error of a state that no rank holds, with the saves to resume from."""
    what = "the newest state, as ranks are at different steps"
    if any(said.lost for said in found.values()):
        what = "the state that a lost rank had"
    newest = max(said.step for said in found.values())
    fix = f"put a state in its place that all ranks have saved, of step {newest} or before"
    fix += "; with checkpoint= the Trainer goes back to the newest by itself"
    lines = errors.rank_lines({rank: f"{said}" for rank, said in found.items()})
    return errors.LostStateError(f"Trainer.reset: no replica holds {what}: {why}", lines, fix)


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
        options = trainer.options
        new = faults.replaced([options.home, *tree.flatten(options.groups)[0]])
        groups, home = tree.map_leaves(new.get, options.groups), new[options.home]
        for old in new:
            old.state.aborted = False  # the gradients of a step that is ready were there before
        trainer.options = replace(options, groups=groups, home=home)
        member.compared, member.begun = False, None
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


# All that a `Trainer` carries from step to step, as a value.


def _split(trainer: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The state, with those buffers that are known to be equal on all ranks; and the others."""
    own, independent = dict(trainer.state.buffers), trainer.options.replica_sync.independent
    averaged = () if independent else trainer.program.buffers.averaged
    shared = {name: own.pop(name) for name in averaged}
    return {"train": replace(trainer.state, buffers=shared), "sync": trainer.sync_state}, own


def _extra(trainer: Any, own: dict[str, Tensor]) -> dict[str, Any]:
    """What belongs to this rank: its own buffers and about 30 kB."""
    home = trainer.options.home
    return {
        "options": lasting_options(trainer),
        "ranks": [home.position, home.world_size, home.device.type],
        "guard": guard_numbers(trainer.guard),
        "buffers": own,
        "data": trainer.passes.kept(trainer.sync_state.step),
        "random": trainer.passes.randoms(home.device),
    }


def _take_back(trainer: Any, found: checkpoint.Loaded, *, strict: bool) -> None:
    """Let a `Trainer` go on from a step that was loaded into its memory.

    Placement, the size of partition groups, budgets and buckets may differ from those of the save,
    and change only how sums are rounded, and a model may be in another number of parts. With
    another number of data-parallel ranks the pass goes on behind the samples that were used, random
    states are not taken, and `accumulate` may differ.

    Args:
      trainer: made as the saved one was.
      found: what `load` gave.
      strict: whether options that change numbers, or a loader, that are not as they were raise; if
        not, they are used with a warning.
    """
    home, extra, options = trainer.options.home, found.extra, lasting_options(trainer)
    was, here = extra["ranks"], [home.position, home.world_size, home.device.type]
    saved, randoms, data = dict(extra["options"]), extra["random"], extra["data"]
    position = data and Position(**data)
    if was[1] != here[1]:  # so that the batch can stay as it was
        saved["accumulate"] = options["accumulate"]
    if was != here:
        places = [f"rank {rank} of {ranks} on {kind}" for rank, ranks, kind in (here, was)]
        text = f"Checkpoints: {places[0]} was given what was saved by {places[1]}"
        warnings.warn(f"{text}: random numbers will not be those of that run", stacklevel=3)
    if was[:2] != here[:2]:  # the states belong to a rank
        randoms, position = None, data and position._replace(start=None, loader=None)
    if not _compare_options(saved, options, strict):
        trainer.guard = with_numbers(trainer.guard, extra["guard"])
    buffers = {**found.state["train"].buffers, **extra["buffers"]}
    for name, own in trainer.state.buffers.items():
        if name not in buffers or buffers[name].shape != own.shape:
            fix = "make the model as it was"
            raise errors.LeafError(f"Checkpoints: buffer {name!r} is not as it was saved", fix=fix)
    buffers = {name: buffers[name] for name in trainer.state.buffers}
    trainer.state = replace(found.state["train"], buffers=buffers)
    trainer.sync_state, member = found.state["sync"], trainer.member
    member.compared, member.merges = trainer.options.replica_sync.independent, False
    trainer.passes.resume(position, position and randoms, strict=strict)
    if randoms is not None:
        put_back(randoms, home.device)


def _compare_options(saved: Mapping[str, str], now: Mapping[str, str], strict: bool) -> bool:
    """Raise or warn of options that differ; gives whether those of the guard do."""
    grave, small = comparing.differing([saved, now])
    if names := grave or small:
        has = {name: (saved.get(name, "not given"), now.get(name, "not given")) for name in names}
        lines = [f"{name}: saved {old}, now {new}" for name, (old, new) in has.items()]
        text = "Checkpoints: this Trainer differs from the saved one"
        text += f" in what changes numbers: {', '.join(grave)}" if grave else " in versions"
        if grave and strict:
            fix = "make the Trainer as it was, or Checkpoints(other_options='warn') takes the new"
            raise errors.PlanError(text, lines, fix)
        warnings.warn(errors.message(text, lines), stacklevel=4)
    return any(name.startswith("guard ") for name in grave)


# `Checkpoints`: a `Trainer` that is saved every so many steps, and goes on where it was saved.

OnChange = Literal["raise", "warn"]


@dataclass(eq=False, repr=False)
class Checkpoints:
    """Save a `Trainer` every so many steps; a new `Trainer` resumes from the newest save.

    What is saved is all that decides the steps to come: parameters, optimizer state, buffers, the
    guard, what merges of replicas need, the place in the data, and random states. A `Trainer` made
    with the same options on as many ranks takes the same steps, to the bit. A model in parts may go
    on in another number of them.

    Args:
      folder: the folder of the job's checkpoints, which all ranks share; it need not exist. A
        relative one belongs to the working directory in which this is made.
      every: a step is saved if its number is a multiple of this.
      keep: how many of the newest steps are kept, at least 2; None keeps all.
      resume: whether a new `Trainer` goes on from the newest committed step, if there is one. If it
        does not, the first save raises FileError where it would replace steps of another
        run; steps are replaced only by a run that went on from this folder.
      background: whether training goes on while files are written; each step that is saved then
        waits for a copy in memory only.
      on_corrupt: "previous" lets it go on from an older step, if the newest one is damaged.
      other_options: "warn" lets it go on with options that change numbers and are not as saved (a
        guard of other options begins anew), and begins a new pass with a loader whose sampler has
        another seed or `shuffle`.

    Communication: at a step that is saved that of `checkpoint.start_save`; at others none.

    Memory: with `background` a copy of what this rank writes: 1/r of its shards.

    Raises:
      PlanError: an argument is not what it should be.
      FileError: when a `Trainer` is made with it, the folder cannot be written. A save would find
        that much later.

    Example:
      >>> import tempfile
      >>> groups, folder = make_groups(1), tempfile.mkdtemp()
      >>> def trainer():
      ...     torch.manual_seed(0)
      ...     model, loss = torch.nn.Linear(2, 1), lambda model, x: model(x).square().mean()
      ...     saved = Checkpoints(folder, every=2)
      ...     return Trainer(model, optim.sgd(0.1), groups, loss=loss, checkpoint=saved)
      >>> found = trainer().fit([torch.ones(4, 2)], steps=5, progress=False)
      >>> trainer().state.step
      4
    """

    folder: str | os.PathLike[str]
    _: KW_ONLY
    every: int = 1000
    keep: int | None = 2
    resume: bool = True
    background: bool = True
    on_corrupt: Literal["raise", "previous"] = "raise"
    other_options: OnChange = "raise"

    def __post_init__(self) -> None:
        checks.path("Checkpoints", "folder", self.folder)
        checks.integer("Checkpoints", "every", self.every)
        checks.choice("Checkpoints", "on_corrupt", self.on_corrupt, "raise", "previous")
        checks.choice("Checkpoints", "other_options", self.other_options, "raise", "warn")
        self.folder = os.path.abspath(self.folder)  # wherever the program goes meanwhile
        self._writer = checkpoint.Folder(self.folder)  # which another one can replace
        self._saved: int | None = None  # the last step that was saved or loaded
        self._retries = False  # whether the next step is saved, as a save has failed before a reset
        self._ours = False  # whether this run has loaded or saved a step of the folder
        self._pending: checkpoint.PendingSave | None = None

    def save(self, trainer: Any) -> None:
        """Save a trainer now, and wait until the step is committed. All ranks call it.

        Args:
          trainer: the `Trainer` to save, between two steps.

        Communication: that of `checkpoint.save`.

        Raises:
          FileError: it cannot be saved. A save before this one that failed is only logged.
        """
        self._end()
        self._begin_save(trainer, background=False)

    def begin(self, trainer: Any) -> bool:
        """Resume from the newest committed step; called by a new `Trainer`.

        `Trainer.reset` calls it, too, where no replica holds what a lost rank had.

        Returns:
          Whether there was one.

        Raises:
          FileError: some rank cannot write to the folder, or a newer job has taken it; on all of
            them.
          LeafError: a buffer cannot be saved.
        """
        self._end()
        where = self._writer, trainer.options.home, trainer.state.buffers
        resumed, seen = False, checkpoint.take_folder(*where, own=False)
        while self.resume:  # a job that cannot go on from here takes nothing from another one
            resumed, tried = self._resume(trainer), seen
            seen = checkpoint.take_folder(*where, own=True)
            if seen == tried:
                break
        return resumed

    def _resume(self, trainer: Any) -> bool:
        """Load the newest step, if there is one; returns whether there was."""
        where = self.folder, _split(trainer)[0], trainer.groups
        how: dict[str, Any] = {"on_corrupt": self.on_corrupt, "replicas": _replicas(trainer)}
        try:
            with Writing() as writing:  # until all of it is that of the trainer
                found = checkpoint.load(*where, donate=True, **how)
                writing.covers(found.state, "state", "load")
                _take_back(trainer, found, strict=self.other_options == "raise")
        except errors.CheckpointNotFound:
            if trainer.options.home.rank == trainer.options.home.state.ranks[0]:
                LOG.info("no checkpoint in %s: beginning at step 0", self.folder)
            return False
        self._saved, self._retries, self._ours = found.step, False, True
        if trainer.options.home.rank == trainer.options.home.state.ranks[0]:
            LOG.info("going on from step %d in %s", found.step, self.folder)
        return True

    def reset(self, trainer: Any) -> None:
        """Called by `Trainer.reset`, with all ranks at one step, on its new groups.

        What was under way on the old ones has ended with them. If that failed, the next step is
        saved in its place. Ranks may have heard different things of the end of a save, and one that
        came back has heard nothing, nor of the epoch in which the job has its folder: so they tell
        each other.
        """
        said = json.dumps([self._end(), self._ours, self._writer.epoch]).encode()
        found = [json.loads(text) for text in collect_bytes(trainer.options.home, said).values()]
        self._retries, self._ours, self._writer.epoch = map(max, zip(*found, strict=True))
        self._saved = trainer.state.step

    def after(self, trainer: Any) -> None:
        """Save a step if due, and raise the error of an earlier save; called after each step.

        State, guard, sync state and the place in the data are those behind this step, which may
        have been refused. The next step writes into the memory of the state, so what is to be saved
        is copied or written before this returns. After a step that raised it is not called.

        Raises:
          FileError: a save has failed, on all ranks after the same step. The step is done,
            a save that is due has begun all the same, and training may go on.
        """
        pending, step = self._pending, trainer.ahead.step
        due = self._retries or (step % self.every == 0 and step != self._saved)
        # To look whether an accelerator has taken the step waits for it, so only if it matters.
        due = due and (self._retries or trainer.state.step == step)
        try:
            if pending is not None and (due or pending.due()):
                self.close()
        finally:
            if due:
                self._begin_save(trainer, background=self.background)

    def close(self) -> None:
        """Wait for a save under way; called when a `fit` has ended, but not by an error.

        Raises:
          FileError: it failed.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait()

    def _end(self) -> bool:
        """Wait for a save under way, and return whether it failed, which nobody is stopped by."""
        pending = self._pending
        try:
            self.close()
        except Exception as error:
            LOG.warning("step %s was not saved: %s", pending and pending.step, error)
            return True
        return False

    def _begin_save(self, trainer: Any, *, background: bool) -> None:
        extra: Any
        try:
            state, own = _split(trainer)
            extra = _extra(trainer, own)
        except Exception as error:  # the save raises it, on all ranks
            state, extra = _split(trainer)[0], error
        step, options = trainer.state.step, {"keep": self.keep}
        # Steps of another run are not replaced, unless this one has gone on from this folder.
        options |= {"overwrite": "newer" if self._ours else "never", "replicas": _replicas(trainer)}
        begin: Any = checkpoint.start_save if background else checkpoint.save
        pending = begin(self._writer, state, trainer.groups, step=step, extra=extra, **options)
        self._pending = pending if background else None
        self._saved, self._retries, self._ours = step, False, True


def _replicas(trainer: Any) -> Literal["equal", "independent"]:
    sync = trainer.options.replica_sync
    return "independent" if sync.independent or has_own_state(sync, trainer.sync_state) else "equal"

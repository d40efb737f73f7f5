"""All that a `Trainer` carries from step to step, as values: what a checkpoint saves of it.

  >>> groups, loss = make_groups(1), lambda model, x: model(x).sum()
  >>> trainer = Trainer(torch.nn.Linear(1, 1), optim.sgd(0.1), groups, loss=loss)
  >>> metrics = trainer.step(torch.ones(1, 1))
  >>> state, extra = carried(trainer)
  >>> kept = tree.map_leaves(lambda x: x + 0, state)  # as steps write into it
  >>> for _ in range(2):
  ...     take_back(trainer, kept, extra)
  ...     print(trainer.step(torch.ones(1, 1)).step)
  2
  2

It is in two parts. The *state* is a tree of shards, tensors and numbers that is the same on all
ranks, up to who holds which piece, so that it can go on with other ranks. The *extra* belongs to
this rank: random states, the position in its data, and buffers that each rank computes for itself.
"""

import json
import os
import warnings
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from mics_fn import checkpoint, checks, errors, shards, tree
from mics_fn.collectives import collect_bytes, finish_readers, together
from mics_fn.faults import differing
from mics_fn.offload import is_placed, placed_like, read
from mics_fn.spans import LOG
from mics_fn.threads import Commit
from mics_fn.train.loop import Position, put_back
from mics_fn.train.replicas import has_own_state
from mics_fn.train.stepping import guard_numbers, lasting_options, with_numbers
from mics_fn.tree import Tree

# The state as a value.

OnChange = Literal["raise", "warn"]


def carried(trainer: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """All that a `Trainer` carries, for `take_back` of another one.

    Call it between two steps. Nothing is copied: the next step writes into the memory of `state`,
    so copy or save it before that.

    Args:
      trainer: the `Trainer`.

    Returns:
      `(state, extra)`. `state` is `{"train": TrainState, "sync": SyncState}`, whose plain tensors
      are equal on all ranks (or, while replicas are independent, on all ranks of a replica).
      `extra` is what `checkpoint.save` takes as such: this rank's random states, its position in
      the data of the last `fit`, what the guard has found, and buffers that ranks do not average:
      these buffers and about 30 kB.

    Communication: none.
    """
    home, (state, own) = trainer.member.home, _split(trainer)
    extra = {
        "options": lasting_options(trainer),
        "ranks": [home.position, home.world_size],
        "guard": guard_numbers(trainer.guard),
        "buffers": own,
        "data": trainer.passes.kept(trainer.sync_state.step),
        "random": trainer.passes.randoms(home.device),
    }
    return state, extra


def _split(trainer: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The state, with those buffers that are known to be equal on all ranks; and the others."""
    own, independent = dict(trainer.state.buffers), trainer.replica_sync.independent
    averaged = () if independent else trainer.program.buffers.averaged
    shared = {name: own.pop(name) for name in averaged}
    return {"train": replace(trainer.state, buffers=shared), "sync": trainer.sync_state}, own


def take_back(
    trainer: Any, state: Tree, extra: Mapping[str, Any], *, other_options: OnChange = "raise"
) -> None:
    """Restore a `Trainer` from the result of `carried`; all ranks call it.

    It goes on to the same bits, if it was made with the same options for as many ranks, and if the
    next `fit` gets a loader like that of the saved run: this `fit` goes on in the middle of its
    pass, see [Note: going on in a pass] in `loop`. Placement, the size of partition groups,
    budgets and buckets may differ, and change only how sums are rounded. With another number of
    ranks the pass goes on behind the samples that were used, random states are not taken, and
    `accumulate` may differ.

    Args:
      trainer: made as the saved one was. It does not change if anything does not fit.
      state: a tree like `carried(trainer)[0]`. Shards are copied into the memory of the trainer's
        own, since bits can depend on how pieces lie; other tensors are taken as they are.
      extra: what was saved by the rank of this position. With another number of ranks, by any rank.
      other_options: whether options that change numbers, or a loader, that are not as they were
        raise, or are used with a warning.

    Communication: two small all-gathers over each of the two groups: if one rank raises, all do.

    Memory: none.

    Raises:
      LeafError: `state` or `extra` does not fit this trainer; the first thing that does not is
        named.
      PlanError: the options of the trainer are not those of the saved run.
      DesyncError: ranks were given different steps, or another rank raises.
    """
    with together("take_back", trainer.member.home) as exchange:
        try:
            taken = _checked(trainer, state, extra, other_options)
        except errors.MicsError:
            raise
        except Exception as wrong:  # whatever a file may hold
            text, why = "take_back: this is not what was saved", f"{type(wrong).__name__}: {wrong}"
            fix = "take what `carried` gave"
            raise errors.LeafError(text, [why.partition("\n")[0]], fix) from None
        exchange.fact = f"go on at call {taken[0]['sync'].step}"
    state, buffers, guard, randoms, resume = taken
    own = shards.reclaimed(_split(trainer)[0])
    with Commit() as commit, shards.Writing() as writing:
        commit.write()
        writing.covers(own, "state", "take_back")
        shards.note_write()
        state = _written(own, state)
        trainer.state = replace(state["train"], buffers=buffers)
        trainer.sync_state, trainer.guard = state["sync"], guard
        trainer.member.compared, trainer.member.merges = trainer.replica_sync.independent, False
        trainer.passes.resume(resume, resume and randoms, strict=other_options == "raise")
        if trainer.checkpoint is not None:
            trainer.checkpoint.took_back(trainer)
        if randoms is not None:
            put_back(randoms, trainer.member.home.device)


def _checked(trainer: Any, state: Tree, extra: Any, other_options: OnChange) -> tuple[Any, ...]:
    """State, buffers, guard, random states and position to be assigned, if all of it fits."""
    checks.choice("take_back", "other_options", other_options, "raise", "warn")
    home = trainer.member.home
    here = [home.position, home.world_size, home.device.type]
    was = [*extra["ranks"], extra["random"]["kind"]]
    saved, now = dict(extra["options"]), lasting_options(trainer)
    if was[1] != here[1]:  # so that the batch can stay as it was
        saved["accumulate"] = now["accumulate"]
    new_guard = _compare_options(saved, now, other_options == "raise")
    shared, own = _split(trainer)
    _check_like(shards.reclaimed(shared), state, "state")
    _check_like(own, extra["buffers"], "extra.buffers")
    found = {**state["train"].buffers, **extra["buffers"]}
    buffers = {name: found[name] for name in trainer.state.buffers}
    guard = with_numbers(trainer.guard, extra["guard"])
    data, randoms = extra["data"], extra["random"]
    resume = data and Position(**data)
    for states in filter(None, (randoms, data and resume.start)):
        put_back(states, home.device, trial=True)
    if data and not type(resume.epoch) is type(resume.samples) is int:
        raise TypeError("extra.data is not the position in a pass")
    if was != here:
        places = [f"rank {rank} of {ranks} on {kind}" for rank, ranks, kind in (here, was)]
        text = f"take_back: {places[0]} was given what was saved by {places[1]}"
        lines = ["random numbers will not be those of the saved run"]
        warnings.warn(errors.message(text, lines), stacklevel=3)
    if was[:2] != here[:2]:  # the states belong to a rank
        randoms, resume = None, data and resume._replace(start=None, loader=None)
    return state, buffers, trainer.guard if new_guard else guard, randoms, resume


def _written(own: Tree, given: Tree) -> Tree:
    """The trainer's own state with given values, in the memory and the files of its shards."""
    (leaves, spec), new = tree.flatten(own, shards.is_leaf), tree.flatten(given, shards.is_leaf)[0]
    mine = {i: x.data for i, x in enumerate(leaves) if shards.is_leaf(x)}
    placed = [i for i, data in mine.items() if is_placed(data)]
    finish_readers([data for data in mine.values() if not is_placed(data)])
    with torch.no_grad():
        for i in mine.keys() - placed:
            mine[i].copy_(new[i].data)
        moved = placed_like([read(new[i].data) for i in placed], [mine[i] for i in placed])
    for i in mine:
        new[i] = leaves[i]
    for i, data in zip(placed, moved, strict=True):
        new[i] = type(leaves[i])(data, leaves[i].bucket, leaves[i].slot)
    return spec.unflatten(new)


def _compare_options(saved: Mapping[str, str], now: Mapping[str, str], strict: bool) -> bool:
    """Raise or warn of options that differ; gives whether those of the guard do."""
    grave, small = differing([saved, now])
    if names := grave or small:
        has = {name: (saved.get(name, "not given"), now.get(name, "not given")) for name in names}
        lines = [f"{name}: saved {old}, now {new}" for name, (old, new) in has.items()]
        text = "take_back: this Trainer differs from the saved one"
        text += f" in what changes numbers: {', '.join(grave)}" if grave else " in versions"
        if grave and strict:
            fix = "make the Trainer as it was, or pass other_options='warn' to go on with the new"
            raise errors.PlanError(text, lines, fix)
        warnings.warn(errors.message(text, lines), stacklevel=4)
    return any(name.startswith("guard ") for name in grave)


def _check_like(want: Tree, got: Tree, root: str) -> None:
    """Raise LeafError unless two trees have the same structure and leaves of the same kinds."""
    odd = [tree.first_mismatch(want, got, root)]
    if odd == [""]:
        wanted, given = (map(_kind, tree.flatten(x, shards.is_leaf)[0]) for x in (want, got))
        kinds = zip(tree.paths(want, root, shards.is_leaf), given, wanted, strict=True)
        odd = [f"{path}: got {new}, expected {old}" for path, new, old in kinds if new != old]
    if odd:
        fix = "load it like what `carried` gives of this trainer"
        raise errors.LeafError("take_back: it does not fit this trainer", odd[:1], fix)


def _kind(leaf: Any) -> str:
    """What must be equal of two leaves."""
    leaf = leaf.data if isinstance(leaf, shards.Sharded | shards.Fixed) else leaf
    if isinstance(leaf, Tensor):
        return f"a tensor of {tuple(leaf.shape)}, {leaf.dtype}, on {leaf.device}"
    return type(leaf).__name__


# `Checkpoints`: a `Trainer` that is saved every so many steps, and goes on where it was saved.


@dataclass(eq=False, repr=False)
class Checkpoints:
    """Save a `Trainer` every so many steps; a new `Trainer` resumes from the newest save.

    Another object with its methods `begin`, `after`, `save`, `reset`, `took_back` and `close` can
    take its place. All ranks call each of them, so they may call collectives, and what one raises
    has to be raised on all ranks.

    What is saved is all that decides the steps to come: parameters, optimizer state, buffers, the
    guard, what merges of replicas need, the place in the data, and random states. A `Trainer` made
    with the same options on as many ranks takes the same steps, to the bit.

    Args:
      folder: the folder of the job's checkpoints, which all ranks share; it need not exist. A
        relative one belongs to the working directory in which this is made.
      every: a step is saved if its number is a multiple of this.
      keep: how many of the newest steps are kept, at least 2; None keeps all.
      resume: whether a new `Trainer` goes on from the newest committed step, if there is one. If it
        does not, the first save raises FileError where it would replace steps of another
        run; steps are replaced only by a run that went on from this folder, or was put back by
        `take_back`.
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
        checks.integer("Checkpoints", "keep", self.keep, optional=True)
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
        where = self._writer, trainer.member.home, trainer.state.buffers
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
            with shards.Writing() as writing:  # until all of it is that of the trainer
                found = checkpoint.load(*where, donate=True, **how)
                writing.covers(found.state, "state", "load")
                trainer.state = replace(found.state["train"], buffers=trainer.state.buffers)
                trainer.sync_state = found.state["sync"]
                take_back(trainer, found.state, found.extra, other_options=self.other_options)
        except errors.CheckpointNotFound:
            if trainer.member.home.position == 0:
                LOG.info("no checkpoint in %s: beginning at step 0", self.folder)
            return False
        self._saved, self._retries = found.step, False
        if trainer.member.home.position == 0:
            LOG.info("going on from step %d in %s", found.step, self.folder)
        return True

    def took_back(self, trainer: Any) -> None:
        """Allow later steps to replace saved ones; called by `take_back`."""
        self._saved, self._ours = None, True

    def reset(self, trainer: Any) -> None:
        """Called by `Trainer.reset`, with all ranks at one step, on its new groups.

        What was under way on the old ones has ended with them. If that failed, the next step is
        saved in its place. Ranks may have heard different things of the end of a save, and one that
        came back has heard nothing, nor of the epoch in which the job has its folder: so they tell
        each other.
        """
        said = json.dumps([self._end(), self._ours, self._writer.epoch]).encode()
        found = [json.loads(text) for text in collect_bytes(trainer.member.home, said).values()]
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
            state, extra = carried(trainer)
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
    sync = trainer.replica_sync
    return "independent" if sync.independent or has_own_state(sync, trainer.sync_state) else "equal"

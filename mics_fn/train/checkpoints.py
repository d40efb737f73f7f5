"""`Checkpoints`: a `Trainer` that is saved every so many steps, and goes on where it was saved."""

import json
import os
from dataclasses import replace
from typing import Any, Literal

from mics_fn import checks
from mics_fn.checkpoint import PendingSave, check_folder, check_writable, load, save, start_save
from mics_fn.collectives import collect_bytes
from mics_fn.errors import CheckpointError, CheckpointNotFound
from mics_fn.log import LOG
from mics_fn.shards import Writing
from mics_fn.train.carried import OnChange, carried, state_of, take_back
from mics_fn.train.syncing import has_own_state


class Checkpoints:
    """Saves a `Trainer` after every so many steps; a new one goes on from the newest of them.

    What is saved is all that decides the steps to come: parameters, optimizer state, buffers, the
    guard, what merges of replicas need, the place in the data, and random states. A `Trainer` made
    with the same options on as many ranks takes the same steps, to the bit.

    Args:
      folder: the folder of the job's checkpoints, which all ranks share; it need not exist. A
        relative one belongs to the working directory in which this is made.
      every: a step is saved if its number is a multiple of this.
      keep: how many of the newest steps are kept, at least 2; None keeps all.
      keep_every: steps that are a multiple of it are kept, too.
      resume: whether a new `Trainer` goes on from the newest committed step, if there is one. If it
        does not, the first save raises CheckpointExists where it would replace steps of another
        run; steps are replaced only by a run that went on from this folder, or was put back by
        `take_back`.
      background: whether training goes on while files are written; each step that is saved then
        waits for a copy in memory only.
      on_corrupt: "previous" lets it go on from an older step, if the newest one is damaged.
      other_options: "warn" lets it go on with options that change numbers and are not as saved, or
        with a loader whose sampler has another seed or `shuffle`.
      commit: as for `checkpoint.save`.

    Communication: at a step that is saved that of `checkpoint.start_save`; at others none.

    Memory: with `background` a copy of what this rank writes: 1/r of its shards.

    Raises:
      PlanError: an argument is not what it should be.
      CheckpointError: what writes files is not installed; or, when a `Trainer` is made with it, the
        folder cannot be written. A save would find either much later.

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

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        every: int = 1000,
        keep: int | None = 2,
        keep_every: int | None = None,
        resume: bool = True,
        background: bool = True,
        on_corrupt: Literal["raise", "previous"] = "raise",
        other_options: OnChange = "raise",
        commit: Literal["rename", "file"] = "rename",
    ) -> None:
        verb = "Checkpoints"
        checks.path(verb, "folder", folder)
        for name, count in (("every", every), ("keep", keep), ("keep_every", keep_every)):
            checks.integer(verb, name, count, optional=name != "every")
        checks.flag(verb, "resume", resume)
        checks.flag(verb, "background", background)
        checks.choice(verb, "on_corrupt", on_corrupt, "raise", "previous")
        checks.choice(verb, "other_options", other_options, "raise", "warn")
        checks.choice(verb, "commit", commit, "rename", "file")
        check_writable()
        self.folder = os.path.abspath(folder)  # wherever the program goes meanwhile
        self.every, self.resume, self.background = every, resume, background
        self.on_corrupt: Literal["raise", "previous"] = on_corrupt
        self.other_options: OnChange = other_options
        self._saving: dict[str, Any] = {"keep": keep, "keep_every": keep_every, "commit": commit}
        self._saved: int | None = None  # the last step that was saved or loaded
        self._failed: int | None = None  # a step whose save failed, with none since
        self._again = False  # whether the next step is saved because of that
        self._ours = False  # whether this run has loaded or saved a step of the folder
        self._pending: PendingSave | None = None

    def save(self, trainer: Any) -> None:
        """Save a trainer now, and wait until the step is committed. All ranks call it.

        Args:
          trainer: the `Trainer` to save, between two steps.

        Communication: that of `checkpoint.save`.

        Raises:
          CheckpointError: it cannot be saved. A save before this one that failed is only logged.
        """
        self._forget(self._ended())
        self._begin_save(trainer, background=False)

    def begin(self, trainer: Any) -> bool:
        """Called by `Trainer` when it is made: go on from the newest committed step.

        `Trainer.reset` calls it, too, where no replica holds what a lost rank had.

        Returns:
          Whether there was one.

        Raises:
          CheckpointWriteError: some rank cannot write to the folder; on all of them.
          LeafError: a buffer cannot be saved.
        """
        self._forget(self._ended())
        check_folder(self.folder, trainer.member.home, trainer.state.buffers)
        if not self.resume:
            return False
        where = self.folder, state_of(trainer), trainer.groups
        how: dict[str, Any] = {"on_corrupt": self.on_corrupt, "replicas": _replicas(trainer)}
        try:
            with Writing():  # until it is the state of the trainer
                found = load(*where, donate=True, **how)
                buffers, state = trainer.state.buffers, found.state["train"]
                trainer.state = replace(state, buffers=buffers)
                trainer.sync_state = found.state["sync"]
        except CheckpointNotFound:
            if trainer.member.home.position == 0:
                LOG.info("no checkpoint in %s: beginning at step 0", self.folder)
            return False
        take_back(trainer, found.state, found.extra, other_options=self.other_options)
        self._saved, self._failed = found.step, None
        if trainer.member.home.position == 0:
            LOG.info("going on from step %d in %s", found.step, self.folder)
        return True

    def took_back(self, trainer: Any) -> None:
        """Called by `take_back`: the steps to come may replace those that are saved."""
        self._saved, self._ours = None, True

    def reset(self, trainer: Any) -> None:
        """Called by `Trainer.reset`: what was under way on the old groups has ended with them.

        If a step was not committed by that, the next one is saved in its place. Ranks may have
        heard different things of the end of a save, and one that came back has heard nothing, so
        they tell each other.
        """
        self._forget(self._ended())
        mine = json.dumps([self._saved, self._failed, self._ours]).encode()
        said = [json.loads(text) for text in collect_bytes(trainer.member.home, mine).values()]
        saved = [each[0] for each in said if each[0] is not None]
        failed = [each[1] for each in said if each[1] is not None]
        self._ours = any(each[2] for each in said)
        self._saved = max(saved, default=None)
        self._failed = max(failed, default=None)
        if self._failed in saved:  # some rank knows that it was committed
            self._failed = None
        self._again = self._failed is not None

    def after(self, trainer: Any) -> None:
        """Called by `Trainer` after each step: save it if it is due, and hear of saves that failed.

        Raises:
          CheckpointError: a save has failed, on all ranks after the same step. The step is done,
            a save that is due has begun all the same, and training may go on.
        """
        pending, step = self._pending, trainer.ahead.step
        error = self._ended() if pending is not None and pending.due() else None
        due = step % self.every == 0 and step != self._saved
        # To look whether an accelerator has taken the step waits for it, so only if it matters.
        if self._again or (due and trainer.state.step == step):
            error = self._ended() or error
            try:
                self._begin_save(trainer, background=self.background)
            except CheckpointError as wrong:
                raise wrong from error
        if error is not None:
            raise error

    def close(self) -> None:
        """Called when a `fit` has ended: wait for a save under way.

        Raises:
          CheckpointError: it failed.
        """
        error = self._ended()
        if error is not None:
            raise error

    def _ended(self) -> Exception | None:
        """Wait for a save under way; what it failed with, which is the same on all ranks."""
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        try:
            pending.wait()
        except Exception as error:
            self._failed = pending.step
            if self._saved == pending.step:
                self._saved = None
            return error
        return None

    def _forget(self, error: Exception | None) -> None:
        """Go on after a save that failed, which nobody is to be stopped by."""
        if error is not None:
            LOG.warning("step %s was not saved: %s", self._failed, error)

    def _begin_save(self, trainer: Any, *, background: bool) -> None:
        extra: Any
        try:
            state, extra = carried(trainer)
        except Exception as error:  # the save raises it, on all ranks
            state, extra = state_of(trainer), error
        step = trainer.state.step
        # Steps of another run are not replaced, unless this one has gone on from this folder.
        overwrite = "newer" if self._ours else "never"
        options = {"overwrite": overwrite, "replicas": _replicas(trainer), **self._saving}
        begin: Any = start_save if background else save
        pending = begin(self.folder, state, trainer.groups, step=step, extra=extra, **options)
        self._pending = pending if background else None
        self._saved, self._failed, self._again, self._ours = step, None, False, True


def _replicas(trainer: Any) -> Literal["equal", "apart"]:
    sync = trainer.replica_sync
    return "apart" if sync.apart or has_own_state(sync, trainer.sync_state) else "equal"

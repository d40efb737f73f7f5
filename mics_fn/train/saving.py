"""What a `Trainer` asks of an object that saves it."""

from typing import Any, Protocol


class Checkpoint(Protocol):
    """Saves a `Trainer` and lets it go on; `Trainer(checkpoint=)` calls it, on all ranks alike.

    What there is to save is `carried(trainer)`, and `take_back` puts it into another trainer; see
    `mics_fn.train.carried`. Each method may call collectives on the trainer's groups, since all
    ranks are at the same place. If one raises on a rank, it has to raise on all of them. An object
    that has `took_back(trainer)` hears of each `take_back`, which may go back to an older step.
    """

    def begin(self, trainer: Any) -> bool:
        """Called at the end of `Trainer.__init__`: load the newest step, and say if there was one.

        `Trainer.reset` calls it, too, where no replica holds what a lost rank had. What it raises
        leaves `Trainer.__init__`, and there is no trainer then.
        """
        ...

    def reset(self, trainer: Any) -> None:
        """Called by `Trainer.reset`, with all ranks at one step: forget what was under way."""

    def after(self, trainer: Any) -> None:
        """Called at the end of each `step`, in `fit` or by hand, also of one that was refused.

        State, guard, sync state and the position in the data are those behind this step; the
        number of calls is `trainer.sync_state.step`. The next step writes into the memory of the
        state, so what is to be saved must be copied or written before it returns. After a step that
        raised it is not called: that step was not taken on some rank, or the program is to end.
        What it raises leaves `step`, whose result is lost, while the step remains done.
        """

    def save(self, trainer: Any) -> None:
        """Called when a `StopRequest` ends a `fit`: save now, and wait for it."""

    def close(self) -> None:
        """Called when a `fit` has ended, but not by an error: wait for a save under way.

        Another `fit` may follow, so the object is used again.
        """


class NothingSaved:
    """A `Checkpoint` that does nothing: what a `Trainer` has if it is given none."""

    def begin(self, trainer: Any) -> bool:
        """Return False: there is nothing to load."""
        return False

    def reset(self, trainer: Any) -> None:
        """Do nothing: there is nothing to forget."""

    def after(self, trainer: Any) -> None:
        """Do nothing."""

    def save(self, trainer: Any) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing: there is nothing to wait for."""

"""`Telling`: a step of a program, of whose error the other ranks hear."""

from types import TracebackType

from mics_fn.groups.life import Life, tell_all


class Telling:
    """A block that is one step of a program; an error that leaves it is told to the other ranks.

    Args:
      life: of the groups that step.
      step: the number of the step.
    """

    def __init__(self, life: Life, step: int) -> None:
        self._life, self._step = life, step

    def __enter__(self) -> None:
        self._life.step = self._step

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            tell_all(error)

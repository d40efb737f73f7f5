"""`Telling`: a step of a program, of whose error the other ranks hear."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import TracebackType

from mics_fn.groups.life import OPEN, Life
from mics_fn.groups.retiring import quietly


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


def tell_all(error: BaseException, *, final: bool = False, kind: str = "") -> None:
    """Tell the ranks of all groups that are open here of an error of this rank, as `Life.tell`."""
    for life in list(OPEN):
        quietly(partial(life.tell, error, final=final, kind=kind))


@contextmanager
def errors_told(kind: type[Exception]) -> Iterator[None]:
    """A block of whose errors of a kind the other ranks hear, even if the program catches them."""
    try:
        yield
    except kind as error:
        tell_all(error)
        raise


def withdraw_all(goes_on: Life | None = None) -> None:
    """Withdraw what `tell_all` told, as this rank goes on.

    Args:
      goes_on: the life of the groups on which it makes its next call; None if there are none.

    Raises:
      PeerFailed: another rank of these groups has given up because of it.
    """
    for life in list(OPEN):
        told = life.told
        if told is None or told.final or life.retract():
            life.stands = False
            continue
        life.told = replace(told, final=True)
        life.fail(told.error(""))
        if life is goes_on:
            raise told.error("")

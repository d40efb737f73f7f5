"""`Turns`: which thread uses the communicators of some groups.

[Note: one thread at a time] A second thread that used communicators while a first one uses them
would issue collectives in between, in an order that other ranks do not have. It is refused. But
threads may take turns, as those do in which autograd runs backward on an accelerator, while the
first one waits for them. So a whole step keeps others from steps of their own, and only what issues
collectives or waits for them keeps others from all communicators.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from mics_fn.errors import GroupsError, message


class Turns:
    """See [Note: one thread at a time]."""

    def __init__(self) -> None:
        self._use, self._step = threading.RLock(), threading.RLock()
        self._stepping = False  # in the thread that holds the second one

    def enter(self) -> None:
        """Begin to use the communicators, until `leave`.

        Raises:
          GroupsError: another thread uses them.
        """
        if not self._use.acquire(blocking=False):
            raise _refused()

    def leave(self) -> None:
        """End what `enter` began."""
        self._use.release()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """A block, such as an evaluation, during which no other thread may begin another one.

        Raises:
          GroupsError: another thread is in one.
        """
        if not self._step.acquire(blocking=False):
            raise _refused()
        try:
            yield
        finally:
            self._step.release()

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Such a block in which this thread may not begin another step, either.

        The gradients of the first one would be applied to parameters that the second has changed.

        Raises:
          GroupsError: this thread is in a step, or another one in a block.
        """
        with self.alone():
            if self._stepping:
                text = "a step begins inside of another one of the same groups"
                raise GroupsError(message(text, fix="let the loss compute, and step after it"))
            self._stepping = True
            try:
                yield
            finally:
                self._stepping = False


def _refused() -> GroupsError:
    name = threading.current_thread().name
    text = f"thread {name!r} uses groups that another thread is using"
    return GroupsError(message(text, fix="call the verbs of one set of groups in one thread"))

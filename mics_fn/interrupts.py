"""Signals held back while a step is written, so that a state is the old one or the new one.

[Note: commit] A step that writes into the memory of its state has instants at which neither the old
state nor the new one is whole. A `KeyboardInterrupt` there would tear the state, or lose it between
its last write and its assignment. So a `Commit` holds signals from the first write on, and calls
their handlers once the new state is in its place.

Ranks must also agree whether a step is done. A rank that has all gradients of a step knows that
each other rank has sent its part of the last bucket, for nothing can be reduced without it. So
`Trainer` begins to hold signals before this rank sends its own part: then no rank that has sent it
can be interrupted, every one of them writes the step, and no message is needed to agree on that. A
rank that was interrupted before has not sent it, so no rank gets that far. While nothing is written
yet, a wait that makes no progress gives way to a signal after a second, or to a second signal:
then some other rank is gone, and whether all ranks are at one step is compared on new groups.

Only handlers that Python runs are held, in the main thread, where alone they can interrupt.

[Note: between two instructions] A function that returns a new state cannot hold signals until its
caller has assigned it. But Python looks for signals only where it calls a function, starts one or
jumps back, and between an index, a return and an assignment it does none of these. So an index ends
the block of such a function, in C from the first handler to the last signal. What was held is sent
again by a thread, after a moment in which the caller assigns the result: where torch.compile has
put an evaluator of its own in the place of Python's, that looks for signals after a call, too. A
signal that comes in just these microseconds is not held there: it may come before the assignment.
"""

import signal
import threading
import time

# Those of `signal` run Python code around these.
from _signal import getsignal  # pyright: ignore[reportMissingImports]
from _signal import signal as set_handler  # pyright: ignore[reportMissingImports]
from _thread import start_new_thread
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain, starmap
from types import FrameType, TracebackType
from typing import Any

# Not SIGPROF, whose handlers look at the program again and again, and those of faults. DataLoader
# raises where SIGCHLD tells it that a worker has died, and a batch system's limit is SIGXCPU.
_NAMES = (
    *("SIGINT", "SIGTERM", "SIGHUP", "SIGALRM", "SIGUSR1", "SIGUSR2"),
    *("SIGCHLD", "SIGXCPU", "SIGVTALRM", "SIGQUIT"),
)
_SIGNALS = [int(getattr(signal, name)) for name in _NAMES if hasattr(signal, name)]
_MOMENT_S = 0.001  # in which a result is assigned
_PATIENCE_S = 1.0  # how long a wait without progress keeps a signal before anything is written

Handler = Callable[[int, FrameType | None], Any]


class Commit:
    """A block that may hold signals from some instant on, and calls their handlers at its end.

    Inside another one that holds signals already it does nothing of its own.

    Example:
      >>> before = signal.signal(signal.SIGUSR1, lambda number, frame: print("heard"))
      >>> with Commit() as commit:
      ...     commit.write()
      ...     signal.raise_signal(signal.SIGUSR1)
      ...     print("done")
      done
      heard
      >>> old = signal.signal(signal.SIGUSR1, before)
    """

    def __init__(self) -> None:
        self.began = False  # whether signals were held from some instant on
        self._writes = False  # whether something was written
        self._handlers: dict[int, Handler] = {}  # those of the signals that are held
        self._pending: list[Any] = []  # signals that came, each once
        self._count = 0  # how often they came

    def block(self) -> None:
        """Hold signals from here on; waits may still give way to them."""
        global _blocking
        self.began = True
        main = threading.current_thread() is threading.main_thread()
        if _blocking is not None or not main:
            return
        try:
            for number in _SIGNALS:
                handler = getsignal(number)
                if callable(handler):
                    self._handlers[number] = handler
                    set_handler(number, self._keep)
        except BaseException:  # a signal that is not held yet
            self._restore()
            raise
        _blocking = self

    def write(self) -> None:
        """Hold signals to the end of the block, whatever happens in it."""
        self.block()
        if _blocking is not None:
            _blocking._writes = True

    def _keep(self, number: int, frame: FrameType | None) -> None:
        if number not in self._pending:
            self._pending.append(number)
        self._count += 1

    def give_way(self, idle_s: float) -> None:
        """Let go of a signal in a wait without progress, unless something was written."""
        insists = self._count > 1 or idle_s > _PATIENCE_S
        if self._pending and insists and not self._writes:
            self._end()

    def _restore(self) -> None:
        """Put the handlers back; one that raises meanwhile does not keep the others away."""
        try:
            for number in list(self._handlers):
                set_handler(number, self._handlers[number])
                del self._handlers[number]
        finally:
            if self._handlers:
                self._restore()

    def _end(self) -> None:
        global _blocking
        handlers = dict(self._handlers)
        _blocking = None
        try:
            self._restore()
        finally:
            blocked, self._pending, self._count, self._writes = self._pending, [], 0, False
            if blocked:
                _call([partial(handlers[number], number, None) for number in blocked])

    def ending(self) -> Mapping[int, Any]:
        """What ends the block when it is indexed; see [Note: between two instructions]."""
        global _blocking
        if _blocking is not self:
            return {0: None}
        _blocking = None
        # Ctrl-C comes last: once its handler is back, nothing looks for signals here.
        back = starmap(set_handler, reversed(self._handlers.items()))
        resent = map(partial(start_new_thread, resend), zip(self._pending, strict=True))
        return defaultdict(partial(deque, chain(back, resent), 0))

    def __enter__(self) -> "Commit":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if _blocking is self:
            self._end()


_blocking: Commit | None = None  # the one that holds signals now


def blocked() -> Commit:
    """Defer signals until the end of a short block."""
    commit = Commit()
    commit.block()
    return commit


def resend(number: int) -> None:
    """Send a deferred signal to the main thread again; called by other threads."""
    time.sleep(_MOMENT_S)
    if callable(getsignal(number)):  # what has no handler any more would end the process
        signal.pthread_kill(threading.main_thread().ident or 0, number)  # ends a sleep, too


def give_way(idle_s: float) -> None:
    """Called in a wait that has made no progress for some time; see [Note: commit]."""
    if _blocking is not None and threading.current_thread() is threading.main_thread():
        _blocking.give_way(idle_s)


def _call(handlers: Sequence[Callable[[], Any]]) -> None:
    """Call all of them, although the first may raise."""
    try:
        handlers[0]()
    finally:
        if handlers[1:]:
            _call(handlers[1:])

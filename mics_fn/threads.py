"""Signals that are deferred while a step is written, and threads that no signal can block.

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

[Note: threads and Ctrl-C] Python's own `Event`, `Condition`, `Future` and `ThreadPoolExecutor` take
their locks in Python. A `KeyboardInterrupt` between the instruction that takes such a lock and the
block that lets go of it leaves it taken for good, and the thread on the other side never comes back
from its next `set` or `release`; then whoever waits for that thread waits for ever. So nothing here
shares such a lock with the main thread: a `Latch` and a `SimpleQueue` have locks of C's, which are
taken and let go of within one instruction, and a thread is started while signals are held.
"""

import signal
import threading
import time

# Those of `signal` run Python code around these.
from _signal import getsignal  # pyright: ignore[reportMissingImports]
from _signal import signal as set_handler  # pyright: ignore[reportMissingImports]
from _thread import allocate_lock, start_new_thread
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain, starmap
from math import inf
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")

# Not SIGPROF, whose handlers look at the program again and again, and those of faults. DataLoader
# raises where SIGCHLD tells it that a worker has died, and a batch system's limit is SIGXCPU.
_NAMES = "SIGINT SIGTERM SIGHUP SIGALRM SIGUSR1 SIGUSR2 SIGCHLD SIGXCPU SIGVTALRM SIGQUIT"
_SIGNALS = [int(getattr(signal, name)) for name in _NAMES.split()]
_MOMENT_S = 0.001  # in which a result is assigned
_PATIENCE_S = 1.0  # how long a wait without progress keeps a signal before anything is written


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
        self._handlers: dict[int, Callable[..., Any]] = {}  # those of the signals that are held
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

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
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


# Threads.

_WAIT_S = 0.1  # of a wait for a thread, after which Python looks for signals and checks


def start(thread: threading.Thread) -> threading.Thread:
    """Start a thread; `KeyboardInterrupt` is raised before its start or after."""
    with blocked():  # the two threads meet at an Event
        thread.start()
    return thread


class Latch:
    """What one thread sets once, and others wait for: an `Event` without a lock in Python.

    Example:
      >>> latch = Latch()
      >>> latch.wait(0.0)
      False
      >>> latch.set()
      >>> latch.wait(0.0)
      True
    """

    __slots__ = ("_lock", "_set")

    def __init__(self) -> None:
        self._set, self._lock = False, allocate_lock()
        self._lock.acquire()

    def set(self) -> None:
        """Release all waiting threads."""
        if not self._set:
            self._set = True
            self._lock.release()

    def is_set(self) -> bool:
        """Whether it is set."""
        return self._set

    def wait(self, timeout_s: float) -> bool:
        """Wait until it is set, or for so many seconds; returns whether it is.

        Whoever is interrupted in here keeps the lock, so that others may wait to the end of their
        time before they see that it is set.
        """
        if not self._set and self._lock.acquire(timeout=max(0.0, timeout_s)):
            self._lock.release()
        return self._set


class Job:
    """Work that was given to another thread.

    Args:
      work: what to do.
    """

    __slots__ = ("__weakref__", "_work", "done", "error", "thread", "value")

    def __init__(self, work: Callable[..., Any]) -> None:
        self._work: Callable[..., Any] | None = work
        self.done = Latch()
        self.value: Any = None
        self.error: BaseException | None = None
        self.thread: threading.Thread | None = None  # of its own

    def begin(self, name: str, *, daemon: bool = True) -> "Job":
        """Do it on a thread of its own; here and now, if none can be started any more.

        >>> Job(lambda: 6 * 7).begin("example").result()
        42
        """
        self.thread = threading.Thread(target=self.run, name=name, daemon=daemon)
        try:
            start(self.thread)
        except RuntimeError:  # at its end the interpreter starts none, or there is no memory
            self.run()
        return self

    def run(self, *given: Any) -> None:
        """Do it with what that thread has, and keep its value or its error."""
        work, self._work = self._work, None
        try:
            self.value = work(*given) if work is not None else None
        except BaseException as error:
            self.error = error
        del work
        self.done.set()

    def drop(self, why: BaseException) -> None:
        """Let it be, as nobody will do it; whoever waits for it gets this error."""
        self._work, self.error = None, why
        self.done.set()

    def result(self) -> Any:
        """Wait for it; returns its value, or raises its error."""
        while not self.done.wait(_WAIT_S):
            pass
        if self.error is not None:
            raise self.error
        return self.value


def ended(jobs: Iterable[Job], timeout_s: float = inf) -> bool:
    """Wait until no thread of jobs is left, or for so many seconds; returns whether none is.

    Ctrl-C meanwhile is raised afterwards, and a second one at once.
    """
    begun = [job.thread for job in jobs if job.thread is not None]
    with blocked():
        deadline = time.monotonic() + timeout_s
        for thread in begun:
            while thread.is_alive() and time.monotonic() < deadline:
                thread.join(_WAIT_S)
                give_way(0.0)
    return not any(thread.is_alive() for thread in begun)


def bounded(
    call: Callable[[], Any], deadline: float, check: Callable[[float], None] = lambda idle_s: None
) -> Any:
    """Make a call that may be stuck in C++ on a thread of its own, and wait in Python.

    Args:
      call: what to do; it goes on if this raises.
      deadline: in seconds of `time.monotonic`.
      check: called with the seconds waited so far; raises if waiting has become useless.

    Raises:
      TimeoutError: it has not ended by the deadline.
    """
    job, started = Job(call).begin("mics_fn bounded"), time.monotonic()
    while not job.done.wait(min(_WAIT_S, max(0.0, deadline - time.monotonic()))):
        now = time.monotonic()
        if now >= deadline:
            raise TimeoutError
        check(now - started)
    return job.result()

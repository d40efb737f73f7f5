"""Threads that Ctrl-C in the main thread cannot block: how to start one, wait for it, share work.

[Note: threads and Ctrl-C] Python's own `Event`, `Condition`, `Future` and `ThreadPoolExecutor` take
their locks in Python. A `KeyboardInterrupt` between the instruction that takes such a lock and the
block that lets go of it leaves it taken for good, and the thread on the other side never comes back
from its next `set` or `release`; then whoever waits for that thread waits for ever. So nothing here
shares such a lock with the main thread: a `Latch` and a `SimpleQueue` have locks of C's, which are
taken and let go of within one instruction, and a thread is started while signals are held.
"""

import threading
import time
import weakref
from _thread import allocate_lock
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from math import inf
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from mics_fn.interrupts import blocked, give_way

_LOOK_S = 0.5  # after which an idle thread looks whether it is still needed
_WAIT_S = 0.1  # between two checks of `bounded`
_PART_S = 0.05  # of a wait for a thread, after which a second Ctrl-C is heard
T = TypeVar("T")


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


class Bell:
    """What wakes one thread up, again and again.

    Example:
      >>> bell = Bell()
      >>> bell.ring()
      >>> bell.ring()
      >>> bell.wait(10.0), bell.wait(0.0)
      (True, False)
    """

    def __init__(self) -> None:
        self._rings: SimpleQueue[None] = SimpleQueue()

    def ring(self) -> None:
        """Wake the thread up that waits, or the next one."""
        self._rings.put(None)

    def wait(self, timeout_s: float) -> bool:
        """Wait until it rings, or for so many seconds; returns whether it rang since the last."""
        try:
            self._rings.get(timeout=timeout_s)
        except Empty:
            return False
        with suppress(Empty):
            while True:  # it rang more than once
                self._rings.get_nowait()
        return True


class Job:
    """Work that was given to another thread.

    Args:
      work: what to do.
    """

    __slots__ = ("_work", "done", "error", "value")

    def __init__(self, work: Callable[..., Any]) -> None:
        self._work: Callable[..., Any] | None = work
        self.done = Latch()
        self.value: Any = None
        self.error: BaseException | None = None

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
        while not self.done.wait(_LOOK_S):
            pass
        if self.error is not None:
            raise self.error
        return self.value


class Crew:
    """A few threads that take one job after the other.

    Args:
      count: how many at most; each is started when there is a job for it.
      name: of the threads.

    Example:
      >>> crew = Crew(2, "example")
      >>> job = crew.give(lambda: 6 * 7)
      >>> job.done.wait(10.0), job.result()
      (True, 42)
      >>> crew.end(10.0)
      True
    """

    def __init__(self, count: int, name: str) -> None:
        self._count, self._name = count, name
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def give(self, work: Callable[[], Any]) -> Job:
        """Hand in some work, which begins as soon as a thread is free.

        Raises:
          RuntimeError: no thread can be started, and none is there.
        """
        job = Job(work)
        with blocked():
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            if len(self._threads) < self._count:
                serve = partial(_serve, self._jobs, weakref.ref(self))
                thread = threading.Thread(target=serve, name=self._name)
                self._threads.append(thread)  # before it starts: `end` waits for all that run
                try:
                    thread.start()
                except RuntimeError:
                    self._threads.remove(thread)
                    if not self._threads:
                        raise
            self._jobs.put(job)
        return job

    def end(self, timeout_s: float = inf) -> bool:
        """Drop the jobs that have not begun, and wait until no thread is left.

        Ctrl-C meanwhile is raised afterwards, and a second one at once.

        Args:
          timeout_s: the longest wait in seconds; a thread that is left then ends after its job.

        Returns:
          Whether no thread is left.
        """
        with blocked():
            self._dismiss()
            deadline = time.monotonic() + timeout_s
            for thread in self._threads:
                while thread.is_alive() and time.monotonic() < deadline:
                    thread.join(_PART_S)
                    give_way(0.0)
        return not any(thread.is_alive() for thread in self._threads)

    def _dismiss(self) -> None:
        with suppress(Empty):
            while True:
                job = self._jobs.get_nowait()
                if job is not None:
                    job.drop(RuntimeError("this job was dropped before it began"))
        for _ in self._threads:
            self._jobs.put(None)


def _serve(jobs: "SimpleQueue[Job | None]", crew: "weakref.ref[Crew]") -> None:
    """Do job after job, until there is a None among them, or nobody can give any more."""
    while True:
        try:
            job = jobs.get(timeout=_LOOK_S)
        except Empty:
            # A finalizer of the crew could tell at once, and could swallow a Ctrl-C.
            if crew() is None or not threading.main_thread().is_alive():
                return
            continue
        if job is None:
            return
        job.run()
        del job  # and so what it refers to, while this thread waits


def each(work: Callable[[T], Any], items: Iterable[T], count: int, name: str) -> list[Any]:
    """What some work gives for each item, done by several threads; raises the first error.

    Nobody works on any of them once this has returned or raised.

    >>> each(abs, [-1, 2, -3], 2, "example")
    [1, 2, 3]
    """
    crew = Crew(count, name)
    try:
        jobs = [crew.give(partial(work, item)) for item in items]
        return [job.result() for job in jobs]
    finally:
        crew.end()


def beside(work: Callable[[], Any]) -> Callable[[], Any]:
    """Begin some work on another thread; the result waits for it, and gives what came of it.

    >>> beside(lambda: 6 * 7)()
    42
    """
    job = Job(work)
    try:
        start(threading.Thread(target=job.run))
    except RuntimeError:  # at its end the interpreter starts no threads
        job.run()
    return job.result


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
    job, started = Job(call), time.monotonic()
    start(threading.Thread(target=job.run, daemon=True))
    while not job.done.wait(min(_WAIT_S, max(0.0, deadline - time.monotonic()))):
        now = time.monotonic()
        if now >= deadline:
            raise TimeoutError
        check(now - started)
    return job.result()

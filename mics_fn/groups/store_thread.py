"""`StoreThread`: a thread that talks to the store, so that no other thread is ever stuck in it.

[Note: the store thread] A call to the store ends in C++, where neither Ctrl-C nor a time limit ends
it: if the rank that holds the store is stopped, it never ends. So each call is handed to a thread
with a connection of its own. Whoever asks waits for the answer in Python, in short waits, and no
longer than it may. The thread may be stuck for good; then nobody else is.
"""

import threading
import time
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch.distributed as dist

from mics_fn.errors import first_line
from mics_fn.threads import Job, start

_WAIT_S = 0.1  # between two looks of whoever waits for an answer
_LOST = dist.DistNetworkError, dist.DistStoreError  # pyright: ignore[reportPrivateImportUsage]


class StoreLost(RuntimeError):
    """The connection to the store failed, or the store does not answer (`silent`)."""

    def __init__(self, text: str, *, silent: bool) -> None:
        super().__init__(text)
        self.silent = silent


_GIVEN_UP = StoreLost("another connection has taken its place", silent=True)


class StoreThread:
    """A thread with a connection to a store of its own; see [Note: the store thread].

    Args:
      store: of torch.distributed, or what does the same.
    """

    def __init__(self, store: Any) -> None:
        self._given = store
        self.renew()

    def renew(self) -> None:
        """Begin anew on another thread with another connection, once this one was lost."""
        self._jobs = SimpleQueue[Job | None]()
        self.connected = False
        self.lost: StoreLost | None = None  # why it can do nothing any more
        serve = partial(self._serve, self._jobs)
        self._thread = threading.Thread(target=serve, name="mics_fn store", daemon=True)
        start(self._thread)

    def ask(self, call: Callable[[Any], Any]) -> Job:
        """Hand in a call, which gets the thread's own connection, and do not wait."""
        job = Job(partial(self._call, self._jobs, call))
        if self.lost is None:
            self._jobs.put(job)
        else:
            job.drop(self.lost)
        return job

    def answer(self, job: Job, patience_s: float) -> Any:
        """Wait for the end of a call; raises its error.

        Raises:
          StoreLost: the store does not answer within these seconds.
        """
        deadline = time.monotonic() + patience_s
        while not job.done.wait(_WAIT_S):
            if self.lost is not None and not job.done.is_set():
                raise self.lost
            if time.monotonic() > deadline:
                raise StoreLost(f"it did not answer within {patience_s:g} s", silent=True)
        return job.result()

    def end(self) -> None:
        """Let the thread end once it has done all that it was asked."""
        self._jobs.put(None)

    def end_now(self, patience_s: float) -> None:
        """`end`, and wait for that; nothing is asked afterwards."""
        self.end()
        self._thread.join(patience_s)
        self.lost = self.lost or StoreLost("this process ends", silent=False)

    def _serve(self, jobs: SimpleQueue[Job | None]) -> None:
        own: list[Any] = []  # the connection, once there is one
        while (job := jobs.get()) is not None:
            given_up = self.lost or (jobs is not self._jobs and _GIVEN_UP)
            if given_up:
                job.drop(given_up)
            else:
                job.run(own)

    def _call(self, jobs: SimpleQueue[Job | None], call: Callable[[Any], Any], own: list) -> Any:
        try:
            if not own:
                own.append(_connected(self._given))
                self.connected = True
            return call(own[0])
        except _LOST as error:
            lost = StoreLost(first_line(error), silent=False)
            if jobs is self._jobs:
                self.lost = lost
            raise lost from error


def _connected(store: Any) -> Any:
    """Another connection to the same store; the store itself if it cannot be cloned."""
    try:
        return store.clone()
    except (AttributeError, NotImplementedError):
        return store


class BoundedStore:
    """A `mics_fn.store.Store` whose calls one thread makes; see [Note: the store thread].

    Args:
      thread: makes them.
      store: the store they go to, if it is not a plain store, to which the store thread connects by
        itself.
      patience_s: how long each call may take.
      failed: makes an error of the store that is lost.
    """

    def __init__(
        self, thread: StoreThread, store: Any, patience_s: float, failed: Callable[..., Exception]
    ) -> None:
        plain = isinstance(store, dist.Store)  # pyright: ignore[reportPrivateImportUsage]
        self._thread, self._store = thread, None if plain else store
        self._patience_s, self._failed = patience_s, failed

    def set(self, key: str, value: str) -> Any:
        """Write."""
        return self._ask("set", key, value)

    def get(self, key: str) -> bytes:
        """Read a key; `check` it first, because reading blocks until the key exists."""
        return self._ask("get", key)

    def check(self, keys: list[str]) -> bool:
        """Whether all of these keys exist."""
        return self._ask("check", keys)

    def add(self, key: str, amount: int) -> int:
        """Add to a number; an interrupted call has not done so."""
        try:
            return self._ask("add", key, amount)
        except Exception:
            raise
        except BaseException:
            self.later("add", key, -amount)
            raise

    def delete_key(self, key: str) -> bool:
        """Delete."""
        return self._ask("delete_key", key)

    def list_keys(self) -> list[str]:
        """All keys."""
        return self._ask("list_keys")

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Write if the value is as expected; returns the value after that."""
        return self._ask("compare_set", key, expected, desired)

    def later(self, name: str, *args: Any) -> Job:
        """Queue a call without waiting for its result."""
        return self._thread.ask(lambda own: getattr(self._store or own, name)(*args))

    def _ask(self, name: str, *args: Any) -> Any:
        try:
            return self._thread.answer(self.later(name, *args), self._patience_s)
        except StoreLost as lost:
            raise self._failed(lost) from None


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

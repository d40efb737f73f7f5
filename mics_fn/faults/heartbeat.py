"""Signs of life: the thread that talks to the store, and what is known of other processes.

[Note: the store thread] A call to the store ends in C++, where neither Ctrl-C nor a time limit ends
it: if the rank that holds the store is stopped, it never ends. So each call is handed to a thread
with a connection of its own. Whoever asks waits for the answer in Python, in short waits, and no
longer than it may. The thread may be stuck for good; then nobody else is.
"""

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch.distributed as dist

from mics_fn import _torch
from mics_fn.errors import first_line
from mics_fn.groups import startup
from mics_fn.store import StoreLost, value_of
from mics_fn.threads import Job, start

_WAIT_S = 0.1  # between two looks of whoever waits for an answer
_LOST = dist.DistNetworkError, dist.DistStoreError  # pyright: ignore[reportPrivateImportUsage]

# What ranks write for each other.

CHANGES = "mics_fn/news"  # the key of a counter of all that ranks write for each other


def departure_of(key: str, rank: int | None) -> str:
    """The key under which a rank writes that it makes no more calls on some groups."""
    return f"{key}/gone/{rank}"


class Replaced(StoreLost):
    """Another process has taken the place of this one; its entry says since which epoch."""

    def __init__(self, entry: str) -> None:
        super().__init__(entry, silent=False)
        self.entry = entry


def claim(store: Any, key: str, since: int, text: str, before: str | None = None) -> str:
    """Write an entry of a rank, unless a later process of the same rank has written it.

    Args:
      store: shared by all ranks.
      key: of the entry.
      since: the epoch from which on this process is a member; each entry begins with its writer's.
      text: the rest of it.
      before: what is there, as far as this process knows; None reads it.

    Returns:
      The whole entry.

    Raises:
      Replaced: a later process has written it, and nothing was written.
    """
    mine = f"{since} {text}"
    there = value_of(store, key) if before is None else before
    while True:
        if int(there.partition(" ")[0] or 0) > since:
            raise Replaced(there)
        found = store.compare_set(key, there, mine).decode()
        if found == mine:
            return mine
        there = "" if found == there else found  # it is not there if that was no match


# The thread.


class StoreThread:
    """A thread with a connection to a store of its own; see [Note: the store thread].

    Args:
      store: of torch.distributed.
    """

    def __init__(self, store: Any) -> None:
        self._given = store
        self._jobs = SimpleQueue[Job | None]()
        self.own: Any = None  # its connection, once there is one
        self.before: Callable[[Any], None] = lambda own: None  # called with it before each call
        self.lost: StoreLost | None = None  # why it can do nothing any more
        thread = threading.Thread(target=self._serve, name="mics_fn store", daemon=True)
        self._thread = start(thread)

    def ask(self, call: Callable[[Any], Any]) -> Job:
        """Hand in a call, which gets the thread's own connection, and do not wait."""
        job = Job(partial(self._call, call))
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

    def end(self, patience_s: float = 0.0) -> None:
        """Let the thread end once it has done all that it was asked.

        Args:
          patience_s: how long to wait for that; nothing can be asked afterwards.
        """
        self._jobs.put(None)
        if patience_s:
            self._thread.join(patience_s)
            self.lost = self.lost or StoreLost("this process ends", silent=False)

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            if self.lost is None:
                job.run()
            else:
                job.drop(self.lost)

    def _call(self, call: Callable[[Any], Any]) -> Any:
        try:
            self.own = self.own or _torch.cloned(self._given)
            self.before(self.own)
            return call(self.own)
        except Replaced as replaced:
            self.lost = replaced
            raise
        except _LOST as error:
            self.lost = StoreLost(first_line(error), silent=False)
            raise self.lost from error


def _asked(name: str) -> Callable[..., Any]:
    """A call of a store, as one that waits for the answer of a thread."""
    return lambda self, *args: self._ask(self.later(name, *args))


class BoundedStore:
    """A `mics_fn.store.Store` whose calls one thread makes; see [Note: the store thread].

    Args:
      thread: makes them.
      patience_s: how long each call may take.
      failed: makes an error of the store that is lost.
      since: the epoch from which on this process is a member.
    """

    def __init__(self, thread: StoreThread, patience_s: float, failed: Any, since: int = 1) -> None:
        self._thread, self._patience_s, self._failed = thread, patience_s, failed
        self.since = since

    set, get, check = _asked("set"), _asked("get"), _asked("check")
    delete_key, list_keys = _asked("delete_key"), _asked("list_keys")
    compare_set = _asked("compare_set")

    def add(self, key: str, amount: int) -> int:
        """Add to a number; an interrupted call has not done so."""
        try:
            return self._ask(self.later("add", key, amount))
        except Exception:
            raise
        except BaseException:
            self.later("add", key, -amount)
            raise

    def claim(self, key: str, text: str) -> None:
        """Write an entry of this rank, unless a later process of it has written there."""
        self._ask(self._thread.ask(lambda own: claim(own, key, self.since, text)))

    def later(self, name: str, *args: Any) -> Job:
        """Queue a call without waiting for its result."""
        return self._thread.ask(lambda own: getattr(own, name)(*args))

    def _ask(self, job: Job) -> Any:
        try:
            return self._thread.answer(job, self._patience_s)
        except StoreLost as lost:
            raise self._failed(lost) from None


# Signs of life of another rank: what it wrote last, and its process if that is on this host.

_TICK_S = 0.25
# One store serves all ranks: at 4,096 signs per second it takes 15 % of a core, so the more ranks
# there are beyond that, the more seldom each of them writes.
RANKS_PER_TICK = 1024


def interval_s(ranks: int) -> float:
    """Seconds between two signs of life of a rank, in a job of so many.

    >>> interval_s(1024), interval_s(16_384)
    (0.25, 4.0)
    """
    return _TICK_S * max(1.0, ranks / RANKS_PER_TICK)


@dataclass(frozen=True)
class Process:
    """A process, as others on its host can find it."""

    host: str  # one boot of a machine, and one space of process numbers in it
    pid: int
    started: str  # in clock ticks since the boot; another process of this number has another one

    @classmethod
    def own(cls) -> "Process":
        """This process; its host is unknown where it cannot see what others run there."""
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            host = f"{boot}/{os.readlink('/proc/self/ns/pid')}"
            hides = not _stat(1)[0]  # as /proc may hide the processes of other users
            return cls("" if hides else host, os.getpid(), _stat(os.getpid())[1])
        except OSError:
            return cls("", os.getpid(), "")

    @property
    def name(self) -> str:
        """A text that no other process of the job has."""
        return f"{self.host} {self.pid} {self.started}"


def _stat(pid: int) -> tuple[str, str]:
    """The state of a process, and when it was started; "" if it has ended."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return "", ""
    return (fields[0], fields[19]) if fields[0] not in "ZX" else ("", "")


def followed(rank: int, ranks: Sequence[int], most: int = 16) -> list[int]:
    """The ranks that a rank follows: those that come next.

    >>> followed(1, range(4)), followed(98, range(100), most=4)
    ([2, 3, 0], [99, 0, 1, 2])
    """
    at = ranks.index(rank)
    return [ranks[(at + i) % len(ranks)] for i in range(1, min(len(ranks), most + 1))]


def heartbeat_of(rank: int) -> str:
    """The key under which a rank writes signs of life."""
    return f"mics_fn/beat/{rank}"


def register(store: Any, key: str, name: str) -> tuple[int, str]:
    """Enter a process under the key of its rank, in the place of another one if there was one.

    Args:
      store: of the job.
      key: of the rank's signs of life, or another one.
      name: of the process.

    Returns:
      The epoch from which on it is a member, and the name of the process that it replaces, or "".
    """
    while True:
        before = store.get(key).decode() if store.check([key]) else ""
        first, _, other = (before or "1  ").split(" ", 2)
        since = int(first)
        if other not in ("", name):
            since = max(since, store.add(startup.EPOCH, 0)) + 1
        mine = f"{since} 0 {name}"
        if store.compare_set(key, before, mine).decode() == mine:
            return since, "" if other == name else other


class Peer:
    """What is known of another rank."""

    def __init__(self) -> None:
        self.heartbeat = ""  # what it wrote last
        self.since = 0  # the epoch from which on its process is a member
        self.process: Process | None = None  # if it is on this host
        self.silent_s = 0.0
        self.count = 0  # of its signs of life; it gives none where none of its groups are open
        self.dead = False

    def observe(self, heartbeat: str, own: Process, interval_s: float) -> None:
        """Take note of what it wrote, read at least a tick after the last time."""
        if heartbeat == self.heartbeat or not heartbeat:
            self.silent_s += interval_s
            return
        since, count, host, pid, started = heartbeat.split(" ")
        self.process = Process(host, int(pid), started) if host and host == own.host else None
        self.heartbeat, self.silent_s, self.since = heartbeat, 0.0, int(since)
        self.count, self.dead = int(count), False

    def has_ended(self) -> bool:
        """Whether its process is on this host, and has ended."""
        found = self.process
        return found is not None and _stat(found.pid)[1] != found.started

    def is_silent(self, limit_s: float) -> bool:
        """Whether it has failed; one that waits for a processor is given twice the time."""
        found = self.process
        waits = found is not None and _stat(found.pid) == ("R", found.started)
        return self.silent_s > limit_s * (2 if waits else 1)

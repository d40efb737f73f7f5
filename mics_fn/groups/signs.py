"""Signs of life of another rank: what it wrote last, and its process if that is on this host."""

import os
import select
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mics_fn.errors import PlanError, message

PARKED = "closed"  # what a rank writes none of whose groups are open
_TICK_S = 0.25
_RANKS_PER_TICK = 64  # one store serves all ranks, so that many more of them tick less often
_LEAST_TICKS = 3  # without a sign of life, before a rank is taken for lost


def tick_s(ranks: int) -> float:
    """Seconds between two signs of life of a rank, in a job of so many."""
    return _TICK_S * max(1.0, ranks / _RANKS_PER_TICK)


def least_limit_s(ranks: int) -> float:
    """The least `heartbeat_s` that is no alarm for a rank which is well, in a job of so many."""
    return _LEAST_TICKS * tick_s(ranks)


def check_limits(timeout_s: float, heartbeat_s: float | None, ranks: int) -> None:
    """Raise PlanError unless these are seconds above 0, and enough for a job of so many ranks."""
    given = {"timeout_s": timeout_s} | ({} if heartbeat_s is None else {"heartbeat_s": heartbeat_s})
    for name, limit in given.items():
        if not isinstance(limit, int | float) or limit is True or not 0 < limit < 1e8:
            fix = "pass seconds above 0"
            raise PlanError(message(f"{name}={limit!r} is not a time limit", fix=fix))
    least = least_limit_s(ranks)
    if heartbeat_s is not None and heartbeat_s < least:
        text = f"heartbeat_s={heartbeat_s!r} would take ranks for lost that are well"
        lines = [f"signs of life come every {tick_s(ranks):g} s"]
        raise PlanError(message(text, lines, f"pass at least {least:g}"))


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

    def is_gone(self) -> bool:
        """Whether it has ended; only asked on its own host."""
        return _stat(self.pid)[1] != self.started

    def is_ready(self) -> bool:
        """Whether it computes, or waits for a processor; only asked on its own host."""
        return _stat(self.pid) == ("R", self.started)


def _stat(pid: int) -> tuple[str, str]:
    """The state of a process, and when it was started; "" if it has ended."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return "", ""
    return (fields[0], fields[19]) if fields[0] not in "ZX" else ("", "")


def followed(rank: int, ranks: Sequence[int], most: int = 16) -> list[int]:
    """The ranks that a rank follows: all of a few, else those next to it on both sides.

    >>> followed(1, range(4)), followed(0, range(100), most=4)
    ([0, 2, 3], [98, 99, 1, 2])
    """
    if rank not in ranks or len(ranks) <= most:
        return [other for other in ranks if other != rank]
    at, half = ranks.index(rank), most // 2
    return [ranks[(at + i) % len(ranks)] for i in range(-half, half + 1) if i]


class Near:
    """Which processes on this host have ended; to ask is cheap where the kernel has pidfds."""

    def __init__(self) -> None:
        self._poll = select.poll() if hasattr(os, "pidfd_open") else None
        self._files: dict[int, int] = {}  # of a process, by its rank
        self._others: dict[int, Process] = {}

    def add(self, rank: int, process: Process) -> None:
        """Watch the process of a rank, instead of the one that it had before."""
        self._others.pop(rank, None)
        if self._poll is not None and rank in self._files:
            with suppress(KeyError):
                self._poll.unregister(self._files[rank])
            os.close(self._files.pop(rank))
        try:
            if self._poll is None:
                raise OSError
            self._files[rank] = file = os.pidfd_open(process.pid)
        except OSError:
            self._others[rank] = process
            return
        if process.is_gone():  # another one has its number
            self._others[rank] = process
        else:
            self._poll.register(file, select.POLLIN)

    def ended(self) -> list[int]:
        """The ranks whose processes have ended."""
        files = {file for file, _ in self._poll.poll(0)} if self._poll and self._files else ()
        found = [rank for rank, file in self._files.items() if file in files]
        return found + [rank for rank, process in self._others.items() if process.is_gone()]

    def forget(self) -> None:
        """Watch none of them any more."""
        for file in self._files.values():
            os.close(file)
        self.__init__()


def beat_of(rank: int) -> str:
    """The key under which a rank writes signs of life."""
    return f"mics_fn/beat/{rank}"


def name_in(beat: str) -> str:
    """The name of the process that wrote a sign of life."""
    return beat.split(" ", 2)[2]


def replaced(processes: Mapping[int, str], beats: Mapping[int, str]) -> list[int]:
    """The ranks whose signs of life now come from another process than the one given.

    >>> replaced({0: "host 7 1", 1: "host 8 1"}, {0: "3 open host 7 1", 1: "1 open host 9 2"})
    [1]
    """
    both = [rank for rank in processes if beats.get(rank)]
    return [rank for rank in both if name_in(beats[rank]) != processes[rank]]


class Peer:
    """What is known of another rank."""

    def __init__(self) -> None:
        self.beat = ""  # what it wrote last
        self.name = ""  # of the process that wrote it
        self.process: Process | None = None  # if it is on this host
        self.silent_s = 0.0
        self.gone = False
        self.parked = True  # whether none of its groups are open, as far as is known

    def heard(self, beat: str, own: Process, tick_s: float) -> Process | None:
        """Take note of what it wrote, read at least a tick after the last time.

        Returns:
          its process, if that is on this host and was not known.
        """
        if beat == self.beat or not beat:
            self.silent_s += tick_s
            return None
        _, state, host, pid, started = beat.split(" ")
        self.name = name_in(beat)
        process = Process(host, int(pid), started) if host and host == own.host else None
        found, self.process = None if process == self.process else process, process
        self.beat, self.silent_s, self.parked, self.gone = beat, 0.0, state == PARKED, False
        return found

    def parts(self, beat: str) -> None:
        """Take note of what it wrote last, once its process has ended."""
        if name_in(beat) == self.name:
            self.parked = beat.split(" ", 2)[1] == PARKED

    def is_silent(self, limit_s: float) -> bool:
        """Whether it has failed; one that waits for a processor is given twice the time."""
        waits = self.process is not None and self.process.is_ready()
        return self.silent_s > limit_s * (2 if waits else 1)

    def mark_gone(self) -> bool:
        """Mark it as gone; returns False if it was marked before."""
        known, self.gone = self.gone, True
        return not known


class Peers(dict[int, Peer]):
    """What is known of other ranks, by rank."""

    def __init__(self) -> None:
        super().__init__()
        self.near = Near()

    def hear(self, rank: int, beat: str, own: Process, tick_s: float) -> tuple[Peer, str]:
        """Take note of what a rank wrote.

        Returns:
          what is known of it, and the name of its process before, if another one took its place.
        """
        peer = self.setdefault(rank, Peer())
        before = peer.name
        process = peer.heard(beat, own, tick_s)
        if process is not None:
            self.near.add(rank, process)
        return peer, before if before != peer.name else ""

    def gone(self, ranks: Iterable[int]) -> list[int]:
        """Those of these ranks that are gone, and had not closed their groups before."""
        found = [(rank, self[rank]) for rank in ranks if rank in self]
        return [rank for rank, peer in found if peer.gone and not peer.parked]

    def anew(self, processes: Mapping[int, str]) -> list[int]:
        """Measure signs of life anew, as these ranks meet: silence before it means nothing.

        Args:
          processes: of the ranks that meet, by rank; "" for the last one that was heard of.

        Returns:
          Those of them whose process was seen to end, with open groups.
        """
        gone = []
        for rank, peer in ((rank, self[rank]) for rank in processes if rank in self):
            ended = peer.process is not None and peer.process.is_gone() and not peer.parked
            if ended and processes[rank] in ("", peer.name):
                gone.append(rank)
            elif not ended:
                peer.silent_s, peer.gone = 0.0, False
        return gone

    def silent(self, ranks: Iterable[int], limit_s: float) -> list[int]:
        """Those of these ranks with open groups that gave no sign for so long."""
        found = [(rank, self[rank]) for rank in ranks if rank in self]
        return [rank for rank, peer in found if peer.silent_s > limit_s and not peer.parked]

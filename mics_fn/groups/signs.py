"""Signs of life of another rank: what it wrote last, and its process if that is on this host."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

PARKED = "closed"  # what a rank writes none of whose groups are open


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


class Peer:
    """What is known of another rank."""

    def __init__(self) -> None:
        self.beat = ""  # what it wrote last
        self.process: Process | None = None  # if it is on this host
        self.silent_s = 0.0
        self.gone = False
        self.parked = True  # whether none of its groups are open, as far as is known

    def heard(self, beat: str, own: Process, tick_s: float) -> None:
        """Take note of what it wrote, read at least a tick after the last time."""
        if beat == self.beat or not beat:
            self.silent_s += tick_s
            return
        _, state, host, pid, started = beat.split(" ")
        self.process = Process(host, int(pid), started) if host and host == own.host else None
        self.beat, self.silent_s, self.parked, self.gone = beat, 0.0, state == PARKED, False

    def is_silent(self, limit_s: float) -> bool:
        """Whether it has failed; one that waits for a processor is given twice the time."""
        waits = self.process is not None and self.process.is_ready()
        return self.silent_s > limit_s * (2 if waits else 1)

"""`Stalls`: when the machine itself stood still, told by processes that only sleep and wake up.

A virtual machine may be left without one of its processors for seconds, and whatever runs there
stands still meanwhile, while all other threads go on. To ranks that watch each other this looks as
if a rank, or the store, had been stopped. One process per processor sleeps for a moment again and
again, so that it notices.
"""

import contextlib
import os
import time
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Self

from tests.stress.fault_trials import end, fork

_SLEEP_S = 0.02
LEAST_S = 0.25  # what other processes that compute may take before one that slept has its turn


class Stalls:
    """Stalls of this machine while a `with` block lasts."""

    def __init__(self) -> None:
        self._pids = list[int]()
        self._ours = list[Connection]()
        self._found = list[tuple[float, float]]()

    def __enter__(self) -> Self:
        for cpu in sorted(os.sched_getaffinity(0)):
            ours, theirs = Pipe(duplex=False)
            self._pids.append(fork(lambda cpu=cpu, theirs=theirs: _sleep(cpu, theirs)))
            self._ours.append(ours)
            theirs.close()
        return self

    def __exit__(self, *_: object) -> None:
        self.longest()  # reads the last ones
        end(self._pids)
        for conn in self._ours:
            conn.close()

    def longest(self, start: float = 0.0, stop: float = float("inf")) -> float:
        """Seconds of the longest stall between two instants of `time.monotonic`; 0 for none."""
        for conn in self._ours:
            with contextlib.suppress(EOFError, OSError):
                while conn.poll():
                    self._found.append(conn.recv())
        parts = [min(stop, until) - max(start, since) for since, until in self._found]
        return max(0.0, *parts, 0.0)


def _sleep(cpu: int, theirs: Connection) -> None:
    """Sleep on this processor, and tell each time that it took too long."""
    os.sched_setaffinity(0, {cpu})
    while True:
        since = time.monotonic()
        time.sleep(_SLEEP_S)
        until = time.monotonic()
        if until - since > _SLEEP_S + LEAST_S:
            theirs.send((since, until))

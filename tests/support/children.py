"""Work in a forked process, which may be killed or interrupted, and never takes the tests along."""

import faulthandler
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

FORK = multiprocessing.get_context("fork")


def in_child(work: Callable[[], Any], limit_s: float = 60.0) -> int:
    """Do something in a forked process; gives its exit code.

    One that hangs shows its stacks and is killed.
    """

    def bounded() -> None:
        faulthandler.register(signal.SIGUSR2, file=2, chain=False)
        try:
            work()
        except BaseException:  # pytest's own text of a failed assertion goes with it
            traceback.print_exc(file=sys.__stderr__)
            os._exit(1)

    process = FORK.Process(target=bounded)
    process.start()
    process.join(limit_s)
    if process.exitcode is None and process.pid is not None:
        os.kill(process.pid, signal.SIGUSR2)
        process.join(2)
        process.kill()
        process.join()
        raise AssertionError(f"the process did not end in {limit_s:g} s; its stacks are on stderr")
    assert process.exitcode is not None
    return process.exitcode


def running(pid: int) -> bool:
    """Whether a process runs; one that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def left_of(pids: Iterable[int], limit_s: float = 5.0) -> list[int]:
    """Those of some processes that have not ended within a limit."""
    pids, deadline = list(pids), time.monotonic() + limit_s
    while any(map(running, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return [pid for pid in pids if running(pid)]

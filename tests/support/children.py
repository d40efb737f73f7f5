"""Work in a forked process, which may be killed or interrupted, and never takes the tests along."""

import faulthandler
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
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


def await_interrupt(limit_s: float = 5.0) -> None:
    """Sleep until a Ctrl-C ends it: one that was held in a step is sent again, at some time.

    Python loses one that comes in a finalizer, so it may never come.
    """
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        time.sleep(1e-3)

"""Jobs whose ranks may die, be interrupted, or have no right to write; their store is apart."""

import atexit
import importlib
import os
import pickle
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from tests.stress.fault_ranks import take_place
from tests.stress.fault_trials import end, fork, free_port, host_store


class Ended(NamedTuple):
    """How a rank ended."""

    value: Any  # what its program returned
    error: str = ""  # the type of what it raised
    text: str = ""
    seconds: float = 0.0  # of its program
    status: int = 0  # of its process


def run_job(n: int, program: Callable[..., Any], *args: Any, limit_s: float = 40.0) -> list[Ended]:
    """Call a program on n forked ranks, each of which ends as a script does.

    Args:
      n: number of ranks.
      program: gets the number of the rank, then `args`.
      limit_s: after which ranks are killed, and have status -9.
    """
    importlib.import_module("torch._dynamo")  # else each rank would
    port = free_port(time.monotonic_ns() % 10_000)
    host, pids, pipes = fork(lambda: host_store(port)), [], []
    try:
        for rank in range(n):
            ours, theirs = os.pipe()
            pids.append(fork(lambda r=rank, p=theirs: serve(r, n, port, p, program, args)))
            pipes.append(ours)
            os.close(theirs)
        said = read_all(pipes, time.monotonic() + limit_s)
        found = []
        for pid, data in zip(pids, said, strict=True):
            status = gone_by(pid, time.monotonic() + 5.0)
            known = pickle.loads(data) if data else Ended(None, "died")
            found.append(known._replace(status=status))
        return found
    finally:
        end([*pids, host])
        for pipe in pipes:
            os.close(pipe)


def serve(
    rank: int, n: int, port: int, pipe: int, program: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    """What a rank does."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    take_place(rank, n, port, apart=True)
    started, found = time.monotonic(), Ended(None)
    try:
        found = Ended(program(rank, *args))
    except BaseException as error:
        found = Ended(None, type(error).__name__, "".join(traceback.format_exception(error)))
        sys.last_type, sys.last_value = type(error), error
        sys.excepthook(type(error), error, error.__traceback__)
    os.write(pipe, pickle.dumps(found._replace(seconds=time.monotonic() - started)))
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
    atexit._run_exitfuncs()
    os._exit(0)


def read_all(pipes: list[int], deadline: float) -> list[bytes]:
    """What comes out of pipes until their other ends are closed."""
    found, open_ = dict.fromkeys(pipes, b""), set(pipes)
    while open_ and (left := deadline - time.monotonic()) > 0:
        for pipe in select.select(list(open_), [], [], left)[0]:
            part = os.read(pipe, 2**16)
            found[pipe] += part
            if not part:
                open_.discard(pipe)
    return list(found.values())


def gone_by(pid: int, deadline: float) -> int:
    """The status of a process; it is killed at the deadline."""
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

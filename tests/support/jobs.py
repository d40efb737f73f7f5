"""Jobs whose ranks may die, be interrupted, or have no right to write; their store is apart."""

import atexit
import importlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

from tests.stress.fault_trials import end, fork, free_port, hear, host_store, take_place


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
    host, pids, conns = fork(lambda: host_store(port)), dict[int, int](), dict[int, Connection]()
    try:
        for rank in range(n):
            conns[rank], theirs = Pipe()
            pids[rank] = fork(lambda r=rank, c=theirs: serve(r, n, port, c, program, args))
            theirs.close()
        said, died = hear(conns, conns, pids, time.monotonic() + limit_s)
        _, left = hear({r: conns[r] for r in said}, said, pids, time.monotonic() + 5.0)
        statuses = died | left  # one that has not ended is killed
        found = [said.get(rank, Ended(None, "died")) for rank in pids]
        return [x._replace(status=statuses.get(r, -signal.SIGKILL)) for r, x in enumerate(found)]
    finally:
        end([*pids.values(), host])
        for conn in conns.values():
            conn.close()


def serve(
    rank: int, n: int, port: int, conn: Connection, program: Callable[..., Any], args: tuple
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
    conn.send(found._replace(seconds=time.monotonic() - started))
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
    atexit._run_exitfuncs()
    os._exit(0)

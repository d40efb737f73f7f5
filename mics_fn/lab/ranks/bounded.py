"""Run a function as n ranks that must end in time, and say how each of them ended.

`launch` gives all results or raises. Here ranks may fail, hang or die, and that is the answer: the
doctor wants to know how each rank ended, and when. Each rank is a fresh process, because a forked
one could not use a GPU. The store lives in this process, as under torchrun it lives in the agent,
so that it outlives any rank.
"""

import contextlib
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mics_fn.lab.ranks import launch
from mics_fn.lab.ranks.failures import exit_text
from mics_fn.lab.ranks.launch import BOOT, DEFAULTS, leave_call

POLL_S = 0.02
STACKS_S = 0.3  # for a rank that hangs to write its stacks
LAST_CHARACTERS = 4000  # of what a rank printed


class Ended(NamedTuple):
    """End of one rank."""

    result: Any  # what the function returned; None if it did not
    how: str  # such as "exited with code 0"
    seconds: float  # from the start of the ranks to the end of this one
    stopped: bool  # whether it had to be ended from outside
    error: str  # the last lines of the exception that it raised; "" if it raised none
    trace: str  # its traceback, or its stacks if it was stopped
    output: str  # the end of what it printed

    @property
    def well(self) -> bool:
        """Whether the function returned and the process ended by itself."""
        return self.how == exit_text(0) and not self.stopped


def run_bounded(
    fn: Callable[..., Any],
    n: int,
    *args: Any,
    limit_s: float,
    grace_s: float = 10.0,
    environment: Callable[[int], Mapping[str, str]] = lambda rank: {},
) -> list[Ended]:
    """Run `fn(*args)` as n ranks on this machine, and end the remaining ones at the limit.

    Args:
        fn: a function of an importable module; it, `args` and results travel by pickle.
        n: number of ranks.
        limit_s: bound of the whole in seconds.
        grace_s: how long the other ranks may go on once one has failed.
        environment: further variables of a rank, which finds those of torchrun in any case.

    Returns:
        How each rank ended. No process is left over, also after an exception in this one.
    """
    store = launch.serve_store()
    folder, started = leave_call(fn, args), time.monotonic()
    procs: list[subprocess.Popen] = []
    try:
        for rank in range(n):
            own = {**_variables(rank, n, store.port), **environment(rank)}
            procs.append(_start(folder, rank, {**DEFAULTS, **os.environ, **own}))
        seconds = _wait(procs, started + limit_s, grace_s)
        stopped = [rank for rank, proc in enumerate(procs) if proc.poll() is None]
        _stop([procs[rank] for rank in stopped])
        now = time.monotonic()
        return [
            _read(folder, rank, proc, seconds.get(rank, now) - started, rank in stopped)
            for rank, proc in enumerate(procs)
        ]
    finally:
        _kill(procs)
        shutil.rmtree(folder, ignore_errors=True)


def _variables(rank: int, n: int, port: int) -> dict[str, str]:
    """Return the variables that torchrun would set for a rank of one machine."""
    numbers = {"RANK": rank, "WORLD_SIZE": n, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": n}
    numbers |= {"GROUP_RANK": 0, "MASTER_PORT": port}
    texts = {"MASTER_ADDR": launch.ADDRESS, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    return texts | {name: str(number) for name, number in numbers.items()}


def _start(folder: Path, rank: int, env: Mapping[str, str]) -> subprocess.Popen:
    command = [sys.executable, str(BOOT), str(folder)]
    with open(folder / f"output{rank}", "wb") as output:
        return subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )


def _wait(procs: Sequence[subprocess.Popen], deadline: float, grace_s: float) -> dict[int, float]:
    """Return when each rank ended, by `time.monotonic`; the others are missing."""
    ended: dict[int, float] = {}
    while len(ended) < len(procs) and time.monotonic() < deadline:
        for rank, proc in enumerate(procs):
            if rank not in ended and proc.poll() is not None:
                ended[rank] = time.monotonic()
                if proc.returncode:
                    deadline = min(deadline, ended[rank] + grace_s)
        time.sleep(POLL_S)
    return ended


def _stop(procs: Sequence[subprocess.Popen]) -> None:
    """Let ranks that hang write their stacks, then end them."""
    for proc in procs:
        proc.send_signal(signal.SIGUSR1)
    time.sleep(STACKS_S if procs else 0)
    _kill(procs)


def _kill(procs: Sequence[subprocess.Popen]) -> None:
    for proc in procs:
        proc.kill()  # does nothing to one that has ended
    for proc in procs:
        proc.wait()


def _read(folder: Path, rank: int, proc: subprocess.Popen, seconds: float, stopped: bool) -> Ended:
    """Read the files that a rank has written."""
    result, error = None, ""
    with contextlib.suppress(FileNotFoundError):
        result = pickle.loads((folder / f"result{rank}.pickle").read_bytes())
    with contextlib.suppress(FileNotFoundError):
        error = json.loads((folder / f"error{rank}.json").read_text())["text"]
    texts = []
    for name in (f"trace{rank}.txt", f"output{rank}"):
        path = folder / name
        texts.append(path.read_text(errors="replace")[-LAST_CHARACTERS:] if path.exists() else "")
    how = "was stopped" if stopped else exit_text(proc.returncode)
    return Ended(result, how, seconds, stopped, error, *texts)

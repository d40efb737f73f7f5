"""Run a function as n ranks on this machine, each a fresh process, as `torchrun` would.

Fresh, because a forked process could not use a GPU. The store of the ranks lives in this process,
as under torchrun it lives in the agent, so that it outlives any rank. It has a socket that is bound
to loopback alone: torch's own listens on every address of the host, and what is in a store is
trusted.
"""

import contextlib
import faulthandler
import math
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch.distributed as dist

from mics_fn import _torch
from mics_fn.groups import announce_all
from mics_fn.lab.ranks.failures import RankError, RankFailure, describe, exit_text

ADDRESS = "127.0.0.1"
LOOPBACK = "lo" if sys.platform == "linux" else "lo0"
DEFAULTS = {
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
    "GLOO_SOCKET_IFNAME": LOOPBACK,
    "NCCL_SOCKET_IFNAME": LOOPBACK,
}
POLL_S = 0.02
LINGER_S = 0.2  # of a rank that raised, so that those that see its end do so after `POLL_S`
PARENT_S = 0.5  # after which a rank looks again whether its parent is there
STACKS_S = 2.0  # for a rank that hangs to write its stacks
LAST_CHARACTERS = 4000  # of what a rank printed
WORK = "from mics_fn.lab.ranks.launch import work; work()"


class Ended(NamedTuple):
    """End of one rank."""

    result: Any  # what the function returned; None if it did not
    how: str  # such as "exited with code 0"
    seconds: float  # from the start of the ranks to the end of this one
    stopped: bool  # whether it had to be ended from outside
    error: str  # the exception that it raised; "" if it raised none
    trace: str  # its traceback, or its stacks if it was stopped or crashed
    output: str  # the end of what it printed

    @property
    def well(self) -> bool:
        """Whether the function returned and the process ended by itself."""
        return self.how == exit_text(0) and not self.stopped

    @property
    def failure(self) -> RankFailure:
        """Failure of a rank that did not end well."""
        if self.error:
            kind, _, text = self.error.partition(": ")
            return RankFailure(kind, text, self.trace)
        kind = "RankTimeout" if self.stopped else "RankDied"
        return RankFailure(kind, f"process {self.how}", f"{self.trace}{self.output}")


def serve_store(port: int = 0) -> Any:
    """Serve a store at a port of the loopback address; 0 takes a free one."""
    return _torch.serve_store(ADDRESS, port)


def launch(fn: Callable[..., Any], n: int, *args: Any) -> list[Any]:
    """Run `fn(*args)` as n ranks on this machine and return their results in rank order.

    Args:
        fn: a function of an importable module; it, `args` and results travel by pickle.
        n: number of ranks.

    Returns:
        Each rank's result. Ranks find the variables of torchrun in their environment; only rank 0
        writes to this terminal. OMP_NUM_THREADS is 1 unless it is set. Nothing listens beyond
        loopback, unless GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME says so.

    Raises:
        RankError: a rank failed, and the others were ended.
    """
    ended = run_bounded(fn, n, *args, limit_s=math.inf, grace_s=1.0, shown=True)
    by_time = sorted(range(n), key=lambda rank: ended[rank].seconds)
    failures = {rank: ended[rank].failure for rank in by_time if not ended[rank].well}
    if failures:
        raise RankError(describe(f"{len(failures)} of {n} ranks failed", failures), failures)
    return [one.result for one in ended]


def run_bounded(
    fn: Callable[..., Any],
    n: int,
    *args: Any,
    limit_s: float,
    grace_s: float = 10.0,
    environment: Callable[[int], Mapping[str, str]] = lambda rank: {},
    shown: bool = False,
) -> list[Ended]:
    """Run `fn(*args)` as n ranks on this machine, and end the remaining ones at the limit.

    Args:
        fn: a function of an importable module; it, `args` and results travel by pickle.
        n: number of ranks.
        limit_s: bound of the whole in seconds.
        grace_s: how long the other ranks may go on once one has failed.
        environment: further variables of a rank, which finds those of torchrun in any case.
        shown: whether rank 0 writes to this terminal.

    Returns:
        How each rank ended. No process is left over, also after an exception in this one.
    """
    if fn.__module__ == "__main__":
        raise TypeError(f"launch: {fn.__qualname__} lives in __main__; move it to a module")
    call, store, started = pickle.dumps((fn, args)), serve_store(), time.monotonic()
    meeting = {"GROUP_RANK": "0", "MASTER_ADDR": ADDRESS, "MASTER_PORT": f"{store.port}"}
    meeting["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    folder = Path(tempfile.mkdtemp(prefix="mics_launch_"))
    procs: list[subprocess.Popen] = []
    try:
        (folder / "call").write_bytes(call)
        for rank in range(n):
            own = {**variables(rank, n), **meeting, **environment(rank)}
            procs.append(_start(folder, rank, {**DEFAULTS, **os.environ, **own}, shown))
        seconds = _wait(procs, started + limit_s, grace_s)
        running = {rank: proc.pid for rank, proc in enumerate(procs) if rank not in seconds}
        stacks = stacks_of(folder, running)
        _kill(procs)
        now = time.monotonic()
        return [
            _read(folder, rank, proc, seconds.get(rank, now) - started, stacks.get(rank))
            for rank, proc in enumerate(procs)
        ]
    finally:
        _kill(procs)
        shutil.rmtree(folder, ignore_errors=True)


def variables(rank: int, n: int) -> dict[str, str]:
    """Return the variables that torchrun would set for a rank of one machine, without its store."""
    found = {"RANK": rank, "WORLD_SIZE": n, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": n}
    return {name: str(number) for name, number in found.items()}


def _start(folder: Path, rank: int, env: Mapping[str, str], shown: bool) -> subprocess.Popen:
    """Start a process that the Ctrl-C of a terminal does not reach."""
    path = os.pathsep.join(os.path.abspath(each) for each in sys.path)
    with open(folder / f"output{rank}", "wb") as file:
        output = None if shown and rank == 0 else file
        return subprocess.Popen(
            [sys.executable, "-c", WORK, str(folder), str(os.getpid())],
            env={**env, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
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


def stacks_of(folder: Path, pids: Mapping[int, int]) -> dict[int, str]:
    """Let ranks write the stacks of all their threads, and read them; "" of one that cannot."""
    for pid in pids.values():
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGUSR1)
    files = {rank: folder / f"stacks{rank}" for rank in pids}
    deadline = time.monotonic() + STACKS_S
    while not all(map(_text, files.values())) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    time.sleep(POLL_S if pids else 0)  # lets a dump that has begun reach its end
    return {rank: _text(file) for rank, file in files.items()}


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _kill(procs: Sequence[subprocess.Popen]) -> None:
    for proc in procs:
        proc.kill()  # does nothing to one that has ended
    for proc in procs:
        proc.wait()


def _read(
    folder: Path, rank: int, proc: subprocess.Popen, seconds: float, stacks: str | None
) -> Ended:
    """Read the files that a rank has written; `stacks` are those of one that was stopped."""
    stopped, result = stacks is not None, folder / f"result{rank}"
    output = _text(folder / f"output{rank}")[-LAST_CHARACTERS:]
    how = "was stopped" if stopped else exit_text(proc.returncode)
    value = None
    if not stopped and proc.returncode >= 0 and result.exists():
        value = pickle.loads(result.read_bytes())
    if isinstance(value, RankFailure):
        error = f"{value.type_name}: {value.message}"
        return Ended(None, how, seconds, stopped, error, value.traceback, output)
    trace = _text(folder / f"stacks{rank}") if stacks is None else stacks
    return Ended(value, how, seconds, stopped, "", trace, output)


def work() -> None:
    """Run a call as one rank, and write its result; the arguments are those of `_start`."""
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    end_with_parent(int(sys.argv[2]))
    faulthandler.enable(dump_stacks(folder / f"stacks{rank}"))
    code = 0
    try:
        fn, args = pickle.loads((folder / "call").read_bytes())
        result = pickle.dumps(fn(*args))
        if dist.is_initialized():
            dist.destroy_process_group()
    except BaseException as error:
        code, result = 1, pickle.dumps(failure_of(error))
        announce_all(error, final=True)
        time.sleep(LINGER_S)
    (folder / f"result{rank}").write_bytes(result)
    # A thread of gloo that has yet to let go of a tensor would abort a normal exit.
    os._exit(code)


def end_with_parent(parent: int) -> None:
    """End this process once its parent has ended."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def dump_stacks(path: Path) -> TextIO:
    """Write the stacks of all threads to a file at SIGUSR1; return the file."""
    file = open(path, "w")  # noqa: SIM115  the fault handler keeps it
    faulthandler.register(signal.SIGUSR1, file)
    return file


def failure_of(error: BaseException) -> RankFailure:
    """Return an error as text, without the frames of this folder on top."""
    frames, here = error.__traceback__, str(Path(__file__).parent)
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(here):
        frames = frames.tb_next
    text = "".join(traceback.format_exception(type(error), error, frames))
    return RankFailure(type(error).__name__, str(error), text)

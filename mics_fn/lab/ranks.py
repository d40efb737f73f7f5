"""Ranks on this machine: a function as n fresh processes.

`launch` starts processes as `torchrun` would, fresh ones, because a forked process could not use a
GPU; `run_bounded` does so with a time limit, and says how each of them ended. Their store lives in
this process, as under torchrun it lives in the agent, so that it outlives any rank. Every wait is
bounded. A hang comes back as an error that quotes each rank's stack.

The store has a socket that is bound to loopback alone: torch's own listens on every address of the
host, and what is in a store is trusted.
"""

import contextlib
import faulthandler
import math
import multiprocessing as mp
import os
import pickle
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch

from mics_fn import _torch
from mics_fn.errors import MicsError, message, name_ranks
from mics_fn.groups import announce_all
from mics_fn.threads import blocked

# What a call on ranks may raise, and how failures of many ranks become one text.

# Errors of ranks that wait for another one: they come last, those that name it at the end.
FOLLOWS = ("CollectiveError", "PeerFailed", "PeerFileError")


class RankFailure(NamedTuple):
    """Failure of one rank, as text."""

    type_name: str
    message: str
    traceback: str


class RankError(MicsError, RuntimeError):
    """Some ranks failed. `errors` maps each of them to its `RankFailure`."""

    def __init__(self, text: str, errors: dict[int, RankFailure] | None = None):
        super().__init__(text)
        self.errors = errors or {}


def describe(what: str, errors: dict[int, RankFailure]) -> str:
    """Render each distinct failure once with the ranks that share it, causes first.

    Of equal kinds the one that comes first in `errors` is first.

    Of ranks that failed because another one did, the traceback only shows where they waited, so it
    is left out if that of the cause is there.

    >>> bad = RankFailure("ValueError", "no", "Traceback:\\n  f()\\nValueError: no")
    >>> print(describe("f: 2 of 4 ranks failed", {1: bad, 3: bad}))
    f: 2 of 4 ranks failed
      ranks 1, 3: ValueError: no
        Traceback:
          f()
        ValueError: no
    """
    shared: dict[tuple[str, str, str], list[int]] = {}
    for rank in sorted(errors, key=lambda rank: _place(errors[rank].type_name)):
        failure = errors[rank]
        # Thread ids differ between processes, and nobody looks for them.
        text = re.sub(r"0x[0-9a-f]+", "0x..", failure.traceback)
        shared.setdefault((failure.type_name, failure.message, text), []).append(rank)
    blocks = []
    cause_is_known = any(failure.type_name not in FOLLOWS for failure in errors.values())
    for (type_name, text, trace), ranks in shared.items():
        first, *lines = f"{type_name}: {text}".splitlines()
        if not cause_is_known or type_name not in FOLLOWS:
            lines += trace.rstrip().splitlines()
        blocks.append("\n    ".join([f"{name_ranks(sorted(ranks))}: {first}", *lines]))
    return message(what, blocks)


def _place(type_name: str) -> int:
    order = ("RankTimeout", *FOLLOWS)
    return order.index(type_name) if type_name in order else -1


# Fresh processes.

ADDRESS = "127.0.0.1"
LOOPBACK = "lo" if sys.platform == "linux" else "lo0"
DEFAULTS = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": LOOPBACK,
    "NCCL_SOCKET_IFNAME": LOOPBACK,
}
POLL_S = 0.02
LINGER_S = 0.2  # of a rank that raised, so that those that see its end do so after `POLL_S`
PARENT_S = 0.5  # after which a rank looks again whether its parent is there
LONGEST_WAIT_S = 3600.0  # at once; a longer one is begun anew
STACKS_S = 2.0  # for a rank that hangs to write its stacks
LAST_CHARACTERS = 4000  # of what a rank printed


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
    replies = run_bounded(fn, n, *args, limit_s=math.inf, grace_s=1.0, shown=True)
    return values(getattr(fn, "__name__", "launch"), replies)


def run_bounded(
    fn: Callable[..., Any],
    n: int,
    *args: Any,
    limit_s: float,
    grace_s: float = 10.0,
    environment: Callable[[int], Mapping[str, str]] = lambda rank: {},
    shown: bool = False,
) -> dict[int, Any]:
    """Run `fn(*args)` as n ranks on this machine, and end the remaining ones at the limit.

    Args:
        fn: a function of an importable module; it, `args` and results travel by pickle.
        n: number of ranks.
        limit_s: bound of the whole in seconds.
        grace_s: how long the other ranks may go on once one has failed.
        environment: further variables of a rank, which finds those of torchrun in any case.
        shown: whether rank 0 writes to this terminal.

    Returns:
        Results in the order in which they came; a `RankFailure` is in the place of a failed one. No
        process is left over, also after an exception in this one.
    """
    store = _torch.serve_store(ADDRESS)
    meeting = {"GROUP_RANK": "0", "MASTER_ADDR": ADDRESS, "MASTER_PORT": f"{store.port}"}
    meeting["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    own = [{**meeting, **environment(rank)} for rank in range(n)]
    with RankProcesses(n, grace_s) as processes:
        resource_tracker.ensure_running()  # which would let through the Ctrl-C that waits below
        with blocked():
            processes.start("spawn", _run_fresh, own, shown, pickle.dumps((fn, args)))
        return processes.collect(limit_s)


def _run_fresh(
    rank: int,
    n: int,
    folder: Path,
    conn: Connection,
    own: Sequence[Mapping],
    shown: bool,
    call: Any,
) -> None:
    """Run a call as a rank in a fresh process, and answer."""

    def work() -> Any:
        _set_up(folder, rank, own[rank], shown)
        fn, args = pickle.loads(call)
        return _announced(fn, args)

    prepare(rank, n, folder)
    with contextlib.suppress(EOFError, OSError):  # the parent has ended
        conn.send_bytes(answer(work))
        conn.recv_bytes()  # never: ranks end together, since others may still need this one
    # Without interpreter shutdown: it would wait for gloo's threads, whose peers may be gone.
    os._exit(0)


def _set_up(folder: Path, rank: int, own: Mapping[str, str], shown: bool) -> None:
    """Give a fresh process the variables of its rank, and the place of what it prints."""
    os.environ.update({**DEFAULTS, **os.environ, **own})
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    with contextlib.suppress(ImportError):
        from tqdm import tqdm

        tqdm.set_lock(threading.RLock())  # its own is a semaphore, which would be left behind
    if rank or not shown:
        output = os.open(folder / f"output{rank}", os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)


def _announced(fn: Callable[..., Any], args: tuple) -> Any:
    """Call a function; the other ranks know of its error before this process answers."""
    try:
        return fn(*args)
    except BaseException as error:
        announce_all(error, final=True)
        time.sleep(LINGER_S)
        raise


def end_with_parent(parent: int) -> None:
    """End this process once its parent has ended."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def prepare(rank: int, n: int, folder: Path) -> None:
    """Make this process a rank that ends with its parent, and writes its stacks on SIGUSR1.

    It has the variables of torchrun for a rank of one machine, without its store. Ctrl-C does not
    reach it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    end_with_parent(os.getppid())
    found = {"RANK": rank, "WORLD_SIZE": n, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": n}
    os.environ.update({name: str(number) for name, number in found.items()})
    stacks = open(folder / f"stacks{rank}", "w")  # noqa: SIM115  the fault handler keeps it
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, stacks)


def answer(work: Callable[[], Any]) -> bytes:
    """Do a rank's work and pack its result; never raise for an error of the work."""
    try:
        return pickle.dumps(work())
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        text = "".join(traceback.format_exception(error))
        return pickle.dumps(RankFailure(type(error).__name__, str(error), text))


class RankProcesses:
    """Processes of n ranks, each at the other end of a pipe; `close` ends them all.

    Args:
        n: number of ranks.
        grace_s: how long the other ranks may take to answer once one has failed.
    """

    def __init__(self, n: int, grace_s: float) -> None:
        self.n, self.grace_s = n, grace_s
        self.procs: list[Any] = []
        self.conns: list[Connection] = []
        self.folders: list[Path] = []  # of the ranks alive: one, or none

    def start(self, method: str, target: Callable[..., None], *args: Any) -> None:
        """Start all: each calls `target` with its rank, n, their folder, its pipe and `args`."""
        self.close()
        folder = Path(tempfile.mkdtemp(prefix="mics_ranks_"))
        self.folders.append(folder)
        context: Any = mp.get_context(method)
        # Until a rank ignores it, the Ctrl-C of a terminal waits, whichever thread here it reaches.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            for rank in range(self.n):
                ours, theirs = context.Pipe()
                self.conns.append(ours)
                job = (rank, self.n, folder, theirs, *args)
                proc = context.Process(target=target, args=job, name=f"rank {rank}")
                proc.start()
                self.procs.append(proc)
                theirs.close()  # so that the death of its owner is an end of file here
        except BaseException:
            self.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def collect(self, limit_s: float) -> dict[int, Any]:
        """Receive replies by rank; last those of ranks that gave none within the bound."""
        replies: dict[int, Any] = {}
        why = f"{limit_s:g} s"
        waiting = dict(zip(self.conns, range(self.n), strict=True))
        deadline = time.monotonic() + limit_s
        while waiting and (remaining_s := deadline - time.monotonic()) > 0:
            for conn in wait(list(waiting), min(remaining_s, LONGEST_WAIT_S)):
                rank = waiting.pop(conn)  # pyright: ignore[reportArgumentType]
                replies[rank] = self._receive(rank)
                if isinstance(replies[rank], RankFailure):
                    deadline = min(deadline, time.monotonic() + self.grace_s)
                    why = f"{self.grace_s:g} s after another failed"
        if silent := sorted(waiting.values()):
            dump_stacks(self.folders[0], {rank: self.procs[rank].pid for rank in silent})
        for rank in silent:
            trace = said_by(self.folders[0], rank) or "no stack: stopped"
            replies[rank] = RankFailure("RankTimeout", f"no answer within {why}", trace)
        return replies

    def _receive(self, rank: int) -> Any:
        try:
            return pickle.loads(self.conns[rank].recv_bytes())
        except (EOFError, OSError):
            self.procs[rank].join(1.0)
            code = self.procs[rank].exitcode or 0
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited: {code}"
            trace = said_by(self.folders[0], rank) or f"no traceback: it {how}"
            return RankFailure("RankDied", f"process {how}", trace)

    def close(self) -> None:
        """Kill the processes and remove their folder."""
        end(self.procs, self.folders)
        for conn in self.conns:
            conn.close()
        self.conns.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def end(procs: list[Any], folders: list[Path]) -> None:
    """Kill processes and remove folders."""
    for proc in procs:
        proc.kill()
    for proc in procs:
        proc.join()
        proc.close()
    procs.clear()
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    folders.clear()


def dump_stacks(folder: Path, pids: Mapping[int, int]) -> None:
    """Let ranks write the stacks of all their threads, as far as they still can."""
    for pid in pids.values():
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGUSR1)
    files, deadline = [folder / f"stacks{rank}" for rank in pids], time.monotonic() + STACKS_S
    while not all(map(_text, files)) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    time.sleep(POLL_S)  # lets a dump that has begun reach its end


def said_by(folder: Path, rank: int) -> str:
    """Return the stacks that a rank has written, and the end of what it printed."""
    return _text(folder / f"stacks{rank}") + _text(folder / f"output{rank}")[-LAST_CHARACTERS:]


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def values(name: str, results: Mapping[int, Any]) -> list[Any]:
    """Return the results in rank order; raise if one is a failure."""
    failures = {r: value for r, value in results.items() if isinstance(value, RankFailure)}
    if failures:
        what = f"{name}: {len(failures)} of {len(results)} ranks failed"
        raise RankError(describe(what, failures), failures)
    return [results[rank] for rank in range(len(results))]

"""One trial of `stress faults`: forked ranks, a fault on one of them, and what they say in time.

[Note: trials] Ranks are forked from a process that has imported torch and has no threads, so a
trial starts in tenths of a second. A rank that an error ends either stays, as the kernel of a
notebook does, or leaves as a script does: through `sys.excepthook` and `atexit`. The store is in
rank 0, as under Slurm, or in a process of its own, as under torchrun.
"""

import contextlib
import ctypes
import mmap
import multiprocessing as mp
import os
import shutil
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

from mics_fn import _torch
from mics_fn.lab.ranks import ADDRESS
from tests.stress.fault_ranks import MARK, STORE, Address, Rank, Told, Trial

PR_SET_PDEATHSIG = 1


class Found(NamedTuple):
    """All that is known after a trial."""

    trial: Trial
    happened: float | None  # when the fault did
    told: dict[int, Told]
    again: dict[int, Told]  # after `reset` and the steps that were left
    silent: dict[int, str]  # ranks that lived and said nothing, and their stacks
    died: dict[int, int]  # ranks that ended unasked, and their status
    seconds: float


def run_trial(trial: Trial) -> Found:
    """Start the ranks of a trial, and hear what became of them; none is left over."""
    started, port = time.monotonic(), free_port(trial.number)
    board = mmap.mmap(-1, MARK.size)
    pids: dict[int, int] = {}
    conns: dict[int, Connection] = {}
    # No object whose end would remove it: a rank that leaves calls what its parent registered.
    folder = tempfile.mkdtemp(prefix="mics_fault_")
    try:
        host = fork(lambda: host_store(port)) if trial.apart else 0
        for rank in range(trial.ranks):
            ours, theirs = mp.Pipe()
            address = Address(port, host or pids.get(0, 0))
            body = Rank(trial, rank, address, board, theirs, f"{folder}/stacks{rank}")
            pids[rank], conns[rank] = fork(body.serve), ours
            theirs.close()
        gone = _gone(trial)
        living = [rank for rank in pids if rank not in gone]
        limit = started + 3 * trial.timeout_s + 2 * trial.heartbeat_s
        told, died = hear(conns, living, pids, limit)
        silent = [rank for rank in living if rank not in told and rank not in died]
        again: dict[int, Told] = {}
        (happened,) = MARK.unpack(board[:])
        failed = happened and any(each.error for each in told.values())
        if failed and not silent and not died and _may_reset(trial):
            for rank in living:
                conns[rank].send("reset")
            again, lost = hear(conns, living, pids, time.monotonic() + 2 * trial.timeout_s)
            died |= lost
            silent = [rank for rank in living if rank not in again and rank not in died]
        stacks = stacks_of({rank: pids[rank] for rank in silent}, folder)
    finally:
        end([*pids.values(), *([host] if trial.apart else [])])
        for conn in conns.values():
            conn.close()
        shutil.rmtree(folder, ignore_errors=True)
    seconds = time.monotonic() - started
    return Found(trial, happened or None, told, again, stacks, died, seconds)


def _gone(trial: Trial) -> list[int]:
    """The ranks that the fault ends or stops."""
    if trial.fault in ("exit", "kill", "stop"):
        return [trial.rank]
    if trial.fault in STORE and not trial.apart:
        return [0]
    return []


def _may_reset(trial: Trial) -> bool:
    """Whether all ranks, the store and the state outlive the fault, and nobody leaves."""
    lost = trial.fault in ("flip", *STORE) or bool(_gone(trial))
    return not trial.script and not lost and trial.step > 0


def hear(
    conns: dict[int, Connection], ranks: Iterable[int], pids: dict[int, int], limit: float
) -> tuple[dict[int, Any], dict[int, int]]:
    """What each of these ranks says until the limit, and those that ended without a word."""
    told: dict[int, Any] = {}
    died: dict[int, int] = {}
    waiting: dict[Any, int] = {conns[rank]: rank for rank in ranks}
    while waiting and (left := limit - time.monotonic()) > 0:
        for conn in wait(list(waiting), left):
            rank = waiting.pop(conn)
            try:
                told[rank] = conns[rank].recv()
            except (EOFError, OSError):
                _, status = os.waitpid(pids[rank], 0)
                died[rank] = os.waitstatus_to_exitcode(status)
    return told, died


def stacks_of(pids: dict[int, int], folder: str) -> dict[int, str]:
    """The stacks of ranks that do not answer."""
    for pid in pids.values():
        os.kill(pid, signal.SIGUSR1)
    time.sleep(0.5 if pids else 0.0)
    found = {}
    for rank in pids:
        with contextlib.suppress(OSError), open(f"{folder}/stacks{rank}") as file:
            found[rank] = file.read()
    return {rank: found.get(rank, "") for rank in pids}


def end(pids: Iterable[int]) -> None:
    """Kill processes that this one forked, and wait for their end.

    One that was waited for before is left alone: its number may be that of another process now.
    """
    left = [pid for pid in pids if _is_ours(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    for pid in left:
        os.waitpid(pid, 0)


def _is_ours(pid: int) -> bool:
    """Whether a process that this one forked is there, and not waited for yet."""
    with contextlib.suppress(ChildProcessError):
        return not os.waitpid(pid, os.WNOHANG)[0]
    return False


def fork(body: Callable[[], None]) -> int:
    """A forked process that does this and ends without Python's own end."""
    pid = os.fork()
    if pid == 0:
        code, shown = 1, os.dup(2)
        try:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            quiet = os.open(os.devnull, os.O_RDWR)
            os.dup2(quiet, 1)
            os.dup2(quiet, 2)
            body()
            code = 0
        except BaseException:
            os.dup2(shown, 2)
            traceback.print_exc()
        finally:
            os._exit(code)
    return pid


def free_port(number: int) -> int:
    """A port below those that systems give away, so that no connection takes it meanwhile."""
    port = 20_000 + (131 * os.getpid() + 7 * number) % 12_000
    while True:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                probe.bind((ADDRESS, port))
                return port
        port = 20_000 + (port + 1) % 12_000


def host_store(port: int) -> None:
    """Serve a store at a port of this machine, for good."""
    store = _torch.serve_store(ADDRESS, port)
    while store:
        time.sleep(60)

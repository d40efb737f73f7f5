"""Forked gloo ranks on this machine, for tests and notebooks: call a function on n ranks.

`RankPool` keeps its ranks alive between calls (0.1 s to fork, then a call costs a pipe round trip);
`run_ranks` forks ranks for one call, so that closures and functions typed into a notebook work.
Every wait is bounded. A hang comes back as an error that quotes each rank's stack.

[Note: What a fork may inherit] A forked child has one thread and a copy of everything else. CUDA
contexts and process groups do not survive that (their threads are gone), so both are refused. After
a parallel region of OpenMP in the parent, one in the child would hang: children use one thread.
"""

import contextlib
import importlib
import multiprocessing as mp
import os
import pickle
import shutil
import signal
import tempfile
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mics_fn.errors import GroupsError, message, name_ranks
from mics_fn.lab.ranks.errors import RankError, RankFailure, RankTimeoutError, describe, exit_text
from mics_fn.lab.ranks.process import (
    Call,
    Place,
    Reply,
    call_name,
    check_in_step,
    dumps_call,
    serve,
)

__all__ = ["RankError", "RankFailure", "RankPool", "RankTimeoutError", "run_ranks"]

# Ranks that have made more groups are forked anew: those that were broken on purpose are never
# destroyed, which would wait for what is under way, and keep their threads and connections.
MOST_GROUPS = 400
HEALTH_TIMEOUT_S = 5.0


class RankPool:
    """Ranks that live until `close()`: a default gloo group of n forked processes.

    Args:
        n: number of ranks.
        timeout_s: bound of one call in seconds, and the timeout of the ranks' default group.
        grace_s: how long the other ranks may take to answer once one has failed.

    Ranks are forked at the first call, and anew after one that hung or left them out of step.
    They see RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE in their environment, use one
    thread each, ignore Ctrl-C (it interrupts the caller) and die with this process.

    Raises:
        GroupsError: CUDA or a process group is initialised here; neither survives a fork.

    Example:
        >>> import operator
        >>> with RankPool(1) as pool:
        ...     pool.run(operator.add, 2, 3)
        [5]
    """

    def __init__(self, n: int, *, timeout_s: float = 60.0, grace_s: float = 10.0):
        if n < 1:
            raise ValueError(f"RankPool: n must be at least 1, got {n}")
        self.n = n
        self.timeout_s = timeout_s
        self.grace_s = grace_s
        self._procs: list[Any] = []
        self._conns: list[Connection] = []
        self._dirs: list[Path] = []  # of the ranks alive: one, or none
        # Holds the lists, not the pool; runs at exit too, before multiprocessing joins children.
        self._finalizer = weakref.finalize(self, _end, self._procs, self._dirs, os.getpid())

    def run(self, fn: Callable[..., Any], *args: Any, timeout_s: float | None = None) -> list[Any]:
        """Call `fn(*args)` on every rank and return the results in rank order.

        Args:
            fn: a function of a module; it travels by reference, `args` and results by value.
            timeout_s: bound in seconds, instead of the pool's.

        Raises:
            RankError: naming the ranks that raised or died, with each distinct traceback once.
            RankTimeoutError: some ranks gave no answer; their stacks are in the text.
        """
        return _values(call_name(fn), self.try_run(fn, *args, timeout_s=timeout_s))

    def try_run(
        self, fn: Callable[..., Any], *args: Any, timeout_s: float | None = None
    ) -> list[Any]:
        """Like `run`, but a rank that raised or died yields a `RankFailure` in its place.

        Raises:
            RankTimeoutError: some ranks gave no answer; their stacks are in the text.
        """
        payload = dumps_call(fn, args)
        if not self._procs or not all(proc.is_alive() for proc in self._procs):
            self._fork()
        for conn in self._conns:
            # A rank that died since is found when its answer is read.
            with contextlib.suppress(BrokenPipeError):
                conn.send_bytes(payload)
        return self._finish(call_name(fn), timeout_s)

    def close(self) -> None:
        """End all ranks. The pool forks new ones if it is used again."""
        _end(self._procs, self._dirs, os.getpid())
        for conn in self._conns:
            conn.close()
        self._conns.clear()

    def __enter__(self) -> "RankPool":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        pids = [proc.pid for proc in self._procs]
        return f"RankPool(n={self.n}, timeout_s={self.timeout_s:g}, pids={pids})"

    def _fork(self, first: Call | None = None) -> None:
        """Start all ranks; with `first`, they inherit that call and answer it at once."""
        _refuse_unsafe_fork()
        self.close()
        importlib.import_module("torch._dynamo")  # which torch.func would import in each of them
        folder = Path(tempfile.mkdtemp(prefix="mics_ranks_"))
        self._dirs.append(folder)
        context = mp.get_context("fork")
        in_main = threading.current_thread() is threading.main_thread()
        try:
            for rank in range(self.n):
                ours, theirs = context.Pipe()
                self._conns.append(ours)
                place = Place(rank, self.n, folder, self.timeout_s, in_main)
                job = (place, theirs, first)
                proc = context.Process(target=serve, args=job, name=f"rank {rank}")
                with warnings.catch_warnings():
                    # Python 3.12 warns about any fork with threads: see [Note: What a fork may
                    # inherit].
                    warnings.simplefilter("ignore", DeprecationWarning)
                    proc.start()
                self._procs.append(proc)
                theirs.close()  # so that the death of its owner is an end of file here
        except BaseException:
            self.close()
            raise

    def _finish(self, name: str, timeout_s: float | None) -> list[Any]:
        """Collect the answers of a call under way; leave the pool fit for the next one or empty."""
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        try:
            replies = self._collect(limit_s)
            silent = sorted(set(range(self.n)) - set(replies))
            if silent:
                self._raise_timeout(name, limit_s, replies, silent)
            results = [replies[rank].value for rank in range(self.n)]
            failed = any(isinstance(value, RankFailure) for value in results)
            groups = {reply.num_groups for reply in replies.values()}
            worn = len(groups) > 1 or max(groups) > MOST_GROUPS
            if worn or (failed and not self._healthy()):
                self.close()
        except BaseException:
            self.close()
            raise
        return results

    def _collect(self, limit_s: float) -> dict[int, Reply]:
        """Replies by rank; ranks that gave none within the bound are missing."""
        replies: dict[int, Reply] = {}
        waiting = dict(zip(self._conns, range(self.n), strict=True))
        deadline = time.monotonic() + limit_s
        while waiting and (left_s := deadline - time.monotonic()) > 0:
            for conn in wait(list(waiting), left_s):
                rank = waiting.pop(conn)  # pyright: ignore[reportArgumentType]
                replies[rank] = self._receive(rank)
                if isinstance(replies[rank].value, RankFailure):
                    deadline = min(deadline, time.monotonic() + self.grace_s)
        return replies

    def _receive(self, rank: int) -> Reply:
        try:
            payload = self._conns[rank].recv_bytes()
        except (EOFError, OSError):
            self._procs[rank].join(1.0)
            how = exit_text(self._procs[rank].exitcode)
            return Reply(RankFailure("RankDied", f"process {how}", f"no traceback: {how}"), -1)
        try:
            return Reply(*pickle.loads(payload))
        except Exception as err:
            return Reply(RankFailure(type(err).__name__, str(err), "result: not readable"), -1)

    def _healthy(self) -> bool:
        """Whether the default group still works: a failed collective breaks gloo's connections."""
        payload = dumps_call(check_in_step, ())
        try:
            for conn in self._conns:
                conn.send_bytes(payload)
        except BrokenPipeError:
            return False
        replies = self._collect(HEALTH_TIMEOUT_S)
        return len(replies) == self.n and all(reply.value is True for reply in replies.values())

    def _raise_timeout(
        self, name: str, limit_s: float, replies: dict[int, Reply], silent: list[int]
    ) -> None:
        errors = {r: v for r, (v, _) in replies.items() if isinstance(v, RankFailure)}
        since = f"{self.grace_s:g} s after another failed" if errors else f"{limit_s:g} s"
        for rank, stack in self._stacks(silent).items():
            errors[rank] = RankFailure("RankTimeout", f"no answer within {since}", stack)
        verb = "gives" if len(silent) == 1 else "give"
        what = f"{name}: {name_ranks(silent)} of {self.n} {verb} no answer within {since}"
        raise RankTimeoutError(describe(what, dict(sorted(errors.items()))), errors)

    def _stacks(self, ranks: list[int]) -> dict[int, str]:
        """The stacks of all threads of `ranks`, written by their signal handlers."""
        files = {rank: self._dirs[0] / f"stacks{rank}" for rank in ranks}
        for rank in ranks:
            with contextlib.suppress(OSError):
                os.kill(self._procs[rank].pid, signal.SIGUSR1)
        deadline = time.monotonic() + 2.0
        while time.monotonic() < deadline:
            time.sleep(0.05)
            if all(_size(path) for path in files.values()):
                break
        time.sleep(0.05)  # lets a dump that has begun reach its end
        return {rank: _read(path) or "no stack: stopped" for rank, path in files.items()}


def run_ranks(
    fn: Callable[..., Any], n: int, *args: Any, timeout_s: float = 60.0, grace_s: float = 10.0
) -> list[Any]:
    """Call `fn(*args)` on n ranks forked for this call; closures and notebook functions work.

    Args:
        fn: any callable; the ranks inherit it and `args`. Results travel by value.
        n: number of ranks.
        timeout_s: bound of the call in seconds.
        grace_s: how long the other ranks may take to answer once one has failed.

    Raises:
        RankError, RankTimeoutError, GroupsError: as `RankPool.run`.

    Example:
        >>> run_ranks(lambda x: x + 1, 1, 2)
        [3]
    """
    with RankPool(n, timeout_s=timeout_s, grace_s=grace_s) as pool:
        pool._fork(first=(fn, args))
        results = pool._finish(call_name(fn), None)
    return _values(call_name(fn), results)


def _values(name: str, results: list[Any]) -> list[Any]:
    """The results, unless one is a failure."""
    failures = {rank: r for rank, r in enumerate(results) if isinstance(r, RankFailure)}
    if failures:
        what = f"{name}: {len(failures)} of {len(results)} ranks failed"
        raise RankError(describe(what, failures), failures)
    return results


def _refuse_unsafe_fork() -> None:
    """See [Note: What a fork may inherit]."""
    if not hasattr(os, "fork"):
        raise GroupsError("ranks: this platform cannot fork processes")
    if torch.cuda.is_initialized():
        raise GroupsError(
            message(
                "ranks: CUDA is initialised in this process, and a forked rank cannot use it",
                fix="fork the ranks before the first use of CUDA, or use lab.ranks.launch",
            )
        )
    if dist.is_initialized():
        raise GroupsError(
            message(
                "ranks: a process group is initialised in this process; its connections would be "
                "dead in a forked rank",
                fix="call torch.distributed.destroy_process_group() first",
            )
        )


def _end(procs: list[Any], folders: list[Path], owner: int) -> None:
    """Kill the processes, remove the folders; in a forked copy of the owner this does nothing."""
    if os.getpid() != owner:
        return
    for proc in procs:
        proc.kill()
    for proc in procs:
        proc.join()
        proc.close()
    procs.clear()
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    folders.clear()


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""

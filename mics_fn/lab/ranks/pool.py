"""Forked gloo ranks on this machine, for tests and notebooks: call a function on n ranks.

`RankPool` keeps its ranks alive between calls (0.1 s to fork, then a call costs a pipe round trip);
`run_ranks` forks ranks for one call, so that closures and functions typed into a notebook work.
Every wait is bounded. A hang comes back as an error that quotes each rank's stack.

[Note: What a fork may inherit] A forked child has one thread and a copy of everything else. CUDA
contexts and process groups do not survive that (their threads are gone), so both are refused. After
a parallel region of OpenMP in the parent, one in the child would hang: children use one thread.
"""

import contextlib
import gc
import importlib
import multiprocessing as mp
import os
import pickle
import shutil
import signal
import socket
import sys
import tempfile
import time
import warnings
import weakref
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from mics_fn._torch import num_process_groups
from mics_fn.errors import GroupsError, name_ranks
from mics_fn.lab.ranks import launch
from mics_fn.lab.ranks.failures import RankError, RankFailure, RankTimeoutError, describe, exit_text

# The child's side of `pool`: one forked rank that answers calls until its parent is gone.

Call = tuple[Callable[..., Any], tuple]


class Reply(NamedTuple):
    """Answer of a rank to one call."""

    value: Any  # the function's result, or a RankFailure
    num_groups: int  # process groups alive on that rank; torch names new groups after it


class RankPlace(NamedTuple):
    """Place of one rank: what `serve` needs to join the others."""

    rank: int
    world_size: int
    folder: Path  # of the pool: the store and the stack dumps
    timeout_s: float  # of the default group


def dumps_call(fn: Callable[..., Any], args: tuple) -> bytes:
    """Pickle a call, with the caller's `sys.path` so that its modules are found."""
    try:
        # Plain pickle, not multiprocessing's: tensors go by value, with no shared memory behind.
        return pickle.dumps((list(sys.path), pickle.dumps((fn, args))))
    except Exception as err:
        raise TypeError(
            f"{call_name(fn)}: cannot travel to a rank that is already running: {err}\n"
            "  fix: define it at the top of a module, or use run_ranks, whose ranks inherit it"
        ) from err


def call_name(fn: Callable[..., Any]) -> str:
    """Return the name of a callable for messages."""
    return getattr(fn, "__qualname__", None) or repr(fn)


def serve(place: RankPlace, conn: Connection, first: Call | None) -> None:
    """Join the default group, answer `first` if given, then calls from `conn` until it ends."""
    _configure(place)
    launch.dump_stacks(place.folder / f"stacks{place.rank}")
    failure = _join_group(place)
    if first is not None:
        conn.send_bytes(_answer(lambda: first, failure))
    with contextlib.suppress(EOFError, OSError):
        while True:
            payload = conn.recv_bytes()
            conn.send_bytes(_answer(lambda payload=payload: _loads_call(payload), failure))
    # Without interpreter shutdown: it would wait for gloo's threads, whose peers may be gone.
    os._exit(0)


def _configure(place: RankPlace) -> None:
    """Set signals, threads, garbage collection and environment of a rank."""
    gc.freeze()  # else each collection would look through, and copy, all that the parent has
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    launch.end_with_parent(os.getppid())
    torch.set_num_threads(1)
    os.environ.update(launch.variables(place.rank, place.world_size))
    # Otherwise gloo looks up the host's name, which on many machines resolves to nothing.
    loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    if loopback:
        os.environ["GLOO_SOCKET_IFNAME"] = loopback[0]


def _join_group(place: RankPlace) -> RankFailure | None:
    """Make the default group; an error of that is then the answer to every call."""
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(  # pyright: ignore[reportPrivateImportUsage]
                str(place.folder / "store"), place.world_size
            ),
            rank=place.rank,
            world_size=place.world_size,
            timeout=timedelta(seconds=place.timeout_s),
        )
    except Exception as err:
        return launch.failure_of(err)
    return None


def _loads_call(payload: bytes) -> Call:
    sys.path[:], call = pickle.loads(payload)
    try:
        return pickle.loads(call)
    except (ImportError, AttributeError) as err:
        err.add_note(
            "The function is sent by name, and this rank does not know it: it was defined after "
            "the ranks were forked, or outside a module. Use run_ranks, or move it to a module."
        )
        raise


def _answer(load: Callable[[], Call], failure: RankFailure | None) -> bytes:
    """Run one call and pack its result; never raise for an error of the function."""
    value: Any = failure
    if failure is None:
        try:
            fn, args = load()
            value = fn(*args)
        except (Exception, SystemExit, KeyboardInterrupt) as err:
            value = launch.failure_of(err)
    try:
        return pickle.dumps(tuple(Reply(value, num_process_groups())))
    except Exception as err:
        return pickle.dumps(tuple(Reply(launch.failure_of(err), num_process_groups())))


def check_in_step() -> bool:
    """Return whether this rank's default group works and all made as many groups."""
    mine = torch.tensor([dist.get_rank(), num_process_groups()])
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    expected = [[rank, num_process_groups()] for rank in range(dist.get_world_size())]
    return [row.tolist() for row in everyone] == expected


# Ranks that have made more groups are forked anew: those that were broken on purpose are never
# destroyed, which would wait for what is under way, and keep their threads and connections.
MOST_GROUPS = 400
HEALTH_TIMEOUT_S = 5.0


class RankPool:
    """Pool of n forked processes in a default gloo group, until `close()`.

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
        """Call `fn(*args)` on every rank; a `RankFailure` is in the place of a failed result.

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
        try:
            for rank in range(self.n):
                ours, theirs = context.Pipe()
                self._conns.append(ours)
                place = RankPlace(rank, self.n, folder, self.timeout_s)
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
        """Collect the answers of a call; keep the pool fit for the next one, or empty."""
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
        """Receive replies by rank; ranks that gave none within the bound are missing."""
        replies: dict[int, Reply] = {}
        waiting = dict(zip(self._conns, range(self.n), strict=True))
        deadline = time.monotonic() + limit_s
        while waiting and (remaining_s := deadline - time.monotonic()) > 0:
            for conn in wait(list(waiting), remaining_s):
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
        """Return whether the default group works: a failed collective breaks gloo's connections."""
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
        stacks = launch.stacks_of(self._dirs[0], {rank: self._procs[rank].pid for rank in silent})
        for rank, stack in stacks.items():
            text = stack or "no stack: stopped"
            errors[rank] = RankFailure("RankTimeout", f"no answer within {since}", text)
        verb = "gives" if len(silent) == 1 else "give"
        what = f"{name}: {name_ranks(silent)} of {self.n} {verb} no answer within {since}"
        raise RankTimeoutError(describe(what, dict(sorted(errors.items()))), errors)


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
    """Return the results; raise if one is a failure."""
    failures = {rank: r for rank, r in enumerate(results) if isinstance(r, RankFailure)}
    if failures:
        what = f"{name}: {len(failures)} of {len(results)} ranks failed"
        raise RankError(describe(what, failures), failures)
    return results


def _refuse_unsafe_fork() -> None:
    """Refuse to fork what is unsafe; see [Note: What a fork may inherit]."""
    if not hasattr(os, "fork"):
        raise GroupsError("ranks: this platform cannot fork processes")
    if torch.cuda.is_initialized():
        raise GroupsError(
            "ranks: CUDA is initialised in this process, and a forked rank cannot use it",
            fix="fork the ranks before the first use of CUDA, or use lab.ranks.launch",
        )
    if dist.is_initialized():
        raise GroupsError(
            "ranks: a process group is initialised in this process; its connections would be "
            "dead in a forked rank",
            fix="call torch.distributed.destroy_process_group() first",
        )


def _end(procs: list[Any], folders: list[Path], owner: int) -> None:
    """Kill the processes and remove the folders; in a forked copy of the owner, do nothing."""
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

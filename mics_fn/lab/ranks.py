"""Ranks on this machine: a function as n fresh processes, or on n forked ones that go on.

`launch` starts processes as `torchrun` would, fresh ones, because a forked process could not use a
GPU; `run_bounded` does so with a time limit, and says how each of them ended. Their store lives in
this process, as under torchrun it lives in the agent, so that it outlives any rank.

`RankPool` forks ranks of gloo, and keeps them alive between calls (0.1 s to fork, then a call costs
a pipe round trip); `run_ranks` forks ranks for one call, so that closures and functions typed into
a notebook work. Every wait is bounded. A hang comes back as an error that quotes each rank's stack.

The store has a socket that is bound to loopback alone: torch's own listens on every address of the
host, and what is in a store is trusted.

[Note: What a fork may inherit] A forked child has one thread and a copy of everything else. CUDA
contexts and process groups do not survive that (their threads are gone), so both are refused. After
a parallel region of OpenMP in the parent, one in the child would hang: children use one thread.
"""

import contextlib
import faulthandler
import gc
import importlib
import math
import multiprocessing as mp
import os
import pickle
import re
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from mics_fn import _torch
from mics_fn.errors import GroupsError, MicsError, message, name_ranks
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
    return _values(getattr(fn, "__name__", "launch"), replies)


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
    with RankPool(n, timeout_s=limit_s, grace_s=grace_s) as pool:
        call = partial(_loads_call, dumps_call(_announced, (fn, args)))
        pool._start("spawn", partial(_set_up, own, shown), call)
        return {rank: value for rank, (value, _) in pool._collect(limit_s).items()}


def _set_up(own: Sequence[Mapping[str, str]], shown: bool, rank: int, folder: Path) -> None:
    """Give a fresh process the variables of its rank, and the place of what it prints."""
    os.environ.update({**DEFAULTS, **os.environ, **own[rank]})
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


def variables(rank: int, n: int) -> dict[str, str]:
    """Return the variables that torchrun would set for a rank of one machine, without its store."""
    found = {"RANK": rank, "WORLD_SIZE": n, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": n}
    return {name: str(number) for name, number in found.items()}


def end_with_parent(parent: int) -> None:
    """End this process once its parent has ended."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def failure_of(error: BaseException) -> RankFailure:
    """Return an error as text, without the frames of this file on top."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    text = "".join(traceback.format_exception(type(error), error, frames))
    return RankFailure(type(error).__name__, str(error), text)


# The child's side: a rank that answers calls until its parent is gone.

Call = tuple[Callable[..., Any], tuple]
Reply = tuple[Any, int]  # a result or a RankFailure, and how many process groups the rank has made
LOST = -1  # process groups of a rank that is gone, or gave no answer


SetUp = Callable[[int, Path], None]  # of a process, by its rank and the folder of all
First = Callable[[], Call] | None  # what a rank is asked at its start


def serve(rank: int, n: int, folder: Path, conn: Connection, set_up: SetUp, first: First) -> None:
    """Set this process up, answer `first` if given, then calls from `conn` until it ends.

    An error of the set-up is the answer to every call. Ctrl-C does not reach this process.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    end_with_parent(os.getppid())
    os.environ.update(variables(rank, n))
    stacks = open(folder / f"stacks{rank}", "w")  # noqa: SIM115  the fault handler keeps it
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, stacks)
    failure = None
    try:
        set_up(rank, folder)
    except Exception as error:
        failure = failure_of(error)
    with contextlib.suppress(EOFError, OSError):  # the parent has ended
        if first is not None:
            conn.send_bytes(_answer(first, failure))
        while True:
            payload = conn.recv_bytes()
            conn.send_bytes(_answer(partial(_loads_call, payload), failure))
    # Without interpreter shutdown: it would wait for gloo's threads, whose peers may be gone.
    os._exit(0)


def _join_group(n: int, timeout_s: float, rank: int, folder: Path) -> None:
    """Make a forked process a member of the default group."""
    gc.freeze()  # else each collection would look through, and copy, all that the parent has
    torch.set_num_threads(1)
    # Otherwise gloo looks up the host's name, which on many machines resolves to nothing.
    if LOOPBACK in (name for _, name in socket.if_nameindex()):
        os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK
    store = dist.FileStore(str(folder / "store"), n)  # pyright: ignore[reportPrivateImportUsage]
    limit = timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=n, timeout=limit)


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


def _loads_call(payload: bytes) -> Call:
    sys.path[:], call = pickle.loads(payload)
    return pickle.loads(call)


def call_name(fn: Callable[..., Any]) -> str:
    """Return the name of a callable for messages."""
    return getattr(fn, "__qualname__", None) or repr(fn)


def _answer(load: Callable[[], Call], failure: RankFailure | None) -> bytes:
    """Run one call and pack its result; never raise for an error of the function."""
    value: Any = failure
    try:
        if failure is None:
            fn, args = load()
            value = fn(*args)
        return pickle.dumps((value, _torch.num_process_groups()))
    except (Exception, SystemExit, KeyboardInterrupt) as err:
        return pickle.dumps((failure_of(err), _torch.num_process_groups()))


def check_in_step() -> bool:
    """Return whether this rank's default group works and all made as many groups."""
    mine = torch.tensor([dist.get_rank(), _torch.num_process_groups()])
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    expected = [[rank, _torch.num_process_groups()] for rank in range(dist.get_world_size())]
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
        self.n, self.timeout_s, self.grace_s = n, timeout_s, grace_s
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
            RankError: naming the ranks that raised, died or gave no answer, with each distinct
                traceback or stack once.
        """
        results = self.try_run(fn, *args, timeout_s=timeout_s)
        return _values(call_name(fn), dict(enumerate(results)))

    def try_run(
        self, fn: Callable[..., Any], *args: Any, timeout_s: float | None = None
    ) -> list[Any]:
        """Call `fn(*args)` on every rank; a `RankFailure` is in the place of a failed result."""
        payload = dumps_call(fn, args)
        if not self._procs or not all(proc.is_alive() for proc in self._procs):
            self._fork()
        self._send(payload)
        return self._finish(timeout_s)

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

    def _fork(self, first: First = None) -> None:
        """Start all ranks; with `first`, they inherit that call and answer it at once."""
        _refuse_unsafe_fork()
        importlib.import_module("torch._dynamo")  # which torch.func would import in each of them
        self._start("fork", partial(_join_group, self.n, self.timeout_s), first)

    def _start(self, method: str, set_up: SetUp, first: First) -> None:
        """Start the processes of all ranks, in place of those that there are."""
        self.close()
        folder = Path(tempfile.mkdtemp(prefix="mics_ranks_"))
        self._dirs.append(folder)
        context: Any = mp.get_context(method)
        # Until a rank ignores it, the Ctrl-C of a terminal waits, whichever thread here it reaches.
        if method == "spawn":
            resource_tracker.ensure_running()  # which would unblock it
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            with blocked() if method == "spawn" else contextlib.nullcontext():
                self._start_each(context, folder, set_up, first)
        except BaseException:
            self.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _start_each(self, context: Any, folder: Path, set_up: SetUp, first: First) -> None:
        for rank in range(self.n):
            ours, theirs = context.Pipe()
            self._conns.append(ours)
            job = (rank, self.n, folder, theirs, set_up, first)
            proc = context.Process(target=serve, args=job, name=f"rank {rank}")
            with warnings.catch_warnings():
                # Python 3.12 warns about any fork with threads: see [Note: What a fork may
                # inherit].
                warnings.simplefilter("ignore", DeprecationWarning)
                proc.start()
            self._procs.append(proc)
            theirs.close()  # so that the death of its owner is an end of file here

    def _send(self, payload: bytes) -> None:
        for conn in self._conns:
            # A rank that died since is found when its answer is read.
            with contextlib.suppress(BrokenPipeError):
                conn.send_bytes(payload)

    def _finish(self, timeout_s: float | None) -> list[Any]:
        """Collect the answers of a call; keep the pool fit for the next one, or empty."""
        try:
            replies = self._collect(self.timeout_s if timeout_s is None else timeout_s)
            groups = {made for _, made in replies.values()}
            worn = len(groups) > 1 or max(groups) > MOST_GROUPS or LOST in groups
            failed = any(isinstance(value, RankFailure) for value, _ in replies.values())
            if worn or (failed and not self._healthy()):
                self.close()
        except BaseException:
            self.close()
            raise
        return [replies[rank][0] for rank in range(self.n)]

    def _collect(self, limit_s: float) -> dict[int, Reply]:
        """Receive replies by rank; last those of ranks that gave none within the bound."""
        replies: dict[int, Reply] = {}
        why = f"{limit_s:g} s"
        waiting = dict(zip(self._conns, range(self.n), strict=True))
        deadline = time.monotonic() + limit_s
        while waiting and (remaining_s := deadline - time.monotonic()) > 0:
            for conn in wait(list(waiting), min(remaining_s, LONGEST_WAIT_S)):
                rank = waiting.pop(conn)  # pyright: ignore[reportArgumentType]
                replies[rank] = self._receive(rank)
                if isinstance(replies[rank][0], RankFailure):
                    deadline = min(deadline, time.monotonic() + self.grace_s)
                    why = f"{self.grace_s:g} s after another failed"
        if silent := sorted(waiting.values()):
            dump_stacks(self._dirs[0], {rank: self._procs[rank].pid for rank in silent})
        for rank in silent:
            trace = said_by(self._dirs[0], rank) or "no stack: stopped"
            replies[rank] = RankFailure("RankTimeout", f"no answer within {why}", trace), LOST
        return replies

    def _receive(self, rank: int) -> Reply:
        try:
            payload = self._conns[rank].recv_bytes()
        except (EOFError, OSError):
            self._procs[rank].join(1.0)
            code = self._procs[rank].exitcode or 0
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited: {code}"
            trace = said_by(self._dirs[0], rank) or f"no traceback: it {how}"
            return RankFailure("RankDied", f"process {how}", trace), LOST
        return pickle.loads(payload)

    def _healthy(self) -> bool:
        """Return whether the default group works: a failed collective breaks gloo's connections."""
        self._send(dumps_call(check_in_step, ()))
        replies = self._collect(HEALTH_TIMEOUT_S)
        return [value for value, _ in replies.values()] == [True] * self.n


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
        RankError, GroupsError: as `RankPool.run`.

    Example:
        >>> run_ranks(lambda x: x + 1, 1, 2)
        [3]
    """
    with RankPool(n, timeout_s=timeout_s, grace_s=grace_s) as pool:
        pool._fork(first=lambda: (fn, args))
        results = pool._finish(None)
    return _values(call_name(fn), dict(enumerate(results)))


def _values(name: str, results: Mapping[int, Any]) -> list[Any]:
    """Return the results in rank order; raise if one is a failure."""
    failures = {r: value for r, value in results.items() if isinstance(value, RankFailure)}
    if failures:
        what = f"{name}: {len(failures)} of {len(results)} ranks failed"
        raise RankError(describe(what, failures), failures)
    return [results[rank] for rank in range(len(results))]


def _refuse_unsafe_fork() -> None:
    """Refuse to fork what is unsafe; see [Note: What a fork may inherit]."""
    if torch.cuda.is_initialized():
        what = "ranks: CUDA is initialised in this process, and a forked rank cannot use it"
        raise GroupsError(what, fix="fork them before the first use of CUDA, or use launch")
    if dist.is_initialized():
        what = "ranks: a process group is initialised here; a forked rank would have it dead"
        raise GroupsError(what, fix="call torch.distributed.destroy_process_group() first")


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

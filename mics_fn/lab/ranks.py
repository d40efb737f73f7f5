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
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch
import torch.distributed as dist

from mics_fn import _torch
from mics_fn.errors import GroupsError, MicsError, message, name_ranks
from mics_fn.groups import announce_all

# What a call on ranks may raise, and how failures of many ranks become one text.

FAILED = ("PeerFailed", "PeerFileError")  # errors that name another rank
FOLLOWS = (*FAILED, "CollectiveError")  # errors of ranks that wait for another one


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


class RankTimeoutError(RankError, TimeoutError):
    """Some ranks did not answer in time; `errors` holds their stacks as tracebacks."""


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
    for rank in _causes_first(errors):
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


def _causes_first(errors: dict[int, RankFailure]) -> list[int]:
    """Sort ranks by their failures: causes first.

    First those that died or that others name, then those with an error of their own, then those
    that gave no answer, and those that waited for others.
    """
    texts = [failure.message for failure in errors.values() if failure.type_name in FAILED]
    named = {int(found[1]) for text in texts if (found := re.match(r"rank (\d+)\b", text))}

    def place(rank: int) -> int:
        kind = errors[rank].type_name
        if kind in FOLLOWS:
            return 3
        if kind == "RankDied" or rank in named:
            return 0
        return 2 if kind == "RankTimeout" else 1

    return sorted(errors, key=place)


def exit_text(code: int | None) -> str:
    """Describe how a process ended, from its exit code as Python's launchers give it.

    >>> exit_text(3), exit_text(-9)
    ('exited with code 3', 'was killed by SIGKILL')
    """
    if code is not None and code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"exited with code {code}"


# Fresh processes.

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
WORK = "from mics_fn.lab.ranks import work; work()"


class Ended(NamedTuple):
    """End of one rank."""

    result: Any  # what the function returned; None if it did not
    seconds: float  # from the start of the ranks to the end of this one
    stopped: bool  # whether it had to be ended from outside
    failure: RankFailure | None  # None if the function returned and the process ended by itself


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
    failures = {rank: failure for rank in by_time if (failure := ended[rank].failure)}
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
    store, started = _torch.serve_store(ADDRESS), time.monotonic()
    meeting = {"GROUP_RANK": "0", "MASTER_ADDR": ADDRESS, "MASTER_PORT": f"{store.port}"}
    meeting["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    folder = Path(tempfile.mkdtemp(prefix="mics_launch_"))
    procs: list[subprocess.Popen] = []
    try:
        (folder / "call").write_bytes(pickle.dumps((fn, args)))
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
    stopped, file = stacks is not None, folder / f"result{rank}"
    if not stopped and proc.returncode >= 0 and file.exists():
        result = pickle.loads(file.read_bytes())
        failure = result if isinstance(result, RankFailure) else None
        return Ended(None if failure else result, seconds, stopped, failure)
    kind, how = (
        ("RankTimeout", "was stopped") if stopped else ("RankDied", exit_text(proc.returncode))
    )
    trace = stacks or _text(folder / f"stacks{rank}")
    output = _text(folder / f"output{rank}")[-LAST_CHARACTERS:]
    return Ended(None, seconds, stopped, RankFailure(kind, f"process {how}", f"{trace}{output}"))


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
    """Return an error as text, without the frames of this file on top."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    text = "".join(traceback.format_exception(type(error), error, frames))
    return RankFailure(type(error).__name__, str(error), text)


# Forked processes: first the child's side, a rank that answers calls until its parent is gone.

Call = tuple[Callable[..., Any], tuple]
Reply = tuple[Any, int]  # a result or a RankFailure, and how many process groups the rank has made


def serve(
    rank: int, n: int, folder: Path, timeout_s: float, conn: Connection, first: Call | None
) -> None:
    """Join the default group, answer `first` if given, then calls from `conn` until it ends."""
    gc.freeze()  # else each collection would look through, and copy, all that the parent has
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    end_with_parent(os.getppid())
    torch.set_num_threads(1)
    os.environ.update(variables(rank, n))
    # Otherwise gloo looks up the host's name, which on many machines resolves to nothing.
    if LOOPBACK in (name for _, name in socket.if_nameindex()):
        os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK
    dump_stacks(folder / f"stacks{rank}")
    failure = _join_group(rank, n, folder, timeout_s)
    if first is not None:
        conn.send_bytes(_answer(lambda: first, failure))
    with contextlib.suppress(EOFError, OSError):
        while True:
            payload = conn.recv_bytes()
            conn.send_bytes(_answer(lambda payload=payload: _loads_call(payload), failure))
    # Without interpreter shutdown: it would wait for gloo's threads, whose peers may be gone.
    os._exit(0)


def _join_group(rank: int, n: int, folder: Path, timeout_s: float) -> RankFailure | None:
    """Make the default group; an error of that is then the answer to every call."""
    store = dist.FileStore(str(folder / "store"), n)  # pyright: ignore[reportPrivateImportUsage]
    limit = timedelta(seconds=timeout_s)
    try:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=n, timeout=limit)
    except Exception as err:
        return failure_of(err)
    return None


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
        if n < 1:
            raise ValueError(f"RankPool: n must be at least 1, got {n}")
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
        self._send(payload)
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
                job = (rank, self.n, folder, self.timeout_s, theirs, first)
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

    def _send(self, payload: bytes) -> None:
        for conn in self._conns:
            # A rank that died since is found when its answer is read.
            with contextlib.suppress(BrokenPipeError):
                conn.send_bytes(payload)

    def _finish(self, name: str, timeout_s: float | None) -> list[Any]:
        """Collect the answers of a call; keep the pool fit for the next one, or empty."""
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        try:
            replies = self._collect(limit_s)
            if len(replies) < self.n:
                self._raise_timeout(name, limit_s, replies)
            groups = {made for _, made in replies.values()}
            worn = len(groups) > 1 or max(groups) > MOST_GROUPS
            if worn or (_failures(replies) and not self._healthy()):
                self.close()
        except BaseException:
            self.close()
            raise
        return [replies[rank][0] for rank in range(self.n)]

    def _collect(self, limit_s: float) -> dict[int, Reply]:
        """Receive replies by rank; ranks that gave none within the bound are missing."""
        replies: dict[int, Reply] = {}
        waiting = dict(zip(self._conns, range(self.n), strict=True))
        deadline = time.monotonic() + limit_s
        while waiting and (remaining_s := deadline - time.monotonic()) > 0:
            for conn in wait(list(waiting), remaining_s):
                rank = waiting.pop(conn)  # pyright: ignore[reportArgumentType]
                replies[rank] = self._receive(rank)
                if isinstance(replies[rank][0], RankFailure):
                    deadline = min(deadline, time.monotonic() + self.grace_s)
        return replies

    def _receive(self, rank: int) -> Reply:
        try:
            payload = self._conns[rank].recv_bytes()
        except (EOFError, OSError):
            self._procs[rank].join(1.0)
            how = exit_text(self._procs[rank].exitcode)
            return RankFailure("RankDied", f"process {how}", f"no traceback: {how}"), -1
        return pickle.loads(payload)

    def _healthy(self) -> bool:
        """Return whether the default group works: a failed collective breaks gloo's connections."""
        self._send(dumps_call(check_in_step, ()))
        replies = self._collect(HEALTH_TIMEOUT_S)
        return [value for value, _ in replies.values()] == [True] * self.n

    def _raise_timeout(self, name: str, limit_s: float, replies: dict[int, Reply]) -> None:
        errors = _failures(replies)
        since = f"{self.grace_s:g} s after another failed" if errors else f"{limit_s:g} s"
        silent = {rank: self._procs[rank].pid for rank in range(self.n) if rank not in replies}
        for rank, stack in stacks_of(self._dirs[0], silent).items():
            text = stack or "no stack: stopped"
            errors[rank] = RankFailure("RankTimeout", f"no answer within {since}", text)
        verb = "gives" if len(silent) == 1 else "give"
        what = f"{name}: {name_ranks([*silent])} of {self.n} {verb} no answer within {since}"
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
        return _values(call_name(fn), pool._finish(call_name(fn), None))


def _failures(replies: Mapping[int, Reply]) -> dict[int, RankFailure]:
    return {r: value for r, (value, _) in replies.items() if isinstance(value, RankFailure)}


def _values(name: str, results: list[Any]) -> list[Any]:
    """Return the results; raise if one is a failure."""
    failures = {r: value for r, value in enumerate(results) if isinstance(value, RankFailure)}
    if failures:
        what = f"{name}: {len(failures)} of {len(results)} ranks failed"
        raise RankError(describe(what, failures), failures)
    return results


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

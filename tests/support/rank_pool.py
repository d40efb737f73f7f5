"""Ranks that are forked from here, and go on: for tests, and for functions that cannot travel.

`RankPool` keeps ranks of gloo alive between calls (0.1 s to fork, then a call costs a pipe round
trip); `run_ranks` forks ranks for one call, so that closures work.

[Note: What a fork may inherit] A forked child has one thread and a copy of everything else. CUDA
contexts and process groups do not survive that (their threads are gone), so both are refused. After
a parallel region of OpenMP in the parent, one in the child would hang: children use one thread.
"""

import contextlib
import gc
import importlib
import os
import pickle
import socket
import sys
import warnings
import weakref
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mics_fn import _torch
from mics_fn.lab.ranks import LOOPBACK, RankFailure, RankProcesses, answer, end, prepare, values

# Ranks that have made more groups are forked anew: those that were broken on purpose are never
# destroyed, which would wait for what is under way, and keep their threads and connections.
MOST_GROUPS = 400
HEALTH_TIMEOUT_S = 5.0


def serve(
    rank: int, n: int, folder: Path, conn: Connection, timeout_s: float, first: Any = None
) -> None:
    """Join the default group, answer `first` if given, then calls from `conn` until it ends."""
    prepare(rank, n, folder)
    gc.freeze()  # else each collection would look through, and copy, all that the parent has
    torch.set_num_threads(1)
    # Otherwise gloo looks up the host's name, which on many machines resolves to nothing.
    if LOOPBACK in (name for _, name in socket.if_nameindex()):
        os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK
    store = dist.FileStore(str(folder / "store"), n)  # pyright: ignore[reportPrivateImportUsage]
    limit = timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=n, timeout=limit)
    with contextlib.suppress(EOFError, OSError):  # the parent has ended
        if first is not None:
            conn.send_bytes(answer(first))
        while True:
            conn.send_bytes(answer(partial(called, conn.recv_bytes())))
    # Without interpreter shutdown: it would wait for gloo's threads, whose peers may be gone.
    os._exit(0)


def called(payload: bytes) -> tuple[Any, int]:
    """The result of a call, and how many process groups this rank has made."""
    sys.path[:], call = pickle.loads(payload)
    fn, args = pickle.loads(call)
    return fn(*args), len(_torch.groups_named(None))


def in_step() -> bool:
    """Whether this rank's default group works and all made as many groups."""
    mine = torch.tensor([len(_torch.groups_named(None))])
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return all(torch.equal(each, mine) for each in everyone)


class RankPool(RankProcesses):
    """Pool of n forked processes in a default gloo group, until `close()`.

    Ranks are forked at the first call, and anew after one that hung or left them out of step.

    Args:
        n: number of ranks.
        timeout_s: bound of one call in seconds, and the timeout of the ranks' default group.
        grace_s: how long the other ranks may take to answer once one has failed.
    """

    def __init__(self, n: int, *, timeout_s: float = 60.0, grace_s: float = 10.0) -> None:
        super().__init__(n, grace_s)
        self.timeout_s = timeout_s
        # Holds the lists, not the pool; runs at exit too, before multiprocessing joins children.
        self._finalizer = weakref.finalize(self, end_own, self.procs, self.folders, os.getpid())

    def run(self, fn: Callable[..., Any], *args: Any, timeout_s: float | None = None) -> list[Any]:
        """The results of `fn(*args)` in rank order; it travels by reference, `args` by value.

        Raises:
            RankError: naming the ranks that raised, died or gave no answer, with each distinct
                traceback or stack once.
        """
        results = self.try_run(fn, *args, timeout_s=timeout_s)
        return values(name_of(fn), dict(enumerate(results)))

    def try_run(
        self, fn: Callable[..., Any], *args: Any, timeout_s: float | None = None
    ) -> list[Any]:
        """As `run`; a `RankFailure` is in the place of a failed result."""
        payload = dumps_call(fn, args)
        if not self.procs or not all(proc.is_alive() for proc in self.procs):
            self.fork()
        try:
            replies = self._ask(payload, self.timeout_s if timeout_s is None else timeout_s)
            failed = {r: each for r, each in replies.items() if isinstance(each, RankFailure)}
            made = {replies[rank][1] for rank in replies if rank not in failed}
            lost = any(each.type_name in ("RankDied", "RankTimeout") for each in failed.values())
            worn = len(made) > 1 or max(made, default=0) > MOST_GROUPS
            if lost or worn or (failed and not self._healthy()):
                self.close()
        except BaseException:
            self.close()
            raise
        return [failed[rank] if rank in failed else replies[rank][0] for rank in range(self.n)]

    def fork(self, first: Callable[[], Any] | None = None) -> None:
        """Start all ranks; with `first`, they inherit that call and answer it at once."""
        # See [Note: What a fork may inherit].
        assert not torch.cuda.is_initialized(), "a forked rank cannot use CUDA"
        assert not dist.is_initialized(), "a forked rank would have this process group dead"
        importlib.import_module("torch._dynamo")  # which torch.func would import in each of them
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12, for any thread
            self.start("fork", serve, self.timeout_s, first)

    def _ask(self, payload: bytes, limit_s: float) -> dict[int, Any]:
        for conn in self.conns:
            # A rank that died since is found when its answer is read.
            with contextlib.suppress(BrokenPipeError):
                conn.send_bytes(payload)
        return self.collect(limit_s)

    def _healthy(self) -> bool:
        """Whether the default group works: a failed collective breaks gloo's connections."""
        replies = self._ask(dumps_call(in_step, ()), HEALTH_TIMEOUT_S)
        return all(not isinstance(each, RankFailure) and each[0] for each in replies.values())


def end_own(procs: list[Any], folders: list[Path], owner: int) -> None:
    if os.getpid() == owner:  # and not a forked copy of it
        end(procs, folders)


def dumps_call(fn: Callable[..., Any], args: tuple) -> bytes:
    """Pickle a call, with the caller's `sys.path` so that its modules are found."""
    try:
        # Plain pickle, not multiprocessing's: tensors go by value, with no shared memory behind.
        return pickle.dumps((list(sys.path), pickle.dumps((fn, args))))
    except Exception as error:
        error.add_note(f"{name_of(fn)}: use run_ranks, whose ranks inherit it")
        raise


def name_of(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__qualname__", None) or repr(fn)


def run_ranks(
    fn: Callable[..., Any], n: int, *args: Any, timeout_s: float = 60.0, grace_s: float = 10.0
) -> list[Any]:
    """The results of `fn(*args)` on n ranks forked for this call, which inherit both.

    Args:
        fn: any callable; its results travel by value.
        n: number of ranks.
        timeout_s: bound of the call in seconds.
        grace_s: how long the other ranks may take to answer once one has failed.
    """
    with RankPool(n, timeout_s=timeout_s, grace_s=grace_s) as pool:
        pool.fork(partial(fn, *args))
        return values(name_of(fn), pool.collect(timeout_s))

"""The child's side of `pool`: one forked rank that answers calls until its parent is gone."""

import contextlib
import ctypes
import faulthandler
import gc
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from mics_fn._torch import num_process_groups
from mics_fn.lab.ranks.errors import RankFailure

PR_SET_PDEATHSIG = 1

Call = tuple[Callable[..., Any], tuple]


class Reply(NamedTuple):
    """A rank's answer to one call."""

    value: Any  # the function's result, or a RankFailure
    num_groups: int  # process groups alive on that rank; torch names new groups after it


class Place(NamedTuple):
    """Where one rank stands: what `serve` needs to know to join the others."""

    rank: int
    world_size: int
    folder: Path  # of the pool: the store and the stack dumps
    timeout_s: float  # of the default group
    from_main_thread: bool  # of the parent


def dumps_call(fn: Callable[..., Any], args: tuple) -> bytes:
    """A call as bytes, with the caller's `sys.path` so that its modules are found."""
    try:
        # Plain pickle, not multiprocessing's: tensors go by value, with no shared memory behind.
        return pickle.dumps((list(sys.path), pickle.dumps((fn, args))))
    except Exception as err:
        raise TypeError(
            f"{call_name(fn)}: cannot travel to a rank that is already running: {err}\n"
            "  fix: define it at the top of a module, or use run_ranks, whose ranks inherit it"
        ) from err


def call_name(fn: Callable[..., Any]) -> str:
    """The name of a callable for messages."""
    return getattr(fn, "__qualname__", None) or repr(fn)


def serve(place: Place, conn: Connection, first: Call | None) -> None:
    """Join the default group, answer `first` if given, then calls from `conn` until it ends."""
    _settle(place)
    stacks = open(place.folder / f"stacks{place.rank}", "w")  # noqa: SIM115  lives with the process
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    failure = _join_group(place)
    if first is not None:
        conn.send_bytes(_answer(lambda: first, failure))
    with contextlib.suppress(EOFError, OSError):
        while True:
            payload = conn.recv_bytes()
            conn.send_bytes(_answer(lambda payload=payload: _loads_call(payload), failure))
    # Without interpreter shutdown: it would wait for gloo's threads, whose peers may be gone.
    os._exit(0)


def _settle(place: Place) -> None:
    """Signals, threads, garbage and environment of a rank."""
    gc.freeze()  # else each collection would look through, and copy, all that the parent has
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _die_with_parent(place.from_main_thread)
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(place.rank),
        WORLD_SIZE=str(place.world_size),
        LOCAL_RANK=str(place.rank),
        LOCAL_WORLD_SIZE=str(place.world_size),
    )
    # Otherwise gloo looks up the host's name, which on many machines resolves to nothing.
    loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    if loopback:
        os.environ["GLOO_SOCKET_IFNAME"] = loopback[0]


def _die_with_parent(from_main_thread: bool) -> None:
    parent = os.getppid()
    if sys.platform == "linux" and from_main_thread:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        # Linux sends the signal when the forking *thread* ends, so a rank forked from a worker
        # thread looks for itself, as it does where there is no such signal.
        threading.Thread(target=_watch_parent, args=(parent,), daemon=True).start()


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _join_group(place: Place) -> RankFailure | None:
    """Make the default group; why it failed is then the answer to every call."""
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
        return _failure(err)
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
    """Run one call and pack what came of it; never raises for what the function did."""
    value: Any = failure
    if failure is None:
        try:
            fn, args = load()
            value = fn(*args)
        except (Exception, SystemExit, KeyboardInterrupt) as err:
            value = _failure(err)
    try:
        return pickle.dumps(tuple(Reply(value, num_process_groups())))
    except Exception as err:
        return pickle.dumps(tuple(Reply(_failure(err), num_process_groups())))


def _failure(err: BaseException) -> RankFailure:
    """The error as text, without this file's own frames on top."""
    frames = err.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    text = "".join(traceback.format_exception(type(err), err, frames))
    return RankFailure(type(err).__name__, str(err), text)


def check_in_step() -> bool:
    """Whether this rank's default group still carries data and all made as many groups."""
    mine = torch.tensor([dist.get_rank(), num_process_groups()])
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    expected = [[rank, num_process_groups()] for rank in range(dist.get_world_size())]
    return [row.tolist() for row in everyone] == expected

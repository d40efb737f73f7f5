"""One trial of `bench faults`: forked ranks that train, a fault on one of them, and what they say.

[Note: trials] Ranks are forked from a process that has imported torch and has no threads, so a trial
starts in tenths of a second. A rank that an error ends either stays, as the kernel of a notebook
does, or leaves as a script does: through `sys.excepthook` and `atexit`. The store is in rank 0, as
under Slurm, or in a process of its own, as under torchrun.
"""

import atexit
import contextlib
import ctypes
import faulthandler
import hashlib
import mmap
import multiprocessing as mp
import os
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import mics_fn as mf
from mics_fn import testing, tree
from mics_fn.errors import MicsError
from mics_fn.lab.ranks import loopback
from mics_fn.lab.ranks.process import PR_SET_PDEATHSIG

STEPS = 4
MARK = struct.Struct("d")


class Trial(NamedTuple):
    """One fault, and the job that it happens to."""

    number: int
    ranks: int
    partition_size: int
    fault: str  # "" for none
    operation: str
    step: int
    rank: int  # on which it happens
    script: bool  # whether ranks leave at an error, as a script does, or stay
    apart: bool  # whether the store has a process of its own
    heartbeat_s: float
    timeout_s: float
    skips: int = 0  # a step whose batch is left out, in a job without a fault


class Told(NamedTuple):
    """What one rank says at its end."""

    rank: int
    at: float  # by `time.monotonic`, which all processes of a machine share
    digests: dict[int, str]  # of the state after each step of this rank
    error: str = ""  # its type; "" if all steps were taken
    typed: bool = False  # whether it is one of this library
    names: int | None = None  # the rank that the error names as a field
    kind: str = ""
    text: str = ""


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
    started, port = time.monotonic(), _free_port(trial.number)
    board = mmap.mmap(-1, MARK.size)
    pids: dict[int, int] = {}
    conns: dict[int, Connection] = {}
    with tempfile.TemporaryDirectory(prefix="mics_fault_") as folder:
        try:
            host = _fork(lambda: _host_store(port)) if trial.apart else 0
            for rank in range(trial.ranks):
                ours, theirs = mp.Pipe()
                body = _Rank(trial, rank, port, board, theirs, f"{folder}/stacks{rank}")
                pids[rank], conns[rank] = _fork(body.serve), ours
                theirs.close()
            gone = _gone(trial)
            living = [rank for rank in pids if rank not in gone]
            limit = started + 3 * trial.timeout_s + 2 * trial.heartbeat_s
            told, died = _hear(conns, living, pids, limit)
            silent = [rank for rank in living if rank not in told and rank not in died]
            again: dict[int, Told] = {}
            if (
                not silent
                and not died
                and _may_reset(trial)
                and any(t.error for t in told.values())
            ):
                for rank in living:
                    conns[rank].send("reset")
                again, lost = _hear(conns, living, pids, time.monotonic() + 2 * trial.timeout_s)
                died |= lost
                silent = [rank for rank in living if rank not in again and rank not in died]
            stacks = _stacks({rank: pids[rank] for rank in silent}, folder)
        finally:
            _end([*pids.values(), *([host] if trial.apart else [])])
            for conn in conns.values():
                conn.close()
    (mark,) = MARK.unpack(board[:])
    seconds = time.monotonic() - started
    return Found(trial, mark or None, told, again, stacks, died, seconds)


def _gone(trial: Trial) -> list[int]:
    """The ranks that the fault ends or stops."""
    if trial.fault in ("exit", "kill", "stop", "abort", "segfault"):
        return [trial.rank]
    if trial.fault in ("store_killed", "store_stopped") and not trial.apart:
        return [0]
    return []


def _may_reset(trial: Trial) -> bool:
    """Whether all ranks and the store outlive the fault, and do not leave."""
    ends = trial.script or trial.fault.startswith("store") or bool(_gone(trial))
    return not ends and trial.step > 0 and hasattr(mf.Trainer, "reset")


def _hear(
    conns: dict[int, Connection], ranks: list[int], pids: dict[int, int], limit: float
) -> tuple[dict[int, Told], dict[int, int]]:
    """What each of these ranks says until the limit, and those that ended without a word."""
    told: dict[int, Told] = {}
    died: dict[int, int] = {}
    waiting: dict[Any, int] = {conns[rank]: rank for rank in ranks}
    while waiting and (left := limit - time.monotonic()) > 0:
        for conn in wait(list(waiting), left):
            rank = waiting.pop(conn)
            try:
                told[rank] = conn.recv()  # pyright: ignore[reportAttributeAccessIssue]
            except EOFError:
                _, status = os.waitpid(pids[rank], 0)
                died[rank] = os.waitstatus_to_exitcode(status)
    return told, died


def _stacks(pids: dict[int, int], folder: str) -> dict[int, str]:
    """The stacks of ranks that do not answer."""
    for pid in pids.values():
        os.kill(pid, signal.SIGUSR1)
    time.sleep(0.5 if pids else 0.0)
    found = {}
    for rank in pids:
        with contextlib.suppress(OSError), open(f"{folder}/stacks{rank}") as file:
            found[rank] = file.read()
    return {rank: found.get(rank, "") for rank in pids}


def _end(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)


def _fork(body: Callable[[], None]) -> int:
    """A forked process that does this and ends without Python's own end."""
    pid = os.fork()
    if pid == 0:
        try:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            quiet = os.open(os.devnull, os.O_RDWR)
            os.dup2(quiet, 1)
            os.dup2(quiet, 2)
            body()
        finally:
            os._exit(0)
    return pid


def _free_port(number: int) -> int:
    """A port below those that systems give away, so that no connection takes it meanwhile."""
    port = 20_000 + (131 * os.getpid() + 7 * number) % 12_000
    while True:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                probe.bind((loopback.ADDRESS, port))
                return port
        port = 20_000 + (port + 1) % 12_000


def _host_store(port: int) -> None:
    store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
        loopback.ADDRESS, port, is_master=True, wait_for_workers=False
    )
    while store:
        time.sleep(60)


class _Rank:
    """One rank of a trial, in its own process."""

    def __init__(
        self, trial: Trial, rank: int, port: int, board: mmap.mmap, conn: Connection, stacks: str
    ) -> None:
        self.trial, self.rank, self.port = trial, rank, port
        self.board, self.conn, self.stacks = board, conn, stacks
        self.digests: dict[int, str] = {}
        self.trainer: mf.Trainer | None = None

    def serve(self) -> None:
        """Train, say what came of it, and stay or leave."""
        self._settle()
        error = self._try(self._train)
        if isinstance(error, SystemExit):
            self._leave(error)
        self.conn.send(self._told(error))
        if error is not None and self.trial.script:
            self._leave(error)
        with contextlib.suppress(EOFError):
            while self.conn.recv() == "reset":
                self.conn.send(self._told(self._try(self._train_again)))

    def _settle(self) -> None:
        faulthandler.disable()
        faulthandler.register(signal.SIGUSR1, open(self.stacks, "w"))  # noqa: SIM115
        signal.signal(signal.SIGINT, signal.default_int_handler)
        torch.set_num_threads(1)
        numbers = {"RANK": self.rank, "WORLD_SIZE": self.trial.ranks, "MASTER_PORT": self.port}
        numbers |= {"LOCAL_RANK": self.rank, "LOCAL_WORLD_SIZE": self.trial.ranks}
        os.environ.update({name: str(number) for name, number in numbers.items()})
        os.environ.update(MASTER_ADDR=loopback.ADDRESS, GLOO_SOCKET_IFNAME="lo")
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = str(self.trial.apart)

    def _try(self, body: Callable[[], None]) -> BaseException | None:
        try:
            body()
        except BaseException as error:
            return error
        return None

    def _told(self, error: BaseException | None) -> Told:
        at = time.monotonic()
        if error is None:
            return Told(self.rank, at, self.digests)
        rank, kind = getattr(error, "rank", None), getattr(error, "kind", "")
        name, typed = type(error).__name__, isinstance(error, MicsError)
        return Told(self.rank, at, self.digests, name, typed, rank, kind, str(error))

    def _leave(self, error: BaseException) -> None:
        """End as Python does, but for the destructors of C++."""
        code = error.code if isinstance(error, SystemExit) else 1
        if not isinstance(error, SystemExit):
            sys.last_type, sys.last_value = type(error), error
            sys.last_traceback = error.__traceback__
            sys.excepthook(type(error), error, error.__traceback__)
        threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
        atexit._run_exitfuncs()
        os._exit(code if isinstance(code, int) else 1)

    def _train(self) -> None:
        trial = self.trial
        where = (trial.rank, trial.step, trial.operation)
        with contextlib.ExitStack() as stack:
            if trial.fault:
                mark: Callable[[Any], None] = lambda point: self._mark()  # noqa: E731
                how = {"seconds": trial.heartbeat_s / 2, "seed": trial.number}
                stack.enter_context(testing.inject(*where, mark))
                stack.enter_context(testing.inject(*where, trial.fault, **how))
            mf.init_distributed(device="cpu", timeout_s=trial.timeout_s)
            groups = groups_for(trial)
            self.trainer = trainer_for(groups)
            for step in range(1, STEPS + 1):
                if step != trial.skips:
                    self._step(step)

    def _train_again(self) -> None:
        trainer: Any = self.trainer
        trainer.reset()
        for step in range(trainer.state.step + 1, STEPS + 1):
            self._step(step)

    def _step(self, step: int) -> None:
        trainer: Any = self.trainer
        try:
            trainer.step(batch_of(self.rank, step))
        finally:
            self.digests[trainer.state.step] = digest(trainer)

    def _mark(self) -> None:
        self.board[:] = MARK.pack(time.monotonic())


def groups_for(trial: Trial) -> mf.Groups:
    """Groups in nodes of half the ranks, so that eight ranks as one replica have two levels."""
    bounds = {"timeout_s": trial.timeout_s, "heartbeat_s": trial.heartbeat_s}
    return mf.make_groups(trial.partition_size, node_size=trial.ranks // 2, **bounds)


def trainer_for(groups: mf.Groups) -> mf.Trainer:
    """A small model in several buckets, with all that compares ranks on."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)), nn.Linear(16, 1))
    guard = mf.optim.Guard(check=True)
    how = {"guard": guard, "bucket_bytes": 2_000, "check_replicas": 1, "deterministic": True}
    return mf.Trainer(model, mf.optim.adamw(1e-2), groups, loss=loss, **how)


def loss(model: nn.Module, x: Tensor) -> Tensor:
    """A loss without targets."""
    return (model(x) - 1).square().mean()


def batch_of(rank: int, step: int) -> Tensor:
    """The samples of a rank at a step."""
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(100 * step + rank))


def digest(trainer: mf.Trainer) -> str:
    """What this rank holds of the state, bit by bit."""
    found = hashlib.sha256()
    for leaf in tree.flatten(trainer.state)[0]:
        if isinstance(leaf, Tensor):
            found.update(leaf.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]

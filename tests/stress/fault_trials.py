"""One trial of `stress faults`: forked ranks, a fault on one of them, and what they say in time.

[Note: trials] Ranks are forked from a process that has imported torch and has no threads, so a
trial starts in tenths of a second. A rank that an error ends either stays, as the kernel of a
notebook does, or leaves as a script does: through `sys.excepthook` and `atexit`. The store is in
rank 0, as under Slurm, or in a process of its own, as under torchrun.
"""

import atexit
import contextlib
import ctypes
import faulthandler
import hashlib
import mmap
import multiprocessing as mp
import os
import shutil
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection, wait
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import mics_fn as mf
from mics_fn import _torch, tree
from mics_fn.errors import MicsError
from mics_fn.lab.ranks import ADDRESS
from mics_fn.testing import inject

# What a rank of a trial does, and what it says at its end.

STEPS = 4
SAVED = 2  # the step after which a job saves, if the fault is there
MARK = struct.Struct("d")
STORE = {"store_killed": signal.SIGKILL, "store_stopped": signal.SIGSTOP}  # what its host is sent


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


class Shell:
    """As much of IPython as the library asks for: whoever registers hears of the end of a cell."""

    def __init__(self) -> None:
        self.events, self._hooks = self, list[Callable[[Any], None]]()

    def register(self, name: str, hook: Callable[[Any], None]) -> None:
        """Call this after each cell."""
        self._hooks.append(hook)

    def end_cell(self, error: BaseException | None) -> None:
        """Tell the hooks what a cell has raised."""
        for hook in self._hooks:
            hook(SimpleNamespace(error_in_exec=error, error_before_exec=None))

    def install(self) -> None:
        """Be the shell of this process."""
        module: Any = ModuleType("IPython")
        module.get_ipython = lambda: self
        sys.modules["IPython"] = module


class Rank:
    """One rank of a trial, in its own process."""

    def __init__(
        self, trial: Trial, rank: int, store: tuple[int, int], board: mmap.mmap, conn: Any, at: str
    ) -> None:
        self.trial, self.rank = trial, rank
        self.port, self.host = store  # its process; 0 for the one that asks
        self.board, self.conn, self.stacks = board, conn, at
        self.digests: dict[int, str] = {}
        self.at = 0.0  # when it ended
        self.shell = Shell()
        self.trainer: mf.Trainer | None = None

    def serve(self) -> None:
        """Train, say what came of it, and stay or leave."""
        self._settle()
        if not self.trial.script:
            self.shell.install()
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
        settle(self.stacks)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        take_place(self.rank, self.trial.ranks, self.port, apart=self.trial.apart)

    def _try(self, body: Callable[[], None]) -> BaseException | None:
        try:
            body()
            self.at = time.monotonic()
        except BaseException as error:
            self.at = time.monotonic()
            if not isinstance(error, SystemExit):
                self.shell.end_cell(error)
            return error
        return None

    def _told(self, error: BaseException | None) -> Told:
        if error is None:
            return Told(self.rank, self.at, self.digests)
        rank, kind = getattr(error, "rank", None), getattr(error, "kind", "")
        name, typed = type(error).__name__, isinstance(error, MicsError)
        return Told(self.rank, self.at, self.digests, name, typed, rank, kind, str(error))

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
                how: dict[str, Any] = {"seconds": trial.heartbeat_s / 2, "seed": trial.number}
                stack.enter_context(inject(*where, self._mark))
                # One that is torn is in a commit, while others write the step.
                fault: Any = "raise" if trial.fault == "torn" else trial.fault
                fault = self._signal_store if fault in STORE else fault
                stack.enter_context(inject(*where, fault, **how))
            mf.init_distributed(device="cpu", timeout_s=trial.timeout_s)
            groups = groups_for(trial)
            self.trainer = trainer_for(groups)
            for step in range(1, STEPS + 1):
                if step != trial.skips:
                    self._step(step)
                if step == SAVED and trial.operation.startswith(("save", "load")):
                    self._save_and_load()

    def _save_and_load(self) -> None:
        trainer: Any = self.trainer
        folder, groups = f"{os.path.dirname(self.stacks)}/saved", trainer.groups
        mf.checkpoint.save(folder, trainer.state, groups, step=SAVED)
        trainer.state = mf.checkpoint.load(folder, trainer.state, groups).state

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

    def _signal_store(self, point: Any) -> None:
        os.kill(self.host or os.getpid(), STORE[self.trial.fault])

    def _mark(self, point: Any) -> None:
        self.board[:] = MARK.pack(time.monotonic())


def settle(stacks: str) -> None:
    """Write this process's stacks to a file at a signal, and compute in one thread."""
    faulthandler.disable()
    faulthandler.register(signal.SIGUSR1, open(stacks, "w"))  # noqa: SIM115
    torch.set_num_threads(1)


def take_place(rank: int, ranks: int, port: int, *, apart: bool) -> None:
    """Be this rank of a job on this machine.

    Args:
      rank: of this process.
      ranks: of the job.
      port: of its store.
      apart: whether the store has a process of its own.
    """
    numbers = {"RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": port}
    numbers |= {"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks}
    os.environ.update({name: str(number) for name, number in numbers.items()})
    os.environ.update(MASTER_ADDR=ADDRESS, GLOO_SOCKET_IFNAME="lo")
    # The store of torch looks up the name of each client, and serves nobody meanwhile.
    os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = str(apart)


def groups_for(trial: Trial) -> mf.Groups:
    """Groups in nodes of half the ranks, so that eight ranks as one replica have two levels."""
    bounds: dict[str, Any] = {"timeout_s": trial.timeout_s, "heartbeat_s": trial.heartbeat_s}
    return mf.make_groups(trial.partition_size, node_size=trial.ranks // 2, **bounds)


def trainer_for(groups: mf.Groups) -> mf.Trainer:
    """A small model in several buckets, with all that compares ranks on."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)), nn.Linear(16, 1))
    guard = mf.optim.Guard(on_nonfinite="skip")
    how: dict[str, Any] = {"guard": guard, "bucket_bytes": 2_000}
    how["faults"] = mf.FaultPolicy(check_replicas=1)
    how["deterministic"] = True
    return mf.Trainer(model, mf.optim.adamw(1e-2), groups, loss=loss, **how)


def loss(model: nn.Module, x: Tensor) -> Tensor:
    """A loss without targets."""
    return (model(x) - 1).square().mean()


def batch_of(rank: int, step: int, width: int = 16) -> Tensor:
    """The samples of a rank at a step."""
    return torch.randn(4, width, generator=torch.Generator().manual_seed(100 * step + rank))


def digest(trainer: mf.Trainer) -> str:
    """What this rank holds of the state, bit by bit."""
    found = hashlib.sha256()
    for leaf in tree.flatten(trainer.state)[0]:
        if isinstance(leaf, Tensor):
            found.update(leaf.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


# One trial.

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
            store = port, host or pids.get(0, 0)
            body = Rank(trial, rank, store, board, theirs, f"{folder}/stacks{rank}")
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

"""What a rank of a trial of `stress faults` does, and what it says at its end."""

import atexit
import contextlib
import faulthandler
import hashlib
import mmap
import os
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import mics_fn as mf
from mics_fn import tree
from mics_fn.errors import MicsError
from mics_fn.lab.ranks import ADDRESS
from mics_fn.testing import inject

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


class Address(NamedTuple):
    """Where the store of a job is."""

    port: int
    host: int  # the process that holds it; 0 for the one that asks


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
        self, trial: Trial, rank: int, address: Address, board: mmap.mmap, conn: Any, stacks: str
    ) -> None:
        self.trial, self.rank, self.address = trial, rank, address
        self.board, self.conn, self.stacks = board, conn, stacks
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
        take_place(self.rank, self.trial.ranks, self.address.port, apart=self.trial.apart)

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
        os.kill(self.address.host or os.getpid(), STORE[self.trial.fault])

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

"""A rank of a trial of `stress faults --rejoin`: it trains, and goes on wherever it is put."""

import contextlib
import mmap
import struct
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import mics_fn as mf
from mics_fn.errors import PeerFailed
from tests.stress.fault_ranks import digest, settle, take_place

STEP = struct.Struct("i")
WIDTH = 24


class Loss(NamedTuple):
    """Ranks that are killed, and the job that they are killed in."""

    number: int
    ranks: int
    partition_size: int
    killed: tuple[int, ...]  # all at once; none in a job that nothing happens to
    at_step: int  # of which the first of them has begun
    delay_s: float  # after that
    steps: int = 16
    accumulate: int = 1
    scheme: str = ""  # a placement
    again_s: float = 0.0  # if above 0: so long after they have been started again, they are killed
    timeout_s: float = 20.0
    heartbeat_s: float = 5.0

    @property
    def plain(self) -> "Loss":
        """The same job, to which nothing happens."""
        return self._replace(killed=(), at_step=0, number=0, delay_s=0.0, again_s=0.0)


class Heard(NamedTuple):
    """What a rank says at its end."""

    rank: int
    digests: dict[int, str]  # of its state after each step
    error: str = ""
    seconds: float = 0.0  # of one that came back: from its start to the end of its first step
    resets: int = 0


class Net(nn.Module):
    """A few layers with a norm whose statistics are buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (self.norm(x) - 1).square().mean()


def made(trial: Loss, **options: Any) -> mf.Trainer:
    """The trainer of a script, made in the same way by each process of a rank."""
    mf.init_distributed(device="cpu", timeout_s=trial.timeout_s)
    bounds: dict[str, Any] = {"timeout_s": trial.timeout_s, "heartbeat_s": trial.heartbeat_s}
    groups = mf.make_groups(trial.partition_size, node_size=max(1, trial.ranks // 2), **bounds)
    if trial.scheme:
        groups = mf.placement.place(groups, trial.scheme)
    torch.manual_seed(0)
    spike = mf.optim.norm_spike(warmup=1, factor=100.0)
    guard = mf.optim.Guard(mf.optim.dynamic_scale(8.0, interval=3), max_norm=1.0, spike=spike)
    how: dict[str, Any] = {"guard": guard, "bucket_bytes": 3_000, "accumulate": trial.accumulate}
    how |= {"deterministic": True, "faults": mf.FaultPolicy(4, recoverable=True)}
    return mf.Trainer(
        Net(), options.pop("optimizer", mf.optim.adamw(1e-2)), groups, **how | options
    )


def batch_of(rank: int, step: int) -> Tensor:
    """The samples of a rank at a step."""
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


@dataclass
class Rank:
    """One process of a rank.

    Args:
      trial: the job.
      rank: which one.
      port: of the store.
      board: where each rank writes the step that it is in.
      conn: for what it says at its end.
      stacks: a file.
      again: whether it takes the place of another process.
    """

    agent = True  # whether the store outlives every rank, or is rank 0's
    trial: Loss
    rank: int
    port: int
    board: mmap.mmap
    conn: Connection
    stacks: str
    again: bool = False
    digests: dict[int, str] = field(default_factory=dict)
    resets: int = 0
    seconds: float = 0.0

    def serve(self) -> None:
        """Train to the last step, and say what came of it."""
        started = time.monotonic()
        self._settle()
        try:
            self._train(started)
            error = ""
        except Exception as caught:
            error = f"{type(caught).__name__}: {caught}"
        self.conn.send(Heard(self.rank, self.digests, error, self.seconds, self.resets))
        with contextlib.suppress(EOFError):
            self.conn.recv()  # until all have ended, as one that leaves is gone for the others

    def make(self) -> mf.Trainer:
        """The trainer."""
        return made(self.trial)

    def _train(self, started: float) -> None:
        """What a script does that goes on after a fault, on ranks old and new."""
        trainer = self.make()
        while trainer.state.step < self.trial.steps:
            step = trainer.state.step
            STEP.pack_into(self.board, STEP.size * self.rank, step + 1)
            self._wait_before(step + 1)
            try:
                trainer.step(self._batch(step))
            except PeerFailed:
                self.resets += 1
                trainer.reset()
                continue
            self.digests[trainer.state.step] = digest(trainer)
            self.seconds = self.seconds or time.monotonic() - started

    def _batch(self, step: int) -> Any:
        """What is given to a step."""
        return batch_of(self.rank, step)

    def _wait_before(self, step: int) -> None:
        """Wait before the last step until all that is to be killed has been."""
        while step == self.trial.steps and not self.board[STEP.size * self.trial.ranks]:
            time.sleep(0.002)

    def _settle(self) -> None:
        settle(self.stacks)
        take_place(self.rank, self.trial.ranks, self.port, apart=self.agent)

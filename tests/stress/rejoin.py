"""`stress faults --rejoin`: ranks are killed and started again, and go on from their replicas.

In each trial 1 to p ranks, no two of which hold the same part of the model, are killed at a random
moment, and started again at once, as a launcher would; some are killed once more while they come
back. The state of every rank after every step is
compared, bit for bit, with that of the same job to which nothing happened.
"""

import contextlib
import importlib
import mmap
import multiprocessing as mp
import os
import random
import shutil
import signal
import struct
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import mics_fn as mf
from mics_fn.errors import GroupsError, PeerFailed
from mics_fn.lab.report import table
from tests.stress import fault_trials as jobs

# A rank of a trial, which trains, and goes on wherever it is put.

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
            self.digests[trainer.state.step] = jobs.digest(trainer)
            self.seconds = self.seconds or time.monotonic() - started

    def _batch(self, step: int) -> Any:
        """What is given to a step."""
        return jobs.batch_of(self.rank, step, WIDTH)

    def _wait_before(self, step: int) -> None:
        """Wait before the last step until all that is to be killed has been."""
        while step == self.trial.steps and not self.board[STEP.size * self.trial.ranks]:
            time.sleep(0.002)

    def _settle(self) -> None:
        jobs.settle(self.stacks)
        jobs.take_place(self.rank, self.trial.ranks, self.port, apart=self.agent)


# The jobs.

GOAL_S = 3.0  # from the start of a process to the end of its first step
LIMIT_S = 60.0  # of one trial
SCHEMES = ("", "", "zero2", "hpz")


@dataclass(frozen=True)
class RejoinConfig:
    """What `stress faults --rejoin` does.

    Args:
      trials: how many.
      ranks: the sizes of jobs.
      seed: chooses what happens.
    """

    trials: int = 100
    ranks: tuple[int, ...] = (4, 8)
    seed: int = 0


class Outcome(NamedTuple):
    """All that is known after a trial."""

    trial: Loss
    heard: dict[int, Heard]
    silent: dict[int, str]  # ranks that said nothing, and their stacks
    seconds: float


def losses_of(config: RejoinConfig) -> Iterator[Loss]:
    """Trials drawn by a seed: which ranks, when, and in which job."""
    draw = random.Random(config.seed)
    for number in range(config.trials):
        n = draw.choice(config.ranks)
        p = draw.choice([p for p in range(1, n // 2 + 1) if n % p == 0])
        places = draw.sample(range(p), draw.randint(1, p))
        killed = tuple(sorted(place + p * draw.randrange(n // p) for place in places))
        scheme = draw.choice(SCHEMES) if p > 1 else ""
        how = {"accumulate": draw.choice((1, 2)), "scheme": scheme}
        how["again_s"] = draw.random() * 0.5 if draw.random() < 0.2 else 0.0
        yield Loss(number, n, p, killed, draw.randint(1, 12), draw.random() * 0.03, **how)


def run_loss(trial: Loss, kind: type[Rank] = Rank, *, again: bool = True) -> Outcome:
    """Start the ranks, kill some and start them again, and hear from all.

    Args:
      trial: the job.
      kind: what a rank does.
      again: whether those that were killed are started again.
    """
    importlib.import_module("torch._dynamo")  # which each rank would import
    started, port = time.monotonic(), jobs.free_port(trial.number)
    # Steps of ranks, then a byte, whether all have been killed.
    board = mmap.mmap(-1, STEP.size * trial.ranks + 1)
    folder = tempfile.mkdtemp(prefix="mics_rejoin_")
    pids: dict[int, int] = {}
    conns: dict[int, Connection] = {}
    hosts = [jobs.fork(lambda: jobs.host_store(port))] if kind.agent else []

    def start(rank: int, again: bool = False) -> None:
        ours, theirs = mp.Pipe()
        body = kind(trial, rank, port, board, theirs, f"{folder}/stacks{rank}", again=again)
        pids[rank], conns[rank] = jobs.fork(body.serve), ours
        theirs.close()

    try:
        for rank in range(trial.ranks):
            start(rank)
        _kill(trial, board, pids)
        for rank in trial.killed:
            conns.pop(rank).close()
            del pids[rank]
        for rank in trial.killed if again else ():
            start(rank, again=True)
        if trial.again_s:
            time.sleep(trial.again_s)
            _end_all(trial.killed, pids)
            for rank in trial.killed:
                conns.pop(rank).close()
                start(rank, again=True)
        board[STEP.size * trial.ranks] = 1
        heard, died = jobs.hear(conns, list(conns), pids, started + LIMIT_S)
        left = {rank: pid for rank, pid in pids.items() if rank not in {**heard, **died}}
        silent = jobs.stacks_of(left, folder) | {
            rank: f"died: {code}" for rank, code in died.items()
        }
    finally:
        jobs.end([*pids.values(), *hosts])
        for conn in conns.values():
            conn.close()
        shutil.rmtree(folder, ignore_errors=True)
    return Outcome(trial, heard, silent, time.monotonic() - started)


def _kill(trial: Loss, board: mmap.mmap, pids: dict[int, int]) -> None:
    """Kill some ranks, a moment after the first of them has begun a step."""
    if not trial.killed:
        return
    deadline = time.monotonic() + LIMIT_S

    def begun() -> bool:  # and all ranks have built what they train
        steps = [STEP.unpack_from(board, STEP.size * rank)[0] for rank in range(trial.ranks)]
        return min(steps) >= 1 and steps[trial.killed[0]] >= trial.at_step

    while not begun():
        if time.monotonic() > deadline:
            return
        time.sleep(0.0005)
    time.sleep(trial.delay_s)
    _end_all(trial.killed, pids)


def _end_all(ranks: Sequence[int], pids: dict[int, int]) -> None:
    for rank in ranks:
        os.kill(pids[rank], signal.SIGKILL)
    for rank in ranks:
        os.waitpid(pids[rank], 0)


def measure_rejoin(config: RejoinConfig) -> dict[str, Any]:
    """Run all trials, and compare each with a job to which nothing happened."""
    torch.set_num_threads(1)
    twins: dict[Loss, dict[int, Heard]] = {}
    rows, started = [], time.monotonic()
    for trial in losses_of(config):
        plain = trial.plain
        if plain not in twins:
            twins[plain] = run_loss(plain).heard
            errors = [heard.error for heard in twins[plain].values() if heard.error]
            if errors or len(twins[plain]) < trial.ranks:
                raise GroupsError(f"faults: a job without a fault failed: {errors[:1]}")
        rows.append(judged(run_loss(trial), twins[plain]))
    return {"rows": rows, "seconds": time.monotonic() - started}


def judged(found: Outcome, twin: dict[int, Heard]) -> dict[str, Any]:
    """A row: what was wrong with a trial, and how long the ranks that came back took."""
    trial, problems = found.trial, []
    for rank, heard in found.heard.items():
        known = twin[rank].digests
        if heard.error:
            problems.append(f"rank {rank}: {heard.error}")
        elif heard.digests.get(trial.steps) != known[trial.steps]:
            problems.append(f"rank {rank}: another state at the end")
        elif any(known[step] != value for step, value in heard.digests.items()):
            problems.append(f"rank {rank}: another state on the way")
    problems += [f"rank {rank}: silent\n{text}" for rank, text in found.silent.items()]
    back = [found.heard[rank] for rank in trial.killed if rank in found.heard]
    seconds = max((heard.seconds for heard in back), default=0.0)
    resets = max((heard.resets for heard in found.heard.values()), default=0)
    row = {**trial._asdict(), "problems": problems, "seconds": seconds, "resets": resets}
    return row | {"took_s": found.seconds}


def render_rejoin(figures: dict[str, Any], config: RejoinConfig) -> str:
    """The figures as a table, a row per size of job, and what went wrong."""
    lines = [("ranks", "trials", "right", "killed", "seconds to the next step", "most")]
    rows: Sequence[dict[str, Any]] = figures["rows"]
    for n in (*config.ranks, "all"):
        part = [row for row in rows if n in ("all", row["ranks"])]
        seconds = sorted(row["seconds"] for row in part) or [0.0]
        right, killed = sum(not x["problems"] for x in part), sum(len(x["killed"]) for x in part)
        numbers = (f"{n}", f"{len(part)}", f"{right}", f"{killed}")
        lines.append((*numbers, f"{seconds[len(seconds) // 2]:.2f}", f"{seconds[-1]:.2f}"))
    wrong = [f"trial {row['number']}: {text}" for row in rows for text in row["problems"]]
    late = sum(row["seconds"] > GOAL_S for row in rows)
    verdict = "goals missed" if wrong or late else "goals met"
    title = f"{len(rows)} losses of ranks, seed {config.seed}: {figures['seconds']:.0f} s"
    text = f"{table(title, lines)}\n\n{verdict}: all right, and at most {GOAL_S:g} s"
    return "\n".join([text, *wrong])

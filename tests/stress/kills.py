"""`stress faults --kills`: jobs that are killed while they save, and what the next job finds.

Each job goes on in the folder that the one before it left: it loads the newest step, compares every
bit, and saves one step after the other, until one to all of its ranks are killed at some moment.
What may not happen: a step that any rank was told is committed and that is lost, a newest step that
does not load, a wrong bit, a job that cannot go on, a rank that hangs.

lost: a step that a rank was told is committed, and that the next job did not find. unloadable: a
newest step that does not load or verify. wrong: other bits than those of its step. stuck: a job
that could not go on. hang: a survivor that neither ends nor raises. untyped: a survivor with an
error of another library. left over: more in the folder than the steps that are kept.

The state is a function of the step, so that whoever loads it knows each bit of it.
"""

import importlib
import mmap
import multiprocessing as mp
import os
import random
import shutil
import signal
import struct
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import mics_fn as mf
from mics_fn import tree
from mics_fn.errors import FileError, MicsError
from mics_fn.lab.report import table
from tests.stress.fault_trials import end, fork, free_port, host_store, take_place

# A rank of a job, which loads, checks, and saves until it dies.

SAVING = struct.Struct("b")  # on the board, one per rank: whether it is inside of a save
KEPT = 3  # steps


class Job(NamedTuple):
    """One job, which some of its ranks do not survive."""

    seed: int
    ranks: int
    partition_size: int
    folder: Path
    rolls_back: bool  # whether it goes on from the step before the newest one


def base() -> dict[str, Tensor]:
    """Parameters before the first step: pieces of odd sizes, in two dtypes."""
    found = {"w": torch.arange(42.0).view(6, 7), "b": torch.arange(13.0) / 8}
    return found | {"half": torch.arange(5.0).bfloat16(), "long": torch.arange(6000.0)}


def state_at(step: int, shards: Any) -> dict[str, Any]:
    """The state after a step, given `shard(base())`."""
    moved = tree.map_leaves(lambda x: x + step % 100, shards)
    return {"params": moved, "seen": torch.full((3,), step), "epoch": step}


def is_right(found: mf.checkpoint.Loaded, shards: Any) -> bool:
    """Whether a state is that of its step, bit for bit."""
    wanted = state_at(found.step, shards)
    pairs = zip(tree.flatten(found.state)[0], tree.flatten(wanted)[0], strict=True)
    same = [torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in pairs]
    return all(same) and found.extra == {"step": found.step}


class Rank:
    """One rank of a job, in its own process.

    Args:
      job: it is a part of.
      rank: its number.
      port: of the store.
      board: memory that all processes share.
      pipe: to the process that started it; each line is one thing that it says.
    """

    def __init__(self, job: Job, rank: int, port: int, board: mmap.mmap, pipe: int) -> None:
        self.job, self.rank, self.port = job, rank, port
        self.board, self.pipe = board, pipe

    def serve(self) -> None:
        """Train, and say what happens, until this process is killed."""
        signal.signal(signal.SIGINT, signal.default_int_handler)
        torch.set_num_threads(1)
        take_place(self.rank, self.job.ranks, self.port, apart=True)
        try:
            self._train()
        except BaseException as error:
            typed = isinstance(error, MicsError)
            text = f"{type(error).__name__}: {error}".replace("\n", " | ")
            self._say("ended", int(typed), text[:1500])
        threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]

    def _train(self) -> None:
        job, folder = self.job, self.job.folder
        mf.init_distributed(device="cpu", timeout_s=20.0)
        groups = mf.make_groups(job.partition_size, timeout_s=20.0, heartbeat_s=4.0)
        shards = mf.shard(base(), groups)
        newest, at = mf.checkpoint.latest(folder), 0
        if newest is not None:
            steps = mf.checkpoint.steps(folder)
            chosen = steps[-2] if job.rolls_back and len(steps) > 1 else None
            found = mf.checkpoint.load(folder, state_at(0, shards), groups, step=chosen)
            at = found.step
            self._say("loaded", at, int(is_right(found, shards)))
        self._say("ready", at)
        draw = random.Random(job.seed)  # the same on all ranks
        while True:
            at += 1
            self._save(at, shards, groups, draw)
            time.sleep(draw.random() * 2e-3)

    def _save(self, step: int, shards: Any, groups: mf.Groups, draw: random.Random) -> None:
        state: Any = state_at(step, shards)
        how: dict[str, Any] = {"step": step, "extra": {"step": step}, "keep": KEPT}
        how |= {"overwrite": "newer"}
        apart = draw.random() < 0.5
        self._say("begins", step)
        self._mark(True)
        if apart:
            pending = mf.checkpoint.start_save(self.job.folder, state, groups, **how)
            for x in tree.flatten(state)[0]:
                if isinstance(x, Tensor):
                    x.zero_()  # the copy is what counts
            while not (pending.done or pending.due()):
                time.sleep(1e-3)
            pending.wait()
        else:
            mf.checkpoint.save(self.job.folder, state, groups, **how)
        self._mark(False)
        self._say("committed", step)

    def _mark(self, saving: bool) -> None:
        SAVING.pack_into(self.board, self.rank * SAVING.size, saving)

    def _say(self, *words: Any) -> None:
        with suppress(BrokenPipeError):
            os.write(self.pipe, (" ".join(map(str, words)) + "\n").encode())


# The jobs.

PROBLEMS = ("lost", "unloadable", "wrong", "stuck", "hang", "untyped", "left over")
# Where a process that is killed loses nothing that the kernel has, a disk would only cost time.
MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None
START_S, END_S = 30.0, 12.0  # within which a job is at its first save, and survivors end
SAVE_S = 0.05  # about one save; kills fall within so long after the beginning of one
SURVIVE_SHARE = 0.08  # of the trials, in which survivors are left alone


@dataclass(frozen=True)
class KillsConfig:
    """What `stress faults --kills` does.

    Args:
      kills: how many jobs are killed.
      seed: chooses when, and which ranks.
      lanes: how many jobs run at the same time.
    """

    kills: int = 5_000
    seed: int = 0
    lanes: int = 2


class Chain:
    """Jobs in one folder, one after the other.

    Args:
      seed: of all that is drawn.
      count: number of jobs that are killed.
    """

    def __init__(self, seed: int, count: int) -> None:
        self.draw, self.count = random.Random(seed), count
        self.folder = Path(tempfile.mkdtemp(prefix="mics_kills_", dir=MEMORY))
        self.low, self.high = 0, 0  # bounds of the newest step
        self.found, self.texts = Counter[str](), list[str]()
        self.pipes: dict[int, int] = {}
        self.pids: dict[int, int] = {}
        self.words: dict[int, list[list[str]]] = {}  # what the ranks of one job have said

    def run(self) -> tuple[Counter[str], list[str]]:
        """Kill all jobs but the last one."""
        try:
            for number in range(self.count + 1):
                self._trial(number)
                if self.found["stuck"] or self.found["hang"]:
                    break
            return self.found, self.texts
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _trial(self, number: int) -> None:
        draw = self.draw
        ranks = draw.choice([4, 4, 4, 4, 4, 4, 2, 2, 1])
        sizes = [p for p in (1, 2, 4) if ranks % p == 0]
        seed = draw.randrange(2**30)
        job = Job(seed, ranks, draw.choice(sizes), self.folder, draw.random() < 0.15)
        port, board = free_port(seed), mmap.mmap(-1, ranks * SAVING.size)
        host = fork(lambda: host_store(port))
        try:
            self._start(job, port, board)
            if not self._reach(ranks):
                self._note("stuck", f"trial {number}: {job}: {self.words}")
            elif number < self.count:
                self._kill(job, board)
            else:
                self._hear(0.5)  # the last one only goes on for a while
        finally:
            end([*self.pids.values(), host])
            self._hear(0.0)
            for pipe in self.pipes.values():
                os.close(pipe)
        self._judge(number, job)

    def _start(self, job: Job, port: int, board: mmap.mmap) -> None:
        self.pids, self.pipes = {}, {}
        self.words = {rank: [] for rank in range(job.ranks)}
        for rank in range(job.ranks):
            self.pipes[rank], theirs = os.pipe()
            os.set_blocking(self.pipes[rank], False)
            self.pids[rank] = fork(Rank(job, rank, port, board, theirs).serve)
            os.close(theirs)

    def _reach(self, ranks: int) -> bool:
        """Wait until a job saves; False if it does not come to that."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            self._hear(0.0)
            if len(self._numbers("begins")) >= ranks:
                return True
            if self._ended():
                return False
            time.sleep(2e-3)
        return False

    def _kill(self, job: Job, board: mmap.mmap) -> None:
        """Kill some ranks at some moment, and after a while the others."""
        draw = self.draw
        victims = draw.sample(range(job.ranks), draw.randint(1, job.ranks))
        time.sleep(draw.random() * SAVE_S * draw.choice([1, 4]))
        saving = [SAVING.unpack_from(board, rank * SAVING.size)[0] for rank in victims]
        for rank in victims:
            os.kill(self.pids[rank], signal.SIGKILL)
        self.found["kills"] += 1
        self.found["inside"] += any(saving)
        self.found["victims"] += len(victims)
        if draw.random() > SURVIVE_SHARE:
            self._hear(draw.random() * SAVE_S)
            return
        living = set(range(job.ranks)) - set(victims)
        deadline = time.monotonic() + END_S
        while living - self._ended() and time.monotonic() < deadline:
            self._hear(0.01)
        self.found["survivors"] += len(living)
        for rank in living:
            words = self.words[rank]
            if rank not in self._ended():
                self._note("hang", f"{job}: rank {rank} of {living}, killed {victims}: {words}")
            elif words[-1][1] == "0":
                self._note("untyped", f"{job}: rank {rank}: {words[-1]}")

    def _numbers(self, word: str) -> list[int]:
        """The steps of which ranks said something."""
        return [int(x[1]) for each in self.words.values() for x in each if x[0] == word]

    def _ended(self) -> set[int]:
        return {rank for rank, x in self.words.items() if x and x[-1][0] == "ended"}

    def _hear(self, seconds: float) -> None:
        """Read what ranks say, for so long."""
        deadline = time.monotonic() + seconds
        while True:
            for rank, pipe in self.pipes.items():
                lines = _read(pipe).decode(errors="replace").splitlines()
                self.words[rank] += [line.split(" ", 2) for line in lines]
            if (left := deadline - time.monotonic()) <= 0:
                return
            time.sleep(min(left, 5e-3))

    def _judge(self, number: int, job: Job) -> None:
        """Compare what a job found and left with what it and those before it were told."""
        text = f"trial {number}: {job}, at least {self.low}, at most {self.high}: {self.words}"
        least = 0 if job.rolls_back else self.low
        for loaded in (x for each in self.words.values() for x in each if x[0] == "loaded"):
            if not least <= int(loaded[1]) <= self.high:
                self._note("lost", text)
            if loaded[2] != "1":
                self._note("wrong", text)
        begun, told = self._numbers("begins"), self._numbers("committed")
        if told:  # newer steps of a run that was rolled back are gone
            self.low, self.high = max(told), max(begun)
        elif begun:
            self.low, self.high = min(self.low, *begun), max(self.high, *begun)
        newest, left = mf.checkpoint.latest(self.folder), sorted(os.listdir(self.folder))
        if not self.low <= (newest or 0) <= self.high:
            self._note("lost", f"{newest} is the newest; {text}")
        try:
            if newest is not None:
                mf.checkpoint.verify(self.folder)
        except FileError as error:
            self._note("unloadable", f"{error}; {text}")
        # What the last save was to remove, what it had begun, what the one before it had left.
        if len(left) > 2 * KEPT + 4:
            self._note("left over", f"{left}; {text}")

    def _note(self, problem: str, text: str) -> None:
        self.found[problem] += 1
        self.texts.append(f"{problem}: {text}")


def _read(pipe: int) -> bytes:
    found = b""
    with suppress(BlockingIOError):
        while part := os.read(pipe, 65536):
            found += part
    return found


def measure_kills(config: KillsConfig) -> dict[str, Any]:
    """Kill all jobs, in several folders at the same time."""
    importlib.import_module("torch._dynamo")  # which each rank would import
    importlib.import_module("safetensors")
    torch.set_num_threads(1)
    started, total, texts = time.monotonic(), Counter[str](), list[str]()
    shares = [config.kills // config.lanes] * config.lanes
    shares[0] += config.kills - sum(shares)
    with mp.get_context("fork").Pool(config.lanes) as lanes:
        seeds = [1_000 * config.seed + lane for lane in range(config.lanes)]
        for found, said in lanes.imap_unordered(_chain, zip(seeds, shares, strict=True)):
            total += found
            texts += said
    seconds = time.monotonic() - started
    return {"found": dict(total), "texts": texts, "seconds": seconds, "missed": missed(total)}


def _chain(given: tuple[int, int]) -> tuple[Counter[str], list[str]]:
    return Chain(*given).run()


def missed(found: Counter[str]) -> list[str]:
    """The goals that were missed, by name."""
    wrong = [name for name in PROBLEMS if found[name]]
    return [*wrong, *(["inside"] if 2 * found["inside"] < found["kills"] else [])]


def render_kills(figures: dict[str, Any], config: KillsConfig) -> str:
    """The figures as a table, and what went wrong first."""
    found = Counter(figures["found"])
    names = ("kills", "inside", "victims", "survivors", *PROBLEMS)
    title = f"{found['kills']} jobs of 1 to 4 ranks killed, seed {config.seed}:"
    title += f" {figures['seconds']:.0f} s"
    rows = [(name, str(found[name] or "-")) for name in names]
    lines = [table(title, [("", "number"), *rows]), "", "inside: of those killed inside a save."]
    goals = f"goals missed: {', '.join(figures['missed'])}" if figures["missed"] else "goals met"
    return "\n".join([*lines, __doc__ or "", *figures["texts"][:5], goals])

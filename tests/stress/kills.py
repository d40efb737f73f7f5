"""`stress faults --kills`: jobs that are killed while they save, and what the next job finds.

Each job goes on in the folder that the one before it left: it loads the newest step, compares every
bit, and saves one step after the other, until one to all of its ranks are killed at some moment.
What may not happen: a step that any rank was told is committed and that is lost, a newest step that
does not load, a wrong bit, a job that cannot go on, a rank that hangs.

lost: a step that a rank was told is committed, and that the next job did not find. unloadable: a
newest step that does not load or verify. wrong: other bits than those of its step. stuck: a job
that could not go on. hang: a survivor that neither ends nor raises. untyped: a survivor with an
error of another library. left over: more in the folder than the steps that are kept.
"""

import importlib
import mmap
import multiprocessing as mp
import os
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import mics_fn as mf
from mics_fn.errors import FileError
from mics_fn.lab.report import table
from tests.stress.fault_trials import end, fork, free_port, host_store
from tests.stress.kill_ranks import KEPT, SAVING, Job, Rank

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

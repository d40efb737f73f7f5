"""`bench checkpoint`: saving and loading against plain writing and reading of the same bytes."""

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import mics_fn as mf
from mics_fn.checkpoint import load, save, start_save
from mics_fn.errors import human_bytes
from mics_fn.lab.bench.turns import between, nbytes, say, spread, start
from mics_fn.lab.report import add_count, table
from mics_fn.offload import read_all, write_all


@dataclass(frozen=True)
class SavesConfig:
    """Options of `bench checkpoint`.

    Args:
        mib: size of a state, in MiB.
        rounds: how often each of the peers takes its turn.
        leaves: of the parameters.
        folder: where to write; default a temporary folder.
    """

    mib: int = 384
    rounds: int = 5
    leaves: int = 24
    folder: str = field(default_factory=tempfile.gettempdir)


def add_save_flags(parser: argparse.ArgumentParser, mib: int = 384, rounds: int = 5) -> None:
    """Add the flags of `bench checkpoint`, and of others that write so much to a folder."""
    add_count(parser, "mib", mib, "size of the state, in MiB")
    add_count(parser, "rounds", rounds, "turns of each peer")
    default = tempfile.gettempdir()
    parser.add_argument("--folder", default=default, help=f"where to write (default {default})")


def measure_saves(config: SavesConfig) -> dict[str, Any]:
    """Compare saves and loads with plain writing and reading, in one process.

    Returns:
        Ratios by name, each the median over rounds with the least and the most.
    """
    start("cpu")
    laps: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(dir=config.folder) as folder, mf.make_groups(1) as groups:
        bench = _SaveBench(config, Path(folder), groups)
        for number in range(config.rounds + 1):
            say(f"round {number} of {config.rounds} ...")
            for name, ratio in bench.round(number).items():
                if number:  # the first one warms memory and files up
                    laps.setdefault(name, []).append(ratio)
    ratios = {name: spread(found) for name, found in laps.items()}
    return {"nbytes": bench.nbytes, "ratios": ratios}


class _SaveBench:
    """State, its bytes as one buffer, and the turns of a round."""

    def __init__(self, config: SavesConfig, folder: Path, groups: mf.Groups) -> None:
        rows = config.mib * 2**20 // 3 // 4 // config.leaves // 1024
        params = {f"h.{i}.w": torch.randn(rows, 1024) for i in range(config.leaves)}
        self.state = mf.init_state(mf.shard(params, groups), mf.optim.adamw(1e-3))
        self.folder, self.groups = folder, groups
        self.nbytes = nbytes(self.state)
        self.plain = torch.randint(0, 255, (self.nbytes,), dtype=torch.uint8)
        self.copy = torch.zeros_like(self.plain)
        self.matrix = torch.randn(512, 512)

    def round(self, number: int) -> dict[str, float]:
        """Return the ratio of each pair, whose two turns follow one another."""
        writes, saves = seconds_of(self.write), seconds_of(lambda: self.save(2 * number))
        reads, loads = seconds_of(self.read), seconds_of(self.load)
        self.forget()
        cold_reads = seconds_of(self.read)
        self.forget()
        cold_loads = seconds_of(self.load)
        copies, alone = seconds_of(lambda: self.copy.copy_(self.plain)), self.steps(lambda: False)
        begun = time.perf_counter()
        args = self.folder / "steps", self.state, self.groups
        pending = start_save(*args, step=2 * number + 1, keep=2)
        blocked = time.perf_counter() - begun
        during = self.steps(lambda: not pending.done)
        pending.wait()
        return {
            "save: speed over plain writing": writes / saves,
            "load, from memory: speed over plain reading": reads / loads,
            "load, from disk: speed over plain reading": cold_reads / cold_loads,
            "start_save: time over a copy in memory": blocked / copies,
            "a step while it writes: time over a step": during / alone,
        }

    def write(self) -> None:
        (self.folder / "plain").unlink(missing_ok=True)
        number = os.open(self.folder / "plain", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        write_all(number, self.plain, 0)
        os.fsync(number)
        os.close(number)

    def read(self) -> None:
        number = os.open(self.folder / "plain", os.O_RDONLY)
        for at in range(0, self.nbytes, 4 * 2**20):
            read_all(number, self.copy[at : at + 4 * 2**20], at)
        os.close(number)

    def save(self, step: int) -> None:
        save(self.folder / "steps", self.state, self.groups, step=step, keep=2)

    def load(self) -> None:
        like = self.folder / "steps", self.state, self.groups
        self.state = load(*like, donate=True).state

    def forget(self) -> None:
        """Drop files from the cache of the system, so that reads are from the disk."""
        for path in self.folder.rglob("*"):
            if path.is_file():
                number = os.open(path, os.O_RDONLY)
                os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(number)

    def steps(self, more: Callable[[], bool]) -> float:
        """Time a step of some work, as the mean over at least ten."""
        begun, count = time.perf_counter(), 0
        while count < 10 or more():
            self.matrix = torch.tanh(self.matrix @ self.matrix)
            count += 1
        return (time.perf_counter() - begun) / count


def seconds_of(work: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def render_saves(figures: dict[str, Any], config: SavesConfig) -> str:
    """Render the table."""
    rows = [(name, between(found, ".2f")) for name, found in figures["ratios"].items()]
    title = f"a state of {human_bytes(figures['nbytes'])}: ratio of two turns that follow another"
    return table(title, rows)

"""`bench checkpoint` and `bench disk`: files against plain writing and reading of the same bytes.

Saving and loading a state; and a step of AdamW on optimizer states that lie in a file.
"""

import argparse
import os
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

import mics_fn as mf
from mics_fn import offload
from mics_fn.checkpoint import load, save, start_save
from mics_fn.errors import human_bytes
from mics_fn.lab.bench.turns import between, nbytes, ratio, say, spread, start
from mics_fn.lab.report import add_count, table
from mics_fn.offload import scratch

_ADAMW: Any = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}
LEAVES = 24  # of the parameters that are saved


@dataclass(frozen=True)
class DiskConfig:
    """Options of `bench checkpoint` and `bench disk`.

    Args:
        mib: size of the states, in MiB.
        rounds: how often each of the peers takes its turn.
        folder: where to write.
        host_mib: host memory through which states in a file travel, in MiB, each in turn.
        threads: that read and write these, each in turn.
    """

    mib: int
    rounds: int
    folder: str
    host_mib: Sequence[int] = (64,)
    threads: Sequence[int] = (3,)


def add_file_flags(parser: argparse.ArgumentParser, mib: int, rounds: int) -> None:
    """Add the flags of a bench that writes so much to a folder."""
    add_count(parser, "mib", mib, "size of the state, in MiB")
    add_count(parser, "rounds", rounds, "turns of each peer")
    default = tempfile.gettempdir()
    parser.add_argument("--folder", default=default, help=f"where to write (default {default})")


# Saving and loading.


def measure_saves(config: DiskConfig) -> dict[str, Any]:
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
            for name, times in bench.round(number).items():
                if number:  # the first one warms memory and files up
                    laps.setdefault(name, []).append(times)
    ratios = {name: spread(found) for name, found in laps.items()}
    return {"nbytes": bench.nbytes, "ratios": ratios}


class _SaveBench:
    """State, its bytes as one buffer, and the turns of a round."""

    def __init__(self, config: DiskConfig, folder: Path, groups: mf.Groups) -> None:
        rows = config.mib * 2**20 // 3 // 4 // LEAVES // 1024
        params = {f"h.{i}.w": torch.randn(rows, 1024) for i in range(LEAVES)}
        self.state = mf.init_state(mf.shard(params, groups), mf.optim.adamw(1e-3))
        self.folder, self.groups = folder, groups
        self.nbytes = nbytes(self.state)
        self.plain = torch.randint(0, 255, (self.nbytes,), dtype=torch.uint8)
        self.copy = torch.zeros_like(self.plain)
        parts = [part.clone() for part in self.plain.chunk(LEAVES)]
        torch.save(parts, folder / "torch.pt")
        self.matrix = torch.randn(512, 512)

    def round(self, number: int) -> dict[str, float]:
        """Return the ratio of each pair, whose two turns follow one another."""
        writes, saves = seconds_of(self.write), seconds_of(lambda: self.save(2 * number))
        reads, loads = seconds_of(self.read), seconds_of(self.load)
        torch_loads = seconds_of(lambda: torch.load(self.folder / "torch.pt", weights_only=True))
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
            "load, from memory: time over torch.load": loads / torch_loads,
            "load, from disk: speed over plain reading": cold_reads / cold_loads,
            "start_save: time over a copy in memory": blocked / copies,
            "a step while it writes: time over a step": during / alone,
        }

    def write(self) -> None:
        (self.folder / "plain").unlink(missing_ok=True)
        number = os.open(self.folder / "plain", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        scratch.write_all(number, self.plain, 0)
        os.fsync(number)
        os.close(number)

    def read(self) -> None:
        number = os.open(self.folder / "plain", os.O_RDONLY)
        for at in range(0, self.nbytes, 4 * 2**20):
            scratch.read_all(number, self.copy[at : at + 4 * 2**20], at)
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


def render_saves(figures: dict[str, Any], config: DiskConfig) -> str:
    """Render the table."""
    rows = [(name, between(found, ".2f")) for name, found in figures["ratios"].items()]
    title = f"a state of {human_bytes(figures['nbytes'])}: ratio of two turns that follow another"
    return table(title, rows)


# States in a file.


def add_disk_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `bench disk`."""
    add_file_flags(parser, 512, 7)
    add_count(parser, "host-mib", [*DiskConfig.host_mib], "host memory, in MiB", nargs="+")
    add_count(parser, "threads", [*DiskConfig.threads], "threads of a stream", nargs="+")


def measure_disk(config: DiskConfig) -> dict[str, Any]:
    """Compare in one process, each round on a new file and new memory.

    Parts of both differ in speed by half.

    Returns:
        Seconds of each peer, and its speed over plain reading and writing and over the bound, the
        slower of that and of the step in memory; each the median over rounds with the least and
        the most; and whether all steps were bit-equal to memory.
    """
    laps: dict[str, list[float]] = {}
    equal = True
    for number in range(config.rounds):
        say(f"round {number + 1} of {config.rounds} ...")
        with tempfile.TemporaryDirectory(dir=config.folder) as folder:
            bench = _DiskBench(config, Path(folder))
            for turn in bench.peers.values():
                seconds_of(turn)  # warms memory and file up
            for name, turn in bench.peers.items():
                laps.setdefault(name, []).append(seconds_of(turn))
            equal = equal and bench.equal()
    laps["in memory"] = [seconds / bench.streams for seconds in laps["in memory"]]
    bound = [max(pair) for pair in zip(laps["plain"], laps["in memory"], strict=True)]
    return {
        "nbytes": bench.nbytes,
        "direct": bench.scratch.direct,
        "equal": equal,
        "speed": spread([2 * bench.nbytes / seconds for seconds in laps["plain"]]),
        "seconds": {name: spread(found) for name, found in laps.items()},
        "ratios": {name: ratio(laps["plain"], found) for name, found in laps.items()},
        "bounds": {name: ratio(bound, found) for name, found in laps.items()},
    }


class _DiskBench:
    """States in a scratch file, and the turns of all that reads and writes it."""

    def __init__(self, config: DiskConfig, folder: Path) -> None:
        numel = config.mib * 2**20 // 8
        self.nbytes = 8 * numel
        self.grad = torch.randn(numel, generator=torch.Generator().manual_seed(0))
        self.params, self.moments = ([torch.zeros(numel) for _ in range(2)] for _ in range(2))
        self.steps = [0, 0]  # as of `params`: of those with moments on disk, and in memory
        self.scratch = offload.Scratch(folder)
        self.in_files = [offload.store(x, self.scratch) for x in self.moments]
        # Plain reading and writing is that of the same bytes, in the same places of the disk.
        part = scratch.block_bytes(config.host_mib[0] * 2**20)
        self.memory = [scratch.aligned(part) for _ in range(2)]
        self.places = [
            (x.extent.offset + at, min(part, x.extent.nbytes - at))
            for x in self.in_files
            for at in range(0, x.extent.nbytes, part)
        ]
        streams: dict[str, Callable[[], Any]] = {
            f"a step through {mib} MiB, {threads} threads": partial(self.step, mib * 2**20, threads)
            for mib in config.host_mib
            for threads in config.threads
        }
        self.streams = len(streams)
        self.peers = {"plain": self.plain, "overlapped": self.overlapped}
        self.peers |= {"in memory": self.in_memory, **streams}

    def move(self, number: int, how: Callable[[int, Tensor, int], None]) -> None:
        """Read or write one part."""
        at, nbytes = self.places[number]
        memory = self.memory[number % 2][:nbytes]
        how(self.scratch.file_for(memory, at), memory, at)

    def plain(self) -> None:
        """Read part after part and write it back."""
        for number in range(len(self.places)):
            self.move(number, scratch.read_all)
            self.move(number, scratch.write_all)

    def overlapped(self) -> None:
        """Do the same, but read the next part while one is written."""
        self.move(0, scratch.read_all)
        for number in range(len(self.places)):
            behind = threading.Thread(target=self.move, args=[number, scratch.write_all])
            behind.start()
            if number + 1 < len(self.places):
                self.move(number + 1, scratch.read_all)
            behind.join()

    def step(self, host_bytes: int, threads: int) -> None:
        """Take a step of AdamW on states in the file."""
        self.steps[0] += 1
        m, v = self.in_files
        blocks = [
            offload.Block((m[a:b], v[a:b]), (m[a:b], v[a:b]), (a, b))
            for a, b in offload.cuts(self.grad.numel(), [4, 4], host_bytes)
        ]
        for block, moments in offload.stream(blocks, host_bytes, threads=threads):
            part = slice(*block.key)
            _adamw(self.params[0][part], self.grad[part], moments, self.steps[0])

    def in_memory(self) -> None:
        """Take as many steps on states in memory as all streams take."""
        for _ in range(self.streams):
            self.steps[1] += 1
            _adamw(self.params[1], self.grad, self.moments, self.steps[1])

    def equal(self) -> bool:
        """Return whether both states went through the same steps to the same bits."""
        pairs = [(self.params[0], self.params[1]), *zip(self.in_files, self.moments, strict=True)]
        return all(torch.equal(a + 0, b) for a, b in pairs)


def _adamw(param: Tensor, grad: Tensor, moments: list[Tensor], step: int) -> None:
    """Take one fused step with this number."""
    # The op counts up by itself.
    lists = [param], [grad], moments[:1], moments[1:], [], [torch.tensor(step - 1.0)]
    adamw(*lists, fused=True, amsgrad=False, maximize=False, **_ADAMW)


def render_disk(figures: dict[str, Any], config: DiskConfig) -> str:
    """Render the table."""
    rows = [("", "seconds", "speed over plain", "over the bound")]
    for name, seconds in figures["seconds"].items():
        over, bound = (between(figures[key][name], ".2f") for key in ("ratios", "bounds"))
        rows.append((name, between(seconds, ".2f"), over, bound))
    how = "direct I/O," if figures["direct"] else "the cache of the system,"
    title = (
        f"{human_bytes(figures['nbytes'])} of moments read and written, by {how} "
        f"plain at {human_bytes(figures['speed']['median'])}/s; {config.rounds} rounds in turns"
    )
    equal = "bit-equal to" if figures["equal"] else "NOT THE SAME AS"
    return f"{table(title, rows)}\n\nparameters and moments are {equal} those in memory"

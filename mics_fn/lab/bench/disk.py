"""`bench disk`: a step on optimizer states in a file, against plain reading and writing."""

import argparse
import os
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from mics_fn.errors import human_bytes
from mics_fn.lab.bench.turns import between, ratio, say, spread
from mics_fn.lab.report import add_count, table
from mics_fn.offload import (
    Block,
    Scratch,
    aligned,
    block_bytes,
    cuts,
    read_all,
    renewed,
    store,
    stream,
    write_all,
)

_DIRECT = getattr(os, "O_DIRECT", 0)
_ADAMW: dict[str, Any] = {
    **{"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01},
    **{"fused": True, "amsgrad": False, "maximize": False},
}


@dataclass(frozen=True)
class DiskConfig:
    """All that decides what is measured.

    Args:
        mib: size of the states, in MiB: two moments in float32.
        host_mib: host memory through which they travel, in MiB, each in turn.
        threads: that read and write, each in turn.
        rounds: how often each of the peers takes its turn, each time on a new file.
        folder: where to write; default a temporary folder.
        cached: I/O through the cache of the system, with all that is written forced to the disk.
    """

    mib: int = 512
    host_mib: tuple[int, ...] = (64,)
    threads: tuple[int, ...] = (3,)
    rounds: int = 7
    folder: str = field(default_factory=tempfile.gettempdir)
    cached: bool = False


def add_disk_flags(parser: argparse.ArgumentParser) -> None:
    """How much is moved, through how much memory, and where."""
    add_count(parser, "mib", DiskConfig.mib, "size of the states, in MiB")
    add_count(parser, "host-mib", [*DiskConfig.host_mib], "host memory, in MiB", nargs="+")
    add_count(parser, "threads", [*DiskConfig.threads], "threads of a stream", nargs="+")
    add_count(parser, "rounds", DiskConfig.rounds, "turns of each peer")
    default = tempfile.gettempdir()
    parser.add_argument("--folder", default=default, help=f"where to write (default {default})")
    text = "go through the cache of the system, and sync at the end of each turn"
    parser.add_argument("--cached", action="store_true", help=text)


def disk_config_of(args: argparse.Namespace, ranks: int) -> DiskConfig:
    """What the flags ask for."""
    budgets, threads = tuple(args.host_mib), tuple(args.threads)
    return DiskConfig(args.mib, budgets, threads, args.rounds, args.folder, args.cached)


def measure_disk(config: DiskConfig) -> dict[str, Any]:
    """Compare in one process.

    Returns:
        Seconds of each peer, and the ratios of speeds, each the median over rounds with the least
        and the most; whether direct I/O was used; the bytes per second of plain reading and
        writing; and whether the steps were bit-equal to memory.
    """
    laps: dict[str, list[float]] = {}
    facts: dict[str, Any] = {}
    for number in range(config.rounds):
        say(f"round {number + 1} of {config.rounds} ...")
        _one_round(config, laps, facts)
    nbytes = facts["nbytes"]
    # With states in files a step cannot take less time than in memory, however fast the disk is.
    slower = [max(pair) for pair in zip(laps["plain"], laps["in memory"], strict=True)]
    against = {"plain": laps["plain"], "overlapped": laps["overlapped"], "slower": slower}
    ratios = {
        name: {peer: ratio(theirs, found)._asdict() for peer, theirs in against.items()}
        for name, found in laps.items()
    }
    seconds = {name: spread(found)._asdict() for name, found in laps.items()}
    speed = spread([2 * nbytes / lap for lap in laps["plain"]])._asdict()
    return {**facts, "speed": speed, "seconds": seconds, "ratios": ratios}


def _one_round(config: DiskConfig, laps: dict[str, list[float]], facts: dict[str, Any]) -> None:
    """A turn of each peer on a new file and new memory: parts of both differ in speed by half."""
    with tempfile.TemporaryDirectory(dir=config.folder) as folder:
        bench = _DiskBench(config, Path(folder))
        peers = bench.peers()
        for turn in peers.values():
            turn()  # warms memory and file up
        for name, turn in peers.items():
            laps.setdefault(name, []).append(turn())
        facts["equal"] = facts.get("equal", True) and bench.equal()
        facts["nbytes"], facts["direct"] = bench.nbytes, bench.scratch.direct
        bench.close()


class _DiskBench:
    """States in a scratch file, and the turns of all that reads and writes it."""

    def __init__(self, config: DiskConfig, folder: Path) -> None:
        self.config = config
        self.numel = config.mib * 2**20 // 8
        self.nbytes = 8 * self.numel
        gen = torch.Generator().manual_seed(0)
        self.grad = torch.randn(self.numel, generator=gen)
        self.params = [torch.zeros(self.numel) for _ in range(2)]  # on disk, and in memory
        self.moments = [torch.zeros(self.numel) for _ in range(2)]
        self.scratch = Scratch(folder, "states", direct=None if not config.cached else False)
        self.stored = [store(x, self.scratch) for x in self.moments]
        self.steps = 0
        # Plain reading and writing is that of the same bytes, in the same places of the disk.
        self.file = os.open(self.scratch.path, os.O_RDWR | _DIRECT * self.scratch.direct)
        self.extents = [x.extent for x in self.stored]
        part = block_bytes(config.host_mib[0] * 2**20)
        self.memory = [aligned(part) for _ in range(2)]
        self.places = [
            (extent.offset + at, min(part, extent.nbytes - at))
            for extent in self.extents
            for at in range(0, extent.nbytes, part)
        ]

    def peers(self) -> dict[str, Callable[[], float]]:
        """What takes turns, by name."""
        found: dict[str, Callable[[], float]] = {"plain": self.plain, "overlapped": self.overlapped}
        found["in memory"] = self.in_memory
        for mib in self.config.host_mib:
            for threads in self.config.threads:
                name = f"a step through {mib} MiB, {threads} threads"
                found[name] = lambda mib=mib, threads=threads: self.streamed(mib, threads)
        return found

    def timed(self, work: Callable[[], Any]) -> float:
        begun = time.perf_counter()
        work()
        if not self.scratch.direct:
            os.fdatasync(self.file)
        seconds = time.perf_counter() - begun
        if not self.scratch.direct:
            os.posix_fadvise(self.file, 0, 0, os.POSIX_FADV_DONTNEED)
        return seconds

    def read(self, number: int) -> None:
        at, nbytes = self.places[number]
        read_all(self.file, self.memory[number % 2][:nbytes], at)

    def write(self, number: int) -> None:
        at, nbytes = self.places[number]
        write_all(self.file, self.memory[number % 2][:nbytes], at)

    def plain(self) -> float:
        """Part after part is read and written back."""

        def work() -> None:
            for number in range(len(self.places)):
                self.read(number)
                self.write(number)

        return self.timed(work)

    def overlapped(self) -> float:
        """The same, but the next part is read while one is written."""

        def work() -> None:
            self.read(0)
            for number in range(len(self.places)):
                behind = threading.Thread(target=self.write, args=[number])
                behind.start()
                if number + 1 < len(self.places):
                    self.read(number + 1)
                behind.join()

        return self.timed(work)

    def streamed(self, mib: int, threads: int) -> float:
        """A step of AdamW on states in the file."""
        return self.timed(lambda: self.step(mib * 2**20, threads))

    def step(self, host_bytes: int, threads: int) -> None:
        self.steps += 1
        m, v = self.stored = renewed(self.stored)
        blocks = [
            Block((m[a:b], v[a:b]), (m[a:b], v[a:b]), (a, b))
            for a, b in cuts(self.numel, [4, 4], host_bytes)
        ]
        for block, moments in stream(blocks, host_bytes, threads=threads):
            part = slice(*block.key)
            _adamw(self.params[0][part], self.grad[part], moments, self.steps)

    def in_memory(self) -> float:
        """The same step on states in memory."""
        begun, peers = time.perf_counter(), len(self.config.host_mib) * len(self.config.threads)
        for _ in range(peers):
            self.in_memory_steps = getattr(self, "in_memory_steps", 0) + 1
            _adamw(self.params[1], self.grad, self.moments, self.in_memory_steps)
        return (time.perf_counter() - begun) / peers

    def equal(self) -> bool:
        """Whether both states went through the same steps to the same bits."""
        pairs = [(self.params[0], self.params[1]), *zip(self.stored, self.moments, strict=True)]
        return all(torch.equal(a + 0, b) for a, b in pairs)

    def close(self) -> None:
        os.close(self.file)
        self.scratch.close()


def _adamw(param: Tensor, grad: Tensor, moments: list[Tensor], step: int) -> None:
    """One fused step, which needs the number of the step before."""
    m, v = moments
    adamw([param], [grad], [m], [v], [], [torch.tensor(float(step))], **_ADAMW)


def render_disk(figures: dict[str, Any], config: DiskConfig) -> str:
    """The table; its last column compares with plain or in memory, whichever is slower."""
    rows = [("", "seconds", "speed over plain", "over overlapped", "over plain or in memory")]
    for name, seconds in figures["seconds"].items():
        plain, other, slower = (between(x, ".2f") for x in figures["ratios"][name].values())
        rows.append((name, between(seconds, ".2f"), plain, other, slower))
    how = "direct I/O," if figures["direct"] else "the cache of the system, synced,"
    title = (
        f"{human_bytes(figures['nbytes'])} of moments read and written, by {how} "
        f"plain at {human_bytes(figures['speed']['median'])}/s; {config.rounds} rounds in turns"
    )
    equal = "bit-equal to" if figures["equal"] else "NOT THE SAME AS"
    return f"{table(title, rows)}\n\nparameters and moments are {equal} those in memory"

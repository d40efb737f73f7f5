"""`bench disk`: a step on optimizer states in a file, against plain reading and writing."""

import argparse
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from mics_fn import offload
from mics_fn.errors import human_bytes
from mics_fn.lab.bench.saves import add_save_flags, seconds_of
from mics_fn.lab.bench.turns import between, ratio, say, spread
from mics_fn.lab.report import add_count, table

_ADAMW: Any = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}


@dataclass(frozen=True)
class DiskConfig:
    """Options of `bench disk`.

    Args:
        mib: size of the states, in MiB: two moments in float32.
        host_mib: host memory through which they travel, in MiB, each in turn.
        threads: that read and write, each in turn.
        rounds: how often each of the peers takes its turn, each time on a new file.
        folder: where to write; default a temporary folder.
    """

    mib: int = 512
    host_mib: Sequence[int] = (64,)
    threads: Sequence[int] = (3,)
    rounds: int = 7
    folder: str = field(default_factory=tempfile.gettempdir)


def add_disk_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `bench disk`."""
    add_save_flags(parser, DiskConfig.mib, DiskConfig.rounds)
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
        part = offload.block_bytes(config.host_mib[0] * 2**20)
        self.memory = [offload.aligned(part) for _ in range(2)]
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
            self.move(number, offload.read_all)
            self.move(number, offload.write_all)

    def overlapped(self) -> None:
        """Do the same, but read the next part while one is written."""
        self.move(0, offload.read_all)
        for number in range(len(self.places)):
            behind = threading.Thread(target=self.move, args=[number, offload.write_all])
            behind.start()
            if number + 1 < len(self.places):
                self.move(number + 1, offload.read_all)
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

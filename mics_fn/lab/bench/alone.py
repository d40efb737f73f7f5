"""Benches of one process: `bench opt` and `bench checkpoint`; in a job the other ranks wait.

`bench opt`: the optimizer's step on flat shards against torch's own on unsharded parameters. And
what optimizers cost a new process, with what they import; and what a step of the verbs costs for
each leaf, in trees of few and of many small leaves. Python's search for garbage is a part of that,
as it begins the more often the more objects are alive at once: its whole heap is searched, with all
of torch in it, unless `gc.freeze` took that out.

`bench checkpoint`: saving and loading, against plain writing and reading of the same bytes.
"""

import gc
import itertools
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import mics_fn as mf
from mics_fn import checkpoint
from mics_fn.errors import human_bytes
from mics_fn.lab.bench import turns
from mics_fn.lab.bench.turns import BenchPeer, BenchTurns
from mics_fn.lab.models import GPT, GPTConfig
from mics_fn.lab.report import table
from mics_fn.offload import scratch

SMALL_SHAPES = ((64,), (16, 64), (256,), (8, 32))


@dataclass(frozen=True)
class OptConfig:
    """Options of `bench opt`.

    Args:
        small_leaves: leaves of the tree that has many small ones. Steps of the verbs are taken on
            trees with half as many, and with two and a half times as many.
        turns: how long.
        device: "auto", "cpu" or "cuda".
        model: sizes of the GPT whose parameters are the other tree.
    """

    small_leaves: int
    turns: BenchTurns = field(default_factory=BenchTurns)
    device: str = "auto"
    model: GPTConfig = field(default_factory=GPTConfig)


def measure_opt(config: OptConfig) -> dict[str, Any]:
    """Compare both optimizers on two trees.

    Returns:
        On rank 0 the figures of each tree; {} on the others.
    """
    making, device = _making(), turns.start(config.device)
    if not turns.is_first():
        return {}
    sizes, found = (config.small_leaves // 2, config.small_leaves * 5 // 2), []
    with mf.make_groups(1, ranks=[0], device=device) as groups:
        for name, shapes in trees(config).items():
            turns.say(f"{name}: opt_step and torch.optim.AdamW take turns ...")
            found.append(_compare(name, shapes, config, groups))
        turns.say("steps of the verbs ...")
        peers = [_verbs(leaves, groups) for leaves in sizes]
        laps = turns.take_turns(peers, config.turns, device=device)
        gc.freeze()
        frozen = turns.take_turns(peers, config.turns, device=device)
        gc.unfreeze()
    steps: list[dict[str, Any]] = [{"leaves": leaves} for leaves in sizes]
    for key, every in (("us_a_leaf", laps), ("us_a_leaf_frozen", frozen)):
        for step, lap in zip(steps, every, strict=True):
            step[key] = turns.spread([x / step["leaves"] * 1e6 for x in lap.seconds])
    return {"making": making, "trees": found, "steps": steps}


def _making() -> dict[str, float]:
    """Measure what the first optimizers cost this process."""
    here, began = torch.device("cpu"), time.perf_counter()
    before = turns.memory_bytes(here) or 0
    mf.optim.adamw(1e-3)
    mf.optim.sgd(1e-3)
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "bytes": (turns.memory_bytes(here) or 0) - before}


def trees(config: OptConfig) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return the shapes to step on, by name of the tree and path."""
    with torch.device("meta"):
        model = GPT(config.model)
    few = {name: tuple(p.shape) for name, p in model.named_parameters()}
    shapes = itertools.islice(itertools.cycle(SMALL_SHAPES), config.small_leaves)
    return {"a GPT": few, "many small leaves": {f"w{i}": s for i, s in enumerate(shapes)}}


def _compare(
    name: str, shapes: dict[str, tuple[int, ...]], config: OptConfig, groups: mf.Groups
) -> dict[str, Any]:
    """Compare `opt_step` with donation, on gradients as hop 1 returns them, with torch's step."""
    random = torch.Generator().manual_seed(0)
    values, grads = (
        {k: torch.randn(s, generator=random).to(groups.device) for k, s in shapes.items()}
        for _ in range(2)
    )
    state = mf.init_state(mf.shard(values, groups), mf.optim.adamw(1e-3))
    shards = mf.reduce_grads(grads, groups, like=state.params)
    reference = {name: nn.Parameter(value.clone()) for name, value in values.items()}
    for path, param in reference.items():
        param.grad = grads[path].clone()
    optimizer = torch.optim.AdamW(reference.values(), 1e-3, fused=True)

    def step(number: int) -> None:
        nonlocal state
        state = mf.opt_step(state, shards, donate=True)

    peers = [
        BenchPeer("opt_step(donate=True)", step),
        BenchPeer("torch.optim.AdamW(fused=True)", lambda number: optimizer.step()),
    ]
    laps = turns.take_turns(peers, config.turns, device=groups.device)
    found, numel = mf.unshard(state.params, groups), sum(p.numel() for p in reference.values())
    gaps = [float((found[path] - p.detach()).abs().max()) for path, p in reference.items()]
    figures = [
        {
            "name": lap.name,
            "seconds_by_round": lap.seconds,
            "ns_per_element": turns.spread([x / numel * 1e9 for x in lap.seconds]),
            "opt_step_ratio": turns.ratio(laps[0].seconds, lap.seconds),
        }
        for lap in laps
    ]
    sizes = {"leaves": len(shapes), "elements": numel, "largest_param_gap": max(gaps)}
    return {"name": name, **sizes, "peers": figures}


def _verbs(leaves: int, groups: mf.Groups) -> BenchPeer:
    """Build the peer that takes whole steps by the verbs on so many leaves of 8 elements."""
    params = mf.shard({f"w{i}": torch.ones(8, device=groups.device) for i in range(leaves)}, groups)
    state = mf.init_state(params, mf.optim.adamw(1e-3))

    def loss(shards: dict[str, Any]) -> Tensor:
        return torch.stack(list(mf.gather(shards, groups).values())).sum()

    def step(number: int) -> None:
        nonlocal state
        grads = mf.reduce_grads(torch.func.grad(loss)(state.params), groups)
        state = mf.opt_step(state, grads, donate=True)

    return BenchPeer(f"{leaves:,} leaves", step)


def render_opt(figures: dict[str, Any], config: OptConfig) -> str:
    """Render the figures as tables."""
    blocks = []
    for part in figures["trees"]:
        title = f"{part['name']}: {part['elements']:,} elements in {part['leaves']:,} leaves, AdamW"
        rows = [("", "ns an element", "opt_step over it")]
        for i, peer in enumerate(part["peers"]):
            over = turns.between(peer["opt_step_ratio"], ".3f") if i else ""
            rows.append((peer["name"], turns.between(peer["ns_per_element"], ".2f"), over))
        gap = part["largest_param_gap"]
        found = table(f"{title}, {config.turns}", rows)
        blocks.append(f"{found}\n  largest difference of a parameter: {gap:.1e}")
    rows = [("", "microseconds a leaf", "after gc.freeze")]
    for step in figures["steps"]:
        now, frozen = (turns.between(step[key], ".1f") for key in ("us_a_leaf", "us_a_leaf_frozen"))
        rows.append((f"{step['leaves']:,} leaves", now, frozen))
    title = f"gather, gradient, both hops and update of small leaves, {config.turns}"
    seconds, nbytes = figures["making"]["seconds"], human_bytes(figures["making"]["bytes"])
    made = f"adamw() and sgd() are made in {seconds * 1e3:.1f} ms and {nbytes} of a new process"
    return "\n\n".join([*blocks, table(title, rows), made])


# `bench checkpoint`.

LEAVES = 24  # of the parameters that are saved


@dataclass(frozen=True)
class SaveConfig:
    """Options of `bench checkpoint`.

    Args:
        mib: size of the state, in MiB.
        rounds: how often each of the peers takes its turn.
        folder: where to write.
    """

    mib: int
    rounds: int
    folder: str


def measure_saves(config: SaveConfig) -> dict[str, Any]:
    """Compare saves and loads with plain writing and reading.

    Returns:
        Ratios by name, each the median over rounds with the least and the most.
    """
    turns.start("cpu")
    laps: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(dir=config.folder) as folder, mf.make_groups(1) as groups:
        bench = _SaveBench(config, Path(folder), groups)
        for number in range(config.rounds + 1):
            turns.say(f"round {number} of {config.rounds} ...")
            for name, times in bench.round(number).items():
                if number:  # the first one warms memory and files up
                    laps.setdefault(name, []).append(times)
    ratios = {name: turns.spread(found) for name, found in laps.items()}
    return {"nbytes": bench.nbytes, "ratios": ratios}


class _SaveBench:
    """State, its bytes as one buffer, and the turns of a round."""

    def __init__(self, config: SaveConfig, folder: Path, groups: mf.Groups) -> None:
        rows = config.mib * 2**20 // 3 // 4 // LEAVES // 1024
        params = {f"h.{i}.w": torch.randn(rows, 1024) for i in range(LEAVES)}
        self.state = mf.init_state(mf.shard(params, groups), mf.optim.adamw(1e-3))
        self.folder, self.groups = folder, groups
        self.nbytes = turns.nbytes(self.state)
        self.plain = torch.randint(0, 255, (self.nbytes,), dtype=torch.uint8)
        self.copy = torch.zeros_like(self.plain)
        torch.save([part.clone() for part in self.plain.chunk(LEAVES)], folder / "torch.pt")
        self.matrix = torch.randn(512, 512)

    def round(self, number: int) -> dict[str, float]:
        """Return the ratio of each pair, whose two turns follow one another."""
        own = self.folder / "steps", self.state, self.groups
        writes = seconds_of(self.write)
        saves = seconds_of(lambda: checkpoint.save(*own, step=2 * number, keep=2))
        reads, loads = seconds_of(self.read), seconds_of(self.load)
        torch_loads = seconds_of(lambda: torch.load(self.folder / "torch.pt", weights_only=True))
        self.forget()
        cold_reads = seconds_of(self.read)
        self.forget()
        cold_loads = seconds_of(self.load)
        copies, alone = seconds_of(lambda: self.copy.copy_(self.plain)), self.steps(lambda: False)
        own, begun = (self.folder / "steps", self.state, self.groups), time.perf_counter()
        pending = checkpoint.start_save(*own, step=2 * number + 1, keep=2)
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

    def load(self) -> None:
        like = self.folder / "steps", self.state, self.groups
        self.state = checkpoint.load(*like, donate=True).state

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


def render_saves(figures: dict[str, Any], config: SaveConfig) -> str:
    """Render the table."""
    rows = [(name, turns.between(found, ".2f")) for name, found in figures["ratios"].items()]
    title = f"a state of {human_bytes(figures['nbytes'])}: ratio of two turns that follow another"
    return table(title, rows)

"""`bench opt`: the optimizer's step on flat shards against torch's own on unsharded parameters.

And what optimizers cost a new process, with what they import; and what a step of the verbs costs
for each leaf, in trees of few and of many small leaves. Python's search for garbage is a part of
that, as it begins the more often the more objects are alive at once: its whole heap is searched,
with all of torch in it, unless `gc.freeze` took that out.
"""

import gc
import itertools
import time
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import mics_fn as mf
from mics_fn.errors import human_bytes
from mics_fn.lab.bench import turns
from mics_fn.lab.bench.turns import BenchPeer, BenchTurns
from mics_fn.lab.models import GPT, GPTConfig
from mics_fn.lab.report import table

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
    """Compare both optimizers on two trees, in one process; in a job the others wait.

    Returns:
        On rank 0 the figures of each tree; {} on the others.
    """
    making, device = _making(), turns.start(config.device)
    if not turns.is_first():
        return {}
    rank = dist.get_rank() if dist.is_initialized() else 0
    found = []
    for name, shapes in trees(config).items():
        turns.say(f"{name}: opt_step and torch.optim.AdamW take turns ...")
        with mf.make_groups(1, ranks=[rank], device=device) as groups:
            found.append(_compare(name, shapes, config, groups))
    turns.say("steps of the verbs ...")
    with mf.make_groups(1, ranks=[rank], device=device) as groups:
        sizes = (config.small_leaves // 2, config.small_leaves * 5 // 2)
        peers = [_verbs(leaves, groups) for leaves in sizes]
        laps = turns.take_turns(peers, config.turns, device=device)
        gc.freeze()
        frozen = turns.take_turns(peers, config.turns, device=device)
        gc.unfreeze()
    steps = []
    for leaves, now, after in zip(sizes, laps, frozen, strict=True):
        us, us_frozen = ([x / leaves * 1e6 for x in lap.seconds] for lap in (now, after))
        found_us = {"us_a_leaf": turns.spread(us), "us_a_leaf_frozen": turns.spread(us_frozen)}
        steps.append({"leaves": leaves, **found_us})
    return {"making": making, "trees": found, "steps": steps}


def _making() -> dict[str, float]:
    """Measure what the first optimizers cost this process."""
    here, began = torch.device("cpu"), time.perf_counter()
    before = turns.memory_bytes(here) or 0
    mf.optim.adamw(1e-3)
    mf.optim.sgd(1e-3)
    return {
        "seconds": time.perf_counter() - began,
        "bytes": (turns.memory_bytes(here) or 0) - before,
    }


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
    random = torch.Generator().manual_seed(0)
    values, grads = (
        {k: torch.randn(s, generator=random).to(groups.device) for k, s in shapes.items()}
        for _ in range(2)
    )
    ours, params = _ours(values, grads, groups)
    theirs, reference = _theirs(values, grads)
    laps = turns.take_turns([ours, theirs], config.turns, device=groups.device)
    found = mf.unshard(params(), groups)
    numel = sum(p.numel() for p in reference.values())
    return {
        "name": name,
        "leaves": len(shapes),
        "elements": numel,
        "largest_param_gap": max(
            float((found[k] - p.detach()).abs().max()) for k, p in reference.items()
        ),
        "peers": [
            {
                "name": lap.name,
                "seconds_by_round": lap.seconds,
                "ns_per_element": turns.spread([x / numel * 1e9 for x in lap.seconds]),
                "opt_step_ratio": turns.ratio(laps[0].seconds, lap.seconds),
            }
            for lap in laps
        ],
    }


def _ours(
    values: dict[str, Tensor], grads: dict[str, Tensor], groups: mf.Groups
) -> tuple[BenchPeer, Any]:
    """Build the peer of `opt_step` with donation; gradients are flat, as hop 1 returns them."""
    params = mf.shard(values, groups)
    state = mf.init_state(params, mf.optim.adamw(1e-3))
    shards = mf.reduce_grads(grads, groups, like=params)

    def step(number: int) -> None:
        nonlocal state
        state = mf.opt_step(state, shards, donate=True)

    return BenchPeer("opt_step(donate=True)", step), lambda: state.params


def _theirs(
    values: dict[str, Tensor], grads: dict[str, Tensor]
) -> tuple[BenchPeer, dict[str, nn.Parameter]]:
    params = {name: nn.Parameter(value.clone()) for name, value in values.items()}
    for name, param in params.items():
        param.grad = grads[name].clone()
    optimizer = torch.optim.AdamW(params.values(), 1e-3, fused=True)

    return BenchPeer("torch.optim.AdamW(fused=True)", lambda number: optimizer.step()), params


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
        title = (
            f"{part['name']}: {part['elements']:,} elements in {part['leaves']:,} leaves, AdamW, "
            f"{config.turns}"
        )
        rows = [("", "ns an element", "opt_step over it")]
        for i, peer in enumerate(part["peers"]):
            over = turns.between(peer["opt_step_ratio"], ".3f") if i else ""
            rows.append((peer["name"], turns.between(peer["ns_per_element"], ".2f"), over))
        gap = part["largest_param_gap"]
        blocks.append(table(title, rows) + f"\n  largest difference of a parameter: {gap:.1e}")
    rows = [("", "microseconds a leaf", "after gc.freeze")]
    for step in figures["steps"]:
        now, frozen = (turns.between(step[key], ".1f") for key in ("us_a_leaf", "us_a_leaf_frozen"))
        rows.append((f"{step['leaves']:,} leaves", now, frozen))
    title = f"gather, gradient, both hops and update of small leaves, {config.turns}"
    seconds, nbytes = figures["making"]["seconds"], human_bytes(figures["making"]["bytes"])
    made = f"adamw() and sgd() are made in {seconds * 1e3:.1f} ms and {nbytes} of a new process"
    return "\n\n".join([*blocks, table(title, rows), made])

"""`bench step`: whole training steps of `Trainer` against plain torch loops and against FSDP2.

[Note: resident memory] Peers that take turns in one process share its memory, so here each peer has
its own processes. Memory counts from the end of a few steps of a tiny model, when all code is
loaded. Glibc keeps freed blocks of up to 32 MB for later, so the peak of resident memory is larger
than the peak of memory in use. Both are measured, each in processes of its own: "resident" with the
usual allocator, "used" with an allocator that returns blocks to the system at once.
"""

import contextlib
import gc
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist

from mics_fn.lab.bench.links import set_rate
from mics_fn.lab.bench.stage import PEERS, Stage, StepConfig, fitting, make_batches
from mics_fn.lab.bench.turns import (
    Laps,
    between,
    give_back_at_once,
    is_first,
    memory_bytes,
    of_all_ranks,
    peak_bytes,
    ratio,
    reset_peak,
    say,
    spread,
    start,
    take_turns,
)
from mics_fn.lab.models import gpt
from mics_fn.lab.ranks.launch import launch
from mics_fn.lab.report import bytes_or_dash, table

LEGEND = """\
seconds per step: of the slowest rank. x/it: the time of x divided by that of this row, round by
round. gap: the largest relative difference from the loss of {first} at any of these steps."""


def measure_step(config: StepConfig) -> dict[str, Any]:
    """Compare peers that take turns, as one rank of a job.

    Returns:
        On rank 0 the figures by peer; {} on the others.
    """
    device = start(config.device)
    names = fitting(config.peers, dist.get_world_size())
    say(f"world {dist.get_world_size()}: {', '.join(names)} take turns ...")
    with contextlib.ExitStack() as closing:
        stage = _stage(config, device, closing, config.turns.all_steps)
        peers = [PEERS[name].build(stage) for name in names]
        set_rate(config.rate)
        laps = take_turns(peers, config.turns, device=device, fence=dist.barrier)
    every = of_all_ranks(laps)
    if not is_first():
        return {}
    merged = [_merge([Laps(*lap) for lap in found]) for found in zip(*every, strict=True)]
    return _compare(config, dict(zip(names, merged, strict=True)))


def _stage(
    config: StepConfig, device: torch.device, closing: contextlib.ExitStack, steps: int
) -> Stage:
    return Stage(config, device, make_batches(config, device, steps), closing)


def _merge(laps: Sequence[Laps]) -> Laps:
    """Merge the laps of one peer on all ranks: a step takes as long as its slowest rank."""
    _, seconds, results = (list(zip(*each, strict=True)) for each in zip(*laps, strict=True))
    return Laps(laps[0].name, list(map(max, seconds)), list(map(fmean, results)))


def _compare(config: StepConfig, laps: dict[str, Laps]) -> dict[str, Any]:
    """Compute the figures of one comparison from the laps by peer."""
    ours = [name for name in laps if PEERS[name].ours]
    first = (ours or [*laps])[0]
    peers = []
    for name, lap in laps.items():
        pairs = zip(laps[first].results, lap.results, strict=True)
        others = [x for x in ours if x != name]
        peers.append(
            {
                "name": name,
                "title": lap.name,
                "seconds_by_round": lap.seconds,
                "seconds": spread(lap.seconds)._asdict(),
                "over_it": {x: ratio(laps[x].seconds, lap.seconds)._asdict() for x in others},
                "losses": lap.results,
                "largest_loss_gap": max(abs(a - b) / abs(b) for a, b in pairs),
            }
        )
    return {"params": gpt.num_params(config.model), "ours": ours, "first": first, "peers": peers}


def render_step(figures: dict[str, Any], config: StepConfig) -> str:
    """Render the figures as a table."""
    ours = figures["ours"]
    rows = [["", "seconds per step", *(f"{name}/it" for name in ours), "gap"]]
    for peer in figures["peers"]:
        ratios = peer["over_it"]
        row = [f"{peer['name']}: {peer['title']}", between(peer["seconds"], ".4f")]
        row += [between(ratios[x], ".3f") if x in ratios else "" for x in ours]
        rows.append([*row, f"{peer['largest_loss_gap']:.1e}"])
    links = f", links {config.rate}" if config.rate else ""
    title = f"{_world(figures, config)}{links}: {config.turns}"
    return f"{table(title, rows)}\n\n{LEGEND.format(first=figures['first'])}"


def _world(figures: dict[str, Any], config: StepConfig) -> str:
    world = f"nodes of {config.node_size}, p = {config.partition_size}"
    return f"{world}, {figures['params']:,} parameters, accumulate {config.accumulate}"


# `bench step --rss`: the memory of a rank that runs one peer and nothing else.

TINY_STEPS = 2
_RSS_LEGEND = """\
Each peer ran alone in new processes, twice; figures are those of the fullest rank. before: resident
memory once all code was loaded, from which the others count. resident: the most in the steps. used:
the same with an allocator that returns freed memory at once."""


def run_rss(config: StepConfig, ranks: int) -> dict[str, Any]:
    """Measure one peer after the other, each on its own ranks."""
    peers = []
    for name in fitting(config.peers, ranks):
        say(f"{name}: alone in new processes, twice ...")
        usual, tight = (launch(measure_rss, ranks, config, name, each) for each in (False, True))
        before = max(rank["before"] or 0 for rank in usual)
        found = {"name": name, "title": tight[0]["title"], "before": before}
        peers.append(found | {"resident": _grown(usual), "used": _grown(tight)})
    return {"params": gpt.num_params(config.model), "peers": peers}


def measure_rss(config: StepConfig, name: str, tight: bool) -> dict[str, Any]:
    """Measure one peer as a rank of several; if `tight`, the allocator frees memory at once."""
    turns, device = config.turns, start(config.device)
    if tight:
        give_back_at_once()
    tiny = gpt.GPTConfig(256, config.model.context, dim=16, num_heads=2, num_blocks=1)
    _take_steps(replace(config, model=tiny), name, device, TINY_STEPS, 0)
    gc.collect()
    before = reset_peak(device)
    found = _take_steps(config, name, device, turns.warmup, turns.rounds * turns.steps)
    return {"before": memory_bytes(device) if before is None else before, **found}


def _take_steps(
    config: StepConfig, name: str, device: torch.device, warmup: int, steps: int
) -> dict[str, Any]:
    """Build the peer and take its steps; return the peak of memory after warm-up."""
    with contextlib.ExitStack() as closing:
        peer = PEERS[name].build(_stage(config, device, closing, warmup + steps))
        for number in range(warmup):
            peer.step(number)
        dist.barrier()
        known = reset_peak(device) is not None
        for number in range(warmup, warmup + steps):
            peer.step(number)
        return {"title": peer.name, "steps": peak_bytes(device) if known else None}


def _grown(ranks: Sequence[dict]) -> int | None:
    """Return by how many bytes the fullest rank grew; None if that could not be measured."""
    if any(rank["steps"] is None or rank["before"] is None for rank in ranks):
        return None
    return max(rank["steps"] - rank["before"] for rank in ranks)


def render_rss(figures: dict[str, Any], config: StepConfig) -> str:
    """Render the figures as a table."""
    rows = [["", "before", "resident", "used"]]
    for peer in figures["peers"]:
        sizes = [bytes_or_dash(peer[key]) for key in ("before", "resident", "used")]
        rows.append([f"{peer['name']}: {peer['title']}", *sizes])
    return f"{table(f'memory of a rank, {_world(figures, config)}', rows)}\n\n{_RSS_LEGEND}"

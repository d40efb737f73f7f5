"""`bench step --rss`: the memory of a rank that runs one peer and nothing else.

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
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from mics_fn._torch import storage_id
from mics_fn.errors import PlanError, human_bytes, message
from mics_fn.lab.bench.links import AS_IS
from mics_fn.lab.bench.stage import (
    StepConfig,
    build,
    make_stage,
    own_group,
    phases,
)
from mics_fn.lab.bench.turns import (
    give_back_at_once,
    in_job,
    memory_bytes,
    peak_bytes,
    reset_peak,
    say,
    start,
)
from mics_fn.lab.models import gpt
from mics_fn.lab.ranks.launch import launch
from mics_fn.lab.report import bytes_or_dash, table

TINY_STEPS = 2
_RSS_LEGEND = """\
Each peer ran alone in new processes, twice; figures are those of the fullest rank. before: resident
memory once all code was loaded, from which the others count. resident: the most in the steps. used:
the same with an allocator that returns freed memory at once. formula: states, and the least that a
step needs: gathered parameters, sums of gradients, what is being reduced, and gradients in full;
and what autograd saves of {tokens} tokens. used to start: the most while the model is built, in
full, and in warm-up."""
PARTS = ("states", "parameters", "sums", "hops", "in full", "activations")


class MemoryRun(NamedTuple):
    """One peer, which is measured in its own processes."""

    config: StepConfig
    name: str
    tight: bool  # whether freed memory is given back at once


def check_rss(config: StepConfig) -> None:
    """Refuse what `--rss` cannot do.

    Raises:
        PlanError: there are rates, on which memory does not depend; or this process belongs to a
            job, whose processes cannot be started anew for each peer.
    """
    if config.rates[0].name != AS_IS:
        text = "--rss with --rates: memory does not depend on them"
        raise PlanError(message(text, fix="leave one of them out"))
    if in_job():
        fix = "run it without a launcher, on any machine: --rss starts ranks of its own"
        raise PlanError(message("--rss in a job: it needs new processes for each peer", fix=fix))


def run_rss(config: StepConfig, ranks: int) -> dict[str, Any]:
    """Measure one peer after the other, each on its own ranks."""
    names = phases(replace(config, alone=False), ranks)[ranks]
    peers = []
    for name in names:
        say(f"{name}: alone in new processes, twice ...")
        found = [
            launch(measure_rss, ranks, MemoryRun(config, name, tight)) for tight in (False, True)
        ]
        peers.append(_figures(name, *found))
    return {"params": gpt.num_params(config.model), "peers": peers}


def measure_rss(run: MemoryRun) -> dict[str, Any]:
    """The memory of one peer, as one rank of several."""
    config, turns = run.config, run.config.turns
    device = start(config.device)
    if run.tight:
        give_back_at_once()
    tiny = gpt.GPTConfig(256, config.model.context, dim=16, num_heads=2, num_blocks=1)
    _take_steps(run._replace(config=replace(config, model=tiny)), device, TINY_STEPS, 0)
    gc.collect()
    before = reset_peak(device)
    found = _take_steps(run, device, turns.warmup, turns.rounds * turns.steps)
    return {"before": memory_bytes(device) if before is None else before, **found}


def _take_steps(run: MemoryRun, device: torch.device, warmup: int, steps: int) -> dict[str, Any]:
    """Build the peer and take its steps; the peaks of memory until warm-up ended, and after it."""
    with contextlib.ExitStack() as closing:
        own = own_group() if dist.get_world_size() == 1 else None
        stage = make_stage(run.config, device, closing, own=own, steps=warmup + steps)
        peer = build(stage, run.name)
        for number in range(warmup):
            peer.step(number)
        dist.barrier()
        first = peak_bytes(device)
        known = reset_peak(device) is not None
        for number in range(warmup, warmup + steps):
            peer.step(number)
        return {
            "title": peer.name,
            "start": first,
            "steps": peak_bytes(device) if known else None,
            "held": peer.held_bytes(),
            "needs": peer.needs,
            "saved": _saved_bytes(run.config),
        }


def _saved_bytes(config: StepConfig) -> int:
    """What autograd saves of one micro-step beside parameters, counted without data."""
    model = gpt.seeded(config.model, torch.device("meta"))
    known = {storage_id(x) for x in model.parameters()}
    found: dict[int, int] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        if storage_id(x) not in known:
            found[storage_id(x)] = x.untyped_storage().nbytes()
        alive.append(x)
        return x

    alive: list[torch.Tensor] = []  # so that no storage has the number of an earlier one
    tokens = torch.zeros((config.sequences, config.model.context), dtype=torch.int64, device="meta")
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        gpt.loss(model, (tokens, tokens))
    return sum(found.values())


def _figures(name: str, usual: Sequence[dict], tight: Sequence[dict]) -> dict[str, Any]:
    formula = {"states": max(rank["held"] for rank in tight), **tight[0]["needs"]}
    formula["activations"] = tight[0]["saved"]
    return {
        "name": name,
        "title": tight[0]["title"],
        "before_bytes": max(rank["before"] or 0 for rank in usual),
        "resident_bytes": _grown(usual, "steps"),
        "used_bytes": _grown(tight, "steps"),
        "used_to_start_bytes": _grown(tight, "start"),
        "formula": formula,
        "formula_bytes": sum(formula.values()),
    }


def _grown(ranks: Sequence[dict], key: str) -> int | None:
    """By how many bytes the fullest rank grew; None if that could not be measured."""
    if any(rank[key] is None or rank["before"] is None for rank in ranks):
        return None
    return max(rank[key] - rank["before"] for rank in ranks)


def render_rss(figures: dict[str, Any], config: StepConfig) -> str:
    """The figures as a table."""
    heads = ("", "before", "resident", "used", "formula", "used/formula")
    rows: list[tuple[str, ...]] = [(*heads, f"= {PARTS[0]}", *(f"+ {x}" for x in PARTS[1:]))]
    rows[0] += ("used to start",)
    for peer in figures["peers"]:
        parts, used = peer["formula"], peer["used_bytes"]
        rows.append(
            (
                f"{peer['name']}: {peer['title']}",
                *(
                    bytes_or_dash(peer[key])
                    for key in ("before_bytes", "resident_bytes", "used_bytes")
                ),
                human_bytes(peer["formula_bytes"]),
                "-" if used is None else f"{used / peer['formula_bytes']:.2f}",
                *(human_bytes(parts[key]) for key in PARTS),
                bytes_or_dash(peer["used_to_start_bytes"]),
            )
        )
    title = (
        f"memory of a rank, {figures['params']:,} parameters, accumulate {config.accumulate}, nodes"
        f" of {config.node_size}, p = {config.partition_size}"
    )
    tokens = config.sequences * config.model.context
    return f"{table(title, rows)}\n\n{_RSS_LEGEND.format(tokens=tokens)}"

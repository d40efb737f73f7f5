"""`bench step`: whole training steps of `Trainer` against plain torch loops and against FSDP2.

[Note: what is hidden] A second of the optimizer is hidden if a hop 2 was under way in all of it. On
the CPU a rank notices late that a transfer is over, so a timeline shows transfers longer than they
were. One counts here only if it ended while the host waited for a hop 2, a millisecond or more
after the wait had begun: then it was under way until the wait. So the shares are lower bounds. What
is left is exposed: the step is longer by it.

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

import mics_fn as mf
from mics_fn.lab.bench import turns
from mics_fn.lab.bench.links import set_rate
from mics_fn.lab.bench.stage import PEERS, Stage, StepConfig, build, labels, make_batches
from mics_fn.lab.models import gpt
from mics_fn.lab.ranks.launch import launch
from mics_fn.lab.report import bytes_or_dash, table

_WAITED_S = 1e-3
SHARES = ("optimizer", "exposed", "hidden")
LEGEND = """\
seconds per step: of the slowest rank. x/it: the time of x divided by that of this row, round by
round. gap: the largest relative difference from the loss of {first} at any of these steps."""
_OVER_FIRST = "\nover {first}: the time of a peer divided by its own in that precision."
_HIDDEN = """
optimizer, exposed: seconds of a step in which leaves are updated, and those of them in which no hop
2 was certainly under way; means over ranks. hidden: the share of the optimizer not exposed."""


def measure_step(config: StepConfig) -> dict[str, Any]:
    """Compare peers that take turns, as one rank of a job.

    Returns:
        On rank 0 the figures by peer; {} on the others.
    """
    device = turns.start(config.device)
    names = labels(config, dist.get_world_size())
    turns.say(f"world {dist.get_world_size()}: {', '.join(names)} take turns ...")
    with contextlib.ExitStack() as closing:
        batches = make_batches(config, device, config.turns.all_steps)
        stage = Stage(config, device, batches, closing)
        peers = [_watched(build(stage, name), config.overlap) for name in names]
        set_rate(config.rate)
        laps = turns.take_turns(peers, config.turns, device=device, fence=dist.barrier)
    every = turns.of_all_ranks(laps)
    if not turns.is_first():
        return {}
    merged = [_merge([turns.Laps(*lap) for lap in found]) for found in zip(*every, strict=True)]
    return _compare(config, dict(zip(names, merged, strict=True)))


def _merge(laps: Sequence[turns.Laps]) -> turns.Laps:
    """Merge the laps of one peer on all ranks: a step takes as long as its slowest rank."""
    _, seconds, results = (list(zip(*each, strict=True)) for each in zip(*laps, strict=True))
    means = [list(map(fmean, zip(*ranks, strict=True))) for ranks in results]
    return turns.Laps(laps[0].name, list(map(max, seconds)), means)


def _watched(peer: turns.BenchPeer, overlap: bool) -> turns.BenchPeer:
    """Make its step return a list of the loss and, if asked, what `updates_of` its timeline is."""

    def step(number: int) -> list[Any]:
        with mf.inspection.watch() if overlap else contextlib.nullcontext() as watched:
            loss = peer.step(number)
        return [loss, *(updates_of(watched.timeline()) if watched else ())]

    return peer._replace(step=step)


def updates_of(timeline: mf.inspection.Timeline) -> tuple[float, float]:
    """Return a step's seconds of the optimizer, and those of them that are exposed.

    See [Note: what is hidden].

    >>> from mics_fn.inspection import Event, Timeline
    >>> timeline = Timeline("step 1", (
    ...     Event("hop2", "w", (0,), "replicas", 8, 0.0, 3.0),
    ...     Event("opt", "b", (1,), "", 0, 1.0, 2.0),
    ...     Event("wait", "hop2 bucket 0: w", (0,), "", 0, 2.0, 3.0),
    ...     Event("opt", "w", (0,), "", 0, 3.0, 3.5)), 3.5)
    >>> updates_of(timeline)
    (1.5, 0.5)
    """
    waits, hops, updates = (
        [(x.start_s, x.end_s) for x in timeline.events if f"{x.kind} {x.about}".startswith(kind)]
        for kind in ("wait hop2", "hop2 ", "opt ")
    )
    sent = [(a, b) for a, b in hops if any(c + _WAITED_S <= b <= d for c, d in waits)]
    exposed = seconds = sum(b - a for a, b in updates)
    for reached, end in updates:
        for a, b in sorted(sent):  # each second counts once, however many are under way
            exposed -= max(0.0, min(b, end) - max(a, reached))
            reached = max(b, reached)
    return seconds, exposed


def _hidden(results: Sequence[list[float]], config: StepConfig) -> dict[str, Any]:
    """Compute what is hidden of one peer from what its steps returned."""
    steps, timed = config.turns.steps, results[config.turns.warmup :]
    rounds = [timed[i : i + steps] for i in range(0, len(timed), steps)]
    sums = [[fmean(step[i] for step in own) for i in (1, 2)] for own in rounds]
    found = zip(*[(a, b, 1 - b / a) for a, b in sums], strict=True)
    return {x: turns.spread(values) for x, values in zip(SHARES, found, strict=True)}


def _compare(config: StepConfig, laps: dict[str, turns.Laps]) -> dict[str, Any]:
    """Compute the figures of one comparison from the laps by peer."""
    parts = {label: label.partition("@") for label in laps}
    losses = {label: [result[0] for result in lap.results] for label, lap in laps.items()}
    mine = [label for label, (name, _, _) in parts.items() if PEERS[name].ours]
    first, ours = (mine or [*laps])[0], list(dict.fromkeys(parts[label][0] for label in mine))
    peers = []
    for label, lap in laps.items():
        name, _, precision = parts[label]
        pairs = zip(losses[first], losses[label], strict=True)
        # Peers are compared in one precision, and each peer with itself in the first one.
        others = {parts[x][0]: x for x in mine if x != label and parts[x][2] == precision}
        same = next(x for x in laps if parts[x][0] == name)
        over_first = None if same == label else turns.ratio(lap.seconds, laps[same].seconds)
        found = {
            "name": label,
            "title": lap.name,
            "seconds_by_round": lap.seconds,
            "seconds": turns.spread(lap.seconds),
            "over_it": {x: turns.ratio(laps[y].seconds, lap.seconds) for x, y in others.items()},
            "over_first": over_first,
            "losses": losses[label],
            "largest_loss_gap": max(abs(a - b) / abs(b) for a, b in pairs),
        }
        peers.append(found | (_hidden(lap.results, config) if config.overlap else {}))
    return {"params": gpt.num_params(config.model), "ours": ours, "first": first, "peers": peers}


def render_step(figures: dict[str, Any], config: StepConfig) -> str:
    """Render the figures as a table."""
    ours, several = figures["ours"], config.precisions[:1] * (len(config.precisions) > 1)
    hidden = SHARES * config.overlap
    head = ["", "seconds per step", *(f"{name}/it" for name in ours)]
    rows = [[*head, *(f"over {text}" for text in several), *hidden, "gap"]]
    for peer in figures["peers"]:
        ratios = [peer["over_it"].get(x) for x in ours] + [peer["over_first"] for _ in several]
        row = [f"{peer['name']}: {peer['title']}", turns.between(peer["seconds"], ".4f")]
        row += [turns.between(found, ".3f") if found else "" for found in ratios]
        row += [turns.between(peer[x], ".2f" if x == "hidden" else ".4f") for x in hidden]
        rows.append([*row, f"{peer['largest_loss_gap']:.1e}"])
    links = f", links {config.rate}" if config.rate else ""
    title = f"{_world(figures, config)}{links}: {config.turns}"
    legend = LEGEND.format(first=figures["first"]) + _HIDDEN * config.overlap
    legend += "".join(_OVER_FIRST.format(first=text) for text in several)
    return f"{table(title, rows)}\n\n{legend}"


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
    for name in labels(config, ranks):
        turns.say(f"{name}: alone in new processes, twice ...")
        usual, tight = (launch(measure_rss, ranks, config, name, each) for each in (False, True))
        before = max(rank["before"] or 0 for rank in usual)
        found = {"name": name, "title": tight[0]["title"], "before": before}
        peers.append(found | {"resident": _grown(usual), "used": _grown(tight)})
    return {"params": gpt.num_params(config.model), "peers": peers}


def measure_rss(config: StepConfig, name: str, tight: bool) -> dict[str, Any]:
    """Measure one peer as a rank of several; if `tight`, the allocator frees memory at once."""
    device = turns.start(config.device)
    if tight:
        turns.give_back_at_once()
    tiny = gpt.GPTConfig(256, config.model.context, dim=16, num_heads=2, num_blocks=1)
    _take_steps(replace(config, model=tiny), name, device, TINY_STEPS, 0)
    gc.collect()
    before = turns.reset_peak(device)
    steps = config.turns.rounds * config.turns.steps
    found = _take_steps(config, name, device, config.turns.warmup, steps)
    return {"before": turns.memory_bytes(device) if before is None else before, **found}


def _take_steps(
    config: StepConfig, name: str, device: torch.device, warmup: int, steps: int
) -> dict[str, Any]:
    """Build the peer and take its steps; return the peak of memory after warm-up."""
    with contextlib.ExitStack() as closing:
        stage = Stage(config, device, make_batches(config, device, warmup + steps), closing)
        peer = build(stage, name)
        for number in range(warmup):
            peer.step(number)
        dist.barrier()
        known = turns.reset_peak(device) is not None
        for number in range(warmup, warmup + steps):
            peer.step(number)
        return {"title": peer.name, "steps": turns.peak_bytes(device) if known else None}


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

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
from statistics import fmean, median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import mics_fn as mf
from mics_fn._torch import storage_id
from mics_fn.errors import human_bytes
from mics_fn.inspection import Timeline
from mics_fn.lab.bench.links import AS_IS, node_interface, sent_bytes, settings_of
from mics_fn.lab.bench.stage import (
    StepConfig,
    build,
    kind_of,
    labels,
    make_stage,
    steps_at,
)
from mics_fn.lab.bench.turns import (
    BenchPeer,
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
round. a node sends: bytes per step through its network interface, the median; "-" if nodes have
none of their own. gap: the largest relative difference from the loss of {first} at any of these
steps."""
OVER_FIRST = """
x/it compares peers of one precision; over {first}: a peer's time over its own with that one."""
HIDDEN = """
optimizer, exposed: seconds of a step in which leaves are updated, and those of them in which no hop
2 was certainly under way; means over ranks. hidden: the share of the optimizer that is not exposed;
the goal is 0.80 at 200mbit. Each is the median over rounds, with the least and the most."""


def measure_step(config: StepConfig) -> dict[str, Any]:
    """Compare peers that take turns, as one rank of a job.

    Returns:
        On rank 0 the figures by peer, and by rate and peer; {} on the others.
    """
    device = start(config.device)
    names = labels(config, dist.get_world_size())
    say(f"world {dist.get_world_size()}: {', '.join(names)} take turns ...")
    interface, updates = node_interface(config.node_size), {name: list[Updates]() for name in names}
    with contextlib.ExitStack() as closing:
        stage = make_stage(config, device, closing)
        peers = {name: build(stage, name) for name in names}
        if config.overlap:
            peers = {name: _watched(peer, updates[name]) for name, peer in peers.items()}
        laps = take_turns(
            list(peers.values()),
            config.turns,
            device=device,
            fence=dist.barrier,
            settings=settings_of(config.rates),
            gauge=lambda: sent_bytes(interface),
        )
    every, updated = zip(*of_all_ranks((laps, updates)), strict=True)
    if not is_first():
        return {}
    merged = [_merge([Laps(*lap) for lap in found]) for found in zip(*every, strict=True)]
    return _compare(config, dict(zip(names, merged, strict=True)), updated)


def _merge(laps: Sequence[Laps]) -> Laps:
    """The laps of one peer on all ranks as one: a step takes as long as its slowest rank."""
    _, seconds, sent, results = (list(zip(*each, strict=True)) for each in zip(*laps, strict=True))
    # Ranks of a node count the same bytes.
    most = [None if None in each else max(each) for each in sent]
    return Laps(laps[0].name, list(map(max, seconds)), most, list(map(fmean, results)))


def _compare(
    config: StepConfig, laps: dict[str, Laps], updated: Sequence[dict[str, list]]
) -> dict[str, Any]:
    """The figures of one comparison, from the laps by peer, and each rank's updates by peer."""
    ours = [name for name in laps if kind_of(name).ours]
    first = (ours or [*laps])[0]
    gaps = {
        name: [abs(a - b) / abs(b) for a, b in zip(laps[first].results, lap.results, strict=True)]
        for name, lap in laps.items()
    }
    rates = []
    for place, rate in enumerate(config.rates):
        steps, peers = steps_at(config, place), []
        for name in laps:
            found = _timed(laps, name, ours, slice(place, None, len(config.rates)))
            found["largest_loss_gap"] = max(gaps[name][step] for step in steps)
            if config.overlap:
                rounds = [steps[i : i + rate.steps] for i in range(0, len(steps), rate.steps)]
                found |= _hidden([rank[name] for rank in updated], rounds)
            peers.append(found)
        rates.append({"rate": rate.name, "steps": rate.steps, "peers": peers})
    return {
        "params": gpt.num_params(config.model),
        "ours": list(dict.fromkeys(map(_base, ours))),
        "first": first,
        "peers": [
            {
                "name": name,
                "title": lap.name,
                "losses": lap.results,
                "largest_loss_gap": max(gaps[name]),  # relative to the first peer at the same step
            }
            for name, lap in laps.items()
        ],
        "rates": rates,
    }


def _timed(laps: dict[str, Laps], name: str, ours: Sequence[str], at: slice) -> dict[str, Any]:
    """Times and bytes of one peer at one rate, and the times of our peers divided by them."""
    seconds, sent = laps[name].seconds[at], laps[name].sent_bytes[at]
    known = [nbytes for nbytes in sent if nbytes is not None]
    # Peers are compared in one precision, and each peer with itself in the first precision.
    others = {_base(x): x for x in ours if x != name and _precision(x) == _precision(name)}
    first = next(x for x in laps if _base(x) == _base(name))
    over_first = ratio(seconds, laps[first].seconds[at])._asdict() if first != name else None
    return {
        "name": name,
        "title": laps[name].name,
        "seconds_by_round": seconds,
        "seconds": spread(seconds)._asdict(),
        "node_bytes": None if len(known) < len(sent) else median(known),
        "over_it": {x: ratio(laps[y].seconds[at], seconds)._asdict() for x, y in others.items()},
        "over_first": over_first,
    }


def _base(label: str) -> str:
    """A peer's name without its precision."""
    return label.partition("@")[0]


def _precision(label: str) -> str:
    return label.partition("@")[2]


def render_step(figures: dict[str, Any], config: StepConfig) -> str:
    """The figures as tables, one per rate."""
    blocks, ours = [], figures["ours"]
    several = config.precisions[:1] if len(config.precisions) > 1 else ()
    hidden = ("optimizer", "exposed", "hidden") if config.overlap else ()
    head = ["", "seconds per step", *(f"{name}/it" for name in ours)]
    head += [*(f"over {x}" for x in several), *hidden, "a node sends", "gap"]
    for found in figures["rates"]:
        links = "" if found["rate"] == AS_IS else f", links {found['rate']}"
        title = f"{_world(figures, config)}{links}: {replace(config.turns, steps=found['steps'])}"
        rows = [head]
        for peer in found["peers"]:
            ratios, over_first = peer["over_it"], peer["over_first"]
            row = [f"{peer['name']}: {peer['title']}", between(peer["seconds"], ".4f")]
            row += [between(ratios[x], ".3f") if x in ratios else "" for x in ours]
            row += [between(over_first, ".3f") if over_first else "" for _ in several]
            row += [between(peer[x], ".2f" if x == "hidden" else ".4f") for x in hidden]
            row += [bytes_or_dash(peer["node_bytes"]), f"{peer['largest_loss_gap']:.1e}"]
            rows.append(row)
        blocks.append(table(title, rows))
    legend = LEGEND.format(first=figures["first"])
    legend += OVER_FIRST.format(first=several[0]) if several else ""
    return "\n\n".join([*blocks, legend + HIDDEN * config.overlap])


def _world(figures: dict[str, Any], config: StepConfig) -> str:
    world = f"nodes of {config.node_size}, p = {config.partition_size}"
    return f"{world}, {figures['params']:,} parameters, accumulate {config.accumulate}"


# `bench step --overlap`: which share of the optimizer is hidden behind hop 2.

_WAITED_S = 1e-3


class Updates(NamedTuple):
    """Seconds of the optimizer in a step, and those in which no hop 2 was surely under way."""

    seconds: float
    exposed: float


def updates_of(timeline: Timeline) -> Updates:
    """What a step's timeline says of its optimizer. See [Note: what is hidden].

    >>> from mics_fn.inspection import Event
    >>> timeline = Timeline("step 1", (
    ...     Event("hop2", "w", (0,), "replicas", 8, 0.0, 3.0),
    ...     Event("opt", "b", (1,), "", 0, 1.0, 2.0),
    ...     Event("wait", "hop2 bucket 0: w", (0,), "", 0, 2.0, 3.0),
    ...     Event("opt", "w", (0,), "", 0, 3.0, 3.5)), 3.5)
    >>> updates_of(timeline)
    Updates(seconds=1.5, exposed=0.5)
    """
    waits = [
        (event.start_s, event.end_s)
        for event in timeline.events
        if event.kind == "wait" and event.about.startswith("hop2")
    ]
    sent = [
        (event.start_s, event.end_s)
        for event in timeline.events
        if event.kind == "hop2" and any(a + _WAITED_S <= event.end_s <= b for a, b in waits)
    ]
    updates = [(event.start_s, event.end_s) for event in timeline.events if event.kind == "opt"]
    seconds = sum(b - a for a, b in updates)
    return Updates(seconds, seconds - sum(_within(a, b, sent) for a, b in updates))


def _within(start: float, end: float, ranges: Sequence[tuple[float, float]]) -> float:
    """Seconds between two times in which at least one of these ranges goes on."""
    found, reached = 0.0, start
    for a, b in sorted(ranges):
        found += max(0.0, min(b, end) - max(a, reached))
        reached = max(reached, b)
    return found


def _watched(peer: BenchPeer, updates: list[Updates]) -> BenchPeer:
    """The same peer, which adds what the timelines of its steps say."""

    def step(number: int) -> float:
        with mf.inspection.watch() as watched:
            loss = peer.step(number)
        updates.append(updates_of(watched.timeline()))
        return float(loss)

    return peer._replace(step=step)


def _hidden(ranks: Sequence[list], rounds: Sequence[Sequence[int]]) -> dict[str, Any]:
    """What is hidden of one peer, from its updates by rank and step, and the steps by round."""
    sums = [[fmean(rank[k][i] for rank in ranks for k in own) for i in (0, 1)] for own in rounds]
    return {
        "optimizer": spread([found for found, _ in sums])._asdict(),
        "exposed": spread([exposed for _, exposed in sums])._asdict(),
        "hidden": spread([1 - exposed / found for found, exposed in sums])._asdict(),
    }


# `bench step --rss`: the memory of a rank that runs one peer and nothing else.

TINY_STEPS = 2
_RSS_LEGEND = """\
Each peer ran alone in new processes, twice; figures are those of the fullest rank. before: resident
memory once all code was loaded, from which the others count. resident: the most in the steps. used:
the same with an allocator that returns freed memory at once. formula: states, and the least that a
step needs: gathered parameters, sums of gradients, what is being reduced, and gradients in full;
and what autograd saves of {tokens} tokens. used to start: the most while the model is built, in
full, and in warm-up."""


def run_rss(config: StepConfig, ranks: int) -> dict[str, Any]:
    """Measure one peer after the other, each on its own ranks."""
    peers = []
    for name in labels(config, ranks):
        say(f"{name}: alone in new processes, twice ...")
        usual, tight = (launch(measure_rss, ranks, config, name, each) for each in (False, True))
        peers.append(
            {
                "name": name,
                "title": tight[0]["title"],
                "before": max(rank["before"] or 0 for rank in usual),
                "resident": _grown(usual, "steps"),
                "used": _grown(tight, "steps"),
                "used to start": _grown(tight, "start"),
                "formula": max((x["formula"] for x in tight), key=lambda parts: parts["states"]),
            }
        )
    return {"params": gpt.num_params(config.model), "peers": peers}


def measure_rss(config: StepConfig, name: str, tight: bool) -> dict[str, Any]:
    """The memory of one peer, as one rank of several; if `tight`, memory is given back at once."""
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
    """Build the peer and take its steps; the peaks of memory until warm-up ended, and after it."""
    with contextlib.ExitStack() as closing:
        peer = build(make_stage(config, device, closing, steps=warmup + steps), name)
        for number in range(warmup):
            peer.step(number)
        dist.barrier()
        first = peak_bytes(device)
        known = reset_peak(device) is not None
        for number in range(warmup, warmup + steps):
            peer.step(number)
        last = peak_bytes(device) if known else None
        formula = {"states": peer.held_bytes(), **peer.needs, "activations": _saved_bytes(config)}
        return {"title": peer.name, "start": first, "steps": last, "formula": formula}


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


def _grown(ranks: Sequence[dict], key: str) -> int | None:
    """By how many bytes the fullest rank grew; None if that could not be measured."""
    if any(rank[key] is None or rank["before"] is None for rank in ranks):
        return None
    return max(rank[key] - rank["before"] for rank in ranks)


def render_rss(figures: dict[str, Any], config: StepConfig) -> str:
    """The figures as a table."""
    first, *parts = figures["peers"][0]["formula"]
    head = ["", "before", "resident", "used", "formula", "used/formula", f"= {first}"]
    rows = [[*head, *(f"+ {part}" for part in parts), "used to start"]]
    for peer in figures["peers"]:
        formula, used = sum(peer["formula"].values()), peer["used"]
        row = [f"{peer['name']}: {peer['title']}"]
        row += [bytes_or_dash(peer[key]) for key in ("before", "resident", "used")]
        row += [human_bytes(formula), "-" if used is None else f"{used / formula:.2f}"]
        row += map(human_bytes, peer["formula"].values())
        rows.append([*row, bytes_or_dash(peer["used to start"])])
    legend = _RSS_LEGEND.format(tokens=config.sequences * config.model.context)
    return f"{table(f'memory of a rank, {_world(figures, config)}', rows)}\n\n{legend}"

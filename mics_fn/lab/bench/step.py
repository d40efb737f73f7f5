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
from mics_fn.errors import PlanError, human_bytes, message
from mics_fn.inspection import Timeline
from mics_fn.lab.bench.links import AS_IS, node_interface, sent_bytes, settings_of
from mics_fn.lab.bench.stage import (
    DEFAULT_PEERS,
    OVERLAP_PEERS,
    PEERS,
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
    in_job,
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


def measure_step(config: StepConfig) -> dict[str, Any]:
    """Compare peers that take turns, as one rank of a job.

    Returns:
        On rank 0 the figures by peer, and by rate and peer; {} on the others.
    """
    device = start(config.device)
    world_size = dist.get_world_size()
    names = labels(config, world_size)
    say(f"world {world_size}: {', '.join(names)} take turns ...")
    interface = node_interface(config.node_size)
    with contextlib.ExitStack() as closing:
        stage = make_stage(config, device, closing)
        laps = take_turns(
            [build(stage, name) for name in names],
            config.turns,
            device=device,
            fence=dist.barrier,
            settings=settings_of(config.rates),
            gauge=lambda: sent_bytes(interface),
        )
    every = [[Laps(*lap) for lap in found] for found in of_all_ranks(laps)]
    if not is_first():
        return {}
    merged = [_merge(found) for found in zip(*every, strict=True)]
    return _compare(merged, names, config, of_ranks=world_size)


def _merge(laps: Sequence[Laps]) -> Laps:
    """The laps of one peer on all ranks as one: a step takes as long as its slowest rank."""
    sent = zip(*(lap.sent_bytes for lap in laps), strict=True)
    return Laps(
        laps[0].name,
        [max(each) for each in zip(*(lap.seconds for lap in laps), strict=True)],
        [_most(each) for each in sent],  # ranks of a node count the same bytes
        [fmean(each) for each in zip(*(lap.results for lap in laps), strict=True)],
    )


def _most(values: Sequence[Any]) -> Any:
    """The largest value; None if one is not known."""
    return None if None in values else max(values)


def _compare(
    laps: list[Laps], names: Sequence[str], config: StepConfig, *, of_ranks: int
) -> dict[str, Any]:
    """The figures of one comparison."""
    by_name = dict(zip(names, laps, strict=True))
    ours = [name for name in names if kind_of(name).ours]
    first = (ours or names)[0]
    losses = {name: [float(loss) for loss in lap.results] for name, lap in by_name.items()}
    gaps = {
        name: [abs(a - b) / abs(b) for a, b in zip(losses[first], own, strict=True)]
        for name, own in losses.items()
    }
    peers = [_overall(name, lap, losses[name], gaps[name]) for name, lap in by_name.items()]
    every = []
    for place, rate in enumerate(config.rates):
        at = slice(place, None, len(config.rates))
        timed = {name: _timed(by_name, name, ours, at) for name in names}
        for name, found in timed.items():
            steps = steps_at(config, place)
            found["largest_loss_gap"] = max(gaps[name][step] for step in steps)
        every.append({"rate": rate.name, "steps": rate.steps, "peers": list(timed.values())})
    return {
        "params": gpt.num_params(config.model),
        "ranks": of_ranks,
        "ours": list(dict.fromkeys(map(_base, ours))),
        "first": first,
        "steps_taken": len(losses[first]),
        "peers": peers,
        "rates": every,
    }


def _overall(name: str, lap: Laps, losses: list[float], gaps: list[float]) -> dict[str, Any]:
    """The figures of one peer that do not depend on the rate of links."""
    return {
        "name": name,
        "title": lap.name,
        "losses": losses,
        "largest_loss_gap": max(gaps),  # relative to the first peer at the same step
    }


def _timed(by_name: dict[str, Laps], name: str, ours: Sequence[str], at: slice) -> dict[str, Any]:
    """Times and bytes of one peer at one rate, and the times of our peers divided by them."""
    lap = by_name[name]
    seconds, sent = lap.seconds[at], lap.sent_bytes[at]
    known = [nbytes for nbytes in sent if nbytes is not None]
    # Peers are compared in one precision, and each peer with itself in the first precision.
    others = {_base(x): x for x in ours if x != name and _precision(x) == _precision(name)}
    first = next(x for x in by_name if _base(x) == _base(name))
    over_first = ratio(seconds, by_name[first].seconds[at])._asdict() if first != name else None
    return {
        "name": name,
        "title": lap.name,
        "seconds_by_round": seconds,
        "seconds": spread(seconds)._asdict(),
        "node_bytes": None if len(known) < len(sent) else median(known),
        "over_it": {
            x: ratio(by_name[label].seconds[at], seconds)._asdict() for x, label in others.items()
        },
        "over_first": over_first,
    }


def _base(label: str) -> str:
    """A peer's name without its precision."""
    return label.partition("@")[0]


def _precision(label: str) -> str:
    return label.partition("@")[2]


def render_step(figures: dict[str, Any], config: StepConfig) -> str:
    """The figures as tables, one per rate."""
    blocks = []
    world = f"world {figures['ranks']}, nodes of {config.node_size}, p = {config.partition_size}"
    world += f", {figures['params']:,} parameters, accumulate {config.accumulate}"
    for found in figures["rates"]:
        links = "" if found["rate"] == AS_IS else f", links {found['rate']}"
        title = f"{world}{links}: {replace(config.turns, steps=found['steps'])}"
        precisions = config.precisions[:1] if len(config.precisions) > 1 else ()
        blocks.append(_times(title, found, figures["ours"], precisions))
    legend = LEGEND.format(first=figures["first"])
    if len(config.precisions) > 1:
        legend += OVER_FIRST.format(first=config.precisions[0])
    return "\n\n".join([*blocks, legend])


def _times(
    title: str, found: dict[str, Any], ours: Sequence[str], precisions: Sequence[str]
) -> str:
    """The times at one rate."""
    over = [f"{name}/it" for name in ours]
    first = [f"over {precision}" for precision in precisions]
    rows = [("", "seconds per step", *over, *first, "a node sends", "gap")]
    for peer in found["peers"]:
        ratios, over_first = peer["over_it"], peer["over_first"]
        rows.append(
            (
                f"{peer['name']}: {peer['title']}",
                between(peer["seconds"], ".4f"),
                *(between(ratios[x], ".3f") if x in ratios else "" for x in ours),
                *(between(over_first, ".3f") if over_first else "" for _ in first),
                bytes_or_dash(peer["node_bytes"]),
                f"{peer['largest_loss_gap']:.1e}",
            )
        )
    return table(title, rows)


# `bench step --overlap`: which share of the optimizer is hidden behind hop 2.

GOAL = 0.80  # of the optimizer, hidden at 200 Mbit/s
_WAITED_S = 1e-3
_OVERLAP_LEGEND = f"""\
seconds per step: of the slowest rank. optimizer, exposed: seconds of a step in which leaves are
updated, and those of them in which no hop 2 was certainly under way; means over ranks. hidden: the
share of the optimizer that is not exposed; the goal is {GOAL:.2f} at 200mbit. Each is the median
over rounds, with the least and the most. gap: relative, from the first peer at the same step."""


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


def check_overlap(config: StepConfig, ranks: int) -> StepConfig:
    """The config with peers that have timelines; PlanError where there is no hop 2."""
    peers = OVERLAP_PEERS if config.peers == DEFAULT_PEERS else config.peers
    others = [name for name in peers if not PEERS[name].ours]
    if others:
        text = f"--overlap: {others[0]} has no timeline"
        raise PlanError(message(text, fix="choose peers of this library, such as keep overlap"))
    if config.partition_size == ranks:
        text = f"--overlap: a partition group of all {ranks} ranks has no hop 2"
        raise PlanError(message(text, fix=f"pass --partition-size, less than {ranks}"))
    return replace(config, peers=peers)


def measure_overlap(config: StepConfig) -> dict[str, Any]:
    """Compare peers that take turns, as one rank of a job.

    Returns:
        On rank 0 the figures by rate and peer; {} on the others.
    """
    device = start(config.device)
    world_size = dist.get_world_size()
    names = labels(config, world_size)
    say(f"world {world_size}: {', '.join(names)} take turns ...")
    with contextlib.ExitStack() as closing:
        stage = make_stage(config, device, closing)
        peers = [_watched(build(stage, name)) for name in names]
        laps = take_turns(
            peers,
            config.turns,
            device=device,
            fence=dist.barrier,
            settings=settings_of(config.rates),
        )
    every = [[Laps(*lap) for lap in found] for found in of_all_ranks(laps)]
    if not is_first():
        return {}
    rates = [
        {
            "rate": rate.name,
            "steps": rate.steps,
            "peers": [
                _figures(name, config, place, [found[i] for found in every])
                for i, name in enumerate(names)
            ],
        }
        for place, rate in enumerate(config.rates)
    ]
    losses = [[[loss for _, _, loss in lap.results] for lap in found] for found in every]
    gap = max(
        abs(a - b) / abs(b)
        for found in losses
        for own in found
        for a, b in zip(own, found[0], strict=True)
    )
    return {"params": gpt.num_params(config.model), "rates": rates, "largest_loss_gap": gap}


def _watched(peer: BenchPeer) -> BenchPeer:
    """The same peer, whose steps give what their timelines say, and the loss."""

    def step(number: int) -> tuple[float, float, float]:
        with mf.inspection.watch() as watched:
            loss = peer.step(number)
        found = updates_of(watched.timeline())
        return found.seconds, found.exposed, float(loss)

    return peer._replace(step=step)


def _figures(name: str, config: StepConfig, place: int, laps: Sequence[Laps]) -> dict[str, Any]:
    """One peer at one rate, from what it measured on each rank."""
    turns = slice(place, None, len(config.rates))
    steps, each = steps_at(config, place), config.rates[place].steps
    rounds = [steps[i : i + each] for i in range(0, len(steps), each)]
    sums = [[sum(lap.results[k][i] for lap in laps for k in own) for i in (0, 1)] for own in rounds]
    seconds = zip(*(lap.seconds[turns] for lap in laps), strict=True)
    count = each * len(laps)
    return {
        "name": name,
        "title": laps[0].name,
        "seconds": spread([max(found) for found in seconds])._asdict(),
        "optimizer_s": spread([found / count for found, _ in sums])._asdict(),
        "exposed_s": spread([found / count for _, found in sums])._asdict(),
        "hidden": spread([1 - exposed / found for found, exposed in sums])._asdict(),
    }


def render_overlap(figures: dict[str, Any], config: StepConfig) -> str:
    """The figures as a table for each rate."""
    blocks = []
    for found in figures["rates"]:
        links = "" if found["rate"] == AS_IS else f", links {found['rate']}"
        title = f"nodes of {config.node_size}, p = {config.partition_size}, {figures['params']:,} "
        title += f"parameters, accumulate {config.accumulate}{links}: "
        title += f"{replace(config.turns, steps=found['steps'])}"
        rows = [["", "seconds per step", "optimizer", "exposed", "hidden"]]
        for peer in found["peers"]:
            times = [between(peer[key], ".4f") for key in ("seconds", "optimizer_s", "exposed_s")]
            rows.append([peer["title"], *times, between(peer["hidden"], ".2f")])
        blocks.append(table(title, rows))
    return "\n\n".join(
        [*blocks, f"largest gap of a loss {figures['largest_loss_gap']:.1e}", _OVERLAP_LEGEND]
    )


# `bench step --rss`: the memory of a rank that runs one peer and nothing else.

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
    peers = []
    for name in labels(config, ranks):
        say(f"{name}: alone in new processes, twice ...")
        found = [
            launch(measure_rss, ranks, MemoryRun(config, name, tight)) for tight in (False, True)
        ]
        peers.append(_rss_figures(name, *found))
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
        stage = make_stage(run.config, device, closing, steps=warmup + steps)
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


def _rss_figures(name: str, usual: Sequence[dict], tight: Sequence[dict]) -> dict[str, Any]:
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

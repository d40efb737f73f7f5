"""`bench step --overlap`: which share of the optimizer is hidden behind hop 2.

[Note: what is hidden] A second of the optimizer is hidden if a hop 2 was under way in all of it. On
the CPU a rank notices late that a transfer is over, so a timeline shows transfers longer than they
were. One counts here only if it ended while the host waited for a hop 2, a millisecond or more
after the wait had begun: then it was under way until the wait. So the shares are lower bounds. What
is left is exposed: the step is longer by it.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch.distributed as dist

import mics_fn as mf
from mics_fn.errors import PlanError, message
from mics_fn.inspection import Timeline
from mics_fn.lab.bench.links import AS_IS, settings_of
from mics_fn.lab.bench.peers import PEERS, build, phases
from mics_fn.lab.bench.stage import DEFAULT_PEERS, OVERLAP_PEERS, StepConfig, make_stage, steps_at
from mics_fn.lab.bench.turns import (
    Laps,
    Peer,
    between,
    is_first,
    of_all_ranks,
    say,
    spread,
    start,
    take_turns,
)
from mics_fn.lab.models import gpt
from mics_fn.lab.report import table

GOAL = 0.80  # of the optimizer, hidden at 200 Mbit/s
_WAITED_S = 1e-3
LEGEND = f"""\
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
    names = phases(config, world_size)[world_size]
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


def _watched(peer: Peer) -> Peer:
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
        [*blocks, f"largest gap of a loss {figures['largest_loss_gap']:.1e}", LEGEND]
    )

"""`bench step`: whole training steps of `Trainer` against plain torch loops and against FSDP2."""

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist

from mics_fn.lab.bench.links import AS_IS, Rate, node_interface, sent_bytes, settings_of
from mics_fn.lab.bench.peers import build, kind_of, phases
from mics_fn.lab.bench.stage import StepConfig, make_stage, own_group, steps_at
from mics_fn.lab.bench.turns import (
    Laps,
    between,
    of_all_ranks,
    ratio,
    say,
    spread,
    start,
    take_turns,
)
from mics_fn.lab.models import gpt
from mics_fn.lab.report import bytes_or_dash, human_bytes, table

LEGEND = """\
seconds per step: of the slowest rank. x/it: the time of x divided by that of this row, round by
round. CPU: seconds of all threads of a rank in a step, the median, also for x/it. a node sends:
bytes per step through its network interface, the median; "-" if nodes have none of their own. gap:
the largest relative difference from the loss of {first} at any of these steps. states: parameters
and optimizer state of the fullest rank. in a step: by how much memory grows beyond them while the
other peers exist too. on the device, on the host: states, and by formula what a step needs beyond
them but activations, by the memory that it lies in; on the CPU both are one."""
OVER_FIRST = """
x/it compares peers of one precision; over {first}: a peer's time over its own with that one."""


def measure_step(config: StepConfig) -> dict[str, Any]:
    """Both comparisons, as one rank of a job.

    Returns:
        On rank 0 the figures of a world of one (`alone`, measured while the others wait) and of all
        ranks (`together`), each None if it was not measured; {} on the others.
    """
    device = start(config.device)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    chosen = phases(config, world_size)
    alone = together = None
    if 1 in chosen:
        own, names = own_group(), chosen[1]
        if rank == 0:
            say(f"world 1: {', '.join(names)} take turns ...")
            single = replace(config, rates=(Rate(AS_IS, config.turns.steps),))
            alone = _compare(_run(single, device, names, own), names, single, of_ranks=1)
        dist.barrier()
    if world_size > 1 and world_size in chosen:
        names = chosen[world_size]
        say(f"world {world_size}: {', '.join(names)} take turns ...")
        found = of_all_ranks(_run(config, device, names))
        every = [[Laps(*lap) for lap in laps] for laps in found]
        merged = [_merge(laps) for laps in zip(*every, strict=True)]
        together = _compare(merged, names, config, of_ranks=world_size)
    if rank:
        return {}
    return {"params": gpt.num_params(config.model), "alone": alone, "together": together}


def _run(
    config: StepConfig, device: torch.device, names: Sequence[str], own: Any = None
) -> list[Laps]:
    """This rank's part of one comparison, among all ranks or within its `own` group."""
    with contextlib.ExitStack() as closing:
        stage = make_stage(config, device, closing, own=own)
        peers = [build(stage, name) for name in names]
        if own is not None:
            return take_turns(peers, config.turns, device=device)
        interface = node_interface(config.node_size)
        return take_turns(
            peers,
            config.turns,
            device=device,
            fence=dist.barrier,
            settings=settings_of(config.rates),
            gauge=lambda: sent_bytes(interface),
        )


def _merge(laps: Sequence[Laps]) -> Laps:
    """The laps of one peer on all ranks as one: a step takes as long as its slowest rank."""
    peaks = [lap.peak_bytes for lap in laps]
    sent = zip(*(lap.sent_bytes for lap in laps), strict=True)
    return Laps(
        laps[0].name,
        [max(each) for each in zip(*(lap.seconds for lap in laps), strict=True)],
        [fmean(each) for each in zip(*(lap.cpu_seconds for lap in laps), strict=True)],
        [_most(each) for each in sent],  # ranks of a node count the same bytes
        max(lap.held_bytes for lap in laps),
        _most(peaks),
        [fmean(each) for each in zip(*(lap.results for lap in laps), strict=True)],
        {place: max(lap.places[place] for lap in laps) for place in laps[0].places},
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
        "held_bytes": lap.held_bytes,
        "peak_bytes": lap.peak_bytes,
        "places": lap.places,
    }


def _timed(by_name: dict[str, Laps], name: str, ours: Sequence[str], at: slice) -> dict[str, Any]:
    """Times and bytes of one peer at one rate, and the times of our peers divided by them."""
    lap = by_name[name]
    seconds, cpu_seconds, sent = lap.seconds[at], lap.cpu_seconds[at], lap.sent_bytes[at]
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
        "cpu_seconds": spread(cpu_seconds)._asdict(),
        "node_bytes": None if len(known) < len(sent) else median(known),
        "over_it": {
            x: ratio(by_name[label].seconds[at], seconds)._asdict() for x, label in others.items()
        },
        "cpu_over_it": {
            x: ratio(by_name[label].cpu_seconds[at], cpu_seconds)._asdict()
            for x, label in others.items()
        },
        "over_first": over_first,
    }


def _base(label: str) -> str:
    """A peer's name without its precision."""
    return label.partition("@")[0]


def _precision(label: str) -> str:
    return label.partition("@")[2]


def render_step(figures: dict[str, Any], config: StepConfig) -> str:
    """The figures as tables: for each world one block per rate, then losses and memory."""
    blocks, legend = [], ""
    for part in filter(None, (figures["alone"], figures["together"])):
        alone = part["ranks"] == 1
        layout = "" if alone else f", nodes of {config.node_size}, p = {config.partition_size}"
        world = f"world {part['ranks']}{layout}"
        world += f", {figures['params']:,} parameters, accumulate {config.accumulate}"
        for found in part["rates"]:
            links = "" if found["rate"] == AS_IS else f", links {found['rate']}"
            title = f"{world}{links}: {replace(config.turns, steps=found['steps'])}"
            precisions = config.precisions[:1] if len(config.precisions) > 1 else ()
            blocks.append(_times(title, found, part["ours"], precisions, alone=alone))
        blocks.append(_memory(f"world {part['ranks']}, the whole run", part["peers"]))
        legend = LEGEND.format(first=part["first"])
        if len(config.precisions) > 1:
            legend += OVER_FIRST.format(first=config.precisions[0])
    return "\n\n".join([*blocks, legend])


def _times(
    title: str,
    found: dict[str, Any],
    ours: Sequence[str],
    precisions: Sequence[str],
    *,
    alone: bool,
) -> str:
    """The times at one rate; a rank alone has no links, so its table shows CPU times instead."""
    over = [f"{name}/it" for name in ours]
    wire = [] if alone else ["a node sends"]
    cpu_over = [f"CPU {text}" for text in over] if alone else []
    first = [f"over {precision}" for precision in precisions]
    rows = [("", "seconds per step", *over, *first, "CPU", *cpu_over, *wire, "gap")]
    for peer in found["peers"]:
        ratios, cpu, over_first = peer["over_it"], peer["cpu_over_it"], peer["over_first"]
        rows.append(
            (
                f"{peer['name']}: {peer['title']}",
                between(peer["seconds"], ".4f"),
                *(between(ratios[x], ".3f") if x in ratios else "" for x in ours),
                *(between(over_first, ".3f") if over_first else "" for _ in first),
                f"{peer['cpu_seconds']['median']:.4f}",
                *(f"{cpu[x]['median']:.3f}" if x in cpu else "" for x in ours if cpu_over),
                *(bytes_or_dash(peer["node_bytes"]) for _ in wire),
                f"{peer['largest_loss_gap']:.1e}",
            )
        )
    return table(title, rows)


def _memory(title: str, peers: Sequence[dict[str, Any]]) -> str:
    rows = [["", "loss at end", "gap", "states", "in a step", "on the device", "on the host"]]
    for peer in peers:
        rows.append(
            [
                f"{peer['name']}: {peer['title']}",
                f"{peer['losses'][-1]:.6f}",
                f"{peer['largest_loss_gap']:.1e}",
                human_bytes(peer["held_bytes"]),
                bytes_or_dash(peer["peak_bytes"]),
                *(human_bytes(peer["places"][place]) for place in ("device", "host")),
            ]
        )
    return table(title, rows)

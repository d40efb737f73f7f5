"""`bench memory`: what ranks hold, by formulas; while a model becomes shards; and by processes.

[Note: what counts] Every tensor that exists counts (see [Note: counted storage] in
`turns`), so nothing that is kept can hide. Between two steps there are the states, and
buffers that wait for the next step, because those of gathers and reductions are used again. They
are shown beside the states. Within a step they are in use, and part of its measurement.

[Note: resident memory] Peers that take turns in one process share its memory, so here each peer has
its own processes. Memory counts from the end of a few steps of a tiny model, when all code is
loaded. Glibc keeps freed blocks of up to 32 MB for later, so the peak of resident memory is larger
than the peak of memory in use. Both are measured, each in processes of its own: "resident" with the
usual allocator, "used" with an allocator that returns blocks to the system at once.
"""

import contextlib
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import mics_fn as mf
from mics_fn import tree
from mics_fn._device import is_async
from mics_fn._torch import storage_id
from mics_fn.collectives import checksum
from mics_fn.errors import PlanError, human_bytes, message
from mics_fn.lab.bench.links import AS_IS
from mics_fn.lab.bench.stage import (
    PLACES,
    StepConfig,
    build,
    cut_of,
    make_place,
    make_stage,
    memory_formula,
    own_group,
    phases,
)
from mics_fn.lab.bench.turns import (
    count_on,
    give_back_at_once,
    in_job,
    is_first,
    memory_bytes,
    of_all_ranks,
    peak_bytes,
    reset_peak,
    say,
    start,
    world_size,
)
from mics_fn.lab.models import gpt
from mics_fn.lab.models.text import load_text
from mics_fn.lab.ranks.launch import launch
from mics_fn.lab.report import buckets_of, bytes_or_dash, table
from mics_fn.shards import Bucket, Precision

# `bench memory`: what a rank holds, between steps and within a step, against the formulas.

TEXT_BYTES = 500_000
BUCKETS = 16  # as many as `Trainer` makes of a model of usual size
TOLERANCE = 0.02  # of the formula, on top of one bucket
LIVE_BUCKETS = 2
LEGEND = """\
Bytes of tensors on the fullest rank; padding counts. between steps: parameters and the two moments
of AdamW; waiting: buffers that the next step uses again. in a step: the most after {warmup} steps
of warm-up, with a budget of {live} gathered buckets; activations are measured, but not in the
formula. gap: the distance from the formula in units of the largest bucket. formula of a step:
states, gathered parameters (kept for the step, or live at once), sums of gradients and means, the
few buckets that are being reduced, and gradients in full."""


@dataclass(frozen=True)
class StatesConfig:
    """Everything that decides what is measured.

    Args:
        node_size: ranks of a node.
        placements: names from `PLACES`.
        precisions: their texts.
        steps: measured steps.
        warmup: steps before them; the first one records the order of use.
        accumulate: micro-steps in a step.
        device: "auto", "cpu" or "cuda".
        model: sizes of the GPT.
    """

    node_size: int
    placements: tuple[str, ...] = tuple(PLACES)
    precisions: tuple[str, ...] = ("f32", "compute=bf16,reduce=bf16")
    steps: int = 2
    warmup: int = 3
    accumulate: int = 1
    device: str = "auto"
    model: gpt.GPTConfig = field(default_factory=gpt.GPTConfig)


class HeldBytes(NamedTuple):
    """What one rank held, in bytes."""

    between: int  # after the last step, without waiting buffers
    waiting: int
    within: int  # the most in the measured steps
    first: int  # the most before them


def measure_states(config: StatesConfig) -> dict[str, Any]:
    """Count the bytes under each placement with each precision, as one rank of a job.

    Returns:
        On rank 0 the figures; {} on the others.
    """
    device = start(config.device)
    checksum(torch.zeros(1, device=device))  # the first call in a process makes a table of 8 MiB
    rows = []
    for name in config.placements:
        for precision in config.precisions:
            say(f"{name}, {precision}: counting ...")
            rows.append(_measure(config, name, precision, device))
    return {"params": gpt.num_params(config.model), "rows": rows} if is_first() else {}


def _measure(
    config: StatesConfig, name: str, precision: str, device: torch.device
) -> dict[str, Any]:
    """One placement with one precision, on all ranks."""
    n = world_size()
    cut = cut_of(name, n, config.node_size)
    with make_place(name, n, config.node_size, device=device) as groups:
        buckets, live, mine = _run(config, groups, precision)
        sizes, replicas = groups.hierarchy.route.sizes, groups.num_replicas
    every = [HeldBytes(*held) for held in of_all_ranks(mine)]
    parts = memory_formula(
        buckets,
        cut,
        sizes,
        live_bytes=live,
        num_replicas=replicas,
        micro_steps=config.accumulate,
        exchanged=not is_async(device),
    )
    bucket = max(b.numel * max(b.dtype.itemsize, b.accumulate.itemsize) for b in buckets)
    between = against(parts["states"], max(held.between for held in every), bucket)
    within = against(sum(parts.values()), max(held.within for held in every), bucket)
    return {
        "placement": name,
        "precision": precision,
        "cut": cut._asdict(),
        "buckets": len(buckets),
        "bucket_bytes": bucket,
        "live_bytes": live,
        "formula": parts,
        "between": between,
        "within": within,
        "waiting_bytes": max(held.waiting for held in every),
        "first_bytes": max(held.first for held in every),
        "ranks": [held._asdict() for held in every],
    }


def _run(
    config: StatesConfig, groups: mf.Groups, precision: str
) -> tuple[list[Bucket], int | None, HeldBytes]:
    """The buckets of the model, the budget in bytes, and what this rank held."""
    text, context = load_text(TEXT_BYTES), config.model.context
    batch = text.batch("train", step=0, rank=groups.rank, size=config.accumulate, context=context)
    dtypes = Precision.parse(precision).dtypes("", torch.float32)
    with count_on(groups.device) as count:
        model = gpt.seeded(config.model, groups.device)
        sizes = [p.numel() for p in model.parameters()]
        live = LIVE_BUCKETS * max(sizes) * dtypes.compute.itemsize
        trainer = mf.Trainer(
            model,
            mf.optim.adamw(3e-4),
            groups,
            loss=gpt.loss,
            accumulate=config.accumulate,
            live_bytes=live,
            precision=precision,
            bucket_bytes=4 * sum(sizes) // BUCKETS,
        )
        del model
        peaks = []
        for steps in (config.warmup, config.steps):
            count.reset_peak()
            for _ in range(steps):
                trainer.step(batch)
            peaks.append(count.peak)
        buckets, waiting = buckets_of(trainer.state.params), groups.hierarchy.pools.waiting_bytes
        # Where nothing has to be fetched again, the trainer needs no budget.
        budget = getattr(trainer.schedule, "live_bytes", live)
        return buckets, budget, HeldBytes(count.now - waiting, waiting, peaks[1], peaks[0])


def against(formula: float, measured: int, bucket: int) -> dict[str, Any]:
    """A measurement beside its formula, and whether it is close: see `TOLERANCE`."""
    gap = measured - formula
    return {
        "formula": formula,
        "measured": measured,
        "ratio": measured / formula,
        "gap_buckets": gap / bucket,
        "close": abs(gap) <= TOLERANCE * formula + bucket,
    }


def render_states(figures: dict[str, Any], config: StatesConfig) -> str:
    """The figures as tables."""
    heads = ("between steps", "formula", "ratio", "waiting", "in a step", "formula", "ratio", "gap")
    rows: list[tuple[str, ...]] = [("placement", "precision", *heads)]
    parts = [("placement", "precision", *figures["rows"][0]["formula"])]
    far = []
    for row in figures["rows"]:
        between, within = row["between"], row["within"]
        label = (row["placement"], row["precision"])
        rows.append(
            (
                *label,
                *(human_bytes(between[key]) for key in ("measured", "formula")),
                f"{between['ratio']:.4f}",
                human_bytes(row["waiting_bytes"]),
                *(human_bytes(within[key]) for key in ("measured", "formula")),
                f"{within['ratio']:.4f}",
                f"{within['gap_buckets']:+.2f}",
            )
        )
        parts.append((*label, *(human_bytes(part) for part in row["formula"].values())))
        if not (between["close"] and within["close"]):
            far.append(" ".join(label))
    title = (
        f"memory of a rank, {figures['params']:,} parameters, nodes of {config.node_size}, "
        f"accumulate {config.accumulate}"
    )
    close = f"within {TOLERANCE:.0%} and one bucket of the formula"
    verdict = f"  NOT {close}: {', '.join(far)}" if far else f"  all {close}"
    legend = LEGEND.format(warmup=config.warmup, live=LIVE_BUCKETS)
    return f"{table(title, rows)}\n{verdict}\n\n{table('formula of a step', parts)}\n\n{legend}"


# `bench memory --init`: the most memory that a rank holds while a model becomes shards.

_INIT_LEGEND = """\
Bytes of tensors on the fullest rank. model, then shard: every rank makes the whole model; formula:
the model, and the rank's shards with one bucket that is being cut (or, before that, the memory of a
digest of the values). init: by init_model; formula: the rank's shards and the largest parameter.
left: bytes that remain; these should be the shards."""

Shards = dict[str, Any]
Make = Callable[[StatesConfig, mf.Groups, dict[str, Any]], Shards]


class Way(NamedTuple):
    """A way to make the shards of a model, and a formula for the most bytes that it holds."""

    make: Make
    formula: Callable[[float, Sequence[Bucket], Sequence[int]], float]  # shards, buckets, leaves


def _from_model(config: StatesConfig, groups: mf.Groups, options: dict[str, Any]) -> Shards:
    params = dict(gpt.seeded(config.model, groups.device).named_parameters())
    return mf.shard(params, groups, order=tree.own_order(params), **options)


def _by_init(config: StatesConfig, groups: mf.Groups, options: dict[str, Any]) -> Shards:
    return mf.init_model(lambda: gpt.GPT(config.model), groups, seed=0, **options)[1]


def _full(bucket: Bucket) -> int:
    return bucket.numel * bucket.dtype.itemsize


def _whole_and_parts(shards: float, buckets: Sequence[Bucket], leaves: Sequence[int]) -> float:
    hashed = 16 * min(max(leaves) // 4, 2**20)  # two int64 per float32, of so many at once
    return sum(leaves) + max(hashed, shards + max(map(_full, buckets)))


WAYS = {
    "model, then shard": Way(_from_model, _whole_and_parts),
    "init": Way(_by_init, lambda shards, buckets, leaves: shards + max(leaves)),
}


def measure_init(config: StatesConfig) -> dict[str, Any]:
    """Count the bytes that each way holds, as one rank of a job; shards are cut over all ranks.

    Returns:
        On rank 0 the figures; {} on the others.
    """
    device = start(config.device)
    n, model = world_size(), gpt.seeded(config.model, torch.device("meta"))
    sizes = [p.numel() * p.itemsize for p in model.parameters()]
    rows = []
    with mf.make_groups(n, node_size=config.node_size, device=device) as groups:
        # A small model first, so that memory which a process takes only once does not count.
        tiny = replace(config, model=gpt.GPTConfig(256, 4, dim=16, num_heads=2, num_blocks=1))
        for name, way in WAYS.items():
            for precision in config.precisions:
                say(f"{name}, {precision}: counting ...")
                options = {"precision": precision, "bucket_bytes": sum(sizes) // BUCKETS}
                init_peak(way.make, tiny, groups, options)
                peak, left, buckets = init_peak(way.make, config, groups, options)
                shards = sum(b.chunk * b.dtype.itemsize for b in buckets)
                bucket = max(map(_full, buckets))
                row = {
                    "way": name,
                    "precision": precision,
                    "shards": shards,
                    "bucket_bytes": bucket,
                }
                row["left"] = max(of_all_ranks(left))
                formula = way.formula(shards, buckets, sizes)
                row["peak"] = against(formula, max(of_all_ranks(peak)), bucket)
                rows.append(row)
    if not is_first():
        return {}
    return {"params": sum(sizes) // 4, "ranks": n, "rows": rows}


def init_peak(
    make: Make, config: StatesConfig, groups: mf.Groups, options: dict[str, Any]
) -> tuple[int, int, list[Bucket]]:
    """The most bytes while shards are made, the bytes that remain, and the buckets."""
    gc.collect()
    with count_on(groups.device) as count:
        shards = make(config, groups, options)
        gc.collect()
        return count.peak, count.now, buckets_of(shards)


def render_init(figures: dict[str, Any], config: StatesConfig) -> str:
    """The figures as a table."""
    rows: list[tuple[str, ...]] = [
        ("", "precision", "at most", "formula", "ratio", "gap", "left", "shards")
    ]
    far = []
    for row in figures["rows"]:
        peak = row["peak"]
        rows.append(
            (
                row["way"],
                row["precision"],
                *(human_bytes(peak[key]) for key in ("measured", "formula")),
                f"{peak['ratio']:.4f}",
                f"{peak['gap_buckets']:+.2f}",
                *(human_bytes(row[key]) for key in ("left", "shards")),
            )
        )
        if not peak["close"]:
            far.append(f"{row['way']} {row['precision']}")
    title = f"memory of a rank that makes {figures['params']:,} parameters, p = {figures['ranks']}"
    close = f"within {TOLERANCE:.0%} and one bucket of the formula"
    verdict = f"  NOT {close}: {', '.join(far)}" if far else f"  all {close}"
    return f"{table(title, rows)}\n{verdict}\n\n{_INIT_LEGEND}"


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

"""`bench memory`: what a rank holds, between steps and within a step, against the formulas.

[Note: what counts] Every tensor that exists counts (see [Note: counted storage] in
`tensor_memory`), so nothing that is kept can hide. Between two steps there are the states, and
buffers that wait for the next step, because those of gathers and reductions are used again. They
are shown beside the states. Within a step they are in use, and part of its measurement.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

import mics_fn as mf
from mics_fn._device import is_async
from mics_fn.collectives import checksum
from mics_fn.lab.bench.formulas import PLACES, cut_of, make_place, memory_formula
from mics_fn.lab.bench.tensor_memory import count_on
from mics_fn.lab.bench.turns import is_first, of_all_ranks, say, start, world_size
from mics_fn.lab.models import gpt
from mics_fn.lab.models.text import load_text
from mics_fn.lab.report import buckets_of, human_bytes, table
from mics_fn.shards import Bucket, Precision

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


class Held(NamedTuple):
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
    every = [Held(*held) for held in of_all_ranks(mine)]
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
) -> tuple[list[Bucket], int | None, Held]:
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
        return buckets, budget, Held(count.now - waiting, waiting, peaks[1], peaks[0])


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

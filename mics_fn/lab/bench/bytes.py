"""`bench bytes`: what a step sends at each level, as counted and by formula."""

import itertools
from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch.distributed as dist

import mics_fn as mf
from mics_fn.groups import Topology, valid_partition_sizes
from mics_fn.lab.bench.stage import TrainConfig, make_batches, make_trainer
from mics_fn.lab.bench.turns import is_first, of_all_ranks, say, start
from mics_fn.lab.models.task import join
from mics_fn.lab.report import buckets_of, table, wire_bytes
from mics_fn.shards import Precision


@dataclass(frozen=True, kw_only=True)
class BytesConfig(TrainConfig):
    """Options of `bench bytes`.

    Args:
        partition_sizes: ranks that share one replica; () takes all sizes that fit.
        live_buckets: the budget for gathered parameters in units of the largest one, as peers of
            `bench step` have it; None keeps all.
    """

    partition_sizes: tuple[int, ...] = ()
    live_buckets: int | None = None


class RankBytes(NamedTuple):
    """Bytes that one rank counted in its steps, beside the formulas."""

    ledger: list[dict[str, tuple[int, int]]]  # for each step: name -> (calls, bytes)
    formula: dict[str, tuple[float, str]]  # for one step: name -> (bytes, formula in words)
    full_bytes: int  # of the parameters, padding included


def measure_bytes(config: BytesConfig) -> dict[str, Any]:
    """Count the bytes of a step for each partition size and precision, as one rank of a job.

    Returns:
        On rank 0 the figures; {} on the others.
    """
    device = start(config.device)
    sizes = config.partition_sizes
    sizes = sizes or valid_partition_sizes(Topology.of(dist.get_world_size(), config.node_size))
    found = []
    for p, text in itertools.product(sizes, config.precisions or ("f32",)):
        say(f"p = {p}, {text}: counting ...")
        with mf.make_groups(p, node_size=config.node_size, device=device) as groups:
            mine = _run(config, groups, Precision.parse(text))
            every = [RankBytes(*one) for one in of_all_ranks(mine)]
            found.append(_summarize(groups, every) | {"precision": text})
    return {"partition_sizes": found} if is_first() else {}


def _run(config: BytesConfig, groups: mf.Groups, precision: Precision) -> RankBytes:
    """Count the bytes that the steps of this rank send."""
    trainer = make_trainer(config, groups, config.live_buckets, precision)
    batch = join(make_batches(config, groups.device, 1)[0])
    for _ in range(config.turns.warmup):
        trainer.step(batch)
    ledger = []
    for _ in range(config.turns.steps):
        groups.traffic.clear()
        trainer.step(batch)
        ledger.append(groups.traffic.snapshot())
    buckets, route = buckets_of(trainer.state.params), groups.hierarchy.route
    planned = getattr(trainer.schedule, "schedule", None)  # on a budget buckets are gathered again
    fetches = None if planned is None else Counter(planned.fetches)
    r, s = groups.num_replicas, config.accumulate
    formula = wire_bytes(buckets, route, r, accumulate=s, fetches=fetches)
    return RankBytes(ledger, formula, sum(x.numel * x.dtype.itemsize for x in buckets))


def _summarize(groups: mf.Groups, every: list[RankBytes]) -> dict[str, Any]:
    first = every[0]
    names = list(dict.fromkeys([*first.formula, *(w for r in every for w in r.ledger[-1])]))
    rows = {}
    for name in names:
        counted = [rank.ledger[-1].get(name, (0, 0)) for rank in every]
        formula, why = first.formula.get(name, (0.0, "not part of a step"))
        rows[name] = {
            "calls": [calls for calls, _ in counted],
            "ledger": [nbytes for _, nbytes in counted],
            "formula": formula,
            "why": why,
        }
    return {
        "partition_size": groups.partition_size,
        "num_replicas": groups.num_replicas,
        "levels": [[level.name, level.gather.size] for level in groups.hierarchy.route.levels],
        "full_bytes": first.full_bytes,
        "steady": all(step == rank.ledger[0] for rank in every for step in rank.ledger),
        "rows": rows,
    }


def render_bytes(figures: dict[str, Any], config: BytesConfig) -> str:
    """Render the figures as tables."""
    blocks = []
    for part in figures["partition_sizes"]:
        levels = " x ".join(f"{name} {size}" for name, size in part["levels"]) or "none"
        title = (
            f"p = {part['partition_size']}, levels {levels}, r = {part['num_replicas']} replicas, "
            f"M = {part['full_bytes']:,} bytes, s = {config.accumulate}, "
            f"{part['precision']}; each rank in one step"
        )
        rows = [("", "calls", "ledger", "formula", "ratio", "")]
        for name, row in part["rows"].items():
            formula = row["formula"]
            worst = max(row["ledger"], key=lambda sent: abs(sent - formula))
            ratio = f"{worst / formula:.4f}" if formula else "-"
            cells = (f"{max(row['calls'])}", f"{worst:,}", f"{formula:,.0f}", ratio, row["why"])
            rows.append((name, *cells))
        steady = "the same in every step" if part["steady"] else "NOT THE SAME IN EVERY STEP"
        blocks.append(f"{table(title, rows)}\n  {steady}")
    return "\n\n".join(blocks)

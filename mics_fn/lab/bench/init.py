"""`bench memory --init`: the most memory that a rank holds while a model becomes shards."""

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

import mics_fn as mf
from mics_fn import tree
from mics_fn.lab.bench.states import BUCKETS, TOLERANCE, StatesConfig, against
from mics_fn.lab.bench.tensor_memory import count_on
from mics_fn.lab.bench.turns import is_first, of_all_ranks, say, start, world_size
from mics_fn.lab.models import gpt
from mics_fn.lab.report import buckets_of, human_bytes, table
from mics_fn.shards import Bucket

LEGEND = """\
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
    return f"{table(title, rows)}\n{verdict}\n\n{LEGEND}"

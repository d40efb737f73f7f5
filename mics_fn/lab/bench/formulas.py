"""Placements by name, with formulas for what a rank should hold and send under each of them."""

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch

import mics_fn as mf
from mics_fn.errors import PlanError, message
from mics_fn.groups import MOST_FULL, placement
from mics_fn.lab.report import gather_bytes
from mics_fn.shards import Bucket

FILLED = 2  # buckets of full gradients that backward is making, in the dtype that computes


class Cut(NamedTuple):
    """The number of ranks over which each kind of data is cut."""

    states: int
    params: int  # gathered parameters, from their first use in a step to its end
    grads: int  # gradients, after each micro-step


# Over how many ranks a placement cuts states, parameters and gradients: "n" are all ranks, "k"
# those of a node, "1" is whole.
PLACES = {
    "ddp": "111",
    "zero1": "n11",
    "zero2": "n1n",
    "zero3": "nnn",
    "mics": "kkk",
    "fsdp": "kkk",
    "hpz": "nkn",
    "hybrid": "nkk",
}


def cut_of(name: str, num_ranks: int, node_size: int) -> Cut:
    """The numbers of a placement in a world."""
    sizes = {"n": num_ranks, "k": node_size, "1": 1}
    return Cut(*(sizes[letter] for letter in PLACES[name]))


def check_places(names: Sequence[str]) -> None:
    """Raise PlanError for names that are not those of placements."""
    wrong = [name for name in names if name not in PLACES]
    if wrong:
        what = f"--placement {' '.join(names)}: there is no placement {' '.join(wrong)}"
        raise PlanError(message(what, fix=f"choose from {' '.join(PLACES)}"))


def make_place(name: str, num_ranks: int, node_size: int, **options: Any) -> mf.Groups:
    """Groups of a placement, made by all ranks.

    Args:
        name: a key of `PLACES`.
        num_ranks, node_size: the world.
        options: other options of `make_groups`.
    """
    partition_size = cut_of(name, num_ranks, node_size).states
    groups = mf.make_groups(partition_size, node_size=node_size, **options)
    return placement.place(groups, name)


def memory_formula(
    buckets: Sequence[Bucket], cut: Cut, *, live_bytes: int | None, micro_steps: int = 1
) -> dict[str, float]:
    """The most that one of several ranks holds in a step with AdamW, by kind.

    Args:
        buckets: the buckets of the model, all of them trained; padding counts.
        cut: over how many ranks each kind is cut.
        live_bytes: the budget for gathered parameters; None keeps all.
        micro_steps: the micro-steps of a step.

    Returns:
        Bytes of "states" (parameters and both moments, which is all that exists between steps),
        "parameters" (a copy kept for the step, and gathered buckets), "sums" (sums of gradients,
        and this rank's means if these are cut further), and "in full" (the few buckets of gradients
        that are being reduced). Activations are not included.

    Example:
        >>> from mics_fn.shards.bucket import LeafSpec, plan_buckets
        >>> leaves = [LeafSpec(f"w{i}", (100,), torch.float32, 4, True, None) for i in range(8)]
        >>> buckets = [bucket for bucket, _ in plan_buckets(leaves, bucket_bytes=400)]
        >>> memory_formula(buckets, Cut(4, 4, 4), live_bytes=0)
        {'states': 2688.0, 'parameters': 448, 'sums': 896.0, 'in full': 3584}
    """
    compute = [bucket.nbytes for bucket in buckets]
    reduce = [bucket.numel * bucket.reduce.itemsize for bucket in buckets]
    sums = [bucket.numel * sum_dtype(bucket, micro_steps).itemsize for bucket in buckets]
    few = min(MOST_FULL, len(buckets))
    live = 0
    if cut.params > 1 or (cut.states == 1 and any(b.compute != b.dtype for b in buckets)):
        live = sum(compute)
    if live and live_bytes is not None:  # one bucket is always allowed, and one more ahead
        budget = max(live_bytes, max(compute))
        live = min(live, budget + (max(compute) if live_bytes > max(compute) else 0))
    packed = 0
    if cut.states > 1 or micro_steps > 1:
        packed = 2 * few * max(reduce if cut.grads > 1 else sums)
    return {
        "states": 3 * sum(bucket.numel * bucket.dtype.itemsize for bucket in buckets) / cut.states,
        "parameters": live + (sum(compute) / cut.params if cut.params < cut.states else 0),
        "sums": sum(sums) / cut.grads + (sum(sums) / cut.states if cut.grads < cut.states else 0),
        "in full": packed + min(FILLED, len(buckets)) * max(compute),
    }


def sum_dtype(bucket: Bucket, micro_steps: int) -> torch.dtype:
    """The dtype of a sum of gradients; after one micro-step the wider of its two ends."""
    if micro_steps > 1:
        return bucket.accumulate
    return torch.promote_types(bucket.dtype, bucket.reduce)


def traffic_formula(
    levels: Sequence[tuple[str, int]],
    cut: Cut,
    *,
    gathered: float,
    reduced: float,
    num_replicas: int,
    fetches: float = 1,
    micro_steps: int = 1,
) -> dict[str, float]:
    """The bytes that each rank sends in a step, by communicator.

    Args:
        levels: names and sizes of the levels of a partition group, outermost first.
        cut: over how many ranks each kind is cut.
        gathered, reduced: bytes of all parameters and of all gradients as they travel, padding
            included.
        num_replicas: the ranks of a replication group.
        fetches: how often a parameter is gathered in a step, on average. Only the first time uses
            the levels outside those over which a copy is kept.
        micro_steps: the micro-steps of a step. Each uses the levels over which gradients are cut.

    Example:
        >>> sizes = {"gathered": 800, "reduced": 800, "num_replicas": 1, "fetches": 2}
        >>> traffic_formula([("node", 2), ("rank", 2)], Cut(4, 2, 4), **sizes)
        {'gather node': 200.0, 'gather rank': 800.0, 'reduce node': 200.0, 'reduce rank': 400.0}
    """
    sizes = [size for _, size in levels]
    found = {}
    for purpose, nbytes, often, least in (
        ("gather", gathered, fetches, cut.params),
        ("reduce", reduced, micro_steps, cut.grads),
    ):
        for i, sent in enumerate(gather_bytes(sizes, nbytes)):
            found[f"{purpose} {levels[i][0]}"] = sent * (1 if prod(sizes[i:]) > least else often)
    if num_replicas > 1:
        found["replicas"] = 2 * (num_replicas - 1) / num_replicas * reduced / cut.states
    return found

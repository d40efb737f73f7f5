"""Placements by name, with the formula for what a rank should hold under each of them."""

from collections.abc import Sequence
from math import prod
from statistics import median_low
from typing import Any, NamedTuple

import torch

import mics_fn as mf
from mics_fn.collectives import Codec, mean_bytes
from mics_fn.errors import PlanError, message
from mics_fn.groups import placement
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
    buckets: Sequence[Bucket],
    cut: Cut,
    sizes: Sequence[int],
    *,
    live_bytes: int | None,
    num_replicas: int = 1,
    micro_steps: int = 1,
    exchanged: bool = True,
) -> dict[str, float]:
    """The most that one of several ranks holds in a step with AdamW, by kind.

    Args:
        buckets: the buckets of the model, all of them trained; padding counts.
        cut: over how many ranks each kind is cut.
        sizes: the ranks of each level of a partition group, outermost first.
        live_bytes: the budget for gathered parameters; None keeps all, as `Trainer` does, which in
            the last pass packs gradients where their parameters were.
        num_replicas: the ranks of a replication group.
        micro_steps: the micro-steps of a step.
        exchanged: whether ranks exchange parts of gradients, as they do with gloo. Of two parts one
            arrives, else all. With NCCL one arrives, which is the mean.

    Returns:
        Bytes of "states" (parameters and both moments, which is all that exists between steps),
        "parameters" (a copy kept for the step, and gathered buckets), "sums" (sums of gradients,
        and this rank's means if these are cut further), "hops" (the few buckets that are being
        reduced), and "in full" (gradients that backward is making). Activations are not included,
        nor is the least memory for hops, `groups.LEAST_RING`.

    Example:
        >>> from mics_fn.shards.bucket import LeafSpec, plan_buckets
        >>> leaves = [LeafSpec(f"w{i}", (100,), torch.float32, 4, True, None) for i in range(8)]
        >>> buckets = [bucket for bucket, _ in plan_buckets(leaves, bucket_bytes=400)]
        >>> memory_formula(buckets, Cut(4, 4, 4), (2, 2), live_bytes=0)
        {'states': 2688.0, 'parameters': 448, 'sums': 896.0, 'hops': 672.0, 'in full': 896}
    """
    compute = [bucket.nbytes for bucket in buckets]
    live = 0
    if cut.params > 1 or (cut.states == 1 and any(b.compute != b.dtype for b in buckets)):
        live = sum(compute)
    if live and live_bytes is not None:  # one bucket is always allowed, and one more ahead
        budget = max(live_bytes, max(compute))
        live = min(live, budget + (max(compute) if live_bytes > max(compute) else 0))
    numbers = {0, min(1, micro_steps - 1), micro_steps - 1}  # of passes that differ
    passes = [(number == 0, number == micro_steps - 1) for number in numbers]
    hops, reused = 0.0, bool(live) and live_bytes is None
    sums = [
        bucket.numel * sum_dtype(bucket, micro_steps).itemsize
        for bucket in buckets
        if not (reused and _stays(bucket, cut, micro_steps))
    ]
    for first, last in passes:
        found = [
            _in_hops(b, cut, sizes, num_replicas, micro_steps, first, last, exchanged, reused)
            for b in buckets
        ]
        few = max(count for _, count in found) * median_low(nbytes for nbytes, _ in found)
        few = few if live_bytes is None else min(few, live_bytes)
        hops = max(hops, few, *(nbytes for nbytes, _ in found))
    return {
        "states": 3 * sum(bucket.numel * bucket.dtype.itemsize for bucket in buckets) / cut.states,
        "parameters": live + (sum(compute) / cut.params if cut.params < cut.states else 0),
        "sums": sum(sums) / cut.grads + (sum(sums) / cut.states if cut.grads < cut.states else 0),
        "hops": hops,
        "in full": min(FILLED, len(buckets)) * max(compute),
    }


def _fits(bucket: Bucket, cut: Cut) -> bool:
    """Whether gradients are packed where gathered parameters were, in the last pass."""
    sent = [x for x in (bucket.reduce, bucket.mean_wire) if isinstance(x, torch.dtype)]
    return cut.grads > 1 and max(x.itemsize for x in sent) <= bucket.compute.itemsize


def _stays(bucket: Bucket, cut: Cut, micro_steps: int) -> bool:
    """Whether the mean stays there too, also where a code of it is sent in hop 2."""
    same = micro_steps == 1 and sum_dtype(bucket, micro_steps) == bucket.reduce
    same = same and not isinstance(bucket.hop2, torch.dtype)
    return same and cut.grads == cut.states and _fits(bucket, cut)


def _in_hops(
    bucket: Bucket,
    cut: Cut,
    sizes: Sequence[int],
    num_replicas: int,
    micro_steps: int,
    first: bool,
    last: bool,
    exchanged: bool,
    reused: bool,
) -> tuple[float, int]:
    """Bytes that a bucket's reduction takes in one pass, and how many of them there are at most.

    In the first pass a mean goes where the sum will be, in later ones it has to be added to it. If
    the memory of gathered parameters is `reused`, see `_fits` and `_stays`.
    """
    if cut.states == num_replicas == 1:
        return 0, 1
    places = [i for i in range(len(sizes) + 1) if prod(sizes[i:]) == cut.grads]
    outer, inner = sizes[: places[0]], sizes[places[0] :]
    total, width = sum_dtype(bucket, micro_steps), bucket.reduce.itemsize
    same, numel = total == bucket.reduce, bucket.numel
    outer, hop2 = outer if last else (), bucket.mean_wire
    copies = last and total != hop2 and num_replicas > 1
    packed = [0.0, numel * width if cut.grads > 1 else 0 if first else numel * total.itemsize]
    packed.append(numel / cut.grads * width if prod(outer) > 1 and not same else 0)
    if copies and isinstance(hop2, torch.dtype):
        packed.append(numel / cut.states * hop2.itemsize)
    if reused and last and _fits(bucket, cut):
        packed = [0.0]
    direct = same and first and not (reused and _stays(bucket, cut, micro_steps))
    arriving = max(
        _arriving(bucket, inner, numel, direct, exchanged),
        _arriving(bucket, outer, numel / cut.grads, same, exchanged),
    )
    if copies and isinstance(hop2, Codec):
        arriving = max(arriving, mean_bytes(hop2, numel // cut.states, num_replicas))
    gathers = copies and isinstance(hop2, Codec)  # of codes, while others are exchanged
    return max(packed) + arriving, 1 + len(inner) + len(outer) + copies + gathers


def _arriving(
    bucket: Bucket, sizes: Sequence[int], numel: float, direct: bool, exchanged: bool
) -> float:
    """Bytes of the memory for what arrives, if the last level can `direct` it to the mean.

    Codes of hop 1 count as if all levels sent them.
    """
    most, width = 0.0, bucket.reduce.itemsize
    for i in reversed(range(len(sizes))):
        all_parts = exchanged and sizes[i] > 2
        if bucket.hop1 is not None:  # those that are sent, and those that arrive
            most = max(most, 2 * (sizes[i] - 1) * bucket.hop1.codec.nbytes(int(numel) // sizes[i]))
        elif all_parts or not (direct and i == 0):
            most = max(most, width * (numel if all_parts else numel / sizes[i]))
        numel /= sizes[i]
    return most


def sum_dtype(bucket: Bucket, micro_steps: int) -> torch.dtype:
    """The dtype of a sum of gradients; after one micro-step the wider of its two ends."""
    if micro_steps > 1:
        return bucket.accumulate
    return torch.promote_types(bucket.dtype, bucket.reduce)

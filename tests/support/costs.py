"""What a step sends and holds, written down from the definitions; and pools that count."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from statistics import median_low
from typing import Any, NamedTuple

import torch
from cases import Layout

import mics_fn as mf
from mics_fn import tree
from mics_fn.collectives import Codec, mean_bytes
from mics_fn.groups import Buffers
from mics_fn.groups.groups import Pools
from mics_fn.lab import report
from mics_fn.shards.bucket import Bucket
from mics_fn.shards.leaf import Nothing, Tied, is_leaf


class Placed(NamedTuple):
    """Over how many ranks of a partition group parameters stay cut in a run, and gradients."""

    params: int
    grads: int


def level_sizes(layout: Layout) -> tuple[int, ...]:
    return mf.groups.plan_groups(
        mf.groups.Topology(layout.sizes), layout.partition_size
    ).level_sizes


def inner_products(sizes: Sequence[int]) -> list[int]:
    """The sizes of parts of a partition group that end between two levels."""
    return [prod(sizes[level:]) for level in range(len(sizes) + 1)]


def buckets_of(shards: Any) -> list[Bucket]:
    """The buckets of a tree, by number."""
    leaves = tree.flatten(shards, is_leaf)[0]
    found = {
        leaf.bucket
        for leaf in leaves
        if not isinstance(leaf, Nothing | Tied) and leaf.bucket is not None
    }
    return sorted(found, key=lambda bucket: bucket.index)


def sent_in_a_step(
    buckets: Sequence[Bucket],
    fetches: Counter[int],
    route: Any,
    replicas: int,
    placed: Placed,
    micro_steps: int,
    fixed_order: bool = False,
) -> dict[str, tuple[int, float]]:
    """The ledger of a step: for each communicator its calls, and the bytes that a rank sends."""
    calls, sent = Counter[str](), Counter[str]()

    def add(name: str, times: int, nbytes: Any) -> None:
        if times and nbytes:
            calls[name] += times
            sent[name] += times * nbytes

    inner = inner_products(route.sizes)
    kept, late = inner.index(placed.params), inner.index(placed.grads)
    for bucket in buckets:
        full, back = report.gathered(bucket, route), report.scattered(bucket, route)
        for i, level in enumerate(route.levels):
            often = fetches[bucket.index]
            add(f"gather {level.name}", min(1, often) if i < kept else often, full[i].nbytes)
            if bucket.trainable:
                add(f"reduce {level.name}", 1 if i < late else micro_steps, back[i].nbytes)
        if not bucket.trainable or replicas == 1:
            continue
        mean, wire = report.averaged(bucket, replicas).nbytes, bucket.hop2_format
        if fixed_order and isinstance(wire, torch.dtype):  # parts are rounded up
            mean = 2 * (replicas - 1) * -(-bucket.chunk // replicas) * wire.itemsize
        twice = fixed_order or isinstance(wire, Codec)  # an exchange, then an all-gather
        add("replicas", 1 + twice, mean / (1 + twice))
    return {name: (count, sent[name]) for name, count in calls.items()}


def one_at_a_time(uses: Sequence[Sequence[int]]) -> Counter[int]:
    """How often each bucket is fetched where only that of the last op stays."""
    found, before = Counter[int](), ()
    for used in uses:
        found.update(set(used) - set(before))
        before = used
    return found


class Counted(Buffers):
    """A pool that knows how many bytes of it are in use, and the most there ever were."""

    def __init__(self) -> None:
        super().__init__()
        self.used = self.peak = 0

    def take(self, *args: Any, **how: Any) -> Any:
        """As ever; counted as asked for, not as found."""
        tensor = super().take(*args, **how)
        self.used += tensor.nbytes
        self.peak = max(self.peak, self.used)
        return tensor

    def give(self, tensor: Any) -> None:
        """As ever."""
        self.used -= tensor.nbytes
        super().give(tensor)


POOLS = ("fetched", "outer", "chunks", "reducing")


def counted(groups: mf.Groups) -> mf.Groups:
    """The same groups with pools of their own, empty and counted."""
    fresh: dict[str, Any] = {name: Counted() for name in POOLS}
    pools = Pools(**fresh)
    return replace(
        groups,
        hierarchy=replace(groups.hierarchy, pools=pools),
        flat=replace(groups.flat, pools=pools),
    )


# What a rank should hold.

FILLED = 2  # buckets of full gradients that backward is making, in the dtype that computes


class Cut(NamedTuple):
    """Number of ranks over which each kind of data is cut."""

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


def memory_formula(
    buckets: Sequence[Bucket],
    cut: Cut,
    sizes: Sequence[int],
    *,
    live_bytes: int | None,
    num_replicas: int = 1,
    micro_steps: int = 1,
) -> dict[str, float]:
    """Compute the most bytes that one of several ranks holds in a step with AdamW, by kind.

    Args:
        buckets: the buckets of the model, all of them trained; padding counts.
        cut: over how many ranks each kind is cut.
        sizes: the ranks of each level of a partition group, outermost first.
        live_bytes: the budget for gathered parameters; None keeps all, as `Trainer` does, which in
            the last pass packs gradients where their parameters were.
        num_replicas: the ranks of a replication group.
        micro_steps: the micro-steps of a step.

    Returns:
        Bytes of "states" (parameters and both moments, which is all that exists between steps),
        "parameters" (a copy kept for the step, and gathered buckets), "sums" (sums of gradients,
        and this rank's means if these are cut further), "hops" (the few buckets that are being
        reduced), and "in full" (gradients that backward is making). Activations are not included,
        nor is the least memory for hops, `LEAST_RING` of `deferred.memory`.
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
            _in_hops(b, cut, sizes, num_replicas, micro_steps, first, last, reused) for b in buckets
        ]
        few = max(count for _, count in found) * median_low(nbytes for nbytes, _ in found)
        few = 0 if live_bytes == 0 else few
        hops = max(hops, few, *(nbytes for nbytes, _ in found))
    return {
        "states": 3 * sum(bucket.numel * bucket.dtype.itemsize for bucket in buckets) / cut.states,
        "parameters": live + (sum(compute) / cut.params if cut.params < cut.states else 0),
        "sums": sum(sums) / cut.grads + (sum(sums) / cut.states if cut.grads < cut.states else 0),
        "hops": hops,
        "in full": min(FILLED, len(buckets)) * max(compute),
    }


def _fits(bucket: Bucket, cut: Cut) -> bool:
    """Return whether gradients reuse the memory of gathered parameters in the last pass."""
    sent = [x for x in (bucket.reduce, bucket.hop2_format) if isinstance(x, torch.dtype)]
    return cut.grads > 1 and max(x.itemsize for x in sent) <= bucket.compute.itemsize


def _stays(bucket: Bucket, cut: Cut, micro_steps: int) -> bool:
    """Return whether the mean reuses that memory too, also where hop 2 sends a code of the mean."""
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
    reused: bool,
) -> tuple[float, int]:
    """Compute the bytes of a bucket's reduction in one pass, and how many there are at most.

    In the first pass a mean goes where the sum will be, in later ones it has to be added to it. If
    the memory of gathered parameters is `reused`, see `_fits` and `_stays`.
    """
    if cut.states == num_replicas == 1:
        return 0, 1
    places = [i for i in range(len(sizes) + 1) if prod(sizes[i:]) == cut.grads]
    outer, inner = sizes[: places[0]], sizes[places[0] :]
    total, width = sum_dtype(bucket, micro_steps), bucket.reduce.itemsize
    same, numel = total == bucket.reduce, bucket.numel
    outer, hop2 = outer if last else (), bucket.hop2_format
    copies = last and total != hop2 and num_replicas > 1
    packed = [0.0, numel * width if cut.grads > 1 else 0 if first else numel * total.itemsize]
    packed.append(numel / cut.grads * width if prod(outer) > 1 and not same else 0)
    if copies and isinstance(hop2, torch.dtype):
        packed.append(numel / cut.states * hop2.itemsize)
    if reused and last and _fits(bucket, cut):
        packed = [0.0]
    direct = same and first and not (reused and _stays(bucket, cut, micro_steps))
    received = max(
        _received(bucket, inner, numel, direct), _received(bucket, outer, numel / cut.grads, same)
    )
    if copies and isinstance(hop2, Codec):
        received = max(received, mean_bytes(hop2, numel // cut.states, num_replicas))
    gathers = copies and isinstance(hop2, Codec)  # of codes, while others are exchanged
    return max(packed) + received, 1 + len(inner) + len(outer) + copies + gathers


def _received(bucket: Bucket, sizes: Sequence[int], numel: float, direct: bool) -> float:
    """Compute the bytes of receive buffers, if the last level can `direct` them to the mean.

    Ranks exchange parts of gradients: of two one arrives, else all. Codes of hop 1 count as if all
    levels sent them.
    """
    most, width = 0.0, bucket.reduce.itemsize
    for i in reversed(range(len(sizes))):
        all_parts = sizes[i] > 2
        if bucket.hop1 is not None:  # those that are sent, and those that arrive
            most = max(most, 2 * (sizes[i] - 1) * bucket.hop1.codec.nbytes(int(numel) // sizes[i]))
        elif all_parts or not (direct and i == 0):
            most = max(most, width * (numel if all_parts else numel / sizes[i]))
        numel /= sizes[i]
    return most


def sum_dtype(bucket: Bucket, micro_steps: int) -> torch.dtype:
    """Return the dtype of a sum of gradients; for one micro-step the wider of its two ends."""
    if micro_steps > 1:
        return bucket.accumulate
    return torch.promote_types(bucket.dtype, bucket.reduce)

"""What a step sends and holds, written down from the definitions; and pools that count."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

import torch
from cases import Layout

import mics_fn as mf
from mics_fn.collectives import Codec
from mics_fn.groups import Buffers
from mics_fn.groups.groups import Pools
from mics_fn.lab import report
from mics_fn.lab.report import Cut
from mics_fn.shards.bucket import Bucket


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

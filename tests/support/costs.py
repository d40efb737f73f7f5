"""What a step sends and holds, written down from the definitions; and pools that count."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

from cases import Layout

import mics_fn as mf
from mics_fn import tree
from mics_fn.collectives import Codec, Wire
from mics_fn.groups.buffers import Buffers
from mics_fn.groups.groups import Pools
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


def per_level(nbytes: int, sizes: Sequence[int]) -> list[int]:
    """Bytes that a rank sends at each level when so many are gathered, or reduced, over all.

    At a level of s ranks each sends to s - 1 others what its own level and those outside of it have
    brought together so far: of p equal chunks the product of the sizes outside.
    """
    held, out = nbytes // prod(sizes), []
    for size in sizes:
        out.append((size - 1) * held)
        held *= size
    return out


def gathered(bucket: Bucket, sizes: Sequence[int], route: Any) -> list[int]:
    """Bytes that a rank sends at each level of a gather: values, or the codes of whole chunks."""
    values = per_level(bucket.numel * bucket.compute.itemsize, sizes)
    wire = Wire(bucket.codes) if bucket.codes else bucket.gather
    if wire is None:
        return values
    codes = per_level(bucket.parts * wire.codec.nbytes(bucket.chunk), sizes)
    coded = wire.levels(route)
    return codes[:coded] + values[coded:]


def scattered(bucket: Bucket, sizes: Sequence[int], route: Any) -> list[int]:
    """Bytes that a rank sends at each level of hop 1: values, or the codes of what goes to each."""
    values = per_level(bucket.numel * bucket.reduce.itemsize, sizes)
    if bucket.hop1 is None:
        return values
    parts = [bucket.chunk * prod(sizes[:level]) for level in range(len(sizes))]
    codes = [(s - 1) * bucket.hop1.codec.nbytes(n) for s, n in zip(sizes, parts, strict=True)]
    coded = bucket.hop1.levels(route)
    return codes[:coded] + values[coded:]


def sent_in_a_step(
    buckets: Sequence[Bucket],
    fetches: Counter[int],
    names: Sequence[str],
    sizes: Sequence[int],
    replicas: int,
    placed: Placed,
    micro_steps: int,
    fixed_order: bool = False,
    route: Any = None,
) -> dict[str, tuple[int, int]]:
    """The ledger of a step: for each communicator its calls, and the bytes that a rank sends.

    The `route` is needed if something travels as codes.
    """
    calls, sent = Counter[str](), Counter[str]()

    def add(name: str, times: int, nbytes: int) -> None:
        if times and nbytes:
            calls[name] += times
            sent[name] += times * nbytes

    inner = inner_products(sizes)
    kept, late = inner.index(placed.params), inner.index(placed.grads)
    for bucket in buckets:
        # Padded, in the dtype that travels.
        full = gathered(bucket, sizes, route)
        back = scattered(bucket, sizes, route)
        chunk = bucket.numel // bucket.parts
        for level, name in enumerate(names):
            once = min(1, fetches[bucket.index])
            add(f"gather {name}", once if level < kept else fetches[bucket.index], full[level])
            if bucket.trainable:
                add(f"reduce {name}", 1 if level < late else micro_steps, back[level])
        if not bucket.trainable or replicas == 1:
            continue
        if isinstance(bucket.hop2, Codec):  # whole blocks for each replica
            part = -(-chunk // bucket.hop2.block // replicas) * bucket.hop2.block
            add("replicas", 2, (replicas - 1) * bucket.hop2.nbytes(part))
        elif fixed_order:  # an exchange, then an all-gather, of parts that are rounded up
            itemsize = (bucket.hop2 or bucket.reduce).itemsize
            add("replicas", 2, (replicas - 1) * -(-chunk // replicas) * itemsize)
        else:
            itemsize = (bucket.hop2 or bucket.reduce).itemsize
            add("replicas", 1, 2 * (replicas - 1) * chunk * itemsize // replicas)
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

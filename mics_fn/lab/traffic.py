"""What the buckets of a model send in a step, by formula: as values, or as codes.

`report.step_bytes` has the same formulas for a model of which only the size is known, and which
sends values of one dtype. These are written down from the definitions, beside what is counted, and
share no code with the collectives but the bytes of a codec and the levels of a `Wire`.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import NamedTuple

import torch

from mics_fn.collectives import Codec, Rounded
from mics_fn.groups import Route
from mics_fn.lab.report import gather_bytes, totals_bytes
from mics_fn.shards import Bucket


class Sent(NamedTuple):
    """What a rank sends of one bucket through one communicator, each time."""

    nbytes: float
    kind: str  # the dtype or the codec that travels, as text


def wire_bytes(
    buckets: Sequence[Bucket],
    route: Route,
    num_replicas: int,
    *,
    accumulate: int = 1,
    fetches: Mapping[int, int] | None = None,
    fixed_order: bool = False,
) -> dict[str, tuple[float, str]]:
    """What each rank sends in one step through each communicator, with the formula in words.

    Levels over which a placement keeps parameters are gathered once, and those over which it
    reduces late once per step; see [Note: placements] in `groups.groups`. "step totals" are sent
    over the partition group and the replication group.

    Args:
        buckets: those of the parameters. Of one that is not trained only gathers count.
        route: the levels of the partition group.
        num_replicas: r, the ranks in a replication group.
        accumulate: s, the micro-steps in a step.
        fetches: f, how often a step gathers each bucket, by its number; None means once.
        fixed_order: whether hop 2 of values is an exchange and an all-gather, as it is with
            `placement.fixed_order`.

    Returns:
        The bytes and the formula of each communicator, by its name. In a formula M are the bytes of
        all parameters as they are kept, padding included. Where something else travels, be it
        another dtype or codes, the formula ends with its name.

    Example:
        >>> from mics_fn.groups import Route
        >>> from mics_fn.shards.bucket import LeafSpec, plan_buckets
        >>> sent = Precision.parse("hop2=int8[256]").wires("w", torch.float32)
        >>> leaf = LeafSpec("w", (1000,), torch.float32, 1, True, None, sent=sent)
        >>> [(bucket, _)] = plan_buckets([leaf])
        >>> wire_bytes([bucket], Route(), 2)["replicas"]
        (1032, '2 (r-1)/r M/p as int8[256]')
    """
    often = {b.index: 1 if fetches is None else fetches.get(b.index, 0) for b in buckets}
    once = {b.index: min(1, count) for b, count in zip(buckets, often.values(), strict=True)}
    trained = [bucket for bucket in buckets if bucket.trainable]
    found: dict[str, tuple[float, str]] = {}
    for i, (level, words) in enumerate(zip(route.levels, _in_words(route.sizes), strict=True)):
        times = once if i < route.hold else often
        factor = "f " if any(count != 1 for count in times.values()) else ""
        every = [(b, times[b.index], gathered(b, route)[i]) for b in buckets]
        found[f"gather {level.name}"] = _total(every, factor + words)
    for i, (level, words) in enumerate(zip(route.levels, _in_words(route.sizes), strict=True)):
        late = i < route.late
        every = [(b, 1 if late else accumulate, scattered(b, route)[i]) for b in trained]
        found[f"reduce {level.name}"] = _total(every, words if late else f"s {words}")
    if num_replicas > 1:
        every = [(b, 1, averaged(b, num_replicas, fixed_order=fixed_order)) for b in trained]
        found["replicas"] = _total(every, "2 (r-1)/r M/p")
    return found | totals_bytes(route.size, num_replicas, fixed_order=fixed_order)


def gathered(bucket: Bucket, route: Route) -> list[Sent]:
    """What a rank sends of a bucket at each level of one gather, outermost level first.

    On coded levels a chunk is one row of codes, which is sent on as it arrived.
    """
    values = gather_bytes(route.sizes, bucket.nbytes)
    found = [Sent(nbytes, _name(bucket.compute)) for nbytes in values]
    wire = bucket.gather_wire
    if wire is not None:
        codec, count = wire.codec, wire.levels(route)
        codes = gather_bytes(route.sizes, bucket.parts * codec.nbytes(bucket.chunk))
        found[:count] = [Sent(nbytes, f"{codec}") for nbytes in codes[:count]]
    return found


def scattered(bucket: Bucket, route: Route) -> list[Sent]:
    """What a rank sends of a bucket at each level of hop 1, outermost level first.

    On coded levels it sends a row of codes to each other rank, of all that this one is to hold.
    """
    values = gather_bytes(route.sizes, bucket.numel * bucket.reduce.itemsize)
    found = [Sent(nbytes, _name(bucket.reduce)) for nbytes in values]
    if bucket.hop1 is not None:
        codec, sizes = bucket.hop1.codec, route.sizes
        for i in range(bucket.hop1.levels(route)):
            row = codec.nbytes(bucket.chunk * prod(sizes[:i]))
            found[i] = Sent((sizes[i] - 1) * row, f"{codec}")
    return found


def averaged(bucket: Bucket, num_replicas: int, *, fixed_order: bool = False) -> Sent:
    """What a rank sends of a bucket in hop 2.

    Codes are sent in an exchange and an all-gather, in which each replica has equally many blocks;
    values in an all-reduce, or with `fixed_order` also in these two.
    """
    wire, chunk, r = bucket.mean_wire, bucket.chunk, num_replicas
    if isinstance(wire, Codec):
        block = wire.block or 1
        part = -(-chunk // (block * r)) * block
        return Sent(2 * (r - 1) * wire.nbytes(part), f"{wire}")
    if fixed_order:
        return Sent(2 * (r - 1) * -(-chunk // r) * wire.itemsize, _name(wire))
    return Sent(2 * (r - 1) * chunk * wire.itemsize // r, _name(wire))


def _name(dtype: torch.dtype) -> str:
    return str(Rounded(dtype))


def _in_words(sizes: Sequence[int]) -> list[str]:
    """The formula of each level, outermost first; it begins with M/p in each rank's hands."""
    parts, found = prod(sizes), []
    for size in sizes:
        found.append(f"({size}-1) M/{parts}")
        parts //= size
    return found


def _total(every: Iterable[tuple[Bucket, int, Sent]], words: str) -> tuple[float, str]:
    """The bytes of all buckets, each sent so often, and the formula with the names of what travels.

    The name of a dtype is left out where all of it is what the shards have.
    """
    every = [(bucket, count, sent) for bucket, count, sent in every if count and sent.nbytes]
    kinds = dict.fromkeys(sent.kind for _, _, sent in every)
    same = all(sent.kind == _name(bucket.dtype) for bucket, _, sent in every)
    total = sum(count * sent.nbytes for _, count, sent in every)
    return total, words if same else f"{words} as {', '.join(kinds)}"

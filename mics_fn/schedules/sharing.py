"""`offsets`: where each fetch of a schedule lies in one piece of memory, so that few bytes do."""

from collections.abc import Hashable, Sequence
from random import Random
from typing import NamedTuple

from mics_fn.schedules.schedule import Schedule

# How many orders of choice a search tries from each start, how many fetches it places in all of
# these, and how often it starts: at worst half a second, once for each schedule.
_TRIES, _WORK, _STARTS = 600, 30_000, 6


class Offsets(NamedTuple):
    """Where the fetches of a schedule lie; those of one pool share one piece of memory."""

    starts: tuple[int, ...]  # of each fetch, in order, where its bucket begins; in bytes
    nbytes: tuple[int, ...]  # of each bucket, the bytes of the memory that its pool has for all


def offsets(schedule: Schedule, sizes: Sequence[int], pools: Sequence[Hashable]) -> Offsets:
    """Choose where each fetch of a schedule lies, beside those that are live at the same time.

    Fetches choose in turn, the largest first. Each takes the lowest place that is free for as long
    as its bucket is live. While some end above the most bytes that are live at once, a local search
    tries other orders, the same ones each time. The result takes no more than is live at once if
    all buckets have one size, or if all are live at once. Few other plans take more; for some no
    arrangement reaches the peak.

    If the sizes are multiples of some number of bytes, so are all places.

    Args:
      schedule: its fetches and drops.
      sizes: bytes of each bucket.
      pools: of each bucket, what has its memory.

    Example:
      >>> text = "fetch 0; fetch 1; use 0+1; drop 0; fetch 2; fetch 3; use 1; use 2+3; drop 1"
      >>> offsets(Schedule.parse(text), [9, 4, 3, 6], [None] * 4)
      Offsets(starts=(0, 9, 6, 0), nbytes=(13, 13, 13, 13))
    """
    fetches, live = schedule.fetches, dict[int, int]()  # bucket -> number of its latest fetch
    beside: list[list[int]] = []  # of each fetch, those of its pool that are live with it
    peaks = dict.fromkeys(pools, 0)
    for kind, (bucket, *_) in schedule.unmarked.actions:
        if kind == "drop":
            del live[bucket]
        elif kind == "fetch":
            others = [i for b, i in live.items() if sizes[b] and pools[b] == pools[bucket]]
            for i in others:
                beside[i].append(len(beside))
            live[bucket] = len(beside)
            beside.append(others)
            nbytes = sizes[bucket] + sum(sizes[fetches[i]] for i in others)
            peaks[pools[bucket]] = max(peaks[pools[bucket]], nbytes)
    starts, most = [0] * len(fetches), dict(peaks)
    for pool, peak in peaks.items():
        own = [i for i, bucket in enumerate(fetches) if pools[bucket] == pool and sizes[bucket]]
        found = _least(own, [sizes[bucket] for bucket in fetches], beside, peak)
        for i, start in found.items():
            starts[i] = start
            most[pool] = max(most[pool], start + sizes[fetches[i]])
    return Offsets(tuple(starts), tuple(most[pool] for pool in pools))


def _least(
    own: Sequence[int], sizes: Sequence[int], beside: Sequence[Sequence[int]], peak: int
) -> dict[int, int]:
    """Where these fetches begin, in the best of the orders that a local search tries."""

    def tried(order: Sequence[int]) -> tuple[dict[int, int], list[int]]:
        starts = _in_order(order, sizes, beside)
        return starts, [max(0, starts[i] + sizes[i] - peak) for i in order]

    best, least, random = dict[int, int](), 0, Random(0)
    tries = max(1, min(_TRIES, _WORK // max(1, len(own))))
    for start in range(_STARTS):
        order = sorted(own, key=lambda i: -sizes[i])
        if start:
            random.shuffle(order)
        starts, over = tried(order)
        for _ in range(tries):
            if not best or max(over, default=0) < least:
                best, least = starts, max(over, default=0)
            if not least:
                return best
            other = list(order)
            if random.random() < 0.5:  # what ends too high chooses earlier
                place = random.choice([at for at, high in enumerate(over) if high])
                other.insert(random.randrange(place + 1), other.pop(place))
            else:
                other.insert(random.randrange(len(own)), other.pop(random.randrange(len(own))))
            moved, above = tried(other)
            if sum(above) <= sum(over):
                order, starts, over = other, moved, above
    return best


def _in_order(
    order: Sequence[int], sizes: Sequence[int], beside: Sequence[Sequence[int]]
) -> dict[int, int]:
    """Where fetches begin that choose in this order, each the lowest place that is free."""
    starts: dict[int, int] = {}
    for i in order:
        at = 0
        taken = ((starts[j], starts[j] + sizes[j]) for j in beside[i] if j in starts)
        for start, stop in sorted(taken):
            if start - at >= sizes[i]:
                break
            at = max(at, stop)
        starts[i] = at
    return starts

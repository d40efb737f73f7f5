"""`offsets`: where each fetch of a schedule lies in one piece of memory, so that few bytes do."""

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from mics_fn.schedules.schedule import Schedule

_ROUNDS = 20  # that look for less memory, from each order of choice


class Offsets(NamedTuple):
    """Where the fetches of a schedule lie; those of one pool share one piece of memory."""

    starts: tuple[int, ...]  # of each fetch, in order, where its bucket begins; in bytes
    nbytes: tuple[int, ...]  # of each bucket, the bytes of the memory that its pool has for all


def offsets(schedule: Schedule, sizes: Sequence[int], pools: Sequence[Hashable]) -> Offsets:
    """Choose where each fetch of a schedule lies, beside those that are live at the same time.

    One after the other takes the lowest place that is free as long as its bucket is live: the
    largest first. While some end above the most bytes that are live at once, these choose earlier
    in another round; after some rounds those choose first that are live beside many others, and so
    on. The best round counts. It takes no more than is live at once if all buckets have one size,
    or all are live then. Of other plans few take more, as one piece of memory cannot always do.

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
    for kind, (bucket, *_) in schedule.actions:
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
    """Where these fetches begin, in the best of some rounds."""
    least, best = 0, dict[int, int]()
    for first in (
        lambda i: -sizes[i],
        lambda i: -len(beside[i]),
        lambda i: -sizes[i] * len(beside[i]),
        lambda i: i,
    ):
        order = sorted(own, key=first)
        for _ in range(_ROUNDS):
            starts = _in_order(order, sizes, beside)
            stops = {i: start + sizes[i] for i, start in starts.items()}
            most = max(stops.values(), default=0)
            if not best or most < least:
                least, best = most, starts
            if least <= peak:
                return best
            for i in [i for i in order if stops[i] > peak]:
                place = order.index(i)
                order.insert(place // 2, order.pop(place))
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

"""`rooms`: which fetches of a schedule share a buffer, so that few bytes serve them all."""

from bisect import bisect_left
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from mics_fn.schedules.schedule import Schedule


class Rooms(NamedTuple):
    """The buffers of a schedule: one after the other each serves several fetches."""

    fetches: tuple[int, ...]  # of each fetch, in order, the bytes of its buffer
    buffers: tuple[tuple[int, int], ...]  # of each buffer, one of its buckets, and its bytes


def rooms(schedule: Schedule, sizes: Sequence[int], pools: Sequence[Hashable]) -> Rooms:
    """Choose a buffer for each fetch of a schedule.

    The largest fetches choose first, and each takes the largest buffer of its pool that is free as
    long as its bucket is live, else a new one of its own size. If instead every fetch took what was
    free, a small one would often hold a large buffer, and more of these would be needed.

    Args:
      schedule: its fetches and drops.
      sizes: bytes of each bucket.
      pools: of each bucket, what has its buffers.

    Example:
      >>> text = "fetch 0; fetch 1; use 0+1; drop 0; drop 1; fetch 0; fetch 2; use 0+2"
      >>> rooms(Schedule.parse(text), [9, 4, 3], [None] * 3)
      Rooms(fetches=(9, 4, 9, 4), buffers=((0, 9), (1, 4)))
    """
    spans: list[tuple[int, int, int]] = []  # bucket; places of its fetch and its drop
    live: dict[int, int] = {}  # bucket -> number of its latest fetch
    for place, action in enumerate(schedule.actions):
        bucket = action.buckets[0]
        if action.kind == "fetch":
            live[bucket] = len(spans)
            spans.append((bucket, place, len(schedule.actions)))
        elif action.kind == "drop":
            fetch = live.pop(bucket)
            spans[fetch] = (*spans[fetch][:2], place)
    found, made = [0] * len(spans), []
    buffers: dict[Hashable, list[tuple[int, list[tuple[int, int]]]]] = {}  # size, when it is taken
    for fetch in sorted(range(len(spans)), key=lambda i: -sizes[spans[i][0]]):
        bucket, start, stop = spans[fetch]
        own = buffers.setdefault(pools[bucket], [])
        for found[fetch], taken in own:
            at = bisect_left(taken, (start, stop))
            before, after = taken[at - 1 : at], taken[at : at + 1]
            if all(end <= start for _, end in before) and all(begin >= stop for begin, _ in after):
                taken.insert(at, (start, stop))
                break
        else:
            found[fetch] = sizes[bucket]
            own.append((sizes[bucket], [(start, stop)]))
            made.append((bucket, sizes[bucket]))
    return Rooms(tuple(found), tuple(made))

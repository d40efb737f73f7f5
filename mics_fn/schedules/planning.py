"""`plan`: what to fetch and drop around each use, for a budget of live bytes."""

from collections.abc import Sequence
from heapq import heappop, heappush

from mics_fn import checks
from mics_fn.schedules.schedule import Action, Schedule, Uses, check_buckets

# For each use, the buckets to fetch before it and those to drop after it.
Around = tuple[list[list[int]], list[list[int]]]


def plan(
    record: Schedule, sizes: Sequence[int], *, live_bytes: float | str | None, prefetch: int = 4
) -> Schedule:
    """Add fetches and drops to a record, knowing all later uses.

    Args:
      record: uses and reductions as they happened; its fetches and drops are ignored, and marks of
        backward passes stay.
      sizes: bytes of each bucket.
      live_bytes: budget for buckets that stay live for a later use. With None all buckets stay, and
        each is fetched once; with 0 one is live at a time. What one use needs is always fetched. A
        text such as "1GB" is a number of bytes, too.
      prefetch: how many buckets may be fetched ahead of their use. If it is not 0, the live bytes
        may exceed `live_bytes` by the size of the largest bucket.

    Returns:
      A schedule with the record's uses and reductions, which passes `check` and ends with nothing
      live. If `prefetch` is 0 and all buckets have one size, no schedule has fewer fetches
      (Belady, 1966); a larger `prefetch` never has more.

    Raises:
      PlanError: a bucket has no size, or a number is negative or not a number.

    Example:
      >>> record = Schedule.parse("use 0; use 1; use 2; use 1; reduce 1; use 0; reduce 0")
      >>> print(plan(record, [8, 8, 8], live_bytes=8, prefetch=1))
      fetch 0; fetch 1; use 0; drop 0; fetch 2; use 1; use 2; drop 2; fetch 0; use 1; drop 1
      reduce 1; use 0; drop 0; reduce 0
    """
    check_buckets("plan", record, sizes)
    checks.integer("plan", "prefetch", prefetch, 0, fix="0 fetches nothing ahead")
    limit = sum(sizes) if live_bytes is None else checks.nbytes("plan", "live_bytes", live_bytes)
    around = zip(*_fetch_ahead(record.uses, sizes, limit, prefetch), strict=True)
    actions: list[Action] = []
    for action in record.actions:
        if action.kind == "use":
            fetched, dropped = next(around)
            actions += [Action("fetch", (bucket,)) for bucket in fetched]
            actions += [action, *(Action("drop", (bucket,)) for bucket in sorted(dropped))]
        elif action.kind in ("reduce", "backward"):
            actions.append(action)
    return Schedule(tuple(actions))


# [Note: planning] `_stays` decides from which use to which other one each bucket is live. When room
# is needed, the bucket whose next use is farthest ahead is dropped, right after its last use before
# that. Then `_fetch_ahead` moves fetches to earlier uses without changing their order. What is live
# at a use therefore depends only on how many fetches were done by then, so a fetch that was not
# moved finds the same room as before. No fetch is added, and if one would come right after the drop
# of its bucket, both are left out. A larger `prefetch` is never behind a smaller one, so it leaves
# out the same pairs too.


def _stays(uses: Uses, sizes: Sequence[int], limit: int) -> Around:
    """What to fetch and drop if nothing is fetched ahead."""
    later: dict[int, list[int]] = {}  # bucket -> its later uses, the next one last
    for k in reversed(range(len(uses))):
        for bucket in uses[k]:
            later.setdefault(bucket, []).append(k)
    before, after = [[] for _ in uses], [[] for _ in uses]
    live: dict[int, int] = {}  # bucket -> its last use so far
    heap: list[tuple[int, int]] = []  # (-next use, bucket) of live buckets; some are outdated
    nbytes = 0
    for k, buckets in enumerate(uses):
        for bucket in [b for b in buckets if b not in live]:
            while nbytes + sizes[bucket] > limit and heap and -heap[0][0] > k:
                coming, victim = heappop(heap)
                if victim in live and later[victim][-1] == -coming:
                    after[live.pop(victim)].append(victim)
                    nbytes -= sizes[victim]
            before[k].append(bucket)
            live[bucket] = k
            nbytes += sizes[bucket]
        for bucket in buckets:
            live[bucket] = later[bucket].pop()
            if not later[bucket]:
                after[live.pop(bucket)].append(bucket)
                nbytes -= sizes[bucket]
            elif sizes[bucket]:  # dropping an empty bucket makes no room
                heappush(heap, (-later[bucket][-1], bucket))
    return before, after


def _fetch_ahead(uses: Uses, sizes: Sequence[int], limit: int, prefetch: int) -> Around:
    """What to fetch and drop if up to `prefetch` buckets are fetched ahead of their use."""
    needed, after = _stays(uses, sizes, limit)
    queue = [(k, bucket) for k, buckets in enumerate(needed) for bucket in buckets]
    most = limit + (max(sizes, default=0) if prefetch else 0)
    before: list[list[int]] = [[] for _ in uses]
    live: set[int] = set()
    waiting: set[int] = set()  # fetched ahead and not used yet
    done = nbytes = 0  # fetches that have their place, and bytes that are live
    for k, buckets in enumerate(uses):
        waiting.difference_update(buckets)
        while done < len(queue):
            due, bucket = queue[done]
            kept = k > 0 and bucket in after[k - 1]  # instead of a drop and a fetch
            blocked = bucket in live or (len(waiting) >= prefetch and not kept)
            if due > k and (blocked or nbytes + sizes[bucket] > most):
                break
            if kept:
                after[k - 1].remove(bucket)
            else:
                before[k].append(bucket)
                if due > k:
                    waiting.add(bucket)
            live.add(bucket)
            nbytes += sizes[bucket]
            done += 1
        live.difference_update(after[k])
        nbytes -= sum(sizes[bucket] for bucket in after[k])
    return before, after

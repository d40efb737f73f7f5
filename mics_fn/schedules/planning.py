"""Plans: what to fetch and drop around each use, for a budget of live bytes."""

from collections.abc import Sequence
from heapq import heappop, heappush

from mics_fn.errors import PlanError
from mics_fn.schedules.schedule import Action, Schedule, Uses, check_buckets

Around = tuple[list[list[int]], list[list[int]]]  # what to fetch before each, and to drop after it


def plan(
    record: Schedule, sizes: Sequence[int], *, live_bytes: int | None, prefetch: int = 4
) -> Schedule:
    """Add fetches and drops to a record, knowing all that follows.

    Args:
      record: uses and reductions as they happened; fetches and drops in it do not count.
      sizes: bytes of each bucket.
      live_bytes: buckets stay live for a later use while they fit in this. None: all do, and each
        is fetched once. 0: one at a time. What one use needs is always fetched.
      prefetch: buckets that may be on their way ahead of their use. With it, as many bytes as the
        largest bucket has may be live above `live_bytes`.

    Returns:
      A schedule with the record's uses and reductions that passes `check`; nothing is live at its
      end. Without `prefetch`, and with buckets of one size, none has fewer fetches (Belady, 1966);
      a larger `prefetch` never has more.

    Communication: none.

    Memory: some ints an action.

    Raises:
      PlanError: a bucket without a size, or a negative number.

    Example:
      >>> record = Schedule.parse("use 0; use 1; use 2; use 1; reduce 1; use 0; reduce 0")
      >>> print(plan(record, [8, 8, 8], live_bytes=8, prefetch=1))
      fetch 0; fetch 1; use 0; drop 0; fetch 2; use 1; use 2; drop 2; fetch 0; use 1; drop 1
      reduce 1; use 0; drop 0; reduce 0
    """
    check_buckets("plan", record, sizes)
    if min(live_bytes or 0, prefetch) < 0:
        raise PlanError(f"plan: live_bytes={live_bytes}, prefetch={prefetch}: one is less than 0")
    limit = sum(sizes) if live_bytes is None else live_bytes
    around = zip(*_fetch_ahead(record.uses, sizes, limit, prefetch), strict=True)
    actions: list[Action] = []
    for action in record.actions:
        if action.kind == "use":
            fetched, dropped = next(around)
            actions += [Action("fetch", (bucket,)) for bucket in fetched]
            actions += [action, *(Action("drop", (bucket,)) for bucket in sorted(dropped))]
        elif action.kind == "reduce":
            actions.append(action)
    return Schedule(tuple(actions))


# [Note: planning] `_stays` decides from where to where each bucket is live. Where room is needed,
# the one whose next use is farthest ahead goes, and goes right after its last use before that. Then
# `_fetch_ahead` moves fetches to earlier places, in the same order, so what is live depends only on
# the place and on how many fetches are done: one that was not moved finds its room as it was. None
# is added, and where one comes right after the drop of its bucket, neither is done. A larger
# `prefetch` is never behind a smaller one, so it meets all those drops too.


def _stays(uses: Uses, sizes: Sequence[int], limit: int) -> Around:
    """What to do if nothing is fetched ahead."""
    later: dict[int, list[int]] = {}  # bucket -> its uses to come, the next one last
    for k in reversed(range(len(uses))):
        for bucket in uses[k]:
            later.setdefault(bucket, []).append(k)
    before, after = [[] for _ in uses], [[] for _ in uses]
    live: dict[int, int] = {}  # bucket -> its last use so far
    heap: list[tuple[int, int]] = []  # (-next use, bucket) of live ones, and outdated ones
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
            elif sizes[bucket]:  # dropping an empty one makes no room
                heappush(heap, (-later[bucket][-1], bucket))
    return before, after


def _fetch_ahead(uses: Uses, sizes: Sequence[int], limit: int, prefetch: int) -> Around:
    """What to do if up to `prefetch` buckets are fetched ahead."""
    needed, after = _stays(uses, sizes, limit)
    queue = [(k, bucket) for k, buckets in enumerate(needed) for bucket in buckets]
    most = limit + (max(sizes, default=0) if prefetch else 0)
    before: list[list[int]] = [[] for _ in uses]
    live: set[int] = set()
    waiting: set[int] = set()  # fetched ahead and not used yet
    place = nbytes = 0
    for k, buckets in enumerate(uses):
        waiting.difference_update(buckets)
        while place < len(queue):
            due, bucket = queue[place]
            kept = k > 0 and bucket in after[k - 1]  # by not dropping it
            blocked = bucket in live or (len(waiting) >= prefetch and not kept)
            if due > k and (blocked or nbytes + sizes[bucket] > most):
                break
            if kept:
                after[k - 1].remove(bucket)
            else:
                before[k].append(bucket)
                waiting.update([bucket] if due > k else ())
            live.add(bucket)
            nbytes += sizes[bucket]
            place += 1
        live.difference_update(after[k])
        nbytes -= sum(sizes[bucket] for bucket in after[k])
    return before, after

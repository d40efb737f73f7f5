"""`Schedule`: the order in which one step uses its buckets; and policies and runs that follow it.

A bucket is a number here, and its size a number of bytes. An `Action` is a kind and the buckets
that it concerns: `fetch` gathers a bucket (an all-gather), `use` is an op that needs its buckets
live, `drop` frees a bucket, and `reduce` averages its gradients into shards (a reduce-scatter).
`backward`, of no bucket, marks where a backward pass begins, for whoever plans; runs pass it by. A
`Schedule` is a tuple of actions, from the first use in forward to the last reduction in backward,
over all micro-steps. In its text form, actions are separated by ";" or a new line:
    fetch 0; fetch 1; use 0; use 0+1; drop 1; reduce 1; drop 0; reduce 0  # a comment
The record of a run is a schedule that has uses and reductions only; `plan` adds the rest.

[Note: recording] The first run knows nothing. It fetches a bucket at its first use, drops the least
recently used one if the budget requires it, and records the order of use. The next run follows the
schedule that was planned from this record, as long as the model does the same again. If it does
not, the run continues like a first run from there, and its record replaces the old one.

[Note: the same order of use] Each rank decides by itself what to fetch. Ranks that fetch different
buckets would hang, or receive the wrong bytes. A fetch is a gather, so it is compared before data
moves, as any call is; see [Note: the same calls] in `faults.order`. Ranks may differ in what they
use while it is live. They may differ in gradients too, unless one of them waits for the memory of a
reduction that another one starts after the next fetch: then they wait for each other, and say so.
"""

import re
import warnings
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from heapq import heappop, heappush
from itertools import accumulate
from random import Random
from typing import Any, Literal, NamedTuple, cast

from mics_fn import checks
from mics_fn.errors import PlanError
from mics_fn.store import Channel

Kind = Literal["fetch", "use", "drop", "reduce", "backward"]
Uses = Sequence[tuple[int, ...]]  # the buckets of each use

_CHANGE = {"fetch": 1, "use": 0, "drop": -1, "reduce": 0}  # times the size: of live bytes
_TEXT = re.compile(r"(?:fetch|drop|reduce)\s+[0-9]+|use\s+[0-9]+(?:\s*\+\s*[0-9]+)*|backward")
_EXPECTED = "expected fetch, drop or reduce and one bucket, use and buckets, or backward alone"
_LINE_CHARS = 92  # of `str`, so that an indented text fits in 100


class Action(NamedTuple):
    """One step of a schedule; its `str` is its text, such as "fetch 3" or "use 1+2".

    Args:
      kind: "fetch", "use", "drop", "reduce" or "backward".
      buckets: a single one; of a use one or more, ascending; of backward none.
    """

    kind: Kind
    buckets: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.kind} {'+'.join(map(str, self.buckets))}".rstrip()


@dataclass(frozen=True, repr=False)
class Schedule:
    """Actions in order, compared and hashed by value. `str` gives its text, and `parse` reads it.

    Example:
      >>> Schedule.parse("fetch 0; fetch 1; use 0+1  # a comment")
      Schedule(3 actions)
    """

    actions: tuple[Action, ...]  # given as any iterable

    def __post_init__(self) -> None:
        object.__setattr__(self, "actions", tuple(self.actions))

    @classmethod
    def parse(cls, text: str) -> "Schedule":
        """Read the text form; `parse(str(schedule))` equals `schedule`.

        Raises:
          PlanError: a part is not an action.
        """
        parts = (part for line in text.split("\n") for part in line.partition("#")[0].split(";"))
        return cls(tuple(map(_action, filter(None, map(str.strip, parts)))))

    @property
    def uses(self) -> tuple[tuple[int, ...], ...]:
        """The buckets of each use, in order."""
        return tuple(action.buckets for action in self.actions if action.kind == "use")

    @property
    def fetches(self) -> tuple[int, ...]:
        """The bucket of each fetch, in order."""
        return tuple(action.buckets[0] for action in self.actions if action.kind == "fetch")

    @property
    def reduces(self) -> tuple[int, ...]:
        """The bucket of each reduction, in order."""
        return tuple(action.buckets[0] for action in self.actions if action.kind == "reduce")

    @property
    def backwards(self) -> tuple[int, ...]:
        """For each backward pass that is marked, how many uses come before it."""
        uses = accumulate(action.kind == "use" for action in self.actions)
        pairs = zip(self.actions, uses, strict=True)
        return tuple(before for action, before in pairs if action.kind == "backward")

    @cached_property
    def steps(self) -> list[tuple[tuple[int, ...], list[tuple[Kind, int]]]]:
        """The buckets of each use, with the fetches and drops before it."""
        found, before = [], list[tuple[Kind, int]]()
        for kind, buckets in self.actions:
            if kind in ("fetch", "drop"):
                before.append((kind, buckets[0]))
            elif kind == "use":
                found.append((buckets, before))
                before = []
        return found

    @property
    def unmarked(self) -> "Schedule":
        """The schedule without marks of backward passes."""
        return Schedule(tuple(action for action in self.actions if action.kind != "backward"))

    def fetched_bytes(self, sizes: Sequence[int]) -> int:
        """Bytes of full buckets over all fetches."""
        return sum(sizes[bucket] for bucket in self.fetches)

    def peak_bytes(self, sizes: Sequence[int]) -> int:
        """The most bytes that are live at once; a bucket is live from its fetch to its drop."""
        actions = self.unmarked.actions
        changes = (_CHANGE[kind] * sizes[buckets[0]] for kind, buckets in actions)
        return max(accumulate(changes, initial=0))

    def check(self, sizes: Sequence[int], *, live_bytes: int | None = None) -> None:
        """Refuse a schedule that cannot be run.

        Args:
          sizes: bytes of each bucket.
          live_bytes: as given to `plan`: so many bytes and the largest bucket may be live at once,
            or what one use needs if that is more. None sets no limit.

        Raises:
          PlanError: a bucket is used or dropped that is not live, or fetched although it is live,
            or has no size; too many bytes are live; or there is no such kind of action.
        """
        for i, action in enumerate(self.actions):
            if (most := max(action.buckets, default=-1)) >= len(sizes):
                why = f"bucket {most} has no size; there are {len(sizes)} sizes"
                raise PlanError(f"Schedule.check: actions[{i}] is '{action}'", [why])
        needs = (sum(sizes[bucket] for bucket in buckets) for buckets in self.uses)
        limit = sum(sizes) if live_bytes is None else live_bytes + max(sizes, default=0)
        most = max([limit, *needs])
        live, nbytes = set[int](), 0
        for i, (kind, buckets) in enumerate(self.actions):
            wrong = []
            if kind in ("use", "drop"):
                wrong = [f"bucket {b} is not live; fetch it" for b in buckets if b not in live]
            elif kind == "fetch" and buckets[0] in live:
                wrong = [f"bucket {buckets[0]} is live; drop it before"]
            elif kind not in _CHANGE and kind != "backward":
                wrong = [_EXPECTED]
            if change := _CHANGE.get(kind, 0):
                nbytes += change * sizes[buckets[0]]
                live.symmetric_difference_update(buckets)
            if nbytes > most:
                wrong.append(f"{nbytes} bytes would be live, of at most {most}")
            if wrong:
                text = f"Schedule.check: actions[{i}] is '{self.actions[i]}'"
                raise PlanError(text, wrong)

    def __str__(self) -> str:
        lines: list[str] = []
        for action in map(str, self.actions):
            if lines and len(lines[-1]) + len(action) + 2 <= _LINE_CHARS:
                lines[-1] += f"; {action}"
            else:
                lines.append(action)
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"Schedule({len(self.actions)} actions)"


def _action(text: str) -> Action:
    """The action with this text."""
    if not _TEXT.fullmatch(text):
        raise PlanError(f"Schedule.parse: {text!r} is no action", [_EXPECTED])
    kind, *buckets = re.split(r"[\s+]+", text)
    return Action(cast(Kind, kind), tuple(sorted(map(int, buckets))))


# `plan`: what to fetch and drop around each use, for a budget of live bytes.

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
      PlanError: `live_bytes` is negative or not a number.
      IndexError: a bucket has no size.

    Example:
      >>> record = Schedule.parse("use 0; use 1; use 2; use 1; reduce 1; use 0; reduce 0")
      >>> print(plan(record, [8, 8, 8], live_bytes=8, prefetch=1))
      fetch 0; fetch 1; use 0; drop 0; fetch 2; use 1; use 2; drop 2; fetch 0; use 1; drop 1
      reduce 1; use 0; drop 0; reduce 0
    """
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
                next_use, victim = heappop(heap)
                if victim in live and later[victim][-1] == -next_use:
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


# `offsets`: where each fetch of a schedule lies in one piece of memory, so that few bytes do.

# How many orders of choice a search tries, and how many fetches it places in all of these: at worst
# half a second, once for each schedule.
_TRIES, _WORK, _STARTS = 600, 30_000, 6


def offsets(
    schedule: Schedule, sizes: Sequence[int], pools: Sequence[Hashable]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Choose where each fetch of a schedule lies, beside those that are live at the same time.

    Fetches choose in turn, the largest first. Each takes the lowest place that is free for as long
    as its bucket is live. While some end above the most bytes that are live at once, a search tries
    other orders, the same ones each time. The result takes no more than is live at once if
    all buckets have one size, or if all are live at once. Few other plans take more; for some no
    arrangement reaches the peak.

    If the sizes are multiples of some number of bytes, so are all places.

    Args:
      schedule: its fetches and drops.
      sizes: bytes of each bucket.
      pools: of each bucket, what has its memory.

    Returns:
      Of each fetch, in order, where its bucket begins, and of each bucket, how much memory its pool
      has for all; in bytes.

    Example:
      >>> text = "fetch 0; fetch 1; use 0+1; drop 0; fetch 2; fetch 3; use 1; use 2+3; drop 1"
      >>> offsets(Schedule.parse(text), [9, 4, 3, 6], [None] * 4)
      ((0, 9, 6, 0), (13, 13, 13, 13))
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
    return tuple(starts), tuple(most[pool] for pool in pools)


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


# Policies: how a schedule is made from a record, and what is remembered between runs.

Planner = Callable[[Schedule, Sequence[int]], Schedule]


@dataclass(eq=False)
class Learned:
    """What earlier runs of one tree under one policy found out."""

    schedule: Schedule | None = None  # what the next run follows
    order: tuple[int, ...] | None = None  # of reductions; the same on all ranks of the job
    firsts: tuple[int, ...] | None = None  # order of first uses; the same on all ranks of the job
    offsets: tuple[Any, Any] = (None, None)  # what they were found for, and what `offsets` gave
    last: Any = None  # the last `Run`, which has perhaps not settled yet
    warned: bool = False  # whether the warning of a changed order of use was given
    examined: bool = False  # whether a loss was searched for parameters that nobody trains
    missed: set[int] = field(default_factory=set)  # buckets that got no gradient in some pass
    reused: set[int] = field(default_factory=set)  # buckets used after they were let go

    def forget(self) -> None:
        """Forget all that ranks must have in common: on new groups some may have seen less."""
        self.schedule = self.order = self.firsts = self.last = None
        self.missed, self.reused = set(), set()


@dataclass(eq=False)
class OnDemand:
    """A policy, and what it remembers of each tree; made by `on_demand` and `keep_all`.

    Keep one policy for each program: training and evaluation use parameters in different orders.

    Args:
      live_bytes: budget for buckets that stay live; None for no limit.
      prefetch: how many buckets may be fetched ahead of their use.
      planner: makes a schedule from a record and the sizes of buckets; None for `schedules.plan`.
      at_once: whether a run fetches everything when it begins.
      lets_go: whether the last pass drops a bucket once its gradients are complete.
      learned: what runs have found out, by tree.

    Example:
      >>> policy = OnDemand(live_bytes=8, prefetch=1)
      >>> print(policy.plan(Schedule.parse("use 0; use 1; use 0"), sizes=[8, 8]))
      fetch 0; fetch 1; use 0; use 1; drop 1; use 0; drop 0
      >>> policy.describe()
      'on_demand(live_bytes=8, prefetch=1)'
    """

    live_bytes: int | None
    prefetch: int
    planner: Planner | None = None
    at_once: bool = False
    lets_go: bool = False
    learned: dict[Hashable, Learned] = field(default_factory=dict, repr=False)

    @property
    def schedule(self) -> Schedule | None:
        """What the next run of the tree that was seen last will follow; None if not known yet."""
        found = [each.schedule for each in self.learned.values() if each.schedule is not None]
        return found[-1] if found else None

    def plan(self, record: Schedule, sizes: Sequence[int]) -> Schedule:
        """A schedule for a record."""
        if self.planner is not None:
            planned = self.planner(record, sizes)
            planned.check(sizes)
            return planned.unmarked
        return plan(record.unmarked, sizes, live_bytes=self.live_bytes, prefetch=self.prefetch)

    def describe(self) -> str:
        """The facts that must be the same on every rank."""
        if self.at_once:
            return "keep_all()"
        # Functions cannot be compared between ranks; the fetches that they plan are.
        own = "" if self.planner is None else ", plan=a function"
        return f"on_demand(live_bytes={self.live_bytes}, prefetch={self.prefetch}{own})"


def on_demand(
    *, live_bytes: float | str | None = None, prefetch: int = 4, plan: Planner | None = None
) -> OnDemand:
    """A policy that fetches buckets when an op needs them, and ahead once their order is known.

    The first run fetches a bucket at its first use and records the order of use; later runs follow
    the plan that was made from it. `Trainer` uses this policy if it has a budget.

    Args:
      live_bytes: how many bytes of gathered buckets stay live. With None all stay, and each bucket
        is fetched once per run, as in ZeRO-2; with 0 one bucket is live at a time, as in ZeRO-3.
        What a single op needs is always allowed, and one more bucket that is fetched ahead. A text
        such as "512MiB" or "1GB" is a number of bytes, too.
      prefetch: how many buckets may be fetched ahead of their use, once the order is known.
      plan: makes a schedule from a record and the sizes of buckets in bytes, instead of
        `mics_fn.schedules.plan`. A record has the marks of backward passes that a `GradSum` runs.

    Returns:
      An `OnDemand`, for `defer` and `Trainer`. It remembers what it learned.

    Communication: in a run without a schedule and in the first that follows one, a few messages of
      about a hundred bytes to the store of torch.distributed before each fetch.

    Raises:
      PlanError: `live_bytes` is negative or not a number.

    Example:
      >>> groups = make_groups(1)
      >>> policy = on_demand(live_bytes=0)
      >>> shards = shard({"w": torch.ones(2), "b": torch.ones(3)}, groups, bucket_bytes=8)
      >>> def loss_fn(shards):
      ...     with defer(shards, groups, policy) as full:
      ...         return full["w"].sum() * full["b"].sum()
      >>> for _ in range(2):
      ...     grads = torch.func.grad(loss_fn)(shards)
      >>> print(policy.schedule)
      fetch 1; fetch 0; use 1; drop 1; use 0; drop 0; reduce 0; reduce 1

    References: MiCS, Zhang et al., VLDB 2022, arXiv:2205.00119, section 4; Belady, IBM Systems
      Journal, 1966.
    """
    budget = None if live_bytes is None else checks.nbytes("on_demand", "live_bytes", live_bytes)
    return OnDemand(budget, prefetch, plan)


def keep_all() -> OnDemand:
    """A policy that starts to fetch all buckets at once and keeps them until the end of the run.

    Buckets arrive in the order in which the first run used them, while the model computes with
    those that are there. Because no fetch depends on what the model does, ranks may use different
    parameters.

    Returns:
      An `OnDemand`, for `defer` and `Trainer`.

    Communication: each run gathers each bucket once.

    Memory: each run holds the full parameters.

    Example:
      >>> groups = make_groups(1)
      >>> shards = shard([torch.ones(2)], groups)
      >>> with defer(shards, groups, keep_all()) as full:
      ...     full[0] + 1
      tensor([2., 2.])
    """
    return OnDemand(None, 0, at_once=True)


# `Channel`, and `Run`.


_CHANGED = """defer: the order of use changed: buckets are fetched on demand until it repeats
  this warning is given once"""


class Run:
    """Follows a schedule or records one, and keeps account of live buckets; it moves no data.

    Args:
      learned: what earlier runs found out; updated with what this run finds out.
      policy: makes schedules, and has the budget.
      sizes: bytes of each bucket.
      channels: for messages to the other ranks, one per set of groups that the tree lives on.
    """

    def __init__(
        self, learned: Learned, policy: OnDemand, sizes: Sequence[int], channels: Iterable[Channel]
    ) -> None:
        if learned.last is not None:
            learned.last.end()
        self.learned, self.policy, self.sizes = learned, policy, sizes
        # Uses and complete gradients as they happened.
        self._events: list[tuple[Kind, tuple[int, ...]]] = []
        self.live: dict[int, None] = {}  # least recently used first
        self.live_bytes = 0
        self.following = learned.schedule is not None
        self._ended = False
        self._steps = [] if learned.schedule is None else learned.schedule.steps
        self._next = 0  # index of the next step to follow
        # In which order buckets are reduced, on every rank, whichever is complete first.
        self.order = learned.order or tuple(reversed(range(len(sizes))))
        # Whether it may fetch something after its start, in which ranks have to agree.
        self._polls = not policy.at_once or policy.lets_go
        self._channels = list(dict.fromkeys(channels)) or [Channel()]
        for channel in self._channels:
            channel.learned.add(learned)
        self._widest = max(self._channels, key=lambda channel: channel.job_size)
        self._widest.runs += 1
        self.number = self._widest.runs
        if self._widest.run_keys:
            self._widest.delete_old()
        learned.last = self

    def start(self) -> Sequence[int]:
        """Return the buckets to fetch before anything is used."""
        order = (self.learned.firsts or range(len(self.sizes))) if self.policy.at_once else ()
        for index in order:
            self.apply("fetch", index)
        return order

    def use(self, ids: tuple[int, ...]) -> list[tuple[Kind, int]]:
        """Return what to fetch and drop before an op that needs these buckets."""
        self._events.append(("use", ids))
        if self.following:
            if self._next < len(self._steps) and self._steps[self._next][0] == ids:
                self._next += 1
                return [self.apply(*action) for action in self._steps[self._next - 1][1]]
            self.following = False
        for i in ids:
            if i in self.live:  # it is the most recently used one now
                self.live[i] = self.live.pop(i)
        return self._on_demand(ids)

    def lets_go(self, index: int) -> bool:
        """Whether a bucket is dropped in the last pass once it has its gradients.

        So it is by policy, if nothing should need it again in this run. Ranks need not agree on it.
        If it is needed all the same, they fetch it again on demand.
        """
        return self.policy.lets_go and self.sizes[index] > 0 and index not in self.learned.reused

    def note(self, kind: Kind, *ids: int) -> None:
        """Note that a backward pass begins here, or that a bucket's gradients are complete."""
        self._events.append((kind, ids))

    def tally(self, event: str, amount: int) -> int:
        """Add to a number of this run that all ranks share, and return the sum; never waits."""
        return self._widest.tally(f"{event}/{self.number}", amount)

    def apply(self, kind: Kind, index: int) -> tuple[Kind, int]:
        """Note that a bucket is fetched or dropped."""
        if kind == "fetch":
            self.live[index] = None
            self.live_bytes += self.sizes[index]
        else:
            del self.live[index]
            self.live_bytes -= self.sizes[index]
        return kind, index

    def _on_demand(self, ids: tuple[int, ...]) -> list[tuple[Kind, int]]:
        """Fetch missing buckets, after drops of the least recently used ones if room is needed."""
        done, budget = [], self.policy.live_bytes
        for i in ids:
            if i in self.live:
                continue
            if self.policy.at_once:  # it was let go
                self.learned.reused.add(i)
            while budget is not None and self.live_bytes + self.sizes[i] > budget:
                victim = next((b for b in self.live if b not in ids), None)
                if victim is None:
                    break
                done.append(self.apply("drop", victim))
            done.append(self.apply("fetch", i))
        return done

    def poll_peers(self) -> None:
        """Poll for messages of other ranks, at most once per second; not with `keep_all`.

        Whether a rank has failed is known here without a message.
        """
        for channel in self._channels:
            channel.check()
            if self._polls:
                channel.glance()

    def end(self) -> Schedule | None:
        """End the run and learn from it; return what the next one follows, if this one has not.

        It warns of another order of use only here, as ranks that differ in it have raised by now.
        """
        if not self._ended:
            self._ended = True
            if self._next < len(self._steps):
                self.following = False
            if self._steps and not self.following and not self.learned.warned:
                self.learned.warned = True
                warnings.warn(_CHANGED, stacklevel=2)
            self._learn()
        return None if self.following else self.learned.schedule

    def _learn(self) -> None:
        learned = self.learned
        if self.following or (self.policy.at_once and learned.order is not None):
            return
        record = self.marked
        if not record.uses:
            return
        if not self.policy.at_once:
            learned.schedule = self.policy.plan(record, self.sizes)
        if learned.order is None:
            # Replicas reduce together in hop 2, so all ranks of the job keep the order of one rank.
            rest = reversed(range(len(self.sizes)))
            learned.order = self._first_order("order", [*record.reduces, *rest])
            used = [i for ids in record.uses for i in ids]
            learned.firsts = self._first_order("firsts", [*used, *range(len(self.sizes))])

    def _first_order(self, event: str, order: Sequence[int]) -> tuple[int, ...]:
        """The order of first occurrences, as found by the rank that asks first among all ranks."""
        text = " ".join(map(str, dict.fromkeys(order)))
        return tuple(map(int, self._widest.first_of(f"{event}/{self.number}", text).split()))

    @property
    def marked(self) -> Schedule:
        """What happened, as a schedule without fetches, marked where backward passes began."""
        return Schedule(tuple(Action(*event) for event in self._events))

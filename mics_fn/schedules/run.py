"""`Run`: one run of a model under a policy, which decides what to fetch and drop at each use.

[Note: recording] The first run knows nothing. It fetches a bucket at its first use, drops the least
recently used one if the budget requires it, and records the order of use. The next run follows the
schedule that was planned from this record, as long as the model does the same again. If it does
not, the run continues like a first run from there, and its record replaces the old one.

[Note: reductions between fetches] A rank may wait for the memory of a reduction that another one
starts after a fetch, while that one waits for this fetch. Reductions come in one order on all
ranks, and each waits at most for the one that is `slack` places before it. So it is enough that
the numbers of reductions before a fetch differ by at most `slack`. A rank starts fewer before a
fetch if a bucket got no gradient there: nobody can know yet that none will come. Ranks tell these
numbers before each fetch, from the second run that follows a schedule on only where theirs are new.
Nothing is compared after the last fetch, so under `keep_all`, or if everything stays, ranks may
differ in what gets a gradient.
"""

import warnings
from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Any

from mics_fn.schedules.desync import Channel
from mics_fn.schedules.policy import Learned, OnDemand
from mics_fn.schedules.schedule import Action, Schedule

# What is learned from a run once it has ended.


def settle(learned: Learned, policy: OnDemand, sizes: Sequence[int], channel: Channel) -> None:
    """Learn from the last run, unless it followed a schedule to its end."""
    last: Any = learned.last
    if last is None or last.settled:
        return
    last.end()
    last.settled = True
    if last.following:
        learned.passes = learned.passes or last.passes or None
        learned.since = last.number if learned.before is None else learned.since
        learned.before = tuple(last.before)
        return
    channel.forget(f"{learned.since}/{k}" for k, _ in learned.before or ())
    learned.before = None
    if not policy.at_once or last.left:
        uses = sha256(repr(last.uses).encode()).hexdigest()[:16]
        channel.compare(f"{last.use_text(len(last.uses))} (digest of its uses: {uses})")
    if not last.uses:
        return
    if not policy.at_once:
        learned.schedule, learned.passes = policy.plan(last.marked, sizes), last.passes or None
        planned = sha256(str(learned.schedule).encode()).hexdigest()[:16]
        channel.compare(f"made a schedule that differs ({planned})")
    if learned.order is None:
        # Replicas reduce together in hop 2, so all ranks of the job keep the order of one rank.
        reduced = [action.buckets[0] for action in last.events if action.kind == "reduce"]
        rest = reversed(range(len(sizes)))
        learned.order = _first_order(channel, f"order/{last.number}", [*reduced, *rest])
        used = [i for ids in last.uses for i in ids]
        learned.firsts = _first_order(channel, f"firsts/{last.number}", [*used, *range(len(sizes))])


def _first_order(channel: Channel, event: str, order: Sequence[int]) -> tuple[int, ...]:
    """The order of first occurrences, as found by the rank that asks first among all ranks."""
    text = channel.first_of(event, " ".join(map(str, dict.fromkeys(order))))
    return tuple(map(int, text.split()))


class Run:
    """Follows a schedule or records one, and keeps account of live buckets; it moves no data.

    Args:
      learned: what earlier runs found out; updated with what this run finds out.
      policy: makes schedules, and has the budget.
      sizes: bytes of each bucket.
      channel: for messages to the other ranks.
      name: text of a bucket, for errors.
    """

    def __init__(
        self,
        learned: Learned,
        policy: OnDemand,
        sizes: Sequence[int],
        channel: Channel,
        name: Callable[[int], str],
    ) -> None:
        settle(learned, policy, sizes, channel)
        self.learned, self.policy, self.sizes = learned, policy, sizes
        self.uses: list[tuple[int, ...]] = []
        self.events: list[Action] = []  # uses and complete gradients as they happened
        self._backwards: list[int] = []  # how many events came before each backward pass
        self._reduced: list[int] = []  # buckets whose reductions have started, over all passes
        # Of each use that fetches: its number, and how many reductions have started before it.
        self.before: list[tuple[int, int]] = []
        self.slack = 0  # a reduction waits at most for the one so many places before it
        self.live: dict[int, None] = {}  # least recently used first
        self.live_bytes = self.peak_bytes = 0
        self.following = learned.schedule is not None
        self.left = self.ended = self.settled = False
        self._actions = () if learned.schedule is None else learned.schedule.actions
        self._next = 0  # index of the next action to follow
        self.passes = 0  # number of backward passes so far
        self._end: int | None = None  # number of uses up to the end of the last backward pass
        self._channel, self.name = channel, name
        self._digest = sha256()
        self.number = channel.begin_run(self)
        channel.remember(learned)
        learned.last = self

    @property
    def order(self) -> tuple[int, ...]:
        """The order in which buckets are reduced, on every rank, whichever is complete first."""
        return self.learned.order or tuple(reversed(range(len(self.sizes))))

    def start(self) -> list[Action]:
        """What to fetch before anything is used."""
        if not self.policy.at_once:
            return []
        order = self.learned.firsts or range(len(self.sizes))
        return [self._apply(Action("fetch", (i,))) for i in order]

    def use(self, ids: tuple[int, ...]) -> list[Action]:
        """What to fetch and drop before an op that needs these buckets."""
        k = len(self.uses)
        self.uses.append(ids)
        self.events.append(Action("use", ids))
        if self.policy.at_once:
            again = [i for i in ids if i not in self.live]
            return self._again(k, ids, again) if again else []
        if self.following:
            found = self._until(ids)
            if found is None:
                self._leave(k, self.use_text(k))
            elif any(a.kind == "fetch" for a in found) and not self._fetch_is_near(k):
                self._leave(k, self._fetch_text(k), len(self._reduced))
            else:
                return [self._apply(action) for action in found]
        self._digest.update(repr(ids).encode())
        for i in ids:
            if i in self.live:
                del self.live[i]
                self.live[i] = None
        return self._on_demand(k, ids)

    def lets_go(self, index: int) -> bool:
        """Return whether `let_go` will drop a live bucket, by policy and because no use follows."""
        return self.policy.lets_go and self.sizes[index] > 0 and index not in self.learned.again

    def let_go(self, index: int) -> bool:
        """Drop a bucket that nothing should need again in this run; returns whether it is dropped.

        Ranks need not agree on it. If it is needed all the same, they fetch it again on demand.
        """
        if index not in self.live or not self.lets_go(index):
            return False
        self._apply(Action("drop", (index,)))
        return True

    def begin_backward(self) -> None:
        """Note that a backward pass begins here."""
        self._backwards.append(len(self.events))

    def complete(self, index: int) -> None:
        """Record that a bucket's gradients are complete."""
        self.events.append(Action("reduce", (index,)))

    def reduce(self, index: int) -> None:
        """Note that a bucket's reduction starts next; see [Note: reductions between fetches]."""
        n = len(self._reduced)
        self._reduced.append(index)
        known, at = self.learned.before or (), len(self.before)
        if self.following and not self.ended and at < len(known):
            k, most = known[at]
            text = self._reduction_text(k, n)
            if n >= most and not self._is_near(self.learned.since, k, n + 1, text):
                self._leave(k, text, n)

    def _fetch_is_near(self, k: int) -> bool:
        """Whether about as many reductions have come before these fetches as on other ranks."""
        known, at, now = self.learned.before, len(self.before), (k, len(self._reduced))
        self.before.append(now)
        if known is None:
            self._compare_reductions(k)
            return True
        return known[at] == now or self._is_near(self.learned.since, *now, self._fetch_text(k))

    def _is_near(self, run: int, k: int, count: int, text: str) -> bool:
        """Whether this number of reductions before use k is near those told since a run."""
        least, most = self._channel.extremes(f"{run}/{k}", count, text)
        return most[0] - least[0] <= self.slack

    def _compare_reductions(self, k: int) -> None:
        """Raise DesyncError if other ranks have started many more or fewer before use k."""
        count, text, lasting = len(self._reduced), self._fetch_text(k), self.following
        found = self._channel.extremes(f"{self.number}/{k}", count, text, lasting=lasting)
        if found[1][0] - found[0][0] > self.slack:
            self._channel.refuse({rank: text for _, rank, text in found})

    def _fetch_text(self, k: int) -> str:
        """Use k, which fetches, as text with the reductions that have started before it."""
        n = dict(self.before).get(k, len(self._reduced))
        last = f", the last of {self.name(self._reduced[n - 1])}" if n else ""
        return f"{self.use_text(k)}; reductions before it: {n}{last}"

    def _reduction_text(self, k: int, n: int) -> str:
        name = self.name(self._reduced[n])
        return f"reduction {n} of run {self.number} is of {name}, before use {k}"

    def end_pass(self, last: bool | None) -> None:
        """Compare the end of a backward pass; buckets without gradients will be reduced as zeros.

        Ranks may differ in which of several passes uses a bucket, as long as they fetch the same.

        Args:
          last: whether it is the last pass of the run. None: if it has the number of the pass that
            was the last one in the run before.
        """
        self.passes += 1
        if self.policy.at_once or last is False:
            return
        self._end = len(self.uses)
        if not self.following:
            self._channel.compare(f"run {self.number} ends a backward pass")
        elif (last or self.learned.passes in (None, self.passes)) and self._uses_left():
            self._leave(self._end, self._pass_end())

    def _pass_end(self) -> str:
        return f"run {self.number} ends a backward pass after {self._end} uses of buckets"

    def _so_far(self, step: str) -> str:
        """A step as text that also differs if any earlier use differed."""
        return f"{step} (digest of the uses so far: {self._digest.hexdigest()[:8]})"

    def _uses_left(self) -> bool:
        return any(action.kind == "use" for action in self._actions[self._next :])

    def tally(self, event: str, amount: int) -> int:
        """Add to a number of this run that all ranks share, and return the sum; never waits."""
        return self._channel.tally(f"{event}/{self.number}", amount)

    def _until(self, ids: tuple[int, ...]) -> list[Action] | None:
        """The schedule's fetches and drops up to this use; None if its next use is another one."""
        found = []
        for place in range(self._next, len(self._actions)):
            action = self._actions[place]
            if action.kind == "use":
                if action.buckets != ids:
                    return None
                self._next = place + 1
                return found
            if action.kind in ("fetch", "drop"):
                found.append(action)
        return None

    def _apply(self, action: Action) -> Action:
        (index,) = action.buckets
        if action.kind == "fetch":
            self.live[index] = None
            self.live_bytes += self.sizes[index]
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        else:
            del self.live[index]
            self.live_bytes -= self.sizes[index]
        return action

    def _on_demand(self, k: int, ids: tuple[int, ...]) -> list[Action]:
        """Fetch missing buckets, after drops of the least recently used ones if room is needed."""
        done, budget = [], self.policy.live_bytes
        for i in ids:
            if i in self.live:
                continue
            while budget is not None and self.live_bytes + self.sizes[i] > budget:
                victim = next((b for b in self.live if b not in ids), None)
                if victim is None:
                    break
                done.append(self._apply(Action("drop", (victim,))))
            # See [Note: the same order of use] in `schedules.desync`.
            self._channel.compare(self._so_far(self.use_text(k)))
            self._compare_reductions(k)
            done.append(self._apply(Action("fetch", (i,))))
        return done

    def _again(self, k: int, ids: tuple[int, ...], again: list[int]) -> list[Action]:
        """Fetch buckets that `let_go` dropped, once all ranks need them again."""
        self.learned.again.update(again)
        if not self.left:
            self.left = True
            self._channel.leave(self.number, (k, None), self.use_text(k))
        return self._on_demand(k, ids)

    def use_text(self, k: int) -> str:
        """Use k of this run as text."""
        if k >= len(self.uses):
            return f"run {self.number} ends after {len(self.uses)} uses of buckets"
        named = " and ".join(map(self.name, self.uses[k]))
        return f"use {k} of run {self.number} is of {named}"

    def step_text(self, k: int, reduced: int | None) -> str | None:
        """What this rank did at a step; see `schedules.desync.Progress`."""
        if self.left:
            return None
        if reduced is not None and len(self.uses) <= k and len(self._reduced) > reduced:
            return self._reduction_text(k, reduced)
        if reduced is not None and len(self.uses) > k:
            return self._fetch_text(k)
        if len(self.uses) == k == self._end and not self.ended:
            return self._pass_end()
        return self.use_text(k) if len(self.uses) > k or self.ended else None

    def last_step(self) -> str:
        """The last thing that this rank did."""
        if len(self.uses) == self._end and not self.ended:
            return self._pass_end()
        if not self.uses and not self.ended:
            return f"run {self.number} began"
        return self.use_text(len(self.uses) - (0 if self.ended else 1))

    def _leave(self, k: int, text: str, reduced: int | None = None) -> None:
        """Stop following the schedule at a step, on all ranks, and warn the first time."""
        self.left = True
        self._channel.leave(self.number, (k, reduced), text)
        self.following = False
        for used in self.uses[: k + 1]:
            self._digest.update(repr(used).encode())
        if not self.learned.warned:
            self.learned.warned = True
            text = f"defer: the order of use changed: {text}. Buckets are fetched on demand"
            warnings.warn(f"{text} until it repeats; this warning is given once", stacklevel=2)

    def end(self) -> list[Action]:
        """End the run; returns the drops of what is still live."""
        if self.following and not self.ended and self._uses_left():
            self._leave(len(self.uses), self.use_text(len(self.uses)))
        self.ended = True
        return [Action("drop", (i,)) for i in self.live]

    def look(self) -> None:
        """Poll for messages of other ranks, at most once per second; not with `keep_all`.

        Whether a rank has failed is known here without a message.
        """
        self._channel.check()
        if not self.policy.at_once:
            self._channel.glance()

    def settle(self) -> Schedule | None:
        """Learn from this run now; returns what the next one follows, if this one has not."""
        settle(self.learned, self.policy, self.sizes, self._channel)
        return None if self.following else self.learned.schedule

    @property
    def record(self) -> Schedule:
        """What happened, as a schedule without fetches."""
        return Schedule(tuple(self.events))

    @property
    def marked(self) -> Schedule:
        """The record, with marks where backward passes began."""
        return self.record.marked_at(self._backwards)

"""`Run`: one run of a model under a policy, which decides what to fetch and drop at each use.

[Note: recording] The first run knows nothing. It fetches a bucket at its first use, drops the least
recently used one if the budget requires it, and records the order of use. The next run follows the
schedule that was planned from this record, as long as the model does the same again. If it does
not, the run continues like a first run from there, and its record replaces the old one.

[Note: the same order of use] Each rank decides by itself what to fetch. Ranks that fetch different
buckets would hang, or receive the wrong bytes, so what a run does is compared before it is done,
like the calls of a communicator: each fetch, the end of a backward pass, and the end of the run.
See [Note: the same calls] in `schedules.calls`; runs that repeat send nothing. A fetch is compared
with the number of reductions that have started before it: a rank may wait for the memory of a
reduction that another one starts after the fetch, while that one waits for the fetch. Ranks may
differ in what they use while it is live, and in gradients after the last fetch. Under `keep_all`,
which fetches everything before the first use, nothing is compared.
"""

import warnings
from collections.abc import Callable, Sequence

from mics_fn.schedules.channel import Channel
from mics_fn.schedules.policy import Learned, OnDemand
from mics_fn.schedules.schedule import Action, Schedule


class Run:
    """Follows a schedule or records one, and keeps account of live buckets; it moves no data.

    Args:
      learned: what earlier runs found out; updated with what this run finds out.
      policy: makes schedules, and has the budget.
      sizes: bytes of each bucket.
      channel: for messages to the other ranks.
      name: text of a bucket, for errors.
      push: called while other ranks are waited for, so that what they wait for gets on.
    """

    def __init__(
        self,
        learned: Learned,
        policy: OnDemand,
        sizes: Sequence[int],
        channel: Channel,
        name: Callable[[int], str],
        push: Callable[[], object] = lambda: None,
    ) -> None:
        if learned.last is not None:
            learned.last.settle()
        self.learned, self.policy, self.sizes = learned, policy, sizes
        self.events: list[Action] = []  # uses and complete gradients as they happened
        self._backwards: list[int] = []  # how many events came before each backward pass
        self._reduced: list[int] = []  # buckets whose reductions have started, over all passes
        self.live: dict[int, None] = {}  # least recently used first
        self.live_bytes = 0
        self.following = learned.schedule is not None
        self._left = ""  # why it does not follow its schedule any more
        self._settled = False
        self._actions = () if learned.schedule is None else learned.schedule.actions
        self._next = 0  # index of the next action to follow
        self.passes = 0  # number of backward passes so far
        self._channel, self.name, self._push = channel, name, push
        self.number = channel.begin_run()
        channel.remember(learned)
        learned.last = self

    @property
    def order(self) -> tuple[int, ...]:
        """The order in which buckets are reduced, on every rank, whichever is complete first."""
        return self.learned.order or tuple(reversed(range(len(self.sizes))))

    @property
    def _compares(self) -> bool:
        """Whether it may fetch something after its start, in which ranks have to agree."""
        return not self.policy.at_once or self.policy.lets_go

    def start(self) -> list[Action]:
        """What to fetch before anything is used."""
        if not self.policy.at_once:
            return []
        order = self.learned.firsts or range(len(self.sizes))
        return [self._apply(Action("fetch", (i,))) for i in order]

    def use(self, ids: tuple[int, ...]) -> list[Action]:
        """What to fetch and drop before an op that needs these buckets."""
        self.events.append(Action("use", ids))
        if self.following:
            found = self._until(ids)
            if found is not None:
                return [self._agreed(action) for action in found]
            self._leave(f"a use is of {' and '.join(map(self.name, ids))}")
        for i in ids:
            if i in self.live:
                del self.live[i]
                self.live[i] = None
        return self._on_demand(ids)

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
        """Note that a bucket's reduction starts next."""
        self._reduced.append(index)

    def end_pass(self, last: bool | None) -> None:
        """Compare the end of a backward pass; buckets without gradients will be reduced as zeros.

        Args:
          last: whether it is the last pass of the run. False compares nothing: ranks may differ in
            which of several passes uses a bucket, as long as they fetch the same.
        """
        self.passes += 1
        if last is not False:
            self._compare("a backward pass ends")

    def _compare(self, text: str) -> None:
        """See [Note: the same order of use]."""
        if self._compares:
            self._channel.compare(text, self._push)
        if self._left and not self.learned.warned:
            self.learned.warned = True
            text = f"defer: the order of use changed: {self._left}. Buckets are fetched on demand"
            warnings.warn(f"{text} until it repeats; this warning is given once", stacklevel=2)

    def _agreed(self, action: Action) -> Action:
        """Do an action, of which all ranks know that the others do it too if it is a fetch."""
        if action.kind == "fetch":
            n = len(self._reduced)
            last = f", the last of {self.name(self._reduced[-1])}" if n else ""
            name = self.name(action.buckets[0])
            self._compare(f"fetch of {name}; reductions before it: {n}{last}")
        return self._apply(action)

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
        else:
            del self.live[index]
            self.live_bytes -= self.sizes[index]
        return action

    def _on_demand(self, ids: tuple[int, ...]) -> list[Action]:
        """Fetch missing buckets, after drops of the least recently used ones if room is needed."""
        done, budget = [], self.policy.live_bytes
        for i in ids:
            if i in self.live:
                continue
            if self.policy.at_once:  # `let_go` has dropped it
                self.learned.again.add(i)
            while budget is not None and self.live_bytes + self.sizes[i] > budget:
                victim = next((b for b in self.live if b not in ids), None)
                if victim is None:
                    break
                done.append(self._apply(Action("drop", (victim,))))
            done.append(self._agreed(Action("fetch", (i,))))
        return done

    def _leave(self, why: str) -> None:
        """Stop following the schedule; says why the first time, once no rank differs."""
        self.following, self._left = False, why

    def end(self) -> list[Action]:
        """End the run; returns the drops of what is still live."""
        left = self._actions[self._next :]
        if self.following and any(action.kind == "use" for action in left):
            self._leave(f"run {self.number} ends after {len(self.record.uses)} uses of buckets")
        return [Action("drop", (i,)) for i in self.live]

    def look(self) -> None:
        """Poll for messages of other ranks, at most once per second; not with `keep_all`.

        Whether a rank has failed is known here without a message.
        """
        self._channel.check()
        if self._compares:
            self._channel.glance()

    def settle(self) -> Schedule | None:
        """Learn from this run; returns what the next one follows, if this one has not.

        Raises:
          DesyncError: other ranks fetch something else where this one ends the run.
        """
        if not self._settled:
            self.end()
            self._settled = True
            self._compare("a run ends")
            self._learn()
        return None if self.following else self.learned.schedule

    def _learn(self) -> None:
        learned, uses = self.learned, self.record.uses
        if self.following or not uses:
            return
        if not self.policy.at_once:
            learned.schedule = self.policy.plan(self.marked, self.sizes)
        if learned.order is None:
            # Replicas reduce together in hop 2, so all ranks of the job keep the order of one rank.
            rest = reversed(range(len(self.sizes)))
            learned.order = self._first_order("order", [*self.record.reduces, *rest])
            used = [i for ids in uses for i in ids]
            learned.firsts = self._first_order("firsts", [*used, *range(len(self.sizes))])

    def _first_order(self, event: str, order: Sequence[int]) -> tuple[int, ...]:
        """The order of first occurrences, as found by the rank that asks first among all ranks."""
        text = " ".join(map(str, dict.fromkeys(order)))
        return tuple(map(int, self._channel.first_of(f"{event}/{self.number}", text).split()))

    @property
    def record(self) -> Schedule:
        """What happened, as a schedule without fetches."""
        return Schedule(tuple(self.events))

    @property
    def marked(self) -> Schedule:
        """The record, with marks where backward passes began."""
        return self.record.marked_at(self._backwards)

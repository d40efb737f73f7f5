"""What ranks of a partition group tell each other through the store, outside of all collectives.

[Note: the same order of use] Ranks that fetch different buckets would hang, or hand each other the
wrong bytes. So a bucket is fetched only if all ranks of the partition group are known to want it
next: either all follow one schedule that they agreed on, or before each single fetch they compare a
digest of the uses so far, which costs one small message to the store. The end of a backward pass
and the end of a run are compared as well: a rank that uses fewer buckets would otherwise wait for
reductions while the others wait for a fetch.

A rank whose model leaves the schedule waits for the others to leave it at the same step. One that
does not leave misses it sooner or later: whoever waits for a collective without seeing it move
looks here once a second, finds who left, or who waits for it in another collective, and both raise
an error that says so. The other replicas would wait for these ranks in hop 2, so they find the same
error when they look. While all ranks follow a schedule nothing is sent.
"""

import json
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn, Protocol

from mics_fn.errors import CollectiveTimeoutError, DesyncError, disagreement, message, name_ranks
from mics_fn.schedules.stalled import Stuck, never, news, next_to
from mics_fn.store import Store, poll

_ORDERS = "defer: ranks use parameters in different orders"
_ONE_ORDER = (
    "let all ranks of a partition group use parameters in one order, "
    "or pass schedule=keep_all(), which lets them differ"
)
_STUCK = (
    "ranks wait for each other in different collectives",
    f"call the same verbs in the same order on all ranks; {_ONE_ORDER}",
)
_RUNS_KEPT = 4  # ranks are never that far apart: every run has collectives


class Progress(Protocol):
    """How far this rank is in one run of the model, for the others."""

    number: int  # of the run

    def step_text(self, k: int) -> str | None:
        """What this rank did at step k; None if it is not there yet or left the schedule there."""
        ...

    def last_step(self) -> str:
        """What this rank did last."""
        ...


class Channel:
    """The messages of a partition group; without a store it has one rank and nothing to say.

    Args:
      store: shared by all ranks.
      key: what no other groups of this job use.
      ranks: global ranks of the partition group.
      rank: this one.
      timeout_s: bound in seconds of each wait.
      job_size: number of ranks of the whole job.
    """

    def __init__(
        self,
        store: Store | None = None,
        key: str = "",
        ranks: Sequence[int] = (),
        rank: int = 0,
        timeout_s: float = 300.0,
        job_size: int = 1,
    ) -> None:
        self.job_size = job_size
        self.runs = 0  # of models, so far
        self.fixed: dict[Any, Any] = {}  # what is known of schedules that came without a policy
        self._store = store if len(ranks) > 1 else None
        self._shared, self._all = store, f"{key}/all"  # all ranks of the groups, with replicas
        self._key = f"{key}/order/{min(ranks, default=0)}"
        self._ranks, self._rank, self._timeout_s = ranks, rank, timeout_s
        self._recent: list[Progress] = []
        self._events = 0
        self._news = ""  # what this rank said of its waiting
        self._written: deque[list[str]] = deque([[]], maxlen=_RUNS_KEPT)

    def begin_run(self, progress: Progress, number: int | None = None) -> int:
        """Begin a run; the n-th on one rank is the n-th on the others. Returns its number."""
        self.runs = self.runs + 1 if number is None else number
        self._recent = [*self._recent[-1:], progress]
        if self._shared is not None:
            # What was said in runs long past is of no use, and a store has to hold it in memory.
            past = self._written[0] if len(self._written) == _RUNS_KEPT else []
            for key in past:
                with suppress(RuntimeError, NotImplementedError):
                    self._shared.delete_key(key)
            self._written.append([])
        return self.runs

    def compare(self, text: str) -> None:
        """Raise DesyncError if the n-th call on another rank has another text; never waits.

        Calls are counted over all runs, so that ranks in different runs are told apart too.
        """
        if self._store is None:
            return
        mine, key = json.dumps([self._rank, text]), f"{self._key}/{self._events}"
        self._events += 1
        first = json.loads(self._store.compare_set(key, "", mine))
        if first[0] == self._rank:
            self._written[-1].append(key)
        if first[1] != text:
            self._raise_everywhere({first[0]: first[1], self._rank: text})

    def first_of(self, event: str, text: str) -> str:
        """The text of whichever rank of all groups came to this event first."""
        if self._shared is None:
            return text
        return self._shared.compare_set(f"{self._all}/{event}", "", text).decode()

    def tally(self, event: str, amount: int) -> int:
        """Add to a number that all groups of the job share, and read it; never waits."""
        key = f"{self._all}/{event}"
        if self._shared is None:
            return amount
        self._written[-1].append(key)
        return self._shared.add(key, amount)

    def leave(self, number: int, k: int, text: str) -> None:
        """Leave a schedule at step k; returns when all ranks have left it there, alike.

        Raises:
          DesyncError: others left elsewhere, or not at all.
          CollectiveTimeoutError: some rank neither left nor noticed that it should.
        """
        self.say_left(number, k, text)
        self.wait_left(number, text)

    def say_left(self, number: int, k: int, text: str) -> None:
        """Tell the others that this rank left the schedule at step k."""
        if self._store is not None:
            self._store.set(self._left(number, self._rank), json.dumps([k, text]))
            self._written[-1].append(self._left(number, self._rank))

    def wait_left(self, number: int, text: str) -> None:
        """Wait until all ranks have left the schedule."""
        store = self._store
        if store is None:
            return
        others = {rank: self._left(number, rank) for rank in self._ranks}

        def all_left() -> bool:
            self._raise_reported()
            return store.check(list(others.values()))

        if not poll(all_left, len(others), time.monotonic() + self._timeout_s):
            late = [rank for rank, key in others.items() if not store.check([key])]
            text = f"{name_ranks(late)} did not come to {text} in {self._timeout_s:g} s"
            raise CollectiveTimeoutError(message(text, fix="look for a rank that stopped"))
        found = {rank: json.loads(store.get(key)) for rank, key in others.items()}
        if len({tuple(left) for left in found.values()}) > 1:
            self._raise_everywhere({rank: left[1] for rank, left in found.items()})

    def look(self, stuck: Sequence[Stuck] = (), issued: Mapping[str, int] | None = None) -> None:
        """Raise what explains why nothing moves, if there is anything; for whoever waits.

        Args:
          stuck: what it waits for.
          issued: how many collectives it issued, by process group.
        """
        self._raise_reported()
        self._look_for_left()
        if self._shared is not None and stuck:
            self._look_for_stuck(self._shared, stuck, issued or {})

    def moved(self) -> None:
        """What this rank waited for is over, or was given up."""
        if self._news and self._shared is not None:
            self._news = ""
            with suppress(RuntimeError):  # a store that is gone must not hide another error
                self._shared.set(f"mics_fn/stuck/{self._rank}", "")

    def report(self, text: str) -> None:
        """Have all ranks of the groups raise this error when they look."""
        if self._shared is not None:
            self._shared.compare_set(f"{self._all}/trouble", "", text)

    def _look_for_stuck(
        self, store: Store, stuck: Sequence[Stuck], issued: Mapping[str, int]
    ) -> None:
        """See [Note: waiting in two places] in `schedules.stalled`."""
        after = f", after {self._recent[-1].last_step()}" if self._recent else ""
        text = f"waits for {stuck[0].text}{after}"
        mine = json.dumps(news(stuck, issued, text))
        if mine != self._news:
            store.set(f"mics_fn/stuck/{self._rank}", mine)
            self._news = mine
        for other in next_to(self._rank, stuck):
            key = f"mics_fn/stuck/{other}"
            there = json.loads((store.check([key]) and store.get(key)) or "null")
            if there and never(stuck, issued, there, other, self._rank):
                self._raise_everywhere({other: there["text"], self._rank: text}, *_STUCK)

    def _look_for_left(self) -> None:
        if self._store is None:
            return
        for progress in self._recent:
            for other in self._ranks:
                key = self._left(progress.number, other)
                if other != self._rank and self._store.check([key]):
                    k, text = json.loads(self._store.get(key))
                    mine = progress.step_text(k)
                    if mine is not None:
                        self._raise_everywhere({other: text, self._rank: mine})

    def _left(self, number: int, rank: int) -> str:
        return f"{self._key}/left/{number}/{rank}"

    def _raise_reported(self) -> None:
        """Raise the error that another rank reported, in this replica or in another one."""
        if self._shared is not None and self._shared.check([f"{self._all}/trouble"]):
            raise DesyncError(self._shared.get(f"{self._all}/trouble").decode())

    def _raise_everywhere(
        self, texts: Mapping[int, str], what: str = _ORDERS, fix: str = _ONE_ORDER
    ) -> NoReturn:
        """Raise, here and on the other ranks, that ranks did different things."""
        error = disagreement(what, texts, fix)
        self.report(str(error))
        self._raise_reported()
        raise error


class Channels(Channel):
    """Those of a tree whose leaves live on several groups: its ranks agree in each of them."""

    def __init__(self, parts: Sequence[Channel]) -> None:
        super().__init__()
        self._parts = parts
        self._widest = max(parts, key=lambda part: part.job_size)

    def begin_run(self, progress: Progress, number: int | None = None) -> int:
        """Begin a run that has the same number in every group."""
        number = number or 1 + max(part.runs for part in self._parts)
        return max(part.begin_run(progress, number) for part in self._parts)

    def compare(self, text: str) -> None:
        """Compare the text in every group of the tree."""
        self._in_each(lambda part: part.compare(text))

    def leave(self, number: int, k: int, text: str) -> None:
        """Leave the schedule in every group.

        A rank may wait in any of them, so this rank says it in all before it waits in one.
        """
        self._in_each(lambda part: part.say_left(number, k, text))
        self._in_each(lambda part: part.wait_left(number, text))

    def look(self, stuck: Sequence[Stuck] = (), issued: Mapping[str, int] | None = None) -> None:
        """Look in every group."""
        self._in_each(lambda part: part.look(stuck, issued))

    def _in_each(self, call: Callable[[Channel], None]) -> None:
        """Ranks look at their own groups alone, so an error of one group is reported to all."""
        try:
            for part in self._parts:
                call(part)
        except DesyncError as error:
            for part in self._parts:
                part.report(str(error))
            raise

    def first_of(self, event: str, text: str) -> str:
        """Ask the groups that span most of the job."""
        return self._widest.first_of(event, text)

    def tally(self, event: str, amount: int) -> int:
        """Count in the groups that span most of the job."""
        return self._widest.tally(event, amount)


def joined(channels: Sequence[Channel]) -> Channel:
    """The channel of a tree, from that of each of its buckets."""
    distinct = list(dict.fromkeys(channels))
    if len(distinct) > 1:
        return Channels(distinct)
    return distinct[0] if distinct else Channel()

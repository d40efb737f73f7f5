"""What ranks of a partition group tell each other through the store, outside of all collectives.

[Note: the same way] Ranks that fetch different buckets would hang, or hand each other the wrong
bytes. So a bucket is fetched only if all ranks of the partition group are known to want it next:
either all follow one schedule that they agreed on, or they compare a digest of their way so far
before each single fetch, which costs one small message to the store. The end of a backward pass and
the end of a run are places of the way too: a rank whose way is shorter would else wait for
reductions while the others wait for a fetch. A rank whose model leaves the schedule waits for the
others to leave it at the same place. One that did not leave will miss it sooner or later: whoever
waits for a collective without seeing it move looks here once a second, finds who left, or who waits
for it in another collective, and both raise an error that says so. The other replicas would wait
for these ranks in hop 2: they hear the same error when they look. While all follow a schedule
nothing is sent.
"""

import json
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn, Protocol

from mics_fn.errors import CollectiveTimeoutError, DesyncError, message, name_ranks
from mics_fn.schedules.stalled import Stuck, never, news, next_to
from mics_fn.store import Store

_WAYS = "gather: ranks take different ways through the model"
_ONE_WAY = (
    "let all ranks of a partition group use parameters in one order, "
    "or pass schedule=keep_all(), which lets them differ"
)
_STUCK = (
    "ranks wait for each other in different collectives",
    f"call the same verbs in the same order on all ranks; {_ONE_WAY}",
)
_RUNS_KEPT = 4  # ranks are never that far apart: every run has collectives


class Way(Protocol):
    """The way of this rank through one run of the model, for those who ask."""

    number: int  # of the run

    def place(self, k: int) -> str | None:
        """What this rank did at step k of its way; None if it is not there yet, or left there."""
        ...

    def last_place(self) -> str:
        """What this rank did last."""
        ...


class Control:
    """A partition group's messages; without a store it has one rank and nothing to say.

    Args:
      store: shared by all ranks.
      key: what no other groups of this job use.
      ranks: global ranks of the partition group.
      rank: this one.
      timeout_s: bound in seconds of each wait.
      job_size: ranks of the whole job.
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
        self._store = store if len(ranks) > 1 else None
        self._shared, self._all = store, f"{key}/all"  # all ranks of the groups, with replicas
        self._key = f"{key}/way/{min(ranks, default=0)}"
        self._ranks, self._rank, self._timeout_s = ranks, rank, timeout_s
        self.fixed: dict[Any, Any] = {}  # what is known of schedules that came without a policy
        self._ways: list[Way] = []
        self._runs = self._events = 0
        self._news = ""  # what this rank said of its waiting
        self._written: deque[list[str]] = deque([[]], maxlen=_RUNS_KEPT)

    def begin(self, way: Way, least: int = 0) -> int:
        """Begin a run; the n-th on one rank is the n-th on the others. Returns its number."""
        self._runs = max(self._runs + 1, least)
        self._ways = [*self._ways[-1:], way]
        if self._shared is not None:
            # What was said in runs long past is of no use, and a store has to hold it in memory.
            past = self._written[0] if len(self._written) == _RUNS_KEPT else []
            for key in past:
                with suppress(RuntimeError, NotImplementedError):
                    self._shared.delete_key(key)
            self._written.append([])
        return self._runs

    def same(self, text: str) -> None:
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
            self._tell({first[0]: first[1], self._rank: text})

    def adopt(self, event: str, text: str) -> str:
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
        self._say_left(number, k, text)
        self._meet_left(number, text)

    def _say_left(self, number: int, k: int, text: str) -> None:
        if self._store is not None:
            self._store.set(self._left(number, self._rank), json.dumps([k, text]))
            self._written[-1].append(self._left(number, self._rank))

    def _meet_left(self, number: int, text: str) -> None:
        """Wait until all ranks have left."""
        if self._store is None:
            return
        others = {rank: self._left(number, rank) for rank in self._ranks}
        deadline, pause_s = time.monotonic() + self._timeout_s, 0.001
        while not self._store.check(list(others.values())):
            self._hear()
            if time.monotonic() > deadline:
                late = [rank for rank, key in others.items() if not self._store.check([key])]
                text = f"{name_ranks(late)} did not come to {text} in {self._timeout_s:g} s"
                raise CollectiveTimeoutError(message(text, fix="look for a rank that stopped"))
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, 0.05)
        found = {rank: json.loads(self._store.get(key)) for rank, key in others.items()}
        if len({tuple(left) for left in found.values()}) > 1:
            self._tell({rank: left[1] for rank, left in found.items()})

    def look(self, stuck: Sequence[Stuck] = (), issued: Mapping[str, int] | None = None) -> None:
        """Raise what explains why nothing moves, if there is anything; called by who waits.

        Args:
          stuck: what it waits for.
          issued: how many collectives it issued, by process group.
        """
        self._hear()
        self._look_for_left()
        if self._shared is not None and stuck:
            self._look_for_stuck(self._shared, stuck, issued or {})

    def moves(self) -> None:
        """What this rank waited for is over, or given up."""
        if self._news and self._shared is not None:
            self._news = ""
            with suppress(RuntimeError):  # a store that is gone must not hide another error
                self._shared.set(f"mics_fn/stuck/{self._rank}", "")

    def _look_for_stuck(
        self, store: Store, stuck: Sequence[Stuck], issued: Mapping[str, int]
    ) -> None:
        """See [Note: waiting in two places] in `schedules.stalled`."""
        after = f", after {self._ways[-1].last_place()}" if self._ways else ""
        text = f"waits for {stuck[0].text}{after}"
        mine = json.dumps(news(stuck, issued, text))
        if mine != self._news:
            store.set(f"mics_fn/stuck/{self._rank}", mine)
            self._news = mine
        for other in next_to(self._rank, stuck):
            key = f"mics_fn/stuck/{other}"
            there = json.loads((store.check([key]) and store.get(key)) or "null")
            if there and never(stuck, issued, there, other, self._rank):
                self._tell({other: there["text"], self._rank: text}, *_STUCK)

    def _look_for_left(self) -> None:
        if self._store is None:
            return
        for way in self._ways:
            for other in self._ranks:
                key = self._left(way.number, other)
                if other != self._rank and self._store.check([key]):
                    k, text = json.loads(self._store.get(key))
                    mine = way.place(k)
                    if mine is not None:
                        self._tell({other: text, self._rank: mine})

    def _left(self, number: int, rank: int) -> str:
        return f"{self._key}/left/{number}/{rank}"

    def _hear(self) -> None:
        """Raise the trouble that another rank found, here or in another replica."""
        if self._shared is not None and self._shared.check([f"{self._all}/trouble"]):
            raise DesyncError(self._shared.get(f"{self._all}/trouble").decode())

    def _warn(self, text: str) -> None:
        """Have all ranks of the groups raise this when they look."""
        if self._shared is not None:
            self._shared.compare_set(f"{self._all}/trouble", "", text)

    def _tell(self, texts: Mapping[int, Any], what: str = _WAYS, fix: str = _ONE_WAY) -> NoReturn:
        """Raise, here and on the other ranks, that ranks took different ways."""
        by_text: dict[str, list[int]] = {}
        for rank, text in sorted(texts.items()):
            by_text.setdefault(text, []).append(rank)
        lines = [f"{name_ranks(ranks)}: {text}" for text, ranks in by_text.items()]
        text = message(what, lines, fix)
        self._warn(text)
        self._hear()
        raise DesyncError(text)


class Controls(Control):
    """Those of a tree whose leaves live on several groups: its ranks agree in each of them."""

    def __init__(self, parts: Sequence[Control]) -> None:
        super().__init__()
        self._parts = parts

    def begin(self, way: Way, least: int = 0) -> int:
        """The same number in each."""
        number = max(part.begin(way, least) for part in self._parts)
        for part in self._parts:
            part._runs = number
        return number

    def same(self, text: str) -> None:
        """In each."""
        self._in_each(lambda part: part.same(text))

    def leave(self, number: int, k: int, text: str) -> None:
        """In each; a rank may wait in any of them, so it is said in all before waiting in one."""
        self._in_each(lambda part: part._say_left(number, k, text))
        self._in_each(lambda part: part._meet_left(number, text))

    def look(self, stuck: Sequence[Stuck] = (), issued: Mapping[str, int] | None = None) -> None:
        """In each."""
        self._in_each(lambda part: part.look(stuck, issued))

    def _in_each(self, call: Callable[[Control], None]) -> None:
        """What one part finds the ranks of the others hear as well: they look at theirs alone."""
        try:
            for part in self._parts:
                call(part)
        except DesyncError as error:
            for part in self._parts:
                part._warn(str(error))
            raise

    def adopt(self, event: str, text: str) -> str:
        """In the groups that span most of the job."""
        return max(self._parts, key=lambda part: part.job_size).adopt(event, text)

    def tally(self, event: str, amount: int) -> int:
        """Likewise."""
        return max(self._parts, key=lambda part: part.job_size).tally(event, amount)


def together(controls: Sequence[Control]) -> Control:
    """The control of a tree, from that of each of its buckets."""
    distinct = list(dict.fromkeys(controls))
    return distinct[0] if len(distinct) == 1 else Controls(distinct) if distinct else Control()

"""What ranks of a partition group tell each other through the store, outside of all collectives.

[Note: the same way] Ranks that fetch different buckets would hang, or hand each other the wrong
bytes. So a bucket is fetched only if all ranks of the partition group are known to want it next:
either all follow one schedule that they agreed on, or they compare a digest of their way so far
before each single fetch, which costs one small message to the store. A rank whose model leaves the
schedule waits for the others to leave it at the same place. One that did not leave will miss it
sooner or later: whoever waits for a collective without seeing it move looks here once a second,
finds who left, and both raise an error that says so. While all follow a schedule nothing is sent.
"""

import json
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn, Protocol

from mics_fn.errors import CollectiveTimeoutError, DesyncError, message, name_ranks
from mics_fn.rendezvous import Store

_RUNS_KEPT = 4  # ranks are never that far apart: every run has collectives


class Way(Protocol):
    """The way of this rank through one run of the model, for those who ask."""

    number: int  # of the run

    def place(self, k: int) -> str | None:
        """What this rank did at step k of its way; None if it is not there yet, or left there."""
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
        self._shared, self._all = store, f"{key}/all"
        self._key = f"{key}/way/{min(ranks, default=0)}"
        self._ranks, self._rank, self._timeout_s = ranks, rank, timeout_s
        self.fixed: dict[Any, Any] = {}  # what is known of schedules that came without a policy
        self._ways: list[Way] = []
        self._runs = 0
        self._written: deque[list[str]] = deque([[]], maxlen=_RUNS_KEPT)

    def begin(self, way: Way, least: int = 0) -> int:
        """Begin a run; the n-th on one rank is the n-th on the others. Returns its number."""
        self._runs = max(self._runs + 1, least)
        self._ways = [*self._ways[-1:], way]
        if self._store is not None:
            # What was said in runs long past is of no use, and a store has to hold it in memory.
            past = self._written[0] if len(self._written) == _RUNS_KEPT else []
            for key in past:
                with suppress(RuntimeError, NotImplementedError):
                    self._store.delete_key(key)
            self._written.append([])
        return self._runs

    def same(self, event: str, text: str) -> None:
        """Raise DesyncError if another rank came to this event with another text; never waits."""
        if self._store is None:
            return
        mine, key = json.dumps([self._rank, text]), f"{self._key}/{event}"
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

    def leave(self, number: int, k: int, text: str) -> None:
        """Leave a schedule at step k; returns when all ranks have left it there, alike.

        Raises:
          DesyncError: others left elsewhere, or not at all.
          CollectiveTimeoutError: some rank neither left nor noticed that it should.
        """
        if self._store is None:
            return
        self._store.set(self._left(number, self._rank), json.dumps([k, text]))
        self._written[-1].append(self._left(number, self._rank))
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

    def look(self) -> None:
        """Raise what explains why nothing moves, if there is anything; called by who waits."""
        if self._store is None:
            return
        self._hear()
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
        """Raise the trouble that another rank found."""
        if self._store is not None and self._store.check([f"{self._key}/trouble"]):
            raise DesyncError(self._store.get(f"{self._key}/trouble").decode())

    def _tell(self, texts: Mapping[int, Any]) -> NoReturn:
        """Raise, here and on the other ranks, that ranks took different ways."""
        by_text: dict[str, list[int]] = {}
        for rank, text in sorted(texts.items()):
            by_text.setdefault(text, []).append(rank)
        lines = [f"{name_ranks(ranks)}: {text}" for text, ranks in by_text.items()]
        fix = (
            "let all ranks of a partition group use parameters in one order, "
            "or pass schedule=keep_all(), which lets them differ"
        )
        text = message("gather: ranks take different ways through the model", lines, fix)
        if self._store is not None:
            self._store.compare_set(f"{self._key}/trouble", "", text)
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

    def same(self, event: str, text: str) -> None:
        """In each."""
        for part in self._parts:
            part.same(event, text)

    def leave(self, number: int, k: int, text: str) -> None:
        """In each."""
        for part in self._parts:
            part.leave(number, k, text)

    def look(self) -> None:
        """In each."""
        for part in self._parts:
            part.look()

    def adopt(self, event: str, text: str) -> str:
        """In the groups that span most of the job."""
        return max(self._parts, key=lambda part: part.job_size).adopt(event, text)


def together(controls: Sequence[Control]) -> Control:
    """The control of a tree, from that of each of its buckets."""
    distinct = list(dict.fromkeys(controls))
    return distinct[0] if len(distinct) == 1 else Controls(distinct) if distinct else Control()

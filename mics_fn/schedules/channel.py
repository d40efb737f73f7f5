"""`Channel`: messages between the ranks of a partition group through the store, not by collectives.

On an accelerator the host does not wait for collectives, so it reads messages only when a run ends,
in `Trainer` or at the end of a `with` block, and at most once per second: that is one call to the
store, see [Note: news] in `schedules.messages`. Under `keep_all` it never reads them. If nobody
finds a message by then, the rank that waits raises after `timeout_s`, and the others by NCCL's
watchdog.
"""

import json
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from typing import Any
from weakref import WeakSet

from mics_fn.errors import DesyncError
from mics_fn.schedules import messages
from mics_fn.schedules.calls import Calls
from mics_fn.store import Store, later

_ORDER = "the order of use"  # the name of its calls
_ONE_ORDER = (
    "let all ranks of a partition group use parameters in one order, "
    "or pass schedule=keep_all(), which lets them differ"
)
_DIFFER = "defer: ranks use parameters in different orders", _ONE_ORDER
_STUCK = (
    "ranks wait for each other in different collectives",
    f"call the same verbs in the same order on all ranks; {_ONE_ORDER}",
)
_GLANCE_S = 1.0  # a host that does not wait for collectives looks that often at most
_RUNS_KEPT = 4  # every run has collectives, so ranks are never that many runs apart

Counts = Mapping[str, int]  # of calls, by communicator


class Seen:
    """What the runs on some groups have learned, for as long as a policy remembers it."""

    def __init__(self) -> None:
        self._learned = WeakSet[Any]()  # each a `Learned`

    def add(self, learned: Any) -> None:
        """Note what a run begins with, and will add to."""
        self._learned.add(learned)

    def digest(self) -> str:
        """What ranks that have made the same runs have in common."""
        facts = sorted(filter(None, (learned.facts for learned in self._learned)))
        return sha256("\n".join(facts).encode()).hexdigest()[:16]

    def carry_over(self, *, forget: bool) -> None:
        """Prepare all for new groups; see `Learned.carry_over`."""
        for learned in self._learned:
            learned.carry_over(forget=forget)


class Channel:
    """Messages between the ranks of a partition group; without a store, of a single rank.

    Args:
      store: shared by all ranks.
      key: prefix of its keys, which no other groups of this job use.
      ranks: global ranks of the partition group.
      rank: this rank.
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
        self.runs = 0  # number of runs so far
        self.fixed: dict[Any, Any] = {}  # policy and `Learned` of schedules given without a policy
        self.seen = Seen()  # what runs have learned
        self.job = messages.JobMessages(store, key, rank)
        self.departures = messages.Departures(self.job, job_size)
        self.job.gone, self.job.await_call = self.departures.closed, self.departures.check
        self._order = Calls(self, _ORDER, ranks, timeout_s, differ=_DIFFER)
        self._store, self._all = store, f"{key}/all"  # for all ranks of the groups, every replica
        self._rank = rank
        self._notes: dict[int, Any] = {}  # what other ranks wrote about their waits; see `messages`
        self._note = ""  # what this rank wrote down about its wait
        self._looked = -math.inf
        self._written = deque[tuple[int, str]]()  # keys to delete, by the run that wrote them

    def begin_run(self, number: int | None = None) -> int:
        """Begin a run and return its number; the n-th run is the same on all ranks."""
        self.runs = self.runs + 1 if number is None else number
        # Nobody reads the messages of old runs, but the store would keep them in memory.
        while self._written and self._written[0][0] <= self.runs - _RUNS_KEPT:
            later(self._store, "delete_key", self._written.popleft()[1])
        return self.runs

    def remember(self, learned: Any) -> None:
        """Note what a run begins with, and will add to."""
        self.seen.add(learned)

    def compare(self, text: str, meanwhile: Callable[[], object] = lambda: None) -> None:
        """Compare what a run does next, as `Calls.add` compares a call of a communicator."""
        self._order.add(("", text, "", 0), meanwhile)
        self._order.issued = self._order.number

    def first_of(self, event: str, text: str) -> str:
        """The text of the rank that came to this event first, among all replicas."""
        if self._store is None:
            return text
        return self._store.compare_set(self._key_of(event), "", text).decode()

    def tally(self, event: str, amount: int) -> int:
        """Add to a number that all replicas share, and return the sum; never waits."""
        return amount if self._store is None else self._store.add(self._key_of(event), amount)

    def _key_of(self, event: str) -> str:
        key = f"{self._all}/{event}"
        self._written.append((self.runs, key))
        return key

    def look(self, stuck: Sequence[messages.Stuck] = (), issued: Counts | None = None) -> None:
        """Raise the error that explains a wait without progress, if the others wrote down why.

        Args:
          stuck: what this rank waits for.
          issued: number of calls that this rank made, by communicator.
        """
        news = self.job.news
        if self._store is None or news is None:
            return
        self._looked = time.monotonic()
        if news.any():
            self.job.raise_reported()
            for calls in self.job.calls:
                calls.read()
            self._notes.clear()
            self.departures.read()
            news.mark_seen()
        for call in stuck:
            self.departures.check(call)
        if stuck:
            self._look_for_stuck(self._store, stuck, issued or {})

    def check(self) -> None:
        """Raise if a rank has failed, without a message."""
        self.job.check()

    def glance(self) -> None:
        """Call `look` at most once per second."""
        if time.monotonic() - self._looked >= _GLANCE_S:
            self.look()

    def moved(self) -> None:
        """Withdraw this rank's note: what it waited for is done, or was given up."""
        if self._note:
            self._note = ""
            later(self._store, "set", f"mics_fn/stuck/{self._rank}", "")

    def _look_for_stuck(self, store: Store, stuck: Sequence[messages.Stuck], made: Counts) -> None:
        """See [Note: waiting in two places] in `schedules.messages`."""
        text = f"waits for {stuck[0].text}"
        mine = json.dumps(messages.note_of(stuck, made, text))
        if mine != self._note:
            store.set(f"mics_fn/stuck/{self._rank}", mine)
            self._note = mine
            self.job.tell()
        for other in messages.neighbours(self._rank, stuck):
            if other not in self._notes:
                key = f"mics_fn/stuck/{other}"
                self._notes[other] = json.loads((store.check([key]) and store.get(key)) or "null")
            note = self._notes[other]
            if note and messages.deadlocked(stuck, made, note, other, self._rank):
                found = {other: note["text"], self._rank: text}
                self.job.raise_everywhere(_STUCK[0], found, _STUCK[1])


class Channels(Channel):
    """The channel of a tree whose leaves live on several groups: its ranks agree in each."""

    def __init__(self, parts: Sequence[Channel]) -> None:
        super().__init__()
        self._parts = parts
        self._widest = max(parts, key=lambda part: part.job_size)

    def begin_run(self, number: int | None = None) -> int:
        """Begin a run with the same number in every group."""
        number = number or 1 + max(part.runs for part in self._parts)
        return max(part.begin_run(number) for part in self._parts)

    def remember(self, learned: Any) -> None:
        """Note in every group what a run begins with."""
        self._in_each(lambda part: part.remember(learned))

    def compare(self, text: str, meanwhile: Callable[[], object] = lambda: None) -> None:
        """Compare the text in every group of the tree."""
        self._in_each(lambda part: part.compare(text, meanwhile))

    def check(self) -> None:
        """Check in every group."""
        self._in_each(lambda part: part.check())

    def glance(self) -> None:
        """Glance in every group."""
        self._in_each(lambda part: part.glance())

    def _in_each(self, call: Callable[[Channel], None]) -> None:
        """Call something in each group; an error in one is reported to the ranks of all."""
        try:
            for part in self._parts:
                call(part)
        except DesyncError as error:
            for part in self._parts:
                part.job.report(str(error))
            raise

    def first_of(self, event: str, text: str) -> str:
        """Ask the groups that span most of the job."""
        return self._widest.first_of(event, text)

    def tally(self, event: str, amount: int) -> int:
        """Count in the groups that span most of the job."""
        return self._widest.tally(event, amount)


def joined(channels: Sequence[Channel]) -> Channel:
    """The channel of a tree, given that of each of its buckets."""
    distinct = list(dict.fromkeys(channels))
    if len(distinct) > 1:
        return Channels(distinct)
    return distinct[0] if distinct else Channel()

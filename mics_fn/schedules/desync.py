"""`Channel`: messages between the ranks of a partition group through the store, not by collectives.

[Note: the same order of use] Ranks that fetch different buckets would hang, or receive the wrong
bytes. So a bucket is fetched only if all ranks of the partition group are known to need it next:
either all follow one schedule that they agreed on, or they compare a digest of the uses so far
before each fetch, with one small message to the store. They also compare the end of a backward pass
and the end of a run: a rank that uses fewer buckets would otherwise wait for reductions while the
others wait for a fetch.

A rank whose model leaves the schedule writes that down, and waits until the others leave it at the
same step. A rank that does not leave will sooner or later wait for it in a collective. Every wait
without progress looks here a few times per second; it then finds out which rank left, or which one
waits in another collective, and both raise an error that says so. The other replicas would wait for
these ranks in hop 2, and find the same error in the same manner. From the second run on in which
all ranks follow a schedule, nothing is sent.

On an accelerator the host does not wait for collectives, so it looks for a rank that left only when
a run ends, in `Trainer` or at the end of a `with` block, and at most once per second: that is one
call to the store, see [Note: news] in `schedules.messages`. Under `keep_all`, which nobody leaves,
it never looks. If nobody finds it by then, that rank raises after `timeout_s`, and the others by
NCCL's watchdog.
"""

import json
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import sha256
from typing import Any, Protocol
from weakref import WeakSet

from mics_fn.errors import CollectiveError, DesyncError, name_ranks
from mics_fn.schedules import messages
from mics_fn.store import Store, later, poll

_ORDERS = "defer: ranks use parameters in different orders"
_ONE_ORDER = (
    "let all ranks of a partition group use parameters in one order, "
    "or pass schedule=keep_all(), which lets them differ"
)
_STUCK = (
    "ranks wait for each other in different collectives",
    f"call the same verbs in the same order on all ranks; {_ONE_ORDER}",
)
_GLANCE_S = 1.0  # a host that does not wait for collectives looks that often at most
_RUNS_KEPT = 4  # every run has collectives, so ranks are never that many runs apart

# Where a rank leaves a schedule: the number of the use that it does otherwise; and the number of
# reductions that it starts before it, if it does that use but these are what differs.
Step = tuple[int, int | None]

Told = tuple[int, int, str]  # a number, the rank that told it, and its text
Counts = Mapping[str, int]  # of calls, by communicator


class RunProgress(Protocol):
    """How far this rank is in one run of the model; shown to the other ranks."""

    number: int  # of the run

    def step_text(self, k: int, reduced: int | None) -> str | None:
        """What this rank did at a `Step`; None if it is not there yet or left the schedule."""
        ...

    def last_step(self) -> str:
        """The last thing that this rank did."""
        ...


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
        self._store = store if len(ranks) > 1 else None
        self._shared, self._all = store, f"{key}/all"  # for all ranks of the groups, every replica
        self._key = f"{key}/order/{min(ranks, default=0)}"
        self._ranks, self._rank, self._timeout_s = ranks, rank, timeout_s
        self._log = None if self._store is None else messages.Log(self._store, f"{self._key}/left")
        self._left: dict[int, dict[int, tuple[Step, str]]] = {}  # by run, then by rank
        self._notes: dict[int, Any] = {}  # what other ranks wrote about their waits; see `messages`
        self._note = ""  # what this rank wrote down about its wait
        self._looked = -math.inf
        self._recent: list[RunProgress] = []
        self._events = 0
        self._written: deque[list[str]] = deque([[]], maxlen=_RUNS_KEPT)

    def begin_run(self, progress: RunProgress, number: int | None = None) -> int:
        """Begin a run and return its number; the n-th run is the same on all ranks."""
        self.runs = self.runs + 1 if number is None else number
        self._recent = [*self._recent[-1:], progress]
        for old in [run for run in self._left if run < self._recent[0].number]:
            del self._left[old]
        if self._shared is not None:
            # Nobody reads the messages of old runs, but the store would keep them in memory.
            oldest = self._written[0] if len(self._written) == _RUNS_KEPT else []
            for key in oldest:
                later(self._shared, "delete_key", key)
            self._written.append([])
        return self.runs

    def remember(self, learned: Any) -> None:
        """Note what a run begins with, and will add to."""
        self.seen.add(learned)

    def compare(self, text: str) -> None:
        """Raise DesyncError if the n-th call on another rank has another text; never waits.

        Calls are counted over all runs, so ranks that are in different runs are found too.
        """
        if self._store is None:
            return
        mine, key = json.dumps([self._rank, text]), f"{self._key}/{self._events}"
        self._events += 1
        first = json.loads(self._store.compare_set(key, "", mine))
        if first[0] == self._rank:
            self._written[-1].append(key)
        if first[1] != text:
            self.refuse({first[0]: first[1], self._rank: text})

    def extremes(
        self, event: str, count: int, text: str, *, lasting: bool = False
    ) -> tuple[Told, Told]:
        """Return the least and greatest number that ranks reported for an event, without waiting.

        Args:
          event: of this partition group.
          count: this rank's number.
          text: what it means, for errors.
          lasting: whether the event is remembered until `forget`, or for a few runs.
        """
        mine = (count, self._rank, text)
        if self._store is None:
            return mine, mine
        key, found, wanted = self._count(event), "", json.dumps([mine, mine])
        while (now := self._store.compare_set(key, found, wanted).decode()) != wanted:
            # torch's store answers what was expected if a rank ahead has deleted the key meanwhile.
            found = now if now != found else ""
            least, most = json.loads(found) if found else ([*mine], [*mine])
            wanted = json.dumps([min(least, [*mine]), max(most, [*mine])])
            if wanted == found:
                break
        if not found and not lasting:
            self._written[-1].append(key)
        least, most = json.loads(wanted)
        return tuple(least), tuple(most)

    def forget(self, events: Iterable[str]) -> None:
        """Let the store forget the numbers of these events."""
        if self._store is not None:
            for event in events:
                later(self._store, "delete_key", self._count(event))

    def _count(self, event: str) -> str:
        return f"{self._key}/count/{event}"

    def refuse(self, texts: Mapping[int, str]) -> None:
        """Raise DesyncError, here and on the other ranks: by rank, what they do differently."""
        self.job.raise_everywhere(_ORDERS, texts, _ONE_ORDER)

    def first_of(self, event: str, text: str) -> str:
        """The text of the rank that came to this event first, among all replicas."""
        if self._shared is None:
            return text
        self._written[-1].append(key := f"{self._all}/{event}")
        return self._shared.compare_set(key, "", text).decode()

    def tally(self, event: str, amount: int) -> int:
        """Add to a number that all replicas share, and return the sum; never waits."""
        if self._shared is None:
            return amount
        self._written[-1].append(key := f"{self._all}/{event}")
        return self._shared.add(key, amount)

    def leave(self, number: int, step: Step, text: str) -> None:
        """Leave a schedule at a step; returns when all ranks have left it at the same step.

        Raises:
          DesyncError: other ranks left it at another step, or not at all.
          CollectiveError: some rank neither left it nor noticed in time that it should.
        """
        self.announce_leave(number, step, text)
        self.await_leave(number, text)

    def announce_leave(self, number: int, step: Step, text: str) -> None:
        """Write down that this rank left the schedule at a step."""
        if self._log is not None:
            self._written[-1].append(self._log.append([number, self._rank, step, text]))
            self.job.tell()

    def await_leave(self, number: int, text: str) -> None:
        """Wait until all ranks have left the schedule."""
        if self._log is None:
            return
        found = self._left.setdefault(number, {})

        def all_left() -> bool:
            self.look()
            return len(found) == len(self._ranks)

        def late() -> list[int]:
            return [rank for rank in self._ranks if rank not in found]

        check, deadline = self.job.check, time.monotonic() + self._timeout_s
        if not poll(all_left, len(self._ranks), deadline, lambda s: check((), s, late())):
            who = name_ranks(late())
            what = f"defer: {who} did not leave the schedule in {self._timeout_s:g} s"
            lines, fix = [f"rank {self._rank} left it: {text}"], "look for a rank that stopped"
            raise self.job.late(CollectiveError(what, lines, fix))
        if len(set(found.values())) > 1:
            self.refuse({rank: text for rank, (_, text) in found.items()})

    def look(self, stuck: Sequence[messages.Stuck] = (), issued: Counts | None = None) -> None:
        """Raise the error that explains a wait without progress, if the others wrote down why.

        Args:
          stuck: what this rank waits for.
          issued: number of calls that this rank made, by communicator.
        """
        news = self.job.news
        if self._shared is None or news is None:
            return
        self._looked = time.monotonic()
        if news.any():
            self.job.raise_reported()
            self._read_left()
            for calls in self.job.calls:
                calls.read()
            self._notes.clear()
            self.departures.read()
            news.mark_seen()
        self._look_for_left()
        for call in stuck:
            self.departures.check(call)
        if stuck:
            self._look_for_stuck(self._shared, stuck, issued or {})

    def check(self) -> None:
        """Raise if a rank has failed, without a message."""
        self.job.check()

    def glance(self) -> None:
        """Call `look` at most once per second."""
        if time.monotonic() - self._looked >= _GLANCE_S:
            self.look()

    def moved(self) -> None:
        """Withdraw this rank's note: what it waited for is done, or was given up."""
        if self._note and self._shared is not None:
            self._note = ""
            later(self._shared, "set", f"mics_fn/stuck/{self._rank}", "")

    def report(self, text: str) -> None:
        """Make all ranks of the groups raise this error at their next poll."""
        self.job.report(text)

    def _look_for_stuck(self, store: Store, stuck: Sequence[messages.Stuck], made: Counts) -> None:
        """See [Note: waiting in two places] in `schedules.messages`."""
        after = f", after {self._recent[-1].last_step()}" if self._recent else ""
        text = f"waits for {stuck[0].text}{after}"
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

    def _look_for_left(self) -> None:
        for progress in self._recent:
            for other, (step, text) in self._left.get(progress.number, {}).items():
                mine = None if other == self._rank else progress.step_text(*step)
                if mine is not None:
                    self.refuse({other: text, self._rank: mine})

    def _read_left(self) -> None:
        """Note the ranks that left a schedule, including runs that this rank has not begun yet."""
        new = self._log.unread() if self._log else ()
        for number, rank, (k, reduced), text in new:
            self._left.setdefault(number, {})[rank] = (k, reduced), text


# `Channels`: messages for a tree whose leaves live on several groups.


class Channels(Channel):
    """The channel of a tree whose leaves live on several groups: its ranks agree in each."""

    def __init__(self, parts: Sequence[Channel]) -> None:
        super().__init__()
        self._parts = parts
        self._widest = max(parts, key=lambda part: part.job_size)

    def begin_run(self, progress: RunProgress, number: int | None = None) -> int:
        """Begin a run with the same number in every group."""
        number = number or 1 + max(part.runs for part in self._parts)
        return max(part.begin_run(progress, number) for part in self._parts)

    def remember(self, learned: Any) -> None:
        """Note in every group what a run begins with."""
        self._in_each(lambda part: part.remember(learned))

    def compare(self, text: str) -> None:
        """Compare the text in every group of the tree."""
        self._in_each(lambda part: part.compare(text))

    def extremes(
        self, event: str, count: int, text: str, *, lasting: bool = False
    ) -> tuple[Told, Told]:
        """The extremes over all groups."""
        found = [part.extremes(event, count, text, lasting=lasting) for part in self._parts]
        return min(least for least, _ in found), max(most for _, most in found)

    def forget(self, events: Iterable[str]) -> None:
        """Forget in every group."""
        events = list(events)
        self._in_each(lambda part: part.forget(events))

    def refuse(self, texts: Mapping[int, str]) -> None:
        """Refuse in every group."""
        self._in_each(lambda part: part.refuse(texts))

    def leave(self, number: int, step: Step, text: str) -> None:
        """Leave the schedule in every group.

        Ranks may wait in any of them, so this rank announces it in all before it waits in one.
        """
        self._in_each(lambda part: part.announce_leave(number, step, text))
        self._in_each(lambda part: part.await_leave(number, text))

    def look(
        self, stuck: Sequence[messages.Stuck] = (), issued: Mapping[str, int] | None = None
    ) -> None:
        """Look in every group."""
        self._in_each(lambda part: part.look(stuck, issued))

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
                part.report(str(error))
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

"""What ranks call and fetch, compared before it is done: `Calls`, and the `Channel` between them.

[Note: the same calls] Ranks that call different collectives on one communicator would receive wrong
bytes, hang, or abort: gloo ends a process that is sent more than it expects, and no Python code of
it can say why. So unlike calls have to be found before they meet, and each collective has a
description: the verb, what it does, the bucket with its layout and the names of its leaves, and the
bytes. If it is what `CallPattern` guesses, nothing is sent. If there is no guess, which all ranks
know, it is compared through the store: one message, which never waits. If it is something else than
the guess, other ranks may call what was guessed without a word. So this rank says in the store what
it does instead, and moves no data before all ranks know of that. A rank learns of it when it comes
to the same call and leaves its pattern as well; or when it looks, since it waits for a collective
or because it left another pattern. If it is not yet at that call, it goes on and will compare it.
If it is past it, it raises an error, and all ranks of the groups raise the same one when they look.
So all ranks have one history, and different calls never meet. A step that repeats sends nothing
from the third time on.

A pattern that is left often is not trusted at once: the next calls are compared although they were
guessed, and more of them each time, up to `_MOST_DOUBT`. So a program without patterns compares all
of its calls, which does not wait, instead of waiting for the others at each of them.

Which calls a rank makes on one communicator does not depend on when it makes them, so fetches and
reductions may come in any order among each other, as uneven gradients need it.

[Note: one guess everywhere] A guess depends on nothing but the sequence. So ranks that have made
the same calls guess the same next one, without a message, and each of them knows what the others
guess.

[Note: looks] A rank that waits without progress looks a few times per second whether others wrote
why. On an accelerator the host does not wait for collectives, so it looks only when a run ends, in
`Trainer` or at the end of a `with` block, and at most once per second: that is one call to the
store, see [Note: news] in `schedules.messages`. Under `keep_all` it never looks. If nobody finds a
message by then, the rank that waits raises after `timeout_s`, and the others by NCCL's watchdog.
"""

import json
import math
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any
from weakref import WeakSet

from mics_fn.errors import CollectiveError, DesyncError, name_ranks
from mics_fn.schedules.messages import JobMessages, Stuck, deadlocked, neighbours, note_of
from mics_fn.store import Store, later, poll

# `CallPattern`: what comes next in a sequence that repeats, found from the sequence alone.

_MOST = 8192  # entries that are remembered; when there are more, the older half is forgotten
_ALIKE = 64  # entries before a place that are compared with the last ones, at most


class CallPattern:
    """A sequence, and a guess of its next entry: what followed where the past was most alike.

    Example:
      >>> pattern = CallPattern()
      >>> for entry in "abcab":
      ...     pattern.add(entry)
      >>> pattern.guess
      'c'
      >>> pattern.add("x")
      >>> pattern.guess is None
      True
    """

    def __init__(self) -> None:
        self._past: list[Any] = []
        self._at = -1  # place of what is expected next; below 0 if nothing is
        self.guess: Any = None  # the expected entry; None if nothing is

    def add(self, entry: Any) -> None:
        """Add any entry."""
        right = self.guess is not None and entry == self.guess
        self._past.append(entry)
        if len(self._past) > _MOST:
            del self._past[: _MOST // 2]
            right = False
        self._at = self._at + 1 if right else _after_most_alike(self._past)
        self.guess = self._past[self._at] if self._at >= 0 else None

    def back(self, count: int) -> Any:
        """The entry so many places before the next one; None if it was forgotten."""
        return self._past[-count] if 0 < count <= len(self._past) else None


def _after_most_alike(past: Sequence[Any]) -> int:
    """The place behind the longest earlier match of the end of a sequence, the latest of equals.

    >>> _after_most_alike("abcab"), _after_most_alike("ab"), _after_most_alike("xabyabxab")
    (2, -1, 3)
    """
    last, most, found = len(past) - 1, 0, -1
    for at in range(last - 1, -1, -1):
        n = 0
        while n <= min(at, _ALIKE) and past[at - n] == past[last - n]:
            n += 1
        if n > most:
            most, found = n, at + 1
    return found


# `Calls`: what this rank has called on one communicator.

Counts = Mapping[str, int]  # of calls, by communicator
Call = tuple[str, str, Hashable, int]  # the verb, what it does, to what, and the bytes

_MOST_DOUBT = 64  # calls that are compared after a pattern was left
_KEPT = 1024  # no rank is so many calls behind, so nobody reads older messages
_ALL: WeakSet["Calls"] = WeakSet()  # of all communicators of this process


class Calls:
    """The calls of one communicator; see [Note: the same calls].

    Args:
      channel: of the groups; None for a communicator of one rank.
      name: of the communicator, the same on all of its ranks, and no other one has it.
      ranks: its global ranks.
      timeout_s: bound in seconds of the wait for the other ranks.
      differ: the error if ranks differ, and what to do; None for that of a communicator.
    """

    def __init__(
        self,
        channel: "Channel | None" = None,
        name: str = "",
        ranks: Sequence[int] = (),
        timeout_s: float = 0.0,
        differ: tuple[str, str] | None = None,
    ) -> None:
        self._channel, self._name, self._ranks = channel, name, ranks
        self._timeout_s, self._differ = timeout_s, differ
        self._job = JobMessages() if channel is None else channel.job
        self._store = self._job.store if len(ranks) > 1 else None
        self.key = f"{self._job.key}/calls/{name}/{min(ranks, default=0)}"
        self._pattern = CallPattern()
        self.number = 0  # of calls so far
        self.issued = 0  # those of them whose collective was issued
        self._doubt = 0  # calls to compare after a pattern was left
        self._owed = 0  # those of them that are still to be compared
        self._quiet = 0  # calls in a row about which nothing was sent
        self._due = -1  # the call, still to be made, at which another rank left its pattern
        self._acknowledged = deque[int](maxlen=_KEPT)  # calls at which some rank left
        self._leaver = ""  # what this rank has read last of a rank that left its pattern
        self._written = deque[tuple[int, str]]()
        if self._store is not None:
            self._job.calls.append(self)
            _ALL.add(self)

    def add(self, call: Call, meanwhile: Callable[[], object]) -> None:
        """Note a call that is about to be made; returns once it is safe to move data.

        Args:
          call: its description, which must be the same on all ranks.
          meanwhile: called again and again while other ranks are waited for, so that what they
            wait for gets on.

        Raises:
          DesyncError: other ranks make another call.
          CollectiveError: some rank made no call in time, nor looked.
        """
        if self._store is None:
            return
        if self._job.raised:
            self._job.go_on()
        pattern = self._pattern
        if call == pattern.guess and not self._owed and self.number != self._due:
            pattern.add(call)
            self.number += 1
            self._quiet += 1
            return
        self._compare(call, meanwhile)

    def _compare(self, call: Call, meanwhile: Callable[[], object]) -> None:
        """Compare a call, and wait for the others if they may guess another one."""
        store: Any = self._store
        number, pattern, text = self.number, self._pattern, call_text(call)
        mine = json.dumps([self._job.rank, text])
        trusted = pattern.guess is not None and not self._owed
        leaves = number == self._due or (trusted and call != pattern.guess)
        rank, written = json.loads(store.compare_set(self._at(number), "", mine))
        if written != text:
            self._refuse(rank, written, text)
        if rank == self._job.rank:
            self._written.append((number, self._at(number)))
            self._tidy(store)
        if leaves:
            self._owed = 0 if self._quiet > _MOST_DOUBT else self._doubt
            self._doubt = min(_MOST_DOUBT, 2 * self._owed + 1)
        elif self._owed and call == pattern.guess:
            self._owed -= 1
        self._quiet = 0
        # An interrupt while it waits counts as a call, as one in the collective would.
        pattern.add(call)
        self.number += 1
        if leaves:
            self._diverge(store, number, text, first=rank == self._job.rank, meanwhile=meanwhile)

    def _diverge(
        self, store: Any, number: int, text: str, *, first: bool, meanwhile: Callable[[], object]
    ) -> None:
        """Leave the pattern at a call; returns once all ranks know of it."""
        acknowledged = f"{self._at(number)}/heard"
        if number != self._due:  # else this rank has said already that it knows
            self._acknowledged.append(number)
            store.add(acknowledged, 1)
        if first:
            self._written.append((number, acknowledged))
            said = json.dumps([number, self._job.rank, text])
            # Never in the place of what this rank has not read: another one may have left earlier.
            # Nor once all know of this call, as what a rank says of a later one would be lost.
            while store.add(acknowledged, 0) < len(self._ranks):
                if store.compare_set(f"{self.key}/left", self._leaver, said).decode() == said:
                    break
                self.read()
            self._job.mark_changed()

        stuck = Stuck(self.key, number + 1, tuple(self._ranks), text)

        def all_acknowledge() -> bool:
            meanwhile()
            if store.add(acknowledged, 0) >= len(self._ranks):
                return True
            self._channel.poll_peers()  # pyright: ignore[reportOptionalMemberAccess]
            self._job.check_departed(stuck)
            return False

        deadline = time.monotonic() + self._timeout_s
        check = partial(self._job.check, [stuck], made=True)
        if not poll(all_acknowledge, len(self._ranks), deadline, check):
            what = f"call {number} over '{self._name}' has no answer in {self._timeout_s:g} s"
            lines = [f"rank {self._job.rank}: {text}", f"asked: {name_ranks(self._ranks)}"]
            fix = "look for a rank that stopped, or that makes fewer calls"
            error = CollectiveError(what, lines, fix)
            raise self._job.timeout_error(error, [stuck])

    def read(self) -> None:
        """Read whether a rank left its pattern: raise if this one is past it, else answer."""
        store: Any = self._store
        if not store.check([f"{self.key}/left"]):
            self._leaver = ""
            return
        self._leaver = store.get(f"{self.key}/left").decode()
        number, rank, text = json.loads(self._leaver)
        # Where all left together nobody says it, so that what is read here may be old.
        if number in self._acknowledged or number < self.number - _KEPT:
            return
        if number < self.number:
            mine = self._pattern.back(self.number - number)
            self._refuse(rank, text, "went on" if mine is None else call_text(mine), number)
        self._due = number
        self._acknowledged.append(number)
        store.add(f"{self._at(number)}/heard", 1)

    def _refuse(self, rank: int, written: str, mine: str, number: int | None = None) -> None:
        """Raise, on all ranks of the groups, that two ranks make different calls."""
        number = self.number if number is None else number
        what = f"call {number} over '{self._name}' of {name_ranks(self._ranks)}: ranks differ in it"
        fix = "call the same verbs on the same trees, in the same order, on all of these ranks"
        what, fix = self._differ or (what, fix)
        self._job.raise_everywhere(what, {rank: written, self._job.rank: mine}, fix)

    def _at(self, number: int) -> str:
        return f"{self.key}/{number}"

    def _tidy(self, store: Any) -> None:
        """Delete what nobody reads any more."""
        while self._written and self._written[0][0] < self.number - _KEPT:
            with suppress(RuntimeError, NotImplementedError):
                store.delete_key(self._written.popleft()[1])


def call_text(call: Call) -> str:
    """A call in words, which other calls do not have.

    >>> call_text(("gather", "gather", "bucket 0 (w)", 8)), call_text(("", "a run ends", "", 0))
    ('gather: gather of bucket 0 (w), 8 bytes', 'a run ends')
    """
    verb, does, about, nbytes = call
    what = f"{does} of {about}" if about else does
    what = f"{what}, {nbytes} bytes" if nbytes else what
    return f"{verb}: {what}" if verb else what


def made(key: str = "") -> dict[str, int]:
    """How many calls this rank has made over each communicator, by the key of its `Calls`.

    Args:
      key: prefix of their keys, such as the key of some groups; by default all.
    """
    return {calls.key: calls.number for calls in _ALL if calls.key.startswith(key)}


def issued(key: str = "") -> dict[str, int]:
    """How many of these calls were issued; the others wait for what was begun before."""
    return {calls.key: calls.issued for calls in _ALL if calls.key.startswith(key)}


# `Channel`: messages between the ranks of a partition group, and the order in which these fetch.

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
        self.learned = WeakSet[Any]()  # each a `Learned`, as long as a policy remembers it
        self.job = JobMessages(store, key, rank, job_size)
        self._order = Calls(self, _ORDER, ranks, timeout_s, differ=_DIFFER)
        self._store, self._all = store, f"{key}/all"  # for all ranks of the groups, every replica
        self._rank = rank
        self._notes: dict[int, Any] = {}  # what other ranks wrote about their waits; see `messages`
        self._note = ""  # what this rank wrote down about its wait
        self._polled = -math.inf
        self._written = deque[tuple[int, str]]()  # keys to delete, by the run that wrote them

    def begin_run(self, learned: Any, number: int | None = None) -> int:
        """Begin a run and return its number; the n-th run is the same on all ranks.

        Args:
          learned: the `Learned` that it begins with, and will add to.
          number: of the run, if the groups have had others; by default the next one.
        """
        self.learned.add(learned)
        self.runs = self.runs + 1 if number is None else number
        # Nobody reads the messages of old runs, but the store would keep them in memory.
        while self._written and self._written[0][0] <= self.runs - _RUNS_KEPT:
            later(self._store, "delete_key", self._written.popleft()[1])
        return self.runs

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

    def poll_peers(self, stuck: Sequence[Stuck] = (), issued: Counts | None = None) -> None:
        """Raise the error that explains a wait without progress, if the others wrote down why.

        Args:
          stuck: what this rank waits for.
          issued: number of calls that this rank made, by communicator.
        """
        if self._store is None:
            return
        self._polled = time.monotonic()
        if self.job.any_changes():
            self.job.raise_reported()
            for calls in self.job.calls:
                calls.read()
            self._notes.clear()
            self.job.read_departures()
            self.job.mark_seen()
        for call in stuck:
            self.job.check_departed(call)
        if stuck:
            self._find_stuck(self._store, stuck, issued or {})

    def check(self) -> None:
        """Raise if a rank has failed, without a message."""
        self.job.check()

    def glance(self) -> None:
        """Call `poll_peers` at most once per second."""
        if time.monotonic() - self._polled >= _GLANCE_S:
            self.poll_peers()

    def moved(self) -> None:
        """Withdraw this rank's note: what it waited for is done, or was given up."""
        if self._note:
            self._note = ""
            later(self._store, "set", f"mics_fn/stuck/{self._rank}", "")

    def _find_stuck(self, store: Store, stuck: Sequence[Stuck], counts: Counts) -> None:
        """See [Note: waiting in two places] in `schedules.messages`."""
        text = f"waits for {stuck[0].text}"
        mine = json.dumps(note_of(stuck, counts, text))
        if mine != self._note:
            store.set(f"mics_fn/stuck/{self._rank}", mine)
            self._note = mine
            self.job.mark_changed()
        for other in neighbours(self._rank, stuck):
            if other not in self._notes:
                key = f"mics_fn/stuck/{other}"
                self._notes[other] = json.loads((store.check([key]) and store.get(key)) or "null")
            note = self._notes[other]
            if note and deadlocked(stuck, counts, note, other, self._rank):
                found = {other: note["text"], self._rank: text}
                self.job.raise_everywhere(_STUCK[0], found, _STUCK[1])


class Channels(Channel):
    """The channel of a tree whose leaves live on several groups: its ranks agree in each."""

    def __init__(self, parts: Sequence[Channel]) -> None:
        super().__init__()
        self._parts = parts
        self._widest = max(parts, key=lambda part: part.job_size)

    def begin_run(self, learned: Any, number: int | None = None) -> int:
        """Begin a run with the same number in every group."""
        number = number or 1 + max(part.runs for part in self._parts)
        return max(part.begin_run(learned, number) for part in self._parts)

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

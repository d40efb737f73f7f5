"""`Calls`: what this rank has called on one communicator, in step with its other ranks.

[Note: the same calls] Ranks that call different collectives on one communicator would receive wrong
bytes, hang, or abort. So each collective has a description: the verb, what it does, the bucket with
its layout and the names of its leaves, and the bytes. If it is what `CallPattern` guesses, nothing
is sent. If there is no guess, which all ranks know, it is compared through the store: one message,
which never waits. If it is something else than the guess, other ranks may call what was guessed
without a word. So this rank says in the store what it does instead, and moves no data before all
ranks know of that. A rank learns of it when it comes to the same call and leaves its pattern as
well; or when it looks, since it waits for a collective or because it left another pattern. If it is
not yet at that call, it goes on and will compare it. If it is past it, it raises an error, and all
ranks of the groups raise the same one when they look. So all ranks have one history, and different
calls never meet. A step that repeats sends nothing from the third time on.

A pattern that is left often is not trusted at once: the next calls are compared although they were
guessed, and more of them each time, up to `_MOST_DOUBT`. So a program without patterns compares all
of its calls, which does not wait, instead of waiting for the others at each of them.

Which calls a rank makes on one communicator does not depend on when it makes them, so fetches and
reductions may come in any order among each other, as uneven gradients need it.

[Note: one guess everywhere] A guess depends on nothing but the sequence. So ranks that have made
the same calls guess the same next one, without a message, and each of them knows what the others
guess.
"""

import json
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from typing import Any, Protocol
from weakref import WeakSet

from mics_fn.errors import CollectiveError, name_ranks
from mics_fn.schedules.messages import JobMessages, Stuck
from mics_fn.store import poll

# `CallPattern`: what comes next in a sequence that repeats, found from the sequence alone.

_MOST = 8192  # entries that are remembered; when there are more, the older half is forgotten


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
        self._known: dict[Hashable, Any] = {}  # the first of equal entries, to compare identities
        self._at = -1  # place of what is expected next; below 0 if nothing is
        self.guess: Any = None  # the expected entry; None if nothing is

    def follow(self) -> None:
        """Add the entry that was expected."""
        self._past.append(self.guess)
        self._at += 1
        self.guess = self._past[self._at]
        if len(self._past) > _MOST:
            self._forget()

    def add(self, entry: Hashable) -> None:
        """Add any entry."""
        if self.guess is not None and entry == self.guess:
            self.follow()
            return
        known = entry in self._known
        self._past.append(self._known.setdefault(entry, entry))
        self._at = _alike(self._past) if known else -1
        self.guess = self._past[self._at] if self._at >= 0 else None
        if len(self._past) > _MOST:
            self._forget()

    def back(self, count: int) -> Any:
        """The entry so many places before the next one; None if it was forgotten."""
        return self._past[-count] if 0 < count <= len(self._past) else None

    def _forget(self) -> None:
        gone = len(self._past) // 2
        del self._past[:gone]
        self._known = {entry: entry for entry in reversed(self._past)}
        self._past = [self._known[entry] for entry in self._past]
        self._at -= gone
        if self._at < 0:
            self._at = _alike(self._past)
        self.guess = self._past[self._at] if self._at >= 0 else None


def _alike(past: Sequence[Any]) -> int:
    """The place behind the longest earlier match of the end of a sequence, the latest of equals.

    It takes linear time: for each place, how much of the reversed sequence equals its beginning
    follows from what is known of the places before it (the Z algorithm). Equal entries must be the
    same object. The result is -1 if the last entry occurs nowhere else.

    >>> _alike("abcab"), _alike("ab"), _alike("xabyabxab")
    (2, -1, 3)
    """
    back, count = past[::-1], len(past)
    lengths, low, high = [0] * count, 0, 0  # back[low:high] equals the beginning of `back`
    best, found = 0, -1
    for i in range(1, count):
        n = min(high - i, lengths[i - low]) if i < high else 0
        while i + n < count and back[n] is back[i + n]:
            n += 1
        lengths[i] = n
        if i + n > high:
            low, high = i, i + n
        if n > best:
            best, found = n, count - i
    return found


Call = tuple[str, str, Hashable, int]  # the verb, what it does, to what, and the bytes

_MOST_DOUBT = 64  # calls that are compared after a pattern was left
_KEPT = 1024  # no rank is so many calls behind, so nobody reads older messages
_ALL: WeakSet["Calls"] = WeakSet()  # of all communicators of this process


class Poller(Protocol):
    """Reader of the messages of other ranks: a `Channel`."""

    @property
    def job(self) -> JobMessages:
        """The messages of all ranks of the groups."""
        ...

    def look(self) -> None:
        """Process messages of other ranks; raise if one reports an error."""
        ...


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
        channel: Poller | None = None,
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
        self._heard = deque[int](maxlen=8)  # the last calls at which some rank left
        self._left = ""  # what this rank has read last of a rank that left its pattern
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
            pattern.follow()
            self.number += 1
            self._quiet += 1
            return
        self._compare(call, meanwhile)

    def _compare(self, call: Call, meanwhile: Callable[[], object]) -> None:
        """Compare a call, and wait for the others if they may guess another one."""
        store: Any = self._store
        number, pattern, text = self.number, self._pattern, call_text(call)
        trusted = pattern.guess is not None and not self._owed
        leaves = number == self._due or (trusted and call != pattern.guess)
        rank, told = json.loads(store.compare_set(self._at(number), "", self._says(text)))
        if told != text:
            self._refuse(rank, told, text)
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
            self._leave(store, number, text, first=rank == self._job.rank, meanwhile=meanwhile)

    def _leave(
        self, store: Any, number: int, text: str, *, first: bool, meanwhile: Callable[[], object]
    ) -> None:
        """Leave the pattern at a call; returns once all ranks know of it."""
        heard = f"{self._at(number)}/heard"
        if number != self._due:  # else this rank has said already that it knows
            self._heard.append(number)
            store.add(heard, 1)
        if first:
            self._written.append((number, heard))
            said = json.dumps([number, self._job.rank, text])
            # Never in the place of what this rank has not read: another one may have left earlier.
            # Nor once all know of this call, as what a rank says of a later one would be lost.
            while store.add(heard, 0) < len(self._ranks):
                if store.compare_set(f"{self.key}/left", self._left, said).decode() == said:
                    break
                self.read()
            self._job.tell()

        def all_heard() -> bool:
            meanwhile()
            if store.add(heard, 0) >= len(self._ranks):
                return True
            self._channel.look()  # pyright: ignore[reportOptionalMemberAccess]
            self._job.await_call(Stuck(self.key, number + 1, ranks, text))
            return False

        def check(idle_s: float) -> None:
            self._job.check([Stuck(self.key, number + 1, ranks, text)], idle_s, made=True)

        ranks, deadline = tuple(self._ranks), time.monotonic() + self._timeout_s
        if not poll(all_heard, len(ranks), deadline, check):
            what = f"call {number} over '{self._name}' has no answer in {self._timeout_s:g} s"
            lines = [f"rank {self._job.rank}: {text}", f"asked: {name_ranks(self._ranks)}"]
            fix = "look for a rank that stopped, or that makes fewer calls"
            error = CollectiveError(what, lines, fix)
            raise self._job.late(error, [Stuck(self.key, number + 1, ranks, text)])

    def read(self) -> None:
        """Read whether a rank left its pattern: raise if this one is past it, else answer."""
        store: Any = self._store
        if not store.check([f"{self.key}/left"]):
            self._left = ""
            return
        self._left = store.get(f"{self.key}/left").decode()
        number, rank, text = json.loads(self._left)
        if number in self._heard:
            return
        if number < self.number:
            mine = self._pattern.back(self.number - number)
            self._refuse(rank, text, "went on" if mine is None else call_text(mine), number)
        self._due = number
        self._heard.append(number)
        store.add(f"{self._at(number)}/heard", 1)

    def _refuse(self, rank: int, told: str, mine: str, number: int | None = None) -> None:
        """Raise, on all ranks of the groups, that two ranks make different calls."""
        number = self.number if number is None else number
        what = f"call {number} over '{self._name}' of {name_ranks(self._ranks)}: ranks differ in it"
        fix = "call the same verbs on the same trees, in the same order, on all of these ranks"
        what, fix = self._differ or (what, fix)
        self._job.raise_everywhere(what, {rank: told, self._job.rank: mine}, fix)

    def _says(self, text: str) -> str:
        return json.dumps([self._job.rank, text])

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

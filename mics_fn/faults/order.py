"""The order of calls, compared between ranks before data moves, and what ranks report of errors.

[Note: the same calls] Ranks that call different collectives on one communicator would receive wrong
bytes, hang, or abort: gloo ends a process that is sent more than it expects, and no Python code of
it can say why. So unlike calls have to be found before they meet, and each collective has a
description: the verb, what it does, the bucket with its layout and the names of its leaves, and the
bytes. If it is what `CallPattern` guesses, nothing is sent. If there is no guess, which all ranks
know, it is compared through the store: one message, which never waits. If it is something else than
the guess, other ranks may call what was guessed without a word. So this rank writes what it does
instead, and moves no data before all ranks know of that: they come to the same call, which takes
two messages of each and what the wait asks, or read of it because they wait, for this rank or for
another. A rank that reads of it and is not yet at that call goes on and will compare it. If it is
past it, it raises an error, and all ranks of the groups raise the same one at their next poll. So
all ranks have one history, and different calls never meet.

This one mechanism is enough for all calls. A digest of calls in the message that ends a step would
find nothing more, as no step ends in which ranks differ; and it could not take the place of
comparing, as calls of unlike sizes end a process 15 ms after they meet, long before a step ends.

Which calls a rank makes on one communicator does not depend on when it makes them, so fetches and
reductions may come in any order among each other, as uneven gradients need it.

[Note: one guess everywhere] A guess depends on nothing but the sequence. So ranks that have made
the same calls guess the same next one, without a message, and each of them knows what the others
guess. The guess is what followed the last time. Where it is wrong, the sequence goes on at the
latest place of the entry after those that are most alike to the last ones. So something rare
between equal steps, such as an evaluation, is a few misses when it comes and one where it came the
last time, whatever the distance. A long step with many equal parts is guessed in full from its
third time on. Where most guesses were wrong there is none for a while, so a program without a
pattern does not wait at each call.

[Note: polls] A rank that waits without progress polls a few times per second whether others wrote
why. On an accelerator the host does not wait for collectives, so it polls only when a run ends, in
`Trainer` or at the end of a `with` block, and at most once per second. Under `keep_all` it never
polls. If nobody finds a message by then, the rank that waits raises after `timeout_s`, and the
others by NCCL's watchdog.

[Note: changes] A rank that writes something for others does it under a key of its own, and then
adds one to a counter that the whole job shares. So a poll reads this counter, and the rest only if
it has changed: while nobody writes anything it is one call to the store, whatever the number of
ranks. A reader reads the counter first, so what is written meanwhile changes it once more.

[Note: waiting in two places] A rank that waits makes no call until what it waits for is done. So if
B has not made one of the calls that A waits for, and A not one of those that B waits for, then
neither can ever proceed, and both can raise long before the timeout. An outdated note does no harm:
for A to have proceeded since it wrote its note, B would have had to make its call first, and B,
which reads the note, knows that it has not. A rank that waits for some time writes a note of what
it waits for, and reads those of a few ranks that take part in it. A communicator's key begins with
that of the meeting of its ranks, and so with an epoch: a note that an earlier process of a rank has
left knows no communicator of the meetings since, and says nothing of them.

[Note: raised by all] An error that some ranks find is raised by all of them, since the others would
wait for these sooner or later. A rank that cannot go on writes its error as the trouble of the
groups, which are finished then. Ranks that compare something by collectives raise together, and may
go on if their program catches the error; if they are only a part of the groups, they write it for
the others, too, and all groups are finished.

[Note: ranks that have left] A rank that closes its groups issues no more collectives. If others
still wait for one that it has issued, they get it; but for one that it has not, they would wait
until the timeout. So a rank that leaves writes down, in one entry, how many it has issued over each
communicator, and a rank that waits without progress compares. The last rank that leaves deletes all
that the groups have written in the store, for then nobody reads it any more.
"""

import json
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn
from weakref import WeakSet

from mics_fn import errors
from mics_fn.faults.heartbeat import CHANGES, departure_of
from mics_fn.groups import GroupState, Watch, withdraw_all
from mics_fn.store import Call, Calls, Channel, Stuck, call_text, later, poll, value_of

# `CallPattern`: what comes next in a sequence that repeats, found from the sequence alone.

_MOST = 8192  # entries that are remembered; when there are more, the older half is forgotten
_ALIKE = 8  # entries before a place that are compared with the last ones, at most
# A wrong guess adds 3 to the doubt, a right one takes 1; above 12 nothing is guessed.
_MISS, _DOUBT, _MOST_DOUBT = 3, 12, 16


class CallPattern:
    """A sequence, and a guess of its next entry; see [Note: one guess everywhere].

    Example:
      >>> pattern = CallPattern()
      >>> for entry in "abcab":
      ...     pattern.add(entry)
      >>> pattern.guess
      'c'
      >>> pattern.add("x")
      >>> pattern.guess is None
      True
      >>> pattern.add("c")
      >>> pattern.guess
      'a'
    """

    def __init__(self) -> None:
        self._past: list[Any] = []
        self._at = -1  # place of what is expected next; below 0 if nothing is
        self._doubt = 0
        self.guess: Any = None  # the expected entry; None if there is none, or too much doubt

    def add(self, entry: Any) -> None:
        """Add any entry."""
        past, at = self._past, self._at
        if at >= 0 and past[at] == entry:
            self._doubt = max(0, self._doubt - 1)
        else:
            self._doubt = min(_MOST_DOUBT, self._doubt + _MISS * (at >= 0))
            at = self._most_alike(entry)
        past.append(entry)
        self._at = at + 1 if at >= 0 else -1
        if len(past) > _MOST:
            half = _MOST // 2
            del past[:half]
            self._at = max(-1, self._at - half)
        expects = self._at >= 0 and self._doubt <= _DOUBT
        self.guess = past[self._at] if expects else None

    def _most_alike(self, entry: Any) -> int:
        """The place of an entry after what is most alike to the end of the sequence, the latest."""
        past, most, found = self._past, -1, -1
        for at in range(len(past) - 1, -1, -1):
            if past[at] == entry:
                alike = 0
                while alike < min(at, _ALIKE) and past[at - 1 - alike] == past[-1 - alike]:
                    alike += 1
                if alike > most:
                    most, found = alike, at
                    if alike == _ALIKE:
                        break
        return found

    def back(self, count: int) -> Any:
        """The entry so many places before the next one; None if it was forgotten."""
        return self._past[-count] if 0 < count <= len(self._past) else None


# `OrderedCalls`: what this rank has called on one communicator, compared.

_KEPT = 1024  # no rank is so many calls behind, so nobody reads older messages
_PATIENCE_S = 0.05  # a rank that leaves its pattern says so if not all came with it in that time
_ALL: WeakSet[Calls] = WeakSet()  # of all communicators of this process


class OrderedCalls(Calls):
    """The calls of one communicator of several ranks; see [Note: the same calls].

    Args:
      channel: of the groups.
      name: of the communicator, the same on all of its ranks, and no other one has it.
      ranks: its global ranks.
    """

    def __init__(self, channel: "JobChannel", name: str, ranks: Sequence[int]) -> None:
        self._channel, self._name, self._ranks, self._store = channel, name, ranks, channel.store
        self.key = f"{channel.key}/calls/{name}/{min(ranks)}"
        self._pattern = CallPattern()
        self._due = set[int]()  # calls, still to be made, at which another rank left its pattern
        self._acknowledged = deque[int](maxlen=_KEPT)  # calls at which some rank left
        self._leaver = ""  # what this rank has read last of a rank that left its pattern
        self._written = deque[tuple[int, str]]()
        channel.calls.append(self)
        _ALL.add(self)

    def add(self, call: Call, meanwhile: Callable[[], object]) -> None:
        """Note a call that is about to be made; returns once it is safe to move data.

        Args:
          call: its description, which must be the same on all ranks.
          meanwhile: called again and again while other ranks are waited for, so that what they
            wait for gets on.

        Raises:
          DesyncError: other ranks make another call.
          CollectiveError: some rank made no call in time, nor polled.
        """
        if self._channel.raised:
            withdraw_all(self._channel.watch.state)
            self._channel.raised = False
        number, guess, text = self.number, self._pattern.guess, ""
        silent = call == guess and number not in self._due
        if not silent:
            text = call_text(call)
            self._write(number, text)
        # An interrupt while it waits counts as a call, as one in the collective would.
        self._pattern.add(call)
        self.number += 1
        if not silent and guess is not None:
            self._leave(number, text, meanwhile)

    def _write(self, number: int, text: str) -> None:
        """Write a call, or compare it with what another rank wrote; delete what nobody reads."""
        said = json.dumps([self._channel.rank, text])
        rank, written = json.loads(self._store.compare_set(self._at(number), "", said))
        if written != text:
            self._refuse(number, rank, written, text)
        if rank == self._channel.rank:
            self._written += [(number, self._at(number)), (number, f"{self._at(number)}/heard")]
        while self._written and self._written[0][0] < number - _KEPT:
            later(self._store, "delete_key", self._written.popleft()[1])

    def _leave(self, number: int, text: str, meanwhile: Callable[[], object]) -> None:
        """Leave the pattern at a call; returns once all ranks know of it."""
        channel = self._channel
        if number not in self._due:  # else this rank has said already that it knows
            self._acknowledge(number)
        self._due.discard(number)
        stuck = Stuck(self.key, number + 1, tuple(self._ranks), text)

        def all_know() -> bool:
            meanwhile()
            return self._all_know(number)

        def check(waited_s: float) -> None:
            if waited_s > _PATIENCE_S:
                self._report(number, text)
                channel.poll_peers()
                channel.check_departed(stuck)
            channel.check([stuck], waited_s, made=True)

        deadline = time.monotonic() + channel.timeout_s
        if not poll(all_know, len(self._ranks), deadline, check):
            what = f"call {number} over '{self._name}' has no answer in {channel.timeout_s:g} s"
            lines = [f"rank {channel.rank}: {text}", f"asked: {errors.name_ranks(self._ranks)}"]
            fix = "look for a rank that stopped, or that makes fewer calls"
            raise channel.watch.timeout_error(errors.CollectiveError(what, lines, fix), [stuck])

    def _report(self, number: int, text: str) -> None:
        """Say at which call this rank left, unless what is said of another call comes first."""
        other = json.loads(self._leaver or "[-1]")[0]
        if other == number or (0 <= other < number and not self._all_know(other)):
            return
        said = json.dumps([number, self._channel.rank, text])
        # Never in the place of what this rank has not read.
        if self._store.compare_set(f"{self.key}/left", self._leaver, said).decode() == said:
            self._leaver = said
            self._channel.mark_changed()
        else:
            self.read()

    def read(self) -> None:
        """Read whether a rank left its pattern: raise if this one is past it, else answer."""
        self._leaver = value_of(self._store, f"{self.key}/left")
        number, rank, text = json.loads(self._leaver or "[-1, 0, 0]")
        # What was said last may be old, of a call that all have made since.
        if number in self._acknowledged or number < max(0, self.number - _KEPT):
            return
        if number < self.number:
            mine = self._pattern.back(self.number - number)
            self._refuse(number, rank, text, "went on" if mine is None else call_text(mine))
        self._due.add(number)
        self._acknowledge(number)

    def _acknowledge(self, number: int) -> None:
        """Say that this rank knows of a call that was not guessed."""
        self._acknowledged.append(number)
        self._store.add(f"{self._at(number)}/heard", 1)

    def _all_know(self, number: int) -> bool:
        return self._store.add(f"{self._at(number)}/heard", 0) >= len(self._ranks)

    def _refuse(self, number: int, rank: int, written: str, mine: str) -> None:
        """Raise, on all ranks of the groups, that two ranks make different calls."""
        whose = f"'{self._name}' of {errors.name_ranks(self._ranks)}"
        what = f"call {number} over {whose}: ranks differ in it"
        self._channel.raise_everywhere(what, {rank: written, self._channel.rank: mine})

    def _at(self, number: int) -> str:
        return f"{self.key}/{number}"


def made() -> dict[str, int]:
    """How many calls this rank has made over each communicator, by the key of its `Calls`."""
    return {calls.key: calls.number for calls in _ALL}


# Find out whether two ranks wait for each other in different collectives.

Note = tuple[Sequence[Stuck], Mapping[str, int]]  # what a rank waits for, and its calls so far
_READ = 8  # notes that a rank reads: in a large group all ranks may wait, with one store for all


def deadlocked(own: int, mine: Note, rank: int, theirs: Note) -> bool:
    """Whether neither this rank nor another one that waits can ever proceed.

    Example:
      >>> mine = [Stuck("a", 3, (0, 1), "reduce")], {"a": 3, "b": 4}
      >>> theirs = [Stuck("b", 5, (0, 1), "gather")], {"a": 2, "b": 5}
      >>> deadlocked(0, mine, 1, theirs), deadlocked(0, (mine[0], {"b": 5}), 1, theirs)
      (True, False)
    """
    stuck, made_here = mine
    waits_for_it = any(each.lacks(rank, theirs[1]) for each in stuck)
    return waits_for_it and any(each.lacks(own, made_here) for each in theirs[0])


# `JobChannel`: what all ranks of the groups, those of every replica, report to each other.

_FIX = (
    "call the same verbs on the same trees, in the same order, on all of these ranks; "
    "schedule=keep_all() lets them use parameters in different orders"
)
_GLANCE_S = 1.0  # a host that does not wait for collectives polls that often at most


class JobChannel(Channel):
    """A channel that compares calls, and on which ranks report errors and that they left.

    Args:
      store, key, ranks, rank, timeout_s, job_size: as for `Channel`; there are several ranks.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.raised = False  # whether this rank raised an error, and has made no call since
        self.watch: Any = Watch(GroupState())  # of the groups
        self.kept = ""  # a key that outlives the groups
        self._trouble = f"{self.key}/all/trouble"
        self._seen = 0  # changes
        self._polled = -math.inf
        self._notes: dict[int, Any] = {}  # what other ranks wrote about their waits
        self._note = ""  # what this rank wrote down about its wait
        self._any_departed = self._departed_here = False  # any rank, and this one
        self._tidy: Callable[[], None] = lambda: None

    def calls_of(self, name: str, ranks: Sequence[int]) -> Calls:
        """The calls of a communicator of these ranks."""
        return OrderedCalls(self, name, ranks) if len(ranks) > 1 else Calls()

    # Errors.

    def mark_changed(self) -> None:
        """Say that this rank has written something."""
        self.store.add(CHANGES, 1)

    def report(self, text: str) -> None:
        """Make all ranks of the groups raise this error at their next poll."""
        self.store.compare_set(self._trouble, "", text)
        self.mark_changed()

    def raise_reported(self) -> None:
        """Raise the error that another rank reported, in this replica or another."""
        text = value_of(self.store, self._trouble)
        if text:
            error = errors.DesyncError(text)
            self.watch.state.fail(error)
            raise error

    def raise_everywhere(self, what: str, texts: Mapping[int, str]) -> NoReturn:
        """Raise, here and on the other ranks, that ranks did different things."""
        error = errors.disagreement(what, texts, _FIX)
        self.report(str(error))
        self.raise_reported()
        raise error

    # Polls of a rank that waits.

    def poll_peers(self, stuck: Sequence[Stuck] = ()) -> None:
        """Raise the error that explains a wait without progress, if the others wrote down why.

        Args:
          stuck: what this rank waits for.
        """
        store, self._polled = self.store, time.monotonic()
        changes = store.add(CHANGES, 0)
        if changes != self._seen:
            self.raise_reported()
            for calls in self.calls:
                calls.read()
            self._notes.clear()
            self._any_departed = store.add(f"{self.key}/gone", 0) > 0
            self._seen = changes  # only once all of it was read without an error
        for call in stuck:
            self.check_departed(call)
        if stuck:
            self._find_stuck(stuck)

    def glance(self) -> None:
        """Call `poll_peers` at most once per second."""
        if time.monotonic() - self._polled >= _GLANCE_S:
            self.poll_peers()

    def _find_stuck(self, stuck: Sequence[Stuck]) -> None:
        """See [Note: waiting in two places]."""
        counts, text = made(), f"waits for {stuck[0].text}"
        note = json.dumps([stuck, counts, text])
        if note != self._note:
            self.store.set(f"mics_fn/stuck/{self.rank}", note)
            self._note = note
            self.mark_changed()
        others = {rank for each in stuck for rank in each.ranks} - {self.rank}
        for other in sorted(others, key=lambda rank: (rank < self.rank, rank))[:_READ]:
            if other not in self._notes:
                said = json.loads(value_of(self.store, f"mics_fn/stuck/{other}") or '[[], {}, ""]')
                self._notes[other] = ([Stuck(*each) for each in said[0]], said[1]), said[2]
            theirs, why = self._notes[other]
            known = [each for each in stuck if each.group in theirs[1]]
            if deadlocked(self.rank, (known, counts), other, theirs):
                what = "ranks wait for each other in different collectives"
                self.raise_everywhere(what, {other: why, self.rank: text})

    # Ranks that make no more calls, since they closed or reset these groups.

    def depart(self, how: str) -> Callable[[], None]:
        """Say that this rank makes no more calls; a second call has no effect.

        Args:
          how: what it did, for errors of others; "" if they have been told of another one.

        Returns:
          What deletes all entries of the groups, if this is the last rank; it may take a while.
        """
        if self._departed_here:
            return self._tidy
        self._departed_here = True
        counts = {calls.key: calls.issued for calls in self.calls}
        self.calls.clear()  # these refer to the channel, and it to them
        with suppress(errors.MicsError, RuntimeError):  # the store is gone, with all that is in it
            if how:
                self.store.set(departure_of(self.key, self.rank), json.dumps([how, counts]))
            if self.store.add(f"{self.key}/gone", 1) == self.job_size:
                self._tidy = self._delete_all
            else:
                self.mark_changed()
        return self._tidy

    def _delete_all(self) -> None:
        with suppress(RuntimeError, NotImplementedError):
            for key in self.store.list_keys():
                if key.startswith(f"{self.key}/") and key != self.kept:
                    later(self.store, "delete_key", key)

    def check_departed(self, call: Stuck) -> None:
        """Raise GroupsError if a rank has left without its part of a call that this one waits for.

        It may have done so because of another error.
        """
        error = self.without(call) if self._any_departed else None
        if error is not None:
            raise self.watch.explained(error, wait=True)

    def without(self, call: Stuck) -> errors.GroupsError | None:
        """The error of a rank that closed or reset its groups without its part of a call."""
        for rank in call.ranks:
            text = value_of(self.store, departure_of(self.key, rank))
            how, counts = json.loads(text or '["", {}]')
            if how and call.lacks(rank, counts):
                what = f"a call that rank {rank} will not make, since it {how}"
                fix = "call the same verbs, or mf.reset, on all ranks before one closes its groups"
                return errors.GroupsError(what, [f"rank {self.rank}: waits for {call.text}"], fix)
        return None


Channel.of_several = JobChannel

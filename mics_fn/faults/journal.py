"""The `Journal` in which all ranks read of failures, and how one rank acts on it: `Watcher`.

[Note: the journal] The first failure wins, an exception that is caught may be withdrawn, and a rank
that waits may have given up before that. All ranks must come to the same end, so what they say is
one list in the store: each entry is appended by `compare_set` at the first free number, so a writer
has read all that was written before it. What comes first counts: a withdrawal after some rank gave
up is void, and so is giving up after a withdrawal.

[Note: no torn step] A rank that raised in step k + 1 has finished step k, which a slower rank may
still be in: it must finish it too. So a rank says how many collectives it had issued on each
communicator, and others go on waiting for one that it did issue. A rank that gives up says the same
of itself, so that those who wait for it give up as well.

[Note: a rank that makes no call] A rank may give signs of life and make no call: its loader hangs,
it is in a debugger, or its loop has ended before those of the others, who wait for it. Nothing says
whether it will go on, so it has `timeout_s`, as any rank that is slow. Each rank that has made no
call for `heartbeat_s`, or half of `timeout_s` if that is less, writes how many calls it has made
and issued, whether it waits for others, and where its main thread is. Of those that wait for nobody
and have not issued a call that another one has made, the one with the fewest calls is behind. The
first of the others names it in a warning, and after `timeout_s` all do in their error.
"""

import json
import os
import sys
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

from mics_fn import errors
from mics_fn.faults.heartbeat import CHANGES, Replaced, departure_of, interval_s
from mics_fn.groups import GroupState, Meeting, Watch
from mics_fn.spans import LOG
from mics_fn.store import StoreLost, Stuck, call_text, value_of

# What ranks tell each other of an error.

_MOST_TEXT, _MOST_TRACE = 1_000, 8_000  # characters of an error that other ranks are told


@dataclass(frozen=True)
class Failure:
    """What is known of a rank that failed."""

    rank: int | None
    kind: str
    text: str  # what happened, in one line
    step: int | None = None
    operation: str = ""
    leaf: str = ""
    trace: str = ""
    made: dict[str, int] | None = None  # calls by communicator; None if it could not say
    issued: dict[str, int] | None = None  # those of them that were issued
    final: bool = True  # whether it cannot be withdrawn
    because: int | None = None  # it gave up because of this rank; -1: of the store
    file_error: list[str] | None = None  # of an `FileError`: file, leaf, and more of its text

    def lacks(self, stuck: Sequence[Stuck], missing: Sequence[int], *, made: bool) -> bool:
        """Whether this rank will never do a part of what another one waits for.

        Args:
          stuck: calls that have to be done, or heard of.
          missing: ranks that are waited for, whatever they have done before.
          made: whether it is enough to have made the calls, or whether they must be issued.
        """
        counts = self.made if made else self.issued
        if counts is None or self.rank is None or self.rank in missing:
            return True
        return any(each.lacks(self.rank, counts) for each in stuck)

    def error(self, waits: str) -> errors.PeerFailed:
        """Return the PeerFailed of ranks that wait for this one; it ends their groups."""
        path, leaf, *said = self.file_error or ["", ""]
        facts = {"in step": self.step, "its last call:": self.operation or None}
        facts["this rank waits for"] = waits or None
        known = [f"{name} {value}" for name, value in facts.items() if value is not None]
        fix = said[-1] if said else _FIXES.get(self.kind, "look at its own error")
        if self.kind != "replaced":
            fix += ", then call groups = mf.reset(groups) on all ranks"
        text, operation = errors.message(self.text, [*said[:-1], *known], fix), self.operation
        more: Any = {"leaf": self.leaf, "remote_traceback": self.trace}
        more |= {"step": self.step, "operation": operation or waits}
        failed = errors.PeerFailed(text, self.rank, self.kind, **more)
        return errors.PeerFileError(failed, path, leaf) if said else failed


_GONE = "look at its own output, and start it again, or the job if it held the store"
_FIXES = {  # by the kind of a failure
    **dict.fromkeys(("killed", "exited", "silent"), _GONE),
    "replaced": "end this process; the job goes on with the one that took its place",
    "stalled": "look what it does there, pass a larger timeout_s= if it may take so long",
}


def facts_of(state: GroupState) -> dict[str, Any]:
    """What this rank is at in some groups: its step, its last call, and how many it has made."""
    call, calls = state.call, list(state.channel.calls)
    last = {} if call is None else {"operation": call_text(call), "leaf": str(call[2])}
    made = {each.key: each.number for each in calls}
    issued = {each.key: each.issued for each in calls}
    return {"step": state.step, **last, "made": made, "issued": issued}


def failure_of(error: BaseException, state: GroupState, final: bool, kind: str) -> Failure:
    """Describe an error of this rank as a `Failure`; its kind is "" if the error says it."""
    first = f"{type(error).__name__}: {error}".partition("\n")[0][:_MOST_TEXT]
    text = f"rank {state.rank} {'left its groups' if final else 'failed'}: {first}"
    if isinstance(error, SystemExit):
        text = f"rank {state.rank} exited, and its groups were still open"
    kind = kind or ("interrupted" if isinstance(error, KeyboardInterrupt) else "raised")
    known: dict[str, Any] = facts_of(state)
    known["trace"] = "".join(traceback.format_exception(error))[-_MOST_TRACE:]
    if isinstance(error, errors.PeerFailed):
        known["because"] = -1 if error.rank is None else error.rank
    if isinstance(error, errors.FileError):
        said = [line.strip().removeprefix("fix: ") for line in str(error).split("\n")[1:]]
        known["file_error"] = [f"{error.path}", f"{error.leaf}", *said]
    return Failure(state.rank, kind, text, final=final, **known)


def without_a_word(rank: int, kind: str) -> Failure:
    """The failure of a rank that could not say so itself."""
    what = {
        "killed": "gone: its process ended without a word",
        "silent": "silent: it is stopped, cut off, or something holds its interpreter",
    }
    return Failure(rank, kind, f"rank {rank} is {what[kind]}")


def of_store(own: int, rank: int | None, address: str, lost: StoreLost) -> Failure:
    """The failure of the rank that holds the store, or of the store if no rank does.

    If the process of this rank, `own`, was replaced, that is its failure.
    """
    if isinstance(lost, Replaced):
        since, *_, pid, _ = lost.entry.split(" ")
        text = f"rank {own}: this process was replaced by process {pid}, epoch {since}"
        return Failure(own, "replaced", text)
    who = "the store" if rank is None else f"rank {rank}, which holds the store,"
    kind, what = ("silent", "gives no answer") if lost.silent else ("killed", f"is gone: {lost}")
    return Failure(rank, kind, f"{who}{address and ' at '}{address} {what}")


class Journal:
    """Log of failures that the ranks of some groups share; see [Note: the journal].

    Only the store thread calls what takes a store.

    Args:
      key: prefix of its keys, which no other groups of the job use.
    """

    def __init__(self, key: str) -> None:
        self._key = f"{key}/failed"
        self._read = 0  # entries read
        self.standing: dict[int | None, Failure] = {}  # by rank, in the order of the entries

    def read(self, store: Any) -> None:
        """Read new entries."""
        while store.check([self._at()]):
            self._take(store.get(self._at()))

    def say(self, store: Any, failure: Failure) -> bool:
        """Append a failure, unless the same stands; returns whether it was appended."""

        def added(known: Failure | None) -> Failure:
            if known is not None and (known.final or not failure.final):
                return known
            first = known or failure  # it may have said why before
            made, issued = failure.made or first.made, failure.issued or first.issued
            return replace(first, final=failure.final, made=made, issued=issued)

        return self._change(store, failure.rank, added)

    def withdraw(self, store: Any, rank: int) -> bool:
        """Withdraw a rank's own failure; return False if another rank gave up because of it."""
        self._change(store, rank, lambda known: known if known and known.final else None)
        return rank not in self.standing

    def make_final(self, store: Any, rank: int | None) -> bool:
        """Make a failure final; False if it was withdrawn before."""
        self._change(store, rank, lambda known: known and replace(known, final=True))
        return rank in self.standing

    def _change(
        self, store: Any, rank: int | None, change: Callable[[Failure | None], Failure | None]
    ) -> bool:
        """Append what a function makes of the failure of a rank; False if that stays the same.

        All ranks read it at their next tick.
        """
        while True:
            self.read(store)
            known = self.standing.get(rank)
            new = change(known)
            if new == known:
                return False
            mine = json.dumps([rank, new and asdict(new)])
            found = store.compare_set(self._at(), "", mine)
            self._take(found)
            if found.decode() == mine:
                store.add(CHANGES, 1)
                return True

    def _at(self) -> str:
        return f"{self._key}/{self._read}"

    def _take(self, found: bytes) -> None:
        # Whoever wrote it had read all that was written before, so it can be taken as it stands.
        self._read += 1
        rank, failure = json.loads(found)
        if failure is None:
            self.standing = {each: self.standing[each] for each in self.standing if each != rank}
        else:
            self.standing = {**self.standing, rank: Failure(**failure)}


# `Watcher`: what a rank does about failures, its own and those that it reads of.

_WAITS_S = 1.5  # a wait that was noted longer ago has ended
_FRAMES = 12  # of the main thread, the innermost first
_IDLE_S = 0.25  # a wait that long without progress asks whether it can still end
_GRACE_S = 5.0  # after which groups on a device are aborted if their rank has not heard why
_LEARN_S = 1.0  # how long a collective that failed waits to learn which rank was the cause


def main_thread() -> list[str]:
    """The frames of the main thread of this process, the innermost first.

    It may run meanwhile, but not in the instant that it takes to walk a few frames.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    stack = [(each.f_code, line) for each, line in islice(traceback.walk_stack(frame), _FRAMES)]
    return [f"{os.path.basename(x.co_filename)}:{line} in {x.co_name}" for x, line in stack]


class Watcher(Watch):
    """What one rank asks and tells of failures in some groups.

    Args:
      state: of the groups.
      monitor: what reads and writes the journal.
    """

    def __init__(self, state: GroupState, monitor: Any) -> None:
        super().__init__(state)
        self._monitor = monitor
        self.journal = Journal("")
        self.idle_s = 0.0  # without a call, by the ticks of the monitor
        self._waited = 0.0  # when this rank was in a wait for others last
        self._facts: Mapping[str, Any] = {}
        self._written, self._warned = "", False  # of a rank that makes no call
        self.announced: Failure | None = None  # what this rank said of itself, and stands
        self._raised = deque[Failure](maxlen=64)  # the last ones; other ranks may be behind
        self._failed_s = 0.0  # seconds since a rank failed; counted only on an accelerator

    def begin(self, meeting: Meeting) -> None:
        """Begin to read the journal, as all have met."""
        self.journal = Journal(meeting.key)
        super().begin(meeting)
        self._monitor.begin(self.state)

    def check(
        self,
        stuck: Sequence[Stuck] = (),
        idle_s: float = _IDLE_S,
        missing: Sequence[int] = (),
        *,
        made: bool = False,
    ) -> None:
        """Raise if a rank has failed without which a wait cannot end; see [Note: no torn step].

        Args:
          stuck: calls that have to be done.
          idle_s: for how long there was no progress.
          missing: ranks that are waited for, whatever they have called.
          made: whether `stuck` waits for calls, and not until these are issued.

        Raises:
          PeerFailed: another rank failed.
          DesyncError: ranks have told why they fail.
        """
        state = self.state
        if stuck or missing:
            self._waited = time.monotonic()
        # A job without its store is over, and its launcher may be gone with it.
        if not state.standing or (idle_s < _IDLE_S and None not in state.standing):
            return
        for failure in list(state.standing.values()):
            if failure.rank == state.rank and not failure.final:
                continue  # the next call withdraws it
            lacks = failure.lacks(stuck, missing, made=made) and not self._shares(failure)
            if lacks or idle_s > state.heartbeat_s:
                self._give_up(failure, stuck[0].text if stuck else "")

    def _shares(self, failure: Failure) -> bool:
        """Return whether this rank raised the same error, so that the other one may continue.

        Both have made equally many calls on each communicator that both are in.
        """
        if failure.final or not self._raised:
            return False
        theirs, mine = failure.made or {}, [each.made or {} for each in self._raised]
        return {failure.kind, self._raised[-1].kind} == {"interrupted"} or any(
            all(theirs[key] == made[key] for key in made if key in theirs) for made in mine
        )

    def _give_up(self, failure: Failure, waits: str) -> None:
        """Raise the error of a failure, unless it was withdrawn meanwhile."""
        if self.state.failed is None:
            self.state.channel.raise_reported()
        if not failure.final and not self._make_final(failure):
            return
        raise self.state.finish(self.first(failure).error(waits))

    def _make_final(self, failure: Failure) -> bool:
        """Make a failure final; returns False if it was withdrawn before."""
        return self._monitor.bounded(partial(self.journal.make_final, rank=failure.rank), True)

    def timeout_error(self, error: Exception, stuck: Sequence[Stuck] = ()) -> Exception:
        """The error of a wait beyond `timeout_s`: of the rank that is behind, if one is known.

        Args:
          error: to raise if none is.
          stuck: what this rank waits for; by default all that it has called.
        """
        failure = self._behind(self.state.channel.store)
        if failure is None:
            self.state.fail(error)
            return error
        self._report(failure)
        return self.state.finish(failure.error(stuck[0].text if stuck else ""))

    def first(self, failure: Failure) -> Failure:
        """Return the first of the failures that led to this one."""
        seen, standing = set[int | None](), self.state.standing
        while failure.because is not None and failure.rank not in seen:
            seen.add(failure.rank)
            failure = standing.get(failure.because if failure.because >= 0 else None, failure)
        return failure

    def explained(self, error: Exception, *, wait: bool, call: Stuck | None = None) -> Exception:
        """The error of a collective that failed: of the rank that caused it, if that is known.

        Args:
          error: to raise if it is not known.
          wait: whether to wait for up to a second to learn of it; longer while some rank gives no
            sign, of which `heartbeat_s` will tell.
          call: what failed; some rank may have closed its groups without a part in it.
        """
        state, began = self.state, time.monotonic()
        deadline = began + _LEARN_S * wait
        try:
            state.channel.raise_reported()
        except errors.MicsError as reported:
            return reported
        while not state.closed:
            failure = next((each for each in state.standing.values() if each.final), None)
            if failure is not None:
                error = self.first(failure).error(str(error).partition("\n")[0])
                break
            silent, now = wait and self._monitor.listen(state.ranks), time.monotonic()
            if now > deadline and not (silent and now < began + state.heartbeat_s + _LEARN_S):
                error = (None if call is None else state.channel.without(call)) or error
                break
            time.sleep(0.02)
        return self.state.finish(error)

    def announce(self, error: BaseException, *, final: bool, kind: str = "") -> None:
        """Tell the other ranks of an error of this one.

        Args:
          error: the error.
          final: whether these groups are finished; else the next call on them withdraws it.
          kind: of the failure; "" by the type of the error.
        """
        if self.announced is not None and self.announced.final:
            return
        self.announced = failure_of(error, self.state, final, kind)
        self.state.channel.raised = not final
        self._raised.append(self.announced)
        self._report(self.announced)

    def _report(self, failure: Failure) -> None:
        if self.state.key:
            self._monitor.say(partial(self.journal.say, failure=failure))

    def retract(self) -> errors.PeerFailed | None:
        """Withdraw what this rank has announced; the error if another one has given up by then."""
        announced = self.announced
        if announced is None or announced.final:
            return None
        if self._monitor.bounded(partial(self.journal.withdraw, rank=self.state.rank), True):
            self.announced, self.state.standing = None, self.journal.standing
            return None
        self.announced = replace(announced, final=True)
        error = announced.error("")
        self.state.fail(error)
        return error

    def stands(self) -> bool:
        """Whether other ranks were told of an error that was not withdrawn; then it is final."""
        if self.announced is not None:
            self._make_final(self.announced)
        return self.announced is not None

    def close(self) -> None:
        """End the watch, as this rank closes the groups."""
        self._monitor.close(self.state)

    # What the monitor calls at each tick.

    def pass_time(self, passed_s: float) -> None:
        """Count the time without a call, and end waits of a host for its device."""
        facts = facts_of(self.state)
        same = facts == self._facts
        self.idle_s = self.idle_s + passed_s if same else 0.0
        self._facts, self._warned = facts, self._warned and same
        self._end_blocked_waits(passed_s)

    def read(self, store: Any, *, changed: bool) -> None:
        """Read what is new in the store, and write where this rank is if others may wait for it.

        Args:
          store: of the monitor.
          changed: whether there is news.
        """
        state = self.state
        if changed and state.key:
            self.journal.read(store)
            state.standing = self.journal.standing
        for listener in list(state.listeners):
            listener(store)
        if state.key and not state.closed:
            self._write_idle(store)
            overdue = self._overdue(store)
            if overdue is not None:
                self.say(overdue, store)

    def say(self, failure: Failure, store: Any) -> None:
        """Tell all ranks of a failure that this one has found, unless that rank left in order."""
        if not store.check([departure_of(self.state.key, failure.rank)]):
            self.journal.say(store, failure)
        self.state.standing = self.journal.standing

    def _write_idle(self, store: Any) -> None:
        """Write where this rank is if that is of interest, and warn of one that is behind."""
        state = self.state
        limit_s = min(state.heartbeat_s, state.timeout_s / 2)
        text = self._idle_text() if self.idle_s > limit_s else ""
        if text != self._written:
            self._written = text
            store.set(f"{state.key}/idle/{state.rank}", text)
        if self._warned or self.idle_s < limit_s + 4 * interval_s(len(state.ranks)):
            return
        self._warned = True
        failure = self._behind(store)
        if failure and state.rank == next(rank for rank in state.ranks if rank != failure.rank):
            text = f"{failure.text}; others wait for it up to timeout_s={state.timeout_s:g}"
            LOG.warning(errors.message(text, [failure.trace.replace("\n", " < ")]))

    def _idle_text(self) -> str:
        """Whether this rank waits for others, and the failure that it is if it does not."""
        rank, frames = self.state.rank, main_thread()
        at = " < ".join(frames[:3])
        text = f"rank {rank} is behind: it lives, but makes no call; it is at {at}"
        failure = Failure(rank, "stalled", text, trace="\n".join(frames), **self._facts)
        return json.dumps([time.monotonic() - self._waited < _WAITS_S, asdict(failure)])

    def _behind(self, store: Any) -> Failure | None:
        """The failure of the rank that others wait for, if that makes no call."""
        state, most, idle = self.state, Counter[str](self._facts.get("made")), list[Failure]()
        for rank in state.ranks:
            text = value_of(store, f"{state.key}/idle/{rank}")  # none while it makes calls
            waits, said = json.loads(text or "[true, null]")
            most |= Counter(said and said["made"])
            if not waits and rank != state.rank:
                idle.append(Failure(**said))
        # What is counted under a key are the calls of a communicator, and all of these are in it.
        found = [x for x in idle if any(most[key] > n for key, n in (x.issued or {}).items())]
        return min(found, key=lambda each: sum((each.made or {}).values()), default=None)

    def _overdue(self, store: Any) -> Failure | None:
        """The rank that is behind, if this one's device has waited for `timeout_s`.

        If none is, the groups have failed: a host that waits for a device finds that out nowhere.
        """
        state = self.state
        waits = state.on_device and self.idle_s > state.timeout_s and state.failed is None
        if not waits or state.ready is None or state.ready.query():
            return None
        failure = self._behind(store)
        if failure is None:
            text = f"the device of rank {state.rank} waits for a collective for "
            state.fail(errors.CollectiveError(f"{text}{state.timeout_s:g} s"), raised=False)
            state.abort()
        return failure

    def _end_blocked_waits(self, passed_s: float) -> None:
        """Abort the groups of an accelerator once a rank, or a collective, has failed.

        A host that waits for a device is in C++, and hears nothing until collectives there end.
        Those in flight have `_GRACE_S` to end by themselves.

        Args:
          passed_s: since this was called last.
        """
        state = self.state
        if not state.on_device or state.aborted or not state.key:
            return
        if state.failed is None and not any(each.final for each in state.standing.values()):
            self._failed_s = 0.0
            return
        self._failed_s += passed_s
        if self._failed_s > _GRACE_S:
            if state.failed is None:
                failure = self.first(next(iter(state.standing.values())))
                state.fail(failure.error("a result of its device"), raised=False)
            state.abort()

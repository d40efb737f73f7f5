"""What ranks write in the store for each other: news, errors, stalls, and that they left.

[Note: news] A rank that tells something writes it under a key of its own, and then adds one to a
counter that the whole job shares. So whoever looks reads this counter, and the rest only if it has
changed: while nobody tells anything a look is one call to the store, whatever the number of ranks.
A reader reads the counter first, so what is told meanwhile changes it once more. Whether news
matters depends on what the reader itself does later, so it keeps what it has read.

[Note: waiting in two places] A rank that waits makes no call until what it waits for is done. So if
B has not made one of the calls that A waits for, and A not one of those that B waits for, then
neither can ever proceed, and both can raise long before the timeout. An outdated note does no harm:
for A to have proceeded since it wrote its note, B would have had to make its call first, and B,
which reads the note, knows that it has not. A rank that waits for some time writes a note of what
it waits for, and reads those of a few ranks that take part in it.

[Note: told to all] An error that some ranks find is raised by all of them, since the others would
wait for these sooner or later. A rank that cannot go on writes its error as the trouble of the
groups, which are finished then. But ranks that compare something by collectives raise together, and
may go on if their program catches the error. If they are only a part of the groups, they tell the
others what they refused, and withdraw it with their next call. Until then the others raise it when
they look, except those that refuse something themselves at that time.

[Note: ranks that have left] A rank that closes its groups issues no more collectives. If others
still wait for one that it has issued, they get it; but for one that it has not, they would wait
until the timeout. So a rank that leaves writes down, in one entry, how many it has issued over each
communicator, and a rank that waits without progress compares. The last rank that leaves deletes all
that the groups have written in the store, for then nobody reads it any more.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn

from mics_fn.errors import DesyncError, GroupsError, MicsError, disagreement
from mics_fn.store import Store, later

# Find out whether two ranks wait for each other in different collectives.

_MOST = 8  # notes that a rank reads: in a large group all ranks may wait, with one store for all


class Stuck(NamedTuple):
    """A call over one communicator that this rank made, and that is not done."""

    group: str  # the key of the communicator's `Calls`, which is the same on all of its ranks
    number: int  # of the call, counted from 1 on in its communicator
    ranks: tuple[int, ...]
    text: str


def deadlocked(
    mine: Sequence[Stuck], issued: Mapping[str, int], note: Mapping[str, Any], rank: int, own: int
) -> bool:
    """Whether neither this rank nor another one that waits can ever proceed.

    Args:
      mine: the calls all of which must be done before this rank goes on.
      issued: number of calls that it made, by communicator.
      note: the `note_of` the other rank.
      rank: the other rank.
      own: this rank.

    Example:
      >>> mine, theirs = Stuck("a", 3, (0, 1), "reduce"), Stuck("b", 5, (0, 1), "gather")
      >>> deadlocked([mine], {"a": 3, "b": 4}, note_of([theirs], {"a": 2, "b": 5}, "there"), 1, 0)
      True
      >>> deadlocked([mine], {"a": 3, "b": 5}, note_of([theirs], {"a": 2, "b": 5}, "there"), 1, 0)
      False
      >>> theirs = Stuck("c", 5, (1, 2), "gather of others")
      >>> deadlocked([mine], {"a": 3}, note_of([theirs], {"a": 2, "c": 5}, "there"), 1, 0)
      False
    """
    lacks_theirs = [
        rank in stuck.ranks and note["issued"].get(stuck.group, 0) < stuck.number for stuck in mine
    ]
    lacks_mine = [
        own in ranks and issued.get(group, 0) < number for group, number, ranks in note["stuck"]
    ]
    return any(lacks_theirs) and any(lacks_mine)


def note_of(mine: Sequence[Stuck], issued: Mapping[str, int], text: str) -> dict[str, Any]:
    """What a rank that waits writes down for the others, ready for JSON."""
    stuck = [(stuck.group, stuck.number, stuck.ranks) for stuck in mine]
    return {"stuck": stuck, "issued": dict(issued), "text": text}


def neighbours(rank: int, mine: Sequence[Stuck]) -> list[int]:
    """The ranks whose notes to read: those that follow this rank in what it waits for.

    >>> neighbours(2, [Stuck("a", 1, (0, 1, 2, 3), "")])
    [3, 0, 1]
    """
    found: dict[int, None] = {}
    for stuck in mine:
        at = stuck.ranks.index(rank) + 1
        found.update(dict.fromkeys((stuck.ranks[at:] + stuck.ranks)[:_MOST]))
    return [other for other in found if other != rank][:_MOST]


# `JobMessages`: what all ranks of the groups, those of every replica, tell each other.

CHANGES = "mics_fn/news"  # the key of the counter; see [Note: news]
LEFT = "left its groups by an error"  # an error that it has already told the others
_RESET = "called reset"


class JobMessages:
    """Messages between all ranks of the groups; without a store, those of a single rank.

    Args:
      store: shared by all ranks.
      key: prefix of its keys, which no other groups of this job use.
      rank: this rank.
      size: number of ranks of the groups.
    """

    def __init__(
        self, store: Store | None = None, key: str = "", rank: int = 0, size: int = 1
    ) -> None:
        self.store, self.key, self.rank, self.size = store, key, rank, size
        self.calls: list[Any] = []  # the `Calls` of each communicator that this rank is in
        # `refusing`: this rank raised an error together with others, and has made no call since.
        # `raised`: the same, or an error of its own.
        self.refusing = self.raised = False
        self.withdraw: Callable[[], None] = lambda: None  # takes back an error of its own
        # Raises if a rank has failed without which a wait cannot end; the error of a wait that took
        # too long; and notes why groups failed: all three of the groups' `GroupState`.
        self.check: Callable[..., None] = lambda *args, **kwargs: None
        self.timeout_error: Callable[..., Exception] = lambda error, stuck=(): error
        self.fail: Callable[[BaseException], None] = lambda error: None
        # What to raise instead, if some rank has failed and that was the cause.
        self.explain: Callable[..., Exception] = lambda error, *, wait: error
        self.kept = ""  # a key that outlives the groups
        self._trouble, self._refused = f"{key}/all/trouble", f"{key}/all/refused"
        self._read = self._seen = 0  # news
        self._departures = f"{key}/gone"
        self._notes: dict[int, tuple[str, Mapping[str, int]]] = {}  # of ranks that left, by rank
        self._tidy: Callable[[], None] = lambda: None
        self._any_departed = self._departed_here = False  # any rank, and this one

    def mark_changed(self) -> None:
        """Say that this rank has written something."""
        if self.store is not None:
            self.store.add(CHANGES, 1)

    def any_changes(self) -> bool:
        """Return whether there are messages that `mark_seen` has not marked."""
        if self.store is not None:
            self._read = self.store.add(CHANGES, 0)
        return self._read != self._seen

    def mark_seen(self) -> None:
        """Mark as seen what `any_changes` found; only once all of it was read without an error."""
        self._seen = self._read

    def report(self, text: str) -> None:
        """Make all ranks of the groups raise this error at their next poll."""
        if self.store is not None:
            self.store.compare_set(self._trouble, "", text)
            self.mark_changed()

    def refuse(self, text: str) -> None:
        """Make the other ranks raise an error that this rank and some others raise now."""
        if self.store is not None:
            self.refusing = self.raised = True
            self.store.compare_set(self._refused, "", text)
            self.mark_changed()

    def go_on(self) -> None:
        """Withdraw this rank's refusal or error."""
        if self.store is not None and self.refusing:
            self.refusing = False
            self.store.set(self._refused, "")
        self.withdraw()
        self.raised = False

    def raise_reported(self) -> None:
        """Raise the error that another rank reported, in this replica or another."""
        for key in (self._trouble, *([] if self.refusing else [self._refused])):
            if self.store is not None and self.store.check([key]):
                text = self.store.get(key).decode()
                if text:
                    error = DesyncError(text)
                    if key == self._trouble:
                        self.fail(error)
                    raise error

    def raise_everywhere(self, what: str, texts: Mapping[int, str], fix: str) -> NoReturn:
        """Raise, here and on the other ranks, that ranks did different things."""
        error = disagreement(what, texts, fix)
        self.report(str(error))
        self.raise_reported()
        raise error

    # Ranks that make no more calls, since they closed or reset these groups.

    def depart(self, how: str) -> Callable[[], None]:
        """Say that this rank makes no more calls; a second call has no effect.

        Args:
          how: what it did, for errors of others.

        Returns:
          What deletes all entries of the groups, if this is the last rank; it may take a while.
        """
        if self.store is None or self._departed_here:
            return self._tidy
        self._departed_here = True
        issued = {calls.key: calls.issued for calls in self.calls}
        self.calls.clear()  # these refer to the channel, and it to them
        try:
            self.store.set(f"{self._departures}/{self.rank}", json.dumps([how, issued]))
            if self.store.add(self._departures, 1) == self.size:
                self._tidy = self._delete_all
            else:
                self.mark_changed()
        except (MicsError, RuntimeError):  # the store is gone, with all that is in it
            pass
        return self._tidy

    def _delete_all(self) -> None:
        store: Any = self.store
        with suppress(RuntimeError, NotImplementedError):
            for key in store.list_keys():
                if key.startswith(f"{self.key}/") and key != self.kept:
                    later(store, "delete_key", key)

    def read_departures(self) -> None:
        """Read whether any rank has left."""
        self._any_departed = self.store is not None and self.store.add(self._departures, 0) > 0

    def check_departed(self, call: Stuck) -> None:
        """Raise GroupsError if a rank has left without its part of a call that this one waits for.

        Args:
          call: the call.
        """
        error = self._departed(call) if self._any_departed else None
        if error is not None:  # a rank that resets its groups does so because of another error
            raise self.explain(error, wait=_RESET in f"{error}")

    def closed(self, call: Stuck) -> GroupsError | None:
        """The error of a rank that closed its groups in order, if one did so without its part."""
        error = self._departed(call)
        return None if error is None or _RESET in f"{error}" else error

    def _departed(self, call: Stuck) -> GroupsError | None:
        for rank in call.ranks:
            how, issued = self._note_of(rank)
            if how not in ("", LEFT) and issued.get(call.group, 0) < call.number:
                lines = [f"rank {self.rank}: waits for {call.text}"]
                fix = "call the same verbs on all ranks before any of them closes its groups"
                if how == _RESET:
                    fix = "call groups = mics_fn.reset(groups), or trainer.reset(), on all ranks"
                what = f"a call that rank {rank} will not make, since it {how}"
                return GroupsError(what, lines, fix)
        return None

    def _note_of(self, rank: int) -> tuple[str, Mapping[str, int]]:
        store, key = self.store, f"{self._departures}/{rank}"
        if rank not in self._notes and store is not None and store.check([key]):
            how, issued = json.loads(store.get(key))
            self._notes[rank] = how, issued
        return self._notes.get(rank, ("", {}))

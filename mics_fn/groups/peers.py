"""`Failure`: what is known of a rank that failed; the `Journal` in which all ranks read of it.

[Note: the journal] The first failure wins, an exception that is caught may be withdrawn, and a rank
that waits may have given up before that. All ranks must come to the same end, so what they say is
one list in the store: each entry is appended by `compare_set` at the first free number, so a writer
has read all that was written before it. What comes first counts: a withdrawal after some rank gave
up is void, and so is giving up after a withdrawal.

[Note: no torn step] A rank that raised in step k + 1 has finished step k, which a slower rank may
still be in: it must finish it too. So a rank says how many collectives it had issued on each
communicator, and others go on waiting for one that it did issue. A rank that gives up says the same
of itself, so that those who wait for it give up as well.
"""

import json
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from mics_fn.errors import OffloadError, PeerFailed, PeerOffloadError, message
from mics_fn.groups.clerk import StoreLost
from mics_fn.schedules import NEWS, Stuck

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
    stored: list[str] | None = None  # of an `OffloadError`: file, leaf, and more of its text

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
        return any(
            self.rank in each.ranks and counts.get(each.group, 0) < each.number for each in stuck
        )

    def error(self, waits: str, *, ends: bool = True) -> PeerFailed:
        """The error of a rank that waits for it; `ends` says whether it ends their groups."""
        at = "" if self.step is None else f"in step {self.step}"
        last = f"its last call: {self.operation}" if self.operation else ""
        own = f"this rank waits for {waits}" if waits else ""
        path, leaf, *said = self.stored or ["", ""]
        where = [*said[:-1], ", ".join(part for part in (at, last) if part), own]
        fix = "look at its own error, then call groups = mf.reset(groups) on all ranks"
        if self.kind in ("killed", "exited", "silent"):
            fix = "look at its own output; start it again, and call mf.reset(groups) or"
            fix += " trainer.reset() on all ranks; or start the job again"
        if self.kind == "stalled":
            fix = (
                "look what it does there, pass a larger timeout_s= if it may take so long, and call"
            )
            fix += " groups = mf.reset(groups) on all ranks"
        if said:
            also = "; then call groups = mf.reset(groups) on all ranks" if ends else ""
            fix = f"{said[-1]}{also}"
        found = PeerFailed(
            message(self.text, [line for line in where if line], fix),
            self.rank,
            self.kind,
            step=self.step,
            operation=self.operation or waits,
            leaf=self.leaf,
            remote_traceback=self.trace,
        )
        return PeerOffloadError(found, path, leaf) if said else found


def without_a_word(rank: int, kind: str) -> Failure:
    """The failure of a rank that could not say so itself."""
    what = "gone: its process ended without a word"
    if kind == "silent":
        what = "silent: it is stopped, cut off, or something holds its interpreter"
    return Failure(rank, kind, f"rank {rank} is {what}")


def of_store(rank: int | None, address: str, lost: StoreLost) -> Failure:
    """The failure of the rank that holds the store, or of the store if no rank does."""
    who = "the store" if rank is None else f"rank {rank}, which holds the store,"
    what = "gives no answer" if lost.silent else f"is gone: {lost}"
    kind = "silent" if lost.silent else "killed"
    return Failure(rank, kind, f"{who}{' at ' if address else ''}{address} {what}")


def failure_of(error: BaseException, rank: int, **known: Any) -> Failure:
    """What this rank says of its own error."""
    first = f"{type(error).__name__}: {error}".partition("\n")[0][:_MOST_TEXT]
    kind = "interrupted" if isinstance(error, KeyboardInterrupt) else "raised"
    trace = "".join(traceback.format_exception(error))[-_MOST_TRACE:]
    because = None
    if isinstance(error, PeerFailed):
        because = -1 if error.rank is None else error.rank
    stored = None
    if isinstance(error, OffloadError):
        said = [line.strip().removeprefix("fix: ") for line in str(error).split("\n")[1:]]
        stored = [error.path, error.leaf, *said]
    return Failure(rank, kind, first, trace=trace, because=because, stored=stored, **known)


class Journal:
    """What has been said of failures by the ranks of some groups; see [Note: the journal].

    Only the clerk calls what takes a store.

    Args:
      key: prefix of its keys, which no other groups of the job use.
    """

    def __init__(self, key: str) -> None:
        self._key = f"{key}/failed"
        self._read = 0  # entries read
        self.standing: dict[int | None, Failure] = {}  # by rank, in the order of the entries

    def read(self, store: Any) -> None:
        """Read what is new."""
        while store.check([self._at()]):
            self._take(store.get(self._at()))

    def say(self, store: Any, failure: Failure) -> bool:
        """Append a failure, unless the same stands; returns whether it was appended."""
        self.read(store)
        while (known := self.standing.get(failure.rank)) is None or not known.final:
            if known is not None and not failure.final:
                return False
            if self._append(store, {"fails": asdict(failure)}):
                return True
        return False

    def withdraw(self, store: Any, rank: int) -> bool:
        """Withdraw what a rank said of itself; False if another rank has given up because of it."""
        self.read(store)
        while (known := self.standing.get(rank)) is not None:
            if known.final:
                return False
            self._append(store, {"withdraws": rank})
        return True

    def settle(self, store: Any, rank: int | None) -> bool:
        """Make a failure final; False if it was withdrawn before."""
        self.read(store)
        while (known := self.standing.get(rank)) is not None:
            if known.final:
                return True
            self._append(store, {"settles": rank})
        return False

    def _at(self) -> str:
        return f"{self._key}/{self._read}"

    def _append(self, store: Any, entry: dict[str, Any]) -> bool:
        mine = json.dumps(entry)
        found = store.compare_set(self._at(), "", mine)
        self._take(found)
        return found.decode() == mine

    def _take(self, found: bytes) -> None:
        self._read += 1
        # Whoever wrote it had read all that was written before, so it can be taken as it stands.
        entry, standing = json.loads(found), dict(self.standing)
        if "withdraws" in entry:
            del standing[entry["withdraws"]]
        elif "settles" in entry:
            standing[entry["settles"]] = replace(standing[entry["settles"]], final=True)
        else:
            failure = Failure(**entry["fails"])
            first = standing.get(failure.rank, failure)  # it may have said why before
            standing[failure.rank] = replace(
                first,
                final=failure.final,
                made=failure.made or first.made,
                issued=failure.issued or first.issued,
            )
        self.standing = standing


def said_to_all(journal: Journal, store: Any, failure: Failure) -> None:
    """Append a failure, and have all ranks read it."""
    if journal.say(store, failure):
        store.add(NEWS, 1)


def withdrawn(journal: Journal, store: Any, rank: int) -> bool:
    """`Journal.withdraw`, and have all ranks read it."""
    try:
        return journal.withdraw(store, rank)
    finally:
        store.add(NEWS, 1)


def same_place(mine: Mapping[str, int], theirs: Mapping[str, int]) -> bool:
    """Whether two ranks have made equally many calls on each communicator that both are in."""
    return all(theirs[key] == made for key, made in mine.items() if key in theirs)

"""Find out whether two ranks wait for each other in different collectives.

[Note: waiting in two places] A rank that waits makes no call until what it waits for is done. So if
B has not made one of the calls that A waits for, and A not one of those that B waits for, then
neither can ever proceed, and both can raise long before the timeout. An outdated note does no harm:
for A to have proceeded since it wrote its note, B would have had to make its call first, and B,
which reads the note, knows that it has not. A rank that waits for some time writes a note of what
it waits for, and reads those of a few ranks that take part in it.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

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

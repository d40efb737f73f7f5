"""Whether two ranks wait for each other, each in a collective that the other did not come to.

[Note: waiting in two places] A rank that waits issues nothing before something that it waits for is
done. So if each thing that A waits for lacks B's part, and each thing that B waits for lacks A's,
neither will ever go on, and that can be said long before the time is up. Old news does no harm: if
A had gone on since it was heard of, B would have had to issue its part before, which B, who looks,
did not. Ranks that wait tell where after a second, and look at a few of those who share it.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

_MOST = 8  # ranks that one looks at: stores serve large groups, and slow links let all wait


class Stuck(NamedTuple):
    """A collective that was issued here and is not over."""

    group: str  # the name of its process group, the same on all of its ranks
    number: int  # of those issued on the group, from 1 on
    ranks: tuple[int, ...]
    text: str


def never(
    mine: Sequence[Stuck], issued: Mapping[str, int], there: Mapping[str, Any], rank: int, own: int
) -> bool:
    """Whether this rank and one that waits elsewhere can neither go on.

    What the other waits for counts only where this rank has a part in it: a collective of others
    may well end.

    Args:
      mine: what this rank waits for.
      issued: what it issued, by group.
      there: the `news` of the other rank.
      rank: that rank.
      own: this rank.

    Example:
      >>> mine, theirs = Stuck("a", 3, (0, 1), "reduce"), Stuck("b", 5, (0, 1), "gather")
      >>> never([mine], {"a": 3, "b": 4}, news([theirs], {"a": 2, "b": 5}, "there"), 1, 0)
      True
      >>> never([mine], {"a": 3, "b": 5}, news([theirs], {"a": 2, "b": 5}, "there"), 1, 0)
      False
      >>> theirs = Stuck("c", 5, (1, 2), "gather of others")
      >>> never([mine], {"a": 3}, news([theirs], {"a": 2, "c": 5}, "there"), 1, 0)
      False
    """
    lacks_theirs = [
        rank in stuck.ranks and there["issued"].get(stuck.group, 0) < stuck.number for stuck in mine
    ]
    lacks_mine = [
        own in ranks and issued.get(group, 0) < number for group, number, ranks in there["stuck"]
    ]
    return bool(mine) and all(lacks_theirs) and bool(lacks_mine) and all(lacks_mine)


def news(mine: Sequence[Stuck], issued: Mapping[str, int], text: str) -> dict[str, Any]:
    """What a rank that waits tells the others, for JSON."""
    stuck = [(stuck.group, stuck.number, stuck.ranks) for stuck in mine]
    return {"stuck": stuck, "issued": dict(issued), "text": text}


def next_to(rank: int, mine: Sequence[Stuck]) -> list[int]:
    """The ranks to look at: those that follow this one in what it waits for.

    >>> next_to(2, [Stuck("a", 1, (0, 1, 2, 3), "")])
    [3, 0, 1]
    """
    found: dict[int, None] = {}
    for stuck in mine:
        at = stuck.ranks.index(rank) + 1
        found.update(dict.fromkeys((stuck.ranks[at:] + stuck.ranks)[:_MOST]))
    return [other for other in found if other != rank][:_MOST]

"""`chosen`: which ranks go on after a fault, of those that are there; pure arithmetic.

[Note: who goes on] Only whole partition groups can go on, and only so many of them as divide the
number r of replicas, so that each takes equally many shares of a step: with r = 4 and one group
lost, two go on and the third waits. Those that hold most of the newest state come first; parts that
only others hold would be lost, so then nobody goes on until more ranks are there.
"""

from collections.abc import Mapping, Sequence

Far = tuple[int, int]  # the round whose state a rank holds, -1 for none, and how many calls


def chosen(far: Mapping[int, Far], partition_size: int, num_replicas: int) -> list[int]:
    """The positions that go on, ascending; none if more have to be there first.

    Args:
      far: how far the ranks have come that are there, by position.
      partition_size: number p of ranks that share one replica.
      num_replicas: number r of replicas of the whole job.

    >>> chosen({0: (0, 5), 1: (0, 5), 2: (0, 5)}, 1, 4)  # two of three: they divide 4
    [0, 1]
    >>> chosen({0: (-1, 0), 1: (0, 5), 2: (0, 5), 3: (-1, 0)}, 2, 2)  # a part of each is new
    [0, 1, 2, 3]
    >>> chosen({0: (-1, 0), 1: (0, 5), 2: (0, 5)}, 2, 2)  # part 0 is with rank 2, which is alone
    []
    """
    p, r = partition_size, num_replicas
    newest = max(far.values(), default=(-1, 0))
    holds = {i // p: _places(far, newest, i // p, p) for i in far}
    whole = [group for group in holds if all(group * p + i in far for i in range(p))]
    wanted = set[int]().union(*holds.values())
    for count in (count for count in range(len(whole), 0, -1) if r % count == 0):
        groups = _covering(count, {group: holds[group] for group in sorted(whole)})
        if wanted <= set[int]().union(*(holds[group] for group in groups)):
            return [group * p + i for group in sorted(groups) for i in range(p)]
    return []


def _places(far: Mapping[int, Far], newest: Far, group: int, p: int) -> set[int]:
    """The parts of the newest state that a partition group holds."""
    return {i for i in range(p) if far.get(group * p + i) == newest}


def _covering(count: int, holds: Mapping[int, set[int]]) -> Sequence[int]:
    """So many groups, each of which adds most to the parts that those before it hold."""
    found, have = list[int](), set[int]()
    for _ in range(count):
        left = [group for group in holds if group not in found]
        best = max(left, key=lambda group: (len(holds[group] - have), len(holds[group]), -group))
        found.append(best)
        have |= holds[best]
    return found

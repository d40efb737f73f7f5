"""Which parts of a file are free, against a set of pages."""

from hypothesis import example, given
from hypothesis import strategies as st

from mics_fn.offload.scratch import PAGE, Space


@example([(True, 2), (True, 1), (False, 0), (True, 1), (True, 1)])  # the rest of a freed part
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 6))))
def test_parts_never_overlap(calls: list[tuple[bool, int]]):
    space, taken = Space(), list[tuple[int, int]]()
    used: set[int] = set()
    for takes, number in calls:
        if takes:
            offset = space.take(number * PAGE)
            pages = {offset // PAGE + i for i in range(number)}
            assert not pages & used
            used |= pages
            taken.append((offset, number * PAGE))
        elif taken:
            offset, nbytes = taken.pop(number % len(taken))
            used -= {offset // PAGE + i for i in range(nbytes // PAGE)}
            space.give(offset, nbytes)
        assert space.used == PAGE * len(used)
        assert space.end == PAGE * (max(used, default=-1) + 1)

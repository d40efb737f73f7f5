"""Who goes on without lost ranks, against all that could: whole groups, which hold all parts."""

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from mics_fn.groups.choosing import chosen


@given(st.data(), st.integers(1, 3), st.integers(1, 6))
def test_as_many_whole_groups_as_possible_that_hold_all_parts(data, p, r):
    far = st.tuples(st.integers(-1, 2), st.integers(0, 3))
    here = data.draw(st.dictionaries(st.integers(0, p * r - 1), far, min_size=1))
    newest = max(here.values())
    parts = {i % p for i in here if here[i] == newest}
    whole = [g for g in range(r) if all(g * p + i in here for i in range(p))]

    def good(groups):
        members = [g * p + i for g in groups for i in range(p)]
        return parts <= {i % p for i in members if here[i] == newest}

    sizes = [n for n in range(1, len(whole) + 1) if r % n == 0]
    most = max((n for n in sizes if any(map(good, combinations(whole, n)))), default=0)
    found = chosen(here, p, r)
    groups = sorted({i // p for i in found})
    assert found == [g * p + i for g in groups for i in range(p)]
    assert set(groups) <= set(whole)
    assert len(groups) == 0 or good(groups)
    # Groups are taken one by one, which may need one group more than the fewest that hold all.
    assert len(groups) <= most
    if p < 3:
        assert len(groups) == most


def test_all_that_are_there_and_a_divisor_of_them():
    alike = (0, 4)
    assert chosen(dict.fromkeys(range(8), alike), 2, 4) == list(range(8))
    assert chosen(dict.fromkeys(range(6), alike), 2, 4) == [0, 1, 2, 3]
    assert chosen(dict.fromkeys(range(2, 6), alike), 2, 3) == [2, 3]
    assert chosen(dict.fromkeys(range(5), alike), 1, 6) == [0, 1, 2]
    assert chosen({1: alike, 2: alike}, 2, 2) == []
    assert chosen({}, 1, 2) == []


def test_those_that_hold_the_newest_state_come_first():
    old, new, none = (1, 9), (2, 3), (-1, 0)
    assert chosen({0: none, 1: old, 2: new}, 1, 5) == [2]
    assert chosen({0: none, 1: none, 2: old, 3: new, 4: new, 5: new}, 2, 5) == [4, 5]

"""What the short suite keeps of a cross product has every value, and what is named together."""

from itertools import combinations, product
from typing import Any

import pytest
from covering import covering, mark_the_rest
from hypothesis import given
from hypothesis import strategies as st

sizes = st.lists(st.integers(1, 5), min_size=1, max_size=4)


@given(sizes, st.data())
def test_every_value_stays_and_what_is_named_meets_in_every_way(counts: list[int], data):
    names = [f"p{i}." for i in range(len(counts))]
    cases = [
        dict(zip(names, values, strict=True)) for values in product(*(range(n) for n in counts))
    ]
    together = data.draw(st.lists(st.sampled_from(names), unique=True))
    worth = data.draw(st.lists(st.integers(-1, 1), min_size=len(cases), max_size=len(cases)))
    kept = [cases[i] for i in covering(cases, [name[:-1] for name in together], worth)]
    for name, count in zip(names, counts, strict=True):
        assert {case[name] for case in kept} == set(range(count))
    met = {tuple(case[name] for name in together) for case in kept}
    assert met == {tuple(case[name] for name in together) for case in cases}


@given(sizes, st.integers(2, 3))
def test_values_meet_in_every_way(counts: list[int], meeting: int):
    meeting = min(meeting, len(counts))
    names = [f"p{i}." for i in range(len(counts))]
    cases = [
        dict(zip(names, values, strict=True)) for values in product(*(range(n) for n in counts))
    ]
    kept = covering(cases, meeting=meeting)

    def met(places) -> set:
        return {each for i in places for each in combinations(cases[i].items(), meeting)}

    assert met(kept) == met(range(len(cases)))


def test_three_values_meet_in_far_fewer_cases():
    cases = [{f"p{i}.": v for i, v in enumerate(x)} for x in product(range(4), repeat=5)]
    assert len(covering(cases, meeting=3)) < len(cases) // 6


def test_what_is_worth_little_is_kept_for_its_own_sake_alone():
    """A layout that cuts nothing is there once, and no model is seen on that alone."""
    cases = [{"model.": m, "ranks.": n} for m in "abcd" for n in (1, 2, 4)]
    kept = [cases[i] for i in covering(cases, worth=[-(case["ranks."] == 1) for case in cases])]
    assert [case["ranks."] for case in kept].count(1) == 1
    assert {case["model."] for case in kept if case["ranks."] > 1} == set("abcd")
    assert len(kept) == 5


class Item:
    """A case of a test, as `mark_the_rest` sees it."""

    def __init__(self, name: str, *marks: Any) -> None:
        self.nodeid, self.callspec, self.own_markers = f"test_it[{name}]", self, list(marks)
        self.id, self.params = name, {"name": name}

    def get_closest_marker(self, name: str) -> Any:
        return next((each.mark for each in self.own_markers if each.name == name), None)

    def add_marker(self, mark: Any) -> None:
        self.own_markers.append(mark)


@pytest.mark.parametrize(("selected", "stay"), [("abcd", "ad"), ("bc", "bc"), ("b", "b")])
def test_short_names_the_cases_that_stay(selected: str, stay: str):
    """Those that somebody selects by their ids run although it does not name them."""
    items: Any = [Item(name, pytest.mark.short("a", "d")) for name in selected]
    mark_the_rest(items)
    assert "".join(x.id for x in items if not x.get_closest_marker("thorough")) == stay


def test_of_what_short_leaves_out_the_thorough_tests_are_those_in_which_values_meet():
    items: Any = []
    for values in product(range(2), repeat=3):
        item: Any = Item("".join(map(str, values)), pytest.mark.short("000"))
        item.params = dict(zip("abc", values, strict=True))
        items.append(item)
    mark_the_rest(items)
    rest = [x for x in items if x.get_closest_marker("exhaustive")]
    thorough = [x for x in items if x.get_closest_marker("thorough")]
    assert len(rest) + len(thorough) == 7
    assert len(rest) > 2
    met = {pair for x in items if x not in rest for pair in combinations(x.params.items(), 2)}
    assert len(met) == 3 * 2 * 2


def test_a_test_has_six_thorough_cases_at_most():
    """Those that were marked so from the start count as well, and every value is among them."""
    items: Any = []
    for a, b in product(range(5), repeat=2):
        item: Any = Item(f"{a}{b}", *[pytest.mark.thorough] * (a > 2), pytest.mark.short("00"))
        item.params = {"a": a, "b": b}
        items.append(item)
    mark_the_rest(items)
    thorough = [x for x in items if x.get_closest_marker("thorough")]
    assert len(thorough) == 6
    assert {x.params["b"] for x in thorough} == set(range(5))
    assert all(x.get_closest_marker("exhaustive") for x in items[1:] if x not in thorough)

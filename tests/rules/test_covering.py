"""What the short suite keeps of a cross product has every value, and what is named together."""

from itertools import product

from covering import covering
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


def test_what_is_worth_little_is_kept_for_its_own_sake_alone():
    """A layout that cuts nothing is there once, and no model is seen on that alone."""
    cases = [{"model.": m, "ranks.": n} for m in "abcd" for n in (1, 2, 4)]
    kept = [cases[i] for i in covering(cases, worth=[-(case["ranks."] == 1) for case in cases])]
    assert [case["ranks."] for case in kept].count(1) == 1
    assert {case["model."] for case in kept if case["ranks."] > 1} == set("abcd")
    assert len(kept) == 5

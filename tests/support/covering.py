"""Which cases of a long cross product the short suite keeps; the others are marked `thorough`.

Most defects need one value of one parameter, or two values that meet (Kuhn, Wallace and Gallo,
Software Fault Interactions and Implications for Software Testing, IEEE TSE 30(6), 2004). So of a
test with `@pytest.mark.covering` few cases stay, in which every value of every parameter occurs.
With names, as in `@pytest.mark.covering("program", "live")`, these also meet in every way. Of a
value that has `features`, such as a layout of ranks, these count as if each were a parameter. Where
two cases serve alike, layouts that cut nothing come last, and values that are named come first, as
in `@pytest.mark.covering(live_bytes=0)`.

`@pytest.mark.short("2x2-p2", ...)` names by their ids the cases of a slow test that stay.

Of what is left, the thorough tests are cases in which any two values meet that do so at all, and of
each test at most six: those that meet first. The rest is marked `exhaustive`.
"""

import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import combinations, groupby
from typing import Any

import pytest
from hypothesis import settings

Case = Mapping[str, Hashable]  # the value of each parameter
_MOST = 6  # thorough cases of a test

_thorough = False  # whether this run is of the thorough tests


def choose(expression: str) -> None:
    """Note which tests pytest's `-m` asks for, before any of them is imported."""
    global _thorough
    _thorough = re.search(r"(?<!not )\bthorough\b", expression) is not None


def examples(few: int, many: int) -> Callable[[Any], Any]:
    """How many examples hypothesis takes in the short suite, and when the test runs as thorough."""

    def decorate(test: Any) -> Any:
        if _thorough:
            return pytest.mark.thorough(settings(max_examples=many)(test))
        return settings(max_examples=few)(test)

    return decorate


def mark_the_rest(items: Iterable[pytest.Item]) -> None:
    """Mark as `thorough` what `covering` leaves out; the cases of one test are neighbours.

    One case that is selected by its name is all there is to cover, so it runs.
    """
    for _, group in groupby(items, key=lambda item: item.nodeid.partition("[")[0]):
        group = list(group)
        cases = [case for case in group if case.get_closest_marker("thorough") is None]
        mark = cases[0].get_closest_marker("covering") if cases else None
        named = cases[0].get_closest_marker("short") if len(cases) > 1 else None
        if mark is not None or named is not None:
            _mark_what_is_left(cases, mark, named)
        _mark_what_is_over(group)


def _mark_what_is_left(cases: Sequence[Any], mark: Any, named: Any) -> None:
    params = [_params(case) for case in cases]
    values = [_values(each) for each in params]
    together, preferred = (mark.args, mark.kwargs) if mark else ((), {})
    worth = [_worth(each, preferred) for each in params]
    kept = _named(cases, named.args) if named else covering(values, together, worth)
    some = covering(values, worth=worth, meeting=2)
    for place in set(range(len(cases))) - kept:
        cases[place].add_marker(pytest.mark.thorough if place in some else pytest.mark.exhaustive)


def _mark_what_is_over(cases: Sequence[Any]) -> None:
    """Of more thorough cases of a test than six, mark the others as exhaustive."""
    cases = [case for case in cases if any(mark.name == "thorough" for mark in case.own_markers)]
    if len(cases) <= _MOST:
        return
    params = [_params(case) for case in cases]
    worth = [_worth(each, {}) for each in params]
    kept = covering([_values(each) for each in params], worth=worth, meeting=2, most=_MOST)
    for place in set(range(len(cases))) - kept:
        own = cases[place].own_markers
        own[:] = [mark for mark in own if mark.name != "thorough"]
        cases[place].add_marker(pytest.mark.exhaustive)


def _params(case: Any) -> Mapping[str, Any]:
    return case.callspec.params if hasattr(case, "callspec") else {}


def _named(cases: Sequence[Any], names: Sequence[str]) -> set[int]:
    """The places of the cases that `short` names; all, if none of them was selected."""
    ids = [case.callspec.id for case in cases]
    return {ids.index(name) for name in names if name in ids} or set(range(len(ids)))


def covering(
    cases: Sequence[Case],
    together: Sequence[str] = (),
    worth: Sequence[int] | None = None,
    meeting: int = 1,
    most: int | None = None,
) -> set[int]:
    """Places of few cases that have every value, and all there is of the parameters `together`.

    With `meeting`, so many values of different parameters meet in every way in which they do; with
    `most` it ends at so many cases.

    Greedy: always the case that adds most of these, then the one of most worth, then the one that
    adds most pairs of values, so that values meet in ever new ways; of equal ones the first. Cases
    of worth below 0 come last, when only what occurs in them alone is missing.

    >>> cases = [{"a": a, "b": b} for a in "xyz" for b in "uv"]
    >>> sorted(covering(cases)), sorted(covering(cases, ["a", "b"]))
    ([0, 3, 4], [0, 1, 2, 3, 4, 5])
    >>> sorted(covering(cases, worth=[b == "v" for a in "xyz" for b in "uv"]))
    [1, 2, 5]
    """
    worth = worth or [0] * len(cases)
    needed = [
        {
            *(met for n in range(1, meeting + 1) for met in combinations(case.items(), n)),
            tuple(value for name, value in case.items() if _base(name) in together),
        }
        for case in cases
    ]
    pairs = [set(combinations(case.items(), 2)) for case in cases]
    kept: list[int] = []
    for least in (0, min(worth, default=0)):
        places = [i for i, w in enumerate(worth) if w >= least]
        missing = set().union(*(needed[i] for i in places)).difference(*(needed[i] for i in kept))
        seen = set().union(*(pairs[i] for i in kept))
        while missing and (most is None or len(kept) < most):
            best = max(
                places, key=lambda i: (len(needed[i] & missing), worth[i], len(pairs[i] - seen))
            )
            kept.append(best)
            missing -= needed[best]
            seen |= pairs[best]
    return set(kept)


def _base(name: str) -> str:
    return name.partition(".")[0]


def _values(params: Mapping[str, Any]) -> Case:
    """By their text, as many are neither hashable nor ordered; a value may name its features."""
    found: dict[str, str] = {}
    for name, value in params.items():
        features = getattr(value, "features", {"": value})
        found |= {f"{name}.{feature}": repr(part) for feature, part in features.items()}
    return found


def _worth(params: Mapping[str, Any], preferred: Mapping[str, Any]) -> int:
    """Ranks that cut nothing find least; `covering(name=value)` prefers a value."""
    found = sum(params[name] == value for name, value in preferred.items())
    return found - sum(getattr(value, "partition_size", 2) == 1 for value in params.values())

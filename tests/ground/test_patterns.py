"""Patterns of paths, and the overrides that have them."""

from typing import Any

import pytest

import mics_fn as mf
from mics_fn import patterns
from mics_fn.offload import Where
from mics_fn.shards import Precision


def test_patterns_that_match_nothing_are_told_once_in_their_order():
    assert patterns.unmatched(["b", "?", "*a", "b", "[ab]"], ["a", "ca"]) == ["b", "[ab]"]
    assert patterns.unmatched(["*"], []) == ["*"]


@pytest.mark.parametrize("kind", [Precision, Where])
@pytest.mark.parametrize("override", ["*", ("*",), ("*", None), (None, Precision()), ("*", 1, 2)])
def test_an_override_is_a_pair_of_a_pattern_and_a_value(kind, override: Any):
    with pytest.raises(mf.errors.PlanError, match=f"^{kind.__name__}: override .* is not a pair"):
        patterns.checked_override(override, kind)


@pytest.mark.parametrize("pattern", ["", " a", "a ", "a;b", "a\nb", "a=b"])
def test_a_pattern_has_a_text_form(pattern):
    with pytest.raises(mf.errors.PlanError, match="has a pattern without a text form") as caught:
        patterns.checked_override((pattern, Where()), Where, marks=";=")
    fix = "write ? for ';', for '=' and for spaces at its ends"
    assert f"the override {pattern!r}" in f"{caught.value}"
    assert f"{caught.value}".endswith(fix)


def test_what_means_nothing_in_a_text_form_may_be_in_a_pattern():
    assert patterns.checked_override(["a=b", Precision()], Precision) == ("a=b", Precision())

"""Patterns that choose leaves by their paths, as the overrides of a `Precision` and a `Where` have.

In a pattern `*` stands for any characters and `?` for one. All else is literal, brackets too, and a
pattern has to match the whole path, such as `h.0.norm.weight`.
"""

import difflib
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, TypeVar

from mics_fn.errors import MicsError, PlanError, message

V = TypeVar("V")


def matches(pattern: str, path: str) -> bool:
    """Whether a pattern matches a whole path.

    >>> matches("*.bias", "h.0.norm.bias"), matches("bias", "h.0.norm.bias")
    (True, False)
    """
    return _regex(pattern).fullmatch(path) is not None


def check_matched(
    what: str,
    patterns: Iterable[str],
    paths: Sequence[str],
    *,
    leaf: str = "leaf",
    kind: type[MicsError] = PlanError,
) -> None:
    """Raise unless each pattern matches a path.

    Args:
      what: the verb and the option that has the patterns, for the error.
      patterns: any.
      paths: of the leaves that can be meant.
      leaf: what these are.
      kind: of the error, which names the paths that are spelled most like the pattern.

    Example:
      >>> check_matched("shard: where", ["*bias"], ["h.0.bias", "norm.bias"])
      >>> check_matched("shard: where", ["bais"], ["h.0.bias", "norm.bias"])
      Traceback (most recent call last):
      mics_fn.errors.PlanError: shard: where: the pattern 'bais' matches no leaf
        nearest: h.0.bias, norm.bias
        fix: a pattern is a whole path, such as 'h.0.weight', or has * for parts of it
    """
    for pattern in patterns:
        if not any(matches(pattern, path) for path in paths):
            near = difflib.get_close_matches(pattern.strip("*"), paths, n=3, cutoff=0.0)
            text = f"{what}: the pattern {pattern!r} matches no {leaf}"
            lines = [f"nearest: {', '.join(near)}"] if near else []
            fix = "a pattern is a whole path, such as 'h.0.weight', or has * for parts of it"
            raise kind(message(text, lines, fix))


def checked_override(override: Any, kind: type[V], marks: str = ";") -> tuple[str, V]:
    """An override, after a check that it is a pattern with a value, and has a text form.

    Args:
      override: what was given.
      kind: the class of the value, which names it in errors.
      marks: the characters that mean something in a text form, so that no pattern can have them.

    Raises:
      PlanError: it is not a pair of these, or its pattern has no text form.
    """
    pair = isinstance(override, tuple | list) and len(override) == 2
    pattern, value = override if pair else ("", None)
    if not isinstance(pattern, str) or not isinstance(value, kind):
        fix = f"give pairs of a pattern and a {kind.__name__}"
        text = f"{kind.__name__}: override {override!r} is not a pair"
        raise PlanError(message(text, fix=fix))
    if not pattern or pattern != pattern.strip() or set(pattern) & {*marks, "\n"}:
        written = ", ".join(f"for {mark!r}" for mark in marks)
        text = f"{kind.__name__}: the override {pattern!r} has a pattern without a text form"
        raise PlanError(message(text, fix=f"write ? {written} and for spaces at its ends"))
    return pattern, value


@lru_cache(maxsize=1024)
def _regex(pattern: str) -> re.Pattern[str]:
    wild = re.escape(pattern).replace(r"\*", ".*").replace(r"\?", ".")
    return re.compile(wild, re.DOTALL)

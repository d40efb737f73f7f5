"""Patterns that choose leaves by their paths, as the overrides of a `Precision` and a `Where` have.

In a pattern `*` stands for any characters and `?` for one. All else is literal, brackets too, and a
pattern has to match the whole path, such as `h.0.norm.weight`.
"""

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, TypeVar

from mics_fn.errors import PlanError, message

V = TypeVar("V")


def matches(pattern: str, path: str) -> bool:
    """Whether a pattern matches a whole path.

    >>> matches("*.bias", "h.0.norm.bias"), matches("bias", "h.0.norm.bias")
    (True, False)
    """
    return _regex(pattern).fullmatch(path) is not None


def unmatched(patterns: Iterable[str], paths: Iterable[str]) -> list[str]:
    """The patterns that match none of these paths, each once, in their order.

    >>> unmatched(["*norm*", "*w*", "*norm*"], ["w"])
    ['*norm*']
    """
    known = list(paths)
    return [p for p in dict.fromkeys(patterns) if not any(matches(p, path) for path in known)]


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

"""Checks of arguments where they enter a public function.

Each error names the function, the argument as it was given, what is expected, and a mend. The
checks communicate with nobody: a rank with a wrong argument raises before it waits for others, and
these hear of it where they wait.

In a pattern `*` stands for any characters and `?` for one. All else is literal, brackets too, and a
pattern has to match the whole path, such as `h.0.norm.weight`.
"""

import difflib
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import Parameter, signature
from numbers import Real
from typing import Any, NoReturn

from mics_fn import _torch
from mics_fn.errors import LeafError, MicsError, PlanError, message

_SHORT = 60  # characters of a value that an error shows
_PLAIN = (bool, int, float, complex, str, bytes, type(None), list, tuple)
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(?:(?:([kmgt])(i)?)?b)?")


def given(name: str, value: Any) -> str:
    """An argument and its value as a short text of one line.

    >>> given("steps", -1), given("model", dict), given("groups", {})
    ('steps=-1', 'model is the class dict', 'groups is of type dict')
    """
    if isinstance(value, type):
        return f"{name} is the class {value.__name__}"
    if type(value) not in _PLAIN:
        return f"{name} is of type {type(value).__name__}"
    text = " ".join(repr(value).split())
    return f"{name}={text if len(text) <= _SHORT else f'{text[: _SHORT - 3]}...'}"


def refuse(
    verb: str,
    name: str,
    value: Any,
    expected: str,
    fix: str = "",
    kind: type[MicsError] = PlanError,
) -> NoReturn:
    """Raise the error of an argument that is not what is expected.

    >>> refuse("fit", "steps", -1, "an int of at least 1", "pass the number of steps to take")
    Traceback (most recent call last):
    mics_fn.errors.PlanError: fit: steps=-1, expected an int of at least 1
      fix: pass the number of steps to take
    """
    raise kind(message(f"{verb}: {given(name, value)}, expected {expected}", fix=fix))


def integer(
    verb: str, name: str, value: Any, least: int = 1, *, optional: bool = False, fix: str = ""
) -> None:
    """Raise PlanError unless a value is an int of at least `least`, or None if it is optional."""
    if not (optional and value is None) and (type(value) is not int or value < least):
        expected = f"{'None or ' if optional else ''}an int of at least {least}"
        refuse(verb, name, value, expected, fix)


def number(
    verb: str,
    name: str,
    value: Any,
    *,
    least: float = -math.inf,
    above: float = -math.inf,
    below: float = math.inf,
    finite: bool = True,
    fix: str = "",
) -> None:
    """Raise PlanError unless a value is a number inside of limits; a bool or NaN is none."""
    size = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    if least <= size and above < size and (size < below or not finite):
        return
    limits = (("of at least", least), ("above", above), ("below", below))
    words = " and ".join(f"{word} {limit:g}" for word, limit in limits if math.isfinite(limit))
    expected = f"{'a finite number' if finite else 'a number'} {words}".rstrip()
    refuse(verb, name, value, expected, fix)


def choice(verb: str, name: str, value: Any, *known: Any, fix: str = "") -> None:
    """Raise PlanError unless a value is one of a few; neither `1` nor "no" is taken for `True`."""
    if not any(value is each or (type(value) is type(each) and value == each) for each in known):
        shown = [repr(each) for each in known]
        listed = f"{', '.join(shown[:-1])} or {shown[-1]}" if shown[1:] else shown[0]
        refuse(verb, name, value, listed, fix)


def answer(verb: str, call: str, value: Any) -> bool:
    """What a user's predicate returned, as a bool; `call` is the call as text.

    A text or a tensor would count as true, or not, by rules that nobody had in mind.

    >>> answer("shard", "frozen('w')", "no")
    Traceback (most recent call last):
    mics_fn.errors.PlanError: shard: frozen('w')='no', expected True or False
      fix: let the function return a bool
    """
    if type(value).__name__ not in ("bool", "bool_"):  # Python's and numpy's
        refuse(verb, call, value, "True or False", "let the function return a bool")
    return bool(value)


def call(
    verb: str, fn: Callable[..., Any] | None, form: str, fix: str, *, optional: bool = True
) -> None:
    """Raise PlanError unless a value is a function of as many arguments as it will be given.

    Args:
      verb: for errors.
      fn: the function; one whose arguments Python does not know is accepted.
      form: the call with the name of the function, such as "loss(model, batch)".
      fix: for errors.
      optional: whether None is accepted.

    >>> call("Trainer", lambda model: 0.0, "loss(model, batch)", "return one number from it")
    Traceback (most recent call last):
    mics_fn.errors.PlanError: Trainer: loss cannot be called as loss(model, batch)
      it takes (model): too many positional arguments
      fix: return one number from it
    """
    name, _, arguments = form.partition("(")
    if fn is None and optional:
        return
    if not callable(fn):
        refuse(verb, name, fn, f"a function {form}", fix)
    if (why := misfit(fn, arguments.split(","), {})) is not None:
        raise PlanError(f"{verb}: {name} cannot be called as {form}", [f"it takes {why}"], fix)


def parameters(fn: Callable[..., Any]) -> Mapping[str, Parameter]:
    """The parameters of a function by name; none if Python does not know them."""
    try:
        return signature(fn).parameters
    except (TypeError, ValueError):
        return {}


def misfit(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """What a function takes, and why these arguments do not fit; None if they do, or may.

    >>> misfit(lambda x: x, [1, 2], {})
    '(x): too many positional arguments'
    """
    try:
        signature(fn).bind(*args, **kwargs)
    except TypeError as error:
        return f"{signature(fn)}: {error}"
    except ValueError:  # Python does not know it
        pass
    return None


def instance(verb: str, name: str, value: Any, kinds: Any, expected: str, fix: str = "") -> None:
    """Raise PlanError unless a value is an instance of these classes."""
    if not isinstance(value, kinds):
        refuse(verb, name, value, expected, fix)


def path(verb: str, name: str, value: Any) -> None:
    """Raise PlanError unless a value is the path of a file or folder; "" is none."""
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        refuse(verb, name, value, "a str or os.PathLike that is not empty")


def nbytes(verb: str, name: str, value: Any, least: int = 0) -> int:
    """A number of bytes from an int, a float without a fraction, or a text with a unit.

    >>> nbytes("f", "size", "1GB"), nbytes("f", "size", "512 MiB"), nbytes("f", "size", 25e6)
    (1000000000, 536870912, 25000000)
    """
    found: Any = value
    parts = _SIZE.fullmatch(value.strip().lower()) if isinstance(value, str) else None
    if parts is not None:
        unit = 1024 if parts[3] else 1000
        found = round(float(parts[1]) * unit ** " kmgt".index(parts[2] or " "))
    whole = isinstance(found, float) and found.is_integer()
    if not (whole or type(found) is int) or found < least:
        expected = f"a number of bytes of at least {least}"
        refuse(verb, name, value, expected, "pass an int, or a text such as '512MiB' or '1GB'")
    return int(found)


# Patterns that choose leaves by their paths, as the overrides of a `Precision` and a `Where`
# have.


def matches(pattern: str, path: str) -> bool:
    """Whether a pattern matches a whole path.

    >>> matches("*.bias", "h.0.norm.bias"), matches("bias", "h.0.norm.bias")
    (True, False)
    """
    wild = re.escape(pattern).replace(r"\*", ".*").replace(r"\?", ".")
    return re.fullmatch(wild, path, re.DOTALL) is not None


def check_matched(
    what: str, patterns: Iterable[str], paths: Sequence[str], *, leaf: str = "leaf"
) -> None:
    """Raise PlanError, with the nearest paths, unless each pattern matches a path.

    Args:
      what: the verb and the option that has the patterns, for the error.
      patterns: any.
      paths: of the leaves that can be meant.
      leaf: what these are.

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
            lines = [f"nearest: {', '.join(near)}"] if near else []
            fix = "a pattern is a whole path, such as 'h.0.weight', or has * for parts of it"
            raise PlanError(f"{what}: the pattern {pattern!r} matches no {leaf}", lines, fix)


def refuse_derivative(verb: str, values: Iterable[Any], fix: str) -> None:
    """Raise LeafError if the result of a verb without a derivative could be differentiated."""
    if _torch.needs_derivative(values):
        text = f"{verb}: its result has no derivative, and here one would be needed"
        raise LeafError(text, fix=fix)

"""Functions that users give: whether they can be called as they will be."""

from collections.abc import Callable
from inspect import signature
from typing import Any

from mics_fn.errors import PlanError, message


def check_call(verb: str, name: str, fn: Callable[..., Any], form: str, fix: str) -> None:
    """Raise PlanError unless a function takes as many arguments as it will be given.

    Args:
      verb: for errors.
      name: the name of the argument.
      fn: the function; one whose arguments Python does not know is accepted.
      form: the call, such as "loss(model, batch)".
      fix: for errors.
    """
    try:
        found = signature(fn)
    except (TypeError, ValueError):
        return
    try:
        found.bind(*form.partition("(")[2].split(","))
    except TypeError as error:
        text = f"{verb}: {name} cannot be called as {form}"
        raise PlanError(message(text, [f"it takes {found}: {error}"], fix)) from None

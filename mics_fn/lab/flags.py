"""Flags of the command line for numbers, which the demo and the benches share."""

import argparse
from typing import Any


def add_count(
    parser: argparse.ArgumentParser,
    name: str,
    default: int | None,
    text: str,
    *,
    smallest: int = 1,
    **options: Any,
) -> None:
    """Add a flag for an int that is not less than `smallest`.

    Args:
        parser: gets the flag.
        name: of the flag, without dashes.
        default: its default; help names it, unless it is None.
        text: its help.
        smallest: the least number that is allowed.
        options: other options of `add_argument`.

    Example:
        >>> parser = argparse.ArgumentParser()
        >>> add_count(parser, "steps", 5, "steps of a turn")
        >>> parser.parse_args(["--steps", "3"]).steps, parser.parse_args([]).steps
        (3, 5)
    """

    def number(given: str) -> int:
        value = int(given)
        if value < smallest:
            raise argparse.ArgumentTypeError(f"{given} is less than {smallest}")
        return value

    shown = text if default is None else f"{text} (default {default})"
    parser.add_argument(f"--{name}", type=number, default=default, help=shown, **options)

"""Flags of the command line for numbers, which the demo and the benches share."""

import argparse
from typing import Any


def add_count(
    parser: argparse.ArgumentParser,
    name: str,
    default: int | list[int] | None,
    text: str,
    *,
    smallest: int = 1,
    largest: int | None = None,
    **options: Any,
) -> None:
    """Add a flag for an int that is not less than `smallest`.

    Args:
        parser: gets the flag.
        name: of the flag, without dashes.
        default: its default, a list for a flag of several; help names it, unless it is None.
        text: its help.
        smallest, largest: the least and the greatest number that are allowed.
        options: other options of `add_argument`.

    Example:
        >>> parser = argparse.ArgumentParser()
        >>> add_count(parser, "steps", 5, "steps of a turn")
        >>> parser.parse_args(["--steps", "3"]).steps, parser.parse_args([]).steps
        (3, 5)
    """

    def number(given: str) -> int:
        try:
            value = int(given)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{given!r} is not an integer") from error
        if value < smallest:
            raise argparse.ArgumentTypeError(f"{given} is less than {smallest}")
        if largest is not None and value > largest:
            raise argparse.ArgumentTypeError(f"{given} is more than {largest}")
        return value

    shown = text if default is None else f"{text} (default {default})"
    parser.add_argument(f"--{name}", type=number, default=default, help=shown, **options)

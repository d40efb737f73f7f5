"""Numbers of ranks: what divides what, and the errors of those that do not fit."""

from collections.abc import Sequence

from mics_fn.errors import PlanError, message


def divisors(n: int) -> list[int]:
    """The divisors of a number, ascending."""
    return [d for d in range(1, n + 1) if n % d == 0]


def check_count(value: object, what: str) -> None:
    """Raise PlanError unless a value is an int of at least 1; `what` names it."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise PlanError(f"{what}={value!r} is a {type(value).__name__}, not an int")
    if value < 1:
        raise PlanError(f"{what}={value} is less than 1")


def parts(total: int, size: int, what: str, whole: str) -> int:
    """How many groups of `size` there are in `total`; PlanError unless it divides."""
    check_count(size, what)
    if total % size:
        raise misfits(f"{what}={size} does not divide {whole}", [], divisors(total))
    return total // size


def misfits(what: str, lines: list[str], sizes: Sequence[int]) -> PlanError:
    """The error of a size that does not fit, with those that do."""
    lines = [*lines, f"sizes that work: {', '.join(map(str, sizes))}"]
    return PlanError(message(what, lines, f"pass one of these as {what.partition('=')[0]}="))

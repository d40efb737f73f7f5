"""What changes in a guard from step to step, as numbers that ranks and later runs take over."""

from dataclasses import replace
from typing import Any

from mics_fn.optim import Guard

SCALE = ("value", "credits", "good_steps", "overflows")  # what changes in a `LossScale`


def guard_numbers(guard: Guard) -> tuple[list[Any], list[float] | None]:
    """What changes in a guard from step to step: the numbers of its scale, and the watch's norms.

    JSON keeps every bit of them.
    """
    norms = guard.spike and list(guard.spike.norms)
    return [getattr(guard.scale, name) for name in SCALE], norms


def with_numbers(guard: Guard, scale: list[Any], norms: list[float] | None) -> Guard:
    """The guard with what `guard_numbers` gave of one like it."""
    spike = guard.spike and replace(guard.spike, norms=tuple(norms or ()))
    changed = replace(guard.scale, **dict(zip(SCALE, scale, strict=True)))
    return replace(guard, scale=changed, spike=spike)

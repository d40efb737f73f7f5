"""What changes in a guard from step to step, as numbers that ranks and later runs take over."""

from dataclasses import replace
from typing import Any

from mics_fn.optim import Guard

SCALE = ("value", "credits", "good_steps", "overflows")  # what changes in a `LossScale`
COUNTS = ("in_row", "skipped")  # and in the guard itself


def guard_numbers(guard: Guard) -> tuple[list[Any], list[float] | None]:
    """What changes in a guard from step to step: those of its scale and its own; the watch's norms.

    JSON keeps every bit of them.
    """
    norms = guard.spike and list(guard.spike.norms)
    own = [getattr(guard, name) for name in COUNTS]
    return [*(getattr(guard.scale, name) for name in SCALE), *own], norms


def with_numbers(guard: Guard, scale: list[Any], norms: list[float] | None) -> Guard:
    """The guard with what `guard_numbers` gave of one like it."""
    spike = guard.spike and replace(guard.spike, norms=tuple(norms or ()))
    found = dict(zip((*SCALE, *COUNTS), scale, strict=True))
    changed = replace(guard.scale, **{name: found.pop(name) for name in SCALE})
    return replace(guard, scale=changed, spike=spike, **found)

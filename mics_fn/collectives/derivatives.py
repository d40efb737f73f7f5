"""Where a derivative may be asked for, and how a verb without one refuses.

A raw collective under torch.func raises nothing, and its derivative is zeros. So what has no rule
for it must ask first.
"""

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from mics_fn import _torch
from mics_fn.errors import LeafError

_RULES = threading.local()


@contextmanager
def inside_a_rule() -> Iterator[None]:
    """Mark a block whose results get their derivative from the rule of a verb around it."""
    before, _RULES.inside = getattr(_RULES, "inside", False), True
    try:
        yield
    finally:
        _RULES.inside = before


def needs_derivative(values: Iterable[Any]) -> bool:
    """Return whether a result of these values could be differentiated; only tensors count."""
    if getattr(_RULES, "inside", False):
        return False
    if _torch.inside_torch_func() or _torch.inside_forward_ad():
        return True
    return torch.is_grad_enabled() and any(
        isinstance(value, Tensor) and value.requires_grad for value in values
    )


def refuse_derivative(verb: str, values: Iterable[Any], fix: str) -> None:
    """Raise LeafError if the result of a verb without a derivative could be differentiated."""
    if needs_derivative(values):
        text = f"{verb}: its result has no derivative, and here one would be needed"
        raise LeafError(text, fix=fix)

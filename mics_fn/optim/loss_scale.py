"""The scale of a loss, as a value, so that small float16 gradients do not become 0.

[Note: which scale] A gradient must be divided by the scale that its loss was multiplied by. A
`LossScale` never changes: `adjust` gives another one for the next step. So the value that scaled
the loss also unscales the gradient, and a scale that has grown meanwhile cannot be taken for it.
"""

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from mics_fn import checks, tree
from mics_fn.errors import LeafError, message
from mics_fn.tree import Tree

_MADE = "make it with no_scale, static_scale or dynamic_scale"


@dataclass(frozen=True)
class LossScale:
    """What a loss is multiplied by before backward, and its gradients are divided by after it.

    Made by `no_scale`, `static_scale` or `dynamic_scale`. It is a value: see [Note: which scale].

    Args:
      kind: which of the three functions made it.
      value: the scale.
      factor, interval, hysteresis, min, max: as for `dynamic_scale`.
      credits: how many more overflows it takes until the scale falls; at 0 or 1 the next one does.
      good_steps: finite steps in a row since the last overflow or growth.
      overflows: all steps with an overflow so far.

    Raises:
      PlanError: `kind` is not one of the three, or a number is out of its range.
    """

    kind: Literal["none", "static", "dynamic"]
    value: float
    factor: float = 2.0
    interval: int = 2000
    hysteresis: int = 1
    min: float = 1.0
    max: float = 2.0**24
    credits: int = 1
    good_steps: int = 0
    overflows: int = 0

    def __post_init__(self) -> None:
        verb = "LossScale"
        checks.choice(verb, "kind", self.kind, "none", "static", "dynamic", fix=_MADE)
        if self.kind == "none" and self.value != 1:
            checks.refuse(verb, "value", self.value, "1, because nothing is scaled", _MADE)
        if self.kind == "static":
            checks.number(verb, "value", self.value, above=0, fix=_MADE)
        if self.kind == "dynamic":
            _check_dynamic(verb, "value", self)
        for name in ("credits", "good_steps", "overflows"):
            checks.integer(verb, name, getattr(self, name), 0, fix=_MADE)

    @property
    def checks(self) -> bool:
        """Whether each step has to look for overflows."""
        return self.kind != "none"

    def scale(self, loss: Tensor) -> Tensor:
        """The loss times the scale; keep it in float32, since float16 has no number above 65504."""
        return loss if self.value == 1.0 else loss * self.value

    def unscale(self, grads: Tree) -> Tree:
        """A tree of tensors or of shards divided by the scale; exact for powers of two.

        What is too small for float16 afterwards becomes 0, so unscale sums that are in float32.
        """
        if self.value == 1.0:
            return grads
        return tree.map_leaves(lambda grad: grad / self.value, grads)

    def adjust(self, finite: bool | Tensor) -> "LossScale":
        """The scale for the next step.

        Args:
          finite: whether the gradient was finite on all ranks: a bool, or a 0-dim bool tensor, for
            which the host waits.

        Raises:
          LeafError: `finite` is something else, such as a norm.
        """
        if isinstance(finite, Tensor):
            finite = bool(finite) if finite.dtype == torch.bool and finite.ndim == 0 else finite
        if not isinstance(finite, bool):
            fix = "pass torch.isfinite(norm) or a bool, the same on all ranks"
            raise LeafError(message(f"adjust: finite is {finite!r}, not a bool", fix=fix))
        if self.kind == "none":
            return self
        overflows = self.overflows + (not finite)
        if self.kind == "static":
            return replace(self, overflows=overflows)
        value, credits, good = self.value, self.credits, self.good_steps + 1
        if not finite:
            credits, good = max(credits - 1, 0), 0
            if not credits:
                value = max(value / self.factor, self.min)
        elif good == self.interval:
            value, credits, good = min(value * self.factor, self.max), self.hysteresis, 0
        return replace(self, value=value, credits=credits, good_steps=good, overflows=overflows)


def no_scale() -> LossScale:
    """A scale of 1 that never changes, and returns loss and gradients as they are.

    Returns:
      A `LossScale`.

    Example:
      >>> loss = torch.tensor(3.0)
      >>> no_scale().scale(loss) is loss
      True
    """
    return LossScale("none", 1.0)


def static_scale(scale: float) -> LossScale:
    """A scale that stays the same, and counts overflows.

    Args:
      scale: above 0; with powers of two nothing is rounded.

    Returns:
      A `LossScale`.

    Memory: `unscale` makes a copy of the gradients.

    Raises:
      PlanError: `scale` is not above 0, or not finite.

    Example:
      >>> scale = static_scale(128.0)
      >>> scale.unscale([scale.scale(torch.tensor(3.0))])
      [tensor(3.)]
    """
    fix = "1 scales nothing; powers of two round nothing"
    checks.number("static_scale", "scale", scale, above=0, fix=fix)
    return LossScale("static", float(scale))


def dynamic_scale(
    init: float = 2.0**16,
    *,
    factor: float = 2.0,
    interval: int = 2000,
    hysteresis: int = 1,
    min: float = 1.0,
    max: float = 2.0**24,
) -> LossScale:
    """A scale that falls at overflows and grows again after a run of finite steps.

    Each overflow takes one of `hysteresis` credits; once none is left, it divides the scale by
    `factor`. `interval` finite steps in a row multiply the scale by `factor` and restore all
    credits; an overflow starts that count again.

    Args:
      init: the first scale. With powers of two, here and as `factor`, nothing is rounded.
      factor: above 1.
      interval: finite steps in a row before the scale grows.
      hysteresis: the number of credits; 1 lets every overflow lower the scale.
      min: the lowest scale.
      max: the highest scale.

    Returns:
      A `LossScale`.

    Memory: `unscale` makes a copy of the gradients.

    Raises:
      PlanError: a number is out of its range, or not finite.

    Example:
      >>> scale = dynamic_scale(8.0, interval=2)
      >>> for finite in (False, True, True):
      ...     scale = scale.adjust(finite)
      ...     print(scale.value, scale.good_steps)
      4.0 0
      4.0 1
      8.0 0

    References: Mixed Precision Training, Micikevicius et al., ICLR 2018, arXiv:1710.03740, section
      3.2.
    """
    _check_dynamic("dynamic_scale", "init", _Numbers(init, factor, interval, hysteresis, min, max))
    numbers = (float(init), float(factor), interval, hysteresis, float(min), float(max))
    return LossScale("dynamic", *numbers, credits=hysteresis)


class _Numbers(NamedTuple):
    """What `dynamic_scale` is given, under the names that a `LossScale` has for it."""

    value: float
    factor: float
    interval: int
    hysteresis: int
    min: float
    max: float


def _check_dynamic(verb: str, first: str, scale: LossScale | _Numbers) -> None:
    """Raise PlanError for a number that a dynamic scale cannot have; `first` names its value."""
    checks.number(verb, "factor", scale.factor, above=1)
    for name, count in (("interval", scale.interval), ("hysteresis", scale.hysteresis)):
        checks.integer(verb, name, count)
    low, value = scale.min, scale.value
    checks.number(verb, "min", low, above=0)
    checks.number(verb, first, value, least=low, fix=f"min={low:g} is the lowest scale")
    checks.number(verb, "max", scale.max, least=value, fix="a scale lies between min and max")

"""The scale of a loss, as a value, so that small float16 gradients do not become 0.

[Note: which scale] A gradient must be unscaled by the scale that its forward used. A `LossScale`
never changes: `adjust` gives another one, for the next step. So whoever holds the one that scaled
the loss unscales by it, and a scale that has just grown can not divide a gradient made before.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from mics_fn import tree
from mics_fn.errors import LeafError, PlanError, message
from mics_fn.tree import Tree


@dataclass(frozen=True)
class LossScale:
    """What a loss is multiplied by before backward, and gradients are divided by after it.

    Made by `no_scale`, `static_scale` or `dynamic_scale`. A value: `adjust` gives the next one, and
    a gradient is unscaled by the one that its loss was scaled by.

    Args:
      kind: which of the three it is.
      value: the scale.
      factor, interval, hysteresis, min, max: as for `dynamic_scale`.
      credits: overflows until the scale falls, that one included; 0 or 1: at the next.
      good_steps: finite steps in a row since the last overflow or growth.
      overflows: steps with an overflow, in all.
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

    @property
    def checks(self) -> bool:
        """Whether a step must look for overflows."""
        return self.kind != "none"

    def scale(self, loss: Tensor) -> Tensor:
        """The loss times the scale; keep it in float32, since float16 ends at 65504."""
        return loss if self.value == 1.0 else loss * self.value

    def unscale(self, grads: Tree) -> Tree:
        """A tree of tensors or of shards, divided by the scale; exact for powers of two.

        What float16 can not hold after that becomes 0: unscale sums that are kept in float32.
        """
        if self.value == 1.0:
            return grads
        return tree.map_leaves(lambda grad: grad / self.value, grads)

    def adjust(self, finite: bool | Tensor) -> "LossScale":
        """The scale of the next step.

        Args:
          finite: whether the gradient was finite on all ranks: a bool, or a 0-dim bool tensor (the
            host waits for it).

        Raises:
          LeafError: `finite` is something else, a norm say.
        """
        if isinstance(finite, Tensor):
            finite = bool(finite) if finite.dtype == torch.bool and finite.ndim == 0 else finite
        if not isinstance(finite, bool):
            fix = "pass torch.isfinite(norm) or a bool, the same on all ranks"
            raise LeafError(message(f"adjust: finite is {finite!r}, no bool", fix=fix))
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
    """A scale of 1 that never changes, and gives loss and gradients back as they are.

    Returns:
      A `LossScale`.

    Communication: none.

    Memory: none.

    Example:
      >>> loss = torch.tensor(3.0)
      >>> no_scale().scale(loss) is loss
      True
    """
    return LossScale("none", 1.0)


def static_scale(scale: float) -> LossScale:
    """A scale that stays; it counts overflows.

    Args:
      scale: above 0; powers of two are exact.

    Returns:
      A `LossScale`.

    Communication: none.

    Memory: none; `unscale` makes a copy of the gradients.

    Raises:
      PlanError: `scale` is not above 0, or not finite.

    Example:
      >>> scale = static_scale(128.0)
      >>> scale.unscale([scale.scale(torch.tensor(3.0))])
      [tensor(3.)]
    """
    require("static_scale", "scale", scale, scale > 0, "finite and above 0")
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

    An overflow uses up a credit. If none is left the scale is divided by `factor`, and so at each
    further overflow. `interval` finite steps in a row multiply it by `factor` and restore the
    credits; every overflow ends such a run.

    Args:
      init: the first scale. Powers of two are exact, here and as `factor`.
      factor: above 1.
      interval: finite steps before it grows.
      hysteresis: credits: the scale falls from this many overflows on.
      min: it does not fall below.
      max: it does not grow above.

    Returns:
      A `LossScale`.

    Communication: none.

    Memory: none; `unscale` makes a copy of the gradients.

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
    verb = "dynamic_scale"
    require(verb, "factor", factor, factor > 1, "finite and above 1")
    for name, count in (("interval", interval), ("hysteresis", hysteresis)):
        require(verb, name, count, type(count) is int and count >= 1, "an int of at least 1")
    require(verb, "min", min, min > 0, "finite and above 0")
    require(verb, "init", init, init >= min, f"finite and at least min={min}")
    require(verb, "max", max, max >= init, f"finite and at least init={init}")
    numbers = (float(init), float(factor), interval, hysteresis, float(min), float(max))
    return LossScale("dynamic", *numbers, credits=hysteresis)


def require(verb: str, name: str, value: float, good: bool, expected: str) -> None:
    """Raise PlanError unless a number is finite and good."""
    if not good or not math.isfinite(value):
        raise PlanError(f"{verb}: {name}={value}, expected {expected}")

"""What a step of a `Trainer` reports."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from torch import Tensor


@dataclass(frozen=True)
class StepMetrics:
    """What a step reports. On an accelerator, to read a number that is no tensor may wait for it.

    Args:
      step: the number of optimizer steps after it.
      loss: 0-dim tensor on the device: the mean over micro-steps and ranks, by weight if there are
        weights.
      samples: samples on all ranks together.
      tokens: elements of the batch's first integer tensor with two or more dims, on all ranks
        together; 0 if there is none.
      seconds: host time of the call.
      grad_norm: 0-dim float64 tensor, the norm of the gradient before clipping; None if the guard
        does not need it, or cannot know it.
      scale: the factor that the loss was multiplied by.
      accepted: whether the step was taken; if not, only the guard has changed.
      spike: whether the norm was a spike.
      nonfinite: as in the guard's `Verdict`: which leaf was not finite, and where that arose. Of
        the first of such steps in a row an accelerator knows neither.
      skipped: how many steps its guard has refused so far.
    """

    step: int
    loss: Tensor
    samples: int
    tokens: int
    seconds: float
    grad_norm: Tensor | None
    scale: float
    accepted: bool
    spike: bool
    nonfinite: str | None
    skipped: int

    @classmethod
    def known_later(cls, rest: Callable[[], Mapping[str, Any]], **known: Any) -> "StepMetrics":
        """Metrics of which some values are asked for when the first of them is read."""
        found = object.__new__(cls)
        vars(found).update(known, rest=rest)
        return found

    if not TYPE_CHECKING:  # for which there is no other attribute

        def __getattr__(self, name: str) -> Any:  # of what is not known yet
            rest = vars(self).pop("rest", None)
            if rest is None:
                raise AttributeError(f"StepMetrics has no attribute {name!r}")
            vars(self).update(rest())
            return getattr(self, name)

    def __reduce__(self) -> Any:
        return StepMetrics, tuple([getattr(self, each.name) for each in fields(self)])

"""What a step of a `Trainer` reports."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mics_fn.collectives import mean_over_ranks
from mics_fn.groups import Groups


class StepMetrics(NamedTuple):
    """What a step reports.

    Args:
      step: the number of optimizer steps after it.
      loss: 0-dim tensor on the device: this rank's mean over micro-steps, which `fit` averages over
        ranks.
      samples: samples on all ranks together.
      tokens: elements of the batch's first integer tensor with two or more dims, on all ranks
        together; 0 if there is none.
      seconds: host time of the call.
      grad_norm: 0-dim float64 tensor, the norm of the gradient before clipping; None if the guard
        does not need it.
      scale: the factor that the loss was multiplied by.
      accepted: whether the step was taken; if not, only the guard has changed.
      spike: whether the norm was a spike.
      nonfinite: as in the guard's `Verdict`: which leaf was not finite, and where that arose.
    """

    step: int
    loss: Tensor
    samples: int
    tokens: int
    seconds: float
    grad_norm: Tensor | None = None
    scale: float = 1.0
    accepted: bool = True
    spike: bool = False
    nonfinite: str | None = None


def averaged(metrics: Sequence[StepMetrics], home: Groups) -> list[StepMetrics]:
    """These metrics with losses averaged over the ranks of the groups."""
    if not metrics:
        return []
    losses = mean_over_ranks(home, torch.stack([m.loss for m in metrics]))
    return [m._replace(loss=loss) for m, loss in zip(metrics, losses, strict=True)]

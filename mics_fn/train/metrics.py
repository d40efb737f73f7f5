"""What a step of a `Trainer` reports."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mics_fn import _torch
from mics_fn.collectives import start_mean_over_ranks
from mics_fn.errors import LeafError
from mics_fn.optim import StepTotals
from mics_fn.train.program import count

# Weights of losses: of how many things each is the mean.


class Weights:
    """The weights of the micro-batches of a step; see [Note: weighted means] in `levels`.

    Args:
      trainer: the `Trainer`, which has a weight.
      parts: this rank's micro-batches.

    Communication: 8 bytes over the partition group and over the replication group, under way while
      the first micro-step computes.
    """

    def __init__(self, trainer: Any, parts: Sequence[Any]) -> None:
        home = trainer.member.home
        home = home.replica if trainer.replica_sync.independent else home
        found = [weight_of(trainer.weight, part, home.device) for part in parts]
        self._values = torch.stack(found)
        self._mean = start_mean_over_ranks(home, self._values.mean())
        self._factors: Tensor | None = None
        void = self._values == 0
        self.void = list(void) if _torch.is_async(home.device) else void.tolist()

    def factor(self, i: int, loss: Tensor) -> Tensor:
        """What the loss of a micro-step is multiplied by; NaN if all weights of all ranks are 0."""
        if self._factors is None:
            self._factors = self._values / self._mean.wait()
        return self._factors[i].to(torch.promote_types(loss.dtype, torch.float32))


def weight_of(weight: Callable[[Any], Any], batch: Any, device: torch.device) -> Tensor:
    """The weight of a batch, 0-dim and float64 on the device; the host does not wait for it.

    Raises:
      LeafError: it is not one number of at least 0.
    """
    found = weight(batch)
    one = isinstance(found, Tensor) and found.numel() == 1 and not found.is_complex()
    plain = isinstance(found, Real) and 0 <= float(found) < math.inf
    if not one and not plain:
        got = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else found
        text, fix = f"Trainer: weight gave {got!r:.80}", "return one number of at least 0"
        raise LeafError(text, fix=fix)
    if isinstance(found, Tensor):
        return found.detach().reshape(()).to(device, torch.float64, non_blocking=True)
    return torch.full((), float(found), dtype=torch.float64, device=device)


def counted(loss: Tensor, void: bool | Tensor) -> Tensor:
    """A loss, or 0 where it counts nothing."""
    return torch.where(torch.as_tensor(void, device=loss.device), 0.0, loss)


def evaluated(trainer: Any, loss: Tensor, batch: Any) -> Tensor:
    """The mean of losses of batches over ranks, by weight if there are weights.

    Communication: that of a `StepTotals`.
    """
    home, dtype, weight = trainer.member.home, loss.dtype, torch.ones((), dtype=torch.float64)
    if trainer.weight is not None:
        weight = weight_of(trainer.weight, batch, home.device)
        loss = counted(loss, weight == 0) * weight
    totals = StepTotals(home, loss.double(), *count(batch), weighted=trainer.weight is not None)
    total = totals.exchange(weight.to(home.device))
    if not _torch.is_async(home.device):  # there only steps look, which need not wait for it
        totals.warn_of_unequal()
    return (totals.loss / total).to(dtype)


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

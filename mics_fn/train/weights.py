"""Weights of losses: of how many things each is the mean."""

import math
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from mics_fn import _device
from mics_fn.collectives import start_mean_over_ranks
from mics_fn.errors import LeafError, message
from mics_fn.groups import Groups
from mics_fn.optim import StepTotals
from mics_fn.train.batch import count


class Weights:
    """The weights of the micro-batches of a step; see [Note: weighted means] in `replicated`.

    Args:
      weight: as for `Trainer`.
      parts: this rank's micro-batches.
      home: the groups over which losses are averaged.

    Communication: 8 bytes over the partition group and over the replication group, under way while
      the first micro-step computes.
    """

    def __init__(self, weight: Callable[[Any], Any], parts: Sequence[Any], home: Groups) -> None:
        self._values = torch.stack([weight_of(weight, part, home.device) for part in parts])
        self._mean = start_mean_over_ranks(home, self._values.mean())
        self._factors: Tensor | None = None
        void = self._values == 0
        self.void = list(void) if _device.is_async(home.device) else void.tolist()

    def factor(self, i: int, loss: Tensor) -> Tensor:
        """What the loss of a micro-step is multiplied by; NaN if all weights of all ranks are 0."""
        if self._factors is None:
            self._factors = self._values / self._mean.wait()
        return self._factors[i].to(torch.promote_types(loss.dtype, torch.float32))


def weights_of(trainer: Any, parts: Sequence[Any]) -> Weights | None:
    """The weights of a step of this trainer on these micro-batches; None if they are equal."""
    if trainer.weight is None:
        return None
    home = trainer.member.home
    home = home.replica if trainer.replica_sync.apart else home
    return Weights(trainer.weight, parts, home)


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
        raise LeafError(message(text, fix=fix))
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
    if not _device.is_async(home.device):  # there only steps look, which need not wait for it
        totals.warn_of_unequal()
    return (totals.loss / total).to(dtype)

"""`StepTotals`: what all ranks exchange once in a step, in one message of 32 bytes.

[Note: one message] At the end of a step each rank knows its loss, how many samples and tokens it
had, and the squares of its part of the gradient. Four float64 numbers go over the partition group
and then over the replication group, and what comes back says whether loss and gradient are finite
everywhere, the norm that a guard limits, the loss of the step, and whether batches were unlike.
Counts are whole numbers, so their fractions are free for more, such as a digest.
"""

import math
import warnings
from collections.abc import Iterable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from mics_fn import _device
from mics_fn.collectives import start_mean_over_ranks
from mics_fn.errors import message
from mics_fn.groups import Groups

TOTALS = "step totals"  # in the ledger
_warned: set[str] = set()  # in this process


class StepTotals:
    """The numbers of a step, of this rank and then of all; see [Note: one message].

    Args:
      home: its ranks exchange it.
      loss: this rank's loss, 0-dim and float64, on the device.
      samples, tokens: how many this rank had.
      weighted: whether losses have weights, so that unlike batches are meant.
    """

    def __init__(
        self, home: Groups, loss: Tensor, samples: int, tokens: int, *, weighted: bool = False
    ) -> None:
        self.home, self.own_loss, self._counts = home, loss, (samples, tokens)
        self._weighted, self._found = weighted, torch.empty(0)
        self._arrived: torch.Event | None = None  # what came back, on the host

    def exchange(self, squares: Tensor | None = None) -> Tensor:
        """Send it, once; the host does not wait on an accelerator.

        Args:
          squares: a number of this rank, 0-dim and float64.

        Returns:
          The mean of `squares` over ranks.
        """
        zero = self.own_loss.new_zeros(())
        counts = [torch.full_like(zero, count) for count in self._counts]
        sent = torch.stack([self.own_loss, zero if squares is None else squares, *counts])
        alone = self.home.world_size == 1
        self._found = sent if alone else start_mean_over_ranks(self.home, sent, TOTALS).wait()
        self._on_host = self._found
        if _device.is_async(self.home.device):
            host = _device.host_buffer(sent.nbytes, self.home.device).view(torch.float64)
            self._on_host = host.copy_(self._found, non_blocking=True)
            self._arrived = _device.record(self.home.device)
        return self._found[1]

    def reaches(self, homes: Iterable[Any]) -> bool:
        """Whether all of these groups have the ranks that it is sent to."""
        ranks = set(self.home.ranks)
        return all(set(home.ranks) == ranks for home in homes)

    @property
    def loss(self) -> Tensor:
        """The mean of the losses of all ranks, on the device."""
        return self._found[0]

    @cached_property
    def _read(self) -> list[float]:
        """What came back; the host waits for that, and for nothing that was queued later."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._on_host.tolist()

    @property
    def finite(self) -> bool:
        """Whether the losses of all ranks are finite."""
        return math.isfinite(self._read[0])

    @property
    def all_finite(self) -> bool:
        """Whether losses and what `exchange` was given are finite on all ranks."""
        return self.finite and math.isfinite(self._read[1])

    @property
    def samples(self) -> int:
        """Those of all ranks."""
        return round(self._read[2] * self.home.world_size)

    @property
    def tokens(self) -> int:
        """Those of all ranks."""
        return round(self._read[3] * self.home.world_size)

    def marked(self, norm: Tensor) -> Tensor:
        """A norm, or infinity if the loss of this rank is not finite."""
        return torch.where(self.own_loss.isfinite(), norm, math.inf)

    def warn_of_unequal(self) -> None:
        """Warn once if ranks had unlike numbers of samples, whose mean of means is another one."""
        own, n = self._counts[0], self.home.world_size
        if self._weighted or own * n == self.samples or "samples" in _warned:
            return
        _warned.add("samples")
        text = f"Trainer: rank {self.home.rank} has {own} samples in this step, and the {n} ranks"
        lines = ["each rank counts the same, so this is not the mean over samples; said once"]
        fix = "give all ranks equally many, or pass weight=, such as the number of samples"
        warnings.warn(message(f"{text} have {self.samples} together", lines, fix), stacklevel=6)

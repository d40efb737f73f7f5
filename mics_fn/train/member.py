"""This rank as a member of its job, which may go on with other processes after a fault."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from mics_fn.groups import Groups
from mics_fn.optim import StepTotals, Verdict
from mics_fn.train.buffers import Values
from mics_fn.train.syncing import SyncState


class Masked(NamedTuple):
    """A step that a device may not have taken; see [Note: masked steps] in `optim.torch_optim`."""

    totals: StepTotals  # they say whether it was
    before: list[Any]  # the leaves of the optimizer's state before it that are no tensors


class Ready(NamedTuple):
    """All that a rank needs to write a step without any other rank."""

    verdict: Verdict
    buffers: Values  # those after the step
    sync: SyncState  # if it is taken
    masked: Masked | None = None  # if the host does not know yet whether it is


@dataclass(eq=False)
class Member:
    """What a `Trainer` knows of its job, besides what it trains; steps and `reset` change it.

    Args:
      home: the first of its groups, whose ranks share buffers and metrics.
      compared: whether all ranks are known to be at one step; replicas that are apart need not be.
      lost: whether this rank is to take its state from others.
      ready: what is left to do of a step that all ranks can write; None if nothing is.
      merges: whether the last step is written, and the merge of replicas after it is left to do.
      masked: the last step, as long as the host has not looked whether it was taken.
    """

    home: Groups
    compared: bool
    lost: bool
    ready: Ready | None = None
    merges: bool = False
    masked: Masked | None = None

"""This rank as a member of its job, which may go on with other processes after a fault."""

from dataclasses import dataclass
from typing import NamedTuple

from mics_fn.groups import Groups
from mics_fn.optim import Verdict
from mics_fn.train.buffers import Values
from mics_fn.train.syncing import SyncState


class Ready(NamedTuple):
    """All that a rank needs to write a step without any other rank."""

    verdict: Verdict
    buffers: Values  # those after the step
    sync: SyncState  # if it is taken


@dataclass(eq=False)
class Member:
    """What a `Trainer` knows of its job, besides what it trains; steps and `reset` change it.

    Args:
      home: the first of its groups, whose ranks share buffers and metrics.
      compared: whether all ranks are known to be at one step; replicas that are apart need not be.
      lost: whether this rank is to take its state from others.
      ready: what is left to do of a step that all ranks can write; None if nothing is.
      merges: whether the last step is written, and the merge of replicas after it is left to do.
    """

    home: Groups
    compared: bool
    lost: bool
    ready: Ready | None = None
    merges: bool = False

"""This rank as a member of its job, which may go on with other ranks, or without some of them."""

from dataclasses import dataclass
from typing import NamedTuple

from mics_fn.groups import Groups, Rounds
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
      positions: the number of ranks of the whole job, whoever is there.
      compared: whether all ranks are known to be at one step; replicas that are apart need not be.
      lost: whether this rank is to take its state from others.
      rounds: decides which ranks go on after a fault; None if all have to.
      round: the number of the newest round that this rank has taken part in.
      ready: what is left to do of a step that all ranks can write; None if nothing is.
    """

    home: Groups
    positions: int
    compared: bool
    lost: bool
    rounds: Rounds | None = None
    round: int = 0
    ready: Ready | None = None

    @property
    def shares(self) -> tuple[int, ...]:
        """The positions whose samples this rank gives."""
        return tuple(range(self.home.position, self.positions, self.home.world_size))

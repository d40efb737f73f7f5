"""Gradients that arrive bucket by bucket: some can be used while others are still being reduced."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from mics_fn.tree import Tree


@dataclass(frozen=True, eq=False)
class Arrival:
    """A tree of gradients whose buckets arrive one after the other, in an order known before.

    Args:
      like: the tree of shards that they are gradients of.
      home: the groups that they are reduced over.
      order: for each bucket, in the order in which they arrive, the numbers of its leaves among the
        trained leaves of the tree; the same on every rank.
      here: whether the bucket with this number in the order has arrived, on the device; nothing
        waits.
      take: waits for a bucket, and gives its pieces, one per leaf. What lies elsewhere is brought
        at each call, in memory of its own.
      whole: waits for all of them, and gives the tree.
      first: waits for what has to be known before any bucket can be taken, such as a verdict on all
        of them; `take` and `whole` call it themselves.
    """

    like: Tree
    home: Any
    order: Sequence[Sequence[int]]
    here: Callable[[int], bool]
    take: Callable[[int], list[Tensor]]
    whole: Callable[[], Tree]
    first: Callable[[], object] = lambda: None


@runtime_checkable
class Arriving(Protocol):
    """What can be given for gradients that have not all arrived, such as a `GradSum`."""

    def arrival(self) -> Arrival:
        """The gradients, some of which are still being reduced."""
        ...

"""Gradients that are made, judged or limited once a step has asked for its states.

[Note: states come first] A step on gradients of which all have to be known first, as by a guard or
for a norm, waits for hop 2 and for that norm before it writes anything. What it needs from files or
from the host does not depend on either. So such a step is begun with `Late` gradients: `Elsewhere`
begins to bring the first parts of the states, as many as its memory holds, and only then asks for
the gradients, which are made and judged meanwhile. If they are refused, an exception ends the step
before its first write: what was brought is dropped, and the state is as it was.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from mics_fn import tree
from mics_fn.errors import MicsError, TreeError, message
from mics_fn.offload import Stored
from mics_fn.optim.flat import unpacked
from mics_fn.optim.runs import devices
from mics_fn.shards import Arrival, Arriving, reduced_over
from mics_fn.tree import Tree


class Refused(MicsError):
    """A step is not taken, since its gradients were refused; nothing was written."""


class Late:
    """Gradients that are made when a step asks for them, once; see [Note: states come first].

    Args:
      like: a tree of shards like that of the gradients, or what they are made of as it arrives.
      make: gives them, a tree or `Arriving`; what it raises ends the step.
    """

    def __init__(self, like: Tree | Arriving, make: Callable[[], Tree | Arriving]) -> None:
        self._like, self._make = like, make
        self._order: Sequence[Sequence[int]] = ()
        self._made: list[Any] = []

    def arrival(self) -> Arrival:
        """The gradients; nothing is made yet."""
        if isinstance(self._like, Arriving):
            like = self._like.arrival()
            self._order, shards, home = like.order, like.like, like.home
        else:
            shards, found = self._like, unpacked(self._like)
            self._order, home = [range(len(found.pieces))], reduced_over(found.leaves)
        given = shards, home, self._order, self._here, self._take, self._whole, self.made
        return Arrival(*given)

    def made(self) -> Any:
        """The gradients, an `Arrival` or a tree."""
        if not self._made:
            found = self._make()
            self._made.append(found.arrival() if isinstance(found, Arriving) else found)
        return self._made[0]

    def _here(self, place: int) -> bool:
        if not self._made:
            return False
        (found,) = self._made
        return not isinstance(found, Arrival) or found.here(place)

    def _take(self, place: int) -> list[Tensor]:
        found = self.made()
        if isinstance(found, Arrival):
            return found.take(place)
        pieces, count = unpacked(found).pieces, sum(map(len, self._order))
        if len(pieces) != count:
            text = f"opt_step: gradients of {count} leaves were given to what made {len(pieces)}"
            raise TreeError(message(text, fix="return a tree like the one that it was given"))
        return [pieces[i] for i in self._order[place]]

    def _whole(self) -> Tree:
        found = self.made()
        return found.whole() if isinstance(found, Arrival) else found


def has_to_come(params: Tree, opt: Any) -> bool:
    """Whether a step brings some of a state from a file or another device; not so on every rank."""
    held = [x for x in tree.flatten(opt)[0] if isinstance(x, Tensor)]
    held += unpacked(params).pieces
    return Stored in map(type, held) or len(set(devices(held))) > 1

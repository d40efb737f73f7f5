"""Gradients on their way: a tree of which some pieces have not arrived."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mics_fn.optim.flat import Unpacked, unpacked
from mics_fn.optim.runs import Run
from mics_fn.shards import Arrival, Arriving
from mics_fn.tree import Tree


@dataclass(frozen=True, eq=False)
class Coming(Unpacked):
    """Gradients whose buckets arrive one after the other.

    Until a piece has arrived, its place is held by that of its parameter, which has the same shape
    and device.

    Args:
      arrival: what they are taken from.
      numbers: of the pieces among those of the arrival, of whose tree this may be a part.
    """

    arrival: Arrival
    numbers: list[int]

    @classmethod
    def of(cls, arrival: Arrival) -> "Coming":
        """All gradients of an arrival."""
        like = unpacked(arrival.like)
        held = like.with_pieces([x.detach() for x in like.pieces])
        return cls(held.leaves, held.spec, held.pieces, arrival, list(range(len(held.pieces))))

    def arriving(self) -> Iterator[list[int]]:
        """The numbers of pieces that have arrived: first those that are here, then as they come."""
        own = {number: i for i, number in enumerate(self.numbers)}
        left = [
            k for k, bucket in enumerate(self.arrival.order) if not own.keys().isdisjoint(bucket)
        ]
        while left:
            here = [k for k in left if self.arrival.here(k)] or left[:1]
            left = [k for k in left if k not in here]
            yield [i for k in here for i in self._take(k, own)]

    def run_order(self, runs: Sequence[Run]) -> list[int]:
        """The numbers of runs, in the order in which they will have arrived."""
        own = {number: i for i, number in enumerate(self.numbers)}
        place = {
            own[n]: k for k, bucket in enumerate(self.arrival.order) for n in bucket if n in own
        }
        return sorted(range(len(runs)), key=lambda r: max(place[i] for i in runs[r].members))

    def _take(self, k: int, own: Mapping[int, int]) -> list[int]:
        """Wait for a bucket; the numbers of its pieces."""
        found = []
        for number, piece in zip(self.arrival.order[k], self.arrival.take(k), strict=True):
            if number in own:
                self.pieces[own[number]] = piece.detach()
                found.append(own[number])
        return found

    def drop(self, numbers: Iterable[int]) -> None:
        """Let go of pieces that were used: those that were brought need no memory any more."""
        for i in numbers:
            self.pieces[i] = self.pieces[i].new_empty(0)

    def part(self, leaves: list[Any], own: Sequence[int]) -> "Coming":
        """The tree with other leaves, of which only those pieces are left."""
        pieces, numbers = [self.pieces[i] for i in own], [self.numbers[i] for i in own]
        return Coming(leaves, self.spec, pieces, self.arrival, numbers)

    def settled(self) -> Unpacked:
        """The tree once all of it has arrived."""
        for _ in self.arriving():
            pass
        return self.with_pieces(self.pieces)


def gradients(given: Tree | Arriving) -> Unpacked:
    """Gradients taken apart, of which some may be on their way."""
    return Coming.of(given.arrival()) if isinstance(given, Arriving) else unpacked(given)


def settled(found: Unpacked) -> Unpacked:
    """The same tree once all of it is here."""
    return found.settled() if isinstance(found, Coming) else found

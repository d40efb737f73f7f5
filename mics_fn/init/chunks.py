"""The chunks of shards that are filled leaf by leaf, each put in its place when it is complete.

So of chunks that live in files, or as codes, few are in memory as values at the same time.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mics_fn.groups import Groups
from mics_fn.offload import DEVICE, Place, Where
from mics_fn.shards import Bucket, Laying, pack_chunk, pieces, split_chunk


@dataclass(eq=False)
class _Chunk:
    """One chunk: in memory while it is open, and then as pieces in their places."""

    home: Groups
    bucket: Bucket
    names: list[str | None] = field(default_factory=list)  # by slot
    places: list[Place] = field(default_factory=list)
    left: set[str] = field(default_factory=set)  # which have no value yet
    flat: Tensor | None = None
    laid: list[Tensor] | None = None

    @property
    def closes(self) -> bool:
        """Whether its values leave memory once they are complete: for a file, or as codes."""
        return self.bucket.codes is not None or any(place != DEVICE for place in self.places)

    @property
    def nbytes(self) -> int:
        return self.bucket.chunk * self.bucket.dtype.itemsize


class Chunks:
    """Chunks that are filled in any order, of which few are in memory if they live elsewhere.

    Args:
      where: the places of leaves.
    """

    def __init__(self, where: Where) -> None:
        self._laying = Laying(where)
        self._found: dict[tuple[Groups, Bucket], _Chunk] = {}
        self._of: dict[str, tuple[_Chunk, int]] = {}
        self._open: list[_Chunk] = []  # those that close, the oldest first

    def add(self, home: Groups, bucket: Bucket, slot: int, name: str) -> None:
        """A leaf that will be filled."""
        chunk = self._found.setdefault((home, bucket), _Chunk(home, bucket))
        if not chunk.names:
            chunk.names = [None] * len(bucket.shapes)
            chunk.places = [DEVICE] * len(bucket.shapes)
        chunk.names[slot] = name
        chunk.places[slot] = self._laying.place(name, home)
        if pieces(bucket, home.hierarchy.route.chunk)[slot].length:
            chunk.left.add(name)
        self._of[name] = chunk, slot

    def has(self, name: str) -> bool:
        """Whether a leaf lies in a chunk."""
        return name in self._of

    def order(self, names: Iterable[str]) -> list[str]:
        """Names bucket by bucket, so that the fewest chunks are open at once."""
        place = {id(chunk): i for i, chunk in enumerate(self._found.values())}
        last = len(place)
        return sorted(names, key=lambda n: place[id(self._of[n][0])] if n in self._of else last)

    def memory(self, name: str) -> Tensor:
        """The memory of a leaf's piece, to be written to before the next one is asked for."""
        chunk, slot = self._of[name]
        flat = self._opened(chunk)
        return split_chunk(chunk.bucket, chunk.home.hierarchy.route.chunk, flat)[slot]

    def _opened(self, chunk: _Chunk) -> Tensor:
        if chunk.flat is not None:
            return chunk.flat
        device, dtype = chunk.home.device, chunk.bucket.dtype
        if chunk.closes:
            while self._open and self._nbytes + chunk.nbytes > self._laying.host_bytes:
                self._close(self._open[0])  # not complete: it will be opened again
            self._open.append(chunk)
        if chunk.laid is None:
            chunk.flat = torch.zeros(chunk.bucket.chunk, dtype=dtype, device=device)
        else:
            number, how = chunk.home.hierarchy.route.chunk, {"device": device, "dtype": dtype}
            chunk.flat = pack_chunk(chunk.bucket, number, chunk.laid, **how)
        return chunk.flat

    @property
    def _nbytes(self) -> int:
        return sum(chunk.nbytes for chunk in self._open)

    def filled(self, name: str) -> None:
        """A leaf of a chunk, or any other, has its value now."""
        if name in self._of:
            chunk, _ = self._of[name]
            chunk.left.discard(name)
            if not chunk.left:
                self._close(chunk)

    def _close(self, chunk: _Chunk) -> None:
        """Put an open chunk in its place."""
        if chunk.flat is None or chunk not in self._open:
            return
        names = [name or "" for name in chunk.names]
        chunk.laid = None  # what it had before goes first
        chunk.laid = self._laying.put(chunk.home, chunk.bucket, chunk.flat, chunk.places, names)
        chunk.flat = None
        self._open.remove(chunk)

    def settled(self, hear: Callable[[], None]) -> dict[str, Tensor]:
        """The piece of each leaf, in its place.

        Args:
          hear: called before each chunk; raises to leave this work.

        Raises:
          OffloadError: a file cannot be made or written.
        """
        for chunk in self._found.values():
            hear()
            if chunk.laid is None:
                flat = self._opened(chunk)
                self._close(chunk)
                if chunk.laid is None:  # on the device
                    number = chunk.home.hierarchy.route.chunk
                    chunk.laid = split_chunk(chunk.bucket, number, flat)
            elif chunk.flat is not None:
                self._close(chunk)
        return {name: chunk.laid[slot] for name, (chunk, slot) in self._of.items() if chunk.laid}

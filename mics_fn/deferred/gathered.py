"""A bucket as deferred tensors see it, and the interface of what makes it live."""

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

Geometry = tuple[tuple[int, ...], tuple[int, ...], int]  # size, stride, offset; in elements


class GatheredBucket:
    """One bucket as deferred tensors see it: live or not."""

    __slots__ = ("_names", "full", "high", "ids", "low", "stays", "views")

    def __init__(self, index: int, names: Callable[[int], Sequence[str]]) -> None:
        self.ids = (index,)
        self._names = names
        self.full: Tensor | None = None  # 1D, whole bucket; None where it is not live
        self.views: dict[Geometry, Tensor] = {}
        self.low, self.high = 1, 0  # addresses of `full`
        self.stays = False  # once live it stays live, so that further uses are not reported

    def fill(self, full: Tensor, *, has_data: bool) -> None:
        """Make the bucket live; views of its previous buffer are dropped."""
        self.full, self.views = full, {}
        if has_data:
            self.low = full.data_ptr()
            self.high = self.low + full.nbytes

    def names(self) -> Sequence[str]:
        """Names of its leaves, for error texts."""
        return self._names(self.ids[0])

    def clear(self) -> None:
        """Drop the bucket and its views."""
        self.full, self.views = None, {}
        self.low, self.high = 1, 0


class Source(Protocol):
    """What makes buckets live."""

    ids: tuple[int, ...]  # the buckets that the previous op needed

    def touch(self, ids: tuple[int, ...]) -> None:
        """Make these buckets live at the same time."""
        ...

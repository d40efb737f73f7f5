"""A bucket as deferred tensors see it, and the interface of what makes it live.

[Note: several streams] A model may compute on several streams of an accelerator, and a bucket is
fetched for the first op that needs it. So each stream that reads a bucket waits for its gather, and
whoever drops the bucket, after which another one may use its memory, waits for all of them.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from mics_fn import _device

Geometry = tuple[tuple[int, ...], tuple[int, ...], int]  # size, stride, offset; in elements


class GatheredBucket:
    """One bucket as deferred tensors see it: live or not."""

    __slots__ = ("_names", "_readers", "_ready", "full", "high", "ids", "low", "stays", "views")

    def __init__(self, index: int, names: Callable[[int], Sequence[str]]) -> None:
        self.ids = (index,)
        self._names = names
        self.full: Tensor | None = None  # 1D, whole bucket; None where it is not live
        self.views: dict[Geometry, Tensor] = {}
        self.low, self.high = 1, 0  # addresses of `full`
        self.stays = False  # once live it stays live, so that further uses are not reported
        # See [Note: several streams]; no event where work is done when a call returns.
        self._ready: torch.Event | None = None
        self._readers: set[torch.Stream] = set()

    def fill(self, full: Tensor, ready: torch.Event | None, *, has_data: bool) -> None:
        """Make the bucket live; views of its previous buffer are dropped.

        Args:
          full: the whole bucket.
          ready: what a stream waits for before it reads it.
          has_data: whether it has memory.
        """
        self.full, self.views, self._ready = full, {}, ready
        if has_data:
            self.low = full.data_ptr()
            self.high = self.low + full.nbytes

    def names(self) -> Sequence[str]:
        """Names of its leaves, for error texts."""
        return self._names(self.ids[0])

    def read(self, where: Geometry) -> Tensor:
        """A view of the bucket, for an op on the current stream; see [Note: several streams]."""
        if self.full is None:
            raise RuntimeError("a bucket is not live where an op needs it")
        if self._ready is not None:
            stream = _device.current_stream(self.full.device)
            if stream not in self._readers:
                stream.wait_event(self._ready)
                self._readers.add(stream)
        view = self.views.get(where)
        if view is None:
            size, stride, offset = where  # in the bucket, which lies somewhere in its memory
            offset += int(self.full.storage_offset())
            view = self.views[where] = self.full.as_strided(size, stride, offset)
        return view

    def clear(self) -> None:
        """Drop the bucket and its views; the current stream waits for all that have read it."""
        if self.full is not None:
            for stream in self._readers:
                _device.current_stream(self.full.device).wait_stream(stream)
        self._readers.clear()
        self.full, self.views, self._ready = None, {}, None
        self.low, self.high = 1, 0


class Source(Protocol):
    """What makes buckets live."""

    ids: tuple[int, ...]  # the buckets that the previous op needed

    def touch(self, ids: tuple[int, ...]) -> None:
        """Make these buckets live at the same time."""
        ...

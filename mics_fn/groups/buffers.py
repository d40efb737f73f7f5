"""Memory that collectives reuse from step to step."""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from mics_fn import _device, _torch

_PATIENCE = 16  # a buffer that stayed free during `_PATIENCE * made` takes is let go


class Buffers:
    """A pool of memory that collectives take and give back, so that every step uses the same.

    The system would map fresh memory of this size page by page each time. A free buffer serves any
    dtype and shape that needs at most its bytes. On an accelerator, the next user of a buffer waits
    for the work that was queued on the current stream when the buffer was given back.

    Args:
      keep: how many free buffers to keep; None for all.

    Example:
      >>> buffers = Buffers()
      >>> first = buffers.take((2, 3), torch.float32, torch.device("cpu"))
      >>> buffers.give(first)
      >>> buffers.take((5,), torch.float32, torch.device("cpu")).data_ptr() == first.data_ptr()
      True
      >>> buffers.made
      1
    """

    def __init__(self, keep: int | None = None) -> None:
        self.keep = keep
        self.made = 0  # how many buffers were allocated
        self._takes = 0
        # 1D, uint8; the event to wait for; and the value of `_takes` when it was given back.
        self._free: list[tuple[Tensor, Any, int]] = []

    def take(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, exact: bool = False
    ) -> Tensor:
        """An uninitialised tensor in the smallest free buffer that is large enough, else a new one.

        With `exact` only a buffer of its own size will do, as for tensors that are kept for long.
        """
        nbytes = prod(shape) * dtype.itemsize
        self._takes += 1
        fits = [
            (event is not None and not event.query(), raw.nbytes, i)
            for i, (raw, event, _) in enumerate(self._free)
            if raw.device == device and (raw.nbytes == nbytes if exact else raw.nbytes >= nbytes)
        ]
        # If the only buffer that fits is still being read, a second one saves the wait: from then
        # on the two alternate.
        if not nbytes or not fits or (len(fits) == 1 and fits[0][0] and not exact):
            if nbytes:
                self._free_unused()
                self.made += 1
            return torch.empty(shape, dtype=dtype, device=device)
        raw, event, _ = self._free.pop(min(fits)[2])
        if event is not None:
            _device.wait(device, event)
        return raw[:nbytes].view(dtype).view(shape)

    def _free_unused(self) -> None:
        """Free buffers that nobody takes any more, such as those of a model that is gone."""
        since = self._takes - _PATIENCE * self.made
        self._free = [
            (raw, event, given)
            for raw, event, given in self._free
            if given >= since or (event is not None and not event.query())
        ]

    @property
    def waiting_bytes(self) -> int:
        """Bytes of the free buffers."""
        return sum(raw.nbytes for raw, _, _ in self._free)

    def give(self, tensor: Tensor) -> None:
        """Give back a tensor that nobody uses any more; queued work may still use it."""
        if not tensor.numel() or _torch.has_no_data(tensor):
            return
        storage = tensor.untyped_storage()
        raw = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        event = _device.record(tensor.device) if _device.is_async(tensor.device) else None
        self._free.append((raw, event, self._takes))
        if self.keep is not None and len(self._free) > self.keep:
            self._free.sort(key=lambda waiting: -waiting[0].nbytes)
            del self._free[self.keep :]


class Slots:
    """A fixed number of pairs of buffers, used in turn; their number does not depend on timing.

    Args:
      count: how many pairs.

    Example:
      >>> slots = Slots(2)
      >>> pair = slots.pair(4, (3,), torch.float32, torch.device("cpu"))
      >>> [buffer.shape for buffer in pair], slots.made
      ([torch.Size([3]), torch.Size([3])], 1)
    """

    def __init__(self, count: int) -> None:
        self.count, self.made = count, 0
        self.users: list[Any] = [None] * count  # the last user of each pair; set by the users
        self._raw: list[tuple[Tensor, Tensor] | None] = [None] * count

    @property
    def nbytes(self) -> int:
        """Bytes of all pairs that were allocated."""
        return sum(2 * pair[0].nbytes for pair in self._raw if pair is not None)

    def pair(
        self, place: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Two uninitialised tensors in the memory of pair `place % count`."""
        nbytes, at = prod(shape) * dtype.itemsize, place % self.count
        raw = self._raw[at]
        if raw is None or raw[0].nbytes < nbytes or raw[0].device != device:
            # Allocate the largest size seen so far at once, so that pairs do not grow step by step.
            size = max([nbytes, *(pair[0].nbytes for pair in self._raw if pair is not None)])
            empty = {"dtype": torch.uint8, "device": device}
            raw = self._raw[at] = (torch.empty(size, **empty), torch.empty(size, **empty))
            self.made += 1
        first, second = (buffer[:nbytes].view(dtype).view(shape) for buffer in raw)
        return first, second

"""Memory of one run, and of reductions in flight: parts of one buffer that a pool has."""

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from mics_fn import _torch
from mics_fn.groups import Buffers

_ALIGN_BYTES = 512  # where the buffers of a lease begin
LEAST_RING = 2**16  # bytes that let small buckets pass without a wait, and cost nothing

_Part = tuple[int, int, torch.Event | None]  # start, end, and what its next user waits for


class Arena:
    """Memory of one run: a pooled buffer with a planned offset for each tensor.

    It is taken with the first tensor and given back with the last one, so that runs that take turns
    share one buffer, and runs at the same time have one each. What has no place in the plan lies in
    the first gap that is large enough, or in a buffer of its own. On an accelerator the taker of a
    part waits, on its stream, for the work that was queued when what lay there was given back.

    Args:
      pool: has the memory.
      nbytes: of all parts; 0 without a plan.
      device: of the memory.

    Example:
      >>> pool = Buffers()
      >>> arena = Arena(pool, 24, torch.device("cpu"))
      >>> first, second = (arena.take(2, torch.float32, at) for at in (0, 8))
      >>> arena.give(first)
      >>> third = arena.take(1, torch.float64)
      >>> first.data_ptr() == third.data_ptr() == second.data_ptr() - 8, pool.made
      (True, 1)
    """

    def __init__(self, pool: Buffers, nbytes: int, device: torch.device) -> None:
        self._pool, self._nbytes, self._device = pool, nbytes, device
        self._raw: Tensor | None = None  # 1D, uint8; None while nothing lies in it
        self._lent = 0  # how many tensors lie in it
        self._free: list[_Part] = [(0, nbytes, None)]  # the parts that are free, in order

    def take(self, numel: int, dtype: torch.dtype, at: int | None = None) -> Tensor:
        """An uninitialised 1D tensor.

        Args:
          numel, dtype: of the tensor.
          at: where it begins, in bytes; nothing that lies there is in use. None finds a place.
        """
        nbytes = numel * dtype.itemsize
        if at is None and (at := self._gap(nbytes)) is None:
            return self._pool.take((numel,), dtype, self._device)
        if self._raw is None:
            self._raw = self._pool.take((self._nbytes,), torch.uint8, self._device)
        self._lent += 1
        self._occupy(at, at + nbytes)
        # Not a view: what is written beside it must not count as a change of this tensor.
        tensor, start = torch.empty(0, dtype=dtype, device=self._device), at // dtype.itemsize
        return tensor.set_(self._raw.untyped_storage(), start, (numel,), (1,))

    def _gap(self, nbytes: int) -> int | None:
        """Where the first gap of so many bytes begins, over free parts that touch."""
        first = last = 0
        for start, stop, _ in self._free:
            first, last = first if start == last else start, stop
            if last - first >= nbytes:
                return first
        return None

    def _occupy(self, start: int, stop: int) -> None:
        """Wait for what lay in free parts, and cut this range out of them."""
        low = bisect_right(self._free, start, key=lambda part: part[1])
        high = bisect_left(self._free, stop, key=lambda part: part[0])
        over = self._free[low:high]
        self._wait_for(over)
        rest = (over[0][0], start, over[0][2]), (stop, *over[-1][1:])
        self._free[low:high] = [part for part in rest if part[0] < part[1]]

    def _wait_for(self, parts: Iterable[_Part]) -> None:
        for _, _, event in parts:
            if event is not None:
                _torch.wait(self._device, event)

    def give(self, tensor: Tensor) -> None:
        """Give back a tensor that nobody uses any more; queued work may still use it."""
        raw, storage = self._raw, tensor.untyped_storage()
        if raw is None or storage.data_ptr() != raw.untyped_storage().data_ptr():
            return self._pool.give(tensor)
        event = _torch.record(self._device) if _torch.is_async(self._device) else None
        start = int(tensor.storage_offset()) * tensor.itemsize
        insort(self._free, (start, start + tensor.nbytes, event), key=lambda part: part[0])
        self._lent -= 1
        if not self._lent:
            self._wait_for(self._free)
            self._raw, self._free = None, [(0, self._nbytes, None)]
            self._pool.give(raw)
        return None

    def __del__(self) -> None:
        if self._raw is not None:  # of a run that failed, with a transfer that still writes to it
            self._wait_for(self._free)
            self._pool.let_go(self._raw)


class Lease:
    """A part of a ring: at least two buffers for one bucket, lent until their user is done."""

    def __init__(self, raw: Tensor, start: int, sizes: Sequence[int]) -> None:
        self.start, self.stop = start, start + sum(sizes)
        self.first, self.second, *self.more = raw[start : self.stop].split(list(sizes))
        self.until: Callable[[], object] = lambda: None  # waits for its user; set by that


class Ring:
    """Ring buffer whose parts are freed in the order in which they were taken.

    So what is in flight at a time is bounded in bytes, and not only in number: a part is as large
    as its user needs, and waits until enough of the ring is free again.

    Example:
      >>> ring, sizes = Ring(), lease_sizes((1000, 24))
      >>> leases = [ring.lend(sizes, sum(sizes) * 2, 3, torch.device("cpu")) for _ in "abc"]
      >>> sizes, [lease.start for lease in leases], ring.made
      ((1024, 512), [0, 1536, 0], 1)
    """

    def __init__(self) -> None:
        self.made = 0  # how often it was allocated
        self.nbytes = 0  # that it holds
        self._pool, self._raw = Buffers(), None  # 1D, uint8; no tensor is made in a transform
        self._next = 0  # where the next part begins, if it fits there
        self._lent: deque[Lease] = deque()

    def lend(self, sizes: Sequence[int], capacity: int, count: int, device: torch.device) -> Lease:
        """A part with these buffers, uninitialised; waits for the users of that memory.

        Args:
          sizes: bytes of each buffer, at least two, as `lease_sizes` gives them.
          capacity: bytes that the ring has at least.
          count: the most parts that are lent at a time.
          device: of the memory.
        """
        nbytes, device = sum(sizes), _torch.with_index(device)
        raw: Any = self._raw
        if raw is None or self.nbytes < max(nbytes, capacity) or raw.device != device:
            while self._lent:
                self._lent.popleft().until()
            if raw is not None:
                self._pool.let_go(raw)
            raw = self._raw = None  # freed before the next is made
            self.nbytes = max(nbytes, capacity)
            raw = self._raw = self._pool.take((self.nbytes,), torch.uint8, device)
            self._next, self.made = 0, self.made + 1
        start = self._next if self._next + nbytes <= self.nbytes else 0
        stop = self._next = start + nbytes
        while len(self._lent) >= count or any(
            start < lease.stop and lease.start < stop for lease in self._lent
        ):
            self._lent.popleft().until()
        self._lent.append(Lease(raw, start, sizes))
        return self._lent[-1]


def lease_sizes(sizes: Sequence[int]) -> tuple[int, ...]:
    """Bytes of buffers in a ring, where each begins at a multiple of `_ALIGN_BYTES`."""
    return tuple(-(-nbytes // _ALIGN_BYTES) * _ALIGN_BYTES for nbytes in sizes)

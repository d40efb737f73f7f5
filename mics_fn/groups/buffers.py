"""Memory that collectives reuse from step to step."""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Sequence
from math import prod

import torch
from torch import Tensor

from mics_fn import _device, _torch

_PATIENCE = 16  # a size that nobody took during `_PATIENCE * made` takes is let go
_ALIGN_BYTES = 512  # where the parts of a ring begin
LEAST_RING = 2**16  # bytes that let small buckets pass without a wait, and cost nothing

_Size = tuple[str, int]  # device, bytes


class Buffers:
    """A pool of memory that collectives take and give back, so that every step uses the same.

    The system would map fresh memory of this size page by page each time. A free buffer serves any
    dtype and shape that needs at most its bytes. If all free ones are too small, the new one takes
    the place of the largest, so there are never more buffers than were in use at once. Which buffer
    is taken depends only on the order of takes and gives: of those of one size the one that was
    given back first. On an accelerator its next user waits, on its stream, for the work that was
    queued on the current stream when the buffer was given back; the host asks for nothing.

    Example:
      >>> buffers = Buffers()
      >>> first = buffers.take((2, 3), torch.float32, torch.device("cpu"))
      >>> buffers.give(first)
      >>> buffers.take((5,), torch.float32, torch.device("cpu")).data_ptr() == first.data_ptr()
      True
      >>> buffers.made
      1
    """

    def __init__(self) -> None:
        self.made = 0  # how many buffers were allocated
        self._takes = 0
        # 1D, uint8, with the event to wait for; the one that was given back first comes first.
        self._free: dict[_Size, deque[tuple[Tensor, torch.Event | None]]] = {}
        self._sizes: list[_Size] = []  # those with a free buffer, sorted
        # The value of `_takes` when a buffer of a size was last given back; least recent first.
        self._given: dict[_Size, int] = {}
        self._streams: dict[int, torch.Stream] = {}  # where memory was made, by its address

    def take(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        *,
        exact: bool = False,
        room: int = 0,
    ) -> Tensor:
        """An uninitialised tensor in the smallest free buffer that is large enough, else a new one.

        Args:
          shape, dtype, device: of the tensor.
          exact: only a buffer of its own size will do, as for tensors that are kept for long.
          room: only a buffer of so many bytes will do, as a plan says; see `schedules.rooms`.
        """
        nbytes = prod(shape) * dtype.itemsize
        if not nbytes:
            return torch.empty(shape, dtype=dtype, device=device)
        raw = self._lend(max(room, nbytes), device, exact or room > 0)
        return raw[:nbytes].view(dtype).view(shape)

    def _lend(self, room: int, device: torch.device, exact: bool) -> Tensor:
        self._takes += 1
        where = str(_device.with_index(device))
        at = bisect_left(self._sizes, (where, room))
        size = self._sizes[at] if at < len(self._sizes) else ("", 0)
        if size[0] == where and (size[1] == room or not exact):
            return self._pop(at)
        self._make_room(where, None if exact else at - 1)
        self.made += 1
        raw = torch.empty(room, dtype=torch.uint8, device=device)
        if _device.is_async(device):
            self._streams[raw.data_ptr()] = _device.current_stream(device)
        return raw

    def _pop(self, at: int) -> Tensor:
        """Take the free buffer that waits longest, of the size at this place."""
        size = self._sizes[at]
        raw, event = self._free[size].popleft()
        if not self._free[size]:
            del self._sizes[at], self._free[size]
        if event is not None:
            _device.wait(raw.device, event)
        return raw

    def _make_room(self, where: str, too_small: int | None) -> None:
        """Before a buffer is made, let go of those whose place it takes."""
        if too_small is not None and too_small >= 0 and self._sizes[too_small][0] == where:
            self._let_go(too_small)
        since = self._takes - _PATIENCE * self.made  # such as buffers of a model that is gone
        while self._given and self._given[size := next(iter(self._given))] < since:
            del self._given[size]
            for _ in range(len(self._free.get(size, ()))):
                self._let_go(bisect_left(self._sizes, size))

    def provide(self, sizes: Sequence[int], device: torch.device) -> None:
        """Have one free buffer of each of these sizes in bytes, and let go of the others."""
        kept = [self._lend(nbytes, device, exact=True) for nbytes in sizes]
        while self._sizes:
            self._let_go(0)
        for raw in kept:
            self._take_back(raw)

    def _let_go(self, at: int) -> None:
        raw = self._pop(at)
        _follow(self._streams.pop(raw.data_ptr(), None), raw.device)

    @property
    def waiting_bytes(self) -> int:
        """Bytes of the free buffers."""
        return sum(nbytes * len(self._free[where, nbytes]) for where, nbytes in self._sizes)

    def give(self, tensor: Tensor) -> None:
        """Give back a tensor that nobody uses any more; queued work may still use it."""
        if not tensor.numel() or _torch.has_no_data(tensor):
            return
        empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        self._take_back(empty.set_(tensor.untyped_storage()))

    def _take_back(self, raw: Tensor) -> None:
        device = raw.device
        event = _device.record(device) if _device.is_async(device) else None
        size = (str(device), raw.nbytes)
        if size not in self._free:
            self._free[size] = deque()
            insort(self._sizes, size)
        self._free[size].append((raw, event))
        self._given.pop(size, None)
        self._given[size] = self._takes


def _follow(stream: torch.Stream | None, device: torch.device) -> None:
    """Before memory goes back to the stream it was made on: that waits for the current one."""
    if stream is not None and stream != (current := _device.current_stream(device)):
        stream.wait_stream(current)


class Slot:
    """A part of a ring: two buffers for one bucket, until what uses them is over."""

    def __init__(self, raw: Tensor, start: int, sizes: tuple[int, int]) -> None:
        first, second = sizes
        middle = start + _aligned(first)
        self.start, self.stop = start, middle + _aligned(second)
        self.first, self.second = raw[start : start + first], raw[middle : middle + second]
        self.until: Callable[[], object] = lambda: None  # waits for its user; set by that

    def overlaps(self, start: int, stop: int) -> bool:
        """Whether it has bytes in this range."""
        return self.start < stop and start < self.stop


class Ring:
    """One piece of memory that is lent part by part, and comes back in the same order.

    So what is in flight at a time is bounded in bytes, and not only in number: a part is as large
    as its user needs, and waits until enough of the ring is free again.

    Example:
      >>> ring, sizes = Ring(), (1000, 24)
      >>> slots = [ring.lend(sizes, ring_bytes(sizes) * 2, 3, torch.device("cpu")) for _ in "abc"]
      >>> [slot.start for slot in slots], slots[0].first.shape, ring.made
      ([0, 1536, 0], torch.Size([1000]), 1)
    """

    def __init__(self) -> None:
        self.made = 0  # how often it was allocated
        self._raw = torch.empty(0, dtype=torch.uint8)
        self._stream: torch.Stream | None = None  # where it was made
        self._next = 0  # where the next part begins, if it fits there
        self._lent: deque[Slot] = deque()

    @property
    def nbytes(self) -> int:
        """Bytes that it holds."""
        return self._raw.nbytes

    def lend(self, sizes: tuple[int, int], capacity: int, count: int, device: torch.device) -> Slot:
        """A part with two buffers, uninitialised; waits for the users of that memory.

        Args:
          sizes: bytes of each buffer.
          capacity: bytes that the ring has at least.
          count: the most parts that are lent at a time.
          device: of the memory.
        """
        nbytes, device = ring_bytes(sizes), _device.with_index(device)
        if self.nbytes < max(nbytes, capacity) or self._raw.device != device:
            while self._lent:
                self._lent.popleft().until()
            _follow(self._stream, self._raw.device)
            self._raw = torch.empty(0, dtype=torch.uint8)  # freed before the next is made
            if _device.is_async(device):
                self._stream = _device.current_stream(device)
            self._raw = torch.empty(max(nbytes, capacity), dtype=torch.uint8, device=device)
            self._next, self.made = 0, self.made + 1
        start = self._next if self._next + nbytes <= self.nbytes else 0
        stop = self._next = start + nbytes
        while len(self._lent) >= count or any(slot.overlaps(start, stop) for slot in self._lent):
            self._lent.popleft().until()
        self._lent.append(Slot(self._raw, start, sizes))
        return self._lent[-1]


def ring_bytes(sizes: tuple[int, int]) -> int:
    """Bytes of a part of a ring with two buffers of these sizes."""
    return _aligned(sizes[0]) + _aligned(sizes[1])


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN_BYTES) * _ALIGN_BYTES

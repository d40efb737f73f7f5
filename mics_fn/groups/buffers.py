"""Memory that collectives reuse from step to step."""

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from mics_fn import _torch

_PATIENCE = 16  # a buffer that nobody took during `_PATIENCE * made` takes is let go
_ALIGN_BYTES = 512  # where the parts of a ring begin
LEAST_RING = 2**16  # bytes that let small buckets pass without a wait, and cost nothing

_Part = tuple[int, int, torch.Event | None]  # start, end, and what its next user waits for


class _Free(NamedTuple):
    """A free buffer; those of one size are taken in the order in which they were given back."""

    where: str  # its device
    nbytes: int
    since: int  # when it was given back, by the clock of its pool: no two are equal
    raw: Tensor  # 1D, uint8
    event: torch.Event | None  # what its next user waits for


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
        self._clock = 0  # of takes and gives
        self._free: list[_Free] = []  # sorted
        self._streams: dict[int, torch.Stream] = {}  # where memory was made, by its address

    def take(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        *,
        exact: bool = False,
    ) -> Tensor:
        """An uninitialised tensor in the smallest free buffer that is large enough, else a new one.

        Args:
          shape, dtype, device: of the tensor.
          exact: only a buffer of its own size will do, as for tensors that are kept for long.
        """
        nbytes = prod(shape) * dtype.itemsize
        if not nbytes:
            return torch.empty(shape, dtype=dtype, device=device)
        self._clock += 1
        where = str(_torch.with_index(device))
        at = bisect_left(self._free, (where, nbytes))
        size = self._free[at][:2] if at < len(self._free) else ("", 0)
        if size[0] == where and (size[1] == nbytes or not exact):
            raw = self._ready(self._free.pop(at))
        else:
            if not exact and at and self._free[at - 1].where == where:  # it is too small
                self.let_go(self._free.pop(at - 1))
            oldest = self._clock - 2 * _PATIENCE * self.made  # such as one of a model that is gone
            for place in reversed(range(len(self._free))):
                if self._free[place].since < oldest:
                    self.let_go(self._free.pop(place))
            self.made += 1
            raw = torch.empty(nbytes, dtype=torch.uint8, device=device)
            if _torch.is_async(device):
                self._streams[raw.data_ptr()] = _torch.current_stream(device)
        return raw[:nbytes].view(dtype).view(shape)

    def _ready(self, free: _Free) -> Tensor:
        """The memory of a buffer for work that is queued from now on."""
        if free.event is not None:
            _torch.wait(free.raw.device, free.event)
        return free.raw

    def provide(self, nbytes: int, device: torch.device) -> None:
        """Have one free buffer of this size in bytes, and let go of all others."""
        size = (str(_torch.with_index(device)), nbytes)
        kept = bisect_left(self._free, size)
        for place in reversed(range(len(self._free))):
            if place != kept or self._free[place][:2] != size:
                self.let_go(self._free.pop(place))
        if nbytes and not self._free:
            self.give(self.take((nbytes,), torch.uint8, device, exact=True))

    def let_go(self, free: _Free) -> None:
        """Before a buffer is freed, and not given back: order that after the current stream."""
        raw = self._ready(free)
        _follow(self._streams.pop(raw.data_ptr(), None), raw.device)

    @property
    def waiting_bytes(self) -> int:
        """Bytes of the free buffers."""
        return sum(each.nbytes for each in self._free)

    def give(self, tensor: Tensor) -> None:
        """Give back a tensor that nobody uses any more; queued work may still use it."""
        if not tensor.numel() or _torch.has_no_data(tensor):
            return
        with _torch.without_torch_func():  # a run may end inside of it
            raw = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            raw = raw.set_(tensor.untyped_storage())
        device = raw.device
        event = _torch.record(device) if _torch.is_async(device) else None
        self._clock += 1
        insort(self._free, _Free(str(device), raw.nbytes, self._clock, raw, event))


def _follow(stream: torch.Stream | None, device: torch.device) -> None:
    """Make the stream that allocated memory wait for the current one, before it is freed."""
    if stream is not None and stream != (current := _torch.current_stream(device)):
        stream.wait_stream(current)


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
        # The parts that are free, in order.
        self._free: list[_Part] = []

    def take(self, numel: int, dtype: torch.dtype, at: int | None = None) -> Tensor:
        """An uninitialised 1D tensor.

        Args:
          numel, dtype: of the tensor.
          at: where it begins, in bytes; nothing that lies there is in use. None finds a place.
        """
        nbytes = numel * dtype.itemsize
        free: list[_Part] = [(0, self._nbytes, None)] if self._raw is None else self._free
        if at is None and (at := _gap(free, nbytes)) is None:
            return self._pool.take((numel,), dtype, self._device)
        if self._raw is None:
            self._raw = self._pool.take((self._nbytes,), torch.uint8, self._device)
            self._free = free
        self._lent += 1
        self._occupy(at, at + nbytes)
        # Not a view: what is written beside it must not count as a change of this tensor.
        tensor, start = torch.empty(0, dtype=dtype, device=self._device), at // dtype.itemsize
        return tensor.set_(self._raw.untyped_storage(), start, (numel,), (1,))

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
            self._raw, self._free = None, []
            self._pool.give(raw)
        return None

    def __del__(self) -> None:
        if self._raw is not None:  # of a run that failed, with a transfer that still writes to it
            self._wait_for(self._free)
            self._pool.let_go(_Free("", 0, 0, self._raw, None))


def _gap(free: Sequence[_Part], nbytes: int) -> int | None:
    """Where the first gap of so many bytes begins, over free parts that touch."""
    first = last = 0
    for start, stop, _ in free:
        first, last = first if start == last else start, stop
        if last - first >= nbytes:
            return first
    return None


class Lease:
    """A part of a ring: at least two buffers for one bucket, lent until their user is done."""

    def __init__(self, raw: Tensor, start: int, sizes: Sequence[int]) -> None:
        self.start = start
        self.first, self.second, *self.more = raw[start : start + sum(sizes)].split(list(sizes))
        self.stop = start + sum(sizes)
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
        self._raw = torch.empty(0, dtype=torch.uint8)
        self._stream: torch.Stream | None = None  # where it was made
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
        if self.nbytes < max(nbytes, capacity) or self._raw.device != device:
            while self._lent:
                self._lent.popleft().until()
            _follow(self._stream, self._raw.device)
            self._raw = torch.empty(0, dtype=torch.uint8)  # freed before the next is made
            if _torch.is_async(device):
                self._stream = _torch.current_stream(device)
            self.nbytes = max(nbytes, capacity)
            self._raw = torch.empty(self.nbytes, dtype=torch.uint8, device=device)
            self._next, self.made = 0, self.made + 1
        start = self._next if self._next + nbytes <= self.nbytes else 0
        stop = self._next = start + nbytes
        while len(self._lent) >= count or any(
            start < lease.stop and lease.start < stop for lease in self._lent
        ):
            self._lent.popleft().until()
        self._lent.append(Lease(self._raw, start, sizes))
        return self._lent[-1]


def lease_sizes(sizes: Sequence[int]) -> tuple[int, ...]:
    """Bytes of buffers in a ring, where each begins at a multiple of `_ALIGN_BYTES`."""
    return tuple(-(-nbytes // _ALIGN_BYTES) * _ALIGN_BYTES for nbytes in sizes)

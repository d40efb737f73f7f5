"""Streams, events, memory and generators of a device: the only file that knows kinds of devices.

It is written against `torch.accelerator` and `torch.Stream`, so CUDA, ROCm, XPU and others that
torch knows need nothing of their own. On the CPU work is done when a call returns, so nothing here
is called but `is_async`, `backend`, `lazy_zeros` and `total_memory`.
"""

import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist


def is_async(device: torch.device) -> bool:
    """Whether work on a device is queued on streams while the host goes on."""
    return device.type not in ("cpu", "meta")


def with_index(device: torch.device) -> torch.device:
    """The device with the number of the current one, if it has none."""
    if device.index is not None or not is_async(device):
        return device
    return torch.device(device.type, torch.accelerator.current_device_index())


def backend(device: torch.device) -> str:
    """The backend of torch.distributed that moves tensors of a device.

    >>> backend(torch.device("cpu")), backend(torch.device("cuda", 1))
    ('gloo', 'nccl')
    """
    return dist.get_default_backend_for_device(device)


def current_stream(device: torch.device) -> torch.Stream:
    """The stream that ops on a device are queued on now."""
    return torch.accelerator.current_stream(device)


def own_stream(device: torch.device) -> torch.Stream:
    """A new stream for collectives, whose kernels go before those of compute streams.

    Compute would otherwise fill the device with blocks that a short collective has to wait for.
    """
    return torch.Stream(device, priority=-1)


@contextmanager
def keep_stream(device: torch.device) -> Iterator[torch.Stream]:
    """A block that may queue work on other streams; its value is the stream before and after it."""
    with torch.accelerator.device_index(device.index):  # `set_stream` changes the current device
        before = current_stream(device)
        try:
            yield before
        finally:
            torch.accelerator.set_stream(before)


def follow(stream: torch.Stream, device: torch.device) -> None:
    """Queue later work on `stream`, behind everything queued on the current stream."""
    current = current_stream(device)
    if stream != current:
        stream.wait_stream(current)
        torch.accelerator.set_stream(stream)


def record(device: torch.device) -> torch.Event:
    """An event that is over once all work on the current stream until now is done."""
    return current_stream(device).record_event()


def wait(device: torch.device, event: torch.Event) -> None:
    """Make the current stream wait for an event; the host goes on."""
    current_stream(device).wait_event(event)


def synchronize(device: torch.device) -> None:
    """Make the host wait for the current stream."""
    if is_async(device):
        current_stream(device).synchronize()


def finish(device: torch.device) -> None:
    """Make the host wait for all work that is queued on a device, on any stream."""
    if is_async(device):
        torch.accelerator.synchronize(device)


class Queued:
    """What is queued on the current stream of a device until now, and whether it ends well.

    [Note: aborted collectives] The host runs ahead of a device. Where collectives are aborted,
    their kernels end without a result, and what is queued behind them goes on with whatever is in
    their memory. So an event that is over says nothing after an abort: what was not over before it
    is lost. A device can tell by itself: it copies `abort_flag` from the host behind the last
    collective. If that was 0, no abort had begun, so all before it was done.

    Args:
        device: that it is queued on.
        lose: called where collectives are aborted before it is over; it runs on any thread.
    """

    def __init__(self, device: torch.device, lose: Callable[[], None] = lambda: None) -> None:
        self.lost, self._lose, self._event = False, lose, record(device)
        with _LOCK:
            while _QUEUED and _QUEUED[0].has_ended():
                _QUEUED.popleft()
            _QUEUED.append(self)

    def has_ended(self) -> bool:
        """Whether the device is done with it, however it ended; the host does not wait."""
        return self._event.query()

    def wait(self) -> bool:
        """Make the host wait for its end; returns whether it ended well."""
        self._event.synchronize()
        return not self.lost

    def judge(self) -> None:
        """Say that it is lost, unless it is over."""
        if not self.has_ended():
            self.lost = True
            self._lose()


class HostCopy:
    """Numbers of a device on their way to the host; see `Queued`."""

    def __init__(self, numbers: torch.Tensor) -> None:
        buffer = host_buffer(numbers.nbytes, numbers.device).view(numbers.dtype)
        self._host = buffer.view(numbers.shape).copy_(numbers, non_blocking=True)
        self.queued = Queued(numbers.device)

    @cached_property
    def numbers(self) -> list[float]:
        """The host waits for them, and for nothing that was queued later."""
        self.queued.wait()
        return self._host.tolist()


_LOCK = threading.RLock()  # of these two, which the monitor empties; a signal may come in between
_QUEUED = deque[Queued]()  # in the order in which it was queued; those at the front may be over
_FLAGS: list[torch.Tensor] = []  # the one of now, if a step asked for it since the last abort


def abort_flag(device: torch.device) -> torch.Tensor | None:
    """A number in host memory that becomes 1 as soon as collectives are aborted.

    None if a device cannot read host memory in its own time.
    """
    with _LOCK:
        if not _FLAGS:
            _FLAGS.append(host_buffer(4, device).view(torch.float32)[0].zero_())
        flag = _FLAGS[0]
    return flag if is_locked(flag) else None


def is_locked(memory: torch.Tensor) -> bool:
    """Whether a device copies from this memory of the host in its own time, not at the call."""
    return memory.is_pinned()


def drain(seconds: float) -> None:
    """Give all that is queued so much time to end."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with _LOCK:
            if all(queued.has_ended() for queued in _QUEUED):
                return
        time.sleep(1e-3)


def lose_queued() -> None:
    """Judge all that is queued, before collectives are aborted."""
    with _LOCK:
        while _FLAGS:
            _FLAGS.pop().fill_(1)
        while _QUEUED:
            _QUEUED.popleft().judge()


def host_buffer(nbytes: int, device: torch.device) -> torch.Tensor:
    """Host memory that a device can copy to while the host goes on, if it has such memory."""
    if is_async(device):
        with suppress(RuntimeError):  # the system may not lock so much memory
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    return torch.empty(nbytes, dtype=torch.uint8)


_LAZY_BYTES = 2**20  # below which memory that is used again costs less


def lazy_zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Make zeros; on the host they take memory page by page as they are written."""
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    if device.type != "cpu" or nbytes < _LAZY_BYTES:
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def total_memory(device: torch.device) -> int:
    """Bytes of memory of a device; of the machine for the CPU."""
    if not is_async(device):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return torch.get_device_module(device).get_device_properties(device).total_memory


def default_generator(device: torch.device) -> torch.Generator | None:
    """The generator of ops that are not given one; None if torch keeps none for such devices."""
    if device.type == "cpu":
        return torch.default_generator
    module: Any = torch.get_device_module(device) if is_async(device) else None
    if not hasattr(module, "default_generators"):
        return None
    module.init()  # makes the generators, which exist only from then on
    return module.default_generators[with_index(device).index]


def mark(device: torch.device) -> torch.Event:
    """As `record`, with the time at which that work is done; see `seconds_between`."""
    event = torch.Event(device, enable_timing=True)
    event.record(current_stream(device))
    return event


def seconds_between(first: torch.Event, second: torch.Event) -> float:
    """The time between two marks; the host waits for both."""
    first.synchronize()
    second.synchronize()
    return first.elapsed_time(second) / 1e3

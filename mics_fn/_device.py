"""Streams, events, memory and generators of a device: the only file that knows kinds of devices.

It is written against `torch.accelerator` and `torch.Stream`, so CUDA, ROCm, XPU and others that
torch knows need nothing of their own. On the CPU work is done when a call returns, so nothing here
is called but `is_async`, `backend` and `total_memory`.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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


def host_buffer(nbytes: int, device: torch.device) -> torch.Tensor:
    """Host memory that a device can copy to while the host goes on, if it has such memory."""
    if is_async(device):
        with suppress(RuntimeError):  # the system may not lock so much memory
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    return torch.empty(nbytes, dtype=torch.uint8)


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

"""How much memory this process has, and the most that it had since a moment.

On an accelerator this is the memory that torch allocated. On the CPU it is resident memory, which
includes code and what the allocator keeps for later.
"""

import contextlib
import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mics_fn import _device

STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")


def memory_bytes(device: torch.device) -> int | None:
    """Bytes in use now; None if they cannot be read."""
    if _device.is_async(device):
        return torch.accelerator.memory_allocated(device)
    return _status_bytes("VmRSS")


def peak_bytes(device: torch.device) -> int | None:
    """The most bytes since `reset_peak`, or ever; None if they cannot be read."""
    if _device.is_async(device):
        return torch.accelerator.max_memory_allocated(device)
    return _status_bytes("VmHWM")


def reset_peak(device: torch.device) -> int | None:
    """Set the peak to the bytes in use now, and return them; None if that is not possible."""
    if _device.is_async(device):
        torch.accelerator.reset_peak_memory_stats(device)
        return torch.accelerator.memory_allocated(device)
    trim()
    try:
        CLEAR_REFS.write_text("5")
    except OSError:
        return None
    return _status_bytes("VmRSS")


def trim() -> None:
    """Return the memory that the host's allocator keeps for later to the system, if it can."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def give_back_at_once(smallest: int = 65536) -> bool:
    """Let blocks of this size or more return to the system when they are freed.

    Glibc raises the size by itself, up to 32 MB, whenever a larger block is freed, and keeps
    smaller blocks. Resident memory is then more than the memory in use.

    Returns:
        Whether the allocator can do that.
    """
    try:
        return ctypes.CDLL(None).mallopt(-3, smallest) == 1  # M_MMAP_THRESHOLD
    except (OSError, AttributeError):
        return False


def peak_growth(work: Callable[[], Any], device: torch.device) -> int | None:
    """The most bytes by which memory grows while `work` runs; None if they cannot be read."""
    before = reset_peak(device)
    work()
    after = peak_bytes(device)
    return None if before is None or after is None else max(0, after - before)


def _status_bytes(name: str) -> int | None:
    """A field of /proc/self/status."""
    if not STATUS.exists():
        return None
    for line in STATUS.read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    return None

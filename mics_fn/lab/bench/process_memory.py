"""How much memory this process has, and the most that it had since some moment.

On a GPU that is what torch allocated. On the CPU it is resident memory, so it holds code, and what
the allocator keeps for later, too.
"""

import contextlib
import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")


def memory_bytes(device: torch.device) -> int | None:
    """Bytes that are there now; None where that can not be seen."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return _status_bytes("VmRSS")


def peak_bytes(device: torch.device) -> int | None:
    """The most bytes since `reset_peak`, or ever; None where that can not be seen."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return _status_bytes("VmHWM")


def reset_peak(device: torch.device) -> int | None:
    """Let the peak begin again at what is there now, and return that; None where it can not."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    trim()
    try:
        CLEAR_REFS.write_text("5")
    except OSError:
        return None
    return _status_bytes("VmRSS")


def trim() -> None:
    """Give what the host's allocator keeps for later back to the system, where it can."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def give_back_at_once(smallest: int = 65536) -> bool:
    """From now on freed blocks of that size go back to the system; whether the allocator can.

    Glibc raises this size by itself whenever a larger block is freed, up to 32 MB, and keeps
    smaller ones, with holes. Resident memory is then more than what is used.
    """
    try:
        return ctypes.CDLL(None).mallopt(-3, smallest) == 1  # M_MMAP_THRESHOLD
    except (OSError, AttributeError):
        return False


def peak_growth(work: Callable[[], Any], device: torch.device) -> int | None:
    """By how many bytes memory grows at most while `work` runs; None where that can not be seen."""
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

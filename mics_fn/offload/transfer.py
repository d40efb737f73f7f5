"""Bytes between memory and files: aligned memory, whole reads and writes, and checksums.

Direct I/O moves whole pages between a file and memory that begins at a page, past the cache of the
system: at the speed of the disk, and without pushing out of memory what others need there.
"""

import contextlib
import ctypes
import errno
import mmap
import os
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mics_fn import _device
from mics_fn.offload.space import PAGE, padded

UNIT = 16 * PAGE  # bytes that a checksum covers
_HUGE_PAGE = 2 * 2**20
_AT_ONCE = 16 * 2**20  # bytes of one call: between two of them Python looks for signals
_WORDS = UNIT // 8
# torch adds up fewer than 32,768 elements on the thread that calls. For more it starts a team of
# threads for each thread that calls, and the teams of those that read and write would take the
# cores from those that compute.
_UNITS_AT_ONCE = 32_767 // _WORDS
_CPU = torch.device("cpu")


@torch.inference_mode(mode=False)  # whose tensors threads could not write to
def aligned(nbytes: int, device: torch.device = _CPU) -> Tensor:
    """Host memory that begins at a page; locked, where a device can copy from such by itself.

    Args:
      nbytes: how much.
      device: the one that copies.
    """
    memory = _device.host_buffer(padded(nbytes) + PAGE, device)
    memory = memory[-memory.data_ptr() % PAGE :][: padded(nbytes)]
    if nbytes >= _HUGE_PAGE and not _device.is_async(device):
        _use_huge_pages(memory)
    return memory


def _use_huge_pages(memory: Tensor) -> None:
    """Ask for pages of 2 MiB, which the disk fills with fewer requests than 512 small ones."""
    with contextlib.suppress(OSError, AttributeError):  # not every system has it
        advise, advice = ctypes.CDLL(None).madvise, mmap.MADV_HUGEPAGE
        advise(ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(len(memory)), advice)


def read_all(file: int, memory: Tensor, offset: int) -> None:
    """Fill memory with the bytes of a file.

    Raises:
      OSError: they cannot be read, or the file ends before.
    """
    _whole(memory, lambda rest, at: os.preadv(file, [rest], offset + at), "read", offset)


def write_all(file: int, memory: Tensor, offset: int) -> None:
    """Write memory to a file.

    Raises:
      OSError: it cannot be written.
    """
    _whole(memory, lambda rest, at: os.pwrite(file, rest, offset + at), "written", offset)


def _whole(memory: Tensor, move: Callable[[memoryview, int], int], done: str, offset: int) -> None:
    """Call `move` until all bytes are moved."""
    total, at = memory.numel(), 0
    if not total:
        return
    raw = memoryview((ctypes.c_char * total).from_address(memory.data_ptr())).cast("B")
    while at < total:
        count = move(raw[at : at + _AT_ONCE], at)
        if count <= 0:
            raise OSError(f"{at} of {total} bytes at {offset} could be {done}: the file ends there")
        at += count


def allocate(file: int, offset: int, nbytes: int) -> None:
    """Make a file longer, so that the disk is sure to have the room.

    Raises:
      OSError: the disk has not so much room.
    """
    try:
        os.posix_fallocate(file, offset, nbytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        zeros = aligned(min(nbytes, _AT_ONCE)).zero_()
        for low in range(0, nbytes, _AT_ONCE):
            write_all(file, zeros[: nbytes - low], offset + low)


def sums(memory: Tensor) -> Tensor:
    """The sum of the 64-bit words of each `UNIT` of memory in whole pages; int64.

    It costs a small part of a copy. No change of a single word goes unseen.
    """
    words = memory.view(torch.int64)
    if len(words) % _WORDS:
        short = len(words) - len(words) % _WORDS
        return torch.cat([sums(memory[: 8 * short]), words[short:].sum().view(1)])
    parts = [part.sum(1) for part in words.view(-1, _WORDS).split(_UNITS_AT_ONCE)]
    return torch.cat(parts)


def layout(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where tensors of so many bytes begin in one memory, each at a page, and where they end.

    >>> layout([100, 5000, 1])
    ([0, 4096, 12288], 16384)
    """
    starts, end = [], 0
    for nbytes in sizes:
        starts.append(end)
        end += padded(nbytes)
    return starts, end

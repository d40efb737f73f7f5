"""Copies between stored tensors and memory, portion by portion, through a small buffer."""

from collections.abc import Iterator

from torch import Tensor

from mics_fn.offload.stored import Stored
from mics_fn.offload.transfer import aligned

PORTION_BYTES = 4 * 2**20
_KEPT: list[Tensor] = []  # buffers of one portion that nobody uses, since making one takes time


def copied_into(memory: Tensor, value: Stored) -> Iterator[None]:
    """Copy a stored tensor, and cast it if need be; each portion is done when this yields.

    Args:
      memory: 1D, of the same length, of any dtype and on any device.
      value: 1D.

    Memory: 4 MiB for each copy under way, of which one stays.

    Raises:
      OffloadError: the file cannot be read, or others have changed it.
      DonatedError: a step was given it, and has overwritten it.
    """
    value.extent.scratch.check(value.leaf)
    for low, part, staging in _portions(value):
        part.extent.read(part.start, staging[: part.reaches()], part.leaf)
        found = staging[: part.size_bytes].view(value.dtype)
        memory.narrow(0, low, len(found)).copy_(found)
        yield


def copied_from(memory: Tensor, value: Stored) -> Iterator[None]:
    """Write to a stored tensor whose old values nobody wants, in place; else as `copied_into`."""
    value.extent.scratch.begin_writes(value.leaf)
    for low, part, staging in _portions(value):
        found = staging[: part.size_bytes].view(value.dtype)
        found.copy_(memory.narrow(0, low, len(found)))
        part.extent.write(part.start, staging[: part.reaches()], part.leaf)
        yield


def _portions(value: Stored) -> Iterator[tuple[int, Stored, Tensor]]:
    """The parts of a stored tensor: their first elements, and memory through which they travel."""
    try:
        staging = _KEPT.pop()
    except IndexError:
        staging = aligned(PORTION_BYTES)
    step = PORTION_BYTES // value.dtype.itemsize
    for low in range(0, value.numel(), step):
        part: Stored = value[low : low + step]  # pyright: ignore[reportAssignmentType]
        part.check()
        yield low, part, staging
    _KEPT[:] = [staging]

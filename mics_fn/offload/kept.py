"""Host memory that one stream leaves to the next, since making and locking it takes time."""

import torch
from torch import Tensor

from mics_fn.offload.transfer import aligned

_MEMORY: dict[str, Tensor] = {}  # by kind of device, since each locks memory for itself
_files = 0  # open scratch files


def take(nbytes: int, device: torch.device) -> Tensor:
    """Memory that nobody uses; see `aligned`."""
    memory = _MEMORY.pop(device.type, None)
    return memory if memory is not None and len(memory) == nbytes else aligned(nbytes, device)


def give(memory: Tensor, device: torch.device) -> None:
    """Leave memory to the next stream."""
    if _files:
        _MEMORY[device.type] = memory


def count_files(more: int) -> None:
    """Note that more scratch files are open, or fewer; memory is let go with the last of them."""
    global _files
    _files += more
    if not _files:
        _MEMORY.clear()

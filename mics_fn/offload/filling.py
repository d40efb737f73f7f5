"""Stored tensors of which a part at a time is read or set, for those who save and load them."""

import mmap
import os
import warnings
from typing import Any

import torch
from torch import Tensor

from mics_fn.offload.apart import Apart
from mics_fn.offload.coded_tensors import Coded
from mics_fn.offload.making import empty
from mics_fn.offload.stored import Stored
from mics_fn.offload.transfer import UNIT

_AT_ONCE = 64 * UNIT  # bytes that are compared at once


def mapped(x: Stored) -> Tensor:
    """The values of a stored tensor on the host, to be read soon: the system reads what is touched.

    Args:
      x: the tensor, which must not be written meanwhile.

    Returns:
      A tensor whose memory is the file's. It must not be written to.

    Memory: none that the system cannot take back.

    Raises:
      OffloadError: others have changed the file, or its values.
      DonatedError: the tensor was given away.
    """
    x.check()
    if not x.numel():
        return torch.empty(x.shape, dtype=x.dtype)
    scratch, leaf, extent = x.extent.scratch, x.leaf, x.extent
    scratch.check(leaf)
    # In whole units, so that all of it can be compared with checksums.
    low = x.start // UNIT * UNIT
    high = min(extent.nbytes, -(-(x.start + x.size_bytes) // UNIT) * UNIT)
    before = (extent.offset + low) % mmap.ALLOCATIONGRANULARITY
    with scratch.named("read", leaf):
        file = os.open(scratch.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            how = {"flags": mmap.MAP_SHARED, "prot": mmap.PROT_READ}
            at = extent.offset + low - before
            view = mmap.mmap(file, before + high - low, **how, offset=at)
        finally:
            os.close(file)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that it cannot be written to
        raw = torch.frombuffer(view, dtype=torch.uint8)[before:]
    for first in range(low, high, _AT_ONCE):
        extent.compare(first, raw[first - low : min(high, first + _AT_ONCE) - low], leaf)
    return raw[x.start - low :][: x.size_bytes].view(x.dtype).view(x.shape)


def unset_like(x: Any) -> Apart:
    """A tensor in the same file, or of the same kind of codes, whose values `set_part` sets."""
    if isinstance(x, Coded):
        return x.unset()
    made = empty(x.extent.scratch, x.shape, x.dtype, leaf=x.leaf, device=x.device)
    x.extent.scratch.begin_writes(x.leaf)
    return made


def set_part(x: Any, low: int, values: Tensor) -> None:
    """Set some elements of a tensor that is apart, and that nobody has read yet.

    Args:
      x: a part of what `unset_like` has made, such as a leaf; each element is set once.
      low: the first element, of the flattened tensor.
      values: on the host.
    """
    if isinstance(x, Coded):
        x.fill(low, values.reshape(-1))
    elif values.numel():
        raw = values.contiguous().view(-1).view(torch.uint8)
        x.extent.write(x.start + low * x.dtype.itemsize, raw, x.leaf)

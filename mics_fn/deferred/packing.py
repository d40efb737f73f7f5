"""Packing a bucket's gradients, the memory that they lie in, and who still uses that memory."""

from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mics_fn import _device, spans
from mics_fn.collectives import Codec, Pending, wait_until
from mics_fn.groups import Life, Slot
from mics_fn.shards import BucketUse, note_origins, pack_full


def elements(raw: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    """The first elements of some memory."""
    return raw[: numel * dtype.itemsize].view(dtype)


def whole(raw: Tensor, dtype: torch.dtype) -> Tensor:
    """All elements that fit in some memory."""
    return elements(raw, raw.numel() // dtype.itemsize, dtype)


def mean_buffer(slot: Slot, levels: int) -> Tensor:
    """The buffer in which a mean is after so many levels that are not coded.

    NCCL reads one of the two and writes the other, alternately. From the first coded level on,
    codes lie in one of them, and values stay in the other.
    """
    return (slot.first, slot.second)[levels % 2 if _device.is_async(slot.first.device) else 0]


def room_of(slot: Slot, total: Tensor, wire: torch.dtype | Codec) -> Tensor:
    """Memory for what hop 2 sends: the total may lie where gradients were packed, but no codes."""
    if isinstance(wire, Codec):
        return slot.second
    return elements(slot.first, total.numel(), wire)


def free_slot(slot: Slot) -> None:
    """On an accelerator, let the next user of a slot wait for the current stream."""
    device = slot.first.device
    if _device.is_async(device):
        slot.until = partial(_device.wait, device, _device.record(device))


def until_passed(life: Life, pending: Pending, levels: int) -> None:
    """Wait until so many levels of a reduction are done."""
    if not pending.passed(levels):
        wait_until(life, lambda: pending.passed(levels), pending)


def pack(use: BucketUse, values: Sequence[Tensor | None], out: Tensor) -> None:
    """Pack a bucket's full gradients, one per member, into `out`."""
    with spans.span("pack", use.bucket, device=out.device):
        pack_full(use.bucket, use.by_slot(values), device=out.device, out=out)
        note_origins(use.bucket, out)


def flat_pieces(
    use: BucketUse, values: Sequence[Tensor | None], dtype: torch.dtype, *, copy: bool
) -> list[Tensor]:
    """A bucket's full gradients as rows in a dtype, one per member; zeros for those missing."""
    device = use.home.device
    flat = [
        torch.zeros(n, dtype=dtype, device=device) if value is None else value.reshape(n)
        for n, value in zip(use.by_member(use.bucket.numels), values, strict=True)
    ]
    same = not copy and all(x.dtype is dtype for x in flat)
    return flat if same else [x.to(dtype, copy=copy) for x in flat]


def holds_in_full(key: Hashable, values: Sequence[Any]) -> None:
    """Tell watchers of full gradients that wait to be packed; of none, that they are gone."""
    if spans.watchers:
        nbytes = sum(x.nbytes for x in values if x is not None)
        spans.holds("gradients in full", key, nbytes)

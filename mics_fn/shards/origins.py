"""On which ranks a gradient that is not finite arose, as each of them saw it before hop 1.

[Note: before hop 1] After hop 1 nobody can tell whose part of a mean was NaN. So each rank looks at
its own gradients where they are packed to be sent, and remembers by bucket what it saw until a
`Guard` has judged them. On the CPU it adds up what was just written, as fast as memory is read, and
only if the sum is not finite it looks leaf by leaf. An accelerator computes the largest absolute
value of each leaf, for which the host does not wait. All this begins with the first guard of the
process that refuses steps.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from mics_fn import _device, _torch
from mics_fn.shards.bucket import Bucket
from mics_fn.shards.pack import split_full

_watching: set[bool] = set()
# Since the last verdict: the largest absolute value by slot, NaN if there is one.
_seen: dict[Bucket, Tensor] = {}


def watch_origins() -> None:
    """Look at gradients from now on."""
    _watching.add(True)


def note_origins(bucket: Bucket, full: Tensor) -> None:
    """Look at this rank's own gradients of a bucket, packed, before others are added."""
    if not _watching or not full.numel() or _torch.has_no_data(full):
        return
    if _device.is_async(full.device) or not _looks_finite(full):
        found = _highest(split_full(bucket, full))
    else:
        found = torch.zeros(len(bucket.shapes), dtype=full.dtype)
    before = _seen.get(bucket)
    _seen[bucket] = found if before is None else torch.maximum(before, found)


def origins_of(bucket: Bucket) -> list[str]:
    """What was seen of a bucket's leaves; nothing if nobody looked. The host waits for a device."""
    return [_kind(value) for value in _seen[bucket].tolist()] if bucket in _seen else []


def forget_origins(buckets: Iterable[Bucket]) -> None:
    """Forget what was seen of buckets, whose gradients have been judged."""
    for bucket in buckets:
        _seen.pop(bucket, None)


def kind_of(values: Tensor) -> str:
    """NaN, infinite or finite, whichever comes first among the values."""
    return _kind(_highest([values]).item())


def _looks_finite(full: Tensor) -> bool:
    # A sum in float16 may overflow although no element does.
    ends = full.aminmax() if full.dtype == torch.float16 else (full.sum(),)
    return all(math.isfinite(x.item()) for x in ends)


def _highest(leaves: list[Tensor]) -> Tensor:
    """The largest absolute value of each leaf; 0 of an empty one."""
    zero = leaves[0].new_zeros(())
    held = iter(_torch.foreach_norm([x for x in leaves if x.numel()], math.inf))
    return torch.stack([next(held) if x.numel() else zero for x in leaves])


def _kind(highest: float) -> str:
    return "NaN" if math.isnan(highest) else "infinite" if math.isinf(highest) else "finite"

"""Parameters of buckets that this rank holds whole: plain tensors in the memory of the shards.

[Note: copy on write] Such a bucket needs no fetch, so an op need not be told which bucket it reads.
Its leaves are copies that torch makes only when something writes to one. So a write does
not reach the shards, and nothing else would ever see it: it is an error at the end of the run.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from mics_fn import _device, _torch, _torch_tensors
from mics_fn.errors import LeafError, message
from mics_fn.shards import BucketUse, split_full


class Copies:
    """The leaves of one bucket, which share the memory of its chunk until something writes.

    Args:
      use: the bucket.
      chunk: all of it.
      whole: `lazy_clone` of the chunk.

    `leaves` are the full parameters, one per member.
    """

    def __init__(self, use: BucketUse, chunk: Tensor, whole: Tensor) -> None:
        self._use, self._chunk, self._whole = use, chunk, whole
        # Through `.data`, autograd does not take them for views of one another.
        self.leaves = [view.data for view in self._views(whole)]

    def check(self, names: Sequence[str]) -> None:
        """Raise LeafError if a leaf was written to, or was given other memory.

        Args:
          names: of the members.
        """
        storage = _torch.storage_id(self._whole)
        moved = [_torch.storage_id(leaf) != storage for leaf in self.leaves]
        if _torch_tensors.is_lazy_clone(self._whole) and not any(moved):
            return
        pairs = zip(self._views(self._whole), self._views(self._chunk), strict=True)
        wrong = [not torch.equal(_bits(now), _bits(before)) for now, before in pairs]
        for name, leaf, *odd in zip(names, self.leaves, moved, wrong, strict=True):
            if any(odd):
                text = f"defer: {name} was written to, which changes no shard"
                fix = "change parameters between steps, in the shards; or write to a clone()"
                raise LeafError(message(text, [f"shape {tuple(leaf.shape)}"], fix))

    def _views(self, whole: Tensor) -> list[Tensor]:
        return self._use.by_member(split_full(self._use.bucket, whole))


def copies_of(use: BucketUse, chunk: Tensor) -> Copies | None:
    """The leaves of a bucket as plain tensors, if this rank holds all of it as ops need it.

    Only where work is done when a call returns: elsewhere kernels that ask for an address are
    frequent, and each would copy the bucket.
    """
    whole_here = use.route.size == 1 and chunk.dtype == use.bucket.compute
    if not whole_here or _device.is_async(chunk.device) or _torch.has_no_data(chunk):
        return None
    whole = _torch_tensors.lazy_clone(chunk)
    return None if whole is None else Copies(use, chunk, whole)


def _bits(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, among which a NaN equals itself."""
    return tensor.reshape(-1).view(torch.uint8)

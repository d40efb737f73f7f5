"""`Column`: corresponding tensors of several trees, on which an optimizer works in one go."""

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from mics_fn import spans
from mics_fn.shards import Bucket


class Column(NamedTuple):
    """Corresponding tensors of several trees, each a run of neighbouring pieces or a single one."""

    key: Hashable
    tensors: tuple[Tensor, ...]
    bucket: Bucket | None = None  # the run, as `Run` has it


def updating(found: Sequence[Column]) -> Any:
    """A block that writes to these columns, for those who watch."""
    if not spans.seen():
        return spans.UNSEEN
    buckets = dict.fromkeys(x.bucket for x in found if x.bucket is not None)
    return spans.Span("opt", list(buckets), device=found[0].tensors[0].device if found else None)

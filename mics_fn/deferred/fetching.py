"""How the gather of a bucket is started, and who receives its gradients.

A chunk that lies elsewhere is brought first.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from mics_fn.collectives import Codes, Task, moves, start_coded_gather, start_fetch
from mics_fn.shards import BucketUse, copied_to, copied_with_zeros, kept_row, zero_padding


class GradSink(Protocol):
    """What receives gradients, if they are not the result of backward."""

    def add(self, index: int, grads: Sequence[Tensor | None]) -> None:
        """Take a bucket's full gradients, one per member."""
        ...


class Fetched(Protocol):
    """A bucket whose fetch was started."""

    @property
    def ready(self) -> torch.Event | None:
        """An event that is over once the bucket is there; None where `wait` waits for that."""
        ...

    def wait(self) -> Tensor:
        """The whole bucket, ready for the current stream."""
        ...


Fetch = Callable[[BucketUse, Tensor | Codes, Tensor | None, Tensor | None, Task | None], Fetched]


def start_fetching(
    use: BucketUse,
    chunk: Tensor | Codes,
    held: Tensor | None,
    out: Tensor | None,
    bring: Task | None,
) -> Fetched:
    """Start to gather a bucket along its route: this rank sends its chunk, or codes of it."""
    what = ("defer", "fetch", use.bucket)
    if isinstance(chunk, Codes):
        bring = None if chunk.coming is None else bring
        return start_coded_gather(use.route, chunk, held, out, what, bring)
    return start_fetch(use.route, chunk, held, out, what, bring)


def codes_of(use: BucketUse, chunk: Tensor, away: Sequence[Tensor | None] | None) -> Codes | None:
    """What this rank sends of a bucket in the place of values, once per run; None if it sends them.

    These are codes that it keeps, or makes now, or makes once the first fetch has brought values.

    Args:
      use: the bucket.
      chunk: its values, or what stands for them.
      away: its pieces, by slot, where they lie elsewhere or are kept as codes.
    """
    wire, pool, route = use.gather_wire, use.hierarchy.pools.codes, use.route
    if wire is None or not moves(chunk):
        return None
    if away is None:
        return Codes.of(wire, route, zero_padding(use.bucket, route.chunk, chunk), pool)
    row = kept_row(use.bucket, route.chunk, away)
    if row is not None:
        return Codes(wire, route, pool, use.bucket.chunk, row)
    return Codes.to_be_made(wire, route, chunk, pool, use.home.device)


def task_of(use: BucketUse, name: str, data: Sequence[Any]) -> Task:
    """What brings a chunk whose pieces, by slot, lie elsewhere; the name is that of the bucket."""
    facts: Any = {"bucket": use.bucket, "chunk": use.route.chunk, "data": data}
    copied = copied_to if use.gather_wire is None else copied_with_zeros
    op = f"the copy of {name} from elsewhere"
    return Task(use.hierarchy.elsewhere, op, partial(copied, **facts))

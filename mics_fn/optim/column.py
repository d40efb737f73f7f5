"""`Column`: corresponding tensors of several trees, on which an optimizer works in one go."""

from collections.abc import Generator, Hashable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from torch import Tensor

from mics_fn import spans
from mics_fn.shards import Bucket


class Writes:
    """What a step writes: whether it has begun to, and what is to be closed when it ends."""

    def __init__(self) -> None:
        self.begun = False
        self.open = ExitStack()


_WRITES: ContextVar[Writes | None] = ContextVar("writes", default=None)


@contextmanager
def noting_writes() -> Iterator[Writes]:
    """A step whose parts are written one after the other, so that it may fail between two."""
    writes = Writes()
    token = _WRITES.set(writes)
    try:
        with writes.open:
            yield writes
    finally:
        _WRITES.reset(token)


def note_write() -> None:
    """A part of a state is written from here on."""
    writes = _WRITES.get()
    if writes is not None:
        writes.begun = True


def closed_after(blocks: Generator[Any]) -> Generator[Any]:
    """The same generator, which ends with the step if it has not ended before."""
    writes = _WRITES.get()
    return blocks if writes is None else writes.open.enter_context(closing(blocks))


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

"""Which memory gathers under way still read, so that nobody overwrites it.

[Note: memory that is still sent] A gather reads this rank's chunk until it is done, and the other
ranks may need what it sends although this one does not: a bucket that was fetched ahead is perhaps
never used here. So a verb that writes into the memory of shards waits for such gathers first. All
ranks have started them by then, or will in their own order, so it waits no longer than a use would.
In a steady step there are none, because the end of a run has waited for all of them.
"""

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from torch import Tensor

from mics_fn import _torch
from mics_fn.collectives.pending import Pending
from mics_fn.groups import Comm, Life

_READERS: WeakKeyDictionary[Pending, tuple[int, Life]] = WeakKeyDictionary()


def reads(pending: Pending, comms: Sequence[Comm], chunk: Tensor) -> Pending:
    """The same gather, noted as a reader of its chunk for as long as anybody may wait for it."""
    if comms:
        _READERS[pending] = _memory_of(chunk), comms[0].life
    return pending


def finish_readers(written: Sequence[Tensor]) -> None:
    """Wait for gathers that read what is to be written; see [Note: memory that is still sent]."""
    under_way = [
        (pending, storage)
        for pending, (storage, life) in _READERS.items()
        if not life.closed
        and life.failed is None
        and (pending.ready is not None or not pending.finished)
    ]
    if under_way:
        storages = {_memory_of(tensor) for tensor in written}
        for pending, storage in under_way:
            if storage in storages:
                pending.wait()


def _memory_of(tensor: Tensor) -> int:
    """What a tensor lies in: its storage, or its part of a file, which it names `extent`."""
    extent = getattr(tensor, "extent", None)
    return _torch.storage_id(tensor) if extent is None else id(extent)

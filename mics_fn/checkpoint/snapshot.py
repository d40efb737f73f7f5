"""Copies of what a save writes, in host memory that is used again by the next one."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from mics_fn import _device, _torch
from mics_fn.offload import Hold, is_apart, is_stored, mapped, read

_ALIGN = 64  # bytes; of a copy, for vector loads


class Memory:
    """Host memory of this process for copies, whichever folder they go to.

    A save takes one piece and gives it back when it has ended; so there are as many pieces as saves
    were under way at the same time, which is one for each folder at most.
    """

    def __init__(self) -> None:
        self.free: list[tuple[str, Tensor]] = []  # the kind of device that copies to it, and it
        self._turn = threading.Lock()

    def lend(self, nbytes: int, device: torch.device) -> Tensor:
        """Memory of at least so many bytes, which a device can copy to."""
        with self._turn:
            mine = [i for i, (kind, _) in enumerate(self.free) if kind == device.type]
            if mine:  # the largest; if that is too small, it goes for a larger one
                largest = max(mine, key=lambda i: len(self.free[i][1]))
                _, memory = self.free.pop(largest)
                if len(memory) >= nbytes:
                    return memory
                del memory
        # A little more, since lengths in JSON may grow from one save to the next.
        return _device.host_buffer(nbytes + 4096, device)

    def give_back(self, memory: Tensor, device: torch.device) -> None:
        """Let other saves use it."""
        with self._turn:
            self.free.append((device.type, memory))


MEMORY = Memory()


class Snapshot:
    """The copies of one save, or the tensors themselves where they can be read as they are."""

    def on_host(self, tensors: Mapping[str, Tensor]) -> Any:
        """A block that has these tensors on the host: themselves if they are there already."""
        if all(x.is_cpu or is_stored(x) for x in tensors.values()):
            dense = {name: _dense(x) for name, x in tensors.items()}
            return _given(lambda: dense)
        return self.copied(tensors)

    def copied(self, tensors: Mapping[str, Tensor]) -> Any:
        """Copy tensors; the result is a block that has the copies.

        What lies in files is not copied but held, so that steps meanwhile write to other parts, and
        the block has it as it was; see [Note: held parts] in `offload.holding`.

        On an accelerator the copies are queued on the current stream, in front of whatever changes
        the tensors next, and the block waits for them, not the caller.
        """
        far: dict[str, Any] = {name: x for name, x in tensors.items() if is_stored(x)}
        hold, near = Hold(far.values()), {k: x for k, x in tensors.items() if k not in far}
        devices = {x.device for x in near.values() if _device.is_async(x.device)}
        places, sources, end = dict[str, int](), list[tuple[int, Tensor]](), 0
        for names in _runs(near):
            sources.append((end, _as_one([near[name].detach() for name in names])))
            for name in names:
                places[name] = end
                end += near[name].numel() * near[name].itemsize
            end = -(-end // _ALIGN) * _ALIGN
        device = next(iter(devices), torch.device("cpu"))
        memory = MEMORY.lend(end, device)
        if sources:
            copies = [_view(memory, place, x.dtype, x.shape) for place, x in sources]
            pinned = bool(devices) and memory.is_pinned()
            with torch.no_grad():
                _torch.foreach_copy(copies, [x for _, x in sources], non_blocking=pinned)
        events = [_device.record(device) for device in devices]
        facts = {name: (places[name], x.dtype, x.shape) for name, x in near.items()}
        order = list(tensors)

        def made() -> dict[str, Tensor]:  # in the block, for which nobody waits
            return {k: mapped(far[k]) if k in far else _view(memory, *facts[k]) for k in order}

        return _given(made, events, hold, lambda: MEMORY.give_back(memory, device))


@contextmanager
def _given(
    make: Callable[[], dict[str, Tensor]],
    events: Any = (),
    hold: Hold | None = None,
    end: Callable[[], None] | None = None,
) -> Iterator[dict[str, Tensor]]:
    try:
        for event in events:
            event.synchronize()
        yield make()
    finally:
        if hold is not None:
            hold.release()
        if end is not None:
            end()


def _runs(tensors: Mapping[str, Tensor]) -> list[list[str]]:
    """Names of tensors, together where these lie one after the other in memory, as in a bucket.

    Each copy ends with a wait for the slowest thread, or has a launch of its own; so one copy of
    a bucket takes less time than one for each of its leaves.
    """
    runs, flat = list[list[str]](), list[tuple[int, str]]()
    for name, x in tensors.items():
        if is_apart(x) or x.is_neg() or x.is_conj() or not x.is_contiguous():
            runs.append([name])
        else:
            flat.append((x.data_ptr(), name))
    before, end = None, -1
    for start, name in sorted(flat):
        kind = _torch.storage_id(tensors[name]), tensors[name].dtype
        if (start, kind) == (end, before):
            runs[-1].append(name)
        else:
            runs.append([name])
        before, end = kind, start + tensors[name].numel() * tensors[name].itemsize
    return runs


def _as_one(parts: Sequence[Tensor]) -> Tensor:
    """The tensors of a run as one."""
    numel = sum(map(Tensor.numel, parts))
    return parts[0] if len(parts) == 1 else parts[0].as_strided((numel,), (1,))


def _view(memory: Tensor, place: int, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    """A tensor that lies in bytes."""
    return memory[place : place + shape.numel() * dtype.itemsize].view(dtype).view(shape)


def _dense(x: Any) -> Tensor:
    return mapped(x) if is_stored(x) else read(x).detach().resolve_conj().resolve_neg().contiguous()

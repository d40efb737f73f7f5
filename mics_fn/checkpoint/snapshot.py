"""Copies of what a save writes, in host memory that is used again by the next one."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mics_fn import _device, _torch
from mics_fn.offload import Hold, is_apart, is_stored, mapped, read

_ALIGN = 64  # bytes; of a copy, for vector loads


class Snapshot:
    """Host memory for the copies of the saves to one folder; one save at a time uses it."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    @staticmethod
    def of(path: Path) -> "Snapshot":
        """The one of a folder in this process."""
        return _KEPT.setdefault(path, Snapshot())

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
        if len(self._memory) < end:
            # A little more, since lengths in JSON may grow from one save to the next.
            device = next(iter(devices), torch.device("cpu"))
            self._memory = _device.host_buffer(end + 4096, device)
        memory = self._memory
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

        return _given(made, events, hold)


@contextmanager
def _given(
    make: Callable[[], dict[str, Tensor]], events: Any = (), hold: Hold | None = None
) -> Iterator[dict[str, Tensor]]:
    try:
        for event in events:
            event.synchronize()
        yield make()
    finally:
        if hold is not None:
            hold.release()


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
    return mapped(x) if is_stored(x) else read(x).detach().resolve_neg().contiguous()


_KEPT: dict[Path, Snapshot] = {}

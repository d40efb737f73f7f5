"""Parts of tensors on their way between host memory and a device, beside the computation."""

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from mics_fn import _device

_AHEAD = 2  # parts that are on the device besides the one that is computed with


def staged(
    parts: Iterator[Any], device: torch.device, *, ahead: bool
) -> Iterator[tuple[int, int, int, dict[int, Tensor]]]:
    """Bring each part to a device, and take it back once the next one is asked for.

    Args:
      parts: a `Moving` each.
      device: where they are computed with.
      ahead: whether the next part may be asked for before one has gone back.

    Memory: on the device a few parts.
    """
    if not _device.is_async(device):
        for part in parts:
            yield part.run, part.low, part.high, part.sources
    elif not ahead:
        for part in parts:
            here = {k: x.to(device, non_blocking=True) for k, x in part.sources.items()}
            yield part.run, part.low, part.high, here
            for k, x in here.items():
                part.goals[k].copy_(x, non_blocking=True)
            _device.synchronize(device)
    else:
        ways = _Ways(device)
        try:
            yield from ways.through(parts)
        except BaseException:  # such as that of a step that is refused
            ways.settle()
            raise


class _Ways:
    """Streams of a device to it and from it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._up, self._down = _device.own_stream(device), _device.own_stream(device)

    def settle(self) -> None:
        """Wait until nothing is read from the host any more, which may be written to next."""
        self._up.synchronize()
        self._down.synchronize()

    def through(self, parts: Iterator[Any]) -> Iterator[tuple[int, int, int, dict[int, Tensor]]]:
        """Each part on the device; those before it are on their way back, the next one comes."""
        gone: deque[tuple[Any, torch.Event]] = deque()
        coming = self._bring(next(parts, None))
        while coming is not None:
            part, here, event = coming
            coming = self._bring(next(parts, None))
            _device.wait(self._device, event)
            yield part.run, part.low, part.high, here
            gone.append((here, self._take_back(part, here)))
            if len(gone) > _AHEAD:
                _, event = gone.popleft()
                self._up.wait_event(event)  # which uses its memory next
        self._down.synchronize()  # from here on the host may read

    def _bring(self, part: Any) -> Any:
        if part is None:
            return None
        with _device.keep_stream(self._device):
            torch.accelerator.set_stream(self._up)
            here = {k: x.to(self._device, non_blocking=True) for k, x in part.sources.items()}
            return part, here, _device.record(self._device)

    def _take_back(self, part: Any, here: dict[int, Tensor]) -> torch.Event:
        with _device.keep_stream(self._device):
            _device.follow(self._down, self._device)
            for k, x in here.items():
                part.goals[k].copy_(x, non_blocking=True)
            return _device.record(self._device)

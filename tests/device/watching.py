"""What a rank sees while a program runs on the simulated device."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from matrix import Seen
from models import STEPS
from simcuda import nccl, torch_cuda
from torch import Tensor


class Watch:
    """Collects what the checker finds, with the last step of a program apart."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.steps, self.races = device, 0, []
        self.waits, self.recorded = {}, 0

    @contextmanager
    def step(self) -> Iterator[None]:
        """One of `STEPS` steps; the waits of the last one are counted."""
        self.steps += 1
        steady = self.device.type == "cuda" and self.steps == STEPS
        if steady:
            self.collect()
        yield
        if steady:
            self.waits, self.recorded = torch_cuda.host_waits(), torch_cuda.recorded_streams()

    def collect(self) -> None:
        self.races.extend(torch_cuda.races())
        torch_cuda.reset()

    def seen(self, numbers: dict[str, Tensor]) -> Seen:
        self.collect()
        issued = [each[:3] for each in nccl.issued]
        races = list(dict.fromkeys(self.races))
        return Seen(races, self.waits, self.recorded, issued, numbers)

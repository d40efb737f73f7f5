"""What a rank sees while a program runs on the simulated device."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from matrix import Seen
from models import STEPS
from simcuda import nccl, torch_cuda
from torch import Tensor

import mics_fn as mf


class Watch:
    """Collects what the checker finds, with the last step of a program apart."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.steps, self.races = device, 0, []
        self.waits, self.recorded, self.kept, self.planned = {}, 0, 0, None

    @contextmanager
    def step(self, groups: Any = None, trainer: Any = None) -> Iterator[None]:
        """One of `STEPS` steps; what is kept after the last one is compared with its plan."""
        self.steps += 1
        steady = self.device.type == "cuda" and self.steps == STEPS
        if steady:
            self.collect()
        yield
        if steady:
            self.waits, self.recorded = torch_cuda.host_waits(), torch_cuda.recorded_streams()
        if steady and groups is not None:
            self.kept = groups.hierarchy.pools.fetched.waiting_bytes
        if steady and trainer is not None:
            sizes = mf.bucket_sizes(trainer.state.params, groups)
            schedule = trainer.schedule.schedule  # None where everything is kept
            self.planned = sum(sizes) if schedule is None else schedule.peak_bytes(sizes)

    def collect(self) -> None:
        self.races.extend(torch_cuda.races())
        torch_cuda.reset()

    def seen(self, numbers: dict[str, Tensor]) -> Seen:
        self.collect()
        issued = [each[:3] for each in nccl.issued]
        races = list(dict.fromkeys(self.races))
        kept = self.kept, self.planned
        return Seen(races, self.waits, self.recorded, issued, *kept, numbers)

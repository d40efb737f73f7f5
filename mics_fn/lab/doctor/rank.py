"""One rank of a part of the report: what it is told, where it computes, and what it finds."""

import contextlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

import mics_fn as mf
from mics_fn.lab.bench.turns import BenchTurns
from mics_fn.lab.doctor.training import (
    STEADY,
    Training,
    distance,
    reference,
    train,
    wait_finder,
    without_waits,
)


@dataclass(frozen=True)
class DoctorConfig:
    """Options of a rank of a part.

    Args:
        device: the type of device.
        training: what is trained.
        turns: the steps of the comparison with FSDP2.
        folder: of files with what the ranks found.
        timeout_s: bound of a wait for other ranks.
    """

    device: str
    training: Training
    turns: BenchTurns = field(default_factory=BenchTurns)
    folder: str = ""
    timeout_s: float = 60.0


class Check(NamedTuple):
    """Value that a part measured, with its limit.

    Args:
        what: its name.
        value: what was found; None where this device cannot tell.
        limit: the most that is right; None for a figure without a verdict.
        unit: "" for a plain number, "bytes", "s", or "x" for a ratio.
    """

    what: str
    value: float | None
    limit: float | None = None
    unit: str = ""

    @property
    def ok(self) -> bool:
        """Whether the value is within the limit, if there are both."""
        return self.value is None or self.limit is None or self.value <= self.limit


class Rank:
    """Rank of a part: its device, and the file of its checks."""

    def __init__(self, job: DoctorConfig) -> None:
        self.job, self.training = job, job.training
        self.device = mf.init_distributed(device=job.device, timeout_s=job.timeout_s)
        self.number, self.size = dist.get_rank(), dist.get_world_size()
        self._file = Path(job.folder) / f"checks{self.number}"

    def say(self, *check: Any, **fields: Any) -> None:
        """Add a check to the report; the arguments are those of `Check`."""
        with open(self._file, "a") as file:
            file.write(json.dumps(Check(*check, **fields)) + "\n")

    def groups(self, p: int | None = None, node_size: int | None = None, place: str = "") -> Any:
        """Make groups of all ranks, for a `with` block."""
        how = {"node_size": node_size or self.size, "device": self.device}
        how["timeout_s"] = self.job.timeout_s
        groups = mf.make_groups(p or self.size, **how)
        return mf.placement.place(groups, place) if place else groups

    def compare(
        self,
        what: str,
        groups: mf.Groups,
        max_norm: float | None = None,
        merge_every: int = 1,
        **options: Any,
    ) -> None:
        """Train on the device, and compare with float64 on the first rank."""
        found = train(self.training, groups, **options)
        if self.number:
            return
        every = list(range(self.size))
        p = self.size if merge_every == 1 else groups.partition_size
        replicas = [every[i : i + p] for i in range(0, self.size, p)]
        expected = reference(self.training, replicas, merge_every=merge_every, max_norm=max_norm)
        precision = options.get("precision", "")
        gap = distance(self.training, found.params, expected, precision, self.size)
        self.say(f"{what}: error of the update", *gap)

    def forbid_waits(self, what: str, groups: mf.Groups, **options: Any) -> None:
        """Train again; where the host waits in a steady step, raise an error that says where.

        It comes last in its part, because ranks that were interrupted in a step cannot go on.
        """

        def around(step: int) -> contextlib.AbstractContextManager:
            return without_waits(self.device) if step >= STEADY else contextlib.nullcontext()

        known = wait_finder(self.device) is not None
        if known:
            train(self.training, groups, around, **options)
        self.say(f"{what}: waits of the host in a steady step", 0 if known else None, 0)

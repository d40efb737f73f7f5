"""What making a model as shards takes, beside the formula."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from mics_fn import tree
from mics_fn.init import init_model
from mics_fn.lab.bench.turns import STATUS, peak_bytes, reset_peak
from mics_fn.shards.leaf import Fixed, Sharded, is_leaf


class InitMemory(NamedTuple):
    """Bytes of one rank.

    Args:
      grown: by how much memory grew at most; None where that can not be seen.
      held: its shards.
      largest: the largest parameter in full.
      whole: all parameters in full.
    """

    grown: int | None
    held: int
    largest: int
    whole: int

    @property
    def formula(self) -> int:
        """Its shards, and one parameter at a time."""
        return self.held + self.largest


def peak_growth(work: Callable[[], Any], device: torch.device) -> int | None:
    """The most bytes by which memory grows while `work` runs; None if they cannot be read."""
    before = reset_peak(device)
    work()
    after = peak_bytes(device)
    return None if before is None or after is None else max(0, after - before)


def code_bytes() -> int:
    """Pages of files, such as libraries, that are resident; 0 where that can not be seen."""
    lines = STATUS.read_text().splitlines() if STATUS.exists() else []
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("RssFile:"))


def measure_init(
    model_fn: Callable[[], nn.Module], groups: Any, device: torch.device, **options: Any
) -> InitMemory:
    """The memory of `init_model` with these arguments, on this rank.

    Call `lab.bench.turns.give_back_at_once` before: what the allocator keeps would count.
    """
    made: list[Any] = []

    def make() -> None:
        made.append(init_model(model_fn, groups, **options))

    code = code_bytes()
    grown = peak_growth(make, device)
    if grown is not None:  # pages of libraries that were touched for the first time are not memory
        grown -= max(0, code_bytes() - code)
    leaves = tree.flatten(made[0][1], is_leaf)[0]
    kept = [leaf for leaf in leaves if isinstance(leaf, Sharded | Fixed)]
    sizes = [leaf.dtype.itemsize * torch.Size(leaf.shape).numel() for leaf in kept]
    return InitMemory(grown, sum(leaf.data.nbytes for leaf in kept), max(sizes), sum(sizes))

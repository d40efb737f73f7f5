"""Defaults of `Trainer`: the size of buckets, and the schedules for its memory budget."""

import torch
from torch import Tensor

from mics_fn import _device, checks, tree
from mics_fn.collectives import collect_all
from mics_fn.groups import Groups
from mics_fn.schedules import OnDemand, keep_all, on_demand
from mics_fn.shards import BUCKET_BYTES
from mics_fn.tree import Tree


def schedules_for(
    live_bytes: float | str | None, prefetch: int, full_bytes: int, home: Groups
) -> tuple[OnDemand, OnDemand]:
    """A policy for training, and one for evaluation, which uses parameters in another order."""
    if isinstance(live_bytes, str) and live_bytes == "auto":
        live_bytes = _quarter_of_memory(home)
    budget = None if live_bytes is None else checks.nbytes("Trainer", "live_bytes", live_bytes)
    if budget is None or budget >= full_bytes:
        return OnDemand(None, 0, at_once=True, lets_go=True), keep_all()
    training, evaluation = (on_demand(live_bytes=budget, prefetch=prefetch) for _ in range(2))
    return training, evaluation


def bucket_bytes_for(params: Tree, home: Groups) -> int:
    """A size that gives a model several buckets to overlap, each large enough for the network."""
    if home.world_size == 1:
        return BUCKET_BYTES
    leaves = {id(x): x for x in tree.flatten(params)[0] if isinstance(x, Tensor)}
    nbytes = sum(x.nbytes for x in leaves.values() if x.is_floating_point())
    return min(BUCKET_BYTES, max(2**20, nbytes // 16))


def _quarter_of_memory(home: Groups) -> int:
    """A quarter of the memory of the rank that has least; the same number on all ranks."""
    found = _device.total_memory(home.device)
    if not _device.is_async(home.device):  # the ranks of a machine share its memory
        found //= home.plan.topology.sizes[-1]
    mine = torch.tensor(found // 4, dtype=torch.int64, device=home.device)
    return int(min(other.item() for other in collect_all(home, mine).values()))

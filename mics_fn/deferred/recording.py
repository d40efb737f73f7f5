"""`record`: the order in which a loss uses buckets, without data, or in a real step."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mics_fn import _torch, tree
from mics_fn.deferred.autograd import fetch_all
from mics_fn.deferred.deferring import defer
from mics_fn.deferred.grad_sum import GradSum
from mics_fn.deferred.graph import Graph, differentiate
from mics_fn.deferred.live import Cache
from mics_fn.groups import Hierarchy, Life
from mics_fn.schedules import Control, Known, OnDemand, Schedule
from mics_fn.shards import (
    Fixed,
    Leaf,
    Sharded,
    Tied,
    check_shards,
    grouped,
    in_order,
    is_leaf,
    names_of,
    owner_index,
    pieces,
    put,
)
from mics_fn.tree import Tree


def record(
    loss_fn: Callable[[Tree, Any], Tensor], shards: Tree, batch: Any, *, groups: Any = None
) -> Schedule:
    """The order in which a loss and its backward use buckets, as a schedule without fetches.

    Args:
      loss_fn: called with full parameters, which are deferred, and the batch; gives one number.
      shards: tree of shards.
      batch: pytree; its tensors are moved to meta, unless some are fake: then all is recorded in
        their fake mode.
      groups: None records without data. Else a real step is taken with the values that there are,
        as a model needs whose way depends on them.

    Returns:
      Uses and reductions in order; `plan` makes a schedule for `gather` of it.

    Communication: none; with `groups` that of a step.

    Memory: none to speak of; with `groups` the full parameters.

    Raises: what the loss raises on tensors without data.

    Example:
      >>> groups = make_groups(1)
      >>> shards = shard({"w": torch.ones(2), "b": torch.ones(2)}, groups, bucket_bytes=8)
      >>> loss_fn = lambda full, x: (x * full["w"] + full["b"]).sum()
      >>> record(loss_fn, shards, torch.ones(3, 2)).uses
      ((1,), (0,))
    """
    leaves, spec = tree.flatten(shards, is_leaf)
    check_shards("record", shards, leaves)
    if groups is not None:
        total = GradSum()
        full, cache = defer(shards, groups, OnDemand(None, 0), total)
        total.backward(loss_fn(full, batch))
        cache.close()
        total.wait()
        return cache.player.record
    try:
        return _without_data(loss_fn, leaves, spec, batch)
    except (NotImplementedError, RuntimeError) as error:
        error.add_note("record: there is no data here; pass groups= to record a real step")
        raise


def _without_data(
    loss_fn: Callable[[Tree, Any], Tensor], leaves: Sequence[Leaf], spec: Any, batch: Any
) -> Schedule:
    mode = next((m for x in tree.flatten(batch)[0] if (m := _torch.fake_mode_of(x))), None)
    device = torch.device("meta") if mode is None else torch.device("cpu")
    place = Hierarchy((), (), 0, device, Life(), None, control=Control())  # pyright: ignore
    with mode or nullcontext(), torch.enable_grad():
        hollow = [_hollow(leaf, device) for leaf in leaves]
        if mode is None:
            batch = tree.map_leaves(lambda x: x.to(device) if isinstance(x, Tensor) else x, batch)
        uses = in_order(grouped(hollow, [place] * len(hollow)))
        data: list[Any] = [None if isinstance(leaf, Tied) else leaf.data for leaf in hollow]
        names = partial(names_of, spec, uses)
        cache = _HollowCache(uses, names, Known(), OnDemand(None, 0), Control(), _Nowhere())
        put(data, uses, fetch_all(cache, data))
        owner = owner_index(hollow)
        loss = loss_fn(spec.unflatten([data[owner[i]] for i in range(len(hollow))]), batch)
        variables = [leaf.data for leaf in hollow if isinstance(leaf, Sharded)]
        if loss.requires_grad:
            differentiate(loss, variables, recomputes=Graph.of(loss).recomputes)
    return cache.player.record


def _hollow(leaf: Leaf, device: torch.device) -> Leaf:
    """A leaf without values, as the rank with the first chunk would have it."""
    if isinstance(leaf, Tied) or leaf.data is None:
        return leaf
    if leaf.bucket is None:
        return Fixed(torch.empty(leaf.data.shape, dtype=leaf.dtype, device=device))
    length = pieces(leaf.bucket, 0)[leaf.slot].length
    data = torch.empty(length, dtype=leaf.dtype, device=device)
    return replace(leaf, data=data.requires_grad_(isinstance(leaf, Sharded)))


class _Nowhere(GradSum):
    """Gradients that nobody wants."""

    def add(self, index: int, grads: Sequence[Tensor | None]) -> list[Tensor]:
        """Forget them."""
        return []


class _HollowCache(Cache):
    """Buckets without data are there at once."""

    def _fetch(self, index: int) -> None:
        bucket = self.uses[index].bucket
        full = self._chunks[index].new_empty(bucket.numel, dtype=bucket.compute)
        self._coming[index] = _Here(full)  # pyright: ignore


class _Here:
    """What `Pending` is for something that is under way."""

    def __init__(self, value: Tensor) -> None:
        self.wait = lambda: value

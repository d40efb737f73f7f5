"""`record`: the order in which a loss uses buckets, found without data or in a real step."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mics_fn import _torch, checks, tree
from mics_fn.collectives import Task
from mics_fn.deferred.autograd import fetch_all
from mics_fn.deferred.deferring import defer
from mics_fn.deferred.grad_sum import GradSum
from mics_fn.deferred.graph import Graph, check_loss, differentiate
from mics_fn.deferred.live import LiveBuckets
from mics_fn.groups import Hierarchy
from mics_fn.schedules import Channel, Learned, OnDemand, Run, Schedule
from mics_fn.shards import (
    BucketUse,
    Fixed,
    Leaf,
    Opened,
    Sharded,
    Tied,
    check_leaves,
    grouped,
    is_leaf,
    pieces,
    put,
    refuse_none,
)
from mics_fn.tree import Tree


def record(
    loss_fn: Callable[[Tree, Any], Tensor],
    shards: Tree,
    batch: Any,
    *,
    groups: Any = None,
    mark_backward: bool = False,
) -> Schedule:
    """The order in which a loss and its backward use buckets, as a schedule without fetches.

    Args:
      loss_fn: called with full parameters, which are deferred, and the batch; gives one number.
      shards: tree of shards.
      batch: pytree. Its tensors are moved to meta, unless some of them are fake; then everything
        is recorded in their fake mode.
      groups: None records without data. With groups a real step is run on the actual values, which
        a model needs whose control flow depends on them.
      mark_backward: put the mark `backward` where the backward pass begins.

    Returns:
      Uses and reductions in order; `schedules.plan` makes a schedule for `defer` from it.

    Communication: none without `groups`; else that of a step.

    Memory: none without `groups`; else the full parameters.

    Raises:
      PlanError: an argument is not what it should be.
      TreeError: there is no tree.

    Any error of the loss on tensors without data is raised, too.

    Example:
      >>> groups = make_groups(1)
      >>> shards = shard({"w": torch.ones(2), "b": torch.ones(2)}, groups, bucket_bytes=8)
      >>> loss_fn = lambda full, x: (x * full["w"] + full["b"]).sum()
      >>> record(loss_fn, shards, torch.ones(3, 2)).uses
      ((1,), (0,))
    """
    fix = "pass a function of full parameters and a batch, such as lambda full, x: ..."
    checks.function("record", "loss_fn", loss_fn, "that gives a loss", fix, optional=False)
    checks.flag("record", "mark_backward", mark_backward)
    if groups is not None:
        total = GradSum()
        with (run := defer(shards, groups, OnDemand(None, 0), into=total)) as full:
            total.backward(loss_fn(full, batch))
        total.wait()
        return run.marked if mark_backward else run.record
    refuse_none("record", shards, "shards")
    leaves, spec = tree.flatten(shards, is_leaf)
    check_leaves("record", shards, leaves, "shards")
    try:
        run = _without_data(loss_fn, leaves, spec, batch)
    except (NotImplementedError, RuntimeError) as error:
        error.add_note("record: there is no data here; pass groups= to record a real step")
        raise
    return run.marked if mark_backward else run.record


def _without_data(
    loss_fn: Callable[[Tree, Any], Tensor], leaves: Sequence[Leaf], spec: Any, batch: Any
) -> Run:
    """The run of a loss and its backward on tensors without data."""
    mode = next((m for x in tree.flatten(batch)[0] if (m := _torch.fake_mode_of(x))), None)
    device = torch.device("meta") if mode is None else torch.device("cpu")
    home = Hierarchy.of_one(device)
    with mode or nullcontext(), torch.enable_grad():
        if mode is None:
            batch = tree.map_leaves(lambda x: x.to(device) if isinstance(x, Tensor) else x, batch)
        empty = [_without_values(leaf, device) for leaf in leaves]
        homes = [home] * len(empty)
        opened = Opened("record", None, "shards", empty, spec, homes, grouped(empty, homes))
        policy, channel = OnDemand(None, 0), Channel()
        live = LiveBuckets(
            opened.uses, opened.names, Learned(), policy, channel, _Nowhere(), fetch=_at_once
        )
        full = opened.data
        put(full, opened.uses, fetch_all(live, full))
        loss = loss_fn(opened.build(full), batch)
        check_loss("record", loss)
        if loss.requires_grad:
            live.run.begin_backward()
            differentiate(loss, opened.pieces, recomputes=Graph.of(loss).recomputes)
    return live.run


def _without_values(leaf: Leaf, device: torch.device) -> Leaf:
    """A leaf without values, of the size that it has on the rank with the first chunk."""
    if isinstance(leaf, Tied) or leaf.data is None:
        return leaf
    if leaf.bucket is None:
        return Fixed(torch.empty(leaf.data.shape, dtype=leaf.dtype, device=device))
    length = pieces(leaf.bucket, 0)[leaf.slot].length
    data = torch.empty(length, dtype=leaf.dtype, device=device)
    return replace(leaf, data=data.requires_grad_(isinstance(leaf, Sharded)))


class _Nowhere:
    """Receives gradients and drops them."""

    def add(self, index: int, grads: Sequence[Tensor | None]) -> None:
        """Do nothing."""


class _AtOnce(NamedTuple):
    """A bucket without data, whose fetch takes no time."""

    full: Tensor
    ready: None = None

    def wait(self) -> Tensor:
        """The bucket."""
        return self.full


def _at_once(
    use: BucketUse, chunk: Any, held: Tensor | None, out: Tensor | None, bring: Task | None
) -> _AtOnce:
    return _AtOnce(chunk.new_empty(use.bucket.numel, dtype=use.bucket.compute))

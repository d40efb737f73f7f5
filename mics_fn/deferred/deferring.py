"""Gathers that follow a schedule: deferred parameters, and the sizes of their buckets."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from mics_fn import tree
from mics_fn.deferred.autograd import fetch_all
from mics_fn.deferred.grad_sum import GradSum
from mics_fn.deferred.live import Cache, sizes_of
from mics_fn.errors import PlanError, TreeError, message
from mics_fn.schedules import Control, Known, OnDemand, Schedule, together
from mics_fn.shards import (
    Sharded,
    Tied,
    as_tree,
    check_shards,
    gather_uses,
    grouped,
    homes_of,
    in_order,
    is_leaf,
    names_of,
    owner_index,
    put,
    read_shards,
)
from mics_fn.tree import Tree


def gather(
    shards: Tree,
    hierarchy: Any,
    *,
    schedule: Schedule | OnDemand | None = None,
    into: GradSum | None = None,
) -> Tree:
    """Rebuild full tensors from shards. Differentiable; the VJP is hop 1.

    Args:
      shards: tree of shards (`Sharded`, `Fixed`, `Tied` leaves).
      hierarchy: the route: `groups.hierarchy`, `groups.flat`, or `groups`; or a prefix pytree of
        these, or a function from path to one.
      schedule: None gathers now. A `Schedule` or a policy (`on_demand`, `keep_all`) gives deferred
        tensors: each fetches its bucket at the op that needs it, in forward and in backward.
      into: a `GradSum` that takes the gradients instead of the result of backward; needs a schedule
        and `groups`.

    Returns:
      The tree with tensors of the full shapes. Those of one bucket are views of one buffer; tied
      leaves are one tensor. The gradient of a function of them is a tree of shards, averaged over
      the partition group; no raw collective is left to differentiate, so grad, vjp, jvp, vmap,
      jacrev of full values and their compositions work. Where p > 1, a basis of one rank's piece
      (`jacfwd`, `hessian`, `jacrev` of shards) does not.

    Communication: one all-gather a level and bucket; each rank receives (p - 1)/p of the full
      bytes. Its VJP is one reduce-scatter a level and bucket. None if p = 1. A tree that is new to
      the groups is agreed on once (32 bytes). With a schedule each bucket is gathered as often as
      it is fetched, its reduce-scatter starts when its gradients are complete, and before a fetch
      that no schedule foresaw one small message goes to the store of torch.distributed.

    Memory: the full tree, until the caller drops it; its VJP four buffers of a bucket at most.
      With p = 1 nothing: full tensors are views of the shards. With a schedule what it keeps live.

    Raises:
      PlanError: the groups are not those that the tree was sharded with.
      DonatedError: a shard was given away earlier.
      DesyncError: ranks gather different trees, or use deferred parameters in different orders.
      LeafError: an op writes to a deferred parameter; `into` or `linearize` of torch.func; a basis
        of one rank's piece.
      TreeError: `into` without a schedule, or used twice.

    Example:
      >>> groups = make_groups(1)
      >>> shards = shard({"w": torch.ones(2)}, groups)
      >>> loss_fn = lambda s: gather(s, groups.hierarchy)["w"].square().sum()
      >>> torch.func.grad(loss_fn)(shards)["w"].data
      tensor([2., 2.])

    References: MiCS, Zhang et al., VLDB 2022, arXiv:2205.00119, section 3.3.
    """
    if into is not None and schedule is None:
        text = "gather: into= needs a schedule: gradients arrive as buckets are done"
        raise TreeError(message(text, fix="pass schedule=on_demand()"))
    if schedule is not None:
        return defer(shards, hierarchy, schedule, into)[0]
    leaves, spec, uses = read_shards("gather", shards, hierarchy)
    full = gather_uses(leaves, uses)
    owner = owner_index(leaves)
    return spec.unflatten([full[owner[i]] for i in range(len(leaves))])


def defer(
    shards: Tree, hierarchy: Any, schedule: Schedule | OnDemand, into: GradSum | None = None
) -> tuple[Tree, Cache]:
    """`gather` with a schedule, and the cache behind it, which may be closed early."""
    leaves, spec, uses = read_shards("gather", shards, hierarchy, describe(schedule))
    uses = in_order(uses)
    full: list[Any] = [None if isinstance(leaf, Tied) else leaf.data for leaf in leaves]
    control = together([use.hierarchy.control for use in uses])
    policy, known = memory_of(schedule, uses, control)
    cache = Cache(uses, partial(names_of, spec, uses), known, policy, control, into)
    if into is not None:
        pieces = [leaf.data for leaf in leaves if isinstance(leaf, Sharded)]
        given = iter(into.expect(pieces, partial(as_tree, spec, leaves, uses), cache.player))
        pairs = zip(leaves, full, strict=True)
        full = [next(given) if isinstance(leaf, Sharded) else x for leaf, x in pairs]
    put(full, uses, fetch_all(cache, full))
    cache.start()
    owner = owner_index(leaves)
    return spec.unflatten([full[owner[i]] for i in range(len(leaves))]), cache


def bucket_sizes(shards: Tree, groups: Any = None) -> list[int]:
    """Bytes that each bucket of a tree takes where it is live, by the numbers that schedules use.

    Args:
      shards: tree of shards.
      groups: as for `gather`; only those of a placement that keeps copies matter.

    Returns:
      One number a bucket; 0 for one that is whole, in a group of one rank or as a kept copy.

    Communication: none.

    Memory: none.

    Raises:
      LeafError: a leaf is no shard.

    Example:
      >>> bucket_sizes(shard([torch.ones(6)], make_groups(1)))
      [0]
    """
    leaves, _ = tree.flatten(shards, is_leaf)
    check_shards("bucket_sizes", shards, leaves)
    homes: list[Any] = [None] * len(leaves)
    if groups is not None:
        homes = homes_of("bucket_sizes", "groups", groups, shards)
    return sizes_of(in_order(grouped(leaves, homes)))


def describe(schedule: Any) -> str:
    """The facts of a schedule or policy that must be the same on every rank.

    Raises:
      PlanError: it is neither.
    """
    if isinstance(schedule, OnDemand):
        return schedule.describe()
    if not isinstance(schedule, Schedule):
        text = f"gather: schedule={schedule!r:.60} is no schedule"
        raise PlanError(message(text, fix="pass a Schedule, on_demand(...) or None"))
    return str(schedule)


def memory_of(
    schedule: Schedule | OnDemand, uses: Sequence[Any], control: Control
) -> tuple[OnDemand, Known]:
    """The policy behind `schedule=`, and what it knows of a tree.

    Raises:
      PlanError: it names buckets that the tree lacks, or uses one that is not live.
    """
    key = tuple((use.bucket, use.missing, use.hierarchy.hold) for use in uses)
    if isinstance(schedule, OnDemand):
        return schedule, schedule.known.setdefault(key, Known())
    if (schedule, key) not in control.fixed:
        sizes = sizes_of(uses)
        schedule.check(sizes)
        # Where the model does otherwise, buckets are fetched on demand in as much memory.
        policy = OnDemand(schedule.peak_bytes(sizes), 0, lambda record, sizes: schedule)
        order = tuple(dict.fromkeys(schedule.reduces))
        whole = sorted(order) == [i for i, use in enumerate(uses) if use.bucket.trainable]
        control.fixed[schedule, key] = policy, Known(schedule, order if whole else None)
    return control.fixed[schedule, key]

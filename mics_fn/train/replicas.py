"""When replicas are merged: at every step, every H steps, or through an outer optimizer.

Hop 2 in every step needs a fast link between replicas. If there is none, as between regions, each
replica steps on its own gradients for a while, and then all of them are merged.
"""

from typing import Any

from mics_fn import tree
from mics_fn.errors import PlanError, TreeError, message
from mics_fn.optim import TrainState, as_transform, fresh, init_state, map_columns, opt_step, sgd
from mics_fn.shards import donate as mark_donated
from mics_fn.shards import is_leaf, sync_replicas
from mics_fn.train.syncing import ReplicaSync, SyncState
from mics_fn.tree import Tree

__all__ = ["ReplicaSync", "SyncState", "diloco", "every_step", "local_sgd"]


def every_step() -> ReplicaSync:
    """Hop 2 in every step, as in MiCS, so that replicas are never apart.

    Returns:
      A `ReplicaSync` that does nothing; the hop 2 of each step keeps replicas equal.

    Example:
      >>> groups = make_groups(1)
      >>> every_step().groups(groups) is groups
      True
    """

    def nothing_left(params: Tree, outer: Any, groups: Any, donate: bool) -> tuple[Tree, Any]:
        return params, outer

    return ReplicaSync("every_step()", 1, False, lambda params: (), nothing_left)


def local_sgd(every: int) -> ReplicaSync:
    """Replicas step on their own gradients; every H steps their parameters are averaged.

    The state of the optimizer stays with its replica. Between merges parameters differ. To get one
    model then, average them with `sync_replicas(params, groups)`.

    Args:
      every: H, the number of steps from one average to the next.

    Returns:
      A `ReplicaSync`.

    Communication: every H steps one all-reduce per bucket over r replicas, 2(r - 1)/r of the
      shards' bytes, instead of one in each step.

    Raises:
      PlanError: `every` is not an int of at least 1.

    Example:
      >>> local_sgd(8)
      local_sgd(8)

    References: Stich, arXiv:1805.09767; McMahan et al. (FedAvg), arXiv:1602.05629.
    """
    _check_every("local_sgd", every)

    def merge(params: Tree, outer: Any, groups: Any, donate: bool) -> tuple[Tree, Any]:
        # Parameters, unlike differences of them, must be sent in full precision.
        return sync_replicas(_own(params, donate), groups, donate=True, exact=True), outer

    return ReplicaSync(f"local_sgd({every})", every, True, lambda params: (), merge)


def diloco(every: int, outer: Any = None) -> ReplicaSync:
    """DiLoCo: every H steps an outer optimizer follows the mean change of the replicas.

    All replicas keep an anchor, which is the parameters that they last restarted from. Every H
    steps the outer gradient, which is anchor - params averaged over replicas, goes through the
    outer optimizer, which moves the anchor, and the parameters restart there. The state of the
    inner optimizer stays with its replica. With `outer=sgd(1.0)` this is `local_sgd`. The last
    merged model is `state.outer.params`. A single replica takes outer steps too.

    Args:
      every: H, the number of inner steps from one outer step to the next; about 500 in the paper.
      outer: a `Transform`, or any object with `init` and `update`; default the paper's,
        `sgd(0.7, momentum=0.9, nesterov=True)`. Its learning rate may be a function of the outer
        step.

    Returns:
      A `ReplicaSync`.

    Communication: every H steps one all-reduce per bucket over r replicas, 2(r - 1)/r of the
      shards' bytes, instead of one in each step.

    Memory: its `SyncState` holds one more copy of the shards and the state of `outer`, which by
      default is another copy.

    Raises:
      PlanError: `every` is not an int of at least 1.
      OptimizerError: `outer` is not an optimizer.

    Example:
      >>> groups = make_groups(1)
      >>> sync = diloco(every=1, outer=sgd(0.5))
      >>> shards = shard({"w": torch.ones(2)}, groups)
      >>> sync_state = sync.init(shards, groups)
      >>> moved, sync_state = sync.after(shard({"w": torch.zeros(2)}, groups), sync_state, groups)
      >>> moved["w"].data
      tensor([0.5000, 0.5000])

    References: Douillard et al., arXiv:2311.08105.
    """
    _check_every("diloco", every)
    transform = sgd(0.7, momentum=0.9, nesterov=True) if outer is None else as_transform(outer)

    def begin(params: Tree) -> TrainState:
        return init_state(fresh(params), transform)

    def merge(params: Tree, kept: Any, groups: Any, donate: bool) -> tuple[Tree, TrainState]:
        _check_anchor(params, kept)
        own = _own(params, donate)
        moved = map_columns(lambda p, a: p.neg_().add_(a), own, kept.params, donate=True)
        # A difference may be sent in fewer bits than parameters have.
        mean = sync_replicas(moved, groups, donate=True)
        kept = opt_step(kept, mean, donate=donate)
        # Copied into other memory, or the next donated step would change the anchor too.
        return map_columns(lambda p, a: p.copy_(a), mean, kept.params, donate=True), kept

    return ReplicaSync(f"diloco({every})", every, True, begin, merge, transform.facts)


def _check_every(verb: str, every: Any) -> None:
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        text = f"{verb}: every={every!r}, expected an int of at least 1"
        raise PlanError(message(text, fix="give the steps from one merge to the next"))


def _check_anchor(params: Tree, kept: Any) -> None:
    """Raise TreeError unless the state of `diloco` belongs to this tree."""
    where = "it was made by another policy"
    if isinstance(kept, TrainState):
        if tree.flatten(kept.params)[1] == tree.flatten(params)[1]:
            return
        where = tree.first_mismatch(kept.params, params, "params", is_leaf) or where
    fix = "pass what init and after of this policy gave for this tree"
    raise TreeError(message("ReplicaSync.after: the state does not fit", [where], fix=fix))


def _own(params: Tree, donate: bool) -> Tree:
    """Parameters that may be written to: a copy, or with `donate` the given memory in new leaves.

    The old leaves are marked as donated before anything is written, so that a failed merge cannot
    be used by mistake.
    """
    if not donate:
        return fresh(params)
    pieces, spec = tree.flatten(params)
    own = spec.unflatten([piece.detach() for piece in pieces])
    mark_donated(params, "params", "ReplicaSync.after")
    return own

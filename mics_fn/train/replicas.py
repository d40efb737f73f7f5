"""When replicas are merged: at every step, every H steps, or through an outer optimizer.

Hop 2 in every step needs a fast link between replicas. If there is none, as between regions, each
replica steps on its own gradients for a while, and then all of them are merged.

What `hop2` of a `Precision` says, such as `hop2=int8`, holds for gradients in `every_step` and for
the outer gradients of `diloco`. `local_sgd` sends parameters, which are never coded, since rounding
them would be an error in the model itself: there it has no effect, and `Trainer` warns of it.
"""

from collections.abc import Callable
from typing import Any

from mics_fn import checks, tree
from mics_fn.errors import PlanError, TreeError, message
from mics_fn.optim import (
    Optimizer,
    TrainState,
    as_transform,
    fresh,
    init_state,
    map_columns,
    opt_step,
    sgd,
)
from mics_fn.shards import is_leaf, sync_replicas
from mics_fn.train.syncing import ReplicaSync, SyncState
from mics_fn.tree import Tree

__all__ = ["ReplicaSync", "SyncState", "diloco", "every_step", "local_sgd", "reduced_by"]


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
    model then, average them with `sync_replicas(params, groups, exact=True)`. They are sent in
    their own dtype, so `hop2` of a `Precision` has no effect.

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
        return sync_replicas(fresh(params), groups, donate=True, exact=True), outer

    return ReplicaSync(f"local_sgd({every})", every, True, lambda params: (), merge, exact=True)


def diloco(every: int, outer: Optimizer | None = None) -> ReplicaSync:
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
        own = fresh(params)  # a merge that fails leaves the parameters as they were
        moved = map_columns(lambda p, a: p.neg_().add_(a), own, kept.params, donate=True)
        # A difference may be sent in fewer bits than parameters have.
        mean = sync_replicas(moved, groups, donate=True)
        kept = opt_step(kept, mean, donate=donate)
        # Copied into other memory, or the next donated step would change the anchor too.
        return map_columns(lambda p, a: p.copy_(a), mean, kept.params, donate=True), kept

    return ReplicaSync(f"diloco({every})", every, True, begin, merge, transform.facts)


def reduced_by(
    hop2: Callable[..., Any], *, init: Callable[[Tree], Any] | None = None
) -> ReplicaSync:
    """Hop 2 by a function of one's own in every step: other dtypes, other routes, fewer bits.

    Steps are taken on `Groups.without_replicas()`, so that gradients come with hop 1 behind them,
    and the function has to make them equal on all replicas; `collectives` has what it needs for
    that. A `Trainer` finds every `check_replicas` steps whether it does.

    Args:
      hop2: `hop2(grads, groups) -> grads`, from this replica's gradients, a tree of shards, to
        their mean over all. With `init` it is `hop2(grads, state, groups) -> (grads, state)`.
      init: `init(params) -> state`, for what is kept from step to step, such as the rest that a
        compressed sum leaves out: a pytree with tensors. It belongs to its rank. A step that is
        refused leaves it as it was, checkpoints save that of each replica, and a rank that was lost
        cannot take it from another one.

    Returns:
      A `ReplicaSync`. `Trainer(hop2=f)` is `Trainer(replica_sync=reduced_by(f))`.

    Communication: what `hop2` sends, once per step.

    Memory: with `init` its state, and two copies of the gradients' shards.

    Raises:
      PlanError: one of them is not a function of these arguments.

    Example:
      >>> groups, loss = make_groups(1), lambda model, x: model(x).sum()
      >>> halved = lambda grads, groups: shards.map(lambda g: g / 2, grads)
      >>> trainer = Trainer(torch.nn.Linear(1, 1), optim.sgd(0.1), groups, loss=loss, hop2=halved)
      >>> before = trainer.params()["bias"]
      >>> metrics = trainer.step(torch.ones(1, 1))
      >>> before - trainer.params()["bias"]
      tensor([0.0500])
    """
    for name, given in (("hop2", hop2), ("init", init)):
        if not callable(given) and (name == "hop2" or given is not None):
            text = f"reduced_by: {name}={given!r:.60} is not a function"
            raise PlanError(message(text, fix="pass hop2(grads, groups), which gives gradients"))

    fix = "it is given gradients of this replica, and returns their mean over all"
    form = "hop2(grads, groups)" if init is None else "hop2(grads, state, groups)"
    checks.call("reduced_by", hop2, form, fix)
    if init is not None:
        checks.call("reduced_by", init, "init(params)", "it returns the first state")

    def with_state(grads: Tree, outer: Any, groups: Any) -> Any:
        return hop2(grads, outer, groups)

    def without_state(grads: Tree, outer: Any, groups: Any) -> Any:
        return hop2(grads, groups), outer

    def nothing_left(params: Tree, outer: Any, groups: Any, donate: bool) -> tuple[Tree, Any]:
        return params, outer

    name = f"reduced_by({getattr(hop2, '__qualname__', type(hop2).__name__)})"
    reduce = without_state if init is None else with_state
    return ReplicaSync(name, 1, False, init or (lambda _: ()), nothing_left, reduce=reduce)


def policy_of(replica_sync: ReplicaSync | None, hop2: Any) -> ReplicaSync:
    """The policy that two arguments of `Trainer` mean.

    Raises:
      PlanError: both are given.
    """
    if hop2 is None:
        return replica_sync or every_step()
    if replica_sync is not None:
        text = "Trainer: replica_sync= and hop2= are both given"
        raise PlanError(message(text, fix="pass one; hop2=f is replica_sync=reduced_by(f)"))
    return reduced_by(hop2)


def _check_every(verb: str, every: Any) -> None:
    checks.integer(verb, "every", every, fix="give the steps from one merge to the next")


def _check_anchor(params: Tree, kept: Any) -> None:
    """Raise TreeError unless the state of `diloco` belongs to this tree."""
    where = "it was made by another policy"
    if isinstance(kept, TrainState):
        if tree.flatten(kept.params)[1] == tree.flatten(params)[1]:
            return
        where = tree.first_mismatch(kept.params, params, "params", is_leaf) or where
    fix = "pass what init and after of this policy gave for this tree"
    raise TreeError(message("ReplicaSync.after: the state does not fit", [where], fix=fix))

"""When replicas become one again: at every step, every H steps, or through an outer optimizer.

Hop 2 of every step needs a fast link between replicas. Where there is none, as between regions,
each replica steps on its own gradients for a while, and then all of them are merged.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from mics_fn import tree
from mics_fn.collectives import check_same
from mics_fn.errors import GroupsError, PlanError, TreeError, message
from mics_fn.groups import Groups
from mics_fn.optim import TrainState, as_transform, fresh, init_state, map_columns, opt_step, sgd
from mics_fn.shards import (
    check_equal,
    is_leaf,
    open_shards,
    refuse_derivative,
    sync_replicas,
)
from mics_fn.shards import donate as mark_donated
from mics_fn.tree import Tree


@tree.node
@dataclass(frozen=True)
class SyncState:
    """What a `ReplicaSync` carries from step to step.

    Args:
      step: steps done, those too whose update was skipped. It is the same on all ranks, so that no
        two disagree on when to merge.
      outer: what the policy keeps. For `diloco` a `TrainState`: its `params` are the anchor, equal
        on all replicas at all times, its `opt` is the state of the outer optimizer.
    """

    step: int
    outer: Any = ()


@dataclass(frozen=True, repr=False)
class ReplicaSync:
    """When and how replicas are merged; made by `every_step`, `local_sgd` or `diloco`.

    Args:
      name: how it was made, such as "local_sgd(8)"; ranks compare it.
      every: steps from one merge to the next.
      apart: whether replicas step on gradients of their own in between; without, every step does
        hop 2, and nothing is left to merge.
      begin: `begin(params) -> outer`, what `SyncState` starts with.
      merge: `merge(params, outer, groups, donate) -> (params, outer)`; afterwards all replicas hold
        the same bits.

    Example:
      >>> from dataclasses import replace
      >>> groups = make_groups(1)
      >>> sync = local_sgd(every=2)
      >>> inner = sync.groups(groups)
      >>> state = init_state(shard({"w": torch.ones(2)}, groups), sgd(0.1))
      >>> sync_state = sync.init(state.params, groups)
      >>> for _ in range(4):
      ...     grads = torch.func.grad(lambda s: gather(s, inner)["w"].sum())(state.params)
      ...     state = opt_step(state, reduce_grads(grads, inner))
      ...     params, sync_state = sync.after(state.params, sync_state, groups)
      ...     state = replace(state, params=params)
    """

    name: str
    every: int
    apart: bool
    begin: Callable[[Tree], Any]
    merge: Callable[[Tree, Any, Any, bool], tuple[Tree, Any]]

    def groups(self, groups: Any) -> Any:
        """The groups that the steps use: those given, or, where replicas are apart, one replica's.

        Args:
          groups: as for `shard`.

        Returns:
          Groups, a prefix pytree of them, or a function from path to groups, as they were given.
          The same `Groups` give the same ones again. They share the life and the ledger of those
          given. (Other groups with equal partition groups do as well: those of a region alone keep
          the replicas of the region equal, and `after` merges regions.)

        Communication: none.

        Raises:
          GroupsError: there are none, or a hierarchy is given, which knows of no replicas.
        """
        if not self.apart:
            return groups
        if callable(groups):
            return lambda path: _replica(groups(path))
        return _replica(None) if groups is None else tree.map_leaves(_replica, groups)

    def init(self, params: Tree, groups: Any) -> SyncState:
        """The state before the first step.

        Args:
          params: tree of shards, equal on all replicas.
          groups: those that it was sharded with.

        Returns:
          A `SyncState` at step 0.

        Communication: the name of the policy; where replicas go apart, 8 bytes a leaf to check that
          they start equal. Both over the partition group and over the replication group.

        Memory: for `diloco` a copy of the shards and the state of the outer optimizer.

        Raises:
          DesyncError: ranks have different policies, or replicas differ.
          PlanError: `groups` are not those of the tree.
          LeafError: replicas go apart, and a derivative would be needed; see `after`.
        """
        self._refuse_derivative("init", params)
        opened = open_shards("ReplicaSync.init", params, groups, root="params").require_replicas()
        text = "ReplicaSync.init: ranks have different policies"
        check_same(text, self.name, opened.homes, "make the same one on every rank")
        if self.apart:
            check_equal(opened)
        return SyncState(0, self.begin(params))

    def due(self, state: SyncState) -> bool:
        """Whether the next `after` leaves replicas equal; the same on every rank."""
        return (state.step + 1) % self.every == 0

    def after(
        self, params: Tree, state: SyncState, groups: Any, *, donate: bool = False
    ) -> tuple[Tree, SyncState]:
        """Call it once after each step: at every H-th it merges the replicas.

        Args:
          params: tree of shards, after the optimizer's step (or without, where that was skipped).
          state: what `init` or the last `after` gave.
          groups: those that the tree was sharded with, not those of the steps.
          donate: merge in the buffers of `params` and `state`, which can not be used again.

        Returns:
          The parameters to go on with, and the next state. Between merges the very parameters.

        Communication: at every H-th step one all-reduce a bucket over r replicas, 2(r - 1)/r of the
          shards' bytes; else none. None if r = 1.

        Memory: at a merge a copy of the shards and of `state`; none with `donate`.

        Raises:
          PlanError: `groups` are those of the steps, in which no other replica is.
          TreeError: `state` is of another tree or policy.
          LeafError: replicas go apart, and this is inside torch.func, or a parameter requires a
            gradient: a merge has no derivative.
          CollectiveError: the merge failed; with `donate` the parameters are gone then, and the
            anchor is not.
        """
        later = replace(state, step=state.step + 1)
        if not self.apart:
            return params, later
        self._refuse_derivative("after", params)
        if state.step == 0 or self.due(state):  # a mistake shows before the first H steps are done
            open_shards("ReplicaSync.after", params, groups, root="params").require_replicas()
        if not self.due(state):
            return params, later
        with torch.no_grad():
            merged, outer = self.merge(params, state.outer, groups, donate)
        return merged, replace(later, outer=outer)

    def _refuse_derivative(self, verb: str, params: Tree) -> None:
        if self.apart:
            fix = "do it outside, or in torch.no_grad(); sync_replicas can be differentiated"
            refuse_derivative(f"ReplicaSync.{verb}", tree.flatten(params)[0], fix)

    def __repr__(self) -> str:
        return self.name


def every_step() -> ReplicaSync:
    """Hop 2 in every step, as MiCS does: replicas are never apart.

    Returns:
      A `ReplicaSync` that does nothing.

    Communication: none here. Each step does hop 2.

    Memory: none.

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

    The state of the optimizer stays with its replica. Between merges parameters differ: for the
    model as it is now, average them with `sync_replicas(params, groups)`.

    Args:
      every: H, steps from one average to the next.

    Returns:
      A `ReplicaSync`.

    Communication: none here. Every H steps one all-reduce a bucket over r replicas, 2(r - 1)/r of
      the shards' bytes, instead of that in each step.

    Memory: none.

    Raises:
      PlanError: `every` is no int of at least 1.

    Example:
      >>> local_sgd(8)
      local_sgd(8)

    References: Stich, arXiv:1805.09767; McMahan et al. (FedAvg), arXiv:1602.05629.
    """
    _check_every("local_sgd", every)

    def merge(params: Tree, outer: Any, groups: Any, donate: bool) -> tuple[Tree, Any]:
        # These are parameters, no differences: they must travel in all the bits that they have.
        return sync_replicas(_own(params, donate), groups, donate=True, exact=True), outer

    return ReplicaSync(f"local_sgd({every})", every, True, lambda params: (), merge)


def diloco(every: int, outer: Any = None) -> ReplicaSync:
    """DiLoCo: every H steps an outer optimizer follows what the replicas did, on average.

    All replicas keep an anchor, the parameters that they last restarted from. Every H steps the
    outer gradient, anchor - params averaged over replicas, goes through the outer optimizer, which
    moves the anchor, and the parameters restart there. The state of the inner optimizer stays with
    its replica. With `outer=sgd(1.0)` it is `local_sgd`. The model as it was last merged is
    `state.outer.params`. One replica alone takes outer steps too.

    Args:
      every: H, inner steps from one outer step to the next; in the paper about 500.
      outer: a `Transform` or anything of `init` and `update`; default the paper's,
        `sgd(0.7, momentum=0.9, nesterov=True)`. Its learning rate may be a function of the outer
        step.

    Returns:
      A `ReplicaSync`.

    Communication: none here. Every H steps one all-reduce a bucket over r replicas, 2(r - 1)/r of
      the shards' bytes, instead of that in each step.

    Memory: none here. Runs hold one more copy of the shards and the state of `outer`, by default
      another.

    Raises:
      PlanError: `every` is no int of at least 1.
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
        # A difference, which may travel in fewer bits than parameters have.
        mean = sync_replicas(moved, groups, donate=True)
        kept = opt_step(kept, mean, donate=donate)
        # In memory of their own, or the next donated step would move the anchor too.
        return map_columns(lambda p, a: p.copy_(a), mean, kept.params, donate=True), kept

    return ReplicaSync(f"diloco({every})", every, True, begin, merge)


def _replica(groups: Any) -> Groups:
    """The groups of this rank's replica, a world of its own."""
    if isinstance(groups, Groups):
        return groups.replica
    text = f"ReplicaSync.groups: got {type(groups).__name__}, expected Groups"
    raise GroupsError(message(text, fix="pass what make_groups gave"))


def _check_every(verb: str, every: Any) -> None:
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        text = f"{verb}: every={every!r}, expected an int of at least 1"
        raise PlanError(message(text, fix="give the steps from one merge to the next"))


def _check_anchor(params: Tree, kept: Any) -> None:
    same = isinstance(kept, TrainState)
    if not same or tree.flatten(kept.params)[1] != tree.flatten(params)[1]:
        where = same and tree.first_mismatch(kept.params, params, "params", is_leaf)
        lines = [where or "it was made by another policy"]
        fix = "pass what init and after of this policy gave for this tree"
        raise TreeError(message("ReplicaSync.after: the state does not fit", lines, fix=fix))


def _own(params: Tree, donate: bool) -> Tree:
    """Parameters to write to: a copy, or the given memory in new nodes, its old ones gone.

    They are gone before anything is written, so that no failure leaves half a merge to be used.
    """
    if not donate:
        return fresh(params)
    pieces, spec = tree.flatten(params)
    own = spec.unflatten([piece.detach() for piece in pieces])
    mark_donated(params, "params", "ReplicaSync.after")
    return own

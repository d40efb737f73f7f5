"""`ReplicaSync`: a policy that says when replicas are merged, and how; and what it carries."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from mics_fn import checks, tree
from mics_fn.collectives import check_same
from mics_fn.errors import GroupsError, TreeError, message
from mics_fn.groups import Groups
from mics_fn.optim import fresh, map_columns
from mics_fn.shards import Writing, check_equal, open_shards, refuse_derivative
from mics_fn.tree import Tree


@tree.node
@dataclass(frozen=True)
class SyncState:
    """What a `ReplicaSync` carries from step to step.

    Args:
      step: the number of steps, including those whose update was skipped. It is the same on all
        ranks, so that they agree on when to merge.
      outer: the state of the policy. For `diloco` it is a `TrainState`: its `params` are the
        anchor, which is equal on all replicas at all times, and its `opt` is the state of the outer
        optimizer.
    """

    step: int
    outer: Any = ()


@dataclass(frozen=True, repr=False)
class ReplicaSync:
    """When and how replicas are merged; made by `every_step`, `local_sgd` or `diloco`.

    Args:
      name: how it was made, such as "local_sgd(8)"; ranks compare it.
      every: the number of steps from one merge to the next.
      apart: whether replicas step on gradients of their own in between. If not, every step does
        hop 2, and nothing is left to merge.
      begin: `begin(params) -> outer`, the first `outer` of a `SyncState`.
      merge: `merge(params, outer, groups, donate) -> (params, outer)`, after which all replicas
        hold the same bits. It leaves the memory of `params` alone; with `donate` it may write into
        that of `outer`, once it needs no other rank any more.
      facts: those of the outer optimizer, as for a `Transform`.
      reduce: `reduce(grads, outer, groups) -> (grads, outer)`, in place of hop 2; None does hop 2.
      exact: whether `merge` sends values as they are, so that no codes of hop 2 are sent.

    Example:
      >>> from mics_fn.optim import sgd
      >>> from mics_fn.train.replicas import local_sgd
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
    facts: Callable[[Sequence[str]], Mapping[str, str]] | None = None
    reduce: Callable[[Tree, Any, Any], tuple[Tree, Any]] | None = None
    exact: bool = False

    def groups(self, groups: Any) -> Any:
        """The groups for the steps: one replica's if these do no hop 2, else those given.

        Args:
          groups: as for `shard`.

        Returns:
          `Groups`, a prefix pytree of them, or a function from path to groups, in the form in which
          they were given. Equal arguments give the same objects, which share the life and the
          ledger of those given. (Steps may also use other groups with equal partition groups: those
          of one region keep the replicas of the region equal, and `after` merges regions.)

        Raises:
          GroupsError: there are no groups, or a hierarchy is given, which has no replicas.
        """
        if not self.apart and self.reduce is None:
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

        Communication: the name of the policy; if replicas go apart, also 8 bytes per leaf to check
          that they start equal. Both go over the partition group and over the replication group.

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

    def reduced(self, grads: Tree, state: SyncState, groups: Any) -> tuple[Tree, SyncState]:
        """Gradients with both hops done; hop 2 by `reduce` if there is one.

        Args:
          grads: tree of shards, reduced over the groups of the steps; given away.
          state: as for `after`.
          groups: those that the tree was sharded with.

        Returns:
          The gradients, and the state for a step that is taken.

        Communication: what `reduce` sends; none without it.

        Raises:
          TreeError: `reduce` gave something else than two values, or gradients of another tree.
          LeafError: a derivative is asked for.
        """
        if self.reduce is None:
            return grads, state
        self._refuse_derivative("reduced", grads)
        keeps = bool(tree.flatten(state.outer)[0])
        with torch.no_grad():
            # The memory of gradients is used again, and a state may be made of them.
            found = self.reduce(fresh(grads) if keeps else grads, state.outer, groups)
            if not isinstance(found, tuple) or len(found) != 2 or not _is_like(found[0], grads):
                text = f"{self.name}: it gave no gradients like those that it was given"
                fix = "return a tree of shards, as shards.map gives; with init= also the next state"
                raise TreeError(message(text, fix=fix))
            mean, outer = found
            return (fresh(mean) if keeps else mean), replace(state, outer=outer)

    def due(self, state: SyncState) -> bool:
        """Whether the next `after` leaves replicas equal; the same on every rank."""
        _check_state("due", state)
        return (state.step + 1) % self.every == 0

    def after(
        self, params: Tree, state: SyncState, groups: Any, *, donate: bool = False
    ) -> tuple[Tree, SyncState]:
        """Merge the replicas at every H-th call; to be called once after each step.

        Args:
          params: tree of shards, after the optimizer's step (unless that was skipped).
          state: the result of `init` or of the last `after`.
          groups: those that the tree was sharded with, not those of the steps.
          donate: merge in the buffers of `params` and `state`, which cannot be used again.

        Returns:
          The parameters for the next step, and the next state. Between merges the parameters are
          the same object.

        Communication: at every H-th step one all-reduce per bucket over r replicas, 2(r - 1)/r of
          the shards' bytes. None at other steps, or if r = 1.

        Memory: at a merge a copy of the shards and of `state`; with `donate` of the shards alone,
          until it is done.

        Raises:
          PlanError: `groups` are those of the steps, which contain no other replica.
          TreeError: `state` belongs to another tree or policy.
          LeafError: replicas go apart, and this is called inside torch.func, or a parameter
            requires a gradient: a merge has no derivative.
          CollectiveError, PeerFailed: the merge failed; `params` and `state` are as they were.
        """
        _check_state("after", state)
        later = replace(state, step=state.step + 1)
        if not self.apart:
            return params, later
        self._refuse_derivative("after", params)
        if state.step == 0 or self.due(state):  # show mistakes before H steps are done
            open_shards("ReplicaSync.after", params, groups, root="params").require_replicas()
        if not self.due(state):
            return params, later
        return self.merged(params, later, groups, donate=donate)

    def merged(
        self, params: Tree, state: SyncState, groups: Any, *, donate: bool
    ) -> tuple[Tree, SyncState]:
        """The merge that `after` makes when it is due, for a state that counts the step already."""
        with torch.no_grad(), Writing() as writing:
            merged, outer = self.merge(params, state.outer, groups, donate)
            if donate:  # from here on no other rank is needed
                writing.covers(params, "params", "ReplicaSync.after")
                merged = map_columns(lambda p, new: p.copy_(new), params, merged, donate=True)
                writing.give_away()
            return merged, replace(state, outer=outer)

    def _refuse_derivative(self, verb: str, params: Tree) -> None:
        if self.apart or verb == "reduced":
            fix = "do it outside, or in torch.no_grad(); sync_replicas can be differentiated"
            refuse_derivative(f"ReplicaSync.{verb}", tree.flatten(params)[0], fix)

    def __repr__(self) -> str:
        return self.name


def has_own_state(sync: ReplicaSync, state: SyncState) -> bool:
    """Whether hop 2 keeps something on each rank that no other rank has."""
    return sync.reduce is not None and bool(tree.flatten(state.outer)[0])


def _is_like(found: Tree, grads: Tree) -> bool:
    """Whether a tree has the structure, the layout and the sizes of another."""
    (x, spec), (y, like) = tree.flatten(found), tree.flatten(grads)
    return spec == like and all(
        isinstance(a, torch.Tensor) and (a.shape, a.dtype) == (b.shape, b.dtype)
        for a, b in zip(x, y, strict=True)
    )


def _check_state(verb: str, state: Any) -> None:
    """Raise PlanError unless a value is what a policy carries."""
    fix = "pass what init or the last after gave; a TrainState is another thing"
    checks.instance(f"ReplicaSync.{verb}", "state", state, SyncState, "a SyncState", fix)


def _replica(groups: Any) -> Groups:
    """The groups of this rank's replica alone."""
    if isinstance(groups, Groups):
        return groups.replica
    text = f"ReplicaSync.groups: got {type(groups).__name__}, expected Groups"
    raise GroupsError(message(text, fix="pass what make_groups gave"))

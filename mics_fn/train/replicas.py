"""When replicas are merged: at every step, every H steps, or through an outer optimizer.

Hop 2 in every step needs a fast link between replicas. If there is none, as between regions, each
replica steps on its own gradients for a while, and then all of them are merged.

What `hop2` of a `Precision` says, such as `hop2=int8`, holds for gradients in `every_step` and for
the outer gradients of `diloco`. `local_sgd` sends parameters, which are never coded, since rounding
them would be an error in the model itself: there it has no effect.

[Note: gradients of copies] Each part of a model computes the gradient of a copy by itself, and
hop 2 takes the mean of these. That is right only if all are equal up to rounding. If the loss
forgets to add up over the parts on its way back, or parts are given other batches, each has another
gradient. So in its first step a `Trainer` compares a few elements of each of them between parts.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from mics_fn import _torch, checks, optim, shards, tree
from mics_fn.collectives import levels, together
from mics_fn.errors import DesyncError, message
from mics_fn.tree import Tree

# `ReplicaSync`: a policy that says when replicas are merged, and how; and what it carries.


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
      independent: whether replicas step on gradients of their own in between. If not, every step
        does hop 2, and nothing is left to merge.
      begin: `begin(params) -> outer`, the first `outer` of a `SyncState`.
      merge: `merge(params, outer, groups, donate) -> (params, outer)`, after which all replicas
        hold the same bits. It leaves the memory of `params` alone; with `donate` it may write into
        that of `outer`, once it needs no other rank any more.
      facts: those of the outer optimizer, as for a `Transform`.
      reduce: `reduce(grads, outer, groups) -> (grads, outer)`, in place of hop 2; None does hop 2.

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
    independent: bool
    begin: Callable[[Tree], Any]
    merge: Callable[[Tree, Any, Any, bool], tuple[Tree, Any]]
    facts: Mapping[str, Any] | None = None
    reduce: Callable[[Tree, Any, Any], tuple[Tree, Any]] | None = None

    def groups(self, groups: Any) -> Any:
        """The groups for the steps: one replica's if these do no hop 2, else those given.

        Args:
          groups: as for `shard`.

        Returns:
          `Groups`, a prefix pytree of them, or a function from path to groups, in the form in which
          they were given. Equal arguments give the same objects, which share the life and the
          ledger of those given. (Steps may also use other groups with equal partition groups: those
          of one region keep the replicas of the region equal, and `after` merges regions.)
        """
        if not self.independent and self.reduce is None:
            return groups
        replica = attrgetter("replica")
        if callable(groups):
            return lambda path: replica(groups(path))
        return tree.map_leaves(replica, groups)

    def init(self, params: Tree, groups: Any) -> SyncState:
        """The state before the first step.

        Args:
          params: tree of shards, equal on all replicas.
          groups: those that it was sharded with.

        Returns:
          A `SyncState` at step 0.

        Communication: the name of the policy; if replicas are independent, also 8 bytes per leaf to
          check that they start equal. Both go over the partition group and over the replication
          group.

        Memory: for `diloco` a copy of the shards and the state of the outer optimizer.

        Raises:
          DesyncError: ranks have different policies, or replicas differ.
          PlanError: `groups` are not those of the tree.
          LeafError: replicas are independent, and a derivative would be needed; see `after`.
        """
        verb = "ReplicaSync.init"
        opened = shards.open_shards(verb, params, groups, root="params").require_replicas()
        with together(verb, list(opened.homes), self.name):
            pass
        if self.independent:
            _refuse_derivative(verb, params)
            shards.check_equal(opened)
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
          LeafError: a derivative is asked for.
        """
        if self.reduce is None:
            return grads, state
        _refuse_derivative("ReplicaSync.reduced", grads)
        keeps = bool(tree.flatten(state.outer)[0])
        with torch.no_grad():
            # The memory of gradients is used again, and a state may be made of them.
            given = optim.fresh(grads) if keeps else grads
            mean, outer = self.reduce(given, state.outer, groups)
            return (optim.fresh(mean) if keeps else mean), replace(state, outer=outer)

    def due(self, state: SyncState) -> bool:
        """Whether the next `after` leaves replicas equal; the same on every rank."""
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
          LeafError: `state` belongs to another tree.
          LeafError: replicas are independent, and this is called inside torch.func, or a parameter
            requires a gradient: a merge has no derivative.
          CollectiveError, PeerFailed: the merge failed; `params` and `state` are as they were.
        """
        fix = "pass what init or the last after gave; a TrainState is another thing"
        checks.instance("ReplicaSync.after", "state", state, SyncState, "a SyncState", fix)
        later = replace(state, step=state.step + 1)
        if not self.independent:
            return params, later
        verb = "ReplicaSync.after"
        _refuse_derivative(verb, params)
        if state.step == 0 or self.due(state):  # show mistakes before H steps are done
            shards.open_shards(verb, params, groups, root="params").require_replicas()
        if not self.due(state):
            return params, later
        return self.merged(params, later, groups, donate=donate)

    def merged(
        self, params: Tree, state: SyncState, groups: Any, *, donate: bool
    ) -> tuple[Tree, SyncState]:
        """The merge that `after` makes when it is due, for a state that counts the step already."""
        with torch.no_grad(), shards.Writing() as writing:
            merged, outer = self.merge(params, state.outer, groups, donate)
            if donate:  # from here on no other rank is needed
                writing.covers(params, "params", "ReplicaSync.after")
                merged = optim.map_columns(lambda p, new: p.copy_(new), params, merged, donate=True)
                writing.mark_donated()
        for home in dict.fromkeys(shards.homes_of("ReplicaSync.after", groups, merged)):
            if _torch.is_async(home.device):
                shards.lose_if_aborted(merged, "ReplicaSync.after", home.device, home)
        return merged, replace(state, outer=outer)

    def __repr__(self) -> str:
        return self.name


def _refuse_derivative(verb: str, params: Tree) -> None:
    fix = "do it outside, or in torch.no_grad(); sync_replicas can be differentiated"
    shards.refuse_derivative(verb, tree.flatten(params)[0], fix)


def has_own_state(sync: ReplicaSync, state: SyncState) -> bool:
    """Whether hop 2 keeps something on each rank that no other rank has."""
    return sync.reduce is not None and bool(tree.flatten(state.outer)[0])


_EVERY = "give the steps from one merge to the next"

__all__ = ["ReplicaSync", "SyncState", "diloco", "every_step", "local_sgd", "reduced_by"]


def _no_sync(params: Tree, outer: Any, groups: Any, donate: bool) -> tuple[Tree, Any]:
    """The merge of replicas that are equal after each step."""
    return params, outer


def every_step() -> ReplicaSync:
    """Run hop 2 in every step, as in MiCS, so that replicas stay equal.

    Returns:
      A `ReplicaSync` that does nothing; the hop 2 of each step keeps replicas equal.

    Example:
      >>> groups = make_groups(1)
      >>> every_step().groups(groups) is groups
      True
    """
    return ReplicaSync("every_step()", 1, False, lambda params: (), _no_sync)


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
    checks.integer("local_sgd", "every", every, fix=_EVERY)

    def merge(params: Tree, outer: Any, groups: Any, donate: bool) -> tuple[Tree, Any]:
        # Parameters, unlike differences of them, must be sent in full precision.
        mean = shards.sync_replicas(params, groups, exact=True)
        return (optim.fresh(params) if mean is params else mean), outer

    return ReplicaSync(f"local_sgd({every})", every, True, lambda params: (), merge)


def diloco(every: int, outer: optim.Optimizer | None = None) -> ReplicaSync:
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
      PlanError: `outer` is not an optimizer.

    Example:
      >>> from mics_fn.optim import sgd
      >>> groups = make_groups(1)
      >>> sync = diloco(every=1, outer=sgd(0.5))
      >>> shards = shard({"w": torch.ones(2)}, groups)
      >>> sync_state = sync.init(shards, groups)
      >>> moved, sync_state = sync.after(shard({"w": torch.zeros(2)}, groups), sync_state, groups)
      >>> moved["w"].data
      tensor([0.5000, 0.5000])

    References: Douillard et al., arXiv:2311.08105.
    """
    checks.integer("diloco", "every", every, fix=_EVERY)
    transform = (
        optim.sgd(0.7, momentum=0.9, nesterov=True) if outer is None else optim.as_transform(outer)
    )

    def begin(params: Tree) -> optim.TrainState:
        return optim.init_state(optim.fresh(params), transform)

    def merge(params: Tree, kept: Any, groups: Any, donate: bool) -> tuple[Tree, optim.TrainState]:
        own = optim.fresh(params)  # a merge that fails leaves the parameters as they were
        moved = optim.map_columns(lambda p, a: p.neg_().add_(a), own, kept.params, donate=True)
        # A difference may be sent in fewer bits than parameters have.
        mean = shards.sync_replicas(moved, groups)
        kept = optim.opt_step(kept, mean, donate=donate)
        # Copied into other memory, or the next donated step would change the anchor too.
        return optim.map_columns(lambda p, a: p.copy_(a), mean, kept.params, donate=True), kept

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
      A `ReplicaSync`.

    Communication: what `hop2` sends, once per step.

    Memory: with `init` its state, and two copies of the gradients' shards.

    Raises:
      PlanError: one of them is not a function of these arguments.

    Example:
      >>> groups, loss = make_groups(1), lambda model, x: model(x).sum()
      >>> halved = lambda grads, groups: shards.map(lambda g: g / 2, grads)
      >>> how = {"loss": loss, "replica_sync": reduced_by(halved)}
      >>> trainer = Trainer(torch.nn.Linear(1, 1), optim.sgd(0.1), groups, **how)
      >>> before = trainer.params()["bias"]
      >>> metrics = trainer.step(torch.ones(1, 1))
      >>> before - trainer.params()["bias"]
      tensor([0.0500])
    """
    verb = "reduced_by"
    fix = "it is given gradients of this replica, and returns their mean over all"
    form = "hop2(grads, groups)" if init is None else "hop2(grads, state, groups)"
    checks.call(verb, hop2, form, fix, optional=False)
    checks.call(verb, init, "init(params)", "it returns the first state")

    def reduce(grads: Tree, outer: Any, groups: Any) -> Any:
        return hop2(grads, outer, groups) if init is not None else (hop2(grads, groups), outer)

    name = f"reduced_by({getattr(hop2, '__qualname__', type(hop2).__name__)})"
    return ReplicaSync(name, 1, False, init or (lambda _: ()), _no_sync, reduce=reduce)


# Whether all parts of a model compute the same gradients of copies.

_SAMPLES, _FAR, _SMALL = 16, 0.1, 1e-3


class CopiesCheck:
    """A block in which gradients of copies are seen; see [Note: gradients of copies].

    Args:
      params: tree of shards.
      groups: those of the tree.
    """

    def __init__(self, params: Tree, groups: Any) -> None:
        leaves = tree.flatten(params, shards.is_leaf)[0]
        pairs = zip(leaves, shards.homes_of("Trainer", groups, params), strict=True)
        copies = {x.bucket: home for x, home in pairs if home.origin is not home}
        self.homes = {
            bucket: home for bucket, home in copies.items() if bucket and bucket.trainable
        }
        self._seen: dict[tuple[shards.Bucket, int], torch.Tensor] = {}

    def __enter__(self) -> None:
        shards.pack.watchers.append(self._see)

    def __exit__(self, *error: object) -> None:
        shards.pack.watchers.remove(self._see)

    def _see(self, bucket: shards.Bucket, full: torch.Tensor | None) -> None:
        if full is not None and bucket in self.homes:
            for slot, x in enumerate(shards.pack.split_full(bucket, full)):
                few = x.reshape(-1)[:: -(-x.numel() // _SAMPLES) or 1].double()
                self._seen[bucket, slot] = few + self._seen.get((bucket, slot), 0)

    def compare(self) -> None:
        """Raise DesyncError on all ranks if parts have other gradients of a copy.

        Communication: at most 128 bytes per leaf, over all ranks of a stage.
        """
        for home in dict.fromkeys(self.homes.values()):
            names = [x for x in self._seen if self.homes[x[0]] is home]
            if not names:
                continue
            names.sort(key=lambda x: (x[0].index, x[1]))
            few = pad_sequence([self._seen[x] for x in names], batch_first=True)
            every, count = levels.start_collect(home.stage.axes, few), home.origin.model.parts.size
            rows, ranks = every.wait().view(count, -1, *few.shape), home.stage.stacked_ranks
            gaps, sizes = (rows - rows[0]).norm(dim=3), rows.norm(dim=3)
            sizes = torch.maximum(sizes, sizes[0])
            odd = ((gaps > _FAR * sizes) & (sizes > _SMALL * sizes.max())).nonzero().tolist()
            home.partition.check_open()
            for part, place, at in odd[:1]:
                other = ranks[part * (len(ranks) // count) + place]
                raise _unlike(*names[int(at)], f"ranks {ranks[place]} and {other}")


def _unlike(bucket: shards.Bucket, slot: int, ranks: str) -> DesyncError:
    what = "Trainer: parts of the model have other gradients of a leaf that each has a copy of"
    lines = [f"leaf {slot} of {bucket}, of shape {bucket.shapes[slot]}: {ranks}"]
    fix = "give all parts the same batch, and add up over the parts in backward where a cut leaf "
    fix += "takes what copies gave; or say in make_groups(cut=) that it is cut"
    return DesyncError(message(what, lines, fix))

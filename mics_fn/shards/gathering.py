"""`gather`: shards become full tensors. See [Note: adjoint] in `linear` for its gradient."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mics_fn import tree
from mics_fn.agreement import agree
from mics_fn.cache import Cache
from mics_fn.control import together
from mics_fn.errors import LeafError, TreeError, message
from mics_fn.fetch import fetch_all
from mics_fn.flat import refuse_sparse
from mics_fn.grad_sum import GradSum
from mics_fn.leaf import Fixed, Leaf, Sharded, Tied, dtype_name, homes_of, is_leaf, owner_index
from mics_fn.linear import BucketUse, Started, apply, grouped, put, start, uses_of
from mics_fn.player import describe, memory_of, sizes_of
from mics_fn.policy import OnDemand
from mics_fn.schedule import Schedule
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
    leaves, spec, uses = _read("gather", shards, hierarchy)
    full = _gather_uses(leaves, uses)
    owner = owner_index(leaves)
    return spec.unflatten([full[owner[i]] for i in range(len(leaves))])


def defer(
    shards: Tree, hierarchy: Any, schedule: Schedule | OnDemand, into: GradSum | None = None
) -> tuple[Tree, Cache]:
    """`gather` with a schedule, and the cache behind it, which may be closed early."""
    leaves, spec, uses = _read("gather", shards, hierarchy, describe(schedule))
    uses = in_order(uses)
    full: list[Any] = [None if isinstance(leaf, Tied) else leaf.data for leaf in leaves]
    control = together([use.hierarchy.control for use in uses])
    policy, known = memory_of(schedule, uses, control)
    cache = Cache(uses, partial(names_of, spec, uses), known, policy, control, into)
    if into is not None:
        pieces = [leaf.data for leaf in leaves if isinstance(leaf, Sharded)]
        given = iter(into.expect(pieces, partial(_as_tree, spec, leaves, uses), cache.player))
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


def in_order(uses: Sequence[BucketUse]) -> list[BucketUse]:
    """The buckets by their numbers, so that a schedule's bucket 3 is bucket 3 of the tree."""
    return sorted(uses, key=lambda use: use.bucket.index)


def _as_tree(
    spec: Any, leaves: Sequence[Leaf], uses: Sequence[BucketUse], pieces: dict[int, list[Tensor]]
) -> Tree:
    """A tree of shards from the pieces of each bucket; leaves that are not trained stay."""
    out: list[Any] = list(leaves)
    for index, values in pieces.items():
        for i, piece in zip(uses[index].members, values, strict=True):
            leaf = leaves[i]
            out[i] = Sharded(piece, uses[index].bucket, getattr(leaf, "slot", 0))
    return spec.unflatten(out)


def names_of(spec: Any, uses: Sequence[BucketUse], index: int) -> list[str]:
    """The paths of a bucket's leaves."""
    paths = tree.spec_paths(spec)
    return [paths[i].removesuffix(".data") for i in uses[index].members]


class PendingTree:
    """A tree under way: `wait()` gives it.

    Communication: what was started; on gloo `wait()` issues the levels that are left.
    """

    def __init__(self, started: Sequence[Started], build: Callable[..., Tree]) -> None:
        self._started, self._build = started, build
        self._tree: Tree = None
        self._done = False

    def wait(self) -> Tree:
        """The tree. All ranks must wait for their trees in the same order; again is free."""
        if not self._done:
            self._tree = self._build(*(started.wait() for started in self._started))
            self._done, self._started = True, ()
        return self._tree


def start_gather(shards: Tree, hierarchy: Any) -> PendingTree:
    """Start a gather and go on; `wait()` gives the full tensors.

    Args:
      shards: as for `gather`; they must not change until `wait()`.
      hierarchy: as for `gather`.

    Returns:
      A `PendingTree`.

    Communication: as `gather`. On gloo the outermost level runs meanwhile, the others in `wait()`;
      on CUDA all of them run on a side stream, and `wait()` does not stop the host.

    Memory: as `gather`.

    Raises:
      LeafError: inside torch.func, or where a shard requires a gradient: it has no derivative.
      Else as `gather`.

    Example:
      >>> groups = make_groups(1)
      >>> start_gather(shard([torch.ones(2)], groups), groups).wait()
      [tensor([1., 1.])]
    """
    leaves, spec, uses = _read("gather", shards, hierarchy)
    data = [None if isinstance(leaf, Tied) else leaf.data for leaf in leaves]
    far = [use for use in uses if use.far]
    started = start("gather", "gather", far, data)
    owner = owner_index(leaves)

    def build(found: list[Tensor]) -> Tree:
        full = _near(uses, data)
        put(full, far, found)
        return spec.unflatten([full[owner[i]] for i in range(len(leaves))])

    return PendingTree([started], build)


def _read(
    verb: str, shards: Tree, hierarchy: Any, how: str = ""
) -> tuple[list[Leaf], Any, list[BucketUse]]:
    """Leaves, structure and buckets of a tree of shards, checked and agreed on."""
    leaves, spec = tree.flatten(shards, is_leaf)
    homes = homes_of(verb, "hierarchy", hierarchy, shards)
    check_shards(verb, shards, leaves)
    uses = uses_of(verb, leaves, homes)
    _agree_on_uses(uses, how)
    return leaves, spec, uses


def _near(uses: Sequence[BucketUse], data: Sequence[Any]) -> list[Any]:
    """Full tensors as views, where a group of one rank holds everything; other data as it is."""
    full = list(data)
    for use in uses:
        if not use.far:
            for i, shape in zip(use.index, use.bucket.shapes, strict=True):
                if i is not None:
                    piece = data[i].to(use.bucket.compute)
                    batch = piece.shape[:-1]
                    full[i] = piece.reshape((*batch, *shape) if batch else shape)
                    if full[i].requires_grad:
                        full[i].register_hook(refuse_sparse)
    return full


def _gather_uses(leaves: Sequence[Leaf], uses: Sequence[BucketUse]) -> list[Any]:
    data: list[Any] = [None if isinstance(leaf, Tied) else leaf.data for leaf in leaves]
    far = [use for use in uses if use.far]
    trained = [use for use in far if use.bucket.trainable]
    frozen = [use for use in far if not use.bucket.trainable]
    full = _near(uses, data)
    put(full, trained, apply("gather", trained, data))
    with torch.no_grad():  # frozen leaves are fetched, never reduced
        put(full, frozen, apply("gather", frozen, data))
    return full


def unshard(shards: Tree, hierarchy: Any) -> Tree:
    """Gather to plain tensors of their own memory, one bucket at a time, keeping nothing.

    Args:
      shards: tree of shards.
      hierarchy: as for `gather`.

    Returns:
      The tree with full tensors in the dtypes of the shards; each has its own storage, tied leaves
      are one tensor.

    Communication: as `gather`.

    Memory: the full tree and one bucket.

    Raises: as `gather`.

    Example:
      >>> groups = make_groups(1)
      >>> unshard(shard([torch.arange(3.0)], groups), groups.hierarchy)
      [tensor([0., 1., 2.])]
    """
    leaves, spec, uses = _read("unshard", shards, hierarchy)
    uses = [replace(use, bucket=use.bucket.exact) for use in uses]
    out: list[Any] = [leaf.data.clone() if isinstance(leaf, Fixed) else None for leaf in leaves]
    for use in uses:
        full = _gather_uses(leaves, [use])
        for i in use.members:
            out[i] = full[i].clone(memory_format=torch.contiguous_format)
    owner = owner_index(leaves)
    return spec.unflatten([out[owner[i]] for i in range(len(leaves))])


def check_shards(verb: str, shards: Tree, leaves: Sequence[Any]) -> None:
    for i, leaf in enumerate(leaves):
        if not is_leaf(leaf):
            path = tree.paths(shards, "shards", is_leaf)[i]
            fix = "make shards with shard(params, groups)"
            raise LeafError(message(f"{verb}: {path} is {type(leaf).__name__}, no shard", fix=fix))


def _agree_on_uses(uses: Sequence[BucketUse], how: str) -> None:
    """Compare what ranks are about to gather together, once for each set of leaves."""
    for home in dict.fromkeys(use.hierarchy for use in uses):
        mine = [use for use in uses if use.hierarchy is home]
        key = (how, home.facts, *((use.bucket, use.missing) for use in mine))
        if key in home.agreed:
            continue
        facts = [("schedule", how or "none: all at once")]
        facts += [("levels", home.facts)]
        for use in mine:
            # All of the layout, so that no other tree's agreement is mistaken for this one's.
            dtypes = (use.bucket.dtype, use.bucket.compute, use.bucket.reduce)
            names = "/".join(dict.fromkeys(map(dtype_name, dtypes)))
            layout = f"{use.bucket.numel} {names} of {use.bucket.shapes}"
            facts.append((f"bucket {use.bucket.index}", layout))
            facts += [
                (f"bucket {use.bucket.index}[{slot}]", str(shape))
                for slot, shape in enumerate(use.bucket.shapes)
                if use.index[slot] is not None
            ]
        agree(home, "gather", facts)
        home.agreed.add(key)

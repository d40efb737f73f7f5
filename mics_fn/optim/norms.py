"""Norms leaf by leaf, and inner products: numbers of whole tensors from the pieces that ranks hold.

They are for optimizers and studies of one's own; `global_norm` is among them.

Gradients that arrive bucket by bucket are limited when a step takes them. Of what lies elsewhere
one bucket at a time is on the device then, and no limit is written to host memory or to a file.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import count
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mics_fn import _torch, checks, shards, tree
from mics_fn.collectives import levels
from mics_fn.errors import LeafError, PlanError
from mics_fn.groups import Hierarchy, Home, fold_ranks
from mics_fn.optim import columns, flat
from mics_fn.optim.optimizers import Transform, from_update
from mics_fn.shards import Bucket, GradStream, Sharded, is_leaf
from mics_fn.tree import Tree

# Limits on gradients: a factor, in one pass.


def clipped(grads: Tree | GradStream, factor: Tensor | float, *, donate: bool = False) -> Any:
    """Multiply gradients by a factor, in one pass.

    Args:
      grads: tree of shards, or a stream of gradients.
      factor: a float, or a 0-dim float64 tensor, for which the host does not wait.
      donate: write into the chunks of `grads`, which cannot be used afterwards.

    Returns:
      The limited gradients; `grads` itself if the factor is 1.

    Memory: a copy of the shards; with `donate` only of those that do not lie in whole chunks.

    Raises:
      PlanError: `donate` where a derivative is asked for.
    """
    if not isinstance(factor, Tensor) and factor == 1.0:
        return grads
    stream = shards.grad_stream(grads)
    if stream is not None:
        return _clipped_stream(stream, factor)

    def limit(grad: Tensor) -> None:
        if not isinstance(factor, Tensor):
            grad.mul_(factor)
        elif grad.itemsize < 4:
            # A factor in float16 would be off by up to 1e-3, or be 0.
            grad.copy_(grad.float().mul_(factor.float()))
        else:
            grad.mul_(factor.to(grad.dtype))

    def own(run: flat.FlatRun, x: Tensor) -> Tensor:
        # In groups of one rank a gradient is a view of what autograd gave, which others may share.
        return x if flat.is_in_chunk(run, x) else flat.copied(run, x)

    given = columns.changed(grads, own) if donate else grads
    out = columns.map_columns(limit, given, donate=donate)
    if donate:
        shards.donate(grads, "grads", "Guard.judge", keep=out)
    return out


def _clipped_stream(given: GradStream, factor: Tensor | float) -> GradStream:
    """Limit gradients as they are taken, in new memory."""
    leaves = [x for x in tree.flatten(given.like, is_leaf)[0] if isinstance(x, Sharded)]

    def take(place: int) -> list[Tensor]:
        pairs = zip(given.order[place], given.take(place), strict=True)
        kept = [Sharded(x.detach(), leaves[i].bucket, leaves[i].slot) for i, x in pairs]
        return [x.data for x in clipped(kept, factor)]

    return replace(given, take=take)


# The norm of a sharded gradient, and clipping: by `Guard`, or by a part of a `chain`.


def global_norm(grads: Tree, groups: Any) -> Tensor:
    """The L2 norm of a whole tree, every element counted once. Differentiable.

    Args:
      grads: tree of shards, equal on all replicas (hop 2 done). Padding does not count, and neither
        do tied, frozen and replicated leaves.
      groups: as for `shard`, of all ranks that hold a part of the model: see [Note: parts of a
        model].

    Returns:
      A 0-dim float64 tensor on the device, the same bits on every rank. The host does not wait for
      it. Squares are added in float32 or wider, so the norm is infinite only where a gradient is,
      or where the sum exceeds float32; in float64 where the norm is differentiated. The gradient of
      a norm of 0 is 0.

    Communication: one all-gather of 8 bytes over each partition group in the tree, summed in rank
      order, so that replicas get the same bits. Its VJP sends as much again.

    Memory: the pieces in float64 where the norm is differentiated, else none.

    Raises:
      LeafError: a leaf is a full tensor.
      PlanError: some leaves, or parts of leaves, are on ranks that these groups do not reach.

    Example:
      >>> groups = make_groups(1)
      >>> global_norm(shard([torch.tensor([3.0, 4.0])], groups), groups)
      tensor(5., dtype=torch.float64)
    """
    return norm_here(_opened("global_norm", grads, groups, "grads", True))


class Measured(NamedTuple):
    """A tree of shards of which numbers are wanted that depend on all of it.

    Args:
      given: it as it was given.
      found: the same, flattened; it may be a stream.
      pieces: those of which numbers are taken; of a stream those of its parameters.
      homes: the groups of any leaf, each once, with the numbers of the pieces that live on them.
      live: whether a derivative is asked for.
    """

    given: Any
    found: flat.Unpacked
    pieces: list[Tensor]
    homes: dict[Home, list[int]]
    live: bool = False

    @property
    def owners(self) -> list[Home]:
        """The groups of trained leaves; no other leaf counts in a norm."""
        return list(filter(self.homes.get, self.homes))


def measured(verb: str, grads: Tree, groups: Any, root: str = "grads") -> Measured:
    """Open gradients, or a stream of them, with the groups of each trained leaf."""
    found = flat.unpacked(grads)
    if len(found.trained) < len(found.leaves):
        shards.check_leaves(verb, found.shards, found.leaves, root)
    homes: dict[Home, list[int]] = {}
    number, every = count(), shards.homes_of(verb, groups, found.shards, count=len(found.leaves))
    for leaf, home in zip(found.leaves, every, strict=True):
        index = homes.setdefault(home, [])
        if isinstance(leaf, Sharded):
            index.append(next(number))
    return Measured(grads, found, found.pieces, homes)


def norm_here(found: Measured) -> Tensor:
    """Compute the norm of the leaves that these groups reach."""
    total = _over_all(squares_here(found), found.live)
    return _roots(total) if found.live else total.sqrt()


def _over_all(here: dict[Home, Tensor], live: bool) -> Tensor:
    """Add up numbers of homes, and each of them over all ranks that have pieces of its leaves."""
    sums = dict[Home, Tensor]()
    for home, x in here.items():  # all parts have the same of copies
        share = x * (home.num_pieces / home.origin.num_pieces)
        sums[home.origin] = sums.get(home.origin, 0) + share
    totals = [_total(home, x, live) for home, x in sums.items()]
    return torch.stack(totals).sum() if totals else torch.zeros((), dtype=torch.float64)


def squares_here(found: Measured) -> dict[Home, Tensor]:
    """Sum the squares of this rank's pieces by groups, in float64; nothing is sent.

    Memory: of gradients elsewhere one bucket at a time is on the device.
    """
    stream = found.found.stream
    if stream is None:
        every = _squares(found.pieces, found.live)
    else:
        squares: dict[int, Tensor] = {}
        for place, numbers in enumerate(stream.order):
            squares.update(zip(numbers, _squares(stream.take(place)).unbind(), strict=True))
        every = torch.stack([squares[i] for i in range(len(squares))])
    sums, each = {}, every.split(1)
    for home, index in found.homes.items():
        # The host would wait for a copy of the index to the device.
        own = every if len(found.homes) == 1 else torch.cat([every[:0], *(each[i] for i in index)])
        zero = torch.zeros(1, dtype=torch.float64, device=home.device)
        sums[home] = torch.cat([zero, own.to(home.device)]).sum()
    return sums


def _squares(pieces: Sequence[Tensor], live: bool = False) -> Tensor:
    """Sum the squares of each piece, in float64; differentiable if `live`."""
    if not pieces:
        return torch.zeros(0, dtype=torch.float64)
    if live:
        return torch.stack([x.double().square().sum() for x in pieces])
    norms = [torch.zeros((), device=pieces[0].device)] * len(pieces)
    sizes = list(map(Tensor.numel, pieces))
    for narrow in (True, False):
        index = [i for i, x in enumerate(pieces) if sizes[i] and (x.itemsize < 4) is narrow]
        if index:
            # The norm of a float16 tensor may exceed float16 although no element does.
            dtype = torch.float32 if narrow else None
            found = _torch.foreach_norm([pieces[i] for i in index], 2, dtype)
            for i, norm in zip(index, found, strict=True):
                norms[i] = norm
    return torch.stack(norms).double().square()


def _total(home: Home, here: Tensor, live: bool) -> Tensor:
    """Sum a vector over ranks with other pieces; differentiable if `live`, without parts.

    What ranks add up is a tensor held in parts, one per rank, and the sum is a full value, so its
    derivative is that of a gather. See [Note: adjoint] in `shards.linear`.
    """
    model = [comm for comm in home.axes[2:] if comm.size > 1]
    if not live:
        for comm in (home.partition, *model):
            here = levels.collect(comm, here, "norm").sum(0)
        return here
    if model:
        what = "a norm over the parts of a model has no derivative"
        raise LeafError(what, fix="take it outside of torch.func, of detached shards")
    p, n = home.partition.size, here.numel()
    if p == 1:
        return here
    shape: Any = {"shapes": ((p * n,),), "offsets": (0,), "numel": p * n}
    bucket = Bucket(torch.float64, index=0, parts=p, **shape)
    use = shards.BucketUse(bucket, home, (0,), "norm")
    (every,) = shards.linear_map("gather", [use], here.reshape(n))
    return every.view(p, *here.shape).sum(0)


def _roots(sums: Tensor) -> Tensor:
    """Take roots whose derivative at 0 is 0: that of a root is infinite, and times 0 NaN."""
    above = sums > 0
    return torch.where(above, torch.where(above, sums, 1.0).sqrt(), sums)


_RANKS, WHOLE = attrgetter("state.ranks"), attrgetter("state.whole")


def norm_problem(verb: str, homes: Iterable[Home]) -> PlanError | None:
    """Why the norm of a whole tree cannot be known on these groups; None if it can.

    [Note: parts of a model] Groups of the data-parallel part of a mesh that say nothing of `model=`
    hold one part of the leaves that are cut, and a copy of those that are not. Nothing says which
    leaves are cut, so a norm over all parts is unknown: a sum would count copies several times, one
    part alone would miss the others. The same holds where leaves live on groups that reach
    different ranks. Ranks would clip by different factors and their copies would drift apart, so it
    is refused.
    """
    homes = list(homes)
    if any(isinstance(home, Hierarchy) and not home.whole for home in homes):
        return PlanError(f"{verb}: a hierarchy has one part of the model", fix="pass its groups")
    sets = dict.fromkeys(map(frozenset, map(_RANKS, homes)))
    if len(sets) < 2 and all(map(WHOLE, homes)):
        return None
    lines = [f"ranks {fold_ranks(sorted(ranks))}" for ranks in sets if ranks]
    what = f"{verb}: these groups are a part of the world, and see the norm of their part alone"
    if len(sets) > 1:
        what = f"{verb}: leaves live on groups of different ranks, and no rank sees the whole norm"
    fix = "say make_groups(mesh=, model=), which dimension of the mesh holds the other parts; "
    fix += "if no other rank holds a part of this model: make_groups(whole=True)"
    return PlanError(what, lines, fix=fix)


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """The factor by which `torch.nn.utils.clip_grad_norm_` multiplies gradients of this norm."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


def clip_by_global_norm(max_norm: float, groups: Any) -> Transform:
    """Scale gradients so that their global norm is at most `max_norm`, as `clip_grad_norm_` does.

    Args:
      max_norm: above 0.
      groups: as for `shard`.

    Returns:
      A `Transform` for `chain`.

    Communication: that of `global_norm`, at each step. The host does not wait.

    Memory: a copy of the gradients' shards.

    Raises:
      PlanError: `max_norm` is not above 0; and in a step, as `global_norm`.

    Example:
      >>> groups = make_groups(1)
      >>> optimizer = optim.chain(clip_by_global_norm(1.0, groups), optim.sgd(0.1))
    """
    checks.number("clip_by_global_norm", "max_norm", max_norm, above=0, finite=False)

    def update(grads: Tree, state: tuple, params: Tree) -> tuple[Tree, tuple]:
        factor = clip_factor(global_norm(grads, groups), max_norm)
        if shards.needs_derivative([factor]):
            # A full value as a factor for shards: its derivative is the sum over their parts.
            owners = measured("clip_by_global_norm", grads, groups).owners
            (p,) = {home.partition_size for home in owners} or {1}
            factor = factor if p == 1 else shards.as_part(factor, p)
        return clipped(grads, factor), state

    facts = {"optimizer": "clip_by_global_norm", "max_norm": max_norm}
    return from_update(lambda params: (), update, facts)


def clip_by_value(max_value: float) -> Transform:
    """Clamp every gradient element to [-max_value, max_value].

    Args:
      max_value: above 0.

    Returns:
      A `Transform` for `chain`.

    Memory: a copy of the gradients' shards.

    Raises:
      PlanError: `max_value` is not above 0.

    Example:
      >>> optimizer = optim.chain(clip_by_value(0.5), optim.sgd(0.1))
    """
    checks.number("clip_by_value", "max_value", max_value, above=0, finite=False)

    def clamp(grad: Tensor) -> None:
        grad.clamp_min_(-max_value).clamp_max_(max_value)  # clamp_ has no rule for vmap

    def update(grads: Tree, state: tuple, params: Tree) -> tuple[Tree, tuple]:
        return columns.map_columns(clamp, grads), state

    facts = {"optimizer": "clip_by_value", "max_value": max_value}
    return from_update(lambda params: (), update, facts)


def leaf_norms(shards: Tree, groups: Any) -> Tree:
    """The L2 norm of each trained leaf, all in one small collective. Differentiable.

    Args:
      shards: tree of shards: parameters, gradients with both hops done, or what an optimizer keeps
        for them. Padding does not count.
      groups: as for `shard`. A leaf that is cut over `model=` of these has the norm of all parts.

    Returns:
      The tree with a 0-dim float64 tensor in place of each shard, the same bits on all ranks that
      hold a part of it, for `shards.map`. Frozen, replicated and tied leaves stay as they are, as
      in gradients. The host does not wait. Squares are added as in `global_norm`, and the gradient
      of a norm of 0 is 0.

    Communication: one all-gather of 8 bytes per leaf over each partition group in the tree. Its VJP
      sends as much again.

    Memory: 8 bytes per leaf and rank; the pieces in float64 where the norms are differentiated.

    Raises:
      LeafError: a leaf is not a shard.

    Example:
      >>> groups = make_groups(1)
      >>> params = shard({"b": torch.ones(4), "w": torch.tensor([3.0, 4.0])}, groups)
      >>> norms = leaf_norms(params, groups)
      >>> norms["w"]
      tensor(5., dtype=torch.float64)
      >>> shards.map(lambda x, norm: x / norm.float(), params, norms)["b"].data
      tensor([0.5000, 0.5000, 0.5000, 0.5000])

    References: You et al. (LAMB), arXiv:1904.00962, whose trust ratios are ratios of such norms.
    """
    found, norms = _opened("leaf_norms", shards, groups, "shards", False), dict[int, Tensor]()
    for home, index in found.homes.items():
        if index:
            pieces = [found.pieces[i] for i in index]
            here = _roots(_total(home.stage, _squares(pieces, found.live), found.live))
            norms.update(zip(index, here.unbind(), strict=True))
    given, leaves = (norms[i] for i in range(len(norms))), found.found.leaves
    leaves = [next(given) if isinstance(leaf, Sharded) else leaf for leaf in leaves]
    return found.found.spec.unflatten(leaves)


def inner(a: Tree, b: Tree, groups: Any) -> Tensor:
    """The inner product of two trees of shards, every element counted once. Differentiable.

    Args:
      a: tree of shards, equal on all replicas. Leaves that are not trained do not count.
      b: a tree of the same structure, cut in the same way.
      groups: as for `shard`, of all ranks that hold a part of the model, as for `global_norm`.

    Returns:
      A 0-dim float64 tensor, the same bits on every rank, for which the host does not wait.
      Products are taken and added in float64.

    Communication: one all-gather of 8 bytes over each partition group in the tree. Its VJP sends
      as much again.

    Memory: two pieces at a time in float64; all of them where it is differentiated.

    Raises:
      LeafError: the trees differ in structure, or are cut in different ways.
      LeafError: a leaf is not a shard.
      PlanError: the groups do not reach all ranks of the model.

    Example:
      >>> groups = make_groups(1)
      >>> a, b = (shard([torch.full((3,), x)], groups) for x in (2.0, 5.0))
      >>> inner(a, b, groups)
      tensor(30., dtype=torch.float64)
    """
    left = _opened("inner", a, groups, "a", True)
    right = _opened("inner", b, groups, "b", True)
    x, y = left.found, right.found
    if x.spec != y.spec or x.geometry[:2] != y.geometry[:2]:
        raise LeafError("inner: the trees differ", fix="pass trees that were sharded together")
    here = dict[Home, Tensor]()
    for home, index in left.homes.items():
        products = [(left.pieces[i].double() * right.pieces[i].double()).sum() for i in index]
        if products:
            here[home] = torch.stack(products).sum()
    return _over_all(here, left.live or right.live)


def _opened(verb: str, given: Tree, groups: Any, root: str, whole: bool) -> Measured:
    """Open a tree for numbers that may be differentiated.

    Then directions that only one rank differentiates by are refused, since after squares are added
    up nobody could tell; see [Note: rows of ranks] in `shards.linear`.
    """
    given = flat.by_leaf(given)
    found = measured(verb, given, groups, root)
    problem = norm_problem(verb, found.owners) if whole else None
    if problem is not None:
        raise problem
    if not shards.needs_derivative(found.pieces):
        return found
    opened, moved = shards.open_shards(verb, given, groups, root=root), dict[int, Tensor]()
    data = [opened.data[i] for use in opened.trained for i in use.members]
    data = shards.linear_map("own", opened.trained, *data)
    for use, pieces in shards.deal(opened.trained, data):
        moved.update(zip(use.members, pieces, strict=True))
    return found._replace(pieces=[moved[i] for i in sorted(moved)], live=True)

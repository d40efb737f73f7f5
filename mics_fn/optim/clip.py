"""The norm of a sharded gradient, and clipping: by `Guard`, or by a part of a `chain`."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from mics_fn import _torch, checks, tree
from mics_fn.collectives import collect
from mics_fn.errors import GroupsError, LeafError, OptimizerError, PlanError, message
from mics_fn.groups import Groups, Home, fold_ranks
from mics_fn.optim.flat import by_leaf
from mics_fn.optim.limiting import limited
from mics_fn.optim.options import facts_from
from mics_fn.optim.transform import Transform, from_update
from mics_fn.shards import (
    Arrival,
    Arriving,
    Bucket,
    BucketUse,
    Sharded,
    deal,
    homes_of,
    is_leaf,
    linear_map,
    needs_derivative,
    open_shards,
    require_groups,
)
from mics_fn.tree import Tree

_Norm = tuple[bool, Tensor | None]  # of a narrow dtype, and the norm; None of no elements


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
    problem = norm_problem("global_norm", counted_homes("global_norm", grads, groups))
    if problem is not None:
        raise problem
    return norm_here(grads, groups)


def counted_homes(verb: str, grads: Tree, groups: Any) -> list[Home]:
    """The groups of the leaves that count in a norm."""
    leaves, _ = tree.flatten(grads, is_leaf)
    homes = homes_of(verb, groups, grads)
    found = (home for leaf, home in zip(leaves, homes, strict=True) if isinstance(leaf, Sharded))
    return list(dict.fromkeys(found))


def norm_here(grads: Tree | Arriving, groups: Any) -> Tensor:
    """`global_norm` of the leaves that these groups reach, whichever others there are."""
    if isinstance(grads, Arriving):
        return _norm_of_arriving(grads.arrival(), groups)
    grads = by_leaf(grads)  # the padding inside of a run must not count
    leaves, by_home = tree.flatten(grads, is_leaf)[0], _by_home(grads, groups)
    differentiated = any(needs_derivative(pieces) for pieces in by_home.values())
    if differentiated:
        by_home = _looked_at(by_home, open_shards("global_norm", grads, groups).uses, leaves)
    of_home = _smooth_total if differentiated else _total
    totals = [of_home(home, pieces) for home, pieces in by_home.items()]
    if not totals:
        return torch.zeros((), dtype=torch.float64)
    total = torch.stack(totals).sum()
    if not differentiated:
        return total.sqrt()
    # A root has no finite derivative at 0, and 0 times that would be NaN.
    above = total > 0
    return torch.where(above, torch.where(above, total, 1.0).sqrt(), total)


def _by_home(grads: Tree, groups: Any) -> dict[Groups, list[Tensor]]:
    """The pieces of the trained leaves of a tree, by their groups."""
    by_home: dict[Groups, list[Tensor]] = {}
    pairs = zip(
        tree.flatten(grads, is_leaf)[0], homes_of("global_norm", groups, grads), strict=True
    )
    for i, (leaf, home) in enumerate(pairs):
        mine = by_home.setdefault(home, [])
        if isinstance(leaf, Sharded):
            mine.append(leaf.data)
        elif not is_leaf(leaf):
            path = tree.paths(grads, "grads", is_leaf)[i]
            fix = "do both hops first: reduce_grads(grads, groups)"
            raise LeafError(message(f"global_norm: {path} is not a shard", fix=fix))
    return by_home


def squares_here(grads: Tree | Arriving, groups: Any) -> dict[Groups, Tensor]:
    """By groups, the sum of squares of this rank's pieces, in float64; nothing is sent."""
    if isinstance(grads, Arriving):
        by_home = _norms_of_arriving(grads.arrival(), groups)
    else:
        by_home = {h: norms_of(x) for h, x in _by_home(by_leaf(grads), groups).items()}
    return {home: _squares(home, norms) for home, norms in by_home.items()}


def _looked_at(
    by_home: Iterable[Any], uses: Sequence[BucketUse], leaves: Sequence[Any]
) -> dict[Any, list[Tensor]]:
    """The pieces as they are, once directions that only one rank differentiates by are refused.

    After squares are added up nobody could tell; see [Note: rows of ranks] in `shards.rows`.
    """
    uses = [use for use in uses if use.bucket.trainable]
    data = [leaves[i].data for use in uses for i in use.members]
    found: dict[Any, list[Tensor]] = {home: [] for home in by_home}
    for use, pieces in deal(uses, linear_map("own", uses, *data)):
        found[use.home] += pieces
    return found


def _total(home: Groups, pieces: Sequence[Tensor]) -> Tensor:
    """The sum of squares over a partition group, without a derivative."""
    return _total_of(home, norms_of(pieces))


def norms_of(pieces: Sequence[Tensor]) -> list[_Norm]:
    """The norm of each piece, and whether its elements have fewer than 4 bytes."""
    norms: list[_Norm] = [(False, None)] * len(pieces)
    # The norm of a float16 tensor may exceed float16 although no element does.
    for dtype, narrow in ((torch.float32, True), (None, False)):
        held = [i for i, x in enumerate(pieces) if x.numel() and (x.itemsize < 4) is narrow]
        if held:
            found = _torch.foreach_norm([pieces[i] for i in held], 2, dtype)
            for i, norm in zip(held, found, strict=True):
                norms[i] = narrow, norm
    return norms


def _total_of(home: Groups, norms: Sequence[_Norm]) -> Tensor:
    """The sum of the squares of norms over a partition group."""
    return collect(home.partition, _squares(home, norms), "norm").sum(0)


def _squares(home: Groups, norms: Sequence[_Norm]) -> Tensor:
    """The sum of the squares of norms of this rank, those of narrow pieces first."""
    held = [x for want in (True, False) for narrow, x in norms if x is not None and narrow is want]
    return torch.stack([torch.zeros((), device=home.device), *held]).double().square().sum()


def _norm_of_arriving(arrival: Arrival, groups: Any) -> Tensor:
    """`norm_here` of gradients that arrive, with the same bits; not differentiable.

    Memory: on the device one bucket of what lies elsewhere.
    """
    homes = homes_of("global_norm", groups, arrival.like)
    leaves = tree.flatten(arrival.like, is_leaf)[0]
    trained = [home for x, home in zip(leaves, homes, strict=True) if isinstance(x, Sharded)]
    if not trained:
        return norm_here(arrival.whole(), groups)
    by_home = _norms_of_arriving(arrival, groups)
    return torch.stack([_total_of(*found) for found in by_home.items()]).sum().sqrt()


def _norms_of_arriving(arrival: Arrival, groups: Any) -> dict[Groups, list[_Norm]]:
    """The norms of pieces that arrive, by their groups; one bucket at a time is on the device."""
    homes = homes_of("global_norm", groups, arrival.like)
    leaves = tree.flatten(arrival.like, is_leaf)[0]
    trained = [home for x, home in zip(leaves, homes, strict=True) if isinstance(x, Sharded)]
    norms: dict[int, _Norm] = {}
    for place, numbers in enumerate(arrival.order):
        norms.update(zip(numbers, norms_of(arrival.take(place)), strict=True))
    by_home: dict[Groups, list[_Norm]] = {home: [] for home in homes}
    for number, home in enumerate(trained):
        by_home[home].append(norms[number])
    return by_home


def _smooth_total(home: Groups, pieces: Sequence[Tensor]) -> Tensor:
    """The sum of squares, differentiable any number of times, at 0 too.

    What ranks add up is a tensor held in parts, one element per rank, and the sum is a full value,
    so its derivative is that of a gather. See [Note: adjoint] in `shards.linear`.
    """
    zero = torch.zeros((), dtype=torch.float64, device=home.device)
    here = torch.stack([zero, *(x.double().square().sum() for x in pieces)]).sum()
    p = home.partition.size
    if p == 1:
        return here
    bucket = Bucket(0, torch.float64, p, ((p,),), (0,), p)
    (every,) = linear_map("gather", [BucketUse(bucket, home, (0,), "norm")], here.view(1))
    return every.sum()


def norm_problem(verb: str, homes: Iterable[Home]) -> PlanError | None:
    """Why the norm of a whole tree cannot be known on these groups; None if it can.

    [Note: parts of a model] Groups of the data-parallel part of a mesh hold one tensor-parallel
    part of the leaves that are cut, and a copy of those that are not. Nothing says which leaves are
    cut, so a norm over all parts is unknown: a sum would count copies several times, one part alone
    would miss the others. The same holds where leaves live on groups of different ranks, as experts
    do. Ranks would clip by different factors and their copies would drift apart, so it is refused.
    """
    lives = list(dict.fromkeys(home.life for home in homes))
    if all(life.whole for life in lives) and len({frozenset(life.ranks) for life in lives}) < 2:
        return None
    sets = dict.fromkeys(fold_ranks(sorted(life.ranks)) for life in lives)
    lines = [f"ranks {ranks}" for ranks in sets if ranks]
    if len(sets) > 1:
        what = f"{verb}: leaves live on groups of different ranks, and no rank sees the whole norm"
    else:
        what = f"{verb}: these groups are a part of the world, and see the norm of their part alone"
    fix = (
        "clip by value (max_value=, clip_by_value), or take the norm over all parts yourself and "
        "scale the gradients; if no other rank holds a part of this model: make_groups(whole=True)"
    )
    return PlanError(message(what, lines, fix=fix))


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """The factor by which `torch.nn.utils.clip_grad_norm_` multiplies gradients of this norm."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


def check_limit(verb: str, name: str, value: float) -> None:
    """Raise OptimizerError unless a limit is above 0; it may be infinite."""
    checks.number(verb, name, value, above=0, finite=False, kind=OptimizerError)


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
      OptimizerError: `max_norm` is not above 0.
      GroupsError: `groups` are none.
      PlanError: as `global_norm`; raised here already unless `groups` is a function.

    Example:
      >>> groups = make_groups(1)
      >>> optimizer = optim.chain(clip_by_global_norm(1.0, groups), optim.sgd(0.1))
    """
    check_limit("clip_by_global_norm", "max_norm", max_norm)
    require_groups("clip_by_global_norm", groups)
    homes = [x for x in tree.flatten(groups)[0] if not callable(groups)]
    for home in homes:
        fix = "pass what make_groups gave, or a tree of such"
        checks.instance("clip_by_global_norm", "groups", home, Home, "Groups", fix, GroupsError)
    problem = norm_problem("clip_by_global_norm", homes)
    if problem is not None:
        raise problem

    def update(grads: Tree, state: tuple, params: Tree) -> tuple[Tree, tuple]:
        factor = clip_factor(global_norm(grads, groups), max_norm)
        if needs_derivative([factor]):
            factor = _for_parts(factor, counted_homes("clip_by_global_norm", grads, groups))
        return limited(grads, factor), state

    facts = facts_from("clip_by_global_norm", {"max_norm": max_norm})
    return from_update(lambda params: (), update, facts)


def _for_parts(factor: Tensor, homes: Sequence[Home]) -> Tensor:
    """A full value as a factor for shards: its derivative is the sum over their parts."""
    sizes = {home.partition_size for home in homes}
    if len(sizes) > 1:
        text = f"clip_by_global_norm: a derivative over groups of {sorted(sizes)} ranks"
        raise LeafError(message(text, fix="clip each part by itself, or outside of torch.func"))
    if sizes == {1} or not sizes:
        return factor
    (p,) = sizes
    bucket = Bucket(0, torch.float64, p, ((1,),), (0,), 1)
    (own,) = linear_map("part", [BucketUse(bucket, homes[0], (0,))], factor.view(1))
    return own[0]


def clip_by_value(max_value: float) -> Transform:
    """Clamp every gradient element to [-max_value, max_value].

    Args:
      max_value: above 0.

    Returns:
      A `Transform` for `chain`.

    Memory: a copy of the gradients' shards.

    Raises:
      OptimizerError: `max_value` is not above 0.

    Example:
      >>> optimizer = optim.chain(clip_by_value(0.5), optim.sgd(0.1))
    """
    check_limit("clip_by_value", "max_value", max_value)

    def update(grads: Tree, state: tuple, params: Tree) -> tuple[Tree, tuple]:
        return limited(grads, max_value=max_value), state

    facts = facts_from("clip_by_value", {"max_value": max_value})
    return from_update(lambda params: (), update, facts)

"""Norms leaf by leaf, and inner products: numbers of whole tensors from the pieces that ranks hold.

They are for optimizers and studies of one's own; `global_norm` is in `clip`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mics_fn import _torch, tree
from mics_fn.collectives import collect
from mics_fn.errors import TreeError, message
from mics_fn.groups import Comm, Home
from mics_fn.optim.clip import counted_homes, norm_problem
from mics_fn.optim.flat import by_leaf
from mics_fn.shards import (
    Bucket,
    BucketUse,
    Opened,
    deal,
    is_leaf,
    linear_map,
    needs_derivative,
    open_shards,
)
from mics_fn.tree import Tree


def leaf_norms(shards: Tree, groups: Any) -> Tree:
    """The L2 norm of each trained leaf, all in one small collective. Differentiable.

    Args:
      shards: tree of shards: parameters, gradients with both hops done, or what an optimizer keeps
        for them. Padding does not count.
      groups: as for `shard`. A leaf's norm is that of the tensor that was sharded on them: with
        tensor parallelism, of this rank's part.

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
    opened, parts, live = _opened("leaf_norms", shards, groups)
    out: list[Any] = list(opened.leaves)
    for home, index, pieces in parts:
        found = _roots(_smooth(home, pieces)) if live else _sums(home, pieces).sqrt()
        for i, norm in zip(index, found.unbind(), strict=True):
            out[i] = norm
    return opened.spec.unflatten(out)


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
      TreeError: the trees differ in structure, or are cut in different ways.
      LeafError: a leaf is not a shard.
      PlanError: the groups do not reach all ranks of the model.

    Example:
      >>> groups = make_groups(1)
      >>> a, b = (shard([torch.full((3,), x)], groups) for x in (2.0, 5.0))
      >>> inner(a, b, groups)
      tensor(30., dtype=torch.float64)
    """
    problem = norm_problem("inner", counted_homes("inner", a, groups))
    if problem is not None:
        raise problem
    left, parts, live = _opened("inner", a, groups, "a")
    right, others, other_live = _opened("inner", b, groups, "b")
    _check_same(left, right)
    totals = []
    for (home, _, x), (_, _, y) in zip(parts, others, strict=True):
        zero = torch.zeros((), dtype=torch.float64, device=home.device)
        products = [(u.double() * v.double()).sum() for u, v in zip(x, y, strict=True)]
        here = torch.stack([zero, *products]).sum().view(1)
        live = live or other_live
        total = _summed(home, here) if live else collect(home.partition, here, "inner").sum(0)
        totals.append(total[0])
    return torch.stack(totals).sum() if totals else torch.zeros((), dtype=torch.float64)


class _Part(NamedTuple):
    """The trained leaves of a tree on one partition group."""

    home: Home
    index: list[int]  # of leaves in the tree
    pieces: list[Tensor]


def _opened(
    verb: str, shards: Tree, groups: Any, root: str = "shards"
) -> tuple[Opened, list[_Part], bool]:
    """A tree with its trained leaves by partition group, and whether a derivative is asked for.

    Then directions that only one rank differentiates by are refused, since after squares are added
    up nobody could tell; see [Note: rows of ranks] in `shards.rows`.
    """
    opened = open_shards(verb, by_leaf(shards), groups, root=root)
    uses = opened.trained
    data = [opened.data[i] for use in uses for i in use.members]
    live = needs_derivative(data)
    if live:
        data = linear_map("own", uses, *data) if uses else []
    found: dict[Comm, _Part] = {}
    for use, pieces in deal(uses, data):
        part = found.setdefault(use.home.partition, _Part(use.home, [], []))
        part.index.extend(use.members)
        part.pieces.extend(pieces)
    return opened, list(found.values()), live


def _sums(home: Home, pieces: Sequence[Tensor]) -> Tensor:
    """The sum of squares of each leaf over a partition group, without a derivative."""
    here = torch.zeros(len(pieces), dtype=torch.float64, device=home.device)
    # The norm of a float16 tensor may exceed float16 although no element does.
    for dtype, narrow in ((torch.float32, True), (None, False)):
        held = [i for i, x in enumerate(pieces) if x.numel() and (x.itemsize < 4) is narrow]
        if held:
            norms = _torch.foreach_norm([pieces[i] for i in held], 2, dtype)
            here[held] = torch.stack([norm.double() for norm in norms]).square()
    return collect(home.partition, here, "leaf norms").sum(0)


def _smooth(home: Home, pieces: Sequence[Tensor]) -> Tensor:
    """The same, differentiable any number of times."""
    return _summed(home, torch.stack([x.double().square().sum() for x in pieces]))


def _summed(home: Home, here: Tensor) -> Tensor:
    """The sum of a vector over a partition group; differentiable, as `clip._smooth_total`."""
    p, n = home.partition.size, here.numel()
    if p == 1:
        return here
    bucket = Bucket(0, torch.float64, p, ((p * n,),), (0,), p * n)
    (every,) = linear_map("gather", [BucketUse(bucket, home, (0,), "norm")], here)
    return every.view(p, n).sum(0)


def _roots(sums: Tensor) -> Tensor:
    """Square roots whose derivative at 0 is 0."""
    above = sums > 0
    return torch.where(above, torch.where(above, sums, 1.0).sqrt(), sums)


def _check_same(a: Opened, b: Opened) -> None:
    """Raise TreeError unless two trees have one structure and are cut in one way."""
    where = ""
    if a.spec != b.spec:
        where = tree.first_mismatch(a.given, b.given, "b", is_leaf)
    for path, x, y in zip(tree.paths(a.given, "b", is_leaf), a.leaves, b.leaves, strict=False):
        places = [(type(leaf), leaf.bucket, getattr(leaf, "slot", 0)) for leaf in (x, y)]
        if not where and places[0] != places[1]:
            where = f"{path} is {y}, and lies elsewhere than that of a, {x}"
    if where:
        fix = "pass trees that were sharded together"
        raise TreeError(message("inner: the trees differ", [where], fix))

"""`cut`: full values that all ranks know become shards, and nothing is sent.

A full value is what every rank has a copy of, and a shard is one value held in parts. The VJP of a
cut multiplies a rank's part of the gradient by the number of parts, as its mean over ranks is then
the gradient; see [Note: adjoint] in `linear`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mics_fn import _torch, checks, tree
from mics_fn.collectives import check_replicas, needs_derivative
from mics_fn.errors import LeafError, TreeError, message
from mics_fn.groups import Groups
from mics_fn.shards.kept import check_finite, coded_pieces
from mics_fn.shards.leaf import Fixed, Nothing, Sharded, Tied, dtype_name, is_leaf
from mics_fn.shards.linear import apply
from mics_fn.shards.memory import same_tensor
from mics_fn.shards.opened import BucketUse, Opened, open_shards
from mics_fn.shards.pack import split_chunk
from mics_fn.shards.ranges import pieces
from mics_fn.tree import Tree


def cut(full: Tree, groups: Any, *, like: Tree, check: bool = False) -> Tree:
    """Shards of full values that are the same on all ranks: each rank keeps its part.

    Args:
      full: tree of full tensors, equal on all ranks, as what was computed from gathered values is,
        or from a seed that ranks share. Dtypes are those of the shards, or of their computation. In
        the place of a tied leaf the tensor of its owner, an equal one, or None.
      groups: as for `shard`.
      like: the shards that say how to cut, as parameters do; only their layout is read.
      check: compare the values between ranks, for tests.

    Returns:
      The tree of shards, frozen and replicated leaves too, in memory of its own. It is
      differentiable.

    Communication: only with `check`: 8 bytes per leaf, over the partition group and over the
      replication group.

    Memory: this rank's shards.

    Raises:
      TreeError: structures or shapes differ.
      LeafError: a value is not a tensor, or its dtype or device differs from the shard's.
      DesyncError: with `check`, on all ranks: they hold different values.

    Example:
      >>> groups = make_groups(1)
      >>> params = shard({"w": torch.ones(3)}, groups)
      >>> shards.cut({"w": torch.arange(3.0)}, groups, like=params)["w"].data
      tensor([0., 1., 2.])
    """
    checks.flag("cut", "check", check)
    opened = open_shards("cut", like, groups, root="like")
    values = _checked(opened, full)
    if check:
        _compare(opened, values)
    out: list[Any] = list(opened.leaves)
    for i, leaf in enumerate(opened.leaves):
        if isinstance(leaf, Fixed) and leaf.bucket is None:
            out[i] = Fixed(values[i].detach().clone())
    for use in opened.uses:
        parts = _parts(use, [values[i] for i in use.members])
        kind = Sharded if use.bucket.trainable else Fixed
        for slot, i in enumerate(use.index):
            if i is not None:
                out[i] = kind(parts[i], use.bucket, slot)
    return opened.spec.unflatten(out)


def _parts(use: BucketUse, values: Sequence[Tensor]) -> dict[int, Tensor]:
    """This rank's part of each member, by the number of the leaf in the tree."""
    bucket, found = use.bucket, {}
    live = needs_derivative(values) and bucket.trainable
    laid = pieces(bucket, use.route.chunk)
    slots = [slot for slot, i in enumerate(use.index) if i is not None]
    for i, slot, value in zip(use.members, slots, values, strict=True):
        flat = (value if live else value.detach()).reshape(bucket.numels[slot])
        found[i] = flat.narrow(0, laid[slot].origin, laid[slot].length).to(bucket.dtype)
    if live:
        found = {i: x.clone() for i, x in found.items()}  # a gather in a group of one gives views
        return dict(zip(use.members, apply("part", [use], found), strict=True))  # pyright: ignore
    device = next((value.device for value in values), use.home.device)
    chunk = torch.zeros(bucket.chunk, dtype=bucket.dtype, device=device)
    views = use.by_member(split_chunk(bucket, use.route.chunk, chunk))
    for view, i in zip(views, use.members, strict=True):
        view.copy_(found[i])
    if bucket.codes is not None and chunk.numel() and not chunk.is_meta:
        names = [""] * len(bucket.shapes)  # `_check_value` has found all values to be finite
        views = use.by_member(coded_pieces(bucket, use.route.chunk, chunk, names))
    return dict(zip(use.members, views, strict=True))


def _checked(opened: Opened, full: Tree) -> list[Any]:
    """One full value per leaf of the tree; None for those that are tied or `Nothing`."""
    try:
        given = opened.spec.flatten_up_to(full)
    except ValueError:
        where = tree.first_mismatch(opened.given, full, "full", is_leaf) or "structure"
        text, fix = "cut: the tree differs from like=", "pass full values of the tree that like= is"
        raise TreeError(message(text, [f"first difference: {where}"], fix)) from None
    paths = tree.paths(opened.given, "full", is_leaf)
    for i, leaf in enumerate(opened.leaves):
        if isinstance(leaf, Tied):
            _check_tied(paths, given, i, opened.owner[i])
        elif not isinstance(leaf, Nothing):
            _check_value(paths[i], leaf, given[i], opened.homes[i].hierarchy.device)
    return given


def _check_tied(paths: Sequence[str], given: Sequence[Any], i: int, owner: int) -> None:
    """Raise TreeError if a tied leaf has a value of its own."""
    x, first = given[i], given[owner]
    if x is None or x is first or same_tensor(x, first):
        return
    both = isinstance(x, Tensor) and isinstance(first, Tensor)
    if not both or _torch.is_wrapped(x) or _torch.is_wrapped(first) or not torch.equal(x, first):
        text = f"cut: {paths[i]} is tied to {paths[owner]}, and has a value of its own"
        raise TreeError(message(text, fix="pass the same tensor for both, or None for this one"))


def _check_value(path: str, leaf: Any, value: Any, device: torch.device) -> None:
    """Raise LeafError or TreeError unless a value can be cut into this leaf."""
    if not isinstance(value, Tensor):
        text = f"cut: {path} is {value if is_leaf(value) else type(value).__name__}"
        raise LeafError(message(text, fix="pass the full tensor"))
    if tuple(value.shape) != leaf.shape:
        text = f"cut: {path}: shape {tuple(value.shape)}, expected {leaf.shape}"
        raise TreeError(message(text, fix="pass the full tensor"))
    allowed = dict.fromkeys((leaf.dtype, leaf.bucket.compute if leaf.bucket else leaf.dtype))
    if value.dtype not in allowed:
        names = " or ".join(dtype_name(dtype) for dtype in allowed)
        text = f"cut: {path}: {dtype_name(value.dtype)}, expected {names}"
        raise LeafError(message(text, fix=f"cast it with .to(torch.{dtype_name(leaf.dtype)})"))
    if leaf.bucket is not None and leaf.bucket.codes is not None and not value.is_meta:
        check_finite(f"cut: {path}", leaf.bucket.codes, value)
    if not value.is_meta and value.device != device:
        text = f"cut: {path} is on {value.device}, its groups are on {device}"
        raise LeafError(message(text, fix="move it to the device of the groups"))


def _compare(opened: Opened, values: Sequence[Any]) -> None:
    """Raise DesyncError unless all ranks hold the same values."""
    paths = tree.paths(opened.given, "full", is_leaf)
    plain = [_torch.unwrapped(x) if isinstance(x, Tensor) else x for x in values]
    for home in dict.fromkeys(opened.homes):
        mine = [
            i
            for i, leaf in enumerate(opened.leaves)
            if opened.homes[i] is home and not isinstance(leaf, Tied | Nothing)
        ]
        kept = [i for i in mine if not plain[i].is_meta]
        if isinstance(home, Groups):
            check_replicas(home, "cut", [paths[i] for i in kept], [plain[i] for i in kept])

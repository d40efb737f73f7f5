"""`map`: an elementwise function of this rank's pieces, as a tree of shards."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mics_fn import tree
from mics_fn.collectives import needs_derivative
from mics_fn.errors import LeafError
from mics_fn.groups import Hierarchy
from mics_fn.offload import placed_like
from mics_fn.shards.bucket import Bucket
from mics_fn.shards.leaf import Sharded, dtype_name, is_leaf, mark_reduced, reduction_groups
from mics_fn.shards.linear import linear_map
from mics_fn.shards.opened import BucketUse, check_leaves, values_up_to
from mics_fn.tree import Tree


def map(fn: Callable[..., Tensor], shards: Tree, *rest: Tree) -> Tree:
    """Apply an elementwise function to every trained leaf of a tree of shards.

    Each rank calls it with its own pieces, so it must not mix elements: `x / x.norm()` would divide
    by the norm of a piece. `optim.leaf_norms` gives norms of whole leaves, to be passed as `rest`.
    So pass every number that is differentiated: its derivative is the sum over all pieces, of which
    a rank that only closes over it would see its own.

    Args:
      fn: `fn(piece, *others)` gives a tensor like `piece`: 1D, maybe empty, of the same dtype.
      shards: tree of shards. Frozen, replicated and tied leaves stay as they are.
      rest: trees of the same structure; in place of a shard they may have a number or a tensor of
        one element, which `fn` gets as it is. A single number serves all leaves.

    Returns:
      The tree with what `fn` gave, in memory of its own if `fn` made new tensors. It is
      differentiated as `fn` is. What lay in files or on the host does so again, except where a
      derivative is asked for, which would end at a file.

    Raises:
      LeafError: a leaf of `shards` is not a shard, or `fn` gave something else than a tensor like
        the piece.
      LeafError: `shards` is None, or a tree of `rest` has another structure, or leaves
        that are cut in another way.

    Example:
      >>> groups = make_groups(1)
      >>> params = shard({"b": torch.ones(2), "w": torch.ones(2)}, groups)
      >>> shards.map(lambda x, y, c: x + c * y, params, params, {"b": 1.0, "w": 2.0})["w"].data
      tensor([3., 3.])
    """
    leaves, spec = tree.flatten(shards, is_leaf)
    check_leaves("map", shards, leaves, "shards")
    others = [_matched(shards, leaves, spec, other, i) for i, other in enumerate(rest)]
    out: list[Any] = list(leaves)
    trained = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, Sharded)}
    made: list[Tensor] = []
    for i, leaf in trained.items():
        found = fn(leaf.data, *(other[i] for other in others))
        if not _is_like(found, leaf.data):
            raise _unlike(tree.paths(shards, "shards", is_leaf)[i], leaf.data, found)
        made.append(found)
    placed = placed_like(made, [leaf.data for leaf in trained.values()])
    for (i, leaf), data in zip(trained.items(), placed, strict=True):
        out[i] = Sharded(data, leaf.bucket, leaf.slot)
    mark_reduced(out, reduction_groups(leaves))
    return spec.unflatten(out)


def _matched(shards: Tree, leaves: Sequence[Any], spec: Any, other: Tree, number: int) -> list[Any]:
    """One value per leaf of the tree: a piece, a number, or a tensor of one element."""
    root = f"rest[{number}]"
    if _is_number(other):
        parts = {leaf.bucket.parts for leaf in leaves if isinstance(leaf, Sharded)}
        own = {p: _for_parts(other, p) for p in parts}
        return [own[leaf.bucket.parts] if isinstance(leaf, Sharded) else 0 for leaf in leaves]
    found: list[Any] = []
    paths, given = (
        tree.paths(shards, root, is_leaf),
        values_up_to(spec, shards, other, f"map: {root}"),
    )
    for path, leaf, value in zip(paths, leaves, given, strict=True):
        if isinstance(value, Sharded) and isinstance(leaf, Sharded):
            if (value.bucket, value.slot) != (leaf.bucket, leaf.slot):
                text = f"map: {path} is {value}, which is cut in another way"
                raise LeafError(text, fix="pass trees that were sharded together")
            value = value.data
        elif isinstance(leaf, Sharded) and isinstance(value, Tensor) and value.numel() == 1:
            value = _for_parts(value, leaf.bucket.parts)
        elif isinstance(leaf, Sharded) and not _is_number(value):
            text = f"map: {path} is {_kind(value)}"
            raise LeafError(text, fix="pass shards, or one number per leaf")
        found.append(value)
    return found


def _for_parts(value: Any, parts: int) -> Any:
    """A full value as a factor for pieces: its derivative is the sum over all parts.

    See [Note: adjoint] in `shards.linear`.
    """
    live = isinstance(value, Tensor) and value.is_floating_point() and needs_derivative([value])
    if not live or parts == 1:
        return value
    bucket = Bucket(0, value.dtype, parts, ((1,),), (0,), parts)
    use = BucketUse(bucket, Hierarchy.of_one(value.device), (0,))  # nothing is sent
    (own,) = linear_map("part", [use], value.reshape(1))
    return own.reshape(value.shape)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)


def _is_like(found: Any, piece: Tensor) -> bool:
    same = isinstance(found, Tensor) and found.shape == piece.shape
    return same and (found.dtype, found.device) == (piece.dtype, piece.device)


def _unlike(path: str, piece: Tensor, found: Any) -> LeafError:
    text = f"map: the function gave {_kind(found)} for {path}"
    lines = [f"expected {_kind(piece)}"]
    fix = "let it give one element for each, and cast it back with .to(piece.dtype)"
    return LeafError(text, lines, fix)


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        where = "" if value.device.type == "cpu" else f" on {value.device}"
        return f"a tensor of {tuple(value.shape)}, {dtype_name(value.dtype)}{where}"
    return type(value).__name__

"""Elementwise work on trees of shards as work on a few long tensors.

The leaves of `tree.flatten` on a tree of shards are this rank's pieces, and the pieces of a bucket
are views of one chunk. An elementwise function may as well take the chunk: fewer, longer tensors,
the same numbers. Padding is computed with and never looked at.

[Note: dense] In groups of one rank a gradient is what autograd gave: expanded, strided, negated as
a view. torch's fused kernels, and whoever looks at memory, take a tensor for `numel` numbers in a
row. So whatever is read through a column is dense, and what is written to is made so before, by
`fresh` or `writable`.
"""

from collections.abc import Callable, Hashable, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from mics_fn import _torch, tree
from mics_fn.leaf import Sharded, is_leaf
from mics_fn.tree import Tree


class Column(NamedTuple):
    """Corresponding tensors of several trees: whole chunks, runs of leaves, or single pieces."""

    key: Hashable
    tensors: tuple[Tensor, ...]


def columns(
    trees: Sequence[Sequence[Tensor]], keys: Sequence[Hashable] | None = None
) -> list[Column]:
    """Corresponding pieces of several trees, joined to as few long tensors as their memory allows.

    Args:
      trees: for each tree its pieces, in the same order and of the same lengths.
      keys: one a piece; only neighbours with equal keys are joined. Default: all equal.

    Returns:
      Columns that cover every element once, of dense tensors. Padding may be covered too. Pieces
      that are not dense are copied, so that only dense ones can be written to.
    """
    found = []
    for members in _by_storage(trees[0]):
        joined = all(_same_places(trees[0], other, members) for other in trees[1:])
        if not joined or not _is_flat(trees[0], members):
            found += [
                Column(keys[i] if keys else None, tuple(_dense(each[i]) for each in trees))
                for i in members
            ]
            continue
        runs = [list(run) for _, run in groupby(members, lambda i: keys[i] if keys else None)]
        for run in runs:
            low, high = 0, _storage_numel(trees[0][run[0]])
            if len(runs) > 1:
                low = int(trees[0][run[0]].storage_offset())
                high = int(trees[0][run[-1]].storage_offset()) + trees[0][run[-1]].numel()
            key = keys[run[0]] if keys else None
            found.append(Column(key, tuple(_span(each[run[0]], low, high) for each in trees)))
    return found


def _dense(piece: Tensor) -> Tensor:
    """The piece, or a copy if it is not its numbers in a row. See [Note: dense]."""
    return piece if piece.is_contiguous() and not piece.is_neg() else _copy(piece)


def _copy(piece: Tensor) -> Tensor:
    return piece.detach().clone(memory_format=torch.contiguous_format)


def _by_storage(pieces: Sequence[Tensor]) -> list[list[int]]:
    """Pieces that share a storage, in the order in which they lie; empty ones are left out."""
    found: dict[int, list[int]] = {}
    seen: dict[int, int] = {}
    for i, piece in enumerate(pieces):
        if piece.numel():
            found.setdefault(_home(piece, seen), []).append(i)
    return [sorted(each, key=lambda i: pieces[i].storage_offset()) for each in found.values()]


def _is_flat(pieces: Sequence[Tensor], members: Sequence[int]) -> bool:
    """Whether pieces lie one after the other in their storage, without overlap."""
    end = 0
    for i in members:
        piece = pieces[i]
        if piece.ndim != 1 or piece.stride(0) != 1 or piece.is_neg():
            return False
        if piece.storage_offset() < end:
            return False
        end = piece.storage_offset() + piece.numel()
    return True


def _same_places(a: Sequence[Tensor], b: Sequence[Tensor], members: Sequence[int]) -> bool:
    """Whether the pieces of `b` lie in one storage as those of `a` do in theirs."""
    if _storage_numel(a[members[0]]) != _storage_numel(b[members[0]]):
        return False
    seen: dict[int, int] = {}
    home = _home(b[members[0]], seen)
    for i in members:
        x, y = a[i], b[i]
        if (
            _home(y, seen) != home
            or y.storage_offset() != x.storage_offset()
            or not y.is_contiguous()
            or y.is_neg()
        ):
            return False
    return True


def _home(piece: Tensor, seen: dict[int, int]) -> int:
    """A piece's storage; `seen` remembers it for a base, since most pieces are views of a few."""
    base = piece._base
    if base is None:
        return _torch.storage_id(piece)
    if id(base) not in seen:
        seen[id(base)] = _torch.storage_id(piece)
    return seen[id(base)]


def _storage_numel(piece: Tensor) -> int:
    return piece.untyped_storage().nbytes() // piece.itemsize


def _span(piece: Tensor, low: int, high: int) -> Tensor:
    return piece.detach().as_strided((high - low,), (1,), low)


def fresh(shards: Tree) -> Tree:
    """A copy in new memory, each chunk copied as a whole, so that it stays one."""
    pieces, spec = tree.flatten(shards)
    # An empty piece would keep the memory that it is a view of.
    out = [piece.detach() if piece.numel() else piece.new_empty(piece.shape) for piece in pieces]
    for members in _by_storage(pieces):
        if _is_flat(pieces, members):
            flat = _span(pieces[members[0]], 0, _storage_numel(pieces[members[0]])).clone()
            for i in members:
                out[i] = flat.narrow(0, pieces[i].storage_offset(), pieces[i].numel())
        else:
            for i in members:
                out[i] = _copy(pieces[i])
    return spec.unflatten(out)


def writable(shards: Tree) -> Tree:
    """The tree for in-place work: whole chunks as they are, copies of all other pieces.

    What is no chunk may lie in somebody's memory beside other values, or twice in the tree: with
    one rank pieces are views of what autograd gave.
    """
    leaves, spec = tree.flatten(shards, is_leaf)
    held = [leaf for leaf in leaves if isinstance(leaf, Sharded)]
    pieces = [leaf.data for leaf in held]
    for members in _by_storage(pieces):
        whole = all(_storage_numel(pieces[i]) == held[i].bucket.chunk for i in members)
        if not (whole and _is_flat(pieces, members)):
            for i in members:
                pieces[i] = _copy(pieces[i])
    given = iter(pieces)
    return spec.unflatten(
        [
            Sharded(next(given), leaf.bucket, leaf.slot) if isinstance(leaf, Sharded) else leaf
            for leaf in leaves
        ]
    )


def map_columns(fn: Callable[..., None], target: Tree, *rest: Tree, donate: bool = False) -> Tree:
    """Apply an in-place elementwise function to a tree of shards.

    Args:
      fn: called as `fn(target, *rest)` with corresponding long tensors; it writes its result into
        the first.
      target: tree of shards.
      rest: trees of the same structure, read only.
      donate: write into `target` itself instead of a copy.

    Returns:
      The tree with the results.

    Memory: a copy of `target`; with `donate` only of those pieces that are no whole chunks.
    """
    out = writable(target) if donate else fresh(target)
    pieces, spec = tree.flatten(out)
    for column in columns([pieces, *(tree.flatten(other)[0] for other in rest)]):
        fn(*column.tensors)
    return spec.unflatten(pieces)

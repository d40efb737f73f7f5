"""Elementwise work on trees of shards as work on a few long tensors.

The leaves of `tree.flatten` on a tree of shards are this rank's pieces, and the pieces of a bucket
are views of one chunk. An elementwise function may as well take them as one: fewer, longer tensors,
the same numbers. Padding between them is computed with and never looked at.

[Note: only what the tree holds] A tree may hold some leaves of a bucket only, as the parts of a
model that has two optimizers do. What lies in the chunk between and around them is somebody else's,
so pieces are joined only where nothing but padding lies between.

[Note: dense] In groups of one rank a gradient is what autograd gave: expanded, strided, negated as
a view. torch's fused kernels, and whoever looks at memory, take a tensor for `numel` numbers in a
row. So columns are dense: what is not is copied before.
"""

from collections.abc import Callable, Container, Hashable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mics_fn import _torch, tree
from mics_fn.errors import OptimizerError, message
from mics_fn.shards import Bucket, Sharded, is_leaf, needs_derivative
from mics_fn.tree import Tree


class Column(NamedTuple):
    """Corresponding tensors of several trees: runs of neighbouring pieces, or single ones."""

    key: Hashable
    tensors: tuple[Tensor, ...]


def columns(
    targets: Sequence[Tree],
    reads: Sequence[Tree] = (),
    keys: Sequence[Hashable] | None = None,
    *,
    by: Sequence[Any] = (),
    donate: bool = False,
) -> tuple[list[Tree], list[Column]]:
    """Corresponding pieces of several trees, joined to as few long tensors as their memory allows.

    Args:
      targets: trees of shards; the columns of copies of them are there to be written to.
      reads: trees that are only read. All trees have the leaves of the first one, in its order.
      keys: one a piece; only neighbours with equal keys are joined. Default: all equal.
      by: what else results depend on, such as a learning rate, of which derivatives may be asked.
      donate: write to the targets themselves; to copies only where their pieces are not dense, or
        overlap with others, of another target too.

    Returns:
      The trees, in new nodes, that will hold what is written; and the columns, each of its targets
      and then its reads. They cover every element once, and besides only padding between pieces.
      Where `needs_derivative` holds, they are single pieces, and the copies are differentiable.

    Memory: a copy of the targets, none with `donate`.

    Raises: `OptimizerError` for `donate` where a derivative is asked for.
    """
    if _torch.inside_torch_func():  # where a tensor may have no memory to look at
        return _one_by_one(targets, reads, keys, by, donate)
    held, others = [_held(each) for each in targets], [_held(each) for each in reads]
    if needs_derivative([*by, *(piece for each in (*held, *others) for piece in each.pieces)]):
        return _one_by_one(targets, reads, keys, by, donate)
    held = _in_place(held) if donate else [_copied(each) for each in held]
    written = {home for each in held for home in each.homes}
    every = [*held, *others]
    found = []
    for members in _by_home(every[0]):
        for run in _runs(every, members, keys):
            tensors = [_span(each, run) for each in every]
            for k in range(len(held), len(every)):
                if every[k].homes[run[0]] in written:
                    tensors[k] = tensors[k].clone()
            found.append(Column(keys[run[0]] if keys else None, tuple(tensors)))
    return [_tree(each) for each in held], found


def _one_by_one(
    targets: Sequence[Tree],
    reads: Sequence[Tree],
    keys: Sequence[Hashable] | None,
    by: Sequence[Any],
    donate: bool,
) -> tuple[list[Tree], list[Column]]:
    """Columns of single pieces, for which nobody looks at memory."""
    if donate:
        fix = "pass donate=False, or call it under torch.no_grad()"
        text = "opt_step: donate=True where a derivative is asked for"
        raise OptimizerError(message(text, fix=fix))
    flat = [tree.flatten(each) for each in (*targets, *reads)]
    given = [pieces for pieces, _ in flat]
    others = [value for value in by if isinstance(value, Tensor)]
    made = [[_live_copy(x, [*row, *others]) for x in row] for row in zip(*given, strict=True)]
    done = [[row[k] for row in made] for k in range(len(targets))]
    found = [
        Column(keys[i] if keys else None, (*row[: len(targets)], *old[len(targets) :]))
        for i, (row, old) in enumerate(zip(made, zip(*given, strict=True), strict=True))
    ]
    trees = zip(flat, done, strict=False)
    return [spec.unflatten(pieces) for (_, spec), pieces in trees], found


def _live_copy(piece: Tensor, others: Sequence[Tensor]) -> Tensor:
    """A copy to write to in place; batched under vmap where any of the others is."""
    copy = piece.clone()
    for other in others if _torch.inside_torch_func() else ():
        never = torch.zeros_like(other, dtype=torch.bool)
        copy = torch.where(never, other.to(copy.dtype), copy)
    return copy


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

    Memory: as `columns`.
    """
    (out,), found = columns([target], rest, donate=donate)
    for column in found:
        fn(*column.tensors)
    return out


def fresh(shards: Tree) -> Tree:
    """A copy in new memory.

    Where the tree holds all leaves of a bucket its chunk is copied as a whole, so that it stays
    one. Else each run of pieces is, and nothing of what the tree lacks.
    """
    if _torch.inside_torch_func():
        return tree.map_leaves(torch.clone, shards)
    return _tree(_copied(_held(shards)))


def in_chunks(shards: Tree) -> Tree:
    """The tree with copies of what does not lie in memory of its chunk's size.

    With one rank a gradient is a view of what autograd gave, which may be part of something else.
    """
    held = _held(shards)
    buckets = {leaf.bucket for leaf in held.slots if isinstance(leaf, Sharded)}
    return _tree(_copied(held, lambda i: _chunk(held, i, buckets) is not None))


class _Held(NamedTuple):
    """The pieces of a tree, and where they lie."""

    pieces: list[Tensor]
    homes: list[int]  # what tells their storages apart; a number of its own if it is not dense
    starts: list[int]  # where they begin there, in elements
    slots: list[Sharded | Tensor]  # the leaves that they are of
    leaves: list[Any]  # all
    spec: Any


def _held(shards: Tree) -> _Held:
    leaves, spec = tree.flatten(shards, is_leaf)
    slots = [leaf for leaf in leaves if isinstance(leaf, Sharded | Tensor)]
    pieces = [leaf.data if isinstance(leaf, Sharded) else leaf for leaf in slots]
    homes: list[int] = []
    seen: dict[int, int] = {}
    for i, piece in enumerate(pieces):
        dense = piece.ndim == 1 and piece.is_contiguous() and not piece.is_neg()
        homes.append(_home(piece, seen) if dense else -1 - i)
    starts = [int(piece.storage_offset()) for piece in pieces]
    return _Held(pieces, homes, starts, slots, leaves, spec)


def _home(piece: Tensor, seen: dict[int, int]) -> int:
    """A piece's storage; `seen` remembers it for a base, since most pieces are views of a few."""
    base = piece._base
    if base is None:
        return _torch.storage_id(piece)
    if id(base) not in seen:
        seen[id(base)] = _torch.storage_id(piece)
    return seen[id(base)]


def _tree(held: _Held) -> Tree:
    """The tree in new nodes, as the old ones may be given away."""
    pieces, leaves = iter(held.pieces), []
    for leaf in held.leaves:
        if isinstance(leaf, Sharded):
            leaf = Sharded(next(pieces), leaf.bucket, leaf.slot)
        leaves.append(next(pieces) if isinstance(leaf, Tensor) else leaf)
    return held.spec.unflatten(leaves)


def _by_home(held: _Held) -> list[list[int]]:
    """Pieces that share a storage, in the order in which they lie; empty ones are left out."""
    found: dict[int, list[int]] = {}
    for i, piece in enumerate(held.pieces):
        if piece.numel():
            found.setdefault(held.homes[i], []).append(i)
    return [sorted(each, key=held.starts.__getitem__) for each in found.values()]


def _runs(
    every: Sequence[_Held], members: Sequence[int], keys: Sequence[Hashable] | None = None
) -> Iterator[list[int]]:
    """Cut pieces of one storage where, in any tree, something else than padding is between two."""
    first, run = every[0], [members[0]]
    for a, b in pairwise(members):
        step = first.starts[b] - first.starts[a]
        gap = step - first.pieces[a].numel()
        if (
            (keys is None or keys[a] == keys[b])
            and (gap == 0 or gap == _padding(first.slots[a], first.slots[b]))
            and all(
                each.homes[a] == each.homes[b] and each.starts[b] - each.starts[a] == step
                for each in every
            )
        ):
            run.append(b)
        else:
            yield run
            run = [b]
    yield run


def _padding(a: Sharded | Tensor, b: Sharded | Tensor) -> int:
    """The length of what lies between two leaves of a bucket, if that is nothing but padding."""
    if isinstance(a, Tensor) or isinstance(b, Tensor) or a.bucket != b.bucket:
        return 0
    bucket = a.bucket
    if any(bucket.numels[a.slot + 1 : b.slot]):
        return 0
    return bucket.offsets[b.slot] - bucket.offsets[a.slot] - bucket.numels[a.slot]


def _span(held: _Held, run: Sequence[int]) -> Tensor:
    """The pieces of a run as one tensor, a single one that is not dense as a copy."""
    first, last = held.pieces[run[0]].detach(), run[-1]
    if held.homes[last] < 0:
        return first.clone(memory_format=torch.contiguous_format)
    start = held.starts[run[0]]
    length = held.starts[last] - start + held.pieces[last].numel()
    return first if len(run) == 1 else first.as_strided((length,), (1,), start)


def _in_place(held: Sequence[_Held]) -> list[_Held]:
    """Trees to be written to as they are, but for copies of what is not dense or overlaps."""
    spans = sorted(
        (home, start, start + piece.numel())
        for each in held
        for home, start, piece in zip(each.homes, each.starts, each.pieces, strict=True)
    )
    odd = {a[0] for a, b in pairwise(spans) if a[0] == b[0] and b[1] < a[2]}
    odd.update(home for each in held for home in each.homes if home < 0)
    return [
        _copied(each, lambda i, homes=each.homes: homes[i] not in odd)
        if not odd.isdisjoint(each.homes)
        else each
        for each in held
    ]


def _copied(held: _Held, stays: Callable[[int], bool] = lambda i: False) -> _Held:
    """Copies of the pieces, storage by storage, but of those whose first piece may stay."""
    pieces, homes, starts, *_ = held
    # An empty piece would keep the memory that it is a view of.
    new = [piece if piece.numel() else piece.new_empty(piece.shape) for piece in pieces]
    new_homes, new_starts, complete = list(homes), list(starts), _complete_buckets(held)
    for members in _by_home(held):
        if stays(members[0]):
            continue
        for run in _runs([held], members):
            chunk = _chunk(held, run[0], complete) if run == members else None
            low = starts[run[0]] if chunk is None else 0
            flat = (_span(held, run) if chunk is None else chunk).clone()
            for i in run:
                new_homes[i], new_starts[i] = _torch.storage_id(flat), starts[i] - low
                alone = homes[i] < 0
                new[i] = flat if alone else flat.narrow(0, starts[i] - low, pieces[i].numel())
    return held._replace(pieces=new, homes=new_homes, starts=new_starts)


def _complete_buckets(held: _Held) -> set[Bucket]:
    """The buckets all of whose leaves are in the tree."""
    found: dict[Bucket, set[int]] = {}
    for leaf in held.slots:
        if isinstance(leaf, Sharded):
            found.setdefault(leaf.bucket, set()).add(leaf.slot)
    return {bucket for bucket, mine in found.items() if len(mine) == len(bucket.shapes)}


def _chunk(held: _Held, i: int, complete: Container[Bucket]) -> Tensor | None:
    """A dense piece's storage, if it is of its chunk's size and the bucket is among those."""
    piece, leaf = held.pieces[i], held.slots[i]
    if isinstance(leaf, Tensor) or held.homes[i] < 0 or leaf.bucket not in complete:
        return None
    numel = leaf.bucket.chunk
    whole = piece.untyped_storage().nbytes() == numel * piece.itemsize
    return piece.detach().as_strided((numel,), (1,), 0) if whole else None

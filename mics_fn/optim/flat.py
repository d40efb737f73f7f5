"""A tree of shards as a few long tensors, one for each run of neighbours in a bucket.

[Note: runs] The leaves of `tree.flatten` on a tree of shards are this rank's pieces, and the pieces
of a bucket are views of one chunk. An elementwise function may as well take them as one tensor: the
numbers are the same, and the work does not grow with the number of leaves. A tree may hold only
some leaves of a bucket, as the two parts of a model with two optimizers do. What lies between and
around them belongs to somebody else, so a run ends where a leaf is missing: between its pieces lies
nothing but padding, which is computed with and never looked at.

Which leaves a run has does not depend on the rank, so that structures compare across ranks; where
its pieces begin does.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mics_fn import _torch, tree
from mics_fn.errors import TreeError, message
from mics_fn.shards import Bucket, Nothing, Sharded, Tied, is_leaf
from mics_fn.tree import Tree

Place = tuple[Bucket, int] | None  # bucket and slot of a piece; None for a plain tensor


class Laid(NamedTuple):
    """A piece that is not empty: its leaf's number, and where it lies in the run, in elements."""

    index: int
    start: int
    length: int


class Run(NamedTuple):
    """Leaves of one bucket, in its order, between which nothing but padding lies.

    Args:
      bucket: the run as the only leaf of a bucket; None for a plain tensor.
      members: the leaves' numbers among the pieces of the tree.
      laid: those that have elements on this rank.
      sizes: (gap, piece, gap, piece, ...): how to split the run on this rank, a piece per member.
      numel: elements on this rank, gaps included.
      complete: whether the tree holds every element of the bucket.
    """

    bucket: Bucket | None
    members: tuple[int, ...]
    laid: tuple[Laid, ...]
    sizes: tuple[int, ...]
    numel: int
    complete: bool


@dataclass(frozen=True)
class Layout:
    """The structure of a tree of shards, and its runs on this rank.

    Args:
      spec: its structure down to leaves.
      leaves: what stands at each leaf: the place of a piece, `Tied`, or `Nothing` for what is not
        trained.
      runs: this rank's, so they are not compared.
    """

    spec: Any
    leaves: tuple[Place | Tied | Nothing, ...]
    runs: tuple[Run, ...] = field(compare=False)


@tree.node
@dataclass(frozen=True, eq=False)
class FlatShards:
    """A tree of shards kept as one long shard per run: what optimizers keep for each parameter.

    Args:
      runs: one `Sharded` per run (see [Note: runs]), so that verbs take the value as it is; a plain
        tensor where the tree has one.
      layout: the tree that they stand for.

    Example:
      >>> groups = make_groups(1)
      >>> params = shard({"b": torch.ones(4), "w": torch.ones(2, 2)}, groups)
      >>> mean = init_state(params, lion(0.1)).opt.mean
      >>> mean.runs
      [Sharded(shape=(8,), float32, here 8 of 8)]
      >>> mean["w"]
      Sharded(shape=(2, 2), float32, here 4 of 4)
    """

    runs: list[Sharded | Tensor]
    layout: Layout = tree.static()

    def by_leaf(self) -> Tree:
        """The tree itself: its pieces are views of the long tensors."""
        held: dict[int, Tensor] = {}
        for run, x in zip(self.layout.runs, self.runs, strict=True):
            if run.bucket is not None and not isinstance(x, Sharded):
                text = "by_leaf: these are the runs of a tree in full, no longer shards"
                fix = "take the leaves first: unshard(moment.by_leaf(), groups)"
                raise TreeError(message(text, fix=fix))
            whole = x.data if isinstance(x, Sharded) else x
            held.update(zip(run.members, split(run, whole), strict=True))
        given, leaves = iter([held[i] for i in range(len(held))]), []
        for leaf in self.layout.leaves:
            if isinstance(leaf, Tied | Nothing):
                leaves.append(leaf)
            else:
                leaves.append(next(given) if leaf is None else Sharded(next(given), *leaf))
        return self.layout.spec.unflatten(leaves)

    def replaced(self, before: Tree, after: Tree) -> "FlatShards":
        """With leaves of `after` where they are not those of `before`, which is `by_leaf()`.

        Memory: a copy of the runs that have such a leaf; the others are the same objects.
        """
        old, new, runs = opened(before), opened(after), list(self.runs)
        same = [a is b for a, b in zip(old.leaves, new.leaves, strict=True) if isinstance(a, _HELD)]
        for r, run in enumerate(self.layout.runs):
            if not all(same[i] for i in run.members):
                whole = joined(run, [new.pieces[i] for i in run.members])
                runs[r] = Sharded(whole, run.bucket, 0) if run.bucket else whole
        return FlatShards(runs, self.layout)

    def pieces(self) -> list[Tensor]:
        """The pieces of the tree, as views."""
        return opened(self.by_leaf()).pieces

    def __getitem__(self, key: Any) -> Any:
        return self.by_leaf()[key]

    @property
    def wholes(self) -> list[Tensor]:
        """The long tensors."""
        return [run.data if isinstance(run, Sharded) else run for run in self.runs]


_HELD = (Sharded, Tensor)


def by_leaf(value: Tree) -> Tree:
    """A tree in which each `FlatShards` is the tree that it stands for; the rest is the same."""
    return tree.map_leaves(
        lambda x: x.by_leaf() if isinstance(x, FlatShards) else x, value, is_leaf=_is_node
    )


def replaced(value: Tree, before: Tree, after: Tree) -> Tree:
    """`after` with `FlatShards` where `value` has them.

    Args:
      value: the tree as it was.
      before: `by_leaf(value)`.
      after: the same with other leaves.
    """
    return tree.map_leaves(
        lambda x, old, new: x.replaced(old, new) if isinstance(x, FlatShards) else new,
        *(value, before, after),
        is_leaf=_is_node,
    )


def _is_node(value: Any) -> bool:
    return is_leaf(value) or isinstance(value, FlatShards)


class Opened(NamedTuple):
    """A tree of shards, taken apart."""

    leaves: list[Any]
    spec: Any
    pieces: list[Tensor]

    @property
    def places(self) -> tuple[Place, ...]:
        """The place of each piece."""
        held = [leaf for leaf in self.leaves if isinstance(leaf, _HELD)]
        return tuple([(x.bucket, x.slot) if isinstance(x, Sharded) else None for x in held])

    @property
    def lengths(self) -> tuple[int, ...]:
        """Elements of each piece (*batch, length), without the batch."""
        if all_rows(self.pieces):
            return tuple(map(Tensor.numel, self.pieces))
        return tuple([x.shape[-1] if x.ndim else 1 for x in self.pieces])

    def runs(self) -> tuple[Run, ...]:
        """Where the pieces lie in their buckets."""
        return _runs(self.places, self.lengths)

    def layout(self) -> Layout:
        """What `FlatShards` for this tree remember of it."""
        places: list[Any] = []
        for leaf in self.leaves:
            if isinstance(leaf, Sharded):
                places.append((leaf.bucket, leaf.slot))
            else:  # a frozen leaf itself would keep its tensor alive
                kept = leaf if isinstance(leaf, Tied) else Nothing()
                places.append(None if isinstance(leaf, Tensor) else kept)
        return Layout(self.spec, tuple(places), self.runs())

    def tree(self, pieces: Sequence[Tensor]) -> Tree:
        """The same tree with other pieces, in new nodes, as the old ones may be given away."""
        given, leaves = iter(pieces), []
        for leaf in self.leaves:
            if isinstance(leaf, Sharded):
                leaves.append(Sharded(next(given), leaf.bucket, leaf.slot))
            else:
                leaves.append(next(given) if isinstance(leaf, Tensor) else leaf)
        return self.spec.unflatten(leaves)


def opened(shards: Tree) -> Opened:
    """Take a tree of shards apart."""
    leaves, spec = tree.flatten(shards, is_leaf)
    held = [leaf for leaf in leaves if isinstance(leaf, _HELD)]
    return Opened(leaves, spec, [x.data if isinstance(x, Sharded) else x for x in held])


# The next three loop over leaves inside the interpreter: a step has nothing else to do for each.


def all_rows(tensors: Sequence[Tensor]) -> bool:
    """Whether all tensors have one dimension."""
    return set(map(Tensor.dim, tensors)) <= {1}


def devices(tensors: Sequence[Tensor]) -> list[torch.device]:
    return list(map(attrgetter("device"), tensors))


def any_requires_grad(tensors: Sequence[Tensor]) -> bool:
    return any(map(attrgetter("requires_grad"), tensors))


def zeros(shards: Tree) -> FlatShards:
    """Zeros for every element of a tree of shards.

    Memory: the trained shards' once more.
    """
    found = opened(shards)
    layout = found.layout()
    return with_wholes(layout, [_zeros(run, found.pieces) for run in layout.runs])


def _zeros(run: Run, pieces: Sequence[Tensor]) -> Tensor:
    like = pieces[run.members[0]]
    shape = like.shape if run.bucket is None else (*like.shape[:-1], run.numel)
    return torch.zeros(shape, dtype=like.dtype, device=like.device)


def with_wholes(layout: Layout, wholes: Sequence[Tensor]) -> FlatShards:
    """Flat shards of a layout from their long tensors."""
    pairs = zip(layout.runs, wholes, strict=True)
    return FlatShards([Sharded(x, run.bucket, 0) if run.bucket else x for run, x in pairs], layout)


def split(run: Run, whole: Tensor) -> list[Tensor]:
    """The pieces of a run, one per member, as views of (*batch, run.numel)."""
    if run.bucket is None:
        return [whole]
    return list(whole.split_with_sizes(run.sizes, -1)[1::2])


def joined(run: Run, pieces: Sequence[Tensor]) -> Tensor:
    """A copy of the pieces of a run, one per member, as one tensor; differentiable."""
    if run.bucket is None:
        return pieces[0]
    parts = []
    for gap, piece in zip(run.sizes[::2], pieces, strict=True):
        parts += [piece.new_zeros((*piece.shape[:-1], gap)), piece] if gap else [piece]
    return torch.cat(parts, -1)


def whole_run(run: Run, pieces: Sequence[Tensor]) -> Tensor | None:
    """The pieces of a run as one tensor without a copy; None where they do not lie like that.

    Args:
      run: which pieces, and how they lie in their bucket.
      pieces: all of the tree.
    """
    if not run.laid:
        return None
    mine = [pieces[i] for i, _, _ in run.laid]
    first = mine[0].detach()
    begin = int(first.storage_offset())
    at = [begin + start for _, start, _ in run.laid]
    if list(map(Tensor.storage_offset, mine)) != at or not all_rows(mine):
        return None
    if list(map(Tensor.numel, mine)) != [length for _, _, length in run.laid]:
        return None
    if not all(map(Tensor.is_contiguous, mine)) or any(map(Tensor.is_neg, mine)):
        return None
    # Most pieces are views of one base, which is quicker to see than their storage.
    bases = {id(base): x for base, x in zip(map(attrgetter("_base"), mine), mine, strict=True)}
    alone = mine if id(None) in bases else bases.values()
    if len(set(map(_torch.storage_id, alone))) > 1 or len({x.dtype for x in mine}) > 1:
        return None
    return first if len(run.laid) == 1 else first.as_strided((run.numel,), (1,), begin)


@lru_cache(maxsize=64)
def _runs(places: tuple[Place, ...], lengths: tuple[int, ...]) -> tuple[Run, ...]:
    """The runs of pieces of these lengths; of leaves that occur again, others than the first."""
    seen: Counter[Place] = Counter()
    by_bucket: dict[tuple, dict[int, int]] = {}
    for i, place in enumerate(places):
        bucket, slot = place or (None, 0)
        key = (bucket, i if place is None else seen[place])
        by_bucket.setdefault(key, {})[slot] = i
        seen[place] += 1
    found = []
    for (bucket, _), by_slot in by_bucket.items():
        if bucket is None:
            (i,), (n,) = by_slot.values(), (lengths[by_slot[0]],)
            found.append(Run(None, (i,), (Laid(i, 0, n),) if n else (), (0, n), n, False))
            continue
        slots: list[int] = []
        for slot in sorted(by_slot):
            if slots and any(bucket.numels[slots[-1] + 1 : slot]):
                found.append(_run(bucket, slots, by_slot, lengths))
                slots = []
            slots.append(slot)
        found.append(_run(bucket, slots, by_slot, lengths))
    return tuple(found)


def _run(
    bucket: Bucket, slots: Sequence[int], by_slot: dict[int, int], lengths: Sequence[int]
) -> Run:
    numels, offsets = bucket.numels, bucket.offsets
    laid, sizes, end, before = [], [], 0, None
    for slot in slots:
        i, gap = by_slot[slot], 0
        if lengths[i]:
            gap = 0 if before is None else offsets[slot] - offsets[before] - numels[before]
            laid.append(Laid(i, end + gap, lengths[i]))
            end, before = end + gap + lengths[i], slot
        sizes += [gap, lengths[i]]
    full = [slot for slot in slots if numels[slot]] or slots[:1]
    start, stop = offsets[full[0]], offsets[full[-1]] + numels[full[-1]]
    own = replace(bucket, shapes=((stop - start,),), offsets=(start,))
    members = tuple(by_slot[slot] for slot in slots)
    complete = sum(numels[slot] for slot in slots) == sum(numels)
    return Run(own, members, tuple(laid), tuple(sizes), end, complete)

"""A tree of shards kept as a few long tensors, one per run; see [Note: runs] in `runs`."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from mics_fn import tree
from mics_fn.errors import TreeError, message
from mics_fn.offload import laid_like
from mics_fn.optim.making import made
from mics_fn.optim.runs import Place, Run, all_rows, joined, runs_of, split
from mics_fn.shards import (
    Bucket,
    Nothing,
    Sharded,
    Tied,
    is_leaf,
    mark_reduced,
    reduced_over,
)
from mics_fn.tree import Tree


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
      runs: one `Sharded` per run, or a plain tensor where the tree has one.
      layout: the tree that they stand for.

    Example:
      >>> groups = make_groups(1)
      >>> params = shard({"b": torch.ones(4), "w": torch.ones(2, 2)}, groups)
      >>> mean = init_state(params, optim.lion(0.1)).opt.mean
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
        old, new, runs = unpacked(before), unpacked(after), list(self.runs)
        same = [a is b for a, b in zip(old.leaves, new.leaves, strict=True) if isinstance(a, _HELD)]
        for r, run in enumerate(self.layout.runs):
            if not all(same[i] for i in run.members):
                whole = joined(run, [new.pieces[i] for i in run.members])
                (whole,) = laid_like([whole], [self.wholes[r]])
                runs[r] = Sharded(whole, run.bucket, 0) if run.bucket else whole
        return FlatShards(runs, self.layout)

    def pieces(self) -> list[Tensor]:
        """The pieces of the tree, as views."""
        return unpacked(self.by_leaf()).pieces

    def __getitem__(self, key: Any) -> Any:
        return self.by_leaf()[key]

    @cached_property
    def cuts(self) -> dict[int, tuple[Tensor, list[Tensor]]]:
        """What `cut` has found, by run; a step that writes in place hands it on."""
        return {}

    def __getstate__(self) -> dict[str, Any]:
        return {"runs": self.runs, "layout": self.layout}  # each view would be saved as a whole

    def cut(self, r: int, whole: Tensor) -> list[Tensor]:
        """The pieces of a run that are not empty, as views of its long tensor."""
        known = self.cuts.get(r)
        if known is not None and known[0] is whole:
            return known[1]
        pieces = [x for x in split(self.layout.runs[r], whole) if x.numel()]
        if whole is self.wholes[r]:  # these would keep the memory of a copy
            self.cuts[r] = whole, pieces
        return pieces

    @property
    def wholes(self) -> list[Tensor]:
        """The long tensors."""
        return [run.data if isinstance(run, Sharded) else run for run in self.runs]


_HELD = (Sharded, Tensor)
_DATA, _BUCKET, _SLOT = attrgetter("data"), attrgetter("bucket"), attrgetter("slot")


def by_leaf(value: Tree) -> Tree:
    """A tree in which each `FlatShards` is the tree that it stands for; the rest is the same."""
    return tree.map_leaves(
        lambda x: x.by_leaf() if isinstance(x, FlatShards) else x, value, is_leaf=is_node
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
        is_leaf=is_node,
    )


def is_node(value: Any) -> bool:
    """Whether a value is a leaf of a tree of shards, or `FlatShards`."""
    return is_leaf(value) or isinstance(value, FlatShards)


@dataclass(frozen=True, eq=False)
class Unpacked:
    """A tree of shards, taken apart. What is read off it is read once in a step."""

    leaves: list[Any]
    spec: Any
    pieces: list[Tensor]

    @cached_property
    def only_shards(self) -> bool:
        """Whether all leaves are `Sharded`, which many loops need not ask of each."""
        return set(map(type, self.leaves)) == {Sharded}

    @cached_property
    def in_rows(self) -> bool:
        """Whether all pieces have one dimension."""
        return all_rows(self.pieces)

    @cached_property
    def places(self) -> tuple[tuple[Bucket | None, ...], tuple[int, ...]]:
        """The buckets of the pieces, None for plain tensors, and their slots."""
        if self.only_shards:
            return tuple(map(_BUCKET, self.leaves)), tuple(map(_SLOT, self.leaves))
        held = [leaf for leaf in self.leaves if isinstance(leaf, _HELD)]
        buckets = [x.bucket if isinstance(x, Sharded) else None for x in held]
        return tuple(buckets), tuple([x.slot if isinstance(x, Sharded) else 0 for x in held])

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Elements of each piece (*batch, length), without the batch."""
        if self.in_rows:
            return tuple(map(Tensor.numel, self.pieces))
        return tuple([x.shape[-1] if x.ndim else 1 for x in self.pieces])

    @property
    def paths(self) -> list[str]:
        """The path of each piece's leaf."""
        pairs = zip(tree.spec_paths(self.spec), self.leaves, strict=True)
        return [path for path, leaf in pairs if isinstance(leaf, _HELD)]

    def runs(self) -> tuple[Run, ...]:
        """Where the pieces lie in their buckets."""
        return runs_of(*self.places, self.lengths)

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

    def with_pieces(self, pieces: Sequence[Tensor]) -> "Unpacked":
        """The same tree with other pieces, in new nodes, as the old ones may be given away."""
        if self.only_shards:
            leaves = list(map(Sharded, pieces, *self.places))  # pyright: ignore
        else:
            given, leaves = iter(pieces), []
            for leaf in self.leaves:
                if isinstance(leaf, Sharded):
                    leaves.append(Sharded(next(given), leaf.bucket, leaf.slot))
                else:
                    leaves.append(next(given) if isinstance(leaf, Tensor) else leaf)
        mark_reduced(leaves, reduced_over(self.leaves))  # limits on gradients change their pieces
        return Unpacked(leaves, self.spec, list(pieces))

    def part(self, leaves: list[Any], own: Sequence[int]) -> "Unpacked":
        """The tree with other leaves, of which only these pieces are left."""
        return Unpacked(leaves, self.spec, [self.pieces[i] for i in own])

    @cached_property
    def _tree(self) -> Tree:
        return self.spec.unflatten(self.leaves)

    def closed(self) -> Tree:
        """The tree itself."""
        return self._tree


def unpacked(shards: Tree) -> Unpacked:
    """Take a tree of shards apart, unless it is already."""
    if isinstance(shards, Unpacked):
        return shards
    leaves, spec = tree.flatten(shards, is_leaf)
    found = Unpacked(leaves, spec, [])
    vars(found)["_tree"] = shards
    if found.only_shards:
        found.pieces.extend(map(_DATA, leaves))
    else:
        held = (x for x in leaves if isinstance(x, _HELD))
        found.pieces.extend(x.data if isinstance(x, Sharded) else x for x in held)
    return found


def zeros(shards: Tree, name: str = "") -> FlatShards:
    """Zeros for every element of a tree of shards.

    Args:
      shards: the tree.
      name: of the moment that begins like this, which may have codes.

    Memory: the trained shards' once more.
    """
    found = unpacked(shards)
    layout = found.layout()
    wholes = [made(layout, r, _zeros(run, found.pieces), name) for r, run in enumerate(layout.runs)]
    return with_wholes(layout, wholes)


def _zeros(run: Run, pieces: Sequence[Tensor]) -> Tensor:
    like = pieces[run.members[0]]
    shape = like.shape if run.bucket is None else (*like.shape[:-1], run.numel)
    return torch.zeros(shape, dtype=like.dtype, device=like.device)


def with_wholes(
    layout: Layout,
    wholes: Sequence[Tensor],
    cuts: dict[int, tuple[Tensor, list[Tensor]]] | None = None,
) -> FlatShards:
    """Flat shards of a layout from their long tensors.

    Args:
      layout: of the tree.
      wholes: the long tensors.
      cuts: `FlatShards.cuts` of those that they replace.
    """
    pairs = zip(layout.runs, wholes, strict=True)
    runs = [Sharded(x, run.bucket, 0) if run.bucket else x for run, x in pairs]
    made = FlatShards(runs, layout)
    # Those of other memory would keep it.
    same = ((r, cut) for r, cut in (cuts or {}).items() if cut[0] is wholes[r])
    made.cuts.update(same)
    return made

"""A tree of shards, opened: its leaves by bucket, each with its groups, checked and agreed."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mics_fn import tree
from mics_fn.collectives import agree, checksum, collect_all
from mics_fn.errors import DesyncError, GroupsError, LeafError, PlanError, message, name_ranks
from mics_fn.groups import OF_STEPS, Comm, Groups, Hierarchy
from mics_fn.shards.bucket import Bucket
from mics_fn.shards.leaf import Leaf, Sharded, Tied, dtype_name, is_leaf
from mics_fn.tree import Tree


@dataclass(frozen=True, eq=False)
class BucketUse:
    """The leaves of a bucket that a tree holds: `index[slot]` is a leaf's place there, or None."""

    bucket: Bucket
    home: Groups | Hierarchy
    index: tuple[int | None, ...]

    @property
    def hierarchy(self) -> Hierarchy:
        return self.home.hierarchy if isinstance(self.home, Groups) else self.home

    @property
    def far(self) -> bool:
        """Whether a gather and its adjoint do more than to look at this rank's piece."""
        return self.bucket.parts > 1 or self.hierarchy.grad_factor != 1.0

    @property
    def members(self) -> list[int]:
        return [i for i in self.index if i is not None]

    @property
    def missing(self) -> tuple[int, ...]:
        """Slots that the tree lacks; mostly none."""
        if None not in self.index:
            return ()
        return tuple(slot for slot, i in enumerate(self.index) if i is None)

    def by_slot(self, values: Sequence[Any]) -> list[Any]:
        """One value a slot, None where the tree lacks the leaf, from one value a member."""
        given = iter(values)
        return [None if i is None else next(given) for i in self.index]

    def by_member(self, values: Sequence[Any]) -> list[Any]:
        """One value a member from one value a slot."""
        return [value for value, i in zip(values, self.index, strict=True) if i is not None]


def uses_of(
    verb: str, leaves: Sequence[Leaf], homes: Sequence[Groups | Hierarchy]
) -> list[BucketUse]:
    """The buckets of a tree; two trees of equal layout in one give two uses of equal buckets."""
    uses = grouped(leaves, homes)
    for use in uses:
        _check_home(verb, use, homes)
    return uses


def grouped(leaves: Sequence[Leaf], homes: Sequence[Any]) -> list[BucketUse]:
    """Leaves by bucket, each bucket once unless a slot occurs again."""
    found: dict[Bucket, list[dict[int, int]]] = {}
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, Tied) or leaf.bucket is None:
            continue
        slots = found.setdefault(leaf.bucket, [])
        if not slots or leaf.slot in slots[-1]:
            slots.append({})
        free = slots[-1] if len(slots) == 1 else next(s for s in slots if leaf.slot not in s)
        free[leaf.slot] = i
    uses = []
    for bucket, every in found.items():
        for slots in every:
            index = tuple(slots.get(slot) for slot in range(len(bucket.shapes)))
            uses.append(BucketUse(bucket, homes[next(iter(slots.values()))], index))
    return uses


def _check_home(verb: str, use: BucketUse, homes: Sequence[Groups | Hierarchy]) -> None:
    if any(homes[i] is not use.home for i in use.members):
        text = f"{verb}: leaves of bucket {use.bucket.index} are given different groups"
        raise PlanError(message(text, fix="pass the groups that the tree was sharded with"))
    if use.hierarchy.size != use.bucket.parts:
        sizes = f"{use.bucket.parts}, the groups have {use.hierarchy.size} ranks"
        text = f"{verb}: shards are cut in {sizes}"
        raise PlanError(message(text, fix="pass the groups that the tree was sharded with"))


def replicas_of(use: BucketUse) -> Comm:
    if isinstance(use.home, Groups):
        return use.home.replicas
    raise GroupsError(message("hop 2 needs groups, got a hierarchy", fix="pass groups"))


def require_groups(verb: str, name: str, homes: Any) -> None:
    """Raise a clear error where a verb is called without groups."""
    if homes is None:
        fix = "make groups first: groups = mics_fn.make_groups(partition_size)"
        raise GroupsError(message(f"{verb}: {name} is None", fix=fix))


def homes_of(verb: str, name: str, homes: Any, like: Tree) -> list[Any]:
    """The groups (or hierarchy) of each leaf of a tree of shards, all of them open."""
    require_groups(verb, name, homes)
    values = {"what": name, "is_value": lambda value: isinstance(value, Groups | Hierarchy)}
    found = tree.spread(homes, like, is_leaf=is_leaf, **values)
    for home in dict.fromkeys(found):
        home.partition.check_open()
    return found


def in_order(uses: Sequence[BucketUse]) -> list[BucketUse]:
    """The buckets by their numbers, so that a schedule's bucket 3 is bucket 3 of the tree."""
    return sorted(uses, key=lambda use: use.bucket.index)


def as_tree(
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


def read_shards(
    verb: str, shards: Tree, hierarchy: Any, how: str = ""
) -> tuple[list[Leaf], Any, list[BucketUse]]:
    """Leaves, structure and buckets of a tree of shards, checked and agreed on."""
    leaves, spec = tree.flatten(shards, is_leaf)
    homes = homes_of(verb, "hierarchy", hierarchy, shards)
    check_shards(verb, shards, leaves)
    uses = uses_of(verb, leaves, homes)
    _agree_on_uses(uses, how)
    return leaves, spec, uses


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


def homes_with_replicas(verb: str, params: Tree, groups: Any) -> list[Groups]:
    """The groups of each leaf of a tree of shards, checked before anything is changed or sent."""
    leaves, _ = tree.flatten(params, is_leaf)
    check_shards(verb, params, leaves)
    homes = homes_of(verb, "groups", groups, params)
    if any(home in OF_STEPS for home in dict.fromkeys(homes)):
        text = f"{verb}: these are the groups of the steps, in which no other replica is"
        raise PlanError(message(text, fix="pass the groups that the tree was sharded with"))
    for use in uses_of(verb, leaves, homes):
        replicas_of(use)
    return homes


def check_equal(verb: str, params: Tree, homes: Sequence[Groups]) -> None:
    """Raise on every rank unless replicas hold the same bits: what starts apart would stay so.

    Communication: 8 bytes a leaf, over the partition group and over the replication group.
    """
    leaves, _ = tree.flatten(params, is_leaf)
    for home in dict.fromkeys(homes):
        mine = [
            i for i, leaf in enumerate(leaves) if homes[i] is home and isinstance(leaf, Sharded)
        ]
        if home.num_replicas == 1 or not mine or leaves[mine[0]].data.is_meta:
            continue
        found = collect_all(home, torch.stack([checksum(leaves[i].data) for i in mine]))
        first = [found[rank] for rank in home.ranks[: home.partition_size]]
        differs = {
            rank: (found[rank] != first[place % home.partition_size]).nonzero().flatten().tolist()
            for place, rank in enumerate(home.ranks)
        }
        odd = [rank for rank, at in differs.items() if at]
        if odd:
            path = tree.paths(params, "params", is_leaf)[mine[min(differs[odd[0]])]]
            lines = [f"first difference: {path}", f"{name_ranks(odd)}: not as in the first replica"]
            fix = "start with what shard gave, or with sync_replicas(params, groups)"
            raise DesyncError(message(f"{verb}: replicas hold different values", lines, fix=fix))

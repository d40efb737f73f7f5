"""A tree of shards, opened for a verb: its leaves by bucket, with their groups, checked."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from mics_fn import _torch, checks, tree
from mics_fn.collectives import Wire, agree, checksum, collect_all
from mics_fn.errors import GroupsError, LeafError, PlanError, disagreement
from mics_fn.groups import Comm, Hierarchy, Home, Route, current, require_replicas
from mics_fn.shards.bucket import Bucket
from mics_fn.shards.leaf import Leaf, Sharded, Tied, is_leaf, mark_reduced, owner_index
from mics_fn.shards.pack import any_elsewhere, check_kept
from mics_fn.tree import Tree

# What verbs are given: a tree of shards, and groups for each of its leaves.

# The groups of a tree: the same for all leaves, a function from the path of a leaf, or a tree.
GroupsTree = Home | Callable[[str], Any] | dict[Any, Any] | list[Any] | tuple[Any, ...]


def check_leaves(verb: str, shards: Tree, leaves: Sequence[Any], root: str) -> None:
    """Raise LeafError unless all leaves of a tree are shards."""
    for i, leaf in enumerate(leaves):
        if not is_leaf(leaf):
            path = tree.paths(shards, root, is_leaf)[i]
            fix = "make shards with shard(params, groups)"
            if hasattr(shards, "params") and hasattr(shards, "opt"):
                fix = "of a TrainState pass its params"
            raise LeafError(f"{verb}: {path} is {type(leaf).__name__}, not a shard", fix=fix)


def require_groups(verb: str, groups: Any) -> None:
    """Raise GroupsError if a verb is called without groups, or with their class."""
    if groups is None or isinstance(groups, type):
        what = "groups is None" if groups is None else checks.given("groups", groups)
        fix = "make groups first: groups = mics_fn.make_groups(partition_size)"
        raise GroupsError(f"{verb}: {what}", fix=fix)


def require_tree(verb: str, tree: Tree, groups: Any, root: str) -> None:
    """Raise unless a verb is called with a tree and with groups.

    Args:
      verb: its name, for errors.
      tree: what should be a tree.
      groups: what should be groups.
      root: the name of the argument that is the tree.

    Raises:
      GroupsError: there are no groups.
      LeafError: there is no tree.
      LeafError: it is called inside `torch.func.functionalize`, whose tensors cannot be sent.
    """
    require_groups(verb, groups)
    if _torch.inside_functionalize():
        text = f"{verb}: it is called inside torch.func.functionalize, whose tensors have no memory"
        raise LeafError(text, fix=f"{verb} outside, and functionalize what works on full tensors")
    refuse_none(verb, tree, root)


def refuse_none(verb: str, tree: Tree, root: str) -> None:
    """Raise LeafError if a verb is called with None, which is a tree without leaves, for a tree."""
    if tree is None:
        raise LeafError(f"{verb}: {root} is None", fix="pass a tree of tensors or shards")


def homes_of(verb: str, groups: Any, like: Tree) -> list[Any]:
    """The groups (or hierarchy) of each leaf of a tree of shards; raises if any are closed."""
    require_tree(verb, like, groups, "tree")
    return spread_homes(groups, like)


def spread_homes(groups: Any, like: Tree) -> list[Any]:
    """`homes_of` for a tree and groups that `require_tree` has seen."""
    found = tree.spread(
        groups,
        like,
        what="groups",
        is_leaf=is_leaf,
        is_value=lambda value: isinstance(value, Home),
    )
    # A transform that was given groups holds those from before a `reset`.
    now = {home: current(home) for home in dict.fromkeys(found)}
    for home in now.values():
        home.partition.check_open()
    return [now[home] for home in found]


_OWN_GROUPS = "pass the groups that the tree was sharded with"


@dataclass(frozen=True, eq=False)
class BucketUse:
    """The leaves of one bucket in a tree, and the groups that they live on."""

    bucket: Bucket
    home: Home
    index: tuple[int | None, ...]  # for each slot the number of the leaf in the tree, or None
    verb: str = ""  # for which it moves
    away: bool = False  # whether a piece lies elsewhere; see [Note: elsewhere] in `pack`

    @property
    def hierarchy(self) -> Hierarchy:
        return self.home.hierarchy

    @property
    def route(self) -> Route:
        return self.home.hierarchy.route

    @property
    def replicas(self) -> Comm:
        """The communicator of hop 2.

        Raises:
          GroupsError: a hierarchy is given, which does not know other replicas.
        """
        require_replicas("hop 2", [self.home])
        return self.home.replicas

    @property
    def crosses_ranks(self) -> bool:
        """Whether a gather or its adjoint does more than take views of this rank's chunk."""
        return self.bucket.parts > 1 or self.route.grad_factor != 1.0

    @property
    def alone(self) -> bool:
        """Whether there are no other ranks, so that this rank's gradient is the mean already."""
        return self.route.size == 1 and self.home.replicas.size == 1

    @property
    def uncoded(self) -> "BucketUse":
        """The same leaves, which travel as values: codes have no derivative."""
        bucket = self.bucket.uncoded
        return self if bucket is self.bucket else replace(self, bucket=bucket)

    @property
    def gather_wire(self) -> Wire | None:
        """What a gather sends in the place of values; None if there is no level that codes."""
        wire = self.bucket.gather_wire
        coded = wire is not None and (self.bucket.codes is not None or wire.levels(self.route))
        return wire if coded else None

    @property
    def members(self) -> list[int]:
        """The numbers of the bucket's leaves in the tree, in the order of slots."""
        return [i for i in self.index if i is not None]

    @property
    def missing(self) -> tuple[int, ...]:
        """Slots of leaves that are missing in the tree."""
        if None not in self.index:
            return ()
        return tuple(slot for slot, i in enumerate(self.index) if i is None)

    def by_slot(self, values: Sequence[Any]) -> list[Any]:
        """One value per slot from one value per member; None if the tree lacks the leaf."""
        given = iter(values)
        return [None if i is None else next(given) for i in self.index]

    def by_member(self, values: Sequence[Any]) -> list[Any]:
        """One value per member from one value per slot."""
        return [value for value, i in zip(values, self.index, strict=True) if i is not None]


@dataclass(frozen=True, eq=False)
class Opened:
    """A tree of shards as its leaves, their groups and the buckets in which they travel."""

    verb: str  # which opened it
    given: Tree
    root: str  # the beginning of its paths in errors
    leaves: list[Leaf]
    spec: Any
    homes: Sequence[Home]
    uses: list[BucketUse]  # in the order of bucket numbers, as in schedules

    @cached_property
    def owner(self) -> list[int]:
        """For each leaf the index of the leaf that holds its data: its own, unless it is `Tied`."""
        return owner_index(self.leaves)

    @property
    def data(self) -> list[Any]:
        """The data of each leaf; None if it is tied."""
        return [None if isinstance(leaf, Tied) else leaf.data for leaf in self.leaves]

    @property
    def pieces(self) -> list[Tensor]:
        """The piece of each trained leaf."""
        return [leaf.data for leaf in self.leaves if isinstance(leaf, Sharded)]

    @property
    def trained(self) -> list[BucketUse]:
        """The buckets that get gradients."""
        return [use for use in self.uses if use.bucket.trainable]

    def names(self, index: int) -> list[str]:
        """The paths of the leaves of `uses[index]`."""
        paths = tree.spec_paths(self.spec)
        return [paths[i] for i in self.uses[index].members]

    def path(self, index: int) -> str:
        """The path of a leaf, for errors."""
        return tree.paths(self.given, self.root, is_leaf)[index]

    def build(self, full: Sequence[Any]) -> Tree:
        """The tree with one value per leaf; tied leaves get that of their owner."""
        return self.spec.unflatten([full[i] for i in self.owner])

    def held(self, index: int) -> list[Tensor]:
        """The pieces of a bucket, by index in `uses`."""
        found: Any = [self.leaves[i] for i in self.uses[index].members]
        return [leaf.data for leaf in found]

    def rebuild(self, pieces: Mapping[int, Sequence[Tensor]]) -> Tree:
        """The tree with new pieces for some buckets, by index in `uses`; other leaves stay."""
        out: list[Any] = list(self.leaves)
        for index, values in pieces.items():
            use = self.uses[index]
            for i, piece in zip(use.members, values, strict=True):
                out[i] = Sharded(piece, use.bucket, getattr(self.leaves[i], "slot", 0))
        if pieces:
            mark_reduced(out, self.homes[0])
        return self.spec.unflatten(out)

    def agree(self, schedule: str = "") -> "Opened":
        """Compare between ranks what they are about to gather, once for each new set of leaves.

        Args:
          schedule: the text of the schedule, for a deferred gather.

        Communication: a digest of 32 bytes, in each group of ranks to which the tree is new.

        Raises:
          DesyncError: ranks have different trees or schedules.
        """
        for home in dict.fromkeys(use.hierarchy for use in self.uses):
            mine = [use for use in self.uses if use.hierarchy is home]
            key = (schedule, home.route.facts, *((use.bucket, use.missing) for use in mine))
            if key in home.agreed:
                continue
            facts = [("schedule", schedule or "none: all at once"), ("levels", home.route.facts)]
            fixes = {"schedule": "pass the same live_bytes=, prefetch= or schedule on every rank"}
            facts += [fact for use in mine for fact in _facts(use)]
            agree(home, self.verb, facts, fixes)
            home.agreed.add(key)
        return self

    def require_replicas(self) -> "Opened":
        """Raise unless hop 2 over these groups reaches all replicas.

        Raises:
          PlanError: they are the groups for steps that each replica takes alone.
          GroupsError: they are hierarchies.
        """
        if any(home.apart for home in dict.fromkeys(self.homes)):
            text = f"{self.verb}: these are the groups of the steps, in which no other replica is"
            raise PlanError(text, fix=_OWN_GROUPS)
        require_replicas(self.verb, self.homes)
        return self


def open_shards(verb: str, shards: Tree, groups: Any, *, root: str = "shards") -> Opened:
    """Open a tree of shards for a verb.

    Args:
      verb: its name, for errors.
      shards: the tree.
      groups: `Groups` or a `Hierarchy`, a prefix pytree of these, or a function from path to one.
      root: the beginning of paths in errors.

    Raises:
      LeafError: a leaf is not a shard.
      PlanError: the groups are not those that the tree was sharded with.
      GroupsError: there are no groups, or they were closed.
    """
    require_tree(verb, shards, groups, root)
    leaves, spec = tree.flatten(shards, is_leaf)
    homes = spread_homes(groups, shards)
    check_leaves(verb, shards, leaves, root)
    uses = grouped(leaves, homes, verb)
    for use in uses:
        _check_home(verb, use, homes, leaves)
    return Opened(verb, shards, root, leaves, spec, homes, uses)


def values_up_to(spec: Any, shards: Tree, given: Tree, what: str) -> list[Any]:
    """The values of another tree in the order of the leaves of shards, whose structure is `spec`.

    Args:
      what: the verb and the name of the other tree, for errors.

    Raises:
      LeafError: its structure differs; optree would print all of its tensors.
    """
    try:
        return spec.flatten_up_to(given)
    except ValueError:
        root = what.rpartition(" ")[2]
        where = tree.first_mismatch(shards, given, root, is_leaf) or "structure"
        text, fix = f"{what} is another tree", "pass one of the structure of the shards"
        raise LeafError(text, [f"first difference: {where}"], fix) from None


def grouped(leaves: Sequence[Leaf], homes: Sequence[Any], verb: str = "") -> list[BucketUse]:
    """Leaves by bucket, in the order of bucket numbers.

    A tree that contains two trees of the same layout gives two uses of each bucket.
    """
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
            home = homes[next(iter(slots.values()))]
            away = any_elsewhere([leaves[i] for i in slots.values()], home)
            uses.append(BucketUse(bucket, home, index, verb, away))
    return sorted(uses, key=lambda use: use.bucket.index)


def _check_home(verb: str, use: BucketUse, homes: Sequence[Home], leaves: Sequence[Any]) -> None:
    if any(homes[i] is not use.home for i in use.members):
        text = f"{verb}: leaves of bucket {use.bucket.index} are given different groups"
        raise PlanError(text, fix=_OWN_GROUPS)
    if use.route.size != use.bucket.parts:
        sizes = f"{use.bucket.parts}, the groups have {use.route.size} ranks"
        raise PlanError(f"{verb}: shards are cut in {sizes}", fix=_OWN_GROUPS)
    if use.bucket.codes is not None:
        check_kept(verb, use.bucket, [None if i is None else leaves[i].data for i in use.index])


def _facts(use: BucketUse) -> list[tuple[str, str]]:
    """The whole layout of a bucket, so that trees with different layouts never compare as equal."""
    layout = f"{use.bucket.numel} {use.bucket.formats} of {use.bucket.shapes}"
    title = (f"bucket {use.bucket.index}", str(use.bucket))
    shapes = [
        (f"bucket {use.bucket.index}[{slot}]", str(shape))
        for slot, shape in enumerate(use.bucket.shapes)
        if use.index[slot] is not None
    ]
    return [(f"bucket {use.bucket.index}", layout), *shapes, title]


def check_equal(opened: Opened) -> None:
    """Raise DesyncError on every rank unless replicas hold the same bits.

    Nothing later would make them equal, since every step adds the same update to each.

    Communication: 8 bytes per leaf, over the partition group and over the replication group.
    """
    leaves, homes = opened.leaves, opened.homes
    for home in dict.fromkeys(homes):
        pieces = {
            i: leaf.data
            for i, leaf in enumerate(leaves)
            if homes[i] is home and isinstance(leaf, Sharded)
        }
        mine = list(pieces)
        if home.num_replicas == 1 or not mine or pieces[mine[0]].is_meta:
            continue
        sums = torch.stack([checksum(piece) for piece in pieces.values()])
        fix = "start with what shard gave, or with sync_replicas(params, groups)"
        refuse_unequal(opened.verb, home, [opened.path(i) for i in mine], sums, fix)


def refuse_unequal(verb: str, home: Home, paths: Sequence[str], sums: Tensor, fix: str) -> None:
    """Raise DesyncError on every rank unless replicas have the same checksums of pieces.

    Communication: 8 bytes per piece, over the partition group and over the replication group.
    """
    found, p = collect_all(home, sums), home.partition_size
    differs = {
        rank: (found[rank] != found[home.ranks[position % p]]).nonzero().flatten().tolist()
        for position, rank in enumerate(home.ranks)
    }
    odd = [rank for rank, at in differs.items() if at]
    if odd:
        first = f"first difference: {paths[min(differs[odd[0]])]}"
        text = f"{verb}: replicas hold different values"
        said = dict.fromkeys(odd, "not as in the first replica")
        raise disagreement(text, said, fix, [first])

"""A tree of shards, opened for a verb: its leaves by bucket, with their groups, checked."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import attrgetter
from typing import Any

from torch import Tensor

from mics_fn import _torch, checks, tree
from mics_fn.collectives import Wire, agree, checksum, refuse_unequal
from mics_fn.errors import GroupsError, LeafError, PlanError
from mics_fn.groups import Hierarchy, Home, Route, current, require_replicas
from mics_fn.shards.bucket import Bucket
from mics_fn.shards.leaf import Leaf, Sharded, Tied, is_leaf, mark_reduced, owner_index, places_of
from mics_fn.shards.pack import any_to_fetch
from mics_fn.tree import Tree

# The groups of a tree: the same for all leaves, a function from the path of a leaf, or a tree.
GroupsTree = Home | Callable[[str], Any] | dict[Any, Any] | list[Any] | tuple[Any, ...]
_OWN_GROUPS = "pass the groups that the tree was sharded with"


def check_leaves(verb: str, shards: Tree, leaves: Sequence[Any], root: str) -> None:
    """Raise LeafError unless there is a tree, all leaves of which are shards."""
    if shards is None:
        raise _no_tree(verb, root)
    for i, leaf in enumerate(leaves):
        if not is_leaf(leaf):
            path = tree.paths(shards, root, is_leaf)[i]
            fix = "make shards with shard(params, groups)"
            if hasattr(shards, "params") and hasattr(shards, "opt"):
                fix = "of a TrainState pass its params"
            raise LeafError(f"{verb}: {path} is {type(leaf).__name__}, not a shard", fix=fix)


def _no_tree(verb: str, root: str) -> LeafError:
    return LeafError(f"{verb}: {root} is None", fix="pass a tree of tensors or shards")


def require_groups(verb: str, groups: Any) -> None:
    """Raise GroupsError if a verb is called without groups, or with their class."""
    if groups is None or isinstance(groups, type):
        what = "groups is None" if groups is None else checks.given("groups", groups)
        fix = "make groups first: groups = mics_fn.make_groups(partition_size)"
        raise GroupsError(f"{verb}: {what}", fix=fix)


_MODEL = attrgetter("model")


def homes_of(
    verb: str, groups: Any, like: Tree, root: str = "tree", kind: Any = Home, *, count: int = -1
) -> list[Any]:
    """The groups of each leaf of a tree, which are open; of tensors those that were given.

    Args:
      verb: its name, for errors.
      groups: as of a verb.
      like: the tree.
      root: the name of the argument that is the tree.
      kind: what groups have to be.
      count: how many leaves the tree has, if that is known.

    Raises:
      GroupsError: there are no groups, or they are closed.
      LeafError: there is no tree, or groups are not a prefix of it.
      LeafError: it is called inside `torch.func.functionalize`, whose tensors cannot be sent.
    """
    if _torch.inside_functionalize():
        text = f"{verb}: it is called inside torch.func.functionalize, whose tensors have no memory"
        raise LeafError(text, fix=f"{verb} outside, and functionalize what works on full tensors")
    if like is None:
        require_groups(verb, groups)
        raise _no_tree(verb, root)
    if isinstance(groups, kind):
        found = [groups] * (len(tree.flatten(like, is_leaf)[0]) if count < 0 else count)
    else:
        require_groups(verb, groups)
        how: Any = {"is_leaf": is_leaf, "is_value": lambda value: isinstance(value, kind)}
        found = tree.spread(groups, like, what="groups", **how)
    each = dict.fromkeys(found)
    now = dict(zip(each, map(current, each), strict=True))  # those before a `reset` may be given
    for home in now.values():
        home.partition.check_open()
    found = list(map(now.__getitem__, found))
    if any(map(_MODEL, now.values())):
        leaves = tree.flatten(like, is_leaf)[0]
        cut = (getattr(x.bucket, "cut", ()) if is_leaf(x) else True for x in leaves)
        found = [home if own else home.copies for home, own in zip(found, cut, strict=True)]
    return found


@dataclass(frozen=True, eq=False)
class BucketUse:
    """The leaves of one bucket in a tree, and the groups that they live on."""

    bucket: Bucket
    home: Home
    index: tuple[int | None, ...]  # for each slot the number of the leaf in the tree, or None
    verb: str = ""  # for which it moves
    placed: bool = False  # whether a piece lies elsewhere; see [Note: elsewhere] in `pack`

    @cached_property
    def hierarchy(self) -> Hierarchy:
        return self.home.hierarchy

    @cached_property
    def route(self) -> Route:
        return self.home.hierarchy.route

    @cached_property
    def crosses_ranks(self) -> bool:
        """Whether a gather or its adjoint does more than take views of this rank's chunk."""
        return self.bucket.parts > 1 or self.route.grad_factor != 1.0

    @cached_property
    def alone(self) -> bool:
        """Whether there are no other ranks, so that this rank's gradient is the mean already."""
        return self.route.size == 1 and self.home.replicas.size == 1

    @property
    def uncoded(self) -> "BucketUse":
        """The same leaves, which travel as values: codes have no derivative."""
        bucket = self.bucket.uncoded
        return self if bucket is self.bucket else replace(self, bucket=bucket)

    @cached_property
    def gather_wire(self) -> Wire | None:
        """What a gather sends in the place of values; None if there is no level that codes."""
        wire = self.bucket.gather_wire
        coded = wire is not None and (self.bucket.codes is not None or wire.levels(self.route))
        return wire if coded else None

    @cached_property
    def members(self) -> list[int]:
        """The numbers of the bucket's leaves in the tree, in the order of slots."""
        return [i for i in self.index if i is not None]

    @cached_property
    def missing(self) -> tuple[int, ...]:
        """Slots of leaves that are missing in the tree."""
        return tuple(slot for slot, i in enumerate(self.index) if i is None)

    def named(self, verb: str) -> str:
        """The verb as ranks compare it: with the leaves that the tree lacks, if it lacks some.

        What is sent holds zeros for them, and a rank whose tree has them would take these.
        """
        return f"{verb} without leaves {self.missing}" if self.missing else verb

    def by_slot(self, values: Sequence[Any]) -> list[Any]:
        """One value per slot from one value per member; None if the tree lacks the leaf."""
        if not self.missing:
            return list(values)
        given = iter(values)
        return [None if i is None else next(given) for i in self.index]

    def by_member(self, values: Sequence[Any]) -> list[Any]:
        """One value per member from one value per slot."""
        if not self.missing:
            return list(values)
        return [value for value, i in zip(values, self.index, strict=True) if i is not None]


@dataclass(frozen=True, eq=False)
class TreeLayout:
    """How trees of one structure lie in buckets on their groups; `layout_on` computes it once."""

    verb: str  # that moves them
    places: tuple[Any, ...]  # of each leaf; see `places_of`
    homes: tuple[Any, ...]
    agreed: set[str] = field(default_factory=set)  # schedules that ranks have compared with it

    @cached_property
    def owner(self) -> list[int]:
        """For each leaf the index of the leaf that holds its data: its own, unless it is `Tied`."""
        return owner_index(self.places)

    @cached_property
    def uses(self) -> list[BucketUse]:
        """Leaves by bucket, in the order of bucket numbers, as in schedules.

        A tree that contains two trees of the same layout gives two uses of each bucket.
        """
        found: dict[Bucket, list[dict[int, int]]] = {}
        for i, (kind, (bucket, slot)) in enumerate(self.places):
            if kind is Tied or bucket is None:
                continue
            every = found.setdefault(bucket, [])
            free = next((slots for slots in every if slot not in slots), None)
            if free is None:
                every.append(free := {})
            free[slot] = i
        uses = []
        for bucket, every in found.items():
            for slots in every:
                index = tuple(slots.get(slot) for slot in range(len(bucket.shapes)))
                uses.append(BucketUse(bucket, self.homes[min(slots.values())], index, self.verb))
        return sorted(uses, key=lambda use: use.bucket.index)

    def uses_of(self, leaves: Sequence[Any]) -> list[BucketUse]:
        """`uses`, which say of these leaves whether they lie elsewhere."""
        found = []
        for use in self.uses:
            placed = any_to_fetch([leaves[i] for i in use.members], use.home)
            found.append(replace(use, placed=True) if placed else use)
        return found


@dataclass(frozen=True, eq=False)
class Opened:
    """A tree of shards as its leaves, their groups and the buckets in which they travel."""

    verb: str  # which opened it
    given: Tree
    root: str  # the beginning of its paths in errors
    leaves: list[Leaf]
    spec: Any
    layout: TreeLayout
    uses: list[BucketUse]  # in the order of bucket numbers, as in schedules

    @property
    def homes(self) -> Sequence[Home]:
        """The groups of each leaf."""
        return self.layout.homes

    @cached_property
    def data(self) -> list[Any]:
        """The data of each leaf; None if it is tied."""
        return list(map(_DATA, self.leaves))

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
        return self.spec.unflatten(map(full.__getitem__, self.layout.owner))

    def rebuild(self, pieces: Mapping[int, Sequence[Tensor]]) -> Tree:
        """The tree with new pieces for some buckets, by index in `uses`; other leaves stay."""
        out: list[Any] = list(self.leaves)
        for index, values in pieces.items():
            use = self.uses[index]
            for i, piece in zip(use.members, values, strict=True):
                out[i] = Sharded(piece, use.bucket, self.leaves[i].slot)
        if pieces:
            mark_reduced(out, self.layout.homes[0])
        return self.spec.unflatten(out)

    def agree(self, schedule: str = "") -> "Opened":
        """Compare between ranks what they are about to gather, once for each new set of leaves.

        Args:
          schedule: the text of the schedule, for a deferred gather.

        Communication: a digest of 32 bytes, in each group of ranks to which the tree is new.

        Raises:
          DesyncError: ranks have different trees or schedules.
        """
        if schedule in self.layout.agreed:
            return self
        for home in dict.fromkeys(use.hierarchy for use in self.uses):
            mine = [use for use in self.uses if use.hierarchy is home]
            key = (schedule, home.route.facts, *((use.bucket, use.missing) for use in mine))
            if key in home.agreed:
                continue
            facts = [("schedule", schedule or "none: all at once"), ("levels", home.route.facts)]
            fixes = {"schedule": "pass the same live_bytes=, prefetch= or schedule on every rank"}
            for use in mine:  # all of a bucket, so that no two layouts compare as equal
                layout = f"{use.bucket.numel} {use.bucket.formats} of {use.bucket.shapes}"
                facts.append((use.named(f"{use.bucket}"), layout))
            agree(home, self.verb, facts, fixes)
            home.agreed.add(key)
        self.layout.agreed.add(schedule)
        return self

    def require_replicas(self) -> "Opened":
        """Raise unless hop 2 over these groups reaches all replicas.

        Raises:
          PlanError: they are the groups for steps that each replica takes alone.
          GroupsError: they are hierarchies.
        """
        if any(home.independent for home in dict.fromkeys(self.homes)):
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
    leaves, spec = tree.flatten(shards, is_leaf)
    homes = homes_of(verb, groups, shards, root, count=len(leaves))
    if not all(map(is_leaf, leaves)):
        check_leaves(verb, shards, leaves, root)
    layout = layout_on(verb, leaves, homes)
    uses = layout.uses
    if any_to_fetch(leaves, homes[0] if homes else None):
        uses = layout.uses_of(leaves)
    return Opened(verb, shards, root, leaves, spec, layout, uses)


_DATA = attrgetter("data")
_MOST_LAYOUTS = 64  # of trees that a process keeps at a time


def layout_on(verb: str, leaves: Sequence[Leaf], homes: Sequence[Home]) -> TreeLayout:
    """Find how leaves lie on their groups, which keep it for the next tree of the same structure.

    Raises:
      PlanError: the groups are not those that the leaves were sharded with.
    """
    found = TreeLayout(verb, places_of(leaves), tuple(homes))
    known = homes[0].state.layouts if homes else {}
    key = verb, found.places, found.homes
    if key not in known:
        for use in found.uses:
            _check_home(verb, use, homes)
        if len(known) == _MOST_LAYOUTS:
            known.clear()
        known[key] = found
    return known[key]


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


def grouped(leaves: Sequence[Leaf], homes: Sequence[Any]) -> list[BucketUse]:
    """Leaves by bucket, in the order of bucket numbers; see `TreeLayout.uses`."""
    return TreeLayout("", places_of(leaves), tuple(homes)).uses_of(leaves)


def _check_home(verb: str, use: BucketUse, homes: Sequence[Home]) -> None:
    if any(homes[i] is not use.home for i in use.members):
        text = f"{verb}: leaves of bucket {use.bucket.index} are given different groups"
        raise PlanError(text, fix=_OWN_GROUPS)
    if use.bucket.cut and use.home.model is None and not isinstance(use.home, Hierarchy):
        text = f"{verb}: bucket {use.bucket.index} has parts of leaves, the groups have whole ones"
        raise PlanError(text, fix=_OWN_GROUPS)
    if use.route.size != use.bucket.parts:
        sizes = f"{use.bucket.parts}, the groups have {use.route.size} ranks"
        raise PlanError(f"{verb}: shards are cut in {sizes}", fix=_OWN_GROUPS)


def compare_values(
    verb: str,
    homes: Sequence[Any],
    paths: Sequence[str],
    values: Sequence[Tensor | None],
    fix: str,
    *,
    whole: bool = False,
) -> None:
    """Raise DesyncError on every rank unless ranks hold the same bits.

    Nothing later would make replicas equal, since every step adds the same update to each.

    Args:
      verb: named in the error.
      homes: the groups of each leaf.
      paths: the path of each leaf.
      values: the tensor of each leaf; None for what is not compared.
      fix: of the error.
      whole: whether all ranks hold the same, and not only those with the same chunk.

    Communication: 8 bytes per leaf, over the partition group and over the replication group.
    """
    for home in dict.fromkeys(homes):
        if (home.world_size if whole else home.num_replicas) > 1:
            mine = {
                path: checksum(x).to(home.device)
                for path, on, x in zip(paths, homes, values, strict=True)
                if on is home and x is not None and not x.is_meta
            }
            refuse_unequal(verb, home, mine, fix, whole=whole)


def check_equal(opened: Opened) -> None:
    """`compare_values` of the pieces of a tree."""
    pieces = [leaf.data if isinstance(leaf, Sharded) else None for leaf in opened.leaves]
    paths = tree.paths(opened.given, opened.root, is_leaf)
    fix = "start with what shard gave, or with sync_replicas(params, groups)"
    compare_values(opened.verb, opened.homes, paths, pieces, fix)

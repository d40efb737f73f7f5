"""What verbs are given: a tree of shards, and groups for each of its leaves."""

from collections.abc import Callable, Sequence
from typing import Any

from mics_fn import _torch, checks, tree
from mics_fn.errors import GroupsError, LeafError, TreeError, message
from mics_fn.groups import Home, current
from mics_fn.shards.leaf import is_leaf
from mics_fn.tree import Tree

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
            raise LeafError(
                message(f"{verb}: {path} is {type(leaf).__name__}, not a shard", fix=fix)
            )


def require_groups(verb: str, groups: Any) -> None:
    """Raise GroupsError if a verb is called without groups, or with their class."""
    if groups is None or isinstance(groups, type):
        what = "groups is None" if groups is None else checks.given("groups", groups)
        fix = "make groups first: groups = mics_fn.make_groups(partition_size)"
        raise GroupsError(message(f"{verb}: {what}", fix=fix))


def require_tree(verb: str, tree: Tree, groups: Any, root: str) -> None:
    """Raise unless a verb is called with a tree and with groups, in this order.

    Args:
      verb: its name, for errors.
      tree: what should be a tree.
      groups: what should be groups.
      root: the name of the argument that is the tree.

    Raises:
      GroupsError: there are no groups, or they come first.
      TreeError: there is no tree.
      LeafError: it is called inside `torch.func.functionalize`, whose tensors cannot be sent.
    """
    require_groups(verb, groups)
    if _torch.inside_functionalize():
        text = f"{verb}: it is called inside torch.func.functionalize, whose tensors have no memory"
        fix = f"{verb} outside, and functionalize what works on full tensors"
        raise LeafError(message(text, fix=fix))
    if isinstance(tree, Home):
        fix = "pass the tree first, and then the groups"
        raise GroupsError(message(f"{verb}: {checks.given(root, tree)}", fix=fix))
    refuse_none(verb, tree, root)


def refuse_none(verb: str, tree: Tree, root: str) -> None:
    """Raise TreeError if a verb is called with None, which is a tree without leaves, for a tree."""
    if tree is None:
        raise TreeError(message(f"{verb}: {root} is None", fix="pass a tree of tensors or shards"))


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

"""Which leaf of a sharded value a path means, and whether all ranks mean the same.

Calls are compared between ranks every time, even if the same call was made before: ranks differ
most easily where a person types at a prompt.
"""

import difflib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from mics_fn import _torch, tree
from mics_fn.collectives import same_call
from mics_fn.errors import LeafError, TreeError, message
from mics_fn.groups import Groups, Hierarchy
from mics_fn.optim import TrainState, by_leaf
from mics_fn.shards import Fixed, Nothing, Tied, homes_of, is_leaf, owner_index
from mics_fn.tree import Tree

Looked = TypeVar("Looked", bound=tuple)

_ROOTS = ("params", "grads", "shards", "opt", "buffers")  # as errors write them


class Leaves(NamedTuple):
    """The leaves of a tree of shards or of a `TrainState`, each with its path."""

    verb: str
    all: list[Any]
    spec: Any
    paths: list[str | None]  # None for a leaf that only repeats another one
    homes: list[Any]  # `Groups` or `Hierarchy` of each leaf; None if no groups were given
    groups: list[Any]  # the distinct ones among them
    is_state: bool

    @property
    def shards(self) -> list[int]:
        """The indices of the leaves that belong to a tree of shards."""
        return [i for i, leaf in enumerate(self.all) if is_leaf(leaf)]

    def in_optimizer(self, at: int) -> bool:
        """Whether a leaf belongs to the optimizer's part of a `TrainState`."""
        return self.is_state and _in_optimizer(self.paths[at] or "")

    def find(self, path: str) -> int:
        """The index of the leaf that a path means; for a tied leaf that of its owner.

        Raises:
          TreeError: the path means no leaf, or several.
        """
        if not isinstance(path, str):
            raise TreeError(f"{self.verb}: the path is {type(path).__name__}, expected str")
        wanted = self._readings(path)
        hits = [i for i, own in enumerate(self.paths) if own in wanted]
        if len(hits) == 1:
            return self._owner(hits[0])
        if hits:
            root = "state" if self.is_state else "params"
            full = [tree.join(root, self.paths[i] or "") for i in hits]
            lines, fix = [f"it may be {' or '.join(full)}"], "write it in full"
            raise TreeError(message(f"{self.verb}: {path!r} names several leaves", lines, fix))
        near = self._near(path)
        lines = [f"nearest: {', '.join(near)}"] if near else []
        fix = "print(summary(...)) shows all paths"
        raise TreeError(message(f"{self.verb}: no leaf {path!r} here", lines, fix))

    def _owner(self, at: int) -> int:
        if not isinstance(self.all[at], Tied):
            return at
        places = self.shards
        return places[owner_index([self.all[i] for i in places])[places.index(at)]]

    def _readings(self, text: str) -> set[str]:
        """The paths that a text may mean: with a root, or without."""
        root, _, bare = text.partition(".")
        if not self.is_state:
            return {text, bare} if root in _ROOTS else {text}
        return {bare} if root == "state" else {text, tree.join("params", text), f"buffers.{text}"}

    def _near(self, text: str) -> list[str]:
        """Paths below it if it is a branch of the tree; otherwise paths of similar spelling."""
        named = {own: own for own in self.paths if own is not None}
        below = [own for own in named if own.startswith(f"{text}.")]
        if below:
            return below[:3]
        if self.is_state:
            named = {name.partition(".")[2]: own for name, own in reversed(named.items())} | named
        close = difflib.get_close_matches(text, named, n=3, cutoff=0.5)
        return list(dict.fromkeys(named[name] for name in close))

    def agreed(self, look: Callable[[], Looked]) -> Looked:
        """The result of `look`, after every rank got the same text from it.

        Args:
          look: gives a tuple whose first item says in words what this rank is about to do.

        Communication: as `same_call`.

        Raises:
          DesyncError: the ranks are about to do different things, or `look` raised on another rank.
        """
        try:
            found = look()
        except Exception as error:  # of any type, so that the other ranks do not wait for this one
            same_call(self.verb, self.groups, "", error)
            raise
        same_call(self.verb, self.groups, found[0])
        return found


def leaves_of(verb: str, shards: Tree, groups: Any, *, local: bool = False) -> Leaves:
    """The leaves of a tree of shards or a `TrainState`, with paths and groups.

    Args:
      verb: the caller's name, for errors.
      shards: the tree, or the state.
      groups: as for `gather`; for a state those of its parameters; None only with `local`.
      local: the caller does not communicate.

    Raises:
      LeafError: the call is inside torch.func.
      TreeError, GroupsError: as `gather`, if `groups` does not fit.
    """
    if _torch.inside_torch_func() and not local:
        fix = "call it outside; gather is what has a derivative"
        raise LeafError(message(f"{verb}: cannot be used inside torch.func", fix=fix))
    shown = by_leaf(shards)
    values, spec = tree.flatten(shown, is_leaf)
    paths: list[str | None] = [*tree.paths(shown, "", is_leaf)]
    is_state = isinstance(shards, TrainState)
    named = shards.params if is_state else shown
    given: list[Any] = []
    if groups is not None or not local:
        given = homes_of(verb, groups, named)
    homes = given or [None] * len(values)
    distinct = list(dict.fromkeys(given))
    if isinstance(groups, Groups | Hierarchy):
        distinct = [groups]  # even if there is no leaf
    if is_state:
        homes = _homes_of_state(values, tree.flatten(named, is_leaf)[0], given)
        # An optimizer's trees may repeat the frozen leaves of the parameters.
        for i, leaf in enumerate(values):
            if isinstance(leaf, Fixed | Nothing) and _in_optimizer(paths[i] or ""):
                paths[i] = None
    return Leaves(verb, values, spec, paths, homes, distinct, is_state)


def _in_optimizer(path: str) -> bool:
    return path.partition(".")[0] == "opt"


def _homes_of_state(values: Sequence[Any], params: Sequence[Any], given: Sequence[Any]) -> list:
    """The groups of each leaf of a state, which are those of the parameters in its bucket."""
    homes: dict[Any, Any] = {}
    for leaf, home in zip(params, given, strict=False):
        if is_leaf(leaf) and leaf.bucket is not None:
            homes[leaf.bucket] = homes[leaf.bucket.index] = home
    found = []
    for value in values:
        bucket = value.bucket if is_leaf(value) else None
        # By its number, if the optimizer's copy of a bucket has another dtype.
        near = homes.get(bucket.index) if bucket is not None else None
        found.append(homes.get(bucket, near or next(iter(given), None)))
    return found

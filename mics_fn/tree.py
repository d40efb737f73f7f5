"""Pytrees: nodes that are registered with optree and with torch, paths of leaves, and prefixes.

`torch.func` walks values with torch's own pytree; everything else here uses optree, in a namespace
of this library. The two differ: optree sorts dict keys, while torch keeps the order of insertion;
None is a leaf for torch, but not for optree. So each node is registered with both in one place,
from its dataclass fields, and only optree decides an order.
"""

import dataclasses
import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any, TypeVar

import optree

from mics_fn import _torch
from mics_fn.errors import LeafError

NAMESPACE = "mics_fn"

Tree = Any  # a pytree of anything
IsLeaf = Callable[[Any], bool]
T = TypeVar("T", bound=type)


def static() -> Any:
    """A dataclass field that belongs to a node's structure and is not one of its children."""
    return dataclasses.field(metadata={"static": True})


def node(cls: T) -> T:
    """Make a dataclass a pytree node for optree and for torch, and thus for `torch.func`.

    Fields made with `static()` belong to the structure and must be hashable; the others are
    children. If the class has a method `refuse_children`, it is called on each instance that torch
    rebuilds.

    Args:
      cls: a dataclass; its instances are rebuilt without calling `__init__`.

    Returns:
      The same class.

    Raises:
      TypeError: it is not a dataclass.

    Example:
      >>> @node
      ... @dataclasses.dataclass(frozen=True)
      ... class Pair:
      ...     left: int
      ...     name: str = static()
      >>> leaves, spec = flatten({"pair": Pair(3, "a")})
      >>> leaves, spec.unflatten([4])
      ([3], {'pair': Pair(left=4, name='a')})
    """
    fields = dataclasses.fields(cls)
    children = tuple(f.name for f in fields if not f.metadata.get("static"))
    statics = tuple(f.name for f in fields if f.metadata.get("static"))

    fields_of = (*children, *statics, "_context")
    put = object.__setattr__  # what a frozen dataclass itself uses
    cls._context = None  # pyright: ignore[reportAttributeAccessIssue]

    def flatten_node(value: Any) -> tuple[list, tuple, tuple]:
        context = value._context
        if context is None:  # kept, because every verb flattens its values
            context = tuple([getattr(value, name) for name in statics])
            put(value, "_context", context)
        return [getattr(value, name) for name in children], context, children

    def unflatten_node(values: Iterable[Any], context: tuple) -> Any:
        value = object.__new__(cls)
        for name, item in zip(fields_of, (*values, *context, context), strict=True):
            put(value, name, item)
        return value

    refuse = getattr(cls, "refuse_children", None)

    def unflatten_for_torch(values: Iterable[Any], context: tuple) -> Any:
        value = unflatten_node(values, context)
        refuse(value)  # pyright: ignore[reportOptionalCall]
        return value

    return _register(cls, flatten_node, unflatten_node, refuse and unflatten_for_torch)


def atom(cls: T) -> T:
    """Make a class a pytree node without children, which is compared by its own `==`.

    It is part of the structure: maps skip it and `torch.func` does not differentiate it, but
    `flatten(..., is_leaf=...)` can still see it.
    """
    return _register(cls, lambda value: ([], value, ()), lambda _, value: value)


def _register(
    cls: T, flatten_node: Callable, unflatten_node: Callable, for_torch: Callable | None = None
) -> T:
    """Register a node; `flatten_node` gives its children, its context and the children's names."""
    optree.register_pytree_node(
        cls,
        flatten_node,
        lambda context, values: unflatten_node(values, context),
        path_entry_type=optree.GetAttrEntry,
        namespace=NAMESPACE,
    )
    rebuild = for_torch or unflatten_node
    _torch.register_node(
        cls,
        lambda value: flatten_node(value)[:2],
        lambda values, context: rebuild(list(values), context),
        serialized_type_name=f"{cls.__module__}.{cls.__qualname__}",
    )
    return cls


def flatten(tree: Tree, is_leaf: IsLeaf | None = None) -> tuple[list, optree.PyTreeSpec]:
    """The leaves (dict keys sorted, None left out) and the structure that rebuilds the tree."""
    return optree.tree_flatten(tree, is_leaf, namespace=NAMESPACE)  # pyright: ignore


def map_leaves(fn: Callable, tree: Tree, *rest: Tree, is_leaf: IsLeaf | None = None) -> Tree:
    """Apply `fn` to the corresponding leaves of all trees; `rest` may be deeper than `tree`."""
    return optree.tree_map(fn, tree, *rest, is_leaf=is_leaf, namespace=NAMESPACE)


def replace_none(tree: Tree, value: Any, is_leaf: IsLeaf | None = None) -> Tree:
    """The tree with `value` in every place where it has None."""
    leaves, spec = optree.tree_flatten(tree, is_leaf, none_is_leaf=True, namespace=NAMESPACE)
    return spec.unflatten(value if x is None else x for x in leaves)


def paths(tree: Tree, root: str = "", is_leaf: IsLeaf | None = None) -> list[str]:
    """The path of each leaf as torch names parameters: keys, indexes and fields, joined by dots.

    >>> paths({"b": [1, 2], "a": 3}, "params")
    ['params.a', 'params.b.0', 'params.b.1']
    """
    return [join(root, path) for path in spec_paths(flatten(tree, is_leaf)[1])]


def join(root: str, path: str) -> str:
    """A path that begins with a root; a tree that is one leaf has no other path than its root.

    >>> join("params", "0.bias"), join("params", ""), join("", "0.bias")
    ('params.0.bias', 'params', '0.bias')
    """
    return f"{root}.{path}" if root and path else root or path


@lru_cache(maxsize=256)
def spec_paths(spec: optree.PyTreeSpec) -> tuple[str, ...]:
    """The paths of a structure's leaves, as `paths` gives them for a tree."""
    # A namedtuple has indexes as its entries, and fields beside them.
    return tuple(
        ".".join(str(getattr(entry, "field", entry.entry)) for entry in place)
        for place in spec.accessors()
    )


def refuse_equal_paths(verb: str, tree: Tree, root: str, is_leaf: IsLeaf | None = None) -> None:
    """Raise LeafError if two leaves have the same path, as those of `{"a.b": x, "a": {"b": y}}`."""
    found = paths(tree, root, is_leaf)
    if len(set(found)) == len(found):
        return
    first = next(path for i, path in enumerate(found) if path in found[:i])
    places = optree.tree_accessors(tree, is_leaf, namespace=NAMESPACE)
    same = [place.codify(root) for place, path in zip(places, found, strict=True) if path == first]
    fix = "rename keys, so that no two leaves have the same keys and indexes joined by dots"
    raise LeafError(f"{verb}: {len(same)} leaves have the path {first}", [" and ".join(same)], fix)


def spread(
    prefix: Any,
    tree: Tree,
    *,
    what: str,
    is_leaf: IsLeaf | None = None,
    is_value: Callable[[Any], bool],
) -> list:
    """One value per leaf of `tree`, from a value, a function of the path, or a prefix pytree.

    Args:
      prefix: what to spread. A function gets the path of each leaf, such as `0.bias`.
      tree: the pytree whose leaves get one value each.
      what: the name of the argument, for errors.
      is_leaf: what counts as a leaf of `tree`.
      is_value: whether an object is a value to be spread.

    Returns:
      A list, one value per leaf.

    Raises:
      LeafError: `prefix` is not a prefix of `tree`, or holds something that is not a value.
    """
    leaves, _ = flatten(tree, is_leaf)
    if is_value(prefix):
        return [prefix] * len(leaves)
    if callable(prefix):
        values = [prefix(path) for path in paths(tree, is_leaf=is_leaf)]
    else:
        try:
            full = optree.tree_broadcast_prefix(prefix, tree, is_leaf, namespace=NAMESPACE)
        except ValueError as error:
            text, lines = f"{what}: not a prefix of the tree it goes with", str(error).splitlines()
            fix = "give one value, a function of the path, or a tree that stops early"
            raise LeafError(text, lines[:1], fix) from None
        values, _ = flatten(full, is_value)
    for path, value in zip(paths(tree, what, is_leaf), values, strict=True):
        if not is_value(value):
            fix = f"pass {what} for all leaves, a function from the path of a leaf, or a tree"
            raise LeafError(f"{path}: got {type(value).__name__}, which is no {what}", fix=fix)
    return values


def natural(path: str) -> tuple:
    """A sort key that compares the numbers in paths as numbers, so layer 2 comes before layer 10.

    >>> sorted(["h.10.w", "h.2.w"], key=natural)
    ['h.2.w', 'h.10.w']
    """
    return tuple((0, int(s), "") if s.isdigit() else (1, 0, s) for s in re.split(r"(\d+)", path))


def own_order(values: Mapping[str, Any]) -> Callable[[str], int]:
    """A sort key of paths: the order in which a mapping lists its names.

    >>> names = {"layer": 1, "head": 2}
    >>> sorted(paths(names), key=own_order(names))
    ['layer', 'head']
    """
    return {name: i for i, name in enumerate(values)}.__getitem__


def digest(lines: Iterable[str]) -> bytes:
    """32 bytes that stand for the lines and their order."""
    return hashlib.sha256("".join(f"{line}\0" for line in lines).encode()).digest()


def first_mismatch(expected: Tree, got: Tree, root: str, is_leaf: IsLeaf | None = None) -> str:
    """The first difference in structure of two trees, in words; '' if there is none.

    >>> first_mismatch({"a": 1, "b": 2}, {"a": 1}, "grads")
    'grads.b is missing'
    """
    want, have = paths(expected, root, is_leaf), paths(got, root, is_leaf)
    missing = [path for path in want if path not in set(have)]
    extra = [path for path in have if path not in set(want)]
    if missing:
        return f"{missing[0]} is missing"
    if extra:
        return f"{extra[0]} is not expected"
    spec_a, spec_b = flatten(expected, is_leaf)[1], flatten(got, is_leaf)[1]
    return "" if spec_a == spec_b else f"{root}: structure {spec_b}, expected {spec_a}"

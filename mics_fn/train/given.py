"""The arguments of a `Trainer`, checked before anything trains; parameters become shards."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mics_fn import tree
from mics_fn.errors import LeafError, PlanError, TreeError, message
from mics_fn.groups import Groups, placement
from mics_fn.shards import (
    Precision,
    check_leaves,
    dtype_name,
    is_leaf,
    open_shards,
    owners_of,
    shard,
)
from mics_fn.train.defaults import bucket_bytes_for
from mics_fn.tree import Tree

_SAME = "pass the shards that init_model or load_shards made for this model"


def as_shards(
    own: Mapping[str, Tensor] | None,
    given: Tree,
    groups: Any,
    home: Groups,
    precision: Precision | None,
    options: dict[str, Any],
) -> Tree:
    """The shards to train.

    Args:
      own: the module's parameters by name; None for a function.
      given: the argument `params`: shards or full tensors; None takes the module's own.
      groups: as for `shard`.
      home: the first of these groups.
      precision: the argument `precision`; None if it was not given.
      options: the options of `shard` that were given; defaults are added here.

    Communication: as for `shard`; none if shards are given.

    Raises:
      TreeError: names, shapes or ties of the parameters differ from those of the model.
      LeafError: a parameter has no value, or another dtype or device than the model or its groups.
      PlanError: shards were made for other groups or another precision, or an option has no effect.
    """
    params = own if given is None else given
    leaves, _ = tree.flatten(params, is_leaf)
    sharded = any(map(is_leaf, leaves))
    if sharded:
        check_leaves("Trainer", params, leaves, "params")
    if own is not None and given is not None:
        _check_names(own, given)
    if sharded:
        _check_shards(params, groups, precision, options)
        return params
    for path, leaf in zip(tree.paths(params, "params", is_leaf), leaves, strict=True):
        if isinstance(leaf, Tensor) and leaf.is_meta:
            fix = "pass params=: the shards that init_model gave with this model, or full tensors"
            raise LeafError(message(f"Trainer: {path} is on meta, without a value", fix=fix))
    if own is not None:
        options.setdefault("order", tree.own_order(own))
    options.setdefault("bucket_bytes", bucket_bytes_for(params, home))
    return shard(params, groups, precision=precision, **options)


def check_buffers(buffers: Mapping[str, Tensor], home: Groups) -> None:
    """Raise LeafError unless all buffers have values and are on the device of the groups."""
    for name, value in buffers.items():
        if value.device != home.device:
            where = "on meta, without a value" if value.is_meta else f"on {value.device}"
            text = f"Trainer: buffer {name!r} is {where}; the groups are on {home.device}"
            fix = "move the model to the device of its groups first"
            if value.is_meta:
                fix = "make the model with init_model, or give the buffer a value"
            raise LeafError(message(text, fix=fix))


def _check_names(own: Mapping[str, Tensor], given: Tree) -> None:
    """Raise unless parameters have the names, shapes, kinds of dtypes and ties of the model's."""
    text = "Trainer: params= are not those of the model"
    if not isinstance(given, Mapping) or sorted(own) != sorted(map(str, given)):
        found = tree.first_mismatch(dict.fromkeys(own, 0), given, "params", is_leaf)
        raise TreeError(message(text, [found], _SAME))
    for name, value in own.items():
        shape, want = getattr(given[name], "shape", None), tuple(value.shape)
        if shape is None or tuple(shape) != want:
            got = type(given[name]).__name__ if shape is None else tuple(shape)
            lines = [f"params[{name!r}]: expected {want}, got {got}"]
            raise TreeError(message(text, lines, _SAME))
        if given[name].dtype.is_floating_point != value.dtype.is_floating_point:
            dtypes = [dtype_name(x.dtype) for x in (value, given[name])]
            lines = [f"params[{name!r}]: expected {dtypes[0]}, got {dtypes[1]}"]
            raise LeafError(message(text, lines, _SAME))
    want, got = _owners(own), _owners(given)
    for name, owner in want.items():
        if owner != got[name]:
            words = [f"tied to {to!r}" if to != name else "not tied" for to in (owner, got[name])]
            lines = [f"params[{name!r}]: expected {words[0]}, got {words[1]}"]
            raise TreeError(message(text, lines, _SAME))


def _owners(values: Mapping[str, Any]) -> dict[str, str]:
    """For each float leaf, by name, the first one that is the same tensor."""
    names = [name for name in sorted(values) if values[name].dtype.is_floating_point]
    if all(isinstance(values[name], Tensor) for name in names):
        owners = owners_of([values[name] for name in names])
        return {name: names[i] for name, i in zip(names, owners, strict=True)}
    first: dict[Any, str] = {}
    slots = {name: (values[name].bucket, values[name].slot) for name in names}
    return {name: first.setdefault(slots[name], name) for name in names}


def _check_shards(
    params: Tree,
    groups: Any,
    precision: Precision | None,
    options: dict[str, Any],
) -> None:
    """Raise unless shards are on their groups' device, have this precision, and need no options."""
    if options:
        text = f"Trainer: {', '.join(f'{name}=' for name in options)}: params= are shards already"
        fix = "give them to what made the shards: shard, init_model or load_shards"
        raise PlanError(message(text, fix=fix))
    opened, bare = open_shards("Trainer", params, groups), tree.paths(params, "", is_leaf)
    for leaf, home, path in zip(opened.leaves, opened.homes, bare, strict=True):
        data, bucket = getattr(leaf, "data", None), leaf.bucket
        if isinstance(data, Tensor) and data.device != home.device:
            text = f"Trainer: params{path} is on {data.device}, its groups are on {home.device}"
            raise LeafError(message(text, fix="make shards on the device of their groups"))
        if precision is not None and bucket is not None:
            want = precision.dtypes(path, bucket.dtype)
            got = (bucket.dtype, bucket.compute, bucket.reduce, bucket.accumulate)
            if want != got:
                lines = [f"{word} {_names(x)}" for word, x in (("expected", want), ("got", got))]
                text = f"Trainer: params{path} was not made with this precision="
                fix = "make the shards with the same precision"
                raise PlanError(message(text, [*lines, "param/compute/reduce/accumulate"], fix))


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return "/".join(map(dtype_name, dtypes))


def homes_for(groups: Any, params: Tree, deterministic: bool) -> tuple[Any, Groups]:
    """The groups of a tree, reducing in fixed order if `deterministic`; and the first of them."""
    found = tree.spread(
        groups, params, what="groups", is_leaf=is_leaf, is_value=lambda v: isinstance(v, Groups)
    )
    if deterministic and isinstance(groups, Groups):
        groups = placement.fixed_order(groups)
    elif deterministic:
        ordered = {home: placement.fixed_order(home) for home in dict.fromkeys(found)}
        paths = tree.paths(params, is_leaf=is_leaf)
        by_path = {path: ordered[home] for path, home in zip(paths, found, strict=True)}
        groups, found = by_path.__getitem__, list(by_path.values())
    return groups, groups if isinstance(groups, Groups) or not found else found[0]

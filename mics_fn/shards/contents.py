"""Batches, and the arguments and results of models: containers of any kind, opened and rebuilt.

Trees of parameters are the pytrees of `mics_fn.tree`. Batches and outputs also come in other
mappings, in dataclasses, and in nodes that a library has registered with torch alone.
"""

import copy
import dataclasses
import enum
import numbers
import os
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from mics_fn import _torch, tree

# Kinds of values that hold no tensor and mean the same for any part of a batch.
PLAIN = (type(None), numbers.Number, str, bytes, enum.Enum, os.PathLike, range, slice, type)
PLAIN += (torch.dtype, torch.device, torch.layout, torch.Size, torch.Generator)
PLAIN += (FunctionType, BuiltinFunctionType, MethodType)
_CLOSED = (Tensor, *PLAIN, nn.Module, PackedSequence)
_DICTS = (dict, OrderedDict, defaultdict)  # optree would sort their keys


class Container(NamedTuple):
    """The values in a container, their names in paths, and a function that rebuilds it."""

    values: list[Any]
    names: Iterable[object]
    rebuild: Callable[[list[Any]], Any]


def map_contents(
    fn: Callable[[Any, str], Any],
    value: Any,
    path: str = "",
    is_leaf: Callable[[Any], bool] | None = None,
) -> Any:
    """Apply `fn` to everything that a value holds, together with its path.

    Args:
      fn: called with each tensor and each object that cannot be opened.
      value: anything.
      path: the beginning of every path.
      is_leaf: says which containers are not to be opened.

    Returns:
      The value with the results in it, or the same object if `fn` changed nothing.

    Example:
      >>> map_contents(lambda x, path: path, {"b": [0, 1], "a": 2}, "batch")
      {'b': ['batch.b.0', 'batch.b.1'], 'a': 'batch.a'}
    """
    opened = None if is_leaf is not None and is_leaf(value) else open_up(value)
    if opened is None:
        return fn(value, path)
    pairs = zip(opened.values, opened.names, strict=True)
    new = [map_contents(fn, x, tree.join(path, f"{name}"), is_leaf) for x, name in pairs]
    same = all(a is b for a, b in zip(new, opened.values, strict=True))
    return value if same else opened.rebuild(new)


def leaves_of(value: Any) -> list[Any]:
    """Everything that `map_contents` would call its function with, in order."""
    found: list[Any] = []

    def note(x: Any, _path: str) -> Any:
        found.append(x)
        return x

    map_contents(note, value)
    return found


def open_up(value: Any) -> Container | None:
    """A container opened by one level; None for anything that is not a container."""
    kind = type(value)
    if isinstance(value, _CLOSED):
        return None
    if kind in (list, tuple):
        return Container(list(value), range(len(value)), kind)
    if kind not in _DICTS:
        node = _registered(value)
        if node is not None:
            return node
    if isinstance(value, Mapping):
        keys = list(value)
        return Container([value[k] for k in keys], keys, partial(_map, value))
    if dataclasses.is_dataclass(value):
        fields = [f.name for f in dataclasses.fields(value) if hasattr(value, f.name)]
        rebuild = partial(_dataclass, value, fields)
        return Container([getattr(value, f) for f in fields], fields, rebuild)
    if isinstance(value, list | tuple):  # of a class that is not registered anywhere
        return Container(list(value), range(len(value)), partial(_list, value))
    return None


def _registered(value: Any) -> Container | None:
    """A node of optree or of torch's own pytree, opened; None for anything else."""

    def below(x: Any) -> bool:
        return x is not value

    leaves, spec = tree.flatten(value, below)
    if len(leaves) != 1 or leaves[0] is not value:
        return Container(leaves, tree.spec_paths(spec), spec.unflatten)
    leaves, spec = _torch.flatten(value, below)
    if len(leaves) != 1 or leaves[0] is not value:
        by_key = isinstance(value, Mapping) and len(value) == len(leaves)
        names = list(value) if by_key else range(len(leaves))
        return Container(leaves, names, lambda new: _torch.unflatten(new, spec))
    return None


def _map(value: Mapping, new: list[Any]) -> Any:
    pairs = dict(zip(value, new, strict=True))
    if not isinstance(value, MutableMapping):
        return type(value)(pairs)  # pyright: ignore[reportCallIssue]
    made = copy.copy(value)
    for key, each in pairs.items():
        made[key] = each
    return made


def _dataclass(value: Any, fields: list[str], new: list[Any]) -> Any:
    made = copy.copy(value)
    for name, each in zip(fields, new, strict=True):
        object.__setattr__(made, name, each)  # works for frozen ones too
    return made


def _list(value: Any, new: list[Any]) -> Any:
    if isinstance(value, tuple):
        return type(value)(new)
    made = copy.copy(value)
    made[:] = new
    return made

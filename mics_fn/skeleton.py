"""The structure of a model: its parameters on meta, all else that it holds as it is.

A model that was just made is changed in place: hooks and other code that hold on to its modules
stay right. One that holds tensors of somebody else is copied.
"""

import copy
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from mics_fn.hollow import META, Hollow

OWN = {"recorder", "_is_param"}  # what a hollow tensor has that is not its user's
# Nothing that a model owns lies behind these.
CLOSED = (str, bytes, int, float, complex, type, torch.Tensor, torch.dtype, torch.device)
CLOSED += (ModuleType, FunctionType, MethodType, BuiltinFunctionType)


def hollow_parts(model: Any) -> dict[int, Hollow]:
    """The hollow tensors that a model holds in modules, containers and objects, by `id`."""
    found: dict[int, Hollow] = {}

    def look(x: Hollow) -> Hollow:
        return found.setdefault(id(x), x)

    _swap(model, look)
    return found


def with_parts(model: nn.Module, new: dict[int, Tensor]) -> nn.Module:
    """The model with a tensor instead of each hollow one, by its `id`."""
    for hollow in hollow_parts(model).values():
        for name, value in vars(hollow).items():
            if name not in OWN and not isinstance(value, Hollow):  # marks for an optimizer
                setattr(new[id(hollow)], name, value)
    _swap(model, lambda hollow: new[id(hollow)])
    real = [p for p in model.parameters() if not p.is_meta]
    if not real:
        return model
    memo: dict[int, Any] = {id(p): hollow_parameter(p) for p in real}
    return copy.deepcopy(model, memo)


def hollow_parameter(like: Tensor) -> nn.Parameter:
    """A parameter on meta of the same geometry."""
    empty = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=META)
    return nn.Parameter(empty, like.requires_grad)


def _swap(model: Any, new: Callable[[Hollow], Tensor]) -> None:
    """Put `new` of it wherever a hollow tensor stands."""
    seen: set[int] = set()
    todo: list[Any] = [model]

    def moved(x: Any) -> Any:
        if isinstance(x, Hollow):
            return new(x)
        if isinstance(x, tuple | frozenset | set) and not isinstance(x, torch.Size):
            parts = [moved(part) for part in x]
            same = all(a is b for a, b in zip(parts, x, strict=True))
            return x if same else _like(x, parts)
        if not isinstance(x, CLOSED) and id(x) not in seen:
            seen.add(id(x))
            todo.append(x)
        return x

    while todo:
        x = todo.pop()
        if isinstance(x, dict):
            for key, value in list(x.items()):
                if (other := moved(value)) is not value:
                    x[key] = other
        elif isinstance(x, list):
            for i, value in enumerate(x):
                if (other := moved(value)) is not value:
                    x[i] = other
        moved(getattr(x, "__dict__", None))


def _like(x: Any, parts: list[Any]) -> Any:
    return type(x)(*parts) if hasattr(x, "_fields") else type(x)(parts)

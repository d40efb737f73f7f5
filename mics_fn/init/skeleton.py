"""The structure of a model: its parameters on meta, all else that it holds as it is.

A model that was just made is changed in place: hooks and other code that hold on to its modules
stay right. One that holds tensors of somebody else is copied.
"""

import copy
from collections.abc import Callable, Iterable
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from mics_fn.errors import LeafError, message
from mics_fn.init.without_data import META, Hollow

OWN = {"recorder", "_is_param"}  # what a hollow tensor has that is not its user's
# Nothing that a model owns lies behind these.
CLOSED = (str, bytes, int, float, complex, type, torch.Tensor, torch.dtype, torch.device)
CLOSED += (ModuleType, FunctionType, MethodType, BuiltinFunctionType)


def tensors_of(model: Any, kind: type[Tensor] = Tensor) -> dict[int, Any]:
    """The tensors of a kind that a model holds in modules, containers and objects, by `id`."""
    found: dict[int, Any] = {}

    def look(x: Tensor) -> Tensor:
        return found.setdefault(id(x), x)

    _swap(model, kind, look)
    return found


def with_parts(model: nn.Module, new: dict[int, Tensor]) -> nn.Module:
    """The model with a tensor instead of each hollow one, by its `id`."""
    for hollow in tensors_of(model, Hollow).values():
        for name, value in vars(hollow).items():
            if name not in OWN and not isinstance(value, Hollow):  # marks for an optimizer
                setattr(new[id(hollow)], name, value)
    _swap(model, Hollow, lambda hollow: new[id(hollow)])
    real = [p for p in model.parameters() if not p.is_meta]
    if not real:
        return model
    memo: dict[int, Any] = {id(p): hollow_parameter(p) for p in real}
    return copy.deepcopy(model, memo)


class Computed(Tensor):
    """Stands in a skeleton for a tensor that its module computed from parameters.

    Such a tensor is of no use once the parameters have moved on. Modules that compute it again in
    each forward, as those of `weight_norm` and `prune` do, replace it before they use it.
    """

    where: str

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        found = [x for x in (*args, *(kwargs or {}).values()) if isinstance(x, Computed)]
        what = found[0].where if found else "a tensor of the model"
        text = f"{what} was computed from parameters before the model was trained, and is used"
        raise LeafError(message(text, fix="compute it in forward, from the parameters given there"))

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Computed({self.where})"


def refuse_lazy(model: nn.Module) -> None:
    """Raise LeafError for a model whose parameters have no shape yet."""
    if any(nn.parameter.is_lazy(value) for value in (*model.parameters(), *model.buffers())):
        text = f"Trainer: the {type(model).__name__} has parameters without a shape yet"
        raise LeafError(message(text, fix="call it once on a batch, which gives them one"))


def on_meta_copy(model: nn.Module, values: Iterable[Tensor]) -> nn.Module:
    """A copy of a model with these parameters and buffers of it on meta, whatever their class."""
    memo: dict[int, Any] = {}
    for value in values:
        empty = hollow_parameter(value)
        memo[id(value)] = empty if isinstance(value, nn.Parameter) else empty.data
    names = {
        id(value): f"{name}.{key}".removeprefix(".")
        for name, module in model.named_modules()
        for key, value in vars(module).items()
    }
    for key, tensor in tensors_of(model).items():
        if not tensor.is_leaf and key not in memo:  # which torch cannot copy
            memo[key] = torch.empty(0, device=META).as_subclass(Computed)
            memo[key].where = f"model.{names[key]}" if key in names else "a tensor of the model"
    return copy.deepcopy(model, memo)


def hollow_parameter(like: Tensor) -> nn.Parameter:
    """A parameter on meta of the same geometry."""
    empty = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=META)
    return nn.Parameter(empty, like.requires_grad)


def _swap(model: Any, kind: type[Tensor], new: Callable[[Any], Tensor]) -> None:
    """Put `new` of it wherever a tensor of that kind stands."""
    seen: set[int] = set()
    todo: list[Any] = [model]

    def moved(x: Any) -> Any:
        if isinstance(x, kind):
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

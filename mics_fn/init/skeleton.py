"""The structure of a model: its parameters on meta, and everything else that it holds as it is.

A model that was just made is changed in place, so that hooks and other code which refer to its
modules stay right. A model whose tensors belong to other code is copied.
"""

import copy
import warnings
from collections.abc import Callable, Iterable
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from mics_fn._torch import compiles_itself
from mics_fn.errors import LeafError, message, name_some
from mics_fn.init.without_data import META, Recorded

OWN = {"recorder", "_is_param"}  # attributes of a recorded tensor that its user did not set
# A model owns nothing behind these.
CLOSED = (str, bytes, int, float, complex, type, torch.Tensor, torch.dtype, torch.device)
CLOSED += (ModuleType, FunctionType, MethodType, BuiltinFunctionType)


def tensors_of(model: Any, kind: type[Tensor] = Tensor) -> dict[int, Any]:
    """The tensors of a class that a model holds in modules, containers and objects, by `id`."""
    found: dict[int, Any] = {}
    _swap(model, kind, lambda x: found.setdefault(id(x), x))
    return found


def with_tensors(model: nn.Module, new: dict[int, Tensor]) -> nn.Module:
    """The model with its parameters on meta, and `new` tensors for recorded ones, by their `id`."""
    for recorded in tensors_of(model, Recorded).values():
        for name, value in vars(recorded).items():
            if name not in OWN and not isinstance(value, Recorded):  # such as `no_decay`
                setattr(new[id(recorded)], name, value)
    _swap(model, Recorded, lambda recorded: new[id(recorded)])
    real = [p for p in model.parameters() if not p.is_meta]
    return on_meta_copy(model, real) if real else model


class Computed(Tensor):
    """Stands in a skeleton for a tensor that its module computed from parameters.

    Such a tensor is out of date once the parameters are trained. Modules that compute it again in
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


def warn_of_compile(verb: str, model: nn.Module, stacklevel: int) -> None:
    """Warn of modules that `compile()` was called on, which a copy of the model has not."""
    found = [f"model.{k}".rstrip(".") for k, x in model.named_modules() if compiles_itself(x)]
    if found:
        text = f"{verb}: compile() of {name_some(found)} is dropped: it runs eagerly"
        fix = "leave compile() out; see Limits in README for what can be compiled"
        warnings.warn(message(text, fix=fix), stacklevel=stacklevel)


def on_meta_copy(model: nn.Module, values: Iterable[Tensor]) -> nn.Module:
    """A copy of a model in which some of its parameters and buffers are on meta."""
    memo: dict[int, Any] = {id(value): meta_like(value) for value in values}
    names = {
        id(value): f"{name}.{key}".removeprefix(".")
        for name, module in model.named_modules()
        for key, value in vars(module).items()
    }
    for key, tensor in tensors_of(model).items():
        if not tensor.is_leaf and key not in memo:  # torch cannot copy such a tensor
            memo[key] = torch.empty(0, device=META).as_subclass(Computed)
            memo[key].where = f"model.{names[key]}" if key in names else "a tensor of the model"
    return copy.deepcopy(model, memo)


def meta_like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A plain tensor of the same shape and strides on meta; a parameter gives a parameter."""
    empty = torch.empty_strided(x.shape, x.stride(), dtype=dtype or x.dtype, device=META)
    return nn.Parameter(empty, x.requires_grad) if isinstance(x, nn.Parameter) else empty


def _swap(model: Any, kind: type[Tensor], new: Callable[[Any], Tensor]) -> None:
    """Replace each tensor of a class by what `new` gives for it, wherever the model holds it."""
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
        if isinstance(x, dict | list):
            items = list(x.items() if isinstance(x, dict) else enumerate(x))
            for key, value in items:
                if (other := moved(value)) is not value:
                    x[key] = other
        moved(getattr(x, "__dict__", None))


def _like(x: Any, parts: list[Any]) -> Any:
    return type(x)(*parts) if hasattr(x, "_fields") else type(x)(parts)

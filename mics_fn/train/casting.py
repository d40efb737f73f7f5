"""A stand-in for a model, whose calls cast their inputs and outputs as a `Precision` says."""

from collections.abc import Callable, Iterator
from functools import wraps
from types import MethodType
from typing import Any

from torch import nn

from mics_fn.shards import Precision


class Casting:
    """Takes the place of a module in a loss: calls are cast, everything else reaches the module.

    The calls of the module itself are cast, those of the methods that its class adds to
    `nn.Module`, and those of its submodules, whether they are reached by name, index or iteration.
    Nothing is cast inside a call. For `isinstance` a stand-in has the class of its module.

    Args:
      module: the module, which also receives assignments to attributes.
      precision: float tensors among the arguments of a call are cast to its `compute`, and those in
        the result to its `output`.

    Example:
      >>> layers = nn.Sequential(nn.Linear(2, 2).bfloat16())
      >>> model = Casting(layers, Precision.parse("compute=bf16"))
      >>> model(torch.ones(1, 2)).dtype, model[0](torch.ones(1, 2)).dtype
      (torch.bfloat16, torch.bfloat16)
      >>> len(model), isinstance(model, nn.Sequential)
      (1, True)
    """

    __slots__ = ("_module", "_precision")

    def __init__(self, module: nn.Module, precision: Precision) -> None:
        # Plain assignments would set attributes of the module.
        object.__setattr__(self, "_module", module)
        object.__setattr__(self, "_precision", precision)

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        return type(self._module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._cast(self._module)(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return self._stand_in(getattr(self._module, name), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._module, name, value._module if type(value) is Casting else value)

    def __delattr__(self, name: str) -> None:
        delattr(self._module, name)

    def __getitem__(self, key: Any) -> Any:
        return self._stand_in(self._module[key])  # pyright: ignore[reportIndexIssue]

    def __iter__(self) -> Iterator[Any]:
        return map(self._stand_in, iter(self._module))  # pyright: ignore[reportCallIssue, reportArgumentType]

    def __len__(self) -> int:
        return len(self._module)  # pyright: ignore[reportArgumentType]

    def __contains__(self, key: Any) -> bool:
        return key in self._module  # pyright: ignore[reportOperatorIssue]

    def __bool__(self) -> bool:
        return bool(self._module)

    def __dir__(self) -> list[str]:
        return dir(self._module)

    def __repr__(self) -> str:
        return repr(self._module)

    def _stand_in(self, value: Any, name: str = "") -> Any:
        """The stand-in for a submodule or a method; any other value as it is."""
        if isinstance(value, nn.Module):
            return Casting(value, self._precision)
        added = isinstance(value, MethodType) and not hasattr(nn.Module, name)
        if added or (name == "forward" and callable(value)):
            return self._cast(value)
        return value

    def _cast(self, call: Callable) -> Callable:
        @wraps(call, updated=())  # a module's attributes are not those of its call
        def cast(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = self._precision.cast_inputs((args, kwargs))
            return self._precision.cast_output(call(*args, **kwargs))

        return cast

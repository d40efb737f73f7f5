"""Tensors whose values do not lie in memory as they are: in a file, or as codes.

[Note: tensors apart] A tensor that is `Apart` has a shape, a dtype and a device, and no memory
that holds its values as they are. An op on it takes its values into new memory and computes with
those, below autograd, as ops on deferred parameters do. A view that is one stretch of the same
elements is apart itself. An op that would write raises.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mics_fn import _torch
from mics_fn.errors import LeafError, message
from mics_fn.read_only import ReadOnly

aten = torch.ops.aten


class Apart(ReadOnly):
    """A dense tensor that has its values elsewhere; see [Note: tensors apart]."""

    leaf: str

    @property
    def memory(self) -> list[Tensor]:
        """The tensors in memory that it consists of."""
        return []

    def check(self) -> None:
        """Raise DonatedError if what it has held was given away to be overwritten."""

    def plain(self) -> Tensor:
        """Its values in new memory, on its device."""
        raise NotImplementedError

    def part(self, start: int, like: Tensor) -> "Apart":
        """The elements from `start` on, with the shape of `like`."""
        raise NotImplementedError

    @property
    def size_bytes(self) -> int:
        """The bytes that it takes where it lies."""
        raise NotImplementedError

    def __tensor_flatten__(self) -> Any:
        """Raise LeafError: torch.compile calls this, and would trace nothing."""
        text = f"torch.compile: {self.noun} enters a compiled region, {self.lies_in()}"
        raise LeafError(message(text, fix="clone() it before, which reads it"))

    __tensor_unflatten__ = __tensor_flatten__  # torch looks for both or neither

    @classmethod
    def __torch_dispatch__(  # pyright: ignore
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        handle = _HANDLERS.get(func)
        if handle is None:
            handle = _HANDLERS[func] = _view if _torch.op_views(func) else _compute
        return handle(func, args, kwargs or {})


def is_apart(value: Any) -> bool:
    """Whether a value is a tensor that lies in a file, or as codes.

    Args:
      value: anything.

    Returns:
      A bool.

    Example:
      >>> offload.is_apart(torch.ones(2))
      False
    """
    return isinstance(value, Apart)


def like_of(value: Tensor) -> Tensor:
    """A tensor on meta with the shape and dtype of a dense one."""
    return torch.empty(value.shape, dtype=value.dtype, device="meta")


def _replace(value: Any) -> Any:
    """An argument of an op with plain tensors in place of those that are apart."""
    if isinstance(value, Apart):
        return value.plain()
    kind = type(value)
    if kind is list or kind is tuple:
        return kind([_replace(each) for each in value])
    return value


def _apart_in(value: Any) -> Apart | None:
    """The first tensor in an argument of an op that is apart."""
    if isinstance(value, Apart):
        return value
    if isinstance(value, list | tuple):
        return next((found for each in value if (found := _apart_in(each)) is not None), None)
    return None


def _compute(func: Any, args: tuple, kwargs: dict) -> Any:
    """Run an op on plain tensors, unless it writes to one that is apart."""
    given = _torch.op_arguments(func, args, kwargs)
    for name in _torch.op_writes(func):
        written = _apart_in(given.get(name))
        if written is not None:
            raise written.refusal(f"{func}: writes to")
    plain = {name: _replace(value) for name, value in kwargs.items()}
    return func(*(_replace(value) for value in args), **plain)


@torch.inference_mode(mode=False)  # in which nothing is a view of tensors from outside
def _view(func: Any, args: tuple, kwargs: dict) -> Any:
    """A view of a tensor that is apart: so itself if it is one stretch of the same elements."""
    value = args[0]
    if not isinstance(value, Apart):
        return _compute(func, args, kwargs)
    value.check()
    made = func(like_of(value), *args[1:], **kwargs)
    several = isinstance(made, list | tuple)
    views = list(made) if several else [made]
    if not all(view.is_contiguous() and view.dtype == value.dtype for view in views):
        return _compute(func, args, kwargs)
    parts = [value.part(int(view.storage_offset()), view) for view in views]
    return parts if several else parts[0]


_HANDLERS: dict[Any, Callable[[Any, tuple, dict], Any]] = {
    aten._unsafe_view.default: _view,
    aten._reshape_alias.default: _view,
    # Called for the two parts of a dual tensor; one that is apart counts as having its own memory.
    aten._has_same_storage_numel.default: lambda func, args, kwargs: True,
    aten.is_same_size.default: lambda func, args, kwargs: args[0].shape == args[1].shape,
}

"""What a tensor without memory of its own refuses: writes outside of ops, and its address.

Those that derive from it recognise ops that write by their schemas. The methods here never reach an
op: torch would answer them in Python or C++, by writing to a value that is then lost, by an error
about fake tensors, or by reading from an invalid address.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mics_fn import _torch
from mics_fn.errors import LeafError

COMPILED = "torch.compile: a tensor without memory enters a compiled region"
_ADDRESS = "pass a clone(), which has memory of its own"

WRITES = (
    *("apply_", "map_", "map2_", "resize_", "resize_as_"),
    # For an in-place change of a view that a Function made, autograd has a less helpful error.
    *("__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__", "__ipow__"),
    *("__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__", "__idiv__"),
)
ADDRESSES = (*("data_ptr", "untyped_storage", "storage", "share_memory_", "__dlpack__"),)


class ReadOnly(torch.Tensor):
    """A tensor that ops can read, and that nothing can write to."""

    __torch_function__ = _torch.no_torch_function
    noun = "a gathered parameter"  # what it is, for error texts
    how_to_change = "change parameters between steps, in the shards; or write to a clone()"
    how_to_compile = "clone() it before, which reads it"

    def where_text(self) -> str:
        """What and where it is, for error texts."""
        return f"shape {tuple(self.shape)}"

    def refusal(self, what: str, fix: str = "") -> LeafError:
        """The error for something that cannot be done with this tensor."""
        text = f"{what} {self.noun}, {self.where_text()}"
        return LeafError(text, fix=fix or self.how_to_change)

    def __tensor_flatten__(self) -> Any:
        """Raise LeafError: torch.compile calls this, and would trace nothing."""
        text = f"{COMPILED}: {self.noun}, {self.where_text()}"
        raise LeafError(text, fix=self.how_to_compile)

    __tensor_unflatten__ = __tensor_flatten__  # torch looks for both or neither

    @property
    def data(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The same tensor without a gradient."""
        return self.detach()

    @data.setter
    def data(self, value: Any) -> None:
        raise self.refusal(".data = writes to")

    @property
    def grad(self) -> Tensor | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """As for any tensor that is not a leaf of autograd: None unless it retains its gradient."""
        return torch.Tensor.grad.__get__(self)  # pyright: ignore

    @grad.setter
    def grad(self, value: Any) -> None:
        if value is not None:
            raise self.refusal(".grad = would be lost on", "give gradients to opt_step, as shards")

    def register_post_accumulate_grad_hook(self, hook: Any) -> Any:
        """Raises LeafError, since no `grad` is accumulated."""
        raise self.refusal("no gradient is accumulated in", "use register_hook, on the full one")

    def is_shared(self) -> bool:
        """Whether other processes share its memory, which is never so."""
        return False

    def numpy(self, *, force: bool = False) -> Any:
        """A copy as an array; read-only, since a write to it would reach no parameter."""
        array = (self.detach() if force else self).clone().numpy(force=force)
        array.flags.writeable = False
        return array

    def tolist(self) -> Any:
        """The values as lists."""
        return self.detach().clone().tolist()

    def __format__(self, spec: str) -> str:
        return format(self.detach().clone(), spec) if spec else repr(self)

    def __copy__(self) -> Tensor:
        return self  # neither of them can be written to

    def __deepcopy__(self, memo: dict) -> Tensor:
        return self.detach().clone()


def _refused(what: str, fix: str = "") -> Callable[..., Any]:
    def method(self: ReadOnly, *args: Any, **kwargs: Any) -> Any:
        raise self.refusal(what, fix)

    return method


for _name in WRITES:
    setattr(ReadOnly, _name, _refused(f"{_name} writes to"))
_PICKLE = "save shards, as checkpoint.save does, or a clone()"
ReadOnly.__reduce_ex__ = _refused("torch.save and pickle want the memory of", _PICKLE)
for _name in ADDRESSES:
    setattr(ReadOnly, _name, _refused(f"{_name} asks for the memory of", _ADDRESS))

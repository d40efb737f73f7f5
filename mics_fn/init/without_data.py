"""Tensors without data that stand for those of a model while its construction is recorded.

[Note: recorded tensors] While a model is recorded every new tensor is `Recorded`: it reports the
real device to all code that asks, and has no data. So code takes the branches that it would take
with real tensors. Tensors on meta do not give that: initialisers of torch and of other libraries
skip them. Where code asks for a value (`.item()`, `bool`, `.numpy()`), the ops that determine it
are replayed at once. Little is left that cannot be recorded: an op that writes to a tensor made
outside, code that wants the address of a tensor, and layouts other than strided.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from mics_fn import _torch, tree
from mics_fn.errors import LeafError, message
from mics_fn.init.tape import View

META = torch.device("meta")


class Answering(Protocol):
    """What a recorded tensor asks of its recorder."""

    active: bool

    def ask(self, x: "Recorded", question: Callable[[Tensor], Any]) -> Any:
        """The answer to a question about the value that the tensor would hold now."""
        ...

    def device_of(self, x: "Recorded") -> torch.device:
        """The device on which the tensor would lie."""
        ...


class Recorded(Tensor):
    """A tensor without data; what it would hold is on the tape of a `Recorder`."""

    recorder: Answering
    __torch_function__ = _torch.no_torch_function

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _torch.ASK_DEVICE:
            return args[0].device
        if func is _torch.ASK_COMPATIBLE:
            return True
        raise left_behind(f"{func}")

    @property
    def device(self) -> torch.device:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The device on which it would lie."""
        return self.recorder.device_of(self)

    def numpy(self, *, force: bool = False) -> Any:
        """Its value, read-only, since a write to it would not be recorded."""
        array = self.recorder.ask(self, lambda x: x.numpy(force=force))
        array.flags.writeable = False
        return array

    def tolist(self) -> Any:
        """Its value as numbers."""
        return self.recorder.ask(self, Tensor.tolist)

    def __format__(self, spec: str) -> str:
        return self.recorder.ask(self, lambda x: format(x, spec))

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        if not self.recorder.active:
            return f"Recorded(shape={tuple(self.shape)}, {self.dtype})"
        return self.recorder.ask(self, repr)

    def __deepcopy__(self, memo: dict[Any, Any]) -> Any:
        # The same as torch does, whose own code asks a tensor of another class for its address.
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError("only tensors that no op computed can be copied by deepcopy")
        copied = self.detach()
        if isinstance(self, nn.Parameter):
            copied = copied.clone()
        else:  # all of its storage, and once for all tensors there
            copies = memo.setdefault("storages of recorded tensors", {})
            key, length = _torch.storage_id(self), self.untyped_storage().nbytes() // self.itemsize
            if key not in copies:
                copies[key] = copied.as_strided((length,), (1,), 0).view(torch.uint8).clone()
            place = self.shape, self.stride(), self.storage_offset()
            copied = copies[key].view(self.dtype).as_strided(*place)
        copied.requires_grad_(self.requires_grad)
        for name, value in vars(self).items():
            setattr(copied, name, value)
        memo[id(self)] = copied
        return copied


def left_behind(what: str) -> LeafError:
    """The error for a tensor that is still without data after its model was made."""
    text = f"{what} on a tensor that init_model left without data: it was made with the model"
    fix = "keep it in the module, as a buffer or an attribute, where init_model finds it"
    return LeafError(message(text, fix=fix))


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors of a pytree."""
    return [x for x in tree.flatten(value)[0] if isinstance(x, Tensor)]


def recorded_in(value: Any) -> list[Recorded]:
    """The recorded tensors of a pytree."""
    return [x for x in tensors_in(value) if isinstance(x, Recorded)]


def on_meta(x: Recorded) -> Tensor:
    """The same tensor on meta, for torch's rules of shapes; it shares the storage without data."""
    memory = x.untyped_storage()
    return View.of(x, _torch.storage_id_of(memory)).on(memory)

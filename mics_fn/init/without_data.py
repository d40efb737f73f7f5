"""Tensors without data whose memory is a cell of a tape, and what they are on meta.

[Note: hollow tensors] While a model is recorded every new tensor is `Hollow`: it lies on the real
device for all that ask, and has no data. Code takes the ways that it would take with real tensors,
which tensors on meta do not promise: torch's and other initialisers skip those. Where code asks for
a value (`.item()`, `bool`, `.numpy()`), what the value follows from is replayed at once. So little
can not be recorded: an op that writes to a tensor made outside, code that wants the address of a
tensor, and layouts other than strided.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from mics_fn import _torch, tree
from mics_fn.errors import LeafError, message
from mics_fn.init.tape import geometry

META = torch.device("meta")


class Keeper(Protocol):
    """Who knows where hollow tensors lie, and what they hold."""

    active: bool

    def ask(self, hollow: "Hollow", question: Callable[[Tensor], Any]) -> Any:
        """What one would answer with what it would hold now."""
        ...

    def device_of(self, hollow: "Hollow") -> torch.device:
        """Where it would lie."""
        ...


class Hollow(Tensor):
    """A tensor without data that is on the tape of a `Recorder`."""

    recorder: Keeper
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
        """Where it would lie."""
        return self.recorder.device_of(self)

    def numpy(self, *, force: bool = False) -> Any:
        """Its value; read-only, since a write to it would reach no tape."""
        array = self.recorder.ask(self, lambda x: x.numpy(force=force))
        array.flags.writeable = False
        return array

    def tolist(self) -> Any:
        """Its value."""
        return self.recorder.ask(self, Tensor.tolist)

    def __format__(self, spec: str) -> str:
        return self.recorder.ask(self, lambda x: format(x, spec))

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        if not self.recorder.active:
            return f"Hollow(shape={tuple(self.shape)}, {self.dtype})"
        return self.recorder.ask(self, repr)

    def __deepcopy__(self, memo: dict[Any, Any]) -> Any:
        # As torch does it; its own code asks for the address of what is no plain tensor.
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError("deepcopy of a tensor that is no leaf")
        copied = self.detach()
        if isinstance(self, nn.Parameter):
            copied = copied.clone()
        else:  # all of its memory, and once for all tensors there
            shape, stride, offset = geometry(self)
            copies = memo.setdefault("hollow", {})
            key, length = _torch.storage_id(self), self.untyped_storage().nbytes() // self.itemsize
            if key not in copies:
                copies[key] = copied.as_strided((length,), (1,), 0).view(torch.uint8).clone()
            copied = copies[key].view(self.dtype).as_strided(shape, stride, offset)
        copied.requires_grad_(self.requires_grad)
        for name, value in vars(self).items():
            setattr(copied, name, value)
        memo[id(self)] = copied
        return copied


def left_behind(what: str) -> LeafError:
    """For a tensor that is still hollow when its model is made."""
    text = f"{what} on a tensor that init_model left without data: it was made with the model"
    fix = "keep it in the module, as a buffer or an attribute, where init_model finds it"
    return LeafError(message(text, fix=fix))


def hollows_in(value: Any) -> list[Hollow]:
    """The hollow tensors of a pytree."""
    return [x for x in tree.flatten(value)[0] if isinstance(x, Hollow)]


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors of a pytree."""
    return [x for x in tree.flatten(value)[0] if isinstance(x, Tensor)]


def on_meta(hollow: Hollow) -> Tensor:
    """The same on meta, for torch's rules; it shares the hollow one's memory, such as it is."""
    shape, stride, offset = geometry(hollow)
    empty = torch.empty(0, dtype=hollow.dtype, device=META)
    return empty.set_(hollow.untyped_storage(), offset, shape, stride)

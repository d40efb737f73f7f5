"""Tensors that lie in a file: any op that reads one gives what the file holds.

[Note: stored tensors] A `Stored` is apart; see [Note: tensors apart] in `apart`. An op on it reads
the file. What is stored changes only by `stream`, which writes blocks of a file, and then under a
new value. The old one belongs to a state that was given away, so using it raises `DonatedError`.
"""

from typing import Any

import torch
from torch import Tensor

from mics_fn import _torch
from mics_fn.errors import DonatedError, message
from mics_fn.offload.apart import Apart
from mics_fn.offload.scratch import Extent
from mics_fn.offload.space import padded
from mics_fn.offload.transfer import aligned


class Stored(Apart):
    """A dense tensor in a scratch file. `empty` and `store` make one, and `read` reads it.

    An op on it reads the file, and gives a tensor with memory. Views are stored tensors, too.

    Example:
      >>> from tempfile import TemporaryDirectory
      >>> with TemporaryDirectory() as folder:
      ...     x = offload.store(torch.arange(4.0), offload.Scratch(folder))
      ...     print(isinstance(x[1:], offload.Stored), x[1:] * 2)
      ...     del x
      True tensor([2., 4., 6.])
    """

    noun = "a stored tensor"
    how_to_change = "write through stream(), or move() it to the device first"
    extent: Extent
    start: int  # where it begins in its extent, in bytes
    _generation: int

    @staticmethod
    def __new__(
        cls: type, extent: Extent, start: int, like: Tensor, device: torch.device, leaf: str = ""
    ) -> Any:
        """A part of an extent.

        Args:
          extent: the part of a file that it lies in.
          start: where it begins there, in bytes.
          like: a dense tensor on meta with its shape and dtype.
          device: the one that ops on it compute on.
          leaf: its path, for error texts.
        """
        geometry = tuple(like.shape), tuple(like.stride()), 0
        self = _torch.wrapper_without_data(cls, geometry, like.dtype, device)
        self.extent, self.start, self.leaf = extent, start, leaf or extent.leaf
        self._generation = extent.generation
        return self

    def __repr__(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        kind = f"{self.dtype}".removeprefix("torch.")
        return f"Stored(shape={tuple(self.shape)}, {kind}, in {self.extent.scratch.path})"

    def lies_in(self) -> str:
        """Its leaf, its shape and its file, for error texts."""
        which = f"{self.leaf}, " if self.leaf else ""
        return f"{which}shape {tuple(self.shape)} in {self.extent.scratch.path}"

    @property
    def size_bytes(self) -> int:
        """The bytes of its values."""
        return self.numel() * self.dtype.itemsize

    def part(self, start: int, like: Tensor) -> "Stored":
        """The elements from `start` on, with the shape of `like`."""
        at = self.start + start * self.dtype.itemsize
        return Stored(self.extent, at, like, self.device, self.leaf)

    def plain(self) -> Tensor:
        """What the file holds, in new memory, on its device."""
        self.check()
        self.extent.scratch.check(self.leaf)
        with _torch.without_torch_func():  # what a file holds is a constant
            memory = aligned(self.reaches())
            self.extent.read(self.start, memory[: self.reaches()], self.leaf)
            made = memory[: self.size_bytes].view(self.dtype).view(self.shape)
            return made.to(self.device)

    def reaches(self) -> int:
        """The bytes to move for it: in whole pages where the rest of its last page is its own."""
        size, extent = self.size_bytes, self.extent
        at_end = self.start + size == extent.length
        whole = self.start + padded(size) == extent.nbytes
        return padded(size) if at_end and whole else size

    def check(self) -> None:
        """Raise DonatedError if what it has held was given away to be overwritten."""
        if self.extent.was_given(self.start, self.start + self.size_bytes, self._generation):
            text = f"offload: {self.lies_in()} was overwritten by a step that was given it"
            fix = "use the new state, or pass donate=False"
            raise DonatedError(message(text, fix=fix))


def is_stored(value: Any) -> bool:
    """Whether a value is a tensor that lies in a file.

    Args:
      value: anything.

    Returns:
      A bool.

    Example:
      >>> offload.is_stored(torch.ones(2))
      False
    """
    return type(value) is Stored


def read(value: Tensor) -> Tensor:
    """The values of a tensor that is apart, in new memory; any other tensor as it is.

    Args:
      value: a tensor.

    Returns:
      A tensor with memory.

    Memory: that of the tensor.

    Raises:
      OffloadError: the file cannot be read, or others have changed it.
      DonatedError: a step was given it, and has overwritten it.

    Example:
      >>> from tempfile import TemporaryDirectory
      >>> with TemporaryDirectory() as folder:
      ...     x = offload.store(torch.ones(2), offload.Scratch(folder))
      ...     print(offload.read(x))
      ...     del x
      tensor([1., 1.])
    """
    return value.plain() if isinstance(value, Apart) else value

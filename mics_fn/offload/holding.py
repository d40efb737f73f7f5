"""`Hold`: parts of files that are read while the program goes on, so that nobody overwrites them.

[Note: held parts] A save that is under way reads the parts of files that its state lay in when it
began. Meanwhile steps go on, and with `donate=True` they would write there. So the save holds these
parts: a step finds them held, and writes to new parts instead, as it does without `donate`. The old
ones are free again when the save ends. Nothing is copied, and what is held keeps its bits; whoever
writes there all the same gets an error.
"""

from collections.abc import Iterable
from typing import Any

from mics_fn.offload.scratch import Extent
from mics_fn.offload.stored import is_stored


class Hold:
    """Keeps parts of files as they are, until `release`, or until nobody refers to it.

    Args:
      values: tensors; what is not stored is passed over.

    Example:
      >>> from tempfile import TemporaryDirectory
      >>> with TemporaryDirectory() as folder:
      ...     x = offload.store(torch.ones(2), offload.Scratch(folder))
      ...     hold = offload.Hold([x])
      ...     before = offload.is_held(x)
      ...     hold.release()
      ...     print(before, offload.is_held(x))
      ...     del x
      True False
    """

    def __init__(self, values: Iterable[Any]) -> None:
        stored = (x for x in values if is_stored(x))
        self._extents: dict[int, Extent] = {id(x.extent): x.extent for x in stored}
        for extent in self._extents.values():
            extent.holders.add(self)

    def release(self) -> None:
        """Let them be overwritten."""
        for extent in self._extents.values():
            extent.holders.discard(self)
        self._extents = {}


def is_held(value: Any) -> bool:
    """Whether a tensor lies in a part of a file that must not be overwritten now.

    Args:
      value: anything; what is not stored is not held.

    Returns:
      A bool.
    """
    return is_stored(value) and value.extent.is_held

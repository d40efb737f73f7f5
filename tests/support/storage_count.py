"""The memory of tensors, counted tensor by tensor, which gives the same number in every run.

[Note: counted storage] The memory of a process depends on its allocator, on its code and on timing.
The memory of its tensors does not: each op is observed as torch runs it, in backward too, and the
storage behind its results counts from then until its last tensor is gone. Memory that an op or a
communication library takes and gives back inside is not observed.
"""

import weakref
from typing import Any

from mics_fn import _torch


class StorageCount(_torch.DispatchMode):
    """Bytes of the tensors that this thread makes in a `with` block. See [Note: counted storage].

    Example:
        >>> with StorageCount() as count:
        ...     a = torch.ones(4)
        ...     b = a.view(2, 2) + 1
        ...     del a
        >>> count.now, count.peak
        (16, 32)
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind not in _torch.PLAIN for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        self._see((args, kwargs), old=True)  # views of tensors from before take no memory
        out = func(*args, **kwargs)
        self._see(out)
        return out

    def _see(self, values: Any, old: bool = False) -> None:
        for tensor in _torch.flatten(values)[0]:
            if type(tensor) not in _torch.PLAIN or tensor.is_meta:
                continue
            key, storage = _torch.storage_id(tensor), tensor.untyped_storage()
            if key not in self._sizes:
                # A lazy clone has the memory of another tensor, which counts already.
                shared = old or _torch.is_lazy_clone(tensor)
                self._sizes[key] = 0 if shared else storage.nbytes()
                self.now += self._sizes[key]
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._gone, key).atexit = False

    def _gone(self, key: int) -> None:
        self.now -= self._sizes.pop(key)

    def reset_peak(self) -> None:
        """Set the peak to the bytes of now."""
        self.peak = self.now

"""The buffers of a module as values: copied at each step, averaged over ranks after it.

[Note: shared buffers] A buffer that two modules hold is one tensor under two names, and several
buffers may be views of the same memory, so that one module reads what the other writes. A step
begins with copies that share memory in the same way, even if the state has been copied tensor by
tensor. If a module assigns a new tensor to a name, that name no longer shares memory, as in any
module.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from mics_fn.collectives import SHORT_NAMES, mean_over_ranks
from mics_fn.errors import LeafError, message
from mics_fn.groups import Groups
from mics_fn.shards import MemoryPlace, each_once, overlaps

Values = dict[str, Tensor]


class ModuleBuffers:
    """Which buffers of a module are averaged, and which share memory.

    Args:
      params: the module's parameters by name.
      buffers: the module's buffers by name.
      saved: the module's state dict, whose names tell which buffers are persistent.

    Raises:
      LeafError: a buffer lies in the memory of a parameter, or of a buffer of another dtype; or a
        persistent one is float8, which no mean over ranks has; or torch cannot copy it.
    """

    def __init__(
        self, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor], saved: Mapping
    ) -> None:
        names, self.shared = [*params, *buffers], []
        for name, x in buffers.items():
            _check_copied(name, x)
        for group in overlaps([*params.values(), *buffers.values()]):
            here = {names[i]: buffers[names[i]] for i in group if i >= len(params)}
            if here and len(here) < len(group):
                self._refuse(names[group[0]], next(iter(here)), "parameter", "which moves")
            if len({x.dtype for x in here.values()}) > 1:
                first, second, *_ = here
                self._refuse(first, second, "buffer", "of another dtype")
            if here:
                self.shared.append({name: MemoryPlace.of(x) for name, x in here.items()})
        persistent = {name for name in buffers if name in saved}
        for group in self.shared:
            persistent |= set(group) if persistent & set(group) else set()
        numbers = [k for k, x in buffers.items() if x.is_floating_point() or x.is_complex()]
        self.averaged = [name for name in numbers if name in persistent]
        for name in self.averaged:
            dtype = buffers[name].dtype
            if (dtype.to_real() if dtype.is_complex else dtype) not in SHORT_NAMES:
                text = f"Trainer: buffer {name!r} is {dtype}, which has no mean over ranks"
                fix = "keep it as bfloat16, or register it with persistent=False"
                raise LeafError(message(text, fix=fix))

    @staticmethod
    def _refuse(first: str, second: str, kind: str, which: str) -> None:
        text = f"Trainer: buffer {second!r} lies in the memory of {kind} {first!r}, {which}"
        raise LeafError(message(text, fix="clone it, or take the view of it in forward"))

    def copies(self, values: Values) -> Values:
        """Copies that share memory as the module's buffers do; see [Note: shared buffers]."""
        found: Values = {}
        for group in self.shared:
            start = min(place.offset for place in group.values())
            stop = max(place.stop for place in group.values())
            memory = values[next(iter(group))].new_empty(stop - start)
            for name, place in group.items():
                view = memory.as_strided(place.size, place.stride, place.offset - start)
                once = each_once(view)
                once.copy_(values[name][tuple(slice(n) for n in once.shape)])
                found[name] = view
        return {name: found[name] if name in found else x.clone() for name, x in values.items()}

    def replaced(self, names: list[str]) -> None:
        """Take note of buffers to which modules assigned new tensors."""
        for group in self.shared:
            for name in names:
                group.pop(name, None)
        self.shared = [group for group in self.shared if len(group) > 1]

    def average(self, values: Values, home: Groups) -> Values:
        """The values with persistent buffers of floats and complex numbers averaged over ranks.

        Communication: for each dtype one mean of all of them, over each of the two groups.
        """
        if home.world_size == 1:
            return values
        for dtype in dict.fromkeys(values[name].dtype for name in self.averaged):
            mine = [name for name in self.averaged if values[name].dtype == dtype]
            flat = torch.cat([values[name].flatten() for name in mine])
            sizes = [values[name].numel() for name in mine]
            real = torch.view_as_real(flat.resolve_conj()) if dtype.is_complex else flat
            mean = mean_over_ranks(home, real.flatten()).view(real.shape)
            means = (torch.view_as_complex(mean) if dtype.is_complex else mean).split(sizes)
            for name, mean in zip(mine, means, strict=True):
                values[name] = mean.view(values[name].shape)
        return self.copies(values) if self.shared else values


def _check_copied(name: str, x: Tensor) -> None:
    """Raise LeafError unless each step can begin with a copy of a buffer."""
    wrong = "nested" if x.is_nested else "quantized" if x.is_quantized else ""
    try:
        torch.empty(0 if wrong else 1, dtype=x.dtype).clone()
    except RuntimeError:
        wrong = f"{x.dtype}, of which torch makes no copies"
    if wrong:
        text = f"Trainer: buffer {name!r} is {wrong}"
        raise LeafError(message(text, fix="keep the numbers that it stands for in buffers"))

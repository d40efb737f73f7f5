"""Values in the form in which they are saved: what JSON has, and tensors.

JSON has no tuples, and its dicts are the only things with names. So here a dict becomes
`{"dict": {...}}` and a tuple `{"tuple": [...]}`, which nothing else can be taken for.
"""

import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mics_fn import _torch
from mics_fn.errors import LeafError
from mics_fn.optim import Guard

_SIMPLE = (bool, int, float, str, type(None))
_TWISTER = "MT19937"  # the generator that numpy begins with


def as_plain(value: Any, path: str) -> Any:
    """A value of dicts, lists, tuples, tensors, numbers and strings in the form of this file.

    Args:
      value: what is to be saved; its tensors are copied.
      path: what it is called, for errors.

    Raises:
      LeafError: it holds something else, or a dict whose keys are not strings.
    """
    if type(value) in _SIMPLE:
        return value
    if isinstance(value, Tensor):
        return value.detach().clone()
    if type(value) is list:
        return [as_plain(x, f"{path}.{i}") for i, x in enumerate(value)]
    if type(value) is tuple:
        return {"tuple": [as_plain(x, f"{path}.{i}") for i, x in enumerate(value)]}
    if isinstance(value, dict):
        odd = next((key for key in value if type(key) is not str), None)
        if odd is None:
            return {"dict": {key: as_plain(x, f"{path}.{key}") for key, x in value.items()}}
        path, value = f"a key of {path}", odd
    fix = "use dicts with names, lists, tuples, numbers, strings, None and tensors"
    raise LeafError(f"{path} is {type(value).__name__}, which cannot be saved", fix=fix)


def from_plain(value: Any) -> Any:
    """The value that `as_plain` was given."""
    if isinstance(value, list):
        return [from_plain(x) for x in value]
    if isinstance(value, dict):
        ((kind, inside),) = value.items()
        if kind == "tuple":
            return tuple(from_plain(x) for x in inside)
        return {key: from_plain(x) for key, x in inside.items()}
    return value


class Randoms(NamedTuple):
    """The states of the generators that a step or a loader may draw from.

    Args:
      cpu: the state of torch's generator on the CPU.
      device: the state of this rank's accelerator; None on the CPU, or if torch keeps none.
      kind: the type of that device.
      python: the state of `random`.
      numpy: the state of `numpy.random`, as numpy gives it; None if numpy is not imported.
      own: the states of a loader's own generators.
    """

    cpu: Tensor
    device: Tensor | None
    kind: str
    python: tuple
    numpy: Any
    own: Sequence[Tensor] = ()

    @classmethod
    def now(cls, device: torch.device, own: Sequence[torch.Generator] = ()) -> "Randoms":
        """Return the states at this moment."""
        generator, numpy = _generator(device), sys.modules.get("numpy")
        return cls(
            torch.get_rng_state(),
            None if generator is None else generator.get_state(),
            device.type,
            random.getstate(),
            None if numpy is None else numpy.random.get_state(),
            [each.get_state() for each in own],
        )

    def put_back(self, device: torch.device, own: Sequence[torch.Generator] = ()) -> None:
        """Set the states of this process to these; that of another type of device is left out."""
        torch.set_rng_state(self.cpu)
        generator, numpy = _generator(device), sys.modules.get("numpy")
        if generator is not None and self.device is not None and device.type == self.kind:
            generator.set_state(self.device)
        random.setstate(self.python)
        if numpy is not None and self.numpy is not None:
            numpy.random.set_state(self.numpy)
        for each, state in zip(own, self.own, strict=False):
            each.set_state(state)

    def plain(self) -> dict[str, Any]:
        """Return the states as they are saved: about 15 kB of tensors."""
        (version, words, gauss), numpy = self.python, None
        if self.numpy is not None:
            _, key, *rest = self.numpy
            numpy = [torch.tensor([*map(int, key)]), *rest]
        python, own = [version, torch.tensor(words), gauss], list(self.own)
        found = {"cpu": self.cpu, "device": self.device, "kind": self.kind, "own": own}
        return {**found, "python": python, "numpy": numpy}

    @classmethod
    def from_plain(cls, saved: Mapping[str, Any], device: torch.device) -> "Randoms":
        """Return the states that `plain` gave, once new generators have accepted them.

        What they raise, if these are no such states, is whatever a file may make them raise.
        """
        (version, words, gauss), numpy = saved["python"], sys.modules.get("numpy")
        python, twister = (version, tuple(words.tolist()), gauss), None
        for state in (saved["cpu"], *saved["own"]):
            torch.Generator().set_state(state)
        if saved["device"] is not None and saved["kind"] == device.type:
            torch.Generator(device).set_state(saved["device"])
        random.Random().setstate(python)
        if saved["numpy"] is not None:
            key, *rest = saved["numpy"]
            twister = (_TWISTER, key.tolist(), *rest)
            if numpy is not None:
                numpy.random.RandomState().set_state(twister)
        return cls(saved["cpu"], saved["device"], saved["kind"], python, twister, saved["own"])


def _generator(device: torch.device) -> torch.Generator | None:
    """Return torch's generator of an accelerator; None on the CPU, or if it keeps none."""
    return None if device.type == "cpu" else _torch.default_generator(device)


# What changes in a guard from step to step, as numbers that ranks and later runs take over.

_COUNTS = ("in_row", "skipped")  # beside those of its scale


def guard_numbers(guard: Guard) -> tuple[list[Any], list[float] | None]:
    """What changes in a guard from step to step: those of its scale and its own; the watch's norms.

    JSON keeps every bit of them.
    """
    norms = guard.spike and list(guard.spike.norms)
    own = [getattr(guard, name) for name in _COUNTS]
    return [*(getattr(guard.scale, name) for name in guard.scale.CHANGING), *own], norms


def with_numbers(guard: Guard, scale: list[Any], norms: list[float] | None) -> Guard:
    """The guard with what `guard_numbers` gave of one like it."""
    spike = guard.spike and replace(guard.spike, norms=tuple(norms or ()))
    found = dict(zip((*guard.scale.CHANGING, *_COUNTS), scale, strict=True))
    changed = replace(guard.scale, **{name: found.pop(name) for name in guard.scale.CHANGING})
    return replace(guard, scale=changed, spike=spike, **found)

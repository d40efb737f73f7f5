"""`StepMemory`: the memory of a step by kind, from what was told while it ran."""

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from mics_fn.errors import human_bytes

# How they are told, by the field; those of the state exist for the whole step.
_STATE = {"shards": "shards", "moments": "moments", "buffers": "buffers"}
_IN_STEP = {
    "gathered": "gathered",
    "gradients_in_full": "gradients in full",
    "gradients_in_reductions": "gradients in reductions",
    "gradient_shards": "gradient shards",
}

Sample = tuple[float, str, Hashable, int]  # when, kind, what holds it, and from now on how much


class StepMemory(NamedTuple):
    """The most bytes that each kind of data took on this rank; prints as a table.

    They are sizes of tensors, padding included, and not of what an allocator keeps beside them.
    Activations are not counted.

    Args:
      shards: this rank's parameters; frozen and replicated ones too.
      moments: the state of the optimizer.
      buffers: the buffers of the model.
      gathered: buckets in full, and the copies that a placement keeps; in the last pass also their
        memory that gradients took over.
      gradients_in_full: gradients that wait to be packed.
      gradients_in_reductions: the memory in which a few buckets are reduced.
      gradient_shards: this rank's part of the gradients.
      total: the sum of all of these. The groups keep memory for the next step, so this is what a
        step takes, without activations.
    """

    shards: int
    moments: int
    buffers: int
    gathered: int
    gradients_in_full: int
    gradients_in_reductions: int
    gradient_shards: int
    total: int

    def __str__(self) -> str:
        rows = [(name.replace("_", " "), human_bytes(n)) for name, n in self._asdict().items()]
        return "\n".join(f"{name:<24}{nbytes:>10}" for name, nbytes in rows)


class Told(NamedTuple):
    """What samples of memory say.

    Args:
      most: the most of each kind.
      curve: times in seconds, each with the bytes of what is made within a step, by kind.
    """

    most: StepMemory
    curve: tuple[tuple[float, dict[str, int]], ...]


def memory_of(samples: Sequence[Sample]) -> Told:
    """The most of each kind, and how much there was when."""
    held: dict[tuple[str, Hashable], int] = {}
    now, most, curve = Counter[str](), Counter[str](), []
    for at, kind, key, nbytes in samples:
        now[kind] += nbytes - held.get((kind, key), 0)
        held[kind, key] = nbytes
        most[kind] = max(most[kind], now[kind])
        curve.append((at, {name: now[name] for name in _IN_STEP.values()}))
    fields = {field: most[kind] for field, kind in (_STATE | _IN_STEP).items()}
    return Told(StepMemory(**fields, total=sum(fields.values())), tuple(curve))

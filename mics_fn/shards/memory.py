"""Which tensors share memory."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mics_fn import _torch
from mics_fn.errors import LeafError, message


class MemoryPlace(NamedTuple):
    """Where a tensor lies in memory. Two tensors with equal places are the same tensor."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # in elements

    @classmethod
    def of(cls, x: Tensor) -> "MemoryPlace":
        """The place of a strided tensor, which may be on meta."""
        where = int(x.storage_offset())
        return cls(_torch.storage_id(x), x.dtype, tuple(x.shape), x.stride(), where)

    @property
    def stop(self) -> int:
        """The end of its elements, counted from the start of the storage."""
        return (
            self.offset + 1 + sum((n - 1) * s for n, s in zip(self.size, self.stride, strict=True))
        )


def same_tensor(x: object, y: object) -> bool:
    """Whether both are tensors with elements, in the same memory, with equal shape and strides."""
    if not isinstance(x, Tensor) or not isinstance(y, Tensor):
        return False
    return x.numel() > 0 and y.numel() > 0 and MemoryPlace.of(x) == MemoryPlace.of(y)


def owners_of(leaves: Sequence[Tensor]) -> list[int]:
    """For each leaf the first one that is the same tensor: the same object or the same place."""
    first: dict[Any, int] = {}
    owners = []
    for i, leaf in enumerate(leaves):
        key: Any = id(leaf) if leaf.is_floating_point() else (i, "no ties between integers")
        if leaf.is_floating_point() and leaf.numel() and not leaf.is_meta:
            key = MemoryPlace.of(_torch.unwrapped(leaf))
        owners.append(first.setdefault(key, i))
    return owners


def each_once(x: Tensor) -> Tensor:
    """A view of a tensor that has each element once, without those that `expand` repeats."""
    for dim, stride in enumerate(x.stride()):
        x = x.narrow(dim, 0, 1) if stride == 0 and x.shape[dim] > 1 else x
    return x


def overlaps(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Groups of tensors, by their numbers, that are connected by shared memory.

    Example:
      >>> x = torch.zeros(4, 2)
      >>> overlaps([x[:, 0], torch.ones(2), x[:, 1], x[2:], x[0, :1]])
      [[0, 2, 3, 4]]
    """
    lie = [x.numel() > 0 and x.layout is torch.strided for x in tensors]
    places = [MemoryPlace.of(x) if does else None for x, does in zip(tensors, lie, strict=True)]
    same: dict[MemoryPlace, list[int]] = {}
    for i, place in enumerate(places):
        if place is not None:
            same.setdefault(place, []).append(i)
    found = []
    for near in _near(same):
        found += [sorted(i for place in group for i in same[place]) for group in _exactly(near)]
    return sorted(group for group in found if len(group) > 1)


def refuse_overlaps(verb: str, leaves: Mapping[str, Tensor], trained: Collection[str]) -> None:
    """Raise LeafError if trained leaves share memory with others without being the same tensor.

    An update of one would have to change the other, which is lost because shards have memory of
    their own.

    Args:
      verb: named in the error.
      leaves: the tensors, by path.
      trained: the paths of those that are trained.
    """
    paths = list(leaves)
    for group in overlaps(list(leaves.values())):
        by_place = {MemoryPlace.of(leaves[paths[i]]): paths[i] for i in reversed(group)}
        if len(by_place) > 1 and any(paths[i] in trained for i in group):
            first, second, *_ = sorted(by_place.values(), key=paths.index)
            text = f"{verb}: {first} and {second} overlap in memory, and are not the same tensor"
            shapes = f"shapes {tuple(leaves[first].shape)} and {tuple(leaves[second].shape)}"
            fix = "clone one of them, or keep one tensor and take views of it in forward"
            raise LeafError(message(text, [shapes], fix))


def _near(places: Iterable[MemoryPlace]) -> list[list[MemoryPlace]]:
    """Groups of places in one storage whose ranges overlap."""
    found: list[list[MemoryPlace]] = []
    storage, end = None, 0
    for place in sorted(places, key=lambda p: (p.storage, p.offset * p.dtype.itemsize)):
        start, stop = (at * place.dtype.itemsize for at in (place.offset, place.stop))
        if place.storage != storage or start >= end:
            found.append([])
            storage, end = place.storage, 0
        found[-1].append(place)
        end = max(end, stop)
    return found


def _exactly(places: Sequence[MemoryPlace]) -> list[list[MemoryPlace]]:
    """Groups of places that share elements. (Columns of a matrix overlap only in their ranges.)"""
    if len(places) == 1:
        return [list(places)]
    unit = 1 if len({p.dtype.itemsize for p in places}) > 1 else places[0].dtype.itemsize
    start = min(p.offset * p.dtype.itemsize for p in places) // unit
    stop = max(p.stop * p.dtype.itemsize for p in places) // unit
    owner = torch.full((stop - start,), -1, dtype=torch.int32)
    groups = [[place] for place in places]
    for i, place in enumerate(places):
        width = place.dtype.itemsize // unit
        size, stride = (*place.size, width), (*(width * s for s in place.stride), 1)
        mine = each_once(owner.as_strided(size, stride, place.offset * width - start))
        for other in mine.unique().tolist():
            if other >= 0 and groups[other] is not groups[i]:
                groups[other] += groups[i]
                for member in groups[i]:
                    groups[places.index(member)] = groups[other]
        mine.fill_(i)
    return [group for i, group in enumerate(groups) if group[0] == places[i]]

"""Directories of torch.distributed.checkpoint (DCP), as FSDP2 and torchtitan write them.

Each rank that saves writes a file in which its *chunks* lie one after the other. A chunk is a part
of a tensor, a box with offsets and sizes, in the form that `torch.save` gives to one tensor. The
file `.metadata` says which chunks there are, and at which byte of which file each begins. It is a
pickle, and torch runs it; here it is only read, as `pickled.py` describes, so that no directory
needs to be trusted for it.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mics_fn.errors import FileError
from mics_fn.init.pickled import NAMED_DTYPES, Made, read_pickle
from mics_fn.init.reading import (
    MAX_DIMS,
    TRUST,
    Entry,
    File,
    Weights,
    check_shape,
    contiguous,
    is_text,
    refusal,
    shown,
)
from mics_fn.init.torch_files import tensor_of_torch

METADATA = ".metadata"

_OF_METADATA = ("Metadata", "MetadataIndex", "ChunkStorageMetadata", "TensorProperties")
_OF_METADATA += ("TensorStorageMetadata", "BytesStorageMetadata")
_CLASSES = [f"torch.distributed.checkpoint.metadata.{name}" for name in _OF_METADATA]
_CLASSES += ["torch.distributed.checkpoint.filesystem._StorageInfo"]
_CLASSES += ["torch.distributed._shard.sharded_tensor.metadata.TensorProperties"]  # before 2.3
_TOGETHER = "copy all files of one save together"

Sizes = tuple[int, ...]


class Place(NamedTuple):
    """Where a chunk lies."""

    file: str
    start: int  # in bytes
    length: int


class Chunk(NamedTuple):
    """A part of a tensor: a box in it, and where the box lies."""

    offsets: Sizes
    sizes: Sizes
    place: Place


def of_dcp(index: File, folder: Path) -> Weights:
    """The tensors that a `.metadata` describes; objects that are not tensors are left out.

    Args:
      index: that file.
      folder: in which the files that it names are.

    Raises:
      FileError: it is damaged, or has more leaves than its limits allow.
    """
    index.require_small(index.size)
    try:
        found = read_pickle(index.read(0, index.size), _CLASSES)
        places, tensors = _places(found), _dict(found, "Metadata", "state_dict_metadata")
        index.require_small(0, len(tensors))
        weights = {}
        for leaf, value in tensors.items():
            if not isinstance(leaf, str) or not is_text(leaf):
                raise ValueError(f"it names a tensor {shown(leaf)}")
            if _class_of(value) != "BytesStorageMetadata":
                weights[leaf] = _Tensor(index, folder, leaf, value, places).entry
    except FileError:
        raise
    except ValueError as error:
        raise index.error("is damaged", [f"{error}"]) from None
    return weights


class _Tensor:
    """A tensor whose chunks lie in several files.

    Args:
      index: the file that describes it.
      folder: where its files are.
      leaf: its name.
      described: what the index says of it.
      places: where chunks lie, by name and offsets.

    Raises:
      ValueError: what the index says does not fit together.
    """

    def __init__(
        self,
        index: File,
        folder: Path,
        leaf: str,
        described: Any,
        places: dict[tuple[str, Sizes], Place],
    ) -> None:
        self.index, self.folder, self.leaf = index, folder, leaf
        facts = _state(described, "TensorStorageMetadata")
        self.dtype = _dtype(leaf, facts.get("properties"))
        self.shape = _sizes(facts.get("size"))
        check_shape(self.shape, self.dtype)
        given = facts.get("chunks")
        self.chunks: list[Chunk] = []
        chunks = given if isinstance(given, list) else []
        for chunk in chunks:
            box = _state(chunk, "ChunkStorageMetadata")
            offsets, sizes = _sizes(box.get("offsets")), _sizes(box.get("sizes"))
            if not len(offsets) == len(sizes) == len(self.shape):
                raise ValueError(f"{shown(leaf)}: a chunk has other dimensions than the tensor")
            ends = [a + n for a, n in zip(offsets, sizes, strict=True)]
            if any(end > n for end, n in zip(ends, self.shape, strict=True)):
                raise ValueError(f"{shown(leaf)}: a chunk lies outside of {self.shape}")
            if not prod(sizes):  # of ranks that have no part of it
                continue
            if (leaf, offsets) not in places:
                raise ValueError(f"{shown(leaf)}: it does not say where chunk {offsets} lies")
            self.chunks.append(Chunk(offsets, sizes, places[leaf, offsets]))
        numel = sum(prod(chunk.sizes) for chunk in self.chunks)
        if numel != prod(self.shape):
            had = f"chunks of {numel} elements in all, expected {prod(self.shape)}"
            raise ValueError(f"{shown(leaf)}: it has {had}")

    @property
    def entry(self) -> Entry:
        """The tensor as any other one that is read from files."""
        return Entry(self.shape, self.dtype, self.read)

    def read(self, start: int, stop: int) -> Tensor:
        """The elements between two indices, from the chunks that have some of them."""
        out = torch.empty(stop - start, dtype=self.dtype)
        done = 0
        for offsets, sizes in boxes(self.shape, start, stop):
            numel = prod(sizes)
            self._read_box(offsets, out[done : done + numel].view(sizes))
            done += numel
        return out

    def _read_box(self, offsets: Sizes, box: Tensor) -> None:
        """Fill a box of the tensor; within each chunk its elements lie one after the other."""
        seen = torch.zeros(box.shape, dtype=torch.bool)
        for chunk in self.chunks:
            ends = [a + n for a, n in zip(chunk.offsets, chunk.sizes, strict=True)]
            low = [max(a, b) for a, b in zip(offsets, chunk.offsets, strict=True)]
            high = [min(a + n, b) for a, n, b in zip(offsets, box.shape, ends, strict=True)]
            sizes = [b - a for a, b in zip(low, high, strict=True)]
            if any(n <= 0 for n in sizes):
                continue
            strides = contiguous(chunk.sizes)
            inside = zip(low, chunk.offsets, strides, strict=True)
            start = sum((a - b) * stride for a, b, stride in inside)
            where = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, offsets, strict=True))
            if seen[where].any():
                raise self.index.error("is damaged", ["its chunks overlap"], self.leaf)
            seen[where] = True
            box[where] = self._read_chunk(chunk, start, start + prod(sizes)).view(sizes)
        if not seen.all():
            raise self.index.error("is damaged", ["its chunks leave a gap"], self.leaf)

    def _read_chunk(self, chunk: Chunk, start: int, stop: int) -> Tensor:
        """Elements of a chunk, from its file."""
        name, first, length = chunk.place
        reason = refusal(self.folder, name, trust=self.index.limits.trust)
        if reason:
            what = f"names {shown(name)}, which is not opened"
            raise self.index.error(what, [reason], self.leaf, TRUST)
        try:
            opened = File(self.index.verb, self.folder / name, self.index.limits)
        except OSError as error:
            what = f"names {shown(name)}, which cannot be opened"
            raise self.index.error(what, [f"{error.strerror}"], self.leaf, _TOGETHER) from error
        with closing(opened):
            file = opened.part(first, length)
            entry = tensor_of_torch(file, self.leaf)
            if (entry.shape, entry.dtype) != (chunk.sizes, self.dtype):
                wrong = f"chunk {chunk.offsets} should be {self.dtype} of shape {chunk.sizes}, "
                wrong += f"is {entry.dtype} of {entry.shape}"
                raise file.error("does not match .metadata", [wrong], self.leaf, _TOGETHER)
            return entry.read(start, stop)


def boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[Sizes, Sizes]]:
    """Offsets and sizes of boxes that one after the other are a range of the flattened tensor.

    A box spans all of its dimensions but the first one in which it has more than one index, so it
    is a range of each chunk, too.

    >>> list(boxes((4, 3), 2, 10))
    [((0, 2), (1, 1)), ((1, 0), (2, 3)), ((3, 0), (1, 1))]
    """
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    inner = prod(shape[1:])
    first, last = -(-start // inner), stop // inner  # the rows that are meant as a whole
    parts = [(first - 1, start, min(stop, first * inner))]
    if first <= last:
        parts.append((last, last * inner, stop))
    for part, (row, begin, end) in enumerate(parts):
        if part and first < last:
            yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
        for offsets, sizes in boxes(shape[1:], begin - row * inner, end - row * inner):
            yield (row, *offsets), (1, *sizes)


def _places(found: Any) -> dict[tuple[str, Sizes], Place]:
    """Where each chunk lies, by the name of its tensor and its offsets."""
    places: dict[tuple[str, Sizes], Place] = {}
    for key, value in _dict(found, "Metadata", "storage_data").items():
        index, info = _state(key, "MetadataIndex"), _state(value, "_StorageInfo")
        name, file = index.get("fqn"), info.get("relative_path")
        start, length = info.get("offset"), info.get("length")
        if index.get("offset") is None:  # an object that is not a tensor
            continue
        if not (isinstance(name, str) and isinstance(file, str)):
            raise ValueError(f"a chunk of {shown(name)} has no place in a file")
        if type(start) is not int or type(length) is not int:
            raise ValueError(f"a chunk of {shown(name)} has no place in {shown(file)}")
        if info.get("transform_descriptors"):
            raise ValueError(
                f"{shown(name)} is transformed: {shown(info['transform_descriptors'])}"
            )
        at = name, _sizes(index["offset"])
        if at in places:
            raise ValueError(f"chunk {at[1]} of {shown(name)} is there twice")
        places[at] = Place(file, start, length)
    return places


def _class_of(value: Any) -> str:
    return value.name.rpartition(".")[2] if isinstance(value, Made) else type(value).__name__


def _state(value: Any, kind: str) -> dict[str, Any]:
    """The attributes of an instance; none if it was given none."""
    if _class_of(value) != kind or not isinstance(value.state, dict):
        raise ValueError(f"expected {kind}, got {shown(_class_of(value))}")
    return value.state


def _dict(value: Any, kind: str, name: str) -> dict[Any, Any]:
    found = _state(value, kind).get(name)
    if not isinstance(found, dict):
        raise ValueError(f"its {name} is {_class_of(found)}, expected dict")
    return found


def _sizes(value: Any) -> Sizes:
    """Offsets or sizes."""
    numbers: Any = value if isinstance(value, tuple) else [None]
    if len(numbers) > MAX_DIMS or not all(type(n) is int and 0 <= n < 2**63 for n in numbers):
        raise ValueError(f"{shown(value)} are not at most {MAX_DIMS} sizes")
    return numbers


def _dtype(leaf: str, properties: Any) -> torch.dtype:
    """The dtype of a tensor, which stands first in its properties."""
    state = properties.state if _class_of(properties) == "TensorProperties" else None
    if isinstance(state, dict):
        state = (state.get("dtype"),)
    name = getattr(state[0], "name", "") if isinstance(state, tuple) and state else ""
    if name not in NAMED_DTYPES:
        raise ValueError(f"{shown(leaf)} has a dtype that is not read: {shown(name)}")
    return NAMED_DTYPES[name]

"""Files of named tensors, from which any range of elements can be read by itself.

A safetensors file is 8 bytes of length, a JSON header and flat data, so the place of an element in
it is known from the header. A file of `torch.save` is a zip file with a pickle that describes the
tensors, and a record for each storage. An index (`*.index.json`) names the file of each tensor, and
a `.metadata` of torch.distributed.checkpoint says where the chunks of each tensor lie. All of them
may come from strangers: see [Note: files of strangers] in `torch_files.py`.

Each rank that saves writes a file in which its *chunks* lie one after the other. A chunk is a part
of a tensor, a box with offsets and sizes, in the form that `torch.save` gives to one tensor. The
file `.metadata` says which chunks there are, and at which byte of which file each begins. It is a
pickle, and torch runs it; here it is only read, as `torch_files.py` describes, so that no directory
needs to be trusted for it.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from math import prod
from os import PathLike, fspath
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mics_fn.errors import FileError, message
from mics_fn.init.torch_files import (
    MAX_DIMS,
    NAMED_DTYPES,
    TRUST,
    Entry,
    File,
    Limits,
    Made,
    Weights,
    check_shape,
    contiguous,
    is_text,
    of_torch,
    read_pickle,
    refusal,
    shown,
    tensor_of_torch,
)

# Safetensors files: 8 bytes of length, a header of JSON, and the values of all tensors.

DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
}
_NEITHER = "is neither a safetensors file nor a zip file of torch.save"


def read_json(file: File, start: int, length: int, wrong: str) -> Any:
    """A part of a file that is JSON, without names that are there twice.

    Args:
      file: what to read.
      start: of the part, in bytes.
      length: of the part, in bytes.
      wrong: what to say of a file that has something else there.

    Raises:
      FileError: it has something else there, or more than its limits allow.
    """
    file.require_small(length)
    data = file.read(start, length)
    try:
        return strict_json(data.decode())
    except (ValueError, RecursionError) as error:
        raise file.error(wrong, [f"{error}"]) from None


def strict_json(text: str) -> Any:
    """The value of a JSON text without names that are there twice, and without NaN.

    Raises:
      ValueError, RecursionError: it is something else.
    """
    return json.loads(text, object_pairs_hook=_once, parse_constant=_no_number)


def of_safetensors(file: File) -> Weights:
    """The tensors of a safetensors file; see `with_texts`."""
    return with_texts(file)[0]


def with_texts(file: File) -> tuple[Weights, dict[str, str]]:
    """The tensors of a safetensors file, whose bytes have neither gaps nor overlaps; and its texts.

    Raises:
      FileError: it is damaged, or has more leaves than its limits allow.
    """
    length = int.from_bytes(file.read(0, 8), "little")
    if length > file.size - 8:
        raise file.error(_NEITHER, ["its header would be longer than the file"])
    header = read_json(file, 8, length, _NEITHER)
    if not isinstance(header, dict):
        raise file.error(_NEITHER, [f"its header is a {type(header).__name__}"])
    texts = header.pop("__metadata__", {})
    said = [*texts, *texts.values()] if isinstance(texts, dict) else [None]
    if not all(isinstance(x, str) and is_text(x) for x in said):
        raise file.error("is damaged", ["its metadata has something else than texts"])
    file.require_small(length, len(header))
    base, found = 8 + length, {}
    places: list[tuple[int, int, str]] = []
    for leaf, facts in header.items():
        try:
            kind, shape, begin, end = _facts(leaf, facts, file.size - base)
        except ValueError as error:
            raise file.error("is damaged", [f"{error}"], leaf) from None
        found[leaf] = file.entry(leaf, base + begin, kind, shape, contiguous(shape))
        places.append((begin, end, leaf))
    _require_dense(file, places, file.size - base)
    return found, texts


def _require_dense(file: File, places: list[tuple[int, int, str]], room: int) -> None:
    """Refuse tensors that overlap, and bytes that belong to none."""
    last = 0
    for begin, end, leaf in sorted(places):
        if begin != last:
            how = "overlap others" if begin < last else "leave a gap before them"
            raise file.error("is damaged", [f"its bytes {begin} to {end} {how}"], leaf)
        last = end
    if last != room:
        raise file.error("is damaged", [f"{room - last} bytes follow the last tensor"])


def _facts(leaf: str, facts: Any, room: int) -> tuple[torch.dtype, list[int], int, int]:
    """Dtype, shape and place of a tensor in a file of safetensors, by its header.

    Raises:
      ValueError: they do not fit together, or not into the bytes of all tensors, `room`.
    """
    if not isinstance(facts, dict) or set(facts) != {"dtype", "shape", "data_offsets"}:
        raise ValueError("the header has something else than its dtype, shape and data_offsets")
    if not is_text(leaf):
        raise ValueError("its name cannot be written")
    code, shape, offsets = facts["dtype"], facts["shape"], facts["data_offsets"]
    kind = getattr(torch, DTYPES.get(code, ""), None) if isinstance(code, str) else None
    if kind is None:
        raise ValueError(f"torch has no dtype {shown(code)}")
    check_shape(shape, kind)
    pair: Any = offsets if isinstance(offsets, list) and len(offsets) == 2 else [None, None]
    if not all(type(n) is int for n in pair):
        raise ValueError(f"data_offsets {shown(offsets)} are not two whole numbers")
    begin, end = pair
    if end - begin != prod(shape) * kind.itemsize or not 0 <= begin <= end <= room:
        raise ValueError(
            f"shape {shown(shape)} of {code} does not fit bytes {shown(begin)} to {shown(end)}"
        )
    return kind, shape, begin, end


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON; raises ValueError if a name is there twice."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{shown(name)} is there twice")
        found[name] = value
    return found


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is not a number of JSON")


# Directories of torch.distributed.checkpoint (DCP), as FSDP2 and torchtitan write them.

METADATA = ".metadata"

_OF_METADATA = ("Metadata", "MetadataIndex", "ChunkStorageMetadata", "TensorProperties")
_OF_METADATA += ("TensorStorageMetadata", "BytesStorageMetadata")
_CLASSES = [f"torch.distributed.checkpoint.metadata.{name}" for name in _OF_METADATA]
_CLASSES += ["torch.distributed.checkpoint.filesystem._StorageInfo"]
_CLASSES += ["torch.distributed._shard.sharded_tensor.metadata.TensorProperties"]  # before 2.3
_TOGETHER = "copy all files of one save together"

Sizes = tuple[int, ...]


class ChunkPlace(NamedTuple):
    """Where a chunk lies."""

    file: str
    start: int  # in bytes
    length: int


class Chunk(NamedTuple):
    """A part of a tensor: a box in it, and where the box lies."""

    offsets: Sizes
    sizes: Sizes
    place: ChunkPlace


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
        places: dict[tuple[str, Sizes], ChunkPlace],
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


def _places(found: Any) -> dict[tuple[str, Sizes], ChunkPlace]:
    """Where each chunk lies, by the name of its tensor and its offsets."""
    places: dict[tuple[str, Sizes], ChunkPlace] = {}
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
        places[at] = ChunkPlace(file, start, length)
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


NAMES = (
    "model.safetensors",
    "pytorch_model.bin",
)  # in a folder; or an index of such
_IN_FOLDER = [found for name in NAMES for found in (name, f"{name}.index.json")] + [METADATA]
Source = str | PathLike | Mapping[str, Tensor]


class WeightsNotFound(FileError, FileNotFoundError):
    """There is no file or folder at the path that was given."""


@contextmanager
def open_weights(verb: str, source: Source, limits: Limits) -> Iterator[Weights]:
    """The tensors of a file, a folder, an index or a mapping, by name.

    Raises:
      FileError: the file is damaged, holds something else, or asks for more than the limits allow.
      WeightsNotFound: there is no such file.
      OSError: it cannot be opened.
    """
    with ExitStack() as closing:
        if isinstance(source, Mapping):
            yield {key: _of_tensor(value.detach()) for key, value in source.items()}
        else:
            name = "weights" if verb == "init_model" else "path"
            path = fspath(source)
            try:
                found = _Opening(verb, limits, closing).weights(Path(path))
            except FileNotFoundError as error:
                fix = "pass a file of weights, an index of such, or a folder that has one of them"
                text = f"{verb}: {name}={path!r} does not exist"
                raise WeightsNotFound(message(text, fix=fix), path) from error
            yield found


class _Opening:
    """The files that one verb reads from.

    Args:
      verb: for errors.
      limits: what the files may ask for.
      closing: closes them.
    """

    def __init__(self, verb: str, limits: Limits, closing: ExitStack) -> None:
        self.verb, self.limits, self.closing = verb, limits, closing

    def weights(self, path: Path) -> Weights:
        """The tensors of a file, a folder or an index."""
        if path.is_dir():
            path = self.file_in(path)
        file = self.open(path)
        if path.name == METADATA:
            return of_dcp(file, path.parent)
        return self.of_index(file, path.parent) if path.suffix == ".json" else self.of_file(file)

    def file_in(self, folder: Path) -> Path:
        """The file of weights in a folder."""
        for found in _IN_FOLDER:
            if not (folder / found).exists():
                continue
            reason = refusal(folder, found, trust=self.limits.trust)
            if reason:
                what = f"{self.verb}: {folder / found} is not opened: {reason}"
                raise FileError(message(what, fix=TRUST), str(folder / found))
            return folder / found
        fix = f"pass the file itself; looked for {' and '.join(NAMES)}, their .index.json, and"
        fix += f" {METADATA} of torch.distributed.checkpoint"
        what = f"{self.verb}: no weights in the folder {folder}"
        raise FileError(message(what, fix=fix), str(folder))

    def open(self, path: Path) -> File:
        """A file, which is closed with the others."""
        file = File(self.verb, path, self.limits)
        self.closing.callback(file.close)
        return file

    def of_file(self, file: File) -> Weights:
        """The tensors of a file that holds them itself."""
        is_zip = file.size > 4 and file.read(0, 4) == b"PK\3\4"
        return of_torch(file) if is_zip else of_safetensors(file)

    def of_index(self, index: File, folder: Path) -> Weights:
        """The tensors of the files that an index names."""
        wrong = "has no weight_map of names to files"
        content = read_json(index, 0, index.size, wrong)
        file_of = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(file_of, dict):
            raise index.error(wrong, fix="pass an index as transformers saves it")
        index.require_small(index.size, len(file_of))
        files: dict[str, Weights] = {}
        for leaf, name in file_of.items():
            if not isinstance(name, str) or name not in files:
                self.check_name(index, folder, leaf, name)
                files[name] = self.named_file(index, folder / name, leaf)
        lost = [leaf for leaf, name in file_of.items() if leaf not in files[name]]
        if lost:
            line = f"it should be in {shown(file_of[lost[0]])} ({len(lost)} are lost)"
            raise index.error("does not match its files", [line], lost[0], _TOGETHER)
        return {leaf: files[name][leaf] for leaf, name in file_of.items()}

    def check_name(self, index: File, folder: Path, leaf: str, name: Any) -> None:
        """Refuse a name that is none, leads out of the folder, or is an index again."""
        reason = refusal(folder, name, trust=self.limits.trust)
        if not reason and name.endswith(".json"):
            reason = "it is an index, too"
        if reason:
            raise index.error(f"names {shown(name)}, which is not opened", [reason], leaf, TRUST)

    def named_file(self, index: File, path: Path, leaf: str) -> Weights:
        """The tensors of a file that an index names."""
        try:
            file = self.open(path)
        except OSError as error:
            what = f"names {shown(path.name)}, which cannot be opened"
            raise index.error(what, [f"{error.strerror}"], leaf, _TOGETHER) from error
        return self.of_file(file)


def _of_tensor(value: Tensor) -> Entry:
    inner = max(1, prod(value.shape[1:]))

    def read(start: int, stop: int) -> Tensor:
        if not value.ndim:
            return value.reshape(1)[start:stop]
        first, end = start // inner, -(-stop // inner)
        rows = value[first:end].reshape(-1)  # copies only rows that lie apart
        return rows[start - first * inner : stop - first * inner]

    return Entry(tuple(value.shape), value.dtype, read)

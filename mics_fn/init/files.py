"""Files of named tensors, from which any range of elements can be read by itself.

A safetensors file is 8 bytes of length, a JSON header and flat data, so the place of an element in
it is known from the header. A file of `torch.save` is mapped into memory, so that only the pages
that are read come from the disk. An index (`*.index.json`) names the file of each tensor.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from math import prod
from os import PathLike, fspath
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from mics_fn.errors import TreeError, message

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
NAMES = (
    "model.safetensors",
    "pytorch_model.bin",
)  # in a folder; or an index of such
Source = str | PathLike | Mapping[str, Tensor]


class Entry(NamedTuple):
    """A tensor of a file."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[int, int], Tensor]  # start and stop in the flattened tensor


Weights = dict[str, Entry]


@contextmanager
def open_weights(verb: str, source: Source) -> Iterator[Weights]:
    """The tensors of a file, a folder, an index or a mapping, by name.

    Raises:
      TreeError: the source holds something else, or is damaged.
      OSError: a file cannot be read.
    """
    with ExitStack() as closing:
        if isinstance(source, Mapping):
            yield _of_tensors(verb, "the mapping", source)
        else:
            yield _of_path(verb, _file_in(verb, Path(fspath(source))), closing)


def _file_in(verb: str, path: Path) -> Path:
    """The path itself, or the file of weights in a folder."""
    if not path.is_dir():
        return path
    for name in NAMES:
        for found in (path / name, path / f"{name}.index.json"):
            if found.exists():
                return found
    fix = f"pass the file itself; looked for {' and '.join(NAMES)}, and their .index.json"
    raise TreeError(message(f"{verb}: no weights in the folder {path}", fix=fix))


def _of_path(verb: str, path: Path, closing: ExitStack) -> Weights:
    if path.suffix == ".json":
        return _of_index(verb, path, closing)
    file = closing.enter_context(path.open("rb", buffering=0))
    if file.read(4) == b"PK\x03\x04":
        loaded = torch.load(fspath(path), map_location="cpu", mmap=True, weights_only=True)
        return _of_tensors(verb, str(path), loaded)
    return _of_safetensors(verb, path, file)


def _of_index(verb: str, path: Path, closing: ExitStack) -> Weights:
    try:
        file_of: dict[str, str] = json.loads(path.read_text())["weight_map"]
    except (ValueError, KeyError, TypeError):
        fix = "pass an index of tensors to files, as transformers saves it"
        raise TreeError(message(f"{verb}: {path} has no weight_map", fix=fix)) from None
    files = {name: _of_path(verb, path.parent / name, closing) for name in set(file_of.values())}
    lost = [key for key, name in file_of.items() if key not in files[name]]
    if lost:
        lines = [f"{lost[0]!r} should be in {file_of[lost[0]]} ({len(lost)} are lost)"]
        fix = "copy all files of one save together"
        raise TreeError(message(f"{verb}: {path} does not match its files", lines, fix=fix))
    return {key: files[name][key] for key, name in file_of.items()}


def _of_tensors(verb: str, where: str, found: Any) -> Weights:
    wrong = [f"got {type(found).__name__}"]
    if isinstance(found, Mapping):
        others = [(key, x) for key, x in found.items() if not isinstance(x, Tensor)]
        wrong = [f"got {key!r}: {type(x).__name__}" for key, x in others[:1]]
    if wrong:
        text = f"{verb}: {where} does not hold tensors by name alone"
        fix = "pass the part that does: load_shards(torch.load(path, mmap=True)['model'], ...)"
        raise TreeError(message(text, wrong, fix=fix))
    return {key: _of_tensor(value.detach()) for key, value in found.items()}


def _of_tensor(value: Tensor) -> Entry:
    inner = max(1, prod(value.shape[1:]))

    def read(start: int, stop: int) -> Tensor:
        if not value.ndim:
            return value.reshape(1)[start:stop]
        first, end = start // inner, -(-stop // inner)
        rows = value[first:end].reshape(-1)  # copies only rows that lie apart
        return rows[start - first * inner : stop - first * inner]

    return Entry(tuple(value.shape), value.dtype, read)


def _of_safetensors(verb: str, path: Path, file: BinaryIO) -> Weights:
    size = path.stat().st_size
    try:
        length = int.from_bytes(_bytes(file, 0, 8), "little")
        if length > size - 8:
            raise ValueError("the header is longer than the file")
        header: dict[str, Any] = json.loads(_bytes(file, 8, length))
        header.pop("__metadata__", None)
        return {name: _entry(file, 8 + length, size, **facts) for name, facts in header.items()}
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        text = f"{verb}: {path} is neither a safetensors file nor a zip file of torch.save"
        fix = "fetch it again; save files of torch before 1.6 anew with a newer torch"
        raise TreeError(message(text, [f"{error}"], fix=fix)) from None


def _entry(
    file: BinaryIO, base: int, size: int, *, dtype: str, shape: list[int], data_offsets: list[int]
) -> Entry:
    begin, end = data_offsets
    kind = getattr(torch, DTYPES.get(dtype, ""), None)
    if kind is None:
        raise ValueError(f"torch has no dtype {dtype}")
    if end - begin != prod(shape) * kind.itemsize or not 0 <= begin <= end <= size - base:
        raise ValueError(f"shape {shape} of {dtype} does not fit bytes {begin} to {end}")

    def read(start: int, stop: int) -> Tensor:
        width = kind.itemsize
        if start == stop:
            return torch.empty(0, dtype=kind)
        data = _bytes(file, base + begin + start * width, (stop - start) * width)
        return torch.frombuffer(data, dtype=kind)

    return Entry(tuple(shape), kind, read)


def _bytes(file: BinaryIO, offset: int, length: int) -> bytearray:
    """Bytes of a file, without reading any others."""
    data = bytearray(length)
    rest = memoryview(data)
    file.seek(offset)
    while rest:
        count = file.readinto(rest)  # pyright: ignore[reportAttributeAccessIssue]
        if not count:
            raise ValueError("the file ends early")
        rest = rest[count:]
    return data

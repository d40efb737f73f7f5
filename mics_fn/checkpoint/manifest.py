"""The manifest of a checkpoint: one JSON object that says what lies where, with its own digest.

[Note: many blocks at once] A file has a checksum for each block, so that any part of it can be
checked. But `zlib.crc32` lets other threads run only while it works, and for a single block it
works for some microseconds: threads that check block by block mostly wait for one another. So a
reader takes one checksum of all that it has read, and compares it with the one that follows from
those of the blocks. CRC-32 is linear: what a block does to the checksum of all before it does not
depend on its content, apart from its own checksum, which is added bit by bit.

[Note: lines and cells] The tensors of a checkpoint lie on *lines*. A line is a bucket: the padded
flat buffer of its leaves, cut into p chunks, of which each of the r replicas writes an equal part.
So a line of n = p r equal *cells* has one cell for each rank, and each element is in one cell.
Everything that ranks hold in full lies on one more line, in bytes, which all ranks share. Where a
tensor begins on its line, and how long the line is, is all that has to be written down: which
writers have a range of a tensor follows from it, for the ranks that wrote as for those that read,
however many they are.
"""

import hashlib
import json
import math
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mics_fn import _torch
from mics_fn.errors import (
    FileError,
    LeafError,
    message,
)
from mics_fn.init import DTYPES, check_shape, is_text, strict_json
from mics_fn.offload import is_placed
from mics_fn.shards import dtype_name

# Checksums of blocks: the CRC-32 of each, and what they say of many blocks at once.

BLOCK = 16 * 2**10  # bytes; a multiple of the size of every dtype
_ZEROS = bytes(BLOCK)


def block_sums(tensor: Tensor) -> str:
    """The CRC-32 of each block of a dense tensor on the CPU, 8 hexadecimal digits each."""
    flat: Any = tensor.detach().as_strided((tensor.numel(),), (1,))  # one element has any stride
    return sums_of(memoryview(flat.view(torch.uint8).numpy()))


def sums_of(data: memoryview) -> str:
    """The CRC-32 of each block of some bytes."""
    return "".join(f"{zlib.crc32(data[i : i + BLOCK]):08x}" for i in range(0, len(data), BLOCK))


def joined(sums: str, nbytes: int) -> int:
    """The CRC-32 of some bytes, from that of each of their blocks; see [Note: many blocks at once].

    Args:
      sums: as `sums_of` gives them.
      nbytes: the number of bytes, at least 1; the last block may be shorter than the others.

    Raises:
      ValueError: there is not a checksum for each block.

    >>> data = bytes(range(250)) * 200
    >>> joined(sums_of(memoryview(data)), len(data)) == zlib.crc32(data)
    True
    """
    raw, count = bytes.fromhex(sums), -(-nbytes // BLOCK)
    if len(raw) != 4 * count:
        raise ValueError(f"{len(raw)} bytes of checksums for {count} blocks")
    *whole, last = struct.unpack(f">{count}I", raw)
    a, b, c, d = _behind_block()
    crc = 0
    for each in whole:
        crc = a[crc & 255] ^ b[crc >> 8 & 255] ^ c[crc >> 16 & 255] ^ d[crc >> 24] ^ each
    return _behind_zeros(crc, nbytes - len(whole) * BLOCK) ^ last


def _behind_zeros(crc: int, count: int) -> int:
    """What the checksum of some bytes adds to that of these bytes and `count` more."""
    zeros = memoryview(_ZEROS)[:count]
    return zlib.crc32(zeros, crc) ^ zlib.crc32(zeros)


@cache
def _behind_block() -> list[list[int]]:
    """`_behind_zeros` for a block, as the sum of what each of the four bytes of `crc` gives."""
    tables = []
    for low in range(0, 32, 8):
        table = [0]
        for bit in range(low, low + 8):
            column = _behind_zeros(1 << bit, BLOCK)
            table += [x ^ column for x in table]
        tables.append(table)
    return tables


# Which writer holds which elements of a tensor, as arithmetic; no rank plans for the others.

BYTES_ALIGN = 16  # of a tensor on the line of bytes; a multiple of the size of every dtype
_AS_BYTES = ("complex32", "complex64", "complex128", "float4_e2m1fn_x2")
_AS_BYTES += ("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
# By name the dtypes that are saved; those that a file has no word for are saved as their bytes.
SAVED = {x: getattr(torch, x) for x in (*DTYPES.values(), *_AS_BYTES) if hasattr(torch, x)}


def in_file(dtype: torch.dtype, numel: int) -> tuple[torch.dtype, int]:
    """As which dtype, and as how many elements, a file has elements of a dtype.

    >>> in_file(torch.float32, 3), in_file(torch.complex128, 3)
    ((torch.float32, 3), (torch.uint8, 48))
    """
    as_bytes = f"{dtype}".removeprefix("torch.") in _AS_BYTES
    return (torch.uint8, numel * dtype.itemsize) if as_bytes else (dtype, numel)


@dataclass(frozen=True)
class Line:
    """A buffer that ranks write together.

    Args:
      length: its elements, or its bytes for tensors that ranks hold in full; a multiple of `parts`.
      parts: equal chunks.
      copies: ranks that share a chunk.
      home: number of the groups whose ranks these are; see `Manifest`.
    """

    length: int
    parts: int
    copies: int
    home: int = 0

    @property
    def cells(self) -> int:
        """Number of cells."""
        return self.parts * self.copies

    def bounds(self, cell: int) -> tuple[int, int]:
        """Where a cell begins and ends.

        >>> [Line(12, 2, 4).bounds(cell) for cell in range(8)][2:6]
        [(3, 4), (4, 6), (6, 7), (7, 9)]
        """
        part, copy = divmod(cell, self.copies)
        chunk = self.length // self.parts
        low = part * chunk + chunk * copy // self.copies
        return low, part * chunk + chunk * (copy + 1) // self.copies

    def cell_at(self, position: int) -> int:
        """The cell that has a position.

        >>> [Line(12, 2, 4).cell_at(position) for position in (3, 4, 5, 6)]
        [2, 3, 3, 4]
        """
        chunk = self.length // self.parts
        part, rest = divmod(position, chunk)
        return part * self.copies + ((rest + 1) * self.copies - 1) // chunk


@dataclass(frozen=True)
class SavedTensor:
    """A tensor of a checkpoint.

    Args:
      name: its path in the state.
      dtype: the dtype of its elements.
      shape: its full shape.
      line: number of its line; -1 if each rank keeps its own value in full.
      offset: where it begins on the line.
      unit: how much of the line an element takes: 1, or its size on the line of bytes.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    line: int = -1
    offset: int = 0
    unit: int = 1

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)


class Slice(NamedTuple):
    """Elements of a flattened tensor that one writer holds."""

    cell: int
    start: int
    stop: int


def within(tensor: SavedTensor, line: Line, cell: int) -> Slice | None:
    """What a cell holds of a tensor; None if it holds nothing.

    >>> line, tensor = Line(16, 2, 2), SavedTensor("w", torch.float32, (3, 3), 0, offset=2)
    >>> [within(tensor, line, cell) for cell in range(3)][1:]
    [Slice(cell=1, start=2, stop=6), Slice(cell=2, start=6, stop=9)]
    """
    low, high = line.bounds(cell)
    start = max(0, -(-(low - tensor.offset) // tensor.unit))
    stop = min(tensor.numel, -(-(high - tensor.offset) // tensor.unit))
    return Slice(cell, start, stop) if start < stop else None


def covering(tensor: SavedTensor, line: Line, start: int, stop: int) -> Iterator[Slice]:
    """The slices, whole, that have elements `start` to `stop` of a tensor.

    >>> list(covering(SavedTensor("w", torch.float32, (9,), 0, offset=2), Line(16, 2, 2), 5, 7))
    [Slice(cell=1, start=2, stop=6), Slice(cell=2, start=6, stop=9)]
    """
    while start < stop:
        # An element of the line of bytes belongs to the cell in which it begins.
        cell = line.cell_at(tensor.offset + start * tensor.unit)
        found = within(tensor, line, cell)
        if found is None or found.stop <= start:
            raise ValueError(f"{tensor.name} does not lie on its line")
        yield found
        start = found.stop


def line_of_bytes(tensors: Sequence[tuple[str, torch.dtype, tuple[int, ...]]], ranks: int) -> Line:
    """The line of tensors that all ranks hold in full; see `places_in_bytes`."""
    end = sum(_padded(prod(shape) * dtype.itemsize) for _, dtype, shape in tensors)
    whole = ranks * BYTES_ALIGN
    return Line(max(whole, -(-end // whole) * whole), ranks, 1)


def places_in_bytes(
    tensors: Sequence[tuple[str, torch.dtype, tuple[int, ...]]], line: int
) -> list[SavedTensor]:
    """Where tensors that all ranks hold in full lie on their line, one after the other."""
    found, end = [], 0
    for name, dtype, shape in tensors:
        found.append(SavedTensor(name, dtype, shape, line, end, dtype.itemsize))
        end += _padded(prod(shape) * dtype.itemsize)
    return found


def _padded(nbytes: int) -> int:
    return -(-nbytes // BYTES_ALIGN) * BYTES_ALIGN


# JSON with tensors, tuples and every float: what a rank saves besides its state.

_TENSOR, _TUPLE, _FLOAT = "$tensor", "$tuple", "$float"


def encoded(value: Any, root: str = "extra") -> tuple[str, dict[str, Tensor]]:
    """A value as JSON, and its tensors by the names that the JSON has for them.

    Raises:
      LeafError: something in it is neither of JSON nor a tensor nor a tuple; it is named.

    >>> text, tensors = encoded({"rate": math.inf, "order": (1, 2)})
    >>> text, decoded(text, tensors)
    ('{"rate":{"$float":"inf"},"order":{"$tuple":[1,2]}}', {'rate': inf, 'order': (1, 2)})
    """
    tensors: dict[str, Tensor] = {}

    def plain(x: Any, path: str) -> Any:
        if isinstance(x, Tensor):
            if path in tensors:
                text, fix = f"save: two tensors have the path {path}", "rename a key of one of them"
                raise LeafError(text, fix=fix)
            tensors[path] = savable("save", path, x)
            as_bytes = in_file(x.dtype, 1)[0] != x.dtype
            return {_TENSOR: [path, dtype_name(x.dtype), *x.shape] if as_bytes else path}
        if x is None or isinstance(x, bool | int | str):
            return x
        if isinstance(x, float):
            return float(x) if math.isfinite(x) else {_FLOAT: repr(float(x))}
        if isinstance(x, dict) and all(isinstance(k, str) and k[:1] != "$" for k in x):
            return {key: plain(each, f"{path}.{key}") for key, each in x.items()}
        if isinstance(x, list | tuple):
            found = [plain(each, f"{path}.{i}") for i, each in enumerate(x)]
            return found if isinstance(x, list) else {_TUPLE: found}
        fix = "keep dicts of texts, lists, tuples, numbers, texts and tensors in it"
        raise LeafError(f"save: {path} is {type(x).__name__}", fix=fix)

    return json.dumps(plain(value, root), separators=(",", ":")), tensors


def kind_of(x: Any) -> type:
    """The type that a number or a text has in a file: that of Python, also for one of numpy."""
    return next((kind for kind in (bool, int, float, str) if isinstance(x, kind)), type(x))


def decoded(text: str, tensors: dict[str, Tensor]) -> Any:
    """The value of `encoded`."""

    def known(x: dict[str, Any]) -> Any:
        if len(x) == 1:
            (key, held), *_ = x.items()
            if key == _TENSOR and isinstance(held, list):
                path, dtype, *shape = held
                return tensors[path].view(SAVED[dtype]).view(shape)
            if key == _TENSOR:
                return tensors[held]
            if key == _TUPLE:
                return tuple(held)
            if key == _FLOAT:
                return float(held)
        return x

    return json.loads(text, object_hook=known)


def savable(verb: str, name: str, x: Tensor) -> Tensor:
    """A tensor without its graph, if it is one that can be saved, and loaded.

    Raises:
      LeafError: it is not dense, has no values, or is of a dtype that is not saved.
    """
    what, fix = "", "pass dense tensors with values"
    if _torch.has_no_data(x):
        what = "has no values"
    elif _torch.is_wrapper(x) and not is_placed(x):
        what = f"is {type(x).__name__}, which keeps its values in other tensors"
        fix = "pass a plain tensor, such as a DTensor's full_tensor() or to_local()"
    elif x.layout != torch.strided or x.is_nested:
        what = f"is not dense: {'nested' if x.is_nested else x.layout}"
    elif dtype_name(x.dtype) not in SAVED:
        what = f"is of {x.dtype}, which is not saved"
        fix = "pass the integers or floats that it stands for, such as x.view(torch.uint8)"
    if what:
        raise LeafError(f"{verb}: {name} {what}", fix=fix)
    return x.detach()


NAME = "MANIFEST.json"
FORMAT, MAJOR, MINOR = "mics_fn checkpoint", 1, 0
MAX_BYTES, MAX_LEAVES = 64 * 2**20, 1_000_000
DIGEST_BYTES = 64  # hexadecimal digits of sha256
_FETCH = "load an older step, or copy the whole folder again"


class _LeadsOut(ValueError):
    """A name that is not one of a file in the folder."""


class Writer(NamedTuple):
    """One file of a checkpoint.

    Args:
      file: its name; "" for a rank that had nothing to write.
      nbytes: its size.
      header: sha256 of its header, in which the checksums of its values are.
      cells: its cell on the lines of each home: the numbers of the chunk and of the replica.
    """

    file: str
    nbytes: int
    header: str
    cells: list[list[int]]


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds.

    Args:
      step: the number of the step.
      versions: the versions of this library and of torch that wrote it.
      replicas: "apart" if each replica has values of its own, else "equal".
      homes: partition size and number of replicas of each set of groups.
      lines: see [Note: lines and cells] in `manifest`; the last one is that of bytes.
      tensors: those that lie on lines, and with line -1 those that each rank has for itself.
      values: numbers and texts by name.
      ties: the name of the tensor that another name means.
      writers: by position in the groups.
      extra: what each rank gave: "same" if the first file has it for all, else "own".
      commit: "rename", or "file" if the step counts only with a file `COMMITTED`.
    """

    step: int
    versions: dict[str, str]
    replicas: str
    homes: list[list[int]]
    lines: list[Line]
    tensors: list[SavedTensor]
    values: dict[str, Any]
    ties: dict[str, str]
    writers: list[Writer]
    extra: str
    commit: str

    def cell(self, line: int, writer: int) -> int:
        """The cell of a line that a writer has."""
        if line == len(self.lines) - 1:
            return writer
        held = self.lines[line]
        chunk, copy = self.writers[writer].cells[held.home]
        if self.replicas == "apart":
            return copy * self.homes[held.home][0] + chunk
        return chunk * held.copies + copy

    def writer(self, line: int, cell: int) -> int:
        """The writer that has a cell of a line."""
        if line == len(self.lines) - 1:
            return cell
        held = self.lines[line]
        if self.replicas == "apart":
            copy, chunk = divmod(cell, self.homes[held.home][0])
        else:
            chunk, copy = divmod(cell, held.copies)
        return self._by_cells[held.home][chunk, copy]

    @cached_property
    def _by_cells(self) -> list[dict[tuple[int, ...], int]]:
        """For each home the writer of each chunk and replica."""
        numbers = range(len(self.homes))
        return [{tuple(x.cells[h]): i for i, x in enumerate(self.writers)} for h in numbers]

    def to_bytes(self) -> bytes:
        """The content of the file."""
        body = {"format": FORMAT, "version": [MAJOR, MINOR], **asdict(self)}
        body["tensors"] = [
            [x.name, dtype_name(x.dtype), list(x.shape), x.line, x.offset] for x in self.tensors
        ]
        body["values"] = json.loads(encoded(self.values)[0])  # which has infinite numbers, too
        body["lines"] = [[x.length, x.parts, x.copies, x.home] for x in self.lines]
        body["writers"] = [list(x) for x in self.writers]
        text = json.dumps(body, separators=(",", ":"), allow_nan=False).encode()
        return b'{"sha256":"' + hashlib.sha256(text).hexdigest().encode() + b'",' + text[1:]


def digest_of(data: bytes) -> str:
    """The digest that the content of a manifest begins with."""
    return data[11 : 11 + DIGEST_BYTES].decode(errors="replace")


def read_manifest(data: bytes, path: str) -> Manifest:
    """The manifest that a file holds.

    Args:
      data: its content.
      path: for errors.

    Raises:
      FileError: it is damaged, or of a version that is not known here.
    """

    def wrong(what: str, fix: str = _FETCH) -> FileError:
        return FileError(message(f"{path} {what}", fix=fix), path, damaged=True)

    head, tail = data[: 13 + DIGEST_BYTES], b"{" + data[13 + DIGEST_BYTES :]
    want = b'{"sha256":"' + hashlib.sha256(tail).hexdigest().encode() + b'",'
    if head != want:
        raise wrong("is damaged: its digest is not that of its content")
    try:
        body = strict_json(tail.decode())
        if body["format"] != FORMAT:
            raise ValueError(f"format {body['format']!r}")
        major = body["version"][0]
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise wrong(f"is not a manifest: {error}") from None
    if major != MAJOR:
        raise wrong(f"has version {major}, known here is {MAJOR}", "use a newer mics_fn")
    try:
        return _parsed(body)
    except _LeadsOut as error:
        fix = "load only checkpoints that you know"
        raise FileError(message(f"{path} {error}", fix=fix), path, damaged=True) from None
    except (LookupError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise wrong(f"does not fit together: {error}") from None


def _parsed(body: dict[str, Any]) -> Manifest:
    """The manifest in a JSON object; raises if anything in it does not fit together."""
    lines = [Line(*_counts(x, 4)) for x in body["lines"]]
    homes = [_counts(x, 2) for x in body["homes"]]
    tensors, writers = body["tensors"], [_writer(x, homes) for x in body["writers"]]
    _require(isinstance(tensors, list) and len(tensors) <= MAX_LEAVES, "too many tensors")
    for line in lines:
        _require(line.parts > 0 and line.copies > 0 and line.length % line.parts == 0, f"{line}")
        _require(line.home < len(homes), f"{line} is of unknown groups")
    tensors = [_tensor(x, lines) for x in tensors]
    _require(len({x.name for x in tensors}) == len(tensors), "a name is there twice")
    _check_cells(body["replicas"], homes, lines, writers)
    found = {name: body[name] for name in ("step", "versions", "replicas", "ties")}
    found["values"] = decoded(json.dumps(body["values"]), {})
    _require(type(found["step"]) is int and found["step"] >= 0, "the step is not a number")
    for name in ("versions", "values", "ties"):
        _require(isinstance(found[name], dict), f"{name} is not an object")
    for name in ("extra", "commit"):
        _require(isinstance(body[name], str), f"{name} is not a text")
    kept = {"homes": homes, "lines": lines, "tensors": tensors, "writers": writers}
    return Manifest(**found, **kept, extra=body["extra"], commit=body["commit"])


def _check_cells(
    replicas: Any, homes: list[list[int]], lines: list[Line], writers: list[Writer]
) -> None:
    """Raise ValueError unless each cell of each line has one writer."""
    _require(replicas in ("equal", "apart"), f"replicas {replicas!r}")
    count, files = len(writers), [x.file for x in writers if x.file]
    _require(len(set(files)) == len(files), "a file is there twice")
    for number, (p, r) in enumerate(homes):
        cells = {tuple(x.cells[number]) for x in writers}
        inside = all(chunk < p and copy < r for chunk, copy in cells)
        _require(inside and len(cells) == count == p * r, f"cells of {p} times {r} ranks")
    for line in lines[:-1]:
        p, r = homes[line.home]
        wanted = (p, r) if replicas == "equal" else (p * r, 1)
        _require((line.parts, line.copies) == wanted, f"{line} has not a cell for each file")
    _require(bool(lines) and (lines[-1].parts, lines[-1].copies) == (count, 1), "the last line")


def _tensor(facts: Any, lines: list[Line]) -> SavedTensor:
    name, kind, shape, line, offset = facts
    _require(isinstance(name, str) and is_text(name), f"{name!r}")
    _require(isinstance(kind, str) and kind in SAVED, f"{name!r} is of {kind!r}")
    dtype = SAVED[kind]
    check_shape(shape, dtype)
    _require(type(line) is int and -1 <= line < len(lines), f"{name!r} is on no line")
    unit = dtype.itemsize if line == len(lines) - 1 else 1
    if line >= 0:
        end = _counts([offset], 1)[0] + prod(shape) * unit
        _require(end <= lines[line].length, f"{name!r} does not lie on its line")
    return SavedTensor(name, dtype, tuple(shape), line, offset, unit)


def _writer(facts: Any, homes: list[list[int]]) -> Writer:
    file, nbytes, header, cells = facts
    _require(isinstance(file, str) and isinstance(header, str), f"file {file!r}")
    if "/" in file or file in (".", "..") or "\0" in file or not is_text(file):
        raise _LeadsOut(f"names {file[:200]!r}, which is not opened: it leads out of the folder")
    _require(len(file) <= 255, f"file {file[:80]!r}...")
    found = [_counts(x, 2) for x in cells]
    _require(len(found) == len(homes), f"file {file!r} has not a cell for each of the groups")
    return Writer(file, _counts([nbytes], 1)[0], header, found)


def _counts(found: Any, length: int) -> list[int]:
    """A list of so many numbers that are not negative."""
    right = isinstance(found, list) and len(found) == length
    _require(right and all(type(n) is int and 0 <= n < 2**62 for n in found), f"{found!r}")
    return found


def _require(right: bool, text: str) -> None:
    if not right:
        raise ValueError(text)

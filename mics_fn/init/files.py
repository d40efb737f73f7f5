"""Files of named tensors, from which any range of elements can be read by itself.

[Note: files of strangers] A file of weights may come from anybody, and may change while it is read.
So only regular files are opened: a FIFO would wait for a writer, and opening a device may already
do something. Names that a file gives stay in its folder. Bytes are read into memory of this process
and never mapped, since a page of a mapped file that somebody cuts ends the process with SIGBUS.
Every size is compared with the file before memory is allocated for it. And nothing in a file is
run: a header is JSON, and a pickle is read as a description of tensors.

Each error is a `FileError` that names the file and the leaf. No format here has a checksum for each
leaf, so values that were changed in place are read as they are.

A format is a function of a `File` that gives an `Entry` for each tensor: its dtype, its shape, and
a function that reads elements of it. Here is that of safetensors files: 8 bytes of length, a JSON
header and flat data, so the place of an element is known from the header. The formats that have a
pickle are in `torch_files.py`.
"""

import copy
import json
import os
import reprlib
import stat
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mics_fn.errors import FileError, message

# Files that others made, read as bytes: what every format needs of them.

FETCH = "fetch it again, and compare its checksum with that of its source"
TRUST = "fetch it again from a source that you know; if you made it yourself, pass trust=True"
TOGETHER = "copy all files of one save together"
HEADER_BYTES = 2**30  # of all that is not the values of tensors; what it says has to fit in memory
MAX_DIMS = 64  # of any tensor on which torch computes

_short = reprlib.Repr()  # what a file says may be as long as the file
_short.maxstring, _short.maxlist, _short.maxtuple, _short.maxother = 200, 12, 12, 60
_short.maxlevel = 2
shown: Callable[[Any], str] = _short.repr


class Entry(NamedTuple):
    """A tensor of a file."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[int, int], Tensor]  # start and stop in the flattened tensor


Weights = dict[str, Entry]


class File:
    """A regular file, open for reading at any place; see [Note: files of strangers].

    Args:
      verb: for errors.
      path: as errors name it; symbolic links in it are followed.
      fix: what to do if it is damaged.

    Raises:
      FileError: it is not a regular file.
      OSError: it cannot be opened.
    """

    def __init__(self, verb: str, path: str | Path, fix: str = FETCH) -> None:
        self.verb, self.path, self._fix = verb, str(path), fix
        self._start = 0  # where byte 0 of what is read lies
        real = os.path.realpath(path)
        self._require_regular(os.lstat(real))
        # If it was replaced since then, the open neither waits nor follows, and is looked at again.
        self._fd = os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            self.size = self._require_regular(os.fstat(self._fd)).st_size
        except BaseException:
            self.close()
            raise

    def _require_regular(self, facts: os.stat_result) -> os.stat_result:
        if not stat.S_ISREG(facts.st_mode):
            kinds = {stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFDIR: "a folder"}
            kind = kinds.get(stat.S_IFMT(facts.st_mode), "a device")
            raise self.error(f"is {kind}, not a regular file", fix="pass a file of weights")
        return facts

    def close(self) -> None:
        """Close it; nothing can be read any more."""
        os.close(self._fd)

    def named(self, name: Any, leaf: str, *, trust: bool) -> "File":
        """Open a file that this one names, in the same folder unless it is trusted.

        Raises:
          FileError: its name leads elsewhere, or it cannot be opened.
        """
        folder = Path(self.path).parent
        reason = refusal(folder, name, trust=trust)
        if reason:
            raise self.error(f"names {shown(name)}, which is not opened", [reason], leaf, TRUST)
        try:
            return File(self.verb, folder / name)
        except OSError as error:
            what = f"names {shown(name)}, which cannot be opened"
            raise self.error(what, [f"{error.strerror}"], leaf, TOGETHER) from error

    def part(self, start: int, length: int) -> "File":
        """A part of the file as a file of its own, which can be read until this one is closed."""
        if not 0 <= start <= start + length <= self.size:
            where = f"byte {shown(start)} to {shown(start + length)}"
            raise self.error("is damaged", [f"it has {self.size} bytes, and not {where}"])
        found = copy.copy(self)
        found._start, found.size = self._start + start, length
        return found

    def header(self, offset: int, length: int, most: int = HEADER_BYTES) -> bytes:
        """Bytes that are no values of tensors, of which there are at most so many.

        Raises:
          FileError: there are more, or as `read`.
        """
        if length > most:
            what = f"has a header of {length} bytes, at most {most} are read"
            raise self.error(what, fix="save fewer tensors in one file")
        return bytes(self.read(offset, length))

    def read(self, offset: int, length: int, leaf: str = "") -> bytearray:
        """Bytes of the file, without reading any others.

        Raises:
          FileError: the file has no such bytes, or they cannot be read.
        """
        self._require(offset, length, leaf)
        data = bytearray(length)
        self.read_into(memoryview(data), offset, leaf)
        return data

    def _require(self, offset: int, length: int, leaf: str) -> None:
        if not 0 <= offset <= offset + length <= self.size:
            problem = f"it ends early, at byte {self.size} of {shown(offset + length)}"
            raise self.error("is damaged", [problem], leaf)

    def read_into(self, rest: memoryview, offset: int, leaf: str = "") -> None:
        """Fill memory with bytes of the file.

        Raises:
          FileError: as `read`.
        """
        self._require(offset, len(rest), leaf)
        while rest:
            try:
                count = os.preadv(self._fd, [rest], self._start + offset)
            except OSError as error:
                wrong = self.error(f"cannot be read: {error.strerror}", leaf=leaf)
                wrong.damaged = False  # nothing is known of it
                raise wrong from error
            if not count:
                problem = f"nothing is at byte {offset}, and it had {self.size} when it was opened"
                fix = "write to another file and rename it, so that no reader sees a part of it"
                raise self.error("was cut while it was read", [problem], leaf, fix)
            rest, offset = rest[count:], offset + count

    def entry(
        self, leaf: str, base: int, kind: torch.dtype, shape: Sequence[int], strides: Sequence[int]
    ) -> Entry:
        """A tensor of the file, read in parts.

        Args:
          leaf: its name.
          base: where its first element lies.
          kind: its dtype.
          shape: its sizes.
          strides: in elements; the caller has compared them with the size of the file.
        """
        sizes, steps = tuple(shape), tuple(strides)
        plain = zip(sizes, steps, contiguous(sizes), strict=True)
        if all(n == 1 or step == dense for n, step, dense in plain):
            sizes, steps = (prod(sizes),), (1,)
        inner = max(1, prod(sizes[1:]))

        def read(start: int, stop: int) -> Tensor:
            if start == stop:
                return torch.empty(0, dtype=kind)
            first, end = start // inner, -(-stop // inner)
            rows = (end - first, *sizes[1:])
            length = kind.itemsize * span(rows, steps)
            data = self.read(base + first * steps[0] * kind.itemsize, length, leaf)
            part = torch.frombuffer(data, dtype=kind).as_strided(rows, steps).reshape(-1)
            return part[start - first * inner : stop - first * inner]

        return Entry(tuple(shape), kind, read)

    def error(
        self, what: str, lines: Sequence[str] = (), leaf: str = "", fix: str = ""
    ) -> FileError:
        """The error that something is wrong with the file, or with a leaf of it."""
        lines = [f"{shown(leaf)}: {lines[0]}", *lines[1:]] if leaf and lines else lines
        text = message(f"{self.verb}: {self.path} {what}", lines, fix or self._fix)
        return FileError(text, self.path, leaf, damaged=True)


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a tensor of this shape whose elements lie one after the other.

    >>> contiguous((2, 3, 4))
    (12, 4, 1)
    """
    return tuple(prod(shape[i + 1 :]) for i in range(len(shape)))


def span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """How many elements lie between the first and the last one of a tensor, both included.

    >>> span((2, 3), (10, 2)), span((2, 0), (1, 1))
    (15, 0)
    """
    steps = sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    return 1 + steps if all(shape) else 0


def check_shape(shape: Any, kind: torch.dtype) -> None:
    """Raise ValueError unless these are the sizes of a tensor that torch can make."""
    sizes: Any = shape if isinstance(shape, list | tuple) else [None]
    if len(sizes) > MAX_DIMS or not all(type(n) is int and n >= 0 for n in sizes):
        raise ValueError(f"the shape {shown(shape)} is not a list of at most {MAX_DIMS} sizes")
    if prod(max(1, n) for n in sizes) * kind.itemsize >= 2**63:
        raise ValueError(f"the shape {shown(shape)} overflows")


def refusal(folder: Path, name: Any, *, trust: bool) -> str:
    """Why a name in a folder is not opened; "" if it may be."""
    if not isinstance(name, str) or not name or "\0" in name or not is_text(name):
        return "that is not the name of a file"
    place, parts = Path(os.path.realpath(folder)), PurePath(name).parts
    if trust:
        return ""
    if PurePath(name).is_absolute() or ".." in parts:
        return "it leads out of the folder"
    if os.path.realpath(place / name) != str(place.joinpath(*parts)):
        return "it is a symbolic link, or behind one"
    return ""


def is_text(name: str) -> bool:
    """Whether a string can be written; JSON and pickles may hold halves of characters."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


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


def read_json(file: File, start: int, length: int, wrong: str) -> dict[str, Any]:
    """A part of a file that is an object of JSON, without names that are there twice.

    Args:
      file: what to read.
      start: of the part, in bytes.
      length: of the part, in bytes.
      wrong: what to say of a file that has something else there.

    Raises:
      FileError: it has something else there, or it is too long.
    """
    data = file.header(start, length)
    try:
        found = strict_json(data.decode())
        if not isinstance(found, dict):
            raise ValueError(f"its header is a {type(found).__name__}")
    except (ValueError, RecursionError) as error:
        raise file.error(wrong, [f"{error}"]) from None
    return found


def strict_json(text: str) -> Any:
    """The value of a JSON text without names that are there twice, and without NaN.

    Raises:
      ValueError, RecursionError: it is something else.
    """
    return json.loads(text, object_pairs_hook=_once, parse_constant=_no_number)


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


def of_safetensors(file: File) -> Weights:
    """The tensors of a safetensors file, whose bytes have neither gaps nor overlaps.

    Raises:
      FileError: it is damaged.
    """
    length = int.from_bytes(file.read(0, 8), "little")
    if length > file.size - 8:
        raise file.error(_NEITHER, ["its header would be longer than the file"])
    header = read_json(file, 8, length, _NEITHER)
    texts = header.pop("__metadata__", {})
    said = [*texts, *texts.values()] if isinstance(texts, dict) else [None]
    if not all(isinstance(x, str) and is_text(x) for x in said):
        raise file.error("is damaged", ["its metadata has something else than texts"])
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
    return found


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

"""Files that others made, read as bytes: what every format needs of them.

[Note: files of strangers] A file of weights may come from anybody, and may change while it is read.
So only regular files are opened: a FIFO would wait for a writer, and opening a device may already
do something. Names that a file gives stay in its folder. Bytes are read into memory of this process
and never mapped, since a page of a mapped file that somebody cuts ends the process with SIGBUS.
Every size is compared with the file before memory is allocated for it. And nothing in a file is
run: a header is JSON, and the opcodes of a pickle are read as a description of tensors.

Each error is a `FileError` that names the file and the leaf. No format here has a checksum for each
leaf, so values that were changed in place are read as they are.
"""

import copy
import os
import reprlib
import stat
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mics_fn import checks
from mics_fn.errors import FileError, message

FETCH = "fetch it again, and compare its checksum with that of its source"
TRUST = "fetch it again from a source that you know; if you made it yourself, pass trust=True"
MAX_DIMS = 64  # of any tensor on which torch computes

_short = reprlib.Repr()  # what a file says may be as long as the file
_short.maxstring, _short.maxlist, _short.maxtuple, _short.maxother = 200, 12, 12, 60
shown: Callable[[Any], str] = _short.repr


class Limits(NamedTuple):
    """What a file may ask of its reader."""

    trust: bool  # whether names in it may lead anywhere, also as symbolic links
    max_header_bytes: int  # of all that is not the values of tensors
    max_leaves: int

    @classmethod
    def checked(cls, verb: str, trust: Any, max_header_bytes: Any, max_leaves: Any) -> "Limits":
        """The limits that a verb was given, if each is what it should be."""
        checks.flag(verb, "trust", trust)
        checks.integer(verb, "max_leaves", max_leaves)
        most = checks.nbytes(verb, "max_header_bytes", max_header_bytes, 1)
        return cls(trust, most, max_leaves)


class Entry(NamedTuple):
    """A tensor of a file."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[int, int], Tensor]  # start and stop in the flattened tensor
    base: int = 0  # where it begins in its file, if its elements lie there one after the other

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)


Weights = dict[str, Entry]


class File:
    """A regular file, open for reading at any place; see [Note: files of strangers].

    Args:
      verb: for errors.
      path: as errors name it; symbolic links in it are followed.
      limits: what it may ask for.

    Raises:
      FileError: it is not a regular file.
      OSError: it cannot be opened.
    """

    def __init__(self, verb: str, path: str | Path, limits: Limits) -> None:
        self.verb, self.path, self.limits = verb, str(path), limits
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

    def part(self, start: int, length: int) -> "File":
        """A part of the file as a file of its own, which can be read until this one is closed."""
        if not 0 <= start <= start + length <= self.size:
            where = f"byte {shown(start)} to {shown(start + length)}"
            raise self.error("is damaged", [f"it has {self.size} bytes, and not {where}"])
        found = copy.copy(self)
        found._start, found.size = self._start + start, length
        return found

    def require_small(self, header_bytes: int, leaves: int = 0) -> None:
        """Refuse a file whose header has more bytes, or more leaves, than the limits allow."""
        limits = self.limits
        if header_bytes > limits.max_header_bytes or leaves > limits.max_leaves:
            found = f"its header has {leaves} leaves" if leaves else "its header has"
            found += f" {header_bytes} bytes" if header_bytes else ""
            fix = f"if that is right, raise max_header_bytes (now {limits.max_header_bytes}) or "
            fix += f"max_leaves (now {limits.max_leaves})"
            raise self.error("is larger than the limits", [found], fix=fix)

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
                raise self.error(f"cannot be read: {error.strerror}", leaf=leaf) from error
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

        return Entry(tuple(shape), kind, read, base)

    def error(
        self, what: str, lines: Sequence[str] = (), leaf: str = "", fix: str = FETCH
    ) -> FileError:
        """The error that something is wrong with the file, or with a leaf of it."""
        lines = [f"{shown(leaf)}: {lines[0]}", *lines[1:]] if leaf and lines else lines
        text = f"{self.verb}: {self.path} {what}"
        return FileError(message(text, lines, fix), self.path, leaf)


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

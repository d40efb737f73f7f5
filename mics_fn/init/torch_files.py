"""Files of `torch.save`: a zip file of a pickle that describes tensors, and their storages.

[Note: files of strangers] A file of weights may come from anybody, and may change while it is read.
So only regular files are opened: a FIFO would wait for a writer, and opening a device may already
do something. Names that a file gives stay in its folder. Bytes are read into memory of this process
and never mapped, since a page of a mapped file that somebody cuts ends the process with SIGBUS.
Every size is compared with the file before memory is allocated for it. And nothing in a file is
run: a header is JSON, and the opcodes of a pickle are read as a description of tensors.

Each error is a `FileError` that names the file and the leaf. No format here has a checksum for each
leaf, so values that were changed in place are read as they are.

A pickle is a program for a small machine with a stack. Here its opcodes are read, and what they
name is never imported or called: a tensor becomes a `FileTensor`, plain values become themselves,
and anything else an `Other`, of which only the name is kept. See [Note: files of strangers].
"""

import copy
import os
import pickletools
import reprlib
import stat
import struct
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mics_fn import checks
from mics_fn.errors import FileError, message

# Files that others made, read as bytes: what every format needs of them.

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


# Where the records of a zip file lie; `torch.save` stores each tensor's storage in one.

_END = struct.Struct("<4s6xHII2x")  # signature, records, bytes of the directory, its place
_END_64 = struct.Struct("<4s28xQQQ")
_LOCATOR = struct.Struct("<4s4xQ4x")
_ENTRY = struct.Struct("<4s4xHH8xIIHHH8xI")  # of the directory
_LOCAL = struct.Struct("<4s22xHH")  # what stands before the bytes of a record
_MOST_COMMENT = 2**16 - 1
_FEW = 20  # records that are not the storage of a leaf
_FULL, _FULL_SHORT = 2**32 - 1, 2**16 - 1  # the number is in a field of 64 bits


class ZipRecord(NamedTuple):
    """A record of a zip file: the place of its bytes, and how many there are."""

    start: int
    length: int


def records(file: File) -> dict[str, ZipRecord]:
    """The records of a zip file by name.

    Raises:
      FileError: it is damaged, too large for the limits, or its records are compressed.
    """
    try:
        count, length, place = _directory(file)
        file.require_small(length, max(0, count - _FEW))
        found: dict[str, ZipRecord] = {}
        data, at = file.read(place, length), 0
        for _ in range(count):
            name, place, size, at = _entry(data, at)
            if name in found:
                raise ValueError(f"{shown(name)} is there twice")
            found[name] = _record(file, name, place, size)
    except FileError:
        raise
    except struct.error:
        raise file.error("is damaged", ["its directory of records is cut"]) from None
    except ValueError as error:
        raise file.error("is damaged", [str(error)]) from None
    return found


def _directory(file: File) -> tuple[int, int, int]:
    """Number of records, bytes of the directory, and where it begins."""
    first = max(0, file.size - _END.size - _MOST_COMMENT)
    tail = file.read(first, file.size - first)
    at = tail.rfind(b"PK\5\6")
    if at < 0:
        raise ValueError("it has no directory of records at its end")
    _, count, length, place = _END.unpack_from(tail, at)
    if count == _FULL_SHORT or _FULL in (length, place):
        signature, end = _LOCATOR.unpack(file.read(first + at - _LOCATOR.size, _LOCATOR.size))
        if signature == b"PK\6\7":
            _, count, length, place = _END_64.unpack(file.read(end, _END_64.size))
    return count, length, place


def _entry(data: bytearray, at: int) -> tuple[str, int, int, int]:
    """Name, place and bytes of the next record in the directory, and where the one after begins."""
    signature, flags, method, packed, length, *sizes, place = _ENTRY.unpack_from(data, at)
    begin = at + _ENTRY.size
    named, extra, comment = sizes
    name = data[begin : begin + named].decode(errors="surrogateescape")
    if signature != b"PK\1\2":
        raise ValueError("its directory has something else than records")
    wide = _wide(data[begin + named : begin + named + extra])
    length, packed, place = (next(wide) if x == _FULL else x for x in (length, packed, place))
    if method or flags & 1 or packed != length:
        raise ValueError(f"{shown(name)} is compressed or encrypted")
    return name, place, length, begin + named + extra + comment


def _record(file: File, name: str, place: int, length: int) -> ZipRecord:
    """A record, from the header that stands before its bytes."""
    raw = name.encode(errors="surrogateescape")
    header = file.read(place, _LOCAL.size + len(raw))
    signature, named, extra = _LOCAL.unpack_from(header)
    start = place + len(header) + extra
    if signature != b"PK\3\4" or named != len(raw) or header[_LOCAL.size :] != raw:
        raise ValueError(f"{shown(name)} is not where its directory says")
    if start + length > file.size:
        raise ValueError(f"{shown(name)} is longer than the file")
    return ZipRecord(start, length)


def _wide(extra: bytearray) -> Iterator[int]:
    """Numbers of 64 bits, from the extra field of an entry."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            for place in range(at + 4, at + 4 + length - 7, 8):
                yield struct.unpack_from("<Q", extra, place)[0]
        at += 4 + length
    raise ValueError("a record has no size")


# What a pickle of `torch.save` describes, without running it.

_STORAGES = {
    "Double": torch.float64,
    "Float": torch.float32,
    "Half": torch.float16,
    "BFloat16": torch.bfloat16,
    "Long": torch.int64,
    "Int": torch.int32,
    "Short": torch.int16,
    "Char": torch.int8,
    "Byte": torch.uint8,
    "Bool": torch.bool,
    "ComplexDouble": torch.complex128,
    "ComplexFloat": torch.complex64,
}
_STORED = {f"torch.{name}Storage": dtype for name, dtype in _STORAGES.items()}
_NEWER = ("uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2")
_NEWER += ("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
_DTYPES = {f"torch.{name}": getattr(torch, name) for name in _NEWER if hasattr(torch, name)}
# Every dtype that a pickle may name by itself.
NAMED_DTYPES = {f"{dtype}": dtype for dtype in _STORAGES.values()} | _DTYPES
_REBUILT = {
    "torch._utils._rebuild_sparse_tensor": "a sparse tensor",
    "torch._utils._rebuild_meta_tensor_no_storage": "a tensor on meta, without values",
    "torch._utils._rebuild_qtensor": "a quantized tensor",
    "torch._utils._rebuild_nested_tensor": "a nested tensor",
}
_PLAIN_TENSORS = ("torch.Tensor", "torch._tensor.Tensor", "torch.nn.parameter.Parameter")
_VALUES = ("BIN", "SHORT_BIN", "INT", "LONG", "FLOAT", "STRING", "UNICODE")  # opcodes of them


class Global(NamedTuple):
    """A class or function that a pickle names."""

    name: str


class Other(NamedTuple):
    """A value that is neither plain nor a tensor."""

    name: str  # of what would make it, or in words


@dataclass(eq=False)
class Made:
    """An instance of a class that the caller knows, which is not made."""

    name: str  # of the class
    state: Any = field(default_factory=dict)  # what it would be given, in most cases attributes


class FileStorage(NamedTuple):
    """Memory that tensors lie in."""

    key: str  # of the record with its bytes
    dtype: torch.dtype | None  # None: that of the tensor


class FileTensor(NamedTuple):
    """A tensor in a storage."""

    storage: str
    dtype: torch.dtype
    offset: int  # in elements, as strides
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def end(self) -> int:
        """Bytes of the storage up to its last element."""
        return (self.offset + span(self.shape, self.strides)) * self.dtype.itemsize


def read_pickle(data: bytes | bytearray, classes: Collection[str] = ()) -> Any:
    """The value that a pickle describes: of dicts, lists, tuples, plain values and the above.

    Args:
      data: the pickle.
      classes: names of classes whose instances become `Made`; others become `Other`.

    Raises:
      ValueError: it is damaged, or has something that `torch.save` does not write.
    """
    machine = _Machine(classes)
    try:
        for opcode, argument, _ in pickletools.genops(bytes(data)):
            if opcode.name == "STOP":
                return machine.stack.pop()
            machine.step(opcode.name, argument)
    except (IndexError, KeyError, TypeError, OverflowError, RecursionError, MemoryError) as error:
        raise ValueError(f"its pickle is damaged ({type(error).__name__})") from None
    raise ValueError("its pickle is cut")


class _Machine:
    """The stack and the memo of a pickle."""

    def __init__(self, classes: Collection[str] = ()) -> None:
        self.classes = classes
        self.stack: list[Any] = []
        self.marks: list[int] = []  # places in the stack
        self.memo: dict[int, Any] = {}

    def step(self, name: str, argument: Any) -> None:
        """Execute one opcode."""
        stack = self.stack
        match name:
            case "PROTO" | "FRAME":
                pass
            case "MARK":
                self.marks.append(len(stack))
            case "NONE" | "NEWTRUE" | "NEWFALSE":
                stack.append({"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[name])
            case "EMPTY_DICT" | "EMPTY_LIST" | "EMPTY_TUPLE":
                stack.append({"EMPTY_DICT": {}, "EMPTY_LIST": [], "EMPTY_TUPLE": ()}[name])
            case "EMPTY_SET":
                stack.append(Other("set"))
            case "TUPLE" | "LIST":
                items = self.since_mark()
                stack.append(tuple(items) if name == "TUPLE" else items)
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                stack.append(tuple(self.pop(int(name[-1]))))
            case "BINPUT" | "LONG_BINPUT" | "PUT":
                self.memo[argument] = stack[-1]
            case "MEMOIZE":
                self.memo[len(self.memo)] = stack[-1]
            case "BINGET" | "LONG_BINGET" | "GET":
                stack.append(self.memo[argument])
            case "GLOBAL":
                stack.append(Global(argument.replace(" ", ".")))
            case "STACK_GLOBAL":
                stack.append(Global(".".join(self.pop(2))))
            case "BINPERSID":
                stack.append(_storage(*self.pop(1)))
            case "NEWOBJ" if getattr(stack[-2], "name", "") in self.classes:
                stack.append(Made(self.pop(2)[0].name))
            case "REDUCE" | "NEWOBJ":
                stack.append(_called(*self.pop(2)))
            case "BUILD":
                state = self.pop(1)[0]  # such as the versions of modules in a state dict
                if isinstance(stack[-1], Made):
                    stack[-1].state = state
            case "APPEND" | "SETITEM":
                self.put(self.pop(1 + (name == "SETITEM")), name == "SETITEM")
            case "APPENDS" | "SETITEMS" | "ADDITEMS":
                self.put(self.since_mark(), name == "SETITEMS")
            case _ if name.startswith(_VALUES):
                stack.append(argument)
            case _:
                raise ValueError(f"its pickle has the opcode {name}")

    def pop(self, count: int) -> list[Any]:
        """The last values of the stack."""
        place = len(self.stack) - count
        if not 0 <= place <= len(self.stack):
            raise IndexError("pop from an empty stack")
        found = self.stack[place:]
        del self.stack[place:]
        return found

    def since_mark(self) -> list[Any]:
        """The values above the last mark."""
        return self.pop(len(self.stack) - self.marks.pop())

    def put(self, items: list[Any], in_pairs: bool) -> None:
        """Add items to the value on top of the stack."""
        target = self.stack[-1]
        if in_pairs and isinstance(target, dict):
            for key, value in zip(items[::2], items[1::2], strict=True):
                key = _as_name(key)
                if key in target:
                    name = key.name if isinstance(key, Other) else shown(key)
                    raise ValueError(f"the name {name} is there twice")
                target[key] = value
        elif not in_pairs and isinstance(target, list):
            target.extend(items)
        elif not isinstance(target, Other):
            raise TypeError("items are put into what takes none")


def _as_name(key: Any) -> Any:
    """A key of a dict as something that is hashed in no time, and not as its writer wishes.

    Hashing what is nested deeply may crash, and numbers can be chosen so that all of them have the
    same hash. The hash of a text is another one in each process.
    """
    if isinstance(key, str | Made | None):
        return key
    kind = type(key).__name__
    plain = isinstance(key, float) or (isinstance(key, int) and key.bit_length() <= 1000)
    return Other(f"{kind} {key!r}" if plain else kind)


def _storage(name: Any) -> FileStorage | Other:
    """What a persistent id stands for."""
    kind, made_of, key, *_ = name if isinstance(name, tuple) and len(name) == 5 else [None] * 3
    if kind != "storage" or not isinstance(made_of, Global) or not isinstance(key, str):
        return Other("a persistent object")
    if made_of.name == "torch.storage.UntypedStorage":
        return FileStorage(key, None)
    dtype = _STORED.get(made_of.name)
    return Other(made_of.name) if dtype is None else FileStorage(key, dtype)


def _called(what: Any, args: Any) -> Any:
    """What a call of a named function would give."""
    name = what.name if isinstance(what, Global) else "an object"
    values: Any = args if isinstance(args, tuple) else ()
    match name, len(values):
        case "collections.OrderedDict", 0:
            return {}
        case "torch.Size", 1 if isinstance(values[0], tuple):
            return values[0]
        case "torch._utils._rebuild_tensor_v2", 6 | 7:
            return _tensor(values, getattr(values[0], "dtype", None), values[6:])
        case "torch._utils._rebuild_tensor_v3", 7 | 8:
            return _tensor(values, _DTYPES.get(getattr(values[6], "name", "")), values[7:])
        case "torch._utils._rebuild_parameter", 3:
            return values[0]
        case "torch._utils._rebuild_parameter_with_state", 4:
            return values[0]
        case "torch._tensor._rebuild_from_type_v2", 4:
            if getattr(values[1], "name", "") in _PLAIN_TENSORS:
                return _called(values[0], values[2])
            name = getattr(values[1], "name", name)
    return Other(_REBUILT.get(name, name))


def _tensor(values: Any, dtype: torch.dtype | None, bits: Any) -> FileTensor | Other:
    """A tensor of a storage; `bits` says whether it is negated or conjugated when it is read."""
    storage, offset, shape, strides = values[:4]
    if isinstance(storage, Other):
        return storage
    if any(bits):
        return Other("a view that negates or conjugates")
    if not isinstance(storage, FileStorage) or dtype is None:
        return Other("a tensor of a dtype that is not read")
    check_shape(shape, dtype)
    numbers = [offset, *strides] if isinstance(strides, tuple) else [None]
    if not all(type(n) is int and 0 <= n < 2**63 for n in numbers) or len(strides) != len(shape):
        raise ValueError(f"strides {shown(strides)} do not fit the shape {shown(shape)}")
    if not is_text(storage.key):
        raise ValueError("a storage has no name")
    return FileTensor(storage.key, dtype, offset, tuple(shape), strides)


_WHOLE = "pass tensors by name alone: save model.state_dict() by itself, or pass the part that is"
_WHOLE += " one, load_shards(torch.load(path, mmap=True, weights_only=True)['model'], ...)"
_MIXED = "does not hold tensors by name alone"


def of_torch(file: File) -> Weights:
    """The tensors of a file of `torch.save`, which are read from the records of their storages.

    Raises:
      FileError: it is damaged, holds something else, or has more leaves than its limits allow.
    """
    value, storages = _read(file)
    if not isinstance(value, dict):
        raise file.error(_MIXED, [f"got {_kind(value)}"], fix=_WHOLE)
    file.require_small(0, len(value))
    return {leaf: _torch_entry(file, storages, leaf, stored) for leaf, stored in value.items()}


def tensor_of_torch(file: File, leaf: str) -> Entry:
    """The tensor of a file that `torch.save` wrote for it alone.

    Raises:
      FileError: it is damaged, or holds something else.
    """
    value, storages = _read(file)
    return _torch_entry(file, storages, leaf, value)


def _read(file: File) -> tuple[Any, dict[str, ZipRecord]]:
    """What the pickle of a file describes, and the storages of the tensors in it."""
    found = records(file)
    pickles = [name for name in found if name.count("/") == 1 and name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise file.error("is a zip file, and not one of torch.save", fix=_WHOLE)
    folder, record = pickles[0].removesuffix("data.pkl"), found[pickles[0]]
    if f"{folder}constants.pkl" in found:
        fix = "save torch.jit.load(path).state_dict() by itself"
        raise file.error("is an archive of TorchScript, which is a program", fix=fix)
    order = found.get(f"{folder}byteorder")
    if order and file.read(order.start, min(order.length, 8)) != b"little":
        fix = "save it again on a machine like this one"
        raise file.error("has another order of bytes than this machine", fix=fix)
    storages = {
        name.removeprefix(f"{folder}data/"): record
        for name, record in found.items()
        if name.startswith(f"{folder}data/")
    }
    file.require_small(record.length)
    data = file.read(record.start, record.length)
    try:
        return read_pickle(data), storages
    except ValueError as error:
        raise file.error("is damaged", [f"{error}"]) from None


def _torch_entry(file: File, storages: dict[str, ZipRecord], leaf: Any, value: Any) -> Entry:
    """A tensor, compared with the storage that it lies in."""
    if not isinstance(leaf, str) or not is_text(leaf):
        raise file.error(_MIXED, [f"got a name that is no text: {_kind(leaf)}"], fix=_WHOLE)
    if not isinstance(value, FileTensor):
        raise file.error(_MIXED, [f"got {_kind(value)}"], leaf, _WHOLE)
    record = storages.get(value.storage)
    if record is None:
        raise file.error("is damaged", [f"its storage {shown(value.storage)} is missing"], leaf)
    if max(value.end, prod(value.shape) * value.dtype.itemsize) > record.length:
        what = f"shape {shown(value.shape)} and strides {shown(value.strides)} of {value.dtype}"
        raise file.error("is damaged", [f"{what} do not fit {record.length} bytes"], leaf)
    base = record.start + value.offset * value.dtype.itemsize
    return file.entry(leaf, base, value.dtype, value.shape, value.strides)


def _kind(value: Any) -> str:
    return value.name if isinstance(value, Other) else type(value).__name__

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
a function that reads elements of it. Of safetensors files, which are 8 bytes of length, a JSON
header and flat data, the place of an element is known from the header.

A file of `torch.save` is a zip file of a pickle, which describes the tensors, and of a record for
each storage. A pickle is a program for a small machine with a stack. Here Python's own machine runs
it, but what it names is never imported or called: each name, and each call of one, becomes a
`Symbol`, and the symbols are read as a description.

Each rank that saves a DCP directory, as FSDP2 and torchtitan do, writes a file in which its
*chunks* lie one after the other. A chunk is a part of a tensor, a box with offsets and sizes, in
the form that `torch.save` gives to one tensor. The file `.metadata`, a pickle, says which chunks
there are, and at which byte of which file each begins.
"""

import copy
import io
import json
import os
import pickle
import reprlib
import stat
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
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
            raise self.error("is not a regular file", fix="pass a file of weights")
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
        self._require(start, length)
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

    def _require(self, offset: int, length: int, leaf: str = "") -> None:
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

    def entry(self, leaf: str, base: int, kind: torch.dtype, shape: Sequence[int]) -> Entry:
        """A tensor of the file, read in parts; its first element lies at `base`, in bytes."""

        def read(start: int, stop: int) -> Tensor:
            if start == stop:
                return torch.empty(0, dtype=kind)
            size = kind.itemsize
            data = self.read(base + start * size, (stop - start) * size, leaf)
            return torch.frombuffer(data, dtype=kind)

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


def sizes_in(value: Any) -> tuple[int, ...]:
    """Sizes, strides or offsets of a tensor; raises ValueError if it is something else."""
    numbers: Any = value if isinstance(value, list | tuple) else [None]
    if len(numbers) > MAX_DIMS or not all(type(n) is int and n >= 0 for n in numbers):
        raise ValueError(f"{shown(value)} is not a list of at most {MAX_DIMS} sizes")
    return tuple(numbers)


def check_shape(shape: Any, kind: torch.dtype) -> None:
    """Raise ValueError unless these are the sizes of a tensor that torch can make."""
    if prod(max(1, n) for n in sizes_in(shape)) * kind.itemsize >= 2**63:
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
    return name.encode(errors="ignore").decode() == name


# Safetensors files: 8 bytes of length, a header of JSON, and the values of all tensors.

_WORDS = "F64 F32 F16 BF16 F8_E4M3 F8_E5M2 I64 I32 I16 I8 U64 U32 U16 U8 BOOL"
_MEANT = "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2"
_MEANT += " int64 int32 int16 int8 uint64 uint32 uint16 uint8 bool"
DTYPES: dict[str, str] = dict(zip(_WORDS.split(), _MEANT.split(), strict=True))
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
    """The value of a JSON text without names that are there twice.

    Raises:
      ValueError, RecursionError: it is something else.
    """
    return json.loads(text, object_pairs_hook=_once)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON; raises ValueError if a name is there twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"a name is there twice: {shown([name for name, _ in pairs])}")
    return found


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
        found[leaf] = file.entry(leaf, base + begin, kind, shape)
        places.append((begin, end, leaf))
    last = 0
    for begin, end, leaf in sorted(places):
        if begin != last:
            how = "overlap others" if begin < last else "leave a gap before them"
            raise file.error("is damaged", [f"its bytes {begin} to {end} {how}"], leaf)
        last = end
    if base + last != file.size:
        raise file.error("is damaged", [f"{file.size - base - last} bytes follow the last tensor"])
    return found


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
    begin, end = sizes_in(offsets)
    if end - begin != prod(shape) * kind.itemsize or not begin <= end <= room:
        text = f"shape {shown(shape)} of {code} does not fit bytes {shown(begin)} to {shown(end)}"
        raise ValueError(text)
    return kind, shape, begin, end


# Where the records of a zip file lie; `torch.save` stores each tensor's storage in one.


class _ReadAt(io.RawIOBase):
    """A file as the stream from which `zipfile` reads the directory of its records."""

    def __init__(self, file: File) -> None:
        self._file, self._at = file, 0

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._file.size)[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        data = self._file.header(self._at, min(len(buffer), max(0, self._file.size - self._at)))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def records(file: File) -> dict[str, File]:
    """The records of a zip file by name, each as a part of it.

    Raises:
      FileError: it is damaged, or its records are compressed.
    """
    found: dict[str, File] = {}
    try:
        with zipfile.ZipFile(_ReadAt(file)) as archive:
            listed = archive.infolist()
        for each in listed:
            signature, named, extra = struct.unpack("<4s22xHH", file.read(each.header_offset, 30))
            if signature != b"PK\3\4":
                raise ValueError(f"{shown(each.filename)} is not where its directory says")
            if each.compress_type or each.flag_bits & 1:
                raise ValueError(f"{shown(each.filename)} is compressed or encrypted")
            if each.filename in found:
                raise ValueError(f"{shown(each.filename)} is there twice")
            found[each.filename] = file.part(
                each.header_offset + 30 + named + extra, each.file_size
            )
    except FileError:
        raise
    except Exception as error:  # whatever `zipfile` makes of damage
        raise file.error("is damaged", [f"{type(error).__name__}: {error}"]) from None
    return found


# What a pickle describes, without importing or calling what it names.


class Symbol:
    """Something that a pickle names, or a call of it, which is not done.

    Args:
      name: of a class or function.
      args: of the call.
    """

    __match_args__ = ("name", "args")

    def __init__(self, name: str, args: tuple = ()) -> None:
        self.name, self.args = name, args
        self.state: Any = None  # what an instance would be given, in most cases its attributes

    def __call__(self, *args: Any) -> "Symbol | _Dict":
        return _Dict() if self.name == "collections.OrderedDict" else Symbol(self.name, args)

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Dict(dict):
    """A dict of a pickle, whose keys are hashed in no time, and not as its writer wishes.

    Hashing what is nested deeply may crash, and numbers can be chosen so that all of them have the
    same hash. The hash of a text is another one in each process, that of a symbol its address.
    """

    def __setitem__(self, key: Any, value: Any) -> None:
        plain = isinstance(key, str | Symbol | None)
        super().__setitem__(key if plain else Symbol(type(key).__name__), value)

    def __setstate__(self, state: Any) -> None:
        pass  # such as the versions of modules in a state dict


# Each hashes, or allocates, what its writer wishes. No state dict of tensors needs them.
_LEFT_OUT = (pickle.DICT, pickle.EMPTY_SET, pickle.FROZENSET, pickle.ADDITEMS, pickle.BYTEARRAY8)


class _Unpickler(pickle._Unpickler):  # in Python, as the one in C allocates what a file asks for
    dispatch = {k: v for k, v in pickle._Unpickler.dispatch.items() if bytes([k]) not in _LEFT_OUT}
    dispatch[pickle.EMPTY_DICT[0]] = lambda self: self.stack.append(_Dict())  # pyright: ignore
    dispatch[pickle.NEWOBJ[0]] = dispatch[pickle.REDUCE[0]]  # both call, and symbols are no classes

    def find_class(self, module: str, name: str) -> Symbol:
        return Symbol(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> Symbol:
        return Symbol("storage", pid if isinstance(pid, tuple) else ())


def read_pickle(data: bytes) -> Any:
    """The value that a pickle describes: of dicts, lists, tuples, plain values and symbols.

    Raises:
      ValueError: it is damaged, or has something that `torch.save` does not write.
    """
    try:
        return _Unpickler(io.BytesIO(data)).load()
    except Exception as error:  # whatever `pickle` makes of damage
        raise ValueError(f"its pickle is damaged ({type(error).__name__}: {error})") from None


def _sizes(value: Any) -> tuple[int, ...]:
    """Sizes, strides or offsets of a tensor, which may be a `torch.Size`."""
    bare = isinstance(value, Symbol) and value.name == "torch.Size" and len(value.args) == 1
    return sizes_in(value.args[0] if bare else value)


def _dtype(value: Any) -> torch.dtype:
    """The dtype that a symbol names, by itself or as the class of a storage."""
    name = value.name if isinstance(value, Symbol) else ""
    if name not in _DTYPES:
        raise ValueError(f"it has a dtype that is not read: {shown(name)}")
    return _DTYPES[name]


_STORED = "Double Float Half BFloat16 Long Int Short Char Byte Bool ComplexDouble ComplexFloat"
_AS = "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 bool complex128 complex64"
_NAMES = dict(zip([f"{x}Storage" for x in _STORED.split()], _AS.split(), strict=True))
_NAMES |= {x: x for x in [*DTYPES.values(), *_AS.split()]}
_NAMES |= {f"float8_{x}": f"float8_{x}" for x in ("e4m3fnuz", "e5m2fnuz", "e8m0fnu")}
_DTYPES = {f"torch.{name}": getattr(torch, x) for name, x in _NAMES.items()}


# The tensors that a file of `torch.save` describes.

_WHOLE = "pass tensors by name alone: save model.state_dict() by itself, or pass the part that is"
_WHOLE += " one, load_shards(torch.load(path, mmap=True, weights_only=True)['model'], ...)"
_MIXED = "does not hold tensors by name alone"


def of_torch(file: File) -> Weights:
    """The tensors of a file of `torch.save`, which are read from the records of their storages.

    Raises:
      FileError: it is damaged, or holds something else.
    """
    value, storages = _read(file)
    if not isinstance(value, dict):
        raise file.error(_MIXED, [f"got {_kind(value)}"], fix=_WHOLE)
    found: Weights = {}
    for leaf, described in value.items():
        if not isinstance(leaf, str) or not is_text(leaf):
            raise file.error(_MIXED, [f"got a name that is no text: {_kind(leaf)}"], fix=_WHOLE)
        found[leaf] = _entry(file, storages, leaf, described)
    return found


def _read(file: File) -> tuple[Any, dict[str, File]]:
    """What the pickle of a file describes, and the storages of the tensors in it."""
    found = records(file)
    pickles = [name for name in found if name.count("/") == 1 and name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise file.error("is a zip file, and not one of torch.save", fix=_WHOLE)
    folder, record = pickles[0].removesuffix("data.pkl"), found[pickles[0]]
    order = found.get(f"{folder}byteorder")
    if order and order.read(0, min(order.size, 8)) != b"little":
        fix = "save it again on a machine like this one"
        raise file.error("has another order of bytes than this machine", fix=fix)
    try:
        value = read_pickle(record.header(0, record.size))
    except ValueError as error:
        raise file.error("is damaged", [f"{error}"]) from None
    start = f"{folder}data/"
    return value, {k.removeprefix(start): v for k, v in found.items() if k.startswith(start)}


def _entry(file: File, storages: dict[str, File], leaf: str, described: Any) -> Entry:
    """A tensor, compared with the storage that it lies in."""
    call = _bare(described)
    args = call.args if isinstance(call, Symbol) else ()
    if _kind(call) == "torch._utils._rebuild_tensor_v2" and len(args) >= 6:
        dtype, bits = None, args[6:]
    elif _kind(call) == "torch._utils._rebuild_tensor_v3" and len(args) >= 7:
        dtype, bits = args[6], args[7:]
    else:
        raise file.error(_MIXED, [f"got {_kind(call)}"], leaf, _WHOLE)
    storage, first, shape, strides = args[:4]
    try:
        match storage:
            case Symbol("storage", ("storage", kind, str(key), _, _)):
                dtype = _dtype(dtype or kind)
            case _:
                raise ValueError(f"its storage is {_kind(storage)}")
        shape, strides, (first,) = _sizes(shape), _sizes(strides), _sizes((first,))
        check_shape(shape, dtype)
        dense = zip(shape, strides, contiguous(shape), strict=True)
        if prod(shape) and any(n > 1 and step != want for n, step, want in dense):
            raise ValueError("it has strides of its own: save it with contiguous()")
        if any(bits):
            raise ValueError("a view that negates or conjugates is not read")
        if key not in storages:
            raise ValueError(f"its storage {shown(key)} is missing")
        record = storages[key]
        if (first + prod(shape)) * dtype.itemsize > record.size:
            raise ValueError(f"shape {shape} of {dtype} does not fit {record.size} bytes")
    except ValueError as error:
        raise file.error("is damaged", [f"{error}"], leaf) from None
    return record.entry(leaf, first * dtype.itemsize, dtype, shape)


def _bare(value: Any) -> Any:
    """The call that makes a tensor, without what makes it a parameter."""
    parameter = _kind(value).removesuffix("_with_state") == "torch._utils._rebuild_parameter"
    return value.args[0] if parameter and value.args else value


def _kind(value: Any) -> str:
    if isinstance(value, Symbol):
        return value.name[:200]
    return "dict" if isinstance(value, _Dict) else type(value).__name__


# The tensors of a DCP directory, and which of their chunks have some elements.

METADATA = ".metadata"
Sizes = tuple[int, ...]


class Chunk(NamedTuple):
    """A part of a tensor: a box in it, and where the box lies."""

    offsets: Sizes
    sizes: Sizes
    file: Any  # its name
    start: int  # in bytes
    length: int


def of_dcp(index: File, *, trust: bool) -> Weights:
    """The tensors that a `.metadata` describes; objects that are not tensors are left out.

    Args:
      index: that file.
      trust: whether the files that it names may lie elsewhere.

    Raises:
      FileError: it is damaged.
    """
    found: Weights = {}
    try:
        described = _state(read_pickle(index.header(0, index.size)), "Metadata")
        places = _places(described)
        for leaf, value in described["state_dict_metadata"].items():
            if not isinstance(leaf, str) or not is_text(leaf):
                raise ValueError(f"it names a tensor {_kind(leaf)}")
            if _class_of(value) == "BytesStorageMetadata":
                continue
            facts = _state(value, "TensorStorageMetadata")
            properties = getattr(facts.get("properties"), "state", None)  # whose first is the dtype
            of = properties[0] if isinstance(properties, tuple) and properties else None
            dtype, shape = _dtype(of), _sizes(facts.get("size"))
            check_shape(shape, dtype)
            chunks = _chunks(leaf, shape, facts.get("chunks"), places)
            cut = _CutTensor(index, leaf, dtype, shape, chunks, trust)
            found[leaf] = Entry(shape, dtype, cut.read)
    except (ValueError, KeyError, AttributeError) as error:  # also of what should be a dict
        raise index.error("is damaged", [f"{error}"]) from None
    return found


def _class_of(value: Any) -> str:
    return _kind(value).rpartition(".")[2]


def _state(value: Any, kind: str) -> dict[str, Any]:
    """The attributes of an instance."""
    if _class_of(value) != kind or not isinstance(value.state, dict):
        raise ValueError(f"expected {kind}, got {_kind(value)}")
    return value.state


def _places(described: dict[str, Any]) -> dict[tuple[Any, Sizes], tuple[Any, int, int]]:
    """File, start and length of each chunk, by the name of its tensor and its offsets."""
    places: dict[tuple[Any, Sizes], tuple[Any, int, int]] = {}
    for key, value in described["storage_data"].items():
        at, info = _state(key, "MetadataIndex"), _state(value, "_StorageInfo")
        name, offset = at.get("fqn"), at.get("offset")
        if offset is None or not isinstance(name, str):  # an object that is not a tensor
            continue
        if (name, _sizes(offset)) in places:
            raise ValueError(f"{shown(name)}: it lists chunk {_sizes(offset)} twice")
        start, length = _sizes((info.get("offset"), info.get("length")))
        places[name, _sizes(offset)] = info.get("relative_path"), start, length
    return places


def _chunks(leaf: str, shape: Sizes, given: Any, places: Mapping[Any, Any]) -> list[Chunk]:
    """The chunks of a tensor that have elements; raises ValueError if they do not fit together."""
    chunks: list[Chunk] = []
    for chunk in given if isinstance(given, list) else []:
        box = _state(chunk, "ChunkStorageMetadata")
        offsets, sizes = _sizes(box.get("offsets")), _sizes(box.get("sizes"))
        if any(a + n > end for a, n, end in zip(offsets, sizes, shape, strict=True)):
            raise ValueError(f"{shown(leaf)}: a chunk lies outside of {shape}")
        if not prod(sizes):  # of ranks that have no part of it
            continue
        if (leaf, offsets) not in places:
            raise ValueError(f"{shown(leaf)}: it does not say where chunk {offsets} lies")
        chunks.append(Chunk(offsets, sizes, *places[leaf, offsets]))
    numel = sum(prod(chunk.sizes) for chunk in chunks)
    if numel != prod(shape):
        had = f"chunks of {numel} elements in all, expected {prod(shape)}"
        raise ValueError(f"{shown(leaf)}: it has {had}")
    return chunks


class _CutTensor(NamedTuple):
    """A tensor whose chunks lie in several files, which the index names."""

    index: File
    leaf: str
    dtype: torch.dtype
    shape: Sizes
    chunks: list[Chunk]
    trust: bool  # whether these files may lie elsewhere

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
        seen = torch.zeros(box.shape, dtype=torch.int8)  # how many chunks have an element
        for chunk in self.chunks:
            edges = zip(offsets, box.shape, chunk.offsets, chunk.sizes, strict=True)
            both = [range(max(a, b), min(a + n, b + m)) for a, n, b, m in edges]
            if not all(both):
                continue
            inside = zip(both, chunk.offsets, contiguous(chunk.sizes), strict=True)
            start = sum((x.start - b) * stride for x, b, stride in inside)
            sizes = [len(x) for x in both]
            where = tuple(
                slice(x.start - a, x.stop - a) for x, a in zip(both, offsets, strict=True)
            )
            seen[where] += 1
            box[where] = self._read_chunk(chunk, start, start + prod(sizes)).view(sizes)
        if not bool((seen == 1).all()):
            raise self.index.error("is damaged", ["its chunks overlap, or leave a gap"], self.leaf)

    def _read_chunk(self, chunk: Chunk, start: int, stop: int) -> Tensor:
        """Elements of a chunk, from its file."""
        with closing(self.index.named(chunk.file, self.leaf, trust=self.trust)) as opened:
            file = opened.part(chunk.start, chunk.length)
            value, storages = _read(file)
            entry = _entry(file, storages, self.leaf, value)
            if (entry.shape, entry.dtype) != (chunk.sizes, self.dtype):
                wrong = f"chunk {chunk.offsets} should be {self.dtype} of shape {chunk.sizes}, "
                wrong += f"is {entry.dtype} of {entry.shape}"
                raise file.error("does not match .metadata", [wrong], self.leaf, TOGETHER)
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

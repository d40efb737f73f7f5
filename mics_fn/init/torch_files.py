"""Files of `torch.save`, and directories of torch.distributed.checkpoint (DCP) made of them.

A file of `torch.save` is a zip file of a pickle, which describes the tensors, and of a record for
each storage. A pickle is a program for a small machine with a stack. Here Python's own machine runs
it, but what it names is never imported or called: each name, and each call of one, becomes a
`Symbol`, and the symbols are read as a description. See [Note: files of strangers] in `files.py`.

Each rank that saves a DCP directory, as FSDP2 and torchtitan do, writes a file in which its
*chunks* lie one after the other. A chunk is a part of a tensor, a box with offsets and sizes, in
the form that `torch.save` gives to one tensor. The file `.metadata`, a pickle, says which chunks
there are, and at which byte of which file each begins.
"""

import io
import pickle
import struct
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mics_fn.errors import FileError
from mics_fn.init import files
from mics_fn.init.files import Entry, File, Weights, shown

# Where the records of a zip file lie; `torch.save` stores each tensor's storage in one.


class ZipRecord(NamedTuple):
    """A record of a zip file: the place of its bytes, and how many there are."""

    start: int
    length: int


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


def records(file: File) -> dict[str, ZipRecord]:
    """The records of a zip file by name.

    Raises:
      FileError: it is damaged, or its records are compressed.
    """
    found: dict[str, ZipRecord] = {}
    try:
        with zipfile.ZipFile(_ReadAt(file)) as archive:
            listed = archive.infolist()
        for each in listed:
            signature, named, extra = struct.unpack("<4s22xHH", file.read(each.header_offset, 30))
            start = each.header_offset + 30 + named + extra
            if signature != b"PK\3\4" or start + each.file_size > file.size:
                raise ValueError(f"{shown(each.filename)} is not where its directory says")
            if each.compress_type or each.flag_bits & 1:
                raise ValueError(f"{shown(each.filename)} is compressed or encrypted")
            if each.filename in found:
                raise ValueError(f"{shown(each.filename)} is there twice")
            found[each.filename] = ZipRecord(start, each.file_size)
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

    def __setitem__(self, key: Any, value: Any) -> None:
        pass  # an item of a dict of another class

    def extend(self, items: Any) -> None:
        """Drop the items of a list of another class."""


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
    """Sizes, strides or offsets of a tensor."""
    if isinstance(value, Symbol) and value.name == "torch.Size" and len(value.args) == 1:
        value = value.args[0]
    numbers: Any = value if isinstance(value, tuple) else [None]
    most = files.MAX_DIMS
    if len(numbers) > most or not all(type(n) is int and 0 <= n < 2**63 for n in numbers):
        raise ValueError(f"{shown(value)} is not a list of at most {most} sizes")
    return numbers


def _dtype(value: Any) -> torch.dtype:
    """The dtype that a symbol names, by itself or as the class of a storage."""
    name = value.name if isinstance(value, Symbol) else ""
    if name not in _DTYPES:
        raise ValueError(f"it has a dtype that is not read: {shown(name)}")
    return _DTYPES[name]


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
_NEWER = ("uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2")
_NEWER += ("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
_DTYPES = {f"torch.{name}Storage": dtype for name, dtype in _STORAGES.items()}
_DTYPES |= {f"{dtype}": dtype for dtype in _STORAGES.values()}
_DTYPES |= {f"torch.{name}": getattr(torch, name) for name in _NEWER if hasattr(torch, name)}


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
        if not isinstance(leaf, str) or not files.is_text(leaf):
            raise file.error(_MIXED, [f"got a name that is no text: {_kind(leaf)}"], fix=_WHOLE)
        found[leaf] = _entry(file, storages, leaf, described)
    return found


def _read(file: File) -> tuple[Any, dict[str, ZipRecord]]:
    """What the pickle of a file describes, and the storages of the tensors in it."""
    found = records(file)
    pickles = [name for name in found if name.count("/") == 1 and name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise file.error("is a zip file, and not one of torch.save", fix=_WHOLE)
    folder, record = pickles[0].removesuffix("data.pkl"), found[pickles[0]]
    order = found.get(f"{folder}byteorder")
    if order and file.read(order.start, min(order.length, 8)) != b"little":
        fix = "save it again on a machine like this one"
        raise file.error("has another order of bytes than this machine", fix=fix)
    try:
        value = read_pickle(file.header(*record))
    except ValueError as error:
        raise file.error("is damaged", [f"{error}"]) from None
    start = f"{folder}data/"
    return value, {k.removeprefix(start): v for k, v in found.items() if k.startswith(start)}


def _entry(file: File, storages: dict[str, ZipRecord], leaf: str, described: Any) -> Entry:
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
        files.check_shape(shape, dtype)
        if len(shape) != len(strides):
            raise ValueError(f"strides {strides} do not fit the shape {shape}")
        if any(bits):
            raise ValueError("a view that negates or conjugates is not read")
        if key not in storages:
            raise ValueError(f"its storage {shown(key)} is missing")
        record = storages[key]
        end = (first + files.span(shape, strides)) * dtype.itemsize
        if max(end, prod(shape) * dtype.itemsize) > record.length:
            what = f"shape {shape} and strides {strides} of {dtype}"
            raise ValueError(f"{what} do not fit {record.length} bytes")
    except ValueError as error:
        raise file.error("is damaged", [f"{error}"], leaf) from None
    return file.entry(leaf, record.start + first * dtype.itemsize, dtype, shape, strides)


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
            if not isinstance(leaf, str) or not files.is_text(leaf):
                raise ValueError(f"it names a tensor {_kind(leaf)}")
            if _class_of(value) != "BytesStorageMetadata":
                cut = _CutTensor(index, leaf, _state(value, "TensorStorageMetadata"), places, trust)
                found[leaf] = Entry(cut.shape, cut.dtype, cut.read)
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


def _dtype_in(properties: Any) -> torch.dtype:
    """The dtype of a tensor, which stands first in its properties."""
    state = getattr(properties, "state", None)
    return _dtype(state[0] if isinstance(state, tuple) and state else None)


def _places(described: dict[str, Any]) -> dict[tuple[Any, Sizes], tuple[Any, int, int]]:
    """File, start and length of each chunk, by the name of its tensor and its offsets."""
    places: dict[tuple[Any, Sizes], tuple[Any, int, int]] = {}
    for key, value in described["storage_data"].items():
        at, info = _state(key, "MetadataIndex"), _state(value, "_StorageInfo")
        name, offset = at.get("fqn"), at.get("offset")
        if offset is None or not isinstance(name, str):  # an object that is not a tensor
            continue
        how = info.get("transform_descriptors")
        if how:
            raise ValueError(f"{shown(name)} is transformed: {shown(how)}")
        if (name, _sizes(offset)) in places:
            raise ValueError(f"chunk {_sizes(offset)} of {shown(name)} is there twice")
        start, length = _sizes((info.get("offset"), info.get("length")))
        places[name, _sizes(offset)] = info.get("relative_path"), start, length
    return places


class _CutTensor:
    """A tensor whose chunks lie in several files.

    Args:
      index: the file that describes it.
      leaf: its name.
      facts: what the index says of it.
      places: where chunks lie, by name and offsets.
      trust: whether the files that the index names may lie elsewhere.

    Raises:
      ValueError: what the index says does not fit together.
    """

    def __init__(
        self, index: File, leaf: str, facts: dict[str, Any], places: dict[Any, Any], trust: bool
    ) -> None:
        self.index, self.leaf, self.trust = index, leaf, trust
        self.dtype = _dtype_in(facts.get("properties"))
        self.shape = _sizes(facts.get("size"))
        files.check_shape(self.shape, self.dtype)
        self.chunks: list[Chunk] = []
        given: Any = facts.get("chunks")
        for chunk in given if isinstance(given, list) else []:
            box = _state(chunk, "ChunkStorageMetadata")
            offsets, sizes = _sizes(box.get("offsets")), _sizes(box.get("sizes"))
            if not len(offsets) == len(sizes) == len(self.shape):
                raise ValueError(f"{shown(leaf)}: a chunk has other dimensions than the tensor")
            if any(a + n > end for a, n, end in zip(offsets, sizes, self.shape, strict=True)):
                raise ValueError(f"{shown(leaf)}: a chunk lies outside of {self.shape}")
            if not prod(sizes):  # of ranks that have no part of it
                continue
            if (leaf, offsets) not in places:
                raise ValueError(f"{shown(leaf)}: it does not say where chunk {offsets} lies")
            self.chunks.append(Chunk(offsets, sizes, *places[leaf, offsets]))
        numel = sum(prod(chunk.sizes) for chunk in self.chunks)
        if numel != prod(self.shape):
            had = f"chunks of {numel} elements in all, expected {prod(self.shape)}"
            raise ValueError(f"{shown(leaf)}: it has {had}")

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
            edges = zip(offsets, box.shape, chunk.offsets, chunk.sizes, strict=True)
            both = [range(max(a, b), min(a + n, b + m)) for a, n, b, m in edges]
            if not all(both):
                continue
            inside = zip(both, chunk.offsets, files.contiguous(chunk.sizes), strict=True)
            start = sum((x.start - b) * stride for x, b, stride in inside)
            sizes = [len(x) for x in both]
            where = tuple(
                slice(x.start - a, x.stop - a) for x, a in zip(both, offsets, strict=True)
            )
            if seen[where].any():
                raise self.index.error("is damaged", ["its chunks overlap"], self.leaf)
            seen[where] = True
            box[where] = self._read_chunk(chunk, start, start + prod(sizes)).view(sizes)
        if not seen.all():
            raise self.index.error("is damaged", ["its chunks leave a gap"], self.leaf)

    def _read_chunk(self, chunk: Chunk, start: int, stop: int) -> Tensor:
        """Elements of a chunk, from its file."""
        with closing(self.index.named(chunk.file, self.leaf, trust=self.trust)) as opened:
            file = opened.part(chunk.start, chunk.length)
            value, storages = _read(file)
            entry = _entry(file, storages, self.leaf, value)
            if (entry.shape, entry.dtype) != (chunk.sizes, self.dtype):
                wrong = f"chunk {chunk.offsets} should be {self.dtype} of shape {chunk.sizes}, "
                wrong += f"is {entry.dtype} of {entry.shape}"
                raise file.error("does not match .metadata", [wrong], self.leaf, files.TOGETHER)
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

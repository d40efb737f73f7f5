"""The manifest of a step: one JSON object with a table of slices, and its own digest.

[Note: slices] A *slice* is a range of a flattened tensor that lies in one file, at most 4 MiB, and
that is read at once: the manifest has its place and the CRC-32 of its bytes. So a reader needs
nothing but this table, however many ranks wrote and read: it takes the slices that overlap what it
wants, reads each as a whole, compares it, and copies what it wants of it. Slices are tensors of the
safetensors file, too, such as `params.w[0:4096]`, for readers that do not know this library.
"""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from mics_fn import _torch
from mics_fn.errors import FileError, LeafError, message
from mics_fn.init import DTYPES, check_shape, is_text, strict_json
from mics_fn.offload import is_placed
from mics_fn.shards import dtype_name

Replicas = Literal["equal", "independent"]

# Which tensors are saved, and as what.

_AS_BYTES = ("complex32", "complex64", "complex128", "float4_e2m1fn_x2")
_AS_BYTES += ("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
# By name the dtypes that are saved; those that a file has no word for are saved as their bytes.
SAVED = {x: getattr(torch, x) for x in (*DTYPES.values(), *_AS_BYTES) if hasattr(torch, x)}
WORDS = {getattr(torch, x): word for word, x in DTYPES.items()}  # of safetensors files


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


# JSON with tensors, tuples and every float: what a rank saves besides its state.

_TENSOR, _TUPLE, _FLOAT = "$tensor", "$tuple", "$float"
EXTRA = "$extra"  # what the names of its tensors begin with


def encoded(value: Any, root: str = EXTRA) -> tuple[str, dict[str, Tensor]]:
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
            return {_TENSOR: [path, dtype_name(x.dtype), *x.shape]}
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


def decoded(text: str, tensors: Mapping[str, Tensor]) -> Any:
    """The value of `encoded`, given the bytes or the values of its tensors."""

    def known(x: dict[str, Any]) -> Any:
        if _TENSOR in x:
            name, dtype, *shape = x[_TENSOR]
            raw = tensors.get(name, torch.empty(0, dtype=torch.uint8))  # none of it is in a file
            return raw.view(SAVED[dtype]).view(shape)
        if _TUPLE in x:
            return tuple(x[_TUPLE])
        return float(x[_FLOAT]) if _FLOAT in x else x

    return json.loads(text, object_hook=known)


# What the manifest says.

NAME = "MANIFEST.json"
FORMAT, VERSION = "mics_fn checkpoint", 2
MAX_BYTES = 256 * 2**20
SLICE_BYTES = 4 * 2**20
DIGEST_BYTES = 64  # hexadecimal digits of sha256


class SavedTensor(NamedTuple):
    """A tensor of a step.

    Args:
      dtype: the name of the dtype of its elements.
      shape: its full shape.
      copies: 1 for a tensor that all ranks save together; else each replica has values of its own,
        and it is saved so often.
    """

    dtype: str
    shape: tuple[int, ...]
    copies: int = 1


class Slice(NamedTuple):
    """A range of one copy of a flattened tensor, and where it lies; see [Note: slices].

    Args:
      name: of the tensor; of one of the extra, the range is one of its bytes.
      copy: which of its copies.
      start: its first element.
      stop: the element behind its last one.
      offset: the byte of the file at which it begins.
      crc: the CRC-32 of its bytes.
    """

    name: str
    copy: int
    start: int
    stop: int
    offset: int = 0
    crc: int = 0

    def __str__(self) -> str:
        return f"{self.name}[{self.start}:{self.stop}]"


class SavedFile(NamedTuple):
    """A file of a step, which one rank wrote.

    Args:
      name: its name in the folder.
      nbytes: its size.
      header_bytes: the size of what stands in front of the values.
      header: sha256 of that.
      slices: what it has.
      extra: what the rank gave besides the state, as JSON; "" for what the first rank gave.
    """

    name: str
    nbytes: int
    header_bytes: int
    header: str
    slices: list[Slice]
    extra: str = ""

    @classmethod
    def of_json(cls, facts: Any) -> "SavedFile":
        """The file that JSON describes; a stranger may have written it.

        Raises:
          ValueError, TypeError: it is not one.
        """
        name, nbytes, header_bytes, header, rows, extra = facts
        found = cls(name, nbytes, header_bytes, header, [Slice(*row) for row in rows], extra)
        _require(all(isinstance(x, str) for x in (name, header, extra)), f"file {name!r}")
        if "/" in name or name in ("", ".", "..") or "\0" in name or not is_text(name):
            raise ValueError(f"{name[:200]!r}, which is not opened: it leads out of the folder")
        _require_counts(nbytes, header_bytes)
        for tensor, *numbers in found.slices:
            _require(isinstance(tensor, str) and is_text(tensor), f"{tensor!r}")
            _require_counts(*numbers)
        return found


@dataclass(frozen=True)
class Manifest:
    """What a step holds.

    Args:
      step: the number of the step.
      replicas: "independent" if each replica has values of its own, else "equal".
      tensors: by name.
      values: numbers and texts by name.
      files: by position in the groups.
    """

    step: int
    replicas: Replicas
    tensors: dict[str, SavedTensor]
    values: dict[str, Any]
    files: list[SavedFile] = field(default_factory=list)

    def slices(self, name: str, copy: int) -> list[tuple[Slice, int]]:
        """The slices of a copy of a tensor, each with the number of its file, in their order."""
        return self._slices.get((name, copy), [])

    @cached_property
    def _slices(self) -> dict[tuple[str, int], list[tuple[Slice, int]]]:
        found: dict[tuple[str, int], list[tuple[Slice, int]]] = {}
        for number, file in enumerate(self.files):
            for each in file.slices:
                found.setdefault((each.name, each.copy), []).append((each, number))
        for slices in found.values():
            slices.sort()  # of one copy of one tensor, so by where they start
        return found

    def nbytes(self, part: Slice) -> int:
        """The bytes of a slice."""
        tensor = self.tensors.get(part.name)
        return (part.stop - part.start) * (SAVED[tensor.dtype].itemsize if tensor else 1)

    def check(self) -> None:
        """Raise ValueError unless each tensor lies in the files, whole and once."""
        whole = Counter[str]()
        for (name, copy), slices in self._slices.items():
            end, tensor = 0, self.tensors.get(name)
            for each, _ in slices:
                _require(each.start == end < each.stop, f"{each} after {end}")
                end = each.stop
            if tensor is None:
                _require(name.startswith(EXTRA), f"{name} is not a tensor of the state")
            else:
                right = end == prod(tensor.shape) and copy < tensor.copies
                _require(right, f"{name} has {end} elements in its slices")
            whole[name] += 1
        for name, tensor in self.tensors.items():
            right = whole[name] == (tensor.copies if prod(tensor.shape) else 0)
            _require(right, f"{name} has no slices")
        names = set[str]()
        for file in self.files:
            end = file.header_bytes
            for each in file.slices:
                nbytes = self.nbytes(each)
                _require(nbytes <= SLICE_BYTES, f"a slice of {file.name} is too large")
                end += nbytes
            _require(end == file.nbytes, f"{file.name} has other bytes")
            names.add(file.name)
        _require(0 < len(self.files) == len(names), "a file is there twice, or none is")

    def to_bytes(self) -> bytes:
        """The content of the file."""
        body = {"format": FORMAT, "version": VERSION, **vars(self)}
        body.pop("_slices", None)
        body["values"] = json.loads(encoded(self.values)[0])  # which has infinite numbers, too
        text = json.dumps(body, separators=(",", ":"), allow_nan=False).encode()
        return b'{"sha256":"' + hashlib.sha256(text).hexdigest().encode() + b'",' + text[1:]


def read_manifest(data: bytes, path: str) -> Manifest:
    """The manifest that a file holds.

    Args:
      data: its content.
      path: for errors.

    Raises:
      FileError: it is damaged, or of a version that is not known here.
    """

    head, tail = data[: 13 + DIGEST_BYTES], b"{" + data[13 + DIGEST_BYTES :]
    want = b'{"sha256":"' + hashlib.sha256(tail).hexdigest().encode() + b'",'
    try:
        _require(head == want, "its digest is not that of its content")
        body = strict_json(tail.decode())
        found = body["format"], body["version"]
        _require(found == (FORMAT, VERSION), f"{found}, known here is version {VERSION}")
        tensors = {name: _tensor(name, *facts) for name, facts in body["tensors"].items()}
        files = [SavedFile.of_json(facts) for facts in body["files"]]
        _require(body["replicas"] in ("equal", "independent"), f"replicas {body['replicas']!r}")
        _require_counts(body["step"])
        _require(isinstance(body["values"], dict), "its values are not an object")
        values = decoded(json.dumps(body["values"]), {})
        manifest = Manifest(body["step"], body["replicas"], tensors, values, files)
        manifest.check()
    except (LookupError, ValueError, TypeError, AttributeError, RecursionError) as error:
        fix = "load an older step, or copy the whole folder again from where you know it"
        text = message(f"{path} is damaged", [f"{error}"], fix)
        raise FileError(text, path, damaged=True) from None
    return manifest


def _tensor(name: str, kind: Any, shape: Any, copies: Any) -> SavedTensor:
    _require(is_text(name), f"{name!r}")
    _require(isinstance(kind, str) and kind in SAVED, f"{name!r} is of {kind!r}")
    check_shape(shape, SAVED[kind])
    _require_counts(copies)
    return SavedTensor(kind, tuple(shape), copies)


def _require_counts(*found: Any) -> None:
    _require(all(type(n) is int and 0 <= n < 2**62 for n in found), f"{found!r}")


def _require(right: bool, text: str) -> None:
    if not right:
        raise ValueError(text)

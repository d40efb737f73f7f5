"""The folder of a job's checkpoints: what a step is on the disk, and which steps count.

[Note: slices] A *slice* is a range of a flattened tensor that lies in one file, at most 4 MiB, and
that is read at once: the manifest has its place and the CRC-32 of its bytes. So a reader needs
nothing but this table, however many ranks wrote and read: it takes the slices that overlap what it
wants, reads each as a whole, compares it, and copies what it wants of it. Slices are tensors of the
safetensors file, too, such as `params.w[0:4096]`, for readers that do not know this library.

[Note: commit] A step is written into a folder with a temporary name. Each writer waits until the
disk has its file; then the manifest is written, and the disk has that and the folder; then the
folder gets its name, which is one operation of the file system, and the disk has this too. So a
folder with the name of a step is whole, whatever was killed meanwhile, and what a killed job leaves
has another name and never matters. What cannot be read all the same counts, and is an error of
whoever loads it: no step is passed over in silence. Exports for other libraries come to be in the
same way, beside the path that they get.

[Note: epochs] A job that was thought dead may live on beside its successor, and a job may be
started twice. So whoever writes to a folder *owns* it in an *epoch*, a number that is higher than
all before it. The file `.epoch-000002`, which says who took it, is made so that only one can make
it: by a `Trainer` that goes on from the folder, by the first save of any other process, and by a
save that goes back to an older step. The owner then gives another name to all folders that older
epochs are writing into, and only then looks which steps there are. Whoever saves makes such a
folder first, and looks then whether the epoch is still its own. So of two that do this at the same
time either the owner finds the folder, and the rename that would commit it fails, as what it
renames has gone; or the other one finds that it was replaced, and raises. Nothing can change
between the look and the commit, and nobody waits for a lock. All ranks of a job know its epoch, so
a process that takes the place of the first one goes on in it, and takes nothing back.

That needs a file system that makes a file exclusively, renames a folder as one operation, and lets
whoever lists a folder see what others did before. Local ones do; NFS does from version 3 on, as its
server does all three, and clients ask it when they open a folder. It was never tried on NFS.

A folder of a step has its epoch in its name if that is not the first one, such as
`step-00000003.000002`. A step *replaces* every step of a lower epoch from its own number on. As
this follows from names alone, the one operation that commits a step replaces the others too: they
do not count from then on, whatever is killed afterwards and whatever cannot be removed.

Replaced steps are removed as soon as two others count. So there are two whole steps at every
instant, if there were two before; `load(step=)` finds a replaced one while it is there.
"""

import errno
import hashlib
import json
import os
import re
import shutil
import socket
import threading
import time
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from math import inf, prod
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from mics_fn import _torch
from mics_fn.errors import CheckpointNotFound, FileError, LeafError, MicsError, first_line, message
from mics_fn.init import DTYPES, File, check_shape, is_text, strict_json
from mics_fn.offload import is_placed
from mics_fn.shards import dtype_name
from mics_fn.spans import LOG
from mics_fn.threads import Job

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
      LeafError: it is not dense, keeps no values of its own, or is of a dtype that is not saved.
    """
    whole = not (_torch.has_no_data(x) or (_torch.is_wrapper(x) and not is_placed(x)))
    dense = x.layout == torch.strided and not x.is_nested
    if not (whole and dense and dtype_name(x.dtype) in SAVED):
        fix = "pass dense tensors with values, such as a DTensor's full_tensor() or to_local(), of"
        fix += " integers or floats that can be saved, such as x.view(torch.uint8)"
        kind = f"{type(x).__name__} of {x.dtype}, {'nested' if x.is_nested else x.layout}"
        raise LeafError(f"{verb}: {name} is {kind} on {x.device}", fix=fix)
    return x.detach()


# JSON with tensors, tuples and every float: what a rank saves besides its state.

_TENSOR, _TUPLE = "$tensor", "$tuple"
EXTRA = "$extra"  # what the names of its tensors begin with


def encoded(value: Any, root: str = EXTRA) -> tuple[str, dict[str, Tensor]]:
    """A value as JSON, and its tensors by the names that the JSON has for them.

    Raises:
      LeafError: something in it is neither of JSON nor a tensor nor a tuple; it is named.

    >>> text, tensors = encoded({"rate": inf, "order": (1, 2)})
    >>> text, decoded(text, tensors)
    ('{"rate":Infinity,"order":{"$tuple":[1,2]}}', {'rate': inf, 'order': (1, 2)})
    """
    tensors: dict[str, Tensor] = {}

    def plain(x: Any, path: str) -> Any:
        if isinstance(x, Tensor):
            if path in tensors:
                text, fix = f"save: two tensors have the path {path}", "rename a key of one of them"
                raise LeafError(text, fix=fix)
            tensors[path] = savable("save", path, x)
            return {_TENSOR: [path, dtype_name(x.dtype), *x.shape]}
        if x is None or isinstance(x, bool | int | float | str):
            return x
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
        return tuple(x[_TUPLE]) if _TUPLE in x else x

    return json.loads(text, object_hook=known)


# What the manifest says.

NAME = "MANIFEST.json"
FORMAT, VERSION = "mics_fn checkpoint", 4
MAX_BYTES = 256 * 2**20
SLICE_BYTES = 4 * 2**20
DIGEST_BYTES = 64  # hexadecimal digits of sha256
Form = tuple[str, tuple[int, ...]]  # of a tensor: the name of its dtype, and its full shape
_PARTS = re.compile("(.*) in parts along ([0-9]{1,2})((?: of stage [0-9]+)?)", re.DOTALL)


def whole_form(name: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...], int | None]:
    """Name and shape of the leaf that parts have been cut from, and the dim along which.

    See [Note: parts are saved] in `checkpoint.saving`.

    >>> whole_form("w in parts along 1", (2, 3, 4)), whole_form("w", (3, 8))
    (('w', (3, 8), 1), ('w', (3, 8), None))
    """
    found = _PARTS.fullmatch(name)
    if found is None or (dim := int(found[2])) + 1 >= len(shape):
        return name, shape, None
    count, sizes = shape[0], list(shape[1:])
    sizes[dim] *= count
    return found[1] + found[3], tuple(sizes), dim


class Slice(NamedTuple):
    """A range of a flattened tensor, and where it lies; see [Note: slices].

    Args:
      name: of the tensor; of one of the extra, the range is one of its bytes.
      start: its first element.
      stop: the element behind its last one.
      offset: of its first byte among the values of its file.
      crc: the CRC-32 of its bytes.
    """

    name: str
    start: int
    stop: int
    offset: int = 0
    crc: int = 0

    def __str__(self) -> str:
        return f"{self.name}[{self.start}:{self.stop}]"


class SavedFile(NamedTuple):
    """A file of a step, which one rank wrote; `part_name` gives its name.

    Args:
      slices: what it has, in the order in which they lie in it.
      extra: what the rank gave besides the state, as JSON; "" for what the first rank gave.
    """

    slices: list[Slice]
    extra: str = ""

    @classmethod
    def of_json(cls, facts: Any) -> "SavedFile":
        """The file that JSON describes; a stranger may have written it.

        Raises:
          ValueError, TypeError: it is not one.
        """
        rows, extra = facts
        found = cls([Slice(*row) for row in rows], extra)
        _require(isinstance(extra, str), "an extra is no text")
        for tensor, *numbers in found.slices:
            _require(isinstance(tensor, str) and is_text(tensor), f"{tensor!r}")
            _require_counts(*numbers)
        return found


def part_name(position: int) -> str:
    """The name of the file of the rank at a position in the groups."""
    return f"rank-{position:05d}.safetensors"


@dataclass(frozen=True)
class Manifest:
    """What a step holds.

    Args:
      step: the number of the step.
      tensors: the form of each, by name.
      values: numbers and texts by name.
      files: by position in the groups.
    """

    step: int
    tensors: dict[str, Form]
    values: dict[str, Any]
    files: list[SavedFile] = field(default_factory=list)

    @cached_property
    def slices(self) -> dict[str, list[tuple[Slice, int]]]:
        """The slices of each tensor, each with the number of its file, in their order."""
        found: dict[str, list[tuple[Slice, int]]] = {}
        for number, file in enumerate(self.files):
            for each in file.slices:
                found.setdefault(each.name, []).append((each, number))
        for slices in found.values():
            slices.sort()  # of one tensor, so by where they start
        return found

    def dtype(self, part: Slice) -> torch.dtype:
        """The dtype of the elements that a slice counts."""
        kind = self.tensors[part.name][0] if part.name in self.tensors else "uint8"
        return SAVED[kind]

    def nbytes(self, part: Slice) -> int:
        """The bytes of a slice."""
        return (part.stop - part.start) * self.dtype(part).itemsize

    def check(self) -> None:
        """Raise ValueError unless each tensor lies in the files, whole and once."""
        ends = dict[str, int]()
        for name, slices in self.slices.items():
            _require(name in self.tensors or name.startswith(EXTRA), f"{name} is not a tensor")
            for each, _ in slices:
                _require(each.start == ends.get(name, 0) < each.stop, f"{each} is not the next")
                ends[name] = each.stop
        for name, (_, shape) in self.tensors.items():
            has = ends.get(name, 0)
            _require(has == prod(shape), f"{name} of {shape} has {has} elements in its slices")
        for file in self.files:
            end = 0
            for each in file.slices:
                right = each.offset == end and self.nbytes(each) <= SLICE_BYTES
                _require(right, f"{each} is too large, or not behind the slice before it")
                end += self.nbytes(each)

    def to_bytes(self) -> bytes:
        """The content of the file."""
        body = {"format": FORMAT, "version": VERSION, **vars(self)}
        body.pop("slices", None)
        text = json.dumps(body, separators=(",", ":")).encode()
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
        tensors = {name: _form(name, *facts) for name, facts in body["tensors"].items()}
        files = [SavedFile.of_json(facts) for facts in body["files"]]
        _require_counts(body["step"])
        _require(isinstance(body["values"], dict), "its values are not an object")
        manifest = Manifest(body["step"], tensors, body["values"], files)
        manifest.check()
    except (LookupError, ValueError, TypeError, AttributeError, RecursionError) as error:
        fix = "load an older step, or copy the whole folder again from where you know it"
        text = message(f"{path} is damaged", [f"{error}"], fix)
        raise FileError(text, path, damaged=True) from None
    return manifest


def _form(name: str, kind: Any, shape: Any) -> Form:
    _require(is_text(name), f"{name!r}")
    _require(isinstance(kind, str) and kind in SAVED, f"{name!r} is of {kind!r}")
    check_shape(shape, SAVED[kind])
    return kind, tuple(shape)


def _require_counts(*found: Any) -> None:
    _require(all(type(n) is int and 0 <= n < 2**62 for n in found), f"{found!r}")


def _require(right: bool, text: str) -> None:
    if not right:
        raise ValueError(text)


# Durable files and folders: each write is followed by fsync.

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def make_folder(path: Path) -> None:
    """Make a folder and all above it, and wait until the disk has their names."""
    missing = [each for each in (path, *path.parents) if not each.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for each in missing:
        sync(each.parent)


def sync(path: Path) -> None:
    """Wait until the disk has a file, or the names in a folder.

    Some file systems that keep files in other places cannot be asked that of a folder.
    """
    number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(number)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(number)


def write_file(path: Path, *parts: bytes | memoryview) -> None:
    """Write a new file, and wait until the disk has it."""
    number = os.open(path, _NEW, 0o666)
    try:
        for part in parts:
            rest = memoryview(part)
            while rest:
                rest = rest[os.write(number, rest) :]
        os.fsync(number)
    finally:
        os.close(number)


def finish_file(path: Path) -> None:
    """Let those read a file who may read its folder, and wait until the disk has it.

    Safetensors makes files that only their owner may read, whatever the umask says.
    """
    path.chmod(path.parent.stat().st_mode & 0o666)
    sync(path)


def publish(new: Path, path: Path) -> None:
    """Give a folder its name, before and after which the disk has all of it; [Note: commit].

    Until the disk has the name, this may still fail; then the folder is removed.
    """
    sync(new)
    os.rename(new, path)
    try:
        sync(path.parent)
    except BaseException:
        remove_folder(path)
        raise


def remove_folder(path: Path) -> bool:
    """Give a folder a name that nobody uses, and remove it; returns whether its own has gone."""
    hidden = path
    with suppress(OSError):
        if not path.name.startswith(".old-"):
            hidden = path.with_name(f".old-{path.name.lstrip('.')}-{uuid.uuid4().hex[:12]}")
            os.rename(path, hidden)
        shutil.rmtree(hidden, ignore_errors=True)
    return not os.path.lexists(path)


@contextmanager
def write_errors(what: str, path: Path) -> Iterator[None]:
    """Raise errors of writing as a FileError that says which file could not be written."""
    try:
        yield
    except MicsError:
        raise
    except Exception as error:
        fix = "make room or give the right to write there, and save again; all else is as it was"
        lines = [f"{type(error).__name__}: {first_line(error)}"]
        raise FileError(message(f"{what} {path}", lines, fix), str(path)) from error


# The file of a rank: a safetensors file, whose slices the manifest lists.


def write_part(path: Path, tensors: Mapping[Slice, Tensor]) -> SavedFile:
    """Write a file, and wait until the disk has it; checksums are computed meanwhile.

    Args:
      path: where there is no file yet.
      tensors: the slices, dense and on the CPU.

    Raises:
      OSError: it cannot be written.
    """
    values = [memory_of(x) for x in tensors.values()]
    slices, end = list[Slice](), 0
    for part, value in zip(tensors, values, strict=True):
        slices.append(part._replace(offset=end))
        end += len(value)
    head = header_of(slices, [x.dtype for x in tensors.values()])
    summed = Job(lambda: [zlib.crc32(each) for each in values]).begin("mics_fn sums")
    try:
        write_file(path, head, *values)
    finally:
        sums = summed.result()
    return SavedFile([part._replace(crc=crc) for part, crc in zip(slices, sums, strict=True)])


def header_of(slices: Sequence[Slice], dtypes: Sequence[torch.dtype]) -> bytes:
    """What stands in front of the values: the size of a text, and the JSON that says what they are.

    It follows from the slices, so a reader compares all of it.
    """
    header = dict[str, Any]()
    for part, dtype in zip(slices, dtypes, strict=True):
        word, count = WORDS.get(dtype), part.stop - part.start  # without a word it is bytes
        place = [part.offset, part.offset + count * dtype.itemsize]
        shape = [count if word else count * dtype.itemsize]
        header[f"{part}"] = {"dtype": word or "U8", "shape": shape, "data_offsets": place}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def memory_of(x: Tensor) -> memoryview:
    """The bytes of a dense tensor on the CPU."""
    flat: Any = x.detach().as_strided((x.numel(),), (1,))  # one element has any stride
    return memoryview(flat.view(torch.uint8).numpy())


ReadSlice = Callable[[Slice, memoryview], None]  # as a whole, and compare it


@contextmanager
def part_file(folder: Path, saved: Manifest, number: int) -> Iterator[ReadSlice]:
    """A file of a step, open for reading slices, by its number in the manifest.

    Raises:
      FileError: it is not there, or not as it was saved, up to its values; or the system cannot
        read it. In the block: a slice has not the bytes that were saved.
    """
    turn, slices = threading.Lock(), saved.files[number].slices
    head = header_of(slices, [saved.dtype(part) for part in slices])
    nbytes = len(head) + sum(map(saved.nbytes, slices))

    def read(part: Slice, out: memoryview) -> None:
        with turn:  # one thread reads, so that the system can read ahead
            file.read_into(out, len(head) + part.offset, f"{part}")
        if zlib.crc32(out) != part.crc:
            why = [f"{part}: its values are not those that were saved"]
            wrong = file.error("is damaged", why)
            wrong.leaf = f"{part}"
            raise wrong

    with closing(open_file(folder / part_name(number))) as file:
        if file.size != nbytes or file.read(0, len(head)) != head:
            raise file.error("is damaged", [f"it had another header, and {nbytes} bytes"])
        yield read


# Files that cannot be read: whether that shows that they are damaged.

_OLDER = "load an older step, as on_corrupt='previous' does"
_AGAIN = "load it again; the file may be as it was saved"
# What the system says of a file that is not there, or is something else.
_EVIDENCE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO)


@contextmanager
def load_errors(path: Path) -> Iterator[None]:
    """Raise errors of the system as those of checkpoints, which say whether a file is damaged.

    A file is damaged only if the error shows that it is not as it was saved. If the system could
    not read it, nothing is known of the file, and `load` does not go back to an older step.
    """
    try:
        yield
    except OSError as error:
        unknown = error.errno not in _EVIDENCE
        fix = _AGAIN if unknown else _OLDER
        text = message(f"load: {path} cannot be read", [f"{error}"[:500]], fix)
        raise FileError(text, str(path), damaged=not unknown) from error


def open_file(path: Path) -> File:
    """Open a file of a step, which lies in its folder.

    Raises:
      FileError: it is a link, it is not there, or the system cannot open it.
    """
    for link in filter(os.path.islink, (path.parent, path)):
        fix = "load only checkpoints that you know, or copy the file itself"
        text = message(f"load: {link} is not opened: it is a symbolic link", fix=fix)
        raise FileError(text, str(link), damaged=True)
    with load_errors(path):
        return File("load", path, _OLDER)


def manifest_in(path: Path, step: int) -> tuple[Manifest, str]:
    """The manifest of a step and its digest.

    Args:
      path: the folder of the step.
      step: which one it should be.

    Raises:
      FileError: it is missing, damaged, or of another step; or the system cannot read it.
    """
    with closing(open_file(path / NAME)) as file:
        data = file.header(0, file.size, MAX_BYTES)
    found = read_manifest(data, str(path / NAME))
    if found.step != step:
        text = message(f"load: {path} holds step {found.step}", fix="keep the names of folders")
        raise FileError(text, str(path), damaged=True)
    return found, hashlib.sha256(data).hexdigest()


# Which steps of a folder count, and whose it is, by names; see [Note: epochs].

_STEP = re.compile(r"step-(\d{8,})(?:\.(\d{6,}))?")
_OF_EPOCH = re.compile(r"\.(?:epoch|tmp)-(\d{6,})(?:-.*)?")
_LEAST = 2  # steps that pruning leaves
Overwrite = Literal["never", "newer"]


def divided(names: Iterable[str]) -> tuple[dict[int, str], list[tuple[int, str]]]:
    """The name of each step that counts, newest first, and those of all that are replaced."""
    found = [(int(x[2] or 1), int(x[1]), x[0]) for x in map(_STEP.fullmatch, names) if x]
    counting, replaced = dict[int, str](), list[tuple[int, str]]()
    for _, step, name in sorted(found, reverse=True):
        if step < min(counting, default=inf):
            counting[step] = name
        else:
            replaced.append((step, name))
    return counting, replaced


class Folder:
    """The folder in which a job keeps its checkpoints, as one writer or reader has it.

    Args:
      path: where; it need not exist.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.abspath(os.fspath(path)))
        self.epoch = 0  # in which this writer owns it; 0 if it never did
        self._new: Path | None = None  # that is written into and not committed yet

    def __fspath__(self) -> str:
        return str(self.path)

    # What readers see.

    def names(self) -> list[str]:
        """All names in it; none if it does not exist.

        Raises:
          FileError: it is there, but cannot be read.
        """
        with load_errors(self.path), suppress(FileNotFoundError, NotADirectoryError):
            return os.listdir(self.path)
        return []

    def committed(self) -> dict[int, Path]:
        """The folder of each committed step, newest step first."""
        return {step: self.path / name for step, name in divided(self.names())[0].items()}

    def find(self, step: int | None) -> tuple[int, Path]:
        """The folder of a step, or of the newest one.

        Raises:
          CheckpointNotFound: there is none.
        """
        names = self.names()
        counting, replaced = divided(names)
        step = max(counting, default=None) if step is None else step
        every = dict(reversed(replaced)) | counting
        if step in every:
            return step, self.path / every[step]
        has = ", ".join(sorted(names)[:8]) if self.path.is_dir() else "no folder"
        what = "no committed checkpoint" if step is None else f"no committed step {step}"
        fix = "pass the folder that save was given, and one of its steps"
        text = message(f"load: {what} in {self.path}", [f"it has: {has}"], fix)
        raise CheckpointNotFound(text, str(self.path))

    # Whose it is.

    def own(self, *, anew: bool = False) -> None:
        """Take the folder, unless this writer owns it; then remove what older epochs left.

        Args:
          anew: whether it begins a new epoch in any case.

        Raises:
          FileError: a newer writer has taken it.
        """
        make_folder(self.path)
        text = f"host {socket.gethostname()}, process {os.getpid()}, since {time.ctime()}"
        text += f", from step {max(self.committed(), default='none')} on"
        while anew or not self._epoch_file(self.epoch).exists():
            self.check_owned()
            newest = self._newest_epoch() + 1
            with suppress(FileExistsError), open(self._epoch_file(newest), "x") as file:
                self.epoch, anew = newest, False
                file.write(text)
        for name in self.names():
            found, path = _OF_EPOCH.fullmatch(name), self.path / name
            if name.startswith(".old-"):
                remove_folder(path)
            elif not found or int(found[1]) > self.epoch or path == self._epoch_file(self.epoch):
                continue
            elif not path.is_dir():
                path.unlink(missing_ok=True)
            elif not remove_folder(path):  # then the older job could still commit it
                raise OSError(f"{path} cannot be removed")

    def check_owned(self) -> None:
        """Raise FileError if a newer writer has taken the folder from this one."""
        newest = self._newest_epoch()
        if newest > self.epoch > 0:
            who = ["its owner is not known"]
            with suppress(OSError):
                who = [self._epoch_file(newest).read_text(errors="replace")[:300]]
            what = f"save: {self.path} has been taken over by another job"
            fix = "end this job, or give it a folder of its own; all that is committed stays"
            raise FileError(message(what, who, fix), str(self.path))

    def _epoch_file(self, epoch: int) -> Path:
        """The file that says who owns the folder in an epoch."""
        return self.path / f".epoch-{epoch:06d}"

    def _newest_epoch(self) -> int:
        names = self.names()
        steps = [int(x[2] or 1) for x in map(_STEP.fullmatch, names) if x]
        return max([*steps, *(int(x[1]) for x in map(_OF_EPOCH.fullmatch, names) if x)], default=0)

    # What the one rank does that commits.

    def begin(self, step: int, overwrite: Overwrite) -> Path:
        """Make the folder that writers write a step into; `abandon` follows, whatever happens.

        Raises:
          FileError: the step is committed already, or there are newer ones, or another job
            has taken the folder; or it cannot be made.
        """
        with write_errors("save: cannot write to", self.path):
            self.own(anew=self._goes_back(step, overwrite))
            self._goes_back(step, overwrite)  # whoever owned it may have committed one meanwhile
            name = f".tmp-{self.epoch:06d}-step-{step:08d}-{uuid.uuid4().hex[:12]}"
            self._new = self.path / name
            self._new.mkdir()
            self.check_owned()  # whoever takes the folder from now on finds the new one
            return self._new

    def _goes_back(self, step: int, overwrite: Overwrite) -> bool:
        """Whether a step that is there would be replaced; raises FileError if it may not."""
        newest = max(self.committed(), default=-1)
        if newest >= step and overwrite == "never":
            what = f"save: step {step} would follow step {newest} in {self.path}"
            fix = "save a later step, elsewhere, or with overwrite='newer', which replaces them"
            raise FileError(message(what, fix=fix), str(self.path))
        return newest >= step

    def commit(self, new: Path, found: Manifest) -> Path:
        """Commit a step whose files are on disk, in the folder of `begin`; see [Note: commit].

        Raises:
          FileError: another job has taken the folder.
          OSError, ValueError: a file cannot be written, or would not be read.
        """
        data = found.to_bytes()
        if len(data) > MAX_BYTES:
            raise ValueError(f"no reader would take a manifest of {len(data)} bytes")
        epoch = f".{self.epoch:06d}" if self.epoch > 1 else ""
        path = self.path / f"step-{found.step:08d}{epoch}"
        try:
            write_file(new / NAME, data)
            publish(new, path)
        except OSError:
            self.check_owned()
            raise
        self._new = None
        return path

    def abandon(self) -> None:
        """Remove what was written of a step that does not count."""
        if self._new is not None:
            remove_folder(self._new)
            self._new = None

    def prune(self, keep: int | None) -> None:
        """Remove replaced and old steps after one was committed; at least two whole ones stay.

        Args:
          keep: how many of the newest to keep; None keeps all.
        """
        counting, replaced = divided(self.names())
        self.check_owned()  # after the look, so that no step of a newer epoch was seen
        if len(counting) < _LEAST:
            return
        old = list(counting.items())[max(keep, _LEAST) :] if keep is not None else []
        # Those first that are replaced: without what replaces them, they would count again.
        for _, name in (*replaced, *old):
            if not remove_folder(self.path / name):
                LOG.warning("save: cannot remove %s; old steps stay", self.path / name)
                return

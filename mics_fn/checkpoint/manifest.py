"""The manifest of a checkpoint: one JSON object that says what lies where, with its own digest."""

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

from mics_fn.checkpoint.extras import decoded, encoded
from mics_fn.checkpoint.layout import SAVED, Line, Stored
from mics_fn.errors import CheckpointFormatError, CheckpointSecurityError, message
from mics_fn.init import check_shape, is_text, strict_json
from mics_fn.shards import dtype_name

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
      lines: see [Note: lines and cells] in `layout`; the last one is that of bytes.
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
    tensors: list[Stored]
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
      CheckpointFormatError: it is damaged, or of a version that is not known here.
    """

    def wrong(what: str, fix: str = _FETCH) -> CheckpointFormatError:
        return CheckpointFormatError(message(f"{path} {what}", fix=fix), path)

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
        raise CheckpointSecurityError(message(f"{path} {error}", fix=fix), path) from None
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


def _tensor(facts: Any, lines: list[Line]) -> Stored:
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
    return Stored(name, dtype, tuple(shape), line, offset, unit)


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

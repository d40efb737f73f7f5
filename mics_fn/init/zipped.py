"""Where the records of a zip file lie; `torch.save` stores each tensor's storage in one."""

import struct
from collections.abc import Iterator
from typing import NamedTuple

from mics_fn.errors import FileError
from mics_fn.init.reading import File, shown

_END = struct.Struct("<4s6xHII2x")  # signature, records, bytes of the directory, its place
_END_64 = struct.Struct("<4s28xQQQ")
_LOCATOR = struct.Struct("<4s4xQ4x")
_ENTRY = struct.Struct("<4s4xHH8xIIHHH8xI")  # of the directory
_LOCAL = struct.Struct("<4s22xHH")  # what stands before the bytes of a record
_MOST_COMMENT = 2**16 - 1
_FEW = 20  # records that are not the storage of a leaf
_FULL, _FULL_SHORT = 2**32 - 1, 2**16 - 1  # the number is in a field of 64 bits


class Record(NamedTuple):
    """A record of a zip file: the place of its bytes, and how many there are."""

    start: int
    length: int


def records(file: File) -> dict[str, Record]:
    """The records of a zip file by name.

    Raises:
      FileError: it is damaged, too large for the limits, or its records are compressed.
    """
    try:
        count, length, place = _directory(file)
        file.require_small(length, max(0, count - _FEW))
        found: dict[str, Record] = {}
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


def _record(file: File, name: str, place: int, length: int) -> Record:
    """A record, from the header that stands before its bytes."""
    raw = name.encode(errors="surrogateescape")
    header = file.read(place, _LOCAL.size + len(raw))
    signature, named, extra = _LOCAL.unpack_from(header)
    start = place + len(header) + extra
    if signature != b"PK\3\4" or named != len(raw) or header[_LOCAL.size :] != raw:
        raise ValueError(f"{shown(name)} is not where its directory says")
    if start + length > file.size:
        raise ValueError(f"{shown(name)} is longer than the file")
    return Record(start, length)


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

"""Disks that fail: scratch files of this process that cannot be made, read or written."""

import errno
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from mics_fn.errors import FileError, MicsError
from mics_fn.offload import Scratch, placed
from mics_fn.offload import scratch as scratch_module

LIMIT_S = 30.0  # for what takes about half a second where nothing else runs
CALLS = {
    "no room": "posix_fallocate",
    "cannot read": "read_all",
    "cannot write": "write_all",
    "cannot be made": "open_files",
}


def files_of(folder: str) -> list[Path]:
    """The folders of scratch files that this process has open below a folder."""
    return [x.folder for x in placed._SCRATCHES.values() if x.folder.is_relative_to(folder)]


def taken(scratch: Scratch) -> int:
    """The bytes of a scratch file that tensors take."""
    scratch._take_back()
    return sum(end - offset for offset, end in scratch._taken)


def no_call(code: int, real: Callable[..., Any], after: int) -> Callable[..., Any]:
    """A call that works so many times, and then fails."""
    done = []

    def fails(*given: Any) -> Any:
        done.append(1)
        if len(done) <= after:
            return real(*given)
        raise OSError(code, os.strerror(code))

    return fails


@contextmanager
def broken(fault: str, after: int = 0) -> Iterator[None]:
    """A block in which files of this process fail in some way; "" is none."""
    if not fault:
        yield
        return
    code = errno.ENOSPC if fault == "no room" else errno.EIO
    where = os if fault == "no room" else scratch_module
    real = getattr(where, CALLS[fault])
    with mock.patch.object(where, CALLS[fault], no_call(code, real, after)):
        yield


def heard(
    call: Callable[[], object], fault: str, bad: bool, after: int = 0, others: type = FileError
) -> Any:
    """The error of a call, soon, while the disk of a bad rank fails: it names rank 1."""
    started, found = time.monotonic(), list[Any]()
    try:
        with broken(fault if bad else "", after):
            call()
    except MicsError as error:
        found.append(error)
    assert time.monotonic() - started < LIMIT_S
    assert [type(each) for each in found] == [FileError if bad else others]
    if others is FileError:
        assert "\n  on rank 1\n" in str(found[0])
    else:
        assert bad or (found[0].rank, found[0].kind) == (1, "raised")
    return found.pop()  # else its own traceback would keep it

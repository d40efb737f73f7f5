"""Disks that fail: scratch files of this process that cannot be made, read or written."""

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from mics_fn.offload import placed
from mics_fn.offload import scratch as scratch_module

CALLS = {
    "no room": "posix_fallocate",
    "cannot read": "read_all",
    "cannot write": "write_all",
    "cannot be made": "open_files",
}


def files_of(folder: str) -> list[Path]:
    """The folders of scratch files that this process has open below a folder."""
    return [x.folder for x in placed._SCRATCHES.values() if x.folder.is_relative_to(folder)]


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

"""Files and folders of which the disk has told that it has them."""

import errno
import os
import stat
import threading
from contextlib import suppress
from pathlib import Path

_BEHIND = 19  # how nice a thread is that only writes
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def make_file(path: Path) -> int:
    """Make a new, empty file; returns who may read and write it, by the umask."""
    number = os.open(path, _NEW, 0o644)
    try:
        return stat.S_IMODE(os.fstat(number).st_mode)
    finally:
        os.close(number)


def make_folder(path: Path) -> None:
    """Make a folder and all above it, and wait until the disk has their names."""
    missing = [each for each in (path, *path.parents) if not each.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for each in missing:
        sync_folder(each.parent)


def sync_folder(path: Path) -> None:
    """Wait until the disk has the names in a folder, where the file system can be asked for that.

    Some that keep files in other places cannot; they have the name of a file once it is closed.
    """
    number = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(number)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(number)


def write_file(path: Path, data: bytes) -> None:
    """Write a new file, and wait until the disk has it."""
    number = os.open(path, _NEW, 0o644)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(number, rest) :]
        os.fsync(number)
    finally:
        os.close(number)


def step_back() -> None:
    """Give this thread a low priority, so that those that compute come first, if the system can."""
    with suppress(AttributeError, OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _BEHIND)

"""Whose a scratch file is: its lock and its first page; see [Note: scratch] in `scratch`."""

import fcntl
import json
import os
import socket
import threading
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

from mics_fn.log import LOG
from mics_fn.offload.space import PAGE
from mics_fn.offload.transfer import aligned, read_all

SUFFIX = ".scratch"
_MAGIC = "mics_fn scratch file"
_ABOUT = "data of a running process; not a checkpoint; worth nothing once that process is gone"
_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_OLD = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


class Claim:
    """A locked file, open for buffered I/O and, if the file system has it, for direct I/O.

    Args:
      path: of the file.
      plain: its file descriptor for buffered I/O, which holds the lock.
      direct: the one for direct I/O, or None.
    """

    def __init__(self, path: Path, plain: int, direct: int | None) -> None:
        self.path, self.plain, self.direct = path, plain, direct
        self._mark = uuid.uuid4().hex
        self._passes = 0  # those that have written
        self._lock = threading.Lock()  # one thread may write while another one reads
        self._pages = (b"",)  # what the first page may hold now
        self._put()

    def count(self) -> None:
        """Count a pass that writes."""
        with self._lock:
            self._passes += 1
            self._put()

    def _put(self) -> None:
        facts = {
            "what": _MAGIC,
            "version": 1,
            "about": _ABOUT,
            **_machine(),
            "process": os.getpid(),
            "mark": self._mark,
            "generation": self._passes,
        }
        page = json.dumps(facts, indent=1).encode().ljust(PAGE, b"\n")
        self._pages = (self._pages[-1], page)  # Ctrl-C may come before or after the write
        if os.pwrite(self.plain, page, 0) != PAGE:
            raise OSError("its first page could be written in part only")
        self._pages = (page,)

    def changed(self, size: int) -> str:
        """What is not as this process has left it, in words; "" if all is.

        Args:
          size: that the file has to have, in bytes.
        """
        now = os.fstat(self.plain)
        if now.st_size < size:
            return f"it has {now.st_size} bytes, expected {size}"
        with self._lock:
            if os.pread(self.plain, PAGE, 0) not in self._pages:
                return f"its first page is not that of generation {self._passes} of this process"
        return ""


def claim(folder: Path, name: str, direct: bool | None) -> Claim:
    """Make a scratch file of this process.

    Args:
      folder: an existing one, in which it is made.
      name: how the file's name begins.
      direct: whether to use direct I/O; None if the file system has it.

    Raises:
      OSError: it cannot be made.
    """
    last = f"{name}-{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:6]}"
    made, path = folder / f".{last}.new", folder / f"{last}{SUFFIX}"
    plain = os.open(made, _NEW, 0o600)
    past = None
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(plain, fcntl.LOCK_EX | fcntl.LOCK_NB)
        found = Claim(path, plain, None)
        if direct is not False:
            past = found.direct = _open_direct(made, must=direct is True)
        os.rename(made, path)  # from here on others can find it, and it is locked
        return found
    except BaseException:
        os.close(plain)
        if past is not None:
            os.close(past)
        for each in (made, path):
            each.unlink(missing_ok=True)
        raise


def _open_direct(path: Path, must: bool) -> int | None:
    """A file descriptor for direct I/O, by which a page was read; None if there is no such I/O."""
    number = None
    try:
        number = os.open(path, _OLD | getattr(os, "O_DIRECT", 0))
        read_all(number, aligned(PAGE), 0)
        return number if hasattr(os, "O_DIRECT") else None
    except OSError:
        if number is not None:
            os.close(number)
        if must:
            raise
        return None


def end(claimed: Claim, process: int) -> None:
    """Remove a file of this process; one of a process that it was forked from stays."""
    if os.getpid() == process:
        claimed.path.unlink(missing_ok=True)
    os.close(claimed.plain)
    if claimed.direct is not None:
        os.close(claimed.direct)


def remove_leftovers(folder: Path) -> list[Path]:
    """Remove scratch files whose processes are gone, and log their names.

    Files that some process has locked stay, and so does whatever is not a scratch file of this
    machine: on a folder that machines share, locks of other ones may not be seen.

    Returns:
      Those that were removed.
    """
    gone = []
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        try:
            number = os.open(path, _OLD)
        except OSError:  # it was removed meanwhile, or is not ours to open
            continue
        try:
            owner = owner_of(number)
            if owner and _is_here(owner):
                fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
                gone.append(path)
                LOG.warning("offload: removed %s, which a process that is gone has left", path)
        except OSError:  # it is in use
            continue
        finally:
            os.close(number)
    return gone


def owner_of(file: int) -> dict[str, Any]:
    """What the first page of a file says of its owner; nothing if it is not a scratch file."""
    try:
        facts = json.loads(os.pread(file, PAGE, 0))
    except (OSError, ValueError):
        return {}
    return facts if isinstance(facts, dict) and facts.get("what") == _MAGIC else {}


def _machine() -> dict[str, str]:
    """What tells this machine from others: its name, and when it was started."""
    boot = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return {"host": socket.gethostname(), "boot": boot}


def _is_here(owner: dict[str, Any]) -> bool:
    """Whether a file was made on this machine; a container may have another name there."""
    own = _machine()
    same_boot = bool(own["boot"]) and owner.get("boot") == own["boot"]
    return same_boot or owner.get("host") == own["host"]

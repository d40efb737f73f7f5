"""`Scratch`: a file for the tensors of a run, which ends with the run.

[Note: scratch] A scratch file is a part of a running process, as its memory is. Nothing is ever
loaded from one that another process has made: a run that dies goes on from a checkpoint. So the
file is locked while its process lives, and has a first page that says whose it is, and how many
passes have written to it. Before each pass the page and the size of the file are compared with what
this process remembers, and what is read with checksums of what was written. So a file that was
cut off, brought back from a copy or written to by others is an error, never a wrong value.

A process removes its files when it ends, or before if nothing refers to them any more. One that is
killed cannot: whoever makes a scratch file in that folder next removes all that no living process
has locked, and logs their names. They end in `.scratch`, which no loader of checkpoints takes.

Direct I/O moves whole pages between a file and memory that begins at a page, past the cache of the
system: at the speed of the disk, and without pushing out of memory what others need there.
"""

import contextlib
import ctypes
import errno
import fcntl
import json
import math
import mmap
import os
import socket
import threading
import uuid
import weakref
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mics_fn import _device, checks
from mics_fn.errors import FileError, message
from mics_fn.offload.places import HOST_BYTES, LEAST_HOST_BYTES
from mics_fn.spans import LOG

# `Space`: which parts of a file are free, as arithmetic.

PAGE = 4096  # bytes; what direct I/O counts in


def padded(nbytes: int) -> int:
    """So many bytes in whole pages.

    >>> padded(0), padded(1), padded(4096), padded(4097)
    (0, 4096, 4096, 8192)
    """
    return -(-nbytes // PAGE) * PAGE


class Space:
    """The free parts of a file, whose first bytes are a header.

    Args:
      start: where the header ends.

    Example:
      >>> space = Space(4096)
      >>> space.take(8192), space.take(4096), space.end
      (4096, 12288, 16384)
      >>> space.give(4096, 8192)
      >>> space.take(4096), space.used
      (4096, 8192)
    """

    def __init__(self, start: int) -> None:
        self._start = self.end = start  # behind the last byte that is taken
        self._free: list[tuple[int, int]] = []  # offset and bytes, by offset, never adjacent

    @property
    def used(self) -> int:
        """Bytes that are taken."""
        return self.end - self._start - sum(nbytes for _, nbytes in self._free)

    def take(self, nbytes: int) -> int:
        """The offset of free bytes: the first part that is large enough, or the end of the file."""
        for i, (offset, size) in enumerate(self._free):
            if size >= nbytes:
                self._free[i : i + 1] = [(offset + nbytes, size - nbytes)] if size > nbytes else []
                return offset
        offset = self.end
        self.end += nbytes
        return offset

    def give(self, offset: int, nbytes: int) -> None:
        """Take bytes back that `take` has given."""
        if not nbytes:
            return
        insort(self._free, (offset, nbytes))
        joined: list[tuple[int, int]] = []
        for at, size in self._free:
            if joined and sum(joined[-1]) == at:
                joined[-1] = (joined[-1][0], joined[-1][1] + size)
            else:
                joined.append((at, size))
        if sum(joined[-1]) == self.end:
            self.end, _ = joined.pop()
        self._free = joined


# Bytes between memory and files: aligned memory, whole reads and writes, and checksums.

UNIT = 16 * PAGE  # bytes that a checksum covers
_HUGE_PAGE = 2 * 2**20
_AT_ONCE = 16 * 2**20  # bytes of one call: between two of them Python looks for signals
_WORDS = UNIT // 8
# torch adds up fewer than 32,768 elements on the thread that calls. For more it starts a team of
# threads for each thread that calls, and the teams of those that read and write would take the
# cores from those that compute.
_UNITS_AT_ONCE = 32_767 // _WORDS
_CPU = torch.device("cpu")


@torch.inference_mode(mode=False)  # whose tensors threads could not write to
def aligned(nbytes: int, device: torch.device = _CPU) -> Tensor:
    """Host memory that begins at a page; locked, where a device can copy from such by itself.

    Args:
      nbytes: how much.
      device: the one that copies.
    """
    memory = _device.host_buffer(padded(nbytes) + PAGE, device)
    memory = memory[-memory.data_ptr() % PAGE :][: padded(nbytes)]
    if nbytes >= _HUGE_PAGE and not _device.is_async(device):
        _use_huge_pages(memory)
    return memory


def _use_huge_pages(memory: Tensor) -> None:
    """Ask for pages of 2 MiB, which the disk fills with fewer requests than 512 small ones."""
    with contextlib.suppress(OSError, AttributeError):  # not every system has it
        advise, advice = ctypes.CDLL(None).madvise, mmap.MADV_HUGEPAGE
        advise(ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(len(memory)), advice)


def read_all(file: int, memory: Tensor, offset: int) -> None:
    """Fill memory with the bytes of a file.

    Raises:
      OSError: they cannot be read, or the file ends before.
    """
    _whole(memory, lambda rest, at: os.preadv(file, [rest], offset + at), "read", offset)


def write_all(file: int, memory: Tensor, offset: int) -> None:
    """Write memory to a file.

    Raises:
      OSError: it cannot be written.
    """
    _whole(memory, lambda rest, at: os.pwrite(file, rest, offset + at), "written", offset)


def _whole(memory: Tensor, move: Callable[[memoryview, int], int], done: str, offset: int) -> None:
    """Call `move` until all bytes are moved."""
    total, at = memory.numel(), 0
    if not total:
        return
    raw = memoryview((ctypes.c_char * total).from_address(memory.data_ptr())).cast("B")
    while at < total:
        count = move(raw[at : at + _AT_ONCE], at)
        if count <= 0:
            raise OSError(f"{at} of {total} bytes at {offset} could be {done}: the file ends there")
        at += count


def allocate(file: int, offset: int, nbytes: int) -> None:
    """Make a file longer, so that the disk is sure to have the room.

    Raises:
      OSError: the disk has not so much room.
    """
    try:
        os.posix_fallocate(file, offset, nbytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        zeros = aligned(min(nbytes, _AT_ONCE)).zero_()
        for low in range(0, nbytes, _AT_ONCE):
            write_all(file, zeros[: nbytes - low], offset + low)


def sums(memory: Tensor) -> Tensor:
    """The sum of the 64-bit words of each `UNIT` of memory in whole pages; int64.

    It costs a small part of a copy. No change of a single word goes unseen.
    """
    words = memory.view(torch.int64)
    if len(words) % _WORDS:
        short = len(words) - len(words) % _WORDS
        return torch.cat([sums(memory[: 8 * short]), words[short:].sum().view(1)])
    parts = [part.sum(1) for part in words.view(-1, _WORDS).split(_UNITS_AT_ONCE)]
    return torch.cat(parts)


def layout(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where tensors of so many bytes begin in one memory, each at a page, and where they end.

    >>> layout([100, 5000, 1])
    ([0, 4096, 12288], 16384)
    """
    starts, end = [], 0
    for nbytes in sizes:
        starts.append(end)
        end += padded(nbytes)
    return starts, end


# Host memory that one stream leaves to the next, since making and locking it takes time.

_MEMORY: dict[str, Tensor] = {}  # by kind of device, since each locks memory for itself
_files = 0  # open scratch files


def take(nbytes: int, device: torch.device) -> Tensor:
    """Memory that nobody uses; see `aligned`."""
    memory = _MEMORY.pop(device.type, None)
    return memory if memory is not None and len(memory) == nbytes else aligned(nbytes, device)


def give(memory: Tensor, device: torch.device) -> None:
    """Leave memory to the next stream."""
    if _files:
        _MEMORY[device.type] = memory


def count_files(more: int) -> None:
    """Note that more scratch files are open, or fewer; memory is let go with the last of them."""
    global _files
    _files += more
    if not _files:
        _MEMORY.clear()


# Whose a scratch file is: its lock and its first page; see [Note: scratch] in `scratch`.

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
    """Remove scratch files of ended processes, and log their names.

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
    """Return the owner in the first page of a file; nothing if it is no scratch file."""
    try:
        facts = json.loads(os.pread(file, PAGE, 0))
    except (OSError, ValueError):
        return {}
    return facts if isinstance(facts, dict) and facts.get("what") == _MAGIC else {}


def _machine() -> dict[str, str]:
    """Return an identity of this machine: its name and the time of its start."""
    boot = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return {"host": socket.gethostname(), "boot": boot}


def _is_here(owner: dict[str, Any]) -> bool:
    """Whether a file was made on this machine; a container may have another name there."""
    own = _machine()
    same_boot = bool(own["boot"]) and owner.get("boot") == own["boot"]
    return same_boot or owner.get("host") == own["host"]


_AGAIN = "the state in this file is lost; load a checkpoint"
_MEND = "mend the disk; with donate=True load a checkpoint, otherwise the old state is as it was"
_UNSET, _WRITTEN, _SUMMED = range(3)  # of a unit: without values, with some, with a checksum
_ROOM = "make room there, or choose another folder in where="


class Scratch:
    """A file for tensors of this process. It is removed when nobody refers to it or to its tensors.

    Args:
      folder: where; made if it does not exist.
      name: how the file's name begins, such as "states-rank3".
      direct: True for direct I/O, False for I/O through the system's cache; None takes direct I/O
        where the file system has it. The attribute of that name says which one it is.
      host_bytes: host memory through which its tensors travel in a step; see `stream`.

    Raises:
      FileError: the file cannot be made.

    Example:
      >>> from tempfile import TemporaryDirectory
      >>> with TemporaryDirectory() as folder:
      ...     x = offload.store(torch.arange(3.0), offload.Scratch(folder))
      ...     print(x + 1)
      ...     del x  # and so the file is gone
      ...     print(os.listdir(folder))
      tensor([1., 2., 3.])
      []
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        name: str = "tensors",
        *,
        direct: bool | None = None,
        host_bytes: int = HOST_BYTES,
    ) -> None:
        checks.path("Scratch", "folder", folder)
        checks.integer("Scratch", "host_bytes", host_bytes, LEAST_HOST_BYTES)
        self.host_bytes, self._name = host_bytes, name
        where = Path(os.path.abspath(os.fspath(folder)))
        try:
            where.mkdir(parents=True, exist_ok=True)
            remove_leftovers(where)
            self._claim: Claim = claim(where, name, direct)
        except OSError as error:
            raise self._error(where, "cannot be made", error, _ROOM) from error
        self.path = self._claim.path
        self._end = weakref.finalize(self, _end, self._claim, os.getpid())
        count_files(1)
        self._space = Space(PAGE)
        self._size = PAGE  # of the file
        self._lock = threading.Lock()
        self._returned: deque[tuple[int, int]] = deque()  # by finalizers, which may not wait

    @property
    def direct(self) -> bool:
        """Whether data go past the cache of the system."""
        return self._claim.direct is not None

    @property
    def nbytes(self) -> int:
        """The bytes that tensors take, in whole pages."""
        with self._lock:
            self._take_back()
            return self._space.used

    def usable(self) -> "Scratch":
        """This file, or a new one beside it if others have changed it."""
        try:
            self.check()
        except FileError:
            return Scratch(self.path.parent, self._name, host_bytes=self.host_bytes)
        return self

    def close(self) -> None:
        """Remove the file; its tensors cannot be read any more."""
        self._end()

    def reserve(self, nbytes: int, leaf: str = "") -> "Extent":
        """Allocate bytes of the file on disk, without values yet.

        Args:
          nbytes: how many.
          leaf: what they are for, in error texts.

        Raises:
          FileError: the disk has not so much room. What the file holds is as it was.
        """
        self._check_open(leaf)
        size = padded(nbytes)
        with self._lock:
            self._take_back()
            offset = self._space.take(size)
            try:
                if self._space.end > self._size:
                    allocate(self._claim.plain, self._size, self._space.end - self._size)
                    self._size = self._space.end
            except OSError as error:
                self._space.give(offset, size)
                what = f"has no room for {size} bytes more"
                raise self._error(self.path, what, error, _ROOM, leaf) from error
        return Extent(self, offset, nbytes, leaf)

    def _take_back(self) -> None:
        while self._returned:
            self._space.give(*self._returned.popleft())

    def check(self, leaf: str = "") -> None:
        """Raise FileError unless the file is the one that this process has written."""
        self._check_open(leaf)
        found = self._claim.changed(self._size)
        if found:
            raise self._error(self.path, f"was changed by others: {found}", None, _AGAIN, leaf)

    def begin_writes(self, leaf: str = "") -> None:
        """Count a pass that writes, in the first page, after `check`."""
        self.check(leaf)
        try:
            self._claim.count()
        except OSError as error:
            raise self._error(self.path, "cannot be written", error, _MEND, leaf) from error

    def _check_open(self, leaf: str) -> None:
        if not self._end.alive:
            fix = "keep the scratch open as long as its tensors are used"
            raise self._error(self.path, "was closed", None, fix, leaf)

    def file_for(self, memory: Tensor, offset: int) -> int:
        """The open file by which memory is moved: direct only in whole pages."""
        whole = not (memory.data_ptr() % PAGE or memory.numel() % PAGE or offset % PAGE)
        direct = self._claim.direct
        return direct if direct is not None and whole else self._claim.plain

    @contextlib.contextmanager
    def named(self, verb: str, leaf: str) -> Iterator[None]:
        """A context in which errors of the system become one that names the file and the leaf."""
        try:
            yield
        except OSError as error:
            fix = _AGAIN if verb == "read" else _MEND
            raise self._error(self.path, f"cannot be {verb}", error, fix, leaf) from error

    @staticmethod
    def _error(path: Path, what: str, error: OSError | None, fix: str, leaf: str = "") -> FileError:
        lines = [f"{leaf}: {error or 'it lies there'}" if leaf else f"{error or ''}"]
        text = message(f"offload: {path} {what}", filter(None, lines), fix)
        return FileError(text, str(path), leaf)


def _end(claimed: Claim, process: int) -> None:
    count_files(-1)
    end(claimed, process)


class Extent:
    """A part of a scratch file, which is free again when nothing refers to it.

    Args:
      scratch: the file.
      offset: where it begins, which is a page.
      length: how many bytes of it are in use; it takes whole pages, `nbytes`.
      leaf: what it is for.
    """

    __slots__ = (
        "__weakref__",
        "_given",
        "_state",
        "_sums",
        "generation",
        "holders",
        "leaf",
        "length",
        "nbytes",
        "offset",
        "scratch",
    )

    def __init__(self, scratch: Scratch, offset: int, length: int, leaf: str) -> None:
        self.scratch, self.offset, self.length, self.leaf = scratch, offset, length, leaf
        self.nbytes = nbytes = padded(length)
        self.generation = 0  # counts how often some of it was given away to be overwritten
        # From which byte on it was last given away in which generation, in order.
        self._given: list[tuple[float, int]] = [(0, 0)]
        self.holders = weakref.WeakSet[Any]()  # each `Hold` for which its bytes stay
        units = -(-nbytes // UNIT)
        with torch.inference_mode(mode=False):  # threads write to it
            self._sums = torch.zeros(units, dtype=torch.int64)
        self._state = bytearray([_UNSET]) * units  # no tensor: its ops would slow small blocks down
        back: Callable[..., Any] = scratch._returned.append
        weakref.finalize(self, back, (offset, nbytes)).atexit = False

    def read(self, start: int, memory: Tensor, leaf: str = "") -> None:
        """Fill memory with bytes from `start` of this part on, and compare them with checksums.

        Raises:
          FileError: they cannot be read, or are not those that were written.
        """
        scratch, leaf = self.scratch, leaf or self.leaf
        with scratch.named("read", leaf):
            touched = self._state[start // UNIT : -(-(start + memory.numel()) // UNIT)]
            if _UNSET in touched:
                raise OSError("it was never written, or not to the end")
            at = self.offset + start
            read_all(scratch.file_for(memory, at), memory, at)
            self._compare(start, memory)

    def compare(self, start: int, memory: Tensor, leaf: str = "") -> None:
        """Compare bytes from `start` of this part on, which were read by other means.

        Raises:
          FileError: they are not those that were written.
        """
        with self.scratch.named("read", leaf or self.leaf):
            self._compare(start, memory)

    def _compare(self, start: int, memory: Tensor) -> None:
        units, inner = self._whole_units(start, memory)
        wanted, found = self._sums[units], sums(inner)
        if not torch.equal(wanted, found):
            wrong = zip((wanted != found).tolist(), self._state[units], strict=True)
            if any(differs and state == _SUMMED for differs, state in wrong):
                raise OSError("its values are not those that were written there")

    def give_away(self, start: int, stop: int) -> None:
        """Count that the bytes from `start` to `stop` are given away to be overwritten."""
        stop += not self.length  # what has no bytes at all counts as one
        if start == stop:
            return
        self.generation += 1
        first, end = bisect_left(self._given, (start,)), bisect_right(self._given, (stop, math.inf))
        rest = (stop, self._given[end - 1][1])
        self._given[first:end] = [(start, self.generation), rest]

    def was_given(self, start: int, stop: int, generation: int) -> bool:
        """Whether any of these bytes was given away after a generation."""
        stop += not self.length
        first, end = bisect_right(self._given, (start, math.inf)), bisect_left(self._given, (stop,))
        return start < stop and any(last > generation for _, last in self._given[first - 1 : end])

    @property
    def is_held(self) -> bool:
        """Whether its bytes have to stay; see [Note: held parts] in `stored`."""
        return len(self.holders) > 0

    def write(self, start: int, memory: Tensor, leaf: str = "") -> None:
        """Write memory from `start` of this part on.

        Raises:
          FileError: it cannot be written, or is held.
        """
        scratch, leaf = self.scratch, leaf or self.leaf
        if self.is_held:
            fix = "wait() for the save that reads it, or write to a new tensor"
            raise scratch._error(scratch.path, "is read by a save under way", None, fix, leaf)
        touched = slice(start // UNIT, -(-(start + memory.numel()) // UNIT))
        count = touched.stop - touched.start
        whole = self._whole_units(start, memory)
        found = sums(whole.memory)
        # Neighbours of a unit that is written in part may be read meanwhile, without its checksum.
        self._state[touched] = self._state[touched].replace(bytes([_SUMMED]), bytes([_WRITTEN]))
        try:
            with scratch.named("written", leaf):
                at = self.offset + start
                write_all(scratch.file_for(memory, at), memory, at)
        except BaseException:
            self._state[touched] = bytes([_UNSET]) * count
            raise
        self._sums[whole.units] = found
        self._state[touched] = bytes([_WRITTEN]) * count
        self._state[whole.units] = bytes([_SUMMED]) * len(found)

    def _whole_units(self, start: int, memory: Tensor) -> "_Whole":
        """The units of which memory has all bytes."""
        stop = start + memory.numel()
        first = -(-start // UNIT)
        last = stop // UNIT if stop < self.nbytes else len(self._sums)
        if last <= first:
            return _Whole(slice(0, 0), memory[:0])
        inner = memory[first * UNIT - start : min(last * UNIT, stop) - start]
        return _Whole(slice(first, last), inner.clone() if inner.data_ptr() % 8 else inner)


class _Whole(NamedTuple):
    """Units of an extent, and the memory for them, whose words are aligned."""

    units: slice
    memory: Tensor

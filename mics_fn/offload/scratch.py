"""`Scratch`: a file for the tensors of a run, which ends with the process.

[Note: scratch] A scratch file is a part of a running process, as its memory is. Nothing is ever
loaded from one that another process has made: a run that dies goes on from a checkpoint. So the
file has no name: it is open, and no entry of the folder leads to it. Nobody else can open, cut off
or replace it, and its room is free again when the process ends, however that is.

Direct I/O moves whole pages between a file and memory that begins at a page, past the cache of the
system: at the speed of the disk, and without pushing out of memory what others need there.
"""

import contextlib
import ctypes
import mmap
import os
import tempfile
import threading
import warnings
import weakref
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mics_fn import _torch, checks
from mics_fn.errors import FileError, PlanError, message
from mics_fn.offload.places import HOST_BYTES, LEAST_HOST_BYTES

# `Space`: which parts of a file are free, as arithmetic.

PAGE = 4096  # bytes; what direct I/O counts in


def padded(nbytes: int) -> int:
    """So many bytes in whole pages.

    >>> padded(0), padded(1), padded(4096), padded(4097)
    (0, 4096, 4096, 8192)
    """
    return -(-nbytes // PAGE) * PAGE


class Space:
    """The free parts of a file.

    Example:
      >>> space = Space()
      >>> space.take(8192), space.take(4096), space.end
      (0, 8192, 12288)
      >>> space.give(0, 8192)
      >>> space.take(4096), space.used
      (0, 8192)
    """

    def __init__(self) -> None:
        self.end = 0  # behind the last byte that is taken
        self._free: list[tuple[int, int]] = []  # offset and bytes, by offset, never adjacent

    @property
    def used(self) -> int:
        """Bytes that are taken."""
        return self.end - sum(nbytes for _, nbytes in self._free)

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


# Bytes between memory and files: aligned memory, whole reads and writes.

_HUGE_PAGE = 2 * 2**20
_AT_ONCE = 16 * 2**20  # bytes of one call: between two of them Python looks for signals
_CPU = torch.device("cpu")


@torch.inference_mode(mode=False)  # whose tensors threads could not write to
def aligned(nbytes: int, device: torch.device = _CPU) -> Tensor:
    """Host memory that begins at a page; locked, where a device can copy from such by itself.

    Args:
      nbytes: how much.
      device: the one that copies.
    """
    memory = _torch.host_buffer(padded(nbytes) + PAGE, device)
    memory = memory[-memory.data_ptr() % PAGE :][: padded(nbytes)]
    if nbytes >= _HUGE_PAGE and not _torch.is_async(device):
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


# Host memory that one stream or copy leaves to the next: making and locking it takes time.

_MEMORY: dict[tuple[str, int], Tensor] = {}  # by kind of device, which locks it, and bytes
_files = 0  # open scratch files


def take(nbytes: int, device: torch.device) -> Tensor:
    """Memory that nobody uses; see `aligned`."""
    memory = _MEMORY.pop((device.type, padded(nbytes)), None)
    return aligned(nbytes, device) if memory is None else memory


def give(memory: Tensor, device: torch.device) -> None:
    """Leave memory to the next stream."""
    if _files:
        _MEMORY[device.type, len(memory)] = memory


def count_files(more: int) -> None:
    """Note that more scratch files are open, or fewer; memory is let go with the last of them."""
    global _files
    _files += more
    if not _files:
        _MEMORY.clear()


_AGAIN = "the state in this file is lost; load a checkpoint"
_MEND = "mend the disk; with donate=True load a checkpoint, otherwise the old state is as it was"
_ROOM = "make room there, or choose another folder in where="


def open_files(folder: Path, direct: bool) -> list[int]:
    """Open a file without a name: for I/O through the cache, and for direct I/O if there is such.

    Raises:
      OSError: it cannot be made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        numbers = [os.dup(file.fileno())]
    if direct and hasattr(os, "O_DIRECT"):
        with contextlib.suppress(OSError):  # a file system without it, which may say so at a read
            flags = os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC
            numbers.append(os.open(f"/proc/self/fd/{numbers[0]}", flags))
            try:
                os.preadv(numbers[1], [mmap.mmap(-1, PAGE)], 0)
            except OSError:
                os.close(numbers.pop())
    return numbers


class Scratch:
    """A file for tensors of this process, which lasts as long as it or one of its tensors does.

    Args:
      folder: where; made if it does not exist.
      direct: whether data go past the cache of the system, where the file system has direct I/O.
        The attribute of that name says whether they do.
      host_bytes: host memory through which its tensors travel in a step; see `stream`.

    Raises:
      FileError: the file cannot be made.

    Example:
      >>> from tempfile import TemporaryDirectory
      >>> with TemporaryDirectory() as folder:
      ...     x = offload.store(torch.arange(3.0), offload.Scratch(folder))
      ...     print(x + 1, os.listdir(folder))
      tensor([1., 2., 3.]) []
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        direct: bool = True,
        host_bytes: int = HOST_BYTES,
    ) -> None:
        checks.path("Scratch", "folder", folder)
        checks.integer("Scratch", "host_bytes", host_bytes, LEAST_HOST_BYTES)
        self.host_bytes, self.folder = host_bytes, Path(os.path.abspath(os.fspath(folder)))
        with self._errors("cannot be made", _ROOM, ""):
            self._files = open_files(self.folder, direct)
        count_files(1)
        weakref.finalize(self, _close, self._files).atexit = False
        self.direct = len(self._files) > 1
        self._space, self._size = Space(), 0  # of the file
        self._lock = threading.Lock()
        self._to_free: deque[tuple[int, int]] = deque()  # by finalizers, which may not wait

    @property
    def nbytes(self) -> int:
        """The bytes that tensors take, in whole pages."""
        with self._lock:
            self._take_back()
            return self._space.used

    def reserve(self, nbytes: int, leaf: str = "") -> "Extent":
        """Allocate bytes of the file on disk, without values yet.

        Args:
          nbytes: how many.
          leaf: what they are for, in error texts.

        Raises:
          FileError: the disk has not so much room. What the file holds is as it was.
        """
        size = padded(nbytes)
        with self._lock, self._errors(f"has no room for {size} bytes more", _ROOM, leaf):
            self._take_back()
            offset = self._space.take(size)
            try:
                if self._space.end > self._size:
                    os.posix_fallocate(self._files[0], self._size, self._space.end - self._size)
                    self._size = self._space.end
            except OSError:
                self._space.give(offset, size)
                raise
        return Extent(self, offset, nbytes, leaf)

    def _take_back(self) -> None:
        while self._to_free:
            self._space.give(*self._to_free.popleft())

    def file_for(self, memory: Tensor, offset: int) -> int:
        """The open file by which memory is moved: direct only in whole pages."""
        whole = not (memory.data_ptr() % PAGE or memory.numel() % PAGE or offset % PAGE)
        return self._files[-1 if whole else 0]

    @contextlib.contextmanager
    def _errors(self, what: str, fix: str, leaf: str) -> Iterator[None]:
        """A context in which errors of the system become one that names the folder and the leaf."""
        try:
            yield
        except OSError as error:
            lines = [f"{leaf}: {error}" if leaf else f"{error}"]
            text = message(f"offload: a scratch file in {self.folder} {what}", lines, fix)
            raise FileError(text, str(self.folder), leaf) from error


def _close(files: list[int]) -> None:
    count_files(-1)
    for number in files:
        os.close(number)


class Extent:
    """A part of a scratch file, which is free again when nothing refers to it.

    Args:
      scratch: the file.
      offset: where it begins, which is a page.
      length: how many bytes of it are in use; it takes whole pages, `nbytes`.
      leaf: what it is for.
    """

    def __init__(self, scratch: Scratch, offset: int, length: int, leaf: str) -> None:
        self.scratch, self.offset, self.length, self.leaf = scratch, offset, length, leaf
        self.nbytes = padded(length)
        self.holders = weakref.WeakSet[Any]()  # each `ReadLock` for which its bytes stay
        back: Callable[..., Any] = scratch._to_free.append
        weakref.finalize(self, back, (offset, self.nbytes)).atexit = False

    def read(self, start: int, memory: Tensor, leaf: str = "") -> None:
        """Fill memory with bytes from `start` of this part on.

        Raises:
          FileError: they cannot be read.
        """
        with self.scratch._errors("cannot be read", _AGAIN, leaf or self.leaf):
            at = self.offset + start
            read_all(self.scratch.file_for(memory, at), memory, at)

    @property
    def is_locked(self) -> bool:
        """Whether its bytes have to stay; see [Note: locked parts] in `placed`."""
        return len(self.holders) > 0

    def write(self, start: int, memory: Tensor, leaf: str = "") -> None:
        """Write memory from `start` of this part on.

        Raises:
          FileError: it cannot be written.
          PlanError: it is held.
        """
        if self.is_locked:
            text = f"offload: {leaf or self.leaf} is read by a save under way"
            raise PlanError(text, fix="wait() for that save, or write to a new tensor")
        with self.scratch._errors("cannot be written", _MEND, leaf or self.leaf):
            at = self.offset + start
            write_all(self.scratch.file_for(memory, at), memory, at)

    def view(self, start: int, nbytes: int, leaf: str = "") -> Tensor:
        """Map bytes of this part, which must not be written: the system reads what is touched."""
        before = (self.offset + start) % mmap.ALLOCATIONGRANULARITY
        with self.scratch._errors("cannot be read", _AGAIN, leaf or self.leaf):
            how = {"flags": mmap.MAP_SHARED, "prot": mmap.PROT_READ}
            at = self.offset + start - before
            view = mmap.mmap(self.scratch._files[0], before + nbytes, **how, offset=at)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that it cannot be written to
            return torch.frombuffer(view, dtype=torch.uint8)[before:]

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
"""

import contextlib
import math
import os
import threading
import weakref
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mics_fn import checks
from mics_fn.errors import OffloadError, message
from mics_fn.offload import kept
from mics_fn.offload.ownership import Claim, claim, end, remove_leftovers
from mics_fn.offload.places import HOST_BYTES, LEAST_HOST_BYTES
from mics_fn.offload.space import PAGE, Space, padded
from mics_fn.offload.transfer import UNIT, allocate, read_all, sums, write_all

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
      OffloadError: the file cannot be made.

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
            if isinstance(error, OffloadError):
                raise
            raise self._error(where, "cannot be made", error, _ROOM) from error
        self.path = self._claim.path
        self._end = weakref.finalize(self, _end, self._claim, os.getpid())
        kept.count_files(1)
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
        except OffloadError:
            return Scratch(self.path.parent, self._name, host_bytes=self.host_bytes)
        return self

    def close(self) -> None:
        """Remove the file; its tensors cannot be read any more."""
        self._end()

    def reserve(self, nbytes: int, leaf: str = "") -> "Extent":
        """Bytes of the file that the disk is sure to have, whose values are not set yet.

        Args:
          nbytes: how many.
          leaf: what they are for, in error texts.

        Raises:
          OffloadError: the disk has not so much room. What the file holds is as it was.
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
        """Raise OffloadError unless the file is the one that this process has written."""
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
            if isinstance(error, OffloadError):
                raise
            fix = _AGAIN if verb == "read" else _MEND
            raise self._error(self.path, f"cannot be {verb}", error, fix, leaf) from error

    @staticmethod
    def _error(
        path: Path, what: str, error: OSError | None, fix: str, leaf: str = ""
    ) -> OffloadError:
        lines = [f"{leaf}: {error or 'it lies there'}" if leaf else f"{error or ''}"]
        text = message(f"offload: {path} {what}", filter(None, lines), fix)
        return OffloadError(text, str(path), leaf)


def _end(claimed: Claim, process: int) -> None:
    kept.count_files(-1)
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
          OffloadError: they cannot be read, or are not those that were written.
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
          OffloadError: they are not those that were written.
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
        """Whether its bytes have to stay; see [Note: held parts] in `holding`."""
        return len(self.holders) > 0

    def write(self, start: int, memory: Tensor, leaf: str = "") -> None:
        """Write memory from `start` of this part on.

        Raises:
          OffloadError: it cannot be written, or is held.
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

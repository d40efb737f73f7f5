"""Places of leaves as a value, files for tensors of a run, and their blocks as a stream.

[Note: scratch] A scratch file is a part of a running process, as its memory is. Nothing is ever
loaded from one that another process has made: a run that dies goes on from a checkpoint. So the
file has no name: it is open, and no entry of the folder leads to it. Nobody else can open, cut off
or replace it, and its room is free again when the process ends, however that is.

Direct I/O moves whole pages between a file and memory that begins at a page, past the cache of the
system: at the speed of the disk, and without pushing out of memory what others need there.

[Note: windows] The memory is cut into `WINDOWS` windows, and block i travels in window i modulo
that number: it is read into the window, computed with in place, and written back from there; then
the same thread reads block i + `WINDOWS` into it. So a window is one task after the other, threads
need no other order, and while one block is computed with, the next ones arrive and the last one
leaves.
"""

import contextlib
import ctypes
import mmap
import os
import tempfile
import threading
import time
import weakref
from bisect import insort
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import cycle, islice
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mics_fn import _torch, checks, spans
from mics_fn.collectives import refuse_derivative
from mics_fn.errors import FileError, PlanError, message
from mics_fn.threads import Job, ended

HOST_BYTES = 64 * 2**20
LEAST_HOST_BYTES = 2**20

# `Where`: the places of parameters, states and gradients, as a value with a text.

# A place is "device", "host" or "disk:FOLDER" with an absolute path. Each rank has scratch files of
# its own in that folder, so a disk of the node is best.
DEVICE, HOST, DISK = "device", "host", "disk:"
_FIELDS = ("params", "states", "grads")


@dataclass(frozen=True)
class Where:
    """Where leaves live. `str` gives the text of its rules, which `parse` reads.

    Args:
      rules: each a pattern, a field ("params", "states" or "grads") and the place that this has for
        leaves whose whole path matches; the last one counts. The pattern "" is that of all leaves.
      host_bytes: host memory through which data of files travel, on this rank; at least 1 MiB.

    Example:
      >>> where = Where.parse("states=disk:/nvme/run1, params=host; *norm*: states=device")
      >>> where.rules[-1], where.at("w", "states", torch.device("cuda"))
      (('*norm*', 'states', 'device'), 'disk:/nvme/run1')
    """

    rules: tuple[tuple[str, str, str], ...] = ()
    host_bytes: int = HOST_BYTES

    def __post_init__(self) -> None:
        checks.integer("Where", "host_bytes", self.host_bytes, LEAST_HOST_BYTES)

    @classmethod
    def parse(cls, value: "Where | str | None") -> "Where":
        """Read the text form; `parse(str(where))` equals `where`. None is the device for all.

        A text is `field=place, ...`, followed by `; pattern: field=place, ...` for each override.

        Raises:
          PlanError: a clause does not give a place for a field, or gives two.
        """
        if isinstance(value, Where):
            return value
        rules = dict[tuple[str, str], str]()
        for number, clause in enumerate(filter(None, map(str.strip, (value or "").split(";")))):
            head, colon, rest = clause.partition(":")
            pattern, fields = (head.strip(), rest) if colon and "=" not in head else ("", clause)
            if number and not pattern:
                fix = "write overrides as in '*norm*: states=device', after the rest"
                raise PlanError(f"where: no pattern in {clause!r}", fix=fix)
            for part in filter(None, map(str.strip, fields.split(","))):
                field, _, place = map(str.strip, part.partition("="))
                if field not in _FIELDS or (pattern, field) in rules:
                    text = f"where: {part!r} gives no place for a field, or two"
                    raise PlanError(text, fix=f"write field=place; fields are {', '.join(_FIELDS)}")
                rules[pattern, field] = _place(place)
        return cls(tuple([(*key, place) for key, place in rules.items()]))

    def __str__(self) -> str:
        base = ", ".join(f"{field}={place}" for pattern, field, place in self.rules if not pattern)
        rest = [f"{pattern}: {field}={place}" for pattern, field, place in self.rules if pattern]
        return "; ".join([base, *rest] if base else rest)

    def at(self, path: str, field: str, device: torch.device) -> str:
        """Find the place of one leaf on a device; on the CPU the host is the device."""
        found = DEVICE
        for pattern, name, place in self.rules:
            if name == field and (not pattern or checks.matches(pattern, path)):
                found = place
        return DEVICE if found == HOST and not _torch.is_async(device) else found

    @property
    def patterns(self) -> list[str]:
        """The patterns of its overrides."""
        return [pattern for pattern, _, _ in self.rules if pattern]

    @cached_property
    def moved(self) -> set[str]:
        """The fields in which a leaf may lie elsewhere than on the device."""
        return {field for _, field, place in self.rules if place != DEVICE}


def where(value: "Where | str | None" = "", *, host_bytes: int | str | None = None) -> Where:
    """Where parameters, states and gradients live, as a value.

    Args:
      value: a `Where`, or its text: `field=place, ...` with the fields `params`, `states` and
        `grads` and the places `device`, `host` and `disk:FOLDER`, followed by `; pattern:
        field=place` for leaves whose path matches. "" leaves everything on the device.
      host_bytes: host memory on each rank through which data of files travel, in bytes or a text
        such as "1GiB"; None keeps that of `value`, by default 64 MiB.

    Returns:
      A `Where`.

    Raises:
      PlanError: the text has no such form, or a place does not exist.

    Example:
      >>> where("states=disk:/nvme/run1,params=host", host_bytes="128MiB").host_bytes
      134217728
    """
    found = Where.parse(value)
    if host_bytes is None:
        return found
    return replace(found, host_bytes=checks.nbytes("where", "host_bytes", host_bytes))


def _place(text: str) -> str:
    """Read a place."""
    kind, colon, folder = map(str.strip, text.partition(":"))
    if kind == "disk" and folder:
        return f"{DISK}{os.path.abspath(folder)}"
    if colon or kind not in (DEVICE, HOST):
        fix = "write device, host, or disk:/nvme/run1"
        raise PlanError(f"where: {text!r} is no place", fix=fix)
    return kind


# Bytes between memory and files: aligned memory, whole reads and writes.

PAGE = 4096  # bytes; what direct I/O counts in


def padded(nbytes: int) -> int:
    """So many bytes in whole pages.

    >>> padded(0), padded(1), padded(4096), padded(4097)
    (0, 4096, 4096, 8192)
    """
    return -(-nbytes // PAGE) * PAGE


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
    raw = memoryview((ctypes.c_char * memory.numel()).from_address(memory.data_ptr()))
    at = 0
    while at < len(raw):
        count = move(raw[at : at + _AT_ONCE], at)
        if count <= 0:
            raise OSError(f"{at} of {len(raw)} bytes at {offset} could be {done}: the file ends")
        at += count


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
        self, folder: str | os.PathLike[str], *, direct: bool = True, host_bytes: int = HOST_BYTES
    ) -> None:
        self.host_bytes, self.folder = host_bytes, Path(os.path.abspath(os.fspath(folder)))
        with self._errors("cannot be made", _ROOM, ""):
            self._files = open_files(self.folder, direct)
        for number in self._files:
            weakref.finalize(self, os.close, number).atexit = False
        self.direct = len(self._files) > 1
        self._size = 0  # of the file
        self._taken: list[tuple[int, int]] = []  # its parts: offset and end, by offset
        self._lock = threading.Lock()
        self._memory: dict[int, Tensor] = {}  # that a stream or copy leaves to the next, by bytes
        self._to_free: deque[tuple[int, int]] = deque()  # by finalizers, which may not wait

    def reserve(self, nbytes: int, leaf: str = "") -> "Extent":
        """Allocate bytes of the file on disk, without values: in the first gap, or at its end.

        Args:
          nbytes: how many.
          leaf: what they are for, in error texts.

        Raises:
          FileError: the disk has not so much room. What the file holds is as it was.
        """
        size, at = padded(nbytes), 0
        with self._lock, self._errors(f"has no room for {size} bytes more", _ROOM, leaf):
            self._take_back()
            for offset, end in self._taken:
                if offset - at >= size:
                    break
                at = end
            if at + size > self._size:
                os.posix_fallocate(self._files[0], self._size, at + size - self._size)
                self._size = at + size
            insort(self._taken, (at, at + size))
        return Extent(self, at, nbytes, leaf)

    def _take_back(self) -> None:
        while self._to_free:
            self._taken.remove(self._to_free.popleft())

    def take(self, nbytes: int, device: torch.device) -> Tensor:
        """Host memory that nobody uses; see `aligned`. Making and locking it takes time."""
        memory = self._memory.pop(padded(nbytes), None)
        return aligned(nbytes, device) if memory is None else memory

    def give(self, memory: Tensor) -> None:
        """Leave memory to the next stream or copy."""
        self._memory[len(memory)] = memory

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
        # Each `ReadLock` for which its bytes stay; see [Note: locked parts] in `placed`.
        self.holders = weakref.WeakSet[Any]()
        back: Callable[..., Any] = scratch._to_free.append
        weakref.finalize(self, back, (offset, offset + self.nbytes)).atexit = False

    def read(self, start: int, memory: Tensor, leaf: str = "") -> None:
        """Fill memory with bytes from `start` of this part on.

        Raises:
          FileError: they cannot be read.
        """
        with self.scratch._errors("cannot be read", _AGAIN, leaf or self.leaf):
            at = self.offset + start
            read_all(self.scratch.file_for(memory, at), memory, at)

    def write(self, start: int, memory: Tensor, leaf: str = "") -> None:
        """Write memory from `start` of this part on.

        Raises:
          FileError: it cannot be written.
          PlanError: it is held.
        """
        if self.holders:
            text = f"offload: {leaf or self.leaf} is read by a save under way"
            raise PlanError(text, fix="wait() for that save, or write to a new tensor")
        with self.scratch._errors("cannot be written", _MEND, leaf or self.leaf):
            at = self.offset + start
            write_all(self.scratch.file_for(memory, at), memory, at)

    def view(self, start: int, nbytes: int) -> Tensor:
        """Map bytes of this part, which must not be written: the system reads what is touched."""
        begin = self.offset + start
        name = f"/proc/self/fd/{self.scratch._files[0]}"
        how: Any = {"shared": True, "size": begin + nbytes, "dtype": torch.uint8}
        return torch.from_file(name, **how)[begin:]


# `stream`: blocks of files through a fixed amount of host memory, read ahead and written behind.

WINDOWS = 4
THREADS = 3
TIMEOUT_S = 600.0  # the longest wait for the disk
_LOOK_S = 0.5  # after which a wait lets Python look for signals, and for the time limit


class Block(NamedTuple):
    """What travels together, and is in host memory at the same time.

    Args:
      reads: tensors in files that are read.
      writes: where each of them goes afterwards; () writes nothing. The same tensor is written in
        place; a new one, made by `empty`, leaves the old as it is.
      key: whatever tells the caller what it is.
    """

    reads: Sequence[Any]
    writes: Sequence[Any] = ()
    key: Any = None

    def moves(self, window: Tensor, tensors: Sequence[Any]) -> list[tuple[Tensor, Any]]:
        """What it reads or writes, each with its part of a window, in whole pages."""
        sizes = [padded(x.size_bytes) for x in self.reads]
        return list(zip(window[: sum(sizes)].split(sizes), tensors, strict=False))

    def tensors(self, window: Tensor) -> list[Tensor]:
        """Its tensors in a window."""
        moves = self.moves(window, self.reads)
        return [part[: x.size_bytes].view(x.dtype).view(x.shape) for part, x in moves]


def stream(
    blocks: Iterable[Block], host_bytes: int = HOST_BYTES, *, threads: int = THREADS
) -> Generator[tuple[Block, list[Tensor]]]:
    """Fetch blocks into host memory one after the other, and write them back.

    The first `WINDOWS` blocks are asked for as one is wanted. A block's
    tensors may be used and changed until the next one is asked for; work that a device has queued
    on them has to be done by then. When the iteration ends, all is written. If it ends early, by an
    error or by `close`, no thread is left, and of each block that was given nothing, a part or all
    is written; so a caller that writes in place has to give such a state up.

    Args:
      blocks: in the order in which they are wanted; `WINDOWS` of them are taken ahead.
      host_bytes: memory for all blocks under way, at least 1 MiB. A block gets a fourth of it.
      threads: that read and write at a time.

    Returns:
      An iterator over each block with its tensors on the host, in locked memory if they belong to a
      device. Its `close` ends it early.

    Memory: `host_bytes`, which stay for the next stream while some scratch file is open.

    Raises:
      RuntimeError: a block is larger than a fourth of `host_bytes`; `cuts` gives parts that fit.
      FileError: a file cannot be read or written, or a block takes longer than 10 minutes.
      LeafError: it runs inside torch.func.

    Example:
      >>> from tempfile import TemporaryDirectory
      >>> with TemporaryDirectory() as folder:
      ...     x = offload.store(torch.arange(3.0), offload.Scratch(folder))
      ...     for block, (part,) in offload.stream([offload.Block([x], [x])]):
      ...         part += 1
      ...     print(offload.read(x))
      tensor([1., 2., 3.])
    """
    refuse_derivative("stream", (), "take steps on data in files outside of torch.func")
    source = iter(blocks)
    ahead = deque(islice(source, WINDOWS))
    if not ahead:
        return
    first = ahead[0].reads[0]
    scratch, device = first.extent.scratch, first.device
    memory, size = scratch.take(host_bytes, device), block_bytes(host_bytes)
    windows = memory[: WINDOWS * size].split(size)
    jobs, turns = list[Job](), SimpleQueue[int]()
    for turn in range(threads):
        turns.put(turn)
    begin = partial(_begin, turns)
    try:
        for window, block in zip(windows, ahead, strict=False):
            jobs.append(begin(window, None, block))
        for i in cycle(range(WINDOWS)):
            if not ahead:
                break
            block = ahead.popleft()
            _await(jobs[i], scratch)
            yield block, block.tensors(windows[i])
            following = next(source, None)
            if following is not None:
                ahead.append(following)
            jobs[i] = begin(windows[i], block, following)
        for job in jobs:
            _await(job, scratch)
    finally:
        ended(jobs, TIMEOUT_S)  # a thread that the disk keeps for too long ends by itself
    scratch.give(memory)  # no thread has it any more


def _begin(turns: Any, window: Tensor, done: Block | None, following: Block | None) -> Job:
    """Begin to write a block and to read another one into its window."""
    writes = [] if done is None else done.moves(window, done.writes)
    reads = [] if following is None else following.moves(window, following.reads)
    for verb, moves in (("write", writes), ("read", reads)):
        if moves and spans.observers:
            leaves = ", ".join(x.leaf for _, x in moves)
            moved = [each for each, _ in moves] if verb == "write" else []
            spans.passing(f"offload: {verb} {leaves}".rstrip(), None, moved)
    return Job(partial(_move, turns, writes, reads)).begin("mics_fn offload")


def _move(turns: SimpleQueue[int], writes: Sequence[Any], reads: Sequence[Any]) -> None:
    """Write a block and read the next one; runs in a thread, of which so many do as have a turn."""
    turn = turns.get()
    try:
        for memory, x in writes:
            x.move(x.extent.write, memory)
        for memory, x in reads:
            x.move(x.extent.read, memory)
    finally:
        turns.put(turn)


def _await(job: Job, scratch: Scratch) -> None:
    """Wait for a job, and raise its error."""
    deadline = time.monotonic() + TIMEOUT_S
    while not job.done.wait(_LOOK_S):
        if time.monotonic() > deadline:
            text = f"offload: the disk took longer than {TIMEOUT_S:g} s: {scratch.folder}"
            raise FileError(message(text, fix="look at the disk"), str(scratch.folder))
    job.result()


def block_bytes(host_bytes: int) -> int:
    """The largest block that travels through so much host memory.

    >>> block_bytes(64 * 2**20) // 2**20
    16
    """
    return host_bytes // WINDOWS // PAGE * PAGE


def cuts(numel: int, sizes: Sequence[int], host_bytes: int = HOST_BYTES) -> list[tuple[int, int]]:
    """Cut tensors of so many elements, so that the same parts of all make one block.

    Args:
      numel: elements of each.
      sizes: bytes of an element of each.
      host_bytes: as for `stream`.

    Returns:
      The first element and the end of each part.

    Example:
      >>> cuts(5_000_000, [4, 4])
      [(0, 2097152), (2097152, 4194304), (4194304, 5000000)]
    """
    most = block_bytes(host_bytes) // sum(sizes)
    step = max(1, most // PAGE) * PAGE  # whole pages of each, for direct I/O
    return [(low, min(numel, low + step)) for low in range(0, numel, step)]

"""`stream`: blocks of files through a fixed amount of host memory, read ahead and written behind.

[Note: windows] The memory is cut into `WINDOWS` windows, and block i travels in window i modulo
that number: it is read into the window, computed with in place, and written back from there; then
the same thread reads block i + `WINDOWS` into it. So a window is one task after the other, threads
need no other order, and while one block is computed with, the next ones arrive and the last one
leaves.
"""

import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, cycle, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mics_fn import checks, spans
from mics_fn.collectives import refuse_derivative
from mics_fn.errors import FileError, PlanError, message
from mics_fn.offload import scratch
from mics_fn.offload.places import HOST_BYTES, LEAST_HOST_BYTES
from mics_fn.threads import Crew, Job

WINDOWS = 4
THREADS = 3
TIMEOUT_S = 600.0
_LOOK_S = 0.5  # after which a wait lets Python look for signals, and for the time limit


class Block(NamedTuple):
    """What travels together, and is in host memory at the same time.

    Args:
      reads: tensors in files that are read; None for memory whose values the caller sets.
      writes: where each of them goes afterwards; None for one that is only read. () writes nothing.
        The same tensor is written in place; a new one, made by `empty`, leaves the old as it is.
      key: whatever tells the caller what it is.
    """

    reads: Sequence[Tensor | None]
    writes: Sequence[Tensor | None] = ()
    key: Any = None

    def pairs(self) -> list[tuple[Any, Any]]:
        """What each of its tensors is read from and written to."""
        return list(zip(self.reads, self.writes or [None] * len(self.reads), strict=True))

    def likes(self) -> list[Any]:
        """A tensor in a file of the shape and dtype of each."""
        return [into if source is None else source for source, into in self.pairs()]

    def memory(self, window: Tensor) -> list[Tensor]:
        """The part of a window that each of its tensors has, in whole pages."""
        sizes = [x.size_bytes for x in self.likes()]
        starts, end = scratch.layout(sizes)
        if end > len(window):
            text = f"stream: a block of {end} bytes, with windows of {len(window)}"
            raise PlanError(text, fix="cut it, as cuts() says, or pass a larger host_bytes")
        pairs = zip(starts, sizes, strict=True)
        return [window[start : start + scratch.padded(size)] for start, size in pairs]

    def tensors(self, window: Tensor) -> list[Tensor]:
        """Its tensors in a window."""
        pairs = zip(self.likes(), self.memory(window), strict=True)
        return [part[: x.size_bytes].view(x.dtype).view(x.shape) for x, part in pairs]


def stream(
    blocks: Iterable[Block],
    host_bytes: int = HOST_BYTES,
    *,
    threads: int = THREADS,
    timeout_s: float = TIMEOUT_S,
) -> Iterator[tuple[Block, list[Tensor]]]:
    """Fetch blocks into host memory one after the other, and write them back.

    The first `WINDOWS` blocks are asked for at once, and waited for as they are wanted. A block's
    tensors may be used and changed until the next one is asked for; work that a device has queued
    on them has to be done by then. When the iteration ends, all is written. If it ends early, by an
    error or by `close`, no thread is left, and of each block that was given nothing, a part or all
    is written; so a caller that writes in place has to give such a state up.

    Args:
      blocks: in the order in which they are wanted; `WINDOWS` of them are taken ahead.
      host_bytes: memory for all blocks under way, at least 1 MiB. A block gets a fourth of it.
      threads: that read and write.
      timeout_s: the longest wait for the disk.

    Returns:
      An iterator over each block with its tensors on the host, in locked memory if they belong to a
      device. Its `close` ends it early.

    Memory: `host_bytes`, which stay for the next stream while some scratch file is open.

    Raises:
      PlanError: a block is larger than a fourth of `host_bytes`.
      FileError: a file cannot be read or written within `timeout_s`.
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
    checks.integer("stream", "host_bytes", host_bytes, LEAST_HOST_BYTES)
    refuse_derivative("stream", (), "take steps on data in files outside of torch.func")
    begun = _streamed(iter(blocks), host_bytes, threads, timeout_s)
    next(begun, None)
    return begun


def _streamed(
    source: Iterator[Block], host_bytes: int, threads: int, timeout_s: float
) -> Generator[Any]:
    """`stream`, which gives None once the first blocks are being read."""
    first = next(source, None)
    if first is None:
        return
    device = next((x.device for x in first.likes()), torch.device("cpu"))
    memory = scratch.take(host_bytes, device)
    work = _Stream(memory, threads, timeout_s)
    try:
        yield from work.run(chain([first], source))
    finally:
        work.end()
    scratch.give(memory, device)  # no thread has it any more


def block_bytes(host_bytes: int) -> int:
    """The largest block that travels through so much host memory.

    >>> block_bytes(64 * 2**20) // 2**20
    16
    """
    return host_bytes // WINDOWS // scratch.PAGE * scratch.PAGE


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
    step = max(1, most // scratch.PAGE) * scratch.PAGE  # whole pages of each, for direct I/O
    return [(low, min(numel, low + step)) for low in range(0, numel, step)]


class _Stream:
    """The windows and threads of one stream.

    Args:
      memory: of all windows.
      threads, timeout_s: as for `stream`.
    """

    def __init__(self, memory: Tensor, threads: int, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        size = block_bytes(len(memory))
        self._windows = [memory[i * size : (i + 1) * size] for i in range(WINDOWS)]
        self._crew = Crew(threads, "mics_fn-offload")
        self._jobs: list[Job] = []  # by window
        self._folder = ""  # of the last file, for errors
        self._ended = False

    def run(self, source: Iterator[Block]) -> Iterator[Any]:
        """Give None once the first blocks are being read, then block after block.

        At the end wait until all are written.
        """
        ahead = deque(islice(source, WINDOWS))
        self._jobs = [self._start(window, None, block) for window, block in enumerate(ahead)]
        yield None
        for window in cycle(range(WINDOWS)):
            if not ahead:
                break
            block = ahead.popleft()
            self._await(self._jobs[window])
            yield block, block.tensors(self._windows[window])
            following = next(source, None)
            if following is not None:
                ahead.append(following)
            self._jobs[window] = self._start(window, block, following)
        for job in self._jobs:
            self._await(job)

    def _start(self, window: int, done: Block | None, following: Block | None) -> Job:
        """Begin to write a block and to read another one into its window."""
        memory = self._windows[window]
        writes = [] if done is None else _moves(memory, done, done.writes)
        reads = [] if following is None else _moves(memory, following, following.reads)
        for verb, moves in (("write", writes), ("read", reads)):
            if moves:
                self._folder = str(moves[0][1].extent.scratch.folder)
            if moves and spans.observers:
                leaves = ", ".join(x.leaf for _, x in moves)
                moved = [each for each, _ in moves] if verb == "write" else []
                spans.passing(f"offload: {verb} {leaves}".rstrip(), None, moved)
        return self._crew.give(partial(self._move, writes, reads))

    def _move(self, writes: Sequence[Any], reads: Sequence[Any]) -> None:
        """Write a block and read the next one; runs in a thread."""
        for memory, x in writes:
            x.extent.write(x.start, memory[: x.reaches()], x.leaf)
        if self._ended:
            return
        for memory, x in reads:
            x.extent.read(x.start, memory[: x.reaches()], x.leaf)

    def _await(self, job: Job) -> None:
        """Wait for a job, and raise its error."""
        deadline = time.monotonic() + self._timeout_s
        while not job.done.wait(_LOOK_S):
            if time.monotonic() > deadline:
                text = f"offload: the disk took longer than {self._timeout_s:g} s: {self._folder}"
                raise FileError(message(text, fix="look at the disk"), self._folder)
        job.result()

    def end(self) -> None:
        """Wait until no thread is left; one that the disk keeps for too long ends by itself."""
        self._ended = True
        self._crew.end(self._timeout_s)


def _moves(window: Tensor, block: Block, tensors: Sequence[Any]) -> list[tuple[Tensor, Any]]:
    """The tensors to read or to write, with the memory of each."""
    pairs = zip(block.memory(window), tensors, strict=False)  # () writes nothing
    return [(memory, x) for memory, x in pairs if x is not None]

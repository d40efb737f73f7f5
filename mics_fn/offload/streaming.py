"""`stream`: blocks of files through a fixed amount of host memory, read ahead and written behind.

[Note: slots] The memory is cut into `SLOTS` slots, and block i travels in slot i modulo that
number: it is read into the slot, computed with in place, and written back from there; then the same
thread reads block i + `SLOTS` into it. So a slot is one task after the other, threads need no other
order, and while one block is computed with, the next ones arrive and the last one leaves.
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
from mics_fn.offload import scratch as scratch_module
from mics_fn.offload.places import HOST_BYTES, LEAST_HOST_BYTES
from mics_fn.offload.scratch import PAGE, UNIT, Scratch, layout, padded
from mics_fn.offload.stored import Stored
from mics_fn.threads import Crew, Job

SLOTS = 4
THREADS = 3
TIMEOUT_S = 600.0
_LOOK_S = 0.5  # after which a wait lets Python look for signals, and for the time limit


class Block(NamedTuple):
    """What travels together, and is in host memory at the same time.

    Args:
      reads: stored tensors that are read; None for memory whose values the caller sets.
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

    def likes(self) -> list[Stored]:
        """A stored tensor of the shape and dtype of each."""
        pairs = self.pairs()
        found = [into if source is None else source for source, into in pairs]
        if not all(isinstance(x, Stored) for x in found):
            fix = "read stored tensors, or write to them"
            raise PlanError("stream: a block of a tensor that is not stored", fix=fix)
        for source, into in pairs:
            if source is not None and into is not None and _form(source) != _form(into):
                text = f"stream: {source!r} would be written to {into!r}"
                raise PlanError(text, fix="write to a tensor of this shape and dtype")
        return found


def _form(x: Tensor) -> tuple[Any, ...]:
    return tuple(x.shape), x.dtype


def stream(
    blocks: Iterable[Block],
    host_bytes: int = HOST_BYTES,
    *,
    threads: int = THREADS,
    timeout_s: float = TIMEOUT_S,
) -> Iterator[tuple[Block, list[Tensor]]]:
    """Bring blocks into host memory one after the other, and write them back.

    The first `SLOTS` blocks are asked for at once, and waited for as they are wanted. A block's
    tensors may be used and changed until the next one is asked for; work that a device has queued
    on them has to be done by then. When the iteration ends, all is written. If it ends early, by an
    error or by `close`, no thread is left, and of each block that was given nothing, a part or all
    is written; so a caller that writes in place has to give such a state up.

    Args:
      blocks: in the order in which they are wanted; `SLOTS` of them are taken ahead.
      host_bytes: memory for all blocks under way, at least 1 MiB. A block gets a fourth of it.
      threads: that read and write.
      timeout_s: the longest wait for the disk.

    Returns:
      An iterator over each block with its tensors on the host, in locked memory if they belong to a
      device. Its `close` ends it early.

    Memory: `host_bytes`, which stay for the next stream while some scratch file is open.

    Raises:
      PlanError: a block is larger than a fourth of `host_bytes`.
      FileError: a file cannot be read or written within `timeout_s`, or others have changed it.
      DonatedError: a tensor was given away.
      LeafError: it runs inside torch.func.

    Example:
      >>> from tempfile import TemporaryDirectory
      >>> with TemporaryDirectory() as folder:
      ...     x = offload.store(torch.arange(3.0), offload.Scratch(folder))
      ...     (x,) = offload.renewed([x])
      ...     for block, (part,) in offload.stream([offload.Block([x], [x])]):
      ...         part += 1
      ...     print(offload.read(x))
      ...     del x, block
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
    memory = scratch_module.take(host_bytes, device)
    work = _Stream(memory, threads, timeout_s)
    try:
        yield from work.run(chain([first], source))
    finally:
        work.end()
    scratch_module.give(memory, device)  # no thread has it any more


def block_bytes(host_bytes: int) -> int:
    """The largest block that travels through so much host memory.

    >>> block_bytes(64 * 2**20) // 2**20
    16
    """
    return host_bytes // SLOTS // UNIT * UNIT


def cuts(numel: int, sizes: Sequence[int], host_bytes: int = HOST_BYTES) -> list[tuple[int, int]]:
    """Where tensors of so many elements are cut, so that the same parts of all make one block.

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
    whole = UNIT // min(sizes)  # so that each part has checksums of its own
    step = most // whole * whole or max(PAGE, most // PAGE * PAGE)
    return [(low, min(numel, low + step)) for low in range(0, numel, step)]


class _Stream:
    """The slots and threads of one stream.

    Args:
      memory: of all slots.
      threads, timeout_s: as for `stream`.
    """

    def __init__(self, memory: Tensor, threads: int, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        size = len(memory) // SLOTS // UNIT * UNIT
        self._slots = [memory[i * size : (i + 1) * size] for i in range(SLOTS)]
        self._crew = Crew(threads, "mics_fn-offload")
        self._jobs: list[Job] = []  # by slot
        self._read: set[Scratch] = set()  # whose first pages were compared
        self._written: set[Scratch] = set()  # that count this pass
        self._ended = False

    def run(self, source: Iterator[Block]) -> Iterator[Any]:
        """Give None once the first blocks are being read, then block after block.

        At the end wait until all are written.
        """
        ahead = deque(islice(source, SLOTS))
        self._jobs = [self._start(slot, None, block) for slot, block in enumerate(ahead)]
        yield None
        for slot in cycle(range(SLOTS)):
            if not ahead:
                break
            block = ahead.popleft()
            self._await(self._jobs[slot])
            yield block, self._tensors(slot, block)
            following = next(source, None)
            if following is not None:
                ahead.append(following)
            self._jobs[slot] = self._start(slot, block, following)
        for job in self._jobs:
            self._await(job)

    def _start(self, slot: int, done: Block | None, coming: Block | None) -> Job:
        """Begin to write a block and to read another one into its slot."""
        if coming is not None:
            need = sum(padded(x.size_bytes) for x in coming.likes())
            if need > len(self._slots[slot]):
                text = f"stream: a block of {need} bytes, with slots of {len(self._slots[slot])}"
                raise PlanError(text, fix="cut it, as cuts() says, or pass a larger host_bytes")
            self._check(coming)
        if done is not None:
            self._count(done)
        if spans.observers:
            self._tell(slot, done, coming)
        return self._crew.give(partial(self._move, slot, done, coming))

    def _tell(self, slot: int, done: Block | None, coming: Block | None) -> None:
        """Show to observers what a thread is about to write and to read."""
        for verb, which, block in (("write", 1, done), ("read", 0, coming)):
            found = [] if block is None else [pair[which] for pair in block.pairs()]
            leaves = ", ".join(x.leaf for x in found if x is not None)
            if any(x is not None for x in found):
                memory = self._tensors(slot, block) if block is done and block is not None else []
                spans.passing(f"offload: {verb} {leaves}".rstrip(), None, memory)

    def _check(self, block: Block) -> None:
        """Raise unless the files of a block are as they were left, and its tensors are valid."""
        for source, into in block.pairs():
            for x in (source, into):
                if x is None:
                    continue
                x.check()
                scratch = x.extent.scratch
                if scratch not in self._read:
                    scratch.check(x.leaf)
                    self._read.add(scratch)

    def _count(self, block: Block) -> None:
        """Count this pass in the files that a block is written to, before the first write."""
        for _, into in block.pairs():
            if into is not None and into.extent.scratch not in self._written:
                into.extent.scratch.begin_writes(into.leaf)
                self._written.add(into.extent.scratch)

    def _move(self, slot: int, done: Block | None, coming: Block | None) -> None:
        """Write a block and read the next one; runs in a thread."""
        for (_, into), memory in self._parts(slot, done):
            if into is not None:
                into.extent.write(into.start, memory[: into.reaches()], into.leaf)
        if self._ended:
            return
        for (source, _), memory in self._parts(slot, coming):
            if source is not None:
                source.extent.read(source.start, memory[: source.reaches()], source.leaf)

    def _parts(self, slot: int, block: Block | None) -> list[tuple[Any, Tensor]]:
        """What each tensor of a block is read from and written to, with its memory."""
        if block is None:
            return []
        sizes = [x.size_bytes for x in block.likes()]
        starts, _ = layout(sizes)
        memory = self._slots[slot]
        parts = [memory[a : a + padded(n)] for a, n in zip(starts, sizes, strict=True)]
        return list(zip(block.pairs(), parts, strict=True))

    def _tensors(self, slot: int, block: Block) -> list[Tensor]:
        """The tensors of a block that has arrived."""
        memory = [part for _, part in self._parts(slot, block)]
        return [
            part[: x.size_bytes].view(x.dtype).view(x.shape)
            for x, part in zip(block.likes(), memory, strict=True)
        ]

    def _await(self, job: Job) -> None:
        """Wait for a job, and raise its error."""
        deadline = time.monotonic() + self._timeout_s
        while not job.done.wait(_LOOK_S):
            if time.monotonic() > deadline:
                files = ", ".join(sorted(f"{x.path}" for x in self._read | self._written))
                text = f"offload: the disk took longer than {self._timeout_s:g} s: {files}"
                raise FileError(message(text, fix="look at the disk"), files)
        job.result()

    def end(self) -> None:
        """Wait until no thread is left; one that the disk keeps for too long ends by itself."""
        self._ended = True
        self._crew.end(self._timeout_s)

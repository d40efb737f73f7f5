"""The only file that calls data collectives: by bucket, over any number of levels, bounded.

[Note: levels in place] Chunks are numbered innermost level first, so that at each level of a gather
(outermost first)
the chunks gathered so far and those about to arrive are one contiguous run of the output: every
level is a plain all-gather written in place. The reduce-scatter is the same walk backwards.

[Note: order on a communicator] Every rank must issue the collectives of one communicator in the
same order. A multi-level collective therefore advances only where the program says so, inside
`wait` or `wait_all`, and `wait_all` never lets a
later bucket start a level before an earlier one has: buckets follow each other through the levels
like a pipeline.

[Note: buffers in flight] On CUDA each collective runs on a side stream that first waits for the
current one; `wait` makes the current stream wait for it, and no host waits. Every tensor that a
collective reads or writes is referenced by its `Pending` until then, so that no allocator hands it
out too early; `record_stream` is never needed.
"""

import time
import warnings
from collections.abc import Callable, Generator, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mics_fn import _torch
from mics_fn.errors import CollectiveError, CollectiveTimeoutError, message, name_ranks
from mics_fn.groups import Comm, Groups, Hierarchy

Steps = Generator["Issued", None, Tensor]


class Issued:
    """One collective on one communicator, under way."""

    def __init__(self, comm: Comm, op: str, nbytes_sent: int, call: Callable[..., Any]) -> None:
        self.comm, self.op = comm, op
        comm.traffic.add(comm.name, nbytes_sent)
        group = comm.process_group()
        try:
            self.work = call(group=group, async_op=True)
        except (RuntimeError, ValueError) as error:
            raise self._failed(error) from error

    def done(self) -> bool:
        """Whether it has finished (or failed), without waiting."""
        return self.work.is_completed()

    def poll(self, until: Callable[[], bool] | None = None) -> None:
        """Wait on the host, sleeping between looks, so that an interrupt is heard at once.

        Args:
          until: what to wait for instead of this collective's own end.
        """
        started, looks = time.monotonic(), 0
        while not (until or self.done)():
            looks += 1
            time.sleep(0 if looks < 20 else min(5e-4, 1e-5 * looks))
            if time.monotonic() - started > self.comm.timeout_s:
                raise CollectiveTimeoutError(
                    message(
                        f"{self.op} over '{self.comm.name}' did not finish in "
                        f"{self.comm.timeout_s:g} s",
                        [f"waiting: rank {dist.get_rank()} of {name_ranks(self.comm.ranks)}"],
                        fix="look for a rank that stopped, or took another way through the program",
                    )
                )
        if until is None:
            self.order()

    def order(self) -> None:
        """On CUDA make the current stream wait for it; on the host raise if it failed."""
        try:
            self.work.wait()
        except RuntimeError as error:
            raise self._failed(error) from error

    def _failed(self, error: Exception) -> CollectiveError:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return CollectiveError(
            message(
                f"{self.op} over '{self.comm.name}' failed: {first}",
                [f"on rank {dist.get_rank()}; its group is {name_ranks(self.comm.ranks)}"],
                fix="look at the other ranks' errors, then make new groups: these are out of step",
            )
        )


class Pending:
    """A collective under way, over all its levels; it keeps its buffers alive until `wait`.

    Args:
      steps: generator that issues one level after the other and returns the result.
      keep: every tensor that it reads or writes.
      device: where they live.
      purpose: 'gather' or 'reduce'; each has its own stream on CUDA.
    """

    def __init__(
        self, steps: Steps, *, keep: Sequence[Tensor], device: torch.device, purpose: str
    ) -> None:
        self._steps, self._keep = steps, keep
        self._issued: Issued | None = None
        self._result: Tensor | None = None
        self._event: Any = None
        self._device, self._on_stream = device, device.type == "cuda"
        self.level = 0  # levels issued so far
        if not self._on_stream:
            self._advance()
            return
        side, current = _side_stream(device, purpose), torch.cuda.current_stream(device)
        side.wait_stream(current)  # the inputs, and the last reader of recycled memory
        with torch.cuda.stream(side):
            self._advance()
            while not self.finished:
                self._advance()
            self._event = side.record_event()

    def _advance(self) -> None:
        issued, self._issued = self._issued, None  # nothing is left of one that fails here
        if issued is not None:
            issued.order() if self._on_stream else issued.poll()
        try:
            self._issued = next(self._steps)
            self.level += 1
        except StopIteration as stop:
            self._result = stop.value

    @property
    def finished(self) -> bool:
        """Whether nothing is left to issue or to wait for on the host."""
        return self._issued is None

    def wait(self) -> Tensor:
        """The result, ready for the current stream. Waiting again returns it again."""
        while not self.finished:
            self._advance()
        if self._event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)
            self._event = None
        self._keep = ()
        if self._result is None:
            raise CollectiveError("this collective failed before; its result does not exist")
        return self._result

    def __del__(self) -> None:
        # Buffers must outlive the transfer even when nobody wants the result.
        if getattr(self, "_issued", None) is not None:
            warnings.warn("a collective was dropped before wait()", ResourceWarning, stacklevel=2)
        elif getattr(self, "_event", None) is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)


def wait_all(pendings: Sequence[Pending]) -> list[Tensor]:
    """Finish several collectives, each level of one overlapping other levels of the next.

    See [Note: order on a communicator].
    """
    while waiting := [pending for pending in pendings if not pending.finished]:
        first = waiting[0]._issued
        if first is not None:
            first.poll(until=lambda: any(_may_advance(waiting)))
        for i in range(len(waiting)):
            if _may_advance(waiting)[i]:
                waiting[i]._advance()
    return [pending.wait() for pending in pendings]


def _may_advance(waiting: Sequence[Pending]) -> list[bool]:
    """Which have finished their level, and stay behind the one before them."""
    clear = [True]
    clear += [a.finished or a.level > b.level for a, b in pairwise(waiting)]
    return [
        ok and pending._issued is not None and pending._issued.done()
        for ok, pending in zip(clear, waiting, strict=True)
    ]


@cache
def _side_stream(device: torch.device, purpose: str) -> Any:
    # Reductions are what the next step waits for, so they go first where both want the device.
    return torch.cuda.Stream(device, priority=-1 if purpose == "reduce" else 0)


def start_all_gather(hierarchy: Hierarchy, chunk: Tensor) -> Pending:
    """Start gathering equal chunks over the levels of a partition group.

    Args:
      hierarchy: levels, outermost first.
      chunk: contiguous; this rank's chunk, any shape.

    Returns:
      A `Pending` whose result is (p, *chunk.shape), in chunk order.

    Communication: one all-gather a level; with p ranks and M bytes in all, (p - 1)/p * M received.
      None if p = 1.

    Memory: the result; no staging copy.
    """
    if hierarchy.size == 1 or chunk.numel() == 0:
        out = chunk.expand(hierarchy.size, *chunk.shape)
    else:
        out = chunk.new_empty(hierarchy.size, *chunk.shape)
    steps = _gather_steps(hierarchy, chunk, out)
    return Pending(steps, keep=(chunk, out), device=chunk.device, purpose="gather")


def _gather_steps(hierarchy: Hierarchy, chunk: Tensor, out: Tensor) -> Steps:
    mine, start = chunk.unsqueeze(0), hierarchy.chunk
    if chunk.numel() and not chunk.is_meta:
        for level, coord in zip(hierarchy.levels, hierarchy.coords, strict=True):
            count = mine.shape[0]
            start -= coord * count
            run = out.narrow(0, start, level.gather.size * count)
            nbytes = (level.gather.size - 1) * mine.nbytes
            yield Issued(
                level.gather,
                "all-gather",
                nbytes,
                _bind(_torch.all_gather_single, run.view(-1), mine.reshape(-1)),
            )
            mine = run
    return out


def start_reduce_scatter(hierarchy: Hierarchy, full: Tensor) -> Pending:
    """Start averaging over a partition group; each rank keeps its own chunk.

    Args:
      hierarchy: levels, outermost first; they are walked innermost first.
      full: contiguous (p, *chunk shape), in chunk order.

    Returns:
      A `Pending` whose result has the shape of one chunk: the mean over the group.

    Communication: one reduce-scatter a level; (p - 1)/p of full's bytes sent. None if p = 1.

    Memory: on gloo, whose own reduce-scatter moves twice the bytes, a receive buffer as large as
      `full`.
    """
    steps = _scatter_steps(hierarchy, full)
    return Pending(steps, keep=(full,), device=full.device, purpose="reduce")


def _scatter_steps(hierarchy: Hierarchy, full: Tensor) -> Steps:
    if full.numel() and not full.is_meta:
        levels = zip(reversed(hierarchy.levels), reversed(hierarchy.coords), strict=True)
        for level, _ in levels:
            comm = level.reduce
            full = yield from _mean_scatter(comm, full.view(comm.size, -1, *full.shape[1:]))
    return full[0]


def _mean_scatter(comm: Comm, parts: Tensor) -> Generator[Issued, None, Tensor]:
    """One level: parts[j] goes to the rank at place j, which keeps the mean of what it gets."""
    nbytes = (comm.size - 1) * (parts.nbytes // comm.size)
    if parts.device.type == "cpu":
        # gloo's reduce-scatter is an all-reduce on the wire; exchanging parts and summing them here
        # moves half as much, sums in rank order, and rounds 16-bit values once.
        received = torch.empty_like(parts)
        call = _bind(dist.all_to_all_single, received.view(-1), parts.view(-1))
        yield Issued(comm, "reduce-scatter", nbytes, call)
        wide = torch.float32 if parts.dtype.itemsize == 2 else parts.dtype
        return received.sum(0, dtype=wide).div_(comm.size).to(parts.dtype)
    out = torch.empty_like(parts[0])
    call = _bind(_torch.reduce_scatter_single, out.view(-1), parts.view(-1), op=dist.ReduceOp.AVG)
    yield Issued(comm, "reduce-scatter", nbytes, call)
    return out


def start_mean(comm: Comm, tensor: Tensor) -> Pending:
    """Start averaging a contiguous tensor over a communicator, in place.

    Communication: one all-reduce, 2(r - 1)/r of the tensor's bytes sent by each of r ranks. None if
      r = 1.
    """
    return Pending(
        _mean_steps(comm, tensor), keep=(tensor,), device=tensor.device, purpose="reduce"
    )


def _mean_steps(comm: Comm, tensor: Tensor) -> Steps:
    if comm.size > 1 and tensor.numel() and not tensor.is_meta:
        nbytes = 2 * (comm.size - 1) * tensor.nbytes // comm.size
        call = _bind(dist.all_reduce, tensor.view(-1), op=dist.ReduceOp.AVG)
        yield Issued(comm, "all-reduce", nbytes, call)
    return tensor


def _bind(fn: Callable, *args: Any, **kwargs: Any) -> Callable:
    return lambda **more: fn(*args, **kwargs, **more)


# What follows is control traffic: small, blocking, outside the hot path.


def collect(comm: Comm, tensor: Tensor) -> Tensor:
    """One small tensor of each rank, stacked in the communicator's order; no host sync on CUDA."""
    if comm.size == 1:
        return tensor.unsqueeze(0)
    flat = tensor.contiguous().view(-1)
    out = flat.new_empty(comm.size * flat.numel())
    call = _bind(_torch.all_gather_single, out, flat)
    issued = Issued(comm, "all-gather", (comm.size - 1) * flat.nbytes, call)
    issued.order() if flat.is_cuda else issued.poll()
    return out.view(comm.size, *tensor.shape)


def broadcast(groups: Groups, tensor: Tensor, source_rank: int) -> None:
    """Overwrite `tensor` everywhere with the source's: over replicas, then inside partitions."""
    place = groups.ranks.index(source_rank) % groups.partition_size
    row = groups.position % groups.partition_size == place
    hops = [(groups.replicas, source_rank)] if row else []
    own = groups.plan.partition_groups[groups.position // groups.partition_size]
    hops.append((groups.partition, groups.ranks[own[place]]))
    for comm, source in hops:
        if comm.size > 1:
            call = _bind(dist.broadcast, tensor, src=source)
            Issued(comm, "broadcast", tensor.nbytes if comm.rank == 0 else 0, call).poll()


def mean_over_ranks(groups: Groups, tensor: Tensor) -> Tensor:
    """The mean of a small tensor over all ranks, in place: in partitions, then over replicas."""
    for comm in (groups.partition, groups.replicas):
        start_mean(comm, tensor).wait()
    return tensor

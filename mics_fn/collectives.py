"""The only file that calls data collectives: by bucket, over any number of levels, bounded.

[Note: levels in place] Chunks are numbered innermost level first, so that at each level of a gather
(outermost first) the chunks gathered so far and those about to arrive are one contiguous run of the
output: every level is a plain all-gather written in place. The reduce-scatter is the same walk
backwards.
"""

from collections.abc import Callable, Generator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mics_fn import _torch
from mics_fn.flat import Buffers
from mics_fn.groups import Comm, Groups, Hierarchy
from mics_fn.pending import Issued, Pending, Steps


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
            parts = full.view(comm.size, -1, *full.shape[1:])
            full = yield from _mean_scatter(comm, parts, hierarchy.buffers)
    return full[0]


def _mean_scatter(comm: Comm, parts: Tensor, buffers: Buffers) -> Generator[Issued, None, Tensor]:
    """One level: parts[j] goes to the rank at place j, which keeps the mean of what it gets."""
    nbytes = (comm.size - 1) * (parts.nbytes // comm.size)
    if parts.device.type == "cpu":
        # gloo's reduce-scatter is an all-reduce on the wire; exchanging parts and summing them here
        # moves half as much, sums in rank order, and rounds 16-bit values once.
        received = buffers.take(parts.shape, parts.dtype, parts.device)
        call = _bind(dist.all_to_all_single, received.view(-1), parts.view(-1))
        yield Issued(comm, "reduce-scatter", nbytes, call)
        wide = torch.float32 if parts.dtype.itemsize == 2 else parts.dtype
        mean = received.sum(0, dtype=wide).div_(comm.size).to(parts.dtype)
        buffers.give(received)
        return mean
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

"""Hierarchical collectives, one bucket at a time; no other file calls collectives that move data.

[Note: levels in place] Chunks are numbered innermost level first. A gather takes the outermost
level first, and in each level the chunks that are there and those that arrive form one contiguous
run of the output, so every level is a plain all-gather that writes in place. A reduce-scatter takes
the same steps in reverse.
"""

from collections.abc import Callable, Generator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mics_fn import _torch
from mics_fn.collectives.means import mean_factors, mean_of, mean_of_two
from mics_fn.collectives.pending import Collective, Pending, Steps
from mics_fn.collectives.sources import reads
from mics_fn.groups import Buffers, Comm, Groups, Route


def start_all_gather(route: Route, chunk: Tensor, out: Tensor | None = None) -> Pending:
    """Start to gather equal chunks over the levels of a partition group.

    Args:
      route: its levels, outermost first.
      chunk: this rank's chunk, contiguous, of any shape.
      out: the output, contiguous (p, *chunk.shape); None allocates it.

    Returns:
      A `Pending` whose result is (p, *chunk.shape), in chunk order.

    Communication: one all-gather per level; with p ranks and M bytes in all, a rank receives
      (p - 1)/p * M. None if p = 1.

    Memory: the result, without a staging copy.
    """
    if chunk.numel() == 0 or (route.size == 1 and out is None):
        out = chunk.expand(route.size, *chunk.shape)
    elif out is None:
        out = chunk.new_empty(route.size, *chunk.shape)
    comms = gather_comms(route, chunk)
    steps = gather_steps(route, chunk, out)
    return reads(Pending(steps, comms, keep=(chunk, out), device=chunk.device), comms, chunk)


def start_fetch(route: Route, chunk: Tensor, held: Tensor | None, out: Tensor | None) -> Pending:
    """Start to gather a bucket, and keep what the outer levels gave; see [Note: placements].

    Args:
      route: the levels; what is gathered over the first `hold` of them goes to `held`.
      chunk: this rank's chunk, contiguous and 1D.
      held: memory for that, in the dtype that is sent; None if `hold` is 0. A later fetch passes
        the kept memory as `chunk` and as `held`, and gathers over the inner levels only.
      out: 1D, memory for the whole bucket, in the dtype that is sent; None if `held` or `chunk` is
        the whole bucket.

    Returns:
      A `Pending` whose result is the whole bucket.

    Communication: as `start_all_gather`.
    """
    outer, inner = route.split(route.hold)
    both = ((outer, held), (inner, out))
    parts = [(route, to) for route, to in both if to is not None and to is not chunk]
    comms = [comm for route, _ in parts for comm in gather_comms(route, chunk)]

    def steps() -> Steps:
        mine = chunk
        for route, target in parts:
            view = target.view(route.size, target.numel() // route.size)
            if mine.dtype != target.dtype or route.size == 1:
                mine = view[route.chunk].copy_(mine)  # cast before sending
            yield from gather_steps(route, mine, view)
            mine = target
        return mine

    keep = (chunk, *(target for _, target in parts))
    return reads(Pending(steps(), comms, keep=keep, device=chunk.device), comms, chunk)


def gather_comms(route: Route, chunk: Tensor) -> list[Comm]:
    """The communicators that `gather_steps` uses, in order."""
    return [level.gather for level in route.levels if _moves(chunk)]


def gather_steps(route: Route, chunk: Tensor, out: Tensor) -> Steps:
    """Gather chunks into `out` (p, *chunk.shape), which may hold this rank's chunk already."""
    mine, start = chunk.unsqueeze(0), route.chunk
    if _moves(chunk):
        for level, coord in zip(route.levels, route.coords, strict=True):
            count = mine.shape[0]
            start -= coord * count
            run = out.narrow(0, start, level.gather.size * count)
            nbytes = (level.gather.size - 1) * mine.nbytes
            call = partial(_torch.all_gather_single, run.view(-1), mine.reshape(-1))
            yield Collective(level.gather, "all-gather", nbytes, call)
            mine = run
    return out


def start_reduce_scatter(
    route: Route, full: Tensor, buffers: Buffers, dtype: torch.dtype | None = None
) -> Pending:
    """Start to average over a partition group; each rank keeps its own chunk.

    Args:
      route: its levels, outermost first; the reduction takes the innermost first.
      full: contiguous (p, *chunk shape), in chunk order; overwritten. Its dtype is what is sent.
      buffers: the pool that lends a second buffer as large as `full`.
      dtype: of the result; None takes that of `full`.

    Returns:
      A `Pending` whose result has the shape of one chunk: the mean over the group, times
      `route.grad_factor`.

    Communication: one reduce-scatter per level, (p - 1)/p of the bytes of `full` sent. None if
      p = 1.

    Memory: the second buffer, and the result.
    """
    comms = scatter_comms(route, full)
    spare = buffers.take(full.shape, full.dtype, full.device) if comms else full
    # On the stream of the caller, who frees it there.
    out = full.new_empty(full.shape[1:], dtype=dtype) if comms else full[0]

    def steps() -> Steps:
        yield from scatter_steps(route, full, out, spare)
        if comms:
            buffers.give(spare)
        mean, factor = out.to(dtype or full.dtype), route.grad_factor
        return mean if factor == 1.0 else mean * factor

    return Pending(steps(), comms, keep=(full, spare, out), device=full.device)


def scatter_comms(route: Route, full: Tensor) -> list[Comm]:
    """The communicators that `scatter_steps` uses, in order."""
    return [level.reduce for level in reversed(route.levels) if _moves(full)]


def scatter_steps(
    route: Route, full: Tensor, out: Tensor, spare: Tensor
) -> Generator[Collective, None, None]:
    """Average `full` (p, *chunk shape) over a partition group; this rank's chunk goes to `out`.

    Args:
      route: the levels.
      full: contiguous, in chunk order; overwritten.
      out: one chunk, of any float dtype. It is written at the end, so the caller can make views of
        it before. If nothing is sent, it must be `full[0]` already.
      spare: as large as `full`; overwritten.
    """
    comms, here, there = scatter_comms(route, full), full.view(-1), spare.view(-1)
    for i, comm in enumerate(comms):
        numel = here.numel() // comm.size
        if here.device.type == "cpu" or comm.fixed_order:
            # gloo's reduce-scatter sends as much as an all-reduce. Exchanging parts and adding them
            # here sends half of that, and rounds 16-bit values only once.
            mean = out.view(-1) if i == len(comms) - 1 else here[:numel]
            yield from _exchange(comm, here.view(comm.size, numel), there[: here.numel()], mean)
        else:
            direct = i == len(comms) - 1 and out.dtype == full.dtype
            mean = out.view(-1) if direct else there[:numel]
            before, after = mean_factors(full.dtype, comm.size)
            if before != 1.0:  # see `mean_factors`
                here.mul_(before)
            op = dist.ReduceOp.AVG if before == 1.0 else dist.ReduceOp.SUM
            yield _issue(comm, _torch.reduce_scatter_single, mean, here, op=op)
            if before != 1.0:
                mean.mul_(after)
            there = here
        here = mean
    if comms and here.data_ptr() != out.data_ptr():
        out.view(-1).copy_(here)


def _exchange(
    comm: Comm, parts: Tensor, received: Tensor, mean: Tensor
) -> Generator[Collective, None, None]:
    """Send part j to the rank at place j, and average what arrives into `mean`.

    `mean` may share memory with part 0.
    """
    received = received.view(parts.shape)
    if comm.size != 2:
        yield _issue(comm, dist.all_to_all_single, received.view(-1), parts.view(-1))
        return mean_of(received, mean, comm.fixed_order)
    # Of two parts only one is sent, and one pass over both makes the mean.
    own, other = comm.rank, 1 - comm.rank
    sizes = [0, parts.shape[1]] if own == 0 else [parts.shape[1], 0]
    call = partial(dist.all_to_all_single, received[other], parts[other], sizes, sizes)
    yield Collective(comm, "reduce-scatter", parts[other].nbytes, call)
    halves = (parts[0], received[1]) if own == 0 else (received[0], parts[1])
    mean_of_two(*halves, mean)
    return None


def _issue(comm: Comm, fn: Callable[..., Any], out: Tensor, full: Tensor, **how: Any) -> Collective:
    """Issue one level of a reduce-scatter: part j of `full` goes to the rank at place j."""
    nbytes = (comm.size - 1) * (full.nbytes // comm.size)
    return Collective(comm, "reduce-scatter", nbytes, partial(fn, out, full, **how))


def start_mean(comm: Comm, tensor: Tensor, wire: torch.dtype | None = None) -> Pending:
    """Start to average a tensor over a communicator, in place.

    Args:
      comm: the communicator.
      tensor: contiguous.
      wire: the dtype that is sent; None takes that of `tensor`.

    Communication: one all-reduce, in which each of r ranks sends 2(r - 1)/r of the tensor's bytes
      in `wire`.
    """
    comms, steps = mean_comms(comm, tensor), mean_steps(comm, tensor, wire)
    return Pending(steps, comms, keep=(tensor,), device=tensor.device)


def mean_comms(comm: Comm, tensor: Tensor) -> list[Comm]:
    """The communicators that `mean_steps` uses, in order: the given one, once or twice or never."""
    if comm.size == 1 or not _moves(tensor):
        return []
    return [comm, comm] if comm.fixed_order else [comm]


def mean_steps(comm: Comm, tensor: Tensor, wire: torch.dtype | None = None) -> Steps:
    """Average a contiguous tensor over a communicator, in place; see `start_mean`."""
    wire, comms = wire or tensor.dtype, mean_comms(comm, tensor)
    if len(comms) > 1:
        yield from _mean_in_order(comm, tensor, wire)
    elif comms:
        before, after = mean_factors(wire, comm.size)
        if before == 1.0:
            sent, op = tensor.to(wire), dist.ReduceOp.AVG
        else:
            sent, op = (tensor * before).to(wire), dist.ReduceOp.SUM
        nbytes = 2 * (comm.size - 1) * sent.nbytes // comm.size
        yield Collective(comm, "all-reduce", nbytes, partial(dist.all_reduce, sent.view(-1), op=op))
        if sent is not tensor:
            tensor.copy_(sent)
        if before != 1.0:
            tensor.mul_(after)
    return tensor


def _mean_in_order(
    comm: Comm, tensor: Tensor, wire: torch.dtype
) -> Generator[Collective, None, None]:
    """An all-reduce made of an exchange of parts, local sums in rank order, and an all-gather."""
    numel = tensor.numel()
    parts = tensor.new_zeros((comm.size, -(-numel // comm.size)), dtype=wire)
    parts.view(-1)[:numel].copy_(tensor.view(-1))
    received, mean = torch.empty_like(parts), parts.new_empty(parts.shape[1])
    yield from _exchange(comm, parts, received, mean)
    call = partial(_torch.all_gather_single, received.view(-1), mean)
    yield Collective(comm, "all-gather", (comm.size - 1) * mean.nbytes, call)
    tensor.view(-1).copy_(received.view(-1)[:numel])


def _moves(tensor: Tensor) -> bool:
    """Whether a tensor has data to send."""
    return bool(tensor.numel()) and not _torch.has_no_data(tensor)


# The functions below move small tensors, and are not called in the inner loop of training.


def collect(comm: Comm, tensor: Tensor) -> Tensor:
    """A small tensor from each rank, stacked in the communicator's order; no host sync on CUDA."""
    if comm.size == 1:
        return tensor.unsqueeze(0)
    flat = tensor.contiguous().view(-1)
    out = flat.new_empty(comm.size * flat.numel())
    call = partial(_torch.all_gather_single, out, flat)
    nbytes = (comm.size - 1) * flat.nbytes
    _one(Collective(comm, "all-gather", nbytes, call), (flat, out))
    return out.view(comm.size, *tensor.shape)


def _one(collective: Collective, keep: tuple[Tensor, ...]) -> None:
    """Issue a single collective when it is first in its queue, and wait for it."""

    def steps() -> Steps:
        yield collective
        return keep[-1]

    Pending(steps(), [collective.comm], keep=keep, device=keep[-1].device).wait()


def broadcast(groups: Groups, tensor: Tensor, source_rank: int) -> None:
    """Overwrite `tensor` on all ranks with that of the source: over replicas, then inside them."""
    place = groups.ranks.index(source_rank) % groups.partition_size
    row = groups.position % groups.partition_size == place
    hops = [(groups.replicas, source_rank)] if row else []
    own = groups.plan.partition_groups[groups.position // groups.partition_size]
    hops.append((groups.partition, groups.ranks[own[place]]))
    for comm, source in hops:
        if comm.size > 1:
            call = partial(dist.broadcast, tensor, src=source)
            nbytes = tensor.nbytes if comm.rank == 0 else 0
            _one(Collective(comm, "broadcast", nbytes, call), (tensor,))


def mean_over_ranks(groups: Groups, tensor: Tensor) -> Tensor:
    """Average a small tensor over all ranks, in place: in partition groups, then over replicas."""
    for comm in (groups.partition, groups.replicas):
        start_mean(comm, tensor).wait()
    return tensor

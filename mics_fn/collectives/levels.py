"""Collectives over one communicator, which are the levels of hierarchical ones.

No other file calls what moves data.
"""

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mics_fn import _device, _torch
from mics_fn.collectives.collective import Collective
from mics_fn.collectives.means import mean_factors, mean_of, mean_of_two
from mics_fn.collectives.pending import Pending, Steps
from mics_fn.groups import Comm

SMALL_BYTES = 2**16  # of a result that gloo may allocate twice more


def all_gather(comm: Comm, out: Tensor, chunk: Tensor) -> Collective:
    """One level of a gather: the chunk of the rank at place j goes to row j of `out`."""
    if _device.is_async(chunk.device) or (comm.size > 2 and out.nbytes <= SMALL_BYTES):
        call = partial(_torch.all_gather_single, out.view(-1), chunk)
    else:
        call = partial(_swap, out, chunk, comm.rank)
    return Collective(comm, "all-gather", (comm.size - 1) * chunk.nbytes, call)


class _Works:
    """Several calls as one: done when all of them are."""

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def _swap(out: Tensor, chunk: Tensor, rank: int, **how: Any) -> _Works:
    """An all-gather as exchanges that write in place.

    gloo's own all-gather sends as much, but allocates twice the size of its result in each call.
    Here each of n ranks sends (n - 1)**2 messages, most of them empty, so it is for large chunks.
    """
    if out[rank].data_ptr() != chunk.data_ptr():
        out[rank].copy_(chunk)
    count, works = len(out), []
    for step in range(1, count):
        to, source = (rank + step) % count, (rank - step) % count
        sent, received = [0] * count, [0] * count
        sent[to] = received[source] = chunk.numel()
        works.append(dist.all_to_all_single(out[source], chunk, received, sent, **how))
    return _Works(works)


def exchanges(comm: Comm, device: torch.device) -> bool:
    """Whether a level of a reduce-scatter is an exchange of parts, which are added here."""
    return not _device.is_async(device) or comm.fixed_order


def average(comm: Comm, parts: Tensor, mean: Tensor) -> Generator[Collective, None, None]:
    """Part j goes to the rank at place j, and the mean of all to `mean`, by torch's own op."""
    before, after = mean_factors(parts.dtype, comm.size)
    if before != 1.0:  # see `mean_factors`
        parts.mul_(before)
    op = dist.ReduceOp.AVG if before == 1.0 else dist.ReduceOp.SUM
    yield _scattered(comm, _torch.reduce_scatter_single, mean, parts.view(-1), op=op)
    if before != 1.0:
        mean.mul_(after)


def exchange(
    comm: Comm, parts: Tensor, received: Tensor, mean: Tensor
) -> Generator[Collective, None, None]:
    """Send part j to the rank at place j, and average what arrives into `mean`.

    Args:
      comm: the communicator.
      parts: one row per rank.
      received: 1D, memory for what arrives: all parts, or one of two. Then it may be `mean`.
      mean: one row; it may share memory with part 0.
    """
    if comm.size != 2:
        received = received[: parts.numel()].view(parts.shape)
        yield _scattered(comm, dist.all_to_all_single, received.view(-1), parts.view(-1))
        mean_of(received, mean, comm.fixed_order)
        return
    # Of two parts only one is sent, and one pass over both makes the mean.
    own, received = comm.rank, received[: parts.shape[1]]
    sizes = [0, parts.shape[1]] if own == 0 else [parts.shape[1], 0]
    call = partial(dist.all_to_all_single, received, parts[1 - own], sizes, sizes)
    yield Collective(comm, "reduce-scatter", received.nbytes, call)
    halves = (parts[0], received) if own == 0 else (received, parts[1])
    mean_of_two(*halves, mean)


def swap_codes(comm: Comm, sent: Tensor, received: Tensor) -> Collective:
    """Exchange one row of codes with each other rank of a communicator, in the order of ranks."""
    sizes = [sent.shape[1]] * comm.size
    sizes[comm.rank] = 0
    call = partial(dist.all_to_all_single, received.view(-1), sent.view(-1), sizes, sizes)
    return Collective(comm, "reduce-scatter", sent.nbytes, call)


def _scattered(
    comm: Comm, fn: Callable[..., Any], out: Tensor, full: Tensor, **how: Any
) -> Collective:
    """One level of a reduce-scatter, to be issued: part j of `full` goes to the rank at place j."""
    nbytes = (comm.size - 1) * (full.nbytes // comm.size)
    return Collective(comm, "reduce-scatter", nbytes, partial(fn, out, full, **how))


def reduce_all(
    comm: Comm, tensor: Tensor, wire: torch.dtype, spare: Tensor | None
) -> Generator[Collective, None, None]:
    """Average a contiguous tensor in place by torch's own op, which sends it in `wire`.

    Args:
      comm, tensor, wire: as for `start_mean`.
      spare: memory for a copy in `wire`, of the shape of `tensor`; None allocates it if needed.
    """
    before, after = mean_factors(wire, comm.size)
    op = dist.ReduceOp.AVG if before == 1.0 else dist.ReduceOp.SUM
    if wire == tensor.dtype:
        sent = tensor if before == 1.0 else tensor.mul_(before)
    else:
        sent = torch.empty_like(tensor, dtype=wire) if spare is None else spare
        torch.mul(tensor, before, out=sent)
    nbytes = 2 * (comm.size - 1) * sent.nbytes // comm.size
    yield Collective(comm, "all-reduce", nbytes, partial(dist.all_reduce, sent.view(-1), op=op))
    if sent is not tensor:
        tensor.copy_(sent)
    if before != 1.0:
        tensor.mul_(after)


def mean_in_order(
    comm: Comm, tensor: Tensor, wire: torch.dtype
) -> Generator[Collective, None, None]:
    """An all-reduce made of an exchange of parts, local sums in rank order, and an all-gather."""
    numel = tensor.numel()
    parts = tensor.new_zeros((comm.size, -(-numel // comm.size)), dtype=wire)
    parts.view(-1)[:numel].copy_(tensor.view(-1))
    received, mean = torch.empty_like(parts).view(-1), parts.new_empty(parts.shape[1])
    yield from exchange(comm, parts, received, mean)
    yield all_gather(comm, received.view(comm.size, -1), mean)
    tensor.view(-1).copy_(received[:numel])


def moves(tensor: Tensor) -> bool:
    """Whether a tensor has data to send."""
    return bool(tensor.numel()) and not _torch.has_no_data(tensor)


# The functions below move small tensors, and are not called in the inner loop of training.


def collect(comm: Comm, tensor: Tensor, what: str = "comparison") -> Tensor:
    """A small tensor from each rank, stacked in the communicator's order; no host sync on CUDA."""
    if comm.size == 1:
        return tensor.unsqueeze(0)
    return start_collect([comm], tensor, what).wait().view(comm.size, *tensor.shape)


def start_collect(comms: Sequence[Comm], tensor: Tensor, what: str = "comparison") -> Pending:
    """Start to collect a small tensor over one communicator after the other; the result is flat."""
    comms, flat = [comm for comm in comms if comm.size > 1], tensor.contiguous().view(-1)
    if any(comm.silent for comm in comms):  # all ranks say the same, as they did before
        return _mirrored(math.prod(comm.size for comm in comms), flat, what)
    outs, numel = [], flat.numel()
    for comm in comms:
        numel *= comm.size
        outs.append(flat.new_empty(numel))

    def steps() -> Steps:
        here = flat
        for comm, out in zip(comms, outs, strict=True):
            call = partial(_torch.all_gather_single, out, here)
            yield Collective(comm, "all-gather", (comm.size - 1) * here.nbytes, call)
            here = out
        return here

    how = {"keep": (flat, *outs), "device": flat.device, "what": ("", what, "")}
    return Pending(steps(), comms, **how)


def _mirrored(count: int, flat: Tensor, what: str) -> Pending:
    """A collection that is done at once, in which each of `count` ranks has what this one has."""

    def steps() -> Steps:
        return flat.repeat(count)
        yield

    return Pending(steps(), [], keep=(flat,), device=flat.device, what=("", what, ""))


def _one(collective: Collective, keep: tuple[Tensor, ...], what: str) -> None:
    """Issue a single collective when it is first in its queue, and wait for it."""

    def steps() -> Steps:
        yield collective
        return keep[-1]

    how = {"keep": keep, "device": keep[-1].device, "what": ("", what, "")}
    Pending(steps(), [collective.comm], **how).wait()


def send_from(comm: Comm, tensor: Tensor, source_rank: int) -> None:
    """Overwrite `tensor` on all ranks of a communicator with that of the source."""
    if comm.size > 1 and not comm.silent:
        call = partial(dist.broadcast, tensor, src=source_rank)
        nbytes = tensor.nbytes if comm.rank == 0 else 0
        what = f"broadcast from rank {source_rank}"
        _one(Collective(comm, "broadcast", nbytes, call), (tensor,), what)


def hand_over(
    comm: Comm, sent: Tensor | None, numel: int, pairs: Mapping[int, int], device: torch.device
) -> Tensor | None:
    """Send bytes from some ranks of a communicator to others; all of its ranks call it.

    Args:
      comm: the communicator.
      sent: 1D bytes, on the ranks that send.
      numel: how many these are, the same everywhere.
      pairs: global ranks, sender by receiver; each sends once at most, and none does both.
      device: of what is sent.

    Returns:
      What arrived; None on ranks that receive nothing.

    Communication: one all-to-all, in which only those that are named send, `numel` bytes each.
    """
    if comm.size == 1:
        return None
    own, sizes = comm.ranks[comm.rank], [0] * comm.size
    received, outgoing = list(sizes), list(sizes)
    for taker, source in pairs.items():
        if taker == own:
            received[comm.ranks.index(source)] += numel
        if source == own:
            outgoing[comm.ranks.index(taker)] += numel
    out = torch.empty(sum(received), dtype=torch.uint8, device=device)
    sent = out.new_empty(0) if sent is None else sent
    call = partial(dist.all_to_all_single, out, sent, received, outgoing)
    same = out.new_empty(0)  # ranks compare how much is in a call, which here is not equal
    what = f"{numel} bytes of state"
    _one(Collective(comm, "hand over", sum(outgoing), call), (same, sent, out), what)
    return out if sum(received) else None

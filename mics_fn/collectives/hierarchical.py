"""Hierarchical collectives, one bucket at a time: level after level of those in `levels`.

Every level of a gather writes in place, and a reduce-scatter takes the same steps in reverse: see
[Note: chunk order] in `groups.topology`.
"""

from collections.abc import Generator
from math import prod

import torch
from torch import Tensor

from mics_fn import _torch
from mics_fn.collectives.coded import exchange_bytes, exchange_codes
from mics_fn.collectives.collective import Collective
from mics_fn.collectives.levels import all_gather, average, exchange, exchanges, moves
from mics_fn.collectives.pending import Pending, Steps, What
from mics_fn.collectives.sources import reads
from mics_fn.collectives.tasks import Task
from mics_fn.collectives.wire import Wire
from mics_fn.groups import Buffers, Comm, Route


def start_all_gather(
    route: Route,
    chunk: Tensor,
    out: Tensor | None = None,
    what: What = ("", "gather", ""),
) -> Pending:
    """Start to gather equal chunks over the levels of a partition group.

    Args:
      route: its levels, outermost first.
      chunk: this rank's chunk, contiguous, of any shape.
      out: the output, contiguous (p, *chunk.shape); None allocates it.
      what: as for `Pending`.

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
    how = {"keep": (chunk, out), "device": chunk.device, "what": what}
    return reads(Pending(gather_steps(route, chunk, out), comms, **how), comms, chunk)


def start_fetch(
    route: Route,
    chunk: Tensor,
    held: Tensor | None,
    out: Tensor | None,
    what: What,
    bring: Task | None = None,
) -> Pending:
    """Start to gather a bucket, and keep what the outer levels gave; see [Note: placements].

    Args:
      route: the levels; what is gathered over the first `hold` of them goes to `held`.
      chunk: this rank's chunk, contiguous and 1D.
      held: memory for that, in the dtype that is sent; None if `hold` is 0. A later fetch passes
        the kept memory as `chunk` and as `held`, and gathers over the inner levels only.
      out: 1D, memory for the whole bucket, in the dtype that is sent; None if `held` or `chunk` is
        the whole bucket.
      what: as for `Pending`.
      bring: where the chunk lies elsewhere, what copies it to its part of the first of these two,
        before anything is sent.

    Returns:
      A `Pending` whose result is the whole bucket.

    Communication: as `start_all_gather`.
    """
    outer, inner = route.split(route.hold)
    both = ((outer, held), (inner, out))
    parts = [(route, to) for route, to in both if to is not None and to is not chunk]
    comms = [comm for route, _ in parts for comm in gather_comms(route, chunk)]
    if bring is not None and parts:
        comms.insert(0, bring.comm)

    def steps() -> Steps:
        mine = chunk
        for route, target in parts:
            view = target.view(route.size, target.numel() // route.size)
            if mine is chunk and bring is not None:
                mine = view[route.chunk]
                yield bring.to(mine)
            elif mine.dtype != target.dtype or route.size == 1:
                mine = view[route.chunk].copy_(mine)  # cast before sending
            yield from gather_steps(route, mine, view)
            mine = target
        return mine

    keep = (chunk, *(target for _, target in parts))
    how = {"keep": keep, "device": keep[-1].device, "what": what}
    return reads(Pending(steps(), comms, **how), comms, chunk)


def gather_comms(route: Route, chunk: Tensor) -> list[Comm]:
    """The communicators that `gather_steps` uses, in order."""
    return [level.gather for level in route.levels if moves(chunk)]


def gather_steps(route: Route, chunk: Tensor, out: Tensor) -> Steps:
    """Gather chunks into `out` (p, *chunk.shape), which may hold this rank's chunk already."""
    mine, start = chunk.unsqueeze(0), route.chunk
    if moves(chunk):
        for level, coord in zip(route.levels, route.coords, strict=True):
            count = mine.shape[0]
            start -= coord * count
            run = out.narrow(0, start, level.gather.size * count)
            yield all_gather(level.gather, run.view(level.gather.size, -1), mine.reshape(-1))
            mine = run
    return out


def start_reduce_scatter(
    route: Route,
    full: Tensor,
    buffers: Buffers,
    dtype: torch.dtype | None = None,
    what: What = ("", "hop 1", ""),
    wire: Wire | None = None,
) -> Pending:
    """Start to average over a partition group; each rank keeps its own chunk.

    Args:
      route: its levels, outermost first; the reduction takes the innermost first.
      full: contiguous (p, *chunk shape), in chunk order; overwritten. Its dtype is what is sent.
      buffers: the pool that lends a second buffer, of `spare_numel` elements.
      dtype: of the result; None takes that of `full`.
      what: as for `Pending`.
      wire: what travels on its levels in the place of values; None sends values on all.

    Returns:
      A `Pending` whose result has the shape of one chunk: the mean over the group, times
      `route.grad_factor`.

    Communication: one reduce-scatter per level, (p - 1)/p of the bytes of `full` sent, or of its
      codes. None if p = 1.

    Memory: the second buffer, and the result.
    """
    comms = scatter_comms(route, full)
    # On the stream of the caller, who frees it there.
    out = full.new_empty(full.shape[1:], dtype=dtype) if comms else full[0]
    how = {"direct": _direct(full, out), "wire": wire, "itemsize": full.itemsize}
    needs = spare_numel(route, full.numel(), full.device, **how)
    spare = buffers.take((needs,), full.dtype, full.device) if comms else full

    def steps() -> Steps:
        yield from scatter_steps(route, full, out, spare, wire)
        if comms:
            buffers.give(spare)
        mean, factor = out.to(dtype or full.dtype), route.grad_factor
        return mean if factor == 1.0 else mean * factor

    return Pending(steps(), comms, keep=(full, spare, out), device=full.device, what=what)


def scatter_comms(route: Route, full: Tensor) -> list[Comm]:
    """The communicators that `scatter_steps` uses, in order."""
    return [level.reduce for level in reversed(route.levels) if moves(full)]


def spare_numel(
    route: Route,
    numel: int,
    device: torch.device,
    *,
    direct: bool,
    wire: Wire | None = None,
    itemsize: int = 1,
) -> int:
    """Elements of the second buffer that `scatter_steps` needs.

    Args:
      route: the levels.
      numel: elements of `full`.
      device: where they are.
      direct: whether `out` has the dtype of `full`, and lies beside it, so that the last level can
        write there.
      wire: as for `start_reduce_scatter`.
      itemsize: bytes of an element, with a wire.
    """
    most, coded = 0, wire.levels(route) if wire else 0
    for i, level in enumerate(route.levels):  # the outermost is the last
        comm = level.reduce
        here = numel // prod(level.reduce.size for level in route.levels[i + 1 :])
        if wire and i < coded:
            nbytes = exchange_bytes(wire.codec, here // comm.size, comm.size)
            most = max(most, -(-nbytes // itemsize))
            continue
        whole = exchanges(comm, device) and comm.size != 2  # else one part arrives
        last = direct and i == 0 and not whole
        most = max(most, 0 if last else here if whole else here // comm.size)
    return most


def scatter_steps(
    route: Route, full: Tensor, out: Tensor, spare: Tensor, wire: Wire | None = None
) -> Generator[Collective, None, None]:
    """Average `full` (p, *chunk shape) over a partition group; this rank's chunk goes to `out`.

    Args:
      route: the levels.
      full: contiguous, in chunk order; overwritten.
      out: one chunk, of any float dtype. It is written at the end, so the caller can make views of
        it before. If nothing is sent, it must be `full[0]` already.
      spare: of `spare_numel` elements; overwritten.
      wire: as for `start_reduce_scatter`.
    """
    comms, here, there = scatter_comms(route, full), full.view(-1), spare.view(-1)
    plain = len(comms) - (wire.levels(route) if wire else 0)
    for i, comm in enumerate(comms):
        numel = here.numel() // comm.size
        last = i == len(comms) - 1
        direct = last and _direct(full, out)
        if wire and i >= plain:
            parts = here.view(comm.size, numel)
            mean = out.view(-1) if last else parts[(comm.rank + 1) % comm.size]
            codes = _codes_room(wire, numel, comm, there)
            yield from exchange_codes(comm, wire.codec, parts.__getitem__, codes, mean)
        elif exchanges(comm, here.device):
            # gloo's reduce-scatter sends as much as an all-reduce. Exchanging parts and adding them
            # here sends half of that, and rounds 16-bit values only once.
            mean = out.view(-1) if last else here[:numel]
            received = mean if direct and comm.size == 2 else there
            yield from exchange(comm, here.view(comm.size, numel), received, mean)
        else:
            mean = out.view(-1) if direct else there[:numel]
            yield from average(comm, here.view(comm.size, numel), mean)
            there = here
        here = mean
    if comms and here.data_ptr() != out.data_ptr():
        out.view(-1).copy_(here)


def _codes_room(wire: Wire, numel: int, comm: Comm, spare: Tensor) -> Tensor:
    """Memory for the codes of one level: the second buffer, unless levels before it took that."""
    raw, nbytes = spare.view(torch.uint8), exchange_bytes(wire.codec, numel, comm.size)
    return raw if raw.numel() >= nbytes else raw.new_empty(nbytes)


def _direct(full: Tensor, out: Tensor) -> bool:
    """Whether the last level can write to `out` while it reads from `full`."""
    if out.dtype != full.dtype or _torch.storage_id(out) != _torch.storage_id(full):
        return out.dtype == full.dtype
    first, second = sorted((full, out), key=Tensor.storage_offset)
    return first.storage_offset() + first.numel() <= second.storage_offset()

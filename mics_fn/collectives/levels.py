"""Collectives over one communicator, which are the levels of hierarchical ones.

No other file calls what moves data.

[Note: codes] Codes are sent between ranks and never added. In a gather every rank decodes the same
codes, those of its own chunk too, so that all have the same bits. In a mean each rank decodes what
arrives and adds its own part as it is: a part is rounded once, on its way to another rank. In hop 2
the mean of each part is coded again and gathered, and all replicas decode the same codes. What is
coded begins and ends on blocks, because leaves and chunks of such a bucket do.

Every level of a gather writes in place, and a reduce-scatter takes the same steps in reverse: see
[Note: chunk order] in `groups.topology`.

[Note: weighted means] Both hops are means, so the gradient of a step is that of the mean of the
losses over ranks and micro-steps. Where each loss is itself a mean, over a number of tokens that
differs, that is a mean of means. With the sum of a micro-step over its tokens divided by the mean
number of tokens, it is the sum over all tokens by their number. That divisor is known before the
loss, so it is one small message beside the gathers, and everything behind it, from the dtype on the
wire to the limit of a guard, sees a gradient of the usual size.
"""

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mics_fn import _device, _torch, checks
from mics_fn.collectives.codec import Codec
from mics_fn.collectives.pending import Collective, Pending, Steps, Task, What
from mics_fn.collectives.wire import Wire, mean_factors, mean_of, mean_of_two
from mics_fn.errors import GroupsError
from mics_fn.groups import Buffers, Comm, Groups, Route

SMALL_BYTES = 2**16  # of a result that gloo may allocate twice more


def all_gather(comm: Comm, out: Tensor, chunk: Tensor) -> Collective:
    """One level of a gather: the chunk of the rank at place j goes to row j of `out`.

    On gloo a large one is made of all-to-alls; see `_swap`. Errors call it an all-gather.
    """
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


def _swap(out: Tensor, chunk: Tensor, rank: int, **how: Any) -> Any:
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
    return works[0] if count == 2 else _Works(works)


def exchanges(comm: Comm, device: torch.device) -> bool:
    """Whether a level of a reduce-scatter is an exchange of parts, which are added here."""
    return not _device.is_async(device) or comm.fixed_order


def mean_by_reduce_scatter(
    comm: Comm, parts: Tensor, mean: Tensor
) -> Generator[Collective, None, None]:
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


def _scattered(
    comm: Comm, fn: Callable[..., Any], out: Tensor, full: Tensor, **how: Any
) -> Collective:
    """One level of a reduce-scatter, to be issued: part j of `full` goes to the rank at place j."""
    nbytes = (comm.size - 1) * (full.nbytes // comm.size)
    return Collective(comm, "reduce-scatter", nbytes, partial(fn, out, full, **how))


def mean_by_all_reduce(
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


def send_from(comm: Comm, tensor: Tensor, source_rank: int) -> None:
    """Overwrite `tensor` on all ranks of a communicator with that of the source."""
    if comm.size > 1 and not comm.silent:
        call = partial(dist.broadcast, tensor, src=source_rank)
        nbytes = tensor.nbytes if comm.rank == 0 else 0

        def steps() -> Steps:
            yield Collective(comm, "broadcast", nbytes, call)
            return tensor

        what = ("", f"broadcast from rank {source_rank}", "")
        Pending(steps(), [comm], keep=(tensor,), device=tensor.device, what=what).wait()


# Collectives that send codes in the place of values.


def exchange_bytes(codec: Codec, numel: int, size: int) -> int:
    """Bytes of memory that `exchange_codes` needs for parts of so many elements."""
    return 2 * (size - 1) * codec.nbytes(numel)


def exchange_codes(
    comm: Comm, codec: Codec, part: Callable[[int], Tensor], memory: Tensor, mean: Tensor
) -> Steps:
    """Send codes of part j to the rank at place j, and average what arrives into `mean`.

    Args:
      comm: the communicator.
      codec: encodes parts.
      part: gives a part, which is 1D, by the place of its rank.
      memory: 1D, uint8, of `exchange_bytes`; overwritten.
      mean: 1D, of the size of a part. It may lie in that of this rank, or where any part did that
        goes to another rank.
    """
    others = [place for place in range(comm.size) if place != comm.rank]
    numel, nbytes = mean.numel(), codec.nbytes(mean.numel())
    sent, received = memory[: exchange_bytes(codec, numel, comm.size)].view(2, -1, nbytes)
    with _torch.inside_a_rule():
        for row, place in zip(sent, others, strict=True):
            codec.encode(part(place), out=row)
    sizes = [nbytes] * comm.size
    sizes[comm.rank] = 0
    call = partial(dist.all_to_all_single, received.view(-1), sent.view(-1), sizes, sizes)
    yield Collective(comm, "reduce-scatter", sent.nbytes, call)
    parts = list(received)
    parts.insert(comm.rank, part(comm.rank))  # as it is, and added in the order of ranks
    with _torch.inside_a_rule():
        codec.decode_mean(parts, None, mean)
    return mean


def mean_numel(codec: Codec, numel: int, size: int) -> int:
    """Elements of each part in `coded_mean_steps`: whole blocks, the same number for each rank."""
    return -(-numel // (codec.block * size)) * codec.block


def mean_bytes(codec: Codec, numel: int, size: int) -> int:
    """Bytes of memory that `coded_mean_steps` needs."""
    part = mean_numel(codec, numel, size)
    return part * torch.float32.itemsize + exchange_bytes(codec, part, size)


def coded_mean_steps(
    comms: Sequence[Comm], tensor: Tensor, codec: Codec, memory: Tensor | None = None
) -> Steps:
    """Average a contiguous tensor over some ranks, in place, in two collectives of codes.

    Args:
      comms: the communicators of the two, which have the same ranks in the same order.
      tensor: contiguous.
      codec: encodes parts, and then their means.
      memory: 1D, uint8, of `mean_bytes`; None allocates it.
    """
    (comm, second), flat = comms, tensor.view(-1)
    size = comm.size
    if memory is None:
        nbytes = mean_bytes(codec, flat.numel(), size)
        memory = torch.empty(nbytes, dtype=torch.uint8, device=tensor.device)
    numel = mean_numel(codec, flat.numel(), size)
    first = numel * torch.float32.itemsize
    mean, memory = memory[:first].view(torch.float32), memory[first:]

    def part(place: int) -> Tensor:
        values = flat[place * numel : (place + 1) * numel]
        missing = numel - values.numel()
        return torch.cat([values, values.new_zeros(missing)]) if missing else values

    yield from exchange_codes(comm, codec, part, memory, mean)
    codes = memory[: size * codec.nbytes(numel)].view(size, -1)
    encode_to(codec, mean, codes[comm.rank])
    yield all_gather(second, codes, codes[comm.rank])
    for place, row in enumerate(codes):
        decode_to(codec, row, numel, flat[place * numel : (place + 1) * numel])
    return tensor


def encode_to(codec: Codec, values: Tensor, out: Tensor) -> None:
    """Write the codes of values to `out`, inside of a verb that has a derivative."""
    with _torch.inside_a_rule():
        codec.encode(values, out=out)


def decode_to(codec: Codec, codes: Tensor, numel: int, out: Tensor) -> None:
    """Write the first of `numel` values that codes stand for to `out`; see `encode_to`."""
    with _torch.inside_a_rule():
        if out.numel() == numel:
            codec.decode(codes, numel, out.dtype, out=out)
        elif out.numel():
            out.copy_(codec.decode(codes, numel, out.dtype)[: out.numel()])


# Hierarchical collectives, one bucket at a time: level after level of those in `levels`.


def start_all_gather(
    route: Route,
    chunk: Tensor,
    what: What = ("", "gather", ""),
) -> Pending:
    """Start to gather equal chunks over the levels of a partition group.

    Args:
      route: its levels, outermost first.
      chunk: this rank's chunk, contiguous, of any shape.
      what: as for `Pending`.

    Returns:
      A `Pending` whose result is (p, *chunk.shape), in chunk order.

    Communication: one all-gather per level; with p ranks and M bytes in all, a rank receives
      (p - 1)/p * M. None if p = 1.

    Memory: the result, without a staging copy.
    """
    shape = (route.size, *chunk.shape)
    nothing = route.size == 1 or not chunk.numel()
    out = chunk.expand(shape) if nothing else chunk.new_empty(shape)
    comms = gather_comms(route, chunk)
    how = {"keep": (chunk, out), "device": chunk.device, "what": what, "reads": chunk}
    return Pending(gather_steps(route, chunk, out), comms, **how)


def start_fetch(
    route: Route,
    chunk: Tensor,
    outer_out: Tensor | None,
    out: Tensor | None,
    what: What,
    fetch: Task | None = None,
) -> Pending:
    """Start to gather a bucket, and keep what the outer levels gave; see [Note: placements].

    Args:
      route: the levels; what is gathered over the first `outer_params` goes to `outer_out`.
      chunk: this rank's chunk, contiguous and 1D.
      outer_out: memory for that, in the dtype that is sent; None for 0 levels. A later fetch passes
        the kept memory as `chunk` and as `outer_out`, and gathers over the inner levels only.
      out: 1D, memory for the whole bucket, in the dtype that is sent; None if `outer_out` or
        `chunk` is the whole bucket.
      what: as for `Pending`.
      fetch: where the chunk is placed, what copies it to its part of the first of these two,
        before anything is sent.

    Returns:
      A `Pending` whose result is the whole bucket.

    Communication: as `start_all_gather`.
    """
    outer, inner = route.split(route.outer_params)
    parts, comms, keep = list[tuple[Route, Tensor]](), list[Comm](), [chunk]
    for levels, target in ((outer, outer_out), (inner, out)):
        if target is not None and target is not chunk:
            parts.append((levels, target))
            comms += gather_comms(levels, chunk)
            keep.append(target)
    if fetch is not None and parts:
        comms.insert(0, fetch.comm)

    def steps() -> Steps:
        mine = chunk
        for route, target in parts:
            view = target.view(route.size, target.numel() // route.size)
            if mine is chunk and fetch is not None:
                mine = view[route.chunk]
                yield fetch.to(mine)
            elif mine.dtype != target.dtype or route.size == 1:
                mine = view[route.chunk].copy_(mine)  # cast before sending
            yield from gather_steps(route, mine, view)
            mine = target
        return mine

    how = {"keep": keep, "device": keep[-1].device, "what": what, "reads": chunk}
    return Pending(steps(), comms, **how)


def gather_comms(route: Route, chunk: Tensor) -> tuple[Comm, ...]:
    """The communicators that `gather_steps` uses, in order."""
    return route.gathers if moves(chunk) else ()


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


def scatter_comms(route: Route, full: Tensor) -> tuple[Comm, ...]:
    """The communicators that `scatter_steps` uses, in order."""
    return route.reductions if moves(full) else ()


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
    most, here = 0, numel
    plain = len(route.levels) - (wire.levels(route) if wire else 0)
    for i, comm in enumerate(route.reductions):
        whole = exchanges(comm, device) and comm.size != 2  # else one part arrives
        if wire and i >= plain:
            nbytes = exchange_bytes(wire.codec, here // comm.size, comm.size)
            most = max(most, -(-nbytes // itemsize))
        elif whole:
            most = max(most, here)
        elif not direct or comm is not route.reductions[-1]:
            most = max(most, here // comm.size)
        here //= comm.size
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
            yield from mean_by_reduce_scatter(comm, here.view(comm.size, numel), mean)
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


# Gathers of codes, which each rank encodes once and may send several times.


class SentCodes:
    """What a rank sends of its chunk in the place of values; later gathers send it again.

    Args:
      wire: what travels, and on which levels of the route.
      route: the levels. What is gathered over the first `outer_params` of them is kept: as codes
        if further levels send codes, else as values, which the caller keeps.
      pool: has the memory, which `release` gives back.
      numel: elements of a chunk.
      mine: the codes of this rank's chunk, in memory that belongs to somebody else.
      chunk_to_fetch: a stand-in for the chunk while it is placed: the first gather fetches it,
        fills `mine`. None once `mine` has the codes.

    Memory: the codes of all chunks that are kept.
    """

    def __init__(
        self,
        wire: Wire,
        route: Route,
        pool: Buffers,
        numel: int,
        mine: Tensor,
        chunk_to_fetch: Tensor | None = None,
    ) -> None:
        self.codec, self.count, self.pool = wire.codec, wire.levels(route), pool
        self.numel, self.device, self.mine = numel, mine.device, mine
        self.chunk_to_fetch = chunk_to_fetch
        self._own: list[Tensor] = []  # what it has taken from the pool, but for `outer_out`
        count = route.split(route.outer_params)[0].size
        self.outer_out = self.room(count) if self.count > route.outer_params and count > 1 else None
        self.sent = False  # whether the chunks of the outer levels were gathered

    @classmethod
    def of(cls, wire: Wire, route: Route, chunk: Tensor, pool: Buffers) -> "SentCodes":
        """Those of this rank's chunk, contiguous and 1D, in memory of the pool."""
        made = cls.to_be_made(wire, route, chunk, pool, chunk.device)
        made.encode(chunk)
        return made

    @classmethod
    def to_be_made(
        cls, wire: Wire, route: Route, chunk: Tensor, pool: Buffers, device: torch.device
    ) -> "SentCodes":
        """Those of a chunk that the first gather fetches to a device; a tensor stands for it."""
        mine = pool.take((wire.codec.nbytes(chunk.numel()),), torch.uint8, device)
        made = cls(wire, route, pool, chunk.numel(), mine, chunk)
        made._own.append(mine)
        return made

    def encode(self, chunk: Tensor) -> None:
        """Make the codes, of this rank's chunk on the device."""
        encode_to(self.codec, chunk, self.mine)
        self.chunk_to_fetch = None

    def room(self, count: int) -> Tensor:
        """Memory for the codes of so many chunks, 1D."""
        return self.pool.take((count * self.codec.nbytes(self.numel),), torch.uint8, self.device)

    def release(self) -> None:
        """Give the memory back, once no gather reads it any more."""
        for codes in (*self._own, *([] if self.outer_out is None else [self.outer_out])):
            self.pool.give(codes)


def start_coded_gather(
    route: Route,
    codes: SentCodes,
    outer_out: Tensor | None,
    out: Tensor | None,
    what: What,
    fetch: Task | None = None,
) -> Pending:
    """Start to gather a bucket as codes on the outer levels, and as values on the others.

    Args:
      route: the levels.
      codes: of this rank's chunk.
      outer_out: 1D, memory for the values that meet over the first `outer_params` levels, in the
        dtype that is sent; None if these are kept as codes, or for 0 levels.
      out: 1D, memory for the whole bucket, in the dtype that is sent; None if `outer_out` is that.
      what: as for `Pending`.
      fetch: where the chunk is placed and no codes were made yet, what copies it to memory on
        the device, with zeros as its padding.

    Returns:
      A `Pending` whose result is the whole bucket: what was decoded, this rank's chunk too.

    Communication: as `start_all_gather`, with the bytes of codes on the outer levels. Levels whose
      codes are kept are left out when they are sent again.

    Memory: the codes of the chunks that meet over the coded levels, until they are decoded; before
      that the chunk that `fetch` copies, until it is encoded.
    """
    coded, plain = route.split(codes.count)
    first, later = coded.split(route.outer_params if codes.outer_out is not None else 0)
    kept = codes.outer_out
    gathers = [] if codes.sent or kept is None else [(first, codes.mine, kept)]
    mine = codes.mine if kept is None else kept
    every = codes.room(coded.size) if later.size > 1 else mine
    gathers += [(later, mine, every)] if later.size > 1 else []
    codes.sent = True
    both = [(plain, out)]
    if outer_out is not None:  # the levels that send values, up to `outer_params` and behind them
        before, behind = plain.split(route.outer_params - codes.count)
        both = [(before, outer_out), (behind, out)]
    values = [(levels, target) for levels, target in both if target is not None]
    comms = [comm for levels, source, _ in gathers for comm in gather_comms(levels, source)]
    comms += [comm for levels, target in values for comm in gather_comms(levels, target)]
    keep = [codes.mine, mine, every, *(target for _, target in values)]
    chunk, near = codes.chunk_to_fetch, None
    if fetch is not None and chunk is not None:
        near = codes.pool.take((codes.numel,), chunk.dtype, codes.device)
        comms.insert(0, fetch.comm)
        keep.append(near)

    def steps() -> Steps:
        if fetch is not None and near is not None:
            yield fetch.to(near)
            with _torch.without_torch_func():  # whatever advances this may be inside of it
                codes.encode(near)
                codes.pool.give(near)
        for levels, source, target in gathers:
            yield from gather_steps(levels, source, target.view(levels.size, -1))
        full = every
        for levels, target in values:
            run = target.view(levels.size, -1)[levels.chunk]
            if full is every:
                _decode(codes, every, run)
                if every is not mine:
                    codes.pool.give(every)
            else:
                run.copy_(full)
            yield from gather_steps(levels, run, target.view(levels.size, -1))
            full = target
        return full

    reads = None if near is None else chunk
    return Pending(steps(), comms, keep=keep, device=codes.device, what=what, reads=reads)


def _decode(codes: SentCodes, every: Tensor, out: Tensor) -> None:
    """Decode the codes of some chunks into one run of values."""
    rows = every.view(-1, codes.codec.nbytes(codes.numel))
    for row, values in zip(rows, out.view(len(rows), -1), strict=True):
        decode_to(codes.codec, row, codes.numel, values)


# Means of whole tensors, such as hop 2, and what all ranks get from one of them.


def start_mean(
    comm: Comm,
    tensor: Tensor,
    wire: torch.dtype | Codec | None = None,
    what: What = ("", "mean", ""),
) -> Pending:
    """Start to average a tensor over a communicator, in place.

    Args:
      comm: the communicator.
      tensor: contiguous.
      wire: the dtype that is sent, or a codec; None takes the dtype of `tensor`.
      what: as for `Pending`.

    Communication: one all-reduce, in which each of r ranks sends 2(r - 1)/r of the tensor's bytes
      in `wire`. With a codec an all-to-all and an all-gather of codes, which send 2(r - 1) times
      those of 1/r of the elements, rounded up to a block.
    """
    comms, steps = mean_comms(comm, tensor, wire), mean_steps(comm, tensor, wire)
    return Pending(steps, comms, keep=(tensor,), device=tensor.device, what=what)


def mean_comms(comm: Comm, tensor: Tensor, wire: torch.dtype | Codec | None = None) -> list[Comm]:
    """The communicators that `mean_steps` uses, in order: none, the given one, or two."""
    if comm.size == 1 or not moves(tensor):
        return []
    if isinstance(wire, Codec):  # the next codes are exchanged while these are decoded
        return [comm, comm.second or comm]
    return [comm, comm] if comm.fixed_order else [comm]


def mean_steps(
    comm: Comm,
    tensor: Tensor,
    wire: torch.dtype | Codec | None = None,
    spare: Tensor | None = None,
) -> Steps:
    """Average a contiguous tensor over a communicator, in place; see `start_mean`.

    Args:
      comm, tensor, wire: as there.
      spare: memory for a copy in `wire`, of the shape of `tensor`; for codes 1D, uint8, of
        `mean_bytes`. None allocates it if needed.
    """
    comms = mean_comms(comm, tensor, wire)
    if isinstance(wire, Codec):
        if comms:
            yield from coded_mean_steps(comms, tensor, wire, spare)
    elif len(comms) > 1:
        yield from mean_in_order(comm, tensor, wire or tensor.dtype)
    elif comms:
        yield from mean_by_all_reduce(comm, tensor, wire or tensor.dtype, spare)
    return tensor


def mean_over_ranks(groups: Groups, tensor: Tensor) -> Tensor:
    """Average a small tensor over all ranks, in place: in partition groups, then over replicas."""
    return start_mean_over_ranks(groups, tensor).wait()


def start_mean_over_ranks(groups: Groups, tensor: Tensor, name: str = "") -> Pending:
    """Start `mean_over_ranks`; with a name the ledger has its bytes under that."""
    both, comms = list[Comm](), list[Comm]()
    for comm in (groups.partition, groups.replicas):
        both.append(replace(comm, name=name) if name else comm)
        comms += mean_comms(both[-1], tensor)

    def steps() -> Steps:
        for comm in both:
            yield from mean_steps(comm, tensor)
        return tensor

    what = ("", name or "mean over all ranks", "")
    return Pending(steps(), comms, keep=(tensor,), device=tensor.device, what=what)


def weighted(loss_sum: Tensor, count: Any, groups: Groups) -> Tensor:
    """A loss for the verbs whose mean over ranks and micro-steps is exact for any counts.

    See [Note: weighted means].

    Args:
      loss_sum: 0-dim tensor, the sum of this rank's losses over its tokens (or samples, or whatever
        it counts) in one micro-step.
      count: how many there are: a number, or a tensor on any device, for which the host does not
        wait. With several micro-steps the counts of all of them, as a sequence or a 1D tensor, in
        each call. A rank or a micro-step may have none, if its `loss_sum` is 0 then; if no rank has
        any, the loss is NaN or infinite.
      groups: those that the gradients are averaged over; `groups.without_replicas()` while replicas
        step on their own.

    Returns:
      `loss_sum` by the mean count per rank and micro-step, at least in float32. It has derivatives
      in every way that `loss_sum` has, also inside of torch.func; counts have none.

    Communication: 8 bytes over the partition group and the replication group.

    Example:
      >>> groups = make_groups(1)
      >>> shards = shard({"w": torch.ones(2)}, groups)
      >>> def loss_fn(shards, tokens):
      ...     return weighted((gather(shards, groups)["w"] * tokens).sum(), len(tokens), groups)
      >>> torch.func.grad(loss_fn)(shards, torch.tensor([1.0, 5.0]))["w"].data
      tensor([0.5000, 2.5000])
    """
    fix = "pass what make_groups gave; of a placement, the groups of all ranks"
    if not isinstance(groups, Groups):
        checks.refuse("weighted", "groups", groups, "Groups", fix, GroupsError)
    counts = list(count) if isinstance(count, list | tuple) else [count]
    parts = [torch.as_tensor(x, dtype=torch.float64, device=groups.device) for x in counts]
    mean = _MeanOfCounts.apply(groups, torch.stack([x.detach().mean() for x in parts]).mean())
    return loss_sum / mean.to(torch.promote_types(loss_sum.dtype, torch.float32))  # pyright: ignore


class _MeanOfCounts(torch.autograd.Function):
    """`mean_over_ranks` of what has no derivative, inside of torch.func too."""

    @staticmethod
    def forward(groups: Groups, count: Tensor) -> Tensor:  # pyright: ignore
        return mean_over_ranks(groups, count.contiguous().clone())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple:  # pyright: ignore
        return None, None

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Any:  # pyright: ignore
        return None

    @staticmethod
    def vmap(info: Any, in_dims: tuple, groups: Groups, count: Tensor) -> tuple:  # pyright: ignore
        return _MeanOfCounts.apply(groups, count), in_dims[1]


def broadcast(groups: Groups, tensor: Tensor, source_rank: int) -> None:
    """Overwrite `tensor` on all ranks with that of the source: over replicas, then inside them."""
    place = groups.ranks.index(source_rank) % groups.partition_size
    row = groups.position % groups.partition_size == place
    hops = [(groups.replicas, source_rank)] if row else []
    own = groups.plan.partition_groups[groups.position // groups.partition_size]
    hops.append((groups.partition, groups.ranks[own[place]]))
    for comm, source in hops:
        send_from(comm, tensor, source)

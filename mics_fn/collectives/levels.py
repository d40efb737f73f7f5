"""Gathers, reductions and means over the levels of a partition group, and over replicas.

No other file calls what moves data. A gather crosses nodes first and then stays inside a node; a
reduction takes the same levels in reverse. Every level of a gather writes in place: see [Note:
chunk order] in `groups.topology`.

Collectives of a user's own are as safe as those of this library. Waits for them are bounded, and
Ctrl-C works there. A rank that fails is named. Ranks compare the name and the size of a call before
it moves data. It has its place in the order of its communicator, and runs on its stream.

[Note: weighted means] Both hops are means, so the gradient of a step is that of the mean of the
losses over ranks and micro-steps. Where each loss is itself a mean, over a number of tokens that
differs, that is a mean of means. With the sum of a micro-step over its tokens divided by the mean
number of tokens, it is the sum over all tokens by their number. That divisor is known before the
loss, so it is one small message beside the gathers, and everything behind it, from the dtype on the
wire to the limit of a guard, sees a gradient of the usual size.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mics_fn import _torch, checks
from mics_fn.collectives.pending import Collective, Pending, Steps, Task, What
from mics_fn.errors import CollectiveError, GroupsError, LeafError
from mics_fn.groups import Buffers, Comm, Groups, Route

SENDERS: dict[type, Any] = {}  # what sends codes, by the class of a codec; see `sent_codes`


def moves(tensor: Tensor) -> bool:
    """Whether a tensor has data to send."""
    return bool(tensor.numel()) and not _torch.has_no_data(tensor)


# Gathers: across nodes first, then within a node.


def start_all_gather(route: Route, chunk: Tensor, what: What = ("", "gather", "")) -> Pending:
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
    how = {"keep": (chunk, out), "device": chunk.device, "what": what, "reads": chunk}
    return Pending(gather_steps(route, chunk, out), gather_comms(route, chunk), **how)


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
            yield gather_level(level.gather, run.view(level.gather.size, -1), mine.reshape(-1))
            mine = run
    return out


SMALL_BYTES = 2**16  # of a result that gloo may allocate twice more


def gather_level(comm: Comm, out: Tensor, chunk: Tensor) -> Collective:
    """One level of a gather: the chunk of the rank at place j goes to row j of `out`.

    On gloo a large one is made of all-to-alls; see `_swap`. Errors call it an all-gather.
    """
    if comm.state.on_device or (comm.size > 2 and out.nbytes <= SMALL_BYTES):
        call = partial(_torch.all_gather_single, out.view(-1), chunk)
    else:
        call = partial(_swap, out, chunk, comm.rank)
    return Collective(comm, "all-gather", call, (comm.size - 1) * chunk.nbytes)


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


class _Works:
    """Several calls as one: done when all of them are."""

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def wait(self, *timeout: Any) -> None:
        for work in self._works:
            work.wait(*timeout)


def start_fetch(
    route: Route,
    chunk: Any,
    outer_out: Tensor | None,
    out: Tensor | None,
    what: What,
    fetch: Task | None = None,
) -> Pending:
    """Start to gather a bucket, and keep what the outer levels gave; see [Note: placements].

    Args:
      route: the levels; what is gathered over the first `outer_params` goes to `outer_out`.
      chunk: this rank's chunk, contiguous and 1D, or what is sent in its place: `SentCodes`.
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
    if not isinstance(chunk, Tensor):
        return chunk.start_gather(route, outer_out, out, what, fetch)
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


# Reductions (hop 1): within a node first, then across nodes.


def start_reduce_scatter(
    route: Route,
    full: Tensor,
    buffers: Buffers,
    dtype: torch.dtype | None = None,
    what: What = ("", "hop 1", ""),
    wire: Any = None,
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
    comms, out, spare = scatter_comms(route, full), full[0], full
    if comms:  # on the stream of the caller, who frees it there
        out = full.new_empty(full.shape[1:], dtype=dtype)
        how = {"direct": _direct(full, out), "wire": wire, "itemsize": full.itemsize}
        needs = spare_numel(route, full.numel(), **how)
        spare = buffers.take((needs,), full.dtype, full.device)

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


def scatter_steps(
    route: Route, full: Tensor, out: Tensor, spare: Tensor, wire: Any = None
) -> Iterator[Collective]:
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
    if comms and wire is not None and wire.levels(route):
        yield from SENDERS[type(wire.codec)].scatter_steps(wire, route, full, out, spare)
        return
    for comm in comms:
        parts, last = here.view(comm.size, -1), comm is comms[-1]
        direct = last and _direct(full, out)
        if exchanges(comm):
            mean = out.view(-1) if last else parts[0]
            received = mean if direct and comm.size == 2 else there
            yield from exchange(comm, parts, received, mean)
        else:
            mean = out.view(-1) if direct else there[: parts.shape[1]]
            yield from mean_by_reduce_scatter(comm, parts, mean)
            there = here
        here = mean
    if comms and here.data_ptr() != out.data_ptr():
        out.view(-1).copy_(here)


def exchanges(comm: Comm) -> bool:
    """Whether a level of a reduce-scatter is an exchange of parts, which are added here.

    gloo's reduce-scatter sends as much as an all-reduce. Exchanging parts and adding them here
    sends half of that, and rounds 16-bit values only once.
    """
    return comm.fixed_order or not comm.state.on_device


def exchange(comm: Comm, parts: Tensor, received: Tensor, mean: Tensor) -> Iterator[Collective]:
    """Send part j to the rank at place j, and average what arrives into `mean`.

    Args:
      comm: the communicator.
      parts: one row per rank.
      received: 1D, memory for what arrives: all parts, or one of two. Then it may be `mean`.
      mean: one row; it may share memory with part 0.
    """
    if comm.size != 2:
        received = received[: parts.numel()]
        yield send_parts(comm, received, parts.view(-1))
        mean_of(received.view(parts.shape), mean, comm.fixed_order)
        return
    # Of two parts only one is sent, and one pass over both makes the mean.
    own, received = comm.rank, received[: parts.shape[1]]
    sizes = [0, parts.shape[1]] if own == 0 else [parts.shape[1], 0]
    yield send_parts(comm, received, parts[1 - own], sizes)
    halves = (parts[0], received) if own == 0 else (received, parts[1])
    mean_of_two(*halves, mean)


def send_parts(
    comm: Comm, received: Tensor, sent: Tensor, sizes: list[int] | None = None
) -> Collective:
    """One level of a reduce-scatter as an exchange of parts, of equal sizes or of these."""
    nbytes = sent.nbytes if sizes else (comm.size - 1) * (sent.nbytes // comm.size)
    call = partial(dist.all_to_all_single, received, sent, sizes, sizes)
    return Collective(comm, "reduce-scatter", call, nbytes)


def mean_by_reduce_scatter(comm: Comm, parts: Tensor, mean: Tensor) -> Iterator[Collective]:
    """Part j goes to the rank at place j, and the mean of all to `mean`, by torch's own op."""
    before, after = mean_factors(parts.dtype, comm.size)
    if before != 1.0:  # see `mean_factors`
        parts.mul_(before)
    op = dist.ReduceOp.AVG if before == 1.0 else dist.ReduceOp.SUM
    call = partial(_torch.reduce_scatter_single, mean, parts.view(-1), op=op)
    yield Collective(comm, "reduce-scatter", call, (comm.size - 1) * mean.nbytes)
    if before != 1.0:
        mean.mul_(after)


def spare_numel(
    route: Route, numel: int, *, direct: bool, wire: Any = None, itemsize: int = 1
) -> int:
    """Elements of the second buffer that `scatter_steps` needs.

    Args:
      route: the levels.
      numel: elements of `full`.
      direct: whether `out` has the dtype of `full`, and lies beside it, so that the last level can
        write there.
      wire: as for `start_reduce_scatter`.
      itemsize: bytes of an element, with a wire.
    """
    if wire is not None and wire.levels(route):
        return SENDERS[type(wire.codec)].spare_numel(wire, route, numel, itemsize)
    most, here = 0, numel
    for comm in route.reductions:
        if exchanges(comm) and comm.size != 2:  # else one part arrives
            most = max(most, here)
        elif not direct or comm is not route.reductions[-1]:
            most = max(most, here // comm.size)
        here //= comm.size
    return most


def _direct(full: Tensor, out: Tensor) -> bool:
    """Whether the last level can write to `out` while it reads from `full`."""
    if out.dtype != full.dtype or _torch.storage_id(out) != _torch.storage_id(full):
        return out.dtype == full.dtype
    first, second = sorted((full, out), key=Tensor.storage_offset)
    return first.storage_offset() + first.numel() <= second.storage_offset()


# The arithmetic of means: how parts from several ranks are added and divided.

_BLOCK = 2**16  # elements that are widened at a time, so that wide copies fit in the CPU's caches


def mean_of(parts: Tensor, out: Tensor, in_order: bool = False) -> None:
    """Write the mean of the rows of `parts` to `out`; 16-bit values are summed in float32.

    Args:
      parts: one row per rank.
      out: one row, of any float dtype.
      in_order: add the rows one after the other for every element.
    """
    wide = torch.promote_types(parts.dtype, torch.float32)
    if in_order:  # in `sum(0)` the order of additions depends on an element's position
        total = parts[0].to(wide, copy=True)
        for row in parts[1:]:
            total.add_(row)
        out.copy_(total.div_(len(parts)))
    elif parts.dtype.itemsize == 2 or out.dtype != parts.dtype:
        out.copy_(parts.sum(0, dtype=wide).div_(len(parts)))
    else:
        torch.sum(parts, 0, out=out).div_(len(parts))


def mean_of_two(a: Tensor, b: Tensor, out: Tensor) -> None:
    """Write a + (b - a)/2 to `out`, which may share memory with either; as wide as `mean_of`."""
    if out.dtype == a.dtype and a.dtype.itemsize != 2:
        torch.lerp(a, b, 0.5, out=out)
        return
    wide = torch.promote_types(a.dtype, torch.float32)
    # On the CPU wide copies are made block by block, so that they fit in its caches.
    block = _BLOCK if a.device.type == "cpu" else max(1, a.numel())
    for x, y, mean in zip(a.split(block), b.split(block), out.split(block), strict=True):
        mean.copy_(torch.lerp(x.to(wide), y.to(wide), 0.5))


def mean_factors(dtype: torch.dtype, count: int) -> tuple[float, float]:
    """Factors that make a sum a mean: multiply values by `before`, and their sum by `after`.

    In float16 neither factor is enough alone: the plain sum overflows early, and a value divided by
    `count` may become 0. So `before` is the largest power of two that is at most 1/sqrt(count).
    Sums then stay finite while values are below 65504 / (count * before), which lies between
    65504 / sqrt(count) and twice that. An overflow beyond it is noticed, and a dynamic loss scale
    adapts. A value that becomes 0 is not noticed, but no value of at least 2**-24 / before does.
    Other dtypes have at least the range of float32, and their `before` is 1.

    Args:
      dtype: the dtype in which the values are added.
      count: number of values.

    Returns:
      `(before, after)`; `before * after * count` is 1, exactly if `count` is a power of two.
    """
    # The smallest k with 4**k >= count.
    k = ((count - 1).bit_length() + 1) // 2 if dtype == torch.float16 else 0
    return 2.0**-k, 2.0**k / count


# Means of whole tensors, such as hop 2.


def start_mean(
    comms: Sequence[Comm], tensor: Tensor, wire: Any = None, what: What = ("", "mean", "")
) -> Pending:
    """Start to average a tensor over one communicator after the other, in place.

    Args:
      comms: the communicators.
      tensor: contiguous.
      wire: the dtype that is sent, or a codec; None takes the dtype of `tensor`.
      what: as for `Pending`.

    Communication: one all-reduce, in which each of r ranks sends 2(r - 1)/r of the tensor's bytes
      in `wire`. With a codec an all-to-all and an all-gather of codes, which send 2(r - 1) times
      those of 1/r of the elements, rounded up to a block.
    """
    used = [each for comm in comms for each in mean_comms(comm, tensor, wire)]

    def steps() -> Steps:
        for comm in comms:
            yield from mean_steps(comm, tensor, wire)
        return tensor

    return Pending(steps(), used, keep=(tensor,), device=tensor.device, what=what)


def mean_comms(comm: Comm, tensor: Tensor, wire: Any = None) -> list[Comm]:
    """The communicators that `mean_steps` uses, in order: none, the given one, or two."""
    if comm.size == 1 or not moves(tensor):
        return []
    if type(wire) in SENDERS:
        return SENDERS[type(wire)].mean_comms(comm)
    return [comm, comm] if comm.fixed_order else [comm]


def mean_steps(comm: Comm, tensor: Tensor, wire: Any = None, spare: Tensor | None = None) -> Steps:
    """Average a contiguous tensor over a communicator, in place; see `start_mean`.

    Args:
      comm, tensor, wire: as there.
      spare: memory for a copy in `wire`, of the shape of `tensor`; for codes 1D, uint8, of
        `mean_bytes`. None allocates it if needed.
    """
    if comm.size == 1 or not moves(tensor):
        return tensor
    if type(wire) in SENDERS:
        yield from SENDERS[type(wire)].mean_steps(wire, comm, tensor, spare)
    elif comm.fixed_order:
        yield from mean_in_order(comm, tensor, wire or tensor.dtype)
    else:
        yield from mean_by_all_reduce(comm, tensor, wire or tensor.dtype, spare)
    return tensor


def mean_by_all_reduce(
    comm: Comm, tensor: Tensor, wire: torch.dtype, spare: Tensor | None
) -> Iterator[Collective]:
    """Average a contiguous tensor in place by torch's own op, which sends it in `wire`."""
    before, after = mean_factors(wire, comm.size)
    op = dist.ReduceOp.AVG if before == 1.0 else dist.ReduceOp.SUM
    if wire == tensor.dtype:
        sent = tensor if before == 1.0 else tensor.mul_(before)
    else:
        sent = torch.empty_like(tensor, dtype=wire) if spare is None else spare
        torch.mul(tensor, before, out=sent)
    nbytes = 2 * (comm.size - 1) * sent.nbytes // comm.size
    yield Collective(comm, "all-reduce", partial(dist.all_reduce, sent.view(-1), op=op), nbytes)
    if sent is not tensor:
        tensor.copy_(sent)
    if before != 1.0:
        tensor.mul_(after)


def mean_in_order(comm: Comm, tensor: Tensor, wire: torch.dtype) -> Iterator[Collective]:
    """An all-reduce made of an exchange of parts, local sums in rank order, and an all-gather."""
    numel = tensor.numel()
    parts = tensor.new_zeros((comm.size, -(-numel // comm.size)), dtype=wire)
    parts.view(-1)[:numel].copy_(tensor.view(-1))
    received, mean = torch.empty_like(parts), parts.new_empty(parts.shape[1])
    yield from exchange(comm, parts, received.view(-1), mean)
    yield gather_level(comm, received, mean)
    tensor.view(-1).copy_(received.view(-1)[:numel])


def mean_over_ranks(groups: Groups, tensor: Tensor) -> Tensor:
    """Average a small tensor over all ranks, in place: in partition groups, then over replicas."""
    return start_mean_over_ranks(groups, tensor).wait()


def start_mean_over_ranks(groups: Groups, tensor: Tensor, name: str = "") -> Pending:
    """Start `mean_over_ranks`; with a name of all parts, and the ledger has its bytes under it."""
    comms = groups.axes if name else [groups.partition, groups.replicas]
    comms = [replace(comm, name=name) for comm in comms] if name else comms
    return start_mean(comms, tensor, what=("", name or "mean over all ranks", ""))


# Small tensors, which move outside of the inner loop of training.


def collect(comm: Comm, tensor: Tensor, what: str = "comparison") -> Tensor:
    """A small tensor from each rank, stacked in the communicator's order; no host sync on CUDA."""
    if comm.size == 1:
        return tensor.unsqueeze(0)
    return start_collect([comm], tensor, what).wait().view(comm.size, *tensor.shape)


def start_collect(comms: Sequence[Comm], tensor: Tensor, what: str = "comparison") -> Pending:
    """Start to collect a small tensor over one communicator after the other; the result is flat."""
    comms, flat = [comm for comm in comms if comm.size > 1], tensor.contiguous().view(-1)
    outs, copies = list[Tensor](), 1
    if any(comm.state.rejoining for comm in comms):  # all ranks say the same, as they did before
        comms, copies = [], math.prod(comm.size for comm in comms)
    for comm in comms:
        outs.append(flat.new_empty(comm.size * (outs[-1] if outs else flat).numel()))

    def steps() -> Steps:
        here = flat if copies == 1 else flat.repeat(copies)
        for comm, out in zip(comms, outs, strict=True):
            call = partial(_torch.all_gather_single, out, here)
            yield Collective(comm, "all-gather", call, (comm.size - 1) * here.nbytes)
            here = out
        return here

    how = {"keep": (flat, *outs), "device": flat.device, "what": ("", what, "")}
    return Pending(steps(), comms, **how)


def send_from(comm: Comm, tensor: Tensor, source_rank: int) -> None:
    """Overwrite `tensor` on all ranks of a communicator with that of the source."""
    if comm.size > 1 and not comm.state.rejoining:
        call = partial(dist.broadcast, tensor, src=source_rank)
        nbytes = tensor.nbytes if comm.rank == 0 else 0

        def steps() -> Steps:
            yield Collective(comm, "broadcast", call, nbytes)
            return tensor

        what = ("", f"broadcast from rank {source_rank}", "")
        Pending(steps(), [comm], keep=(tensor,), device=tensor.device, what=what).wait()


# What users call: collectives of their own, and weights of losses.

_ISSUE = "pass functools.partial of a function of torch.distributed, with its tensors"
_FIX = "call it in torch.no_grad() and outside of torch.func; gather and sync_replicas have one"


def all_gather(comm: Comm, tensor: Tensor, *, name: str = "own all-gather") -> Tensor:
    """The tensor of each rank of a communicator, stacked in its order.

    Args:
      comm: one of `Groups.communicators`; all of its ranks make the call.
      tensor: of any dtype, with the same shape and dtype on all ranks.
      name: for errors; ranks compare it.

    Returns:
      A new tensor (comm.size, *shape). With one rank it is a copy.

    Communication: one all-gather: this rank sends its tensor to the size - 1 others.

    Memory: the result.

    Raises:
      LeafError: `tensor` is not a tensor with data, or a derivative of the result is needed, which
        does not exist.
      GroupsError: the groups of `comm` are closed or have failed.
      DesyncError: ranks make different calls, or give tensors of different sizes.
      CollectiveError, PeerFailed: as every collective.

    Example:
      >>> groups = make_groups(1)
      >>> collectives.all_gather(groups.communicators["replicas"], torch.ones(2))
      tensor([[1., 1.]])
    """
    _check("all_gather", comm, [tensor])
    flat = tensor.detach().contiguous().view(-1)
    if comm.size == 1 or not flat.numel():
        return flat.expand(comm.size, -1).clone().view(comm.size, *tensor.shape)
    raw = flat.view(torch.uint8)
    out = raw.new_empty(comm.size, raw.numel())

    def steps() -> Steps:
        yield gather_level(comm, out, raw)
        return out

    what = "", name, str(tensor.dtype)
    Pending(steps(), [comm], keep=(raw, out), device=raw.device, what=what).wait()
    return out.view(-1).view(tensor.dtype).view(comm.size, *tensor.shape)


def start(
    comm: Comm, issue: Callable[..., Any], tensors: Sequence[Tensor], *, name: str, sent_bytes: int
) -> Pending:
    """Start a collective of one's own, and return at once; `wait()` gives the last of `tensors`.

    Args:
      comm: one of `Groups.communicators`, with several ranks, which all make the call.
      issue: called as `issue(group=, async_op=)`, maybe later; it gives what functions of
        torch.distributed give. `functools.partial(dist.all_reduce, x)` is one.
      tensors: all that it reads or writes, which are kept until then. The first one has the same
        size on all ranks, which compare it.
      name: for errors; ranks compare it.
      sent_bytes: what this rank sends, for the ledger `Groups.traffic`.

    Returns:
      A `Pending`. All ranks wait for theirs in the same order.

    Communication: what `issue` sends.

    Raises:
      LeafError: `tensors` are not tensors with data, or a derivative of the result is needed, which
        does not exist.
      GroupsError: `comm` has one rank, or its groups are closed.
      CollectiveError: `issue` gave nothing to wait for; `wait` raises it.
      DesyncError, CollectiveError, PeerFailed: as every collective.

    Example:
      >>> import functools, torch.distributed as dist
      >>> groups, x = make_groups(1), torch.ones(2)
      >>> for comm in groups.communicators.values():
      ...     if comm.size > 1:
      ...         sum_of = functools.partial(dist.all_reduce, x)
      ...         collectives.start(comm, sum_of, [x], name="sum", sent_bytes=x.nbytes).wait()
    """
    checks.instance("start", "issue", issue, Callable, "a function that starts it", _ISSUE)
    tensors = list(tensors)
    _check("start", comm, tensors)
    comm.process_group()  # raises where there is none

    def call(**how: Any) -> Any:
        work = issue(**how)
        if how["async_op"] and not isinstance(work, dist.Work):
            text = f"start: {name!r} gave {type(work).__name__}, and nothing to wait for"
            fix = "return what a function of torch.distributed gives for async_op=True"
            raise CollectiveError(text, fix=fix)
        return work

    def steps() -> Steps:
        yield Collective(comm, name, call, sent_bytes)
        return tensors[-1]

    device, what = tensors[0].device, ("", name, "")
    return Pending(steps(), [comm], keep=tensors, device=device, what=what)


def _check(verb: str, comm: Comm, tensors: Sequence[Any]) -> None:
    comm.check_open()
    for i, x in enumerate(tensors):
        if not isinstance(x, Tensor) or x.is_meta:
            got = "on meta, without data" if isinstance(x, Tensor) else type(x).__name__
            text = f"{verb}: tensor {i} is {got}"
            raise LeafError(text, fix="pass tensors of the device of the groups")
    checks.refuse_derivative(verb, tensors, _FIX)


# Weights of losses.


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
    def jvp(ctx: Any, *_: Any) -> Any:  # pyright: ignore
        return None

    @staticmethod
    def vmap(info: Any, in_dims: tuple, groups: Groups, count: Tensor) -> tuple:  # pyright: ignore
        return _MeanOfCounts.apply(groups, count), in_dims[1]

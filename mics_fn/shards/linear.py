"""The differentiable linear maps under every verb: gather, reduce-scatter, mean over replicas.

[Note: adjoint] A gathered value is *full*: every rank has its own copy and its own cotangent, and
the true gradient is the mean of those over ranks. A shard is *one value held in parts*: its
cotangent is its part of the true gradient. With these two meanings the VJP of a gather is a
reduce-scatter with mean (hop 1), the VJP of that is a plain gather, and hop 2 is its own VJP. So
second and higher orders come out right, and so does forward over reverse. Nothing here is left for
torch to differentiate on its own: a raw collective under `torch.func` silently gives zeros.

[Note: one node] All buckets of a tree go through one autograd node. If any of its outputs is used,
its backward reduces every bucket, those without a gradient as zeros. So a parameter that only some
ranks use cannot make ranks differ in what they communicate.

[Note: rows of ranks] A map between ranks adds up row k of all ranks. That is right if ranks batch
samples, whole models or directions. But `jacfwd`, `hessian`, and `jacrev` of a function that gives
shards batch a basis of this rank's own pieces: row k is a different direction on each rank, and the
result would be the derivative in the direction of their sum. The missing rows cannot be added from
inside `vmap`, so this raises an error. It is recognised by its values, at the first map that
receives tangents or cotangents in parts: on every rank each row has at most one nonzero element, no
two rows have the same one, and several ranks have an element in the same row. A basis that ranks
share, each vector of which was cut by `shard`, has the element of each row on one rank only, so it
passes the check.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mics_fn import _torch, collectives
from mics_fn.errors import LeafError
from mics_fn.groups import Buffers, Comm, Hierarchy
from mics_fn.shards import pack
from mics_fn.shards.bucket import Bucket
from mics_fn.shards.leaf import LOCAL_BASIS, SHARED_BASIS, refuse_tracing
from mics_fn.shards.opened import BucketUse

# Batches under `vmap`: row k must be the same direction on all ranks.


def in_front(info: Any, in_dims: Sequence[int | None], data: Sequence[Any]) -> list[Any]:
    """Move the batch dim of each value to the front, in the vmap rule of an autograd function."""
    found = []
    for value, dim in zip(data, in_dims, strict=True):
        if value is not None and dim is None:
            value = value.expand(info.batch_size, *value.shape)
        elif value is not None:
            value = value.movedim(dim, 0)
        found.append(value)
    return found


def refuse_local_basis(levels: int, dealt: Sequence[tuple[Any, Sequence[Any]]]) -> None:
    """Raise LeafError on every rank if the rows of a batch are a basis of each rank's own pieces.

    See [Note: rows of ranks].

    Args:
      levels: how many `vmap` enclose a tangent or cotangent in parts.
      dealt: each use of a bucket with its values, which are plain tensors, one per member.

    Communication: none without a batch. Else 8 bytes and one per row, in each partition group; the
      host waits for both.
    """
    met: dict[Comm, list[Tensor]] = {}
    for use, values in dealt:
        given = [v for v in values if v is not None and v.ndim > 1 and not _torch.has_no_data(v)]
        if given and use.home.partition.size > 1:
            met.setdefault(use.home.partition, []).extend(given)
    for comm, values in met.items():
        for dim in range(min(levels, values[0].ndim - 1)):
            own = _own_rows(values, dim)
            count = torch.tensor([len(own)], device=own.device)
            counts = collectives.levels.collect(comm, count, "number of rows").flatten().tolist()
            comm.check_open()  # else these may be no values of any rank
            if len(set(counts)) == 1:
                found = collectives.levels.collect(comm, own, "rows of a batch")
                if not bool((found < 2).all()) or not bool((found.sum(0) > 1).any()):
                    continue
            text = "torch.func: row k of a batch under vmap is another direction on each rank"
            raise LeafError(text, [LOCAL_BASIS], SHARED_BASIS)


def _own_rows(values: Sequence[Tensor], dim: int) -> Tensor:
    """For each row along a dim of the batch 1 if it has a nonzero element, else 0.

    All are 2 if they do not look like a basis: a row has two elements, or two rows the same one.
    """
    nonzero = [value.movedim(dim, 0).ne(0) for value in values]
    table = torch.cat([x.flatten(1, -2).any(1) if x.ndim > 2 else x for x in nonzero], 1)
    is_basis = (table.sum(0) <= 1).all() & (table.sum(1) <= 1).all()
    return torch.where(is_basis, table.any(1).to(torch.uint8), 2)


# The linear maps between ranks, on plain tensors: one value per member of each use.

# Waits for what was started of one bucket, and gives one value per member.
Finish = Callable[[], list[Tensor]]
Runner = Callable[[Sequence[Any]], list[Tensor]]  # of one value per member of each use


def _gather(use: BucketUse, values: Sequence[Tensor | None], like: dict) -> Finish:
    """Start the gather of one bucket, which is cast before it is sent.

    Codes are kept for no later gather. A batch is sent as values, and so is nothing, as on meta.
    """
    bucket, number, slots, row = use.bucket, use.route.chunk, use.by_slot(values), None
    wire, what = None if like["batch"] else use.gather_wire, _what(use, "gather", like)
    chunk: Any = None
    if wire is not None:
        row = pack.kept_row(bucket, number, slots)
    if row is None:
        dtype = bucket.compute if wire is None else bucket.dtype
        chunk = pack.pack_chunk(bucket, number, slots, dtype=dtype, **like)
    if wire is None or not (row is not None or collectives.levels.moves(chunk)):
        pending = collectives.levels.start_all_gather(use.route, chunk.to(bucket.compute), what)
    else:
        chunk = chunk if row is not None else pack.zero_padding(bucket, number, chunk)
        lone = use.route.split(0)[1]  # without levels that keep what they gather
        how = {"chunk": chunk, "row": row, "device": like["device"]}
        codes = collectives.SentCodes(wire, lone, Buffers(), bucket.chunk, **how)
        out = torch.empty(bucket.numel, dtype=bucket.compute, device=like["device"])
        pending = collectives.levels.start_fetch(lone, codes, None, out, what)

    def finish() -> list[Tensor]:
        full = pending.wait()
        if full.ndim > 2:  # batched: chunks must be adjacent before the batch can come first
            full = full.movedim(0, -2).contiguous()
        full = full if full.ndim == 1 else full.flatten(-2)
        return use.by_member(pack.split_full(bucket, full))

    return finish


def _what(use: BucketUse, hop: str, like: dict) -> tuple:
    """What ranks compare before they move data: of a batch its shape, of a part what it lacks."""
    batch = tuple(like["batch"])
    verb = use.named(use.verb)
    return (f"{verb} of a batch {batch}" if batch else verb, hop, use.bucket)


def _scatter(use: BucketUse, leaves: Sequence[Tensor | None], like: dict) -> Finish:
    """Start hop 1 of one bucket: a reduce-scatter with mean."""
    bucket, buffers = use.bucket, use.hierarchy.pools.reducing
    given = {"dtype": bucket.reduce, "buffers": buffers, **like}
    full = pack.pack_full(bucket, use.by_slot(leaves), **given)
    pack.observe(bucket, full)
    parts = full.unflatten(-1, (bucket.parts, -1)).movedim(-2, 0).contiguous()
    what, wire = _what(use, "hop 1", like), bucket.hop1 if parts.ndim == 2 else None
    pending = collectives.levels.start_reduce_scatter(
        use.route, parts, buffers, bucket.dtype, what, wire
    )

    def finish() -> list[Tensor]:
        chunk = pending.wait()
        if use.crosses_ranks:  # no transfer reads it any more, and the chunk is no view of it
            buffers.give(full)
        return _pieces(use, chunk)

    return finish


def _mean(use: BucketUse, values: Sequence[Tensor | None], like: dict) -> Finish:
    """Start hop 2 of one bucket."""
    bucket, pieces, number = use.bucket, use.by_slot(values), use.route.chunk
    chunk = pack.whole_chunk(bucket, number, pieces)
    if chunk is None:
        chunk = pack.pack_chunk(bucket, number, pieces, **like)
    else:
        chunk = chunk.clone()
    if bucket.parts == 1:  # there was no hop 1
        pack.observe(bucket, chunk)
    wire = bucket.hop2_format
    if isinstance(wire, collectives.Codec):
        if chunk.ndim == 1:
            chunk = pack.zero_padding(bucket, number, chunk)
        else:
            wire = bucket.uncoded.hop2_format
    what, replicas = _what(use, "hop 2", like), [use.home.replicas]
    pending = collectives.levels.start_mean(replicas, chunk, wire, what)
    return lambda: _pieces(use, pending.wait())


def _pieces(use: BucketUse, chunk: Tensor) -> list[Tensor]:
    return use.by_member(pack.split_chunk(use.bucket, use.route.chunk, chunk))


def deal(uses: Sequence[BucketUse], data: Sequence[Any]) -> list[tuple[BucketUse, Sequence[Any]]]:
    """Split a flat list of values into those of each use."""
    dealt, start = [], 0
    for use in uses:
        stop = start + len(use.members)
        dealt.append((use, data[start:stop]))
        start = stop
    return dealt


def _like(uses: Sequence[BucketUse], data: Sequence[Tensor | None], *, full: bool) -> dict:
    """Batch shape and device of the given values, as of the zeros that replace missing ones."""
    for use, values in deal(uses, data):
        for slot, value in enumerate(use.by_slot(values)):
            if value is not None:
                own = len(use.bucket.shapes[slot]) if full else 1
                device = use.hierarchy.device if use.placed else value.device
                return {"batch": value.shape[: value.ndim - own], "device": device}
    return {"batch": (), "device": uses[0].hierarchy.device} if uses else {}


def _own(use: BucketUse, values: Sequence[Any], like: dict) -> Finish:
    """The values themselves; nothing is sent."""
    return lambda: [x.view_as(x) for x in values]


def _times_parts(use: BucketUse, values: Sequence[Any], like: dict) -> Finish:
    return lambda: [x * use.bucket.parts for x in values]


_MAPS: dict[str, Callable[..., Finish]] = {
    **{"gather": _gather, "scatter": _scatter, "mean": _mean},
    **{"own": _own, "part": _own, "times parts": _times_parts},
}
_SENT = ("gather", "scatter", "mean")
# See [Note: adjoint]. "own" gives parts as they are, so that `refuse_local_basis` sees them. "part"
# takes a full value as this rank's part of a value: of x = (1, 2, 3, 4) on 2 ranks the
# parts are (1, 2) and (3, 4). Cotangents of full values are averaged later, so its transpose
# multiplies by the number of parts.
_TRANSPOSED = {
    **{"gather": "scatter", "scatter": "gather", "mean": "mean", "own": "own"},
    **{"part": "times parts", "times parts": "part"},
}


class _Linear(torch.autograd.Function):
    """One of the maps, differentiable in both modes and under vmap. See [Note: adjoint]."""

    @staticmethod
    def forward(  # pyright: ignore
        name: str, levels: int | None, uses: Sequence[BucketUse], by: Runner | None, *data: Any
    ) -> tuple[Tensor, ...]:
        if name in _SENT:
            refuse_tracing()
        if levels and name in ("gather", "own"):  # of which tangents are in parts
            refuse_local_basis(levels, deal(uses, data))
        return tuple(run(name, uses, data) if by is None else by(data))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        ctx.name, _, ctx.uses = inputs[:3]
        # In trees with thousands of leaves Python's search for garbage takes a third of the time,
        # and counts objects: nothing is kept for a leaf but its device, which is none.
        ctx.devices = [None if value is None else value.device for value in inputs[4:]]
        # What is sent is packed with zeros for missing (co)tangents, without tensors of zeros.
        ctx.set_materialize_grads(ctx.name not in _SENT)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple:  # pyright: ignore
        # The transpose of a gather is hop 1 of gradients. Further ones have no codes.
        uses = ctx.uses if ctx.name == "gather" else [use.uncoded for use in ctx.uses]
        found = _Linear.apply(_TRANSPOSED[ctx.name], 0, uses, None, *cotangents)
        pairs = zip(found, ctx.devices, strict=True)
        return (None, None, None, None, *(None if to is None else g.to(to) for g, to in pairs))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        uses = [use.uncoded for use in ctx.uses]
        return _Linear.apply(ctx.name, 0, uses, None, *tangents[4:])

    @staticmethod
    def vmap(  # pyright: ignore
        info: Any, in_dims: tuple, name: str, levels: int | None, uses: Any, by: Any, *data: Any
    ) -> tuple:
        levels = None if levels is None else levels + 1
        found = _Linear.apply(name, levels, uses, by, *in_front(info, in_dims[4:], data))
        return found, (0,) * len(found)


def run(name: str, uses: Sequence[BucketUse], data: Sequence[Any]) -> list[Tensor]:
    """Apply a map to plain tensors, one value per member of each use."""
    like = _like(uses, data, full=name == "scatter")
    most = 2 if name == "scatter" else len(uses)  # buckets in flight, which bounds the memory
    under_way, out = deque[Finish](), list[Tensor]()
    for use, values in deal(uses, data):
        if len(under_way) == most:
            out += under_way.popleft()()
        under_way.append(_MAPS[name](use, values, like))
    while under_way:
        out += under_way.popleft()()
    return out


def linear_map(
    name: str,
    uses: Sequence[BucketUse],
    *data: Tensor | None,
    derived: bool = False,
    by: Runner | None = None,
) -> list[Tensor]:
    """Apply a map to one value per member of each use.

    Args:
      name, uses: the map, and the buckets.
      data: one value per member of each use.
      derived: whether they are (co)tangents.
      by: does on plain tensors what the map does; its derivatives are those of the map.
    """
    return list(_Linear.apply(name, 0 if derived else None, uses, by, *data))


def as_part(value: Any, parts: int) -> Any:
    """A full value as a factor for pieces: its derivative is the sum over all parts."""
    live = isinstance(value, Tensor) and value.is_floating_point()
    if parts == 1 or not live or not collectives.needs_derivative([value]):
        return value
    bucket = Bucket(value.dtype, index=0, parts=parts, shapes=((1,),), offsets=(0,), numel=parts)
    use = BucketUse(bucket, Hierarchy.of_one(value.device), (0,))  # nothing is sent
    (own,) = linear_map("part", [use], value.reshape(1))
    return own.reshape(value.shape)


def apply(name: str, uses: Sequence[BucketUse], values: Sequence[Any]) -> list[Tensor]:
    """Apply a map to a tree's values, one per leaf; gives one result per member of each use."""
    data: list[Any] = []
    for use in uses:
        data.extend(map(values.__getitem__, use.members))
    return list(_Linear.apply(name, None, uses, None, *data)) if uses else []


def put(out: list[Any], uses: Sequence[BucketUse], found: Sequence[Any]) -> None:
    """Write one value per member of each use into a list with one entry per leaf of the tree."""
    for use, values in deal(uses, found):
        for i, value in zip(use.members, values, strict=True):
            out[i] = value

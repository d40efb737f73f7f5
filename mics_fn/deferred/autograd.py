"""The autograd side of deferred parameters: made in forward, their gradients reduced in backward.

[Note: join and fetch] The pieces of all buckets pass through one `_Join` node (unless a `GradSum`
takes the gradients), and then through one `_Fetch` node for each bucket, whose outputs are the
deferred parameters. In backward each `_Fetch` runs as soon as the gradients of its bucket are
complete, because its sequence number is the highest in the graph. It starts hop 1, and passes on
pieces that have no values yet. `_Join` runs after all of them: it reduces the buckets that got no
gradient, waits, and passes the pieces on. So nothing downstream ever sees a gradient without
values. `_Start` and `_Wait` are these two halves as differentiable maps, so that second derivatives
are those of the reduce-scatter; see [Note: adjoint] in `shards.linear`.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from mics_fn import _torch, _torch_tensors
from mics_fn.deferred.gathered import Geometry
from mics_fn.deferred.live import LiveBuckets
from mics_fn.deferred.reduction import Reduction
from mics_fn.deferred.tensor import Deferred
from mics_fn.errors import LeafError, message
from mics_fn.shards import (
    Bucket,
    BucketUse,
    brought,
    deal,
    in_front,
    is_elsewhere,
    linear_map,
    refuse_tracing,
    with_zeros,
)

_FIRST = 2**62  # sequence numbers of ordinary nodes count up from 0


def _refuse_batch(info: Any, in_dims: tuple, *inputs: Any) -> Any:
    """The vmap rule of nodes that have none."""
    text = "defer: shards are batched by vmap, and a schedule fetches one model at a time"
    raise LeafError(message(text, fix="use gather under vmap over shards"))


class _Join(torch.autograd.Function):
    """The identity on all pieces; its backward ends hop 1. See [Note: join and fetch]."""

    @staticmethod
    def forward(live: LiveBuckets, trained: Sequence[int], *pieces: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore
        live.load(trained, pieces)  # here they are plain tensors, even inside torch.func
        uses = (live.uses[i] for i in trained for _ in live.uses[i].members)
        return tuple(map(_standing_for, uses, pieces))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        ctx.live, ctx.trained = inputs[:2]
        ctx.like = [(x.shape, x.dtype, x.device) for x in inputs[2:]]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple:  # pyright: ignore
        live: LiveBuckets = ctx.live
        live.run.end_pass(last=None)
        reduction, live.reduction = live.begin_pass(), None
        uses = [live.uses[i] for i in ctx.trained]
        dealt = dict(zip(ctx.trained, (list(g) for _, g in deal(uses, grads)), strict=True))
        for i in reduction.missing():
            if all(grad is None for grad in dealt[i]):
                dealt[i] = list(_Start.apply(reduction, i, *dealt[i]))
        reduction.end_pass()
        found = _Wait.apply(reduction, *(g for i in ctx.trained for g in dealt[i]))
        # A gradient lies where its piece does.
        return (None, None, *(g.to(to) for g, (_, _, to) in zip(found, ctx.like, strict=True)))

    @staticmethod
    def jvp(ctx: Any, _cache: None, _trained: None, *tangents: Tensor | None) -> Any:  # pyright: ignore
        uses = [ctx.live.uses[i] for i in ctx.trained]
        homes = [use.home for use in uses for _ in use.members]
        seen = with_zeros(_seen_together(uses, tangents), ctx.like)
        return tuple(_here(t, home.device) for t, home in zip(seen, homes, strict=True))

    vmap = staticmethod(_refuse_batch)


def _here(tangent: Tensor, device: torch.device) -> Tensor:
    """A tangent as an output of its own, on the device."""
    moved = brought(tangent, device)
    return tangent.view_as(tangent) if moved is tangent else moved


def _standing_for(use: BucketUse, piece: Tensor) -> Tensor:
    """A piece behind `_Join`, where only its shape counts; of one elsewhere nothing is brought."""
    if not is_elsewhere(piece, use.home.device):
        return piece.view_as(piece)
    how: Any = {"dtype": piece.dtype, "device": use.home.device}
    if _torch.inside_forward_ad():  # a tangent needs the same layout, and memory
        return torch.empty(piece.shape, **how)
    return torch.empty((), **how).expand(piece.shape)


class _Fetch(torch.autograd.Function):
    """One bucket: its pieces become deferred parameters. See [Note: join and fetch]."""

    @staticmethod
    def forward(live: LiveBuckets, index: int, *pieces: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore
        return tuple(parameters(live, index))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        ctx.live, ctx.index = inputs[:2]
        ctx.set_materialize_grads(False)
        _torch_tensors.set_order(ctx, _FIRST)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple:  # pyright: ignore
        live: LiveBuckets = ctx.live
        live.run.complete(ctx.index)
        if live.into is not None:
            live.into.add(ctx.index, grads)
            return (None, None, *(None for _ in grads))
        return (None, None, *_Start.apply(live.begin_pass(), ctx.index, *grads))

    @staticmethod
    def jvp(ctx: Any, _cache: None, _index: None, *tangents: Tensor | None) -> Any:  # pyright: ignore
        # Tangents are rare and used once, so they are gathered now. Views of a dual tensor need
        # both of its parts in the same layout, so each tangent gets memory of its own.
        found = linear_map("gather", [ctx.live.uses[ctx.index].uncoded], *tangents)
        return tuple(tangent.clone() for tangent in found)

    vmap = staticmethod(_refuse_batch)


class _Start(torch.autograd.Function):
    """Starts hop 1 of one bucket: full gradients become pieces that have no values yet."""

    @staticmethod
    def forward(reduction: Reduction, index: int, *grads: Tensor | None) -> tuple[Tensor, ...]:  # pyright: ignore
        return tuple(reduction.add(index, grads))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        ctx.use = inputs[0].uses[inputs[1]]
        ctx.given = [value is not None for value in inputs[2:]]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple:  # pyright: ignore
        found = linear_map("gather", [ctx.use.uncoded], *cotangents)
        kept = (g if given else None for g, given in zip(found, ctx.given, strict=True))
        return (None, None, *kept)

    @staticmethod
    def jvp(ctx: Any, _reduction: None, _index: None, *tangents: Tensor | None) -> Any:  # pyright: ignore
        return tuple(linear_map("scatter", [ctx.use.uncoded], *tangents))

    @staticmethod
    def vmap(info: Any, in_dims: tuple, reduction: Reduction, index: int, *grads: Any) -> tuple:  # pyright: ignore
        reduction.skip(index)
        found = linear_map("scatter", [reduction.uses[index]], *in_front(info, in_dims[2:], grads))
        return tuple(found), (0,) * len(found)


class _Wait(torch.autograd.Function):
    """The identity on pieces, which waits for all reductions of the pass."""

    @staticmethod
    def forward(reduction: Reduction, *pieces: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore
        reduction.wait()
        return tuple(piece.view_as(piece) for piece in pieces)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        ctx.uses = [use for use in inputs[0].uses if use.bucket.trainable]
        ctx.like = [(x.shape, x.dtype, x.device) for x in inputs[1:]]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple:  # pyright: ignore
        return (None, *_seen_together(ctx.uses, cotangents))

    @staticmethod
    def jvp(ctx: Any, _reduction: None, *tangents: Tensor | None) -> Any:  # pyright: ignore
        return tuple(t.view_as(t) for t in with_zeros(tangents, ctx.like))

    @staticmethod
    def vmap(info: Any, in_dims: tuple, reduction: Reduction, *pieces: Any) -> tuple:  # pyright: ignore
        return _Wait.apply(reduction, *pieces), in_dims[1:]


def _seen_together(uses: Sequence[BucketUse], data: Sequence[Tensor | None]) -> list[Tensor | None]:
    """(Co)tangents in parts, unchanged, after `check_rows` has seen all of them together.

    See [Note: rows of ranks] in `shards.rows`.
    """
    if all(use.route.size == 1 for use in uses):
        return list(data)
    given = [
        replace(use, index=tuple(use.by_slot([None if v is None else 0 for v in values])))
        for use, values in deal(uses, data)
    ]
    found = iter(linear_map("own", given, *(v for v in data if v is not None), derived=True))
    return [None if v is None else next(found) for v in data]


class _QuickJoin(torch.autograd.Function):
    """`_Join` without torch.func's argument binding, which takes most of the time of the call."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:  # pyright: ignore
        _Join.setup_context(ctx, inputs, None)
        return _Join.forward(*inputs)

    backward, jvp = _Join.backward, _Join.jvp


class _QuickFetch(torch.autograd.Function):
    """`_Fetch` without torch.func's argument binding, for plain autograd."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:  # pyright: ignore
        _Fetch.setup_context(ctx, inputs, None)
        return _Fetch.forward(*inputs)

    backward, jvp = _Fetch.backward, _Fetch.jvp


def parameters(live: LiveBuckets, index: int) -> Sequence[Tensor]:
    """The leaves of a bucket, deferred if they need a fetch, one per member; none is started."""
    plain = live.plain(index)
    if plain is not None:
        return plain
    use, gathered = live.uses[index], live.buckets[index]
    like = (use.bucket.compute, live.device(index), None)
    return [
        Deferred(live, gathered, geometry, leaf, like)
        for geometry, leaf in use.by_member(_leaves(use.bucket))
    ]


@lru_cache(maxsize=4096)
def _leaves(bucket: Bucket) -> list[tuple[Geometry, tuple[int, int]]]:
    """The geometry of each leaf of a bucket, and where in the bucket it lies."""
    places = zip(bucket.shapes, bucket.offsets, bucket.numels, strict=True)
    return [((shape, _dense_strides(shape), 0), (offset, numel)) for shape, offset, numel in places]


def _dense_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))


def fetch_all(live: LiveBuckets, data: Sequence[Any]) -> list[Any]:
    """Deferred parameters for all buckets, differentiable if a bucket is trained.

    Args:
      live: a new one, whose chunks are loaded here.
      data: the data of each leaf of the tree.

    Returns:
      One deferred tensor per member of each bucket, in the order of buckets.

    Raises:
      LeafError: torch is recording ops in order to repeat them later.
    """
    refuse_tracing()
    uses: Sequence[BucketUse] = live.uses
    trained = [i for i, use in enumerate(uses) if use.bucket.trainable]
    frozen = [i for i, use in enumerate(uses) if not use.bucket.trainable]
    with _torch.without_torch_func():  # inside it the chunks would have no memory to send
        live.load(frozen, [data[i] for index in frozen for i in uses[index].members])
    pieces = [data[i] for index in trained for i in uses[index].members]
    inside = _torch.inside_torch_func()
    join, fetch = (_Join, _Fetch) if inside else (_QuickJoin, _QuickFetch)
    if live.into is not None:  # it takes the gradients, so there are none to join
        with torch.no_grad():
            live.load(trained, pieces)
    elif pieces:
        pieces = join.apply(live, trained, *pieces)
    joined = deal([uses[i] for i in trained], pieces)
    found: dict[int, Sequence[Any]] = {index: parameters(live, index) for index in frozen}
    for index, (_, values) in zip(trained, joined, strict=True):
        found[index] = fetch.apply(live, index, *values)
    return [value for index in range(len(uses)) for value in found[index]]

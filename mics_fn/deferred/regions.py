"""Regions of `torch.compile`, which are called with deferred parameters.

[Note: regions] A region is one use of its buckets. At its edge deferred parameters become views of
their live buckets, so the compiler sees plain tensors, and equal blocks share one graph. What a
region saves for backward and what lies in a bucket is kept as a place in it, not as a tensor:
before its backward reads that, the buckets are made live again, in one use. So schedules, limits
and hops are those of an eager block. Under `torch.func`, which forbids the hooks that do this, and
in which `torch.compile` compiles nothing, a region runs as it is.

Where a rank holds a bucket in full, its parameters are plain tensors that are copied when something
writes to them; a compiled kernel asks for their address, for which they would be copied, too. So a
region gets copies in its first call, in which a write reaches no shard; in later ones it gets views
of the shards themselves, and their versions tell whether another graph wrote to them.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any, cast
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from mics_fn import _torch, tree
from mics_fn.deferred.live import OPENED, Deferred, LiveBucket
from mics_fn.errors import LeafError
from mics_fn.groups import hooks


class _Open(torch.autograd.Function):
    """Views of live buckets in the place of parameters; gradients go on as they are."""

    @staticmethod
    def forward(ctx: Any, views: Sequence[Tensor], *given: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore
        ctx.set_materialize_grads(False)
        return tuple(views)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:  # pyright: ignore
        return None, *grads


class _Saved:
    """What a region saves for backward: of its buckets places, and all else as it is.

    Args:
      some: one of its deferred parameters for each bucket.
      outer: hooks that were active around the region, which still get all else.
    """

    def __init__(self, some: Sequence[Deferred], outer: Any) -> None:
        self._some, self._outer = some, outer

    def pack(self, value: Tensor) -> Any:
        """Called with a tensor that is saved."""
        at = value.data_ptr()
        for each in self._some:
            bucket: LiveBucket = each._bucket
            if value.numel() and at in bucket.memory and bucket.full is not None:
                if value.dtype == bucket.full.dtype:
                    offset = (at - bucket.memory.start) // value.itemsize
                    return bucket, (tuple(value.shape), value.stride(), offset)
                value = value.clone()  # of other elements than the bucket has
        return None, value if self._outer is None else self._outer[0](value)

    def unpack(self, packed: tuple[LiveBucket | None, Any]) -> Tensor:
        """Called with what `pack` gave when backward needs it."""
        bucket, kept = packed
        if bucket is None:
            return kept if self._outer is None else self._outer[1](kept)
        Deferred.fetch(self._some)
        return bucket.read(kept).detach()


class Region:
    """A function that is compiled, and may be given deferred parameters.

    Args:
      fn: the function.
      compiled: the same, compiled.
      module: whose parameters it reads, those that are swapped into it when it is called.
      first: arguments in front of those of a call: of the forward of a class its module.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        compiled: Callable[..., Any],
        module: nn.Module | None = None,
        first: tuple[Any, ...] = (),
    ) -> None:
        self.fn, self.compiled, self.first = fn, compiled, first
        self._known = WeakSet[Any]()  # buckets that it was given before
        owners = () if module is None else module.modules()
        self._owners = [own for each in owners if (own := _torch.own_parameters(each))]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _torch.inside_torch_func() or _torch.is_tracing():  # where it would compile nothing
            return self.fn(*self.first, *args, **kwargs)
        _torch.on_compile(hooks.busy, skips=(_Saved.pack, _Saved.unpack))
        leaves, spec = tree.flatten((args, kwargs))
        given = [x for own in self._owners for x in own.values()]
        views, some = _opened([*given, *leaves], self._known)
        if not views:
            return self.compiled(*self.first, *args, **kwargs)
        if any(id(x) in views for x in leaves):
            args, kwargs = cast(Any, spec.unflatten([views.get(id(x), x) for x in leaves]))
        saved, before = _Saved(some, _torch.saved_tensors_hooks()), _versions(views.values())
        kept = [dict(own) for own in self._owners]
        try:
            for own in self._owners:
                own.update({name: views.get(id(x), x) for name, x in own.items()})
            with saved_tensors_hooks(saved.pack, saved.unpack) if some else nullcontext():
                out = self.compiled(*self.first, *args, **kwargs)
        finally:
            for own, values in zip(self._owners, kept, strict=True):
                own.update(values)
        if _versions(views.values()) != before:
            fix = "change parameters between steps, in the shards; or write to a clone()"
            raise LeafError("a compiled region writes to its parameters", fix=fix)
        memory = [each._bucket.memory for each in some]
        return tree.map_leaves(lambda x: _without_bucket(x, memory), out)


def _opened(given: Iterable[Any], known: WeakSet[Any]) -> tuple[dict[int, Tensor], list[Deferred]]:
    """Views of live buckets by the id of the parameters, and one deferred one for each bucket.

    Args:
      given: parameters, and other values.
      known: buckets that are held in full, and were given before; gets those that were not.
    """
    found: dict[int, Any] = {}
    for x in given:
        if isinstance(x, Tensor) and (type(x) is Deferred or "_shared" in x.__dict__):
            found[id(x)] = x
    deferred: list[Any] = [x for x in found.values() if type(x) is Deferred]
    if deferred:
        Deferred.fetch(deferred)
    views, buckets = dict[int, Tensor](), set[Any]()
    for key, x in found.items():
        if type(x) is Deferred:
            views[key] = x.plain().detach()
        else:
            buckets.add(bucket := x._shared.use.bucket)
            views[key] = x.detach() if bucket in known else x.detach().clone()
    OPENED.update(buckets)
    known.update(buckets)
    trained = [key for key, x in found.items() if x.requires_grad]
    if trained:
        args = [views[key] for key in trained], *(found[key] for key in trained)
        views.update(zip(trained, _Open.apply(*args), strict=True))  # pyright: ignore
    return views, list({id(x._bucket): x for x in deferred}.values())


def _versions(views: Iterable[Tensor]) -> list[int]:
    return [_torch.version(x) for x in views]


def _without_bucket(x: Any, memory: Sequence[range]) -> Any:
    """A result of a region, as a copy if it lies in a bucket, which soon has other values."""
    inside = isinstance(x, Tensor) and x.numel() and any(x.data_ptr() in each for each in memory)
    return x.clone() if inside else x

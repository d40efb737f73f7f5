"""Parameters without data: tensors whose bucket is fetched at the op that needs it.

[Note: deferred parameters] A `Deferred` is a wrapper subclass with a shape, dtype, strides and
device, which knows its bucket and where its elements lie in it. Autograd saves the wrapper instead
of the weight, so nothing holds a gathered weight between forward and backward; the backward op that
needs it makes the bucket live again. This happens below autograd, in `__torch_dispatch__`, so it
needs no hooks and works under `torch.func`. A view of a deferred tensor is computed from metadata
alone and is deferred itself. So is a cast, which is repeated at each use instead of being kept. Any
other op gets plain tensors, which are views of the bucket, and returns plain tensors.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from mics_fn import _torch
from mics_fn.errors import LeafError
from mics_fn.read_only import COMPILED, ReadOnly
from mics_fn.shards import dtype_name

Geometry = tuple[tuple[int, ...], tuple[int, ...], int]  # size, stride, offset; in elements

aten = torch.ops.aten


class Deferred(ReadOnly):
    """A full parameter, or a view or cast of one, which is fetched at an op that needs it.

    Reading its shape, strides, dtype, device or repr never communicates; ops on it do.
    """

    how_to_compile = "use gather around compiled code, or clone() parameters before it"
    _source: Any  # the `LiveBuckets` that it is in
    _bucket: Any  # its `LiveBucket`
    _leaf: tuple[int, int]  # where its leaf begins in the bucket, and how many elements it has
    _where: Geometry  # in the bucket
    _cast: torch.dtype | None  # None unless it is a cast

    @staticmethod
    def __new__(
        cls: type,
        source: Any,
        bucket: Any,
        geometry: Geometry,
        leaf: tuple[int, int],
        like: "_Like",
    ) -> Any:
        size, stride, offset = geometry
        self = _torch.wrapper_without_data(cls, geometry, like[0], like[1])
        self._source, self._bucket, self._leaf = source, bucket, leaf
        self._where = (size, stride, leaf[0] + offset)
        self._cast = like[2]
        return self

    def __repr__(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        state = "live" if self._bucket.full is not None else "not here"
        where = f"bucket {self._bucket.ids[0]}, {state}"
        return f"Deferred(shape={tuple(self.shape)}, {dtype_name(self.dtype)}, {where})"

    def where_text(self) -> str:
        """Its shape, and the bucket with some of its leaves, for error texts."""
        bucket, names = self._bucket, ", ".join(self._bucket.names()[:3])
        return (
            f"one of bucket {bucket.ids[0]}\n  shape {tuple(self.shape)}; the bucket holds {names}"
        )

    @classmethod
    def __torch_dispatch__(  # pyright: ignore
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        handle = _HANDLERS.get(func)
        if handle is None:
            handle = _HANDLERS[func] = _handler(func)
        return handle(func, args, kwargs or {})


_Like = tuple[torch.dtype, torch.device, torch.dtype | None]  # dtype, device, dtype of the cast


def from_dynamo(error: BaseException) -> LeafError | None:
    """The refusal of a deferred parameter, if dynamo wrapped it in an error of its own."""
    if isinstance(error, LeafError) or COMPILED not in f"{error}":
        return None
    return LeafError(COMPILED, fix=Deferred.how_to_compile)


def _fetch(found: Sequence[Deferred]) -> set[Any]:
    """Make all buckets of an op live together, so that fetching one does not drop another."""
    buckets = {each._bucket for each in found}
    if len(buckets) == 1:  # the most frequent case
        (bucket,), source = buckets, found[0]._source
        if source.ids != bucket.ids and not (bucket.stays and bucket.full is not None):
            source.touch(bucket.ids)
        return buckets
    for source in {each._source for each in found}:
        ids = tuple(sorted({each._bucket.ids[0] for each in found if each._source is source}))
        if source.ids != ids:
            source.touch(ids)
    return buckets


def _search(values: Iterable[Any], found: list[Deferred]) -> list[Deferred]:
    """Append to `found` the deferred tensors among an op's arguments, including those in lists."""
    for value in values:
        kind = type(value)
        if kind is Deferred:
            found.append(value)
        elif kind is list or kind is tuple:
            _search(value, found)
    return found


def _replace(value: Any) -> Any:
    """An argument of an op with plain tensors, of buckets that are live, for deferred ones."""
    kind = type(value)
    if kind is Deferred:
        view = value._bucket.read(value._where)
        return view if value._cast is None else view.to(value._cast)
    if kind is list or kind is tuple:
        return kind([_replace(each) for each in value])
    return value


def _compute(func: Any, args: tuple, kwargs: dict) -> Any:
    """Run an op on plain tensors."""
    found = _search(args, [])
    if kwargs:
        _search(kwargs.values(), found)
    buckets = _fetch(found)
    if kwargs:
        kwargs = {name: _replace(value) for name, value in kwargs.items()}
    return _own(func(*_replace(args), **kwargs), buckets)


def _own(out: Any, buckets: Iterable[Any]) -> Any:
    """The result of an op in memory of its own, since some ops return their input."""
    kind = type(out)
    if kind is Tensor:
        if out.layout is not torch.strided:  # its parts may lie in the memory of its inputs
            return out.clone()
        at = out.data_ptr()
        for bucket in buckets:
            if bucket.low <= at < bucket.high and out.numel():
                return out.clone()
    elif kind is tuple or kind is list:
        return kind([_own(each, buckets) for each in out])
    return out


# The results of view ops on tensors, as metadata, and whether an op gives a list; None if it gives
# another dtype.
_VIEWS: dict[Hashable, tuple[list[Geometry], bool] | None] = {}
_MOST_VIEWS = 20_000  # slices at ever new offsets would make it grow without bound


def _view(func: Any, args: tuple, kwargs: dict) -> Any:
    """A view of a deferred tensor, computed from its metadata alone."""
    deferred = args[0]
    if type(deferred) is not Deferred:
        return _compute(func, args, kwargs)
    size, stride, at = deferred._where
    offset, dtype = at - deferred._leaf[0], deferred.dtype
    rest = tuple([tuple(a) if type(a) is list else a for a in args[1:]])
    key = (func, size, stride, offset, dtype, rest, tuple(kwargs.items()) if kwargs else ())
    if key not in _VIEWS:
        if len(_VIEWS) >= _MOST_VIEWS:
            _VIEWS.clear()
        extent = offset + 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True) if n)
        base = torch.empty(extent, dtype=dtype, device="meta").as_strided(size, stride, offset)
        _VIEWS[key] = _geometries(func(base, *args[1:], **kwargs), dtype)
    if (found := _VIEWS[key]) is None:
        return _compute(func, args, kwargs)
    made = [_like(deferred, geometry) for geometry in found[0]]
    return made if found[1] else made[0]


def _geometries(out: Any, dtype: torch.dtype) -> tuple[list[Geometry], bool] | None:
    several = isinstance(out, list | tuple)
    metas = list(out) if several else [out]
    if any(m.dtype != dtype or m.is_neg() or m.is_conj() for m in metas):
        return None
    return [(tuple(m.shape), m.stride(), int(m.storage_offset())) for m in metas], several


def _as_strided(func: Any, args: tuple, kwargs: dict) -> Any:
    """`_view` for `as_strided`, which must stay within the leaf, since others lie next to it."""
    made = _view(func, args, kwargs)
    if type(made) is Deferred and made.numel():
        size, stride, at = made._where
        start, numel = made._leaf
        stop = at + 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
        if at < start or stop > start + numel:
            raise made.refusal(f"as_strided reads beyond the {numel} elements of", "stay within")
    return made


def _set(func: Any, args: tuple, kwargs: dict) -> Any:
    """Refuse `set_` with the memory of a deferred tensor, which later holds other values."""
    source = _search((*args[1:], *kwargs.values()), [])
    if source:
        raise source[0].refusal("set_ takes the memory of", "use copy_")
    return _refuse(func, args, kwargs)


def _like(deferred: Deferred, geometry: Geometry, cast: torch.dtype | None = None) -> Deferred:
    """A deferred tensor of the same leaf with another geometry or dtype."""
    cast = cast or deferred._cast
    like = (cast or deferred.dtype, deferred.device, cast)
    return Deferred(deferred._source, deferred._bucket, geometry, deferred._leaf, like)


def _to_copy(func: Any, args: tuple, kwargs: dict) -> Any:
    """A cast to another float dtype stays deferred; anything else is computed."""
    deferred, dtype = args[0], kwargs.get("dtype")
    others = [name for name, value in kwargs.items() if value is not None and name != "dtype"]
    if dtype is None or not dtype.is_floating_point or others or deferred._cast is not None:
        return _compute(func, args, kwargs)
    size, stride, at = deferred._where
    if deferred.numel() == 0 or not deferred.is_contiguous():
        return _compute(func, args, kwargs)  # a copy is dense, so its strides may differ
    return _like(deferred, (size, stride, at - deferred._leaf[0]), dtype)


def _refuse(func: Any, args: tuple, kwargs: dict) -> Any:
    """An op that writes: refused for deferred tensors, computed for others."""
    given = _torch.op_arguments(func, args, kwargs)
    written = _search([given.get(name) for name in _torch.op_writes(func)], [])
    if written:
        raise written[0].refusal(f"{func}: writes to")
    return _compute(func, args, kwargs)


# Ops for which the schema is not enough to choose a handler.
_HANDLERS: dict[Any, Callable[[Any, tuple, dict], Any]] = {
    aten._unsafe_view.default: _view,
    aten._reshape_alias.default: _view,
    aten.as_strided.default: _as_strided,
    aten.set_.source_Tensor: _set,
    aten.set_.source_Tensor_storage_offset: _set,
    aten._to_copy.default: _to_copy,
    # Called for the two parts of a dual tensor before anything is fetched. A deferred one counts as
    # having memory of its own.
    aten._has_same_storage_numel.default: lambda func, args, kwargs: True,
    aten.is_same_size.default: lambda func, args, kwargs: args[0].shape == args[1].shape,
}


def _handler(func: Any) -> Callable[[Any, tuple, dict], Any]:
    if _torch.op_views(func):
        return _view
    return _refuse if _torch.op_changes(func) else _compute

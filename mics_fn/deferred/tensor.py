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
from typing import Any, NamedTuple

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


def _plain(deferred: Deferred) -> Tensor:
    """Return the value of a deferred tensor, of a bucket that is live."""
    view = deferred._bucket.read(deferred._where)
    return view if deferred._cast is None else view.to(deferred._cast)


def _fetch(found: Sequence[Deferred]) -> None:
    """Make all buckets of an op live together, so that fetching one does not drop another."""
    first = found[0]
    source, ids = first._source, first._bucket.ids
    if len(found) > 1 and any(d._bucket is not first._bucket for d in found):
        sources = {id(d._source): d._source for d in found}
        for key, source in sources.items():
            numbers = sorted({d._bucket.ids[0] for d in found if id(d._source) == key})
            ids = tuple(numbers)
            if source.ids != ids:
                source.touch(ids)
    elif source.ids != ids and not (first._bucket.stays and first._bucket.full is not None):
        source.touch(ids)


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
    """An argument of an op with plain tensors in place of deferred ones."""
    kind = type(value)
    if kind is Deferred:
        return _plain(value)
    if kind is list or kind is tuple:
        return kind([_replace(each) for each in value])
    return value


def _compute(func: Any, args: tuple, kwargs: dict) -> Any:
    """Run an op on plain tensors."""
    bucket = source = None
    for value in args:
        kind = type(value)
        if kind is Deferred:
            if bucket is None:
                bucket, source = value._bucket, value._source
            elif value._bucket is not bucket:
                break
        elif kind is list and value and type(value[0]) is not int:
            break
    else:
        if bucket is not None and source is not None and not kwargs:  # the most frequent case
            if source.ids != bucket.ids and not (bucket.stays and bucket.full is not None):
                source.touch(bucket.ids)
            plain = [_plain(value) if type(value) is Deferred else value for value in args]
            return _own(func(*plain), (bucket,))
    found = _search((*args, *kwargs.values()), [])
    _fetch(found)
    args = tuple([_replace(value) for value in args])
    kwargs = {name: _replace(value) for name, value in kwargs.items()}
    return _own(func(*args, **kwargs), {d._bucket for d in found})


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


class _Views(NamedTuple):
    """The results of a view op on a tensor, as metadata."""

    several: bool  # whether it gives a list
    same_dtype: bool
    geometries: list[Geometry]


_VIEWS: dict[Hashable, _Views] = {}
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
    found = _VIEWS.get(key)
    if found is None:
        if len(_VIEWS) >= _MOST_VIEWS:
            _VIEWS.clear()
        extent = offset + 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True) if n)
        base = torch.empty(extent, dtype=dtype, device="meta").as_strided(size, stride, offset)
        found = _VIEWS[key] = _views(func(base, *args[1:], **kwargs), dtype)
    if not found.same_dtype:
        return _compute(func, args, kwargs)
    made = [_like(deferred, geometry) for geometry in found.geometries]
    return made if found.several else made[0]


def _views(out: Any, dtype: torch.dtype) -> _Views:
    several = isinstance(out, list | tuple)
    metas = list(out) if several else [out]
    geometries = [(tuple(m.shape), m.stride(), int(m.storage_offset())) for m in metas]
    same = all(m.dtype == dtype and not m.is_neg() and not m.is_conj() for m in metas)
    return _Views(several, same, geometries)


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


def _transpose(func: Any, args: tuple, kwargs: dict) -> Any:
    """Fast path of `_view` for `t()`: every linear layer transposes its weight in both passes."""
    deferred: Deferred = args[0]
    size, stride, at = deferred._where
    if len(size) != 2:
        return _view(func, args, kwargs)
    return _like(deferred, (size[::-1], stride[::-1], at - deferred._leaf[0]))


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
    aten.t.default: _transpose,
    # Called for the two parts of a dual tensor before anything is fetched. A deferred one counts as
    # having memory of its own.
    aten._has_same_storage_numel.default: lambda func, args, kwargs: True,
    aten.is_same_size.default: lambda func, args, kwargs: args[0].shape == args[1].shape,
}


def _handler(func: Any) -> Callable[[Any, tuple, dict], Any]:
    if _torch.op_views(func):
        return _view
    return _refuse if _torch.op_changes(func) else _compute

"""The buckets of one run: parameters without data, which buckets are live, and in what memory.

[Note: deferred parameters] A `Deferred` is an `Absent` tensor of the wing `offload`. It knows its
bucket, and where its elements lie in it. Autograd saves it instead of the weight, so nothing holds
a gathered weight between forward and backward; the backward op that needs it makes the bucket live
again. A cast is deferred too, and repeated at each use instead of being kept. Any op but a view
gets plain tensors, which are views of the bucket, and returns plain tensors.

[Note: copy on write] Such a bucket needs no fetch, so an op need not be told which bucket it reads.
Its leaves are copies that torch makes only when something writes to one. So a write does
not reach the shards, and nothing else would ever see it: it is an error at the end of the run.

[Note: several streams] A model may compute on several streams of an accelerator, and a bucket is
fetched for the first op that needs it. So each stream that reads a bucket waits for its gather, and
whoever drops the bucket, after which another one may use its memory, waits for all of them.

A chunk that lies elsewhere is brought first.
"""

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from mics_fn import _torch, shards, spans
from mics_fn.collectives import Pending, SentCodes, Task, levels, push_all
from mics_fn.deferred.memory import Arena
from mics_fn.errors import DonatedError, GroupsError, LeafError
from mics_fn.groups import Buffers
from mics_fn.offload import placed
from mics_fn.schedules import Learned, OnDemand, Run, Schedule, offsets

aten = torch.ops.aten
# Buckets that compiled regions have read: their kernels ask for addresses, which makes a copy on
# write copy. Their leaves are views of the chunk itself, whose versions tell of a write.
OPENED = WeakSet[shards.Bucket]()
Names = Callable[[int], Sequence[str]]  # of the leaves of a bucket, for error texts

# Parameters without data, whose bucket is fetched at the op that needs it.


class Deferred(placed.Absent):
    """A full parameter, or a view or cast of one, which is fetched at an op that needs it.

    Reading its shape, strides, dtype, device or repr never communicates; ops on it do.
    """

    how_to_compile = "compile it by mf.compile, mf.compile_blocks or Trainer(compile=)"
    in_one_range = False
    _source: Any  # the `LiveBuckets` that it is in
    _bucket: Any  # its `LiveBucket`
    _leaf: tuple[int, int]  # where its leaf begins in the bucket, and how many elements it has
    geometry: placed.Geometry  # in the leaf
    _cast: torch.dtype | None  # None unless it is a cast

    @staticmethod
    def __new__(
        cls: type,
        source: Any,
        bucket: Any,
        geometry: placed.Geometry,
        leaf: tuple[int, int],
        like: tuple,
    ) -> Any:
        self = _torch.wrapper_without_data(cls, geometry, like[0], like[1])
        self._source, self._bucket, self._leaf = source, bucket, leaf
        self.geometry, self._cast = geometry, like[2]
        return self

    def __repr__(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        kind, bucket = shards.dtype_name(self.dtype), self._bucket.ids[0]
        return f"Deferred(shape={tuple(self.shape)}, {kind}, bucket {bucket})"

    def where_text(self) -> str:
        """Its shape, and the bucket with some of its leaves, for error texts."""
        names, shape = ", ".join(self._bucket.names()[:3]), tuple(self.shape)
        return f"one of bucket {self._bucket.ids[0]}\n  shape {shape}; the bucket holds {names}"

    def plain(self) -> Tensor:
        """A view of its bucket, which is live; of a cast a copy."""
        size, stride, offset = self.geometry
        view = self._bucket.read((size, stride, self._leaf[0] + offset))
        return view if self._cast is None else view.to(self._cast)

    def view_with(self, geometry: placed.Geometry, cast: torch.dtype | None = None) -> "Deferred":
        """A deferred tensor of the same leaf with another geometry or dtype."""
        cast = cast or self._cast
        like = (cast or self.dtype, self.device, cast)
        return Deferred(self._source, self._bucket, geometry, self._leaf, like)

    @classmethod
    def fetch(cls, found: Sequence[Any]) -> Sequence[range]:
        """Make all buckets of an op live together, so that fetching one does not drop another."""
        buckets = {each._bucket for each in found}
        if len(buckets) == 1:  # the most frequent case
            (bucket,), source = buckets, found[0]._source
            if source.ids != bucket.ids and not (bucket.stays and bucket.full is not None):
                source.touch(bucket.ids)
            return (bucket.memory,)
        for source in {each._source for each in found}:
            ids = tuple(sorted({each._bucket.ids[0] for each in found if each._source is source}))
            if source.ids != ids:
                source.touch(ids)
        return [bucket.memory for bucket in buckets]


def _as_strided(cls: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    """`view` for `as_strided`, which must stay within the leaf, since others lie next to it."""
    made = placed.view(cls, func, args, kwargs)
    if type(made) is Deferred and made.numel():
        (size, stride, at), numel = made.geometry, made._leaf[1]
        stop = at + 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
        if stop > numel:
            raise made.refusal(f"as_strided reads beyond the {numel} elements of", "stay within")
    return made


def _set(cls: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    """Refuse `set_` with the memory of a deferred tensor, which later holds other values."""
    source = placed.search(cls, args[1:], [])
    if source:
        raise source[0].refusal("set_ takes the memory of", "use copy_")
    return placed.refuse_writes(cls, func, args, kwargs)


def _to_copy(cls: Any, func: Any, args: tuple, kwargs: dict) -> Any:
    """A cast to another float dtype stays deferred; anything else is computed."""
    deferred, dtype = args[0], kwargs.get("dtype")
    others = [name for name, value in kwargs.items() if value is not None and name != "dtype"]
    casts = dtype is not None and dtype.is_floating_point and not others and deferred._cast is None
    if casts and deferred.numel() and deferred.is_contiguous():  # a copy is dense
        return deferred.view_with(deferred.geometry, dtype)
    return placed.compute(cls, func, args, kwargs)


Deferred.handlers = {
    **placed.Absent.handlers,
    aten.as_strided.default: _as_strided,
    aten.set_.source_Tensor: _set,
    aten.set_.source_Tensor_storage_offset: _set,
    aten._to_copy.default: _to_copy,
}


# One bucket of a run.


def _bits(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, among which a NaN equals itself."""
    return tensor.reshape(-1).view(torch.uint8)


class LiveBucket:
    """One bucket of a run: this rank's chunk of it, its gather, and the memory that it lies in.

    Args:
      index: its number.
      names: gives the names of a bucket's leaves, for error texts.
      use: the bucket, and its groups.
      stays: whether it stays live once it is, so that further uses are not reported.
    """

    def __init__(self, index: int, names: Names, use: shards.BucketUse, *, stays: bool) -> None:
        self.ids, self.use, self.stays, self.names = (index,), use, stays, partial(names, index)
        self.full: Tensor | None = None  # 1D, whole bucket; None where it is not live
        self.views: dict[placed.Geometry, Tensor] = {}
        self.memory = range(0)  # the addresses of `full`
        # See [Note: several streams]; no event where work is done when a call returns.
        self._ready: torch.Event | None = None
        self.readers: set[torch.Stream] = set()
        self.chunk: Any = None  # until `load`
        self.version = 0
        self.placed: Sequence[Tensor | None] | None = None  # pieces that lie elsewhere, by slot
        self.device = use.home.device  # of its tensors
        self.outer_numel, self.numel = _fetched_numels(use)  # of the buffers that a fetch writes
        self.pending: Pending | None = None
        self.buffer: Tensor | None = None
        self.outer: Tensor | None = None  # see [Note: placements] in `groups.groups`
        self.codes: SentCodes | None = None  # of this rank's chunk, sent again by later fetches
        self.whole: Any = None  # see [Note: copy on write]
        self.leaves: list[Tensor] = []

    def fill(self, full: Tensor | None, ready: torch.Event | None) -> None:
        """Make the bucket live, or not; views of its previous buffer are dropped.

        Args:
          full: the whole bucket; None where it is live no more.
          ready: what a stream waits for before it reads it.
        """
        self.full, self.views, self._ready, self.memory = full, {}, ready, range(0)
        self.readers.clear()
        if full is not None and not _torch.has_no_data(full):
            self.memory = range(full.data_ptr(), full.data_ptr() + full.nbytes)

    def read(self, where: placed.Geometry) -> Tensor:
        """A view of the bucket, for an op on the current stream; see [Note: several streams]."""
        if self.full is None:
            raise RuntimeError("a bucket is not live where an op needs it")
        if self._ready is not None:
            stream = _torch.current_stream(self.full.device)
            if stream not in self.readers:
                stream.wait_event(self._ready)
                self.readers.add(stream)
        view = self.views.get(where)
        if view is None:
            size, stride, offset = where  # in the bucket, which lies somewhere in its memory
            offset += int(self.full.storage_offset())
            view = self.views[where] = self.full.as_strided(size, stride, offset)
        return view

    def load(self, pieces: Sequence[Tensor]) -> None:
        """Take its pieces, one per member; copied unless they form a chunk."""
        use, device = self.use, pieces[0].device
        bucket, number, slots = use.bucket, use.route.chunk, use.by_slot(pieces)
        if use.placed:
            self.placed = [None if x is None else x.detach() for x in slots]
            chunk = shards.pack.standing_for(bucket, number, self.placed)
        else:
            chunk = shards.pack.pack_chunk(bucket, number, slots, device=device).detach()
        if not chunk.numel():  # it is never fetched, which would cast it
            chunk = chunk.to(use.home.device if use.placed else device, bucket.compute)
            self.placed = None
        if self.placed is None:
            self.device = chunk.device
        self.chunk, self.version = chunk, _torch.version(chunk)

    def share(self) -> None:
        """Make `leaves` plain tensors, one per member, if ops can use the chunk itself.

        Only where this rank holds all of it, and work is done when a call returns: elsewhere
        kernels that ask for an address are frequent, and each would copy the bucket.
        """
        chunk = self.chunk
        needed = self.use.route.size > 1 or self.placed is not None
        if not (needed or _torch.is_async(chunk.device) or _torch.has_no_data(chunk)):
            self.whole = chunk if self.use.bucket in OPENED else _torch.lazy_clone(chunk)
        if self.whole is not None:
            with _torch.below_autograd():  # which does not take them for views of one another
                self.leaves = self._views(self.whole)
            for leaf in self.leaves:
                leaf._shared = self  # pyright: ignore

    def _views(self, whole: Tensor) -> list[Tensor]:
        return self.use.by_member(shards.pack.split_full(self.use.bucket, whole))

    def check_copies(self) -> None:
        """Raise LeafError if a plain leaf was written to, or was given other memory."""
        whole, leaves, self.whole, self.leaves = self.whole, self.leaves, None, []
        storage, same = _torch.storage_id(whole), _torch.is_lazy_clone(whole)
        if whole is self.chunk:
            same = not any(map(_torch.version, leaves))
        if same and set(map(_torch.storage_id, leaves)) == {storage}:
            return
        pairs = zip(self._views(whole), self._views(self.chunk), strict=True)
        for name, leaf, (now, before) in zip(self.names(), leaves, pairs, strict=True):
            kept = same or (whole is not self.chunk and torch.equal(_bits(now), _bits(before)))
            if not kept or _torch.storage_id(leaf) != storage:
                fix = "change parameters between steps, in the shards; or write to a clone()"
                raise LeafError(f"defer: {name} was written to, which changes no shard", fix=fix)

    def sent(self) -> tuple[Tensor | SentCodes, Task | None]:
        """What this rank sends, and what fetches that if it lies in host memory or in a file.

        It is its chunk, or codes: those that it keeps, or makes now, or makes once the first fetch
        has brought values; once in a run.
        """
        use, wire, chunk, row, task = self.use, self.use.gather_wire, self.chunk, None, None
        if self.placed is not None:
            facts: Any = {"bucket": use.bucket, "chunk": use.route.chunk, "data": self.placed}
            copied = partial(shards.pack.copied_to, **facts, zeros=wire is not None)
            op = f"the copy of {use.bucket.title} from elsewhere"
            task = Task(use.hierarchy.fetch_queue, op, copied)
        if wire is None or not levels.moves(chunk):
            return chunk, task
        if self.codes is None:
            if self.placed is None:
                chunk = shards.pack.zero_padding(use.bucket, use.route.chunk, chunk)
            else:
                row = shards.pack.kept_row(use.bucket, use.route.chunk, self.placed)
            how = {"chunk": chunk, "row": row, "device": self.device}
            memory = use.hierarchy.pools.codes, use.bucket.chunk
            self.codes = SentCodes(wire, use.route, *memory, **how)
        return self.codes, task

    def watch(self, key: int, *, live: bool) -> None:
        """Tell watchers what it takes: with the memory of the bucket, or without."""
        if spans.watchers:
            parts = (self.outer, self.buffer if live else None)
            nbytes = sum(x.nbytes for x in parts if x is not None)
            spans.resident("gathered", (key, self.ids[0]), nbytes)


# All buckets of a run.

# Called in backward with the number of a bucket and its full gradients, one per member.
GradSink = Callable[[int, Sequence[Tensor | None]], object]


class LiveBuckets:
    """Fetch and drop buckets in the order of a schedule.

    Args:
      opened: the tree.
      learned, policy: as for `Run`.
      into: receives the gradients; None if they are the result of backward.
    """

    def __init__(
        self,
        opened: shards.Opened,
        learned: Learned,
        policy: OnDemand,
        into: GradSink | None = None,
    ) -> None:
        self.uses, self.into = opened.uses, into
        self.ids: tuple[int, ...] = ()
        self.buckets, sizes, channels = list[LiveBucket](), list[int](), list[Any]()
        for index, use in enumerate(self.uses):
            self.buckets.append(LiveBucket(index, opened.names, use, stays=policy.at_once))
            sizes.append(self.buckets[index].numel * use.bucket.compute.itemsize)
            channels.append(use.hierarchy.channel)
        # Whether nothing is left to be derived when the run ends; see [Note: copy on write].
        self.closes = False
        # The run may outlive these buckets, so it must not refer to their buffers.
        self.run = Run(learned, policy, sizes, channels)
        # The schedule that this run follows; another run may learn a new one before this run ends.
        self._schedule = learned.schedule if self.run.following else None
        self.reduction: Any = None  # of the backward pass under way, if gradients are its result
        self.derived = False  # whether such a pass has ended
        self._arenas: dict[Buffers, Arena] = {}  # in which buffers lie, by their pool
        self._starts: Sequence[int] = ()  # of the fetches that the schedule has; see `offsets`
        self._fetches = 0  # so far in this run
        self._closed = False

    def parameters(self, index: int) -> Sequence[Tensor]:
        """The leaves of a bucket, one per member, deferred if they need a fetch."""
        each = self.buckets[index]
        if self.closes and not each.numel:
            each.share()
        if each.whole is not None:
            return each.leaves
        bucket, like = each.use.bucket, (each.use.bucket.compute, each.device, None)
        places = zip(shards.pack.geometries(bucket), bucket.numels, strict=True)
        return [
            Deferred(self, each, (shape, stride, 0), (begin, numel), like)
            for (shape, stride, begin), numel in each.use.by_member(list(places))
        ]

    def start(self) -> None:
        """After all chunks are loaded: fetch what the policy wants before the first use."""
        with _torch.without_torch_func():
            for index in self.run.start():
                self._fetch(index)

    def touch(self, ids: tuple[int, ...]) -> None:
        """Make these buckets live at the same time, for an op that needs them."""
        if self._closed:
            text = "a deferred parameter is used after its run ended"
            raise GroupsError(text, fix="call defer again")
        needed, buckets = list(map(self.buckets.__getitem__, ids)), list[shards.Bucket]()
        for each in needed:
            buckets.append(each.use.bucket)
            if _torch.version(each.chunk) != each.version:
                text = f"{each.use.bucket.title} was changed after its run began"
                raise DonatedError(text, fix="call defer again after an update")
        with _torch.without_torch_func():
            for kind, index in self.run.use(ids):
                if kind == "fetch":
                    self._fetch(index)
                else:
                    self._drop(index)
            with spans.span("use", buckets, device=needed[0].device):
                for each in needed:
                    pending, each.pending = each.pending, None
                    if pending is not None:
                        each.fill(pending.wait().view(-1), pending.ready)
        self.ids = ids
        push_all(needed[0].use.home.state)

    def _fetch(self, index: int) -> None:
        """Start to gather a bucket along its route: this rank sends its chunk, or codes of it."""
        each = self.buckets[index]
        use, dtype = each.use, each.use.bucket.compute
        if _torch.has_no_data(each.chunk):  # in a record, or of a model on meta
            each.fill(each.chunk.new_empty(use.bucket.numel, dtype=dtype), None)
            return
        chunk, fetch = each.sent() if each.outer is None else (each.outer, None)
        if each.outer_numel and each.outer is None:  # kept for the run
            pool = use.hierarchy.pools.outer
            each.outer = pool.take((each.outer_numel,), dtype, each.device, exact=True)
        if each.numel:
            each.buffer = self._take(each)
        self._fetches += 1
        each.watch(id(self), live=True)
        what = (use.named("defer"), "fetch", use.bucket)
        each.pending = levels.start_fetch(use.route, chunk, each.outer, each.buffer, what, fetch)

    def _offsets(self, schedule: Schedule) -> tuple[Sequence[int], Sequence[int]]:
        """Where the fetches of a schedule lie; found once per schedule."""
        pools = [id(use.hierarchy.pools.fetched) for use in self.uses]
        learned, key = self.run.learned, (schedule, self.run.sizes, pools)
        if learned.offsets[0] != key:
            learned.offsets = key, offsets(*key)
        return learned.offsets[1]

    def _take(self, each: LiveBucket) -> Tensor:
        """Memory for a bucket, at its place in the plan."""
        numel, dtype, device = each.numel, each.use.bucket.compute, each.device
        pool = each.use.hierarchy.pools.fetched
        if self._schedule is None:
            return pool.take((numel,), dtype, device)
        arena = self._arenas.get(pool)
        if arena is None:
            self._starts, needs = self._offsets(self._schedule)
            arena = self._arenas[pool] = Arena(pool, needs[each.ids[0]], device)
        return arena.take(numel, dtype, self._starts[self._fetches] if self.run.following else None)

    def _drop(self, index: int) -> None:
        each = self.buckets[index]
        with spans.span("drop", each.use.bucket):
            pending, each.pending = each.pending, None
            if pending is not None:  # fetched for a use that did not happen
                pending.wait()
            if each.full is not None:  # this stream waits for all that have read it
                for stream in each.readers:
                    _torch.current_stream(each.full.device).wait_stream(stream)
            each.fill(None, None)
            buffer, each.buffer = each.buffer, None
            if buffer is not None:
                pool = each.use.hierarchy.pools.fetched
                with _torch.without_torch_func():
                    self._arenas.get(pool, pool).give(buffer)
        each.watch(id(self), live=False)

    def let_go(self, index: int) -> Tensor | None:
        """Drop a bucket whose gradients are complete in the last pass, if the schedule allows.

        Returns:
          Its memory, which the caller gives back; None if it stays.
        """
        each = self.buckets[index]
        if each.buffer is None or index not in self.run.live:
            return None
        self.run.apply("drop", index)
        room, each.buffer, self.ids = each.buffer, None, ()
        self._drop(index)
        return room

    def close(self) -> None:
        """End the run: its buckets are dropped, and using its tensors is an error from then on."""
        if not self._closed:
            for index in self.run.live:
                self._drop(index)
            self._closed = True
            schedule = self.run.end()
            if schedule is not None:  # the next run has the memory that it needs, and no more
                _, needs = self._offsets(schedule)
                for each, nbytes in zip(self.buckets, needs, strict=True):
                    each.use.hierarchy.pools.fetched.provide(nbytes, each.device)
            self.leave()
            if self.buckets and _torch.is_async(self.buckets[0].device):
                # A host that waits for a collective looks meanwhile; here it never waits.
                self.run.poll_peers()

    def __del__(self) -> None:
        if hasattr(self, "_closed"):  # else `__init__` has failed
            try:
                self.leave()  # no tensor of the tree is left
            except LeafError as error:
                warnings.warn(str(error), stacklevel=2)

    def leave(self, *, check: bool = True) -> None:
        """Give back what buckets have, unless a transfer still uses it, and check copies.

        It sends nothing to other ranks, and so ends a run that failed, too.
        """
        self._closed, self.ids = True, ()
        for index, each in enumerate(self.buckets):
            if each.pending is not None:
                continue
            if each.buffer is not None:
                self._drop(index)
            if each.outer is not None:
                each.use.hierarchy.pools.outer.give(each.outer)
            if each.codes is not None:
                each.codes.release()
            each.outer = each.codes = None
            each.watch(id(self), live=False)
        for each in self.buckets:
            if not check:
                each.whole = None
            elif each.whole is not None:
                each.check_copies()


def _fetched_numels(use: shards.BucketUse) -> tuple[int, int]:
    """Elements of the buffers of a fetch: what the outer levels keep, and the whole bucket."""
    bucket, route, wire = use.bucket, use.route, use.gather_wire
    before, behind = route.split(route.outer_params)
    coded = wire is not None and wire.levels(route) > route.outer_params
    outer_numel = bucket.numel // behind.size if before.size > 1 and not coded else 0
    made = use.placed or bucket.codes is not None or bucket.compute != bucket.dtype
    whole = behind.size > 1 or (not outer_numel and made)
    return outer_numel, bucket.numel if whole else 0


def sizes_of(uses: Sequence[shards.BucketUse]) -> list[int]:
    """Bytes that each bucket takes while it is live; 0 if it is a view of memory that is kept."""
    return [_fetched_numels(use)[1] * use.bucket.compute.itemsize for use in uses]


def kept_of(uses: Sequence[shards.BucketUse]) -> list[int]:
    """Bytes that each bucket takes from its first fetch to the end of a run; see `start_fetch`."""
    return [_fetched_numels(use)[0] * use.bucket.compute.itemsize for use in uses]

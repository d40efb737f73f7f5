"""The buckets of one run: their chunks, which of them are live, and the memory they lie in.

[Note: copy on write] Such a bucket needs no fetch, so an op need not be told which bucket it reads.
Its leaves are copies that torch makes only when something writes to one. So a write does
not reach the shards, and nothing else would ever see it: it is an error at the end of the run.

A chunk that lies elsewhere is brought first.
"""

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mics_fn import _device, _torch, shards, spans
from mics_fn._torch import version
from mics_fn.collectives import (
    Pending,
    SentCodes,
    Task,
    Wire,
    moves,
    push_all,
    start_coded_gather,
    start_fetch,
)
from mics_fn.deferred.reduction import Reduction
from mics_fn.deferred.tensor import GatheredBucket
from mics_fn.errors import DonatedError, GroupsError, LeafError
from mics_fn.groups import Arena, Buffers
from mics_fn.schedules import Learned, Offsets, OnDemand, Run, Schedule, offsets

# Parameters of buckets that this rank holds whole: plain tensors in the memory of the shards.


class Copies:
    """The leaves of one bucket, which share the memory of its chunk until something writes.

    Args:
      use: the bucket.
      chunk: all of it.
      whole: `lazy_clone` of the chunk.

    `leaves` are the full parameters, one per member.
    """

    def __init__(self, use: shards.BucketUse, chunk: Tensor, whole: Tensor) -> None:
        self._use, self._chunk, self._whole = use, chunk, whole
        # Through `.data`, autograd does not take them for views of one another.
        self.leaves = [view.data for view in self._views(whole)]

    def check(self, names: Sequence[str]) -> None:
        """Raise LeafError if a leaf was written to, or was given other memory.

        Args:
          names: of the members.
        """
        storage = _torch.storage_id(self._whole)
        moved = [_torch.storage_id(leaf) != storage for leaf in self.leaves]
        if _torch.is_lazy_clone(self._whole) and not any(moved):
            return
        pairs = zip(self._views(self._whole), self._views(self._chunk), strict=True)
        wrong = [not torch.equal(_bits(now), _bits(before)) for now, before in pairs]
        for name, leaf, *odd in zip(names, self.leaves, moved, wrong, strict=True):
            if any(odd):
                text = f"defer: {name} was written to, which changes no shard"
                fix = "change parameters between steps, in the shards; or write to a clone()"
                raise LeafError(text, [f"shape {tuple(leaf.shape)}"], fix)

    def _views(self, whole: Tensor) -> list[Tensor]:
        return self._use.by_member(shards.split_full(self._use.bucket, whole))


def copies_of(use: shards.BucketUse, chunk: Tensor) -> Copies | None:
    """The leaves of a bucket that this rank holds whole as plain tensors, if ops can use them so.

    Only where work is done when a call returns: elsewhere kernels that ask for an address are
    frequent, and each would copy the bucket.
    """
    cast = chunk.dtype != use.bucket.compute
    if cast or _device.is_async(chunk.device) or _torch.has_no_data(chunk):
        return None
    whole = _torch.lazy_clone(chunk)
    return None if whole is None else Copies(use, chunk, whole)


def _bits(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, among which a NaN equals itself."""
    return tensor.reshape(-1).view(torch.uint8)


# What a rank sends of its buckets.


def codes_of(
    use: shards.BucketUse, wire: Wire, chunk: Tensor, placed: Sequence[Tensor | None] | None
) -> SentCodes:
    """What this rank sends of a bucket in the place of values, once per run.

    These are codes that it keeps, or makes now, or makes once the first fetch has brought values.

    Args:
      use: the bucket.
      wire: what travels, and on which levels.
      chunk: its values, or what stands for them.
      away: its pieces, by slot, where they lie elsewhere or are kept as codes.
    """
    pool, route = use.hierarchy.pools.codes, use.route
    if placed is None:
        return SentCodes.of(wire, route, shards.zero_padding(use.bucket, route.chunk, chunk), pool)
    row = shards.kept_row(use.bucket, route.chunk, placed)
    if row is not None:
        return SentCodes(wire, route, pool, use.bucket.chunk, row)
    return SentCodes.to_be_made(wire, route, chunk, pool, use.home.device)


def task_of(use: shards.BucketUse, name: str, data: Sequence[Any]) -> Task:
    """Return the task that fetches a chunk's pieces from host memory or files."""
    facts: Any = {"bucket": use.bucket, "chunk": use.route.chunk, "data": data}
    copied = shards.copied_to if use.gather_wire is None else shards.copied_with_zeros
    op = f"the copy of {name} from elsewhere"
    return Task(use.hierarchy.fetch_queue, op, partial(copied, **facts))


class Hollow(NamedTuple):
    """Stand for a bucket without data, whose fetch is free."""

    full: Tensor
    ready: None = None

    def wait(self) -> Tensor:
        """The bucket."""
        return self.full


# Called in backward with the number of a bucket and its full gradients, one per member.
GradSink = Callable[[int, Sequence[Tensor | None]], object]


class LiveBuckets:
    """Fetch and drop buckets in the order of a schedule.

    Args:
      uses: the buckets.
      names: gives the names of a bucket's leaves, for error texts.
      learned, policy: as for `Run`.
      into: receives the gradients; None if they are the result of backward.
      hollow: whether tensors have no data, to record what is used.
      closes: whether nothing is left to be derived when the run ends; see [Note: copy on write] in
        `deferred.live`.
    """

    def __init__(
        self,
        uses: Sequence[shards.BucketUse],
        names: Callable[[int], Sequence[str]],
        learned: Learned,
        policy: OnDemand,
        into: GradSink | None = None,
        *,
        hollow: bool = False,
        closes: bool = False,
    ) -> None:
        self.uses, self.into = uses, into
        self.ids: tuple[int, ...] = ()
        self.buckets: list[GatheredBucket] = []
        self._hollow = hollow
        # The run may outlive these buckets, so it must not refer to their buffers.
        self._name = partial(_title, names)
        for index in range(len(uses)):
            self.buckets.append(GatheredBucket(index, names, stays=policy.at_once))
        channels = [use.hierarchy.channel for use in uses]
        self.run = Run(learned, policy, sizes_of(uses), channels, self._name)
        # The schedule that this run follows; another run may learn a new one before this run ends.
        self._schedule = learned.schedule if self.run.following else None
        self.reduction: Reduction | None = None  # of the backward pass under way
        self._chunks: dict[int, Tensor] = {}
        self._placed: dict[int, Sequence[Tensor | None]] = {}  # pieces that lie elsewhere, by slot
        self._versions: dict[int, int] = {}
        self._pending: dict[int, Pending | Hollow] = {}
        self._buffers: dict[int, Tensor] = {}
        self._arenas: dict[Buffers, Arena] = {}  # in which buffers lie, by their pool
        self._starts: tuple[int, ...] = ()  # of the fetches that the schedule has; see `Offsets`
        self._fetches = 0  # so far in this run
        self._closes, self._copies = closes and policy.at_once, dict[int, Copies]()
        self._outer: dict[int, Tensor] = {}  # see [Note: placements] in `groups.groups`
        self._codes: dict[int, SentCodes] = {}  # of this rank's chunks, sent again by later fetches
        self._closed = self._ended = False

    def load(self, index: int, pieces: Sequence[Tensor]) -> None:
        """Take the pieces of a bucket, one per member; copied unless they form a chunk."""
        use = self.uses[index]
        slots, device = use.by_slot(pieces), pieces[0].device
        if use.placed:
            self._placed[index] = [None if x is None else x.detach() for x in slots]
            chunk = shards.standing_for(use.bucket, use.route.chunk, self._placed[index])
        else:
            chunk = shards.pack_chunk(use.bucket, use.route.chunk, slots, device=device).detach()
        if not chunk.numel():  # it is never fetched, which would cast it
            device = self.device(index) if index in self._placed else chunk.device
            chunk = chunk.to(device, use.bucket.compute)
            self._placed.pop(index, None)
        self._chunks[index], self._versions[index] = chunk, version(chunk)

    def plain(self, index: int) -> list[Tensor] | None:
        """The leaves of a bucket as plain tensors, if they need no fetch; one per member."""
        use = self.uses[index]
        if not self._closes or use.route.size > 1 or index in self._placed:
            return None
        copies = copies_of(use, self._chunks[index])
        if copies is None:
            return None
        self._copies[index] = copies
        return copies.leaves

    def device(self, index: int) -> torch.device:
        """The device of a bucket's tensors."""
        return self.uses[index].home.device if index in self._placed else self._chunks[index].device

    def start(self) -> None:
        """After all chunks are loaded: fetch what the policy wants before the first use."""
        with _torch.without_torch_func():
            for index in self.run.start():
                self._fetch(index)

    def begin_pass(self) -> Reduction:
        """The reduction of this backward pass, if gradients are its result."""
        if self.reduction is None:
            self.reduction = Reduction(self.uses, self.run)
        return self.reduction

    def touch(self, ids: tuple[int, ...]) -> None:
        """Make these buckets live at the same time; see `deferred.gathered.Source`."""
        if self._closed:
            text = "a deferred parameter is used after its run ended"
            raise GroupsError(text, fix="call defer again")
        for i in ids:
            if version(self._chunks[i]) != self._versions[i]:
                text = f"{self._name(i)} was changed after its run began"
                raise DonatedError(text, fix="call defer again after an update")
        with _torch.without_torch_func():
            for kind, index in self.run.use(ids):
                if kind == "fetch":
                    self._fetch(index)
                else:
                    self._drop(index)
            using = spans.UNSEEN
            if spans.seen():
                buckets = [self.uses[i].bucket for i in ids]
                using = spans.Span("use", buckets, device=self.device(ids[0]))
            with using:
                for i in ids:
                    if self.buckets[i].full is None:
                        pending = self._pending.pop(i)
                        full = pending.wait().view(-1)
                        has_data = not _torch.has_no_data(full)
                        self.buckets[i].fill(full, pending.ready, has_data=has_data)
        self.ids = ids
        push_all(self.uses[ids[0]].home.state)

    def _fetch(self, index: int) -> None:
        """Start to gather a bucket along its route: this rank sends its chunk, or codes of it."""
        use = self.uses[index]
        if self._hollow:
            empty = self._chunks[index].new_empty(use.bucket.numel, dtype=use.bucket.compute)
            self._pending[index] = Hollow(empty)
            return
        outer_numel, out_numel = self._needs(index)
        chunk = self._outer[index] if index in self._outer else self._sent(index)
        placed = None if index in self._outer else self._placed.get(index)
        fetch = None if placed is None else task_of(use, self._name(index), placed)
        if outer_numel and index not in self._outer:
            self._outer[index] = self._take(index, outer_numel, keep=True)
        if out_numel:
            self._buffers[index] = self._take(index, out_numel)
        self._fetches += 1
        outer_out, out = self._outer.get(index), self._buffers.get(index)
        if spans.watchers:
            nbytes = sum(x.nbytes for x in (outer_out, out) if x is not None)
            spans.resident("gathered", (id(self), index), nbytes)
        what = ("defer", "fetch", use.bucket)
        if isinstance(chunk, SentCodes):
            fetch = None if chunk.chunk_to_fetch is None else fetch
            self._pending[index] = start_coded_gather(use.route, chunk, outer_out, out, what, fetch)
        else:
            self._pending[index] = start_fetch(use.route, chunk, outer_out, out, what, fetch)

    def _sent(self, index: int) -> Tensor | SentCodes:
        """What this rank sends of a bucket: its chunk, or codes of it, made once in a run."""
        use, chunk = self.uses[index], self._chunks[index]
        wire = use.gather_wire
        if wire is None or not moves(chunk):
            return chunk
        if index not in self._codes:
            self._codes[index] = codes_of(use, wire, chunk, self._placed.get(index))
        return self._codes[index]

    def _needs(self, index: int) -> tuple[int, int]:
        """Return the elements of the buffers that a fetch writes: of the run, and of the bucket."""
        use, chunk = self.uses[index], self._chunks[index]
        outer, inner = use.route.split(use.route.outer_params)
        wire = use.gather_wire
        as_codes = wire is not None and wire.levels(use.route) > use.route.outer_params
        outer_numel = use.bucket.numel // inner.size if outer.size > 1 and not as_codes else 0
        cast = chunk.dtype != use.bucket.compute or index in self._placed
        needed = inner.size > 1 or (not outer_numel and cast)
        return outer_numel, use.bucket.numel if needed else 0

    def _offsets(self, schedule: Schedule) -> Offsets:
        """Where the fetches of a schedule lie; found once per schedule."""
        numbers: dict[Buffers, int] = {}
        pools = [numbers.setdefault(use.hierarchy.pools.fetched, len(numbers)) for use in self.uses]
        itemsizes = [use.bucket.compute.itemsize for use in self.uses]
        sizes = [self._needs(i)[1] * itemsize for i, itemsize in enumerate(itemsizes)]
        learned, key = self.run.learned, (schedule, sizes, pools)
        if learned.offsets[0] != key:
            learned.offsets = key, offsets(*key)
        return learned.offsets[1]

    def _take(self, index: int, numel: int, *, keep: bool = False) -> Tensor:
        use, chunk, device = self.uses[index], self._chunks[index], self.device(index)
        dtype, pools = use.bucket.compute, use.hierarchy.pools
        if _torch.has_no_data(chunk):
            return chunk.new_empty(numel, dtype=dtype)
        if keep:
            return pools.outer.take((numel,), dtype, device, exact=True)
        if self._schedule is None:
            return pools.fetched.take((numel,), dtype, device)
        arena = self._arenas.get(pools.fetched)
        if arena is None:
            self._starts, needs = self._offsets(self._schedule)
            arena = self._arenas[pools.fetched] = Arena(pools.fetched, needs[index], device)
        return arena.take(numel, dtype, self._starts[self._fetches] if self.run.following else None)

    def _drop(self, index: int) -> None:
        with spans.span("drop", self.uses[index].bucket):
            pending = self._pending.pop(index, None)
            if pending is not None:  # fetched for a use that did not happen
                pending.wait()
            self.buckets[index].clear()
            buffer = self._buffers.pop(index, None)
            if buffer is not None:
                pool = self.uses[index].hierarchy.pools.fetched
                with _torch.without_torch_func():
                    self._arenas.get(pool, pool).give(buffer)
        if spans.watchers:
            outer_out = self._outer.get(index)
            nbytes = 0 if outer_out is None else outer_out.nbytes
            spans.resident("gathered", (id(self), index), nbytes)

    def let_go(self, index: int) -> Tensor | None:
        """Drop a bucket whose gradients are complete in the last pass, if the schedule allows.

        Returns:
          Its memory, which the caller gives back; None if it stays.
        """
        if index not in self._buffers or not self.run.let_go(index):
            return None
        room, self.ids = self._buffers.pop(index), ()
        self._drop(index)
        return room

    def close(self) -> None:
        """End the run: its buckets are dropped, and using its tensors is an error from then on."""
        if not self._closed:
            for index in self.run.live:
                self._drop(index)
            self._closed, self.ids = True, ()
            schedule = self.run.end()
            if schedule is not None:
                self._provide(schedule)
            self._give_outer()
            self._ended = True
            if self._copies:
                self._check_copies()
            if self._chunks and _device.is_async(self.device(min(self._chunks))):
                # A host that waits for a collective looks meanwhile; here it never waits.
                self.run.poll_peers()

    def abandon(self) -> None:
        """Give back the memory that no transfer writes to, and send nothing to other ranks."""
        self._closed, self.ids, self._copies = True, (), {}
        for index in list(self._buffers):
            if index not in self._pending:
                self._drop(index)
        self._give_outer()

    def _provide(self, schedule: Schedule) -> None:
        """Have the memory that the next run needs, and no more; later steps allocate none."""
        for index in schedule.fetches:
            outer_numel, _ = self._needs(index)
            if outer_numel and index not in self._outer:
                self._outer[index] = self._take(index, outer_numel, keep=True)
        needs = self._offsets(schedule).nbytes
        pools = {use.hierarchy.pools.fetched: i for i, use in enumerate(self.uses)}
        for pool, index in pools.items():
            pool.provide(needs[index], self.device(index))

    def _check_copies(self) -> None:
        """Raise LeafError if a parameter was written to; see [Note: copy on write]."""
        copies, self._copies = self._copies, {}
        for index, each in copies.items():
            each.check(self.buckets[index].names())

    def __del__(self) -> None:
        if not getattr(self, "_ended", True):  # else `__init__` has failed, or all is given back
            try:
                self._check_copies()
            except LeafError as error:
                warnings.warn(str(error), stacklevel=2)
            self.abandon()  # no tensor of the tree is left

    def _give_outer(self) -> None:
        for index in list(self._outer):
            if index not in self._pending:
                self.uses[index].hierarchy.pools.outer.give(self._outer.pop(index))
                spans.resident("gathered", (id(self), index), 0)
        for index in list(self._codes):
            if index not in self._pending:
                self._codes.pop(index).release()


def _title(names: Callable[[int], Sequence[str]], index: int) -> str:
    """A bucket by its number and some of its leaves."""
    found = names(index)
    return f"bucket {index} ({', '.join(found[:2])}{', ...' if len(found) > 2 else ''})"


def sizes_of(uses: Sequence[Any]) -> list[int]:
    """Bytes that each bucket takes while it is live; 0 if it is a view of memory that is kept."""
    found = []
    for use in uses:
        bucket = use.bucket
        inner = use.route.split(use.route.outer_params)[1].size if use.home else bucket.parts
        made = use.placed or bucket.codes is not None or bucket.compute != bucket.dtype
        cast = inner == bucket.parts and made
        found.append(bucket.nbytes if inner > 1 or cast else 0)
    return found

"""The buckets of one gathered tree: their chunks, what is live, and the memory they lie in."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mics_fn import _torch
from mics_fn.collectives import Pending, push_all, start_fetch
from mics_fn.deferred.cell import Cell
from mics_fn.deferred.grad_sum import GradSum
from mics_fn.deferred.reduction import Reduction
from mics_fn.errors import DonatedError, GroupsError, message
from mics_fn.schedules import Control, Known, OnDemand, Player, Schedule
from mics_fn.shards import BucketUse, deal, pack_chunk


class Cache:
    """Makes buckets live, as its player says, and gives their memory back.

    Args:
      uses: the buckets.
      names: of each bucket the names of its leaves, for people.
      known, policy: as for `Player`.
      control: of the partition group.
      into: where gradients go; None if they are the result of backward.
    """

    def __init__(
        self,
        uses: Sequence[BucketUse],
        names: Callable[[int], Sequence[str]],
        known: Known,
        policy: OnDemand,
        control: Control,
        into: GradSum | None = None,
    ) -> None:
        self.uses, self.into = uses, into
        self.ids: tuple[int, ...] = ()
        self.cells = [Cell(i, names) for i in range(len(uses))]
        self._control = control
        # The player outlives the cache, and must not keep its buffers.
        self._name = partial(_title, names)
        for cell in self.cells:
            cell.stays = policy.at_once
        self.player = Player(known, policy, sizes_of(uses), control, self._name)
        if into is not None:
            into.bind(uses, self.player.order)
        self.reduction: Reduction | None = None  # of the backward pass under way
        self._chunks: dict[int, Tensor] = {}
        self._versions: dict[int, int] = {}
        self._coming: dict[int, Pending] = {}
        self._buffers: dict[int, Tensor] = {}
        self._held: dict[int, Tensor] = {}  # see [Note: placements] in `groups.communicator`
        self._closed = False

    def load(self, indexes: Sequence[int], pieces: Sequence[Tensor]) -> None:
        """Take the data of some buckets, one piece a member; copied unless they are one chunk."""
        for index, (use, data) in zip(
            indexes, deal([self.uses[i] for i in indexes], pieces), strict=True
        ):
            slots, device = use.by_slot(data), data[0].device
            chunk = pack_chunk(use.bucket, use.hierarchy.chunk, slots, device=device).detach()
            if not chunk.numel():  # nothing will be fetched, so nothing else would cast it
                chunk = chunk.to(use.bucket.compute)
            self._chunks[index], self._versions[index] = chunk, _version(chunk)

    def device(self, index: int) -> torch.device:
        """Where a bucket's tensors live."""
        return self._chunks[index].device

    def start(self) -> None:
        """All chunks are loaded: fetch what the policy wants before any use."""
        with _torch.without_torch_func():
            for action in self.player.start():
                self._fetch(action.buckets[0])

    def begin_pass(self) -> Reduction:
        """Where this backward pass brings its gradients."""
        if self.into is not None:
            return self.into
        if self.reduction is None:
            self.reduction = Reduction(self.uses, self.player.order)
        return self.reduction

    def touch(self, ids: tuple[int, ...]) -> None:
        """Make these buckets live, all at once; see `deferred.Source`."""
        if self._closed:
            text = "a gathered parameter is used after its step ended"
            raise GroupsError(message(text, fix="gather again"))
        for i in ids:
            if _version(self._chunks[i]) != self._versions[i]:
                text = f"{self._name(i)} was changed after it was gathered"
                raise DonatedError(message(text, fix="gather again after an update"))
        with _torch.without_torch_func():
            for action in self.player.use(ids):
                (index,) = action.buckets
                self._fetch(index) if action.kind == "fetch" else self._drop(index)
            for i in ids:
                if self.cells[i].full is None:
                    full = self._coming.pop(i).wait().view(-1)
                    self.cells[i].fill(full, _torch.is_hollow(full))
        self.ids = ids
        push_all(self.uses[ids[0]].hierarchy.life)

    def _fetch(self, index: int) -> None:
        route, chunk = self.uses[index].hierarchy, self._chunks[index]
        held_numel, out_numel = self._needs(index)
        chunk = self._held.get(index, chunk)
        if held_numel and index not in self._held:
            self._held[index] = self._take(index, held_numel, keep=True)
        if out_numel:
            self._buffers[index] = self._take(index, out_numel)
        held, out = self._held.get(index), self._buffers.get(index)
        self._coming[index] = start_fetch(route, chunk, held, out)

    def _needs(self, index: int) -> tuple[int, int]:
        """Elements that a bucket's fetch writes: what is held for the run, and all of it."""
        use, chunk = self.uses[index], self._chunks[index]
        outer, inner = use.hierarchy.split(use.hierarchy.hold)
        held = use.bucket.numel // inner.size if outer.size > 1 else 0
        moves = inner.size > 1 or (not held and chunk.dtype != use.bucket.compute)
        return held, use.bucket.numel if moves else 0

    def _take(self, index: int, numel: int, keep: bool = False) -> Tensor:
        use, chunk = self.uses[index], self._chunks[index]
        if _torch.is_hollow(chunk):
            return chunk.new_empty(numel, dtype=use.bucket.compute)
        pool = use.hierarchy.held if keep else use.hierarchy.fetched
        return pool.take((numel,), use.bucket.compute, chunk.device, exact=keep)

    def _drop(self, index: int) -> None:
        coming = self._coming.pop(index, None)
        if coming is not None:  # fetched for a use that did not come
            coming.wait()
        self.cells[index].clear()
        buffer = self._buffers.pop(index, None)
        if buffer is not None:
            with _torch.without_torch_func():
                self.uses[index].hierarchy.fetched.give(buffer)

    def close(self) -> None:
        """The run is over: buckets are dropped, and using its tensors is an error from now on."""
        if not self._closed:
            for action in self.player.end():
                self._drop(action.buckets[0])
            self._closed, self.ids = True, ()
            schedule = self.player.settle()
            if schedule is not None:
                self._provide(schedule)
            self._give_held()
            if self._chunks and self.device(min(self._chunks)).type == "cuda":
                self._control.look()  # here no host waits for a collective, and would look then

    def _provide(self, schedule: Schedule) -> None:
        """Have the memory that a new schedule needs, so that no step has to make any."""
        taken: dict[int, Tensor] = {}
        for action in schedule.actions:
            index = action.buckets[0]
            if action.kind == "fetch":
                held, out = self._needs(index)
                if held and index not in self._held:
                    self._held[index] = self._take(index, held, keep=True)
                if out:
                    taken[index] = self._take(index, out)
            elif action.kind == "drop" and index in taken:
                self.uses[index].hierarchy.fetched.give(taken.pop(index))

    def __del__(self) -> None:
        # The tensors of the tree are gone. Memory that is still being written to is left alone.
        for index in list(getattr(self, "_buffers", ())):
            if index not in self._coming:
                self._drop(index)
        self._give_held()

    def _give_held(self) -> None:
        for index in list(getattr(self, "_held", ())):
            if index not in self._coming:
                self.uses[index].hierarchy.held.give(self._held.pop(index))


def _title(names: Callable[[int], Sequence[str]], index: int) -> str:
    """A bucket in words."""
    found = names(index)
    return f"bucket {index} ({', '.join(found[:2])}{', ...' if len(found) > 2 else ''})"


def _version(chunk: Tensor) -> int:
    return 0 if chunk.is_inference() else chunk._version


def sizes_of(uses: Sequence[Any]) -> list[int]:
    """Bytes that each bucket takes where it is live; none if it is a view of what is there."""
    found = []
    for use in uses:
        route, bucket = use.home and use.hierarchy, use.bucket
        inner = bucket.parts if route is None else route.split(route.hold)[1].size
        cast = inner == bucket.parts and bucket.compute != bucket.dtype
        found.append(bucket.nbytes if inner > 1 or cast else 0)
    return found

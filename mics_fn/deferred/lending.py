"""Memory in a ring for gradients in flight: see [Note: gradients in flight] in `reduction`."""

from collections.abc import Sequence
from statistics import median_low

import torch
from torch import Tensor

from mics_fn import spans
from mics_fn.collectives import spare_numel
from mics_fn.groups import LEAST_RING, Ring, Route, Slot, ring_bytes
from mics_fn.schedules import Run
from mics_fn.shards import Bucket, BucketUse


class Lending:
    """What each bucket of a reduction needs of a ring, and how much is lent at a time."""

    has_target = True  # whether in this pass the mean has memory of its own
    uses: Sequence[BucketUse]
    order: list[int]
    own: dict[int, Tensor]  # bytes to pack a bucket in, where its parameters were
    _run: Run
    _rooms: dict[int, tuple[int, int]]  # by ring: its bytes, and the most parts

    # Methods that `Reduction`, `SumOfPasses` and `PlacedSum` override.

    def alone(self, index: int) -> bool:
        """Whether a bucket is not packed, as there are no other ranks."""
        return self.uses[index].alone

    def dtype_of(self, bucket: Bucket) -> torch.dtype:
        """The dtype of the result of hop 1."""
        return bucket.dtype

    def levels_now(self, route: Route) -> Route:
        """The levels that are reduced in every pass, as soon as a bucket is complete."""
        return route

    def late_levels(self, route: Route) -> Route:
        """The levels that are reduced after `levels_now` in this pass."""
        return Route()

    def gets_room(self, index: int) -> bool:
        """Whether a bucket is packed where its parameters were, unless these stay after all."""
        return False

    def stays_there(self, index: int) -> bool:
        """Whether the mean of a bucket that was packed there stays there too."""
        return False

    def copies(self, use: BucketUse) -> bool:
        """Whether hop 2 follows in another dtype or in codes, so that it sends a copy."""
        return False

    def coded_bytes(self, use: BucketUse) -> int:
        """Bytes of memory that codes of hop 2 take in this pass."""
        return 0

    def sum_sizes(self, index: int) -> tuple[int, ...]:
        """Bytes of further buffers that a bucket needs in this pass, for its sum over passes."""
        return ()

    # Arithmetic with these.

    def slot_sizes(self, index: int, own: bool) -> tuple[int, ...]:
        """Bytes of the buffers that a bucket needs in this pass; 0 if there is nothing.

        Args:
          index: the bucket.
          own: whether it is packed where its parameters were.
        """
        use = self.uses[index]
        bucket, device, dtype = use.bucket, use.home.device, self.dtype_of(use.bucket)
        now, late = self.levels_now(use.route), self.late_levels(use.route)
        mine, same = bucket.numel // now.size, dtype == bucket.reduce
        packed = [0]
        if now.size > 1:
            packed.append(bucket.numel * bucket.reduce.itemsize)
        elif not self.has_target:
            packed.append(bucket.numel * dtype.itemsize)
        if late.size > 1 and not same:
            packed.append(mine * bucket.reduce.itemsize)
        codes, wire, sums = self.coded_bytes(use), bucket.mean_wire, self.sum_sizes(index)
        if self.copies(use) and isinstance(wire, torch.dtype):
            packed.append(mine // late.size * wire.itemsize)
        direct = same and self.has_target and not (own and self.stays_there(index))
        how = {"wire": bucket.hop1, "itemsize": bucket.reduce.itemsize}
        arriving = max(
            spare_numel(now, bucket.numel, device, direct=direct, **how),
            spare_numel(late, mine, device, direct=same, **how),
        )
        second = max(arriving * bucket.reduce.itemsize, codes)
        return 0 if own else max(packed), second, *sums

    def _room(self, ring: Ring) -> tuple[int, int]:
        """Bytes of a ring, and the most parts of it at a time; see [Note: gradients in flight]."""
        here = self._users(ring)
        uses, needs = [(i, self.uses[i]) for i in here], self._needs(here)
        count = 1 + max(
            len(self.levels_now(use.route).levels)
            + len(self.late_levels(use.route).levels)
            + self.copies(use)
            + bool(self.coded_bytes(use))  # codes are exchanged, and gathered
            + bool(self.sum_sizes(i))
            for i, use in uses
        )
        few, budget = count * median_low(needs), self._run.policy.live_bytes
        if budget is not None:
            few = min(few, budget)
        return max(*needs, few, LEAST_RING), count

    def _users(self, ring: Ring) -> list[int]:
        """The buckets that are reduced in a ring."""
        found = [i for i in self.order if not self.alone(i)]
        return [i for i in found if self.uses[i].hierarchy.pools.hops is ring]

    def _needs(self, indexes: Sequence[int]) -> list[int]:
        """Bytes of a ring that each of these buckets needs in this pass."""
        return [ring_bytes(self.slot_sizes(i, self.gets_room(i))) for i in indexes]

    def _slack(self) -> int:
        """A reduction waits at most for the memory of the one so many places before it."""
        found, uses = [len(self.order)], [self.uses[i] for i in self.order if not self.alone(i)]
        for ring in {use.hierarchy.pools.hops for use in uses}:
            sizes = set(self._needs(self._users(ring)))
            room, count = self._room(ring)
            if count > 1:  # else nothing is sent in this pass
                # Parts of different sizes may leave a gap at the end of the ring.
                fit = room // max(1, *sizes) - (len(sizes) > 1)
                found.append(max(1, min(count, fit)))
        return min(found)

    def _lend(self, index: int, device: torch.device) -> Slot:
        """Memory for a bucket's reduction; waits for those that still use it."""
        ring, own = self.uses[index].hierarchy.pools.hops, self.own.get(index)
        if id(ring) not in self._rooms:
            self._rooms[id(ring)] = self._room(ring)
        slot = ring.lend(self.slot_sizes(index, own is not None), *self._rooms[id(ring)], device)
        spans.holds("gradients in reductions", id(ring), ring.nbytes)
        slot.first = slot.first if own is None else own
        return slot

"""Reductions that overlap backward: hop 1 once a bucket's gradients are complete, then hop 2.

[Note: reduced in one order] The order in which buckets become complete may differ between ranks,
for example if only some of them use a parameter. Buckets are reduced in one order that is the same
everywhere: a bucket that is complete early waits for those before it, and one that never becomes
complete is reduced as zeros at the end. So no rank can wait for a reduction that another one does
not do. Where these reductions come between fetches is a part of the run, which compares it: see
[Note: the same order of use] in `schedules.schedule`.

[Note: gradients in flight] A bucket's gradients are packed into a part of a ring of memory, with
room for what arrives from other ranks. They stay there until hop 1 is done, late levels included,
and so does the copy that hop 2 sends in another dtype. The next bucket waits until its part of the
ring is free. The ring has room for one bucket on each level and one that is being packed, by the
median of their sizes; the largest bucket always fits. That is beside the budget for gathered
parameters, as a link that is slow is idle while a bucket waits for room. A budget of 0, the least
memory, has a ring for the largest bucket alone. Where hop 2 sends codes it counts as two levels, on
two communicators: while a bucket's codes are gathered, the next one's are exchanged. So full
gradients take the memory of a few buckets, whatever the size of the model, and how much does not
depend on timing.

[Note: in the memory of parameters] Where `Trainer` keeps all parameters, memory is fullest when the
last backward pass begins: everything is gathered. From then on a bucket that has its gradients is
of no use, and has just the size of what hop 1 packs. So they are packed there, and where nothing is
added and dtypes agree their mean stays there until the end of the step: neither the ring nor the
pool of sums needs memory for it. Beside that there is what arrives from other ranks, and gradients
in full while backward makes them.

An op that runs later, such as that of a hook or of a detached parameter, finds the bucket dropped.
It is fetched again once all ranks have said that they need it, and from the next run on it stays.
If some rank does not need it, all raise DesyncError; `keep_all()` keeps it from the first run on.

[Note: sums elsewhere] A bucket is reduced on the device, wherever its sum lies: the sum of earlier
passes comes to the part of the ring that the bucket has, the mean of hop 1 is added there by the
op that would add it in memory, and the sum goes back. So the bits are those of a sum in memory, and
what the device holds of all sums is a part of the ring. Copies have a queue of their own, on a
device a stream: they run beside backward, and beside the hops of other buckets. To and from files
a thread copies; on a device it is the host, which waits for the bucket.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mics_fn import _torch, checks, collectives, spans, tree
from mics_fn.deferred.memory import LEAST_RING, Lease, Ring, lease_sizes
from mics_fn.errors import LeafError
from mics_fn.groups import Buffers, Comm, Route
from mics_fn.offload import DEVICE, Where, empty_at, transfer
from mics_fn.schedules import Run
from mics_fn.shards import BucketUse, Opened, pack

# How a bucket is reduced in a pass: facts of its layout, found once.


class Hops(NamedTuple):
    """How a bucket is reduced in one pass of a step; pools keep it for the next step."""

    first: bool  # nothing is added to yet
    alone: bool  # there are no other ranks, so that it is not packed
    now: Route  # the levels of hop 1 that are reduced in every pass
    outer: Route  # those that follow in this pass
    dtype: torch.dtype  # of the sum
    divisor: float  # of the sum, behind this pass; see [Note: mean over more ranks] in `groups`
    mean: bool  # hop 2 follows
    copies: bool  # hop 2 sends a copy, in another dtype or in codes
    fits: bool  # it may be packed where its parameters were
    stays: bool  # if it is, its mean stays there, too
    in_flight: int = 0  # how many other buckets are in the ring while this one is
    # Bytes of its buffers in the ring: where it is packed there, and where its parameters were.
    sizes: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())

    @classmethod
    def of(cls, use: BucketUse, passes: int, first: bool, last: bool, placed: bool) -> "Hops":
        """Find how a bucket is reduced in a pass of a step.

        Args:
          use: the bucket.
          passes: of the step; 0 for one that ends with hop 1.
          first, last: which pass it is.
          placed: whether the sum lies elsewhere than on the device.
        """
        bucket, route, others = use.bucket, use.route, use.home.replicas.size > 1
        reduce, wire = bucket.reduce, bucket.hop2_format
        outer, now = route.split(route.outer_grads if passes else 0)
        dtype = bucket.accumulate if passes > 1 else bucket.dtype
        if passes == 1:  # nothing is added
            dtype = torch.promote_types(dtype, reduce)
        sent = [x.itemsize for x in (reduce, wire) if isinstance(x, torch.dtype)]
        rounds = others and isinstance(bucket.hop2, torch.dtype)  # a copy lies there
        found = cls(
            first=first,
            alone=use.alone and not placed,
            now=now,
            outer=outer if last else Route(),
            dtype=dtype,
            divisor=max(1, passes) / route.grad_factor if last else 1.0,
            mean=last and passes > 0,
            copies=last and passes > 0 and others and dtype != wire,
            fits=last and passes > 0 and now.size > 1 and max(sent) <= bucket.compute.itemsize,
            stays=passes == 1 and outer.size == 1 and dtype == reduce and not (rounds or placed),
        )
        return found._with_sizes(use, placed)

    def _with_sizes(self, use: BucketUse, placed: bool) -> "Hops":
        """The same with the memory that it takes; see [Note: gradients in flight]."""
        bucket, wire = use.bucket, use.bucket.hop2_format
        reduce, mine = bucket.reduce, bucket.numel // self.now.size
        same = self.dtype == reduce
        packed, codes, sums = [0], 0, list[int]()
        if self.now.size > 1:
            packed.append(bucket.numel * reduce.itemsize)
        elif not self.first:
            packed.append(mine * self.dtype.itemsize)
        if self.outer.size > 1 and not same:
            packed.append(mine * reduce.itemsize)
        if self.copies and isinstance(wire, collectives.Codec):
            codes = collectives.mean_bytes(wire, bucket.chunk, use.home.replicas.size)
        elif self.copies and isinstance(wire, torch.dtype):
            packed.append(mine // self.outer.size * wire.itemsize)
        if placed:  # the sum, and that of the outer levels
            sums = [mine * self.dtype.itemsize]
            sums += [bucket.chunk * self.dtype.itemsize] if self.outer.size > 1 else []
        how: Any = {"wire": bucket.hop1, "itemsize": reduce.itemsize}
        later, sizes = collectives.levels.spare_numel(self.outer, mine, direct=same, **how), []
        for most, beside in ((max(packed), True), (0, not self.stays)):
            direct = same and self.first and beside  # the mean lies beside what is packed
            spare = max(
                collectives.levels.spare_numel(self.now, bucket.numel, direct=direct, **how), later
            )
            sizes.append(lease_sizes([most, max(spare * reduce.itemsize, codes), *sums]))
        levels = len(self.now.levels) + len(self.outer.levels)  # codes are exchanged and gathered
        count = levels + self.copies + bool(codes) + placed
        return self._replace(in_flight=count, sizes=tuple(sizes))


def ring_bytes(sizes: Sequence[int], parts: int, *, least: bool) -> int:
    """Bytes of a ring for leases of these sizes; see [Note: gradients in flight].

    Args:
      sizes: of the lease of each bucket, in bytes.
      parts: how many are lent at a time at most.
      least: whether the ring has room for the largest alone.
    """
    few = 0 if least else parts * sorted(sizes)[(len(sizes) - 1) // 2]
    return max(*sizes, few, LEAST_RING)


# Packing a bucket's gradients, the memory that they lie in, and who still uses that memory.


def elements(raw: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    """The first elements of some memory."""
    return raw[: numel * dtype.itemsize].view(dtype)


def mean_buffer(lease: Lease, levels: int) -> Tensor:
    """The buffer in which a mean is after so many levels that are not coded.

    NCCL reads one of the two and writes the other, alternately. From the first coded level on,
    codes lie in one of them, and values stay in the other.
    """
    return (lease.first, lease.second)[levels % 2 if _torch.is_async(lease.first.device) else 0]


def free_lease(lease: Lease) -> None:
    """On an accelerator, let the next user of a lease wait for the current stream."""
    device = lease.first.device
    if _torch.is_async(device):
        lease.until = partial(_torch.wait, device, _torch.record(device))


# The gradients of a step on their way to shards.

_DTYPE = attrgetter("dtype")

LetGo = Callable[[], Callable[[int], Tensor | None] | None]  # what a weak reference gives


@dataclass(eq=False)
class _Reducing:
    """One bucket of a `Reduction`: what it has, and where."""

    hops: Hops  # of the present pass
    to_room: bool  # whether it is packed where its parameters were, unless these stay after all
    grads: list[Tensor | None] | None = None  # these in full, until they are packed
    out: Tensor | None = None  # memory for the mean of this pass; None if that is in a ring
    total: list[Tensor] = field(default_factory=list)  # [chunk], or pieces without other ranks
    pendings: list[collectives.Pending] = field(default_factory=list)  # of every pass
    lease: Lease | None = None  # of the latest pass
    own: Tensor | None = None  # bytes to pack it in, where its parameters were


class Reduction:
    """The gradients of all backward passes of a step: hop 1 of each, their mean, then hop 2.

    Args:
      micro_steps: the number of passes in the step; 0 for one pass without hop 2.
    """

    def __init__(self, micro_steps: int = 0) -> None:
        self.micro_steps = micro_steps
        # Called before this rank sends its part of the step's last reduction.
        self.before_last: Callable[[], None] = lambda: None
        self.passes = 0  # that have ended
        self.order: list[int] = []
        self._last_shared = -1  # the last one of them that has other ranks
        self.missing: dict[int, None] = {}  # buckets without a gradient in this pass, in order
        # What is given back at the end, with the kind that watchers are told.
        self._given: list[tuple[Buffers, Tensor, str]] = []
        self._buckets: dict[int, _Reducing] = {}
        self.placed: dict[int, _PlacedSum] = {}  # of sums that lie elsewhere than on the device
        self._released = False  # whether its memory was given back

    def begin(
        self, uses: Sequence[BucketUse], run: Run, let_go: LetGo = lambda: None, places: Any = None
    ) -> "Reduction":
        """Prepare for the gradients of some buckets.

        Args:
          uses: the buckets, frozen ones too.
          run: has the order of all their reductions and the budget, and hears of each before it
            starts.
          let_go: as `LiveBuckets.let_go`, if that is still there.
          places: of buckets whose sums lie elsewhere, as `places_of_sums` gives them.

        Raises:
          FileError: a file cannot be made, or the disk has not so much room.
        """
        self.uses, self.run, self._let_go, self._places = uses, run, let_go, places or {}
        for index in run.order:
            if uses[index].bucket.trainable:
                self.order.append(index)
                self._last_shared = self._last_shared if uses[index].alone else index
        self._begin_pass()
        for index, where in self._places.items():
            self.placed[index] = _PlacedSum(uses[index], self._buckets[index].hops, *where)
        return self

    def _begin_pass(self) -> None:
        """Find how each bucket is reduced in this pass, and what its ring has to hold."""
        count, first, self._next = self.micro_steps, self.passes == 0, 0  # place in the order
        self.last, self.missing = self.passes >= count - 1, dict.fromkeys(self.order)
        # What ranks compare before they reduce a bucket; those that have more passes differ here.
        self._does = f"reduction in pass {self.passes + 1} of {count}" if count else "hop 1"
        needs: dict[int, list[int]] = {}  # by ring, the bytes of its buckets
        parts: dict[int, int] = {}  # the most of them at a time
        for index in self.order:
            use, placed = self.uses[index], index in self._places
            pass_kind = count, first, self.last, placed
            # Placements of the same groups share their pools, and differ in their routes.
            key = (use.bucket, use.route, use.home.replicas.size, *pass_kind)
            kept = use.hierarchy.pools
            if (hops := kept.sums.get(key)) is None:
                hops = kept.sums[key] = Hops.of(use, *pass_kind)
            to_room = hops.fits and self.run.lets_go(index)
            each = self._buckets.setdefault(index, _Reducing(hops, to_room))
            each.hops, each.to_room, each.out = hops, to_room, None
            if not hops.alone:
                if "ring" not in kept.sums:
                    kept.sums["ring"] = Ring()
                ring = id(kept.sums["ring"])
                needs.setdefault(ring, []).append(sum(hops.sizes[to_room]))
                parts[ring] = max(parts.get(ring, 0), 1 + hops.in_flight)
        # Of each ring its bytes, and the most parts; see [Note: gradients in flight].
        self._rooms, least = dict[int, tuple[int, int]](), self.run.policy.live_bytes == 0
        for ring, sizes in needs.items():
            self._rooms[ring] = ring_bytes(sizes, parts[ring], least=least), parts[ring]

    def add(self, index: int, grads: Sequence[Tensor | None]) -> None:
        """Add a bucket's full gradients, one per member, and start hop 1 in the agreed order.

        Raises:
          LeafError: the bucket has got its gradients already.
        """
        each = self._buckets[index]
        if index not in self.missing:
            text = "backward: a bucket got gradients in two parts in one pass"
            fix = "use torch.utils.checkpoint, instead of a backward that runs in backward"
            raise LeafError(text, [f"bucket {index}"], fix)
        del self.missing[index]
        values = list(map(pack.dense, grads))
        if each.hops.alone:
            self._add_alone(index, values)
        else:
            if spans.watchers:
                nbytes = sum(x.nbytes for x in values if x is not None)
                spans.resident("gradients in full", (id(self), index), nbytes)
            each.grads, each.out = values, self._target(index, values)
        self._issue()

    def started(self, index: int, grads: Sequence[Tensor | None]) -> list[Tensor]:
        """Add a bucket's gradients; return its pieces, which have values only after `wait`."""
        self.add(index, grads)
        use, each = self.uses[index], self._buckets[index]
        if each.out is None:
            return each.total
        # Through `.data`, autograd does not see that values are written later as a change.
        pieces = [piece.data for piece in pack.split_chunk(use.bucket, use.route.chunk, each.out)]
        return use.by_member(pieces)

    def skip(self, index: int) -> None:
        """Mark a bucket as reduced elsewhere (under vmap), so that those behind it can start."""
        del self.missing[index]
        self._issue()

    def end_pass(self) -> None:
        """Prepare for the next pass, once no bucket is missing."""
        self.passes += 1
        if self.passes < self.micro_steps:
            self._begin_pass()

    def waited(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        """Return pieces that `started` gave once they have values."""
        self.wait()
        return [piece.view_as(piece) for piece in pieces]

    def wait(self) -> None:
        """Wait for all reductions that were started; on CUDA the current stream waits for them."""
        for index in self.order:
            self.wait_for(index)

    def wait_for(self, index: int) -> None:
        """Wait for one bucket."""
        pendings = self._buckets[index].pendings
        for pending in pendings:
            pending.wait()
        pendings.clear()

    def done(self, index: int) -> bool:
        """Whether no wait is left for a bucket; on an accelerator, for the host."""
        return all(pending.finished for pending in self._buckets[index].pendings)

    def pieces(self, index: int) -> list[Tensor]:
        """A bucket's mean gradients, one per member, in the dtype of the shards.

        Of a bucket that lies elsewhere in new memory on the device, at each call.
        """
        use, dtype, each = self.uses[index], self.uses[index].bucket.dtype, self._buckets[index]
        if each.hops.alone:
            is_same = each.hops.dtype == dtype
            return list(each.total) if is_same else [total.to(dtype) for total in each.total]
        if index in self.placed:
            chunk = torch.empty(use.bucket.chunk, dtype=dtype, device=use.home.device)
            for _ in transfer(self.placed[index].room[: use.bucket.chunk], chunk):
                pass
        else:
            chunk = each.total[0].to(dtype)
        found = use.by_member(pack.split_chunk(use.bucket, use.route.chunk, chunk))
        # Gradients that autograd gave are apart, and kernels round ends of long tensors otherwise.
        return [x.clone() for x in found] if use.alone else found

    def release(self) -> None:
        """Give the memory of the gradients back, for the next step; they must not be read then."""
        for number, (buffers, tensor, kind) in enumerate(self._given, 1):
            buffers.give(tensor)
            spans.resident(kind, (id(self), number), 0)
        for index, each in self._buckets.items():
            each.total = []
            spans.resident("gradient shards", (id(self), -1 - index), 0)
        self._given, self.placed, self._released = [], {}, True

    # The memory of a bucket.

    def _target(self, index: int, values: Sequence[Tensor | None]) -> Tensor | None:
        """Memory for the mean of the first pass; None where the ring has it.

        Here a bucket gets the memory of its parameters; see [Note: in the memory of parameters].
        """
        use, each = self.uses[index], self._buckets[index]
        hops, let_go = each.hops, self._let_go()
        if let_go is not None and each.to_room and (room := let_go(index)) is not None:
            each.own = room.view(torch.uint8)
            self._give_back(use.hierarchy.pools.fetched, room, "gathered")
        if self.passes or index in self.placed:
            return None
        numel = use.bucket.numel // hops.now.size
        if not self.micro_steps:  # autograd hands it out
            device = next((v.device for v in values if v is not None), use.home.device)
            return torch.empty(numel, dtype=hops.dtype, device=device)
        if each.own is not None and hops.stays:
            return elements(each.own, numel, hops.dtype)
        return self._take(use, numel, hops.dtype)

    def _take(self, use: BucketUse, numel: int, dtype: torch.dtype) -> Tensor:
        """Memory for a sum until the end of the step.

        If it went back earlier, the number of chunks would depend on timing.
        """
        pool = use.hierarchy.pools.chunks
        taken = pool.take((numel,), dtype, use.hierarchy.device, exact=True)
        self._give_back(pool, taken, "gradient shards")
        return taken

    def _give_back(self, pool: Buffers, tensor: Tensor, kind: str) -> None:
        """Have memory in which gradients lie given back at the end of the step."""
        self._given.append((pool, tensor, kind))
        spans.resident(kind, (id(self), len(self._given)), tensor.nbytes)

    # The reduction of a bucket.

    def _add_alone(self, index: int, values: Sequence[Tensor | None]) -> None:
        """Add gradients that are their own mean, as there are no other ranks; not packed."""
        use, hops = self.uses[index], self._buckets[index].hops
        # torch may give one tensor as two gradients, so what is written needs memory of its own.
        copy = not self.passes and (self.micro_steps > 1 or hops.divisor != 1)
        numels, device = use.by_member(use.bucket.numels), use.home.device
        flat = list[Tensor]()
        for n, value in zip(numels, values, strict=True):
            if value is None:
                value = torch.zeros(n, dtype=hops.dtype, device=device)
            flat.append(value if value.ndim == 1 else value.reshape(n))
        if copy or set(map(_DTYPE, flat)) != {hops.dtype}:
            flat = [x.to(hops.dtype, copy=copy) for x in flat]
        total = self._sum(index, hops, flat)
        if spans.watchers:
            nbytes = sum(x.nbytes for x in total)
            spans.resident("gradient shards", (id(self), -1 - index), nbytes)

    def _sum(self, index: int, hops: Hops, values: list[Tensor]) -> list[Tensor]:
        """Add to a bucket's total; in the last pass it becomes the mean over passes."""
        each = self._buckets[index]
        if each.total:
            _torch.foreach_add(each.total, values)
        else:
            each.total = values
        if values and hops.divisor != 1:
            _torch.foreach_div(each.total, hops.divisor)
        return each.total

    def _issue(self) -> None:
        """Start the next reductions in the order, up to the first bucket that is not complete."""
        while self._next < len(self.order) and self.order[self._next] not in self.missing:
            index = self.order[self._next]
            values, self._buckets[index].grads = self._buckets[index].grads, None
            if values is not None:
                self._start(index, values)
                spans.resident("gradients in full", (id(self), index), 0)
            self._next += 1

    def _start(self, index: int, values: list[Tensor | None]) -> None:
        if self.last and index == self._last_shared:
            self.before_last()
        use, each = self.uses[index], self._buckets[index]
        hops, out, bucket, now = each.hops, each.out, use.bucket, each.hops.now
        collectives.push_all(use.home.state)
        if each.lease is not None:
            each.lease.until()  # else a later pass could be added to the sum first
        device = use.home.device if out is None else out.device
        ring = use.hierarchy.pools.sums["ring"]
        sizes = hops.sizes[each.own is not None]
        lease = each.lease = ring.lend(sizes, *self._rooms[id(ring)], device)
        spans.resident("gradients in reductions", id(ring), ring.nbytes)
        if each.own is not None:
            lease.first = each.own
        if lease.more and not self.passes:
            out = elements(lease.more[0], bucket.numel // now.size, hops.dtype)
        full = out  # if nothing is scattered they are packed where the mean goes
        if now.size > 1 or full is None:  # gradients that are not sent need no rounding
            dtype = bucket.reduce if now.size > 1 else hops.dtype
            full = elements(lease.first, bucket.numel, dtype)
        with spans.span("pack", bucket, device=full.device):
            pack.pack_full(bucket, use.by_slot(values), device=full.device, out=full)
            pack.observe(bucket, full)
        comms = collectives.levels.scatter_comms(now, full := full.view(now.size, -1))
        if out is None:
            coded = bucket.hop1.levels(now) if bucket.hop1 else 0
            out = elements(mean_buffer(lease, len(comms) - coded), full.shape[1], full.dtype)
        later, levels = self._later_comms(index, out)
        how = {"keep": (full, out, lease.second), "device": device}
        steps = self._steps(index, hops, full, out, lease)
        what = (use.named("defer"), self._does, bucket)
        pending = collectives.Pending(steps, [*comms, *later], **how, what=what)
        each.pendings.append(pending)
        if not _torch.is_async(device):
            lease.until = partial(pending.wait_for, len(now.levels) + levels)

    def _later_comms(self, index: int, out: Tensor) -> tuple[list[Comm], int]:
        """Communicators of what follows hop 1, and after how many of them the lease is free."""
        use, hops, comms, levels = self.uses[index], self._buckets[index].hops, list[Comm](), 0
        if hops.mean:
            hop_2 = collectives.levels.mean_comms(use.home.replicas, out, use.bucket.hop2_format)
            comms = [*collectives.levels.scatter_comms(hops.outer, out), *hop_2]
            levels = len(hops.outer.levels) + (len(hop_2) if hops.copies else 0)
        if index in self.placed:  # the sum comes and goes, and the lease is in use to the end
            own = self.placed[index].comm
            comms = [*([own] if self.passes else []), *comms, own]
            levels = len(comms)
        return comms, levels

    def _steps(
        self, index: int, hops: Hops, full: Tensor, out: Tensor, lease: Lease
    ) -> collectives.Steps:
        """Run hop 1 and sum over passes; in the last pass also the outer levels and hop 2."""
        use, placed, each = self.uses[index], self.placed.get(index), self._buckets[index]
        bucket, wire = use.bucket, use.bucket.hop2_format
        spare = lease.second.view(bucket.reduce)
        yield from collectives.levels.scatter_steps(hops.now, full, out, spare, bucket.hop1)
        if placed is not None and not hops.first:
            before = elements(lease.more[0], out.numel(), hops.dtype)
            yield placed.task("from", before)
            each.total = [before]
        (total,) = self._sum(index, hops, [out])
        if hops.outer.size > 1:
            total = yield from self._outer_steps(use, hops.outer, total, lease)
            each.total = [total]
        if not hops.copies and placed is None:
            free_lease(lease)
        if hops.mean:
            room = lease.second  # of codes; values may lie where gradients were packed
            if not isinstance(wire, collectives.Codec):
                room = elements(lease.first, total.numel(), wire)
            yield from collectives.levels.mean_steps(use.home.replicas, total, wire, room)
        if placed is not None:
            each.total = []  # it is elsewhere
            yield placed.task("to", total)
        if hops.copies or placed is not None:
            free_lease(lease)
        return total

    def _outer_steps(
        self, use: BucketUse, outer: Route, total: Tensor, lease: Lease
    ) -> collectives.Steps:
        """Hop 1 over the levels that wait for the last pass, in the memory of the lease."""
        bucket, full = use.bucket, total
        if total.dtype != bucket.reduce:
            full = elements(lease.first, total.numel(), bucket.reduce).copy_(total)
        if lease.more:
            mine = elements(lease.more[1], bucket.chunk, total.dtype)
        else:
            mine = self._take(use, bucket.chunk, total.dtype)
        spare = lease.second.view(bucket.reduce)
        yield from collectives.levels.scatter_steps(
            outer, full.view(outer.size, -1), mine, spare, bucket.hop1
        )
        return mine


# Sums of gradients that lie elsewhere than on the device: in host memory, or in files.


class _PlacedSum:
    """Memory at a place for the sum of one bucket, and the copies there and back.

    Args:
      use, hops: the bucket, and how it is reduced in the first pass.
      place: where.
      leaf: of the bucket, for errors.
      host_bytes: of the `Where` that the place comes from.
    """

    def __init__(self, use: BucketUse, hops: Hops, place: str, leaf: str, host_bytes: int) -> None:
        self._place, self._leaf = place, tree.join("grads", leaf)
        self.comm = use.hierarchy.sum_queue
        how: Any = {"device": use.home.device, "host_bytes": host_bytes, "leaf": self._leaf}
        self.room = empty_at(place, (use.bucket.numel // hops.now.size,), hops.dtype, **how)

    def task(self, way: str, memory: Tensor) -> collectives.Task:
        """Return the task that stores a sum from its first element on ("to"), or fetches it."""
        there = self.room[: memory.numel()]

        def move(here: Tensor) -> Iterator[None]:
            return transfer(here, there) if way == "to" else transfer(there, here)

        op = f"the copy of the sum of {self._leaf} {way} {self._place}"
        return collectives.Task(self.comm, op, move).to(memory)


def places_of_sums(where: Where, opened: Opened) -> dict[int, tuple[str, str, int]]:
    """Return the buckets with gradients in host memory or files, with what `_PlacedSum` takes.

    A bucket's gradients lie together, where those of its largest leaf should.
    """
    checks.check_matched("GradSum: where", where.patterns, tree.spec_paths(opened.spec))
    found = {}
    for index, use in enumerate(opened.uses):
        sizes = use.by_member(use.bucket.numels)
        if not use.bucket.trainable or not sizes or not use.bucket.chunk:
            continue
        leaf = opened.names(index)[sizes.index(max(sizes))]
        place = where.at(leaf, "grads", use.home.device)
        if place != DEVICE:
            found[index] = place, leaf, where.host_bytes
    return found

"""`simulate`: what a step does, when, and in how much memory, on a cluster that nobody has.

[Note: replay] A `Schedule` is replayed action by action, as a run follows it. There is one stream
that computes, one stream for each communicator, and the links, of which each carries one collective
at a time. A collective starts once what computes has reached its place, its communicator is free,
and the level before is done; it then waits for its link. Which of two collectives crosses a link
first is decided by the program and never by times: at each use of a bucket and each reduction, all
that are under way enter their next link, the oldest first; a wait lets all of them go on until its
own is done. So every time is a maximum of sums of durations, and nothing that becomes faster makes
any event later.

What a collective is, how many bytes it sends and how much memory a reduction takes are those of the
library: groups, buckets, routes, `Hops` and the ring are the same values and the same code. Only
`Level`s have no process groups. Of compute it knows a number of seconds for the step, of which each
use has a share: by the elements of its buckets, 1 in forward and 2 in backward. Between compute and
its gradients nothing is known of what an op saves: activations are not counted.

Not simulated: sums of gradients and parameters in host memory or files, weights of losses, buffers,
means of a user's own, failures, models in parts, steps that overlap hop 2, and several placements
in one tree.
"""

from bisect import bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from html import escape
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import torch

from mics_fn import checks, spans
from mics_fn.collectives import Codec, check_level
from mics_fn.deferred import live, memory, reduction
from mics_fn.errors import PlanError, human_bytes
from mics_fn.groups import Comm, Groups
from mics_fn.inspection import Event, StepMemory, Timeline
from mics_fn.lab import report
from mics_fn.lab.hardware import Device, Hardware, Placement
from mics_fn.optim import TOTALS
from mics_fn.schedules import Action, Schedule, plan
from mics_fn.shards import Bucket, BucketUse, LeafSpec, Precision, plan_buckets

# Schedules, as a `Trainer` follows them.


def scheduled(
    record: Schedule, sizes: Sequence[int], live_bytes: int | str | None, *, prefetch: int = 4
) -> Schedule:
    """The schedule that a `Trainer` with this budget makes of a record.

    Args:
      record: uses and reductions in order, and marks of backward passes.
      sizes: bytes of each bucket, as `bucket_sizes` gives them.
      live_bytes: the budget. With None, or if all fits in it, everything is fetched at once, in the
        order of first use, and dropped in the last pass where its gradients are complete.
      prefetch: as for `schedules.plan`.

    Example:
      >>> record = Schedule.parse("use 1; use 0; use 1; reduce 1; reduce 0")
      >>> print(scheduled(record, [8, 8], None))
      fetch 1; fetch 0; use 1; use 0; use 1; drop 1; reduce 1; drop 0; reduce 0
    """
    budget = None if live_bytes is None else checks.nbytes("scheduled", "live_bytes", live_bytes)
    if budget is not None and budget < sum(sizes):
        return plan(record, sizes, live_bytes=budget, prefetch=prefetch)
    used = [bucket for ids in record.uses for bucket in ids]
    actions = [Action("fetch", (b,)) for b in dict.fromkeys([*used, *range(len(sizes))])]
    kept = [action for action in record.actions if action.kind not in ("fetch", "drop")]
    last = {bucket: i for i, action in enumerate(kept) for bucket in action.buckets}
    for i, action in enumerate(kept):
        bucket = action.buckets[0] if action.kind == "reduce" else -1
        if last.get(bucket) == i and sizes[bucket]:
            actions.append(Action("drop", (bucket,)))
        actions.append(action)
    return Schedule(tuple(actions))


def followed(trainer: Any) -> Schedule:
    """The schedule that the next step of a `Trainer` follows, once it has taken one or two.

    Raises:
      PlanError: it has not taken a step yet.
    """
    policy = trainer.schedule
    if isinstance(policy, Schedule):
        return policy
    if policy.schedule is not None:
        return policy.schedule
    runs = [each.last for each in policy.learned.values() if each.last is not None]
    if not runs:
        raise PlanError("followed: this Trainer has no schedule yet", fix="take two steps first")
    return scheduled(runs[-1].marked, runs[-1].sizes, None)


# What is simulated: streams, links, and what crosses them.


class _Hop(NamedTuple):
    """One level of a collective."""

    kind: str  # of its event
    level: str  # in the ledger
    stream: str
    link: str
    nbytes: int  # that each rank sends
    seconds: float
    own_s: float  # of the time of what computes, where that does it itself


@dataclass(eq=False)
class _Flight:
    """A collective under way."""

    about: Any  # its bucket, or a text
    hops: Sequence[_Hop]
    ready: float  # when its next level may start
    ends: list[float] = field(default_factory=list)  # of its levels so far


class _Pass(NamedTuple):
    """How buckets are reduced in one pass."""

    hops: dict[int, reduction.Hops]
    room: set[int]  # buckets that are packed where their parameters were
    parts: int  # leases of the ring at a time


class _Streams:
    """One stream that computes, one for each communicator, and the links; see [Note: replay]."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.now = self.waited = 0.0  # of the stream that computes
        self._free = defaultdict[str, float](float)  # since when a stream or a link is
        self._queues = defaultdict[str, deque[_Flight]](deque)
        self._active: list[_Flight] = []
        self.events: list[Event] = []

    def compute(self, kind: str, about: Any, seconds: float = 0.0) -> None:
        """Let what computes be busy, and note with what."""
        self.now += seconds
        self._note(kind, about, "", 0, self.now - seconds, self.now)

    def _note(self, kind: str, about: Any, *facts: Any) -> None:
        buckets = about if isinstance(about, list) else [about] * isinstance(about, Bucket)
        text = spans.title(about)
        text = text if kind == "wait" else text.partition(": ")[2] or text
        self.events.append(Event(kind, text, tuple([x.index for x in buckets]), *facts))

    def start(self, about: Any, hops: Sequence[_Hop]) -> _Flight:
        """Start a collective, whose first level enters its link if no other is before it."""
        flight = _Flight(about, hops, self.now)
        for hop in hops:
            self._queues[hop.stream].append(flight)
        self._active += [flight] * bool(hops)
        self._enter(flight)
        return flight

    def _enter(self, flight: _Flight) -> None:
        """Let the next level of a collective enter its link, if it is the first of its stream."""
        hop = flight.hops[len(flight.ends)] if len(flight.ends) < len(flight.hops) else None
        if hop is None or self._queues[hop.stream][0] is not flight:
            return
        self._queues[hop.stream].popleft()
        if not self._device.runs_ahead:  # the host starts it, and takes part
            self.now += hop.own_s
            flight.ready = max(flight.ready, self.now)
        link = f"link {hop.link}"
        start = max(flight.ready, self._free[hop.stream], self._free[link])
        end = flight.ready = self._free[hop.stream] = self._free[link] = start + hop.seconds
        flight.ends.append(end)
        self._note(hop.kind, flight.about, hop.level, hop.nbytes, start, end)

    def push(self) -> None:
        """Let all that is under way enter one link more."""
        for flight in self._active:
            self._enter(flight)
        self._active = [each for each in self._active if len(each.ends) < len(each.hops)]

    def wait(self, flight: _Flight, levels: int = 99) -> None:
        """Let what computes wait for a collective, or for so many levels of it."""
        hops = flight.hops[:levels]
        while len(flight.ends) < len(hops):
            self.push()
        if hops and (end := flight.ends[len(hops) - 1]) > self.now:
            about = spans.Span(hops[-1].kind, flight.about)
            self._note("wait", about, "", 0, self.now, end)
            self.waited, self.now = self.waited + end - self.now, end


# The step.


class _Step:
    """Replays one step; see [Note: replay]."""

    def __init__(self, uses: Sequence[BucketUse], groups: Groups, cluster: Hardware) -> None:
        self.uses, self.buckets, self.sizes = uses, [x.bucket for x in uses], live.sizes_of(uses)
        self.route, self.groups = groups.hierarchy.route, groups
        self.cluster, self.streams = cluster, _Streams(cluster.device)
        self.kept = live.kept_of(uses)  # from the first fetch on
        self.peak = self.bytes = 0  # of gathered buckets, and of what a placement keeps
        self.fetched: dict[int, _Flight] = {}  # the latest of each bucket
        self.reduced: dict[int, tuple[_Flight, memory.Lease]] = {}
        self.ring, self.shares = memory.Ring(), dict[tuple[Comm, str], int]()

    # What is sent.

    def _hop(self, kind: str, comm: Comm, nbytes: float, link: str, **how: Any) -> _Hop:
        """One level; where it is a ring, only one of a node's ranks sends over the link.

        Args:
          kind, comm, nbytes, link: of it.
          how: `rounds` of a ring, elements that are `coded` in it, its `level` in the ledger.
        """
        device, rounds, sent, inside = self.cluster.device, how.get("rounds", 1), nbytes, 0.0
        ring = rounds == 2 or device.runs_ahead
        if ring and (share := self._in_a_node(comm, link)) > 1:
            inner = self.cluster.links[self.cluster.topology.names.index(link) + 1]
            sent, inside = nbytes / share, inner.seconds(1, nbytes)
        crossed = self.cluster.link(link)
        delay = crossed.seconds(comm.size, 0, rounds)
        rate = device.coded_gb_per_s or device.gb_per_s / 15
        own = delay + 4e-9 * how.get("coded", 0) / rate + device.shared * nbytes
        seconds = max(inside, crossed.seconds(1, sent))
        if device.runs_ahead:
            seconds, own = seconds + own, 0.0
        level = how.get("level") or comm.name
        return _Hop(kind, level, comm.name, link, int(nbytes), seconds, own)

    def _in_a_node(self, comm: Comm, link: str) -> int:
        """How many ranks of a communicator are on one side of a link, with this one."""
        if (comm, link) not in self.shares:
            at = self.cluster.topology.names.index(link) + 1
            inner = prod(self.cluster.topology.sizes[at:])
            own = comm.ranks[comm.rank] // inner
            self.shares[comm, link] = sum(rank // inner == own for rank in comm.ranks)
        return self.shares[comm, link]

    def _mean(self, kind: str, comm: Comm, numel: int, wire: Any, level: str = "") -> list[_Hop]:
        """An all-reduce; an exchange and an all-gather of codes, or in a fixed order."""
        n, link, second = comm.size, self.cluster.outermost, comm.name
        if comm is self.groups.partition and self.route.levels:
            link = _link(self.route.levels[0])
        if n == 1 or not numel:
            return []
        if isinstance(wire, Codec):
            nbytes, second = report.averaged_codes(wire, numel, n) / 2, "replicas, second"
        elif comm.fixed_order:
            nbytes = (n - 1) * -(-numel // n) * wire.itemsize
        else:
            nbytes = 2 * (n - 1) * numel * wire.itemsize // n
            return [self._hop(kind, comm, nbytes, link, rounds=2, level=level)]
        # Half of it in each: parts of others are coded and decoded, then their means.
        coded = 1.5 * numel * isinstance(wire, Codec)
        first = self._hop(kind, comm, nbytes, link, level=level, coded=coded)
        return [first, first._replace(stream=second)]

    # What is done.

    def fetch(self, index: int) -> None:
        """Gather a bucket; over the levels of which a run keeps what came, the first time alone."""
        bucket, repeated = self.buckets[index], index in self.fetched
        pairs = zip(self.route.levels, report.gathered(bucket, self.route), strict=True)
        wire = bucket.gather_wire
        count, coded = wire.levels(self.route) if wire else 0, bucket.chunk
        hops = list[_Hop]()
        for i, (level, sent) in enumerate(pairs):  # a chunk is coded once, and all are decoded
            coded *= self.route.sizes[i]
            own = (bucket.chunk + coded) * (i == count - 1)
            hops.append(self._hop("fetch", level.gather, sent.nbytes, _link(level), coded=own))
        hops = hops[self.route.outer_params if repeated else 0 :] if bucket.chunk else []
        self.fetched[index] = self.streams.start(bucket, hops)
        self.bytes += self.sizes[index] + (0 if repeated else self.kept[index])
        self.peak = max(self.peak, self.bytes)

    def use(self, ids: Sequence[int], seconds: float) -> None:
        for index in ids:
            self.streams.wait(self.fetched[index])
        self.streams.compute("use", [self.buckets[index] for index in ids], seconds)
        self.streams.push()

    def drop(self, index: int) -> None:
        self.streams.wait(self.fetched[index])  # it may be that nobody used it
        self.streams.compute("drop", self.buckets[index])
        self.bytes -= self.sizes[index]

    def plan_passes(self, order: Sequence[int], count: int, room: set[int], *, least: bool) -> None:
        """Find how each bucket is reduced in each pass, and what the ring has to hold in all.

        Args:
          order: of the reductions.
          count: of passes.
          room: buckets that are packed where their parameters were, if they fit there.
          least: whether the ring has room for one bucket alone.
        """
        self.passes, self.ring_bytes = deque[_Pass](), 0  # a ring has served the steps before
        for number in range(count):
            if 1 < number < count - 1:  # as the one before it
                self.passes.append(self.passes[-1])
                continue
            how = count, number == 0, number == count - 1, False
            hops = {index: reduction.Hops.of(self.uses[index], *how) for index in order}
            own = {i for i in order if i in room and hops[i].fits}
            leases = [sum(each.sizes[i in own]) for i, each in hops.items()]
            parts = max((1 + each.in_flight for each in hops.values()), default=1)
            nbytes = reduction.ring_bytes(leases or [0], parts, least=least)
            self.passes.append(_Pass(hops, own, parts))
            self.ring_bytes = max(self.ring_bytes, nbytes)
        self.begin_pass(order)

    def begin_pass(self, order: Sequence[int]) -> None:
        """Begin the next pass, if there is one."""
        if self.passes:
            self.now, self.order = self.passes.popleft(), deque(order)
            self.missing = dict.fromkeys(order)

    def reduce(self, index: int) -> None:
        """A bucket has its gradients: it is reduced, once those before it in the order are."""
        del self.missing[index]
        while self.order and self.order[0] not in self.missing:
            self._start(self.order.popleft())

    def _start(self, index: int) -> None:
        bucket, route, streams = self.buckets[index], self.route, self.streams
        hops = self.now.hops[index]
        if hops.alone:
            return
        streams.push()
        if index in self.reduced:
            self.reduced[index][1].until()
        sizes, meta = hops.sizes[index in self.now.room], torch.device("meta")
        lease = self.ring.lend(sizes, self.ring_bytes, self.now.parts, meta)
        width = bucket.reduce if hops.now.size > 1 else hops.dtype
        streams.compute("pack", bucket, self._copying(2 * bucket.numel * width.itemsize))
        count = len(hops.now.levels) + len(hops.outer.levels)
        pairs = [*zip(route.levels, report.scattered(bucket, route), strict=True)][::-1][:count]
        wires = bucket.hop1.levels(route) if bucket.hop1 else 0
        found = list[_Hop]()
        for i, (level, sent) in zip(range(len(route.levels))[::-1], pairs, strict=False):
            coded = 2 * (route.sizes[i] - 1) * bucket.chunk * prod(route.sizes[:i]) * (i < wires)
            found.append(self._hop("hop1", level.reduce, sent.nbytes, _link(level), coded=coded))
        mean = self._mean("hop2", self.groups.replicas, bucket.chunk, bucket.hop2_format)
        found = found + mean * hops.mean if bucket.chunk else []
        flight = streams.start(bucket, found)
        lease.until = partial(streams.wait, flight, count + len(mean) * hops.copies)
        self.reduced[index] = flight, lease

    def _copying(self, nbytes: int) -> float:
        """Seconds to read or write so many bytes."""
        return nbytes / (self.cluster.device.gb_per_s * 1e9)

    def end(self, order: Sequence[int], moments: int) -> None:
        """Wait for all gradients, exchange the totals of the step, and update."""
        for index in order:
            if index in self.reduced:
                self.streams.wait(self.reduced[index][0])
        totals = list[_Hop]()
        for comm in (self.groups.partition, self.groups.replicas):
            totals += self._mean(TOTALS, comm, 4, torch.float64, TOTALS)
        self.streams.wait(self.streams.start(TOTALS, totals))
        about = [self.buckets[index] for index in order]
        # Parameters and moments are read and written, gradients are read.
        nbytes = (3 + 2 * moments) * sum(x.chunk * x.dtype.itemsize for x in about)
        self.streams.compute("opt", about, self._copying(nbytes))


def _link(level: Any) -> str:
    """The level of the topology that a level of a route crosses."""
    return level.reach or level.name


def _passes(schedule: Schedule) -> list[tuple[int, int]]:
    """Of each backward pass the first action in it, and its last reduction.

    Where a pass begins is marked, or it is behind the first use of the bucket that comes last,
    since forward uses all; and it ends where the next reduction is of a bucket that it has reduced.
    """
    actions, ends, reduced = schedule.actions, [0], set[tuple[int, ...]]()
    begins = [i for i, action in enumerate(actions) if action.kind == "backward"]
    marked = bool(begins)
    for i, (kind, buckets) in enumerate(actions):
        opens = kind == "reduce" and (len(ends) == 1 or buckets in reduced)
        if opens and marked:
            text = f"simulate: actions[{i}] is '{actions[i]}', in no pass that is marked"
            raise PlanError(text, fix="mark each by 'backward', or none; one reduction in each")
        if opens or kind == "backward":
            ends.append(i)
            reduced.clear()
        if kind == "reduce":
            ends[-1] = i
            reduced.add(buckets)
    for start, end in () if marked else pairwise(ends):
        first = dict[int, int]()
        for i in range(start, end):
            for bucket in actions[i].buckets if actions[i].kind == "use" else ():
                first.setdefault(bucket, i)
        begins.append(1 + max(first.values(), default=start))
    return list(zip(begins, ends[1:], strict=True))


def _shares(actions: Sequence[Action], bounds: Sequence[int], buckets: Sequence[Bucket]) -> Any:
    """Of each use its share of what a step computes: for its input, and for its weights."""
    phases = [
        (bisect_right(bounds, i), a.buckets) for i, a in enumerate(actions) if a.kind == "use"
    ]
    counts = Counter((phase, bucket) for phase, ids in phases for bucket in ids)
    found = list[float]()
    for phase, ids in phases:  # an odd one is backward
        twice = phase % 2
        work = [
            buckets[i].numel * (1 + twice * buckets[i].trainable) / counts[phase, i] for i in ids
        ]
        found.append(sum(work))
    return [share / (sum(found) or 1.0) for share in found]


@dataclass(frozen=True, repr=False)
class Simulated:
    """What a step would do on a cluster; prints as a table of events.

    Args:
      schedule: that it follows.
      seconds: the length of the step.
      exposed_s: for how long what computes waits in it.
      events: as those of a `Timeline`.
      peak: bytes of each kind of data.
    """

    schedule: Schedule
    seconds: float
    exposed_s: float
    events: tuple[Event, ...] = field(repr=False)
    peak: StepMemory

    def timeline(self) -> Timeline:
        """The events of the step, as `inspection.watch` gives them of a real one."""
        return Timeline("simulated step", self.events, self.seconds)

    def memory(self) -> StepMemory:
        """Peak bytes of each kind of data on a rank; activations are not counted."""
        return self.peak

    def sent_bytes(self) -> dict[str, int]:
        """What a rank sends, by communicator, as the ledger of the groups has it."""
        return self.timeline().sent_bytes()

    def __str__(self) -> str:
        exposed = f"{self.exposed_s:.3g} s exposed, {human_bytes(self.peak.total)} at most"
        return f"simulated step: {self.seconds:.3g} s, {exposed}"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}\n{escape(str(self.peak))}</pre>"


def simulate(
    schedule: Schedule,
    sizes: Sequence[int] | Sequence[Bucket],
    cluster: Hardware | str,
    *,
    partition_size: int,
    placement: Placement = "mics",
    accumulate: int | None = None,
    precision: Precision | str | None = None,
    live_bytes: int | str | None = None,
    compute_s: float | None = None,
    tokens: int | None = None,
    moments: int = 2,
) -> Simulated:
    """What one step of a schedule does on a cluster, when, and in how much memory.

    Args:
      schedule: that the step follows, as `followed(trainer)` or a policy has it, or your own. One
        without fetches is a record, of which `scheduled` makes the schedule.
      sizes: the buckets of a tree, or the bytes of each of them in full, which are then trained.
      cluster: where; or the text of a well-known one, as `Hardware.of` reads it.
      partition_size: number of ranks that share one replica.
      placement: a name, or what places groups; see `Hardware.groups`.
      accumulate: micro-steps of the step; None counts the backward passes of the schedule.
      precision: of buckets that are given as bytes.
      live_bytes: the budget of the run, as `Trainer` has it: with 0 gradients are reduced in the
        memory for one bucket, and with None (or if all fits) they are packed where parameters were.
      compute_s: seconds that a rank computes in the step.
      tokens: in the place of that, how many tokens a rank has in the step: each takes 2 operations
        per element in forward and 4 in backward.
      moments: numbers per element that the optimizer keeps: 2 of AdamW, 1 of Muon.

    Returns:
      A `Simulated`. A schedule without reductions is an evaluation, which ends without an update.

    Raises:
      PlanError: the schedule, the sizes, the placement or the budget do not fit together.

    Example:
      >>> from mics_fn.lab.hardware import Hardware
      >>> record = Schedule.parse("use 0; use 1; use 1; reduce 1; use 0; reduce 0")
      >>> cluster = Hardware.of("2 x 8 h100, 8 x 400 Gbit")
      >>> found = simulate(record, [2**30] * 2, cluster, partition_size=16, compute_s=0.1)
      >>> print(found)
      simulated step: 0.109 s, 0.00722 s exposed, 5.10 GB at most
      >>> found.sent_bytes()["gather node"]
      134217728
    """
    fix = "pass a Schedule, or Schedule.parse of a text"
    checks.instance("simulate", "schedule", schedule, Schedule, "a Schedule", fix)
    cluster = Hardware.read("simulate", cluster)
    groups = cluster.groups(partition_size, placement)
    buckets = _buckets(sizes, groups, precision)
    step = _Step([BucketUse(x, groups, (0,) * len(x.shapes)) for x in buckets], groups, cluster)
    most = max((bucket for action in schedule.actions for bucket in action.buckets), default=-1)
    if most >= len(buckets):
        raise PlanError(f"simulate: bucket {most} has no size; there are {len(buckets)} sizes")
    budget = None if live_bytes is None else checks.nbytes("simulate", "live_bytes", live_bytes)
    budget = None if budget is None or budget >= sum(step.sizes) else budget
    schedule = schedule if schedule.fetches else scheduled(schedule, step.sizes, budget)
    schedule.check(step.sizes, live_bytes=budget)
    kinds = [action.kind for action in schedule.actions if action.kind in ("fetch", "use")]
    if budget is None and "fetch" in kinds[len(schedule.fetches) :]:  # not all at once
        budget = schedule.peak_bytes(step.sizes)
    frozen = [i for i in schedule.reduces if not buckets[i].trainable]
    if frozen:
        raise PlanError(f"simulate: 'reduce {frozen[0]}' is of a bucket that is frozen")
    passes = _passes(schedule)
    if passes and accumulate not in (None, len(passes)):
        text = f"simulate: accumulate={accumulate}, and the schedule has {len(passes)} passes"
        raise PlanError(text, fix="leave accumulate= out, or mark each pass by 'backward'")
    checks.integer("simulate", "moments", moments, 0)
    order = _replay(step, schedule, passes, _compute_s(buckets, cluster, compute_s, tokens), budget)
    if passes:
        step.end(order, moments)
    events = sorted(step.streams.events, key=lambda event: (event.start_s, event.end_s))
    seconds = max([step.streams.now, *(event.end_s for event in events)])
    peak = _memory(step, order, budget, len(passes), moments)
    return Simulated(schedule, seconds, step.streams.waited, tuple(events), peak)


def _replay(
    step: _Step,
    schedule: Schedule,
    passes: Sequence[tuple[int, int]],
    seconds: float,
    budget: int | None,
) -> list[int]:
    """Follow a schedule to its end; return the order of its reductions."""
    actions, count = schedule.actions, len(passes)
    shares = iter(_shares(actions, [i for bounds in passes for i in bounds], step.buckets))
    order = dict.fromkeys([*schedule.reduces, *reversed(range(len(step.uses)))])
    order = [i for i in order if passes and step.buckets[i].trainable]
    kept = pairwise(actions) if budget is None else ()
    # Buckets of which a drop comes just before a reduction are reduced in their own memory.
    room = {b.buckets[0] for a, b in kept if (a.kind, b) == ("drop", Action("reduce", a.buckets))}
    step.plan_passes(order, count, room, least=budget == 0)
    ends = [end for _, end in passes]
    for i, (kind, ids) in enumerate(actions):
        if kind == "use":
            step.use(ids, seconds * next(shares))
        elif kind != "backward":
            getattr(step, kind)(ids[0])
        if i in ends:
            for index in list(step.missing):  # without a gradient: they are zeros
                step.reduce(index)
            step.begin_pass(order)
    return order


def _buckets(
    sizes: Sequence[Any], groups: Groups, precision: Precision | str | None
) -> list[Bucket]:
    """The buckets that are given, or those of so many bytes."""
    parts, given = groups.partition_size, list(sizes)
    if not any(isinstance(each, Bucket) for each in given):
        formats = Precision.parse(precision or "f32").formats("", torch.float32)
        for i, nbytes in enumerate(given):
            checks.integer("simulate", f"sizes[{i}]", nbytes)
        numels = [-(-nbytes // formats.compute.itemsize) for nbytes in given]
        leaves = [LeafSpec(f"bucket{i}", (n,), formats, parts) for i, n in enumerate(numels)]
        given = [bucket for bucket, _ in plan_buckets(leaves, bucket_bytes=0)]
    elif precision is not None:
        raise PlanError("simulate: precision= is of sizes in bytes; buckets have their own")
    for i, bucket in enumerate(given):
        if not isinstance(bucket, Bucket) or (bucket.index, bucket.parts) != (i, parts):
            got = f"{bucket.title} in {bucket.parts}" if isinstance(bucket, Bucket) else bucket
            text = f"simulate: sizes[{i}] is {got}, expected bucket {i} in {parts} parts"
            raise PlanError(text, fix="pass all buckets of one tree, and its partition_size=")
        for wire in filter(None, (bucket.gather_wire, bucket.hop1)):
            check_level(wire, groups.plan.topology.names)
    return given


def _compute_s(
    buckets: Sequence[Bucket], cluster: Hardware, compute_s: float | None, tokens: int | None
) -> float:
    """Seconds that a rank computes in a step."""
    if (compute_s is None) == (tokens is None):
        raise PlanError("simulate: expected one of compute_s= and tokens=", fix="pass one of them")
    if tokens is None:
        checks.number("simulate", "compute_s", compute_s, least=0)
        return compute_s or 0.0
    checks.integer("simulate", "tokens", tokens, 0)
    work = ((x, x.numel * (6 if x.trainable else 4) * tokens) for x in buckets)
    names = {2: "bf16"}  # by the bytes of what computes
    return sum(cluster.device.seconds(names.get(x.compute.itemsize, "f32"), n) for x, n in work)


def _memory(
    step: _Step, order: Sequence[int], budget: int | None, passes: int, moments: int
) -> StepMemory:
    """Peak bytes by kind: what is gathered as it was replayed, and gradients by formula."""
    trained, route, parts = [step.buckets[i] for i in order], step.route, dict[str, float]()
    if trained:
        how: Any = {"num_replicas": step.groups.num_replicas, "micro_steps": passes}
        cut = report.Cut.of(route)
        parts = report.memory_formula(trained, cut, route.sizes, live_bytes=budget, **how)
    shards = [x.chunk * x.dtype.itemsize for x in step.buckets]
    kept = moments * sum(n for x, n in zip(step.buckets, shards, strict=True) if x.trainable)
    in_full, sums = (int(parts.get(kind, 0)) for kind in ("in full", "sums"))
    found = (sum(shards), kept, 0, step.peak, in_full, step.ring.nbytes, sums)
    return StepMemory(*found, total=sum(found))

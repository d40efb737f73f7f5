"""`simulate`: the events of a real step exactly, and times by laws, twins and closed forms."""

import itertools
import math
import time
from collections import Counter
from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch
from cases import Layout, groups_of, placed_as, random
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import mics_fn as mf
from mics_fn.lab.hardware import Device, Hardware, Link
from mics_fn.lab.report import buckets_of
from mics_fn.lab.simulator import followed, scheduled, simulate
from mics_fn.schedules import Schedule, plan
from mics_fn.shards import Bucket

# What is sent: that of a real step, event by event.


def sent_by(timeline: Any) -> Counter:
    """How often each transfer happens: its kind, buckets, communicator and bytes."""
    return Counter((e.kind, e.buckets, e.level, e.sent_bytes) for e in timeline.events if e.level)


def cluster_of(sizes: tuple[int, ...], **device: Any) -> Hardware:
    facts: Any = {
        "memory_bytes": 2**30,
        "flops": {"f32": 1e10},
        "gb_per_s": 10,
        "runs_ahead": False,
    }
    links = [Link(10 * i + 10, 1 + i) for i in range(len(sizes))]
    topology = mf.groups.Topology(sizes)
    return Hardware(topology, tuple(links), Device("cpu", **{**facts, **device}))


class Loose(nn.Module):
    """Layers of which one is used by nobody, and is reduced as zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(7, 51), nn.Tanh(), nn.Linear(51, 33), nn.LayerNorm(33))
        self.unused = nn.Linear(30, 20)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def both(
    layout: Layout, scheme: str, precision: str, accumulate: int, live: int | None, how: str = ""
) -> Any:
    """What a watched step of a `Trainer` did, and what is simulated of the same schedule."""
    groups = placed_as(groups_of(layout), scheme)
    torch.manual_seed(0)
    model = Loose()
    sgd, muon = mf.optim.sgd(0.1), mf.optim.muon(0.02)
    given: Any = {"accumulate": accumulate, "bucket_bytes": 1500, "precision": precision}
    given |= {"loss": lambda model, x: model(x).float().square().mean()}
    given |= {"frozen": lambda path: "3.bias" in path, "live_bytes": live}
    optimizer = (
        mf.optim.by_path({"*0.weight": muon, "*2.weight": muon}, default=sgd)
        if how == "muon"
        else sgd
    )
    trainer, x = (
        mf.Trainer(model, optimizer, groups, **given),
        random(groups.rank, 2 * accumulate, 7),
    )
    for number in range(5 if how == "own" else 3):
        if number == 2 and how == "own":  # fetch everything earlier than a planner would
            sizes = mf.bucket_sizes(trainer.state.params, groups)
            own = plan(followed(trainer), sizes, live_bytes=sum(sizes) - 1, prefetch=9)
            trainer = mf.Trainer(model, optimizer, groups, schedule=own, **given)
            live = own.peak_bytes(sizes)
        groups.traffic.clear()
        with mf.inspection.watch():
            trainer.step(x)
    found = simulate(
        followed(trainer), buckets_of(trainer.state.params), cluster_of(layout.sizes),
        partition_size=layout.partition_size, placement=lambda groups: placed_as(groups, scheme),
        accumulate=accumulate, live_bytes=live, compute_s=0.1, moments=0,
    )  # fmt: skip
    real, ledger = trainer.last_step, dict(groups.traffic.sent_bytes)
    memory = real.memory()._asdict(), found.memory()._asdict()
    return sent_by(real.timeline()), sent_by(found.timeline()), ledger, found.sent_bytes(), memory


CODED = "gather=int8[32],hop1=int8[32]@node,hop2=int4[32]"
MIXED = "compute=bf16,reduce=bf16,hop2=f32; *0.*: gather=fp8[64],hop1=bf16"
WORLD, TWO, DDP = Layout((2, 2), 4), Layout((2, 2), 2), Layout((2, 2), 1)
CASES = [
    (WORLD, "mics", "f32", 1, None),
    (WORLD, "zero1", "f32", 2, 0),
    (WORLD, "zero2", CODED, 3, None),
    (WORLD, "zero3", CODED, 2, 3000),
    (WORLD, "fsdp", "hop2=int8[256]", 1, 0),
    (WORLD, "hpz", CODED, 2, 0),
    (WORLD, "hybrid", MIXED, 2, 0),
    (WORLD, "fixed_order", "f32", 2, 3000),
    (TWO, "mics", CODED, 2, 0),
    (TWO, "mics", MIXED, 1, None),
    (TWO, "hpz", "f32", 3, 6000),
    (TWO, "fixed_order", MIXED, 1, 0),
    (DDP, "ddp", CODED, 2, None),
    (DDP, "fixed_order", "compute=bf16", 1, 0),
    (TWO, "mics", "f32", 2, 0, "muon"),
    (WORLD, "zero2", "hop2=int8[256]", 1, 3000, "muon"),
    (WORLD, "mics", "f32", 2, 3000, "own"),
]
SMALL = [
    (Layout((2,), 2), "mics", CODED.replace("@node", ""), 2, 0),
    (Layout((2,), 1), "ddp", "f32", 3, None),
    (Layout((2,), 2), "zero1", "compute=bf16", 2, 3000),
]


def each(cases: list[Any]) -> list[Any]:
    return [both(*case) for case in cases]


@pytest.mark.parametrize(("count", "cases"), [(4, CASES[::2]), (4, CASES[1::2]), (2, SMALL)])
def test_a_step_sends_what_a_real_one_does(ranks, count, cases):
    for every in ranks(count).run(each, cases):
        for case, (real, found, ledger, sent, memory) in zip(cases, every, strict=True):
            assert found == real, case
            assert sent == ledger, case
            seen, known = memory  # gradients in full are a bound: backward may free them early
            most = [kinds.pop("gradients_in_full") for kinds in memory]
            assert 0 < most[0] <= most[1], case
            assert known.pop("total") - most[1] == sum(known.values()), case
            seen = {**seen, "moments": 0, "total": 0}  # those of Muon are not asked for
            known["total"] = 0
            assert seen == known, case


# When it happens: a twin that knows the graph of one step, and recurses over it.

KIB = 2**10
SIZE = 768 * KIB  # of a bucket: the ring is longer than its least


class Graph:
    """Durations, and what comes before; built by the rules that [Note: replay] states."""

    def __init__(self, cluster: Hardware) -> None:
        self.cluster, self.jobs = cluster, list[tuple[float, list[int]]]()
        self.last = dict[str, int]()  # of a stream or a link
        self.flights = list[tuple[list[tuple[str, str, float, float]], list[int], int]]()

    def job(self, seconds: float, *before: int | None) -> int:
        self.jobs.append((seconds, [i for i in before if i is not None]))
        return len(self.jobs) - 1

    def compute(self, seconds: float, *before: int) -> None:
        self.last["compute"] = self.job(seconds, self.last.get("compute"), *before)

    def begin(self, hops: list[tuple[str, str, float, float]]) -> int:
        self.compute(0)
        self.flights.append((hops, [], self.last["compute"]))
        self.step(len(self.flights) - 1)
        return len(self.flights) - 1

    def step(self, number: int) -> bool:
        """One more level, unless an older one has still to use its stream."""
        hops, done, begun = self.flights[number]
        if len(done) == len(hops):
            return False
        stream, link, seconds, own = hops[len(done)]
        if any(stream in [h[0] for h in h[len(d) :]] for h, d, _ in self.flights[:number]):
            return False
        before = [begun, *done[-1:], self.last.get(stream), self.last.get(link)]
        if not self.cluster.device.runs_ahead:
            self.compute(own)
            before.append(self.last["compute"])
        done.append(self.job(seconds, *before))
        self.last[stream] = self.last[link] = done[-1]
        return True

    def push(self) -> None:
        for number in range(len(self.flights)):
            self.step(number)

    def wait(self, number: int) -> None:
        hops, done, _ = self.flights[number]
        while len(done) < len(hops):
            self.push()
        self.compute(0, *done[-1:])

    def seconds(self) -> float:
        ends = list[float]()
        for seconds, before in self.jobs:  # they are in an order in which all comes before
            ends.append(seconds + max((ends[i] for i in before), default=0.0))
        return max(ends)


def twin(
    schedule: Schedule, cluster: Hardware, p: int, passes: int, live: int, secs: float
) -> float:
    """The length of a step of equal buckets in float32 with a budget of some buckets."""
    plan = mf.groups.plan_groups(cluster.topology, p)
    sizes, names, world = plan.level_sizes, plan.level_names, cluster.topology.world_size
    graph, rate, count = Graph(cluster), cluster.device.gb_per_s * 1e9, 1 + max(schedule.fetches)
    links = dict(zip(cluster.topology.names, cluster.links, strict=True))
    outermost = cluster.topology.names[0]

    def hop(stream: str, name: str, size: int, nbytes: float, stride: int = 0) -> Any:
        """One level; with a stride between ranks an all-reduce, as a ring."""
        link, at = links[name], 1 + cluster.topology.names.index(name)
        rounds, inner = (2 if stride else 1) * (size - 1), prod(cluster.topology.sizes[at:])
        crossing = len(range(0, inner, stride)[:size]) if stride else 1  # of a ring, in one node
        seconds, delay = nbytes / crossing / link.gb_per_s / 1e9, rounds * link.latency_us / 1e6
        if crossing > 1:
            seconds = max(seconds, nbytes / cluster.links[at].gb_per_s / 1e9)
        own = delay + cluster.device.shared * nbytes
        if cluster.device.runs_ahead:
            return stream, f"the link {name}", seconds + own, 0.0
        return stream, f"the link {name}", seconds, own

    def share(i: int) -> float:  # of a bucket, that crosses a level
        here = 1
        for size in sizes[i:]:
            here *= size
        return (sizes[i] - 1) * SIZE / here

    levels = range(len(sizes))
    gather = [hop(f"gather {names[i]}", names[i], sizes[i], share(i)) for i in levels]
    back = [hop(f"reduce {names[i]}", names[i], sizes[i], share(i)) for i in reversed(levels)]
    r = world // p
    mean = [hop("replicas", outermost, r, 2 * (r - 1) * (SIZE // p) // r, p)] * (r > 1)
    room = 1 if live == 0 else len(sizes) + 1
    arrived, taken = dict[int, int](), list[tuple[int, int]]()
    uses, total = list[tuple[int, int]](), 0.0
    seen = Counter[int]()
    for kind, (b, *_) in schedule.unmarked.actions:  # each use is of one bucket, once in a phase
        if kind == "use":
            uses.append((b, 2 if seen[b] % 2 else 1))
            seen[b] += 1
            total += uses[-1][1]
    turn, done = iter(uses), Counter[int]()
    for kind, (b, *_) in schedule.unmarked.actions:
        if kind == "fetch":
            arrived[b] = graph.begin(gather)
        elif kind == "use":
            if b in arrived:
                graph.wait(arrived.pop(b))
            graph.compute(secs * next(turn)[1] / total)
            graph.push()
        elif kind == "reduce":
            graph.push()
            for flight in [flight for other, flight in taken if other == b]:
                lease(graph, flight, len(back))
            while len(taken) >= room:
                lease(graph, taken.pop(0)[1], len(back))
            graph.compute(2 * SIZE / rate)
            done[b] += 1
            flight = graph.begin([*back, *(mean if done[b] == passes else [])])
            taken.append((b, flight))
    for number in range(len(graph.flights)):
        graph.wait(number)
    groups = [hop("partition", names[0], p, 2 * (p - 1) * 32 // p, 1)] * (p > 1)
    graph.wait(
        graph.begin(
            [*groups, *([hop("replicas", outermost, r, 2 * (r - 1) * 32 // r, p)] * (r > 1))]
        )
    )
    graph.compute(7 * count * (SIZE // p) / rate)
    return graph.seconds()


def lease(graph: Graph, flight: int, levels: int) -> None:
    """Wait until hop 1 of a reduction has freed its memory."""
    done = graph.flights[flight][1]
    while len(done) < levels:
        graph.push()
    graph.compute(0, *done[levels - 1 : levels])


@st.composite
def steps(draw: Any) -> Any:
    """A cluster, a partition size of more than one rank, a record, passes, and a budget."""
    sizes = draw(st.sampled_from([(2,), (4,), (2, 2), (2, 4), (3, 2), (2, 2, 2)]))
    rates, waits = st.floats(0.1, 20), st.floats(0, 200)
    links = tuple(Link(draw(waits), draw(rates)) for _ in sizes)
    facts: Any = {"gb_per_s": draw(rates), "runs_ahead": draw(st.booleans())}
    facts["shared"] = draw(st.sampled_from([0.0, 1e-10]))
    cluster = replace(cluster_of(sizes, **facts), links=links)
    p = draw(st.sampled_from(mf.groups.valid_partition_sizes(cluster.topology)[1:]))
    count, passes = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    order = draw(st.permutations(range(count)))
    forward = "; ".join(f"use {i}" for i in order)
    text = f"{forward}; backward; {'; '.join(f'use {i}; reduce {i}' for i in reversed(order))}"
    record = Schedule.parse("; ".join([text] * passes))
    # The leases of a first pass are shorter, and those of two passes fit less well in a ring.
    live = draw(st.integers(0, count - 1)) * SIZE if passes == 1 else 0
    return cluster, p, record, count, passes, live, draw(st.floats(0, 0.02))


@given(steps())
def test_times_are_those_of_a_graph(step: Any):
    cluster, p, record, count, passes, live, secs = step
    schedule = scheduled(record, [SIZE] * count, live)
    how: Any = {"partition_size": p, "live_bytes": live, "compute_s": secs}
    found = simulate(schedule, [SIZE] * count, cluster, **how)
    assert found.seconds == pytest.approx(twin(schedule, cluster, p, passes, live, secs), rel=1e-12)
    # Marks are found again where a run has left them out.
    assert simulate(schedule.unmarked, [SIZE] * count, cluster, **how) == replace(
        found, schedule=schedule.unmarked
    )
    waits = sum(event.seconds for event in found.events if event.kind == "wait")
    assert found.exposed_s == pytest.approx(waits)
    assert found.memory().gathered == schedule.peak_bytes([SIZE] * count)


CODES = "gather=int8[64]"


@given(steps(), st.data())
def test_nothing_that_is_faster_makes_a_step_slower(step: Any, data: Any):
    cluster, p, record, count, _, live, secs = step
    factors = st.sampled_from([1.0, 1.3, 10.0])
    faster = [data.draw(factors) for _ in range(4)]
    links = tuple(
        Link(link.latency_us / data.draw(factors), link.gb_per_s * data.draw(factors))
        for link in cluster.links
    )
    device = cluster.device
    device = replace(device, gb_per_s=device.gb_per_s * faster[0], shared=device.shared / faster[1])
    other = replace(cluster, links=links, device=device)
    live = data.draw(st.sampled_from([None, live]))
    scheme = data.draw(st.sampled_from(["mics", "zero1", "zero2", "hpz", "hybrid"]))
    how: Any = {"partition_size": p, "placement": scheme, "live_bytes": live}
    slow = simulate(record, [SIZE] * count, cluster, compute_s=secs, **how)
    assert slow.seconds >= (secs + slow.exposed_s) * (1 - 1e-12)
    quick = simulate(record, [SIZE] * count, other, compute_s=secs / faster[2], **how)
    assert quick.seconds <= slow.seconds * (1 + 1e-12)
    # Codes of gradients need other memory; those of parameters only make gathers shorter.
    free = replace(cluster, device=replace(cluster.device, coded_gb_per_s=1e30))
    quick = simulate(record, [SIZE] * count, free, compute_s=secs, precision=CODES, **how)
    assert quick.seconds <= slow.seconds * (1 + 1e-12)


@given(steps())
def test_a_larger_budget_never_fetches_more(step: Any):
    cluster, p, record, count, passes, _, _ = step
    sent, how = list[int](), dict[str, Any](partition_size=p, compute_s=0)
    for live in [*(k * SIZE for k in range(count + 1)), None]:
        found = simulate(record, [SIZE] * count, cluster, live_bytes=live, **how).sent_bytes()
        sent.append(sum(n for name, n in found.items() if name.startswith("gather")))
    assert sent == sorted(sent, reverse=True)
    assert sent[-1] == sent[-2] == count * (p - 1) * SIZE // p
    assert sent[0] <= 2 * passes * sent[-1]


# Closed forms


def there_and_back(count: int) -> Schedule:
    """A pass through layers of one bucket each."""
    uses = [f"use {i}" for i in range(count)]
    back = [f"use {i}; reduce {i}" for i in reversed(range(count))]
    return Schedule.parse("; ".join([*uses, "backward", *back]))


def test_where_nothing_overlaps_a_step_is_a_sum():
    cluster = cluster_of((2,), gb_per_s=1, runs_ahead=True)
    how: Any = {"partition_size": 2, "compute_s": 0.5, "live_bytes": 0}
    found = simulate(Schedule.parse("use 0; use 0; reduce 0"), [SIZE], cluster, **how)
    hop = 1e-5 + SIZE / 2 / 1e9
    totals = 2e-5 + 32 / 1e9
    assert found.seconds == pytest.approx(2 * hop + 0.5 + (2 + 7 / 2) * SIZE / 1e9 + totals)
    assert found.exposed_s == pytest.approx(2 * hop + totals)


def test_where_all_is_hidden_only_the_ends_are_seen():
    count, cluster = 40, cluster_of((4,), gb_per_s=1e6, runs_ahead=True)
    record = there_and_back(count)
    found = simulate(
        record, [SIZE] * count, cluster, partition_size=4, live_bytes=SIZE, compute_s=10
    )
    hop, totals = 3e-5 + 3 * SIZE / 4 / 1e9, 6e-5 + 48 / 1e9
    assert found.exposed_s == pytest.approx(2 * hop + totals)
    assert found.seconds == pytest.approx(10 + found.exposed_s, rel=1e-4)


def test_a_link_with_two_streams_carries_one_collective_at_a_time():
    cluster = cluster_of((2, 2), runs_ahead=True).with_link("node", latency_us=0, gb_per_s=1e-3)
    record = Schedule.parse("; ".join(["use 0", "use 1", "use 1", "reduce 1", "use 0", "reduce 0"]))
    found = simulate(record, [SIZE] * 2, cluster, partition_size=4, live_bytes=0, compute_s=0)
    over = [event for event in found.timeline().events if "node" in event.level]
    assert {event.level for event in over} == {"gather node", "reduce node"}
    assert all(a.end_s <= b.start_s for a, b in itertools.pairwise(over))
    assert found.seconds >= sum(event.seconds for event in over)


# Large, and refused


def test_seventy_billion_parameters_on_16384_ranks():
    cluster, count = Hardware.of("2048 x 8 h100, 8 x 400 Gbit"), 10_000
    sizes = [4 * 7_000_000] * count
    record = there_and_back(count)
    started = time.perf_counter()
    found = simulate(record, sizes, cluster, partition_size=128, live_bytes="4GB", tokens=8192)
    assert time.perf_counter() - started < 30
    assert found.memory().shards == pytest.approx(sum(sizes) / 128, rel=1e-3)
    padded = found.schedule.peak_bytes(sizes)
    assert padded <= found.memory().gathered <= 1.001 * padded <= 1.002 * (4e9 + sizes[0])
    assert len(found.timeline().events) > 6 * count


def refused(text: str, *given: Any, **how: Any) -> None:
    how = {"partition_size": 4, "compute_s": 0.0} | how
    with pytest.raises(mf.errors.PlanError, match=text):
        simulate(*given, **how)


def test_what_does_not_fit_is_refused_by_name(tmp_path):
    cluster, record = cluster_of((2, 2)), Schedule.parse("use 0; use 1; reduce 1; reduce 0")
    one, two = [SIZE], [SIZE, SIZE]
    refused("bucket 1 has no size", record, one, cluster)
    refused("schedule='use 0', expected a Schedule", "use 0", one, cluster)
    refused("is no cluster that is known", record, two, "2 x 2 z80")
    refused("simulate: cluster=.*, expected Hardware or a text", record, two, [cluster])
    own = Schedule.parse("fetch 0; use 0; use 1")
    refused("'use 1'\n  bucket 1 is not live", own, two, cluster)
    own = Schedule.parse("fetch 0; fetch 1; fetch 2; use 0")
    refused("bytes would be live, of at most", own, [SIZE] * 3, cluster, live_bytes=SIZE)
    refused("partition_size=3 does not fit", record, two, cluster, partition_size=3)
    refused("place: scheme='zero4'", record, two, cluster, placement="zero4")
    refused("'ddp' needs partition groups of 1 rank", record, two, cluster, placement="ddp")
    refused("accumulate=2, and the schedule has 1", record, two, cluster, accumulate=2)
    refused("in no pass that is marked", Schedule.parse("use 0; reduce 0; backward"), one, cluster)
    refused("'rack' that these groups|int8\\[64\\]@rack", record, two, cluster,
            precision="gather=int8[64]@rack")  # fmt: skip
    refused("expected one of compute_s= and tokens=", record, two, cluster, tokens=3)
    refused(
        "compute_s=-1, expected a finite number of at least 0", record, two, cluster, compute_s=-1
    )
    refused("sizes\\[1\\]", record, [SIZE, -1], cluster)
    refused("sizes\\[1\\]", record, [SIZE, 2.5], cluster)
    how: Any = {"shapes": ((8,),), "offsets": (0,), "numel": 8, "parts": 2}
    buckets = [Bucket(torch.float32, index=i, **how) for i in (0, 1)]
    refused("in 2, expected bucket 0 in 4 parts", record, buckets, cluster)
    refused("expected bucket 0", record, buckets[::-1], cluster, partition_size=2)
    refused("precision= is of sizes", record, buckets, cluster, partition_size=2, precision="f32")
    frozen = [replace(bucket, trainable=False) for bucket in buckets]
    refused("is of a bucket that is frozen", record, frozen, cluster, partition_size=2)


def test_clusters_are_read_written_and_refused(tmp_path):
    cluster = cluster_of((2, 3), shared=1e-9).with_link("node", gb_per_s=0.125)
    cluster.save(tmp_path / "profile.json")
    assert Hardware.load(tmp_path / "profile.json") == cluster
    (tmp_path / "other.json").write_text('{"levels": []}')
    for name in ("other.json", "none.json"):
        with pytest.raises(mf.errors.FileError, match="doctor --profile"):
            Hardware.load(tmp_path / name)
    eight = Hardware.of("8 x 8 v100, 100 Gbit")
    assert eight.topology.sizes == (8, 8)
    assert eight.link("node").gb_per_s == 100 / 8 / 8
    assert Hardware.of("64 x 8 H100, 8 x 400 Gbit").link("node").gb_per_s == 50
    assert Hardware.of("8 a100").topology.sizes == (8,)
    for text in ("8 x 8 v100", "8 x 8 z80, 1 Gbit", "0 x 8 v100, 1 Gbit", "h100", ""):
        with pytest.raises(mf.errors.PlanError, match="devices: v100, a100"):
            Hardware.of(text)
    for wrong in (lambda: Link(-1, 1), lambda: Link(0, 0), lambda: Link(0, math.inf)):
        with pytest.raises(mf.errors.PlanError, match="Link: .*, expected a finite number"):
            wrong()
    with pytest.raises(mf.errors.PlanError, match="1 links .* for the levels node, rank"):
        replace(cluster, links=cluster.links[:1])
    with pytest.raises(mf.errors.PlanError, match="level='rack', expected 'node' or 'rank'"):
        cluster.with_link("rack", gb_per_s=1)

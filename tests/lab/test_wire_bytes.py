"""The bytes of a step by formula: equal to the ledger, and to what torch.distributed is given."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from cases import Layout, groups_of, placed_as, random
from costs import buckets_of
from torch import nn

import mics_fn as mf
from mics_fn import _torch
from mics_fn.collectives import Codec
from mics_fn.groups import Route
from mics_fn.groups.communicator import Comm, GroupState
from mics_fn.groups.groups import Level
from mics_fn.lab.report import averaged, wire_bytes
from mics_fn.shards.bucket import Bucket, LeafSpec, plan_buckets

F32 = torch.float32

SMALL = [Layout((2,), 1), Layout((2, 2), 2), Layout((2, 2), 4)]
LARGE = [Layout((3,), 1), Layout((3,), 3), Layout((2, 2, 2), 8)]
LAYOUTS = [*SMALL, *(pytest.param(x, marks=pytest.mark.thorough) for x in LARGE)]

# The precision, in which LEVEL is the outermost level of a layout; micro-steps; the budget.
CODED = "gather=int8[32],hop1=int8[32]@node,hop2=int4[32]"
STEPS = [
    ("f32", 1, None),
    ("gather=int8[256],hop1=int8[256],hop2=int8[256]", 2, 0),
    ("gather=int8[64]@LEVEL,hop1=int4[32]@LEVEL,hop2=int4[4]", 3, None),
    ("hop2=fp8[32]; *weight*: gather=int4[4],hop1=fp8[4]@LEVEL; *2*: hop2=f32,gather=f32", 2, 0),
    ("compute=bf16,reduce=bf16,hop2=f32; *0.*: gather=fp8[64],hop1=bf16", 1, 3000),
]


# What is counted.


@contextmanager
def counting() -> Iterator[Counter[int]]:
    """Bytes of the tensors that torch.distributed is given for other ranks, by process group."""
    found, real = Counter[int](), dist.all_to_all_single

    def count(group: Any, nbytes: int) -> None:
        found[id(group)] += nbytes

    def exchange(out: Any, sent: Any, *sizes: Any, group: Any, **how: Any) -> Any:
        numels = sizes[1] if sizes else [sent.numel() // group.size()] * group.size()
        own = numels[dist.get_rank(group)]
        count(group, (sum(numels) - own) * sent.itemsize)
        return real(out, sent, *sizes, group=group, **how)

    def gather(out: Any, sent: Any, *, group: Any, **how: Any) -> Any:
        assert out.numel() == group.size() * sent.numel()
        count(group, out.nbytes - sent.nbytes)
        return real_gather(out, sent, group=group, **how)

    def reduce(tensor: Any, *, group: Any, **how: Any) -> Any:
        count(group, 2 * (group.size() - 1) * tensor.nbytes // group.size())
        return real_reduce(tensor, group=group, **how)

    real_gather, real_reduce = _torch.all_gather_single, dist.all_reduce
    with (
        patch.object(dist, "all_to_all_single", exchange),
        patch.object(dist, "all_reduce", reduce),
        patch.object(_torch, "all_gather_single", gather),
    ):
        yield found


def comms_of(groups: mf.Groups) -> list[Comm]:
    """All communicators of several ranks that a step may use."""
    levels = groups.hierarchy.route.levels
    comms = [comm for level in levels for comm in (level.gather, level.reduce)]
    return [comm for comm in (*comms, groups.replicas, groups.partition) if comm.size > 1]


def a_step(
    layout: Layout, precision: str, accumulate: int, live: int | None, scheme: str = ""
) -> None:
    """Compare a step of a `Trainer` that follows its schedule; sizes are no multiples of blocks."""
    groups = groups_of(layout)
    groups = placed_as(groups, scheme) if scheme else groups
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 51), nn.Tanh(), nn.Linear(51, 33), nn.LayerNorm(33))
    trainer = mf.Trainer(
        model,
        mf.optim.sgd(0.1),
        groups,
        loss=lambda model, x: model(x).float().square().mean(),
        accumulate=accumulate,
        live_bytes=live,
        bucket_bytes=1500,
        precision=precision,
        frozen=lambda path: "3.bias" in path,
    )
    x = random(groups.rank, 2 * accumulate, 7)
    for _ in range(2):
        trainer.step(x)
    groups.traffic.clear()
    with counting() as counted:
        trainer.step(x)
    schedule = getattr(trainer.schedule, "schedule", None)
    buckets = buckets_of(trainer.state.params)
    assert len(buckets) > 2
    formula = wire_bytes(
        buckets,
        groups.hierarchy.route,
        groups.num_replicas,
        accumulate=accumulate,
        fetches=None if schedule is None else Counter(schedule.fetches),
    )
    want = {name: nbytes for name, (nbytes, _) in formula.items() if nbytes}
    ledger = dict(groups.traffic.sent_bytes)
    assert set(ledger) - set(want) <= {"partition"}  # what schedules compare
    assert {name: ledger[name] for name in want} == want
    expected = Counter[int]()  # hop 1 over one level and these comparisons share a process group
    for comm in comms_of(groups):
        expected[id(comm.process_group())] += int(want.get(comm.name, ledger.get(comm.name, 0)))
    for comm in (groups.partition, groups.replicas):  # four numbers of the step
        if comm.size > 1:
            expected[id(comm.process_group())] += 2 * (comm.size - 1) * 32 // comm.size
    if groups.num_replicas > 1:  # what codes were exchanged for is gathered over the second one
        coded = [b for b in buckets if b.trainable and isinstance(b.hop2_format, Codec)]
        gathered = sum(int(averaged(b, groups.num_replicas).nbytes) // 2 for b in coded)
        assert groups.replicas.second is not None
        expected[id(groups.replicas.process_group())] -= gathered
        expected[id(groups.replicas.second.process_group())] += gathered
    assert +counted == +expected


@pytest.mark.parametrize(("precision", "accumulate", "live"), STEPS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.covering
def test_a_step_sends_the_bytes_of_its_formulas(ranks, layout, precision, accumulate, live):
    outermost = mf.groups.Topology(layout.sizes).names[0]
    precision = precision.replace("LEVEL", outermost)
    ranks(layout.world_size).run(a_step, layout, precision, accumulate, live)


@pytest.mark.parametrize("precision", ["compute=bf16,reduce=bf16", CODED])
@pytest.mark.short("compute=bf16,reduce=bf16")
def test_a_step_in_each_placement_of_the_same_groups_does_so_too(ranks, precision):
    for scheme in ("zero1", "zero2", "hpz", "hybrid"):
        ranks(4).run(a_step, Layout((2, 2), 4), precision, 2, 0, scheme)


# Figures by hand, without ranks.


def route_of(**sizes: int) -> Route:
    """A route with levels of these sizes, outermost first, as its first rank sees it."""
    levels = []
    for name, size in sizes.items():
        comm = Comm(name, tuple(range(size)), 0, "", 1.0, GroupState())
        levels.append(Level(name, comm, comm))
    return Route(tuple(levels), (0,) * len(sizes), 0, names=("node", "rank"))


def buckets_for(shapes: dict[str, Any], parts: int, text: str, **how: Any) -> list[Bucket]:
    """The buckets of leaves in float32, sharded with a precision."""
    precision, specs = mf.Precision.parse(text), []
    for path, shape in shapes.items():
        specs.append(LeafSpec(path, tuple(shape), precision.formats(path, F32), parts))
    found = {bucket.index: bucket for bucket, _ in plan_buckets(specs, **how)}
    return [found[index] for index in sorted(found)]


def test_a_bucket_by_hand():
    """1010 elements on 2 x 2 ranks: 4 chunks of one block of 256, of 258 bytes as codes."""
    text = "gather=int8[256],hop1=int4[256]@node,hop2=int8[256]"
    buckets = buckets_for({"w": (1010,)}, 4, text)
    assert wire_bytes(buckets, route_of(node=2, rank=2), 3, accumulate=5, fetches={0: 2}) == {
        "gather node": (2 * 258, "f (2-1) M/4 as int8[256]"),
        "gather rank": (2 * 2 * 258, "f (2-1) M/2 as int8[256]"),
        "reduce node": (5 * (128 + 2), "s (2-1) M/4 as int4[256]"),
        "reduce rank": (5 * 512 * 4, "s (2-1) M/2"),
        "replicas": (2 * 2 * 258, "2 (r-1)/r M/p as int8[256]"),  # one replica has the only block
        "step totals": (48 + 42, "2 (n-1)/n 32, n = p, r"),
    }
    plain = buckets_for({"w": (1010,)}, 4, "hop2=bf16")
    found = wire_bytes(plain, route_of(node=2, rank=2), 3)
    assert found["replicas"] == (2 * 2 * 256 * 2 // 3, "2 (r-1)/r M/p as bf16")

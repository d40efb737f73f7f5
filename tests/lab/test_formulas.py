"""Bytes and memory of a step by formula: equal to what is counted."""

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from cases import Layout, groups_of, placed_as, random
from costs import cut_of
from storage_count import StorageCount
from torch import nn

import mics_fn as mf
from mics_fn import _torch
from mics_fn.collectives import Codec, checksum
from mics_fn.groups.communicator import Comm
from mics_fn.lab.models import GPTConfig, TrainingTask, load_text, loss_of, seeded
from mics_fn.lab.report import averaged, buckets_of, memory_formula, wire_bytes

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
        equal = [sent.numel() // group.size()] * group.size()
        numels = (sizes[1] if sizes else None) or equal
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
        second: Any = groups.replicas.second
        if coded:
            expected[id(groups.replicas.process_group())] -= gathered
            expected[id(second.process_group())] += gathered
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


# Memory

F32, NODE = torch.float32, 2
BF16_TEXT = "compute=bf16,reduce=bf16"

CASES = [(name, "f32") for name in ("ddp", "mics", "zero2", "zero3")]
CASES += [(name, BF16_TEXT) for name in ("hpz", "hybrid")]  # parameters over fewer than states
MODEL = GPTConfig(256, 2, dim=64, num_heads=2, num_blocks=4)
BUCKETS, LIVE_BUCKETS = 16, 2
TOLERANCE = 0.02  # of the formula, on top of one bucket


def held_bytes(name: str, precision: str) -> dict[str, Any]:
    """The bytes of tensors on this rank between and within steps, and the formula for them."""
    groups = mf.make_groups(cut_of(name, 4, NODE).states, node_size=NODE, device="cpu")
    groups = mf.placement.place(groups, name)
    batch = TrainingTask(model=MODEL).batch(load_text(100_000), 0, 0, groups.rank)
    checksum(torch.zeros(1))  # the first call in a process makes a table of 8 MiB
    itemsize = mf.Precision.parse(precision).formats("", F32).compute.itemsize
    with StorageCount() as count:
        model = seeded(MODEL, groups.device)
        sizes = [p.numel() for p in model.parameters()]
        trainer = mf.Trainer(
            model,
            mf.optim.adamw(3e-4),
            groups,
            loss=loss_of,
            live_bytes=LIVE_BUCKETS * max(sizes) * itemsize,
            precision=precision,
            bucket_bytes=4 * sum(sizes) // BUCKETS,
        )
        del model
        gc.collect()  # what a cycle still holds of it would count
        for steps in (3, 2):
            count.reset_peak()
            for _ in range(steps):
                trainer.step(batch)
        waiting = groups.hierarchy.pools.waiting_bytes
        between, within = count.now - waiting, count.peak
    buckets = buckets_of(trainer.state.params)
    formula = memory_formula(
        buckets,
        cut_of(name, 4, NODE),
        groups.hierarchy.route.sizes,
        # Where nothing has to be fetched again, the trainer needs no budget.
        live_bytes=getattr(trainer.schedule, "live_bytes", LIVE_BUCKETS * max(sizes) * itemsize),
        num_replicas=groups.num_replicas,
    )
    bucket = max(b.numel * max(b.dtype.itemsize, b.accumulate.itemsize) for b in buckets)
    groups.close()
    found = {"between": between, "within": within, "waiting": waiting}
    return {**found, "formula": formula, "bucket": bucket, "full": 12 * sum(sizes)}


@pytest.mark.parametrize(("name", "precision"), CASES)
@pytest.mark.thorough
@pytest.mark.limit(300)
def test_memory_of_every_placement(name: str, precision: str, ranks: Callable):
    every = ranks(4).run(held_bytes, name, precision)
    first, share = every[0], {"ddp": 1, "mics": 2, "fsdp": 2}.get(name, 4)
    states, total = first["formula"]["states"], sum(first["formula"].values())
    between, within = (max(found[key] for found in every) for key in ("between", "within"))
    assert between == pytest.approx(states, rel=1e-3)
    assert abs(within - total) <= TOLERANCE * total + first["bucket"]
    assert first["bucket"] < 0.09 * first["full"] / 3, "the tolerance is small"
    assert within >= between + max(found["waiting"] for found in every) / 2
    assert first["full"] <= states * share <= 1.02 * first["full"]

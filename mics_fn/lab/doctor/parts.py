"""The parts of the doctor's report, each as the function that every rank of it runs.

A part adds what it finds to a file as soon as it knows it, so that a part which fails or hangs
later has said so much.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

import mics_fn as mf
from mics_fn import _torch, tree
from mics_fn.deferred import bucket_sizes
from mics_fn.groups import LEAST_RING
from mics_fn.lab.bench.stage import Cut, StepConfig, memory_formula
from mics_fn.lab.bench.step import measure_step
from mics_fn.lab.doctor.rank import Check, DoctorConfig, Rank
from mics_fn.lab.doctor.training import LATE, Delays, train
from mics_fn.lab.models import gpt
from mics_fn.lab.ranks.launch import Ended
from mics_fn.lab.report import buckets_of

BF16 = "compute=bf16, reduce=bf16, output=f32"
F16 = "compute=f16, reduce=f16, output=f32"
ENDS_S = 20.0  # the timeout of the groups of the part in which a rank fails
MINE = "the doctor's own error"


def alone(job: DoctorConfig) -> None:
    """Check a world of one: numbers, waits of the host, the initial model, and the optimizer."""
    me = Rank(job)
    with me.groups() as groups:
        me.compare("float32", groups)
        me.compare("bf16", groups, precision=BF16)
        me.compare("deterministic", groups, deterministic=True)
        me.say("AdamW: error in units of the learning rate", *_adamw(me, groups))
        make = partial(gpt.GPT, job.training.model)
        torch.manual_seed(3)
        with me.device:
            plain = dict(make().named_parameters())
        made = mf.unshard(mf.init_model(make, groups, seed=3)[1], groups)
        wrong = sum(not torch.equal(made[name], value) for name, value in plain.items())
        me.say("init_model: parameters that are not equal to the bit", wrong, 0)
        me.forbid_waits("float32", groups)
        me.forbid_waits("bf16", groups, precision=BF16)


def _adamw(me: Rank, groups: mf.Groups) -> tuple[float, float]:
    """Return the largest error of AdamW on given gradients against float64, and the bound.

    An update is a few dozen roundings long, each relative to the learning rate. Decay rounds its
    factor and its product, and the sum of the two is rounded once more, relative to the parameter.
    """
    lr, steps, roundings, of_parameter = 1e-3, 3, 24, 3
    start = dict(me.training.make_model().named_parameters())
    exact = {name: p.detach().double().requires_grad_() for name, p in start.items()}
    theirs = torch.optim.AdamW(exact.values(), lr)
    moved = {name: p.detach().to(me.device) for name, p in start.items()}
    state = mf.init_state(mf.shard(moved, groups), mf.optim.adamw(lr))
    random = torch.Generator().manual_seed(0)
    for _ in range(steps):
        grads = {name: torch.randn(p.shape, generator=random) for name, p in start.items()}
        for name, p in exact.items():
            p.grad = grads[name].double()
        theirs.step()
        here = tree.map_leaves(lambda g: g.to(me.device), grads)
        state = mf.opt_step(state, mf.reduce_grads(here, groups))
    found = mf.unshard(state.params, groups)
    gap = max((found[name].cpu() - p).abs().max().item() for name, p in exact.items())
    unit, largest = torch.finfo(torch.float32).eps / 2, max(p.abs().max() for p in exact.values())
    return gap / lr, steps * unit * (roundings + of_parameter * largest.item() / lr)


def ways(job: DoctorConfig) -> None:
    """Check one partition group: each fetch, each precision, a guard, independent replicas."""
    me, live = Rank(job), job.training.live_bytes
    guard = mf.optim.Guard(mf.optim.dynamic_scale(2.0**10), max_norm=1.0)
    with me.groups() as groups:
        me.compare("all kept", groups)
        me.compare("two buckets", groups, live_bytes=live)
        me.compare("one bucket", groups, live_bytes=0)
        me.compare("bf16", groups, live_bytes=live, precision=BF16)
        me.compare("f16, guard", groups, max_norm=1.0, precision=F16, guard=guard)
    with me.groups(1) as groups:
        me.compare("local_sgd", groups, merge_every=2, replica_sync=mf.replicas.local_sgd(2))
    with me.groups() as groups:
        me.forbid_waits("two buckets", groups, live_bytes=live)


def levels(job: DoctorConfig) -> None:
    """Check several levels and replicas: hop 2, gathers over two levels, and placements."""
    me, live = Rank(job), job.training.live_bytes
    half = me.size // 2
    for p, place in ((half, ""), (me.size, ""), (me.size, "hybrid"), (me.size, "zero1")):
        with me.groups(p, half, place) as groups:
            name = f"p={p}, nodes of {half}" + (f", {place}" if place else "")
            me.compare(name, groups, live_bytes=live)
    with me.groups(half, half) as groups:
        me.forbid_waits("two buckets", groups, live_bytes=live)


def delays(job: DoctorConfig) -> None:
    """Check that random delays on streams change no bit."""
    me = Rank(job)
    options = {"live_bytes": job.training.live_bytes, "deterministic": True}
    delayed = "streams" if _torch.stream_delay(me.device) else "hosts"
    with me.groups() as groups:
        expected = train(job.training, groups, **options).params

        def different(around: Callable[[int], Any]) -> int:
            found = train(job.training, groups, around, **options).params
            return sum(not torch.equal(found[name], p) for name, p in expected.items())

        changed = different(lambda step: contextlib.nullcontext())
        me.say("no delays: parameters that are not equal to the bit", changed, 0)
        for kind in LATE:
            mode = Delays(groups, kind, me.number)
            changed = different(lambda step, mode=mode: mode)
            if not mode.count:
                raise RuntimeError(f"delays: nothing was late, of {kind}")
            me.say(f"{delayed} late, {kind}: delays", mode.count)
            me.say(f"{delayed} late, {kind}: parameters that are not equal", changed, 0)


def pools(job: DoctorConfig) -> None:
    """Compare the memory of pools with the plan and the formula while the device is behind."""
    me, training = Rank(job), job.training
    with me.groups() as groups:
        mode = Delays(groups, "compute", me.number)
        live = training.live_bytes
        policy = mf.on_demand(live_bytes=live)
        trainer = train(training, groups, lambda step: mode, schedule=policy).trainer
        schedule = policy.schedule
        if schedule is None:
            raise RuntimeError("pools: no schedule was recorded")
        kept, sizes = groups.hierarchy.pools, bucket_sizes(trainer.state.params, groups)
        plan = schedule.peak_bytes(sizes)
        me.say("gathered buckets", kept.fetched.waiting_bytes, plan, "bytes")
        p = groups.partition_size
        parts = memory_formula(
            buckets_of(trainer.state.params),
            Cut(p, p, p),
            [p],
            live_bytes=live,
            micro_steps=training.accumulate,
            exchanged=not _torch.is_async(me.device),
        )
        most = plan + max(parts["hops"], LEAST_RING) + parts["sums"]
        me.say("all pools", kept.waiting_bytes, most, "bytes")


def ends(job: DoctorConfig) -> None:
    """Raise on the last rank in the middle of a run; the error must end all ranks at once."""
    me, failed = Rank(job), []

    @contextlib.contextmanager
    def around(step: int) -> Iterator[None]:
        if step == 2 and me.number == me.size - 1:
            failed.append(time.monotonic())
            raise KeyError(MINE)
        yield

    try:
        with mf.make_groups(me.size, device=me.device, timeout_s=ENDS_S) as groups:
            train(job.training, groups, around)
    finally:
        if failed:
            seconds = time.monotonic() - failed[0]
            me.say("from an error to the end of its `with` block", seconds, 5.0, "s")


def speed(job: DoctorConfig) -> None:
    """Compare step times in turns with FSDP2, over the ranks with a device of their own."""
    me = Rank(job)
    config = StepConfig(
        node_size=me.size,
        partition_size=me.size,
        turns=job.turns,
        peers=("keep", "zero3", "fsdp2-keep", "fsdp2"),
        accumulate=job.training.accumulate,
        sequences=job.training.sequences,
        device=job.device,
        model=job.training.model,
    )
    found = measure_step(config)
    if not found:
        return
    peers = found["peers"]
    for peer in peers:
        me.say(f"{peer['title']}: median of a step", peer["seconds"]["median"], unit="s")
    titles = {peer["name"]: peer["title"] for peer in peers}
    for ours, theirs in (("keep", "fsdp2-keep"), ("zero3", "fsdp2")):
        over = next(peer for peer in peers if peer["name"] == theirs)["over_it"][ours]
        me.say(f"{titles[ours]} over {titles[theirs]}", over["median"], unit="x")


class ReportPart(NamedTuple):
    """Part of the report.

    Args:
        run: what each rank runs.
        ranks: how many.
        limit_s: bound of the part in seconds, with the start of its processes.
        grace_s: how long the other ranks may go on once one has failed.
        judge: makes checks of how the ranks ended, if they should not all end well.
        variables: the environment of each rank, beyond what a launcher sets.
    """

    run: Callable[[Any], Any]
    ranks: int
    limit_s: float
    grace_s: float = 10.0
    judge: Callable[[Sequence[Ended]], list[Check]] | None = None
    variables: Callable[[int], Mapping[str, str]] = lambda rank: {}


def ended_right(ended: Sequence[Ended]) -> list[Check]:
    """Check that all ranks of `ends` ended by themselves, and the failed one with its error."""
    *others, last = ended
    seconds = [one.seconds for one in ended]
    return [
        Check("ranks that had to be stopped", sum(one.stopped for one in ended), 0),
        Check("ranks that lost their own error", int(MINE not in last.error), 0),
        Check("ranks that saw no error", sum(one.well for one in others), 0),
        Check("from the first end to the last", max(seconds) - min(seconds), 2 * ENDS_S, "s"),
    ]


# What is worth most comes first, since time may end before the last of them.
PARTS = {
    "alone": ReportPart(alone, 1, 80),
    "ways": ReportPart(ways, 2, 110),
    "delays": ReportPart(delays, 2, 110),
    "levels": ReportPart(levels, 4, 120),
    "pools": ReportPart(pools, 2, 60),
    "ends": ReportPart(ends, 2, 110, 2 * ENDS_S, ended_right),
    "speed": ReportPart(speed, 1, 80),
}

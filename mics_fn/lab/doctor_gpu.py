"""Parts of the doctor's report for the first hour on GPUs: a lost rank, communicators, and times.

[Note: what codes save] Hop 2 of B bytes over R replicas sends 2 (R - 1) / R of them, and a codec
leaves a share c of each: int8[256] 0.252 of float32. So codes save 2 (R - 1) / R (1 - c) B bytes
of a link, and cost one encoding of B and the decoding of (2 - 1 / R) B. Two replicas save least:
(1 - c) B, for one encoding and 1.5 decodings. The bound is the time that these bytes take at 50
GB/s, which is a link of 400 Gbit/s for each GPU; on slower links codes save more.

[Note: the profile] A file of JSON, small and plain, for whoever plans or simulates a step:

    {"levels": [{"name": "node", "ranks": 4, "latency_us": 20.0, "gb_per_s": 40.0}, ...],
     "device": {"name": "NVIDIA H100", "memory_bytes": 85899345920,
                "flops": {"bf16": 7e14, "f32": 5e13}, "gb_per_s": 2600.0, "copy_gb_per_s": 25.0}}

Levels are those of the topology that have several ranks, outermost first. All groups of a level
work at once, as in a step, and the slowest one counts. `latency_us` and `gb_per_s` are such that a
ring all-gather over n ranks with a result of B bytes takes

    latency_us * (n - 1)  +  (n - 1) / n * B / gb_per_s

A reduce-scatter of B bytes takes as long, and an all-reduce as both. They are fitted to times at
several sizes, by the least squares of relative errors, so that no size counts more than another.
`flops` is what a product of large square matrices reaches, in floating-point operations per
second; `gb_per_s` what a copy reads and writes of a device's memory, and `copy_gb_per_s` the slower
direction between it and locked memory of its host.
"""

import json
import multiprocessing
import os
import re
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import mics_fn as mf
from mics_fn import _torch
from mics_fn.errors import GroupsError, LostStateError, PeerFailed
from mics_fn.groups import Comm
from mics_fn.lab import doctor_parts as parts
from mics_fn.lab.bench.turns import memory_bytes, of_all_ranks
from mics_fn.lab.doctor_parts import STEADY, Check, DoctorConfig, Rank, ReportPart, seconds_of
from mics_fn.lab.models import GPTBlock, GPTConfig, loss_of
from mics_fn.lab.ranks import end_with_parent

COMMUNICATOR_BYTES = 300 * 2**20  # of a device, at most
LINK_GB_PER_S = 50.0  # see [Note: what codes save]
HEARTBEAT_S = 10.0
# A rank without a sign of life is named after a heartbeat and a second, and what is under way on a
# device is aborted in five.
LOST_S = HEARTBEAT_S + 1.0 + 5.0
KILL_AT = 2  # the step in which a rank is killed
DEBUG = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,P2P,SHM,NET"}  # which say CONNECTION
CONNECTION = re.compile(r"Connected all|via (?:P2P|SHM|NET)")


# A rank is killed, and started again.


def lost(job: DoctorConfig) -> None:
    """Kill the last rank in a backward and start it again; all must end as without that."""
    if int(os.environ["RANK"]) < int(os.environ["WORLD_SIZE"]) - 1:
        go_on(job)
        return
    for expected in (-9, 0):  # this process only starts those that are the rank
        child = multiprocessing.get_context("spawn").Process(target=go_on, args=(job, os.getpid()))
        child.start()
        child.join()
        if child.exitcode != expected:
            raise RuntimeError(f"lost: a rank ended with {child.exitcode}, not with {expected}")


def go_on(job: DoctorConfig, parent: int | None = None) -> None:
    """Train while the last rank is killed once; `reset` follows each `PeerFailed`.

    Args:
        job: of this rank.
        parent: the process that started this one only for that, and ends with it.
    """
    if parent is not None:
        end_with_parent(parent)
    me, killed, kept = Rank(job), Path(job.folder, "killed"), None
    dies = parent is not None and not killed.exists()

    def kill(grad: Any) -> None:
        killed.write_text(str(time.monotonic()))
        os.kill(os.getpid(), 9)

    def loss(model: Any, batch: Any) -> Any:
        value = loss_of(model, batch)
        if dies and trainer.state.step == KILL_AT:
            value.register_hook(kill)
        return value

    options = {"deterministic": True, "live_bytes": job.live_bytes}
    faults, half = mf.FaultPolicy(recoverable=True), me.size // 2
    groups = me.groups(half, half, heartbeat_s=HEARTBEAT_S)
    trainer, batches = parts.trainer_of(job, groups, loss=loss, faults=faults, **options)
    while (step := trainer.state.step) < job.steps:
        try:
            trainer.step(batches[step])
            kept = {name: x.data.clone() for name, x in trainer.state.params.items()}
        except PeerFailed as error:
            if kept is not None:
                seconds = time.monotonic() - float(killed.read_text())
                me.say("from a kill to the error on the others", seconds, LOST_S, "s")
                me.say("errors that name another rank", int(error.rank != me.size - 1), 0)
                me.say("shards that are not those of the last step", _damaged(trainer, kept), 0)
            trainer.reset()
    expected = parts.params_of(parts.train(job, trainer.groups, **options))
    unequal = parts.unequal(parts.params_of(trainer), expected)
    me.say("all at the end: parameters that are not equal to the bit", unequal, 0)
    trainer.groups.close()
    if parent is not None:
        os._exit(0)  # as `run_bounded` ends a rank


def _damaged(trainer: mf.Trainer, kept: dict[str, Any]) -> int:
    """Count shards that read as something else; those that cannot be read say that by an error."""
    with suppress(LostStateError):
        found = mf.shards.map(torch.clone, trainer.state.params)
        return parts.unequal({name: x.data for name, x in found.items()}, kept)
    return 0


# What communicators take, and when they connect.


def communicators(job: DoctorConfig) -> None:
    """Count the memory of communicators, and what connects only in the first step."""
    log = Path(job.folder, f"nccl{os.environ['RANK']}")
    os.environ.update(DEBUG, NCCL_DEBUG_FILE=str(log))
    me = Rank(job)
    half, shared = me.size // 2, -(-me.size // (torch.accelerator.device_count() or me.size))
    me.say("a GPU shared without a word: groups made", _sharing(me) if shared > 1 else None, 0)

    made = lambda: len(CONNECTION.findall(log.read_text())) if log.exists() else 0  # noqa: E731
    with me.groups(half, half) as first:
        parts.train(job, first)  # kernels are loaded, and the default group is connected
        before = used_bytes(me.device)
        with me.groups(half, half) as groups:
            me.say(*communicator_check(groups, before, shared))
            so_many = made()
            parts.train(replace(job, steps=1), groups, live_bytes=job.live_bytes)
            more = made() - so_many if so_many else None
            me.say("connections that are made in the first step", more, 0)


def _sharing(me: Rank) -> int:
    """Return whether ranks that share a GPU, and do not say so, get groups, or another error."""
    host = os.environ.pop("NCCL_HOSTID")
    try:
        me.groups().close()
    except GroupsError as error:
        return int("several ranks use one device" not in str(error))
    finally:
        os.environ["NCCL_HOSTID"] = host
    return 1


def communicator_check(groups: mf.Groups, before: int, ranks: int = 1) -> Check:
    """Check what each communicator of groups has added for each of the ranks on a device."""
    count, used = len(groups.state.live()), used_bytes(groups.device)
    each = (used - before) // max(1, count * ranks)
    return Check(f"each of {count} communicators", each, COMMUNICATOR_BYTES, "bytes")


def used_bytes(device: torch.device) -> int:
    """Return the bytes of a device that all its processes use; on the CPU what this one does."""
    _torch.finish(device)
    dist.barrier()
    ask = getattr(torch.get_device_module(device), "mem_get_info", None)
    free, total = ask(device) if ask else (0, memory_bytes(device) or 0)
    dist.barrier()  # none goes on before all have looked
    return total - free


# Times.


def speed(job: DoctorConfig) -> None:
    """Compare times: of the host with the device, and of codes with the link that they relieve."""
    me = Rank(job)
    real = GPTConfig(context=2048, dim=2048, num_heads=16) if job.timed else job.model
    block = GPTBlock(real).to(me.device, torch.bfloat16)
    x = torch.randn(2, real.context, real.dim, device=me.device, dtype=torch.bfloat16)
    layer_us = 1e6 * seconds_of(lambda: block(x).sum().backward(), me.device, 5)[1]
    me.say(f"2 x {real.context} tokens through a layer of width {real.dim}", layer_us, unit="us")
    with me.groups() as groups:
        few, many = (_host_s(me, groups, blocks) for blocks in (2, 10))
    limit = layer_us if job.timed else None
    me.say("the host, for a layer of 12 leaves", 1e6 * (many - few) / 8, limit, "us")
    me.say(*_coding(me))


def _host_s(me: Rank, groups: mf.Groups, blocks: int) -> float:
    """Return the seconds in which the host queues a step of a tiny model."""
    tiny, seconds = GPTConfig(context=8, dim=32, num_blocks=blocks), []
    job = replace(me.job, model=tiny, steps=STEADY + 7, accumulate=1, sequences=1)
    trainer, batches = parts.trainer_of(job, groups)
    for batch in batches:
        _torch.finish(me.device)
        began = time.monotonic()
        trainer.step(batch)
        seconds.append(time.monotonic() - began)
    return statistics.median(seconds[STEADY:])


def _coding(me: Rank) -> Check:
    """Time the codes of a bucket; see [Note: what codes save]."""
    codec, numel = mf.collectives.Codec("int8", 256), 2**24 if me.job.timed else 2**16
    values = torch.randn(numel, device=me.device)
    codes, encode_s = seconds_of(lambda: codec.encode(values), me.device, 5)
    _, decode_s = seconds_of(lambda: codec.decode(codes, numel, torch.float32), me.device, 5)
    saved_us = (values.nbytes - codes.nbytes) / LINK_GB_PER_S / 1e3
    what = f"hop2=int8[256] of {values.nbytes >> 10} KiB, two replicas: codes"
    us = 1e6 * (encode_s + 1.5 * decode_s)
    return Check(what, us, saved_us if me.job.timed else None, "us")


# What links and devices do; see [Note: the profile].

SIZES = (2**12, 2**16, 2**20, 2**22), (2**16, 2**20, 2**24, 2**28)  # bytes; on devices
# How the time of the largest size per byte compares with the best one; and which share of a step
# may be spent in waits for one kind of transfer. With more than these, look for what is slow.
WORSE, EXPOSED = 1.5, 0.25
# By collective: what calls it with the values of all ranks and those of one, and how many times it
# does what an all-gather does.
COLLECTIVES: dict[str, tuple[Callable[[Any, Any, Any], Any], int]] = {
    "all_gather": (lambda full, part, at: _torch.all_gather_single(full, part, group=at), 1),
    "reduce_scatter": (
        lambda full, part, at: _torch.reduce_scatter_single(part, full, group=at),
        1,
    ),
    "all_reduce": (lambda full, part, at: dist.all_reduce(full, group=at), 2),
}


def links(job: DoctorConfig) -> None:
    """Measure as a part of the report."""
    me = Rank(job)
    measure(job, me.device, me.say)


def measure(job: DoctorConfig, device: torch.device, say: Callable[..., None]) -> None:
    """Measure links, communicators, the device, and what of a step waits for links.

    The first rank writes the profile to `job.profile`, if there is one.

    Args:
        job: the same on all ranks.
        device: of this rank.
        say: is called with what `Check` is made of.
    """
    before, found = used_bytes(device), list[dict]()
    with mf.make_groups(dist.get_world_size(), device=device, timeout_s=parts.TIMEOUT_S) as groups:
        say(*communicator_check(groups, before))
        for level in groups.hierarchy.route.levels:
            found.append({"name": level.name, "ranks": level.gather.size})
            for name in COLLECTIVES:
                points = _points(name, level.gather, device, job.timed)
                latency_us, gb_per_s = fit(points, level.gather.size)
                if name == "all_gather":
                    found[-1] |= {"latency_us": latency_us, "gb_per_s": gb_per_s}
                what = f"{name} over {level.name} ({level.gather.size} ranks)"
                say(f"{what}: a step of it", latency_us, unit="us")
                say(f"{what}: rate", gb_per_s, unit="GB/s")
                per_byte = [seconds / nbytes for nbytes, seconds in points]
                limit, worse = WORSE if job.timed else None, per_byte[-1] / min(per_byte)
                say(f"{what}: largest size over best", worse, limit, "x")
    rates = _device_rates(device, job.timed)
    for kind, flops in rates["flops"].items():
        say(f"products of matrices, {kind}", 1e-12 * flops, unit="Tflop/s")
    say("copies between host and device", rates["copy_gb_per_s"], unit="GB/s")
    if job.profile is not None and dist.get_rank() == 0:
        job.profile.write_text(json.dumps({"levels": found, "device": rates}, indent=1))
    _exposed(job, device, say)


def _points(name: str, comm: Comm, device: torch.device, timed: bool) -> list[tuple[int, float]]:
    """Return bytes and seconds of a collective at several sizes, per what an all-gather does."""
    (call, gathers), found = COLLECTIVES[name], []
    for nbytes in SIZES[timed]:
        part = torch.zeros(nbytes // 4 // comm.size, device=device)
        full = part.repeat(comm.size)
        work = partial(call, full, part, comm.process_group())
        best = min(seconds_of(work, device, 3)[1] for _ in range(3))  # others use links, too
        found.append((full.nbytes, max(of_all_ranks(best)) / gathers))
    return found


def fit(points: Sequence[tuple[int, float]], ranks: int) -> tuple[float, float]:
    """Return microseconds per step and GB/s, from bytes and seconds; see [Note: the profile].

    >>> times = [(n, 3 * 20e-6 + 3 / 4 * n / 40e9) for n in (10**4, 10**6, 10**8)]
    >>> [round(x, 3) for x in fit(times, ranks=4)]
    [20.0, 40.0]
    """
    steps = ranks - 1
    terms = [[1e-6 * steps / s, 1e-9 * steps / ranks * nbytes / s] for nbytes, s in points]
    rows, ones = torch.tensor(terms).double(), torch.ones(len(terms), 1).double()
    latency, per_gb = torch.linalg.lstsq(rows, ones).solution.flatten().tolist()
    if latency < 0:  # it is too short to be seen
        latency, per_gb = 0.0, (rows[:, 1].sum() / rows[:, 1].square().sum()).item()
    return latency, 1 / max(per_gb, 1e-9)


def _device_rates(device: torch.device, timed: bool) -> dict[str, Any]:
    """Return the part of the profile that is about a device."""
    side, flops = 8192 if timed else 256, {}
    name_of = getattr(torch.get_device_module(device), "get_device_name", lambda _: device.type)
    for kind, dtype in (("bf16", torch.bfloat16), ("f32", torch.float32)):
        x = torch.randn(side, side, device=device, dtype=dtype)
        flops[kind] = 2 * side**3 / seconds_of(partial(torch.mm, x, x), device, 5)[1]
    here = torch.empty(side**2, dtype=torch.uint8, device=device)
    own = seconds_of(partial(here.copy_, torch.zeros_like(here)), device, 5)[1]
    host = _torch.host_buffer(side**2, device)
    copies = [partial(x.copy_, y, non_blocking=True) for x, y in ((here, host), (host, here))]
    slower = max(seconds_of(copy, device, 5)[1] for copy in copies)
    found = {"name": name_of(device), "memory_bytes": _torch.total_memory(device), "flops": flops}
    found["gb_per_s"] = 2e-9 * side**2 / own
    return found | {"copy_gb_per_s": 1e-9 * side**2 / slower}


def _exposed(job: DoctorConfig, device: torch.device, say: Callable[..., None]) -> None:
    """Say which share of a step, on two buckets, compute waits for transfers, by their kind."""
    if job.timed:
        job = replace(job, model=GPTConfig(context=1024, dim=2048, num_heads=16, num_blocks=8))
    with mf.make_groups(device=device, timeout_s=parts.TIMEOUT_S) as groups, mf.inspection.watch():
        trainer, batches = parts.trainer_of(job, groups, live_bytes=job.live_bytes)
        for batch in batches:
            trainer.step(batch)
        timeline = trainer.last_step.timeline()
    limit, waits = EXPOSED if job.timed else None, timeline.waited_s()
    for kind in ("fetch", "hop1", "hop2"):
        share = waits.get(kind, 0.0) / timeline.seconds
        say(f"compute waits for a {kind}: share of a step", share, limit, "x")


# What is worth most comes first, since time may end before the last of them.
PARTS = {
    "alone": ReportPart(parts.alone, 1, 100),
    "ways": ReportPart(parts.ways, 2, 110),
    "lost": ReportPart(lost, 4, 110),
    "communicators": ReportPart(communicators, 4, 80),
    "speed": ReportPart(speed, 1, 60),
    "levels": ReportPart(parts.levels, 4, 120),
    "delays": ReportPart(parts.delays, 2, 110),
    "pools": ReportPart(parts.pools, 2, 60),
    "ends": ReportPart(parts.ends, 2, 110),
}

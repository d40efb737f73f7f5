"""The parts of the doctor's report, each as the function that every rank of it runs.

A part adds what it finds to a file as soon as it knows it, so that a part which fails or hangs
later has said so much. What is trained are the same steps on the device, and in float64 by plain
torch.

[Note: how far apart numbers may be] Each op rounds its result once, by at most u of the dtype that
computes, and the sum of K products inside it by about sqrt(K) u of float32, because the roundings
of a sum have random signs. What a step changes went through the ops of the model twice, forward and
back, then through a sum over tokens, and through one addition per rank and micro-step in the dtype
that reduces. That is the error of an update relative to the update, since an update by SGD is
linear in the gradient. Parameters are stored in float32, which rounds them once per step. A loss is
off by what the way forward rounds, which is less than half of that error, and by what parameters
are off: that error of how far the loss has fallen. Together this is at most that error of the first
loss.
"""

import contextlib
import json
import random
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import sqrt
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import mics_fn as mf
from mics_fn import _torch, tree
from mics_fn.deferred import bucket_sizes
from mics_fn.errors import MicsError
from mics_fn.groups import Topology
from mics_fn.lab.models import GPT, TrainingTask, load_text, loss_of, num_params
from mics_fn.shards import Precision

TEXT_BYTES = 200_000
STEADY = 3  # steps before these record and plan, or allocate for the first time
TIMEOUT_S = 60.0  # of waits for other ranks
# What only some devices can do. Where one cannot, a check says so instead of failing.
CYCLES = 2_000_000  # about a millisecond of a GPU
HOST_DELAY_S = 1e-3
# What is late, and which share of it.
LATE = {
    "compute": {"compute": 0.02},
    "gathers": {"gather": 0.5},
    "reductions": {"reduce": 0.5},
    "all of them": {"compute": 0.01, "gather": 0.2, "reduce": 0.2},
}
BF16 = "compute=bf16, reduce=bf16, output=f32"
F16 = "compute=f16, reduce=f16, output=f32"
ENDS_S = 20.0  # the timeout of the groups of the part in which a rank fails


@dataclass(frozen=True, kw_only=True)
class DoctorConfig(TrainingTask):
    """Options of a rank of a part; it trains by SGD, at a rate that changes more than rounding.

    Args:
        device: the type of device.
        steps: optimizer steps.
        folder: of files with what the ranks found.
        timed: whether times are those of a device, and have limits.
        profile: a file for the measured links.
    """

    device: str = "cpu"
    steps: int = 5
    accumulate: int = 2
    sequences: int = 2
    lr: float = 0.1
    folder: str = ""
    timed: bool = False
    profile: Path | None = None

    @property
    def bucket_bytes(self) -> int:
        """Size that cuts the model into about eight buckets."""
        return num_params(self.model) * 4 // 8

    @property
    def live_bytes(self) -> int:
        """Budget of two buckets, far below all parameters."""
        return 2 * self.bucket_bytes


class Check(NamedTuple):
    """Value that a part measured, with its limit.

    Args:
        what: its name.
        value: what was found; None where this device cannot tell.
        limit: the most that is right; None for a figure without a verdict.
        unit: "" for a plain number, "bytes", "s", or "x" for a ratio.
    """

    what: str
    value: float | None
    limit: float | None = None
    unit: str = ""

    @property
    def ok(self) -> bool:
        """Whether the value is within the limit, if there are both."""
        return self.value is None or self.limit is None or self.value <= self.limit


class Rank:
    """Rank of a part: its device, and the file of its checks."""

    def __init__(self, job: DoctorConfig) -> None:
        self.job = job
        self.device = mf.init_distributed(device=job.device, timeout_s=TIMEOUT_S)
        self.number, self.size = dist.get_rank(), dist.get_world_size()

    def say(self, *check: Any, **fields: Any) -> None:
        """Add a check to the report; the arguments are those of `Check`."""
        with open(Path(self.job.folder, f"checks{self.number}"), "a") as file:
            file.write(json.dumps(Check(*check, **fields)) + "\n")

    def groups(self, p: int = 0, node_size: int = 0, place: str = "", **options: Any) -> Any:
        """Make groups of all ranks, for a `with` block."""
        how = {"node_size": node_size or self.size, "device": self.device, "timeout_s": TIMEOUT_S}
        groups = mf.make_groups(p or self.size, **how, **options)
        return mf.placement.place(groups, place) if place else groups

    def compare(
        self,
        what: str,
        groups: mf.Groups,
        max_norm: float | None = None,
        **options: Any,
    ) -> None:
        """Train on the device, and compare with float64 on the first rank."""
        found = params_of(train(self.job, groups, **options))
        if self.number:
            return
        expected = reference(self.job, range(self.size), max_norm)
        gap = distance(self.job, found, expected, options.get("precision", ""), self.size)
        self.say(f"{what}: error of the update", *gap)

    def limit_waits(self, what: str, groups: mf.Groups, most: int = 0, **options: Any) -> None:
        """Train again, and count ops in which the host waits in a steady step; none is an error.

        Where none is allowed it comes last in its part, because ranks that were interrupted in a
        step cannot go on. A wait for an event is none, such as that of the totals of the step
        before, long over.
        """
        forbid: Any = getattr(torch.get_device_module(self.device), "set_sync_debug_mode", None)
        seen = [0]

        @contextlib.contextmanager
        def counting() -> Iterator[None]:
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                forbid("warn" if most else "error")
                try:
                    yield
                finally:
                    forbid("default")
            seen.append(sum("called a synchronizing" in str(each.message) for each in said))

        def around(step: int) -> Any:
            return counting() if step >= STEADY else contextlib.nullcontext()

        if forbid is not None:
            train(self.job, groups, around, **options)
        waits = max(seen) if forbid else None
        self.say(f"{what}: waits of the host in a steady step", waits, most)


# The training, and what it is compared with.


def train(
    job: DoctorConfig,
    groups: mf.Groups,
    around: Callable[[int], Any] = lambda step: contextlib.nullcontext(),
    **options: Any,
) -> mf.Trainer:
    """Train on this rank's samples with `Trainer`.

    Args:
        job: what to train.
        groups: of all ranks.
        around: a block around each step, by its number.
        options: of `Trainer`, beyond those that `job` gives.
    """
    trainer, batches = trainer_of(job, groups, **options)
    for step, batch in enumerate(batches):
        with around(step):
            trainer.step(batch)
    return trainer


def trainer_of(job: DoctorConfig, groups: mf.Groups, **options: Any) -> tuple[mf.Trainer, list]:
    """Make a trainer, and this rank's batches of each step.

    Args:
        job: what to train.
        groups: of all ranks.
        options: of `Trainer`, beyond those that `job` gives.
    """
    text, here = load_text(TEXT_BYTES), [groups.rank]
    batches = [job.step_batch(text, step, here, groups.device) for step in range(job.steps)]
    given = {"live_bytes": None, "bucket_bytes": job.bucket_bytes, "loss": loss_of} | options
    model, sgd = job.make_model(groups.device), mf.optim.sgd(job.lr)
    return mf.Trainer(model, sgd, groups, accumulate=job.accumulate, **given), batches


def params_of(trainer: mf.Trainer) -> dict[str, Tensor]:
    """Return full parameters on the CPU."""
    return {name: value.cpu() for name, value in trainer.params().items()}


def reference(
    job: DoctorConfig, ranks: Sequence[int], max_norm: float | None = None, losses: Any = None
) -> dict[str, Tensor]:
    """Train in plain torch in float64 on the samples of ranks; return the parameters.

    Args:
        job: what to train.
        ranks: whose samples.
        max_norm: to which the norm of a gradient is clipped.
        losses: a list, to which that of each step is added.
    """
    text, model = load_text(TEXT_BYTES), job.make_model().double()
    sgd = torch.optim.SGD(model.parameters(), job.lr)
    for step in range(job.steps):
        sgd.zero_grad()
        (loss := loss_of(model, job.step_batch(text, step, ranks))).backward()
        if losses is not None:
            losses.append(loss.item())
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        sgd.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def distance(
    job: DoctorConfig,
    found: dict[str, Tensor],
    expected: dict[str, Tensor],
    precision: str = "",
    ranks: int = 1,
) -> tuple[float, float]:
    """Return the error of parameters against float64, relative to their update, and the bound.

    See [Note: how far apart numbers may be].
    """
    start = dict(job.make_model().double().named_parameters())
    change = _norm({name: p - start[name] for name, p in expected.items()})
    gap = _norm({name: found[name].double() - p for name, p in expected.items()})
    rounding = _unit(torch.float32) * sqrt(job.steps) * _norm(expected) / change
    formats = Precision.parse(precision).formats("", torch.float32)
    return gap / change, rounding + _roundings(job, formats.compute, formats.reduce, ranks)


def _roundings(job: DoctorConfig, compute: torch.dtype, reduce: torch.dtype, ranks: int) -> float:
    """Return the relative error of a gradient; see [Note: how far apart numbers may be]."""
    model = job.model
    d, context = model.dim, model.context
    block = [d, d, d // model.num_heads, context, d, 1]  # attention, from its norm to its addition
    block += [d, d, 1, 4 * d, 1]
    ops = [1, *block * model.num_blocks, d, d, model.vocab_size]
    way = sum(_unit(compute) + sqrt(length) * _unit(torch.float32) for length in ops)
    tokens = sqrt(job.sequences * context) * _unit(torch.float32)
    return 2 * way + tokens + (ranks + job.accumulate) * _unit(reduce)


def _unit(dtype: torch.dtype) -> float:
    """Return the largest relative error of rounding to a dtype."""
    return torch.finfo(dtype).eps / 2


def _norm(values: dict[str, Tensor]) -> float:
    return sqrt(sum(value.detach().double().square().sum().item() for value in values.values()))


class Delays(_torch.DispatchMode):
    """Mode that delays queued work, in backward too.

    It sees each op before torch queues it, and each collective when the ledger of its groups does,
    on the stream on which it will be. So gathers and reductions are late on their own streams, and
    compute on its own. What is late is drawn from a seed, which should differ between ranks.

    Args:
        groups: whose collectives are made late.
        kind: what is late, a key of `LATE`.
        seed: of the draws.
    """

    def __init__(self, groups: mf.Groups, kind: str, seed: int) -> None:
        super().__init__()
        self.count = 0
        self._sleep = _torch.stream_delay(groups.device)
        self._traffic, self._delays = groups.traffic, LATE[kind]
        self._random = random.Random(f"{kind} {seed}")

    def __enter__(self) -> "Delays":
        count = self._traffic.add

        def add(what: str, nbytes: int) -> None:
            count(what, nbytes)
            self._draw("gather" if what.startswith("gather") else "reduce")

        vars(self._traffic)["add"] = add
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        del vars(self._traffic)["add"]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind not in _torch.PLAIN for kind in types):
            return NotImplemented
        if func.namespace != "c10d":
            self._draw("compute")
        return func(*args, **(kwargs or {}))

    def _draw(self, kind: str) -> None:
        if self._random.random() < self._delays.get(kind, 0.0):
            self.count += 1
            if self._sleep is None:
                time.sleep(HOST_DELAY_S)
            else:
                self._sleep(CYCLES)


# The parts.


def alone(job: DoctorConfig) -> None:
    """Check a world of one: numbers, waits of the host, the initial model, and the optimizer."""
    me = Rank(job)
    with me.groups() as groups:
        me.compare("float32", groups)
        me.compare("bf16", groups, precision=BF16)
        me.compare("deterministic", groups, deterministic=True)
        me.say("50 losses of float32: error of one, over the first", *_curve(me, groups))
        me.say("AdamW: error in units of the learning rate", *_adamw(me, groups))
        make = partial(GPT, job.model)
        torch.manual_seed(3)
        with me.device:
            plain = dict(make().named_parameters())
        made = mf.unshard(mf.init_model(make, groups, seed=3)[1], groups)
        me.say("init_model: parameters that are not equal to the bit", unequal(made, plain), 0)
        reads = {"guard": mf.optim.Guard(on_nonfinite="raise")}
        me.limit_waits("a guard that reads", groups, 1, **reads)
        me.limit_waits("float32", groups)
        me.limit_waits("bf16", groups, precision=BF16)


def unequal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> int:
    """Count the tensors that are not equal to the bit."""
    return sum(not torch.equal(found[name], value) for name, value in expected.items())


def _curve(me: Rank, groups: mf.Groups) -> tuple[float, float]:
    """Return the largest error of a loss against float64 on the CPU, and the bound."""
    small, expected = replace(me.job.model, dim=64, num_blocks=2), list[float]()
    job = replace(me.job, model=small, steps=50)
    trainer, batches = trainer_of(job, groups)
    found = [trainer.step(batch).loss for batch in batches]
    reference(job, range(1), losses=expected)
    gap = max(abs(x.item() - loss) for x, loss in zip(found, expected, strict=True))
    return gap / expected[0], _roundings(job, torch.float32, torch.float32, 1)


def _adamw(me: Rank, groups: mf.Groups) -> tuple[float, float]:
    """Return the largest error of AdamW on given gradients against float64, and the bound.

    An update is a few dozen roundings long, each relative to the learning rate. Decay rounds its
    factor and its product, and the sum of the two is rounded once more, relative to the parameter.
    """
    lr, steps, roundings, of_parameter = 1e-3, 3, 24, 3
    start = dict(me.job.make_model().named_parameters())
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
    largest = max(p.abs().max().item() for p in exact.values())
    return gap / lr, steps * _unit(torch.float32) * (roundings + of_parameter * largest / lr)


def ways(job: DoctorConfig) -> None:
    """Check one partition group: each fetch, each precision, and a guard."""
    me, live = Rank(job), job.live_bytes
    guard = mf.optim.Guard(mf.optim.dynamic_scale(2.0**10), max_norm=1.0)
    with me.groups() as groups:
        me.compare("all kept", groups)
        me.compare("two buckets", groups, live_bytes=live)
        me.compare("one bucket", groups, live_bytes=0)
        me.compare("bf16", groups, live_bytes=live, precision=BF16)
        me.compare("f16, guard", groups, max_norm=1.0, precision=F16, guard=guard)
        me.limit_waits("two buckets", groups, live_bytes=live)


def levels(job: DoctorConfig) -> None:
    """Check several levels and replicas: hop 2, gathers over two levels, and placements."""
    me, live = Rank(job), job.live_bytes
    half = me.size // 2
    for p, place in ((half, ""), (me.size, ""), (me.size, "hybrid"), (me.size, "zero1")):
        with me.groups(p, half, place) as groups:
            name = f"p={p}, nodes of {half}" + (f", {place}" if place else "")
            me.compare(name, groups, live_bytes=live)
    with me.groups(half, half) as groups:
        me.limit_waits("two buckets", groups, live_bytes=live)


def delays(job: DoctorConfig) -> None:
    """Check that random delays on streams change no bit."""
    me = Rank(job)
    options = {"live_bytes": job.live_bytes, "deterministic": True}
    delayed = "streams" if _torch.stream_delay(me.device) else "hosts"
    with me.groups() as groups:
        expected = params_of(train(job, groups, **options))
        found = params_of(train(job, groups, **options))
        me.say("no delays: parameters that are not equal to the bit", unequal(found, expected), 0)
        for kind in LATE:
            mode = Delays(groups, kind, me.number)
            found = params_of(train(job, groups, lambda step, mode=mode: mode, **options))
            if not mode.count:
                raise RuntimeError(f"delays: nothing was late, of {kind}")
            me.say(f"{delayed} late, {kind}: delays", mode.count)
            wrong = unequal(found, expected)
            me.say(f"{delayed} late, {kind}: parameters that are not equal", wrong, 0)


def pools(job: DoctorConfig) -> None:
    """Compare the memory of gathered buckets with the plan while the device is behind."""
    me, policy = Rank(job), mf.on_demand(live_bytes=job.live_bytes)
    with me.groups() as groups:
        mode = Delays(groups, "compute", me.number)
        trainer = train(job, groups, lambda step: mode, schedule=policy)
        if policy.schedule is None:
            raise RuntimeError("pools: no schedule was recorded")
        kept = groups.hierarchy.pools
        params = trainer.state.params
        plan = policy.schedule.peak_bytes(bucket_sizes(params, groups))
        me.say("gathered buckets", kept.fetched.waiting_bytes, plan, "bytes")
        me.say("all pools", kept.waiting_bytes, unit="bytes")


def ends(job: DoctorConfig) -> None:
    """Raise on the last rank in the middle of a run; the error must end all ranks at once."""
    me, began, wrong = Rank(job), Path(job.folder, "began"), 1
    fails = me.number == me.size - 1

    @contextlib.contextmanager
    def around(step: int) -> Iterator[None]:
        if step == 2 and fails:
            began.write_text(str(time.monotonic()))
            raise KeyError("the doctor's own error")
        yield

    try:
        with mf.make_groups(me.size, device=me.device, timeout_s=ENDS_S) as groups:
            train(job, groups, around)
    except (KeyError, MicsError) as error:
        wrong = int(isinstance(error, KeyError) != fails)
    seconds = time.monotonic() - float(began.read_text())
    me.say("ranks that saw no error, or that of another", wrong, 0)
    limit = 5.0 if fails else 2 * ENDS_S
    me.say(f"from an error to its end {'here' if fails else 'on the others'}", seconds, limit, "s")


# Whether ranks reach each other.

SIZE = 1_000_000  # elements that are moved


def loopback(job: DoctorConfig) -> None:
    """Check that two ranks of gloo reach each other, as those of a job."""
    began = time.monotonic()
    me = Rank(job)
    me.say("until ranks are connected", time.monotonic() - began, unit="s")
    for check in reach_checks(me.device)[1]:
        me.say(*check)


def reach_checks(device: torch.device) -> tuple[Topology, list[Check]]:
    """Check that all ranks reach each other: along the nodes, and across them."""
    with mf.make_groups(dist.get_world_size(), device=device, timeout_s=TIMEOUT_S) as groups:
        checks = _gather(groups)
    with mf.make_groups(device=device, timeout_s=TIMEOUT_S) as groups:  # one replica per node
        return groups.plan.topology, checks + _means(groups)


def _gather(groups: mf.Groups) -> list[Check]:
    """Gather known values of every rank, across nodes first."""
    want = torch.arange(SIZE, dtype=torch.float32, device=groups.device)
    shards = mf.shard({"known": want}, groups)
    full, seconds = seconds_of(lambda: mf.unshard(shards, groups), groups.device)
    return [
        Check("elements that are wrong in a gather", int((full["known"] != want).sum()), 0),
        Check(f"a gather of {SIZE * 4 // 10**6} MB over all ranks", seconds, unit="s"),
    ]


def _means(groups: mf.Groups) -> list[Check]:
    """Reduce a gradient by both hops: each rank gives its number, and gets the mean of all."""
    shards = mf.shard({"known": torch.zeros(SIZE, device=groups.device)}, groups)
    mine = {"known": torch.full((SIZE,), float(groups.position), device=groups.device)}

    def reduce() -> Any:
        return mf.reduce_grads(mf.scatter_grads(mine, groups, like=shards), groups)

    means, seconds = seconds_of(reduce, groups.device)
    wrong = mf.unshard(means, groups)["known"] != (groups.world_size - 1) / 2
    return [
        Check("elements that are wrong after both hops", int(wrong.sum()), 0),
        Check("both hops, with one replica per node", seconds, unit="s"),
    ]


def seconds_of(work: Callable[[], Any], device: torch.device, times: int = 1) -> tuple[Any, float]:
    """Return what queued work gives, and its seconds, the mean of some times.

    It is done once before, since the first time also makes connections.
    """
    work()
    _torch.finish(device)
    began, found = time.monotonic(), None
    for _ in range(times):
        found = work()
    _torch.finish(device)
    return found, (time.monotonic() - began) / times


class ReportPart(NamedTuple):
    """Part of the report.

    Args:
        run: what each rank runs.
        ranks: how many.
        limit_s: bound of the part in seconds, with the start of its processes.
    """

    run: Callable[[Any], Any]
    ranks: int
    limit_s: float

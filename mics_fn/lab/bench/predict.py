"""`bench plan`: predicted times of steps beside measured ones, on the links of this job.

Links are measured by hop 2 over the nodes and by gathers inside of them, with buckets of one size,
and what a rank computes by steps of a world of one that all ranks take at once. Where ranks share
the cores of a machine, what a collective takes of these is also time in which nobody computes. From
all this, and from the schedule that a `Trainer` follows, `simulate` predicts the time of its step
for each placement, for codes, and for each rate of the links. Nothing is fitted to these steps.
"""

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import mics_fn as mf
from mics_fn.groups import Topology
from mics_fn.lab.bench import turns
from mics_fn.lab.bench.step import link_setter
from mics_fn.lab.bench.turns import BenchTurns
from mics_fn.lab.hardware import Device, Hardware, Link
from mics_fn.lab.models import Batch, TrainingTask, load_text, loss_of, num_params
from mics_fn.lab.report import buckets_of, table
from mics_fn.lab.simulator import followed, simulate

SIZES, BUCKETS = (2**12, 2**21), 8  # bytes of a bucket: for latency, and for rate
TRIES = 5


class Setting(NamedTuple):
    """One way to train that is predicted and measured."""

    name: str
    partition_size: int
    placement: str = "mics"
    precision: str = "f32"
    buckets: int | None = None  # budget; None keeps all


@dataclass(frozen=True, kw_only=True)
class PredictConfig(TrainingTask):
    """Options of `bench plan`.

    Args:
        node_size: nodes are groups of so many ranks.
        rates: of the links between nodes; () leaves them as they are.
        turns: how many steps are measured.
    """

    node_size: int
    rates: tuple[str, ...] = ()
    turns: BenchTurns = field(default_factory=BenchTurns)

    def settings(self, n: int) -> list[Setting]:
        """What is compared on n ranks."""
        node, codes = self.node_size, "gather=int8[256], hop1=int8[256]"
        return [
            Setting("p = 1", 1),
            Setting("a node", node),
            Setting("a node, two buckets", node, buckets=2),
            Setting("a node, int8 in hop 2", node, precision="hop2=int8[256]"),
            Setting("all ranks", n),
            Setting("all ranks, two buckets", n, buckets=2),
            Setting("all ranks, hpz, two buckets", n, "hpz", buckets=2),
            Setting("all ranks, int8, two buckets", n, precision=codes, buckets=2),
        ]

    @property
    def bucket_bytes(self) -> int:
        """Size that cuts the model into about eight buckets."""
        return num_params(self.model) * 4 // 8

    def live_bytes(self, setting: Setting) -> int | None:
        """The budget of a setting."""
        return None if setting.buckets is None else setting.buckets * self.bucket_bytes

    def trainer(self, setting: Setting, groups: mf.Groups) -> mf.Trainer:
        """Build what trains as a setting says."""
        if setting.placement != "mics":
            groups = mf.placement.place(groups, setting.placement)
        how: Any = {"live_bytes": self.live_bytes(setting), "precision": setting.precision}
        how |= {"bucket_bytes": self.bucket_bytes, "accumulate": self.accumulate}
        return mf.Trainer(self.make_model(), mf.optim.adamw(self.lr), groups, loss=loss_of, **how)


def measure_predictions(config: PredictConfig) -> dict[str, Any]:
    """Measure links, what is computed, and steps; and predict the latter.

    Returns:
        On rank 0 the rows of all settings, and what was measured at each rate; {} on the others.
    """
    turns.start("cpu")
    n, rows, known = dist.get_world_size(), list[dict[str, Any]](), dict[str, Any]()
    text = load_text()
    batches = [config.step_batch(text, k, [dist.get_rank()]) for k in range(config.turns.all_steps)]
    for rate in config.rates or ("as it is",):
        if config.rates:
            dist.barrier()
            link_setter(rate)(rate)
        turns.say(f"{rate}: links, and a world of one ...")
        links, shared = _links(config, n)
        with mf.make_groups(1, ranks=[dist.get_rank()], whole=True, device="cpu") as alone:
            compute_s, update_s, _ = _steps(config, config.trainer(Setting("", 1), alone), batches)
        moved = 7 * 4 * num_params(config.model)  # as `simulate` counts
        rates = moved / update_s * 1e-9, False, _coded_gb_per_s(), shared
        device = Device("cpu", 2**36, {"f32": 1e9}, *rates)
        cluster = Hardware(
            Topology((n // config.node_size, config.node_size)), tuple(links), device
        )
        known[rate] = {"cluster": f"{cluster}; {device}", "compute_s": compute_s - update_s}
        for setting in config.settings(n):
            turns.say(f"{rate}: {setting.name} ...")
            found = _compared(config, setting, cluster, compute_s - update_s, batches)
            rows.append({"setting": setting.name, "rate": rate, **found})
    return {"rows": rows, "known": known} if turns.is_first() else {}


def _links(config: PredictConfig, n: int) -> tuple[list[Link], float]:
    """Measure hop 2 over the nodes and gathers inside of them, of several buckets in flight.

    Returns:
        The links, and the seconds of a core's share that a rank takes to send a byte.
    """
    k, found, shared = config.node_size, list[Link](), list[float]()
    crowd = max(1.0, k / (os.cpu_count() or 1) * (n // k))  # ranks of a core, on one machine
    with mf.make_groups(k, node_size=k, device="cpu") as groups:

        def measure(across: bool, nbytes: int) -> tuple[float, float]:
            params = {f"w{i}": torch.zeros(nbytes // 4) for i in range(BUCKETS)}
            shards = mf.shard(params, groups, bucket_bytes=nbytes)
            owing = mf.scatter_grads(params, groups, like=shards)
            works = partial(mf.gather, shards, groups), partial(mf.sync_replicas, owing, groups)
            used = time.process_time()
            seconds = statistics.median(_seconds(works[across]) for _ in range(TRIES))
            return seconds, (time.process_time() - used) / TRIES

        for across, size in ((True, n // k), (False, k)):
            if size == 1:
                found.append(Link(0.0, 1.0))
                continue
            (short, few), (long, many) = (measure(across, nbytes) for nbytes in SIZES)
            part = 2 / k if across else 1.0  # hop 2 sends twice what a ring does, of 1/k
            sent = (size - 1) / size * part * BUCKETS * (SIZES[1] - SIZES[0])
            latency = short / BUCKETS / (size - 1) / (1 + across)
            found.append(Link(1e6 * latency, 1e-9 * sent / (long - short)))
            shared.append(crowd * (many - few) / sent)
    return found, max(turns.of_all_ranks(shared[-1]))  # where waits are short: they poll


def _coded_gb_per_s() -> float:
    """Encode and decode on all ranks at once."""
    codec, values = mf.collectives.Codec("int8", 256), torch.randn(2**19)
    codes = codec.encode(values)
    both = lambda: (codec.encode(values), codec.decode(codes, 2**19, torch.float32))  # noqa: E731
    seconds = statistics.median(_seconds(both) for _ in range(2 * TRIES))
    return 2e-9 * values.nbytes / seconds


def _seconds(work: Callable[[], Any]) -> float:
    """Seconds that the slowest rank takes, all beginning together."""
    dist.barrier()
    began = time.perf_counter()
    work()
    return max(turns.of_all_ranks(time.perf_counter() - began))


def _steps(
    config: PredictConfig, trainer: mf.Trainer, batches: Sequence[Batch]
) -> tuple[float, float, mf.Trainer]:
    """Median seconds of a step, and of its update alone; and the trainer, which has taken them."""
    times, updates = list[float](), list[float]()
    for batch in batches:
        times.append(_seconds(partial(trainer.step, batch)))
    with mf.inspection.watch():
        for batch in batches[-TRIES:]:
            trainer.step(batch)
            events = trainer.last_step.timeline().events
            updates.append(sum(each.seconds for each in events if each.kind == "opt"))
    update_s = max(turns.of_all_ranks(statistics.median(updates)))
    return statistics.median(times[config.turns.warmup :]), update_s, trainer


def _compared(
    config: PredictConfig,
    setting: Setting,
    cluster: Hardware,
    compute_s: float,
    batches: Sequence[Batch],
) -> dict[str, float]:
    with mf.make_groups(setting.partition_size, node_size=config.node_size, device="cpu") as groups:
        measured, _, trainer = _steps(config, config.trainer(setting, groups), batches)
        how: Any = {"partition_size": setting.partition_size, "placement": setting.placement}
        how |= {"live_bytes": config.live_bytes(setting), "compute_s": compute_s}
        buckets = buckets_of(trainer.state.params)
        found = simulate(followed(trainer), buckets, cluster, **how)
    error = found.seconds / measured - 1
    return {"measured_s": measured, "predicted_s": found.seconds, "error": error}


def render_predictions(figures: dict[str, Any], config: PredictConfig) -> str:
    """Render the figures as a table."""
    rows: list[Any] = [("", "links", "measured s", "predicted s", "error")]
    for row in figures["rows"]:
        times = (f"{row[key]:.3f}" for key in ("measured_s", "predicted_s"))
        rows.append((row["setting"], row["rate"], *times, f"{row['error']:+.0%}"))
    errors = [abs(row["error"]) for row in figures["rows"]]
    lines = [f"  {rate}: {each['cluster']}" for rate, each in figures["known"].items()]
    middle, most = statistics.median(errors), max(errors)
    text = f"  {len(errors)} settings: median error {middle:.1%}, largest {most:.1%}"
    return "\n".join([table("steps, measured and predicted", rows), *lines, text])

"""The two runs of the demo: sharded over ranks, and the same training in one process of torch."""

import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

import mics_fn as mf
from mics_fn import _torch
from mics_fn.collectives import Codec
from mics_fn.lab.bench.turns import nbytes
from mics_fn.lab.models import gpt
from mics_fn.lab.models.task import Batch, TrainingTask, join
from mics_fn.lab.models.text import Text, load_text
from mics_fn.lab.report import buckets_of, wire_bytes
from mics_fn.shards import Precision

WEIGHT_DECAY = 0.1
WIDE = (None, torch.float32, torch.float64)
SENT = ("gather", "hop1", "hop2")  # the fields of a precision that say what travels
CODED_LR, CODED_STEPS = 3e-4, 60  # up to which runs with codes were compared with float32
CODED_BOUNDS = {"int8": 5e-3, "fp8": 5e-3, "int4": 1e-2}  # three times and more of what was found


@dataclass(frozen=True, kw_only=True)
class DemoConfig(TrainingTask):
    """Options of the demo.

    Args:
        ranks, node_size, partition_size: the layout; nodes are groups of `node_size` ranks.
        steps: optimizer steps.
        held_out_sequences: samples per rank in a test on held-out text.
        device: "cpu" or "cuda".
        precision: the text of the sharded run's `Precision`; the single process is in float32.
    """

    ranks: int
    node_size: int
    partition_size: int
    steps: int
    device: str
    precision: str = ""
    held_out_sequences: int = 16
    lr: float = 1e-3

    @property
    def tokens_per_step(self) -> int:
        """Number of tokens that all ranks together train on in a step."""
        return self.ranks * self.accumulate * self.sequences * self.model.context

    @property
    def rounds(self) -> bool:
        """Whether the sharded run rounds anything to less than float32."""
        return bool(self._rounded())

    def _rounded(self) -> list[tuple[str, Any]]:
        """Return the fields of the precision that round to less than float32, with their values."""
        found = Precision.parse(self.precision)
        each = (found, *(override for _, override in found.overrides))
        names = [x.name for x in fields(Precision) if x.name != "overrides"]
        values = [(name, getattr(one, name)) for one in each for name in names]
        return [(name, value) for name, value in values if value not in WIDE]

    @property
    def coded_bound(self) -> float | None:
        """Bound on the mean of the last losses for codes on the wire, relative to one process.

        None where that was not measured: if anything else is rounded, at a higher rate, at which
        training magnifies any rounding, or over more steps. The figures are in `collectives`.
        """
        sent = [(name, getattr(value, "codec", value)) for name, value in self._rounded()]
        coded = all(name in SENT and isinstance(value, Codec) for name, value in sent)
        if not sent or not coded or self.lr > CODED_LR or self.steps > CODED_STEPS:
            return None
        return max(CODED_BOUNDS[codec.name] for _, codec in sent)

    @property
    def bounded(self) -> bool:
        """Whether the bounds of float32 hold; elsewhere training may magnify rounding.

        With seed 1, parameters that are changed by 1e-6 of themselves change a loss by 2e-3.
        """
        usual = self.seed == DemoConfig.seed and self.lr == DemoConfig.lr
        return usual and not self.rounds

    @property
    def tests_at(self) -> set[int]:
        """Steps after which the held-out loss is computed: both ends, and about twelve more."""
        return {*range(0, self.steps, max(1, self.steps // 12)), self.steps}


@dataclass(frozen=True)
class RankResult:
    """Result of one rank."""

    losses: list[float]  # one per step, the mean over ranks
    seconds: list[float]  # one per step, without the last
    held_out: list[tuple[int, float]]  # (steps done, loss)
    state_bytes: int  # parameters and optimizer state on this rank
    full_bytes: int  # of all parameters as they are kept, padding included
    formulas: dict[str, tuple[float, str]]  # bytes in one step, by communicator, and why
    sent: dict[str, int]  # bytes in one step, by communicator
    device: str
    params: dict[str, Tensor]  # full; empty on all ranks but 0


@dataclass(frozen=True)
class AloneResult:
    """Result of the single process."""

    losses: list[float]
    held_out: float  # at the end
    state_bytes: int  # parameters and optimizer state
    params: dict[str, Tensor]


def held_out_batch(config: DemoConfig, text: Text, ranks: Iterable[int], device: Any) -> Batch:
    """Return the batch on which ranks are tested, always the same one."""
    size = config.held_out_sequences
    return join([config.batch(text, 0, 0, rank, "held_out", size) for rank in ranks], device)


@dataclass
class _Record:
    """Measurements between the steps."""

    held_out: list[tuple[int, float]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    sent: dict[str, int] = field(default_factory=dict)


def train_rank(config: DemoConfig) -> RankResult:
    """Run the sharded training, as one of the ranks that `python -m mics_fn demo` launches."""
    device = mf.init_distributed(device=config.device)
    groups = mf.make_groups(
        partition_size=config.partition_size, node_size=config.node_size, device=device
    )
    text, record = load_text(), _Record()
    optimizer = mf.optim.adamw(config.lr, weight_decay=WEIGHT_DECAY)
    model = config.make_model(device)
    trainer = mf.Trainer(
        model,
        optimizer,
        groups,
        loss=gpt.loss,
        accumulate=config.accumulate,
        precision=config.precision or None,
    )
    test = held_out_batch(config, text, [groups.rank], device)
    batches = _batches(config, text, groups, record, lambda: trainer.eval(test).item())
    steps = trainer.fit(batches, config.steps)
    record.held_out.append((config.steps, trainer.eval(test).item()))
    params, buckets, route = (
        trainer.params(),
        buckets_of(trainer.state.params),
        groups.hierarchy.route,
    )
    formulas = wire_bytes(buckets, route, groups.num_replicas, accumulate=config.accumulate)
    groups.close()
    return RankResult(
        losses=[float(m.loss) for m in steps],
        seconds=record.seconds,
        held_out=record.held_out,
        state_bytes=nbytes((trainer.state.params, trainer.state.opt)),
        full_bytes=sum(bucket.numel * bucket.dtype.itemsize for bucket in buckets),
        formulas=formulas,
        sent=record.sent,
        device=str(device),
        params={k: v.cpu() for k, v in params.items()} if groups.rank == 0 else {},
    )


def _batches(
    config: DemoConfig, text: Text, groups: mf.Groups, record: _Record, test: Callable[[], float]
) -> Iterator[Batch]:
    """Yield this rank's batches, and measure the training step between two of them."""
    device = groups.device
    for step in range(config.steps):
        if step in config.tests_at:
            record.held_out.append((step, test()))
        batch = config.step_batch(text, step, [groups.rank], device)
        groups.traffic.clear()
        started = time.perf_counter()
        yield batch
        _torch.finish(device)
        record.seconds.append(time.perf_counter() - started)
        record.sent = {what: sent for what, (_, sent) in groups.traffic.snapshot().items()}


def train_alone(config: DemoConfig, progress: Any) -> AloneResult:
    """Train on the same batches and parameters in one process with `torch.optim.AdamW`.

    Args:
        config: as for the ranks.
        progress: a progress bar, which is called with the steps and gives them back.
    """
    # Half of the cores: an op waits for its slowest thread, and others may use some of the cores.
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // 2))
    text = load_text()
    model = config.make_model(config.device)
    optimizer = torch.optim.AdamW(model.parameters(), config.lr, weight_decay=WEIGHT_DECAY)
    ranks, micros = range(config.ranks), range(config.accumulate)
    losses = []
    for step in progress(range(config.steps)):
        total = 0.0
        for m in micros:
            batch = join([config.batch(text, step, m, r) for r in ranks], config.device)
            loss = gpt.loss(model, batch)
            (loss / config.accumulate).backward()
            total += loss.item() / config.accumulate
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    with torch.no_grad():
        test = held_out_batch(config, text, ranks, config.device)
        held_out = gpt.loss(model, test).item()
    params = {name: p.detach().cpu() for name, p in model.named_parameters()}
    nbytes_here = nbytes(([*model.parameters()], [*optimizer.state.values()]))
    return AloneResult(losses, held_out, nbytes_here, params)

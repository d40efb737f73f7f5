"""The training that the doctor checks: the same steps on the device, and in float64 by plain torch.

[Note: how far apart numbers may be] Each op rounds its result once, by at most u of the dtype that
computes, and the sum of K products inside it by about sqrt(K) u of float32, because the roundings
of a sum have random signs. What a step changes went through the ops of the model twice, forward and
back, then through a sum over tokens, and through one addition per rank and micro-step in the dtype
that reduces. That is the error of an update relative to the update, since an update by SGD is
linear in the gradient. Parameters are stored in float32, which rounds them once per step.
"""

import contextlib
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mics_fn as mf
from mics_fn import _torch
from mics_fn.lab.models import gpt
from mics_fn.lab.models.task import Batch, TrainingTask
from mics_fn.lab.models.text import load_text
from mics_fn.shards import Precision

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


def wait_finder(device: torch.device) -> Callable[[str], None] | None:
    """Return what sets whether an op in which the host waits raises; None if a device has none."""
    return getattr(torch.get_device_module(device), "set_sync_debug_mode", None)


@contextlib.contextmanager
def without_waits(device: torch.device) -> Iterator[None]:
    """Raise RuntimeError at an op of this block in which the host waits for the device.

    Not for an event, such as that of the totals of the step before, which is long over.
    """
    forbid = wait_finder(device) or (lambda mode: None)
    forbid("error")
    try:
        yield
    finally:
        forbid("default")


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


TEXT_BYTES = 200_000
STEADY = 3  # steps before these record and plan, or allocate for the first time


@dataclass(frozen=True, kw_only=True)
class Training(TrainingTask):
    """Options of what is trained by SGD, at a rate at which a step changes more than rounding does.

    Args:
        steps: optimizer steps.
    """

    steps: int = 5
    accumulate: int = 2
    sequences: int = 2
    lr: float = 0.1

    @property
    def bucket_bytes(self) -> int:
        """Size that cuts the model into about eight buckets."""
        return gpt.num_params(self.model) * 4 // 8

    @property
    def live_bytes(self) -> int:
        """Budget of two buckets, far below all parameters."""
        return 2 * self.bucket_bytes


class Trained(NamedTuple):
    """Results of some steps."""

    losses: list[float]  # of this rank
    params: dict[str, Tensor]  # full, on the CPU
    trainer: mf.Trainer


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Compute the mean cross-entropy, in float64 for a model of float64, else in float32."""
    logits = model(batch[0])
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())


def train(
    training: Training,
    groups: mf.Groups,
    around: Callable[[int], contextlib.AbstractContextManager] = lambda step: (
        contextlib.nullcontext()
    ),
    **options: Any,
) -> Trained:
    """Train on this rank's samples with `Trainer`.

    Args:
        training: what to train.
        groups: of all ranks.
        around: a block around each step, by its number. The loss is read after all of them.
        options: of `Trainer`, beyond those that `training` gives.
    """
    text = load_text(TEXT_BYTES)
    here, device = [groups.rank], groups.device
    batches = [training.step_batch(text, step, here, device) for step in range(training.steps)]
    options = {"live_bytes": None, "bucket_bytes": training.bucket_bytes} | options
    trainer = mf.Trainer(
        training.make_model(groups.device),
        mf.optim.sgd(training.lr),
        groups,
        loss=loss_of,
        accumulate=training.accumulate,
        **options,
    )
    losses = []
    for step, batch in enumerate(batches):
        with around(step):
            losses.append(trainer.step(batch).loss)
    params = {name: value.cpu() for name, value in trainer.params().items()}
    return Trained([loss.item() for loss in losses], params, trainer)


def reference(
    training: Training,
    replicas: Sequence[Sequence[int]],
    *,
    merge_every: int = 1,
    max_norm: float | None = None,
) -> dict[str, Tensor]:
    """Train in plain torch in float64; return the parameters of the first replica.

    Args:
        training: what to train.
        replicas: the ranks whose samples each replica trains on.
        merge_every: replicas are averaged after so many steps; one replica never is.
        max_norm: to which the norm of a gradient is clipped.
    """
    text = load_text(TEXT_BYTES)
    models = [training.make_model().double() for _ in replicas]
    for step in range(training.steps):
        for model, ranks in zip(models, replicas, strict=True):
            loss = loss_of(model, training.step_batch(text, step, ranks))
            model.zero_grad()
            loss.backward()
            if max_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            with torch.no_grad():
                for p in model.parameters():
                    p -= training.lr * (p.grad if p.grad is not None else 0)
        if (step + 1) % merge_every == 0:
            _merge(models)
    return {name: p.detach() for name, p in models[0].named_parameters()}


@torch.no_grad()
def _merge(models: Sequence[nn.Module]) -> None:
    for same in zip(*(model.parameters() for model in models), strict=True):
        mean = torch.stack(same).mean(0)
        for p in same:
            p.copy_(mean)


def distance(
    training: Training,
    found: dict[str, Tensor],
    expected: dict[str, Tensor],
    precision: str = "",
    ranks: int = 1,
) -> tuple[float, float]:
    """Return the error of parameters against float64, relative to their update, and the bound.

    See [Note: how far apart numbers may be].
    """
    start = dict(training.make_model().double().named_parameters())
    change = _norm({name: p - start[name] for name, p in expected.items()})
    gap = _norm({name: found[name].double() - p for name, p in expected.items()})
    rounding = _unit(torch.float32) * sqrt(training.steps) * _norm(expected) / change
    formats = Precision.parse(precision).formats("", torch.float32)
    return gap / change, rounding + _roundings(training, formats.compute, formats.reduce, ranks)


def _roundings(training: Training, compute: torch.dtype, reduce: torch.dtype, ranks: int) -> float:
    """Return the relative error of a gradient; see [Note: how far apart numbers may be]."""
    model = training.model
    d, context = model.dim, model.context
    block = [d, d, d // model.num_heads, context, d, 1]  # attention, from its norm to its addition
    block += [d, d, 1, 4 * d, 1]
    ops = [1, *block * model.num_blocks, d, d, model.vocab_size]
    way = sum(_unit(compute) + sqrt(length) * _unit(torch.float32) for length in ops)
    tokens = sqrt(training.sequences * context) * _unit(torch.float32)
    return 2 * way + tokens + (ranks + training.accumulate) * _unit(reduce)


def _unit(dtype: torch.dtype) -> float:
    """Return the largest relative error of rounding to a dtype."""
    return torch.finfo(dtype).eps / 2


def _norm(values: dict[str, Tensor]) -> float:
    return sqrt(sum(value.detach().double().square().sum().item() for value in values.values()))

"""Small models, one for each way in which code uses parameters.

A case is a model, this rank's batch of a step, and a loss; `test_zoo` trains each on several ranks
and in one process. What each is for:

| case | what it does with parameters |
|---|---|
| linear, arguments | plain layers; lists and keywords as arguments, and the model's own loss |
| views, views-of-one | every view operation, on a weight each and all on one weight |
| indexing | what copies a part: advanced indexing, gather, where, in-place writes to a copy |
| function | an autograd.Function that saves its weight, and one that keeps it on ctx |
| weight-norm, spectral-norm | parametrizations; power iteration writes to buffers in forward |
| embedding, sparse | lookups, with padding, sparse gradients |
| conv1d, conv2d, channels-last | convolutions and all norms; running statistics; strided memory |
| lstm, rnn | fused kernels that take lists of weights |
| attention, encoder | packed and separate projections; the encoder's fast path in eval |
| strided | gradients that are columns, parts of complex ones, or one number expanded |
| float32-cast, bfloat16-cast, autocast | a cast copy of a weight is what is used and saved |
| experts, skip, reorder | weights that no rank uses, that come and go, that change places |
| checkpoint | forward of a block runs again in backward; hooks on what is saved |
| tied, shared | a weight under two names, a module in two places, a weight used twice |
| frozen, lora | weights without gradient in front of, between and behind those with |
| teacher | the same weights under no_grad, inference_mode and autograd; an output detached |
| hooks | forward and backward hooks of modules, hooks on weights |
| twice | two forwards of the model in one loss |
| penalty, sharpness | backward through backward, by inputs and by weights |
| decay | a loss of the parameters themselves, one by one, stacked and by foreach |
| reads | numbers, shapes and detached copies of weights steer the forward |
| func | closed over by vmap, grad and jvp of torch.func |
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import zoo_models as m
from cases import random, unit_roundoff
from torch import Tensor, nn
from torch.nn.utils import parametrizations

# The relative error of one kernel's result in each precision. A sum here has at most about a
# hundred terms, which kernels may add in any order; autocast adds in float32 and then rounds
# each result to bfloat16, which turns a difference of any size into at most one unit, 2 u.
FLOAT64 = 100 * unit_roundoff(torch.float64)
FLOAT32 = 100 * unit_roundoff(torch.float32)
BFLOAT16 = 2 * unit_roundoff(torch.bfloat16)


def objective(out: Tensor) -> Tensor:
    """One number in which every element of `out` has a weight of its own."""
    out = out.double()
    weights = torch.sin(torch.arange(out.numel(), device=out.device) + 1.0).view(out.shape)
    return (out * weights).sum() + 0.1 * out.square().sum()


def call(model: nn.Module, batch: Any) -> Tensor:
    return objective(model(**batch) if isinstance(batch, dict) else model(*batch))


def own_loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    """What `Trainer` does without a loss: that of the model."""
    out = model(**batch)
    return out if isinstance(out, Tensor) else out.loss


@dataclass(frozen=True)
class Case:
    """One model of the zoo.

    Args:
      model: makes it; `build` then seeds it and moves its parameters off special values.
      batch: `batch(step, rank)`.
      loss: as for `Trainer`.
      dtype: of the parameters.
      error: the relative error of one kernel in the coarsest precision that the case computes in.
      evaluates: whether its loss can be had without gradients.
      changes: whether the order in which it uses parameters is not the same in every step.
    """

    model: Callable[[], nn.Module]
    batch: Callable[[int, int], Any]
    loss: Callable[[nn.Module, Any], Tensor] | None = call
    dtype: torch.dtype = torch.float64
    error: float = FLOAT64
    evaluates: bool = True
    changes: bool = False


def build(case: Case) -> nn.Module:
    """The same model on every rank, with no parameter at zero or one by initialisation."""
    torch.manual_seed(0)
    model = case.model().to(case.dtype)
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.add_(random(i, *p.shape, dtype=p.dtype), alpha=0.1)
    return model.train()


def floats(*shapes: tuple[int, ...]) -> Callable[[int, int], tuple[Tensor, ...]]:
    """Batches of random tensors, other ones each step on each rank."""

    def batch(step: int, rank: int) -> tuple[Tensor, ...]:
        seed = 1000 * step + 10 * rank
        return tuple(
            random(seed + i, *shape, dtype=torch.float64) for i, shape in enumerate(shapes)
        )

    return batch


def tokens(*shape: int) -> Callable[[int, int], tuple[Tensor, ...]]:
    """Batches of integers below 11."""

    def batch(step: int, rank: int) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(1000 * step + 10 * rank)
        return (torch.randint(11, shape, generator=generator),)

    return batch


def with_step(step: int, rank: int) -> dict[str, Any]:
    """A batch that says which step it is, for models that do not do the same in each."""
    return {"x": random(1000 * step + 10 * rank, 4, 6, dtype=torch.float64), "step": step}


def single(batch: Callable[[int, int], tuple[Tensor, ...]], step: int, rank: int) -> tuple:
    return tuple(x.float() for x in batch(step, rank))


def arguments_batch(step: int, rank: int) -> dict[str, Any]:
    *inputs, target = floats(*[(4, 6)] * 4)(step, rank)
    return {"inputs": inputs, "target": target, "power": 2}


def twice(model: nn.Module, batch: Any) -> Tensor:
    x = batch[0]
    return objective(model(x)) - (model(x) * model(x.flip(0))).sum()


def penalised(model: nn.Module, batch: Any) -> Tensor:
    """The gradient by the input is part of the loss."""
    x = batch[0].detach().requires_grad_()
    out = objective(model(x))
    (slope,) = torch.autograd.grad(out, x, create_graph=True)
    return out + (slope.norm() - 1).square()


def sharpness(model: nn.Module, batch: Any) -> Tensor:
    """The gradient by the weights is part of the loss."""
    out = call(model, batch)
    slopes = torch.autograd.grad(out, list(model.parameters()), create_graph=True)
    return out + 0.01 * sum(slope.square().sum() for slope in slopes)


def decayed(model: nn.Module, batch: Any) -> Tensor:
    """Sums over all parameters, in the ways in which people write them."""
    params: list[Tensor] = list(model.parameters())
    matrices: list[Tensor] = [p for name, p in model.named_parameters() if name.endswith("weight")]
    squares = sum(p.square().sum() for p in params)
    # What torch's own clipping calls:
    foreach_norm: Any = torch._foreach_norm  # pyright: ignore[reportPrivateImportUsage]
    norms = torch.stack(foreach_norm(params))
    spread = torch.stack(matrices).var(0).sum() + torch.cat([p.flatten() for p in params]).std()
    vector = nn.utils.parameters_to_vector(params)
    return call(model, batch) + 0.01 * (squares + norms.sum() + spread + vector.abs().sum())


def _lstm() -> nn.Module:
    return nn.Sequential(nn.LSTM(6, 4, 2, bidirectional=True, batch_first=True), m.First())


def _rnn() -> nn.Module:
    return nn.Sequential(nn.RNN(6, 6, 2), m.First(), nn.LSTM(6, 6, proj_size=3), m.First())


def _embedding(**options: Any) -> nn.Module:
    return nn.Sequential(nn.Embedding(11, 6, **options), *m.layers())


def _weight_norm() -> nn.Module:
    linear, conv = nn.Linear(6, 6), nn.Conv1d(4, 4, 3, padding=1)
    parts = parametrizations.weight_norm(linear), parametrizations.weight_norm(conv, dim=2)
    return nn.Sequential(parts[0], nn.Tanh(), parts[1], *m.layers(1))


def _spectral_norm() -> nn.Module:
    parts = [parametrizations.spectral_norm(nn.Linear(6, 6)) for _ in range(2)]
    return nn.Sequential(
        parts[0], nn.Tanh(), parts[1], parametrizations.orthogonal(nn.Linear(6, 6))
    )


def _conv1d() -> nn.Module:
    convs = nn.Conv1d(2, 4, 3, groups=2), nn.ConvTranspose1d(4, 4, 3), nn.Conv1d(4, 4, 1)
    norms = nn.BatchNorm1d(4), nn.InstanceNorm1d(4, affine=True, track_running_stats=True)
    return nn.Sequential(convs[0], norms[0], nn.GELU(), convs[1], norms[1], nn.PReLU(4), convs[2])


def _conv2d() -> nn.Module:
    body = nn.Conv2d(2, 4, 3, padding=1, padding_mode="circular"), nn.BatchNorm2d(4), nn.GELU()
    head = nn.ConvTranspose2d(4, 4, 2, stride=2), nn.GroupNorm(2, 4), nn.Conv2d(4, 4, 3, stride=2)
    return nn.Sequential(*body, *head, nn.LayerNorm([4, 4, 4]), nn.RMSNorm(4))


def _channels_last() -> nn.Module:
    model: Any = _conv2d()
    return model.to(memory_format=torch.channels_last)


def _encoder() -> nn.Module:
    options: dict[str, Any] = {"dropout": 0.0, "batch_first": True}
    first = nn.TransformerEncoderLayer(8, 2, 16, **options)
    return nn.Sequential(first, nn.TransformerEncoderLayer(8, 2, 16, norm_first=True, **options))


IMAGES = floats((2, 2, 5, 5))
ROWS, SEQUENCES, IDS = floats((4, 6)), floats((2, 5, 8)), tokens(2, 4)

CASES: dict[str, Case] = {
    "linear": Case(m.stack, ROWS),
    "arguments": Case(m.Arguments, arguments_batch, None),
    "views": Case(partial(m.Each, m.VIEWS), ROWS),
    "views-of-one": Case(partial(m.Each, m.VIEWS, one=True), ROWS),
    "indexing": Case(partial(m.Each, m.COPIES), ROWS),
    "function": Case(m.ByHand, ROWS),
    "weight-norm": Case(_weight_norm, floats((2, 4, 6))),
    "spectral-norm": Case(_spectral_norm, ROWS),
    "embedding": Case(partial(_embedding, padding_idx=0, scale_grad_by_freq=True), IDS),
    "sparse": Case(partial(_embedding, sparse=True), IDS),
    "conv1d": Case(_conv1d, floats((2, 2, 6))),
    "conv2d": Case(_conv2d, IMAGES),
    "channels-last": Case(_channels_last, IMAGES),
    "lstm": Case(_lstm, floats((2, 4, 6))),
    "rnn": Case(_rnn, floats((4, 2, 6))),
    "attention": Case(m.Attention, SEQUENCES),
    "strided": Case(m.Strided, SEQUENCES),
    "encoder": Case(_encoder, SEQUENCES),
    "float32-cast": Case(partial(m.Casts, torch.float32), ROWS, error=FLOAT32),
    "bfloat16-cast": Case(partial(m.Casts, torch.bfloat16), ROWS, error=BFLOAT16),
    "autocast": Case(m.Autocast, partial(single, ROWS), dtype=torch.float32, error=BFLOAT16),
    "experts": Case(m.Experts, with_step, changes=True),
    "skip": Case(partial(m.Changes, m.skipping), with_step, changes=True),
    "reorder": Case(partial(m.Changes, m.turning), with_step, changes=True),
    "checkpoint": Case(m.Checkpointed, ROWS),
    "tied": Case(m.TiedHead, IDS),
    "shared": Case(m.SharedParts, ROWS),
    "frozen": Case(m.frozen_parts, ROWS),
    "lora": Case(m.lora, ROWS),
    "teacher": Case(m.Teacher, ROWS),
    "hooks": Case(m.Hooked, ROWS),
    "twice": Case(m.stack, ROWS, twice),
    "penalty": Case(m.stack, ROWS, penalised, evaluates=False),
    "sharpness": Case(m.stack, ROWS, sharpness, evaluates=False),
    "decay": Case(m.stack, ROWS, decayed),
    "reads": Case(m.Reads, ROWS),
    "func": Case(m.Transformed, ROWS),
}

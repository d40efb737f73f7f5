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
from cases import random, unit_roundoff
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

# The models.


def layers(n: int = 3, width: int = 6) -> list[nn.Module]:
    return [layer for _ in range(n) for layer in (nn.Linear(width, width), nn.Tanh())]


def stack(n: int = 3, width: int = 6) -> nn.Module:
    return nn.Sequential(*layers(n, width))


class Arguments(nn.Module):
    """Tensors in a list, keywords, and a loss of its own."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.gain = nn.Parameter(torch.tensor(1.5))

    def forward(self, inputs: list[Tensor], *, target: Tensor, power: int = 1) -> Tensor:
        out = sum(part(x) for part, x in zip(self.parts, inputs, strict=True)) * self.gain
        return (out - target).abs().pow(power).mean()


class First(nn.Module):
    """The first of what a recurrent module gives."""

    def forward(self, out: tuple) -> Tensor:
        return out[0]


class Attention(nn.Module):
    """Projections in one packed weight, and in three of different widths."""

    def __init__(self):
        super().__init__()
        self.packed = nn.MultiheadAttention(8, 2, batch_first=True)
        self.separate = nn.MultiheadAttention(8, 2, kdim=4, vdim=6, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.packed(x, x, x, need_weights=False)[0]
        out, weights = self.separate(x, x[..., :4], x[..., 2:])
        return out + weights.mean()


class Strided(nn.Module):
    """Weights whose gradients autograd gives as columns, as parts of complex ones, expanded."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(8))
        self.real, self.imag = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8))
        self.shift = nn.Parameter(torch.randn(2, 3))
        self.biased = nn.MultiheadAttention(8, 2, add_bias_kv=True, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.biased(x, x, x, need_weights=False)[0]
        x = torch.view_as_real(x.to(torch.complex128) @ torch.complex(self.real, self.imag)).sum(-1)
        return x.tanh() @ torch.stack([self.left, self.right], 1).tanh() + self.shift.sum()


class Autocast(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.norm, self.conv = stack(), nn.LayerNorm(6), nn.Conv1d(6, 6, 1)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.conv(self.norm(self.body(x)).mT)


class Experts(nn.Module):
    """Four experts of which two work: the last one never, others in some steps only."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(6, 4), nn.ModuleList(stack(1) for _ in range(4))

    def forward(self, x: Tensor, step: int) -> Tensor:
        chosen = [0, 1] if step == 0 else [2, 1]
        gates = self.gate(x)[:, chosen].softmax(1)
        halves = [self.experts[k](x[i::2]) for i, k in enumerate(chosen)]
        return torch.cat([half * gates[i::2, i, None] for i, half in enumerate(halves)])


class Changes(nn.Module):
    """Forward is not the same in every step: a layer is left out, or their order is another."""

    def __init__(self, order: Callable[[int], list[int]]):
        super().__init__()
        self.order, self.parts = order, nn.ModuleList(stack(1) for _ in range(4))

    def forward(self, x: Tensor, step: int) -> Tensor:
        for i in self.order(step):
            x = x + self.parts[i](x)
        return x


def skipping(step: int) -> list[int]:
    return [0, 3] if step == 1 else [0, 1, 2, 3]


def turning(step: int) -> list[int]:
    return [3, 2, 1, 0] if step == 1 else [0, 1, 2, 3]


class Checkpointed(nn.Module):
    """Blocks that are computed again in backward, one of them inside another."""

    def __init__(self):
        super().__init__()
        self.first, self.inner, self.outer, self.last = stack(2), stack(1), stack(1), stack(1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.again(self.first, x)
        x = self.again(lambda x: self.outer(self.again(self.inner, x)), x)
        with torch.autograd.graph.save_on_cpu():  # on a CPU: a copy of what is saved
            return self.last(x)

    @staticmethod
    def again(block: Callable, x: Tensor) -> Any:
        return checkpoint(block, x, use_reentrant=False)


class TiedHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.body = nn.Embedding(11, 6), stack()
        self.head = nn.Linear(6, 11)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(self.embed(ids)))


class SharedParts(nn.Module):
    """A module in two places, a weight in two modules, and a weight used by hand too."""

    def __init__(self):
        super().__init__()
        self.first, self.middle = nn.Linear(6, 6), stack(2)
        self.again, self.last = self.first, nn.Linear(6, 6)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.again(self.middle(torch.tanh(self.first(x))))
        return self.last(x) @ self.first.weight + self.first.bias


def frozen_parts() -> nn.Module:
    """Frozen in front (no gradient comes there), between (it passes through) and behind."""
    model = stack(5)
    for i in (0, 4, 8):
        model.get_submodule(str(i)).requires_grad_(False)
    model.get_parameter("2.bias").requires_grad_(False)
    return model


class LowRank(nn.Module):
    """A frozen layer and what is learned beside it; `merged` adds the weights, not the outputs."""

    def __init__(self, base: nn.Linear, rank: int = 2, *, merged: bool = False):
        super().__init__()
        self.base, self.merged = base.requires_grad_(False), merged
        self.down = nn.Parameter(torch.randn(rank, base.in_features))
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        if self.merged:
            return x @ (self.base.weight + self.up @ self.down).t() + self.base.bias
        return self.base(x) + x @ self.down.t() @ self.up.t()


def lora() -> nn.Module:
    first, last = LowRank(nn.Linear(6, 8)), LowRank(nn.Linear(8, 6), merged=True)
    return nn.Sequential(first, nn.GELU(), last)


class Hooked(nn.Module):
    """Hooks on modules, forward and backward, and on an alias of a weight.

    (On a `Parameter` itself a hook would stay for all later steps.)
    """

    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.first.register_forward_hook(lambda module, inputs, out: 2 * out + module.bias)
        self.last.register_forward_pre_hook(lambda module, inputs: inputs[0] @ module.weight)
        self.last.register_full_backward_hook(lambda module, grads, _: (3 * grads[0],))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        weight = self.middle.weight.view(6, 6)
        if weight.requires_grad:
            weight.register_hook(lambda grad: 2 * grad)
        return self.last(torch.tanh(x @ weight + self.middle.bias))


class Teacher(nn.Module):
    """The same weights without autograd and with it, in one forward."""

    def __init__(self):
        super().__init__()
        self.body, self.head, self.untaught = stack(), nn.Linear(6, 6), stack(1)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.body(x)
        with torch.inference_mode():
            second = self.body(x + 1)
        features = self.untaught(x).detach()  # used, and yet without a gradient
        return self.head(self.body(x) + features) - target - second.clone()


class Transformed(nn.Module):
    """Under the transforms of torch.func, inside an ordinary backward."""

    def __init__(self):
        super().__init__()
        self.body = stack()

    def forward(self, x: Tensor) -> Tensor:
        slopes = torch.func.vmap(torch.func.grad(lambda row: self.body(row).sum()))(x)
        tangents = torch.func.jvp(self.body, (x,), (torch.ones_like(x),))[1]
        return torch.vmap(self.body)(x) + slopes + tangents


# Weights that code takes in hand.

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {  # of a weight of shape (4, 6)
    "t": lambda w: w.t(),
    "view": lambda w: w.view(3, 8),
    "view_as_complex": lambda w: torch.view_as_complex(w.view(4, 3, 2)).abs(),
    "transpose": lambda w: w.transpose(0, 1),
    "permute": lambda w: w.view(2, 2, 6).permute(2, 0, 1),
    "narrow": lambda w: w.narrow(1, 2, 3),
    "select": lambda w: w.select(0, 2),
    "slice": lambda w: w[1:3, ::2],
    "row": lambda w: w[-1],
    "ellipsis": lambda w: w[..., None, 3],
    "expand": lambda w: w.unsqueeze(0).expand(3, 4, 6),
    "unsqueeze": lambda w: w.unsqueeze(1),
    "squeeze": lambda w: w.view(4, 1, 6).squeeze(1),
    "split": lambda w: w.split([2, 1, 3], dim=1)[2],
    "chunk": lambda w: w.chunk(2)[1] * w.chunk(2)[0],
    "unbind": lambda w: torch.stack(w.unbind(1)[::2]),
    "rows": lambda w: torch.cat([i * row for i, row in enumerate(w)]),
    "as_strided": lambda w: w.as_strided((3, 4), (2, 1)),
    "reshape_copy": lambda w: w.t().reshape(8, 3),
    "flatten": lambda w: w.flatten(),
    "unflatten": lambda w: w.unflatten(1, (2, 3)),
    "diagonal": lambda w: w.diagonal(1),
    "unfold": lambda w: w.unfold(1, 3, 2),
    "view_of_view": lambda w: w.t()[1:5].unsqueeze(0).transpose(1, 2)[0, 1:],
    "detached": lambda w: w.detach()[0] * w[1],
}

COPIES: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda w: w[torch.tensor([2, 0, 2])],
    "mask": lambda w: w[torch.tensor([True, False, True, True])],
    "pairs": lambda w: w[[0, 3], [1, 5]],
    "index_select": lambda w: w.index_select(1, torch.tensor([5, 5, 1])),
    "gather": lambda w: w.gather(1, torch.tensor([[0], [1], [2], [5]])),
    "take": lambda w: w.take(torch.tensor([0, 7, 23])),
    "where": lambda w: torch.where(w > 0, w, 2 * w),
    "repeat": lambda w: w.repeat(2, 1),
    "roll": lambda w: w.roll(1, 0),
    "flip": lambda w: w.flip(1),
    "tril": lambda w: w.tril(),
    "einsum": lambda w: torch.einsum("ij,kj->ik", w, w),
    "matmul": lambda w: w @ w.t(),
    "sort": lambda w: w.sort(1).values[:, 0],
    "norm": lambda w: w.norm(dim=1),
    "softmax": lambda w: w.softmax(1),
    "clone": lambda w: w.clone().mul_(2),
    "contiguous": lambda w: w.t().contiguous(),
    "written": lambda w: torch.zeros(4, 6, dtype=w.dtype).copy_(w)[1:],
    "filled": lambda w: w.masked_fill(torch.eye(4, 6) > 0, 0.5),
}


class Each(nn.Module):
    """Each operation on a weight of its own, which bears its name, or all on the same weight."""

    def __init__(self, ops: dict[str, Callable[[Tensor], Tensor]], *, one: bool = False):
        super().__init__()
        self.ops, self.body = ops, stack(2)
        names = ["all"] if one else ops
        self.of = nn.ParameterDict({f"w_{name}": torch.randn(4, 6) for name in names})

    def forward(self, x: Tensor) -> Tensor:
        gain, only = self.body(x).mean(), "w_all" if "w_all" in self.of else None
        outs = [op(self.of[only or f"w_{name}"]) for name, op in self.ops.items()]
        return torch.cat([torch.sin(out.flatten() + gain) for out in outs])


class Saves(torch.autograd.Function):
    """A product by hand; what it needs is saved, with its weight under autograd's eyes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x


class Keeps(torch.autograd.Function):
    """The same in the newer form; it keeps the weight as an attribute, behind autograd's back."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return x @ weight.t()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.x, ctx.weight = inputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad @ ctx.weight, grad.t() @ ctx.x


class ByHand(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.third = nn.Linear(6, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(Saves.apply(x, self.first.weight) + self.first.bias)
        x = torch.tanh(Keeps.apply(x, self.second.weight) + self.second.bias)
        return Saves.apply(x, self.third.weight.t())  # a view of a weight is what is saved


class Casts(nn.Module):
    """Its weights are used in another precision; gradients come back in the parameters' own."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.dtype, self.parts = dtype, nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        part: Any
        for part in self.parts:
            weight = part.weight.to(self.dtype)
            x = torch.tanh(x @ weight.double().t() + part.bias) + (x.to(self.dtype) @ weight)
        return x


class Reads(nn.Module):
    """What code asks of weights besides their product with something."""

    def __init__(self):
        super().__init__()
        self.weight, self.gain = nn.Parameter(torch.randn(4, 6)), nn.Parameter(torch.tensor(0.5))
        self.spare = nn.ParameterList(torch.randn(6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            largest = self.weight.abs().max().item()
        if self.gain > 100 or bool(torch.isnan(self.weight).any()):
            raise ValueError("not reached")
        ones = self.weight.new_ones(self.weight.size(1)) + torch.zeros_like(self.spare[0])
        x = (x + ones).to(self.weight.dtype) @ (self.weight / largest).T
        x = x * float(self.gain.detach()) + self.gain * self.weight.data.norm() / len(self.weight)
        x = x.to(self.weight) @ self.weight.clone().detach()
        number = self.spare[1][0].item() + self.spare[2].max().item()
        number += float(self.spare[0].detach().cpu().numpy().max()) + self.weight.tolist()[0][0]
        return x * self.spare[0] + number + sum(p.sum() / p.numel() for p in self.spare)


# The cases.

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
    return nn.Sequential(nn.LSTM(6, 4, 2, bidirectional=True, batch_first=True), First())


def _rnn() -> nn.Module:
    return nn.Sequential(nn.RNN(6, 6, 2), First(), nn.LSTM(6, 6, proj_size=3), First())


def _embedding(**options: Any) -> nn.Module:
    return nn.Sequential(nn.Embedding(11, 6, **options), *layers())


def _weight_norm() -> nn.Module:
    linear, conv = nn.Linear(6, 6), nn.Conv1d(4, 4, 3, padding=1)
    parts = parametrizations.weight_norm(linear), parametrizations.weight_norm(conv, dim=2)
    return nn.Sequential(parts[0], nn.Tanh(), parts[1], *layers(1))


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
    "linear": Case(stack, ROWS),
    "arguments": Case(Arguments, arguments_batch, None),
    "views": Case(partial(Each, VIEWS), ROWS),
    "views-of-one": Case(partial(Each, VIEWS, one=True), ROWS),
    "indexing": Case(partial(Each, COPIES), ROWS),
    "function": Case(ByHand, ROWS),
    "weight-norm": Case(_weight_norm, floats((2, 4, 6))),
    "spectral-norm": Case(_spectral_norm, ROWS),
    "embedding": Case(partial(_embedding, padding_idx=0, scale_grad_by_freq=True), IDS),
    "sparse": Case(partial(_embedding, sparse=True), IDS),
    "conv1d": Case(_conv1d, floats((2, 2, 6))),
    "conv2d": Case(_conv2d, IMAGES),
    "channels-last": Case(_channels_last, IMAGES),
    "lstm": Case(_lstm, floats((2, 4, 6))),
    "rnn": Case(_rnn, floats((4, 2, 6))),
    "attention": Case(Attention, SEQUENCES),
    "strided": Case(Strided, SEQUENCES),
    "encoder": Case(_encoder, SEQUENCES),
    "float32-cast": Case(partial(Casts, torch.float32), ROWS, error=FLOAT32),
    "bfloat16-cast": Case(partial(Casts, torch.bfloat16), ROWS, error=BFLOAT16),
    "autocast": Case(Autocast, partial(single, ROWS), dtype=torch.float32, error=BFLOAT16),
    "experts": Case(Experts, with_step, changes=True),
    "skip": Case(partial(Changes, skipping), with_step, changes=True),
    "reorder": Case(partial(Changes, turning), with_step, changes=True),
    "checkpoint": Case(Checkpointed, ROWS),
    "tied": Case(TiedHead, IDS),
    "shared": Case(SharedParts, ROWS),
    "frozen": Case(frozen_parts, ROWS),
    "lora": Case(lora, ROWS),
    "teacher": Case(Teacher, ROWS),
    "hooks": Case(Hooked, ROWS),
    "twice": Case(stack, ROWS, twice),
    "penalty": Case(stack, ROWS, penalised, evaluates=False),
    "sharpness": Case(stack, ROWS, sharpness, evaluates=False),
    "decay": Case(stack, ROWS, decayed),
    "reads": Case(Reads, ROWS),
    "func": Case(Transformed, ROWS),
}

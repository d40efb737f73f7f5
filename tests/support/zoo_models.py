"""The models of `zoo`, which says what each is for."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


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

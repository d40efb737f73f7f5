"""Modules of the `zoo` that take their weights in hand; `zoo` says what each is for."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from zoo_models import stack

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
        return x * self.spare[0] + number + sum(p.sum() / p.numel() for p in self.spare)


class ReadsNumpy(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = stack(2)
        self.weight = nn.Parameter(torch.randn(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        size = self.weight.detach().cpu().numpy().max() + self.weight.tolist()[0][0]
        return self.body(x) @ self.weight / float(size)

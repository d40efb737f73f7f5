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


class Bags(nn.Module):
    def __init__(self):
        super().__init__()
        self.mean = nn.EmbeddingBag(11, 6, padding_idx=0)
        self.sum = nn.EmbeddingBag(11, 6, mode="sum")
        self.weights = nn.Embedding(11, 1)  # of the samples: a gradient through the other input
        self.out = nn.Linear(6, 6)

    def forward(self, ids: Tensor) -> Tensor:
        weighted = self.sum(ids, per_sample_weights=self.weights(ids)[..., 0])
        return self.out(self.mean(ids) + weighted)


class First(nn.Module):
    """The first of what a recurrent module gives."""

    def forward(self, out: tuple) -> Tensor:
        return out[0]


class Cells(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.gru, self.rnn = nn.LSTMCell(6, 6), nn.GRUCell(6, 6), nn.RNNCell(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        h, c = x[0], x[1]
        for step in x:
            h, c = self.lstm(step, (h, c))
            c = self.gru(h, c)
            h = self.rnn(c, h)
        return h + c


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


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        mask = torch.ones(5, 5, dtype=torch.bool).triu(1)
        return self.layer(x, memory, tgt_mask=mask)


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

"""Small models and data of the scenarios."""

from collections.abc import Callable
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

STEPS = 4


class Block(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(d), nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Blocks between an embedding and a head that share their weight."""

    def __init__(self, depth: int = 4, d: int = 16, vocab: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, d)
        self.blocks = nn.ModuleList(Block(d) for _ in range(depth))
        self.head = nn.Linear(d, vocab, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.hidden(self.embedding(x)))

    def hidden(self, h: Tensor) -> Tensor:
        for block in self.blocks:
            h = block(h)
        return h


class Recomputed(Net):
    """Every block is computed again in backward."""

    def hidden(self, h: Tensor) -> Tensor:
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=False)
        return h


class Forked(Net):
    """Two blocks on a stream of their own beside two others, as expert layers do."""

    def hidden(self, h: Tensor) -> Tensor:
        first, second, third, fourth = self.blocks
        if not h.is_cuda:
            return second(first(h)) + fourth(third(h))
        main, other = torch.accelerator.current_stream(), _second_stream(h.device)
        other.wait_stream(main)
        with other:
            a = second(first(h))
        b = fourth(third(h))
        main.wait_stream(other)
        return a + b


@cache
def _second_stream(device: torch.device) -> torch.Stream:
    return torch.Stream(device)


def loss_of(model: Callable[[Tensor], Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return nn.functional.cross_entropy(model(x).flatten(0, 1).float(), y.flatten())


def batches(device: torch.device, samples: int = 4) -> list[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(100 + dist.get_rank())
    found = [torch.randint(32, (samples, 8), generator=random) for _ in range(STEPS)]
    return [(x.to(device), x.roll(1, 1).to(device)) for x in found]

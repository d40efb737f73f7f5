"""A small GPT, written plainly; the demo and the benches train it."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a `GPT`.

    Args:
        vocab_size: number of tokens; 256 for bytes.
        context: longest sequence in tokens.
        dim: width of the residual stream.
        num_heads: attention heads; divides `dim`.
        num_blocks: transformer blocks.
        tied: whether the head is the token embedding's own weight.
    """

    vocab_size: int = 256
    context: int = 128
    dim: int = 128
    num_heads: int = 4
    num_blocks: int = 4
    tied: bool = False

    def __post_init__(self) -> None:
        if self.dim % self.num_heads:
            text = f"GPTConfig: num_heads={self.num_heads} does not divide dim={self.dim}"
            raise ValueError(text)


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = nn.Linear(config.dim, 3 * config.dim)
        self.out = nn.Linear(config.dim, config.dim)

    def forward(self, x: Tensor) -> Tensor:  # [batch, time, dim]
        batch, time, dim = x.shape
        heads = self.qkv(x).view(batch, time, 3, self.num_heads, dim // self.num_heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # each [batch, head, time, dim of a head]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, time, dim))


class GPTBlock(nn.Module):
    """Attention and a two-layer MLP, each added to the stream after a norm of the input."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.norm1 = nn.LayerNorm(config.dim)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.dim)
        self.mlp = nn.Sequential(
            nn.Linear(config.dim, 4 * config.dim),
            nn.GELU(),
            nn.Linear(4 * config.dim, config.dim),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Maps tokens to logits of the next token, at every position.

    Args:
        config: its sizes.

    Example:
        >>> model = GPT(GPTConfig(vocab_size=11, context=8, dim=16, num_heads=2))
        >>> model(torch.zeros(3, 8, dtype=torch.int64)).shape
        torch.Size([3, 8, 11])
    """

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab_size, config.dim)
        self.positions = nn.Embedding(config.context, config.dim)
        self.blocks = nn.ModuleList(GPTBlock(config) for _ in range(config.num_blocks))
        self.norm = nn.LayerNorm(config.dim)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.apply(_init)
        if config.tied:
            self.head.weight = self.tokens.weight
        # Each block adds twice to the stream; this keeps its variance from growing with depth.
        for name, param in self.named_parameters():
            if name.endswith(("attention.out.weight", "mlp.2.weight")):
                nn.init.normal_(param, std=0.02 / (2 * config.num_blocks) ** 0.5)

    def forward(self, tokens: Tensor) -> Tensor:  # [batch, time] -> [batch, time, vocab]
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(places)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def _init(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def seeded(config: GPTConfig, device: torch.device, seed: int = 0) -> GPT:
    """Make a GPT on a device, with parameters that a seed decides."""
    torch.manual_seed(seed)
    with device:
        return GPT(config)


def num_params(config: GPTConfig) -> int:
    """Count the parameters of such a GPT."""
    return sum(p.numel() for p in seeded(config, torch.device("meta")).parameters())


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Compute the mean cross-entropy in nats per token of `(tokens_in, tokens_out)`.

    Both are [batch, time]. The loss is in float32, in whatever dtype the model computes.
    """
    tokens_in, tokens_out = batch
    logits = model(tokens_in).float()
    return F.cross_entropy(logits.flatten(0, 1), tokens_out.flatten())

"""What the demo, the benches and the doctor train: a small GPT, on text that every machine has.

The text is the bytes of Python's own library, cut into batches. The seed and the place of a batch
(part, step, micro-step, rank) alone decide which bytes it holds, so that one process can make the
batches of all ranks again.
"""

import random
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mics_fn.errors import PlanError

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a `GPT`.

    Args:
        vocab_size: number of tokens; 256 for bytes.
        context: longest sequence in tokens.
        dim: width of the residual stream.
        num_heads: attention heads; divides `dim`.
        num_blocks: transformer blocks.

    Raises:
        PlanError: `num_heads` does not divide `dim`.
    """

    vocab_size: int = 256
    context: int = 128
    dim: int = 128
    num_heads: int = 4
    num_blocks: int = 4

    def __post_init__(self) -> None:
        if self.dim % self.num_heads:
            raise PlanError(f"a width of {self.dim} is no multiple of {self.num_heads} heads")


class Attention(nn.Module):
    """Causal self-attention; the rows of `qkv` are in the order of heads, so it may have a part."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = nn.Linear(config.dim, 3 * config.dim)
        self.out = nn.Linear(config.dim, config.dim)

    def forward(self, x: Tensor) -> Tensor:  # [batch, time, dim]
        heads = self.qkv(x).unflatten(2, (-1, 3, x.shape[2] // self.num_heads))
        q, k, v = heads.permute(3, 0, 2, 1, 4)  # each [batch, head, time, dim of a head]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class GPTBlock(nn.Module):
    """Attention and a two-layer MLP, each added to the stream after a norm of the input."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        wide = 4 * config.dim
        self.norm1 = nn.LayerNorm(config.dim)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.dim)
        self.mlp = nn.Sequential(
            nn.Linear(config.dim, wide), nn.GELU(), nn.Linear(wide, config.dim)
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
        self.tokens = nn.Embedding(config.vocab_size, config.dim)
        self.positions = nn.Embedding(config.context, config.dim)
        self.blocks = nn.ModuleList(GPTBlock(config) for _ in range(config.num_blocks))
        self.norm = nn.LayerNorm(config.dim)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.apply(_init)
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


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Compute the mean cross-entropy in nats per token of `(tokens_in, tokens_out)`.

    Both are [batch, time]. The loss is in float64 for a model of float64, else in float32.
    """
    logits = model(batch[0])
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())


# The text.

HELD_OUT_EVERY = 10  # files

Part = Literal["train", "held_out"]


class Text(NamedTuple):
    """Bytes to train on, and bytes of other files for tests."""

    train: Tensor  # 1D uint8
    held_out: Tensor


def load_text(max_bytes: int = 4_000_000) -> Text:
    """Read the sources of Python's library in the order of names; every tenth is held out.

    Args:
        max_bytes: how many bytes to read at most.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    parts, remaining = (bytearray(), bytearray()), max_bytes
    for index, path in enumerate(sorted(folder.glob("*.py"), key=lambda path: path.name)):
        content = path.read_bytes()[:remaining]
        parts[index % HELD_OUT_EVERY == HELD_OUT_EVERY - 1].extend(content)
        remaining -= len(content)
        if not remaining:
            break
    return Text(*(torch.frombuffer(part, dtype=torch.uint8) for part in parts))


@dataclass(frozen=True, kw_only=True)
class TrainingTask:
    """Options of a training of the GPT on batches of the text, by rank.

    Args:
        model: sizes of the GPT.
        accumulate: micro-steps in a step.
        sequences: samples per rank and micro-step.
        lr: the learning rate.
        seed: the seed of parameters and batches.
    """

    model: GPTConfig = field(default_factory=GPTConfig)
    accumulate: int = 1
    sequences: int = 1
    lr: float = 3e-4
    seed: int = 0

    def make_model(self, device: Any = "cpu") -> GPT:
        """Make the initial model of every run, on the CPU, so that all machines have the same."""
        return seeded(self.model, torch.device("cpu"), self.seed).to(device)

    def batch(
        self, text: Text, step: int, micro: int, rank: int, part: Part = "train", size: int = 0
    ) -> Batch:
        """Draw the batch of one rank in one micro-step, the same on every machine.

        Args:
            text: from which sequences are drawn.
            step, micro, rank: the place of this batch in the run.
            part: "train" or "held_out".
            size: number of sequences; 0 means `sequences`.

        Returns:
            `(tokens_in, tokens_out)`, each int64 [size, context]; the second is one byte ahead.

        Example:
            >>> task = TrainingTask(model=GPTConfig(context=8), sequences=2)
            >>> tokens_in, tokens_out = task.batch(load_text(max_bytes=100_000), 0, 0, rank=1)
            >>> tokens_in.shape, bool((tokens_in[:, 1:] == tokens_out[:, :-1]).all())
            (torch.Size([2, 8]), True)
        """
        data, context = getattr(text, part), self.model.context
        # Python defines the sequence that a string seeds for every platform and version.
        places = random.Random(f"{self.seed} {part} {step} {micro} {rank}")
        starts = [places.randrange(len(data) - context) for _ in range(size or self.sequences)]
        rows = torch.stack([data[at : at + context + 1] for at in starts]).to(torch.int64)
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def step_batch(self, text: Text, step: int, ranks: Iterable[int], device: Any = "cpu") -> Batch:
        """Return the batches of ranks in all micro-steps of a step as one."""
        micros = range(self.accumulate)
        return join([self.batch(text, step, m, rank) for rank in ranks for m in micros], device)


def join(batches: Iterable[Batch], device: Any = None) -> Batch:
    """Concatenate batches, on a device."""
    tokens_in, tokens_out = (torch.cat(part).to(device) for part in zip(*batches, strict=True))
    return tokens_in, tokens_out

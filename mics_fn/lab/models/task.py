"""What the demo, the benches and the doctor train: the GPT, on batches of the text by rank."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mics_fn.lab.models import gpt
from mics_fn.lab.models.text import Part, Text

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class TrainingTask:
    """Options of a training of the GPT.

    Args:
        model: sizes of the GPT.
        accumulate: micro-steps in a step.
        sequences: samples per rank and micro-step.
        lr: the learning rate.
        seed: the seed of parameters and batches.
    """

    model: gpt.GPTConfig = field(default_factory=gpt.GPTConfig)
    accumulate: int = 1
    sequences: int = 1
    lr: float = 3e-4
    seed: int = 0

    def make_model(self, device: Any = "cpu") -> gpt.GPT:
        """Make the initial model of every run, on the CPU, so that all machines have the same."""
        return gpt.seeded(self.model, torch.device("cpu"), self.seed).to(device)

    def batch(
        self, text: Text, step: int, micro: int, rank: int, part: Part = "train", size: int = 0
    ) -> Batch:
        """Return the batch of one rank in one micro-step, of `sequences` samples or of `size`."""
        return text.batch(
            part,
            step=step,
            micro=micro,
            rank=rank,
            size=size or self.sequences,
            context=self.model.context,
            seed=self.seed,
        )

    def step_batch(self, text: Text, step: int, ranks: Iterable[int], device: Any = "cpu") -> Batch:
        """Return the batches of ranks in all micro-steps of a step as one."""
        micros = range(self.accumulate)
        return join([self.batch(text, step, m, rank) for rank in ranks for m in micros], device)


def join(batches: Iterable[Batch], device: Any = None) -> Batch:
    """Concatenate batches, on a device."""
    tokens_in, tokens_out = (torch.cat(part).to(device) for part in zip(*batches, strict=True))
    return tokens_in, tokens_out

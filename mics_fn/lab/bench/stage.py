"""What the peers of `bench step` are built from: sizes, batches, and a world of ranks."""

import contextlib
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mics_fn.lab.bench.links import AS_IS, Rate
from mics_fn.lab.bench.turns import Turns
from mics_fn.lab.models import gpt
from mics_fn.lab.models.text import load_text
from mics_fn.shards import Precision

Batch = tuple[Tensor, Tensor]
TEXT_BYTES = 500_000
DEFAULT_PEERS = ("keep", "zero3", "fsdp2", "fsdp2-keep", "plain")
OVERLAP_PEERS = ("keep", "overlap")  # of `--overlap`


@dataclass(frozen=True)
class StepConfig:
    """Everything that decides what is measured.

    Args:
        node_size, partition_size: the layout; nodes are groups of `node_size` ranks.
        turns: how many steps.
        peers: names from `PEERS`.
        precisions: texts of precisions; each peer that takes one is built with each of them. ()
            means float32, which is then not part of a name.
        rates: rates of the links between nodes, which are all measured in one run.
        alone: whether to compare peers also in a world of one, if they make sense there.
        accumulate: micro-steps in a step.
        sequences: samples per rank and micro-step.
        device: "auto", "cpu" or "cuda".
        model: sizes of the GPT.
        lr: the learning rate of AdamW.
        seed: the seed of parameters and batches.
    """

    node_size: int
    partition_size: int
    turns: Turns = field(default_factory=Turns)
    peers: tuple[str, ...] = DEFAULT_PEERS
    precisions: tuple[str, ...] = ()
    rates: tuple[Rate, ...] = (Rate(AS_IS, Turns.steps),)
    alone: bool = True
    accumulate: int = 1
    sequences: int = 1
    device: str = "auto"
    model: gpt.GPTConfig = field(default_factory=gpt.GPTConfig)
    lr: float = 3e-4
    seed: int = 0


def steps_at(config: StepConfig, place: int) -> list[int]:
    """The numbers of the steps that were timed at one of the rates."""
    steps = [rate.steps for rate in config.rates]
    first = config.turns.warmup + sum(steps[:place])
    starts = range(first, first + config.turns.rounds * sum(steps), sum(steps))
    return [start + step for start in starts for step in range(steps[place])]


class Stage(NamedTuple):
    """What a peer is built from, on this rank of a world of all ranks or of this rank alone."""

    config: StepConfig
    device: torch.device
    world_size: int
    partition_size: int
    own: Any  # the process group of this rank alone; None in a world of all ranks
    batches: list[list[Batch]]  # by step and micro-step, the same for every peer
    closing: contextlib.ExitStack  # closes what peers leave open
    precision: Precision = Precision()  # for the next peer


def make_stage(
    config: StepConfig,
    device: torch.device,
    closing: contextlib.ExitStack,
    *,
    own: Any = None,
    steps: int | None = None,
) -> Stage:
    """A stage of all ranks, or of this one alone if its `own` group is given."""
    world_size = 1 if own is not None else dist.get_world_size()
    p = 1 if own is not None else config.partition_size
    if steps is None:
        steps = config.turns.all_steps(*(rate.steps for rate in config.rates))
    batches = _batches(config, dist.get_rank(), device, steps)
    return Stage(config, device, world_size, p, own, batches, closing)


def own_group() -> Any:
    """The process group of this rank alone; all ranks must call it, since they count groups."""
    return dist.new_group([dist.get_rank()], use_local_synchronization=True)


def _batches(config: StepConfig, rank: int, device: torch.device, steps: int) -> list[list[Batch]]:
    text = load_text(TEXT_BYTES)
    sizes = {"size": config.sequences, "context": config.model.context, "seed": config.seed}
    found = []
    for step in range(steps):
        micros = [
            text.batch("train", step=step, micro=micro, rank=rank, **sizes)
            for micro in range(config.accumulate)
        ]
        found.append([(x.to(device), y.to(device)) for x, y in micros])
    return found


def make_model(config: StepConfig, device: torch.device) -> gpt.GPT:
    """The GPT with the parameters that every peer starts from."""
    return gpt.seeded(config.model, device, config.seed)

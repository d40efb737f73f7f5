"""`bench step`: whole training steps of `Trainer` against a plain torch loop and against FSDP2."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import mics_fn as mf
from mics_fn.lab import gpt
from mics_fn.lab.bench_measure import (
    Laps,
    Peer,
    Turns,
    between,
    nbytes,
    of_all_ranks,
    ratio,
    say,
    spread,
    start,
    take_turns,
)
from mics_fn.lab.report import human_bytes, table
from mics_fn.lab.text import load_text

Batch = tuple[Tensor, Tensor]
TEXT_BYTES = 500_000
HEADS = (
    "",
    "seconds a step",
    "Trainer over it",
    "CPU",
    "over it",
    "loss at end",
    "gap",
    "states",
    "in a step",
)


@dataclass(frozen=True)
class StepConfig:
    """All that decides what is measured.

    Args:
        node_size, partition_size: the layout; nodes are groups of `node_size` ranks.
        turns: how long.
        accumulate: micro-steps in a step.
        sequences: samples of one rank and micro-step.
        device: "auto", "cpu" or "cuda".
        model: sizes of the GPT.
        lr: AdamW's learning rate.
        seed: of parameters and batches.
    """

    node_size: int
    partition_size: int
    turns: Turns = field(default_factory=Turns)
    accumulate: int = 1
    sequences: int = 1
    device: str = "auto"
    model: gpt.GPTConfig = field(default_factory=gpt.GPTConfig)
    lr: float = 3e-4
    seed: int = 0


def measure_step(config: StepConfig) -> dict[str, Any]:
    """Both comparisons, as one rank of a job; the figures are rank 0's to keep.

    Returns:
        On rank 0 `alone` (a world of one, measured while the others wait) and `together` (all
        ranks; None in a world of one); {} on the others.
    """
    device = start(config.device)
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    alone = None
    if rank == 0:
        say("world 1: Trainer and a plain torch loop take turns ...")
        alone = _compare(_run(config, device, 0, 1), config, of_ranks=1)
    together = None
    if world_size > 1:
        dist.barrier()
        say(f"world {world_size}: Trainer and FSDP2 take turns ...")
        every = of_all_ranks(_run(config, device, rank, world_size))
        merged = [_merge(laps) for laps in zip(*every, strict=True)]
        together = _compare(merged, config, of_ranks=world_size)
    if rank:
        return {}
    params = sum(p.numel() for p in make_model(config, torch.device("meta")).parameters())
    return {"params": params, "alone": alone, "together": together}


def make_model(config: StepConfig, device: torch.device) -> gpt.GPT:
    """The GPT with the parameters that every peer starts from."""
    torch.manual_seed(config.seed)
    return gpt.GPT(config.model).to(device)


def _run(config: StepConfig, device: torch.device, rank: int, world_size: int) -> list[Laps]:
    """This rank's part of one comparison."""
    batches = _batches(config, rank, device)
    if world_size == 1:
        with mf.make_groups(1, ranks=[rank], device=device) as groups:
            peers = [_trainer(config, groups, batches), _plain(config, device, batches)]
            return take_turns(peers, config.turns, device=device)
    p, node_size = config.partition_size, config.node_size
    with mf.make_groups(p, node_size=node_size, device=device) as groups:
        peers = [_trainer(config, groups, batches)]
        peers += [_fsdp2(config, device, batches, keep=keep) for keep in (False, True)]
        return take_turns(peers, config.turns, device=device, fence=dist.barrier)


def _batches(config: StepConfig, rank: int, device: torch.device) -> list[list[Batch]]:
    """For each step its micro-batches, the same for every peer."""
    text = load_text(TEXT_BYTES)
    sizes = {"size": config.sequences, "context": config.model.context, "seed": config.seed}
    found = []
    for step in range(config.turns.all_steps):
        micros = [
            text.batch("train", step=step, micro=micro, rank=rank, **sizes)
            for micro in range(config.accumulate)
        ]
        found.append([(x.to(device), y.to(device)) for x, y in micros])
    return found


def _trainer(config: StepConfig, groups: mf.Groups, batches: list[list[Batch]]) -> Peer:
    model = make_model(config, groups.device)
    accumulate = config.accumulate
    optimizer = mf.adamw(config.lr)
    trainer = mf.Trainer(model, optimizer, groups, loss=gpt.loss, accumulate=accumulate)
    joined = [tuple(map(torch.cat, zip(*micros, strict=True))) for micros in batches]

    def held() -> int:
        return nbytes((trainer.state.params, trainer.state.opt))

    name = f"Trainer, p = {groups.partition_size}"
    return Peer(name, lambda step: trainer.step(joined[step]).loss, held)


def _plain(config: StepConfig, device: torch.device, batches: list[list[Batch]]) -> Peer:
    model = make_model(config, device)
    optimizer = torch.optim.AdamW(model.parameters(), config.lr, fused=True)

    def step(number: int) -> Tensor:
        losses = []
        for batch in batches[number]:
            loss = gpt.loss(model, batch)
            (loss / config.accumulate if config.accumulate > 1 else loss).backward()
            losses.append(loss.detach())
        optimizer.step()
        # At the end, so that gradients do not stay between steps in anyone's memory.
        optimizer.zero_grad(set_to_none=True)
        return torch.stack(losses).mean()

    return Peer("plain torch loop", step, lambda: _held(model, optimizer))


def _fsdp2(
    config: StepConfig, device: torch.device, batches: list[list[Batch]], *, keep: bool
) -> Peer:
    """FSDP2 on a (replicate, shard) mesh; with `keep` parameters are gathered once a step."""
    p = config.partition_size
    sizes = (dist.get_world_size() // p, p)
    mesh = init_device_mesh(device.type, sizes, mesh_dim_names=("replicate", "shard"))
    model = make_model(config, device)
    options = {"mesh": mesh, "reshard_after_forward": not keep}
    for block in model.blocks:
        fully_shard(block, **options)
    root = fully_shard(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), config.lr, fused=True)
    last = config.accumulate - 1

    def step(number: int) -> Tensor:
        losses = []
        for micro, batch in enumerate(batches[number]):
            # As in MiCS: hop 1 each micro-step, hop 2 with the last one.
            root.set_requires_all_reduce(micro == last)
            if keep:
                root.set_reshard_after_backward(micro == last)
            loss = gpt.loss(model, batch)
            (loss / config.accumulate if last else loss).backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return torch.stack(losses).mean()

    name = "FSDP2, gathers once" if keep else "FSDP2, default"
    return Peer(name, step, lambda: _held(model, optimizer))


def _held(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Bytes of parameters and optimizer state on this rank."""
    tensors: list[Any] = [*model.parameters()]
    for state in optimizer.state.values():
        tensors += [value for value in state.values() if isinstance(value, Tensor)]
    local = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
    return sum(t.nbytes for t in local)


def _merge(laps: Sequence[Laps]) -> Laps:
    """One peer's laps of all ranks: a step takes as long as its slowest rank."""
    peaks = [lap.peak_bytes for lap in laps]
    return Laps(
        laps[0].name,
        [max(each) for each in zip(*(lap.seconds for lap in laps), strict=True)],
        [fmean(each) for each in zip(*(lap.cpu_seconds for lap in laps), strict=True)],
        max(lap.held_bytes for lap in laps),
        None if None in peaks else max(peak for peak in peaks if peak is not None),
        [torch.stack(each).mean() for each in zip(*(lap.results for lap in laps), strict=True)],
    )


def _compare(laps: list[Laps], config: StepConfig, *, of_ranks: int) -> dict[str, Any]:
    """The figures of one comparison; the first peer is ours."""
    ours = laps[0]
    own_losses = [float(loss) for loss in ours.results]
    peers = []
    for lap in laps:
        losses = [float(loss) for loss in lap.results]
        gaps = [abs(a - b) / abs(b) for a, b in zip(own_losses, losses, strict=True)]
        peers.append(
            {
                "name": lap.name,
                "seconds_by_round": lap.seconds,
                "seconds": spread(lap.seconds)._asdict(),
                "trainer_ratio": ratio(ours.seconds, lap.seconds)._asdict(),
                "cpu_seconds": spread(lap.cpu_seconds)._asdict(),
                "trainer_cpu_ratio": ratio(ours.cpu_seconds, lap.cpu_seconds)._asdict(),
                "ratio_of_medians": spread(ours.seconds).median / spread(lap.seconds).median,
                "losses": losses,
                "largest_loss_gap": max(gaps),  # relative, to Trainer's at the same step
                "held_bytes": lap.held_bytes,
                "peak_bytes": lap.peak_bytes,
            }
        )
    return {"ranks": of_ranks, "steps_taken": len(own_losses), "peers": peers}


def render_step(figures: dict[str, Any], config: StepConfig) -> str:
    """The figures as tables."""
    blocks = []
    for part in (figures["alone"], figures["together"]):
        if part is None:
            continue
        title = (
            f"world {part['ranks']}, {figures['params']:,} parameters, accumulate "
            f"{config.accumulate}: {config.turns}"
        )
        first, *rest = (_row(peer) for peer in part["peers"])
        # Over itself it takes once as long.
        rows = [HEADS, (*first[:2], "", first[3], "", *first[5:]), *rest]
        blocks.append(table(title, rows))
    blocks.append(
        "seconds a step: of the slowest rank. over it: Trainer's divided by this. CPU: seconds of\n"
        "all threads of a rank in a step. gap: largest relative difference to Trainer's loss at\n"
        "any step. states: parameters and optimizer state of the fullest rank. in a step: by how\n"
        "much memory grows beyond them."
    )
    return "\n\n".join(blocks)


def _row(peer: dict[str, Any]) -> tuple[str, ...]:
    peak = "-" if peer["peak_bytes"] is None else human_bytes(peer["peak_bytes"])
    return (
        peer["name"],
        between(peer["seconds"], ".4f"),
        between(peer["trainer_ratio"], ".3f"),
        f"{peer['cpu_seconds']['median']:.4f}",
        f"{peer['trainer_cpu_ratio']['median']:.3f}",
        f"{peer['losses'][-1]:.6f}",
        f"{peer['largest_loss_gap']:.1e}",
        human_bytes(peer["held_bytes"]),
        peak,
    )

"""What `bench step` compares: `Trainer` in several modes, and torch's own ways to train."""

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import mics_fn as mf
from mics_fn import tree
from mics_fn.errors import PlanError, message
from mics_fn.lab import gpt
from mics_fn.lab.bench_links import AS_IS, Rate
from mics_fn.lab.bench_measure import Peer, Turns, nbytes
from mics_fn.lab.text import load_text
from mics_fn.leaf import Sharded, is_leaf

Batch = tuple[Tensor, Tensor]
TEXT_BYTES = 500_000
DEFAULT_PEERS = ("keep", "zero3", "fsdp2", "fsdp2-keep", "plain")


@dataclass(frozen=True)
class StepConfig:
    """All that decides what is measured.

    Args:
        node_size, partition_size: the layout; nodes are groups of `node_size` ranks.
        turns: how long.
        peers: names from `PEERS`.
        rates: of the links between nodes, all measured in one run.
        alone: whether the peers that make sense there are compared in a world of one too.
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
    peers: tuple[str, ...] = DEFAULT_PEERS
    rates: tuple[Rate, ...] = (Rate(AS_IS, Turns.steps),)
    alone: bool = True
    accumulate: int = 1
    sequences: int = 1
    device: str = "auto"
    model: gpt.GPTConfig = field(default_factory=gpt.GPTConfig)
    lr: float = 3e-4
    seed: int = 0


class Stage(NamedTuple):
    """Where peers are built: this rank's part of a world, which may be itself alone."""

    config: StepConfig
    device: torch.device
    world_size: int
    partition_size: int
    own: Any  # the process group of this rank alone; None unless the world is that
    batches: list[list[Batch]]  # for each step its micro-batches, the same for every peer
    closing: contextlib.ExitStack  # of what peers leave open


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
    steps = (
        config.turns.all_steps(*(rate.steps for rate in config.rates)) if steps is None else steps
    )
    batches = _batches(config, dist.get_rank(), device, steps)
    return Stage(config, device, world_size, p, own, batches, closing)


def own_group() -> Any:
    """The process group of this rank alone; all ranks call it, so that they count groups alike."""
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
    torch.manual_seed(config.seed)
    return gpt.GPT(config.model).to(device)


def _trainer(stage: Stage, *, wide: bool, keep: bool) -> Peer:
    """`Trainer`, with a partition group as asked for or of all ranks.

    It keeps all gathered parameters, or has a budget of two buckets, which is ZeRO-3's memory: one
    in use, one that comes next, and the one more that `live_bytes` allows.
    """
    config, p = stage.config, stage.world_size if wide else stage.partition_size
    if stage.own is not None:
        groups = mf.make_groups(1, ranks=[dist.get_rank()], device=stage.device)
    else:
        groups = mf.make_groups(p, node_size=config.node_size, device=stage.device)
    stage.closing.enter_context(groups)
    model = make_model(config, stage.device)
    # Few parameters are larger than a bucket, and such a one is a bucket alone.
    largest = max(parameter.nbytes for parameter in model.parameters())
    trainer = mf.Trainer(
        model,
        mf.adamw(config.lr),
        groups,
        loss=gpt.loss,
        accumulate=config.accumulate,
        live_bytes=None if keep else 2 * largest,
    )
    del model
    joined = [tuple(map(torch.cat, zip(*micros, strict=True))) for micros in stage.batches]

    def held() -> int:
        return nbytes((trainer.state.params, trainer.state.opt))

    leaves, _ = tree.flatten(trainer.state.params, is_leaf)
    buckets = {leaf.bucket for leaf in leaves if isinstance(leaf, Sharded)}
    needs = _needs([bucket.nbytes for bucket in buckets], p, 3, keep=keep)
    name = f"Trainer p={p}, {'keep' if keep else 'two buckets'}"
    return Peer(name, lambda step: trainer.step(joined[step]).loss, held, needs)


def _plain(stage: Stage) -> Peer:
    return _torch_loop("plain torch loop", stage, make_model(stage.config, stage.device))


def _ddp(stage: Stage) -> Peer:
    model = DistributedDataParallel(
        make_model(stage.config, stage.device), gradient_as_bucket_view=True
    )

    def begin(last: bool) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext() if last else model.no_sync()

    return _torch_loop("DDP", stage, model, begin)


def _fsdp2(stage: Stage, *, full: bool, keep: bool) -> Peer:
    """FSDP2 on a (replicate, shard) mesh or on one of all ranks.

    With `keep` parameters are gathered once a step, otherwise again for backward.
    """
    config, p = stage.config, stage.world_size if full else stage.partition_size
    model = make_model(config, stage.device)
    options = {"mesh": _mesh(stage, full), "reshard_after_forward": not keep}
    for block in model.blocks:
        fully_shard(block, **options)
    root = fully_shard(model, **options)

    def begin(last: bool) -> contextlib.AbstractContextManager:
        # As in MiCS: hop 1 each micro-step, hop 2 with the last one.
        root.set_requires_all_reduce(last)
        if keep:
            root.set_reshard_after_backward(last)
        return contextlib.nullcontext()

    blocks = [sum(x.numel() * x.itemsize for x in block.parameters()) for block in model.blocks]
    whole = sum(x.numel() * x.itemsize for x in model.parameters())
    name = f"FSDP2 {'full, ' if full else ''}p={p}, {'keep' if keep else 'default'}"
    needs = _needs([*blocks, whole - sum(blocks)], p, 2, keep=keep)
    return _torch_loop(name, stage, model, begin, needs)


def _mesh(stage: Stage, full: bool) -> DeviceMesh:
    kind, p = stage.device.type, stage.partition_size
    if stage.own is not None:
        return DeviceMesh.from_group(stage.own, kind)
    if full:
        return init_device_mesh(kind, (stage.world_size,))
    sizes = (stage.world_size // p, p)
    return init_device_mesh(kind, sizes, mesh_dim_names=("replicate", "shard"))


def _torch_loop(
    name: str,
    stage: Stage,
    model: nn.Module,
    begin: Callable[[bool], contextlib.AbstractContextManager] = lambda last: (
        contextlib.nullcontext()
    ),
    needs: dict[str, float] | None = None,
) -> Peer:
    """A loop as torch's users write it; `begin` is told whether a micro-step is the last one."""
    config = stage.config
    optimizer = torch.optim.AdamW(model.parameters(), config.lr, fused=True)
    last = config.accumulate - 1

    def step(number: int) -> Tensor:
        losses = []
        for micro, batch in enumerate(stage.batches[number]):
            with begin(micro == last):
                loss = gpt.loss(model, batch)
                (loss / config.accumulate if last else loss).backward()
            losses.append(loss.detach())
        optimizer.step()
        # At the end, so that gradients do not stay between steps in anyone's memory.
        optimizer.zero_grad(set_to_none=True)
        return torch.stack(losses).mean()

    if needs is None:
        full = sum(x.numel() * x.itemsize for x in model.parameters())
        needs = {"parameters": 0, "gradients": full}
    return Peer(name, step, lambda: _held(model, optimizer), needs)


def _held(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Bytes of parameters and optimizer state on this rank."""
    tensors: list[Any] = [*model.parameters()]
    for state in optimizer.state.values():
        tensors += [value for value in state.values() if isinstance(value, Tensor)]
    local = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
    return sum(t.nbytes for t in local)


def _needs(units: Iterable[int], p: int, live: int, *, keep: bool) -> dict[str, float]:
    """What a step needs beyond states, at the least, where parameters travel in such units.

    Gathered parameters: all, or the few that are live at once. Gradients: this rank's part of
    all, and two full units, one that is made while the other is reduced.
    """
    ordered = sorted(units, reverse=True)
    total, two, few = sum(ordered), sum(ordered[:2]), sum(ordered[:live])
    if p == 1:  # what is gathered are the states themselves
        return {"parameters": 0, "gradients": total}
    return {"parameters": total if keep else few, "gradients": total / p + two}


class Kind(NamedTuple):
    """A way to train, by what builds it and where it makes sense."""

    build: Callable[[Stage], Peer]
    ours: bool = False
    alone: bool = True  # in a world of one
    together: bool = True


PEERS = {
    "keep": Kind(partial(_trainer, wide=False, keep=True), ours=True),
    "zero3": Kind(partial(_trainer, wide=False, keep=False), ours=True),
    "wide-keep": Kind(partial(_trainer, wide=True, keep=True), ours=True, alone=False),
    "wide-zero3": Kind(partial(_trainer, wide=True, keep=False), ours=True, alone=False),
    "fsdp2": Kind(partial(_fsdp2, full=False, keep=False)),
    "fsdp2-keep": Kind(partial(_fsdp2, full=False, keep=True)),
    "fsdp2-full": Kind(partial(_fsdp2, full=True, keep=False), alone=False),
    "fsdp2-full-keep": Kind(partial(_fsdp2, full=True, keep=True), alone=False),
    "ddp": Kind(_ddp, alone=False),
    "plain": Kind(_plain, together=False),
}


def phases(config: StepConfig, world_size: int) -> dict[int, list[str]]:
    """World sizes to measure in, each with those of the chosen peers that make sense there."""
    found = {}
    if config.alone or world_size == 1:
        found[1] = [name for name in config.peers if PEERS[name].alone]
    if world_size > 1:
        found[world_size] = [name for name in config.peers if PEERS[name].together]
    return {size: names for size, names in found.items() if names}


def check_peers(config: StepConfig, world_size: int) -> None:
    """Refuse names that are none, and choices that leave nothing to measure.

    Raises:
        PlanError: it says which.
    """
    asked = f"--peers {' '.join(config.peers)}"
    wrong = [name for name in config.peers if name not in PEERS]
    if wrong:
        what = f"{asked}: there is no peer {' '.join(wrong)}"
        raise PlanError(message(what, fix=f"choose from {' '.join(PEERS)}"))
    if len(set(config.peers)) < len(config.peers):
        raise PlanError(message(f"{asked}: one is named twice", fix="name each once"))
    if not phases(config, world_size):
        fits = " ".join(phases(replace(config, peers=tuple(PEERS)), world_size)[world_size])
        what = f"{asked}: none of these is measured with {world_size} ranks"
        raise PlanError(message(what, fix=f"choose from {fits}"))

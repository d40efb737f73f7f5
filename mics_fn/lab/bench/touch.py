"""`bench touch`: host time of each layer of tiny leaves, which is all that such a model takes.

An accelerator hides the time of the host where its own work on a layer takes longer. What a step
costs beyond plain torch is measured in three parts, as differences between peers that take turns:

- *uses*: deferred parameters, with their fetches and drops. The peer runs forward and backward
  through them, into a `GradSum` that reduces nothing; less plain forward and backward.
- *hops*: what such a loop takes more with both hops.
- *step*: what `Trainer.step` takes more than that; less torch's fused AdamW.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.func import functional_call

import mics_fn as mf
from mics_fn.lab.bench import turns
from mics_fn.lab.bench.turns import BenchPeer, BenchTurns, Laps
from mics_fn.lab.report import table

LEAVES, WIDTH = 12, 8  # of a layer: weights and biases of six maps


@dataclass(frozen=True)
class TouchConfig:
    """Options of `bench touch`.

    Args:
        layers: how many layers the model has.
        live_bytes: budget for gathered parameters; None keeps all.
        partition_size: ranks of a replica; None takes all.
        turns: how long.
        device: "auto", "cpu" or "cuda".
    """

    layers: int
    live_bytes: int | None = None
    partition_size: int | None = None
    turns: BenchTurns = field(default_factory=BenchTurns)
    device: str = "auto"


class _Unreduced(mf.GradSum):
    """Takes gradients of buckets and leaves them."""

    def add(self, index: int, grads: Any) -> None:
        """Do nothing, but note that it was called."""
        self._reached = True
        self.missing.pop(index, None)


def measure_touch(config: TouchConfig) -> dict[str, Any]:
    """Measure the parts on all ranks.

    Returns:
        On rank 0 microseconds a layer by part, and those of whole steps by peer; {} on the others.
    """
    device = turns.start(config.device)
    size = dist.get_world_size()
    with mf.make_groups(config.partition_size or size, node_size=size, device=device) as groups:
        x = torch.randn(4, WIDTH, device=device)
        peers = [*_plain(config, x), *_ours(config, groups, x), _fsdp2(config, x)]
        laps = turns.take_turns(peers, config.turns, device=device, fence=dist.barrier)
    return _figures(config, laps) if turns.is_first() else {}


def _figures(config: TouchConfig, laps: list[Laps]) -> dict[str, Any]:
    seconds = {lap.name: lap.seconds for lap in laps}
    us = {name: [x / config.layers * 1e6 for x in found] for name, found in seconds.items()}

    def less(more: str, base: str) -> list[float]:
        return [a - b for a, b in zip(us[more], us[base], strict=True)]

    own, torchs = less("Trainer.step", "hops"), less("plain step", "plain")
    parts = {"uses": less("uses", "plain"), "hops": less("hops", "uses")}
    parts["step"] = [a - b for a, b in zip(own, torchs, strict=True)]
    parts["all, over plain"] = less("Trainer.step", "plain step")
    parts["FSDP2, over plain"] = less("FSDP2", "plain step")
    named = {name: turns.spread(found) for name, found in parts.items()}
    return {"parts": named, "steps": {name: turns.spread(found) for name, found in us.items()}}


def _model(config: TouchConfig, device: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    maps = lambda: [nn.Linear(WIDTH, WIDTH) for _ in range(LEAVES // 2)]  # noqa: E731
    return nn.Sequential(*(nn.Sequential(*maps()) for _ in range(config.layers))).to(device)


def _loss(model: Any, x: Tensor) -> Tensor:
    return model(x).square().mean()


def _plain(config: TouchConfig, x: Tensor) -> list[BenchPeer]:
    """Build the loops of torch, without and with a step of the optimizer."""
    model = _model(config, x.device)
    adamw = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)

    def backward(_: int) -> None:
        model.zero_grad(set_to_none=True)
        _loss(model, x).backward()

    def step(number: int) -> None:
        backward(number)
        adamw.step()

    return [BenchPeer("plain", backward), BenchPeer("plain step", step)]


def _ours(config: TouchConfig, groups: mf.Groups, x: Tensor) -> list[BenchPeer]:
    model = _model(config, x.device)
    shards = mf.shard(dict(model.named_parameters()), groups)
    live = config.live_bytes

    def loop(name: str, make: type[mf.GradSum]) -> BenchPeer:
        policy = mf.keep_all() if live is None else mf.on_demand(live_bytes=live)

        def step(_: int) -> None:
            total = make()
            with mf.defer(shards, groups, policy, into=total) as full:
                total.backward(_loss(lambda x: functional_call(model, full, (x,)), x))
            if make is mf.GradSum:
                total.grads()
                total.release()

        return BenchPeer(name, step)

    trainer = mf.Trainer(model, mf.optim.adamw(1e-3), groups, loss=_loss, live_bytes=live)
    whole = BenchPeer("Trainer.step", lambda _: trainer.step(x))
    return [loop("uses", _Unreduced), loop("hops", mf.GradSum), whole]


def _fsdp2(config: TouchConfig, x: Tensor) -> BenchPeer:
    model = _model(config, x.device)
    for layer in model:
        fully_shard(layer, reshard_after_forward=config.live_bytes is not None)
    fully_shard(model)
    adamw = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)

    def step(_: int) -> None:
        adamw.zero_grad()
        _loss(model, x).backward()
        adamw.step()

    return BenchPeer("FSDP2", step)


def render_touch(figures: dict[str, Any], config: TouchConfig) -> str:
    """Render both tables."""
    title = f"microseconds a layer of {LEAVES} tiny leaves, {config.layers} layers, {config.turns}"
    blocks = [("over plain torch", "parts"), ("whole", "steps")]
    rows = [[(x, turns.between(y, ".0f")) for x, y in figures[key].items()] for _, key in blocks]
    tables = [table(name, found) for (name, _), found in zip(blocks, rows, strict=True)]
    hidden = "a device hides this where its own work on a layer takes longer"
    return "\n".join([title, *tables, f"  {hidden}"])

"""`bench touch`: host time that an op takes longer on a deferred weight than on a plain one."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import linear

import mics_fn as mf
from mics_fn.lab.bench.turns import (
    BenchPeer,
    BenchTurns,
    Laps,
    between,
    is_first,
    say,
    spread,
    start,
    take_turns,
)
from mics_fn.lab.report import table

WIDTH = 16  # so small that the ops themselves cost little


@dataclass(frozen=True)
class TouchConfig:
    """Everything that decides what is measured.

    Args:
        turns: how many steps.
        layers: linear layers, each with a weight and a bias.
        device: "auto", "cpu" or "cuda".
    """

    turns: BenchTurns = field(default_factory=BenchTurns)
    layers: int = 64
    device: str = "auto"

    @property
    def touches(self) -> int:
        """How often ops use weights in a step: twice per layer in forward, once in backward."""
        return 3 * self.layers


def measure_touch(config: TouchConfig) -> dict[str, Any]:
    """Forward and backward through plain and through deferred layers, in one process.

    Returns:
        On rank 0 the figures; {} on the others.
    """
    device = start(config.device)
    if not is_first():
        return {}
    say("layers of plain and of deferred weights take turns ...")
    torch.manual_seed(0)
    params = [torch.randn(WIDTH, WIDTH, device=device) for _ in range(config.layers)]
    params += [torch.randn(WIDTH, device=device) for _ in range(config.layers)]
    rank = dist.get_rank() if dist.is_initialized() else 0
    with mf.make_groups(1, ranks=[rank], device=device) as groups:
        one, each = (
            mf.shard(params, groups, frozen=lambda path: True, bucket_bytes=size)
            for size in (2**30, 1)
        )
        policies = mf.on_demand(), mf.on_demand()
        peers = [
            _peer("plain", lambda: params, config.layers),
            _peer("in one bucket", partial(_deferred, one, groups, policies[0]), config.layers),
            _peer("a bucket each", partial(_deferred, each, groups, policies[1]), config.layers),
        ]
        laps = take_turns(peers, config.turns, device=device)
    return {"touches": config.touches, "peers": [_figures(lap, laps[0], config) for lap in laps]}


def _deferred(shards: Any, groups: mf.Groups, policy: mf.schedules.OnDemand) -> list[Tensor]:
    return mf.defer(shards, groups, policy).params


def _peer(name: str, weights: Callable[[], list[Tensor]], layers: int) -> BenchPeer:
    """Layers of frozen weights, whose input has a gradient, so that only the layers take time."""
    x = torch.randn(4, WIDTH, device=weights()[0].device, requires_grad=True)

    def step(number: int) -> Tensor:
        full, h = weights(), x
        for w, b in zip(full[:layers], full[layers:], strict=True):
            h = linear(h, w, b)
        return torch.autograd.grad(h.sum(), x)[0].sum()

    return BenchPeer(name, step, lambda: 0)


def _figures(lap: Laps, plain: Laps, config: TouchConfig) -> dict[str, Any]:
    extra = [
        (a - b) / config.touches * 1e6 for a, b in zip(lap.seconds, plain.seconds, strict=True)
    ]
    return {
        "name": lap.name,
        "seconds": spread(lap.seconds)._asdict(),
        "microseconds_a_touch": spread(extra)._asdict(),
    }


def render_touch(figures: dict[str, Any], config: TouchConfig) -> str:
    """The figures as a table."""
    title = f"{config.layers} linear layers, {figures['touches']} touches per step: {config.turns}"
    rows = [("weights", "ms per step", "us per touch, over plain")]
    for peer in figures["peers"]:
        ms = {k: 1e3 * v for k, v in peer["seconds"].items()}
        extra = between(peer["microseconds_a_touch"], ".1f") if peer["name"] != "plain" else ""
        rows.append((peer["name"], between(ms, ".2f"), extra))
    note = "a touch: an op, forward or backward, uses a weight; making deferred tensors and\n"
    return table(title, rows) + "\n\n" + note + "their views is included. world 1: nothing travels."

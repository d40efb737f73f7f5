"""`bench opt --muon`: a step of Muon on matrices that lie whole on one rank each.

Its peers, on all ranks of the job at once, are one process with all parameters, and an all-gather
of the gradient and the momentum of each cut matrix, behind which every rank steps all of it. What
is no matrix of a block is stepped by AdamW by all.
"""

from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import mics_fn as mf
from mics_fn.lab.bench import turns
from mics_fn.lab.bench.alone import OptConfig, trees
from mics_fn.lab.bench.turns import BenchPeer
from mics_fn.lab.report import table

MUON, ADAMW = 0.02, 3e-4  # rates
Values = dict[str, Tensor]


def measure_muon(config: OptConfig) -> dict[str, Any]:
    """Compare steps of Muon on all ranks.

    Returns:
        On rank 0 the figures of each peer, and of each layout; {} on the others.
    """
    device, random = turns.start(config.device), torch.Generator().manual_seed(0)
    shapes = trees(config)["a GPT"].items()
    values, grads = (
        {k: torch.randn(s, generator=random).to(device) for k, s in shapes} for _ in range(2)
    )
    size, padding, peers = dist.get_world_size(), dict[int, float](), [_full(values, grads)]
    with ExitStack() as closing:
        for p in (p for p in (2, 4, 8) if not size % p):
            groups = closing.enter_context(mf.make_groups(p, node_size=size, device=device))
            peer, padding[p] = _whole(values, grads, groups)
            peers += [peer, _gathered(values, grads, groups)] if p == 2 else [peer]
        laps = turns.take_turns(peers, config.turns, device=device, fence=dist.barrier)
    found = turns.of_all_ranks([lap.seconds for lap in laps])
    slowest = [[max(x) for x in zip(*ranks, strict=True)] for ranks in zip(*found, strict=True)]
    own = {
        lap.name: {"seconds": turns.spread(seconds), "over": turns.ratio(seconds, slowest[0])}
        for lap, seconds in zip(laps, slowest, strict=True)
    }
    return {"peers": own, "padding": padding} if turns.is_first() else {}


def matrices(values: Values) -> list[str]:
    """Return the names of what Muon steps: matrices of the blocks of a GPT."""
    return [name for name, x in values.items() if name.startswith("blocks.") and x.ndim == 2]


def _full(values: Values, grads: Values) -> BenchPeer:
    """Build the peer that has all parameters, as every rank of DDP."""
    params, mine = (
        {name: x.clone().requires_grad_() for name, x in values.items()},
        matrices(values),
    )
    for name, param in params.items():
        param.grad = grads[name].clone()
    muon = torch.optim.Muon([params[name] for name in mine], MUON)
    others = [x for name, x in params.items() if name not in mine]
    adamw = torch.optim.AdamW(others, ADAMW, fused=True)
    return BenchPeer("torch.optim.Muon on all of it", lambda _: (muon.step(), adamw.step()))


def _whole(values: Values, grads: Values, groups: mf.Groups) -> tuple[BenchPeer, float]:
    """Build the peer of `optim.muon`; also its padding, relative to all elements."""
    muon, adamw = mf.optim.muon(MUON), mf.optim.adamw(ADAMW)
    optimizer = mf.optim.by_path(dict.fromkeys(matrices(values), muon), default=adamw)
    state = mf.init_state(mf.shard(values, groups, whole=optimizer.whole), optimizer)
    shards = mf.reduce_grads(grads, groups, like=state.params)
    planned = sum(each.numel for each in {x.bucket for x in state.params.values()})

    def step(_: int) -> None:
        nonlocal state
        state = mf.opt_step(state, shards, donate=True)

    padding = planned / sum(map(Tensor.numel, values.values())) - 1
    return BenchPeer(f"optim.muon, p={groups.partition_size}", step), padding


def _gathered(values: Values, grads: Values, groups: mf.Groups) -> BenchPeer:
    """Build the peer that gathers gradients and momentum of cut matrices, and steps all of them."""
    params, mine = mf.shard(values, groups), matrices(values)
    shards = mf.reduce_grads(grads, groups, like=params)
    full = {name: values[name].clone().requires_grad_() for name in mine}
    muon = torch.optim.Muon(full.values(), MUON)
    rest = {name: x for name, x in shards.items() if name not in mine}
    state = mf.init_state({name: params[name] for name in rest}, mf.optim.adamw(ADAMW))

    def step(_: int) -> None:
        nonlocal state
        state = mf.opt_step(state, rest, donate=True)
        for name in mine:  # one matrix at a time, as there is no room for more
            full[name].grad, _momentum = mf.unshard([shards[name], params[name]], groups)
        muon.step()

    return BenchPeer(f"an all-gather of each matrix, p={groups.partition_size}", step)


def render_muon(figures: dict[str, Any], config: OptConfig) -> str:
    """Render the figures as a table."""
    rows: list[Any] = [("", "seconds", "over all of it on each rank")]
    for name, peer in figures["peers"].items():
        rows.append((name, *(turns.between(peer[key], ".4f") for key in ("seconds", "over"))))
    padding = ", ".join(f"p={p} {share:.1%}" for p, share in figures["padding"].items())
    title = f"opt_step with Muon, all ranks at once, {config.turns}"
    return f"{table(title, rows)}\n  padding, which is all that a step sends more: {padding}"

"""A model whose frozen part is larger than the memory that a rank may have trains its adapters.

The limit is one of the system, on what a process may allocate (RLIMIT_DATA): it counts threads,
buffers of gloo and all that torch takes. It does not count what is free in the heap already, so
ranks are forked from a fresh process: the heap of one that ran other tests may have room for the
model. The twin is the same program in memory without a limit.
"""

import multiprocessing
import resource
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch
from cases import Layout, groups_of
from rank_pool import RankPool
from torch import Tensor, nn

import mics_fn as mf
from mics_fn.lab.bench.turns import give_back_at_once
from mics_fn.offload import where

WIDTH, DEPTH = 1024, 12  # 4 MiB of frozen weights per block
FROZEN_BYTES = 4 * WIDTH * WIDTH * DEPTH
LAYER_BYTES = 4 * WIDTH * WIDTH
STEPS = 2
Numbers = list[Tensor]


class Adapted(nn.Module):
    """Frozen square layers, each with an adapter of low rank that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.ParameterList(
            nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5, requires_grad=False)
            for _ in range(DEPTH)
        )
        self.down = nn.ParameterList(nn.Parameter(torch.randn(WIDTH, 2)) for _ in range(DEPTH))
        self.up = nn.ParameterList(nn.Parameter(torch.zeros(2, WIDTH)) for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        for weight, down, up in zip(self.frozen, self.down, self.up, strict=True):
            x = torch.tanh(x @ weight + x @ down @ up)
        return x


def trained(layout: Layout, folder: str, limit_bytes: int = 0) -> Numbers:
    """Losses of some steps and of an evaluation, and the adapters."""
    groups = groups_of(layout)
    if limit_bytes:
        give_back_at_once()  # else glibc keeps what is freed, as much as it likes
        limit = data_bytes() + limit_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
    adapters = "; *down*: params=device; *up*: params=device"
    places = where(f"params=disk:{folder}{adapters}", host_bytes=2**20) if folder else None
    how: Any = {"bucket_bytes": LAYER_BYTES}
    model, shards = mf.init_model(Adapted, groups, seed=0, where=places, **how)
    how = {"params": shards, "live_bytes": 0, "loss": lambda model, x: model(x).square().mean()}
    trainer = mf.Trainer(model, mf.optim.adamw(1e-2), groups, **how)
    torch.manual_seed(groups.position)
    losses = [trainer.step(torch.randn(4, WIDTH)).loss for _ in range(STEPS)]
    losses.append(trainer.eval(torch.ones(1, WIDTH)))
    return losses + [mf.get(trainer.state.params, f"up.{i}", groups) for i in (0, DEPTH - 1)]


def trained_afresh(*args: Any) -> list[Numbers]:
    """`trained` on ranks that inherit no free memory of this process."""
    spawned = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawned) as fresh:
        return fresh.submit(on_new_ranks, *args).result()


def on_new_ranks(layout: Layout, *args: Any) -> list[Numbers]:
    torch.set_num_threads(1)
    pool = RankPool(layout.world_size)
    try:
        return pool.run(trained, layout, *args)
    finally:
        pool.close()


def data_bytes() -> int:
    """What counts towards RLIMIT_DATA in this process now."""
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith("VmData:"))
    return int(line.split()[1]) * 1024


@pytest.mark.limit(60)
@pytest.mark.thorough
def test_adapters_of_a_model_larger_than_memory(ranks: Any, tmp_path: Any) -> None:
    layout = Layout((1,), 1)
    want = ranks(1).run(trained, layout, "")
    found = trained_afresh(layout, str(tmp_path), FROZEN_BYTES // 2)
    for mine, twin in zip(found, want, strict=True):
        for a, b in zip(mine, twin, strict=True):
            assert torch.equal(a, b)

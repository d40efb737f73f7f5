"""The most that `init_model` and `load_shards` hold: a rank's shards and one parameter."""

import multiprocessing
import resource
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from cases import Layout, groups_of
from rank_pool import RankPool
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import mics_fn as mf
from mics_fn import tree
from mics_fn.lab.bench.turns import give_back_at_once
from mics_fn.offload import where

WIDTH, DEPTH = 64, 16
SPLIT = Layout((2, 2), 2)
SMALL = 8 * 1024  # bytes: biases, and numbers that ranks exchange


class Most(TorchDispatchMode):
    """The most bytes that the results of ops with data take at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree.flatten(out)[0]:
            # Checksums are 8 bytes an element, of a million elements at once at most.
            if isinstance(x, Tensor) and not x.is_meta and x.dtype != torch.int64:
                storage = x.untyped_storage()
                ref = StorageWeakRef(storage)
                self.live[ref.cdata] = (ref, storage.nbytes())
        self.live = {k: v for k, v in self.live.items() if not v[0].expired()}
        self.most = max(self.most, sum(nbytes for _, nbytes in self.live.values()))
        return out


def stack(init: Callable[[Tensor], Any]) -> nn.Module:
    """Every weight is initialised twice, and changed again when all of them exist."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))
    for layer in model.children():
        init(layer.weight)  # pyright: ignore[reportArgumentType]
    with torch.no_grad():
        for p in model.parameters():
            p.div_(3)
    return model


def most(layout: Layout, init: Any) -> tuple[int, int]:
    groups = groups_of(layout)
    with Most() as seen:
        _, shards = mf.init_model(partial(stack, init), groups, seed=1)
    chunks = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in tree.flatten(shards)[0]}
    return seen.most, sum(storage.nbytes() for storage in chunks.values())


def by_its_own_spread(weight: Tensor) -> None:
    weight.data.normal_().mul_(weight.data.std().item())


@pytest.mark.parametrize(
    ("init", "layout"), [(by_its_own_spread, SPLIT), (nn.init.normal_, Layout((1,), 1))]
)
def test_one_parameter_at_a_time_is_there_besides_the_shards(ranks, layout: Layout, init: Any):
    parameter = WIDTH * WIDTH * 4
    for found, held in ranks(layout.world_size).run(most, layout, init):
        assert held >= DEPTH * parameter / layout.partition_size
        assert held + parameter <= found <= held + parameter + SMALL
        assert layout.partition_size == 1 or found < 0.75 * DEPTH * parameter


# A model whose frozen part is larger than the memory that a rank may have trains its adapters.
#
# The limit is one of the system, on what a process may allocate (RLIMIT_DATA): it counts threads,
# buffers of gloo and all that torch takes. It does not count what is free in the heap already, so
# ranks are forked from a fresh process: the heap of one that ran other tests may have room for the
# model. The twin is the same program in memory without a limit.

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

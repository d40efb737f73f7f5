"""The most that `init_model` and `load_shards` hold: a rank's shards and one parameter."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from cases import Layout, groups_of
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import mics_fn as mf
from mics_fn import tree

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

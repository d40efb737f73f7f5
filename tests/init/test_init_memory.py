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

WIDTH, DEPTH = 64, 12
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


def stack(init: Callable[[Tensor], Any], width: int = WIDTH, depth: int = DEPTH) -> nn.Module:
    """Every weight is initialised twice, and changed again when all of them exist."""
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))
    for layer in model.children():
        init(layer.weight)  # pyright: ignore[reportArgumentType]
    with torch.no_grad():
        for p in model.parameters():
            p.div_(3)
    return model


def most(layout: Layout, name: str) -> tuple[int, int]:
    groups = groups_of(layout)
    with Most() as seen:
        _, shards = mf.init_model(INITS[name][0], groups, seed=1)
    chunks = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in tree.flatten(shards)[0]}
    return seen.most, sum(storage.nbytes() for storage in chunks.values())


def by_its_own_spread(weight: Tensor) -> None:
    weight.data.normal_().mul_(weight.data.std().item())


# How many parameters' memory making one takes: itself, and what its initialiser uses besides.
INITS: dict[str, tuple[Callable[[], nn.Module], float]] = {
    "normal": (partial(stack, nn.init.normal_), 1),
    "orthogonal": (partial(stack, nn.init.orthogonal_), 3),
    "read": (partial(stack, by_its_own_spread), 1),
}


@pytest.mark.parametrize(
    ("name", "layout"),
    [("read", SPLIT), ("orthogonal", SPLIT), ("normal", Layout((1,), 1))],
    ids=str,
)
def test_one_parameter_at_a_time_is_there_besides_the_shards(ranks, layout: Layout, name: str):
    factor = INITS[name][1]
    parameter = WIDTH * WIDTH * 4
    for found, held in ranks(layout.world_size).run(most, layout, name):
        assert held >= DEPTH * parameter / layout.partition_size
        assert held + parameter <= found <= held + factor * parameter + SMALL
        assert layout.partition_size == 1 or found < 0.75 * DEPTH * parameter


class Calls(TorchDispatchMode):
    """Counts an op on tensors with data."""

    def __init__(self, func: Any) -> None:
        super().__init__()
        self.func, self.count = func, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is self.func and not args[0].is_meta if args else 0
        return func(*args, **(kwargs or {}))


def decompositions(layout: Layout) -> int:
    groups = groups_of(layout)
    with Calls(torch.ops.aten.linalg_qr.default) as seen:
        mf.init_model(INITS["orthogonal"][0], groups, seed=1)
    return seen.count


def test_a_rank_computes_only_what_it_keeps_a_part_of(ranks):
    """Numbers that are drawn for other ranks are dropped."""
    found = ranks(4).run(decompositions, Layout((4,), 4))
    assert DEPTH <= sum(found) <= DEPTH + 3  # a parameter may lie across the border of two chunks

"""The most that `init_model` and `load_shards` hold: a rank's shards and one parameter."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from cases import Layout, groups_of
from init_peak import InitMemory, measure_init
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import mics_fn as mf
from mics_fn import tree
from mics_fn.lab.bench.turns import give_back_at_once
from mics_fn.lab.ranks.pool import run_ranks

WIDTH, DEPTH = 64, 24
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
    "truncated": (partial(stack, nn.init.trunc_normal_), 4.5),
    "bfloat16": (lambda: stack(nn.init.normal_).to(torch.bfloat16), 3),  # two are of float32
    "read": (partial(stack, by_its_own_spread), 1),
}


@pytest.mark.parametrize("layout", [Layout((1,), 1), Layout((2, 2), 2), Layout((4,), 4)], ids=str)
@pytest.mark.parametrize("name", INITS)
@pytest.mark.covering
@pytest.mark.short("read-2x2-p2", "normal-2x2-p2", "normal-1-p1")
def test_one_parameter_at_a_time_is_there_besides_the_shards(ranks, layout: Layout, name: str):
    factor = INITS[name][1]
    parameter = WIDTH * WIDTH * (2 if name == "bfloat16" else 4)
    for found, held in ranks(layout.world_size).run(most, layout, name):
        assert held >= DEPTH * parameter / layout.partition_size
        assert held + parameter <= found <= held + factor * parameter + SMALL
        assert layout.partition_size == 1 or found < 0.75 * DEPTH * parameter


class Draws(TorchDispatchMode):
    """Counts the ops that draw."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        real = all(not x.is_meta for x in tree.flatten(args)[0] if isinstance(x, Tensor))
        self.count += real and torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def test_each_number_is_drawn_once():
    """This includes draws that no value needs, because other code draws again."""
    with mf.make_groups(1) as groups:
        for model_fn in (INITS["normal"][0], INITS["orthogonal"][0], INITS["bfloat16"][0]):
            with Draws() as plain:
                model_fn()
            with Draws() as ours:
                mf.init_model(model_fn, groups, seed=1)
            assert ours.count == plain.count == 3 * DEPTH
            with Draws() as ours:
                weights = {k: p.detach() for k, p in model_fn().named_parameters()}
                before = ours.count
                mf.init_model(model_fn, groups, seed=1, weights=weights)
            assert ours.count == before


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


def wide(depth: int) -> nn.Module:
    return stack(nn.init.normal_, width=768, depth=depth)


def resident(depth: int) -> InitMemory:
    """The least of six: what the allocator and the system keep only adds to the number."""
    give_back_at_once()
    groups = mf.make_groups(4)
    for _ in range(2):  # then all code is loaded
        mf.init_model(partial(wide, 2), groups, seed=1)
    cpu, make = torch.device("cpu"), partial(wide, depth)
    found = [measure_init(make, groups, cpu, seed=1) for _ in range(6)]
    return min(found, key=lambda memory: memory.grown or 0)


@pytest.mark.thorough
def test_resident_memory_follows_the_formula():
    for found in run_ranks(resident, 4, 40):
        assert found.held == found.whole / 4
        assert found.formula < 0.3 * found.whole
        if found.grown is not None:
            assert found.grown <= found.formula + found.largest + 4 * 2**20

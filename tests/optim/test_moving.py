"""States in files and on the host: the bits of states in memory, and errors that lose nothing."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import Layout, groups_of, random, same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import mics_fn as mf
from mics_fn import optim, tree
from mics_fn.offload import in_file, where
from mics_fn.optim.columns import Stretch, parts_of
from mics_fn.optim.flat import by_leaf

LEAST = 2**20  # bytes of host memory: blocks of 32,768 elements with two moments
SHAPES = {"a": (70_001,), "b": (7,), "c": (301, 203), "none": (0, 3), "d": (40, 5)}


def values(seed: int) -> dict[str, Tensor]:
    return {k: random(seed + i, *shape) for i, (k, shape) in enumerate(SHAPES.items())}


def spares_small(path: str) -> bool:
    return "b" not in path and "d" not in path


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "adamw": lambda: optim.adamw(1e-2, decay_mask=spares_small),
    "sgd": lambda: optim.sgd(0.1, momentum=0.9),
    "lion": lambda: optim.lion(1e-3, weight_decay=0.1),
    "adagrad": lambda: optim.from_torch(torch.optim.Adagrad, lr=0.1),
    "by_path": lambda: optim.by_path({"*c*": optim.lion(1e-3)}, default=optim.adam(1e-2)),
    "chain": lambda: optim.chain(optim.clip_by_value(0.5), optim.adamw(1e-2)),
    "own": lambda: optim.from_update(
        lambda params: mf.shards.map(torch.zeros_like, params),
        lambda grads, mean, params: (
            mf.shards.map(lambda m, g: -0.1 * (m + g), mean, grads),
            mf.shards.map(lambda m, g: 0.9 * m + g, mean, grads),
        ),
    ),
}


def stepped(groups: Any, make: Any, place: Any, *, donate: bool) -> Any:
    params = mf.shard(values(0), groups, bucket_bytes=300_000)
    state = mf.init_state(params, make(), where=place)
    for step in range(2):
        grads = mf.reduce_grads(values(10 * step + 5), groups, like=state.params)
        state = mf.opt_step(state, grads, donate=donate)
    return state


def moments(state: Any) -> list[Tensor]:
    return [x for x in tree.flatten(state.opt)[0] if isinstance(x, Tensor) and x.ndim]


def same_state(got: Any, want: Any) -> None:
    same_bits(got.params, want.params)
    same_bits(by_leaf(mf.move(got, "").opt), by_leaf(want.opt))


def of_bits(folder: str, name: str, layout: Layout) -> None:
    groups, make = groups_of(layout), OPTIMIZERS[name]
    place = where(f"states=disk:{folder}", host_bytes=LEAST)
    want = stepped(groups, make, None, donate=False)
    for donate in (False, True):
        got = stepped(groups, make, place, donate=donate)
        assert all(map(in_file, moments(got)))
        same_state(got, want)


CASES = [*((Layout((1,), 1), name) for name in OPTIMIZERS), (Layout((2, 2), 2), "adamw")]


@pytest.mark.parametrize(("layout", "name"), CASES, ids=str)
def test_a_step_on_states_in_files_has_the_bits_of_one_in_memory(ranks, tmp_path, layout, name):
    ranks(layout.world_size).run(of_bits, f"{tmp_path}", name, layout)


@settings(max_examples=40)
@given(
    start=st.integers(0, 300),
    length=st.integers(1, 700),
    cuts=st.lists(st.integers(0, 1000), max_size=4),
    seed=st.integers(0, 9),
)
def test_parts_of_a_column_have_the_bits_of_the_whole(start, length, cuts, seed):
    """Of a fused kernel, which rounds the last elements of a tensor in another way."""
    every = [random(seed + i, start + length) for i in range(4)]
    every[2] = every[2].square()

    def step(p: Tensor, m: Tensor, v: Tensor, g: Tensor) -> None:
        torch._fused_adamw_(  # pyright: ignore[reportPrivateImportUsage]
            *([p], [g], [m], [v], [], [torch.tensor(3.0)]), lr=1e-2, beta1=0.9, beta2=0.999,
            weight_decay=0.1, eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip

    want = [x.clone() for x in every]
    step(*(x[start:] for x in want))
    got, stretch = [x.clone() for x in every], Stretch(start, start + length, start + length)
    bounds = sorted({0, start + length, *(min(cut, start + length) for cut in cuts)})
    for low, high in zip(bounds, bounds[1:], strict=False):
        for part in parts_of(stretch, low, high, lambda a, b: [x[a:b] for x in got], 3):
            step(*part.tensors)
            part.finish()
    same_bits(got, want)

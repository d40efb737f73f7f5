"""A step on gradients that still arrive: the bits of a step on all of them, bucket by bucket."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import Layout, groups_of, random, same_bits
from torch import Tensor

import mics_fn as mf
from mics_fn import optim, tree
from mics_fn.optim.flat import by_leaf
from mics_fn.shards import grad_stream

STEPS = 3
LAYOUTS = [Layout((1,), 1), Layout((2,), 1), Layout((2, 2), 2), Layout((2, 2), 4)]


def by_name() -> dict[str, Callable[[mf.Groups], Any]]:
    """Optimizers of every kind that a step treats in another way."""
    decays = lambda path: "b" not in path  # noqa: E731
    patterns = {"*b*": optim.sgd(0.1, momentum=0.9), "*1*": optim.lion(1e-2)}
    return {
        "adamw": lambda groups: optim.adamw(1e-2, decay_mask=decays),
        "lion": lambda groups: optim.lion(1e-2, weight_decay=0.1, decay_mask=decays),
        "from_torch": lambda groups: optim.from_torch(torch.optim.Adagrad, lr=0.1),
        "by_path": lambda groups: optim.by_path(patterns, default=optim.adamw(1e-2)),
        "chain": lambda groups: optim.chain(
            optim.clip_by_global_norm(0.1, groups), optim.adamw(1e-2)
        ),
    }


def values() -> dict[str, Tensor]:
    shapes = {"w0": (9, 7), "b0": (7,), "w1": (7, 11), "b1": (11,), "w2": (11, 3), "none": (0, 2)}
    return {name: random(i, *shape) for i, (name, shape) in enumerate(shapes.items())}


def loss_of(full: Any, seed: int) -> Tensor:
    x = random(100 * seed + dist.get_rank() if dist.is_initialized() else seed, 4, 9)
    hidden = torch.tanh(x @ full["w0"] + full["b0"])
    return torch.tanh(hidden @ full["w1"] + full["b1"]).mm(full["w2"]).square().mean()


def total_of(shards: Any, groups: Any, seed: int, policy: Any, micro_steps: int) -> mf.GradSum:
    total = mf.GradSum(micro_steps)
    with mf.defer(shards, groups, policy, into=total) as full:
        for part in range(micro_steps):
            total.backward(loss_of(full, 10 * seed + part))
    return total


def trained(groups: Any, make: Any, *, early: bool, donate: bool, micro_steps: int) -> Any:
    shards = mf.shard(values(), groups, bucket_bytes=200, precision="param=f32, reduce=f32")
    state, policy = mf.init_state(shards, make(groups)), mf.on_demand(live_bytes=400)
    for step in range(STEPS):
        total = total_of(state.params, groups, step, policy, micro_steps)
        old, before = state, copy.deepcopy((state.params, by_leaf(state.opt)))
        state = mf.opt_step(state, total if early else total.grads(), donate=donate)
        if not donate:
            same_bits((old.params, by_leaf(old.opt)), before)
        total.release()
    return state


def of_bits(layout: Layout, name: str, micro_steps: int) -> None:
    groups, make = groups_of(layout), by_name()[name]
    options: dict[str, Any] = {"micro_steps": micro_steps}
    want = trained(groups, make, early=False, donate=False, **options)
    for donate in (False, True):
        got = trained(groups, make, early=True, donate=donate, **options)
        same_bits(got.params, want.params)
        same_bits(by_leaf(got.opt), by_leaf(want.opt))


CASES = [(layout, "adamw") for layout in LAYOUTS] + [
    (LAYOUTS[1], name) for name in by_name() if name != "adamw"
]


@pytest.mark.parametrize(("layout", "name"), CASES, ids=str)
def test_the_bits_of_a_step_on_all_gradients(ranks, layout, name):
    ranks(layout.world_size).run(of_bits, layout, name, 1 + (name == "adamw"))


class Fault(Exception):
    pass


class Broken:
    """Gradients of which one bucket never comes."""

    def __init__(self, total: mf.GradSum, at: int):
        self.total, self.at = total, at

    def __grad_stream__(self) -> Any:
        found: Any = grad_stream(self.total)
        calls = iter(range(100))

        def take(place: int) -> Any:
            if next(calls) == self.at:
                raise Fault
            return found.take(place)

        return replace(found, take=take, here=lambda place: False)


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("at", [0, 1])
def test_a_state_is_whole_or_known_to_be_lost(donate, at):
    groups = mf.make_groups(1)
    state = mf.init_state(mf.shard(values(), groups, bucket_bytes=200), optim.adamw(1e-2))
    before = tree.map_leaves(torch.clone, state.params)
    total = total_of(state.params, groups, 0, mf.on_demand(), 1)
    with pytest.raises(Fault):
        mf.opt_step(state, Broken(total, at), donate=donate)
    if at and donate:
        lost = "is lost: opt_step at step 0 was cut short while it wrote it"
        with pytest.raises(mf.errors.LostStateError, match=lost):
            mf.gather(state.params, groups)
        with pytest.raises(mf.errors.LostStateError, match=lost):
            by_leaf(state.opt)
    else:
        same_bits(state.params, before)
    total.release()

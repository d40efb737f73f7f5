"""Sums of gradients in files: the bits of sums in memory, and errors that name what lies there.

On the CPU the host is the device, so host memory is in `tests/device`.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import Layout, forget_groups, groups_of, placed_as, random, same_bits
from disks import files_of
from torch import Tensor

import mics_fn as mf
from mics_fn import optim
from mics_fn.offload import in_file

ALONE, PAIR = Layout((1,), 1), Layout((2,), 2)
PRECISIONS = ["param=f32", "param=f32, compute=bf16", "param=f32, reduce=bf16", "param=bf16"]
SHAPES = {"w0": (9, 7), "b0": (7,), "w1": (7, 11), "b1": (11,), "w2": (11, 3), "none": (0, 2)}
GUARDS: dict[str, optim.Guard] = {
    "clip": optim.Guard(max_norm=0.1),
    "scale": optim.Guard(optim.dynamic_scale(8.0), max_norm=1.0),
}


def shards_of(groups: Any, precision: str) -> Any:
    values = {name: random(i, *shape) for i, (name, shape) in enumerate(SHAPES.items())}
    if "param=bf16" in precision:
        values = {name: x.bfloat16() for name, x in values.items()}
    values["tied"] = values["w0"]
    how = {"bucket_bytes": 600, "precision": precision, "frozen": lambda path: "b1" in path}
    return mf.shard(values, groups, **how)


def loss_of(full: Any, seed: int, *, short: bool) -> Tensor:
    rank = dist.get_rank() if dist.is_initialized() else 0
    x = random(100 * seed + rank, 4, 9, dtype=full["w0"].dtype)
    hidden = torch.tanh(x @ full["w0"] + full["b0"]) + (x @ full["tied"]).sin()
    if short:  # the last leaves get no gradient in this pass
        return hidden.float().square().mean()
    return torch.tanh(hidden @ full["w1"] + full["b1"]).mm(full["w2"]).float().square().mean()


def summed(state: Any, groups: Any, step: int, policy: Any, passes: int, **how: Any) -> mf.GradSum:
    total = mf.GradSum(passes, **how)
    with mf.defer(state.params, groups, policy, into=total) as full:
        for number in range(passes):
            total.backward(loss_of(full, 10 * step + number, short=number == 1))
    return total


def trained(groups: Any, precision: str, passes: int, kind: str, **how: Any) -> Any:
    """Three steps, the sum given in one of several ways."""
    state = mf.init_state(shards_of(groups, precision), optim.adamw(1e-2))
    policy, norms = mf.on_demand(live_bytes=400), []
    for step in range(3):
        total = summed(state, groups, step, policy, passes, **how)
        given: Any = total.grads() if kind == "grads" else total
        if kind in GUARDS:
            verdict = GUARDS[kind].judge(given if "where" in how else total.grads(), groups)
            norms.append(verdict.norm)
            given = verdict.grads
        state = mf.opt_step(state, given, donate=step > 0)
        total.release()
    return state.params, norms


def of_bits(
    folder: str, layout: Layout, precision: str, passes: int, kind: str, place: str
) -> None:
    groups = groups_of(layout)
    groups = placed_as(groups, place) if place in ("zero2", "fixed_order") else groups
    for where in (f"grads=disk:{folder}", f"grads=disk:{folder}; *b0*: grads=device"):
        want = trained(groups, precision, passes, kind)
        same_bits(trained(groups, precision, passes, kind, where=where), want)
    assert files_of(folder) == []  # they end with their steps


CASES = [
    (ALONE, PRECISIONS[1], 3, "sum", ""),
    pytest.param(Layout((2,), 1), PRECISIONS[0], 2, "clip", "", marks=pytest.mark.thorough),
    (PAIR, PRECISIONS[2], 1, "grads", ""),
    pytest.param(Layout((2, 2), 2), PRECISIONS[3], 3, "scale", "zero2", marks=pytest.mark.thorough),
    (Layout((2, 2), 4), PRECISIONS[0], 4, "clip", "fixed_order"),
]


@pytest.mark.parametrize(("layout", "precision", "passes", "kind", "place"), CASES)
def test_sums_in_files_have_the_bits_of_sums_in_memory(
    ranks, tmp_path, layout, precision, passes, kind, place
):
    ranks(layout.world_size).run(of_bits, f"{tmp_path}", layout, precision, passes, kind, place)


def of_bytes(folder: str, layout: Layout) -> None:
    """The sums lie in files, and no chunk of one is left on the device."""
    forget_groups(layout)
    groups = groups_of(layout)
    state = mf.init_state(shards_of(groups, "param=f32"), optim.sgd(0.1))
    total = summed(state, groups, 0, mf.on_demand(live_bytes=0), 2, where=f"grads=disk:{folder}")
    total.wait()
    assert all(in_file(placed.room) for placed in total.placed.values())
    assert sum(placed.room.numel() for placed in total.placed.values()) > 0
    assert groups.hierarchy.pools.chunks.made == 0
    total.release()
    forget_groups(layout)


def test_nothing_of_the_sum_stays_on_the_device(ranks, tmp_path):
    ranks(2).run(of_bytes, f"{tmp_path}", PAIR)


@pytest.mark.parametrize("away", [False, True], ids=["here", "away"])
def test_a_sum_that_was_released_is_refused(tmp_path, away):
    groups, where = mf.make_groups(1), f"grads=disk:{tmp_path}" if away else ""
    state = mf.init_state(shards_of(groups, "param=f32"), optim.sgd(0.1))
    total = summed(state, groups, 0, mf.on_demand(), 1, where=where)
    total.release()
    for use in (total.grads, lambda: mf.opt_step(state, total)):
        with pytest.raises(mf.errors.LeafError, match="its memory was given back"):
            use()

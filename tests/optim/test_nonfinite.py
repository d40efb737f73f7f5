"""What is done with a gradient that is not finite, and that its leaf and ranks are named."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import Layout, groups_of, placed_as, random, same_bits
from torch import Tensor

import mics_fn as mf
from mics_fn import tree
from mics_fn.shards import pack

ALONE, PAIR, COPIES = Layout((1,), 1), Layout((2,), 2), Layout((2,), 1)
BOTH, WIDE = Layout((2, 2), 2), Layout((2, 2), 4)
SHAPES = {"a": (7,), "b": (3, 5), "c": (2,), "d": (11,)}
KINDS = {"NaN": math.nan, "infinite": -math.inf}
MICRO_STEPS = 2


def params() -> dict[str, Tensor]:
    return {name: random(i, *shape) for i, (name, shape) in enumerate(SHAPES.items())}


def loss_of(full: Any, batch: dict[str, Tensor]) -> Tensor:
    """Its gradient by a leaf is the mean of what the batch has under that name."""
    return sum(((full[name] * batch[name]).sum() / len(batch[name]) for name in SHAPES), start=0.0)  # pyright: ignore


def batch_of(seed: int) -> dict[str, Tensor]:
    return {
        name: random(100 * seed + 10 * dist.get_rank() + i, MICRO_STEPS, *shape)
        for i, (name, shape) in enumerate(SHAPES.items())
    }


def spoiled(batch: dict[str, Tensor], bad: dict[int, dict[str, str]]) -> Any:
    """The batch with values that are not finite, for some leaves on some ranks."""
    for leaf, kind in bad.get(dist.get_rank(), {}).items():
        batch[leaf].view(-1)[batch[leaf].numel() // 2] = KINDS[kind]
    return batch


def by_gather(shards: Any, groups: Any, batch: Any) -> Any:
    grads = torch.func.grad(lambda x: loss_of(mf.gather(x, groups.hierarchy), batch))(shards)
    return mf.reduce_grads(grads, groups)


def by_full(shards: Any, groups: Any, batch: Any) -> Any:
    grads = {name: value.mean(0) for name, value in batch.items()}
    return mf.reduce_grads(grads, groups, like=shards)


def by_sum(shards: Any, groups: Any, batch: Any) -> Any:
    total = mf.GradSum(MICRO_STEPS)
    with mf.defer(shards, groups, mf.on_demand(live_bytes=0), into=total) as full:
        for i in range(MICRO_STEPS):
            total.backward(loss_of(full, {name: x[i : i + 1] for name, x in batch.items()}))
    return total.grads()


SKIP = mf.optim.Guard(on_nonfinite="skip")
WAYS = {"gather": by_gather, "full": by_full, "sum": by_sum}


def judged(layout: Layout, way: str, guard: Any, bad: Any, placement: str = "") -> Any:
    groups = groups_of(layout)
    groups = placed_as(groups, placement) if placement else groups
    shards = mf.shard(params(), groups, bucket_bytes=64)
    grads = WAYS[way](shards, groups, spoiled(batch_of(1), bad))
    try:
        return guard.judge(grads, groups)[3:7]
    except mf.errors.NonFiniteError as error:
        return str(error), error.leaf, error.ranks


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layout", [ALONE, PAIR, COPIES, BOTH], ids=str)
@pytest.mark.covering
def test_the_first_leaf_and_its_ranks_are_named(ranks, layout, way):
    n, pool = layout.world_size, ranks(layout.world_size)
    bad = {n - 1: {"c": "infinite", "b": "NaN"}, 0: {"c": "NaN", "d": "NaN"}}
    bad[0] |= {} if n > 1 else bad[0] | {"b": "NaN"}
    want = (False, False, SKIP, f"grads.b is NaN on rank {n - 1}")
    assert pool.run(judged, layout, way, SKIP, bad) == [want] * n
    found = pool.run(judged, layout, way, mf.optim.Guard(on_nonfinite="raise"), bad)
    what = "Guard.judge: loss or gradient is not finite, and the step was not taken"
    for text, leaf, where in found:
        assert (leaf, where) == ("grads.b", (n - 1,))
        assert text.startswith(f"{what}\n  grads.b is NaN on rank {n - 1}\n  fix: ")
    assert len({text for text, _, _ in found}) == 1


@pytest.mark.parametrize(
    ("placement", "way"), [("zero1", "sum"), ("hpz", "full"), ("fixed_order", "gather")]
)
def test_they_are_named_in_every_placement(ranks, way, placement):
    bad = {1: {"c": "infinite"}, 3: {"d": "NaN", "c": "NaN"}}
    want = (False, False, SKIP, "grads.c is infinite on rank 1, NaN on rank 3")
    assert ranks(4).run(judged, WIDE, way, SKIP, bad, placement) == [want] * 4


def of_experts() -> list[str | None]:
    """Dense leaves on all ranks, experts on one rank each."""
    groups, found = {"dense": groups_of(PAIR), "experts": groups_of(COPIES)}, []
    for leaf, bad in (("dense", 0), ("experts", 1)):
        grads = {"dense": torch.ones(9), "experts": torch.ones(5)}
        grads[leaf][4] = math.inf if dist.get_rank() == bad else 1
        found.append(SKIP.judge(mf.reduce_grads(grads, groups), groups).nonfinite)
    return found


def only_as_a_mean() -> list[str | None]:
    """Its mean in float16 is scaled, so it is finite; twice as much is more than float16 holds."""
    groups, found, values = groups_of(PAIR), [], {"a": torch.zeros(3), "w": torch.full((5,), 6e4)}
    shards = mf.shard(values, groups, precision=mf.Precision(reduce=torch.float16))
    for times in (1.0, 2.0):
        grads = {name: x * times for name, x in values.items()}
        found.append(SKIP.judge(mf.reduce_grads(grads, groups, like=shards), groups).nonfinite)
    return found


def spoiled_between() -> list[str | None]:
    """Spoiled after the reduction; then reduced when no guard was there."""
    groups = groups_of(PAIR)
    grads = mf.reduce_grads({"w": torch.ones(5)}, groups)
    between = tree.map_leaves(lambda x: x / 0, grads)
    first = SKIP.judge(between, groups).nonfinite
    pack.watchers.clear()  # as before the first guard
    grads = mf.reduce_grads({"w": torch.full((5,), math.nan)}, groups)
    return [first, SKIP.judge(grads, groups).nonfinite]


def after_an_error() -> list[str | None]:
    """A step that was not judged, because the program raised, and then another one."""
    groups, grads = groups_of(PAIR), None
    shards = mf.shard(params(), groups, bucket_bytes=64)
    for bad in (0, 1):
        grads = by_sum(shards, groups, spoiled(batch_of(1), {bad: {"b": "NaN"}}))
    return [SKIP.judge(grads, groups).nonfinite]


def norm_overflows() -> list[str | None]:
    groups = groups_of(PAIR)
    return [SKIP.judge(mf.shard({"w": torch.full((2,), 3e38)}, groups), groups).nonfinite]


SAYS = {
    of_experts: ["grads.dense is infinite on rank 0", "grads.experts is infinite on rank 1"],
    only_as_a_mean: [None, "grads.w is infinite on ranks 0, 1"],
    spoiled_between: [
        "grads.w is finite on each rank, but not after the reduction",
        "grads.w is not finite; it is not known on which rank, since nobody looked at gradients "
        "before they were reduced; from the next step on a guard does",
    ],
    after_an_error: ["grads.b is NaN on rank 1"],
    norm_overflows: ["every gradient is finite, but their norm exceeds float32"],
}


@pytest.mark.parametrize("case", SAYS, ids=lambda case: case.__name__)
def test_what_is_said(ranks, case):
    assert ranks(2).run(case) == [SAYS[case]] * 2


# In a run: which steps are taken, and with what.


def run(layout: Layout, guard: Any, bad: dict[int, Any], leave_out: bool = False) -> Any:
    """Steps at which some rank has values that are not finite; or the same without these steps."""
    said: list[str] = []
    trainer = mf.Trainer(
        loss_of, mf.optim.adamw(0.1), groups_of(layout), params=params(), accumulate=MICRO_STEPS,
        guard=guard, bucket_bytes=64, faults=mf.FaultPolicy(1),
    )  # fmt: skip
    for step in range(5):
        if step in bad and leave_out:
            continue
        try:
            metrics = trainer.step(spoiled(batch_of(step), bad.get(step, {})))
            said.append(metrics.nonfinite or "")
            assert metrics.accepted == (not metrics.nonfinite or guard.on_nonfinite == "ignore")
        except mf.errors.NonFiniteError as error:
            said.append(str(error).split("\n")[1].strip())
    return mf.unshard(trainer.state.params, trainer.groups), trainer.state.step, said


BAD = {1: {1: {"d": "NaN"}}, 3: {0: {"a": "infinite"}, 1: {"b": "NaN"}}}
SAID = ["", "grads.d is NaN on rank 1", "", "grads.a is infinite on rank 0", ""]


@pytest.mark.parametrize("policy", ["skip", "raise"])
@pytest.mark.parametrize("layout", [PAIR, COPIES], ids=str)
def test_a_refused_step_leaves_no_trace(ranks, layout, policy):
    pool, guard = ranks(layout.world_size), mf.optim.Guard(on_nonfinite=policy)
    found = pool.run(run, layout, guard, BAD)
    want = pool.run(run, layout, guard, BAD, True)
    for (full, step, said), (wanted, _, nothing) in zip(found, want, strict=True):
        same_bits(full, wanted)
        assert (step, said, nothing) == (3, SAID, [""] * 3)


@pytest.mark.parametrize("scale", [None, mf.optim.static_scale(4.0)], ids=["plain", "scaled"])
def test_a_step_is_taken_where_that_is_asked_for(ranks, scale):
    guard = mf.optim.Guard(scale or mf.optim.no_scale(), on_nonfinite="ignore")
    for full, step, said in ranks(2).run(run, PAIR, guard, BAD):
        assert step == 5
        assert full["d"].isnan().any()
        # After the first such step all parameters that it wrote stay NaN, but not their gradients.
        lost = "the loss is NaN on ranks 0, 1; every gradient is finite"
        assert said == ([""] * 5 if scale is None else [*SAID[:2], lost, SAID[3], lost])


def falls() -> list[str]:
    """A dynamic scale that falls from 4 to 1, and then can fall no more."""
    groups, said = groups_of(PAIR), []
    guard = mf.optim.Guard(mf.optim.dynamic_scale(4.0), on_nonfinite="raise")
    grads = {"w": torch.full((5,), math.inf if dist.get_rank() else 1.0)}
    for _ in range(2):
        guard = guard.judge(mf.reduce_grads(grads, groups), groups).next
        said.append(f"{guard.scale.value:g}")
    with pytest.raises(mf.errors.NonFiniteError) as caught:
        guard.judge(mf.reduce_grads(grads, groups), groups)
    return [*said, caught.value.leaf]


def test_an_overflow_is_an_error_once_a_dynamic_scale_can_not_fall(ranks):
    assert ranks(2).run(falls) == [["2", "1", "grads.w"]] * 2

"""What is done with a gradient that is not finite, and that its leaf and ranks are named."""

import math
import random as python_random
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
LAYOUTS = [ALONE, PAIR, COPIES, Layout((2, 2), 1), Layout((2, 2), 2), Layout((2, 2), 4)]
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


def spoiled(batch: dict[str, Tensor], bad: dict[int, dict[str, str]], seed: int = 0) -> Any:
    """The batch with values that are not finite, for some leaves on some ranks."""
    choose = python_random.Random(seed)
    for leaf, kind in bad.get(dist.get_rank(), {}).items():
        at = choose.randrange(batch[leaf].numel())
        batch[leaf].view(-1)[at] = KINDS[kind]
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
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.covering
def test_the_first_leaf_and_its_ranks_are_named(ranks, layout, way):
    n, pool = layout.world_size, ranks(layout.world_size)
    bad = {n - 1: {"c": "infinite", "b": "NaN"}, 0: {"c": "NaN", "d": "NaN"}}
    bad[0] |= {} if n > 1 else bad[0] | {"b": "NaN"}
    skip = mf.optim.Guard(on_nonfinite="skip")
    want = (False, False, skip, f"grads.b is NaN on rank {n - 1}")
    assert pool.run(judged, layout, way, skip, bad) == [want] * n
    found = pool.run(judged, layout, way, mf.optim.Guard(on_nonfinite="raise"), bad)
    what = "Guard.judge: loss or gradient is not finite, and the step was not taken"
    for text, leaf, where in found:
        assert (leaf, where) == ("grads.b", (n - 1,))
        assert text.startswith(f"{what}\n  grads.b is NaN on rank {n - 1}\n  fix: ")
    assert len({text for text, _, _ in found}) == 1


@pytest.mark.parametrize("placement", ["zero1", "zero2", "hpz", "fixed_order"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.covering
def test_they_are_named_in_every_placement(ranks, way, placement):
    layout, guard = Layout((2, 2), 4), mf.optim.Guard(on_nonfinite="skip")
    bad = {1: {"c": "infinite"}, 3: {"d": "NaN", "c": "NaN"}}
    want = (False, False, guard, "grads.c is infinite on rank 1, NaN on rank 3")
    assert ranks(4).run(judged, layout, way, guard, bad, placement) == [want] * 4


def of_experts() -> list[str | None]:
    """Dense leaves on all ranks, experts on one rank each."""
    groups = {"dense": groups_of(PAIR), "experts": groups_of(COPIES)}
    rank, found = dist.get_rank(), []
    for leaf, bad in (("dense", 0), ("experts", 1)):
        grads = {"dense": torch.ones(9), "experts": torch.ones(5)}
        if rank == bad:
            grads[leaf][4] = math.inf
        verdict = mf.optim.Guard(on_nonfinite="skip").judge(mf.reduce_grads(grads, groups), groups)
        found.append(verdict.nonfinite)
    return found


def test_they_are_named_where_leaves_live_on_several_groups(ranks):
    want = ["grads.dense is infinite on rank 0", "grads.experts is infinite on rank 1"]
    assert ranks(2).run(of_experts) == [want] * 2


# What no rank had before the reduction, and what nobody has looked at.


def only_as_a_mean(layout: Layout) -> list[str | None]:
    groups, found = groups_of(layout), []
    guard = mf.optim.Guard(on_nonfinite="skip")
    wire = mf.Precision(reduce=torch.float16)
    shards = mf.shard({"a": torch.ones(3), "w": torch.ones(5)}, groups, precision=wire)
    values = {"a": torch.zeros(3), "w": torch.full((5,), 6e4)}
    for times in (1.0, 2.0):
        grads = {name: x * times for name, x in values.items()}
        found.append(guard.judge(mf.reduce_grads(grads, groups, like=shards), groups).nonfinite)
    return found


def test_what_overflows_on_its_way_arose_where_it_was_packed(ranks):
    """Its mean in float16 is scaled, so it is finite; twice as much is more than float16 holds."""
    want = [None, "grads.w is infinite on ranks 0, 1"]
    assert ranks(2).run(only_as_a_mean, PAIR) == [want] * 2


def spoiled_between(layout: Layout) -> tuple[str | None, str | None]:
    """Spoiled after the reduction; then reduced when no guard was there."""
    groups, guard = groups_of(layout), mf.optim.Guard(on_nonfinite="skip")
    grads = mf.reduce_grads({"w": torch.ones(5)}, groups)
    between = tree.map_leaves(lambda x: x / 0, grads)
    first = guard.judge(between, groups).nonfinite
    pack._watching.clear()  # as before the first guard
    grads = mf.reduce_grads({"w": torch.full((5,), math.nan)}, groups)
    return first, guard.judge(grads, groups).nonfinite


def test_what_is_not_known_is_said(ranks):
    want = (
        "grads.w is finite on each rank, but not after the reduction",
        "grads.w is not finite; it is not known on which rank, since nobody looked at gradients "
        "before they were reduced; from the next step on a guard does",
    )
    assert ranks(2).run(spoiled_between, PAIR) == [want] * 2


def norm_overflows() -> str | None:
    groups = groups_of(ALONE)
    grads = mf.shard({"w": torch.full((2,), 3e38)}, groups)
    return mf.optim.Guard(on_nonfinite="skip").judge(grads, groups).nonfinite


def test_a_norm_alone_may_overflow(ranks):
    want = "every gradient is finite, but their norm exceeds float32"
    assert ranks(1).run(norm_overflows) == [want]


def one_after_another(layout: Layout) -> list[str | None]:
    """Nothing is remembered of a step that was judged."""
    groups, guard, found = groups_of(layout), mf.optim.Guard(on_nonfinite="skip"), []
    for bad in (0, 1, None, 1):
        grads = {"w": torch.full((5,), math.nan if dist.get_rank() == bad else 1.0)}
        grads = mf.reduce_grads(grads, groups)
        assert pack.origins_of(grads["w"].bucket)
        found.append(guard.judge(grads, groups).nonfinite)
        assert not pack.origins_of(grads["w"].bucket)
    return found


def test_each_verdict_is_about_its_own_step(ranks):
    where = [f"grads.w is NaN on rank {rank}" for rank in (0, 1)]
    want = [where[0], where[1], None, where[1]]
    for layout in (PAIR, COPIES):
        assert ranks(2).run(one_after_another, layout) == [want] * 2


def after_an_error(layout: Layout) -> str | None:
    """A step that was not judged, because the program raised, and then another one."""
    groups, guard = groups_of(layout), mf.optim.Guard(on_nonfinite="skip")
    shards = mf.shard(params(), groups, bucket_bytes=64)
    for bad in (0, 1):
        grads = by_sum(shards, groups, spoiled(batch_of(1), {bad: {"b": "NaN"}}))
    return guard.judge(grads, groups).nonfinite  # pyright: ignore


def test_a_step_that_was_not_judged_is_forgotten(ranks):
    assert ranks(2).run(after_an_error, PAIR) == ["grads.b is NaN on rank 1"] * 2


# In a run: which steps are taken, and with what.


def run(layout: Layout, guard: Any, bad: dict[int, Any], leave_out: bool, by: str) -> Any:
    """Steps at which some rank has values that are not finite; or the same without these steps."""
    groups = groups_of(layout)
    said: list[str] = []
    if by == "trainer":
        trainer = mf.Trainer(
            loss_of, mf.optim.adamw(0.1), groups, params=params(), accumulate=MICRO_STEPS,
            guard=guard, bucket_bytes=64, check_replicas=1,
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
        return trainer.params(), trainer.state.step, said
    state = mf.init_state(mf.shard(params(), groups, bucket_bytes=64), mf.optim.adamw(0.1))
    for step in range(5):
        if step in bad and leave_out:
            continue
        grads = WAYS[by](state.params, groups, spoiled(batch_of(step), bad.get(step, {})))
        try:
            verdict = guard.judge(grads, groups, donate=True)
        except mf.errors.NonFiniteError as error:
            said.append(str(error).split("\n")[1].strip())
            continue
        said.append(verdict.nonfinite or "")
        guard = verdict.next
        if verdict.accept:
            state = mf.opt_step(state, verdict.grads, donate=True)
    return mf.unshard(state.params, groups), state.step, said


BAD = {1: {1: {"d": "NaN"}}, 3: {0: {"a": "infinite"}, 1: {"b": "NaN"}}}
SAID = ["", "grads.d is NaN on rank 1", "", "grads.a is infinite on rank 0", ""]


@pytest.mark.parametrize("by", ["trainer", *WAYS])
@pytest.mark.parametrize("policy", ["skip", "raise"])
@pytest.mark.parametrize("layout", [PAIR, COPIES, Layout((2, 2), 2)], ids=str)
@pytest.mark.covering
def test_a_refused_step_leaves_no_trace(ranks, layout, policy, by):
    pool, guard = ranks(layout.world_size), mf.optim.Guard(on_nonfinite=policy)
    found = pool.run(run, layout, guard, BAD, False, by)
    want = pool.run(run, layout, guard, BAD, True, by)
    for (full, step, said), (wanted, _, nothing) in zip(found, want, strict=True):
        same_bits(full, wanted)
        assert (step, said, nothing) == (3, SAID, [""] * 3)


@pytest.mark.parametrize("scale", [None, mf.optim.static_scale(4.0)], ids=["plain", "scaled"])
def test_a_step_is_taken_where_that_is_asked_for(ranks, scale):
    guard = mf.optim.Guard(scale or mf.optim.no_scale(), on_nonfinite="ignore")
    for full, step, said in ranks(2).run(run, PAIR, guard, BAD, False, "trainer"):
        assert step == 5
        assert full["d"].isnan().any()
        # After the first such step all parameters that it wrote stay NaN, but not their gradients.
        lost = "the loss is NaN on ranks 0, 1; every gradient is finite"
        assert said == ([""] * 5 if scale is None else [*SAID[:2], lost, SAID[3], lost])


def falls(layout: Layout) -> list[str]:
    """A dynamic scale that falls from 4 to 1, and then can fall no more."""
    groups, said = groups_of(layout), []
    guard = mf.optim.Guard(mf.optim.dynamic_scale(4.0), on_nonfinite="raise")
    for _ in range(3):
        grads = {"w": torch.full((5,), math.inf if dist.get_rank() else 1.0)}
        try:
            verdict = guard.judge(mf.reduce_grads(grads, groups), groups)
            guard = verdict.next
            said.append(f"{guard.scale.value:g}")
        except mf.errors.NonFiniteError as error:
            said.append(error.leaf)
    return said


def test_an_overflow_is_an_error_once_a_dynamic_scale_can_not_fall(ranks):
    assert ranks(2).run(falls, PAIR) == [["2", "1", "grads.w"]] * 2


# Any leaf, rank, place, kind, way and layout.


def many(layout: Layout, seeds: range) -> list[Any]:
    """For each seed the ranks' verdicts on values that are not finite; of one rank at a time."""
    found = []
    for seed in seeds:
        for rank in range(layout.world_size):
            choose = python_random.Random(f"{seed} {rank}")
            leaves = choose.sample(sorted(SHAPES), choose.randrange(1, len(SHAPES)))
            bad = {rank: {leaf: choose.choice(sorted(KINDS)) for leaf in leaves}}
            guard = mf.optim.Guard(on_nonfinite=choose.choice(["skip", "raise"]))  # pyright: ignore
            said = judged(layout, choose.choice(sorted(WAYS)), guard, bad)
            first = min(leaves)
            text = f"grads.{first} is {bad[rank][first]} on rank {rank}"
            assert text in str(said), (seed, rank, said)
            found.append(said)
    return found


@pytest.mark.parametrize("layout", [PAIR, COPIES, Layout((2, 2), 2), Layout((4,), 4)], ids=str)
def test_any_value_is_found_wherever_it_is(ranks, layout):
    found = ranks(layout.world_size).run(many, layout, range(2))
    assert all(each == found[0] for each in found)


@pytest.mark.thorough
@pytest.mark.limit(300)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_any_value_is_found_for_thirty_seeds(ranks, layout):
    found = ranks(layout.world_size).run(many, layout, range(30))
    assert all(each == found[0] for each in found)

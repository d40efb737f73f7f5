"""Norms by leaf, inner products, optimizers by path and of one's own: against full tensors."""

from typing import Any

import pytest
import torch
from cases import (
    LAYOUTS,
    TREES,
    Layout,
    groups_of,
    placed_as,
    poison,
    random,
    same_bits,
    small_first,
)
from torch import Tensor, nn

import mics_fn as mf
from mics_fn import tree
from mics_fn.shards.leaf import Nothing, is_leaf

ALONE, PAIR, COPIES, BOTH = Layout((1,), 1), Layout((2,), 2), Layout((2,), 1), Layout((2, 2), 2)
BOUND = {torch.float32: 1e-6, torch.float64: 1e-14, torch.bfloat16: 1e-6, torch.float16: 1e-6}


def sharded_pairs(params: Any, shards: Any) -> list[tuple[str, Tensor]]:
    """Path and full values of each trained leaf."""
    leaves, fulls = tree.flatten(shards, is_leaf)[0], iter(tree.flatten(params)[0])
    pairs = []
    for path, leaf in zip(tree.paths(shards, "", is_leaf), leaves, strict=True):
        full = None if isinstance(leaf, Nothing) else next(fulls)
        pairs += [(path, full)] if isinstance(leaf, mf.shards.Sharded) else []
    return pairs


def norms_of(layout: Layout, name: str, dtype: torch.dtype) -> None:
    groups = groups_of(layout)
    params = TREES[name](dtype, 3)
    shards = poison(mf.shard(params, groups, bucket_bytes=200))
    groups.traffic.clear()
    norms = mf.optim.leaf_norms(shards, groups)
    calls, sent = groups.traffic.snapshot().get("partition", (0, 0))
    found = dict(zip(tree.paths(norms, "", is_leaf), tree.flatten(norms, is_leaf)[0], strict=True))
    pairs = sharded_pairs(params, shards)
    for path, full in pairs:
        want = full.double().square().sum().sqrt()
        assert found[path].shape == ()
        assert found[path].dtype == torch.float64
        assert abs(float(found[path] - want)) <= BOUND[full.dtype] * (1 + float(want)) * 4, path
    total = torch.stack([found[path].square() for path, _ in pairs] or [torch.zeros(())]).sum()
    assert abs(float(total.sqrt() - mf.optim.global_norm(shards, groups))) <= 1e-6 * (1 + total)
    if layout.partition_size > 1 and pairs:
        assert (calls, sent) == (1, (layout.partition_size - 1) * 8 * len(pairs))
    product = mf.optim.inner(shards, shards, groups)
    assert abs(float(product - total)) <= 1e-5 * (1 + float(total))


@pytest.mark.parametrize("layout", small_first(LAYOUTS))
@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.covering
def test_norms_of_leaves_and_inner_products(ranks, layout, name, dtype):
    ranks(layout.world_size).run(norms_of, layout, name, dtype)


def placed_norms(layout: Layout) -> None:
    """Placements, several groups in one tree, moments, part of a tree; the same bits everywhere."""
    groups = groups_of(layout)
    params = {k: random(i, 7, 3) for i, k in enumerate("abcd")}
    want = {k: x.double().norm() for k, x in params.items()}
    for scheme in ("zero2", "zero1", "fixed_order"):
        placed = placed_as(groups, scheme)
        shards = mf.shard(params, placed)
        same_close(mf.optim.leaf_norms(shards, placed), want)
        by_path = lambda path, placed=placed: placed if "a" in path else groups  # noqa: E731
        shards = mf.shard(params, by_path)
        same_close(mf.optim.leaf_norms(shards, by_path), want)
    part = {k: x for k, x in mf.shard(params, groups).items() if k in "bd"}
    same_close(mf.optim.leaf_norms(part, groups), {k: want[k] for k in "bd"})
    state = mf.init_state(mf.shard(params, groups), mf.optim.lion(0.1, betas=(0.5, 0.5)))
    grads = mf.reduce_grads({k: x.clone() for k, x in params.items()}, groups)
    state = mf.opt_step(state, grads)
    same_close(mf.optim.leaf_norms(state.opt.mean, groups), {k: x / 2 for k, x in want.items()})


def same_close(got: Any, want: Any) -> None:
    for name, x in want.items():
        assert abs(float(got[name] - x)) <= 1e-6 * (1 + float(x)), name


@pytest.mark.parametrize("layout", [ALONE, PAIR, Layout((2, 2), 4)], ids=str)
@pytest.mark.covering
def test_norms_on_placements_and_parts(ranks, layout):
    ranks(layout.world_size).run(placed_norms, layout)


def refused() -> None:
    groups = groups_of(ALONE)
    a = mf.shard({"w": torch.ones(4), "v": torch.ones(3)}, groups)
    b = mf.shard({"w": torch.ones(4)}, groups)
    c = mf.shard({"w": torch.ones(4), "v": torch.ones(3)}, groups, bucket_bytes=4)
    for call, text in (
        (lambda: mf.optim.leaf_norms({"w": torch.ones(3)}, groups), "shards.w is Tensor"),
        (lambda: mf.optim.inner(a, b, groups), "inner: the trees differ\n  b.v is missing"),
        (lambda: mf.optim.inner(a, c, groups), "lies elsewhere than that of a"),
        (lambda: mf.optim.inner(a, {"w": 1, "v": 2}, groups), "b.v is int, not a shard"),
        (lambda: mf.optim.leaf_norms(a, None), "leaf_norms: groups is None"),
        (lambda: mf.optim.by_path({"w": 3}), "int is not an optimizer"),
        (
            lambda: mf.init_state(a, mf.optim.by_path({"*w*": mf.optim.sgd(0.1)})),
            "by_path: v matches no pattern, and there is no default",
        ),
        (
            lambda: mf.init_state(
                a, mf.optim.by_path({"w.*": mf.optim.sgd(0.1)}, default=mf.optim.sgd(0.1))
            ),
            "by_path: the pattern 'w.*' matches no trained leaf",
        ),
        (
            lambda: mf.init_state(
                a, mf.optim.by_path({"*w*": mf.optim.sgd(0.1), "*": mf.optim.sgd(0.1)})
            ),
            "'*w*' has only leaves that a later pattern matches, too",
        ),
    ):
        with pytest.raises(mf.MicsError) as caught:
            call()
        assert text in str(caught.value), caught.value
        assert "\n  fix: " in str(caught.value)


def test_what_cannot_be_is_named(ranks):
    ranks(1).run(refused)


# Optimizers by path


def odd_params() -> Any:
    shared = random(1, 4, 4, dtype=torch.float64)
    return {
        "a.w": random(2, 5, dtype=torch.float64),
        "b.w": random(3, 3, 3, dtype=torch.float64),
        "c.bias": random(4, 7, dtype=torch.float64),
        "tied": [shared, shared],
        "still": nn.Parameter(random(5, 3, dtype=torch.float64), requires_grad=False),
        "steps": torch.tensor(3),
        "none": None,
    }


def split_by_path(layout: Layout, donate: bool) -> None:
    """Every leaf moves as with its own optimizer alone, whatever else is in the tree."""
    groups = groups_of(layout)
    made = {
        "*.w*": lambda: mf.optim.adamw(0.1),
        "*tied*": lambda: mf.optim.lion(0.01),
        "*b.w*": lambda: mf.optim.sgd(0.1, momentum=0.9),
    }
    owner = {"a.w": "*.w*", "b.w": "*b.w*", "tied": "*tied*", "c.bias": "default"}
    made["default"] = lambda: mf.optim.adam(0.05)
    optimizer = mf.optim.by_path(
        {k: f() for k, f in made.items() if k != "default"}, default=made["default"]()
    )
    shards = mf.shard(odd_params(), groups, bucket_bytes=10_000)
    state = mf.init_state(shards, optimizer, groups=groups)
    for step in range(3):
        full = {k: random_like(step + 10, *shape) for k, shape in sizes().items()}
        full |= {"tied": [random(step + 11, 4, 4, dtype=torch.float64), None]}
        full |= {"still": None, "steps": None, "none": None}
        grads = mf.reduce_grads(full, groups, like=state.params)
        state = mf.opt_step(state, grads, donate=donate)
    got = mf.unshard(state.params, groups)
    assert got["tied"][0] is got["tied"][1]
    for name, pattern in owner.items():
        alone = odd_params()[name]
        mine = mf.init_state(mf.shard({name: alone}, groups), made[pattern]())
        for step in range(3):
            grad: Any = random_like(step + 10, *sizes()[name]) if name in sizes() else None
            if name == "tied":
                grad = [random(step + 11, 4, 4, dtype=torch.float64), None]
            grads = mf.reduce_grads({name: grad}, groups, like=mine.params)
            mine = mf.opt_step(mine, grads)
        want = mf.unshard(mine.params, groups)[name]
        pairs = zip(tree.flatten(got[name])[0], tree.flatten(want)[0], strict=True)
        assert all(float((x - y).abs().max()) <= 1e-12 for x, y in pairs), name
    assert mf.get(state, "opt.0.moments.exp_avg.a.w", groups).shape == (5,)
    assert int(got["steps"]) == 3


def sizes() -> dict[str, tuple[int, ...]]:
    return {"a.w": (5,), "b.w": (3, 3), "c.bias": (7,)}


def random_like(seed: int, *shape: int) -> Tensor:
    return random(seed, *shape, dtype=torch.float64)


@pytest.mark.parametrize("layout", [ALONE, PAIR, BOTH], ids=str)
@pytest.mark.parametrize("donate", [False, True], ids=["kept", "donated"])
@pytest.mark.covering
def test_leaves_go_with_their_own_optimizers(ranks, layout, donate):
    ranks(layout.world_size).run(split_by_path, layout, donate)


def facts_differ(layout: Layout) -> None:
    groups = groups_of(layout)
    shards = mf.shard({"w": torch.ones(4), "v": torch.ones(3)}, groups)
    rate = 0.1 * (1 + groups.position)
    optimizer = mf.optim.by_path({"*w*": mf.optim.sgd(rate)}, default=mf.optim.sgd(0.1))
    with pytest.raises(mf.errors.DesyncError, match=r"by_path\['\*w\*'\]: lr"):
        mf.init_state(shards, optimizer, groups=groups)


def test_ranks_compare_the_options_of_each_part(ranks):
    ranks(2).run(facts_differ, PAIR)


def own_optimizer(layout: Layout, folder: str) -> None:
    """From `update`: donated steps, a saved state, and the bits of sgd with momentum."""
    groups = groups_of(layout)

    def update(grads: Any, mean: Any, params: Any) -> Any:
        mean = mf.shards.map(lambda m, g: 0.5 * m + g, mean, grads)
        return mf.shards.map(lambda m: -0.25 * m, mean), mean

    facts = lambda paths: {"optimizer": "own"}  # noqa: E731
    own = mf.optim.from_update(lambda p: mf.shards.map(torch.zeros_like, p), update, facts)
    params = {"w": random(1, 5, 3), "v": random(2, 4)}
    found = []
    for optimizer in (own, mf.optim.sgd(0.25, momentum=0.5)):
        state = mf.init_state(mf.shard(params, groups), optimizer)
        for step in range(3):
            full = {k: random(step, *x.shape) for k, x in params.items()}
            state = mf.opt_step(state, mf.reduce_grads(full, groups), donate=True)
        found.append(mf.unshard(state.params, groups))
        if optimizer is own:
            mf.checkpoint.save(folder, state, groups, step=3)
            like = mf.init_state(mf.shard(params, groups), own)
            loaded = mf.checkpoint.load(folder, like, groups).state
            same_bits(loaded.opt, state.opt)
    assert all(float((found[0][k] - found[1][k]).abs().max()) < 1e-6 for k in params)


@pytest.mark.parametrize("layout", [ALONE, PAIR], ids=str)
def test_an_optimizer_of_ones_own(ranks, layout, tmp_path):
    ranks(layout.world_size).run(own_optimizer, layout, str(tmp_path))

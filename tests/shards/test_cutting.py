"""Borders of buckets, cuts without communication, maps over pieces, and shards in pickles."""

import copy
import io
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import LAYOUTS, TREES, Layout, groups_of, placed_as, random, same_bits, small_first
from covering import examples
from hypothesis import given
from hypothesis import strategies as st

import mics_fn as mf
from mics_fn import tree
from mics_fn.shards.bucket import Formats, LeafSpec, plan_buckets, with_parts
from mics_fn.shards.leaf import is_leaf

ALONE, PAIR, COPIES, BOTH = Layout((1,), 1), Layout((2,), 2), Layout((2,), 1), Layout((2, 2), 2)

# Borders of buckets

leaf_lists = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2), st.booleans()), max_size=12)


@examples(50, 200)
@given(leaf_lists, st.integers(4, 80), st.integers(1, 5))
def test_a_border_lies_where_keys_change_or_bytes_run_out(found, most, parts):
    specs = [
        LeafSpec(f"{i:02}", (n,), Formats(torch.float32), parts, trainable)
        for i, (n, _, trainable) in enumerate(found)
    ]
    keys = {f"{i:02}": key for i, (_, key, _) in enumerate(found)}
    placed = plan_buckets(specs, bucket_bytes=most, bucket=keys.__getitem__)
    # A slow twin: go through the leaves of each kind, and close a bucket by hand.
    for kind in (True, False):
        mine = [i for i, (_, _, trainable) in enumerate(found) if trainable is kind]
        nbytes, before = 0, None
        for i, last in zip(mine, [None, *mine], strict=False):
            size = 4 * found[i][0]
            opens = last is None or keys[f"{i:02}"] != before or nbytes + size > most
            assert opens is (last is None or placed[i][0].index != placed[last][0].index)
            nbytes, before = size + (0 if opens else nbytes), keys[f"{i:02}"]
    for bucket, _ in placed:
        again = [x._replace(parts=3) for x in specs]
        other = plan_buckets(again, bucket_bytes=most, bucket=keys.__getitem__)
        at = next(i for i, (b, _) in enumerate(placed) if b is bucket)
        assert with_parts(bucket, 3) == other[at][0]


def one_per_layer(path: str) -> str:
    return path.split(".")[0]


def borders(layout: Layout, folder: str) -> None:
    """One layout by all ways, and checkpoints of another one."""
    groups = groups_of(layout)
    params = {f"{i}.{k}": random(i, 4, 4) for i in range(3) for k in "ab"}
    shards = mf.shard(params, groups, bucket=one_per_layer)
    leaves = tree.flatten(shards, is_leaf)[0]
    assert [leaf.bucket.index for leaf in leaves] == [0, 0, 1, 1, 2, 2]
    assert mf.bucket_sizes(shards, partition_size=2) == [128, 128, 128]
    same_bits(mf.load_shards(params, groups, bucket=one_per_layer), shards)
    mf.checkpoint.save(folder, mf.shard(params, groups), groups, step=1)
    like = mf.shard({k: torch.zeros_like(x) for k, x in params.items()}, groups, bucket=lambda p: p)
    same_bits(mf.unshard(mf.checkpoint.load(folder, like, groups).state, groups), params)
    how: Any = {"params": params, "bucket": one_per_layer}
    trainer = mf.Trainer(lambda full, x: full["0.a"].sum(), mf.optim.sgd(0.1), groups, **how)
    assert tree.flatten(trainer.state.params)[1] == tree.flatten(shards)[1]
    make = lambda: torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))  # noqa: E731
    made: Any = mf.init_model(make, groups, seed=0, bucket=one_per_layer)[1]
    assert [made[name].bucket.index for name in ("0.weight", "0.bias", "1.weight")] == [0, 0, 1]
    if layout.world_size > 1:
        key = (lambda path: path) if groups.position else one_per_layer
        with pytest.raises(mf.errors.DesyncError, match="ranks disagree on the tree"):
            mf.shard(params, groups, bucket=key)


@pytest.mark.parametrize("layout", [PAIR, BOTH], ids=str)
@pytest.mark.short("2-p2")
def test_borders_are_the_same_everywhere(ranks, layout, tmp_path):
    ranks(layout.world_size).run(borders, layout, str(tmp_path))


# Cuts


def cuts(layout: Layout, name: str, dtype: torch.dtype) -> None:
    groups = groups_of(layout)
    like = mf.shard(TREES[name](dtype, 1), groups, bucket_bytes=100)
    full = mf.unshard(like, groups)
    groups.traffic.clear()
    found = mf.shards.cut(full, groups, like=like)
    assert groups.traffic.snapshot() == {}
    same_bits(found, like)
    for x, y in zip(tree.flatten(found)[0], tree.flatten(like)[0], strict=True):
        assert x.numel() == 0 or x.untyped_storage().data_ptr() != y.untyped_storage().data_ptr()
        assert x.untyped_storage().nbytes() == y.untyped_storage().nbytes()


@pytest.mark.parametrize("layout", small_first(LAYOUTS))
@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.covering
def test_a_cut_is_what_shard_gives(ranks, layout, name, dtype):
    ranks(layout.world_size).run(cuts, layout, name, dtype)


def odd_cuts(layout: Layout) -> None:
    """Part of a tree, several groups, casts, meta; what does not fit is named."""
    groups = groups_of(layout)
    placed = placed_as(groups, "zero2")
    params = {"a": random(1, 5), "b": random(2, 6), "n": torch.tensor([1, 2]), "none": None}
    by_path = lambda path: placed if "a" in path else groups  # noqa: E731
    like = mf.shard(params, by_path, precision="compute=bf16")
    same_bits(mf.shards.cut(params, by_path, like=like), like)
    half = {**params, "a": params["a"].bfloat16(), "n": params["n"] + 1}
    found = mf.unshard(mf.shards.cut(half, by_path, like=like), by_path)
    assert torch.equal(found["a"], params["a"].bfloat16().float())
    assert torch.equal(found["n"], torch.tensor([2, 3]))
    part = {"b": like["b"]}
    same_bits(mf.shards.cut({"b": params["b"]}, by_path, like=part), part)
    meta = mf.shard(tree.map_leaves(lambda x: x.to("meta"), params), by_path)
    full = tree.map_leaves(lambda x: x.to("meta"), params)
    assert mf.shards.cut(full, by_path, like=meta)["a"].data.is_meta
    x = params["a"].clone().requires_grad_()
    grown = mf.shards.cut({**params, "a": x}, by_path, like=like)
    (grad,) = torch.autograd.grad(grown["a"].data.sum(), [x])
    here = grown["a"].data.numel()
    assert float(grad.sum()) == here * layout.partition_size
    tied = {"v": params["a"], "w": params["a"]}
    both = mf.shard(tied, groups)
    equal = {"v": params["a"], "w": params["a"].clone()}
    same_bits(mf.shards.cut(equal, groups, like=both), both)
    same_bits(mf.shards.cut({"v": params["a"], "w": None}, groups, like=both), both)
    for full, text in (
        ({"b": params["b"]}, "cut: full is another tree\n  first difference: full.a"),
        ({**params, "a": random(1, 6)}, "cut: full.a is float32 of shape (6,)"),
        ({**params, "a": random(1, 5).double()}, "expected float32 or bfloat16 of shape (5,)"),
    ):
        with pytest.raises(mf.MicsError) as caught:
            mf.shards.cut(full, by_path, like=like)
        assert text in str(caught.value), caught.value
    with pytest.raises(mf.errors.LeafError, match="is tied to full"):
        mf.shards.cut({"v": params["a"], "w": params["a"] + 1}, groups, like=both)


@pytest.mark.parametrize("layout", [PAIR, COPIES, Layout((2, 2), 4)], ids=str)
@pytest.mark.short("2-p2", "2-p1")
def test_odd_cuts(ranks, layout):
    ranks(layout.world_size).run(odd_cuts, layout)


# Maps


def nothing(x: Any) -> Any:
    """What a function without a return statement gives."""


def maps(layout: Layout) -> None:
    groups = groups_of(layout)
    for name in TREES:
        shards = mf.shard(TREES[name](torch.float32, 1), groups, bucket_bytes=100)
        doubled = mf.shards.map(lambda x, y: x + y, shards, shards)
        want, found = (tree.flatten(mf.unshard(each, groups))[0] for each in (shards, doubled))
        leaves = tree.flatten(shards, is_leaf)[0]
        leaves = [x for x in leaves if not isinstance(x, mf.shards.Nothing)]
        for leaf, old, new in zip(leaves, want, found, strict=True):
            assert torch.equal(new, old * (1 if isinstance(leaf, mf.shards.Fixed) else 2)), name
    given = {"a": torch.ones(5), "b": torch.ones(3), "n": None}
    shards, other = mf.shard(given, groups), mf.shard(given, groups, bucket_bytes=1)
    twice = mf.shards.map(lambda x, k: x * k, shards, {"a": 2.0, "b": torch.tensor(3.0), "n": None})
    assert mf.unshard(twice, groups)["b"].tolist() == [3.0] * 3
    state = mf.init_state(shards, mf.optim.sgd(0.5))
    state = mf.opt_step(state, mf.shards.map(torch.neg, mf.reduce_grads(shards, groups)))
    assert mf.unshard(state.params, groups)["a"].tolist() == [1.5] * 5
    for fn, first, rest, text in (
        (torch.neg, {"a": torch.ones(2)}, [], "shards.a is Tensor, not a shard"),
        (torch.add, shards, [other], "which is cut in another way"),
        (torch.add, shards, [{"a": 1.0, "n": None}], "rest[0].b is missing"),
        (torch.add, shards, [{"a": 1.0, "b": "x", "n": None}], "rest[0].b is str"),
        (lambda x: x.double(), shards, [], "expected a tensor of"),
        (lambda x: torch.cat([x, x, x.new_ones(1)]), shards, [], "shards.a"),
        (nothing, shards, [], "the function gave NoneType"),
    ):
        with pytest.raises(mf.MicsError) as caught:
            mf.shards.map(fn, first, *rest)
        assert text in str(caught.value), caught.value
        assert "\n  fix: " in str(caught.value)


@pytest.mark.parametrize("layout", [PAIR, ALONE, Layout((2, 2), 4)], ids=str)
@pytest.mark.short("2-p2")
def test_maps(ranks, layout):
    ranks(layout.world_size).run(maps, layout)


# Pickles and copies


def saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS = {
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "torch.save": saved,
    "deepcopy": copy.deepcopy,
}


def kept(layout: Layout, way: str) -> None:
    """A state comes back equal, goes on to the same bits on the same groups, and shares nothing."""
    groups, tied = groups_of(layout), random(9, 4, 4)
    params = TREES["mixed"](torch.float32, 1) | {"t": [tied, tied], "none": None}
    optimizer = mf.optim.chain(mf.optim.clip_by_value(1.0), mf.optim.adamw(0.1))
    shards = mf.shard(params, groups, bucket_bytes=200)
    state = mf.init_state(shards, optimizer, buffers={"n": torch.ones(2)})
    grads = mf.reduce_grads(grads_like(params), groups, like=state.params)
    state = mf.opt_step(state, grads)
    back = WAYS[way](state)
    if way != "deepcopy":
        with pytest.raises(mf.errors.PlanError, match="comes from a pickle") as caught:
            mf.opt_step(back, grads)
        assert "replace(state, transform=optimizer)" in str(caught.value)
        back = replace(back, transform=state.transform)
    same_bits((back.params, back.opt, back.buffers), (state.params, state.opt, state.buffers))
    memory = [
        {x.untyped_storage().data_ptr() for x in tree.flatten(each)[0] if hasattr(x, "ndim")}
        for each in (state, back)
    ]
    assert not (memory[0] & memory[1]) - {0}
    both = (tree.flatten(each.params, is_leaf)[0] for each in (back, state))
    assert all(leaf.bucket is old.bucket for leaf, old in zip(*both, strict=True))
    after, want = (mf.opt_step(each, grads, donate=True) for each in (back, state))
    same_bits((after.params, after.opt), (want.params, want.opt))


def grads_like(params: Any) -> Any:
    grads = {k: torch.ones_like(x) for k, x in params.items() if k in "abz"}
    grads |= {"count": None, "mask": None, "frozen": None, "none": None}
    return grads | {"t": [torch.ones(4, 4), None]}


@pytest.mark.parametrize("layout", [ALONE, PAIR], ids=str)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.covering
def test_states_in_pickles(ranks, layout, way):
    ranks(layout.world_size).run(kept, layout, way)


def test_odd_pickles():
    groups = mf.make_groups(1)
    params = {f"{i:03}": torch.ones(64) for i in range(200)}
    shards = mf.shard(params, groups)
    assert hash(shards["000"].bucket)
    assert b"_hash" not in pickle.dumps(shards)  # another process computes other ones
    assert len(pickle.dumps(shards)) < 200 * 64 * 4 + 100_000  # a chunk once, and not per leaf
    back = pickle.loads(pickle.dumps(shards))
    assert len({x.untyped_storage().data_ptr() for x in tree.flatten(back)[0]}) == 1
    variables = tree.map_leaves(lambda x: x.clone().requires_grad_(), shards)
    assert pickle.loads(pickle.dumps(variables))["000"].data.requires_grad
    with pytest.raises(mf.errors.LeafError, match="is computed from a tensor that requires"):
        pickle.dumps(tree.map_leaves(lambda x: x * 2, variables))
    grads = mf.reduce_grads({k: torch.ones(64) for k in params}, groups)  # refers to its groups
    same_bits(copy.deepcopy(grads), grads)
    state = mf.init_state(shards, mf.optim.sgd(0.1))
    mf.opt_step(state, grads, donate=True)
    with pytest.raises(mf.errors.DonatedError, match="was donated to opt_step"):
        pickle.dumps(state)

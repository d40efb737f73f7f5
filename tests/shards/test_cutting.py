"""Borders of buckets, cuts without communication, maps over pieces, and shards in pickles."""

import copy
import io
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import TREES, Layout, groups_of, random, same_bits
from covering import examples
from hypothesis import given
from hypothesis import strategies as st

import mics_fn as mf
from mics_fn import tree
from mics_fn.shards.bucket import Formats, LeafSpec, plan_buckets
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


def one_per_layer(path: str) -> str:
    return path.split(".")[0]


def borders(layout: Layout, folder: str) -> None:
    """One layout by all ways, and checkpoints of another one."""
    groups = groups_of(layout)
    params = {f"{i}.{k}": random(i, 4, 4) for i in range(3) for k in "ab"}
    shards = mf.shard(params, groups, bucket=one_per_layer)
    leaves = tree.flatten(shards, is_leaf)[0]
    assert [leaf.bucket.index for leaf in leaves] == [0, 0, 1, 1, 2, 2]
    same_bits(mf.load_shards(params, groups, bucket=one_per_layer), shards)
    mf.checkpoint.save(folder, mf.shard(params, groups), groups, step=1)
    like = mf.shard({k: torch.zeros_like(x) for k, x in params.items()}, groups, bucket=lambda p: p)
    same_bits(mf.unshard(mf.checkpoint.load(folder, like, groups).state, groups), params)
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
        (torch.add, shards, [other], "expected shards that are cut in the same way"),
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
    for way in ("torch.save", "deepcopy"):  # a chunk once, and not per leaf
        back = tree.flatten(WAYS[way](shards))[0]
        assert len({x.untyped_storage().data_ptr() for x in back}) == 1
    grads = mf.reduce_grads({k: torch.ones(64) for k in params}, groups)  # refers to its groups
    same_bits(copy.deepcopy(grads), grads)
    state = mf.init_state(shards, mf.optim.sgd(0.1))
    mf.opt_step(state, grads, donate=True)
    with pytest.raises(mf.errors.DonatedError, match="was donated to opt_step"):
        pickle.dumps(state)

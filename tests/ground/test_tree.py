"""Pytrees: both registrations, paths, prefixes (law 8), and flat buckets as arithmetic."""

from collections.abc import Iterator
from typing import Any, cast

import optree
import pytest
import torch
import torch.utils._pytree as torch_pytree
from cases import TREES, Block, Pair, random, same_bits
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import mics_fn as mf
from mics_fn import tree
from mics_fn.checks import matches
from mics_fn.optim.optimizers import LionState, TorchState
from mics_fn.optim.state import TrainState
from mics_fn.shards import bucket as bucket_module
from mics_fn.shards import is_leaf, pack
from mics_fn.shards.bucket import ALIGN_BYTES, LeafSpec, plan_buckets
from mics_fn.shards.leaf import Nothing

SGD = mf.optim.sgd(0.1)
BUCKET = bucket_module.Bucket(3, torch.float64, 2, ((2, 3), (4,)), (0, 6), 12, False)


def train_state():
    groups = mf.make_groups(1)
    state = mf.init_state(
        mf.shard({"w": random(0, 3)}, groups), mf.optim.adamw(1e-3), buffers={"b": random(1, 2)}
    )
    return TrainState(7, state.params, state.opt, state.buffers, state.transform)


NODES = {
    "Sharded": lambda: mf.shards.Sharded(random(0, 6), BUCKET, 1),
    "Fixed": lambda: mf.shards.Fixed(random(0, 6), BUCKET, 1),
    "Fixed replicated": lambda: mf.shards.Fixed(torch.tensor([4, 2])),
    "Tied": lambda: mf.shards.Tied(BUCKET, 1),
    "Nothing": Nothing,
    "Block": lambda: Block(random(0, 2), None, "named"),
    "TorchState": lambda: TorchState(5, cast(Any, {"m": [random(0, 2)]}), {"s": random(1)}),
    "LionState": lambda: LionState(5, cast(Any, {"m": random(0, 2)})),
    "TrainState": train_state,
}


def fields(value):
    names = getattr(value, "_fields", None) or getattr(value, "__dataclass_fields__", ())
    return {name: getattr(value, name) for name in names}


@pytest.mark.parametrize("name", NODES)
def test_nodes_round_trip_in_both_worlds(name):
    value = NODES[name]()
    leaves, spec = tree.flatten({"x": value})
    torch_leaves, torch_spec = torch_pytree.tree_flatten({"x": value})
    again = [
        spec.unflatten(leaves)["x"],
        torch_pytree.tree_unflatten(torch_leaves, torch_spec)["x"],
    ]
    for other in again:
        assert type(other) is type(value)
        for field, part in fields(value).items():
            mine, theirs = tree.flatten(part)[0], tree.flatten(getattr(other, field))[0]
            assert len(mine) == len(theirs)
            assert all(
                a is b if isinstance(a, torch.Tensor) else a == b
                for a, b in zip(mine, theirs, strict=True)
            )
            assert repr(part) == repr(getattr(other, field))
    assert tree.flatten({"x": again[0]})[1] == spec
    assert hash(tree.flatten({"x": again[0]})[1]) == hash(spec)
    assert torch_pytree.tree_flatten({"x": again[1]})[1] == torch_spec
    assert len(tree.paths(value)) == len(leaves)


def test_every_registered_node_is_in_the_table():
    shown = {type(make()) for make in NODES.values()}
    for cls in (mf.shards.Sharded, mf.shards.Fixed, mf.shards.Tied, Nothing, TrainState):
        assert cls in shown


def test_structure_is_compared_not_values():
    a, b = mf.shards.Fixed(random(0, 6), BUCKET, 1), mf.shards.Fixed(random(1, 6), BUCKET, 1)
    assert tree.flatten([a])[1] == tree.flatten([b])[1]
    for other in (
        mf.shards.Fixed(random(0, 6), BUCKET, 0),
        mf.shards.Fixed(random(0, 6)),
        mf.shards.Tied(BUCKET, 1),
    ):
        assert tree.flatten([a])[1] != tree.flatten([other])[1]
    assert (
        tree.flatten([mf.shards.Sharded(random(0, 6), BUCKET, 1)])[1]
        != tree.flatten([mf.shards.Sharded(random(0, 6), BUCKET, 0)])[1]
    )


def test_the_first_difference_of_two_trees_is_named():
    found = [tree.first_mismatch({"a": 1, "b": 2}, x, "t") for x in ({"a": 1}, {"a": 1, "b": 2})]
    assert found == ["t.b is missing", ""]
    assert tree.first_mismatch({"a": 1}, {"a": 1, "c": 2}, "t") == "t.c is not expected"


def test_leaves_of_one_path_are_refused():
    with pytest.raises(mf.errors.LeafError, match=r"verb: 2 leaves have the path t.a.b"):
        tree.refuse_equal_paths("verb", {"a.b": 1, "a": {"b": 2}}, "t")


def test_optree_and_torch_order_keys_differently_and_results_agree():
    """torch.func walks insertion order, optree sorts: the names must still fit the values."""
    groups = mf.make_groups(1)
    shards = mf.shard({"z": random(0, 2), "a": random(1, 3)}, groups)
    grads = torch.func.grad(lambda s: (mf.gather(s, groups)["z"] * 2).sum())(shards)
    same_bits(mf.unshard(grads, groups), {"z": torch.full((2,), 2.0), "a": torch.zeros(3)})


def test_spread_takes_a_value_a_prefix_or_a_function():
    params = {"dense": [1, 2], "experts": {"w": 3, "b": 4}}
    is_str = lambda value: isinstance(value, str)  # noqa: E731
    spread = lambda prefix: tree.spread(prefix, params, what="x", is_value=is_str)  # noqa: E731
    assert spread("d") == ["d"] * 4
    assert spread({"dense": "d", "experts": {"w": "e", "b": "f"}}) == ["d", "d", "f", "e"]
    assert spread(lambda path: "e" if "experts" in path else "d") == ["d", "d", "e", "e"]
    with pytest.raises(mf.errors.LeafError, match=r"x.dense.0: got int, which is no x"):
        spread({"dense": 1, "experts": "e"})


@given(st.lists(st.integers(0, 300), max_size=12))
def test_natural_order_counts_numbers(numbers):
    paths = [f"layers.{i}.w" for i in numbers]
    assert sorted(paths, key=tree.natural) == [f"layers.{i}.w" for i in sorted(numbers)]


KEYS = st.sampled_from(["a", "b", "0", "1", "a.b", "b.0", 0, 1])
LEAF = object()


def _inner(below: Any) -> Any:
    pair = st.builds(Pair, below, below)
    block = st.builds(Block, below, below, st.just(""))
    lists = st.lists(below, max_size=3)
    return st.one_of(st.dictionaries(KEYS, below, max_size=3), lists, lists.map(tuple), pair, block)


SHAPES = st.recursive(st.sampled_from([LEAF, LEAF, None]), _inner, max_leaves=8)
SHAPES = SHAPES.filter(lambda shape: shape is not None)  # which is no tree


def filled(shape: Any, values: Iterator[int]) -> Any:
    """A tree of this shape with a tensor of its own in each place of `LEAF`."""
    if shape is LEAF:
        return torch.full((2,), float(next(values)))
    if isinstance(shape, dict):
        return {key: filled(x, values) for key, x in shape.items()}
    if isinstance(shape, Pair | Block):
        return rebuilt(shape, [filled(x, values) for x in fields_of(shape).values()])
    return shape if shape is None else type(shape)(filled(x, values) for x in shape)


def rebuilt(value: Any, children: list[Any]) -> Any:
    return type(value)(*children, *([value.name] if isinstance(value, Block) else []))


def fields_of(value: Any) -> dict[str, Any]:
    return {name: x for name, x in fields(value).items() if name != "name"}


def named(value: Any, path: tuple[str, ...] = ()) -> list[tuple[str, Tensor | None]]:
    """The leaves with their paths, in words of the law; also those that are None."""
    if value is None or isinstance(value, Tensor):
        return [(".".join(path), value)]
    pairs = enumerate(value) if type(value) in (list, tuple) else fields_of(value).items()
    pairs = value.items() if isinstance(value, dict) else pairs
    return [leaf for key, x in pairs for leaf in named(x, (*path, str(key)))]


def turned(value: Any) -> Any:
    """The same tree, with keys of dicts in the other order."""
    if isinstance(value, dict):
        return {key: turned(x) for key, x in reversed(value.items())}
    if isinstance(value, Pair | Block):
        return rebuilt(value, [*map(turned, fields_of(value).values())])
    return value if value is None or isinstance(value, Tensor) else type(value)(map(turned, value))


@given(SHAPES)
@example([LEAF, {"0": LEAF, 0: LEAF}])
@example({"a.b": LEAF, "a": {"b": LEAF}})
@example({"b": [LEAF], "b.0": LEAF})
@example(LEAF)
@settings(max_examples=200, deadline=None)
def test_a_path_is_what_torch_would_call_the_leaf_and_means_that_leaf_alone(shape):
    params = filled(shape, iter(range(1, 100)))
    places, groups = named(params), mf.make_groups(1)
    want = [(path, x) for path, x in places if x is not None]
    found = dict(zip(tree.paths(params), tree.flatten(params)[0], strict=True))
    assert sorted(tree.paths(params)) == sorted(path for path, _ in want)
    if len(found) < len(want):
        each = [mf.shard({"w": x}, groups)["w"] for _, x in want]
        shards = tree.flatten(params)[1].unflatten(each)
        for verb, call in {
            "shard": lambda: mf.shard(params, groups),
            "Trainer": lambda: mf.Trainer(torch.sum, SGD, groups, params=shards),
            "save": lambda: mf.checkpoint.save("never", params, groups, step=1),
        }.items():
            with pytest.raises(mf.errors.LeafError, match=rf"^{verb}: \d leaves have the path "):
                call()
        return
    if len(dict(places)) < len(places):  # None has a place in shards
        with pytest.raises(mf.errors.LeafError, match=r"^shard: \d leaves have the path "):
            mf.shard(params, groups)
        return
    assert all(x is found[path] for path, x in want)
    assert [*tree.paths(turned(params))] == [*found]
    shards = mf.shard(params, groups)
    state = mf.init_state(shards, SGD)
    for path, x in want:
        for value, name in ((shards, path), (state, path), (state, tree.join("params", path))):
            assert torch.equal(mf.get(value, name, groups), x), name
        assert [other for other in found if matches(path, other)] == [path]
        chosen = mf.shard(params, groups, frozen=path.__eq__)
        assert [*map(type, tree.flatten(chosen, is_leaf)[0])].count(mf.shards.Fixed) == 1
        assert torch.equal(mf.get(chosen, path, groups), x)


@given(
    st.recursive(
        st.none(),
        lambda x: (
            st.lists(x, max_size=3)
            | st.dictionaries(st.sampled_from(["norm", "w", "0"]), x, max_size=3)
        ),
        max_leaves=8,
    )
)
@settings(max_examples=100, deadline=None)
def test_the_paths_of_the_parts_of_a_module_are_the_names_of_its_parameters(shape):
    def module(shape: Any) -> nn.Module:
        if shape is None:
            return nn.Linear(1, 1)
        if isinstance(shape, list):
            return nn.ModuleList(map(module, shape))
        return nn.ModuleDict({key: module(x) for key, x in shape.items()})

    def parts(model: Any) -> Any:
        if isinstance(model, nn.ModuleList):
            return [parts(x) for x in model]
        return {**model._parameters, **{key: parts(x) for key, x in model._modules.items()}}

    model = module(shape)
    own = dict(model.named_parameters())
    for params in (own, parts(model)):
        found = dict(zip(tree.paths(params), tree.flatten(params)[0], strict=True))
        assert found.keys() == own.keys()
        assert all(found[name] is x for name, x in own.items())


def test_digest_depends_on_every_line_and_their_borders():
    seen = [["ab", "c"], ["a", "bc"], ["c", "ab"], ["abc"], []]
    assert len({tree.digest(lines) for lines in seen}) == len(seen)


# Flat buckets.

leaf_lists = st.lists(
    st.tuples(
        st.lists(st.integers(0, 5), max_size=3).map(tuple),
        st.sampled_from([torch.float32, torch.bfloat16]),
    ),
    min_size=1,
    max_size=10,
)


@given(leaf_lists, st.sampled_from([1, 2, 3, 4, 8, 12]), st.sampled_from([1, 100, 10**6]))
def test_buckets_hold_every_element_once(leaves, parts, bucket_bytes):
    specs = [
        LeafSpec(f"p{i}", shape, dtype, parts, True, None)
        for i, (shape, dtype) in enumerate(leaves)
    ]
    places = plan_buckets(specs, bucket_bytes=bucket_bytes)
    assert len(set(places)) == len(places)
    for spec, (bucket, slot) in zip(specs, places, strict=True):
        assert bucket.shapes[slot] == spec.shape
        assert bucket.dtype == spec.dtype
    for bucket in {bucket for bucket, _ in places}:
        assert bucket.numel % parts == 0
        assert bucket.chunk * bucket.dtype.itemsize % ALIGN_BYTES == 0
        assert bucket.numel < sum(bucket.numels) + 8 * len(bucket.shapes) + 8 * parts
        if len(bucket.shapes) > 1:
            assert sum(bucket.numels) * bucket.dtype.itemsize <= bucket_bytes
        covered = [0] * bucket.numel
        for chunk in range(parts):
            for offset, piece in zip(
                bucket.offsets, bucket_module.pieces(bucket, chunk), strict=True
            ):
                for i in range(piece.length):
                    covered[chunk * bucket.chunk + piece.start + i] += 1
                    assert (
                        chunk * bucket.chunk + piece.start == offset + piece.origin
                        or not piece.length
                    )
        for start, length in bucket_module.gaps(bucket):
            for i in range(start, start + length):
                covered[i] += 1
        assert covered == [1] * bucket.numel, "pieces and padding tile the buffer"


@given(leaf_lists, st.sampled_from([1, 2, 4]), st.booleans())
def test_packing_is_undone_by_splitting(leaves, parts, batched):
    specs = [
        LeafSpec(f"p{i}", shape, torch.float64, parts, True, None)
        for i, (shape, _) in enumerate(leaves)
    ]
    bucket = plan_buckets(specs)[0][0]
    batch = (3,) if batched else ()
    cpu = torch.device("cpu")
    full = [random(i, *batch, *shape, dtype=torch.float64) for i, shape in enumerate(bucket.shapes)]
    packed = pack.pack_full(bucket, full, batch=batch, device=cpu)
    assert all(
        torch.equal(a, b) for a, b in zip(pack.split_full(bucket, packed), full, strict=True)
    )
    for start, length in bucket_module.gaps(bucket):
        assert not packed[..., start : start + length].any()
    for chunk, part in enumerate(packed.split(bucket.chunk, -1)):
        own = part.clone()
        pieces = pack.split_chunk(bucket, chunk, own)
        back = pack.pack_chunk(bucket, chunk, pieces, batch=batch, device=cpu)
        assert torch.equal(back, part)
        held = any(piece.numel() for piece in pieces)
        if held:
            assert (back.data_ptr() == own.data_ptr()) == (not batched), "views need no copy"
        copies = [piece.clone() for piece in pieces]
        assert torch.equal(pack.pack_chunk(bucket, chunk, copies, batch=batch, device=cpu), part)


def test_missing_gradients_are_zeros_and_use_no_memory_of_their_own():
    (bucket, _), *_ = plan_buckets(
        [LeafSpec(f"p{i}", (3,), torch.float32, 2, True, None) for i in range(3)]
    )
    packed = pack.pack_full(bucket, [None, torch.ones(3), None], device=torch.device("cpu"))
    assert packed.tolist() == [0, 0, 0, 0, 1, 1, 1, 0] + [0] * (bucket.numel - 8)


def test_a_chunk_of_somebody_elses_memory_is_copied():
    """In-place updates must not reach beyond the pieces."""
    (bucket, _), *_ = plan_buckets([LeafSpec("w", (8,), torch.float32, 1, True, None)])
    big = torch.arange(100.0)
    found = pack.pack_chunk(bucket, 0, [big[:8]], device=torch.device("cpu"))
    assert found.data_ptr() != big.data_ptr()
    assert torch.equal(found, big[:8])


def test_optree_sees_our_nodes_only_in_our_namespace():
    (value,) = optree.tree_leaves(NODES["Sharded"](), namespace="")
    assert isinstance(value, mf.shards.Sharded)


@pytest.mark.parametrize("name", TREES)
def test_meta_gives_shapes_only(name):
    groups = mf.make_groups(1)
    params = TREES[name](torch.float32, 0)
    meta = tree.map_leaves(lambda x: x.to("meta") if x.is_floating_point() else x, params)
    shards = mf.shard(meta, groups)
    assert all(x.is_meta for x in tree.flatten(shards)[0])
    full = mf.gather(shards, groups)
    assert [x.shape for x in tree.flatten(full)[0]] == [x.shape for x in tree.flatten(params)[0]]

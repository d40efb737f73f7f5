"""Pytrees: both registrations, paths, prefixes (law 8), and flat buckets as arithmetic."""

from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
import torch.utils._pytree as torch_pytree
from cases import Block, Pair, random
from covering import examples
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

import mics_fn as mf
from mics_fn import tree
from mics_fn.checks import matches
from mics_fn.optim.optimizers import OptimizerState
from mics_fn.optim.state import TrainState
from mics_fn.shards import bucket as bucket_module
from mics_fn.shards import is_leaf, pack
from mics_fn.shards.bucket import ALIGN_BYTES, Formats, LeafSpec, plan_buckets
from mics_fn.shards.leaf import Nothing

SGD = mf.optim.sgd(0.1)
WHERE: Any = {"index": 3, "parts": 2, "offsets": (0, 6), "numel": 12, "trainable": False}
BUCKET = bucket_module.Bucket(torch.float64, shapes=((2, 3), (4,)), **WHERE)


def train_state():
    groups = mf.make_groups(1)
    state = mf.init_state(
        mf.shard({"w": random(0, 3)}, groups), mf.optim.adamw(1e-3), buffers={"b": random(1, 2)}
    )
    return TrainState(7, state.params, state.opt, state.buffers, state.transform)


NODES = {
    "Sharded": lambda: mf.shards.Sharded(random(0, 6), BUCKET, 1),
    "Sharded, another slot": lambda: mf.shards.Sharded(random(0, 6), BUCKET, 0),
    "Fixed": lambda: mf.shards.Fixed(random(0, 6), BUCKET, 1),
    "Fixed replicated": lambda: mf.shards.Fixed(torch.tensor([4, 2])),
    "Tied": lambda: mf.shards.Tied(BUCKET, 1),
    "Nothing": Nothing,
    "Block": lambda: Block(random(0, 2), None, "named"),
    "OptimizerState": lambda: OptimizerState(5, cast(Any, {"m": [random(0, 2)]}), {"s": random(1)}),
    "TrainState": train_state,
}


@pytest.mark.parametrize("name", NODES)
def test_nodes_round_trip_in_both_worlds(name):
    value = NODES[name]()
    leaves, spec = tree.flatten({"x": value})
    theirs, torch_spec = torch_pytree.tree_flatten({"x": value})
    again = torch_pytree.tree_unflatten(theirs, torch_spec)
    assert torch_pytree.tree_flatten(again)[1] == torch_spec
    for other in (spec.unflatten(leaves)["x"], again["x"]):
        assert type(other) is type(value)
        assert (tree.flatten({"x": other})[1], hash(spec)) == (spec, hash(tree.flatten(again)[1]))
        parts = zip(leaves, tree.flatten({"x": other})[0], strict=True)
        assert all(a is b if isinstance(a, Tensor) else a == b for a, b in parts)
        assert repr(other) == repr(value)
    assert len(tree.paths(value)) == len(leaves)


def test_structure_is_compared_not_values():
    specs = {tree.flatten(make())[1] for make in NODES.values()}
    assert len(specs) == len(NODES)
    assert tree.flatten(mf.shards.Sharded(random(1, 6), BUCKET, 1))[1] in specs


def test_the_first_difference_of_two_trees_is_named():
    found = [tree.first_mismatch({"a": 1, "b": 2}, x, "t") for x in ({"a": 1}, {"a": 1, "b": 2})]
    assert found == ["t.b is missing", ""]
    assert tree.first_mismatch({"a": 1}, {"a": 1, "c": 2}, "t") == "t.c is not expected"


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
    lists, dicts = st.lists(below, max_size=3), st.dictionaries(KEYS, below, max_size=3)
    return st.one_of(dicts, lists, lists.map(tuple), st.builds(Pair, below, below))


SHAPES = st.recursive(st.sampled_from([LEAF, LEAF, None]), _inner, max_leaves=8)
SHAPES = SHAPES.filter(lambda shape: shape is not None)  # which is no tree


def filled(shape: Any, values: Iterator[int]) -> Any:
    """A tree of this shape with a tensor of its own in each place of `LEAF`."""
    if shape is LEAF:
        return torch.full((2,), float(next(values)))
    if isinstance(shape, dict):
        return {key: filled(x, values) for key, x in shape.items()}
    parts = () if shape is None else [filled(x, values) for x in shape]
    return None if shape is None else Pair(*parts) if type(shape) is Pair else type(shape)(parts)


def named(value: Any, path: tuple[str, ...] = ()) -> list[tuple[str, Tensor | None]]:
    """The leaves with their paths, in words of the law; also those that are None."""
    if value is None or isinstance(value, Tensor):
        return [(".".join(path), value)]
    fields = value._asdict() if isinstance(value, Pair) else value
    pairs = fields.items() if isinstance(fields, dict) else enumerate(value)
    return [leaf for key, x in pairs for leaf in named(x, (*path, str(key)))]


@given(SHAPES)
@example([LEAF, {"0": LEAF, 0: LEAF}])
@example({"a.b": LEAF, "a": {"b": LEAF}})
@example({"b": [LEAF], "b.0": LEAF})
@example(LEAF)
@examples(40, 200)
def test_a_path_is_what_torch_would_call_the_leaf_and_means_that_leaf_alone(shape):
    params = filled(shape, iter(range(1, 100)))
    places, groups = named(params), mf.make_groups(1)
    want = [(path, x) for path, x in places if x is not None]
    found = dict(zip(tree.paths(params), tree.flatten(params)[0], strict=True))
    assert sorted(tree.paths(params)) == sorted(path for path, _ in want)
    if len(dict(places)) < len(places):  # None has a place in shards, and in nothing else
        each = [mf.shard({"w": x}, groups)["w"] for _, x in want]
        shards = tree.flatten(params)[1].unflatten(each)
        verbs = {"shard": lambda: mf.shard(params, groups)}
        if len(found) < len(want):
            verbs["Trainer"] = lambda: mf.Trainer(torch.sum, SGD, groups, params=shards)
            verbs["save"] = lambda: mf.checkpoint.save("never", params, groups, step=1)
        for verb, call in verbs.items():
            with pytest.raises(mf.errors.LeafError, match=rf"^{verb}: \d leaves have the path "):
                call()
        return
    assert all(x is found[path] for path, x in want)
    if isinstance(params, dict):
        assert tree.paths(dict(reversed(params.items()))) == [*found]
    shards = mf.shard(params, groups)
    state = mf.init_state(shards, SGD)
    for path, x in want:
        for value, name in ((shards, path), (state, path), (state, tree.join("params", path))):
            assert torch.equal(mf.get(value, name, groups), x), name
        assert [other for other in found if matches(path, other)] == [path]
        chosen = mf.shard(params, groups, frozen=path.__eq__)
        assert [*map(type, tree.flatten(chosen, is_leaf)[0])].count(mf.shards.Fixed) == 1
        assert torch.equal(mf.get(chosen, path, groups), x)


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


def planned(leaves, parts, **options):
    """Specs of leaves, and where each lies."""
    specs = [
        LeafSpec(f"p{i}", shape, Formats(dtype), parts) for i, (shape, dtype) in enumerate(leaves)
    ]
    return specs, plan_buckets(specs, **options)


@examples(30, 100)
@given(leaf_lists, st.sampled_from([1, 2, 3, 4, 8, 12]), st.sampled_from([1, 100, 10**6]))
def test_buckets_hold_every_element_once(leaves, parts, bucket_bytes):
    specs, places = planned(leaves, parts, bucket_bytes=bucket_bytes)
    assert len(set(places)) == len(places)
    for spec, (bucket, slot) in zip(specs, places, strict=True):
        assert (bucket.shapes[slot], bucket.dtype) == (spec.shape, spec.formats.dtype)
    for bucket in {bucket for bucket, _ in places}:
        assert bucket.numel % parts == 0
        assert bucket.chunk * bucket.dtype.itemsize % ALIGN_BYTES == 0
        assert bucket.numel < sum(bucket.numels) + 8 * len(bucket.shapes) + 8 * parts
        if len(bucket.shapes) > 1:
            assert sum(bucket.numels) * bucket.dtype.itemsize <= bucket_bytes
        leaves_at = zip(bucket.offsets, bucket.numels, strict=True)
        want, covered = [i for start, n in leaves_at for i in range(start, start + n)], []
        for chunk in range(parts):
            base, pieces = chunk * bucket.chunk, bucket_module.pieces(bucket, chunk)
            for offset, piece in zip(bucket.offsets, pieces, strict=True):
                assert base + piece.start == offset + piece.origin or not piece.length
                covered += range(base + piece.start, base + piece.start + piece.length)
        assert sorted(covered) == want == sorted({*want} & {*range(bucket.numel)})


@examples(30, 100)
@given(leaf_lists, st.sampled_from([1, 2, 4]), st.booleans())
def test_packing_is_undone_by_splitting(leaves, parts, batched):
    bucket = planned([(shape, torch.float64) for shape, _ in leaves], parts)[1][0][0]
    how: Any = {"batch": (3,) if batched else (), "device": torch.device("cpu")}
    full = [random(i, *how["batch"], *shape).double() for i, shape in enumerate(bucket.shapes)]
    packed = pack.pack_full(bucket, full, **how)
    assert all(map(torch.equal, pack.split_full(bucket, packed), full))
    padding = packed.clone()
    for leaf in pack.split_full(bucket, padding):
        leaf.zero_()
    assert not padding.any()
    for chunk, part in enumerate(packed.split(bucket.chunk, -1)):
        own = part.clone()
        pieces = pack.split_chunk(bucket, chunk, own)
        back = pack.pack_chunk(bucket, chunk, pieces, **how)
        assert torch.equal(back, part)
        if any(piece.numel() for piece in pieces):
            assert (back.data_ptr() == own.data_ptr()) == (not batched), "views need no copy"
        copies = [piece.clone() for piece in pieces]
        assert torch.equal(pack.pack_chunk(bucket, chunk, copies, **how), part)


def test_a_chunk_of_somebody_elses_memory_is_copied():
    """In-place updates must not reach beyond the pieces."""
    bucket = planned([((8,), torch.float32)], 1)[1][0][0]
    big = torch.arange(100.0)
    found = pack.pack_chunk(bucket, 0, [big[:8]], device=torch.device("cpu"))
    assert found.data_ptr() != big.data_ptr()
    assert torch.equal(found, big[:8])

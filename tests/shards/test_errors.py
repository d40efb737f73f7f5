"""Bad input: messages say what, where, who, expected and got, and the fix, on all ranks."""

import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import Layout, groups_of, random
from torch import nn
from torch.func import functional_call, functionalize, grad

import mics_fn as mf

FOUR = Layout((2, 2), 2)
SAME_TREE = "build the same tree on every rank: same keys in the same order, same shapes and dtypes"
DENSE = "\n  fix: pass a dense tensor of f32, bf16, f16, f64, bool or whole numbers"
CONVERT = (
    "\n  fix: pass tensors, as dict(model.named_parameters()); a Trainer takes the module itself"
)


def on_all_ranks(ranks, fn, *args):
    """The one message that all four ranks raise, and its type's name."""
    failures = ranks(4).try_run(fn, *args)
    found = {(f.type_name, f.message) for f in failures}
    assert len(found) == 1, found
    return found.pop()


# Ranks that disagree: found before data moves, named on every rank.


def odd_tree(kind):
    a, b = random(0, 4, 4), random(1, 3)
    params = {"a": {"w": a}, "b": b}
    odd: dict[str, Any] = {
        "shape": {"a": {"w": random(0, 4, 5)}, "b": b},
        "dtype": {"a": {"w": a}, "b": b.double()},
        "key": {"a": {"x": a}, "b": b},
        "fewer": {"a": {"w": a}},
        "frozen": {"a": {"w": a}, "b": nn.Parameter(b, requires_grad=False)},
        "tied": {"a": {"w": a}, "b": a},
    }
    mf.shard(odd[kind] if dist.get_rank() == 2 else params, groups_of(FOUR))


@pytest.mark.parametrize(
    ("kind", "path", "theirs", "mine"),
    [
        ("shape", "a.w", "(4, 4) float32 at 0 of bucket 0", "params.a.w (4, 5) float32 at 0 of"),
        ("dtype", "b", "(3,) float32 at 16 of bucket 0", "params.b (3,) float64 at 0 of bucket 1"),
        ("key", "a.w", "(4, 4) float32 at 0 of bucket 0", "params.a.x (4, 4) float32 at 0 of"),
        ("fewer", "b", "(3,) float32 at 16 of bucket 0", "(no more leaves)"),
        ("frozen", "b", "(3,) float32 at 16 of bucket 0", "params.b (3,) float32 frozen at 0 of"),
        ("tied", "b", "(3,) float32 at 16 of bucket 0", "params.b (4, 4) float32 tied to params.a"),
    ],
)
def test_ranks_that_disagree_on_the_tree(ranks, kind, path, theirs, mine):
    name, text = on_all_ranks(ranks, odd_tree, kind)
    assert name == "DesyncError"
    what, first, others, odd, fix = text.splitlines()
    assert what == "shard: ranks disagree on the tree"
    assert first == f"  first difference: params.{path}"
    assert others == f"  ranks 0, 1, 3: params.{path} {theirs}"
    assert odd.startswith(f"  rank 2: {mine}")
    assert fix == f"  fix: {SAME_TREE}"


def odd_gather():
    groups = groups_of(FOUR)
    shards = mf.shard({"a": random(0, 4), "b": random(1, 3)}, groups)
    mf.gather(shards, groups)
    mf.gather(mf.shard({"a": random(0, 4)}, groups), groups)  # alike, but agreed on by itself
    mf.gather({"b": shards["b"]} if dist.get_rank() == 1 else {"a": shards["a"]}, groups)


def test_ranks_that_gather_different_leaves(ranks):
    failures = ranks(4).try_run(odd_gather)
    names = [getattr(f, "type_name", None) for f in failures]
    assert names == ["DesyncError", "DesyncError", None, None]
    assert failures[0].message == failures[1].message
    what, _, *lines, fix = failures[0].message.splitlines()
    assert (what, fix) == ("gather: ranks disagree on the tree", f"  fix: {SAME_TREE}")
    for rank, line in enumerate(lines):
        assert line.startswith(f"  rank {rank}: bucket 0 (a, b; layout ")
        assert line.endswith(f") without leaves ({1 - rank},) 8 f32 of ((4,), (3,))")


def odd_grads():
    mf.reduce_grads({"w": random(0, 5 if dist.get_rank() == 3 else 4)}, groups_of(FOUR))


def other_groups():
    mf.gather(mf.shard({"w": random(0, 4)}, groups_of(FOUR)), groups_of(Layout((2, 2), 4)))


def tied_across_groups():
    w = random(0, 4)
    mf.shard({"a": w, "b": w}, {"a": groups_of(FOUR), "b": groups_of(Layout((2, 2), 4))})


@pytest.mark.parametrize(
    ("call", "kind", "said"),
    [
        (odd_grads, "DesyncError", "ranks 0-2: grads.w (4,) float32 at 0 of bucket 0\n  rank 3: "),
        (other_groups, "PlanError", "gather: shards are cut in 2, the groups have 4 ranks\n  fix:"),
        (tied_across_groups, "PlanError", "params.b is tied to params.a, but on other groups"),
    ],
    ids=["gradients", "other groups", "tied across groups"],
)
def test_what_all_ranks_raise(ranks, call, kind, said):
    name, text = on_all_ranks(ranks, call)
    assert name == kind
    assert said in text


# One rank's own mistakes: raised before anything is sent.


def expect(error, text, call):
    with pytest.raises(error) as caught:
        call()
    assert text in str(caught.value)


DTYPES = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)


def test_a_dtype_is_kept_to_the_bit_or_refused_by_name():
    groups = mf.make_groups(1)
    kept = {getattr(torch, f"{kind}{bits}") for kind in ("int", "uint") for bits in (8, 16, 32, 64)}
    kept |= {torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.bool}
    for dtype in DTYPES:
        given = torch.zeros(16, dtype=torch.uint8)
        try:
            given = given.view(dtype)
        except RuntimeError:  # quantized ones have scales, and some have no memory to look at
            with warnings.catch_warnings(action="ignore"):
                given = torch.empty(2, dtype=dtype)
        if dtype in kept:
            found = mf.unshard(mf.shard({"w": given}, groups), groups)["w"]
            assert torch.equal(found.view(torch.uint8), given.view(torch.uint8)), dtype
            continue
        text = f"shard: params.w is strided, {f'{dtype}'.removeprefix('torch.')}{DENSE}"
        expect(mf.errors.LeafError, text, lambda given=given: mf.shard({"w": given}, groups))


def test_a_shard_is_no_tensor_and_says_what_makes_one():
    groups, x, model = mf.make_groups(1), torch.ones(4, 2), nn.Linear(2, 1)
    shards: Any = mf.shard(dict(nn.Linear(2, 1).named_parameters()), groups)
    w = shards["weight"]
    for call in (
        lambda: x @ w.T, lambda: torch.mm(x, w), lambda: nn.functional.linear(x, w),
        lambda: w @ x.T, lambda: torch.stack([w]), lambda: x.copy_(w), lambda: w.sum(),
        lambda: model.load_state_dict(shards),
    ):  # fmt: skip
        expect(
            (mf.errors.LeafError, AttributeError), "fix: gather(shards, groups) gives tensors", call
        )
    text = r"Sharded\(.*\) is not an instance"
    for fn in (
        lambda s: functional_call(model, s, (x,)),
        grad(lambda s: functional_call(model, s, (x,)).sum()),
    ):
        with pytest.raises(TypeError, match=text):
            fn(shards)


def test_functionalize_is_refused():
    groups, full = mf.make_groups(1), {"w": torch.ones(4)}
    shards = mf.shard(full, groups)
    for verb, call, given in (
        ("shard", mf.shard, full), ("gather", mf.gather, shards),
        ("scatter_grads", mf.scatter_grads, full), ("reduce_grads", mf.reduce_grads, shards),
        ("defer", lambda s, groups: mf.defer(s, groups, mf.keep_all()).params, shards),
    ):  # fmt: skip
        text = f"{verb}: it is called inside torch.func.functionalize, whose tensors have no memory"
        inside = functionalize(lambda x, call=call: call(x, groups))
        expect(mf.errors.LeafError, text, partial(inside, given))
    total = functionalize(lambda w: w * 2)(mf.gather(shards, groups)["w"])
    assert total.tolist() == [2.0] * 4


def test_a_tensor_on_another_device():
    groups = mf.make_groups(1, device="cpu")
    shards = mf.shard({"w": torch.zeros(2, device="meta")}, groups)  # shape only, and welcome
    assert shards["w"].shape == (2,)
    there = torch.device("cuda:0" if torch.cuda.is_available() else "meta")
    hierarchy = replace(groups.hierarchy, device=there)  # nobody makes groups on meta
    away = replace(groups, device=there, hierarchy=hierarchy, flat=hierarchy)
    text = f"shard: params.w is on cpu, its groups are on {away.device}\n  fix: move it with .to('"
    expect(mf.errors.LeafError, text, lambda: mf.shard({"w": torch.zeros(2)}, away))


@pytest.mark.parametrize("verb", [mf.reduce_grads, mf.scatter_grads])
def test_gradients_of_the_wrong_kind(verb):
    groups, good = mf.make_groups(1), torch.ones(2, 3)
    like = mf.shard({"n": torch.tensor([1, 2]), "v": good, "w": good.clone()}, groups)
    done = mf.scatter_grads({"n": None, "v": good, "w": good}, groups, like=like)
    want = "expected float32 of shape (2, 3)\n  fix: give the gradient of the full parameter"
    for changed, text in (
        ({"n": torch.ones(2)}, "n is float32 of shape (2,), expected int64 of shape (2,)"),
        ({"w": good.T}, f"w is float32 of shape (3, 2), {want}"),
        ({"w": good.double()}, f"w is float64 of shape (2, 3), {want}"),
        ({"w": 3.0}, f"w is float, {want}"),
        ({"v": done["v"]}, "v is reduced already, others of its bucket are not"),
    ):
        grads = {"n": None, "v": good, "w": good, **changed}
        with pytest.raises(mf.MicsError) as caught:
            verb(grads, groups, like=like)
        assert str(caught.value).startswith(f"{verb.__name__}: grads.{text}")
    with pytest.raises(mf.MicsError, match=f"^{verb.__name__}: "):
        verb({"b": good.to_sparse(), "w": "no"}, groups)


def test_verbs_without_groups_and_with_the_wrong_thing():
    groups: Any = mf.make_groups(1)
    full = {"w": torch.zeros(2)}
    shards = mf.shard(full, groups)
    partly: Any = {"a": shards["w"], "b": torch.zeros(2)}
    e = mf.errors
    none = "groups is None\n  fix: make groups first: groups = mics_fn.make_groups(partition_size)"
    for error, text, call in (
        (e.GroupsError, f"gather: {none}", lambda: mf.gather(shards, None)),  # pyright: ignore
        (e.GroupsError, f"reduce_grads: {none}", lambda: mf.reduce_grads(full, None)),
        (e.GroupsError, "reduce_grads: got a h", lambda: mf.reduce_grads(shards, groups.hierarchy)),
        (
            e.LeafError,
            f"shard: params.a.0 is float, expected torch.Tensor{CONVERT}",
            lambda: mf.shard({"a": [3.5]}, groups),
        ),
        (
            e.LeafError,
            f"params.a is sparse_coo, float32{DENSE}",
            lambda: mf.shard({"a": torch.eye(2).to_sparse()}, groups),
        ),
        (e.LeafError, "unshard: shards is None", lambda: mf.unshard(None, groups)),
        (e.LeafError, "gather: shards.w is Tensor, not a shard", lambda: mf.gather(full, groups)),
        (e.LeafError, "groups: not a prefix of the tree", lambda: mf.shard(full, {"v": groups})),
        (e.LeafError, ".a is Sharded, expected torch.Ten", lambda: mf.shard(partly, groups)),
        (e.LeafError, ".a is Sharded, expected torch.T", lambda: mf.reduce_grads(partly, groups)),
        (e.PlanError, "bucket_bytes=0, expected", lambda: mf.shard(full, groups, bucket_bytes=0)),
    ):
        expect(error, text, call)

"""Bad input: messages say what, where, who, expected and got, and the fix, on all ranks."""

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import Layout, groups_of, random
from torch import nn
from torch.func import functional_call, functionalize, grad, vmap

import mics_fn as mf
from mics_fn.errors import message, name_ranks

FOUR = Layout((2, 2), 2)
SAME_TREE = "build the same tree on every rank: same keys in the same order, same shapes and dtypes"
DENSE = "\n  fix: pass a dense tensor of f32, bf16, f16, f64, bool or whole numbers"
CONVERT = "\n  fix: convert it with torch.as_tensor, or leave it out of the tree"


def on_all_ranks(ranks, fn, *args, n=4):
    """The one message that all ranks raise, and its type's name."""
    failures = ranks(n).try_run(fn, *args)
    found = {(f.type_name, f.message) for f in failures}
    assert len(found) == 1, found
    return found.pop()


# Ranks that disagree: found before data moves, named on every rank.


def odd_tree(kind, odd):
    params = {"a": {"w": random(0, 4, 4)}, "b": random(1, 3)}
    if dist.get_rank() == odd:
        if kind == "shape":
            params["a"]["w"] = random(0, 4, 5)
        elif kind == "dtype":
            params["b"] = params["b"].double()
        elif kind == "key":
            params["a"]["x"] = params["a"].pop("w")
        elif kind == "fewer":
            del params["b"]
        elif kind == "frozen":
            params["b"] = nn.Parameter(params["b"], requires_grad=False)
        elif kind == "tied":
            params["b"] = params["a"]["w"]
    mf.shard(params, groups_of(FOUR))


DISAGREE = {
    "shape": [
        "first difference: params.a.w",
        "ranks 0, 1, 3: params.a.w (4, 4) float32 at 0 of bucket 0",
        "rank 2: params.a.w (4, 5) float32 at 0 of bucket 0",
    ],
    "dtype": [
        "first difference: params.b",
        "ranks 0, 1, 3: params.b (3,) float32 at 16 of bucket 0",
        "rank 2: params.b (3,) float64 at 0 of bucket 1",
    ],
    "key": [
        "first difference: params.a.w",
        "ranks 0, 1, 3: params.a.w (4, 4) float32 at 0 of bucket 0",
        "rank 2: params.a.x (4, 4) float32 at 0 of bucket 0",
    ],
    "fewer": [
        "first difference: params.b",
        "ranks 0, 1, 3: params.b (3,) float32 at 16 of bucket 0",
        "rank 2: (no more leaves)",
    ],
    "frozen": [
        "first difference: params.b",
        "ranks 0, 1, 3: params.b (3,) float32 at 16 of bucket 0",
        "rank 2: params.b (3,) float32 frozen at 0 of bucket 1",
    ],
    "tied": [
        "first difference: params.b",
        "ranks 0, 1, 3: params.b (3,) float32 at 16 of bucket 0",
        "rank 2: params.b (4, 4) float32 tied to params.a.w",
    ],
}


@pytest.mark.parametrize("kind", DISAGREE)
def test_ranks_that_disagree_on_the_tree(ranks, kind):
    name, text = on_all_ranks(ranks, odd_tree, kind, 2)
    assert name == "DesyncError"
    assert text == message("shard: ranks disagree on the tree", DISAGREE[kind], fix=SAME_TREE)


def odd_gather():
    groups = groups_of(FOUR)
    shards = mf.shard({"a": random(0, 4), "b": random(1, 3)}, groups)
    mf.gather(shards, groups)
    mf.gather(mf.shard({"a": random(0, 4)}, groups), groups)  # alike, but agreed on by itself
    mf.gather({"b": shards["b"]} if dist.get_rank() == 1 else {"a": shards["a"]}, groups)


def test_ranks_that_gather_different_leaves(ranks):
    failures = ranks(4).try_run(odd_gather)
    assert [getattr(f, "type_name", None) for f in failures] == [
        "DesyncError",
        "DesyncError",
        None,
        None,
    ]
    want = message(
        "gather: ranks disagree on the tree",
        [
            "first difference: bucket 0[0]",
            "rank 0: bucket 0[0] (4,)",
            "rank 1: bucket 0[1] (3,)",
        ],
        fix=SAME_TREE,
    )
    assert failures[0].message == failures[1].message == want


def odd_grads():
    groups = groups_of(FOUR)
    size = 5 if dist.get_rank() == 3 else 4
    mf.reduce_grads({"w": random(0, size)}, groups)


def test_gradients_that_differ_between_ranks(ranks):
    name, text = on_all_ranks(ranks, odd_grads)
    assert name == "DesyncError"
    assert "ranks 0-2: grads.w (4,) float32 at 0 of bucket 0\n  rank 3: grads.w (5,)" in text


# One rank's own mistakes: raised before anything is sent.


def expect(error, text, call):
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value) == text


def test_leaves_that_can_not_be_sharded():
    groups = mf.make_groups(1)
    cases = {
        "float": (
            3.5,
            "shard: params.a.0 is float, expected torch.Tensor" + CONVERT,
        ),
        "str": (
            "x",
            "shard: params.a.0 is str, expected torch.Tensor" + CONVERT,
        ),
        "sparse": (
            torch.eye(2).to_sparse(),
            "shard: params.a.0 is sparse_coo, float32" + DENSE,
        ),
        "complex": (
            torch.ones(2, dtype=torch.complex64),
            "shard: params.a.0 is strided, complex64" + DENSE,
        ),
    }
    for value, text in cases.values():
        expect(mf.errors.LeafError, text, lambda value=value: mf.shard({"a": [value]}, groups))


DTYPES = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)


def test_a_dtype_is_kept_to_the_bit_or_refused_by_name():
    groups = mf.make_groups(1)
    whole = {
        getattr(torch, f"{kind}{bits}") for kind in ("int", "uint") for bits in (8, 16, 32, 64)
    }
    floats = {torch.float32, torch.bfloat16, torch.float16, torch.float64}
    for dtype in DTYPES:
        given = torch.zeros(16, dtype=torch.uint8)
        try:
            given = given.view(dtype)
        except RuntimeError:  # quantized ones have scales, and some have no memory to look at
            with warnings.catch_warnings(action="ignore"):
                given = torch.empty(2, dtype=dtype)
        if dtype in floats | whole | {torch.bool}:
            found = mf.unshard(mf.shard({"w": given}, groups), groups)["w"]
            assert torch.equal(found.view(torch.uint8), given.view(torch.uint8)), dtype
            continue
        name = f"{dtype}".removeprefix("torch.")
        text = f"shard: params.w is strided, {name}{DENSE}"
        expect(mf.errors.LeafError, text, lambda given=given: mf.shard({"w": given}, groups))


def test_a_shard_is_no_tensor_and_says_what_makes_one():
    groups, x = mf.make_groups(1), torch.ones(4, 2)
    shards = mf.shard(dict(nn.Linear(2, 1).named_parameters()), groups)
    w: Any = shards["weight"]
    given: Any = shards
    fix = "fix: gather(shards, groups) gives tensors"
    model = nn.Linear(2, 1)
    for call in (
        lambda: x @ w.T, lambda: torch.mm(x, w), lambda: nn.functional.linear(x, w),
        lambda: w @ x.T, lambda: torch.stack([w]), lambda: x.copy_(w), lambda: w.sum(),
        lambda: model.load_state_dict(given),
    ):  # fmt: skip
        with pytest.raises((mf.errors.LeafError, AttributeError)) as caught:
            call()
        assert fix in str(caught.value)
    text = r"Sharded\(.*\), of which gather\(shards, groups\) makes a tensor, is not an instance"
    for fn in (
        lambda s: functional_call(model, s, (x,)),
        grad(lambda s: functional_call(model, s, (x,)).sum()),
    ):
        with pytest.raises(TypeError, match=text):
            fn(shards)


def functionalized(p: int) -> None:
    groups = mf.make_groups(p)
    full = {"w": torch.ones(4)}
    shards = mf.shard(full, groups)
    for verb, call in {
        "shard": lambda given: mf.shard(given["full"], groups),
        "gather": lambda given: mf.gather(given["shards"], groups)["w"] * 2,
        "unshard": lambda given: mf.unshard(given["shards"], groups),
        "defer": lambda given: mf.defer(given["shards"], groups, mf.on_demand()).params["w"] * 2,
        "reduce_grads": lambda given: mf.reduce_grads(given["shards"], groups),
        "scatter_grads": lambda given: mf.scatter_grads(given["full"], groups, like=shards),
    }.items():
        for around in (
            functionalize(call),
            lambda given, call=call: vmap(functionalize(lambda _: call(given)))(torch.ones(1)),
        ):
            with pytest.raises(mf.errors.LeafError) as caught:
                around({"full": full, "shards": shards})
            assert str(caught.value) == (
                f"{verb}: it is called inside torch.func.functionalize, whose tensors have no "
                f"memory\n  fix: {verb} outside, and functionalize what works on full tensors"
            )
    total = functionalize(lambda w: w * 2)(mf.gather(shards, groups)["w"])
    assert total.tolist() == [2.0] * 4


@pytest.mark.parametrize(("n", "p"), [(1, 1), (2, 2), (2, 1)])
def test_functionalize_is_refused(ranks, n, p):
    ranks(n).run(functionalized, p)


def test_a_tensor_on_another_device():
    groups = mf.make_groups(1, device="cpu")
    shards = mf.shard(
        {"w": torch.zeros(2, device="meta")}, groups
    )  # meta is shape only, and welcome
    assert shards["w"].shape == (2,)
    there = torch.device("cuda:0" if torch.cuda.is_available() else "meta")
    hierarchy = replace(groups.hierarchy, device=there)  # nobody makes groups on meta
    away = replace(groups, device=there, hierarchy=hierarchy, flat=hierarchy)
    expect(
        mf.errors.LeafError,
        f"shard: params.w is on cpu, its groups are on {away.device}\n"
        f"  fix: move it with .to('{away.device}'), or make groups with device='cpu'",
        lambda: mf.shard({"w": torch.zeros(2)}, away),
    )


def test_gradients_of_the_wrong_kind():
    groups = mf.make_groups(1)
    shards = mf.shard({"n": torch.tensor([1, 2]), "w": torch.zeros(2, 3)}, groups)
    good = torch.ones(2, 3)
    fix = "\n  fix: give the gradient of the full parameter"
    expected = ", expected float32 of shape (2, 3)" + fix
    cases = [
        (
            mf.errors.LeafError,
            {"n": torch.ones(2), "w": good},
            "reduce_grads: grads.n is float32 of shape (2,), expected int64 of shape (2,)" + fix,
        ),
        (
            mf.errors.LeafError,
            {"n": None, "w": good.T},
            "reduce_grads: grads.w is float32 of shape (3, 2)" + expected,
        ),
        (
            mf.errors.LeafError,
            {"n": None, "w": good.double()},
            "reduce_grads: grads.w is float64 of shape (2, 3)" + expected,
        ),
        (
            mf.errors.LeafError,
            {"n": None, "w": 3.0},
            "reduce_grads: grads.w is float" + expected,
        ),
    ]
    for error, grads, text in cases:
        expect(error, text, lambda grads=grads: mf.reduce_grads(grads, groups, like=shards))


@pytest.mark.parametrize("verb", [mf.reduce_grads, mf.scatter_grads, mf.shards.start_scatter_grads])
def test_errors_of_gradients_name_the_verb_that_was_called(verb):
    good = torch.ones(2)
    with mf.make_groups(1) as groups:
        like = mf.shard({"b": good, "w": good.clone()}, groups)
        done = mf.shards.scatter_grads({"b": good, "w": good}, groups, like=like)
        wrong = [{"b": good, "w": good[:1]}, {"b": 3.0, "w": None}]
        wrong += [{"b": good.double(), "w": None}, {"b": done["b"], "w": good}]
        for grads in wrong:
            with pytest.raises(mf.MicsError, match=f"^{verb.__name__}: "):
                verb(grads, groups, like=like)
        with pytest.raises(mf.MicsError, match=f"^{verb.__name__}: "):
            verb({"b": good.to_sparse(), "w": "no"}, groups)


@pytest.mark.parametrize("verb", [mf.gather, mf.shards.start_gather, mf.unshard])
def test_errors_of_gathers_name_the_verb_that_was_called(verb):
    with mf.make_groups(1) as groups:
        for shards in (None, {"w": torch.ones(2)}):
            with pytest.raises(mf.MicsError, match=f"^{verb.__name__}: shards"):
                verb(shards, groups)


def test_verbs_without_groups_and_with_the_wrong_thing():
    groups = mf.make_groups(1)
    shards = mf.shard({"w": torch.zeros(2)}, groups)
    fix = "\n  fix: make groups first: groups = mics_fn.make_groups(partition_size)"
    expect(
        mf.errors.GroupsError,
        "shard: groups is None" + fix,
        lambda: mf.shard({"w": torch.zeros(2)}, None),  # pyright: ignore
    )
    expect(mf.errors.GroupsError, "gather: groups is None" + fix, lambda: mf.gather(shards, None))  # pyright: ignore
    expect(
        mf.errors.GroupsError,
        "reduce_grads: groups is None" + fix,
        lambda: mf.reduce_grads({"w": torch.zeros(2)}, None),
    )
    expect(
        mf.errors.GroupsError,
        "reduce_grads: groups is None" + fix,
        lambda: mf.reduce_grads(shards, None),
    )
    expect(
        mf.errors.GroupsError,
        "hop 2: got a hierarchy, needs groups\n  fix: pass groups, which know the other replicas",
        lambda: mf.reduce_grads(shards, groups.hierarchy),
    )
    expect(
        mf.errors.LeafError,
        "gather: shards.w is Tensor, not a shard\n  fix: make shards with shard(params, groups)",
        lambda: mf.gather({"w": torch.zeros(2)}, groups),
    )
    with pytest.raises(mf.errors.LeafError, match="groups: not a prefix of the tree it goes with"):
        mf.shard({"w": torch.zeros(2)}, {"v": groups})
    with pytest.raises(mf.errors.LeafError, match=r"groups.w: got int, which is no groups"):
        mf.shard({"w": torch.zeros(2)}, {"w": 3})
    expect(
        mf.errors.PlanError,
        "shard: replicas='maybe', expected 'check' or 'broadcast'",
        lambda: mf.shard({"w": torch.zeros(2)}, groups, **{"replicas": "maybe"}),  # pyright: ignore
    )
    partly = {"a": shards["w"], "b": torch.zeros(2)}
    text = ".a is Sharded, expected torch.Tensor"
    expect(mf.errors.LeafError, "shard: params" + text + CONVERT, lambda: mf.shard(partly, groups))
    expect(
        mf.errors.LeafError,
        "reduce_grads: grads" + text + CONVERT,
        lambda: mf.reduce_grads(partly, groups),
    )
    expect(
        mf.errors.PlanError,
        "shard: source_rank=3 is not one of rank 0\n  fix: name a global rank of the groups",
        lambda: mf.shard({"w": torch.zeros(2)}, groups, replicas="broadcast", source_rank=3),
    )
    expect(
        mf.errors.PlanError,
        "shard: bucket_bytes=0, expected a number of bytes of at least 1\n"
        "  fix: pass an int, or a text such as '512MiB' or '1GB'",
        lambda: mf.shard({"w": torch.zeros(2)}, groups, bucket_bytes=0),
    )


def test_verbs_after_close():
    groups = mf.make_groups(1)
    shards = mf.shard({"w": torch.zeros(2)}, groups)
    groups.close()
    for call in (
        lambda: mf.shard({"w": torch.zeros(2)}, groups),
        lambda: mf.gather(shards, groups),
        lambda: mf.gather(shards, groups.hierarchy),
        lambda: mf.unshard(shards, groups),
        lambda: mf.reduce_grads(shards, groups),
        lambda: mf.reduce_grads({"w": torch.zeros(2)}, groups),
        lambda: mf.optim.global_norm(shards, groups),
    ):
        with pytest.raises(mf.errors.GroupsError, match="is used after its groups were closed"):
            call()


def other_groups():
    two, four = groups_of(FOUR), groups_of(Layout((2, 2), 4))
    shards = mf.shard({"w": random(0, 4)}, two)
    mf.gather(shards, four)


def test_groups_that_the_tree_was_not_sharded_with(ranks):
    assert on_all_ranks(ranks, other_groups) == (
        "PlanError",
        "gather: shards are cut in 2, the groups have 4 ranks\n"
        "  fix: pass the groups that the tree was sharded with",
    )


def tied_across_groups():
    w = random(0, 4)
    groups = {"a": groups_of(FOUR), "b": groups_of(Layout((2, 2), 4))}
    mf.shard({"a": w, "b": w}, groups)


def test_a_tied_leaf_on_two_groups(ranks):
    assert on_all_ranks(ranks, tied_across_groups) == (
        "PlanError",
        "shard: params.b is tied to params.a, but on other groups\n"
        "  n=4 p=2 levels=rank:2 against n=4 p=4 levels=node:2,rank:2\n"
        "  fix: give tied leaves the same groups, or clone one of them",
    )


def test_a_tied_leaf_without_its_owner():
    groups = mf.make_groups(1)
    w = torch.zeros(3)
    shards = mf.shard({"a": w, "b": w}, groups)
    nested = mf.gather({"deep": [shards]}, groups)["deep"][0]
    assert nested["a"] is nested["b"]


def donating():
    groups = groups_of(Layout((2,), 1))
    shards = mf.shard({"w": torch.ones(2)}, groups)
    with pytest.raises(mf.errors.DonatedError, match="sync_replicas: donate=True under autograd"):
        torch.func.grad(lambda s: mf.sync_replicas(s, groups, donate=True)["w"].data.sum())(shards)
    synced = mf.sync_replicas(shards, groups, donate=True)
    assert synced["w"].data.tolist() == [1.0, 1.0]
    with pytest.raises(mf.errors.DonatedError, match=r"grads.w was donated to sync_replicas"):
        mf.gather(shards, groups)


def test_donated_gradients(ranks):
    ranks(2).run(donating)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ([4], "rank 4"),
        ([1, 0], "ranks 0, 1"),
        ([0, 1, 2, 5, 7, 8], "ranks 0-2, 5, 7, 8"),
        (range(9), "ranks 0-8"),
    ],
)
def test_names_of_ranks(given, text):
    assert name_ranks(list(given)) == text

"""Deferred parameters as tensors: what communicates, what stays deferred, what is refused."""

import copy
import operator
import pickle
import warnings

import pytest
import torch
import torch.distributed as dist
from cases import Layout, groups_of, random
from covering import examples
from hypothesis import given
from hypothesis import strategies as st
from storage_count import StorageCount
from torch import nn
from torch.func import functional_call

import mics_fn as mf
from mics_fn import _torch, tree
from mics_fn.deferred.live import Deferred
from mics_fn.errors import DonatedError, LeafError

PAIR = Layout((2,), 2)


def deferred_weight(groups, value, **options):
    policy = mf.on_demand(**options)
    shards = mf.shard({"w": value, "other": torch.ones(300)}, groups, bucket_bytes=8)
    return mf.defer(shards, groups, policy).params["w"]


def nothing_sent(groups):
    return not any(name.startswith("gather") for name in groups.traffic.snapshot())


# What a deferred tensor is.

VIEWS = {
    "t": lambda w: w.t(),
    "view": lambda w: w.view(2, 12),
    "permute": lambda w: w.permute(1, 0),
    "select": lambda w: w[1],
    "slice": lambda w: w[1:3, ::2],
    "expand": lambda w: w.unsqueeze(0).expand(5, 4, 6),
    "diagonal": lambda w: w.diagonal(),
    "as_strided": lambda w: w.as_strided((2, 2), (6, 1), 3),
    "twice": lambda w: w.t()[1:4].t(),
    "detach": lambda w: w.detach(),
    "lists": lambda w: w.split(3, 1)[1],
    "unbind": lambda w: w.unbind()[2],
    "cast": lambda w: w.to(torch.bfloat16),
    "cast view": lambda w: w.half().t(),
}


def views(layout):
    groups = groups_of(layout)
    value = random(1, 4, 6)
    for name, view in VIEWS.items():
        groups.traffic.clear()
        w = deferred_weight(groups, value)
        out = view(w)
        assert type(out) is Deferred, name
        assert nothing_sent(groups), name
        want = view(value)
        about = (out.shape, out.dtype, out.stride(), out.storage_offset())
        assert about == (want.shape, want.dtype, want.stride(), want.storage_offset()), name
        assert torch.equal(out + 0, want + 0), name
    bits = deferred_weight(groups, value).detach().view(torch.int32)
    assert type(bits) is torch.Tensor, "other kinds of views give values of their own"
    assert torch.equal(bits, value.view(torch.int32))


def metadata(layout):
    groups = groups_of(layout)
    value = random(1, 4, 6)
    variable = tree.map_leaves(lambda x: x.requires_grad_(), mf.shard({"w": value}, groups))
    groups.traffic.clear()
    w = mf.defer(variable, groups, mf.on_demand()).params["w"]
    assert (w.shape, w.dtype, w.numel(), len(w)) == ((4, 6), torch.float32, 24, 4)
    assert (w.device, w.stride(0), w.element_size()) == (value.device, 6, 4)
    assert (w.is_leaf, w.requires_grad, w.is_contiguous()) == (False, True, True)
    assert w.detach().requires_grad is False
    assert f"{w}" == repr(w) == "Deferred(shape=(4, 6), float32, bucket 0)"
    assert nothing_sent(groups)
    assert torch.equal(w, value)
    assert groups.traffic.snapshot()["gather rank"][0] == 1


# What people do with a parameter that is no op on it. Of each: what comes, or what is said.

W = torch.arange(1.0, 7).view(2, 3)


def setting(name, value):
    def assign(w):
        setattr(w, name, value())

    return assign


GIVES = {
    "data": (lambda w: w.data, W),
    "grad = None": (setting("grad", lambda: None), None),
    "deepcopy": (copy.deepcopy, W),
    "format": (lambda w: f"{w[0, 1]:.2f} {w[0, 1].item():.1f}", "2.00 2.0"),
    "tolist": (lambda w: w.tolist(), W.tolist()),
    "numpy": (lambda w: w.detach().numpy().tolist(), W.tolist()),
    "type": (lambda w: w.type(torch.float64), W.double()),
    "item": (lambda w: (float(w[0, 1]), int(w[0, 1]), bool(w[0, 1])), (2.0, 2, True)),
    "is_shared": (lambda w: w.is_shared(), False),
    "as_strided": (lambda w: w[1].as_strided((2, 2), (3, 1), 1), W[:, 1:]),
    "as_strided, of a cast": (lambda w: w.half().as_strided((6,), (1,), 0), W.flatten().half()),
    "neg view": (torch.ops.aten._neg_view, -W),
    "sparse": (lambda w: w.to_sparse().to_dense(), W),
    "as a target's source": (lambda w: torch.empty(2, 3).copy_(w.detach()), W),
    "share a clone": (lambda w: w.detach().clone().share_memory_(), W),
}
SAYS = {
    "data =": (setting("data", lambda: torch.zeros(2, 3)), "data = writes to"),
    "grad =": (setting("grad", lambda: torch.zeros(2, 3)), "grad = would be lost on"),
    "hook on what is accumulated": (
        lambda w: w.register_post_accumulate_grad_hook(print),
        "no gradient is accumulated in",
    ),
    "share_memory_": (lambda w: w.share_memory_(), "share_memory_ asks for the memory of"),
    "storage": (lambda w: w.storage(), "storage asks for the memory of"),
    "data_ptr": (lambda w: w.data_ptr(), "data_ptr asks for the memory of"),
    "pickle": (pickle.dumps, "torch.save and pickle want the memory of"),
    "dlpack": (lambda w: torch.from_dlpack(w.detach()), "dlpack__ asks for the memory of"),
    "set_ of another": (lambda w: torch.empty(0).set_(w.detach()), "set_ takes the memory of"),
    "as_strided, too far": (lambda w: w.as_strided((7,), (1,)), "reads beyond the 6 elements of"),
    "apply_": (lambda w: w.apply_(lambda x: x), "apply_ writes to"),
    "resize_": (lambda w: w.resize_(4), "resize_ writes to"),
    "set_": (lambda w: w.detach().set_(torch.ones(2)), "writes to"),
    "setitem": (lambda w: w.detach().__setitem__((0, 0), 5.0), "writes to"),
    "of a view": (lambda w: w.t().add_(1), "writes to"),
    "out=": (lambda w: torch.add(W, 1, out=w.detach()), "writes to"),
    "init": (nn.init.normal_, "writes to"),
    "foreach": (lambda w: _torch.foreach_add([torch.ones(2), w.detach()], 1.0), "writes to"),
    "parts": (lambda w: nn.utils.vector_to_parameters(torch.zeros(6), [w]), "data = writes to"),
    "+=": (lambda w: operator.iadd(w, W), "writes to"),
}


def doings(layout):
    groups = groups_of(layout)
    for requires_grad in (False, True):
        shards = mf.shard({"w": W, "after": torch.full((4,), 7.0)}, groups)
        if requires_grad:
            shards = tree.map_leaves(lambda x: x.requires_grad_(), shards)
        full = mf.defer(shards, groups, mf.on_demand()).params
        for name, (do, want) in GIVES.items():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # sparse rows are in beta; a grad that is no leaf's
                got = do(full["w"])
            if isinstance(want, torch.Tensor):
                assert torch.equal(got + 0, want), name
                if type(got) is torch.Tensor and not got.requires_grad:
                    got.zero_()  # it has memory of its own
            else:
                assert got == want, name
            assert torch.equal(full["w"], W), name
        for name, (do, said) in SAYS.items():
            with pytest.raises(LeafError) as caught:
                do(full["w"])
            assert said in f"{caught.value}", name
            assert " a gathered parameter, one of bucket 0\n" in f"{caught.value}", name
            assert "the bucket holds after, w\n" in f"{caught.value}", name
            assert torch.equal(full["w"], W), name
    array = full["w"].detach().numpy()
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1
    seen = []
    full["w"].register_hook(seen.append)
    full["w"].retain_grad()
    full["w"].pow(2).sum().backward()
    assert torch.equal(seen[0], 2 * W)
    assert torch.equal(full["w"].grad, 2 * W)


@pytest.mark.parametrize("layout", [Layout((1,), 1), PAIR], ids=str)
def test_what_people_do_with_a_parameter_works_or_says_why_not(ranks, layout):
    ranks(layout.world_size).run(doings, layout)


def no_alias(layout):
    """Ops that may return their input as it is must not hand out the bucket's memory."""
    groups = groups_of(layout)
    value = random(1, 4, 6)
    w = deferred_weight(groups, value).detach()
    library = torch.library.Library("mics_fn_test", "FRAGMENT")
    library.define("same(Tensor x) -> (Tensor, Tensor[])")
    # Against torch's rules, and met all the same.
    library.impl("same", lambda x: (x, [x[1:], x + 1]), "CPU")
    out, several = torch.ops.mics_fn_test.same(w)
    for same in (
        *(out, several[0], torch.native_dropout(w, 0.5, False)[0], w.t().contiguous(), w.clone()),
        *(w.to(torch.float64).to(torch.float32) + 0, w.nan_to_num(), torch.real(w) + 0),
    ):
        assert type(same) is torch.Tensor
        same.zero_()
    assert torch.equal(w, value)


def lists(layout):
    groups = groups_of(layout)
    values = {k: random(i, 3, 4) for i, k in enumerate("abc")}
    shards = mf.shard(values, groups, bucket_bytes=8)  # a bucket each
    for live in (None, 0):
        policy = mf.on_demand(live_bytes=live)
        for _ in range(2):
            few, want = list(mf.defer(shards, groups, policy).params.values()), [*values.values()]
            for op in (
                torch.cat,
                lambda x: torch.stack([x[2], values["a"], x[1]], dim=1),
                lambda x: torch.stack(list(_torch.foreach_norm(x))),
                lambda x: torch.ops.aten.index(x[1].detach(), [torch.tensor([0, 2]), None]),
                lambda x: torch.addmm(x[0][:, :3], x[1], x[2].t(), beta=0.5),
            ):
                assert torch.equal(op(few), op(want))
        assert policy.schedule is not None and (0, 1, 2) in policy.schedule.uses  # noqa: PT018


# Memory.


def stack(blocks, width):
    torch.manual_seed(0)
    layers = [[nn.Linear(width, width), nn.Tanh()] for _ in range(blocks)]
    return nn.Sequential(*(layer for block in layers for layer in block))


def nothing_between(layout):
    """After forward only what the budget allows is alive, though autograd saved every weight."""
    groups, width = groups_of(layout), 128
    params = dict(stack(5, width).named_parameters())
    shards = mf.shard(params, groups, bucket_bytes=(width + 1) * width * 4)
    variables = tree.map_leaves(lambda x: x.requires_grad_(), shards)
    skeleton, one = stack(5, width).to("meta"), (width + 1) * width * 4
    groups.hierarchy.pools.fetched.__init__()
    with StorageCount() as count, mf.defer(variables, groups, mf.on_demand(live_bytes=0)) as full:
        loss = functional_call(skeleton, full, (torch.ones(2, width),)).sum()
        assert one <= count.now <= 2.2 * one, "a full parameter is alive between both passes"
        torch.autograd.grad(loss, tree.flatten(variables)[0])


# Ends and misuse.


def misuse(layout):
    groups = groups_of(layout)

    def sharded():
        return mf.shard({"a": random(0, 8, 8), "b": random(1, 8)}, groups)

    state = mf.init_state(sharded(), mf.optim.sgd(0.1))
    full = mf.defer(state.params, groups, mf.on_demand()).params
    mf.opt_step(state, tree.map_leaves(torch.ones_like, state.params), donate=True)
    with pytest.raises(DonatedError, match=r"bucket 0: a ... \(2 leaves\) was changed after"):
        full["a"].sum()
    total = mf.GradSum()
    with pytest.raises(LeafError, match=r"0 of 1 passes are done\n  fix: defer"):
        total.backward(torch.ones(()))
    _ = mf.defer(sharded(), groups, mf.on_demand(), into=total).params
    with pytest.raises(LeafError, match="in use by another run"):
        mf.defer(sharded(), groups, mf.on_demand(), into=total)
    with pytest.raises(LeafError, match="0 of 1 passes are done"):
        total.grads()


LAWS = [views, metadata, no_alias, lists, nothing_between, misuse]


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_deferred_tensors(ranks, law):
    ranks(2).run(law, PAIR)


# Any program of uses.


def any_program(layout, sizes, program, live, prefetch, passes):
    groups = groups_of(layout)
    values = [random(i, n, dtype=torch.float64) for i, n in enumerate(sizes)]
    shards = mf.shard(values, groups, bucket_bytes=1)
    policy = mf.on_demand(live_bytes=live, prefetch=prefetch)
    rank = dist.get_rank()

    def loss(full):
        total = torch.ones((), dtype=torch.float64)
        for used in program:
            total = torch.sin(total * sum((full[i] * (i + rank + 1)).mean() for i in used))
        return total

    plain = [v.clone().requires_grad_() for v in values]
    want = torch.autograd.grad(loss(plain), plain, materialize_grads=True)
    for w in want:
        dist.all_reduce(w)
    for _ in range(passes):
        total = mf.GradSum()
        with (run := mf.defer(shards, groups, policy, into=total)) as full:
            total.backward(loss(full))
        assert run.following == (_ > 0)
        got = mf.unshard(total.grads(), groups)
        for g, w in zip(got, want, strict=True):
            close = (g - w / layout.world_size).abs() <= 1e-12 * (1 + w.abs())
            assert close.all()


@pytest.mark.limit(300)
@examples(6, 50)
@given(
    layout=st.sampled_from([Layout((2,), 2), Layout((2, 2), 2), Layout((2, 2), 4)]),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    live=st.sampled_from([None, 0, 40, 100]),
    prefetch=st.integers(0, 4),
    data=st.data(),
)
def test_any_program_of_uses(ranks, layout, sizes, live, prefetch, data):
    bucket = st.integers(0, len(sizes) - 1)
    uses = st.lists(bucket, min_size=1, max_size=3, unique=True)
    program = data.draw(st.lists(uses, min_size=1, max_size=8))
    ranks(layout.world_size).run(any_program, layout, sizes, program, live, prefetch, 3)

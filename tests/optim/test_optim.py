"""Optimizers over shards: torch's arithmetic to the bit, purity, donation, masks, protocols."""

import inspect
import subprocess
import sys
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import (
    ODD_MEMORY,
    Layout,
    groups_of,
    in_odd_memory,
    in_own_memory,
    poison,
    random,
    same_bits,
)
from covering import examples
from hypothesis import given
from hypothesis import strategies as st

import mics_fn as mf
from mics_fn import tree
from mics_fn.lab.bench.turns import memory_bytes
from mics_fn.optim.flat import by_leaf

STEPS = 4
ELEMENTWISE = {
    "SGD": [{}, {"momentum": 0.9, "nesterov": True}, {"momentum": 0.8, "dampening": 0.3}],
    "Adam": [{"amsgrad": True, "weight_decay": 0.1}],
    "AdamW": [{"weight_decay": 0.1}, {"maximize": True}],
    "RMSprop": [{}, {"momentum": 0.9, "centered": True}],
    "Adagrad": [{"initial_accumulator_value": 0.1, "lr_decay": 0.1}],
    "Adadelta": [{}],
    "Adamax": [{}],
    "NAdam": [{"momentum_decay": 0.01}],
    "RAdam": [{}],
    "ASGD": [{"t0": 1}],
    "Rprop": [{}],
}
CASES = [(name, options) for name, every in ELEMENTWISE.items() for options in every]


def values(seed=0):
    shapes = {"a": (5, 3), "b": (2,), "c": (), "d": (33,), "e": (0, 2)}
    return {k: random(seed + i, *s) for i, (k, s) in enumerate(shapes.items())}


def grads_at(step):
    return values(100 * (step + 1))


def decays(path):
    return path != "a"


def takes(cls, option):
    return option in inspect.signature(cls).parameters


def torch_twin(cls, options, lr=1e-2):
    params = {k: torch.nn.Parameter(v) for k, v in values().items()}
    kinds: list[Any] = [
        {"params": [p for k, p in params.items() if decays(k)]},
        {"params": [params["a"]]},
    ]
    kinds[1] |= {"weight_decay": 0.0} if takes(cls, "weight_decay") else {}
    optimizer = cls(kinds, lr=lr, **options)
    for step in range(STEPS):
        for k, g in grads_at(step).items():
            params[k].grad = g
        optimizer.step()
    kept = {f"{name}.{k}": x for k, p in params.items() for name, x in optimizer.state[p].items()}
    return {**kept, **{k: p.detach() for k, p in params.items()}}


def run_sharded(layout, make, donate=False):
    groups = groups_of(layout)
    state = mf.init_state(poison(mf.shard(values(), groups, bucket_bytes=100)), make())
    structure = tree.flatten(state.opt)[1]
    for step in range(STEPS):
        grads = mf.reduce_grads(grads_at(step), groups, like=state.params)
        state = mf.opt_step(state, grads, donate=donate)
        assert tree.flatten(state.opt)[1] == structure, "the state's structure changes"
    moments = mf.unshard(by_leaf(getattr(state.opt, "moments", {})), groups)
    kept = {f"{name}.{k}": x for name, full in moments.items() for k, x in full.items()}
    return {**kept, **mf.unshard(state.params, groups)}


def single_ops(name, options):
    """One of torch's, without kernels over lists: those round by place."""
    cls = getattr(torch.optim, name)
    single = {"foreach": False} if takes(cls, "foreach") else {}
    return cls, {**single, **options}


class SignedDescent(torch.optim.SGD):
    """Elementwise, and not of torch: it steps by the sign of what SGD would step by."""

    @torch.no_grad()
    def step(self, closure=None):
        leaves = [p for group in self.param_groups for p in group["params"]]
        before = [p.clone() for p in leaves]
        super().step()
        for p, old in zip(leaves, before, strict=True):
            p.copy_(old + self.defaults["lr"] * (p - old).sign())


def of_torch(layout):
    own = SignedDescent, {"momentum": 0.9, "foreach": False, "elementwise": True}
    for cls, how in [*(single_ops(*case) for case in CASES), own]:
        want = torch_twin(cls, {k: x for k, x in how.items() if k != "elementwise"})
        for donate in (False, True):
            mask = decays if takes(cls, "weight_decay") else None
            make = partial(mf.optim.from_torch, cls, lr=1e-2, decay_mask=mask, **how)
            found = run_sharded(layout, make, donate)
            same_bits(found, {name: want[name] for name in found})


@pytest.mark.parametrize("layout", [Layout((1,), 1), Layout((2, 2), 4)], ids=str)
@pytest.mark.short("1-p1")
def test_torch_optimizers_to_the_bit(ranks, layout):
    ranks(layout.world_size).run(of_torch, layout)


@pytest.mark.parametrize(
    ("dtype", "options"),
    [(torch.bfloat16, {}), (torch.float16, {"momentum": 0.9, "nesterov": True})],
    ids=str,
)
def test_sgd_moves_all_of_16_bits(dtype, options):
    """Torch's fused SGD skips them on the CPU, in whole vectors, and no small tensor shows it."""
    groups, start = mf.make_groups(1), random(0, 1000, dtype=dtype)
    state = mf.init_state(mf.shard({"w": start}, groups), mf.optim.sgd(0.1, **options))
    twin = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.SGD([twin], 0.1, fused=False, foreach=False, **options)
    for step in range(STEPS):
        twin.grad = random(step + 1, 1000, dtype=dtype)
        state = mf.opt_step(state, mf.reduce_grads({"w": twin.grad}, groups))
        optimizer.step()
    same_bits(mf.unshard(state.params, groups), {"w": twin.detach()})


class Keeping(torch.optim.Adam):
    """Keeps one thing more, which is no tensor."""

    def step(self, closure=None):
        super().step()
        for p in self.param_groups[0]["params"]:
            self.state[p]["more"] = 3


@pytest.mark.parametrize(
    ("cls", "how", "text"),
    [
        (torch.optim.LBFGS, {"elementwise": True}, "LBFGS is not known to be elementwise"),
        (SignedDescent, {}, "not known to be elementwise"),
        (Keeping, {"elementwise": True}, "it keeps 'more'"),
    ],
)
def test_a_class_that_cannot_be_used_is_refused(cls, how, text):
    with pytest.raises(mf.errors.PlanError, match=text):
        mf.optim.from_torch(cls, lr=0.1, **how)


# Purity and donation.


def test_donation_reuses_buffers_and_names_what_is_used_again():
    groups = mf.make_groups(1)
    state = mf.init_state(
        mf.shard(values(), groups),
        mf.optim.chain(mf.optim.clip_by_value(0.5), mf.optim.adamw(1e-2)),
    )
    memory = [x.data_ptr() for x in tree.flatten(state.params)[0]]
    kept = state
    for step in range(3):
        grads = mf.reduce_grads(grads_at(step), groups, like=state.params)
        state = mf.opt_step(state, grads, donate=True)
    assert [x.data_ptr() for x in tree.flatten(state.params)[0]] == memory
    fix = "\n  fix: use the value that came back, or pass donate=False"
    pinned = "params.a was donated to opt_step at step 0" + fix
    for use in (
        lambda: mf.gather(kept.params, groups),
        lambda: mf.unshard(kept.params, groups),
        lambda: mf.opt_step(kept, grads),
        lambda: kept.params["a"].data.sum(),
        lambda: torch.func.grad(lambda s: mf.gather(s, groups)["a"].sum())(kept.params),
        lambda: tree.map_leaves(torch.clone, kept.params),
    ):
        with pytest.raises(mf.errors.DonatedError) as caught:
            use()
        assert str(caught.value) == pinned
    assert repr(kept.params["a"]) == "Sharded(params.a was donated to opt_step at step 0)"
    with pytest.raises(mf.errors.DonatedError, match="opt.*exp_avg.*was donated to opt_step at"):
        _ = kept.opt[1].moments["exp_avg"]["a"].data + 1


# Memory that is not a piece's numbers in a row, and not its alone.


def named(name, options):
    cls, given = single_ops(name, options)
    return lambda: mf.optim.from_torch(cls, lr=1e-2, **given)


EVERY = {
    **{name: named(name, options[-1]) for name, options in ELEMENTWISE.items()},
    "foreach": named("RMSprop", {"momentum": 0.9, "foreach": True}),
    "sgd": lambda: mf.optim.sgd(0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adamw": lambda: mf.optim.adamw(0.1, decay_mask=lambda path: "1" not in path),
    "lion": lambda: mf.optim.lion(0.1, weight_decay=0.1, decay_mask=lambda path: "1" not in path),
    "clip_by_value": lambda: mf.optim.chain(mf.optim.clip_by_value(0.5), mf.optim.sgd(0.1)),
    "protocol": lambda: OptaxLike(),
}


def odd_memory(layout, names, kinds):
    groups = groups_of(layout)
    guard = mf.optim.Guard(mf.optim.static_scale(4.0))
    for name in names:
        start = mf.init_state(mf.shard(values(), groups), EVERY[name]())
        grads = mf.reduce_grads(grads_at(0), groups, like=start.params)
        state = mf.opt_step(start, grads)
        for kind in ("columns", "overlapping") if name in ELEMENTWISE else kinds:
            check_odd_gradients(state, in_odd_memory(kind, grads))
            check_odd_state(state, grads, lambda t, kind=kind: in_odd_memory(kind, t))
    for kind in kinds:
        odd = in_odd_memory(kind, grads)
        want: Any = guard.judge(in_own_memory(odd), groups)
        for donate in (False, True):
            got: Any = guard.judge(odd, groups, donate=donate)
            same_bits(got.grads, want.grads)
            assert abs(got.norm - want.norm) <= 120 * 6e-8 * want.norm  # of squares


def check_odd_gradients(state, odd):
    own = in_own_memory(odd)
    want, got = mf.opt_step(state, own), mf.opt_step(state, odd)
    same_bits((got.params, got.opt, odd), (want.params, want.opt, own))


def check_odd_state(state, grads, odd):
    for donate in (False, True):
        there = replace(state, params=odd(state.params), opt=odd(state.opt))
        # all pieces apart, since fused kernels round by place
        want = mf.opt_step(in_own_memory(there), in_own_memory(grads))
        got = mf.opt_step(there, in_own_memory(grads), donate=donate)
        same_bits((got.params, got.opt), (want.params, want.opt))


@pytest.mark.parametrize(
    ("layout", "names"),
    [(Layout((1,), 1), list(EVERY)), (Layout((2,), 2), ["sgd", "lion"])],
    ids=["alone", "parts"],
)
def test_odd_memory_changes_no_bit(ranks, layout, names):
    """Of gradients, parameters and moments: expanded, strided, negated, overlapping."""
    ranks(layout.world_size).run(odd_memory, layout, names, list(ODD_MEMORY))


# Part of a tree: other leaves lie in the same chunks.


def of_parts(layout, shapes, chosen, bucket_bytes, name):
    groups = groups_of(layout)

    def sharded(seed):
        params = {f"p{i:02}": random(seed + i, *s) for i, s in enumerate(shapes)}
        return poison(mf.shard(params, groups, bucket_bytes=bucket_bytes))

    def part(shards):
        return {k: leaf for k, leaf in shards.items() if int(k[1:]) in chosen}

    def check(verb):
        """What a verb gives with donation equals what it gives without; the rest stays."""
        want, _ = verb(part(sharded(0)), False)
        whole = sharded(0)
        got, extra = verb(part(whole), True)
        same_bits(got, want)
        rest = {k: leaf for k, leaf in whole.items() if int(k[1:]) not in chosen}
        same_bits(rest, {k: sharded(0)[k] for k in rest})
        same_bits(extra, sharded(50))

    def steps(mine, donate):
        grads = sharded(50)
        state = mf.init_state(mine, EVERY[name]())
        for _ in range(2):
            state = mf.opt_step(state, part(grads), donate=donate)
        return (state.params, state.opt), grads

    def judged(mine, donate):
        guard = mf.optim.Guard(max_norm=0.1)
        return guard.judge(mine, groups, donate=donate).grads, sharded(50)

    sync = mf.replicas.diloco(1)

    def merged(mine, donate):
        state = sync.init(mine, groups)
        moved = tree.map_leaves(lambda x: x.mul_(1 + dist.get_rank()), mine)
        return sync.after(moved, state, groups, donate=donate), sharded(50)

    for verb in (steps, judged, merged):
        check(verb)


@examples(6, 60)
@given(
    layout=st.sampled_from([Layout((1,), 1), Layout((2,), 1), Layout((2,), 2)]),
    shapes=st.lists(st.lists(st.integers(0, 7), max_size=2).map(tuple), min_size=2, max_size=8),
    bucket_bytes=st.sampled_from([100, 25 * 2**20]),
    name=st.sampled_from(sorted(EVERY)),
    data=st.data(),
)
def test_donating_any_part_leaves_the_rest_alone(ranks, layout, shapes, bucket_bytes, name, data):
    chosen = data.draw(st.sets(st.integers(0, len(shapes) - 1)))
    ranks(layout.world_size).run(of_parts, layout, shapes, chosen, bucket_bytes, name)


# Structure of gradients.


def test_gradients_must_match():
    groups = mf.make_groups(1)
    state = mf.init_state(mf.shard(values(), groups), mf.optim.sgd(0.1))
    full = grads_at(0)
    fewer = {k: v for k, v in full.items() if k != "c"}
    for do, said in (
        (
            lambda: mf.opt_step(state, full),
            "grads.a does not match its parameter\n  expected Shard",
        ),
        (lambda: mf.opt_step(state, mf.reduce_grads(fewer, groups)), "grads.c is missing"),
        (lambda: mf.opt_step(state, mf.shard(full, groups, bucket_bytes=1)), "device or bucket"),
    ):
        with pytest.raises(mf.errors.LeafError, match=said):
            do()


# Anything shaped like optax or torchopt.


class OptaxLike:
    def init(self, params):
        return {k: torch.zeros_like(v) for k, v in params.items()}

    def update(self, updates, state, params=None):
        state = {k: 0.9 * v + updates[k] for k, v in state.items()}
        return {k: -0.1 * v for k, v in state.items()}, state


class TorchoptLike(OptaxLike):
    def update(self, updates, state, *, params=None, inplace=True):
        assert (inplace, params is None) == (False, False)
        return super().update(updates, state, params)


@pytest.mark.parametrize("optimizer", [OptaxLike, TorchoptLike])
def test_accepts_the_protocol(optimizer):
    got = run_sharded(Layout((1,), 1), optimizer)
    want = torch_twin(torch.optim.SGD, {"momentum": 0.9, "foreach": False}, lr=0.1)
    for key, value in got.items():
        torch.testing.assert_close(value, want[key], rtol=1e-6, atol=1e-6)
    limited = lambda: mf.optim.chain(mf.optim.clip_by_value(1e9), optimizer())  # noqa: E731
    same_bits(run_sharded(Layout((1,), 1), limited, donate=True), got)


@pytest.mark.thorough
def test_a_step_does_not_import_the_compiler():
    """torch's optimizer objects do, which takes a second and 80 MB in every process."""
    program = """
import sys, torch, mics_fn as mf
groups = mf.make_groups(1)
makes = [mf.optim.adamw(1e-3), mf.optim.adam(0.1), mf.optim.sgd(0.1, momentum=0.9)]
for optimizer in [*makes, mf.optim.chain(mf.optim.clip_by_global_norm(1.0, groups), makes[0])]:
    state = mf.init_state(mf.shard({"w": torch.ones(3)}, groups), optimizer)
    state = mf.opt_step(state, mf.reduce_grads({"w": torch.ones(3)}, groups), donate=True)
print("torch._dynamo" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("False\n", 0), done.stderr


def test_moments_take_memory_when_a_step_writes_them():
    params = mf.shard({"w": torch.ones(2**24)}, mf.make_groups(1))
    before = memory_bytes(torch.device("cpu")) or 0
    state = mf.init_state(params, mf.optim.adamw(0.1, weight_decay=0.0))
    assert (memory_bytes(torch.device("cpu")) or 0) - before < 2**24
    state = mf.opt_step(state, params, donate=True)
    assert state.params["w"].data.sub(0.9).abs().max() < 1e-6

"""Optimizers over shards: torch's arithmetic to the bit, purity, donation, masks, protocols."""

import inspect
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import (
    ODD_MEMORY,
    Layout,
    full_of,
    groups_of,
    in_odd_memory,
    in_own_memory,
    poison,
    random,
    same_bits,
    unit_roundoff,
)
from covering import examples
from hypothesis import given, settings
from hypothesis import strategies as st

import mics_fn as mf
from mics_fn import tree
from mics_fn.optim.columns import columns
from mics_fn.optim.optimizers import ELEMENTWISE as KNOWN
from mics_fn.optim.optimizers import REFUSED

STEPS = 4
ELEMENTWISE = {
    "SGD": [
        {},
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True},
        {"momentum": 0.8, "dampening": 0.3},
    ],
    "Adam": [{}, {"amsgrad": True, "weight_decay": 0.1}],
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


def torch_twin(cls, options, lr: Any = 1e-2, decayed=lambda name: True):
    params = {k: torch.nn.Parameter(v) for k, v in values().items()}
    kinds = [
        [p for k, p in params.items() if decayed(k)],
        [p for k, p in params.items() if not decayed(k)],
    ]
    parts = [{"params": kinds[0]}, {"params": kinds[1], "weight_decay": 0.0}]
    optimizer = cls(
        [part for part in parts if part["params"]], lr=lr if not callable(lr) else lr(0), **options
    )
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = lr(step) if callable(lr) else lr
        for k, g in grads_at(step).items():
            params[k].grad = g
        optimizer.step()
    return {k: p.detach() for k, p in params.items()}


def run_sharded(layout, make, donate=False):
    groups = groups_of(layout)
    state = mf.init_state(mf.shard(values(), groups), make())
    structure = tree.flatten(state.opt)[1]
    for step in range(STEPS):
        grads = mf.reduce_grads(grads_at(step), groups, like=state.params)
        state = mf.opt_step(state, grads, donate=donate)
        assert tree.flatten(state.opt)[1] == structure, "the state's structure changes"
    return mf.unshard(state.params, groups)


def of_torch(layout, name, options, donate):
    cls = getattr(torch.optim, name)
    single = {"foreach": False} if "foreach" in inspect.signature(cls).parameters else {}
    make = lambda: mf.optim.from_torch(cls, lr=1e-2, **{**options, **single})  # noqa: E731
    same_bits(run_sharded(layout, make, donate), torch_twin(cls, {**options, **single}))


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
@pytest.mark.parametrize("layout", [Layout((1,), 1), Layout((2, 2), 4)], ids=str)
def test_torch_optimizers_to_the_bit(ranks, layout, name, options):
    for donate in (False, True):
        ranks(layout.world_size).run(of_torch, layout, name, options, donate)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", [{}, {"momentum": 0.9, "nesterov": True}], ids=str)
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


@pytest.mark.parametrize("cls", REFUSED)
@pytest.mark.parametrize("elementwise", [False, True])
def test_refuses_by_name_with_the_reason(cls, elementwise):
    text = f"from_torch: {cls.__name__} cannot be used: it "
    with pytest.raises(mf.errors.PlanError, match=text) as caught:
        mf.optim.from_torch(cls, elementwise=elementwise)
    assert "fix: use an elementwise one: SGD" in str(caught.value)


def test_every_torch_optimizer_is_decided():
    classes = {
        cls
        for cls in vars(torch.optim).values()
        if isinstance(cls, type)
        and issubclass(cls, torch.optim.Optimizer)
        and cls is not torch.optim.Optimizer
    }
    assert classes == set(KNOWN) | set(REFUSED)
    assert {cls.__name__ for cls in KNOWN} == set(ELEMENTWISE)


class SignedDescent(torch.optim.SGD):
    """Elementwise, and not of torch: it steps by the sign of what SGD would step by."""

    @torch.no_grad()
    def step(self, closure=None):
        before = [p.clone() for group in self.param_groups for p in group["params"]]
        super().step()
        params = [p for group in self.param_groups for p in group["params"]]
        for p, old in zip(params, before, strict=True):
            p.copy_(old + self.defaults["lr"] * (p - old).sign())


class Keeping(torch.optim.Adam):
    """Adam, which keeps one thing more: what `more` makes of a parameter."""

    more: Any = staticmethod(lambda p: 0)

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["more"] = self.more(p)


def keeping(more):
    return type("Keeping", (Keeping,), {"more": staticmethod(more)})


@pytest.mark.parametrize("layout", [Layout((1,), 1), Layout((2, 2), 4)], ids=str)
def test_a_class_that_is_said_to_be_elementwise_steps_to_the_bit(ranks, layout):
    ranks(layout.world_size).run(of_signed, layout)


def of_signed(layout):
    options = {"momentum": 0.9, "foreach": False}
    make = partial(mf.optim.from_torch, SignedDescent, lr=1e-2, elementwise=True, **options)
    same_bits(run_sharded(layout, make), torch_twin(SignedDescent, options))


@pytest.mark.parametrize(
    ("cls", "how", "text", "fix"),
    [
        (SignedDescent, {}, "not known to be elementwise", "pass elementwise=True"),
        (type("SGD", (torch.optim.SGD,), {}), {}, "not known to be", "pass elementwise=True"),
        (keeping(lambda p: 3), {"elementwise": True}, "it keeps 'more'", "let _init_group"),
        (keeping(lambda p: p[:1]), {"elementwise": True}, "it keeps 'more'", "let _init_group"),
        (keeping(torch.sum), {"elementwise": True}, "its first step makes 'more'", "let _init"),
        (torch.optim.SGD, {"elementwise": 1}, "elementwise=1, expected True or False", ""),
    ],
)
def test_a_class_of_which_nobody_knows_is_refused(cls, how, text, fix):
    with pytest.raises(mf.errors.PlanError, match=text) as caught:
        mf.optim.from_torch(cls, lr=0.1, **how)
    assert fix in str(caught.value)


def test_refuses_bad_arguments_at_once():
    with pytest.raises(mf.errors.PlanError, match="adamw: lr=-1.0, expected"):
        mf.optim.adamw(-1.0)
    with pytest.raises(mf.errors.PlanError, match="there is no option nope="):
        mf.optim.from_torch(torch.optim.SGD, lr=0.1, nope=1)
    with pytest.raises(mf.errors.PlanError, match="SGD is not an optimizer of init and update"):
        mf.init_state({}, torch.optim.SGD([torch.zeros(1)], 0.1))  # pyright: ignore


FUSED = {
    "sgd": (
        lambda lr: mf.optim.sgd(lr, momentum=0.9, nesterov=True),
        torch.optim.SGD,
        {"momentum": 0.9, "nesterov": True},
    ),
    "adam": (mf.optim.adam, torch.optim.Adam, {}),
    "adamw": (
        lambda lr: mf.optim.adamw(lr, weight_decay=0.3),
        torch.optim.AdamW,
        {"weight_decay": 0.3},
    ),
}


def of_fused(layout, name):
    make, cls, options = FUSED[name]
    rate = mf.optim.warmup_cosine(1e-2, 2, STEPS)
    got = run_sharded(layout, lambda: make(rate), donate=True)
    want = torch_twin(cls, {**options, "fused": True}, lr=rate)
    for (
        key,
        value,
    ) in (
        got.items()
    ):  # vector and tail loops of a fused kernel round differently: 4 steps of 8 roundings
        bound = STEPS * 8 * torch.finfo(torch.float32).eps * (want[key].abs() + 0.04)
        assert ((value - want[key]).abs() <= bound).all()


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("layout", [Layout((1,), 1), Layout((2, 2), 2), Layout((2, 2), 4)], ids=str)
def test_fused_ones_and_rates(ranks, layout, name):
    ranks(layout.world_size).run(of_fused, layout, name)


def lion_twin(lr, beta1, beta2, decay):
    params = {k: v.double() for k, v in values().items()}
    means = {k: torch.zeros_like(v) for k, v in params.items()}
    for step in range(STEPS):
        for k, g in grads_at(step).items():
            direction = (beta1 * means[k] + (1 - beta1) * g.double()).sign()
            params[k] = params[k] * (1 - lr * (decay if k != "b" else 0)) - lr * direction
            means[k] = beta2 * means[k] + (1 - beta2) * g.double()
    return params


def of_lion(layout, donate):
    make = lambda: mf.optim.lion(1e-2, weight_decay=0.1, decay_mask=lambda path: "b" not in path)  # noqa: E731
    got, want = run_sharded(layout, make, donate), lion_twin(1e-2, 0.9, 0.99, 0.1)
    for key, value in got.items():
        assert ((value - want[key]).abs() <= STEPS * 4 * 6e-8 * (want[key].abs() + 0.04)).all()


def of_mask(layout):
    make = lambda: mf.optim.from_torch(  # noqa: E731
        torch.optim.AdamW,
        lr=1e-2,
        weight_decay=0.5,
        foreach=False,
        decay_mask=lambda path: path not in ("b", "d"),
    )
    want = torch_twin(
        torch.optim.AdamW,
        {"weight_decay": 0.5, "foreach": False},
        decayed=lambda name: name not in "bd",
    )
    same_bits(run_sharded(layout, make), want)


@pytest.mark.parametrize("layout", [Layout((1,), 1), Layout((2, 2), 4)], ids=str)
def test_lion_and_masks(ranks, layout):
    for donate in (False, True):
        ranks(layout.world_size).run(of_lion, layout, donate)
    ranks(layout.world_size).run(of_mask, layout)


# Purity and donation.


def one_step(donate):
    groups = mf.make_groups(1)
    state = mf.init_state(mf.shard(values(), groups), mf.optim.adamw(1e-2))
    before = tree.map_leaves(torch.clone, state.params)
    grads = mf.reduce_grads(grads_at(0), groups, like=state.params)
    return groups, state, before, grads, mf.opt_step(state, grads, donate=donate)


def test_pure_by_default():
    groups, state, before, grads, after = one_step(False)
    same_bits(state.params, before)
    again = mf.opt_step(state, grads)
    same_bits(again.params, after.params)
    same_bits(mf.unshard(grads, groups), grads_at(0))
    assert (state.step, after.step) == (0, 1)


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
    with pytest.raises(
        mf.errors.DonatedError, match="opt.*exp_avg.*was donated to opt_step at step 0"
    ):
        _ = kept.opt[1].moments["exp_avg"]["a"].data + 1


# Memory that is not a piece's numbers in a row, and not its alone.


def single_ops(name, options):
    """One of torch's, without kernels over lists: those round by place."""
    cls = getattr(torch.optim, name)
    single = {"foreach": False} if "foreach" in inspect.signature(cls).parameters else {}
    return lambda: mf.optim.from_torch(cls, lr=1e-2, **{**options, **single})


EVERY = {
    **{f"{name} {options}": single_ops(name, options) for name, options in CASES},
    "foreach": lambda: mf.optim.from_torch(
        torch.optim.RMSprop, lr=1e-2, momentum=0.9, foreach=True
    ),
    "sgd": lambda: mf.optim.sgd(0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam": lambda: mf.optim.adam(0.1),
    "adamw": lambda: mf.optim.adamw(0.1, decay_mask=lambda path: "1" not in path),
    "lion": lambda: mf.optim.lion(0.1, weight_decay=0.1, decay_mask=lambda path: "1" not in path),
    "clip_by_value": lambda: mf.optim.chain(mf.optim.clip_by_value(0.5), mf.optim.sgd(0.1)),
    "protocol": lambda: OptaxLike(),
}


def odd_memory(layout, names, kinds):
    groups = groups_of(layout)
    guard = mf.optim.Guard(max_value=0.1)
    for name in names:
        start = mf.init_state(mf.shard(values(), groups), EVERY[name]())
        grads = mf.reduce_grads(grads_at(0), groups, like=start.params)
        state = mf.opt_step(start, grads)
        for kind in ("columns", "overlapping") if " " in name else kinds:
            check_odd_gradients(state, in_odd_memory(kind, grads))
            check_odd_state(state, grads, lambda t, kind=kind: in_odd_memory(kind, t))
    for kind in kinds:
        odd = in_odd_memory(kind, grads)
        want = guard.judge(in_own_memory(odd), groups).grads
        exact = torch.cat(
            [x.double().flatten() for x in tree.flatten(mf.unshard(odd, groups))[0]]
        ).norm()
        assert (
            abs(mf.optim.global_norm(odd, groups) - exact) <= 120 * 6e-8 * exact
        )  # as in `clipped`
        same_bits(guard.judge(odd, groups).grads, want)
        same_bits(guard.judge(odd, groups, donate=True).grads, want)


def check_odd_gradients(state, odd):
    own = in_own_memory(odd)
    want = mf.opt_step(state, own)
    got = mf.opt_step(state, odd)
    same_bits((got.params, got.opt), (want.params, want.opt))
    same_bits(odd, own)


def check_odd_state(state, grads, odd):
    for donate in (False, True):
        there = replace(state, params=odd(state.params), opt=odd(state.opt))
        # all pieces apart, since fused kernels round by place
        want = mf.opt_step(in_own_memory(there), in_own_memory(grads))
        got = mf.opt_step(there, in_own_memory(grads), donate=donate)
        same_bits((got.params, got.opt), (want.params, want.opt))


@pytest.mark.parametrize(
    ("layout", "names"),
    [
        (Layout((1,), 1), list(EVERY)),
        (Layout((2,), 1), ["sgd", "adamw", "lion"]),
        (Layout((2,), 2), ["sgd", "adamw", "lion"]),
    ],
    ids=["alone", "replicas", "parts"],
)
def test_odd_memory_changes_no_bit(ranks, layout, names):
    """Of gradients, parameters and moments: expanded, strided, negated, overlapping."""
    ranks(layout.world_size).run(odd_memory, layout, names, list(ODD_MEMORY))


def _by(x):
    """Weights of elements, so that no two count alike."""
    return torch.sin(torch.arange(1.0, x.numel() + 1, dtype=x.dtype)).view(x.shape)


# What one weight (a, b) adds to a loss, such that its gradient is a view of some sort.
TERMS = {
    "sum": lambda w: w.sum(),
    "rows": lambda w: w.sum(0) @ _by(w[0]),
    "mean": lambda w: w.mean(1).square().sum(),
    "expanded": lambda w: (w.unsqueeze(0).expand(3, *w.shape) * 2).sum(),
    "transposed": lambda w: (w.t() @ _by(w)).sum() + (w.t() * _by(w.t())).sum(),
    "permuted": lambda w: (w.t().contiguous() * _by(w.t())).sum(),
    "column": lambda w: (torch.stack([w, 2 * w.detach()], 2) * _by(w.new_empty(*w.shape, 2))).sum(),
    "real": lambda w: (torch.view_as_real(torch.complex(w, w.detach())) * 3).sum(),
    "imaginary": lambda w: (torch.complex(w.detach(), w).conj() * 1j).real.sum(),
    "parts": lambda w: sum(i * x.sum() for i, x in enumerate(w.flatten().split(3))),
    "diagonal": lambda w: w.diagonal().sum() + w[0, 0] ** 2,
    "window": lambda w: (w.flatten().unfold(0, 1, 1) * 5).sum(),
    "matrix": lambda w: (_by(w.t()) @ w).square().sum() / w.numel(),
    "unused": lambda w: w.new_zeros(()),
}
WITH_TORCH = {
    "sgd": (mf.optim.sgd, torch.optim.SGD, {}),
    "momentum": (mf.optim.sgd, torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
    "adam": (mf.optim.adam, torch.optim.Adam, {"eps": 1e-2}),
    "adamw": (mf.optim.adamw, torch.optim.AdamW, {"eps": 1e-2}),
    "rmsprop": (
        lambda lr, **options: mf.optim.from_torch(torch.optim.RMSprop, lr=lr, **options),
        torch.optim.RMSprop,
        {"eps": 1e-2},
    ),
}


def trained_by_torch(weights, loss_of, name):
    _, cls, options = WITH_TORCH[name]
    twin = [w.clone().requires_grad_() for w in weights]
    optimizer = cls(twin, lr=0.05, foreach=False, **options)
    for _ in range(STEPS):
        grads = torch.autograd.grad(loss_of(twin), twin, allow_unused=True)
        for w, g in zip(twin, grads, strict=True):
            w.grad = torch.zeros_like(w) if g is None else g
        optimizer.step()
    return [w.detach() for w in twin]


def trained_alone(weights, loss_of, name, schedule, donate):
    groups, (make, _, options) = mf.make_groups(1), WITH_TORCH[name]
    state = mf.init_state(mf.shard(weights, groups), make(0.05, **options))
    for _ in range(STEPS):
        grads = torch.func.grad(lambda s: loss_of(full_of(s, groups, schedule)))(state.params)
        state = mf.opt_step(state, mf.reduce_grads(grads, groups), donate=donate)
    return mf.unshard(state.params, groups)


@settings(max_examples=25)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4)), min_size=1, max_size=4),
    name=st.sampled_from(sorted(WITH_TORCH)),
    schedule=st.sampled_from([None, mf.keep_all()]),
    flags=st.tuples(st.booleans(), st.booleans()),
    data=st.data(),
)
def test_random_models_on_one_rank_equal_torch(shapes, name, schedule, flags, data):
    """Their gradients are views of all sorts, which torch's own plain optimizers take as they are.

    As in `test_zoo` the bound is measured: how far a relative error of 100 roundings at the start
    carries in the twin.
    """
    some = st.lists(st.sampled_from(sorted(TERMS)), min_size=1, max_size=3)
    terms, (shared, donate) = [data.draw(some) for _ in shapes], flags
    shapes = [*shapes, (2, 3), (2, 3)]
    weights = [random(i, *s, dtype=torch.float64) for i, s in enumerate(shapes)]

    def loss_of(full):
        total = sum(TERMS[t](w) for w, mine in zip(full, terms, strict=False) for t in mine)
        if shared:  # two weights get one tensor as their gradient
            return total + (full[-2] + full[-1]).tanh().sum()
        return total + full[-1].square().sum()

    error = 100 * unit_roundoff(torch.float64)
    off = [w * (1 + error * random(9, *w.shape, dtype=w.dtype).sign()) for w in weights]
    got = trained_alone(weights, loss_of, name, schedule, donate)
    want, shifted = (trained_by_torch(start, loss_of, name) for start in (weights, off))
    carried = max((a - b).abs().max() for a, b in zip(want, shifted, strict=True))
    size = max(w.abs().max() for w in want)
    for a, b in zip(got, want, strict=True):
        assert (a - b).abs().max() <= carried + error * size


# Part of a tree: other leaves lie in the same chunks.


def of_parts(layout, shapes, chosen, bucket_bytes, name):
    groups = groups_of(layout)

    def sharded(seed):
        params = {f"p{i:02}": random(seed + i, *s) for i, s in enumerate(shapes)}
        return poison(mf.shard(params, groups, bucket_bytes=bucket_bytes))

    def part(shards):
        return {k: leaf for k, leaf in shards.items() if int(k[1:]) in chosen}

    def check(verb, seed=0):
        """What a verb gives with donation equals what it gives without; the rest stays."""
        want, _ = verb(part(sharded(seed)), False)
        whole = sharded(seed)
        got, extra = verb(part(whole), True)
        same_bits(got, want)
        rest = {k: leaf for k, leaf in whole.items() if int(k[1:]) not in chosen}
        same_bits(rest, {k: sharded(seed)[k] for k in rest})
        same_bits(extra, sharded(50))

    def steps(mine, donate):
        grads = sharded(50)
        state = mf.init_state(mine, EVERY[name]())
        for _ in range(2):
            state = mf.opt_step(state, part(grads), donate=donate)
        return (state.params, state.opt), grads

    def judged(mine, donate):
        guard = mf.optim.Guard(max_norm=0.1, max_value=0.05)
        return guard.judge(mine, groups, donate=donate).grads, sharded(50)

    def synced(mine, donate):
        return mf.sync_replicas(mine, groups, donate=donate), sharded(50)

    def merged(sync, mine, donate):
        state = sync.init(mine, groups)
        moved = tree.map_leaves(lambda x: x.mul_(1 + dist.get_rank()), mine)
        return sync.after(moved, state, groups, donate=donate), sharded(50)

    for verb in (steps, judged, synced, partial(merged, mf.replicas.local_sgd(1))):
        check(verb)
    check(partial(merged, mf.replicas.diloco(1)))


def test_part_of_a_bucket_leaves_the_rest_alone(ranks):
    """Two optimizers on the parts of one tree, p = 2."""
    ranks(2).run(actor_and_critic)


def actor_and_critic():
    groups = groups_of(Layout((2,), 2))
    shards = mf.shard({"actor": torch.ones(40), "critic": torch.ones(7)}, groups)
    parts = [{"actor": shards["actor"]}, {"critic": shards["critic"]}]
    states = [
        mf.init_state(part, mf.optim.sgd(lr)) for part, lr in zip(parts, (0.2, 0.3), strict=True)
    ]
    grads = mf.reduce_grads({"actor": torch.ones(40), "critic": torch.ones(7)}, groups)
    for i, key in ((0, "actor"), (1, "critic")):
        states[i] = mf.opt_step(states[i], {key: grads[key]}, donate=True)
    for state, key, want in zip(states, ("actor", "critic"), (0.8, 0.7), strict=True):
        value = mf.unshard(state.params, groups)[key]
        assert torch.allclose(value, torch.full_like(value, want))


@examples(15, 60)
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


def copies_of_parts(layout):
    shards = mf.shard({f"p{i}": random(i, 300) for i in range(4)}, groups_of(layout))
    some = {k: shards[k] for k in ("p0", "p1", "p3")}
    for held, columned in ((shards, 1), (some, 2)):
        state = mf.init_state(held, mf.optim.adam(0.1))
        grads = tree.map_leaves(torch.ones_like, held)
        for each in (state.opt.moments["exp_avg"], mf.opt_step(state, grads).params):
            pieces = [x for x in tree.flatten(each)[0] if x.numel()]
            stores = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in pieces}
            assert sum(stores.values()) == sum(x.nbytes for x in pieces), "the rest is kept"
        if layout.partition_size == 1:
            work = columns([held], [state.opt.moments["exp_avg"]], donate=True)
            assert sum(map(len, work.blocks)) == columned


@pytest.mark.parametrize("layout", [Layout((1,), 1), Layout((2,), 2)], ids=str)
def test_columns_are_as_long_as_what_the_tree_holds(ranks, layout):
    """And copies hold no more than that."""
    ranks(layout.world_size).run(copies_of_parts, layout)


def test_gradients_may_lie_in_the_memory_that_is_written_to():
    groups = mf.make_groups(1)
    for make in EVERY.values():
        want, got = (mf.init_state(mf.shard(values(), groups), make()) for _ in range(2))
        for _ in range(2):
            want = mf.opt_step(want, in_own_memory(want.params))
            got = mf.opt_step(got, mf.reduce_grads(got.params, groups), donate=True)
        for a, b in zip(tree.flatten(got.params)[0], tree.flatten(want.params)[0], strict=True):
            assert torch.allclose(a, b, rtol=1e-6, atol=1e-6)  # fused kernels round by place


# Structure of gradients.


def test_gradients_must_match():
    groups = mf.make_groups(1)
    state = mf.init_state(mf.shard(values(), groups), mf.optim.sgd(0.1))
    full = grads_at(0)
    with pytest.raises(mf.errors.LeafError) as caught:
        mf.opt_step(state, full)
    assert str(caught.value) == (
        "opt_step: grads.a does not match its parameter\n"
        "  expected Sharded(shape=(5, 3), float32, here 15 of 15)\n"
        "  got Tensor\n"
        "  fix: do both hops first: reduce_grads(grads, groups, like=state.params)"
    )
    fewer = {k: v for k, v in full.items() if k != "c"}
    with pytest.raises(mf.errors.LeafError) as caught:
        mf.opt_step(state, mf.reduce_grads(fewer, groups))
    assert str(caught.value) == (
        "opt_step: the gradients' tree differs from the parameters'\n"
        "  grads.c is missing\n"
        "  fix: differentiate with respect to state.params"
    )
    with pytest.raises(mf.errors.LeafError) as caught:
        mf.reduce_grads(fewer, groups, like=state.params)
    assert "first difference: grads.c is missing" in str(caught.value)
    other = mf.shard(full, groups, bucket_bytes=1)
    with pytest.raises(
        mf.errors.LeafError, match="it lies at 0 of bucket .*, the parameter at"
    ) as caught:
        mf.opt_step(state, other)
    assert "fix: pass like=state.params to reduce_grads" in str(caught.value)


# Clipping.


def clipped(layout, max_norm):
    groups = groups_of(layout)
    shared = random(1, 4, 4)
    params = {
        "a": random(0, 101),
        "tied": [shared, shared],
        "frozen": torch.nn.Parameter(random(2, 9) * 100, requires_grad=False),
        "n": torch.tensor(1000),
        "empty": torch.zeros(0),
    }
    shards = mf.shard(params, groups)
    full = {
        **params,
        "a": params["a"] * (1 + dist.get_rank()),
        "tied": [shared, shared * 2],
        "n": None,
    }
    full["frozen"] = None
    grads = mf.reduce_grads(full, groups, like=shards)
    n = layout.world_size
    exact = torch.cat([params["a"].double() * (n + 1) / 2, shared.flatten().double() * 3]).norm()
    norm = mf.optim.global_norm(grads, groups)
    # rounding of the mean (n terms) and of the norm (about 120 squares, in float32)
    assert abs(norm - exact) <= (n + 120) * 6e-8 * exact
    state = mf.init_state(
        shards, mf.optim.chain(mf.optim.clip_by_global_norm(max_norm, groups), mf.optim.sgd(1.0))
    )
    moved = mf.unshard(mf.opt_step(state, grads).params, groups)
    want = params["a"].double() - params["a"].double() * (n + 1) / 2 * min(1.0, max_norm / exact)
    assert (moved["a"] - want).abs().max() <= 1e-5 * max(1.0, float(want.abs().max()))
    assert torch.equal(moved["tied"][0], moved["tied"][1])
    assert torch.equal(moved["frozen"], params["frozen"].detach())
    return norm


@pytest.mark.parametrize(
    "layout", [Layout((1,), 1), Layout((2, 2), 2), Layout((2, 2, 2), 8)], ids=str
)
@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_clip_by_global_norm_counts_once(ranks, layout, max_norm):
    found = ranks(layout.world_size).run(clipped, layout, max_norm)
    assert all(torch.equal(norm, found[0]) for norm in found), "ranks would scale differently"


def test_clip_by_value():
    groups = mf.make_groups(1)
    state = mf.init_state(
        mf.shard({"w": torch.zeros(3)}, groups),
        mf.optim.chain(mf.optim.clip_by_value(0.5), mf.optim.sgd(1.0)),
    )
    grads = mf.reduce_grads({"w": torch.tensor([-3.0, 0.25, 9.0])}, groups)
    assert mf.opt_step(state, grads).params["w"].data.tolist() == [0.5, -0.25, -0.5]
    for bad in (
        lambda: mf.optim.clip_by_value(0),
        lambda: mf.optim.clip_by_global_norm(-1.0, groups),
        mf.optim.chain,
    ):
        with pytest.raises(mf.errors.PlanError):
            bad()


# Anything shaped like optax or torchopt.


class OptaxLike:
    def init(self, params):
        return {k: torch.zeros_like(v) for k, v in params.items()}

    def update(self, updates, state, params=None):
        state = {k: 0.9 * v + updates[k] for k, v in state.items()}
        return {k: -0.1 * v for k, v in state.items()}, state


class TorchoptLike(OptaxLike):
    def update(self, updates, state, *, params=None, inplace=True):
        assert not inplace
        assert params is not None
        return super().update(updates, state, params)


@pytest.mark.parametrize("optimizer", [OptaxLike, TorchoptLike])
def test_accepts_the_protocol(optimizer):
    got = run_sharded(Layout((1,), 1), optimizer)
    want = torch_twin(torch.optim.SGD, {"momentum": 0.9, "foreach": False}, lr=0.1)
    for key, value in got.items():
        assert torch.allclose(value, want[key], rtol=1e-6, atol=1e-6)
    chained = run_sharded(
        Layout((1,), 1),
        lambda: mf.optim.chain(mf.optim.clip_by_value(1e9), optimizer()),
        donate=True,
    )
    same_bits(chained, got)


@given(step=st.integers(0, 200), warmup=st.integers(1, 50), total=st.integers(51, 150))
def test_warmup_cosine_stays_between_floor_and_peak(step, warmup, total):
    lr = mf.optim.warmup_cosine(2.0, warmup, total, floor=0.25)
    assert 0 < lr(step) <= 2.0
    assert lr(warmup - 1) == 2.0
    assert lr(max(total, step)) == pytest.approx(0.25) or step < total

"""Derivatives through `opt_step`: inner loops against the same written out in plain torch, float64.

The twin knows all ranks' batches and nothing of shards. Optimizers have a large `eps`, since the
slope of Adam's step goes as 1/eps where a gradient is small.
"""

import pytest
import torch
import torch.distributed as dist
from cases import Layout, everywhere, groups_of, random
from torch import Tensor
from torch.func import vmap

import mics_fn as mf
from mics_fn import tree

STEPS, EPS = 3, 0.1
TOLERANCE = 1e5 * torch.finfo(torch.float64).eps  # some thousand terms, slopes of at most 1/EPS
OPTIMIZERS = {
    "sgd": lambda lr: mf.optim.sgd(lr),
    "momentum": lambda lr: mf.optim.sgd(lr, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam": lambda lr: mf.optim.adam(lr, eps=EPS, weight_decay=0.1),
    "adamw": lambda lr: mf.optim.adamw(
        lr, eps=EPS, weight_decay=0.1, decay_mask=lambda path: "a" in path
    ),
    "lion": lambda lr: mf.optim.lion(lr, weight_decay=0.1, decay_mask=lambda path: "a" in path),
    "clipped": lambda lr: mf.optim.chain(mf.optim.clip_by_value(0.2), mf.optim.sgd(lr)),
    "by path": lambda lr: mf.optim.by_path({"*": mf.optim.sgd(lr)}),
    "one's own": lambda lr: mf.optim.from_update(
        lambda p: (), lambda g, s, p: (mf.shards.map(lambda x: -lr * x, g), s)
    ),
}
Values = dict[str, Tensor]


def by_hand(name: str, step: int, w: Tensor, g: Tensor, m: Tensor, v: Tensor, lr: Tensor, key: str):
    """One step of each optimizer: the next (w, m, v)."""
    if name in ("sgd", "by path", "one's own"):
        return w - lr * g, m, v
    if name == "clipped":
        return w - lr * g.clamp(-0.2, 0.2), m, v
    if name == "momentum":
        g = g + 0.1 * w
        m = 0.9 * m + g
        return w - lr * (g + 0.9 * m), m, v
    if name == "lion":
        sign = (0.9 * m + 0.1 * g).sign()
        return w * (1 - lr * 0.1 * (key == "a")) - lr * sign, 0.99 * m + 0.01 * g, v
    g = g + 0.1 * w if name == "adam" else g
    w = w * (1 - lr * 0.1) if name == "adamw" and key == "a" else w
    m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
    top, bottom = m / (1 - 0.9 ** (step + 1)), (v / (1 - 0.999 ** (step + 1))).sqrt()
    return w - lr * top / (bottom + EPS), m, v


def start() -> Values:
    return {"a": random(1, 3, 5, dtype=torch.float64), "b": random(2, 5, dtype=torch.float64)}


def loss_of(params: Values, seed: int) -> Tensor:
    x, y = random(seed, 4, 3, dtype=torch.float64), random(seed + 1, 4, dtype=torch.float64)
    return (torch.tanh(x @ params["a"]) @ params["b"] - y).square().mean()


def everyones(params: Values, seed: int, ranks: int) -> Tensor:
    return torch.stack([loss_of(params, seed + 10 * rank) for rank in range(ranks)]).mean()


def twin(name: str, ranks: int, rate: float) -> tuple[Values, list[Tensor]]:
    """The parameters after the inner loop; the outer loss by where it began, and by the rate."""
    first = {k: w.requires_grad_() for k, w in start().items()}
    lr = torch.tensor(rate, dtype=torch.float64, requires_grad=True)
    params: Values = dict(first)
    kept = {k: (torch.zeros_like(w), torch.zeros_like(w)) for k, w in params.items()}
    for step in range(STEPS):
        loss = everyones(params, 100 * step, ranks)
        grads = torch.autograd.grad(loss, list(params.values()), create_graph=True)
        for (k, w), g in zip(list(params.items()), grads, strict=True):
            params[k], m, v = by_hand(name, step, w, g, *kept[k], lr, k)
            kept[k] = (m, v)
    found = torch.autograd.grad(everyones(params, 900, ranks), [*first.values(), lr])
    return {k: w.detach() for k, w in params.items()}, list(found)


def inner_loop(shards, lr, name, groups, slopes):
    """The parameters after it, by the verbs."""
    state = mf.init_state(shards, OPTIMIZERS[name](lr))
    for step in range(STEPS):
        seed = 100 * step + 10 * dist.get_rank()
        grads = slopes(lambda s, seed=seed: loss_of(mf.gather(s, groups), seed), state.params)
        state = mf.opt_step(state, mf.reduce_grads(grads, groups))
    return state.params


def by_autograd(loss, shards):
    pieces, spec = tree.flatten(shards)
    return spec.unflatten(torch.autograd.grad(loss(shards), pieces, create_graph=True))


def by_func(loss, shards):
    return torch.func.grad(loss)(shards)


def unrolled(layout, name):
    groups, rate = groups_of(layout), 0.05
    n, p, seed = layout.world_size, layout.partition_size, 900 + 10 * dist.get_rank()
    want, (by_a, by_b, by_rate) = twin(name, n, rate)
    shards, lr = mf.shard(start(), groups), torch.tensor(rate, dtype=torch.float64)

    def outer(shards, lr, slopes):
        params = inner_loop(shards, lr, name, groups, slopes)
        return loss_of(mf.gather(params, groups), seed), params

    pieces, spec = tree.flatten(shards)
    variables, rate_too = [x.clone().requires_grad_() for x in pieces], lr.clone().requires_grad_()
    loss, params = outer(spec.unflatten(variables), rate_too, by_autograd)
    *classic, classic_rate = torch.autograd.grad(loss, [*variables, rate_too])
    (func, func_rate), same = torch.func.grad(
        lambda s, lr: outer(s, lr, by_func), argnums=(0, 1), has_aux=True
    )(shards, lr)
    for found in (params, same):
        close(mf.unshard(tree.map_leaves(Tensor.detach, found), groups), want)
    for grads, slope in ((spec.unflatten(classic), classic_rate), (func, func_rate)):
        close(mf.unshard(mf.reduce_grads(grads, groups), groups), {"a": by_a, "b": by_b})
        # a rank's is that of its shards: a sum over the partition group, a mean over replicas
        close({"lr": sum(everywhere(slope, n)) / (n // p)}, {"lr": by_rate})


def close(got: Values, want: Values) -> None:
    for key, value in want.items():
        assert value.abs().max() > 0, "a twin of zeros proves nothing"
        assert (got[key] - value).abs().max() <= TOLERANCE * max(1.0, float(value.abs().max())), key


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("layout", [Layout((2,), 2), Layout((2,), 1)], ids=str)
@pytest.mark.covering
def test_unrolled_inner_loops(ranks, layout, name):
    ranks(layout.world_size).run(unrolled, layout, name)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_ensembles_under_vmap(name):
    """Members that differ in parameters and gradients, or in gradients only."""
    groups, optimizer = mf.make_groups(1), OPTIMIZERS[name](0.05)
    members, grads = (
        [mf.shard({"a": random(i, 3, 2), "b": random(9 + i, 4)}, groups) for i in range(n, n + 3)]
        for n in (0, 20)
    )

    def stacked(shards):
        return tree.map_leaves(lambda *x: torch.stack(x), *shards)

    def two_steps(params, grads):
        state = mf.opt_step(mf.init_state(params, optimizer), grads)
        return mf.opt_step(state, grads).params

    for starts, dim in ((members, 0), (members[:1] * 3, None)):
        given = stacked(starts) if dim == 0 else starts[0]
        got = vmap(two_steps, in_dims=(dim, 0))(given, stacked(grads))
        want = stacked([two_steps(*each) for each in zip(starts, grads, strict=True)])
        for a, b in zip(tree.flatten(got)[0], tree.flatten(want)[0], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_what_has_no_derivative_says_so():
    groups = mf.make_groups(1)
    shards = mf.shard({"w": torch.ones(3)}, groups)
    live = tree.map_leaves(lambda x: x.clone().requires_grad_(), shards)
    with pytest.raises(mf.errors.PlanError, match="donate=True where a derivative is asked for"):
        mf.opt_step(mf.init_state(shards, mf.optim.sgd(0.1)), live, donate=True)
    state = mf.init_state(shards, mf.optim.sgd(torch.tensor(0.1, requires_grad=True)))
    with pytest.raises(mf.errors.PlanError, match="fix: pass donate=False, or call it under"):
        mf.opt_step(state, shards, donate=True)
    with torch.no_grad():
        mf.opt_step(state, shards)
    optimizer = mf.optim.from_torch(torch.optim.RMSprop, lr=0.1)
    state = mf.init_state(shards, optimizer)
    with pytest.raises(mf.errors.PlanError, match=r"from_torch\(RMSprop\) has no derivative"):
        mf.opt_step(state, live)
    with torch.no_grad():
        mf.opt_step(state, live)

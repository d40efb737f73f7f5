"""torch.func through `gather`: each transform equals the unsharded result, on real gloo ranks.

The unsharded twin runs on each rank in float64: its own data, then the mean over ranks by a plain
all-reduce.
"""

import pytest
import torch
import torch.distributed as dist
from cases import LAYOUTS, everywhere, full_of, groups_of, random, small_first
from torch.func import grad, grad_and_value, jacrev, jvp, vjp, vmap

import mics_fn as mf
from mics_fn import tree
from mics_fn.shards.precision import precision_of

# What `test_mixed` changes: what gather casts to, the unsharded twin casts to as well.
PRECISION: str | None = None
TOLERANCE = 64 * torch.finfo(torch.float64).eps  # relative; sums of some hundred terms of order one


def make_params():
    shared = random(5, 4, 4, dtype=torch.float64)
    return {
        "in": {"w": random(1, 4, 3, dtype=torch.float64), "b": random(2, 4, dtype=torch.float64)},
        "mid": [shared, shared],
        "out": random(3, 4, dtype=torch.float64),
        "scale": random(4, dtype=torch.float64),
        "unused": random(6, 7, dtype=torch.float64),
        "none": None,
        "steps": torch.tensor(3),
    }


def cut(params, groups, **options):
    return mf.shard(params, groups, precision=PRECISION, **options)


def cast(params):
    return tree.map_leaves(
        lambda x: x.to(precision_of(PRECISION).formats("", x.dtype).compute), params
    )


def loss_of(params, batch):
    x, y = (each.to(params["in"]["w"].dtype) for each in batch)
    h = torch.tanh(x @ params["in"]["w"].T + params["in"]["b"])
    for w in params["mid"]:
        h = torch.tanh(h @ w)
    return ((h @ params["out"]) * params["scale"] - y).square().mean()


def untied(params):
    """The tree as torch.func can differentiate it: floats only, the tied leaf once."""
    leaves = {k: params[k] for k in ("in", "out", "scale", "unused")}
    return {**leaves, "mid": params["mid"][0]}


def plain_loss(leaves, batch):
    leaves = cast(leaves)
    return loss_of({**leaves, "mid": [leaves["mid"]] * 2}, batch)


def batch_of(rank, size=6):
    return random(50 + rank, size, 3, dtype=torch.float64), random(
        90 + rank, size, dtype=torch.float64
    )


def mean(value):
    return tree.map_leaves(
        lambda x: sum(everywhere(x, dist.get_world_size())) / dist.get_world_size(), value
    )


def close(got, want):
    leaves_a, leaves_b = tree.flatten(got)[0], tree.flatten(want)[0]
    assert len(leaves_a) == len(leaves_b) > 0
    for a, b in zip(leaves_a, leaves_b, strict=True):
        assert a.shape == b.shape
        assert (
            (a - b).abs().max() <= TOLERANCE * max(1.0, float(b.abs().max())) if a.numel() else True
        )
    nonzero = [name for name, b in zip(range(99), leaves_b, strict=False) if b.abs().sum() > 0]
    assert len(nonzero) >= len(leaves_b) - 1, "a twin of zeros proves nothing"


def policy(live):
    """None: gathered at once; else deferred, all kept or under a budget of so many bytes."""
    if live == "keep":
        return mf.keep_all()
    return None if live is None else mf.on_demand(live_bytes=live)


def setting(layout, live=None):
    groups = groups_of(layout)
    params = make_params()
    shards = cut(params, groups, bucket_bytes=150)
    schedule = policy(live)

    def sharded_loss(s, batch):
        return loss_of(full_of(s, groups.hierarchy, schedule), batch)

    def full(grads):
        return untied(mf.unshard(mf.reduce_grads(grads, groups), groups))

    return groups, untied(params), shards, sharded_loss, full


def reverse_mode(layout, live):
    _, params, shards, loss, full = setting(layout, live)
    batch = batch_of(dist.get_rank())
    want = mean(grad(plain_loss)(params, batch))
    close(full(grad(loss)(shards, batch)), want)
    grads, value = grad_and_value(loss)(shards, batch)
    close(full(grads), want)
    close(value, plain_loss(params, batch))
    value, pull = vjp(lambda s: loss(s, batch), shards)  # pyright: ignore
    (pulled,) = pull(torch.ones_like(value) * 4)  # exact whatever rounds
    close(full(pulled), tree.map_leaves(lambda x: 4 * x, want))
    leaves, spec = tree.flatten(shards)
    variables = [x.detach().requires_grad_() for x in leaves]
    value = loss(spec.unflatten(variables), batch)
    found = torch.autograd.grad(value, variables, materialize_grads=True)
    close(full(spec.unflatten(found)), want)


def forward_mode(layout, live):
    _, params, shards, loss, _ = setting(layout, live)
    batch = batch_of(dist.get_rank())
    pieces = tree.flatten(shards)[1]
    tangent = tree.map_leaves(lambda x: x.cos(), shards)
    assert tree.flatten(tangent)[1] == pieces
    value, out = jvp(lambda s: loss(s, batch), (shards,), (tangent,))  # pyright: ignore
    want = jvp(lambda p: plain_loss(p, batch), (params,), (tree.map_leaves(torch.cos, params),))
    close([value, out], list(want))


def per_sample(layout, live):
    _, params, shards, loss, full = setting(layout, live)
    x, y = batch_of(dist.get_rank(), 5)
    batch = (x.unsqueeze(1), y.unsqueeze(1))
    want = mean(vmap(grad(plain_loss), in_dims=(None, 0))(params, batch))
    got = vmap(grad(loss), in_dims=(None, 0))(shards, batch)
    close(full(got), want)
    nested = (x[:4].view(2, 2, 1, 3), y[:4].view(2, 2, 1))
    want = mean(vmap(vmap(grad(plain_loss), in_dims=(None, 0)), in_dims=(None, 0))(params, nested))
    got = vmap(vmap(grad(loss), in_dims=(None, 0)), in_dims=(None, 0))(shards, nested)
    close(full(got), want)


def over_shards(layout, live):
    """vmap over a batch of whole models: the gather itself is batched."""
    groups, params, shards, loss, _ = setting(layout, live)
    batch = batch_of(dist.get_rank())
    models = tree.map_leaves(lambda x: torch.stack([x, x.sin(), x * 2]), shards)
    want = vmap(plain_loss, in_dims=(0, None))(
        tree.map_leaves(lambda x: torch.stack([x, x.sin(), x * 2]), params), batch
    )
    if live is not None:  # a schedule fetches one model at a time
        with pytest.raises(mf.errors.LeafError, match="shards are batched by vmap"):
            vmap(loss, in_dims=(0, None))(models, batch)
        return
    close(vmap(loss, in_dims=(0, None))(models, batch), want)


def jacobian(layout, live):
    _, params, shards, _, full = setting(layout, live)
    groups = groups_of(layout)
    x, _ = batch_of(dist.get_rank(), 3)

    def outputs(p):
        return torch.tanh(x.to(p["out"].dtype) @ p["in"]["w"].T) @ p["out"]

    schedule = policy(live)
    got = jacrev(lambda s: outputs(full_of(s, groups.hierarchy, schedule)))(shards)
    want = mean(jacrev(lambda p: outputs(cast(p)))(params))
    got, want = full(got), want
    close([got["in"]["w"], got["out"]], [want["in"]["w"], want["out"]])


def second_order(layout, live):
    groups, params, shards, loss, full = setting(layout, live)
    batch = batch_of(dist.get_rank())
    v = tree.map_leaves(torch.cos, params)
    v_shards = tree.map_leaves(torch.cos, shards)

    def dot(a, b):
        pairs = zip(tree.flatten(a)[0], tree.flatten(b)[0], strict=True)
        return sum((x * y).sum() for x, y in pairs)

    def plain_grad(p):
        return grad(plain_loss)(p, batch)

    want = mean(grad(lambda p: dot(plain_grad(p), v))(params))
    close(full(grad(lambda s: dot(grad(loss)(s, batch), v_shards))(shards)), want)
    *_, loss, _ = setting(layout, live)  # another program, so another memory of its order
    forward_over_reverse = jvp(lambda s: grad(loss)(s, batch), (shards,), (v_shards,))[1]
    close(full(forward_over_reverse), mean(jvp(plain_grad, (params,), (v,))[1]))

    *_, loss, _ = setting(layout, live)

    def synced(s):  # through hop 2 as well: it must not be a silent zero either
        return dot(mf.reduce_grads(grad(loss)(s, batch), groups), v_shards)

    close(full(grad(synced)(shards)), want)


def used_on_some_ranks(layout, live):
    """Every rank reduces every bucket, also those that its own loss does not touch."""
    groups = groups_of(layout)
    rank, n = dist.get_rank(), layout.world_size
    params = {"a": random(0, 5, dtype=torch.float64), "b": random(1, 6, dtype=torch.float64)}

    def loss(p, rank):
        return p["a"].square().sum() + (p["b"].pow(3).sum() if rank % 2 == 0 else 0)

    # Deferred, a bucket is fetched by all ranks or by none, so here both lie in one.
    shards = cut(params, groups, bucket_bytes=1 if live is None else 1000)
    schedule = policy(live)
    full = lambda s: full_of(s, groups, schedule)  # noqa: E731
    got = mf.reduce_grads(grad(lambda s: loss(full(s), rank))(shards), groups)
    each = [grad(lambda p, r: loss(cast(p), r))(params, r) for r in range(n)]
    close(mf.unshard(got, groups), {k: sum(g[k] for g in each) / n for k in params})


PROGRAMS = [
    reverse_mode,
    forward_mode,
    per_sample,
    over_shards,
    jacobian,
    second_order,
    used_on_some_ranks,
]


@pytest.mark.parametrize("layout", small_first(LAYOUTS))
@pytest.mark.parametrize("live", [None, 0, 300, "keep"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
@pytest.mark.covering
def test_equals_the_unsharded_result(ranks, layout, program, live):
    ranks(layout.world_size).run(program, layout, live)

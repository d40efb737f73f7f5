"""Every public name that computes on tensors is differentiated correctly, or refuses by name.

A program is a loss of shards that goes through a verb; its twin is the same of full parameters on
one process. Each runs under every transform of torch.func and under plain autograd.
"""

import inspect
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from cases import Layout, everywhere, full_of, groups_of, random
from test_api import public_names
from torch import nn
from torch.autograd import forward_ad as fwAD  # noqa: N812
from torch.func import grad, grad_and_value, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap

import mics_fn as mf
from mics_fn import tree

ALONE, PAIR, COPIES = Layout((1,), 1), Layout((2,), 2), Layout((2,), 1)
BOTH = Layout((2, 2), 2)  # two replicas of two ranks
TOLERANCE = 64 * torch.finfo(torch.float64).eps  # relative; sums of some dozen terms of order one


def make_params():
    shared = random(3, 3, 2, dtype=torch.float64)
    return {
        "a": random(1, 5, dtype=torch.float64),
        "none": None,
        "still": nn.Parameter(random(2, 3, dtype=torch.float64), requires_grad=False),
        "steps": torch.tensor(3),
        "tied": [shared, shared],
        "zero": torch.zeros(4, dtype=torch.float64),
    }


def loss_of(full: Any, rank: int) -> Any:
    """Another function on each rank; every trained leaf counts, at every order."""
    w = full["tied"][0]
    scale = (rank + 1) * full["still"].sum().detach() * full["steps"]
    both = (w * full["tied"][1]).sin().sum() + (w.t() @ full["a"][:3]).square().sum()
    halves = torch.full((4,), 0.5, dtype=torch.float64, device=full["zero"].device)  # a constant
    zero = full["zero"] * halves
    return scale * (both + full["a"].pow(3).sum() + zero.exp().sum())


class Program(NamedTuple):
    """A loss of shards through a verb, and what it is of full parameters."""

    sharded: Callable[[Any, "Place"], Any]
    plain: Callable[[Any, "Place"], Any]
    # What sends counts of this rank's own makes one model, but no stack of models.
    over_models: bool = True


class Place(NamedTuple):
    """Where a program runs."""

    groups: mf.Groups
    like: Any  # the shards
    schedule: Any = None  # one for all transforms, which use parameters in different orders

    @property
    def rank(self) -> int:
        return dist.get_rank() if dist.is_initialized() else 0

    @property
    def peers(self) -> list[int]:
        """The ranks of this one's partition group."""
        p = self.groups.partition_size
        return [r for r in range(self.groups.world_size) if r // p == self.rank // p]


def weight(rank: int) -> float:
    return 1.0 + rank / 4


def weighted(full: Any, factor: float) -> Any:
    return tree.map_leaves(lambda x: x * factor if x.is_floating_point() else None, full)


def fixed_order(shards: Any, groups: Any) -> mf.schedules.Schedule:
    """Of one forward and backward pass; other transforms leave it."""
    found = mf.record(lambda full, batch: loss_of(full, 0), shards, None)
    return mf.schedules.plan(found, mf.bucket_sizes(shards, groups), live_bytes=0)


def frozen_too(full: Any, like: Any) -> Any:
    return {**full, "still": like["still"], "steps": like["steps"]}


def through_scatter(verb: Callable, ranks_of: Callable) -> Program:
    """Every rank scales the parameters by a factor of its own; what comes is scaled by the mean."""

    def factor(place: Place) -> float:
        ranks = ranks_of(place)
        return sum(map(weight, ranks)) / len(ranks)

    def sharded(s: Any, place: Place) -> Any:
        full = mf.gather(s, place.groups)
        scaled = {**weighted(full, weight(place.rank)), "still": None, "steps": None, "none": None}
        scaled["tied"] = [scaled["tied"][0], None]  # gradients of tied leaves would be added
        back = mf.gather(verb(scaled, place.groups, like=place.like), place.groups)
        return loss_of(back, place.rank)

    def plain(full: Any, place: Place) -> Any:
        return loss_of(frozen_too(weighted(full, factor(place)), full), place.rank)

    return Program(sharded, plain)


def norm_of(leaves: list) -> Any:
    return torch.stack([x.square().sum() for x in leaves]).sum().sqrt()


def clipped(transform: mf.optim.Transform, s: Any) -> Any:
    return transform.update(s, transform.init(s), s)[0]


def changed(full: Any, change: Callable) -> Any:
    return {**full, **{k: tree.map_leaves(change, full[k]) for k in ("a", "tied", "zero")}}


def sine(full: Any) -> Any:
    return changed(full, torch.sin)


def product(norms: Any) -> Any:
    return norms["a"] * norms["tied"][0].pow(2)


def by_norms(s: Any, at: Place) -> Any:
    """Leaves times their own norms, which are full values; not that of zeros."""
    norms = {**mf.optim.leaf_norms(s, at.groups), "zero": 0.0}
    return mf.shards.map(lambda x, norm: x * (1 + norm), s, norms)


def within_one(full: Any) -> Any:
    """What torch's clip_grad_norm_ multiplies by."""
    norm = norm_of([full["a"], full["tied"][0], full["zero"]])
    return (1.0 / (norm + 1e-6)).clamp(max=1.0)


def idling(full: Any) -> Any:
    """Parameters of which one bucket gets no gradient, and passes no tangent on."""
    return {**full, "zero": torch.zeros(4, dtype=torch.float64)}


def of_loss(full: Callable, change: Callable = lambda p: p, over_models: bool = True) -> Program:
    """The loss of full values, some way, and that of parameters that are changed alike."""
    return Program(
        lambda s, at: loss_of(full(s, at), at.rank),
        lambda p, at: loss_of(change(p), at.rank),
        over_models,
    )


def of_shards(verb: Callable, change: Callable = lambda p: p) -> Program:
    """The loss of shards that a verb gives, gathered."""
    return of_loss(lambda s, at: mf.gather(verb(s, at), at.groups), change)


def deferred(s: Any, at: Place) -> Any:
    return mf.defer(s, at.groups, at.schedule).params


def kept_all(s: Any, at: Place) -> Any:
    return mf.defer(s, at.groups, mf.keep_all()).params


PROGRAMS: dict[str, Program] = {
    "gather": of_loss(lambda s, at: mf.gather(s, at.groups)),
    "gather, a bucket idle": of_loss(lambda s, at: idling(mf.gather(s, at.groups)), idling),
    "unshard": of_loss(lambda s, at: mf.unshard(s, at.groups)),
    "sync_replicas": of_shards(lambda s, at: mf.sync_replicas(s, at.groups)),
    "defer, on demand": of_loss(
        lambda s, at: mf.defer(s, at.groups, mf.on_demand(live_bytes=0)).params, over_models=False
    ),
    "defer, learned order": of_loss(deferred, over_models=False),
    "defer, fixed order": of_loss(deferred, over_models=False),
    "defer, keep_all": of_loss(kept_all, over_models=False),
    "defer, a bucket idle": of_loss(lambda s, at: idling(deferred(s, at)), idling, False),
    "defer, keep_all, a bucket idle": of_loss(lambda s, at: idling(kept_all(s, at)), idling, False),
    "weighted": Program(
        lambda s, at: mf.weighted(
            loss_of(mf.gather(s, at.groups), at.rank), [at.rank + 1, at.rank + 1], at.groups
        ),
        lambda p, at: loss_of(p, at.rank) / ((at.groups.world_size + 1) / 2),
    ),
    "scatter_grads": through_scatter(mf.scatter_grads, lambda at: at.peers),
    "reduce_grads": through_scatter(mf.reduce_grads, lambda at: range(at.groups.world_size)),
    "global_norm": Program(
        lambda s, at: (at.rank + 1) * mf.optim.global_norm(s, at.groups).pow(3),
        lambda p, at: (at.rank + 1) * norm_of([p["a"], p["tied"][0], p["zero"]]).pow(3),
    ),
    "global_norm of what is computed": Program(
        lambda s, at: (
            mf.optim.global_norm(tree.map_leaves(torch.sin, s), at.groups)
            * loss_of(mf.gather(s, at.groups), at.rank)
        ),
        lambda p, at: (
            norm_of([x.sin() for x in (p["a"], p["tied"][0], p["zero"])]) * loss_of(p, at.rank)
        ),
    ),
    "leaf_norms": Program(
        lambda s, at: (at.rank + 1) * product(mf.optim.leaf_norms(s, at.groups)),
        lambda p, at: (at.rank + 1) * norm_of([p["a"]]) * norm_of([p["tied"][0]]).pow(2),
    ),
    "inner": Program(
        lambda s, at: (
            (at.rank + 1)
            * mf.optim.inner(s, tree.map_leaves(torch.cos, s), at.groups)
            * loss_of(mf.gather(s, at.groups), at.rank)
        ),
        lambda p, at: (
            (at.rank + 1)
            * sum((x * x.cos()).sum() for x in (p["a"], p["tied"][0], p["zero"]))
            * loss_of(p, at.rank)
        ),
    ),
    "map": of_shards(lambda s, at: mf.shards.map(torch.sin, s), sine),
    "map with norms": of_shards(
        by_norms,
        lambda p: {**changed(p, lambda x: x * (1 + norm_of([x]))), "zero": p["zero"]},
    ),
    "clip_by_value": of_shards(
        lambda s, at: clipped(mf.optim.clip_by_value(0.5), s),
        lambda p: changed(p, lambda x: x.clamp(-0.5, 0.5)),
    ),
    "clip_by_global_norm": of_shards(
        lambda s, at: clipped(mf.optim.clip_by_global_norm(1.0, at.groups), s),
        lambda p: changed(p, lambda x: x * within_one(p)),
    ),
}


# The transforms. A tree of full values is compared on each rank with the mean over ranks.


def mean(value: Any, place: Place) -> Any:
    n = place.groups.world_size
    return tree.map_leaves(lambda x: sum(everywhere(x, n)) / n if n > 1 else x, value)


def close(name: str, got: Any, want: Any) -> None:
    a, b = tree.flatten(got)[0], tree.flatten(want)[0]
    assert len(a) == len(b) > 0, name
    for x, y in zip(a, b, strict=True):
        assert x.shape == y.shape, name
        error = float((x - y).abs().max())
        assert error <= TOLERANCE * max(1.0, float(y.abs().max())), (name, error, y)
    assert any(y.abs().sum() > 0 for y in b), f"{name}: a twin of zeros proves nothing"


def trained(full: Any) -> Any:
    """What can be differentiated of a full tree, the tied leaf once."""
    return {"a": full["a"], "tied": full["tied"][0], "zero": full["zero"]}


def dot(a: Any, b: Any) -> Any:
    pairs = zip(tree.flatten(a)[0], tree.flatten(b)[0], strict=True)
    return sum((x * y).sum() for x, y in pairs)


def one_leaf(sharded: Any, plain: Any, shards: Any, full: Any) -> Iterator[tuple]:
    """What `jvp` is given of a function of one leaf, and of its twin."""
    for fn, x in ((sharded, shards["a"]), (plain, full["a"])):
        yield fn, (x,), (tree.map_leaves(torch.cos, x),)


def check_program(layout: Layout, name: str, where: str) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "defer: the order of use changed")
        check_transforms(layout, name, where)


def check_transforms(layout: Layout, name: str, where: str) -> None:
    program, groups = PROGRAMS[name], groups_of(layout)
    params = make_params()
    shards = mf.shard(params, groups, bucket_bytes=100, where=where)
    schedule = fixed_order(shards, groups) if "fixed" in name else mf.on_demand(live_bytes=0)
    place, start = Place(groups, shards, schedule), trained(params)

    def sharded(s: Any) -> Any:
        return program.sharded(s, place)

    def plain(p: Any) -> Any:
        return program.plain({**params, **p, "tied": [p["tied"]] * 2}, place)

    def full(grads: Any) -> Any:
        return trained(mf.unshard(mf.reduce_grads(grads, groups), groups))

    want = mean(grad(plain)(start), place)
    close("grad", full(grad(sharded)(shards)), want)
    close("value", grad_and_value(sharded)(shards)[1], plain(start))
    value, pull = vjp(sharded, shards)  # pyright: ignore
    close("vjp", full(pull(torch.full_like(value, 4.0))[0]), tree.map_leaves(lambda x: 4 * x, want))
    v, v_shards = tree.map_leaves(torch.cos, start), tree.map_leaves(torch.cos, shards)
    close("jvp", list(jvp(sharded, (shards,), (v_shards,))), list(jvp(plain, (start,), (v,))))
    close("jacrev", full(jacrev(sharded)(shards)), want)

    second = mean(jvp(grad(plain), (start,), (v,))[1], place)
    close("grad of grad", full(grad(lambda s: dot(grad(sharded)(s), v_shards))(shards)), second)
    close("forward over reverse", full(jvp(grad(sharded), (shards,), (v_shards,))[1]), second)
    # Along one leaf alone: the others have no tangents.
    one, one_plain = (lambda x: sharded({**shards, "a": x})), (lambda x: plain({**start, "a": x}))
    close("jvp of one", *(list(jvp(*x)) for x in one_leaf(one, one_plain, shards, start)))
    one, one_plain = (
        (lambda x: grad(sharded)({**shards, "a": x})),
        (lambda x: grad(plain)({**start, "a": x})),
    )
    found, wanted = (jvp(*x)[1] for x in one_leaf(one, one_plain, shards, start))
    close("forward over reverse of one", full(found), mean(wanted, place))

    x = torch.tensor([1.0, -0.5, 2.0], dtype=torch.float64)
    samples = vmap(grad(lambda s, t: sharded(s) * t), in_dims=(None, 0))(shards, x)
    wanted = vmap(grad(lambda p, t: plain(p) * t), in_dims=(None, 0))(start, x)
    close("vmap(grad)", full(samples), mean(wanted, place))
    if program.over_models:
        models = [torch.ones_like, torch.cos, lambda x: x * 2]
        stack = lambda t: tree.map_leaves(lambda x: torch.stack([f(x) for f in models]), t)  # noqa: E731
        close("vmap", vmap(sharded)(stack(shards)), vmap(plain)(stack(start)))
        each = vmap(grad(sharded))(stack(shards))
        close("vmap(grad) of models", full(each), mean(vmap(grad(plain))(stack(start)), place))

    with fwAD.dual_level():
        pairs = zip(tree.flatten(shards)[0], tree.flatten(v_shards)[0], strict=True)
        duals = [fwAD.make_dual(x, t) for x, t in pairs]
        found = fwAD.unpack_dual(sharded(tree.flatten(shards)[1].unflatten(duals)))
    close("forward AD", list(found), list(jvp(plain, (start,), (v,))))

    leaves, spec = tree.flatten(shards)
    variables = [leaf.detach().requires_grad_() for leaf in leaves]
    value = sharded(spec.unflatten(variables))
    how: Any = {"allow_unused": True, "materialize_grads": True}
    found = torch.autograd.grad(value, variables, create_graph=True, **how)
    first = spec.unflatten([each.detach() for each in found])
    close("autograd", full(first), want)
    again = torch.autograd.grad(dot(spec.unflatten(found), v_shards), variables, **how)
    close("autograd twice", full(spec.unflatten(again)), second)


# Of the others some parts are the same.
FIRST = ["gather", "defer, on demand", "defer, keep_all", "sync_replicas", "reduce_grads"]
FIRST += ["unshard", "leaf_norms", "inner", "map"]


@pytest.mark.thorough
@pytest.mark.parametrize("layout", [COPIES, PAIR, BOTH, Layout((2, 2), 4)], ids=str)
@pytest.mark.parametrize("part", range(2))  # each within the limit of the pool
def test_all_programs_equal_their_unsharded_twins(ranks, layout, part):
    for name in list(PROGRAMS)[part::2]:
        ranks(layout.world_size).run(check_program, layout, name, "")


@pytest.mark.parametrize("layout", [ALONE, COPIES, PAIR, BOTH, Layout((2, 2), 4)], ids=str)
@pytest.mark.parametrize("name", FIRST)
@pytest.mark.parametrize("where", ["", "params=host", "params=disk:"])
@pytest.mark.covering
def test_what_has_a_derivative_equals_the_unsharded_twin(ranks, tmp_path, layout, name, where):
    where = f"{where}{tmp_path}" if "disk" in where else where
    ranks(layout.world_size).run(check_program, layout, name, where)


def check_own_orders(layout: Layout, transform: str) -> None:
    """Each transform with the order that it has learned itself, and with that order when fixed."""
    groups, params = groups_of(layout), make_params()
    shards, start = mf.shard(params, groups, bucket_bytes=100), trained(params)
    place, apply = Place(groups, shards), TRANSFORMS[transform]
    here: list[Any] = []

    def plain(p: Any) -> Any:
        return loss_of({**params, **p, "tied": [p["tied"]] * 2}, place.rank)

    def sharded(s: Any, schedule: Any) -> Any:
        here.append(mf.defer(s, groups, schedule))
        return loss_of(here[-1].params, place.rank)

    policy = mf.on_demand(live_bytes=0)
    want = apply(plain, start, tree.map_leaves(torch.cos, start))
    for number in range(6):  # learned, followed, fixed
        schedule = policy if number < 4 else mf.schedules.Schedule.parse(str(policy.schedule))
        here.clear()
        cosines = tree.map_leaves(torch.cos, shards)
        found = apply(partial(sharded, schedule=schedule), shards, cosines)
        assert number < 2 or all(each.following for each in here)
        if isinstance(want, dict):
            grads = mf.reduce_grads(found, groups)
            close(transform, trained(mf.unshard(grads, groups)), mean(want, place))
        else:
            close(transform, [found], [want])


TRANSFORMS: dict[str, Callable[[Callable, Any, Any], Any]] = {
    "value": lambda f, s, v: f(s),
    "grad": lambda f, s, v: grad(f)(s),
    "jvp": lambda f, s, v: jvp(f, (s,), (v,))[1],
    "forward over reverse": lambda f, s, v: jvp(grad(f), (s,), (v,))[1],
    "reverse over forward": lambda f, s, v: grad(lambda t: jvp(f, (t,), (v,))[1])(s),
}


@pytest.mark.parametrize("layout", [ALONE, COPIES, PAIR, BOTH, Layout((2, 2), 4)], ids=str)
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.covering
def test_each_transform_follows_its_own_order(ranks, layout, transform):
    ranks(layout.world_size).run(check_own_orders, layout, transform)


def norm_over_two_groups():
    """Leaves cut over different groups of the same ranks count together."""
    wide, narrow = groups_of(PAIR), groups_of(COPIES)
    start = {k: random(i, 6, dtype=torch.float64) for i, k in enumerate("ab")}
    homes = {"a": wide, "b": narrow}
    shards = mf.shard(start, homes)
    place = Place(wide, shards)

    def sharded(s):
        return (place.rank + 1) * mf.optim.global_norm(s, homes).pow(3)

    def plain(p):
        return (place.rank + 1) * norm_of(list(p.values())).pow(3)

    got = mf.unshard(mf.reduce_grads(grad(sharded)(shards), homes), homes)
    close("grad", got, mean(grad(plain)(start), place))


def test_a_norm_over_several_groups_is_differentiated(ranks):
    ranks(2).run(norm_over_two_groups)


def norm_at_zero(layout):
    groups = groups_of(layout)
    shards = mf.shard({"w": torch.zeros(5), "n": torch.zeros(3)}, groups)
    for found in (
        grad(lambda s: mf.optim.global_norm(s, groups))(shards),
        torch.func.jvp(lambda s: mf.optim.global_norm(s, groups), (shards,), (shards,)),
    ):
        assert not any(x.any() for x in tree.flatten(found)[0])


@pytest.mark.parametrize("layout", [ALONE, PAIR], ids=str)
def test_the_gradient_of_a_norm_of_zero_is_zero(ranks, layout):
    ranks(layout.world_size).run(norm_at_zero, layout)


# A basis: each rank's own raises, one that ranks share gives the Hessian.


def two_leaves():
    """Of the second layout one rank has all of a leaf, so that no leaf has pieces of two ranks."""
    return [
        {"a": random(1, 8, dtype=torch.float64), "b": random(2, 8, dtype=torch.float64)},
        {"a": random(3, 4, dtype=torch.float64), "b": random(4, 4, dtype=torch.float64)},
        {"a": random(5, 5, dtype=torch.float64), "b": random(6, 2, dtype=torch.float64)},
    ]


def curved(full: Any) -> Any:
    scale = 1 + (dist.get_rank() if dist.is_initialized() else 0)
    return (full["a"].sin()[:2] * full["b"][:2]).sum().pow(2) * scale + full["a"].exp().sum()


SCHEDULES = {
    "at once": lambda: None,
    "on demand": lambda: mf.on_demand(live_bytes=0),
    "keep_all": mf.keep_all,
}

# Given a loss of shards, a pair that makes it of full values, and the shards.
OWN_BASES: dict[str, Callable[[Callable, Callable, Any], Any]] = {
    "jacfwd": lambda loss, full, s: jacfwd(lambda s: full(s)["a"])(s),
    "jacfwd of a loss": lambda loss, full, s: jacfwd(loss)(s),
    "jacfwd after a map": lambda loss, full, s: jacfwd(
        lambda s: full(tree.map_leaves(torch.tanh, s))["a"]
    )(s),
    "jacfwd of grad": lambda loss, full, s: jacfwd(grad(loss))(s),
    "hessian": lambda loss, full, s: hessian(loss)(s),
    "jacrev of jacrev": lambda loss, full, s: jacrev(jacrev(loss))(s),
    "jacrev of grad": lambda loss, full, s: jacrev(grad(loss))(s),
    "jacrev of grad, in chunks": lambda loss, full, s: jacrev(grad(loss), chunk_size=2)(s),
    "jacrev of grad, one by one": lambda loss, full, s: jacrev(grad(loss), chunk_size=1)(s),
}


def own_bases(layout: Layout) -> None:
    groups = groups_of(layout)
    for params in two_leaves():
        for bucket_bytes in (10_000, 1):
            shards = mf.shard(params, groups, bucket_bytes=bucket_bytes)
            here = sum(x.numel() for x in tree.flatten(shards)[0])
            equal = len({int(n) for n in everywhere(torch.tensor(here), layout.world_size)}) == 1
            for how, schedule in SCHEDULES.items():
                for name, program in OWN_BASES.items():
                    if "one by one" in name and not equal:
                        continue  # without vmap nobody knows, before one rank is done
                    policy = schedule()
                    full = lambda s: full_of(s, groups, policy)  # noqa: B023, E731
                    found = refusal(program, lambda s: curved(full(s)), full, shards)  # noqa: B023
                    assert "each rank's own pieces" in found, (name, how, found)
            found = refusal(jacfwd(lambda s: mf.optim.global_norm(s, groups)), shards)
            assert "each rank's own pieces" in found


@pytest.mark.thorough
def test_a_basis_of_each_ranks_own_raises(ranks):
    ranks(2).run(own_bases, PAIR)


def shared_basis(layout: Layout, how: str) -> None:
    """Rows of the identity, each cut by `shard`: row k is one direction on all ranks."""
    groups = groups_of(layout)
    for params in two_leaves():
        shards = mf.shard(params, groups)
        leaves, spec = tree.flatten(params)
        numels = [leaf.numel() for leaf in leaves]
        eye = torch.eye(sum(numels), dtype=torch.float64)
        rows = [spec.unflatten(list(row.split(numels))) for row in eye]
        cut = [mf.shard(row, groups) for row in rows]
        directions = tree.map_leaves(lambda *x: torch.stack(x), *cut)
        policy = SCHEDULES[how]()

        def loss(s, policy=policy):
            return curved(full_of(s, groups, policy))

        place = Place(groups, shards)
        got = vmap(lambda v, s=shards: jvp(grad(loss), (s,), (v,))[1])(directions)
        got = mf.unshard(mf.reduce_grads(got, groups), groups)
        blocks = mean(hessian(curved)(params), place)
        want = {j: torch.cat([blocks[i][j] for i in params]) for j in params}
        close("Hessian", got, want)
        found = vmap(lambda v, s=shards: jvp(loss, (s,), (v,))[1])(directions)
        close("forward", found, torch.cat(list(grad(curved)(params).values())))
        _, pull = vjp(grad(loss), shards)  # pyright: ignore
        back = mf.unshard(mf.reduce_grads(vmap(pull)(directions)[0], groups), groups)
        close("reverse", back, want)


@pytest.mark.parametrize("layout", [ALONE, PAIR, BOTH], ids=str)
@pytest.mark.parametrize("how", SCHEDULES)
@pytest.mark.covering
def test_directions_that_ranks_share_give_the_hessian(ranks, layout, how):
    ranks(layout.world_size).run(shared_basis, layout, how)


def own_bases_alone(layout: Layout) -> None:
    """A group of one rank holds all, so its own basis is that of the parameters."""
    groups, params = groups_of(layout), two_leaves()[0]
    shards = mf.shard(params, groups)
    want = hessian(curved)(params)
    for how in (hessian, lambda f: jacrev(jacrev(f)), lambda f: jacrev(grad(f))):
        got = how(lambda s: curved(mf.gather(s, groups)))(shards)
        for i in params:
            for j in params:
                close("Hessian", got[i].data[j].data, want[i][j])


@pytest.mark.parametrize("layout", [ALONE, COPIES], ids=str)
def test_a_group_of_one_rank_has_a_basis_of_its_own(ranks, layout):
    ranks(layout.world_size).run(own_bases_alone, layout)


def batches(groups: mf.Groups) -> dict[str, Callable[[], Any]]:
    """Calls with a batch of another shape on each rank, of one with equally many bytes."""
    rank, shards = dist.get_rank(), mf.shard({"w": torch.arange(1.0, 5)}, groups)
    samples = torch.ones(3 + rank)

    def stacked(*sizes: int) -> Any:
        return tree.map_leaves(lambda x: x.expand(*sizes, *x.shape), shards)

    def loss(full: Any, x: Any) -> Any:
        return full["w"].sum() * x

    return {
        "samples": lambda: vmap(
            grad(lambda s, x: loss(mf.gather(s, groups), x)), in_dims=(None, 0)
        )(shards, samples),
        "on demand": lambda: vmap(
            grad(lambda s, x: loss(mf.defer(s, groups, mf.on_demand()).params, x)),
            in_dims=(None, 0),
        )(shards, samples),
        "models": lambda: vmap(lambda s: mf.gather(s, groups)["w"])(stacked(3 + rank)),
        "unshard": lambda: mf.unshard(stacked(3 + rank), groups),
        "equal bytes": lambda: mf.unshard(stacked(2 + rank, 3 - rank), groups),
        "replicas": lambda: mf.reduce_grads(stacked(3 + rank), groups),
    }


def other_batches(layout: Layout, *names: str) -> None:
    for name in names:
        with pytest.raises(mf.errors.DesyncError, match=r"of a batch \("):
            batches(groups_of(layout))[name]()
        groups_of(layout).close()  # they have failed


def test_batches_of_other_sizes_are_told(ranks):
    ranks(2).run(other_batches, PAIR, "samples", "on demand", "models", "unshard", "equal bytes")
    ranks(2).run(other_batches, COPIES, "replicas")


def linearized(layout: Layout) -> None:
    groups = groups_of(layout)
    start = {"w": torch.tensor([1.0, 2.0]), "b": torch.tensor([3.0])}
    shards = mf.shard(start, groups)
    loss = lambda full: (full["w"] ** 2).sum() * full["b"].sum()  # noqa: E731
    for how, schedule in SCHEDULES.items():
        policy = schedule()
        f = lambda s: loss(full_of(s, groups, policy))  # noqa: B023, E731
        if how == "at once" and layout.partition_size == 1:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of torch's own graphs
                assert linearize(f, shards)[1](shards) == 45
        else:
            assert "linearize" in refusal(linearize, f, shards), how
    batch = torch.ones(2)
    uses = mf.record(lambda full, x: loss({**full, "w": full["w"] * x}), shards, batch).uses
    assert uses  # it has tensors without data, which is another way to trace


@pytest.mark.parametrize("layout", [ALONE, PAIR], ids=str)
def test_linearize_is_right_or_refused(ranks, layout):
    ranks(layout.world_size).run(linearized, layout)


# What refuses: a call on shards (and full tensors) that somebody differentiates.


class Setting(NamedTuple):
    """What the calls need that is not differentiated."""

    groups: mf.Groups
    shards: Any
    trainer: mf.Trainer


def due(sync: mf.replicas.ReplicaSync, s: Any, groups: mf.Groups) -> Any:
    state = sync.init(mf.shard({"w": torch.ones(4)}, groups), groups)
    return sync.after(s, replace(state, step=0), groups)[0]


def by_hand(x: Any, groups: mf.Groups) -> Any:
    """A collective of one's own; in a world of one there is none."""
    for comm in groups.communicators.values():
        if comm.size > 1:
            issue = partial(dist.all_reduce, x)
            call = mf.collectives.start(comm, issue, [x], name="sum", sent_bytes=x.nbytes)
            return call.wait()
    return mf.collectives.all_gather(groups.communicators["replicas"], x)


def own_hop_2(s: Any, groups: mf.Groups) -> Any:
    sync = mf.replicas.reduced_by(lambda grads, groups: grads)
    return sync.reduced(s, sync.init(s, groups), groups)[0]


def relaid(s: Any, groups: mf.Groups) -> Any:
    state = mf.init_state(s, mf.optim.sgd(0.1))
    return mf.optim.relayout(state, state, groups)


REFUSALS: dict[str, Callable[[Any, Setting], Any]] = {
    "shard": lambda s, at: mf.shard(mf.gather(s, at.groups), at.groups),
    "Guard.judge": lambda s, at: mf.optim.Guard(max_norm=1.0).judge(s, at.groups).grads,
    "Guard.judge, no limit": lambda s, at: mf.optim.Guard().judge(s, at.groups).grads,
    "local_sgd": lambda s, at: due(mf.replicas.local_sgd(1), s, at.groups),
    "diloco": lambda s, at: due(mf.replicas.diloco(1), s, at.groups),
    "all_gather": lambda s, at: mf.collectives.all_gather(
        at.groups.communicators["replicas"], s["w"].data
    ),
    "start": lambda s, at: by_hand(s["w"].data.sum(), at.groups),
    "reduced_by": lambda s, at: own_hop_2(s, at.groups),
    "relayout": lambda s, at: relaid(s, at.groups).params,
    "diloco, init": lambda s, at: mf.replicas.diloco(1).init(s, at.groups).outer.params,
}

# These refuse inside torch.func only: of autograd's leaves they give values without a gradient.
REFUSALS_INSIDE: dict[str, Callable[[Any, Setting], Any]] = {
    "get": lambda s, at: mf.get(s, "w", at.groups),
    "save": lambda s, at: mf.checkpoint.save("/never", s, at.groups, step=0),
    "start_save": lambda s, at: mf.checkpoint.start_save("/never", s, at.groups, step=0),
    "load": lambda s, at: mf.checkpoint.load("/never", s, at.groups).state,
    "set": lambda s, at: mf.set(s, "w", 1.0, at.groups),
    "GradSum": lambda s, at: mf.defer(s, at.groups, mf.on_demand(), into=mf.GradSum()).params,
    "as_dtensors": lambda s, at: mf.shards.as_dtensors(*[mf.gather(s, at.groups)] * 2),
    "GradSum.backward": lambda s, at: mf.GradSum().backward(mf.optim.global_norm(s, at.groups)),
    "Trainer.step": lambda s, at: at.trainer.step(mf.gather(s, at.groups)["w"][None, :2]).loss,
    "Trainer.eval": lambda s, at: at.trainer.eval(mf.gather(s, at.groups)["w"][None, :2]),
    "Trainer.fit": lambda s, at: at.trainer.fit([torch.ones(1, 2)], 1, progress=False)[0].loss,
}


def total(value: Any) -> Any:
    floats = [x for x in tree.flatten(value)[0] if isinstance(x, torch.Tensor)]
    return sum(x.double().sum() for x in floats)


def refusal(call: Callable, *args: Any) -> str:
    try:
        return f"nothing refused, but {call(*args)}"
    except mf.MicsError as error:
        return str(error)


def refusals(layout: Layout) -> None:
    groups = groups_of(layout)
    torch.manual_seed(0)
    shards = mf.shard({"w": torch.arange(1.0, 5)}, groups)
    loss = lambda model, x: model(x).sum()  # noqa: E731
    trainer = mf.Trainer(nn.Linear(2, 1), mf.optim.sgd(0.1), groups, loss=loss)
    at = Setting(groups, shards, trainer)
    for name, call in {**REFUSALS, **REFUSALS_INSIDE}.items():
        for transform in (
            lambda f: grad(f)(shards),
            lambda f: jvp(f, (shards,), (shards,)),
            lambda f: vmap(f)(tree.map_leaves(lambda x: torch.stack([x, x]), shards)),
        ):
            program = partial(lambda s, call: total(call(s, at)), call=call)
            assert "\n  fix: " in refusal(transform, program), name
    for name, call in REFUSALS.items():
        s = tree.map_leaves(lambda x: x.clone().requires_grad_(), shards)
        assert "\n  fix: " in refusal(call, s, at), name
        with torch.no_grad():
            call(s, at)
    values = tree.map_leaves(lambda x: x.clone().requires_grad_(), shards)
    assert not mf.get(values, "w", groups).requires_grad


@pytest.mark.parametrize("layout", [ALONE, PAIR, COPIES], ids=str)
def test_what_has_no_derivative_refuses(ranks, layout):
    ranks(layout.world_size).run(refusals, layout)


# The law: each public function is above, or here with the reason why it need not be.

# The functions that need no row above: optimizers are in tests/optim/test_unrolled.py.
OPTIMIZERS = "opt_step adam adamw lion sgd from_torch chain by_path from_update muon matrixwise"
# Those that keep their tensors as they are, take them as constants, or make them of none.
CONSTANT = "init_state same_step same_replicas keep_all on_demand every_step init_model load_shards"
CONSTANT += " save_dcp save_pretrained warmup_cosine static_scale dynamic_scale inject"
CONSTANT += " move"
# Those that give no tensor that was made of tensors.
READS = "steps latest verify record plan bucket_sizes summary watch norm_spike sampler node compile"
READS += " make_groups reset init_distributed plan_groups where simulate"
OTHERS = {*f"{OPTIMIZERS} {CONSTANT} {READS} compile_blocks".split()}
OTHER_METHODS = {
    *("Cluster.cell", "Cluster.run", "Cluster.reset", "Cluster.restart", "Checkpoints.save"),
    *("Watched.timeline", "Watched.memory", "Timeline.sent_bytes", "Timeline.waited_s"),
    *("Timeline.summary", "PendingSave.due", "PendingSave.wait", "GradSum.release", "Groups.close"),
    # The trainer's own state, which nobody differentiates.
    *("Trainer.params", "Trainer.state_dict", "Trainer.reset"),
    # See what makes them: GradSum, diloco, local_sgd and reduced_by.
    *("GradSum.grads", "ReplicaSync.groups", "ReplicaSync.init"),
    *("ReplicaSync.reduced", "ReplicaSync.after"),
}


def named(table: Any) -> set[str]:
    return {name.partition(",")[0].partition("(")[0].partition(" of ")[0] for name in table}


def bare(name: str) -> str:
    """The name without its namespace."""
    return name.rpartition(".")[2]


def test_every_public_function_is_in_a_table():
    covered = named(PROGRAMS) | named(REFUSALS) | named(REFUSALS_INSIDE) | OTHERS
    functions = {name for name, value in public_names().items() if inspect.isfunction(value)}
    names = {bare(name) for name in functions if not name.startswith("placement.")}
    assert names - covered == set()
    assert OTHERS - names == set()


def test_every_public_method_that_communicates_is_in_a_table():
    covered = named(PROGRAMS) | named(REFUSALS) | named(REFUSALS_INSIDE) | OTHER_METHODS
    for name, value in public_names().items():
        for key, method in inspect.getmembers(value, inspect.isfunction):
            if inspect.isclass(value) and key[0] != "_":
                doc = inspect.getdoc(method) or ""
                _, _, said = doc.partition("Communication:")
                if said and not said.strip().startswith("none"):
                    found = f"{bare(name)}.{key}"
                    assert found in covered, f"{found}: {said.splitlines()[0]}"

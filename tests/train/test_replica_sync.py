"""When replicas are merged: exact twins of every policy, bytes, donation, and what is refused.

The twins hold all replicas in one process, in full and in float64. All numbers are multiples of
small powers of two, and means are over 1 to 8 ranks, so no operation rounds: any order of them
gives the same bits, and `same_bits` is the bound.
"""

import gc
import weakref
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from cases import (
    LAYOUTS,
    TREES,
    Layout,
    groups_of,
    plain_values,
    poison,
    random,
    same_bits,
    unit_roundoff,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.func import grad

import mics_fn as mf
from mics_fn import tree
from mics_fn.shards.leaf import is_leaf

STEPS = 7
LR, OUTER_LR, MOMENTUM = 0.25, 0.5, 0.5
FAR = [x for x in LAYOUTS if x.world_size > x.partition_size]
NEAR = [x for x in LAYOUTS if x not in FAR]
POLICIES = {
    "every": mf.replicas.every_step,
    "local1": lambda: mf.replicas.local_sgd(1),
    "local3": lambda: mf.replicas.local_sgd(3),
    "diloco1": lambda: mf.replicas.diloco(1, mf.optim.sgd(1.0)),
    "diloco2": lambda: mf.replicas.diloco(2, mf.optim.sgd(OUTER_LR, momentum=MOMENTUM)),
    "diloco3": lambda: mf.replicas.diloco(
        3, mf.optim.sgd(OUTER_LR, momentum=MOMENTUM, nesterov=True)
    ),
    "default": lambda: mf.replicas.diloco(3),
}


def integers(seed, *shape):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 9, shape, generator=generator).double()


def tree_of(seed):
    """Leaves of all kinds; those of `tied` are one tensor."""
    tied = integers(seed, 6, 4)
    return {
        "a": integers(seed + 1, 33),
        "b": [integers(seed + 2, 4, 4), integers(seed + 3), torch.zeros(0, 3).double()],
        "count": torch.tensor([seed, 7]),
        "frozen": nn.Parameter(integers(seed + 4, 5), requires_grad=False),
        "tied": (tied, tied),
    }


def loss_fn(shards, groups, targets):
    """The gradient of each leaf is leaf - target; no rounding."""
    full = tree.flatten(mf.gather(shards, groups))[0]
    pairs = zip(full, tree.flatten(targets)[0], strict=True)
    parts = [(x - t).square().sum() / 2 for x, t in pairs if x.is_floating_point()]
    return torch.stack(parts).sum()


def target(step, rank):
    return tree_of(100 * (step + 1) + 7 * rank)


# The slow twin.


def trained(values):
    """The leaves that are trained, by name, with how often they occur."""
    return {
        "a": [values["a"]],
        "b0": [values["b"][0]],
        "b1": [values["b"][1]],
        "tied": list(values["tied"]),
    }


def whole(model):
    """The tree at the start, with the values of a model in their places."""
    values = tree_of(0)
    b = [model["b0"], model["b1"], values["b"][2]]
    changed = {"a": model["a"], "b": b, "tied": (model["tied"], model["tied"])}
    return plain_values({**values, **changed})


class Twin:
    """All replicas of a layout, one after the other, and their merge."""

    def __init__(self, layout, policy):
        self.p, self.policy = layout.partition_size, policy
        start = {name: leaves[0] for name, leaves in trained(tree_of(0)).items()}
        self.models = [start] * (layout.world_size // self.p)
        self.anchor, self.velocity = start, {k: torch.zeros_like(v) for k, v in start.items()}

    def step(self, step):
        if self.policy == "every":
            everyone = range(self.p * len(self.models))
            self.models = [self.moved(self.models[0], step, everyone)] * len(self.models)
            return
        self.models = [
            self.moved(model, step, range(i * self.p, (i + 1) * self.p))
            for i, model in enumerate(self.models)
        ]
        if (step + 1) % int(self.policy[-1]) == 0:
            self.merge()

    def moved(self, model, step, ranks):
        """One step of SGD on the mean gradient of some ranks."""
        out = {}
        for name, value in model.items():
            seen = [t for rank in ranks for t in trained(target(step, rank))[name]]
            out[name] = value - LR * sum(value - t for t in seen) / len(ranks)
        return out

    def merge(self):
        r, kind = len(self.models), self.policy[:-1]
        for name, anchor in self.anchor.items():
            if kind == "local":
                self.anchor = {**self.anchor, name: sum(m[name] for m in self.models) / r}
                continue
            outer_grad = sum(anchor - m[name] for m in self.models) / r
            self.velocity[name] = MOMENTUM * self.velocity[name] + outer_grad
            step = self.velocity[name]
            if self.policy == "diloco3":  # Nesterov
                step = outer_grad + MOMENTUM * step
            self.anchor = {**self.anchor, name: anchor - OUTER_LR * step}
        self.models = [self.anchor] * r


# Every policy equals its twin to the bit, on every layout.


def trained_models(layout, policy, donate, bucket_bytes):
    """After all steps this replica's parameters, and the anchor where there is one."""
    groups, sync = groups_of(layout), POLICIES[policy]()
    inner = sync.groups(groups)
    shards = mf.shard(tree_of(0), groups, bucket_bytes=bucket_bytes)
    state = mf.init_state(poison(shards), mf.optim.sgd(LR))
    sync_state = sync.init(state.params, groups)
    for step in range(STEPS):
        grads = grad(loss_fn)(state.params, inner, target(step, dist.get_rank()))
        state = mf.opt_step(state, mf.reduce_grads(grads, inner), donate=donate)
        params, sync_state = sync.after(state.params, sync_state, groups, donate=donate)
        state = replace(state, params=params)
    assert sync_state.step == STEPS
    anchor = getattr(sync_state.outer, "params", state.params)
    return mf.unshard(state.params, inner), mf.unshard(anchor, inner)


@pytest.mark.parametrize("layout", [*FAR, *NEAR[:2]], ids=str)
@pytest.mark.parametrize("policy", ["every", "local3", "diloco2", "diloco3"])
@pytest.mark.covering
@pytest.mark.short("every-2x2-p2", "every-2x2-p1", "diloco3-2-p2")
def test_equals_its_twin_to_the_bit(ranks, layout, policy):
    pool = ranks(layout.world_size)
    found = [
        pool.run(trained_models, layout, policy, donate, bucket_bytes)
        for donate, bucket_bytes in ((False, 2**20), (True, 200))
    ]
    twin = Twin(layout, policy)
    for step in range(STEPS):
        twin.step(step)
    for run in found:
        for rank, (model, anchor) in enumerate(run):
            same_bits(model, whole(twin.models[rank // layout.partition_size]))
            if policy.startswith("diloco"):
                same_bits(anchor, whole(twin.anchor))
    apart = any(not torch.equal(m["a"], twin.models[0]["a"]) for m in twin.models)
    assert apart == (policy[-1] in "23" and len(twin.models) > 1 and STEPS % int(policy[-1]) != 0)


def at_every_step(layout):
    found = []
    for policy in ("every", "local1", "diloco1"):
        groups, sync = groups_of(layout), POLICIES[policy]()
        inner = sync.groups(groups)
        state = mf.init_state(mf.shard(tree_of(0), groups), mf.optim.sgd(LR))
        sync_state = sync.init(state.params, groups)
        for step in range(STEPS):
            grads = grad(loss_fn)(state.params, inner, target(step, dist.get_rank()))
            state = mf.opt_step(state, mf.reduce_grads(grads, inner))
            params, sync_state = sync.after(state.params, sync_state, groups)
            state = replace(state, params=params)
        found.append(mf.unshard(state.params, groups))
    same_bits(found[0], found[1])
    same_bits(found[0], found[2])
    return found[0]["a"]


@pytest.mark.parametrize("layout", [*FAR, *NEAR[:2]], ids=str)
@pytest.mark.covering
@pytest.mark.short("2x2-p2", "2-p2", "2-p1")
def test_sgd_averaged_at_every_step_is_hop_2(ranks, layout):
    """p - lr g averaged over replicas is p - lr mean(g), exactly where nothing rounds."""
    found = ranks(layout.world_size).run(at_every_step, layout)
    assert all(torch.equal(x, found[0]) for x in found)
    assert not torch.equal(found[0], tree_of(0)["a"])


# The outer optimizer's numbers, where they do round.


def mlp():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def batch_of(step, rank):
    return random(50 * step + rank, 6, 5, dtype=torch.float64)


def mlp_loss(model, x):
    return (model(x) - x[:, :3].sin()).square().mean()


def explicit_diloco(layout, every, steps):
    """DiLoCo as in the paper: a model and an AdamW a replica, one outer SGD on the anchor."""
    p = layout.partition_size
    models = [mlp() for _ in range(layout.world_size // p)]
    inner = [torch.optim.AdamW(m.parameters(), 1e-2, eps=1e-3) for m in models]
    anchor = mlp()
    outer = torch.optim.SGD(anchor.parameters(), 0.7, momentum=0.9, nesterov=True)
    for step in range(steps):
        for i, (model, optimizer) in enumerate(zip(models, inner, strict=True)):
            optimizer.zero_grad()
            for rank in range(i * p, (i + 1) * p):
                (mlp_loss(model, batch_of(step, rank)) / p).backward()
            optimizer.step()
        if (step + 1) % every:
            continue
        each = zip(anchor.parameters(), *(m.parameters() for m in models), strict=True)
        with torch.no_grad():
            for a, *parts in each:
                a.grad = torch.stack([a - x for x in parts]).mean(0)
            outer.step()
            for model in models:
                model.load_state_dict(anchor.state_dict())
    return {k: v.detach() for k, v in anchor.named_parameters()}


def run_diloco(layout, every, steps):
    groups, sync = groups_of(layout), mf.replicas.diloco(every)
    inner, model = sync.groups(groups), mlp()
    params = {k: v.detach() for k, v in model.named_parameters()}
    state = mf.init_state(mf.shard(params, groups), mf.optim.adamw(1e-2, eps=1e-3))
    sync_state = sync.init(state.params, groups)

    def loss(shards, x):
        call = lambda x: torch.func.functional_call(model, mf.gather(shards, inner), (x,))  # noqa: E731
        return mlp_loss(call, x)

    for step in range(steps):
        grads = grad(loss)(state.params, batch_of(step, dist.get_rank()))
        state = mf.opt_step(state, mf.reduce_grads(grads, inner), donate=True)
        params, sync_state = sync.after(state.params, sync_state, groups, donate=True)
        state = replace(state, params=params)
    same_bits(mf.unshard(state.params, inner), mf.unshard(sync_state.outer.params, groups))
    return mf.unshard(state.params, groups)


@pytest.mark.parametrize("layout", [LAYOUTS[0], Layout((2, 2), 2), Layout((2, 4), 2)], ids=str)
def test_diloco_is_the_papers_loop(ranks, layout):
    """The defaults, AdamW inside, float64.

    Gradient elements are sums of at most 18 x 8 terms of order one, added in another order: an
    error of 150 u. AdamW with eps = 1e-3 makes at most lr / eps = 10 of it a step, in 6 steps, and
    feedback through a loss with a Lipschitz constant below 10 at steps of 1e-2 less than doubles it
    in that time. Outer Nesterov steps take at most 0.7 x 1.9 and 0.7 x 0.81 of it. In sum below
    1e5 u.
    """
    want = explicit_diloco(layout, 3, 6)
    start = {k: v.detach() for k, v in mlp().named_parameters()}
    bound = 1e5 * unit_roundoff(torch.float64)
    assert max((want[k] - start[k]).abs().max() for k in want) > 1e6 * bound
    for found in ranks(layout.world_size).run(run_diloco, layout, 3, 6):
        for name, value in found.items():
            assert (value - want[name]).abs().max() <= bound, name


def merged_once(layout, shapes, kinds, bucket_bytes, policy):
    """One merge of values that differ between replicas, in memory that is no chunk."""
    groups, sync = groups_of(layout), POLICIES[policy]()
    rank, r = dist.get_rank(), layout.world_size // layout.partition_size
    replica = rank // layout.partition_size
    dtypes = [torch.float32, torch.float64, torch.bfloat16]

    def values(seed):
        every = zip(shapes, kinds, strict=True)
        return {f"p{i}": random(seed + i, *s, dtype=dtypes[k]) for i, (s, k) in enumerate(every)}

    start = mf.shard(values(0), groups, bucket_bytes=bucket_bytes)
    sync_state = sync.init(start, groups)
    own = sync.groups(groups)
    moved = mf.shard(values(100 * (replica + 1)), own, bucket_bytes=bucket_bytes)
    moved = tree.map_leaves(torch.clone, moved)
    params, _ = sync.after(moved, sync_state, groups)
    parts = [values(100 * (i + 1)) for i in range(r)]
    for key, value in mf.unshard(params, groups).items():
        anchor, each = values(0)[key].double(), [part[key].double() for part in parts]
        assert value.dtype == values(0)[key].dtype
        # A difference, a sum of r, a quotient, and the step: r + 3 roundings, each of numbers that
        # are no larger than all values together.
        size = anchor.abs() + sum(x.abs() for x in each)
        bound = 2 * (r + 3) * unit_roundoff(value.dtype) * size
        assert ((value.double() - sum(each) / r).abs() <= bound).all(), key
    return bits_of(params)


@pytest.mark.limit(300)
@settings(max_examples=30)
@given(
    layout=st.sampled_from([x for x in FAR if x.world_size in (2, 4, 8)]),
    shapes=st.lists(st.lists(st.integers(0, 6), max_size=3).map(tuple), min_size=1, max_size=7),
    policy=st.sampled_from(["local1", "diloco1"]),
    data=st.data(),
)
def test_any_tree_is_averaged(ranks, layout, shapes, policy, data):
    """Both are the mean: of parameters, or the anchor less the mean of differences from it."""
    kinds = data.draw(st.lists(st.integers(0, 2), min_size=len(shapes), max_size=len(shapes)))
    bucket_bytes = data.draw(st.sampled_from([1, 64, 2**20]))
    args = layout, shapes, kinds, bucket_bytes, policy
    found = ranks(layout.world_size).run(merged_once, *args)
    for rank, bits in enumerate(found):
        assert bits == found[rank % layout.partition_size], "replicas differ"


# Law 5, by H steps; law 6, by H steps.


def bits_of(shards):
    return [bytes(x.view(-1).view(torch.uint8).tolist()) for x in tree.flatten(shards)[0]]


def bits_by_step(layout, policy, dtype):
    """At each step the bits of parameters and anchor."""
    groups, sync = groups_of(layout), POLICIES[policy]()
    inner, seen = sync.groups(groups), []
    params = TREES["mixed"](dtype, 5)
    state = mf.init_state(mf.shard(params, groups), mf.optim.adamw(1e-2))
    sync_state = sync.init(state.params, groups)
    for step in range(STEPS):
        full = TREES["mixed"](dtype, 100 * step + 10 * dist.get_rank() + 10)
        full |= {"count": None, "mask": None, "frozen": None}
        grads = mf.reduce_grads(full, inner, like=state.params)
        state = mf.opt_step(state, grads, donate=True)
        merged, sync_state = sync.after(state.params, sync_state, groups, donate=True)
        state = replace(state, params=merged)
        anchor = getattr(sync_state.outer, "params", ())
        seen.append((bits_of(state.params), bits_of(anchor)))
    unchanged = mf.unshard(state.params, inner)
    kept = ("count", "mask", "frozen")
    same_bits([unchanged[k] for k in kept], [params[k].detach() for k in kept])
    return seen


@pytest.mark.parametrize("layout", FAR, ids=str)
@pytest.mark.parametrize(
    ("policy", "dtype"), [("local3", torch.float32), ("default", torch.bfloat16)], ids=str
)
@pytest.mark.covering
def test_replicas_are_equal_after_each_merge_and_apart_between(ranks, layout, policy, dtype):
    found = ranks(layout.world_size).run(bits_by_step, layout, policy, dtype)
    p = layout.partition_size
    for step in range(STEPS):
        due = step % 3 == 2
        for rank, seen in enumerate(found):
            params, anchor = found[rank % p][step]
            assert seen[step][1] == anchor, "anchors differ"
            assert (seen[step][0] == params) == (due or rank < p), "equal just where it is due"


def traffic_by_step(layout, policy):
    groups, sync = groups_of(layout), POLICIES[policy]()
    inner = sync.groups(groups)
    params = {"a": random(0, 100), "b": random(1, 7, 5), "c": random(2, 9).double()}
    state = mf.init_state(mf.shard(params, groups, bucket_bytes=200), mf.optim.sgd(LR))
    sync_state = sync.init(state.params, groups)
    seen = []
    for _ in range(STEPS):
        groups.traffic.clear()
        full = mf.gather(state.params, inner)
        state = mf.opt_step(state, mf.reduce_grads(full, inner, like=state.params))
        params, sync_state = sync.after(state.params, sync_state, groups)
        state = replace(state, params=params)
        seen.append(groups.traffic.snapshot())
    assert inner is groups or inner.traffic is groups.traffic
    buckets = {leaf.bucket for leaf in tree.flatten(state.params, is_leaf)[0]}
    return seen[1:], [bucket.chunk * bucket.dtype.itemsize for bucket in buckets]


@pytest.mark.parametrize("layout", [*FAR, *NEAR[:2]], ids=str)
@pytest.mark.parametrize("policy", ["every", "local1", "local3", "diloco2"])
@pytest.mark.covering
def test_bytes_between_replicas_follow_the_formula(ranks, layout, policy):
    pool, r = ranks(layout.world_size), layout.world_size // layout.partition_size
    inside = [
        [{k: v for k, v in step.items() if k != "replicas"} for step in steps]
        for steps, _ in pool.run(traffic_by_step, layout, "every")
    ]
    for rank, (steps, chunks) in enumerate(pool.run(traffic_by_step, layout, policy)):
        assert len(chunks) == 3
        merge = (3, sum(2 * (r - 1) * nbytes // r for nbytes in chunks))
        every = 1 if policy == "every" else int(policy[-1])
        for step, (sent, near) in enumerate(zip(steps, inside[rank], strict=True), start=1):
            due = r > 1 and (step + 1) % every == 0
            assert sent == near | ({"replicas": merge} if due else {}), step


def alone_in_the_world(layout):
    groups, sync = groups_of(layout), mf.replicas.local_sgd(2)
    assert sync.groups(groups) is groups
    shards = mf.shard(tree_of(0), groups)
    state = sync.init(shards, groups)
    groups.traffic.clear()
    for _ in range(4):
        params, state = sync.after(shards, state, groups)
        same_bits(mf.unshard(params, groups), mf.unshard(shards, groups))
    assert "replicas" not in groups.traffic.snapshot()


@pytest.mark.parametrize("layout", NEAR, ids=str)
def test_with_one_replica_there_is_nothing_to_average(ranks, layout):
    ranks(layout.world_size).run(alone_in_the_world, layout)


# The groups of the steps.


def of_one_replica(layout):
    groups, sync = groups_of(layout), mf.replicas.local_sgd(2)
    inner = sync.groups(groups)
    p, rank = layout.partition_size, dist.get_rank()
    assert sync.groups(groups) is inner
    assert mf.replicas.diloco(5).groups(groups) is inner
    assert sync.groups(inner) is inner
    assert mf.replicas.every_step().groups(groups) is groups
    first = rank // p * p
    assert inner.ranks == tuple(range(first, first + p))
    assert (inner.world_size, inner.num_replicas, inner.partition_size) == (p, 1, p)
    assert inner.ranks[inner.position] == inner.rank == rank
    assert inner.hierarchy is groups.hierarchy
    assert inner.plan.level_names == groups.plan.level_names
    assert inner.plan.coords(inner.position) == groups.plan.coords(groups.position)
    assert inner.plan.chunk(inner.position) == groups.hierarchy.route.chunk
    # A world of its own for every verb: another replica may hold other values, and another tree.
    shapes = {"w": (9, 5), f"only{first}": (3 + first,)}
    params = {k: random(first + i, *s) for i, (k, s) in enumerate(shapes.items())}
    same_bits(mf.unshard(mf.shard(params, inner), inner), params)
    assert "disagree on the tree" in caught_of(lambda: mf.shard(params, groups))[1]
    ours = {"w": random(rank, 3)}
    sent = mf.shard(ours, inner, replicas="broadcast", source_rank=first + p - 1)
    same_bits(mf.unshard(sent, inner), {"w": random(first + p - 1, 3)})
    if p > 1:
        text = caught_of(lambda: mf.shard(ours, inner))[1]
        assert f"rank {first}: value A" in text
        assert f"rank {(first + p) % layout.world_size}:" not in text


@pytest.mark.parametrize("layout", FAR, ids=str)
def test_a_replica_is_a_world_of_its_own(ranks, layout):
    ranks(layout.world_size).run(of_one_replica, layout)


def forgotten(layout):
    groups = mf.make_groups(layout.partition_size, topology=mf.groups.Topology(layout.sizes))
    inner = mf.replicas.local_sgd(2).groups(groups)
    assert inner is not groups
    groups.close()
    assert inner.closed
    seen = weakref.ref(groups), weakref.ref(inner)
    del groups, inner
    gc.collect()
    return [x() is None for x in seen]


def test_closed_groups_are_not_kept(ranks):
    assert ranks(2).run(forgotten, Layout((2,), 1)) == [[True, True]] * 2


def overlapped(layout):
    """With a schedule and a GradSum nothing goes to other replicas either."""
    groups, sync = groups_of(layout), mf.replicas.local_sgd(2)
    inner, policy = sync.groups(groups), mf.on_demand(live_bytes=0)
    twin = shards = mf.shard(tree_of(0), groups, bucket_bytes=200)
    state = sync.init(shards, groups)
    for step in range(3):
        groups.traffic.clear()
        wanted = target(step, dist.get_rank())
        total = mf.GradSum(micro_steps=2)
        full = mf.defer(shards, inner, policy, into=total).params
        for _ in range(2):
            pairs = zip(tree.flatten(full)[0], tree.flatten(wanted)[0], strict=True)
            parts = [(x - t).square().sum() / 2 for x, t in pairs if t.is_floating_point()]
            total.backward(torch.stack(parts).sum())
        shards = mf.opt_step(mf.init_state(shards, mf.optim.sgd(LR)), total.grads()).params
        total.release()
        assert "replicas" not in groups.traffic.snapshot()
        grads = mf.reduce_grads(grad(loss_fn)(twin, inner, wanted), inner)
        twin = mf.opt_step(mf.init_state(twin, mf.optim.sgd(LR)), grads).params
        twin, _ = sync.after(twin, state, groups)
        shards, state = sync.after(shards, state, groups)
        same_bits(mf.unshard(shards, inner), mf.unshard(twin, inner))


@pytest.mark.parametrize("layout", [Layout((2, 2), 2), Layout((4, 2), 4)], ids=str)
def test_gradients_that_overlap_stay_in_the_replica(ranks, layout):
    ranks(layout.world_size).run(overlapped, layout)


def with_experts(layout, policy):
    """Experts on other groups, with more replicas: a prefix tree, and a function of the path."""
    dense, experts = groups_of(layout), groups_of(Layout(layout.sizes, 1))
    rank, n, p = dist.get_rank(), layout.world_size, layout.partition_size
    params = {"dense": {"w": integers(0, 5, 4)}, "experts": [integers(1, 7)]}
    for groups in (
        {"dense": dense, "experts": experts},
        lambda path: experts if "experts" in path else dense,
    ):
        sync = POLICIES[policy]()
        inner = sync.groups(groups)
        shards = mf.shard(params, groups)
        state = sync.init(shards, groups)
        grads = tree.map_leaves(lambda x: torch.full_like(x, 8.0 * rank), params)
        for step in range(3):
            reduced = mf.reduce_grads(grads, inner, like=shards)
            shards = mf.opt_step(mf.init_state(shards, mf.optim.sgd(1.0)), reduced).params
            due = sync.due(state)
            shards, state = sync.after(shards, state, groups)
            own = {"dense": rank // p * p + (p - 1) / 2, "experts": rank}
            means = dict.fromkeys(own, (n - 1) / 2) if due else own
            for name, mean in means.items():
                (full,) = tree.flatten(mf.unshard(shards[name], groups_at(groups, name)))[0]
                same_bits(full, tree.flatten(params[name])[0][0] - 8.0 * (step + 1) * mean)


def groups_at(groups, name):
    return groups(name) if callable(groups) else groups[name]


@pytest.mark.parametrize("layout", [x for x in FAR if x.partition_size > 1], ids=str)
@pytest.mark.parametrize("policy", ["local3", "local1"])
@pytest.mark.covering
def test_groups_may_differ_between_leaves(ranks, layout, policy):
    ranks(layout.world_size).run(with_experts, layout, policy)


def in_regions(layout):
    """Two regions: hop 2 inside a region at each step, between regions every second step."""
    groups, sync, rank = groups_of(layout), mf.replicas.local_sgd(2), dist.get_rank()
    half = layout.world_size // 2
    region = range(rank // half * half, (rank // half + 1) * half)
    state = None
    with mf.make_groups(layout.partition_size, ranks=region, node_size=1) as inner:
        shards = mf.shard({"w": integers(0, 9)}, groups)
        state = sync.init(shards, groups)
        for step in range(4):
            own = mf.reduce_grads({"w": torch.full((9,), float(rank)).double()}, inner, like=shards)
            shards = mf.opt_step(mf.init_state(shards, mf.optim.sgd(1.0)), own).params
            shards, state = sync.after(shards, state, groups)
            near, all_ranks = region[0] + (half - 1) / 2, (layout.world_size - 1) / 2
            moved = step * all_ranks + (all_ranks if step % 2 else near)
            same_bits(mf.unshard(shards, groups), {"w": integers(0, 9) - moved})


def test_replicas_of_a_region_may_stay_together(ranks):
    ranks(4).run(in_regions, Layout((2, 2), 1))


# Donation, purity, failure.


def moved_state(layout, policy):
    """A policy's state one step before a merge, and parameters that differ between replicas."""
    groups, sync = groups_of(layout), POLICIES[policy]()
    inner = sync.groups(groups)
    shards = mf.shard(tree_of(0), groups)
    state = sync.init(shards, groups)
    for _ in range(sync.every - 1):
        same, state = sync.after(shards, state, groups, donate=True)
        assert same is shards, "between merges nothing is copied or given away"
    grads = mf.reduce_grads(grad(loss_fn)(shards, inner, target(0, dist.get_rank())), inner)
    return groups, sync, mf.opt_step(mf.init_state(shards, mf.optim.sgd(LR)), grads).params, state


def memory_of(*trees):
    return [x.data_ptr() for each in trees for x in tree.flatten(each)[0] if x.numel()]


def outer_of(state):
    """The outer state as a tree of tensors."""
    return [x for x in tree.flatten(state.outer)[0] if isinstance(x, torch.Tensor)]


def pure(layout, policy):
    groups, sync, params, state = moved_state(layout, policy)
    kept = tree.map_leaves(torch.clone, params), [x.clone() for x in outer_of(state)]
    first, later = sync.after(params, state, groups)
    again, _ = sync.after(params, state, groups)
    same_bits(params, kept[0])
    same_bits(outer_of(state), kept[1])
    same_bits(first, again)
    everything = memory_of(first, again, params, outer_of(state), outer_of(later))
    assert len(set(everything)) == len(everything), "memory is shared"
    assert later.step == state.step + 1
    assert [type(x) for x in tree.flatten(params, is_leaf)[0]] == [
        type(x) for x in tree.flatten(first, is_leaf)[0]
    ]


def donated(layout, policy):
    groups, sync, params, state = moved_state(layout, policy)
    want, _ = sync.after(params, state, groups)
    places = memory_of(params, outer_of(state))
    merged, later = sync.after(params, state, groups, donate=True)
    assert memory_of(merged, outer_of(later)) == places, "not in place"
    same_bits(merged, want)
    gone = "params.a was donated to ReplicaSync.after"
    for use in (
        lambda: mf.unshard(params, groups),
        lambda: params["a"].data + 1,
        lambda: sync.after(params, replace(later, step=state.step), groups),
        lambda: sync.after(params, replace(later, step=state.step), groups, donate=True),
    ):
        assert caught_of(use)[1].startswith(gone)
    kept = "nothing" if policy.startswith("local") else "DonatedError"
    assert caught_of(lambda: tree.flatten(state.outer))[0] == kept


@pytest.mark.parametrize("layout", [Layout((1,), 1), Layout((2, 2), 2), Layout((2, 4), 2)], ids=str)
@pytest.mark.parametrize("policy", ["local1", "local3", "diloco3"])
def test_pure_by_default_and_in_place_on_request(ranks, layout, policy):
    ranks(layout.world_size).run(pure, layout, policy)
    ranks(layout.world_size).run(donated, layout, policy)


def backward_after_donation(layout):
    """With p = 1 gathered tensors are views of the shards: autograd must see that they changed."""
    groups, sync, params, state = moved_state(layout, "local1")
    leaf = tree.map_leaves(lambda x: x.detach().requires_grad_(), params)
    loss = mf.gather(leaf, groups)["a"].square().sum()
    sync.after(params, state, groups, donate=True)
    try:
        loss.backward()
    except RuntimeError as error:
        return "modified by an inplace operation" in str(error)


def test_autograd_sees_donation(ranks):
    assert all(ranks(2).run(backward_after_donation, Layout((2,), 1)))


def failing(policy, donate):
    """The peer is gone at a merge: what was given is whole, and the anchor too."""
    groups = mf.make_groups(1, topology=mf.groups.Topology((2,)), timeout_s=3.0)
    sync = POLICIES[policy]()
    params = {"w": random(0, 1000), "v": random(1, 10).double()}
    shards = mf.shard(params, groups)
    state = sync.init(shards, groups)
    dist.barrier()
    if dist.get_rank() == 1:
        groups.close()
        return "left"
    try:
        sync.after(shards, state, groups, donate=donate)
    except mf.errors.GroupsError as error:
        text = str(error)
    if outer_of(state):
        same_bits([x.data for x in state.outer.params.values()], list(params.values()))
    same_bits([x.data for x in shards.values()], list(params.values()))
    return text


@pytest.mark.parametrize("policy", ["local1", "diloco1"])
@pytest.mark.parametrize("donate", [False, True])
def test_a_merge_that_fails_leaves_nothing_half_done(ranks, policy, donate):
    text, left = ranks(2).run(failing, policy, donate)
    assert left == "left"
    assert "a call that rank 1 will not make, since it closed its groups" in text


# What is refused.


@pytest.mark.parametrize("make", [mf.replicas.local_sgd, mf.replicas.diloco])
@pytest.mark.parametrize("every", [0, -3, True, 2.0, "8", None])
def test_every_is_an_int_above_0(make, every):
    with pytest.raises(mf.errors.PlanError) as caught:
        make(every)
    assert str(caught.value) == (
        f"{make.__name__}: every={every!r}, expected an int of at least 1\n"
        "  fix: give the steps from one merge to the next"
    )


def test_what_is_no_optimizer_is_refused_at_once():
    with pytest.raises(mf.errors.PlanError, match="float is not an optimizer of init and update"):
        mf.replicas.diloco(8, 0.7)  # pyright: ignore


def test_a_policy_shows_how_it_was_made():
    shown = [mf.replicas.every_step(), mf.replicas.local_sgd(8), mf.replicas.diloco(500)]
    assert str(shown) == "[every_step(), local_sgd(8), diloco(500)]"


def test_a_state_is_a_tree():
    groups, sync = mf.make_groups(1), mf.replicas.diloco(2)
    state = sync.init(mf.shard({"w": torch.ones(3)}, groups), groups)
    leaves, spec = tree.flatten(state)
    again = spec.unflatten(leaves)
    assert (again.step, spec) == (0, tree.flatten(again)[1])
    same_bits(again.outer.params, state.outer.params)


def caught_of(use):
    try:
        use()
    except mf.MicsError as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def refused(layout):
    groups, rank = groups_of(layout), dist.get_rank()
    local, diloco = mf.replicas.local_sgd(2), mf.replicas.diloco(2)
    inner, params = local.groups(groups), {"w": integers(0, 9), "v": [integers(1, 2)]}
    shards = mf.shard(params, groups)
    states = {sync: sync.init(shards, groups) for sync in (local, diloco)}
    due = {sync: replace(state, step=1) for sync, state in states.items()}
    fewer = mf.shard({"w": params["w"]}, groups)
    found = {
        "inner at init": caught_of(lambda: local.init(shards, inner)),
        "inner at step 0": caught_of(lambda: local.after(shards, states[local], inner)),
        "inner when due": caught_of(lambda: diloco.after(shards, due[diloco], inner, donate=True)),
        "inner of a part": caught_of(lambda: local.init(shards, {"w": groups, "v": inner})),
        "a hierarchy at init": caught_of(lambda: local.init(shards, groups.hierarchy)),
        "a hierarchy when due": caught_of(lambda: local.after(shards, due[local], groups.flat)),
        "no shards": caught_of(lambda: local.init(params, groups)),
        "another tree's state": caught_of(
            lambda: diloco.after(fewer, due[diloco], groups, donate=True)
        ),
    }
    same_bits(mf.unshard(shards, groups), params)  # nothing was given away or changed
    same_bits(mf.unshard(fewer, groups), {"w": params["w"]})
    with mf.make_groups(1, topology=mf.groups.Topology(layout.sizes)) as short:
        state = local.init(mf.shard(params, short), short)
    found["closed"] = caught_of(lambda: local.after(shards, state, short))
    policy = mf.replicas.local_sgd(3) if rank == layout.world_size - 1 else mf.replicas.diloco(3)
    found["another policy"] = caught_of(lambda: policy.init(shards, groups))
    odd = tree.map_leaves(torch.clone, shards)
    if rank == 1:
        odd["v"][0].data.add_(1)
    found["another start"] = caught_of(lambda: local.init(odd, groups))
    assert caught_of(lambda: mf.replicas.every_step().init(odd, groups))[0] == "nothing"
    return found


STEPS_GROUPS = (
    "these are the groups of the steps, in which no other replica is\n"
    "  fix: pass the groups that the tree was sharded with"
)
REFUSED = {
    "inner at init": ("PlanError", f"ReplicaSync.init: {STEPS_GROUPS}"),
    "inner at step 0": ("PlanError", f"ReplicaSync.after: {STEPS_GROUPS}"),
    "inner when due": ("PlanError", f"ReplicaSync.after: {STEPS_GROUPS}"),
    "inner of a part": (
        "PlanError",
        "ReplicaSync.init: leaves of bucket 0 are given different groups\n"
        "  fix: pass the groups that the tree was sharded with",
    ),
    "a hierarchy at init": ("GroupsError", "ReplicaSync.init: got a hierarchy, needs groups"),
    "a hierarchy when due": ("GroupsError", "ReplicaSync.after: got a hierarchy, needs groups"),
    "no shards": ("LeafError", "ReplicaSync.init: params.v.0 is Tensor, not a shard"),
    "another tree's state": ("LeafError", "trees of different numbers of leaves"),
    "closed": ("GroupsError", "is used after its groups were closed"),
    "another policy": (
        "DesyncError",
        "ReplicaSync.init: ranks have different policies\n"
        "  ranks 0-2: diloco(3)\n"
        "  rank 3: local_sgd(3)\n"
        "  fix: make the same one on every rank",
    ),
    "another start": (
        "DesyncError",
        "ReplicaSync.init: replicas hold different values\n"
        "  first difference: params.v.0\n"
        "  rank 1: not as in the first replica\n"
        "  fix: start with what shard gave, or with sync_replicas(params, groups)",
    ),
}


def test_what_is_refused_is_said_on_every_rank(ranks):
    for found in ranks(4).run(refused, Layout((4,), 1)):
        assert found.keys() == REFUSED.keys()
        for case, (kind, text) in REFUSED.items():
            assert found[case][0] == kind, (case, found[case])
            assert text in found[case][1], case

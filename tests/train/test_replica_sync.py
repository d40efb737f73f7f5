"""When replicas are merged: exact twins of every policy, bytes, donation, and what is refused.

The twins hold all replicas in one process, in full and in float64. All numbers are multiples of
small powers of two, and means are over 1 to 8 ranks, so no operation rounds: any order of them
gives the same bits, and `same_bits` is the bound.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import LAYOUTS, Layout, groups_of, plain_values, poison, same_bits
from torch import nn
from torch.func import grad

import mics_fn as mf
from mics_fn import tree
from mics_fn.shards.leaf import is_leaf

STEPS = 7
LR, OUTER_LR, MOMENTUM = 0.25, 0.5, 0.5
FAR = [x for x in LAYOUTS if x.world_size > x.partition_size]
NEAR = [x for x in LAYOUTS if x not in FAR]
FOUR, PAIR = Layout((2, 2), 2), Layout((2,), 1)
POLICIES = {
    "every": mf.replicas.every_step,
    "local1": lambda: mf.replicas.local_sgd(1),
    "local3": lambda: mf.replicas.local_sgd(3),
    "diloco2": lambda: mf.replicas.diloco(2, mf.optim.sgd(OUTER_LR, momentum=MOMENTUM)),
    "diloco3": lambda: mf.replicas.diloco(
        3, mf.optim.sgd(OUTER_LR, momentum=MOMENTUM, nesterov=True)
    ),
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
    b = values["b"]
    return {"a": [values["a"]], "b0": [b[0]], "b1": [b[1]], "tied": list(values["tied"])}


def whole(model):
    """The tree at the start, with the values of a model in their places."""
    values = tree_of(0)
    b = [model["b0"], model["b1"], values["b"][2]]
    return plain_values({**values, "a": model["a"], "b": b, "tied": (model["tied"],) * 2})


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


# Every policy equals its twin to the bit, on every layout, and sends what its formula says.


def trained_models(layout, policy, donate, bucket_bytes):
    """This replica's parameters, and the anchor; what steps sent to replicas; bytes of chunks."""
    groups, sync = groups_of(layout), POLICIES[policy]()
    inner, sent = sync.groups(groups), []
    shards = mf.shard(tree_of(0), groups, bucket_bytes=bucket_bytes)
    leaves = tree.flatten(shards, is_leaf)[0]
    chunks = {leaf.bucket for leaf in leaves if isinstance(leaf, mf.shards.Sharded)}
    state = mf.init_state(poison(shards), mf.optim.sgd(LR))
    sync_state = sync.init(state.params, groups)
    for step in range(STEPS):
        groups.traffic.clear()
        grads = grad(loss_fn)(state.params, inner, target(step, dist.get_rank()))
        state = mf.opt_step(state, mf.reduce_grads(grads, inner), donate=donate)
        params, sync_state = sync.after(state.params, sync_state, groups, donate=donate)
        state = replace(state, params=params)
        sent.append(groups.traffic.snapshot().get("replicas"))
    assert sync_state.step == STEPS
    anchor = getattr(sync_state.outer, "params", state.params)
    nbytes = [bucket.chunk * bucket.dtype.itemsize for bucket in chunks]
    return mf.unshard(state.params, inner), mf.unshard(anchor, inner), sent, nbytes


@pytest.mark.parametrize("layout", [*FAR, *NEAR[:2]], ids=str)
@pytest.mark.parametrize("policy", ["every", "local1", "local3", "diloco2", "diloco3"])
@pytest.mark.covering
@pytest.mark.short("local3-2x2-p2", "every-2x2-p1", "diloco3-2-p1", "diloco2-2-p2")
def test_equals_its_twin_to_the_bit(ranks, layout, policy):
    found = [
        ranks(layout.world_size).run(trained_models, layout, policy, donate, bucket_bytes)
        for donate, bucket_bytes in ((False, 2**20), (True, 200))
    ]
    twin, r = Twin(layout, policy), layout.world_size // layout.partition_size
    for step in range(STEPS):
        twin.step(step)
    every = 1 if policy == "every" else int(policy[-1])
    for run in found:
        for rank, (model, anchor, sent, nbytes) in enumerate(run):
            same_bits(model, whole(twin.models[rank // layout.partition_size]))
            if policy.startswith("diloco"):
                same_bits(anchor, whole(twin.anchor))
            merge = (len(nbytes), sum(2 * (r - 1) * x // r for x in nbytes)) if r > 1 else None
            due = [merge if (k + 1) % every == 0 else None for k in range(STEPS)]
            assert (sent[: every - 1], sent[every:]) == (due[: every - 1], due[every:])
    apart = any(not torch.equal(m["a"], twin.models[0]["a"]) for m in twin.models)
    assert apart == (every > 1 and r > 1)


def test_the_outer_optimizer_is_that_of_the_paper():
    papers: Any = mf.replicas.diloco(3, mf.optim.sgd(0.7, momentum=0.9, nesterov=True))
    default: Any = mf.replicas.diloco(3)
    assert default.facts == papers.facts


# The groups of the steps.


def with_experts(layout, policy):
    """Experts on other groups, with more replicas: a prefix tree, and a function of the path."""
    dense, experts = groups_of(layout), groups_of(Layout(layout.sizes, 1))
    rank, n, p = dist.get_rank(), layout.world_size, layout.partition_size
    params = {"dense": {"w": integers(0, 5, 4)}, "experts": [integers(1, 7)]}
    by_name = {"dense": dense, "experts": experts}
    for groups in (by_name, lambda path: experts if "experts" in path else dense):
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
                (full,) = tree.flatten(mf.unshard(shards[name], by_name[name]))[0]
                same_bits(full, tree.flatten(params[name])[0][0] - 8.0 * (step + 1) * mean)


def test_groups_may_differ_between_leaves(ranks):
    ranks(4).run(with_experts, FOUR, "local3")


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


def pure_and_donated(layout, policy):
    groups, sync, params, state = moved_state(layout, policy)
    kept = tree.map_leaves(torch.clone, params), [x.clone() for x in outer_of(state)]
    want, later = sync.after(params, state, groups)
    again, _ = sync.after(params, state, groups)
    same_bits((params, outer_of(state)), kept)
    same_bits(want, again)
    everything = memory_of(want, again, params, outer_of(state), outer_of(later))
    assert len(set(everything)) == len(everything), "memory is shared"
    places = memory_of(params, outer_of(state))
    leaf = tree.map_leaves(lambda x: x.detach().requires_grad_(x.is_floating_point()), params)
    loss = mf.gather(leaf, groups)["a"].square().sum()
    merged, later = sync.after(params, state, groups, donate=True)
    assert memory_of(merged, outer_of(later)) == places, "not in place"
    same_bits(merged, want)
    if layout.partition_size == 1:  # gathered tensors are views of the shards
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    gone = caught_of(lambda: mf.unshard(params, groups))[1]
    assert gone.startswith("params.a was donated to ReplicaSync.after")
    kept = "nothing" if policy.startswith("local") else "DonatedError"
    assert caught_of(lambda: tree.flatten(state.outer))[0] == kept


@pytest.mark.parametrize("layout", [PAIR, FOUR], ids=str)
@pytest.mark.parametrize("policy", ["local3", "diloco3"])
@pytest.mark.covering
def test_pure_by_default_and_in_place_on_request(ranks, layout, policy):
    ranks(layout.world_size).run(pure_and_donated, layout, policy)


# What is refused.


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
    state, due = local.init(shards, groups), replace(diloco.init(shards, groups), step=1)
    fewer = mf.shard({"w": params["w"]}, groups)
    policy = mf.replicas.local_sgd(3) if rank == layout.world_size - 1 else mf.replicas.diloco(3)
    odd = tree.map_leaves(torch.clone, shards)
    if rank == 1:
        odd["v"][0].data.add_(1)
    of_steps = "these are the groups of the steps, in which no other replica is"
    for use, kind, text in (
        (lambda: local.init(shards, inner), "PlanError", f"ReplicaSync.init: {of_steps}"),
        (lambda: local.after(shards, state, inner), "PlanError", f"ReplicaSync.after: {of_steps}"),
        (lambda: diloco.after(fewer, due, groups, donate=True), "LeafError",
         "trees of different numbers of leaves"),
        (lambda: policy.init(shards, groups), "DesyncError",
         "\n  ranks 0-2: diloco(3)\n  rank 3: local_sgd(3)\n"),
        (lambda: local.init(odd, groups), "DesyncError",
         "\n  first difference: params.v.0\n  rank 1: not as in the first replica\n"),
        (lambda: mf.replicas.every_step().init(odd, groups), "nothing", ""),
    ):  # fmt: skip
        name, said = caught_of(use)
        assert (name, text in said) == (kind, True), said
    same_bits(mf.unshard(shards, groups), params)  # nothing was given away or changed
    same_bits(mf.unshard(fewer, groups), {"w": params["w"]})


def test_what_is_refused_is_said_on_every_rank(ranks):
    ranks(4).run(refused, Layout((4,), 1))

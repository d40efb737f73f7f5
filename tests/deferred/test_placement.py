"""Placements: each trains as a single process does, sends what its definition says, and no more.

The twin is plain torch in float64 on the concatenated batch. What a step sends and holds is written
down in `costs`, from the definitions alone.
"""

from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import Layout, full_of, groups_of, placed_as, random, same_bits
from costs import (
    POOLS,
    Placed,
    counted,
    inner_products,
    level_sizes,
    one_at_a_time,
    sent_in_a_step,
)
from torch import nn
from torch.nn import functional as F

import mics_fn as mf
from mics_fn import tree
from mics_fn.collectives import checksum
from mics_fn.groups import placement
from mics_fn.lab.report import buckets_of

STEPS = 3
BUCKET_BYTES = 250  # a block's weight and bias, or the embedding
MIDDLE = 550  # two of four buckets
P2, P4 = Layout((2, 2), 2), Layout((2, 2), 4)


def make_params():
    """Uneven sizes; a tied, a frozen and an integer leaf."""
    shared = random(1, 9, 5, dtype=torch.float64)
    blocks = [{"w": random(10 + i, 5, 5).double(), "b": random(20 + i, 5).double()} for i in (0, 1)]
    half = torch.full((5,), 0.5, dtype=torch.float64)
    return {
        "embed": shared,
        "blocks": blocks,
        "frozen": nn.Parameter(half, requires_grad=False),
        "head": shared,
        "twice": torch.tensor(2),
    }


def loss_of(params, batch):
    tokens, targets = batch
    h = F.embedding(tokens, params["embed"]) * params["frozen"] * params["twice"]
    for block in params["blocks"]:
        h = h + torch.tanh(h @ block["w"].T + block["b"])
    return F.cross_entropy(h @ params["head"].T, targets)


def micro_batch(step, part, rank):
    generator = torch.Generator().manual_seed(1000 * step + 100 * part + rank)
    return tuple(torch.randint(9, (2, 3), generator=generator))


def optimizer():
    return mf.optim.adamw(1e-2, weight_decay=0.1, eps=1e-3)


@cache
def reference(world_size, accumulate):
    """A single process over the micro-batches of all ranks."""
    params = make_params()
    params["embed"] = params["head"] = nn.Parameter(params["embed"])
    for block in params["blocks"]:
        block.update({name: nn.Parameter(value) for name, value in block.items()})
    trained = [params["embed"], *(x for b in params["blocks"] for x in b.values())]
    torch_optimizer = torch.optim.AdamW(trained, 1e-2, weight_decay=0.1, eps=1e-3)
    count, losses = world_size * accumulate, []
    for step in range(STEPS):
        torch_optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for rank, part in product(range(world_size), range(accumulate)):
            loss = loss_of(params, micro_batch(step, part, rank)) / count
            loss.backward()
            total += loss.detach()
        torch_optimizer.step()
        losses.append(total.item())
    return tree.map_leaves(lambda x: x.detach(), params), losses


# An element of a gradient is a mean of at most 8 * 3 micro-batches, whose own kernels add some 40
# terms of order one: re-associated, the relative error is below 100 u of the terms. AdamW divides
# by sqrt(v) + eps with eps = 1e-3, so an error e of g moves a step by at most lr * e / eps; each
# step rounds a parameter of order one twice; the loss feeds both back by less than a factor 10.
U = torch.finfo(torch.float64).eps / 2
BOUND = 10 * (STEPS * 1e-2 * 100 * U / 1e-3 + 2 * STEPS * U)


def pairs(layout):
    sizes = inner_products(level_sizes(layout))
    return [Placed(params, grads) for params, grads in product(sizes, sizes)]


def placed_groups(layout, scheme, placed):
    """Groups with counted pools: two numbers over the levels, over one, or in fixed order."""
    groups = counted(groups_of(layout))
    groups = placement.place(groups, "fsdp") if scheme == "one level" else groups
    groups = placement.fixed_order(groups) if scheme == "in fixed order" else groups
    return placement.place(groups, params=placed.params, grads=placed.grads)


# One run: a few steps by hand, with everything counted.


def by_hand(layout, groups, placed, accumulate, live, prefetch):
    rank, pools = dist.get_rank(), groups.hierarchy.pools
    shards = mf.shard(make_params(), groups, bucket_bytes=BUCKET_BYTES)
    buckets = buckets_of(shards)
    state = mf.init_state(shards, optimizer())
    policy = mf.on_demand(live_bytes=live, prefetch=prefetch)
    ledgers, sums, losses, made = [], [], [], []
    for step in range(STEPS):
        groups.traffic.clear()
        total = mf.GradSum(accumulate)
        mean = torch.zeros((), dtype=torch.float64)
        with mf.defer(state.params, groups, policy, into=total) as full:
            for part in range(accumulate):
                loss = loss_of(full, micro_batch(step, part, rank))
                total.backward(loss)
                mean += loss.detach() / accumulate
                when = "last" if part == accumulate - 1 else "between"
                check_pools(buckets, groups, placed, live, when)
        grads = total.grads()
        check_pools(buckets, groups, placed, live, "end")
        state = mf.opt_step(state, grads, donate=True)
        total.release()
        assert all(getattr(pools, name).used == 0 for name in POOLS), "something is not given back"
        ledgers.append(groups.traffic.snapshot())
        sums.append(checksum(torch.cat(tree.flatten(state.params)[0])).item())
        losses.append(mean)
        ring = pools.sums.get("ring")
        made.append([*(getattr(pools, name).made for name in POOLS), ring and ring.made])
    check_ledgers(layout, groups, placed, accumulate, live, prefetch, buckets, policy, ledgers)
    assert made[1] == made[2], f"a later step makes memory: {made}"
    assert made[0] == made[1] or live not in (None, 0), f"a later step makes memory: {made}"
    return state, sums, losses


def check_pools(buckets, groups, placed, live, when):
    """What is held after a micro-step, after the last one, and at the end."""
    p, pools = groups.partition_size, groups.hierarchy.pools
    sizes = [b.numel * b.compute.itemsize for b in buckets]
    held = sum(sizes) // placed.params if placed.params < p else 0
    window = sum(sizes) if live is None else min(sum(sizes), live + max(sizes))
    assert pools.fetched.peak <= (window if placed.params > 1 else 0)
    used = 0 if when == "end" else held
    assert (pools.outer.peak, pools.outer.used) == (held, used), "copies are kept after the run"
    trained = [b for b in buckets if b.trainable]
    sums, mine = (
        sum(b.numel // cut * b.accumulate.itemsize for b in trained) for cut in (placed.grads, p)
    )
    if when == "between" and p > 1:
        assert pools.chunks.used == sums
    if when == "end" and p > 1:  # one rank's gradients are the sum themselves
        assert sums <= pools.chunks.peak <= sums + mine * (placed.grads < p)
        assert pools.reducing.peak == 0, "a reduction has memory outside of the ring"


def check_ledgers(layout, groups, placed, accumulate, live, prefetch, buckets, policy, ledgers):
    (known,) = policy.learned.values()
    fetches = Counter(known.schedule.fetches)
    if live is None or placed.params == 1:
        assert set(fetches.values()) == {1}
    elif live == 0 and prefetch == 0 and (layout.partition_size > 1):
        assert fetches == one_at_a_time(known.schedule.uses)
    replicas = layout.world_size // layout.partition_size
    numbers = (placed, accumulate, groups.replicas.fixed_order)
    want = sent_in_a_step(buckets, fetches, groups.hierarchy.route, replicas, *numbers)
    assert ledgers[1] == ledgers[2] == want
    hop_1 = [{k: v for k, v in x.items() if k.startswith("reduce")} for x in (ledgers[0], want)]
    assert hop_1[0] == hop_1[1]


def train(layout, cases, wanted):
    """All cases of a layout; of each the checksums of this rank's shards after each step."""
    found = []
    for scheme, placed, live, accumulate, prefetch in cases:
        groups = placed_groups(layout, scheme, placed)
        case = (accumulate, live, prefetch)
        state, sums, losses = by_hand(layout, groups, placed, *case)
        full = mf.unshard(state.params, groups)
        want, curve = wanted[accumulate]
        far = tree.map_leaves(lambda a, b: (a - b).abs().max().item(), full, want)
        assert max(tree.flatten(far)[0]) <= BOUND, (scheme, placed, case, far)
        for loss in losses:
            dist.all_reduce(loss)
        means = [loss.item() / layout.world_size for loss in losses]
        assert all(abs(a - b) <= 10 * BOUND for a, b in zip(means, curve, strict=True))
        found.append(sums)
    return found


def compare(ranks, layout, cases):
    wanted = {accumulate: reference(layout.world_size, accumulate) for accumulate in (1, 3)}
    for want, _ in wanted.values():
        moved = (want["embed"] - make_params()["embed"]).abs().max()
        assert moved > 1e6 * BOUND, "nothing was learned: the comparison proves nothing"
    found = ranks(layout.world_size).run(train, layout, cases, wanted)
    for rank, sums in enumerate(found):
        assert sums == found[rank % layout.partition_size], "replicas differ"


BUDGETS = list(product((0, MIDDLE, None), (1, 3)))


def rotated(placements, every):
    """Cases: of each placement some budgets and numbers of micro-steps, so that all are met."""
    return [
        (scheme, placed, live, accumulate, 4 if (i + j) % 4 == 0 else 0)
        for i, (scheme, placed) in enumerate(placements)
        for j, (live, accumulate) in enumerate(BUDGETS)
        if (i + j) % every == 0
    ]


@pytest.mark.parametrize("part", range(3))
@pytest.mark.parametrize("layout", [P2, P4, Layout((4,), 4), Layout((2, 2, 2), 4)], ids=str)
@pytest.mark.short("2x2-p2-1", "4-p4-0")
def test_a_placement_trains_as_a_single_process(ranks, layout, part):
    every, placements = 6, pairs(layout)
    if len(placements) == 16:  # a checkerboard of them: each size with half of the others
        placements = [placed for i, placed in enumerate(placements) if (i // 4 + i) % 2 == 0]
    every = 3 if layout.sizes == (2, 2) else 6
    cases = rotated([("levels", placed) for placed in placements], every)
    compare(ranks, layout, cases[part::3])


@pytest.mark.parametrize("layout", [P4, P2], ids=str)
@pytest.mark.short("2x2-p2")
def test_a_placement_over_one_level_or_in_fixed_order(ranks, layout):
    one = [("one level", Placed(*sizes)) for sizes in product((1, 4), (1, 4)) if layout is P4]
    ordered = [("in fixed order", placed) for placed in pairs(layout)[::2]]
    compare(ranks, layout, rotated([*one, *ordered], 6))


# Without a schedule nothing is kept, and nothing waits: the same bits.


def functional(layout):
    base = groups_of(layout)
    shards = mf.shard(make_params(), base, bucket_bytes=BUCKET_BYTES)
    batch = micro_batch(0, 0, dist.get_rank())

    def grads_of(groups, schedule=None):
        loss = lambda s: loss_of(full_of(s, groups, schedule), batch)  # noqa: E731
        return mf.unshard(mf.reduce_grads(torch.func.grad(loss)(shards), groups), groups)

    want = grads_of(base)
    for placed in pairs(layout):
        groups = placed_groups(layout, "levels", placed)
        same_bits(grads_of(groups), want)
        same_bits(grads_of(groups, mf.on_demand(live_bytes=0)), want)


@pytest.mark.thorough
@pytest.mark.parametrize("layout", [P2, P4], ids=str)
def test_functions_give_the_same_bits_under_any_placement(ranks, layout):
    ranks(layout.world_size).run(functional, layout)


# Ranks that differ, and sizes that do not fit.

ODD = {
    "zero1": "levels node:2,rank:2 params over 1 grads over 1",
    "fsdp": "levels flat:4",
    "fixed_order": "levels node:2,rank:2 in fixed order",
}


def one_rank_differs(layout, scheme, verb):
    base = replace(groups_of(layout), agreed=set())  # nothing was agreed on before
    base = replace(base, hierarchy=replace(base.hierarchy, agreed=set()))
    base = replace(base, flat=replace(base.flat, agreed=base.hierarchy.agreed))
    groups = placed_as(base, scheme) if dist.get_rank() == 1 else base
    shards = mf.shard(make_params(), base, bucket_bytes=BUCKET_BYTES)
    if verb == "gather":
        mf.gather(shards, groups)
    mf.defer(shards, groups, mf.on_demand(), into=mf.GradSum())


@pytest.mark.parametrize("scheme", ODD)
def test_ranks_with_different_placements_are_told(ranks, scheme):
    for verb in ("gather", "defer"):
        for failure in ranks(4).try_run(one_rank_differs, P4, scheme, verb):
            assert failure.type_name == "DesyncError", failure
            assert failure.message.splitlines()[:4] == [
                f"{verb}: ranks disagree on the tree",
                "  first difference: levels",
                "  ranks 0, 2, 3: levels node:2,rank:2",
                f"  rank 1: {ODD[scheme]}",
            ]


def test_sizes_that_do_not_fit_are_refused(ranks):
    ranks(4).run(refused)


def refused():
    for size in (2, 0, -1, 16):
        with pytest.raises(mf.errors.PlanError, match=f"params={size} ends inside a level"):
            placement.place(groups_of(Layout((4,), 4)), params=size)
    with pytest.raises(mf.errors.PlanError, match="place: scheme='zero9', expected None, 'ddp'"):
        placement.place(groups_of(P4), "zero9")
    with pytest.raises(mf.errors.PlanError, match="'ddp' needs partition groups of 1 rank, these"):
        placement.place(groups_of(P4), "ddp")


def one_policy_two_placements(layout):
    """What was planned for kept copies must not be followed where nothing is kept."""
    base, policy = counted(groups_of(layout)), mf.on_demand(live_bytes=0, prefetch=0)
    shards = mf.shard(make_params(), base, bucket_bytes=BUCKET_BYTES)
    size = max(b.numel * b.compute.itemsize for b in buckets_of(shards))
    for scheme in ("zero2", "zero2", "zero3", "zero3"):
        groups = placed_as(base, scheme)
        fetched: Any = groups.hierarchy.pools.fetched
        fetched.peak = 0
        total = mf.GradSum()
        with mf.defer(shards, groups, policy, into=total) as full:
            total.backward(loss_of(full, micro_batch(0, 0, dist.get_rank())))
        total.grads()
        total.release()
    assert fetched.peak <= size


def test_a_policy_knows_placements_apart(ranks):
    ranks(4).run(one_policy_two_placements, P4)

"""Precision policies on real ranks: which bits travel, and how far results are from exact ones."""

from collections import Counter
from dataclasses import astuple
from functools import partial
from itertools import product

import pytest
import torch
import torch.distributed as dist
from cases import (
    Layout,
    full_of,
    groups_of,
    mean_bound,
    placed_as,
    poison,
    random,
    same_bits,
    unit_roundoff,
)
from costs import Placed, counted, level_sizes, sent_in_a_step
from torch import nn
from torch.func import grad

import mics_fn as mf
from mics_fn import tree
from mics_fn.collectives import Codec
from mics_fn.collectives.levels import mean_over_ranks, start_mean
from mics_fn.groups import placement
from mics_fn.lab.report import buckets_of
from mics_fn.shards.bucket import Formats
from mics_fn.shards.leaf import is_leaf

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
POLICIES = [
    None,
    "bf16",
    "compute=bf16,reduce=bf16",
    "compute=f16,reduce=f16",
    "param=bf16",
    "param=bf16,reduce=f32,accumulate=f32",
    "compute=bf16; *norm*: compute=f32",
    "param=f64,compute=f32,reduce=f32",
]
PLACEMENTS = {
    Layout((2, 2), 1): ["ddp"],
    Layout((2, 2), 2): ["mics", "zero1"],
    Layout((2, 2), 4): ["mics", "zero1", "zero2", "hpz", "hybrid", "fsdp"],
    Layout((2, 2, 2), 4): ["mics", "hybrid"],
}


def dtypes_by_path(policy, params) -> dict[str, Formats]:
    """Of each float leaf, as the policy alone says."""
    rule = mf.shards.Precision.parse(policy)
    leaves = zip(tree.paths(params), tree.flatten(params)[0], strict=True)
    return {path: rule.formats(path, x.dtype) for path, x in leaves if x.is_floating_point()}


def as_said(policy, params, *fields):
    """The values rounded to these dtypes, one after the other."""
    said = dtypes_by_path(policy, params)
    leaves, spec = tree.flatten(params)
    out = []
    for path, leaf in zip(tree.paths(params), leaves, strict=True):
        for field in fields if path in said else ():
            leaf = leaf.to(getattr(said[path], field))
        out.append(leaf.detach().clone())
    return spec.unflatten(out)


# What a leaf can be: ordinary, normed, empty, tied, frozen, integer, of another dtype, missing.


def make_values():
    special = torch.tensor([0.0, -0.0, 1e5, -65504.0, 65520.0, 1e-40, 6e-8, 3e-5, float("inf"), 1])
    shared = random(1, 6, 4)
    return {
        "h": [{"norm": random(2 + i, 5), "w": random(4 + i, 4, 3).t()} for i in range(2)],
        "special": torch.cat([special, random(9, 21)]),
        "scalar": random(7),
        "empty": torch.zeros(0, 3),
        "embed": shared,
        "zhead": shared.detach(),
        "other": random(8, 7, dtype=F64),
        "half": random(8, 7, dtype=F16),
        "frozen": nn.Parameter(random(10, 3, 3), requires_grad=False),
        "norm_frozen": nn.Parameter(random(11, 2), requires_grad=False),
        "count": torch.tensor([3, 7]),
        "mask": torch.tensor([True, False]),
        "none": None,
    }


def all_empty():
    return {"a": torch.zeros(0), "norm": torch.zeros(2, 0), "b": torch.zeros(0, dtype=F64)}


# Law 1: what an op gets is the value rounded to `param`, then to `compute`.


def ways(groups, shards):
    """Every way to gather, as a tree of plain tensors."""
    for route in (groups, groups.hierarchy, groups.flat):
        yield mf.gather(shards, route)
    yield mf.gather(tree.map_leaves(torch.clone, shards), groups)  # pieces that are no chunk
    schemes = ["zero1", "hpz", "fsdp"] if groups.partition_size > 1 else []
    for scheme in ("mics", *schemes):
        policy = mf.keep_all() if scheme == "fsdp" else mf.on_demand(live_bytes=0)
        placed = placed_as(groups, scheme)
        for _ in range(2):  # recording, and then following
            full = mf.defer(shards, placed, policy).params
            leaves, spec = tree.flatten(full)
            for _ in range(2 if scheme == "hpz" else 1):  # the second time from what is kept
                found = [x.detach().clone() for x in leaves]
            assert [x.dtype for x in found] == [x.dtype for x in leaves]
            yield spec.unflatten(found)


def round_trip(layout, policies):
    groups = groups_of(layout)
    for policy in policies:
        for make in (make_values, all_empty)[: 2 if policy == POLICIES[6] else 1]:
            params = make()
            shards = poison(mf.shard(make(), groups, precision=policy, bucket_bytes=80))
            said = dtypes_by_path(policy, params)
            for leaf, path in zip(
                tree.flatten(shards, is_leaf)[0], tree.paths(shards, "", is_leaf), strict=True
            ):
                if path in said:
                    b, want = leaf.bucket, said[path]
                    found = (leaf.dtype, b.compute, b.reduce, b.accumulate)
                    assert found == astuple(want)[:4], (policy, path)
            want = as_said(policy, params, "dtype", "compute")
            for full in ways(groups, shards):
                same_bits(full, want)
            same_bits(mf.unshard(shards, groups), as_said(policy, params, "dtype"))


@pytest.mark.parametrize("policies", [POLICIES[::2], POLICIES[1::2]], ids=["even", "odd"])
@pytest.mark.parametrize("layout", [Layout((2, 2), 4), Layout((1,), 1)], ids=str)
@pytest.mark.short("1-p1-odd")
def test_gather_gives_the_rounded_value(ranks, layout, policies):
    ranks(layout.world_size).run(round_trip, layout, policies)


# The mean of all ranks and micro-steps, and what it cost to send: every policy and placement.


def cotangents(params, said, seed):
    """One a float leaf, in the dtype in which a gradient comes."""
    leaves = zip(tree.paths(params), tree.flatten(params)[0], strict=True)
    floats = [(i, path, x) for i, (path, x) in enumerate(leaves) if path in said]
    return {
        path: random(seed + 31 * i, *x.shape, dtype=F64).to(said[path].compute)
        for i, path, x in floats
        if "frozen" not in path
    }


def total_loss(full, ys):
    at = dict(zip(tree.paths(full), tree.flatten(full)[0], strict=True))
    return torch.stack([(at[path] * y).sum(dtype=F64) for path, y in ys.items()]).sum()


# Codes on all levels and on some, and dtypes of one hop.
CODED = [
    "gather=int8[64],hop1=int8[64],hop2=int4[32]",
    "gather=fp8[32]@node,hop1=int4[64]@node,hop2=int8[64]",
    "hop1=bf16",
    "compute=bf16,hop1=int8[32],hop2=f32",
    "reduce=bf16,hop2=f32,gather=int8[128]@node",
]
LARGEST_CODE = {"int8": 127, "int4": 7, "fp8": 16}


def bound_of_codes(said, parts):
    """A code is off by at most half a step, which is a part of the largest value, on each level."""
    wires = [said.hop1 and said.hop1.codec, said.hop2]
    steps = [1 / LARGEST_CODE[wire.name] for wire in wires if isinstance(wire, Codec)]
    return 2 * sum(steps) * max((part.abs().max() for part in parts if part.numel()), default=0)


def bound_of_mean(said, parts, layout, sizes):
    """How far the result may be from the float64 mean of what each rank computed.

    Roundings in the dtype that travels: to it, once a level of hop 1, and in hop 2 the r - 1 sums
    and the division that a library does in it, then to it for the sum over micro-steps. In float32
    or wider: the sums of each level, of micro-steps, and their divisions. Once to the shards' own.
    """
    r = layout.world_size // layout.partition_size
    wide = torch.promote_types(said.reduce, F32)
    narrow = 1 + len(sizes) + 1 + (r + 1) * (r > 1)
    bound = mean_bound(parts, narrow, said.reduce)
    bound = bound + mean_bound(parts, layout.world_size + len(parts) + 4, wide)
    bound = bound + mean_bound(parts, 1, said.dtype)
    tiny = (
        2.0**-24 if F16 in astuple(said) else 0.0
    )  # below the least normal float16 errors are absolute
    return bound + (narrow + 2) * tiny


def means_and_bytes(layout, scheme, policies, accumulate):
    groups, rank, n = counted(groups_of(layout)), dist.get_rank(), layout.world_size
    groups = placed_as(groups, scheme)
    sizes, fixed = groups.hierarchy.route.sizes, scheme == "fixed_order"
    p, k = layout.partition_size, (level_sizes(layout) or (1,))[-1]
    table = {"ddp": (1, 1), "zero1": (1, 1), "zero2": (1, p), "hpz": (k, p), "hybrid": (k, k)}
    placed, means = Placed(*table.get(scheme, (p, p))), []
    for policy in policies:
        params = make_values()
        said = dtypes_by_path(policy, params)
        shards = mf.shard(params, groups, precision=policy, bucket_bytes=80)
        keep = mf.on_demand()
        for step in range(2):
            groups.traffic.clear()
            total = mf.GradSum(accumulate)
            run = mf.defer(shards, groups, keep, into=total)
            full = run.params
            for part in range(accumulate):
                total.backward(total_loss(full, cotangents(params, said, 1000 * part + rank)))
            run.close()
            found = total.grads()
            ledger = groups.traffic.snapshot()
            if step == 0:  # unused leaves are fetched by nobody
                (known,) = keep.learned.values()
                assert known.schedule is not None
                fetches = Counter(known.schedule.fetches)
            total_grads = mf.unshard(found, groups)
            total.release()
        # Bucket fields are those of the policy, as `round_trip` has seen.
        numbers = (fetches, groups.hierarchy.route, n // p, placed, accumulate, fixed)
        assert ledger == sent_in_a_step(buckets_of(shards), *numbers), (policy, scheme)
        at = dict(zip(tree.paths(total_grads), tree.flatten(total_grads)[0], strict=True))
        count = layout.world_size * accumulate
        each = [
            cotangents(params, said, 1000 * part + other)
            for other, part in product(range(n), range(accumulate))
        ]
        for ys in each:  # one tensor at two places: its cotangents are added, where they come
            ys["embed"] = ys["embed"] + ys.pop("zhead")
        for path in each[0]:
            parts = [ys[path].double() for ys in each]
            error = (at[path].double() - torch.stack(parts).sum(0) / count).abs()
            assert at[path].dtype == said[path].dtype
            bound = bound_of_mean(said[path], parts, layout, sizes)
            bound = bound + bound_of_codes(said[path], parts)
            assert (error <= bound).all(), (policy, scheme, path, error.max(), bound.min())
        means.append(at)
    return means


@pytest.mark.parametrize("layout", PLACEMENTS, ids=str)
@pytest.mark.short("2x2-p2")
def test_sums_of_gradients_and_their_bytes(ranks, layout):
    for i, scheme in enumerate(PLACEMENTS[layout]):
        policies = POLICIES[i + 1 :: 3] if scheme != "ddp" else POLICIES
        ranks(layout.world_size).run(means_and_bytes, layout, scheme, policies, 2 + i % 2)


@pytest.mark.parametrize("scheme", ["mics", "zero1", "zero2", "hpz", "hybrid", "fixed_order"])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("layout", [Layout((2, 2), 4), Layout((2, 2), 2)], ids=str)
@pytest.mark.covering(layout=Layout((2, 2), 4))
def test_sums_travel_as_codes_by_their_formulas(ranks, layout, scheme, accumulate):
    found = ranks(layout.world_size).run(means_and_bytes, layout, scheme, CODED, accumulate)
    for theirs in found[1:]:
        same_bits(theirs, found[0])  # replicas and ranks hold the same mean


# What narrow dtypes can lose, and do not.


def gradient_of(groups, values, policy, ys):
    """The mean over ranks and micro-steps of these cotangents, full, by a `GradSum`."""
    shards = mf.shard({"w": values}, groups, precision=policy)
    total = mf.GradSum(len(ys))
    full = mf.defer(shards, groups, mf.keep_all(), into=total).params
    for y in ys:
        total.backward((full["w"] * y.to(full["w"].dtype)).sum())
    found = mf.unshard(total.grads(), groups)["w"]
    total.release()
    return found


def long_sums(layout, schemes):
    groups = groups_of(layout)
    ys = [torch.full((9,), 256.0), *[torch.ones(9)] * 8]
    for scheme in schemes:
        placed = placed_as(groups, scheme)
        for policy in ("param=bf16", "compute=bf16,reduce=bf16", "param=bf16,reduce=f32"):
            found = gradient_of(placed, torch.ones(9), policy, ys).double()
            # Each summand is exact; the mean over ranks and the result are rounded to bfloat16.
            assert ((found - 264 / 9).abs() <= 3 * unit_roundoff(BF16) * 264 / 9).all(), policy
        lost = gradient_of(placed, torch.ones(9), "param=bf16,accumulate=bf16", ys).double()
        near = (lost - 256 / 9).abs() <= 3 * unit_roundoff(BF16) * 256 / 9
        assert near.all(), "256 + 1 = 256"


def test_sums_over_micro_steps_are_float32(ranks):
    ranks(1).run(long_sums, Layout((1,), 1), ["mics"])
    ranks(4).run(long_sums, Layout((2, 2), 4), ["mics", "zero1"])


def what_does_not_travel(layout, scheme):
    """Float32 gradients of each micro-step, where only their sum goes over bfloat16."""
    groups = placed_as(groups_of(layout), scheme)
    ys = [random(i, 50) for i in range(3)]  # the same on all ranks
    found = gradient_of(groups, torch.ones(50), "reduce=bf16", ys)
    sums = ys[0].clone()
    for y in ys[1:]:
        sums += y
    assert torch.equal(found, (sums / 3).bfloat16().float())


def test_what_does_not_travel_is_not_rounded(ranks):
    ranks(4).run(what_does_not_travel, Layout((2, 2), 1), "ddp")
    ranks(4).run(what_does_not_travel, Layout((2, 2), 4), "zero1")


HALF = "compute=f16,reduce=f16"


def float16_range(layout):
    rank, n = dist.get_rank(), layout.world_size
    r = n // layout.partition_size
    for groups in (groups_of(layout), placement.fixed_order(groups_of(layout))):
        # Sums made here are float32. Those of a library are float16, of values times a power of
        # two below 1/sqrt(r): see `mean_factors`.
        largest = 65504.0
        if r > 2 and not groups.replicas.fixed_order:
            largest /= 2
        half = partial(gradient_of, groups, torch.ones(70), HALF)
        for sign in (1.0, -1.0):
            large = torch.full((70,), sign * largest)
            assert torch.equal(half([large]), large), "the mean of equal values is that value"
            assert torch.equal(half([large] * 3), large)
        # The least normal value, of all ranks and of one alone; the mean is exact in float16.
        small = torch.full((70,), 2.0**-14)
        assert torch.equal(half([small]), small)
        for one in {0, n - 1}:
            alone = small * (rank == one)
            assert torch.equal(half([alone]), small / n)
        # Signs cancel without overflow on the way.
        signs = torch.full((70,), largest * (-1) ** rank)
        assert (half([signs]) == (0.0 if n > 1 else largest)).all()


@pytest.mark.parametrize(
    "layout",
    [
        Layout((2, 2), 1),
        Layout((2, 2), 2),
        Layout((2, 2), 4),
        Layout((8,), 1),
        Layout((2, 2, 2), 4),
    ],
    ids=str,
)
@pytest.mark.short("2x2-p2", "2x2-p1")
def test_float16_means_neither_overflow_nor_vanish(ranks, layout):
    ranks(layout.world_size).run(float16_range, layout)


# Reductions in fixed order: the bits of a plain loop over ranks.


def in_rank_order(parts):
    """The mean of some ranks' values: sums in float32 or wider, one after the other."""
    dtype = parts[0].dtype
    wide = torch.promote_types(dtype, F32)
    if len(parts) == 2:
        a, b = (part.to(wide) for part in parts)
        return (b - (b - a) * 0.5).to(dtype)
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part.to(wide)
    return (total / len(parts)).to(dtype)


def ordered_means(layout, dtype):
    groups = placement.fixed_order(groups_of(layout))
    rank, n, p = dist.get_rank(), layout.world_size, layout.partition_size
    for numel in (1, 1003):
        each = [random(100 + other, numel, dtype=dtype) for other in range(n)]
        like = mf.shard({"w": torch.zeros(numel, dtype=dtype)}, groups)
        sizes = groups.hierarchy.route.sizes
        replicas = []
        for start in range(0, n, p):
            parts = each[start : start + p]
            for size in reversed(sizes):  # ranks of an inner level are neighbours
                parts = [in_rank_order(parts[i : i + size]) for i in range(0, len(parts), size)]
            replicas += parts
        mine = {"w": each[rank].clone()}
        hop1 = mf.scatter_grads(mine, groups, like=like)
        same_bits(mf.unshard(hop1, groups), {"w": replicas[rank // p]})
        want = in_rank_order(replicas) if len(replicas) > 1 else replicas[0]
        for _ in range(2):
            both = mf.reduce_grads(mine, groups, like=like)
            same_bits(mf.unshard(both, groups), {"w": want})
        total = mf.GradSum()
        full = mf.defer(like, groups, mf.keep_all(), into=total).params
        total.backward((full["w"] * mine["w"]).sum())
        same_bits(mf.unshard(total.grads(), groups), {"w": want})
        total.release()
        # Over replicas alone, where parts of numel / r are not whole.
        over = [each[i] for i in range(rank % p, n, p)]
        found = start_mean([groups.replicas], each[rank].clone()).wait()
        same_bits(found, in_rank_order(over) if len(over) > 1 else over[0])
        # What is no gradient, as the buffers of a model: over partition groups, then replicas.
        order = [other % p for other in groups.partition.ranks]
        parts = [[each[start + place] for place in order] for start in range(0, n, p)]
        means = [in_rank_order(part) if p > 1 else part[0] for part in parts]
        found = mean_over_ranks(groups, each[rank].clone())
        same_bits(found, in_rank_order(means) if len(means) > 1 else means[0])


@pytest.mark.parametrize(
    "layout",
    [Layout((2,), 2), Layout((4,), 4), Layout((2, 2), 2), Layout((8,), 1), Layout((2, 4), 8)],
    ids=str,
)
@pytest.mark.short("4-p4", "2x2-p2")
def test_fixed_order_is_a_loop_over_ranks(ranks, layout):
    for dtype in (F32, BF16):
        ranks(layout.world_size).run(ordered_means, layout, dtype)


# torch.func, where each rank uses other leaves; the twin rounds as gather does.


def used_on_some_ranks(layout, precision, policy):
    """Every rank reduces every bucket, also those that its own loss does not touch."""
    groups, rank, n = groups_of(layout), dist.get_rank(), layout.world_size
    params = {"a": random(0, 5, dtype=F64), "b": random(1, 6, dtype=F64)}
    # Deferred, a bucket is fetched by all ranks or by none, so there both lie in one.
    shards = mf.shard(params, groups, bucket_bytes=1000 if policy else 1, precision=precision)

    def loss(p, rank):
        return p["a"].square().sum() + (p["b"].pow(3).sum() if rank % 2 == 0 else 0)

    def rounded(p, rank):
        dtype = mf.shards.Precision.parse(precision).formats("", F64).compute
        return loss({key: x.to(dtype) for key, x in p.items()}, rank)

    grads = grad(lambda s: loss(full_of(s, groups, policy and policy()), rank))(shards)
    found = mf.unshard(mf.reduce_grads(grads, groups), groups)
    each = [grad(rounded)(params, other) for other in range(n)]
    for key, x in found.items():
        want = sum(g[key] for g in each) / n
        assert (x - want).abs().max() <= 64 * torch.finfo(F64).eps * want.abs().max() > 0


@pytest.mark.parametrize("layout", [Layout((2,), 2), Layout((2, 2), 4), Layout((2, 2), 2)], ids=str)
@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("policy", [None, mf.on_demand, mf.keep_all])
@pytest.mark.covering
def test_what_some_ranks_use_is_reduced_by_all(ranks, layout, precision, policy):
    ranks(layout.world_size).run(used_on_some_ranks, layout, precision, policy)

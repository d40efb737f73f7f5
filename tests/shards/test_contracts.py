"""The laws that every layout x tree x dtype must keep, on gloo ranks; training has its own file."""

import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from cases import (
    DTYPES,
    LAYOUTS,
    TREES,
    everywhere,
    groups_of,
    mean_bound,
    plain_values,
    poison,
    random,
    same_bits,
    small_first,
)

import mics_fn as mf
from mics_fn import tree
from mics_fn.collectives.levels import start_all_gather, start_reduce_scatter
from mics_fn.shards.leaf import Nothing, is_leaf

every_layout = pytest.mark.parametrize("layout", small_first(LAYOUTS), ids=str)


# Law 1: gather(shard(p)) == p, bit for bit, with NaN in all padding (law 7); so is what ops get.


def round_trip(layout, name, dtype):
    groups = groups_of(layout)
    params = TREES[name](dtype, 11)
    want = plain_values(params)
    shards = poison(mf.shard(params, groups))
    same_bits(mf.gather(shards, groups.hierarchy), want)
    same_bits(mf.gather(shards, groups.flat), want)  # law 2: the route changes nothing
    full = mf.unshard(shards, groups)
    same_bits(full, want)
    stores = [x.untyped_storage().nbytes() for x in tree.flatten(full)[0]]
    assert stores == [x.nbytes for x in tree.flatten(full)[0]], "unshard keeps a bucket alive"
    leaves = [x for x in tree.flatten(shards, is_leaf)[0] if not isinstance(x, Nothing)]
    facts = [(tuple(x.shape), x.dtype) for x in tree.flatten(want)[0]]
    assert facts == [(leaf.shape, leaf.dtype) for leaf in leaves]
    for bucket_bytes, live in [(25 * 2**20, None), (40, 0), (40, 100)]:
        policy = mf.on_demand(live_bytes=live)
        parts = poison(mf.shard(TREES[name](dtype, 11), groups, bucket_bytes=bucket_bytes))
        for route in (groups.hierarchy, groups.flat, groups):  # on demand, then twice ahead
            deferred, spec = tree.flatten(mf.defer(parts, route, policy).params)
            assert [tuple(x.shape) for x in deferred] == [shape for shape, _ in facts]
            same_bits(spec.unflatten([x.detach().clone() for x in deferred]), want)
    return sum(x.numel() for x in tree.flatten(shards)[0])


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.covering
def test_gather_undoes_shard(ranks, layout, name, dtype):
    found = ranks(layout.world_size).run(round_trip, layout, name, dtype)
    params = TREES[name](dtype, 11)
    leaves = {id(x): x for x in tree.flatten(params)[0] if x.is_floating_point()}
    tied = 24 if name == "tied" else 0  # wte and its detached twin have 24 elements once
    frozen = 9 if name == "mixed" else 0
    numel = sum(x.numel() for x in leaves.values()) - tied - frozen
    for start in range(0, layout.world_size, layout.partition_size):
        part = found[start : start + layout.partition_size]
        assert sum(part) == numel, "every element is held once a replica"


# Law 2: hierarchical reductions equal flat ones, and both the mean, within rounding.


def reductions(layout, dtype):
    groups = groups_of(layout)
    rank, n, p = dist.get_rank(), layout.world_size, layout.partition_size
    grads = TREES["plain"](dtype, 100 + rank)
    wide = {k: [x.double() for x in everywhere(v, n)] for k, v in grads.items()}
    first = rank // p * p
    like = mf.shard({k: torch.zeros_like(v) for k, v in grads.items()}, groups)
    for route in (groups, groups.hierarchy, groups.flat):
        hop1 = mf.unshard(mf.scatter_grads(grads, route, like=like), groups)
        for key, value in hop1.items():
            mine = wide[key][first : first + p]
            exact = sum(mine) / p
            # each level sums its n_l parts and divides, in a wider type where dtype has 16 bits,
            # then rounds once
            roundings = sum(size + 1 for size in groups.hierarchy.route.sizes) + p + 1
            bound = mean_bound(mine, roundings, dtype)
            assert ((value.double() - exact).abs() <= bound).all(), (key, route)
    both = mf.unshard(mf.reduce_grads(grads, groups, like=like), groups)
    for key, value in both.items():
        exact = sum(wide[key]) / n
        roundings = sum(size + 1 for size in groups.hierarchy.route.sizes) + n // p + 2
        bound = mean_bound(wide[key], roundings, dtype)
        assert ((value.double() - exact).abs() <= bound).all(), key
    again = mf.unshard(mf.reduce_grads(mf.reduce_grads(grads, groups, like=like), groups), groups)
    if n // p in (1, 2, 4, 8):  # then a mean of equal values is exact: hops are idempotent
        same_bits(again, both)


@every_layout
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.covering
def test_hops_are_means(ranks, layout, dtype):
    ranks(layout.world_size).run(reductions, layout, dtype)


# Law 5: replicas hold the same bits.


def check_values(layout, odd_rank):
    seed = 4 if dist.get_rank() == odd_rank else 0
    mf.shard({"a": random(3, 4), "w": random(seed, 9, 5)}, groups_of(layout))


@pytest.mark.parametrize("layout", LAYOUTS[1:6:2], ids=str)
def test_check_names_the_rank_that_differs(ranks, layout):
    odd = layout.world_size - 1
    ranks(layout.world_size).run(check_values, layout, None)
    for failure in ranks(layout.world_size).try_run(check_values, layout, odd):
        assert failure.type_name == "DesyncError"
        assert "first difference: params.w" in failure.message
        assert f"rank {odd}: not as on the first rank" in failure.message


# Law 9: a collective that fails raises, on a rank that still waits, and leaves no value behind.


def agreed(timeout_s):
    """New groups of two ranks, and shards on whose tree they have agreed."""
    groups = mf.make_groups(2, timeout_s=timeout_s)
    shards = mf.shard({"w": random(0, 1000)}, groups)
    mf.gather(shards, groups.hierarchy)
    dist.barrier()
    return groups, shards


def peer_is_late():
    groups, _ = agreed(1.0)
    late, texts = (mf.errors.CollectiveError, mf.errors.PeerFailed), []  # gloo's limit, or ours
    if dist.get_rank() == 0:
        pending = start_all_gather(groups.hierarchy.route, torch.ones(4))
        for _ in range(2):
            try:
                texts.append(str(pending.wait()))
            except late as error:
                texts.append(str(error))
    dist.barrier()  # rank 1 comes here at once, and is late for as long as that
    return texts


def test_a_late_rank_is_an_error_within_the_limit_and_what_failed_has_no_result(ranks):
    first, again = ranks(2).run(peer_is_late)[0]
    assert "all-gather over 'gather rank'" in first
    assert again == "this collective failed before; its result does not exist"


def interrupted():
    """Ctrl-C while a peer is late: gloo's own wait would not hear it for minutes."""
    groups, shards = agreed(30.0)
    if dist.get_rank() == 1:
        dist.barrier()
        mf.gather(shards, groups.hierarchy)
        return 0.0
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    started = time.monotonic()
    try:
        mf.gather(shards, groups.hierarchy)
    except KeyboardInterrupt:
        return time.monotonic() - started
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        dist.barrier()
    return None


def test_an_interrupt_is_heard_at_once(ranks):
    waited = ranks(2).run(interrupted)[0]
    assert waited is not None
    assert waited < 10, "sent after 0.5 s; the peer would wait for 30"


def start_and_finish(layout):
    """Several buckets under way at once, waited for in any order that all ranks share."""
    groups, p, rank = groups_of(layout), layout.partition_size, dist.get_rank()
    route, first = groups.hierarchy.route, rank // p * p
    chunks = [torch.full((3,), float(10 * i + route.chunk)) for i in range(4)]
    for pick in ([0, 1, 2, 3], [3, 1, 0, 2]):
        pendings = [start_all_gather(route, chunk) for chunk in chunks]
        found = {i: pendings[i].wait() for i in pick}
        for i, full in found.items():
            assert full.shape == (p, 3)
            assert full[:, 0].tolist() == [10.0 * i + c for c in range(p)]
        assert all(pendings[i].wait() is found[i] for i in pick), "waiting again is free"
        assert not groups.state.active, "what is over is kept, and its memory with it"
    fulls = [torch.arange(p * 2.0).view(p, 2) * (i + 1) * (rank + 1) for i in range(4)]
    buffers = groups.hierarchy.pools.reducing
    parts = [x.wait() for x in [start_reduce_scatter(route, full, buffers) for full in fulls]]
    mean = sum(range(first + 1, first + p + 1)) / p
    for i, part in enumerate(parts):
        want = torch.arange(p * 2.0).view(p, 2)[route.chunk] * (i + 1) * mean
        assert (part - want).abs().max() <= 1e-5 * want.abs().max() + 1e-12


@every_layout
@pytest.mark.covering
def test_collectives_start_and_finish(ranks, layout):
    ranks(layout.world_size).run(start_and_finish, layout)

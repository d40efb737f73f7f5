"""Deferred parameters and sums of gradients that travel as codes, in every placement."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from cases import Layout, groups_of, placed_as, random, same_bits
from costs import Placed, buckets_of, counted, level_sizes, sent_in_a_step

import mics_fn as mf

CODED = "gather=int8[64],hop1=int8[64],hop2=int4[32]"
MIXED = [CODED, "gather=fp8[32]@node,hop1=int4[64]@node,hop2=int8[64]", "hop1=bf16"]
MIXED += ["compute=bf16,hop1=int8[32],hop2=f32", "reduce=bf16,hop2=f32,gather=int8[128]@node"]
SCHEMES = ["mics", "zero1", "zero2", "hpz", "hybrid", "fixed_order"]


def values():
    return {"a": random(0, 130), "b": random(1, 9, 50), "c": random(2, 3), "d": random(3, 700)}


def loss_of(full, rank, part):
    ys = {k: random(100 * part + 7 * rank + i, *x.shape) for i, (k, x) in enumerate(full.items())}
    return torch.stack([(full[k].float() * y).sum() for k, y in ys.items()]).sum()


def sums(layout, scheme, precision, accumulate, live):
    """Two steps of a `GradSum`: what a fetch gave, what was sent, and the gradients."""
    groups, rank = counted(groups_of(layout)), dist.get_rank()
    groups = placed_as(groups, scheme)
    p, k = layout.partition_size, (level_sizes(layout) or (1,))[-1]
    table = {"zero1": (1, 1), "zero2": (1, p), "hpz": (k, p), "hybrid": (k, k)}
    shards = mf.shard(values(), groups, precision=precision, bucket_bytes=1200)
    plain = mf.gather(shards, groups)
    keep = mf.keep_all() if live is None else mf.on_demand(live_bytes=live)
    found = []
    for _ in range(2):
        groups.traffic.clear()
        total = mf.GradSum(accumulate)
        with mf.defer(shards, groups, keep, into=total) as full:
            for part in range(accumulate):
                same_bits({name: x.clone() for name, x in full.items()}, plain)
                total.backward(loss_of(full, rank, part))
        grads = total.grads()
        ledger = groups.traffic.snapshot()
        found.append(mf.unshard(grads, groups))
        total.release()
    same_bits(found[1], found[0])
    (known,) = keep.learned.values()
    once = range(len(buckets_of(shards)))  # where all are kept nothing is learned
    fetches = Counter(once if known.schedule is None else known.schedule.fetches)
    numbers = (Placed(*table.get(scheme, (p, p))), accumulate, scheme == "fixed_order")
    route = groups.hierarchy.route
    want = sent_in_a_step(buckets_of(shards), fetches, route, groups.num_replicas, *numbers)
    ledger.pop("partition", None)  # what schedules compare
    assert ledger == want, (scheme, precision)
    return found[0]


def exact(layout, accumulate):
    """The mean of the gradients in float64, by name."""
    found = {k: torch.zeros(x.shape, dtype=torch.float64) for k, x in values().items()}
    for rank in range(layout.world_size):
        for part in range(accumulate):
            for i, (k, x) in enumerate(values().items()):
                found[k] += random(100 * part + 7 * rank + i, *x.shape).double()
    return {k: x / (layout.world_size * accumulate) for k, x in found.items()}


@pytest.mark.parametrize("precision", MIXED)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("live", [0, None])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("layout", [Layout((2, 2), 4), Layout((2, 2), 2)], ids=str)
@pytest.mark.covering(layout=Layout((2, 2), 4))
def test_sums_travel_as_codes_by_their_formulas(ranks, layout, scheme, precision, live, accumulate):
    found = ranks(layout.world_size).run(sums, layout, scheme, precision, accumulate, live)
    for theirs in found[1:]:
        same_bits(theirs, found[0])  # replicas and ranks hold the same mean
    # The largest value has a magnitude below 6; int4 rounds to a seventh of it, and fp8 less.
    step = {"int4": 6 / 7, "int8": 6 / 127, "fp8": 6 / 16, "bf16": 6 / 256}
    bound = sum(2 * size for name, size in step.items() if name in precision)
    for name, x in exact(layout, accumulate).items():
        assert (found[0][name].double() - x).abs().max() <= bound, name

"""What travels as codes: the laws of coded gathers and hops on gloo ranks, and their slow twins.

A twin holds the values of all ranks in one process and encodes and decodes them row by row.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import Layout, everywhere, groups_of, poison, random, same_bits

import mics_fn as mf
from mics_fn.collectives import Codec, Wire
from mics_fn.lab.report import buckets_of
from mics_fn.shards.bucket import Formats, LeafSpec, Precision, plan_buckets
from mics_fn.shards.pack import pack_chunk, pack_full, split_full

SMALL = [Layout((2, 2), 4), Layout((2, 2), 2), Layout((2,), 2), Layout((2,), 1), Layout((3,), 3)]
LARGE = [Layout((4,), 4), Layout((4,), 1), Layout((2, 2, 2), 8), Layout((2, 2, 2), 4)]
LAYOUTS = [*SMALL, *(pytest.param(x, marks=pytest.mark.thorough) for x in LARGE)]
every_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=str)
CODECS = ["int8[64]", "int4[16]", "fp8[32]"]


def params_of(seed, dtype=torch.float32):
    """Leaves that end inside of blocks; the first is 1000 times as large as the others."""
    sizes = {"big": (5, 7), "none": (0, 3), "odd": (3, 50), "one": (1,), "wide": (130,)}
    return {
        name: random(seed + i, *shape, dtype=dtype) * (1000.0 if name == "big" else 1.0)
        for i, (name, shape) in enumerate(sizes.items())
    }


def rounded(codec, values):
    """What arrives of values."""
    return codec.decode(codec.encode(values), values.numel(), values.dtype)


# Texts and layouts, without ranks.


def test_codecs_are_given_as_values_or_as_texts():
    codec, bf16, f32 = Codec.parse("int8[256]"), torch.bfloat16, torch.float32
    by_text = Precision(gather="int8[256]", hop1="int8[256]@node", hop2="bf16")
    assert Precision(gather=codec, hop1=Wire(codec, "node"), hop2=bf16) == by_text
    want = Formats(f32, f32, f32, f32, Wire(codec), Wire(codec, "node"), bf16)
    assert by_text.formats("", f32) == want
    i64 = torch.int64
    assert by_text.formats("", i64) == Formats(i64, i64, i64, i64)
    assert Precision(gather=bf16, compute=bf16).formats("", f32).gather is None
    with pytest.raises(mf.errors.PlanError, match="gather=bf16 for w, which is computed in"):
        Precision(gather=bf16).formats("w", f32)
    # What hop 1 sends as a dtype is what gradients are packed in, which leaves hop 2.
    found = Precision.parse("hop1=bf16").formats("", f32)
    assert found == Formats(f32, f32, bf16, f32, hop2=f32)
    assert Precision.parse("reduce=bf16,hop2=bf16").formats("", f32).hop2 is None


def test_leaves_and_chunks_of_a_coded_bucket_begin_on_blocks():
    formats = Precision.parse("gather=int8[64],hop1=int4[256]").formats("", torch.float32)
    specs = [LeafSpec(x, (n,), formats, 4) for x, n in zip("abc", (5, 200, 1), strict=True)]
    (bucket, *_) = {bucket for bucket, _ in plan_buckets(specs)}
    assert bucket.offsets == (0, 256, 512)
    assert bucket.numel == 1024
    assert bucket.chunk % 256 == 0
    assert "gather=int8[64], hop1=int4[256]" in str(bucket.formats)
    for plain in (bucket.exact, bucket.uncoded):
        assert (plain.gather, plain.hop1, plain.hop2) == (None, None, None)


# Law 1 and 3: gathers.


def coded_gathers(layout, wires, poisoned):
    groups = groups_of(layout)
    params, found = params_of(3), []
    for wire in wires:
        shards = mf.shard(params, groups, precision=f"gather={wire}")
        shards = poison(shards) if poisoned else shards
        same_bits(mf.unshard(shards, groups), params)
        full = mf.gather(shards, groups)
        if "@" not in wire:
            same_bits(mf.gather(shards, groups.flat), full)
        with mf.defer(shards, groups, mf.on_demand(live_bytes=0)) as deferred:
            for _ in range(2):  # the second fetch sends the codes of the first
                same_bits({name: x + 0 for name, x in deferred.items()}, full)
        (bucket,) = buckets_of(shards)
        assert bucket.gather is not None
        flat = pack_full(bucket, list(params.values()), device=torch.device("cpu"))
        coded = Wire(bucket.gather.codec, wire.partition("@")[2]).levels(groups.hierarchy.route)
        chunks = flat.view(bucket.parts, -1)
        if coded:
            chunks = torch.cat([rounded(bucket.gather.codec, row) for row in chunks])
        want = dict(zip(params, split_full(bucket, chunks.flatten()), strict=True))
        same_bits(full, want)
        found.append(full)
    return found


@every_layout
@pytest.mark.parametrize("poisoned", [False, True])
@pytest.mark.short("True-2x2-p4", "False-3-p3")
def test_all_ranks_decode_the_same_codes(ranks, layout, poisoned):
    inner = mf.groups.Topology(layout.sizes).names[0]
    wires = [*CODECS, *([f"int8[64]@{inner}"] if layout.partition_size > 1 else [])]
    found = ranks(layout.world_size).run(coded_gathers, layout, wires, poisoned)
    for theirs in found[1:]:
        for mine, their in zip(found[0], theirs, strict=True):
            same_bits(mine, their)


# Law 2 and 4: means, by a twin.


def twin_of_hop1(levels, coded, codec, rows, own):
    """This rank's chunk of the mean of all `rows`, with the roundings of coded levels.

    Args:
      levels: (size, place of this rank) of each level, outermost first.
      coded: how many of them are coded.
      rows: by coordinates of ranks, flat buffers that cover the same elements.
      own: the coordinates of this rank.
    """
    held = rows
    for level in reversed(range(len(levels))):
        size = levels[level]
        fewer = {}
        for at, flat in held.items():
            parts = [held[(*at[:level], k, *at[level + 1 :])] for k in range(size)]
            numel = flat.numel() // size
            mine = [row[at[level] * numel : (at[level] + 1) * numel] for row in parts]
            if level < coded:
                mine = [x if k == at[level] else rounded(codec, x) for k, x in enumerate(mine)]
            fewer[at] = sum(x.double() for x in mine) / size
            fewer[at] = fewer[at].float()
        held = fewer
    return held[own]


def coded_hops(layout, wire, at_hop2):
    groups, n, p = groups_of(layout), layout.world_size, layout.partition_size
    rank, route = dist.get_rank(), groups.hierarchy.route
    field = "hop2" if at_hop2 else "hop1"
    params = params_of(0)
    shards = mf.shard(params, groups, precision=f"{field}={wire}")
    grads = params_of(50 + 9 * rank)
    if at_hop2:  # as all ranks of a partition group have the same, hop 1 is exact
        grads = params_of(50 + 9 * (rank // p))
    (bucket,) = buckets_of(shards)
    everyone = {k: everywhere(v, n) for k, v in grads.items()}
    rows = [
        pack_full(bucket, [everyone[k][r] for k in params], device=torch.device("cpu"))
        for r in range(n)
    ]
    hop1 = mf.scatter_grads(grads, groups, like=shards)
    scale = torch.stack(rows).abs().amax().item()
    if not at_hop2:
        inside = [groups.plan.coords(first) for first in range(p)]
        mine = rows[rank // p * p : rank // p * p + p]
        assert bucket.hop1 is not None
        coded = bucket.hop1.levels(route)
        by_place = dict(zip(inside, mine, strict=True))
        want = twin_of_hop1(route.sizes, coded, bucket.hop1.codec, by_place, route.coords)
        got = pack(bucket, route.chunk, hop1)
        # Sums of a few float32 values in another order than the twin's.
        assert (got - want).abs().max().item() <= 2.0**-21 * scale
        return None
    before = pack(bucket, route.chunk, hop1)
    mean = mf.sync_replicas(hop1, groups)
    exact = mf.unshard(mf.sync_replicas(hop1, groups, exact=True), groups)
    full = mf.unshard(mean, groups)
    codec: Any = bucket.hop2 if isinstance(bucket.hop2, Codec) else None
    r = n // p
    for name, x in exact.items():
        block = 2 * scale / {"int8": 127, "int4": 7, "fp8": 8}[codec.name]
        assert ((full[name] - x).abs() <= (block if r > 1 else 0)).all(), name
        assert full[name].isfinite().all()
    if r == 1:
        same_bits(full, exact)
    again = mf.sync_replicas(hop1, mf.placement.fixed_order(groups))
    same_bits(again, mean)  # law 7
    same_bits(pack(bucket, route.chunk, hop1), before)  # none writes to what it is given
    return full


def pack(bucket, chunk, shards):
    """The chunk of a tree of shards, with zeros as padding."""
    pieces = [leaf.data.clone() for leaf in shards.values()]
    return pack_chunk(bucket, chunk, pieces, device=torch.device("cpu"))


@every_layout
@pytest.mark.parametrize("wire", [*CODECS, "int8[64]@outer"])
@pytest.mark.covering
def test_hop1_codes_what_it_sends_and_not_its_own_part(ranks, layout, wire):
    names = mf.groups.Topology(layout.sizes).names
    ranks(layout.world_size).run(coded_hops, layout, wire.replace("outer", names[0]), False)


@every_layout
@pytest.mark.parametrize("wire", CODECS)
@pytest.mark.covering
def test_replicas_get_the_same_bits_from_a_coded_hop2(ranks, layout, wire):
    found = ranks(layout.world_size).run(coded_hops, layout, wire, True)
    for theirs in found[1:]:
        same_bits(theirs, found[0])

"""What blocks of codes add to the size of buckets: bounded, or told."""

import re
import warnings

import pytest
import torch
from costs import buckets_of

import mics_fn as mf
from mics_fn.shards.bucket import LeafSpec, check_blocks, plan_buckets, warn_of_padding
from mics_fn.shards.precision import Precision

LEAVES = {f"w{i}": torch.ones(768) for i in range(200)}


def factor(precision):
    """The size of all buckets beside that of the leaves."""
    with mf.make_groups(1) as groups:
        shards = mf.shard(LEAVES, groups, precision=precision)
        return sum(bucket.numel for bucket in buckets_of(shards)) / (200 * 768)


@pytest.mark.parametrize(
    "precision",
    [
        "",
        "hop2=int8[256]",
        "gather=int8[256],hop1=int8[64]@rank,hop2=int4[2]",
        "gather=int8[768],hop2=int8[256]",
        "state=int8[64],hop2=int8[1024]; *1*: hop2=f32",
    ],
)
def test_blocks_that_fit_into_each_other_add_little(precision):
    assert factor(precision) < 1.5


@pytest.mark.parametrize(
    ("precision", "fields", "multiple"),
    [
        ("gather=int8[256],hop2=int8[250]", "gather=int8[256], hop2=int8[250]", "32,000"),
        ("gather=int8[256],hop1=int8[1000]", "gather=int8[256], hop1=int8[1000]", "32,000"),
        ("hop1=int8[65536],hop2=int8[65534]", "...", "2,147,418,112"),
        ("gather=int4[6], hop1=fp8[4]@rank, hop2=int8[10]", "...", "60"),
    ],
)
def test_blocks_of_one_leaf_fit_into_each_other(precision, fields, multiple):
    with pytest.raises(mf.errors.PlanError) as caught:
        factor(precision)
    text = f"""shard: blocks of different lengths for w0 do not fit into each other
  {fields}
  it would be padded to a multiple of {multiple} elements
  fix: choose lengths of which the longest is a multiple of the others, as 64 and 256"""
    assert re.fullmatch(re.escape(text).replace(r"\.\.\.", ".*"), str(caught.value))


def test_blocks_of_moments_and_of_frozen_leaves_count_as_well():
    big = {"w": torch.ones(4096)}
    with mf.make_groups(1) as groups:
        with pytest.raises(mf.errors.PlanError, match=r"hop2=int8\[250\], state=fp8\[256\]"):
            mf.shard(big, groups, precision="hop2=int8[250],state=fp8[256]")
        coded = "param=int4[250],hop2=int8[256]"
        shards = mf.shard(big, groups, precision=coded, frozen=lambda path: True)
        assert buckets_of(shards)[0].numel < 4096 + 500  # a frozen leaf is sent as it is kept


@pytest.mark.parametrize(
    ("precision", "fields", "times"),
    [
        ("hop2=int8[4096]", r"hop2=int8\[4096\]", 5.3),
        ("gather=int8[65536],hop2=int8[256]", r"gather=int8\[65536\], hop2=int8\[256\]", 84.9),
    ],
)
def test_blocks_longer_than_leaves_are_told_once(precision, fields, times):
    with pytest.warns(UserWarning, match=f"(?s)bucket 0 .*: {fields}\n.* {times} times") as told:
        assert factor(precision) == pytest.approx(times, rel=0.01)
    assert [each.filename for each in told] == [__file__]  # where `shard` is called


def test_the_worst_bucket_is_named_and_small_ones_are_not():
    wire = Precision.parse("hop2=int8[65536]").wires("", torch.float32)
    specs = [
        LeafSpec(path, (n,), torch.float32, 1, True, path[0], sent=wire)
        for path, n in (
            ("a", 9),
            ("b0", 4000),
            ("b1", 40000),
            ("b2", 1),
            ("c0", 9),
            ("c1", 9),
            ("c2", 1),
        )
    ]
    check_blocks("shard", specs)
    buckets = dict.fromkeys(bucket for bucket, _ in plan_buckets(specs))
    with pytest.warns(UserWarning, match=r"\(c0, c1, .*\): hop2") as told:
        warn_of_padding("shard", buckets, 1)
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_padding("shard", [b for b in buckets if b.names == "a"], 1)

"""What a text of precisions does not do, or does too much: fields without effect, and padding."""

import re
import warnings

import pytest
import torch
from costs import buckets_of
from torch import nn

import mics_fn as mf

W = torch.ones(70, 70)
LEAVES = {f"w{i}": torch.ones(768) for i in range(200)}


def told(precision, params=None, frozen=None):
    """The shards, and the warnings of `shard`."""
    base = nn.Parameter(torch.ones(64, 64), requires_grad=False)
    kinds = {"base": base, "count": torch.tensor(3), "emb": W, "head": W, "small": torch.ones(5)}
    with mf.make_groups(1) as groups, warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        shards = mf.shard(params or kinds, groups, precision=precision, frozen=frozen)
    assert all(each.filename == __file__ for each in found)  # where `shard` is called
    return shards, [f"{each.message}" for each in found]


GRADIENT = "base is frozen, and has no gradient"
KEPT = "base is kept as int4[64], which gathers send as they are"
SMALL = "small has fewer than 4,096 elements, so its moments stay values"


@pytest.mark.parametrize(
    ("override", "field", "why"),
    [
        ("*head*: hop2=int8[64]", "hop2=int8[64]", "head is tied to emb, whose path counts"),
        ("*count*: compute=bf16", "compute=bf16", "count is not a float tensor"),
        ("*base*: hop1=int8[64]", "hop1=int8[64]", GRADIENT),
        ("*base*: hop2=f32", "hop2=f32", GRADIENT),
        ("*base*: reduce=bf16", "reduce=bf16", GRADIENT),
        ("*base*: accumulate=f64", "accumulate=f64", GRADIENT),
        ("*base*: state=int8", "state=int8[256]", "base is frozen, and has no moments"),
        ("*base*: param=int4,gather=fp8[32]", "gather=fp8[32]", KEPT),
        ("*small*: state=fp8[64]", "state=fp8[64]", SMALL),
        ("*: hop2=int8", None, None),  # it has an effect on some
        ("*base*: param=int4[64],compute=bf16", None, None),
        ("*base*: gather=int8[64]", None, None),
        ("*emb*: hop2=int8[64],state=int8", None, None),
        ("*small*: state=f32", None, None),
    ],
)
def test_a_field_without_effect_is_told(override, field, why):
    _, found = told(override)
    pattern = override.partition(":")[0]
    if why is None:
        assert found == []
    else:
        what = f"{field} has no effect on the leaves that {pattern!r} matches\n  {why}\n  fix: "
        assert [each[: len(what) + 18] for each in found] == [f"shard: precision: {what}"]


def test_what_has_no_effect_is_told_for_each_field_of_each_override():
    _, found = told("*base*: hop1=int8,reduce=bf16,compute=bf16; *count*: hop2=f32")
    words = ["reduce=bf16", "hop1=int8[256]", "hop2=f32"]
    assert [next(w for w in words if w in each) for each in found] == words


def test_a_tied_leaf_is_coded_as_the_one_that_owns_its_data_says():
    for override, count, codes in (("*head*", 1, "None"), ("*emb*", 0, "int4[64]")):
        shards, found = told(f"{override}: param=int4", frozen=lambda path: True)
        assert len(found) == count
        assert str(shards["head"].bucket.codes) == codes


# What blocks of codes add to the size of buckets: bounded, or told.


@pytest.mark.parametrize(
    ("precision", "least", "most", "said"),
    [
        ("gather=int8[256],hop1=int8[64]@rank,hop2=int4[2]", 1, 1.5, None),
        ("gather=int8[768],hop2=int8[256]", 1, 1.5, None),
        ("state=int8[64],hop2=int8[1024]; *1*: hop2=f32", 1, 1.5, None),
        ("hop2=int8[4096]", 5.2, 5.4, r"bucket 0 .*: hop2=int8\[4096\]\n.* 5.3 times"),
        (
            "gather=int8[65536],hop2=int8[256]",
            80,
            90,
            r"bucket 0 .*: gather=int8\[65536\], hop2=int8\[256\]\n.* 84.9 times",
        ),
    ],
)
def test_what_blocks_add_is_little_or_told_once(precision, least, most, said):
    shards, found = told(precision, LEAVES)
    assert least <= sum(bucket.numel for bucket in buckets_of(shards)) / (200 * 768) <= most
    assert len(found) == (said is not None)
    assert said is None or re.search(f"(?s){said}", found[0])


@pytest.mark.parametrize(
    ("precision", "fields", "multiple"),
    [
        ("gather=int8[256],hop1=int8[1000]", "gather=int8[256], hop1=int8[1000]", "32,000"),
        ("gather=int4[6], hop1=fp8[4]@rank, hop2=int8[10]", "...", "60"),
    ],
)
def test_blocks_of_one_leaf_fit_into_each_other(precision, fields, multiple):
    with pytest.raises(mf.errors.PlanError) as caught:
        told(precision, LEAVES)
    text = f"""shard: blocks of different lengths for w0 do not fit into each other
  {fields}
  it would be padded to a multiple of {multiple} elements
  fix: choose lengths of which the longest is a multiple of the others, as 64 and 256"""
    assert re.fullmatch(re.escape(text).replace(r"\.\.\.", ".*"), str(caught.value))


def test_blocks_of_moments_and_of_frozen_leaves_count_as_well():
    big = {"w": torch.ones(4096)}
    with pytest.raises(mf.errors.PlanError, match=r"hop2=int8\[250\], state=fp8\[256\]"):
        told("hop2=int8[250],state=fp8[256]", big)
    shards, _ = told("param=int4[250],hop2=int8[256]", big, frozen=lambda path: True)
    assert buckets_of(shards)[0].numel < 4096 + 500  # a frozen leaf is sent as it is kept

"""Overrides that match leaves and have no effect on them: each is told, and no other is."""

import warnings

import pytest
import torch
from torch import nn

import mics_fn as mf

W = torch.ones(70, 70)


def tree_of_all_kinds():
    frozen = nn.Parameter(torch.ones(64, 64), requires_grad=False)
    return {"base": frozen, "count": torch.tensor(3), "emb": W, "head": W, "small": torch.ones(5)}


def told(precision, frozen=None):
    """The warnings of `shard`."""
    with mf.make_groups(1) as groups, warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        shards = mf.shard(tree_of_all_kinds(), groups, precision=precision, frozen=frozen)
    assert all(each.filename == __file__ for each in found)  # where `shard` is called
    return shards, [f"{each.message}" for each in found]


TIED = "head is tied to emb, whose path counts"
INT = "count is not a float tensor"
GRADIENT = "base is frozen, and has no gradient"


@pytest.mark.parametrize(
    ("override", "field", "why"),
    [
        ("*head*: hop2=int8[64]", "hop2=int8[64]", TIED),
        ("*head*: compute=bf16", "compute=bf16", TIED),
        ("*head*: param=bf16", "param=bf16", TIED),
        ("*count*: gather=int8[64]", "gather=int8[64]", INT),
        ("*count*: compute=bf16", "compute=bf16", INT),
        ("*base*: hop1=int8[64]", "hop1=int8[64]", GRADIENT),
        ("*base*: hop2=f32", "hop2=f32", GRADIENT),
        ("*base*: reduce=bf16", "reduce=bf16", GRADIENT),
        ("*base*: accumulate=f64", "accumulate=f64", GRADIENT),
        ("*base*: state=int8", "state=int8[256]", "base is frozen, and has no moments"),
        (
            "*base*: param=int4,gather=fp8[32]",
            "gather=fp8[32]",
            "base is kept as int4[64], which gathers send as they are",
        ),
        (
            "*small*: state=fp8[64]",
            "state=fp8[64]",
            "small has fewer than 4,096 elements, so its moments stay values",
        ),
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
    if why is not None:
        assert found == [
            f"shard: precision: {field} has no effect on the leaves that {pattern!r} matches\n"
            f"  {why}\n  fix: leave it out, or write a pattern of the leaves that are meant"
        ]
    else:
        assert found == []


def test_a_tied_leaf_is_coded_as_the_one_that_owns_its_data_says():
    everything = {"frozen": lambda path: True}
    shards, found = told("*head*: param=int4", **everything)
    assert len(found) == 1
    assert "param=int4[64] has no effect" in found[0]
    assert shards["emb"].bucket.codes is None
    shards, found = told("*emb*: param=int4", **everything)
    assert found == []
    assert str(shards["head"].bucket.codes) == "int4[64]"


def test_what_has_no_effect_is_told_for_each_field_of_each_override():
    _, found = told("*base*: hop1=int8,reduce=bf16,compute=bf16; *count*: hop2=f32")
    words = ["reduce=bf16", "hop1=int8[256]", "hop2=f32"]
    assert [next(w for w in words if w in each) for each in found] == words

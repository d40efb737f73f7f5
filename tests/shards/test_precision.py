"""Policies of dtypes and scales of a loss: pure values, no ranks."""

import fnmatch
import math
from dataclasses import astuple
from typing import Any

import pytest
import torch
from covering import examples
from hypothesis import example, given
from hypothesis import strategies as st

import mics_fn as mf
from mics_fn.collectives.levels import mean_factors
from mics_fn.shards.bucket import Precision

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
FIELDS = ("param", "compute", "reduce", "output", "accumulate", "gather", "hop1", "hop2", "state")

# Policies: which dtype a leaf has.


@pytest.mark.parametrize(
    ("policy", "own", "expected"),
    [
        *((Precision(), own, (own, own, own, F64 if own == F64 else F32)) for own in (F16, F64)),
        (Precision(compute=BF16), F32, (F32, BF16, F32, F32)),
        (Precision(param=F32), F16, (F32, F32, F32, F32)),
        (Precision(param=F64, reduce=F32), F32, (F64, F64, F32, F32)),
        (Precision(reduce=F64), F32, (F32, F32, F64, F64)),
        (Precision(reduce=F64, accumulate=BF16), F32, (F32, F32, F64, BF16)),
        *(
            (Precision(BF16, BF16, BF16, BF16, BF16), own, (own,) * 4)
            for own in (torch.int64, torch.bool)
        ),
    ],
    ids=str,
)
def test_each_field_falls_back_as_it_says(policy, own, expected):
    assert astuple(policy.formats("w", own))[:4] == expected


@examples(50, 200)
@given(st.text("a*?[]!.'", max_size=6).filter(lambda p: p.strip()), st.text("aA[]!.'", max_size=8))
@example("[ab]", "a")  # no set of characters
@example("*A*", "a")
def test_patterns_match_as_fnmatch_does_with_its_brackets_escaped(pattern, path):
    policy = Precision(overrides=((pattern, Precision(param=F64)),))
    want = fnmatch.fnmatchcase(path, pattern.replace("[", "[[]"))
    assert (policy.at(path).param == F64) == want


def test_later_overrides_win_field_by_field():
    policy = Precision.parse("bf16; *norm*: param=f32,compute=f32; *: reduce=f32; *norm*: f64")
    assert policy.at("norm") == Precision(param=F32, compute=F64, reduce=F32)
    assert astuple(policy.formats("norm", BF16))[:4] == (F32, F64, F32, F32)
    assert astuple(policy.formats("w", BF16))[:4] == (BF16, BF16, F32, F32)


# Their text.


dtypes = st.sampled_from([None, F16, BF16, F32, F64])
patterns = st.text(min_size=1, max_size=12).filter(
    lambda p: p == p.strip() and not set(p) & {";", "\n"} and p not in FIELDS
)
overrides = st.tuples(
    patterns, st.builds(Precision, dtypes, dtypes, dtypes, accumulate=dtypes).filter(str)
)
policies = st.builds(
    Precision, dtypes, dtypes, dtypes, dtypes, dtypes, st.lists(overrides, max_size=3).map(tuple)
)


@examples(15, 200)
@given(policies)
@example(Precision(overrides=(("a: b", Precision(compute=F32)), ("x,y=f32", Precision(param=F16)))))
def test_a_policys_text_gives_it_back(policy):
    text = str(policy)
    assert Precision.parse(text) == policy == Precision.parse(policy)
    assert str(Precision.parse(text)) == text


@pytest.mark.parametrize(
    ("text", "policy", "canonical"),
    [
        (" ; ; ", Precision(), ""),
        (
            " reduce = fp32 , float16, output=torch.float64",
            Precision(None, F16, F32, F64),
            "compute=f16,reduce=f32,output=f64",
        ),
        (
            "bf16; *norm*: compute=f32; *a: b*: f32,param=float64",
            Precision(
                compute=BF16,
                overrides=(("*norm*", Precision(compute=F32)), ("*a: b*", Precision(F64, F32))),
            ),
            "compute=bf16; *norm*: compute=f32; *a: b*: param=f64,compute=f32",
        ),
        (
            "hop2=int4[64], hop1=fp8[32]@node; *n*: gather=float32",
            Precision(
                hop2="int4[64]", hop1="fp8[32]@node", overrides=(("*n*", Precision(gather=F32)),)
            ),
            "hop1=fp8[32]@node,hop2=int4[64]; *n*: gather=f32",
        ),
    ],
)
def test_texts_that_people_write(text, policy, canonical):
    assert Precision.parse(text) == policy
    assert str(policy) == canonical


PATTERN = "  fix: write overrides as in '*norm*: compute=f32', after the rest"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        ("bf61", "compute='bf61' is not a float dtype of torch\n  fix: pass one of torch.float32"),
        ("weights=f32", f"'weights=f32' in 'weights=f32'\n  fix: give each of {', '.join(FIELDS)}"),
        ("bf16,compute=f32", "Precision.parse: 'compute=f32' in 'bf16,compute=f32'"),
        ("*norm*: f32; bf16", "Precision.parse: no pattern in 'bf16'\n" + PATTERN),
        ("bf16; *norm*:", "the override '*norm*' sets no field"),
        ("*norm*: output=f32", "the override '*norm*' sets no field"),
        ("hop2=int8[256]@node", "hop2=int8[256]@node: it has no such level"),
        ("gather=int8[256]@", "gather=int8[256]@: it has no such level"),
        ("hop1=bf16@node", "hop1=bf16@node: it has no such level"),
        ("gather=int7[256]", "int7[256]"),
        ("param=int8[3x]", "is not a codec"),
        ("compute=int8[256]", "is not a float dtype"),
        (lambda: Precision(param=torch.float8_e5m2), "param=torch.float8_e5m2 is not a float"),
    ],
)
def test_what_a_policy_can_not_be_is_refused(make, said):
    with pytest.raises(mf.errors.PlanError) as caught:
        Precision.parse(make) if isinstance(make, str) else make()
    assert said in str(caught.value)


# The factors of a mean.


@examples(50, 200)
@given(st.integers(1, 2**20))
def test_the_factors_make_a_mean(count):
    for dtype in (F16, BF16, F32, F64):
        before, after = mean_factors(dtype, count)
        assert math.frexp(before)[0] == 0.5, "a power of two"
        assert abs(before * after * count - 1) <= 2**-53
        if count & (count - 1) == 0:
            assert before * after * count == 1
        if dtype == F16:
            assert 0.5 < before * math.sqrt(count) <= 1
        else:
            assert before == 1


# The scale of a loss.


class Machine:
    """A dynamic scale as an object that changes, written down without looking."""

    def __init__(self, init, factor, interval):
        self.scale, self.run = init, 0
        self.rules = (factor, interval)

    def step(self, finite):
        factor, interval = self.rules
        if finite:
            self.run += 1
            if self.run == interval:
                self.run = 0
                self.scale = min(self.scale * factor, 2.0**24)
            return
        self.run, self.scale = 0, max(self.scale / factor, 1.0)


@examples(50, 200)
@given(
    st.sampled_from([0, 3, 20, 23]),
    st.sampled_from([2.0, 4.0, 1.5]),
    st.integers(1, 4),
    st.lists(st.booleans(), max_size=60),
)
def test_a_dynamic_scale_is_the_plain_machine(init, factor, interval, steps):
    options = {"factor": factor, "interval": interval}
    scale = start = mf.optim.dynamic_scale(2.0**init, **options)
    machine = Machine(2.0**init, factor, interval)
    for i, finite in enumerate(steps):
        scale = scale.adjust(torch.tensor(finite) if i % 2 else finite)  # both forms of the answer
        machine.step(finite)
        assert (scale.value, scale.good_steps) == (machine.scale, machine.run)
    assert scale.overflows == steps.count(False)
    assert start.overflows == 0, "the first is as it was"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"factor": 1.0}, "factor=1.0, expected a finite number above 1"),
        ({"init": 0.5}, "value=0.5, expected a finite number of at least 1"),
        ({"init": 2.0**25}, "value=33554432.0"),
        ({"value": 0.0}, "LossScale: value=0.0, expected a finite number above 0"),
    ],
)
def test_a_scale_that_can_not_work_is_refused(options, said):
    make: Any = mf.optim.static_scale if "value" in options else mf.optim.dynamic_scale
    with pytest.raises(mf.errors.PlanError) as caught:
        make(*options.values()) if "value" in options else make(**options)
    assert said in str(caught.value)


@pytest.mark.parametrize("finite", [torch.tensor(math.nan), None])
def test_a_norm_is_no_answer(finite):
    """`bool(nan)` is True, so a norm in the place of the answer would never be refused."""
    for scale in (mf.optim.no_scale(), mf.optim.static_scale(2.0), mf.optim.dynamic_scale()):
        with pytest.raises(mf.errors.LeafError, match="adjust: finite is .*, not a bool"):
            scale.adjust(finite)

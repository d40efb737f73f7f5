"""Policies of dtypes and scales of a loss: pure values, no ranks."""

import fnmatch
import math
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import mics_fn as mf
from mics_fn import tree
from mics_fn.collectives.wire import mean_factors
from mics_fn.optim.guard import LossScale
from mics_fn.shards.precision import Dtypes, Precision, precision_of

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
FIELDS = ("param", "compute", "reduce", "output", "accumulate", "gather", "hop1", "hop2", "state")


# Policies: which dtype a leaf has.


@pytest.mark.parametrize("own", [F16, BF16, F32, F64])
def test_an_empty_policy_keeps_each_tensors_dtype_and_sums_in_float32(own):
    wide = F64 if own == F64 else F32
    assert Precision().dtypes("w", own) == Dtypes(own, own, own, wide)


def test_each_field_falls_back_as_it_says():
    assert Precision(compute=BF16).dtypes("", F32) == (F32, BF16, F32, F32)
    assert Precision(param=F32).dtypes("", F16) == (F32, F32, F32, F32)
    assert Precision(param=F64, reduce=F32).dtypes("", F32) == (F64, F64, F32, F32)
    assert Precision(reduce=F64).dtypes("", F32).accumulate == F64
    assert Precision(reduce=F64, accumulate=BF16).dtypes("", F32).accumulate == BF16


@pytest.mark.parametrize("own", [torch.int64, torch.bool, torch.uint8])
def test_what_is_no_float_keeps_its_dtype(own):
    policy = Precision(BF16, BF16, BF16, BF16, BF16, (("*", Precision(compute=F32)),))
    assert policy.dtypes("n", own) == (own,) * 4


PATHS = ["h.0.ln_1.weight", "layers.0.norm.w", "h.0.attn.weight", "[1].bias"]


@pytest.mark.parametrize(
    ("pattern", "matched"),
    [
        ("*norm*", [1]),
        ("*ln_*", [0]),
        ("*", [0, 1, 2, 3]),
        ("h.?.*", [0, 2]),
        ("h.?.weight", []),
        ("[hl]*", []),  # no set of characters
        ("*bias", [3]),
        ("bias", []),  # the whole path has to match
        ("*.ln_1.*", [0]),
        ("*LN_*", []),
        ("[?].bias", [3]),  # brackets for themselves
    ],
)
def test_an_override_is_chosen_by_the_whole_path(pattern, matched):
    policy = Precision(compute=BF16, overrides=((pattern, Precision(compute=F32)),))
    found = [i for i, path in enumerate(PATHS) if policy.dtypes(path, F64).compute == F32]
    assert found == matched


@given(st.text("a*?[]!.'", max_size=6).filter(lambda p: p.strip()), st.text("a[]!.'", max_size=8))
def test_patterns_match_as_fnmatch_does_with_its_brackets_escaped(pattern, path):
    policy = Precision(overrides=((pattern, Precision(param=F64)),))
    want = fnmatch.fnmatchcase(path, pattern.replace("[", "[[]"))
    assert (policy.at(path).param == F64) == want


def test_later_overrides_win_field_by_field():
    policy = Precision(
        compute=BF16,
        overrides=(
            ("*norm*", Precision(param=F32, compute=F32)),
            ("*", Precision(reduce=F32)),
            ("*norm*", Precision(compute=F64)),
        ),
    )
    assert policy.at("norm") == Precision(param=F32, compute=F64, reduce=F32)
    assert policy.dtypes("norm", BF16) == (F32, F64, F32, F32)
    assert policy.dtypes("w", BF16) == (BF16, BF16, F32, F32)


def test_policies_are_values():
    a, b = (Precision(compute=BF16, overrides=[("*n*", Precision(param=F32))]) for _ in range(2))  # pyright: ignore
    assert a == b
    assert hash(a) == hash(b)
    assert a != Precision(compute=BF16)


# Their text.


dtypes = st.sampled_from([None, F16, BF16, F32, F64])
patterns = st.text(min_size=1, max_size=12).filter(
    lambda p: p == p.strip() and not set(p) & {";", "\n"} and p not in FIELDS
)
overrides = st.tuples(
    patterns, st.builds(Precision, dtypes, dtypes, dtypes, accumulate=dtypes).filter(str)
)
policies = st.builds(
    Precision, dtypes, dtypes, dtypes, dtypes, dtypes, st.lists(overrides, max_size=4).map(tuple)
)


@given(policies)
@example(Precision(overrides=(("a: b", Precision(compute=F32)), ("x,y=f32", Precision(param=F16)))))
def test_a_policys_text_gives_it_back(policy):
    text = str(policy)
    assert Precision.parse(text) == policy
    assert str(Precision.parse(text)) == text
    assert precision_of(text) == policy


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("", Precision()),
        (" ; ; ", Precision()),
        ("bf16", Precision(compute=BF16)),
        ("half", Precision(compute=F16)),
        ("param=f32,compute=bf16,reduce=f32", Precision(F32, BF16, F32)),
        (" reduce = fp32 , float16, output=torch.float64", Precision(None, F16, F32, F64)),
        ("accumulate=fp64, param=bfloat16, output=fp16", Precision(BF16, None, None, F16, F64)),
        (
            "compute=bf16; *norm*: compute=f32; *router*: f32,param=float32",
            Precision(
                compute=BF16,
                overrides=(("*norm*", Precision(compute=F32)), ("*router*", Precision(F32, F32))),
            ),
        ),
        ("*norm*: f32", Precision(overrides=(("*norm*", Precision(compute=F32)),))),
    ],
)
def test_texts_that_people_write(text, policy):
    assert Precision.parse(text) == policy


def test_the_canonical_text():
    policy = Precision.parse("half; *norm*: float32 ; *a: b*: param = fp64, half")
    assert str(policy) == "compute=f16; *norm*: compute=f32; *a: b*: param=f64,compute=f16"


NARROW = "not a dtype to compute, reduce or keep parameters in here"
DTYPES = "  fix: pass one of torch.float32, torch.bfloat16, torch.float16, torch.float64"
ONCE = f"  fix: give each of {', '.join(FIELDS)} once at most"


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("compute=fp8", ["Precision: compute='fp8' is not a torch.dtype", DTYPES]),
        ("bf61", ["Precision: compute='bf61' is not a torch.dtype", DTYPES]),
        ("weights=f32", ["Precision.parse: 'weights=f32' in 'weights=f32'", ONCE]),
        ("bf16,compute=f32", ["Precision.parse: 'compute=f32' in 'bf16,compute=f32'", ONCE]),
        (
            "bf16; f32",
            [
                "Precision.parse: no pattern in 'f32'",
                "  fix: write overrides as in '*norm*: compute=f32', after the rest",
            ],
        ),
        (
            "*norm*: f32; bf16",
            [
                "Precision.parse: no pattern in 'bf16'",
                "  fix: write overrides as in '*norm*: compute=f32', after the rest",
            ],
        ),
        (
            "bf16; *norm*:",
            [
                "Precision: the override '*norm*' sets no field",
                "  fix: write one, as in '*norm*: compute=f32'",
            ],
        ),
        (
            "bf16; : f32",
            [
                "Precision: the override '' has a pattern without a text form",
                "  fix: write ? for ';' and for spaces at its ends",
            ],
        ),
        (
            "*norm*: output=f32",
            [
                "Precision: the override '*norm*' sets what a leaf does not have",
                "  output=f32",
                "  fix: give it param, compute, reduce, accumulate, gather, hop1, hop2, state",
            ],
        ),
    ],
)
def test_what_a_text_can_not_say_is_refused_by_its_clause(text, lines):
    with pytest.raises(mf.errors.PlanError) as caught:
        Precision.parse(text)
    assert str(caught.value).splitlines() == lines


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Precision(param=torch.float8_e5m2), f"param=torch.float8_e5m2 is {NARROW}"),
        (lambda: Precision(reduce=torch.int32), "reduce=torch.int32 is not a float dtype"),
        (lambda: Precision(compute=torch.complex64), "is not a float dtype"),
        (lambda: Precision(compute="bf16"), "compute='bf16' is not a torch.dtype"),  # pyright: ignore
        (lambda: Precision(compute=[]), r"compute=\[\] is not a torch.dtype"),  # pyright: ignore
        (lambda: Precision(overrides=(("*", "f32"),)), "is not a pair"),  # pyright: ignore
        (lambda: Precision(overrides=("*n*",)), "is not a pair"),  # pyright: ignore
        (lambda: Precision(overrides=((" *", Precision(F32)),)), "without a text form"),
        (lambda: Precision(overrides=(("a;b", Precision(F32)),)), "without a text form"),
        (
            lambda: Precision(overrides=(("*", Precision(overrides=(("*", Precision(F32)),))),)),
            "what a leaf does not have",
        ),
    ],
)
def test_what_a_policy_can_not_be_is_refused(make, said):
    with pytest.raises(mf.errors.PlanError, match=said):
        make()


def test_policy_of_takes_a_policy_a_text_or_nothing():
    policy = Precision(compute=BF16)
    assert precision_of(policy) is policy
    assert precision_of("bf16") == policy
    assert precision_of(None) == Precision()


# Casts.


class Batch(NamedTuple):
    x: Any
    rest: Any


def test_only_float_tensors_are_cast():
    ids, mask = torch.tensor([1, 2]), torch.tensor([True])
    wave = torch.ones(2, dtype=torch.complex64)
    already = torch.ones(3, dtype=BF16)
    value = Batch(
        torch.ones(2), {"ids": ids, "no": None, "s": "text", "n": [mask, wave, already, 2.5]}
    )
    cast = Precision(compute=BF16, output=F64).cast_inputs(value)
    assert isinstance(cast, Batch)
    assert cast.x.dtype == BF16
    assert cast.rest["ids"] is ids
    assert cast.rest["no"] is None
    assert cast.rest["s"] == "text"
    assert all(a is b for a, b in zip(cast.rest["n"], value.rest["n"], strict=True))
    out = Precision(compute=BF16, output=F64).cast_output(value)
    assert (out.x.dtype, out.rest["n"][2].dtype) == (F64, F64)
    assert value.x.dtype == F32


def test_where_there_is_nothing_to_cast_the_very_object_comes_back():
    value = {"x": torch.ones(2), "n": torch.tensor(1)}
    assert Precision().cast_inputs(value) is value
    assert Precision(compute=F32).cast_inputs(value) is value
    assert Precision(compute=BF16).cast_output(value) is value
    assert Precision(compute=BF16).cast_inputs(None) is None


def test_a_cast_is_differentiable():
    x = torch.ones(3, requires_grad=True)
    Precision(compute=BF16).cast_inputs([x])[0].sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == F32


def test_what_other_libraries_return_is_cast():
    outputs = pytest.importorskip("transformers.modeling_outputs")
    value = outputs.CausalLMOutput(
        loss=torch.ones((), dtype=BF16), logits=torch.ones(2, dtype=BF16)
    )
    out = Precision(output=F32).cast_output(value)
    assert type(out) is type(value)
    assert (out.loss.dtype, out.logits.dtype) == (F32, F32)


# The factors of a mean.


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


def added(terms: torch.Tensor, order: str) -> torch.Tensor:
    """Columns of float16 terms added in float16, one after the other or in a tree."""
    if order == "sequence":
        total = terms[0]
        for term in terms[1:]:
            total = total + term
        return total
    while len(terms) > 1:
        odd = terms[len(terms) // 2 * 2 :]
        terms = torch.cat([terms[0 : len(terms) - len(odd) : 2] + terms[1::2], odd])
    return terms[0]


counts = st.one_of(st.integers(1, 70), st.sampled_from([127, 128, 500, 1000, 1024, 4095, 4096]))


@given(counts, st.sampled_from(["sequence", "tree"]), st.integers(0, 9999), st.booleans())
def test_no_sum_of_large_values_overflows(count, order, seed, same_sign):
    before, after = mean_factors(F16, count)
    # An addition at worst doubles what it adds, by rounding: half of the range is safe.
    largest = 65504 / 2 / (count * before)
    random = torch.Generator().manual_seed(seed)
    values = torch.rand(count, 8, generator=random, dtype=F64) * (0.2 * largest) + 0.8 * largest
    if not same_sign:
        values *= torch.randint(0, 2, (count, 8), generator=random) * 2 - 1
    values = values.to(F16)
    mean = added(values * before, order) * after
    assert mean.isfinite().all()
    # Each addition rounds once: n of them in sequence, log2 n in a tree.
    roundings = count + 2 if order == "sequence" else count.bit_length() + 2
    bound = roundings * 2.0**-11 * values.double().abs().mean(0) + 2.0**-24
    assert ((mean.double() - values.double().mean(0)).abs() <= bound).all()


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_four_values_of_half_the_range_do_not_overflow(count):
    before, after = mean_factors(F16, count)
    half = torch.full((count, 1), 65504 / 2, dtype=F16)
    mean = added(half * before, "sequence") * after
    assert abs(float(mean) - 65504 / 2) <= 16


@given(counts, st.sampled_from(["sequence", "tree"]), st.floats(2.0**-14, 2.0**-10))
def test_no_normal_value_goes_to_zero(count, order, size):
    before, after = mean_factors(F16, count)
    values = torch.full((count, 1), size, dtype=F16)
    alone = values.clone()
    alone[1:] = 0
    assert (values * before > 0).all()
    mean = float(added(values * before, order) * after)
    # `before` leaves at least 2**-20 / 2**-24: four bits; then each addition rounds.
    first = 2.0**-25 / (float(values[0]) * before)
    assert abs(mean / float(values[0]) - 1) <= first + (count + 2) * 2.0**-11
    assert float(added(alone * before, order)) > 0, "one rank's value alone"


def test_one_factor_alone_fails_where_both_do_not():
    """So that the tests above look where it matters."""
    large = torch.full((64, 1), 4e3, dtype=F16)
    before, after = mean_factors(F16, 64)
    assert not added(large, "tree").isfinite()
    assert abs(float(added(large * before, "tree") * after) - 4e3) <= 4
    small = torch.full((4096, 1), 2.0**-14, dtype=F16)
    before, after = mean_factors(F16, 4096)
    assert float(added(small / 4096, "tree")) == 0
    assert float(added(small * before, "tree") * after) == 2.0**-14


# The scale of a loss: sequences of good (.) and overflowing (!) steps, and what comes of them.

SEQUENCES = [
    # options, sequence, then value, credits and good_steps after each step
    ({"init": 8.0, "interval": 2}, "", "", "", ""),
    # no overflow
    ({"init": 8.0, "interval": 2}, ".....", "8 16 16 32 32", "1 1 1 1 1", "1 0 1 0 1"),
    ({"init": 8.0, "interval": 1}, "...", "16 32 64", "1 1 1", "0 0 0"),
    # nothing but overflows, down to the floor and no further
    ({"init": 8.0, "interval": 2}, "!!!!!", "4 2 1 1 1", "0 0 0 0 0", "0 0 0 0 0"),
    ({"init": 8.0, "interval": 2, "min": 3.0}, "!!!", "4 3 3", "0 0 0", "0 0 0"),
    ({"init": 8.0, "interval": 2, "factor": 4.0, "min": 0.25}, "!!!", "2 .5 .25", "0 0 0", "0 0 0"),
    # some: each ends a run of good steps
    ({"init": 8.0, "interval": 2}, ".!..!.", "8 4 4 8 4 4", "1 0 0 1 0 0", "1 0 1 0 0 1"),
    ({"init": 8.0, "interval": 3}, "..!..!...", "8 8 4 4 4 2 2 2 4", "1 1 0 0 0 0 0 0 1",
     "1 2 0 1 2 0 1 2 0"),
    # the ceiling
    ({"init": 8.0, "interval": 1, "max": 20.0}, "...!", "16 20 20 10", "1 1 1 0", "0 0 0 0"),
    # hysteresis: the second overflow counts, and each after it
    ({"init": 8.0, "interval": 2, "hysteresis": 2}, "!!!", "8 4 2", "1 0 0", "0 0 0"),
    ({"init": 8.0, "interval": 2, "hysteresis": 3}, "!!!!", "8 8 4 2", "2 1 0 0", "0 0 0 0"),
    # one good step does not restore credits, growth does
    ({"init": 8.0, "interval": 2, "hysteresis": 2}, "!.!.!", "8 8 4 4 2", "1 1 0 0 0", "0 1 0 1 0"),
    (
        {"init": 8.0, "interval": 2, "hysteresis": 2},
        "!..!.!..!!",
        "8 8 16 16 16 8 8 16 16 8",
        "1 1 2 1 1 0 0 2 1 0",
        "0 1 0 0 1 0 1 0 0 0",
    ),
    # at the ceiling a run of good steps still restores credits
    (
        {"init": 8.0, "interval": 2, "hysteresis": 2, "max": 8.0},
        "!..!!",
        "8 8 8 8 4",
        "1 1 2 1 0",
        "0 1 0 0 0",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("options", "steps", "values", "credits", "good"), SEQUENCES)
def test_a_dynamic_scale_follows_the_table(options, steps, values, credits, good):
    scale = start = mf.optim.dynamic_scale(**options)
    found = []
    for i, step in enumerate(steps):
        # Both forms of the answer.
        scale = scale.adjust(torch.tensor(step == ".") if i % 2 else step == ".")
        found.append((scale.value, scale.credits, scale.good_steps, scale.overflows))
    columns = [[float(x) for x in text.split()] for text in (values, credits, good)]
    overflows = [steps[: i + 1].count("!") for i in range(len(steps))]
    assert found == list(zip(*columns, overflows, strict=True))
    assert start == mf.optim.dynamic_scale(**options), "the first is as it was"


class Machine:
    """The same as an object that changes, written down without looking."""

    def __init__(self, init, factor, interval, hysteresis, lowest, highest):
        self.scale, self.run, self.left = init, 0, hysteresis
        self.rules = (factor, interval, hysteresis, lowest, highest)

    def step(self, finite):
        factor, interval, hysteresis, lowest, highest = self.rules
        if finite:
            self.run += 1
            if self.run == interval:
                self.run = 0
                self.left = hysteresis
                self.scale *= factor
                if self.scale > highest:
                    self.scale = highest
        else:
            self.run = 0
            if self.left > 0:
                self.left -= 1
            if self.left == 0:
                self.scale /= factor
                if self.scale < lowest:
                    self.scale = lowest


@given(
    st.integers(0, 20),
    st.sampled_from([2.0, 4.0, 1.5]),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(-3, 0),
    st.integers(20, 24),
    st.lists(st.booleans(), max_size=60),
)
def test_a_dynamic_scale_is_the_plain_machine(init, factor, interval, hysteresis, low, high, steps):
    low, high = 2.0**low, 2.0**high
    options = {"factor": factor, "interval": interval, "hysteresis": hysteresis}
    scale = mf.optim.dynamic_scale(2.0**init, **options, min=low, max=high)
    machine = Machine(2.0**init, factor, interval, hysteresis, low, high)
    for finite in steps:
        scale = scale.adjust(finite)
        machine.step(finite)
        assert (scale.value, scale.good_steps, scale.credits) == (
            machine.scale,
            machine.run,
            machine.left,
        )
    assert scale.overflows == steps.count(False)


def test_no_scale_gives_everything_back():
    scale, loss, grads = mf.optim.no_scale(), torch.tensor(3.0), {"w": torch.ones(2)}
    assert scale.value == 1.0
    assert not scale.checks
    assert scale.scale(loss) is loss
    assert scale.unscale(grads) is grads
    assert scale.adjust(False) is scale
    assert scale.adjust(torch.tensor(True)) is scale


def test_a_static_scale_stays_and_counts():
    scale = mf.optim.static_scale(128)
    assert scale.checks
    after = scale.adjust(False).adjust(True).adjust(torch.tensor(False))
    assert after == replace(scale, overflows=2)
    assert (after.value, scale.overflows) == (128.0, 0)


@pytest.mark.parametrize(
    "scale", [mf.optim.static_scale(2.0**12), mf.optim.dynamic_scale(), mf.optim.no_scale()]
)
def test_a_power_of_two_leaves_no_trace(scale: LossScale):
    """Also in the gradients of shards, which stay shards."""
    shards = mf.shard({"w": torch.randn(5, 3), "n": torch.tensor(2)}, mf.make_groups(1))

    def loss_fn(shards, times):
        return times(shards["w"].data.square().sum())

    plain = torch.func.grad(loss_fn)(shards, lambda loss: loss)
    scaled = torch.func.grad(loss_fn)(shards, scale.scale)
    assert torch.equal(scaled["w"].data, plain["w"].data * scale.value)
    found = scale.unscale(scaled)
    assert isinstance(found["w"], mf.shards.Sharded)
    assert torch.equal(found["w"].data, plain["w"].data)
    assert tree.flatten(found)[1] == tree.flatten(plain)[1]


def test_a_gradient_is_unscaled_by_the_scale_of_its_forward():
    """On the step at which the scale grows as well, so every update is the same."""
    scale, weight = mf.optim.dynamic_scale(4.0, interval=2), 1.0
    seen = []
    for _ in range(6):
        x = torch.tensor(weight, requires_grad=True)
        scale.scale(0.25 * x).backward()
        assert x.grad is not None
        seen.append((scale.value, float(x.grad), float(scale.unscale(x.grad))))
        scale = scale.adjust(bool(x.grad.isfinite()))
    assert seen == [(s, s / 4, 0.25) for s in (4.0, 4.0, 8.0, 8.0, 16.0, 16.0)]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"factor": 1.0}, "factor=1.0, expected a finite number above 1"),
        ({"factor": math.inf}, "factor=inf"),
        ({"factor": math.nan}, "factor=nan"),
        ({"interval": 0}, "interval=0, expected an int of at least 1"),
        ({"interval": 1.5}, "interval=1.5, expected an int"),
        ({"hysteresis": 0}, "hysteresis=0, expected an int of at least 1"),
        ({"hysteresis": True}, "hysteresis=True, expected an int"),
        ({"min": 0.0}, "min=0.0, expected a finite number above 0"),
        ({"init": 0.5}, "value=0.5, expected a finite number of at least 1\n  fix: min=1 is the"),
        ({"init": math.nan}, "value=nan"),
        ({"init": math.inf}, "value=inf"),
        ({"init": 2.0**25}, "max=16777216.0, expected a finite number of at least 3.35544e+07"),
        ({"max": math.inf}, "max=inf"),
        ({"max": math.nan}, "max=nan"),
    ],
)
def test_a_scale_that_can_not_work_is_refused(options, said):
    with pytest.raises(mf.errors.PlanError) as caught:
        mf.optim.dynamic_scale(**options)
    assert said in str(caught.value)


@pytest.mark.parametrize("scale", [0.0, -2.0, math.inf, math.nan])
def test_a_static_scale_is_above_zero(scale):
    with pytest.raises(
        mf.errors.PlanError, match="LossScale: value=.*, expected a finite number above 0"
    ):
        mf.optim.static_scale(scale)


@pytest.mark.parametrize("finite", [torch.tensor(math.nan), 1, None, torch.tensor([True, False])])
def test_a_norm_is_no_answer(finite):
    """`bool(nan)` is True, so a norm in the place of the answer would never be refused."""
    for scale in (mf.optim.no_scale(), mf.optim.static_scale(2.0), mf.optim.dynamic_scale()):
        with pytest.raises(mf.errors.LeafError, match="adjust: finite is .*, not a bool"):
            scale.adjust(finite)

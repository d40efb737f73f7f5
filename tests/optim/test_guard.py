"""Between reduction and update: unscale, refuse, clip; against a single process and plain code."""

import math
from dataclasses import replace
from statistics import median

import pytest
import torch
import torch.distributed as dist
from cases import LAYOUTS, Layout, everywhere, groups_of, poison, random, same_bits, small_first
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

import mics_fn as mf
from mics_fn import tree
from mics_fn.optim.norms import limited

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
SEVERAL = [layout for layout in LAYOUTS if layout.world_size > 1]


def whole(seed: int, *shape: int) -> torch.Tensor:
    """Whole numbers: sums over ranks, means of 2**k of them and squares are exact in float64."""
    random = torch.Generator().manual_seed(seed)
    return torch.randint(-50, 51, shape, generator=random).to(F64)


def values():
    """Tied, frozen, integer and empty leaves, and experts that live on other groups."""
    shared = whole(1, 4, 4)
    return {
        "dense": {
            "a": whole(0, 101),
            "tied": [shared, shared],
            "frozen": torch.nn.Parameter(whole(2, 9) * 100, requires_grad=False),
            "n": torch.tensor([1000, 7]),
            "empty": torch.zeros(0, dtype=F64),
        },
        "experts": [whole(3, 7), whole(4, 3, 5)],
    }


def homes(layout):
    return {"dense": groups_of(layout), "experts": groups_of(Layout(layout.sizes, 1))}


def gradients(rank):
    """A rank's full gradients."""
    by = rank + 1
    tied = [whole(11, 4, 4) * by, whole(12, 4, 4)]
    dense = {"a": whole(10, 101) * by, "tied": tied, "frozen": None, "n": None}
    dense["empty"] = torch.zeros(0, dtype=F64)
    return {"dense": dense, "experts": [whole(13, 7), whole(14, 3, 5) * by]}


def by_torch(world_size, max_norm, max_value):
    """The same on one process: plain parameters, torch's own clipping."""
    every = [gradients(rank) for rank in range(world_size)]

    def mean(pick):
        return torch.stack([pick(grads) for grads in every]).mean(0)

    full = {
        "a": mean(lambda g: g["dense"]["a"]),
        "tied": mean(lambda g: g["dense"]["tied"][0]) + mean(lambda g: g["dense"]["tied"][1]),
        "x": mean(lambda g: g["experts"][0]),
        "y": mean(lambda g: g["experts"][1]),
    }
    params = {name: torch.nn.Parameter(torch.zeros_like(grad)) for name, grad in full.items()}
    for name, param in params.items():
        param.grad = full[name].clone()
    norm = torch.nn.utils.clip_grad_norm_(params.values(), max_norm or math.inf)
    if max_value is not None:
        torch.nn.utils.clip_grad_value_(params.values(), max_value)
    return norm, {name: param.grad for name, param in params.items() if param.grad is not None}


def trained(full):
    """Those of the full gradients that a single process has too."""
    dense, experts = full["dense"], full["experts"]
    assert torch.equal(*dense["tied"])
    return {"a": dense["a"], "tied": dense["tied"][0], "x": experts[0], "y": experts[1]}


# Clipping, against torch's on one process.


LIMITS = [(0.5, None), (None, 3.0), (200.0, 2.5), (1e9, 1e9), (None, None)]


def clips_as_torch_does(layout):
    return [clips_by(layout, max_norm, max_value) for max_norm, max_value in LIMITS]


def clips_by(layout, max_norm, max_value):
    groups = homes(layout)
    shards = mf.shard(values(), groups)
    grads = poison(mf.reduce_grads(gradients(dist.get_rank()), groups, like=shards))
    norm, want = by_torch(layout.world_size, max_norm, max_value)
    plain = mf.optim.Guard(max_norm=max_norm, max_value=max_value)
    times = 2.0**12
    scaled = tree.map_leaves(lambda x: x * times, grads)
    found = []
    for guard, given_grads in (
        (plain, grads),
        (replace(plain, on_nonfinite="skip"), grads),
        (replace(plain, scale=mf.optim.static_scale(times)), scaled),
        (replace(plain, scale=mf.optim.dynamic_scale(times)), poison(scaled)),
    ):
        verdict = guard.judge(given_grads, groups)
        assert verdict.accept is True
        assert verdict.finite is (True if guard.decides else None)
        full = trained(mf.unshard(verdict.grads, groups))
        for name, grad in full.items():
            # Squares are exact; each of about 10 norms, their sum, and the factor round.
            assert ((grad - want[name]).abs() <= 16 * 2.0**-53 * want[name].abs()).all(), name
            if max_norm is None or norm <= max_norm:
                assert torch.equal(grad, want[name]), name
        if verdict.norm is None:
            assert max_norm is None
            assert guard == plain
        else:
            assert verdict.norm.dtype == F64
            assert abs(verdict.norm - norm) <= 12 * 2.0**-53 * norm
        found.append(full)
    for full in found[1:]:
        same_bits(full, found[0])
    return verdict.norm  # of a guard that decides


@pytest.mark.parametrize("layout", small_first(LAYOUTS), ids=str)
@pytest.mark.covering
@pytest.mark.short("2x2-p2", "2-p2")
def test_clipping_is_that_of_a_single_process(ranks, layout):
    found = ranks(layout.world_size).run(clips_as_torch_does, layout)
    for norms in found:
        assert all(map(torch.equal, norms, found[0])), "ranks would clip differently"


@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize("scale", [mf.optim.no_scale(), mf.optim.static_scale(2.0**5)])
def test_sixteen_bit_gradients_are_rounded_once(dtype, scale):
    """Neither the factor nor the norm is: a factor in bfloat16 alone would be off by 2**-9."""
    groups = mf.make_groups(1)
    exact = random(0, 400, dtype=F64).to(dtype).double()
    grads = mf.shard({"w": (exact * scale.value).to(dtype)}, groups)
    norm = exact.norm()
    for guard in (mf.optim.Guard(scale, 0.3), mf.optim.Guard(scale, 0.3, on_nonfinite="skip")):
        verdict = guard.judge(grads, groups)
        assert verdict.norm is not None
        assert abs(verdict.norm - norm) <= 400 * 2.0**-24 * norm
        got, want = verdict.grads["w"].data.double(), exact * (0.3 / (norm + 1e-6))
        # One rounding of the result, at least to a subnormal; some of the factor in float32.
        info = torch.finfo(dtype)
        assert (
            (got - want).abs() <= (info.eps / 2 + 2.0**-20) * want.abs() + info.tiny * info.eps
        ).all()
    unscaled = scale.unscale(grads)
    chained, _ = mf.optim.clip_by_global_norm(0.3, groups).update(unscaled, (), grads)
    same_bits(chained, mf.optim.Guard(max_norm=0.3).judge(unscaled, groups).grads)


@pytest.mark.parametrize("dtype", [F16, BF16, F32, F64])
@pytest.mark.parametrize("check", [None, "skip"])
def test_a_norm_may_be_above_what_the_dtype_holds(dtype, check):
    """No element is infinite, so it is no overflow: float16 ends at 65504, this norm is 6e5."""
    groups = mf.make_groups(1)
    grads = mf.shard([torch.full((100,), 6e4, dtype=dtype), torch.ones(3, dtype=F32)], groups)
    each = float(torch.tensor(6e4, dtype=dtype))
    verdict = mf.optim.Guard(max_norm=1.0, on_nonfinite=check).judge(grads, groups)
    assert verdict.accept
    assert verdict.norm is not None
    norm = math.sqrt(100 * each**2 + 3)
    # 100 squares, added in float32 at least; then one rounding of the result.
    rounding = 100 * (2.0**-53 if dtype == F64 else 2.0**-24)
    assert abs(float(verdict.norm) / norm - 1) <= rounding
    want = each / (norm + 1e-6)
    assert abs(float(verdict.grads[0].data[0]) / want - 1) <= rounding + torch.finfo(dtype).eps


# Overflow.


def scaled_to(dtype, grads, times):
    return tree.map_leaves(lambda grad: (grad * times).to(dtype), grads)


def tensors_of(state):
    leaves = tree.flatten(state)[0]
    return [x.clone() if isinstance(x, torch.Tensor) else torch.tensor(x) for x in leaves]


def train(layout, dtype, bad, guard, steps, donate):
    """Steps by hand; in those of `bad` one rank's loss overflows, another one each time."""
    groups = homes(layout)
    rank, n = dist.get_rank(), layout.world_size
    params = tree.map_leaves(lambda x: x.to(dtype) if x.is_floating_point() else x, values())
    params["dense"]["tied"][1] = params["dense"]["tied"][0]
    state = mf.init_state(mf.shard(params, groups), mf.optim.adam(0.01))
    found = []
    for step in range(steps):
        full = scaled_to(dtype, gradients(rank), guard.scale.value)
        if step in bad and rank == step % n:
            leaf = full["experts"][0] if step % 2 else full["dense"]["a"]
            leaf.view(-1)[3] = (math.inf, -math.inf, math.nan)[step % 3]
        grads = mf.reduce_grads(full, groups, like=state.params)
        before = tensors_of(state)
        verdict = guard.judge(grads, groups, donate=donate)
        if verdict.accept:
            state = mf.opt_step(state, verdict.grads)
        else:
            assert verdict.grads is grads, "nothing is touched"
            same_bits(before, tensors_of(state))
        assert verdict.accept is verdict.finite is (step not in bad)
        guard = verdict.next
        scale = guard.scale
        found.append(
            (verdict.accept, scale.value, scale.credits, scale.good_steps, scale.overflows)
        )
    return found, mf.unshard(state.params, groups), state.step


@pytest.mark.parametrize(
    ("layout", "dtype", "donate"),
    [*((x, BF16, False) for x in LAYOUTS), *((x, F32, True) for x in LAYOUTS[::3])],
    ids=str,
)
@pytest.mark.covering
@pytest.mark.short(
    "4-p4-torch.float32-True",
    "2x4-p2-torch.bfloat16-False",
    "2x2-p1-torch.float32-True",
    "2-p2-torch.bfloat16-False",
)
def test_an_overflow_on_one_rank_is_refused_by_all(ranks, layout, dtype, donate):
    guard = mf.optim.Guard(mf.optim.dynamic_scale(2.0**8, interval=2, hysteresis=2), max_norm=5.0)
    bad = {1, 2, 3, 7}
    found = ranks(layout.world_size).run(train, layout, dtype, bad, guard, 9, donate)
    #        .      X     X     X     .     .     .     X      .
    value = [2**8, 2**8, 2**7, 2**6, 2**6, 2**7, 2**7, 2**7, 2**7]
    credits, good = [2, 1, 0, 0, 0, 2, 2, 1, 1], [1, 0, 0, 0, 1, 0, 1, 0, 1]
    overflows = [0, 1, 2, 3, 3, 3, 3, 4, 4]
    accepted = [step not in bad for step in range(9)]
    want = list(zip(accepted, value, credits, good, overflows, strict=True))
    for rows, params, steps in found:
        assert rows == want
        assert steps == 5
        same_bits(params, found[0][1])


@pytest.mark.parametrize("layout", [Layout((1,), 1), Layout((2, 2), 2)], ids=str)
def test_a_scale_leaves_no_trace_in_a_run(ranks, layout):
    """Bit for bit the run without one that leaves out the same steps."""
    pool, bad = ranks(layout.world_size), {2, 3}
    runs = [
        pool.run(train, layout, F32, bad, mf.optim.Guard(scale, on_nonfinite="skip"), 7, False)[0]
        for scale in (
            mf.optim.no_scale(),
            mf.optim.static_scale(2.0**9),
            mf.optim.dynamic_scale(interval=2),
        )
    ]
    for run in runs[1:]:
        same_bits(run[1], runs[0][1])
    assert [rows[-1][1] for rows, *_ in runs] == [1.0, 2.0**9, 2.0**16]
    assert [rows[-1][4] for rows, *_ in runs] == [0, 2, 2]


VALUES = [math.inf, 1e6, math.nan, math.inf]


def differing(layout, guard, where, value):
    """Replicas that only did hop 1, so that each has a gradient of its own."""
    groups = groups_of(layout)
    grads = {"w": torch.full((12,), float(1 + groups.position // groups.partition_size))}
    if dist.get_rank() == where:
        grads["w"][5] = value
    verdict = guard.judge(mf.scatter_grads(grads, groups), groups)
    full = mf.unshard(verdict.grads, groups)["w"]
    return verdict.accept, verdict.finite, verdict.spike, verdict.next, verdict.norm, full


@pytest.mark.parametrize(
    ("layout", "value"),
    [(x, v) for i, x in enumerate(SEVERAL) for v in VALUES[i % 3 :][:2]],
    ids=str,
)
def test_replicas_that_differ_decide_alike(ranks, layout, value):
    watch = mf.optim.norm_spike(50.0, warmup=3)
    for norm in (10.0, 20.0, 30.0):
        watch = watch.look(norm)[1]
    guard = mf.optim.Guard(mf.optim.dynamic_scale(4.0), max_norm=1.0, spike=watch)
    found = ranks(layout.world_size).run(differing, layout, guard, layout.world_size - 1, value)
    finite = math.isfinite(value)
    scale = guard.scale.adjust(finite)
    for accept, was_finite, spike, after, _, _ in found:
        assert (accept, was_finite, spike) == (False, finite, finite)
        assert after == replace(guard, scale=scale)


@pytest.mark.parametrize("layout", SEVERAL, ids=str)
def test_each_replica_clips_by_its_own_norm_and_remembers_the_highest(ranks, layout):
    guard = mf.optim.Guard(max_norm=1.0, spike=mf.optim.norm_spike())
    found = ranks(layout.world_size).run(differing, layout, guard, -1, 0.0)
    p, highest = layout.partition_size, layout.world_size // layout.partition_size
    for rank, (accept, _, _, after, norm, full) in enumerate(found):
        assert accept
        own = (rank // p + 1) * math.sqrt(12)
        assert abs(float(norm) - own) <= 1e-6 * own
        assert abs(float(full.double().norm()) - 1) <= 1e-5
        assert after == found[0][3]
        assert after.spike is not None
        assert abs(after.spike.norms[0] - highest * math.sqrt(12)) <= 1e-5


def only_experts_overflow(layout):
    """Only hop 1, where experts have p = 1: no collective has shown the value to anybody."""
    groups = homes(layout)
    shards = mf.shard(values(), groups)
    grads = gradients(dist.get_rank())
    if dist.get_rank() == 1:
        grads["experts"][0][2] = math.inf
    verdict = mf.optim.Guard(on_nonfinite="skip").judge(
        mf.scatter_grads(grads, groups, like=shards), groups
    )
    assert verdict.norm is not None
    seen = everywhere(verdict.norm.isfinite(), layout.world_size)
    return verdict.accept, [bool(x) for x in seen]


@pytest.mark.parametrize("layout", SEVERAL, ids=str)
def test_what_only_one_rank_has_seen_is_agreed_on(ranks, layout):
    found = ranks(layout.world_size).run(only_experts_overflow, layout)
    assert [accept for accept, _ in found] == [False] * layout.world_size
    seen = [rank != 1 for rank in range(layout.world_size)]
    assert found[0][1] == seen, "the others could not know"


def experts_of_some_ranks():
    """Dense leaves on all ranks; experts of their own for each half, so no replica sees both."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("half", "data"))
    with mf.make_groups(2, mesh=mesh["data"], timeout_s=20) as experts:
        groups = {"dense": groups_of(Layout((4,), 4)), "experts": experts}
        grads = {"dense": torch.ones(9), "experts": torch.ones(5)}
        if dist.get_rank() == 3:
            grads["experts"][4] = math.nan
        verdict = mf.optim.Guard(on_nonfinite="skip").judge(mf.reduce_grads(grads, groups), groups)
        return verdict.accept


def test_ranks_that_share_only_a_partition_group_decide_alike(ranks):
    assert ranks(4).run(experts_of_some_ranks) == [False] * 4


# Spikes.


def plain_watch(norms, factor, window, warmup, skip):
    """Which are spikes, and what is remembered; written down without looking."""
    known, spikes = [], []
    for norm in norms:
        spike = False
        if not math.isfinite(norm):
            spikes.append(False)
            continue
        if len(known) >= warmup:
            middle = median(known)
            spike = middle > 0 and norm > factor * middle
        spikes.append(spike)
        if not (spike and skip):
            known.append(norm)
            if len(known) > window:
                del known[0]
    return spikes, known


sizes = st.one_of(st.floats(0, 4), st.sampled_from([0.0, 1.0, 10.0, 10.1, 1e9, math.inf, math.nan]))


@given(
    st.lists(sizes, max_size=40),
    st.sampled_from([1.5, 10.0]),
    st.integers(1, 6),
    st.integers(1, 6),
    st.booleans(),
)
def test_a_watch_is_the_plain_one(norms, factor, window, warmup, skip):
    warmup = min(warmup, window)
    action = "skip" if skip else "report"
    watch = mf.optim.norm_spike(factor, window=window, warmup=warmup, action=action)
    found = []
    for norm in norms:
        spike, watch = watch.look(norm)
        found.append(spike)
    assert (found, list(watch.norms)) == plain_watch(norms, factor, window, warmup, skip)


def watched(layout, action, factors):
    groups = groups_of(layout)
    state = mf.init_state(mf.shard({"w": torch.zeros(9)}, groups), mf.optim.sgd(1.0))
    guard = mf.optim.Guard(spike=mf.optim.norm_spike(4.0, window=3, warmup=2, action=action))
    found = []
    for factor in factors:
        grads = mf.reduce_grads({"w": torch.full((9,), factor)}, groups)
        verdict = guard.judge(grads, groups)
        before = state
        if verdict.accept:
            state = mf.opt_step(state, verdict.grads)
        assert verdict.accept or state is before
        guard = verdict.next
        watch = guard.spike
        assert watch is not None
        found.append((verdict.accept, verdict.finite, verdict.spike, watch.norms))
    return found, mf.unshard(state.params, groups)["w"].tolist()


@pytest.mark.parametrize("layout", [LAYOUTS[0], LAYOUTS[4], LAYOUTS[9]], ids=str)
@pytest.mark.parametrize("action", ["skip", "report"])
def test_spikes_are_skipped_or_reported(ranks, layout, action):
    factors = [1.0, 50.0, 2.0, 200.0, math.nan, 3.0]
    found = ranks(layout.world_size).run(watched, layout, action, factors)
    # 3 is the norm of nine ones. The first spike comes before two norms are known.
    norms = [(3,), (3, 150), (3, 150, 6), (3, 150, 6), (3, 150, 6), (150, 6, 9)]
    spikes, took = [False, False, False, True, False, False], [1.0, 50.0, 2.0, 3.0]
    accept = [True, True, True, False, False, True]
    if action == "report":
        norms = [(3,), (3, 150), (3, 150, 6), (150, 6, 600), (150, 6, 600), (6, 600, 9)]
        accept[3], took = True, [*took, 200.0]
    for rows, w in found:
        assert [row[:3] for row in rows] == [
            (a, i != 4, s) for i, (a, s) in enumerate(zip(accept, spikes, strict=True))
        ]
        assert [len(row[3]) for row in rows] == [len(want) for want in norms]
        for row, want in zip(rows, norms, strict=True):
            assert row[3] == pytest.approx(want, rel=1e-6)
        assert w == [-sum(took)] * 9


# Waiting, memory, donation.


def test_the_host_waits_once_where_something_is_decided_and_else_never(monkeypatch):
    groups = mf.make_groups(1)
    grads = mf.shard({"w": torch.ones(4), "v": torch.ones(3, dtype=BF16)}, groups)
    waits = []
    for name in ("item", "tolist", "__bool__", "__float__", "__int__", "__index__", "cpu", "numpy"):
        real = getattr(torch.Tensor, name)

        def noted(*args, real=real, name=name, **kwargs):
            waits.append(name)
            return real(*args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, noted)
    limited_too = mf.optim.Guard(max_norm=0.5, max_value=0.1, on_nonfinite="ignore")
    for guard in (
        mf.optim.Guard(on_nonfinite="ignore"),
        mf.optim.Guard(max_norm=0.5, on_nonfinite="ignore"),
        mf.optim.Guard(max_value=0.5, on_nonfinite="ignore"),
        limited_too,
    ):
        verdict = guard.judge(grads, groups)
        assert not waits, guard
        assert verdict.accept is True
        assert verdict.next is guard
        assert (verdict.norm is None) == (guard.max_norm is None)
    for guard in (
        mf.optim.Guard(on_nonfinite="skip"),
        mf.optim.Guard(mf.optim.static_scale(1.0)),
        mf.optim.Guard(mf.optim.dynamic_scale()),
        mf.optim.Guard(spike=mf.optim.norm_spike()),
        mf.optim.Guard(),
        replace(limited_too, on_nonfinite="skip"),
        replace(limited_too, on_nonfinite=None, scale=mf.optim.dynamic_scale()),
    ):
        waits.clear()
        assert guard.judge(grads, groups).norm is not None
        assert waits == ["tolist"], guard


@pytest.mark.parametrize(
    "guard",
    [
        mf.optim.Guard(),
        mf.optim.Guard(on_nonfinite="skip"),
        mf.optim.Guard(mf.optim.static_scale(1.0)),
        mf.optim.Guard(max_norm=100.0, on_nonfinite="skip"),
    ],
)
def test_where_nothing_is_to_do_nothing_is_touched(guard):
    groups = mf.make_groups(1)
    grads = mf.shard({"w": torch.ones(4)}, groups)
    for donate in (False, True):
        verdict = guard.judge(grads, groups, donate=donate)
        assert verdict.grads is grads
        assert grads["w"].data.tolist() == [1.0] * 4


def donating(layout):
    groups = homes(layout)
    shards = mf.shard(values(), groups)
    guard = mf.optim.Guard(mf.optim.static_scale(4.0), max_norm=1.0, max_value=0.1)
    grads = mf.reduce_grads(gradients(dist.get_rank()), groups, like=shards)
    kept = guard.judge(grads, groups).grads
    pieces = tree.flatten(grads)[0]
    verdict = guard.judge(grads, groups, donate=True)
    same_bits(trained(mf.unshard(verdict.grads, groups)), trained(mf.unshard(kept, groups)))
    with pytest.raises(mf.errors.DonatedError, match=r"grads.dense.a was donated to Guard.judge"):
        _ = grads["dense"]["a"].data
    same = [
        a.data_ptr() == b.data_ptr()
        for a, b in zip(pieces, tree.flatten(verdict.grads)[0], strict=True)
        if a.numel()
    ]
    assert layout.world_size == 1 or all(same), "donated chunks are written in place"


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.covering
def test_donation_saves_the_copy_and_changes_no_number(ranks, layout):
    ranks(layout.world_size).run(donating, layout)


def test_a_donation_writes_to_nothing_else():
    """On one rank pieces are views of what autograd gave, which may hold other values or be one."""
    groups = mf.make_groups(1)
    flat = torch.ones(12)
    like = mf.shard({k: torch.zeros(4) for k in "ab"}, groups)
    grads = mf.reduce_grads({"a": flat[:4], "b": flat[6:10]}, groups, like=like)
    out = mf.optim.Guard(max_value=0.5).judge(grads, groups, donate=True).grads
    assert flat[4:6].tolist() + flat[10:].tolist() == [1.0] * 4
    assert out["a"].data.tolist() + out["b"].data.tolist() == [0.5] * 8
    guard = mf.optim.Guard(mf.optim.static_scale(2.0))
    alone = mf.shard({k: torch.zeros(4) for k in "ab"}, groups, bucket_bytes=1)
    for layout in (like, alone):
        same = torch.ones(4)
        grads = mf.reduce_grads({"a": same, "b": same}, groups, like=layout)
        out = guard.judge(grads, groups, donate=True).grads
        assert [x.data.tolist() for x in out.values()] == [[0.5] * 4] * 2, "scaled once"
    grads = mf.reduce_grads({"a": torch.ones(1).expand(4), "b": torch.ones(4)}, groups, like=like)
    out = guard.judge(grads, groups, donate=True).grads
    assert out["a"].data.tolist() == [0.5] * 4


def test_without_donation_the_gradients_stay():
    groups = mf.make_groups(1)
    grads = mf.shard({"w": torch.ones(4)}, groups)
    before = grads["w"].data.clone()
    mf.optim.Guard(mf.optim.static_scale(2.0), 0.1, 0.1).judge(grads, groups)
    assert torch.equal(grads["w"].data, before)


def test_a_factor_on_the_device_and_one_on_the_host_give_the_same():
    groups = mf.make_groups(1)
    for dtype in (F16, BF16, F32, F64):
        grads = mf.shard([random(3, 50, dtype=dtype)], groups)
        factor = torch.tensor(0.0123, dtype=F64)
        same_bits(limited(grads, factor), limited(grads, float(factor)))


def test_an_empty_tree_is_judged():
    groups = mf.make_groups(1)
    guard = mf.optim.Guard(mf.optim.dynamic_scale(), 1.0, 1.0, mf.optim.norm_spike(), "skip")
    verdict = guard.judge({}, groups)
    assert verdict.accept
    assert verdict.norm is not None
    assert float(verdict.norm) == 0


# Refusals.


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: mf.optim.Guard(max_norm=0.0), "Guard: max_norm=0.0, expected a number above 0"),
        (
            lambda: mf.optim.Guard(max_norm=math.nan),
            "Guard: max_norm=nan, expected a number above 0",
        ),
        (
            lambda: mf.optim.Guard(max_value=-1.0),
            "Guard: max_value=-1.0, expected a number above 0",
        ),
        (lambda: mf.optim.Guard(spike=10.0), "Guard: spike=10.0 is not a watch"),  # pyright: ignore
        (
            lambda: mf.optim.Guard(on_nonfinite=True),  # pyright: ignore
            "Guard: on_nonfinite=True, expected 'skip', 'raise' or 'ignore'",
        ),
        (
            lambda: mf.optim.Guard(mf.optim.dynamic_scale(), on_nonfinite="ignore"),
            "Guard: on_nonfinite='ignore' with a dynamic scale",
        ),
    ],
)
def test_a_guard_that_can_not_work_is_refused(make, said):
    with pytest.raises(mf.errors.PlanError) as caught:
        make()
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"factor": 1.0}, "factor=1.0, expected a finite number above 1"),
        ({"factor": math.inf}, "factor=inf"),
        ({"window": 0}, "window=0, expected an int of at least 1"),
        ({"warmup": 1.5}, "warmup=1.5, expected an int"),
        ({"window": 5, "warmup": 6}, "warmup=6, expected at most window=5"),
        ({"action": "warn"}, "action='warn', expected 'skip' or 'report'"),
    ],
)
def test_a_watch_that_can_not_work_is_refused(options, said):
    with pytest.raises(mf.errors.PlanError) as caught:
        mf.optim.norm_spike(**options)
    assert said in str(caught.value)


def test_gradients_that_still_owe_a_hop_are_refused():
    groups = mf.make_groups(1)
    with pytest.raises(mf.errors.LeafError, match=r"grads.w is not a shard"):
        mf.optim.Guard(on_nonfinite="skip").judge({"w": torch.ones(2)}, groups)
    grads = mf.shard({"w": torch.ones(2)}, groups)
    with pytest.raises(mf.errors.GroupsError, match="Guard.judge: got a hierarchy, needs groups"):
        mf.optim.Guard(on_nonfinite="skip").judge(grads, groups.hierarchy)
    with pytest.raises(mf.errors.GroupsError, match="Guard.judge: groups is None"):
        mf.optim.Guard().judge(grads, None)

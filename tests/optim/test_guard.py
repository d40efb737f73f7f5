"""Between reduction and update: unscale, refuse, clip; against a single process and plain code."""

import math
from dataclasses import replace
from statistics import median

import pytest
import torch
import torch.distributed as dist
from cases import Layout, groups_of, poison, random, same_bits
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

import mics_fn as mf
from mics_fn import tree

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


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


def by_torch(world_size, max_norm):
    """The same on one process: plain parameters, torch's own clipping."""
    every = [parts(gradients(rank)) for rank in range(world_size)]
    params = {name: torch.nn.Parameter(torch.zeros_like(x)) for name, x in every[0].items()}
    for name, param in params.items():
        param.grad = torch.stack([each[name] for each in every]).mean(0)
    norm = torch.nn.utils.clip_grad_norm_(params.values(), max_norm or math.inf)
    return norm, {name: param.grad for name, param in params.items() if param.grad is not None}


def parts(full):
    """Full gradients as a single process has them: those of tied leaves are added."""
    dense, (x, y) = full["dense"], full["experts"]
    return {"a": dense["a"], "tied": dense["tied"][0] + dense["tied"][1], "x": x, "y": y}


def trained(full):
    """The same of what comes back, where tied leaves hold one gradient."""
    assert torch.equal(*full["dense"]["tied"])
    return {**parts(full), "tied": full["dense"]["tied"][0]}


# Clipping, against torch's on one process.


def clips_as_torch_does(layout):
    return [clips_by(layout, max_norm) for max_norm in (0.5, 1e9, None)]


def clips_by(layout, max_norm):
    groups = homes(layout)
    shards = mf.shard(values(), groups)
    grads = poison(mf.reduce_grads(gradients(dist.get_rank()), groups, like=shards))
    norm, want = by_torch(layout.world_size, max_norm)
    plain = mf.optim.Guard(max_norm=max_norm)
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
    if max_norm is not None:
        chained, _ = mf.optim.clip_by_global_norm(max_norm, groups).update(grads, (), grads)
        found.append(trained(mf.unshard(chained, groups)))
    for full in found[1:]:
        same_bits(full, found[0])
    return verdict.norm  # of a guard that decides


ALONE, COPIES, PAIR = Layout((1,), 1), Layout((2,), 1), Layout((2,), 2)
BOTH, WIDE = Layout((2, 2), 2), Layout((2, 2), 4)


@pytest.mark.parametrize("layout", [ALONE, PAIR, BOTH, WIDE, Layout((2, 2, 2), 4)], ids=str)
@pytest.mark.short("2x2-p2", "1-p1")
def test_clipping_is_that_of_a_single_process(ranks, layout):
    found = ranks(layout.world_size).run(clips_as_torch_does, layout)
    for norms in found:
        assert all(map(torch.equal, norms, found[0])), "ranks would clip differently"


@pytest.mark.parametrize(
    ("dtype", "scale"), [(F16, mf.optim.no_scale()), (BF16, mf.optim.static_scale(2.0**5))]
)
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
        bound = (info.eps / 2 + 2.0**-20) * want.abs() + info.tiny * info.eps
        assert ((got - want).abs() <= bound).all()


@pytest.mark.parametrize(("dtype", "check"), [(F16, None), (F16, "skip"), (F64, "skip")])
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


def train(layout, dtype, bad, guard, steps, donate):
    """Steps by hand; in those of `bad` one rank's loss overflows, another one each time."""
    groups = homes(layout)
    rank, n = dist.get_rank(), layout.world_size
    params = tree.map_leaves(lambda x: x.to(dtype) if x.is_floating_point() else x, values())
    params["dense"]["tied"][1] = params["dense"]["tied"][0]
    state = mf.init_state(mf.shard(params, groups), mf.optim.adam(0.01))
    found = []
    for step in range(steps):
        scale = guard.scale.value
        full = tree.map_leaves(lambda x: (x * scale).to(dtype), gradients(rank))  # noqa: B023
        if step in bad and rank == step % n:
            leaf = full["experts"][0] if step % 2 else full["dense"]["a"]
            leaf.view(-1)[3] = (math.inf, -math.inf, math.nan)[step % 3]
        grads = mf.reduce_grads(full, groups, like=state.params)
        before = tree.map_leaves(torch.clone, state.params)
        verdict = guard.judge(grads, groups, donate=donate)
        if verdict.accept:
            state = mf.opt_step(state, verdict.grads)
        else:
            assert verdict.grads is grads, "nothing is touched"
            same_bits(before, state.params)
        assert verdict.accept is verdict.finite is (step not in bad)
        guard, now = verdict.next, verdict.next.scale
        found.append((verdict.accept, now.value, now.good_steps, now.overflows))
    return found, mf.unshard(state.params, groups), state.step


@pytest.mark.parametrize(
    ("layout", "dtype", "donate"),
    [(PAIR, BF16, False), (BOTH, F32, True), (WIDE, BF16, True), (Layout((2, 4), 2), F32, False)],
    ids=str,
)
@pytest.mark.short("2-p2-torch.bfloat16-False", "2x2-p2-torch.float32-True")
def test_an_overflow_on_one_rank_is_refused_by_all(ranks, layout, dtype, donate):
    guard = mf.optim.Guard(mf.optim.dynamic_scale(2.0**8, interval=2), max_norm=5.0)
    bad = {1, 2, 3, 7}
    found = ranks(layout.world_size).run(train, layout, dtype, bad, guard, 9, donate)
    #        .      X     X     X     .     .     .     X      .
    value = [2**8, 2**7, 2**6, 2**5, 2**5, 2**6, 2**6, 2**5, 2**5]
    good = [1, 0, 0, 0, 1, 0, 1, 0, 1]
    overflows = [0, 1, 2, 3, 3, 3, 3, 4, 4]
    accepted = [step not in bad for step in range(9)]
    want = list(zip(accepted, value, good, overflows, strict=True))
    for rows, params, steps in found:
        assert rows == want
        assert steps == 5
        same_bits(params, found[0][1])


def differing(layout, guard, value):
    """Replicas that only did hop 1, so that each has a gradient of its own."""
    groups = groups_of(layout)
    grads = {"w": torch.full((12,), float(1 + groups.position // groups.partition_size))}
    if dist.get_rank() == layout.world_size - 1:
        grads["w"][5] = value
    verdict = guard.judge(mf.scatter_grads(grads, groups), groups)
    return verdict.accept, verdict.finite, verdict.spike, verdict.next


@pytest.mark.parametrize(
    ("layout", "value"), [(COPIES, math.inf), (BOTH, 1e6), (PAIR, math.nan)], ids=str
)
def test_replicas_that_differ_decide_alike(ranks, layout, value):
    watch = mf.optim.norm_spike(50.0, warmup=3)
    for norm in (10.0, 20.0, 30.0):
        watch = watch.observe(norm)[1]
    guard = mf.optim.Guard(mf.optim.dynamic_scale(4.0), max_norm=1.0, spike=watch)
    finite = math.isfinite(value)
    want = (False, finite, finite, replace(guard, scale=guard.scale.adjust(finite)))
    found = ranks(layout.world_size).run(differing, layout, guard, value)
    assert found == [want] * layout.world_size


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


def plain_watch(norms, factor, window, warmup):
    """Which are spikes, and what is remembered; written down without looking."""
    known, spikes = [], []
    for norm in norms:
        usual = median(known) if len(known) >= warmup else 0
        spikes.append(math.isfinite(norm) and 0 < factor * usual < norm)
        if math.isfinite(norm) and not spikes[-1]:
            known = [*known, norm][-window:]
    return spikes, known


sizes = st.one_of(st.floats(0, 4), st.sampled_from([0.0, 1.0, 10.0, 10.1, 1e9, math.inf, math.nan]))


@given(
    st.lists(sizes, max_size=40),
    st.sampled_from([1.5, 10.0]),
    st.integers(1, 6),
    st.integers(1, 6),
)
def test_a_watch_is_the_plain_one(norms, factor, window, warmup):
    warmup = min(warmup, window)
    watch = mf.optim.norm_spike(factor, window=window, warmup=warmup)
    found = []
    for norm in norms:
        spike, watch = watch.observe(norm)
        found.append(spike)
    assert (found, list(watch.norms)) == plain_watch(norms, factor, window, warmup)


# Memory and donation.


def donating(layout):
    groups = homes(layout)
    shards = mf.shard(values(), groups)
    guard = mf.optim.Guard(mf.optim.static_scale(4.0), max_norm=1.0)
    grads = mf.reduce_grads(gradients(dist.get_rank()), groups, like=shards)
    kept = guard.judge(grads, groups).grads
    memory = [x.data_ptr() for x in tree.flatten(grads)[0]]
    found = guard.judge(grads, groups, donate=True).grads
    same_bits(found, kept)
    with pytest.raises(mf.errors.DonatedError, match=r"grads.dense.a was donated to Guard.judge"):
        _ = grads["dense"]["a"].data
    now = [x.data_ptr() for x in tree.flatten(found)[0]]
    assert now == memory, "donated chunks are written in place"


def test_donation_saves_the_copy_and_changes_no_number(ranks):
    ranks(4).run(donating, BOTH)


def test_a_donation_writes_to_nothing_else():
    """On one rank pieces are views of what autograd gave, which may hold other values or be one."""
    groups = mf.make_groups(1)
    flat = torch.ones(12)
    like = mf.shard({k: torch.zeros(4) for k in "ab"}, groups)
    grads = mf.reduce_grads({"a": flat[:4], "b": flat[6:10]}, groups, like=like)
    guard = mf.optim.Guard(mf.optim.static_scale(2.0))
    out = guard.judge(grads, groups, donate=True).grads
    assert flat[4:6].tolist() + flat[10:].tolist() == [1.0] * 4
    assert out["a"].data.tolist() + out["b"].data.tolist() == [0.5] * 8
    alone = mf.shard({k: torch.zeros(4) for k in "ab"}, groups, bucket_bytes=1)
    for layout in (like, alone):
        same = torch.ones(4)
        grads = mf.reduce_grads({"a": same, "b": same}, groups, like=layout)
        out = guard.judge(grads, groups, donate=True).grads
        assert [x.data.tolist() for x in out.values()] == [[0.5] * 4] * 2, "scaled once"


def test_gradients_that_still_owe_a_hop_are_refused():
    groups = mf.make_groups(1)
    with pytest.raises(mf.errors.LeafError, match=r"grads.w is Tensor, not a shard"):
        mf.optim.Guard(on_nonfinite="skip").judge({"w": torch.ones(2)}, groups)
    grads = mf.shard({"w": torch.ones(2)}, groups)
    with pytest.raises(mf.errors.GroupsError, match="Guard.judge: got a hierarchy, needs groups"):
        mf.optim.Guard(on_nonfinite="skip").judge(grads, groups.hierarchy)

"""State kept by bucket: the numbers of state kept by leaf, in few kernels, read by leaf."""

import pickle
from collections import Counter

import pytest
import torch
from cases import Layout, groups_of, poison, random, same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import mics_fn as mf
from mics_fn import tree
from mics_fn.errors import DonatedError, LeafError
from mics_fn.optim.flat import FlatShards, by_leaf, zeros

STEPS = 3
CLASSES = {
    "AdamW": (torch.optim.AdamW, {"weight_decay": 0.3}, ("exp_avg", "exp_avg_sq")),
    "SGD": (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.3}, ("momentum_buffer",)),
    "Adagrad": (torch.optim.Adagrad, {"initial_accumulator_value": 0.1}, ("sum",)),
}


def tensors(shapes, seed):
    return {f"p{i}": random(seed + i, *s, dtype=torch.float64) for i, s in enumerate(shapes)}


def by_torch(name, start, steps, decays):
    """Parameters and moments of torch's own optimizer, which keeps them leaf by leaf."""
    cls, options, moments = CLASSES[name]
    params = {k: torch.nn.Parameter(x.clone()) for k, x in start.items()}
    kinds = [{"params": [p for k, p in params.items() if decays(k)]}]
    kinds += [{"params": [p for k, p in params.items() if not decays(k)], "weight_decay": 0.0}]
    optimizer = cls([each for each in kinds if each["params"]], lr=0.1, foreach=False, **options)
    for grads in steps:
        for k, p in params.items():
            p.grad = grads[k].clone()
        optimizer.step()
    kept = {m: {k: optimizer.state[p][m] for k, p in params.items()} for m in moments}
    return {k: p.detach() for k, p in params.items()}, kept


def of_law(layout, shapes, chosen, bucket_bytes, name, donate):
    groups, (cls, options, _) = groups_of(layout), CLASSES[name]
    decays = lambda key: int(key[1:]) % 3 != 0  # noqa: E731

    def part(full):
        return {k: x for k, x in full.items() if int(k[1:]) in chosen}

    def sharded(full):
        return part(poison(mf.shard(full, groups, bucket_bytes=bucket_bytes)))

    start, steps = tensors(shapes, 0), [tensors(shapes, 100 * (i + 1)) for i in range(STEPS)]
    mask = decays
    optimizer = mf.optim.from_torch(cls, lr=0.1, foreach=False, decay_mask=mask, **options)
    state = mf.init_state(sharded(start), optimizer)
    for grads in steps:
        state = mf.opt_step(state, sharded(grads), donate=donate)
    params, moments = by_torch(name, part(start), [part(grads) for grads in steps], decays)
    same_bits(mf.unshard(state.params, groups), params)
    for key, want in moments.items():
        same_bits(mf.unshard(state.opt.moments[key].by_leaf(), groups), want)


@settings(max_examples=25)
@given(
    layout=st.sampled_from([Layout((1,), 1), Layout((2,), 1), Layout((2,), 2)]),
    shapes=st.lists(st.lists(st.integers(0, 7), max_size=2).map(tuple), min_size=1, max_size=8),
    bucket_bytes=st.sampled_from([100, 25 * 2**20]),
    name=st.sampled_from(sorted(CLASSES)),
    donate=st.booleans(),
    data=st.data(),
)
def test_state_by_bucket_equals_state_by_leaf(
    ranks, layout, shapes, bucket_bytes, name, donate, data
):
    """To the bit, with decay masks, in any part of a tree, whatever lies in padding."""
    chosen = data.draw(st.sets(st.integers(0, len(shapes) - 1), min_size=1))
    ranks(layout.world_size).run(of_law, layout, shapes, chosen, bucket_bytes, name, donate)


def of_leaf(layout):
    groups = groups_of(layout)
    shards, grads = (
        mf.shard({f"w{i}": random(k + i, 3, 3) for i in range(5)}, groups, bucket_bytes=150)
        for k in (0, 9)
    )
    state = mf.opt_step(mf.init_state(shards, mf.optim.adamw(0.1)), grads)
    before = {k: mf.unshard(m.by_leaf(), groups) for k, m in state.opt.moments.items()}
    new = mf.set(state, "opt.moments.exp_avg.w3", 7, groups)
    same_bits(mf.get(new, "opt.moments.exp_avg.w3", groups), torch.full((3, 3), 7.0))
    want = {**before, "exp_avg": {**before["exp_avg"], "w3": torch.full((3, 3), 7.0)}}
    for key, moment in new.opt.moments.items():
        same_bits(mf.unshard(moment.by_leaf(), groups), want[key])
        same_bits(mf.unshard(state.opt.moments[key].by_leaf(), groups), before[key])
    old, after = (x.opt.moments["exp_avg"].runs for x in (state, new))
    assert sum(a is b for a, b in zip(old, after, strict=True)) == len(old) - 1 > 0
    assert {f"opt.moments.exp_avg.w{i}" for i in range(5)} <= {
        row.path for row in mf.summary(state, groups).rows
    }


@pytest.mark.parametrize("layout", [Layout((1,), 1), Layout((2,), 2)], ids=str)
def test_get_and_set_of_a_leaf_of_a_moment_touch_that_leaf_alone(ranks, layout):
    ranks(layout.world_size).run(of_leaf, layout)


class Kernels(TorchDispatchMode):
    """Counts the ops that write numbers; views and looks at memory are free."""

    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view:
            self.seen[func.overloadpacket.__name__] += 1
        return func(*args, **kwargs or {})


@pytest.mark.parametrize(
    "make", [mf.optim.adamw, mf.optim.sgd, mf.optim.lion], ids=["adamw", "sgd", "lion"]
)
def test_a_step_takes_as_many_kernels_for_many_leaves_as_for_few(make):
    groups, found = mf.make_groups(1), []
    for n in (2, 300):
        full = {f"w{i}": random(i, 1 + i % 9) for i in range(n)}
        state, grads = mf.init_state(mf.shard(full, groups), make(0.1)), mf.shard(full, groups)
        with Kernels() as kernels:
            mf.opt_step(state, grads, donate=True)
        found.append(kernels.seen)
    assert found[0] == found[1]
    assert 0 < sum(found[1].values()) < 20


def test_a_tree_by_runs_is_the_tree_by_leaf():
    groups, shared = mf.make_groups(1), random(0, 3)
    frozen = torch.nn.Parameter(random(1, 2), requires_grad=False)
    full = {"a": random(2, 5), "t": [shared, shared], "f": frozen, "n": torch.tensor(3), "x": None}
    shards = mf.shard(full, groups)
    flat = zeros(shards)
    assert [run.shape for run in flat.runs] == [(11,)], "5, padding, 3"
    got, spec = tree.flatten(flat.by_leaf())
    assert [x.tolist() for x in got] == [[0.0] * 5, [0.0] * 3]
    assert flat["t"][1] == shards["t"][1], "tied leaves stay tied"  # pyright: ignore
    leaves, same = tree.flatten(flat)
    rebuilt: FlatShards = same.unflatten(leaves)  # pyright: ignore[reportAssignmentType]
    assert tree.flatten(rebuilt.by_leaf())[1] == spec
    again = mf.opt_step(mf.init_state(shards, mf.optim.lion(0.1)), shards).opt.mean
    assert tree.flatten(again)[1] == same, "structures compare"
    with pytest.raises(LeafError, match="fix: take the leaves first: unshard"):
        mf.unshard(flat, groups)["a"]
    assert not isinstance(by_leaf({"m": flat})["m"], FlatShards)


def test_a_state_of_other_parameters_is_refused():
    groups = mf.make_groups(1)
    two, three = (mf.shard([random(i, 4) for i in range(n)], groups) for n in (2, 3))
    optimizer = mf.optim.adamw(0.1)
    state = mf.init_state(two, optimizer)
    mixed = mf.TrainState(0, three, state.opt, {}, optimizer)
    with pytest.raises(LeafError, match="the state is of another tree"):
        mf.opt_step(mixed, three)


def test_a_moment_that_was_given_away_says_so():
    groups = mf.make_groups(1)
    shards = mf.shard({"w": random(0, 4)}, groups)
    state = mf.init_state(shards, mf.optim.adamw(0.1))
    mf.opt_step(state, mf.shard({"w": random(1, 4)}, groups), donate=True)
    pinned = r"opt.moments.exp_avg.runs.0 was donated to opt_step at step 0"
    for use in (lambda m: m["w"], lambda m: m.by_leaf(), lambda m: tree.flatten(m)):
        with pytest.raises(DonatedError, match=pinned):
            use(state.opt.moments["exp_avg"])


def test_a_step_takes_each_tree_apart_once(monkeypatch):
    groups, seen = mf.make_groups(1), []
    flatten = tree.flatten
    monkeypatch.setattr(tree, "flatten", lambda *args: seen.append(args[0]) or flatten(*args))
    for donate in (False, True):
        params, grads = (mf.shard({"w": random(k, 3), "b": random(k, 2)}, groups) for k in (0, 1))
        state = mf.init_state(params, mf.optim.adamw(0.1, decay_mask=lambda path: "w" in path))
        seen.clear()
        new = mf.opt_step(state, grads, donate=donate)
        for mine, times in ((params, 1), (grads, 1), (new.params, 0)):
            assert sum(x is mine for x in seen) == times


def test_a_transform_of_ones_own_gets_the_trees_themselves():
    """It may change the gradients' dict in place: only those of this library never look again."""
    groups = mf.make_groups(1)
    params, grads, zero = (mf.shard({"w": torch.full((3,), x)}, groups) for x in (1.0, 2.0, 0.0))

    def update(got, state, held):
        assert got is grads
        assert held is params
        got["w"] = zero["w"]
        return got, state

    own = mf.optim.Transform(lambda params: (), update, lambda *_: pytest.fail("not by chain"))
    optimizer = mf.optim.chain(own, mf.optim.sgd(0.1))
    new = mf.opt_step(mf.init_state(params, optimizer), grads, donate=True)
    same_bits(mf.unshard(new.params, groups), {"w": torch.ones(3)})


def changed_between(params, way, groups):
    w = mf.shard({"w": torch.full((3,), 5.0), "b": torch.full((2,), 6.0)}, groups)
    if way == "by hand":
        return {**params, "w": w["w"]}
    if way == "by set":
        return mf.set(params, "w", 5.0, groups)
    if way == "by map":
        return tree.map_leaves(lambda x: x + 1, params)
    if way == "its memory":
        params["w"].data.data = torch.full((3,), 5.0)
    return params


@pytest.mark.parametrize("way", ["by hand", "by set", "by map", "its memory"])
@pytest.mark.parametrize("donate", [False, True])
def test_what_is_changed_between_steps_counts(way, donate):
    """Nothing that a step knew of its trees is taken for granted in the next."""
    groups, found = mf.make_groups(1), []
    grads = {"w": torch.tensor([1.0, 2.0, 3.0]), "b": torch.ones(2)}
    for fresh_state in (False, True):
        params = mf.shard({"w": torch.ones(3), "b": torch.zeros(2)}, groups)
        state = mf.opt_step(
            mf.init_state(params, mf.optim.sgd(0.1)), mf.shard(grads, groups), donate=donate
        )
        params = changed_between(state.params, way, groups)
        if fresh_state:
            params = mf.shard(mf.unshard(params, groups), groups)
        state = mf.TrainState(1, params, state.opt, {}, state.transform)
        state = mf.opt_step(state, mf.shard(grads, groups), donate=donate)
        found.append(mf.unshard(state.params, groups))
    same_bits(*found)


def test_an_exception_in_the_middle_of_a_step_gives_nothing_away():
    groups, rate = mf.make_groups(1), [0.1]
    state = mf.init_state(mf.shard({"w": torch.ones(3)}, groups), mf.optim.adamw(lambda _: rate[0]))
    grads = mf.shard({"w": torch.ones(3)}, groups)
    state = mf.opt_step(state, grads, donate=True)
    before = mf.unshard(state.params, groups)["w"].clone()
    rate[0] = -1.0
    with pytest.raises(ValueError, match="lr\\(1\\)=-1.0, expected a finite number"):
        mf.opt_step(state, grads, donate=True)
    rate[0] = 0.1
    same_bits(mf.unshard(state.params, groups), {"w": before})
    assert mf.opt_step(state, grads, donate=True).step == 2


def test_pieces_of_a_moment_are_cut_once_and_keep_no_memory():
    groups = mf.make_groups(1)
    start, grads = tensors([(3,), (4,)], 0), tensors([(3,), (4,)], 9)
    given = lambda: mf.reduce_grads({k: x.clone() for k, x in grads.items()}, groups)  # noqa: E731
    state = mf.init_state(mf.shard(start, groups), mf.optim.adam(0.1))
    state = mf.opt_step(state, given(), donate=True)
    cuts = state.opt.moments["exp_avg"].cuts
    state = mf.opt_step(state, given(), donate=True)
    moment = state.opt.moments["exp_avg"]
    assert len(cuts) == 1
    assert moment.cuts[0][1] is cuts[0][1], "cut again"
    assert pickle.dumps(moment).count(b"_rebuild_tensor") <= 1
    before = moment["p1"].data.clone()
    copied = mf.opt_step(state, given()).opt.moments["exp_avg"]
    assert moment.cuts
    same_bits(moment["p1"].data, before)
    torch.testing.assert_close(copied["p1"].data, 0.9 * before + 0.1 * grads["p1"])
    for each in (moment, copied):
        assert all(whole is each.wholes[r] for r, (whole, _) in each.cuts.items())
    set_by_hand = mf.set(state, "opt.moments.exp_avg.p0", torch.ones(3), groups)
    again = mf.opt_step(set_by_hand, given()).opt.moments["exp_avg"]["p0"].data
    torch.testing.assert_close(again, 0.9 + 0.1 * grads["p0"])

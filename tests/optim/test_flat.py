"""State kept by bucket: the numbers of state kept by leaf, in few kernels, read by leaf."""

import pickle
from collections import Counter
from dataclasses import replace

import pytest
import torch
from cases import random, same_bits
from torch.utils._python_dispatch import TorchDispatchMode

import mics_fn as mf
from mics_fn import tree
from mics_fn.errors import LeafError


class Kernels(TorchDispatchMode):
    """Counts the ops that write numbers; views and looks at memory are free."""

    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen[func.overloadpacket.__name__] += not func.is_view
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("make", [mf.optim.adamw, mf.optim.lion], ids=["adamw", "lion"])
@pytest.mark.parametrize("of_shards", [mf.shard, mf.reduce_grads], ids=["in a chunk", "apart"])
def test_a_step_takes_as_many_kernels_for_many_leaves_as_for_few(make, of_shards):
    groups, found = mf.make_groups(1), []
    for n in (2, 300):
        full = {f"w{i}": random(i, 1 + i % 9) for i in range(n)}
        state, grads = mf.init_state(mf.shard(full, groups), make(0.1)), of_shards(full, groups)
        with Kernels() as kernels:
            mf.opt_step(state, grads, donate=True)
        found.append(+kernels.seen)
    assert found[0] == found[1]
    assert 0 < found[1].total() < 20


def test_a_state_of_other_parameters_is_refused():
    groups = mf.make_groups(1)
    two, three = (mf.shard([random(i, 4) for i in range(n)], groups) for n in (2, 3))
    optimizer = mf.optim.adamw(0.1)
    state = mf.init_state(two, optimizer)
    mixed = mf.TrainState(0, three, state.opt, {}, optimizer)
    with pytest.raises(LeafError, match="the state is of another tree"):
        mf.opt_step(mixed, three)


WAYS = {
    "by hand": lambda params, w, groups: {**params, "w": w["w"]},
    "by set": lambda params, w, groups: mf.set(params, "w", 5.0, groups),
    "by map": lambda params, w, groups: tree.map_leaves(lambda x: x + 1, params),
    "its memory": lambda params, w, groups: setattr(
        params["w"].data, "data", torch.full((3,), 5.0)
    ),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("donate", [False, True])
def test_what_is_changed_between_steps_counts(way, donate):
    """Nothing that a step knew of its trees is taken for granted in the next."""
    groups, found = mf.make_groups(1), []
    grads = {"w": torch.tensor([1.0, 2.0, 3.0]), "b": torch.ones(2)}
    for fresh_state in (False, True):
        other = mf.shard({"w": torch.full((3,), 5.0), "b": torch.full((2,), 6.0)}, groups)
        params = mf.shard({"w": torch.ones(3), "b": torch.zeros(2)}, groups)
        state = mf.init_state(params, mf.optim.sgd(0.1))
        state = mf.opt_step(state, mf.shard(grads, groups), donate=donate)
        params = WAYS[way](state.params, other, groups) or state.params
        if fresh_state:
            params = mf.shard(mf.unshard(params, groups), groups)
        state = mf.opt_step(replace(state, params=params), mf.shard(grads, groups), donate=donate)
        found.append(mf.unshard(state.params, groups))
    same_bits(*found)


def test_a_moment_that_was_set_counts_in_the_next_step():
    groups = mf.make_groups(1)
    start, grads = ({f"p{i}": random(seed + i, 3 + i) for i in range(2)} for seed in (0, 9))
    given = lambda: mf.reduce_grads({k: x.clone() for k, x in grads.items()}, groups)  # noqa: E731
    state = mf.init_state(mf.shard(start, groups), mf.optim.adam(0.1))
    for _ in range(2):
        state = mf.opt_step(state, given(), donate=True)
    before = state.opt.moments["exp_avg"]["p1"].data.clone()
    assert pickle.dumps(state.opt.moments["exp_avg"]).count(b"_rebuild_tensor") <= 1
    state = mf.set(state, "opt.moments.exp_avg.p0", torch.ones(3), groups)
    again = mf.opt_step(state, given()).opt.moments["exp_avg"]
    torch.testing.assert_close(again["p0"].data, 0.9 + 0.1 * grads["p0"])
    torch.testing.assert_close(again["p1"].data, 0.9 * before + 0.1 * grads["p1"])

"""How small an element may be beside the largest of its block, in moments that are codes."""

import pytest
import torch

import mics_fn as mf

RATIOS = (1.0, 1e-1, 1e-2, 1e-3, 1e-4)


def moved(state):
    """How far AdamW moves elements whose constant gradients have these ratios, by its rate."""
    with mf.make_groups(1) as groups:
        shards = mf.shard({"w": torch.zeros(8192)}, groups, precision=f"state={state}")
        grads = torch.tensor(RATIOS).repeat(8192)[:8192]
        one = mf.init_state(shards, mf.optim.adamw(1e-3, weight_decay=0.0))
        for _ in range(20):
            one = mf.opt_step(one, mf.shard({"w": grads}, groups, precision=f"state={state}"))
        found = mf.unshard(one.params, groups)["w"]
    return [float(found[i : 8190 : len(RATIOS)].mean()) / -0.02 for i in range(len(RATIOS))]


def test_without_codes_all_elements_move_as_far():
    assert moved("f32") == pytest.approx([1.0] * len(RATIOS), rel=1e-2)


def test_fp8_moves_small_elements_as_far():
    assert moved("fp8[256]") == pytest.approx([1.0] * len(RATIOS), rel=0.15)


def test_int8_moves_elements_below_a_hundredth_of_the_largest_less():
    found = moved("int8[256]")
    assert found[:3] == pytest.approx([1.0] * 3, rel=0.15)
    assert 0.0 < found[3] < 0.3
    assert 0.0 < found[4] < 0.3

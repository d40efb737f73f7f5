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


# An element below a hundredth of the largest of its block moves less with int8.
@pytest.mark.parametrize(
    ("state", "equal", "near"), [("f32", 5, 1e-2), ("fp8[256]", 5, 0.15), ("int8[256]", 3, 0.15)]
)
def test_how_far_small_elements_move(state, equal, near):
    found = moved(state)
    assert found[:equal] == pytest.approx([1.0] * equal, rel=near)
    assert all(0.0 < x < 0.3 for x in found[equal:])

"""On an accelerator, where the host does not wait for what a rank sees of its own gradients."""

import pytest
from simcuda.server import Server

pytestmark = [pytest.mark.thorough, pytest.mark.limit(300)]


def test_the_rank_of_a_gradient_that_is_not_finite_is_named(device: Server):
    named = [True, None], [False, "grads.b is infinite on rank 1"], [True, None]
    found = device.run("nonfinite_on_rank_1", 2)
    assert [[list(each) for each in of_rank] for of_rank in found] == [list(named)] * 2

"""On an accelerator, where the host does not wait for what a rank sees of its own gradients."""

import pytest
from simcuda.server import Server

pytestmark = [pytest.mark.thorough, pytest.mark.limit(300)]


def test_a_step_that_is_masked_changes_nothing(device: Server):
    """What the host reads a step late on a device is what it reads at once on the CPU."""
    for on_cpu, there, gap in device.run("masked", 2):
        assert there == on_cpu
        assert gap < 1e-5
        said, error, step, skipped = on_cpu
        assert [n for n, (_, taken, *_) in enumerate(said, 1) if not taken] == [2, 4, 5, 7, 8]
        assert (step, skipped, [samples for *_, samples in said]) == (3, 5, [12] * 8)
        assert error.startswith("grads")
        assert error.endswith("is NaN on rank 1")


def test_the_rank_of_a_gradient_that_is_not_finite_is_named(device: Server):
    named = [True, None], [False, "grads.b is infinite on rank 1"], [True, None]
    found = device.run("nonfinite_on_rank_1", 2)
    assert [[list(each) for each in of_rank] for of_rank in found] == [list(named)] * 2

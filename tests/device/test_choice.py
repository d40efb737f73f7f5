"""Which device ranks take where nobody names one."""

import pytest
from simcuda.server import Server

pytestmark = [pytest.mark.thorough, pytest.mark.limit(300)]


def test_each_rank_takes_its_own_device_and_asks_its_memory(device: Server):
    found = device.run("with_defaults", 2)
    budget = 80 * 2**30 // 4  # a quarter of the simulated memory holds all that is gathered
    assert [(groups, chosen) for groups, chosen, _ in found] == [("cuda:0",) * 2, ("cuda:1",) * 2]
    assert all(0 < gathered < budget for *_, gathered in found)

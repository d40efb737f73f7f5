"""The laws see seeded mistakes."""

from pathlib import Path

import pytest
from laws import LAWS
from matrix import SCENARIOS
from mistakes import MISTAKES, copied
from simcuda.server import Server

pytestmark = pytest.mark.limit(300)


@pytest.mark.thorough
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_breaks_its_law(device: Server, tmp_path: Path, name: str):
    mistake = MISTAKES[name]
    root, scenario = copied(tmp_path, *mistake.changes), mistake.scenario
    run = device.run("compared", SCENARIOS[scenario].ranks, scenario, ("never",), root=root)
    broken = [law.__name__ for law in LAWS if law(scenario, run)]
    assert mistake.law in broken

"""The laws see seeded mistakes."""

from pathlib import Path

import pytest
from laws import LAWS
from matrix import SCENARIOS
from mistakes import MISTAKES, TORN, copied
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


@pytest.mark.thorough
@pytest.mark.parametrize("name", TORN)
def test_a_mistake_leaves_something_torn(device: Server, tmp_path: Path, name: str):
    """A program finds it, or ends in an error."""
    each = TORN[name]
    root = copied(tmp_path, *each.changes)
    try:
        found = device.run(each.program, each.ranks, *each.args, root=root, timeout_s=120.0)
    except RuntimeError:
        return
    if each.program == "reads_of_backward":
        assert any("another thread" in name for _, read, _ in found for name in read)
    elif each.program == "torn":
        assert any(wrong for wrong, _ in found)
    else:
        assert any(found)

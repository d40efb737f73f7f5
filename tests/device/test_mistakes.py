"""The checker sees seeded mistakes, and says nothing of other people's correct programs."""

from pathlib import Path

import pytest
from matrix import SCENARIOS
from mistakes import MISTAKES, copied
from simcuda.server import Server

pytestmark = [pytest.mark.thorough, pytest.mark.limit(300)]


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_seen(device: Server, tmp_path: Path, name: str):
    mistake = MISTAKES[name]
    root = copied(tmp_path, *mistake.changes)
    n = SCENARIOS[mistake.scenario].ranks
    found = device.run("races_in", n, mistake.scenario, root=root)
    races = [race for rank in found for race in rank]
    assert bool(races) != bool(mistake.harmless), races or "no report"


@pytest.mark.parametrize("program", ["two_streams_of_torch", "fsdp2", "fsdp2_on_two_streams"])
def test_correct_programs_have_no_report(device: Server, program: str):
    for races, numel, groups in device.run(program, 2):
        assert not races
        assert numel > 0
        assert groups > 0 or program == "two_streams_of_torch"

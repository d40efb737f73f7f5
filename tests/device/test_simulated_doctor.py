"""The parts of `python -m mics_fn doctor --gpu` on the simulated CUDA device."""

from pathlib import Path

import pytest
from simcuda.server import Server

from mics_fn.lab.doctor.parts import PARTS
from mics_fn.lab.doctor.report import checks_of

pytestmark = [pytest.mark.thorough, pytest.mark.limit(300)]


# A simulated storage cannot be resized, as FSDP2 does in `speed`; `ends` needs processes that end.
@pytest.mark.parametrize("name", ["alone", "ways", "delays", "levels", "pools"])
def test_a_part_finds_nothing_wrong_and_leaves_nothing_out(
    name: str, device: Server, tmp_path: Path
):
    races = device.run("doctor", PARTS[name].ranks, name, str(tmp_path), timeout_s=240.0)
    assert races == [[]] * PARTS[name].ranks
    checks = checks_of(tmp_path, PARTS[name].ranks)
    assert checks
    for check in checks:
        assert check.ok, check
        assert check.value is not None, f"{check.what}: not available"
    if name == "delays":
        late = [check for check in checks if check.what.endswith("delays")]
        assert all(check.what.startswith("streams late") for check in late)
        assert min(check.value or 0 for check in late) > 5
    elif name != "pools":
        assert any("waits of the host" in check.what for check in checks)

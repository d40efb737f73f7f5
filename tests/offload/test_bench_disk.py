"""`bench disk`, small: it measures what it says, and its steps are those in memory."""

import argparse
from pathlib import Path

import pytest

from mics_fn.errors import human_bytes
from mics_fn.lab.bench.command import BENCHES, add_arguments
from mics_fn.lab.bench.disk import DiskConfig, _DiskBench, measure_disk, render_disk


@pytest.mark.parametrize("cached", [False, True])
def test_a_small_one(tmp_path: Path, cached: bool):
    config = DiskConfig(
        mib=3, host_mib=(1, 2), threads=(1, 3), rounds=2, folder=str(tmp_path), cached=cached
    )
    figures = measure_disk(config)
    assert figures["equal"]
    assert figures["direct"] <= (not cached)
    assert figures["nbytes"] == 3 * 2**20
    assert len(figures["seconds"]) == 3 + 4
    text = render_disk(figures, config)
    assert "a step through 2 MiB, 3 threads" in text
    assert "bit-equal to those in memory" in text
    assert ("direct I/O" if figures["direct"] else "cache of the system") in text
    assert f", plain at {human_bytes(figures['speed']['median'])}/s; 2 rounds" in text
    assert not list(tmp_path.iterdir())


def test_a_step_is_compared_with_the_slower_of_its_two_bounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    laps = {"plain": 2.0, "overlapped": 1.0, "in memory": 3.0, "a step": 6.0}
    monkeypatch.setattr(
        _DiskBench, "peers", lambda _: {name: lambda lap=lap: lap for name, lap in laps.items()}
    )
    figures = measure_disk(DiskConfig(mib=1, host_mib=(1,), rounds=1, folder=str(tmp_path)))
    found = {peer: each["median"] for peer, each in figures["ratios"]["a step"].items()}
    assert found == {"plain": 2 / 6, "overlapped": 1 / 6, "slower": 3 / 6}
    assert figures["speed"]["median"] == 2 * 2**20 / 2


def test_its_flags():
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    args = parser.parse_args(["disk", "--mib", "8", "--host-mib", "1", "2", "--threads", "2"])
    config = BENCHES["disk"].config(args, 1)
    assert (config.mib, config.host_mib, config.threads) == (8, (1, 2), (2,))
    assert parser.parse_args(["disk"]).host_mib == [64]

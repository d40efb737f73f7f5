"""`bench disk`, small: it measures what it says, and its steps are those in memory."""

from pathlib import Path

from mics_fn.lab.bench.disk import DiskConfig, measure_disk, render_disk


def test_a_small_one(tmp_path: Path):
    config = DiskConfig(mib=3, host_mib=(1, 2), threads=(1, 3), rounds=2, folder=str(tmp_path))
    figures = measure_disk(config)
    assert figures["equal"]
    assert figures["nbytes"] == 3 * 2**20
    assert len(figures["seconds"]) == 3 + 4
    text = render_disk(figures, config)
    assert "a step through 2 MiB, 3 threads" in text
    assert "bit-equal to those in memory" in text
    assert not list(tmp_path.iterdir())

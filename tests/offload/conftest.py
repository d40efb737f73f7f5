"""Scratch files with direct I/O and through the cache, which must not differ."""

from pathlib import Path

import pytest

from mics_fn.offload import Scratch


@pytest.fixture(params=["direct", "cached"])
def scratch(request: pytest.FixtureRequest, tmp_path: Path) -> Scratch:
    made = Scratch(tmp_path, direct=request.param == "direct")
    if made.direct != (request.param == "direct"):
        pytest.skip("the file system has no direct I/O")
    return made

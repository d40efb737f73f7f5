"""The server of ranks on the simulated device; a test that needs it is skipped without g++."""

from collections.abc import Iterator

import pytest
from simcuda import build
from simcuda.server import Server


@pytest.fixture(scope="session")
def device() -> Iterator[Server]:
    reason = build.missing()
    if reason is not None:
        pytest.skip(reason)
    build.library()
    server = Server()
    yield server
    server.close()

"""Scratch files with direct I/O and through the cache, which must not differ."""

from collections.abc import Callable
from pathlib import Path

import pytest

from mics_fn.offload import Scratch


@pytest.fixture(params=["direct", "cached"])
def scratch(request: pytest.FixtureRequest, tmp_path: Path) -> Scratch:
    made = Scratch(tmp_path, direct=request.param == "direct")
    if made.direct != (request.param == "direct"):
        pytest.skip("the file system has no direct I/O")
    return made


@pytest.fixture
def raises() -> Callable[[Callable[[], object]], str]:
    """What a call raises, as text with its type in front; "" if it raises nothing."""

    def of(call: Callable[[], object]) -> str:
        try:
            call()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""

    return of

"""Folders in memory, where a save takes no longer than what it does.

A process that is killed loses nothing that the kernel has, so a disk would only cost time. What
reaches it in which order is tested by what a save calls.
"""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stress.kills import MEMORY


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A folder in memory, in the place of pytest's own."""
    path = Path(tempfile.mkdtemp(prefix="mics_test_", dir=MEMORY))
    yield path
    shutil.rmtree(path)

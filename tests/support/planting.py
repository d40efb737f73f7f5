"""Mistakes that are planted in a copy of the package; a test of their wing has to catch each.

A wing lists its own in `tests/<wing>/planted.py`. Whoever removes or rewrites tests of a wing runs
`python tests/support/planting.py shards` before and after: all have to be caught. It takes minutes,
so no suite runs it; `tests/rules/test_planted.py` only checks that each mistake can be planted.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]


class Planted(NamedTuple):
    """A mistake: text of a file of the package, what replaces it, and the tests that catch it."""

    what: str
    file: str  # below mics_fn
    old: str  # occurs there exactly once
    new: str
    tests: str  # arguments of pytest, below tests, such as "shards/test_gather.py -k tied"


def planted(wing: str) -> list[Planted]:
    """The mistakes of a wing."""
    spec = importlib.util.spec_from_file_location(f"planted_{wing}", _table(wing))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return [Planted(*each) for each in module.PLANTED]


def wings() -> list[str]:
    """The wings that have a table."""
    return sorted(path.parent.name for path in (ROOT / "tests").glob("*/planted.py"))


def _table(wing: str) -> Path:
    return ROOT / "tests" / wing / "planted.py"


def caught(mistake: Planted, limit_s: float = 300.0) -> bool:
    """Whether the tests of a mistake fail in a copy of the project that has it."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in ("mics_fn", "tests"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        file = copy / "mics_fn" / mistake.file
        file.write_text(file.read_text().replace(mistake.old, mistake.new))
        first, *options = mistake.tests.split()
        wanted = ["-x", "-q", "-n0", "-p", "no:cacheprovider", "-m", "thorough or not thorough"]
        command = [sys.executable, "-m", "pytest", *wanted, f"tests/{first}", *options]
        env = os.environ | {"PYTHONPATH": folder}
        try:
            run = subprocess.run(
                command, cwd=folder, env=env, capture_output=True, timeout=limit_s, check=False
            )
        except subprocess.TimeoutExpired:
            return True  # a hang is a failure
    return run.returncode == 1


if __name__ == "__main__":
    missed = 0
    for wing in sys.argv[1:] or wings():
        for mistake in planted(wing):
            found = caught(mistake)
            missed += not found
            print(f"{wing}: {mistake.what}: {'caught' if found else 'MISSED'}", flush=True)
    sys.exit(missed > 0)

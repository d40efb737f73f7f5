"""What a type checker tells people before they run anything."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLANTED = Path(__file__).with_name("planted_mistakes.txt")  # not .py: it is wrong on purpose


@pytest.mark.thorough
def test_planted_mistakes_are_found_and_nothing_else(tmp_path: Path):
    text = PLANTED.read_text()
    expected = [i for i, line in enumerate(text.splitlines(), 1) if "# mistake: " in line]
    (tmp_path / "planted.py").write_text(text)
    settings = {"extraPaths": [str(ROOT)], "typeCheckingMode": "basic"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable]
    done = subprocess.run(
        [*command, "-p", str(tmp_path)], cwd=tmp_path, capture_output=True, text=True, timeout=110
    )
    found = json.loads(re.sub(r"\A[^{]*", "", done.stdout))["generalDiagnostics"]
    errors = {x["range"]["start"]["line"] + 1 for x in found if x["severity"] == "error"}
    assert sorted(errors) == expected, "\n".join(x["message"] for x in found)
    assert len(expected) >= 15

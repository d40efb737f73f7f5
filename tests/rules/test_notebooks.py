"""Every notebook runs from top to bottom, in a fresh kernel, and prints what it prints in the repo.

A notebook checks itself with asserts and prints what came out; its text is stored with it, so a
reader on the web sees what this test sees.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(path.name for path in FOLDER.glob("*.ipynb"))
MAX_BYTES = 100_000
EXPECTED = {
    "1_shard_and_gather.ipynb": [
        "Tied(shape=(6, 4), float32)",
        "partition groups (1 of 4): 0-3",
        "rank 1 keeps chunk 2: elements {'w1': 12, 'b1': 0, 'w2': 0}",
        "gather node: 48 bytes sent in 1 call",
        "gather rank: 96 bytes sent in 1 call",
        "gather flat: 144 bytes sent in 1 call",
        "rank 3: equal to the unsharded gradient within 1e-6: True",
        "gathered: (8, 6, 5) equal within 1e-6: True",
        "the two agree within 1e-6: True",
    ],
    "2_schedules.ipynb": [
        "both runs give the same: True",
        "planned as followed: True",
        "live_bytes: 0: sent 170,880 bytes, same gradients: True",
        "live_bytes: None: sent 102,528 bytes, same gradients: True",
        "259 buckets, 26.6 GB",
        "4 micro-steps: 213 GB with 0.8 GB at once",
        "at once 68,352 bytes, fetched 307,584, sent 153,792",
        "bucket 3 is not live; fetch it",
        "rank 1: use 2 of run 1 is of bucket 3",
    ],
    "3_placements.ipynb": [
        "levels kept for a step: 1, reduced once per step: 1  as named: True",
        "hpz     parameters within 1e-5 of the single process, on every rank: True",
        "mics                          812,976   812,976      1,383,488",
        "ddp     replicas 812,976; as the formulas: True",
        "zero3   gather node 1,075,200, gather rank 2,150,400,",
        "hpz     gather node 135,504, gather rank 2,150,400,",
        "sent {'gather rank': 275536, 'reduce rank': 135504, 'replicas': 135504}",
        "['torch.bfloat16', 'torch.float32']",
        "rank 3: parameters within 1e-5 of the single process: True",
    ],
    "4_slow_links.ipynb": [
        "every_step(): sent 308,736 bytes to the other region, loss halved: True",
        "diloco(12): sent 25,728 bytes to the other region, loss halved: True",
        "local_sgd(12): equal after steps [12, 24, 36, 48, 60, 72, 84, 96]",
        "diloco(12, outer=sgd(1.0)) is local_sgd(12) within 1e-4: True",
        "PlanError: ReplicaSync.after: these are the groups of the steps",
        "ranks 2, 3: local_sgd(24)",
    ],
}
PICTURES = {
    "1_shard_and_gather.ipynb": 1,
    "2_schedules.ipynb": 2,
    "3_placements.ipynb": 1,
    "4_slow_links.ipynb": 2,
}


def printed(notebook: Any) -> list[str]:
    """What each cell of code wrote; pictures are left out."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [
        "".join(out.text for out in cell.outputs if out.output_type == "stream") for cell in cells
    ]


# A process of its own: the client leaves sockets behind, and a kernel ends with its parent.
EXECUTE = """
import sys
import nbformat
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

notebook = nbformat.read(sys.argv[1], as_version=4)
for cell in notebook.cells:
    if cell.cell_type == "code":
        cell.outputs, cell.execution_count = [], None
# Sockets in this folder instead of ports: nothing else on the machine can be in the way.
manager = AsyncKernelManager(kernel_name="python3", transport="ipc")
NotebookClient(notebook, km=manager, timeout=60).execute()
nbformat.write(notebook, sys.argv[2])
"""


def executed(path: Path, folder: Path) -> Any:
    """The notebook with the outputs of a run in `folder`."""
    jupyter = ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR")
    env = {k: v for k, v in os.environ.items() if k != "MPLBACKEND"}
    env |= {name: str(folder / name) for name in jupyter} | {"PYTHONPATH": str(FOLDER.parent)}
    result = folder / "executed.ipynb"
    done = subprocess.run(
        [sys.executable, "-c", EXECUTE, str(path), str(result)],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=folder,
        env=env,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return nbformat.read(result, as_version=4)


def test_there_is_an_expectation_for_each_notebook():
    assert sorted(EXPECTED) == NOTEBOOKS


@pytest.mark.parametrize(
    "name", [NOTEBOOKS[0], *(pytest.param(n, marks=pytest.mark.thorough) for n in NOTEBOOKS[1:])]
)
def test_it_runs_and_prints_what_it_shows(name: str, tmp_path: Path):
    notebook = executed(FOLDER / name, tmp_path)
    text = printed(notebook)
    assert text == printed(nbformat.read(FOLDER / name, as_version=4))
    for line in EXPECTED[name]:
        assert line in "\n".join(text)
    assert "False" not in "\n".join(text)
    outputs = [out for cell in notebook.cells for out in cell.get("outputs", [])]
    assert not [out for out in outputs if out.get("name") == "stderr"]
    assert sum("image/png" in out.get("data", {}) for out in outputs) == PICTURES[name]


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_it_is_small_and_has_a_sentence_above_each_cell(name: str):
    path = FOLDER / name
    assert path.stat().st_size < MAX_BYTES
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    title, *cells = notebook.cells
    assert title.cell_type == "markdown"
    assert [cell.cell_type for cell in cells] == ["markdown", "code"] * (len(cells) // 2)
    assert all("\n" not in cell.source.strip() for cell in cells[::2])

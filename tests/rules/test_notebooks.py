"""Every notebook runs from top to bottom, in a fresh kernel, and prints what it prints in the repo.

A notebook checks itself with asserts and prints what came out; its text is stored with it, so a
reader on the web sees what this test sees.
"""

import ast
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from test_api import listed

import mics_fn

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(path.name for path in FOLDER.glob("*.ipynb"))
MAX_BYTES = 100_000
EXPECTED = {
    "0_a_node_of_gpus.ipynb": [
        "groups: n=4 p=4 levels=node:2,rank:2",
        "rank 1: 2",
        "losses of 4 ranks, each halved: True",
        "['first of 4', 'second of 4', 'third of 4', 'fourth of 4']",
        "gather node: 2,640 bytes sent in 1 call",
        "ValueError: a bad sample on rank 2",
        "ranks 0, 1, 3: PeerFailed: rank 2 failed: ValueError: a bad sample on rank 2",
        "all ranks are at one step, 61: True",
        "ranks 0-3:",
        "one step more: True",
        "CellEnded: it has ended this cell, or takes no part in it",
        "Cluster(4 ranks, stopped)",
    ],
    "1_shard_and_gather.ipynb": [
        "Tied(shape=(6, 4), float32)",
        "partition groups (1 of 4): 0-3",
        "rank 1: keeps chunk 2: elements {'w1': 12, 'b1': 0, 'w2': 0}",
        "gather node: 48 bytes sent in 1 call",
        "gather rank: 96 bytes sent in 1 call",
        "gather flat: 144 bytes sent in 1 call",
        "formula over two levels: [48, 96]",
        "equal to the unsharded gradient within 1e-6: True",
        "gathered: (8, 6, 5) equal within 1e-6: True",
        "the two agree within 1e-6: True",
    ],
    "2_schedules.ipynb": [
        "both runs give the same: True",
        "planned as followed: True",
        "live_bytes: 0: sent 170,880 bytes, same gradients: True",
        "live_bytes: None: sent 102,528 bytes, same gradients: True",
        "257 buckets, 26.6 GB",
        "4 micro-steps: 213 GB with 0.8 GB at once",
        "at once 68,352 bytes, fetched 307,584, sent 153,792",
        "bucket 3 is not live; fetch it",
        "fetch of bucket 3 (3.linear1.bias",
    ],
    "3_placements.ipynb": [
        "levels kept for a step: 1, reduced once per step: 1  as named: True",
        "hpz     parameters within 1e-5 of plain torch: True",
        "mics                          812,976   812,976            1,150,528",
        "ddp     replicas 812,976, step totals 48; as the formulas: True",
        "zero3   gather node 1,075,200, gather rank 2,150,400,",
        "hpz     gather node 135,504, gather rank 2,150,400,",
        "'reduce rank': 135504, 'replicas': 135504, 'step totals': 64}",
        "['torch.bfloat16', 'torch.float32']",
        "parameters within 1e-5 of plain torch: True",
    ],
    "4_slow_links.ipynb": [
        "every_step(): sent 308,736 bytes to the other region, loss halved: True",
        "diloco(12): sent 25,728 bytes to the other region, loss halved: True",
        "int8[64]: sent 88,704 bytes, 0.287 of those of float32",
        "int4[64]: sent 45,696 bytes, 0.148 of those of float32",
        "equal replicas: True; loss within 0.5 % of it: True",
        "equal replicas: True; loss within 2 % of it: True",
        "local_sgd(12): equal after steps [12, 24, 36, 48, 60, 72, 84, 96]",
        "diloco(12, outer=sgd(1.0)) is local_sgd(12) within 1e-4: True",
        "PlanError: ReplicaSync.after: these are the groups of the steps",
        "ranks 2, 3: local_sgd(24)",
    ],
    "5_checkpoints.ipynb": [
        "rank 2: gone: killed by SIGKILL",
        "rank 0: PeerFailed: rank 2 is gone",
        "committed: [10, 20]  latest: 20",
        "went on from step 20; losses equal: True",
        "parameters equal, to the bit: True",
        "mean loss of the last 10 steps within 10 %: True",
        "FileError names the file: True  the leaf: True",
        "goes back to step 50",
    ],
    "6_a_model_from_transformers.ipynb": [
        "goes on with [3, 4, 5, 6, 7, 8, 9, 10, 11]",
        "6,656 of 85,120 bytes are trained; held here: 42,560",
        "all steps were taken: True",
        "the loss fell below a tenth of what it was: True",
        "moments: 13,312 bytes, twice those of the adapters: True",
        "['config.json', 'model.safetensors'] goes on with [3, 5, 7, 9, 11, 13, 15, 17, 19]",
    ],
}
PICTURES = {
    "0_a_node_of_gpus.ipynb": 1,
    "1_shard_and_gather.ipynb": 1,
    "2_schedules.ipynb": 2,
    "3_placements.ipynb": 1,
    "4_slow_links.ipynb": 2,
    "5_checkpoints.ipynb": 1,
    "6_a_model_from_transformers.ipynb": 1,
}


def printed(notebook: Any) -> list[str]:
    """What each cell of code wrote; pictures and errors are left out."""
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
@pytest.mark.thorough
def test_it_runs_and_prints_what_it_shows(name: str, tmp_path: Path):
    notebook = executed(FOLDER / name, tmp_path)
    text = printed(notebook)
    assert text == printed(nbformat.read(FOLDER / name, as_version=4))
    outputs = [out for cell in notebook.cells for out in cell.get("outputs", [])]
    errors = [out.evalue for out in outputs if out.output_type == "error"]
    shown = "\n".join([*text, *errors])
    for line in EXPECTED[name]:
        assert line in shown, shown
    assert "False" not in "\n".join(text)
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


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_it_uses_public_names_alone(name: str):
    known = set(listed())
    notebook = nbformat.read(FOLDER / name, as_version=4)
    used = set[str]()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            code = re.sub(r"^%%ranks.*$", "", cell.source, count=1, flags=re.MULTILINE)
            used |= set(names_in(ast.parse(code)))
    spaces = {each.partition(".")[0] for each in known if "." in each}
    assert {each for each in used if each not in known or each in spaces} == set()


def names_in(code: ast.Module) -> Iterator[str]:
    """The names of this library that code uses: `a` of `mf.a`, and `a.b` where `a` is a module."""
    for part in ast.walk(code):
        if isinstance(part, ast.ImportFrom) and f"{part.module}".startswith("mics_fn"):
            inner = f"{part.module}".removeprefix("mics_fn").removeprefix(".")
            yield from (f"{inner}.{alias.name}".removeprefix(".") for alias in part.names)
        if isinstance(part, ast.Import):
            names = [alias.name for alias in part.names if alias.name.startswith("mics_fn.")]
            yield from (name.removeprefix("mics_fn.") for name in names)
        if isinstance(part, ast.Attribute):
            *spaces, last = ast.unparse(part).split(".")
            if spaces == ["mf"] and not inspect.ismodule(getattr(mics_fn, last, None)):
                yield last
            if (
                len(spaces) == 2
                and spaces[0] == "mf"
                and inspect.ismodule(getattr(mics_fn, spaces[1], None))
            ):
                yield f"{spaces[1]}.{last}"

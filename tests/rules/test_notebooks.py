"""Every notebook runs from top to bottom, in a fresh kernel, and prints what it prints in the repo.

A notebook checks itself with asserts and prints what came out; its text is stored with it, so a
reader on the web sees what this test sees.
"""

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from test_api import listed
from test_packaging import run

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(path.name for path in FOLDER.glob("*.ipynb"))
MAX_BYTES = 100_000


def shown(notebook: Any) -> list[str]:
    """What each cell of code wrote, how its errors begin, and that it drew a picture."""
    found = []
    for cell in notebook.cells:
        if cell.cell_type == "code":
            text = "".join(out.text for out in cell.outputs if out.output_type == "stream")
            errors = [out.evalue for out in cell.outputs if out.output_type == "error"]
            text += "".join(error.splitlines()[0] for error in errors)
            shown = [out.get("data", {}) for out in cell.outputs]
            drawn = ["image/png" in x or "<svg" in str(x.get("text/html")) for x in shown]
            found.append(text + " picture" * sum(drawn))
    return found


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
    own, result = {name: str(folder / name) for name in jupyter}, folder / "executed.ipynb"
    run("-c", EXECUTE, str(path), str(result), cwd=folder, path=FOLDER.parent, **own)
    return nbformat.read(result, as_version=4)


@pytest.mark.parametrize("name", NOTEBOOKS)
@pytest.mark.thorough
def test_it_runs_and_shows_what_it_showed(name: str, tmp_path: Path):
    notebook = executed(FOLDER / name, tmp_path)
    found = shown(notebook)
    assert found == shown(nbformat.read(FOLDER / name, as_version=4))
    assert "picture" in "\n".join(found)
    assert "False" not in "\n".join(found)
    outputs = [out for cell in notebook.cells for out in cell.get("outputs", [])]
    assert not [out for out in outputs if out.get("name") == "stderr"]


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
    notebook = nbformat.read(FOLDER / name, as_version=4)
    code = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    assert "from mics_fn" not in code
    spaces = {each.partition(".")[0] for each in listed() if "." in each}
    for used in re.findall(r"\bmf\.([\w.]*\w)", code):
        parts = used.split(".")
        begins = {".".join(parts[:n]) for n in range(1, len(parts) + 1)}
        assert begins & (set(listed()) - spaces), used

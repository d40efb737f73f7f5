"""What is built from this folder: a source package, from it a wheel, and the wheel as installed.

All files of the package are in the wheel, the lab too: its demo, doctor and benches are commands
that README names, and they share code.
"""

import builtins
import os
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

import mics_fn as mf
from mics_fn.__main__ import COMMANDS

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "mics_fn"
STEM = f"mics_fn-{mf.__version__}"
TRAIN = """
import mics_fn as mf, torch
model = torch.nn.Linear(2, 1)
trainer = mf.Trainer(model, mf.optim.sgd(0.1), mf.make_groups(), loss=lambda m, x: m(x).sum())
trainer.fit([torch.ones(4, 2)], steps=2, progress=False)
model.load_state_dict(trainer.state_dict())
print(mf.__version__, trainer.state.step, mf.__file__)

import contextlib
from mics_fn.__main__ import COMMANDS, main

for command in COMMANDS:
    with contextlib.suppress(SystemExit):
        main([command, "--help"])
with contextlib.suppress(SystemExit):
    main(["--version"])
"""


OF_TESTS = {"PYTHONPATH", "MPLBACKEND", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"}


def run(*command: str, cwd: Path, path: Path | None = None, **variables: str) -> str:
    """What a command of this Python prints, without the sources that this test runs from."""
    env = {k: v for k, v in os.environ.items() if k not in OF_TESTS} | variables
    env |= {"PYTHONPATH": str(path)} if path else {}
    env["PIP_DISABLE_PIP_VERSION_CHECK"] = "1"
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=100, cwd=cwd, env=env
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both packages; nothing is fetched, as the back end is installed."""
    folder = tmp_path_factory.mktemp("built")
    run("-m", "build", "--no-isolation", "-o", str(folder), str(ROOT), cwd=folder)
    return folder


def test_packages_have_all_files_and_say_what_they_are(built: Path):
    assert sorted(path.name for path in built.iterdir()) == [
        f"{STEM}-py3-none-any.whl",
        f"{STEM}.tar.gz",
    ]
    with zipfile.ZipFile(built / f"{STEM}-py3-none-any.whl") as wheel:
        names = wheel.namelist()
        about = message_from_string(wheel.read(f"{STEM}.dist-info/METADATA").decode())
        license_text = wheel.read(f"{STEM}.dist-info/licenses/mics_fn/LICENSE").decode()
    kinds = (".py", ".md", ".typed")
    own = [path for path in PACKAGE.rglob("*") if path.suffix in kinds or path.name == "LICENSE"]
    found = {name for name in names if ".dist-info" not in name}
    assert found == {f"mics_fn/{path.relative_to(PACKAGE).as_posix()}" for path in own}
    assert about["Version"] == mf.__version__
    assert about["License-Expression"] == "Apache-2.0"
    assert "TERMS AND CONDITIONS FOR USE, REPRODUCTION, AND DISTRIBUTION" in license_text
    needed = [line for line in about.get_all("Requires-Dist", []) if "extra" not in line]
    assert sorted(line.partition(">")[0] for line in needed) == ["optree", "torch"]
    assert str(about.get_payload()).startswith("# mics_fn")
    with tarfile.open(built / f"{STEM}.tar.gz") as source:
        tops = {name.split("/")[1] for name in source.getnames()}
    assert {"README.md", "mics_fn", "notebooks", "pyproject.toml", "tests", ".ci"} <= tops


@pytest.mark.thorough  # it imports torch in a new process
def test_a_wheel_that_is_installed_trains_and_has_its_commands(built: Path, tmp_path: Path):
    site, wheel = tmp_path / "site", built / f"{STEM}-py3-none-any.whl"
    options = ("--no-deps", "--no-index", "--no-compile", "--quiet", "--target", str(site))
    run("-m", "pip", "install", *options, str(wheel), cwd=tmp_path)
    said = run("-W", "error", "-c", TRAIN, cwd=tmp_path, path=site).splitlines()
    assert said[0].split() == [mf.__version__, "2", str(site / "mics_fn" / "__init__.py")]
    for command in COMMANDS:
        assert any(line.startswith(f"usage: python -m mics_fn {command}") for line in said)
    assert said[-1] == f"mics_fn {mf.__version__}"


def test_a_star_import_gives_the_public_names_and_hides_no_builtin():
    names: dict = {}
    exec("from mics_fn import *", names)
    found = set(names) - {"__builtins__"}
    assert found == set(mf.__all__) == set(dir(mf)) - {"compile", "set"}
    assert not found & set(dir(builtins))

"""The library of the simulated device is built once, by whoever comes first, or skipped by name."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from simcuda import build

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(sys.platform != "linux", reason=str(build.missing())),
]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A cache folder, and a compiler that only writes down that it was called."""
    (tmp_path / "bin").mkdir()
    compiler = tmp_path / "bin" / "g++"
    compiler.write_text(
        "#!/bin/sh\necho called >> $CALLS\n"
        'while [ "$1" != -o ]; do shift; done\nprintf lib > $2; sleep 0.3; echo rary >> $2\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    return tmp_path


def test_it_is_built_once(quick: Path):
    first = build.library()
    calls = (quick / "calls").read_text()
    assert first.read_text() == "library\n"
    assert first.is_relative_to(quick / "cache" / "mics_fn")
    assert build.library() == first
    assert (quick / "calls").read_text() == calls


def test_several_processes_may_build_at_once(quick: Path):
    code = "from simcuda import build; print(build.library().read_text())"
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, "-c", code]
    builders = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    assert [builder.communicate(timeout=60)[0].strip() for builder in builders] == ["library"] * 3
    (cache,) = (quick / "cache").iterdir()
    assert len(list(cache.iterdir())) == 1  # no half-made folder is left


def test_what_does_not_compile_is_an_error_with_the_compilers_text(quick: Path):
    (quick / "bin" / "g++").write_text("#!/bin/sh\necho 'no such header' >&2; exit 1\n")
    with pytest.raises(RuntimeError, match="no such header"):
        build.library()
    assert not list((quick / "cache" / "mics_fn").iterdir())


def test_without_a_compiler_the_reason_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    assert build.missing() is None or "g++" in str(build.missing())
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "g++" in str(build.missing())

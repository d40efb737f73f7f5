"""Build the library of the simulated device, once for each torch and each state of its sources."""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).parent
FLAGS = ["-std=c++20", "-O1", "-fPIC"]


def missing() -> str | None:
    """Why the simulated device cannot be built here; None if it can."""
    if sys.platform != "linux":
        return f"the simulated CUDA device is built on Linux only, not on {sys.platform}"
    if shutil.which("g++") is None:
        return "the simulated CUDA device needs g++, which is not installed"
    return None


def library() -> Path:
    """The library's path; it is built if the cache folder of the user does not have it.

    Several processes may build at the same time: the last one to finish replaces the others' file
    by an equal one, and nobody sees half a file.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mics_fn"
    built = cache / f"simcuda-{version('torch')}-{_digest()}.so"
    if not built.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            _compile(Path(folder), Path(folder) / built.name)
            os.replace(Path(folder) / built.name, built)
    return built


def _digest() -> str:
    sources = [path.read_bytes() for path in sorted([*HERE.glob("*.cpp"), *HERE.glob("*.h")])]
    # It is linked to the torch of this environment, which others need not have, or no longer.
    given = [*sources, *map(str.encode, [*FLAGS, str(_torch())])]
    return hashlib.sha256(b"\0".join(given)).hexdigest()[:16]


def _torch() -> Path:
    """The folder of torch."""
    spec = find_spec("torch")  # found, not imported: the library must be loaded before it
    if spec is None or spec.origin is None:
        raise RuntimeError("torch is not installed")
    return Path(spec.origin).parent


def _compile(folder: Path, out: Path) -> None:
    torch = _torch()
    headers = [f"-I{torch / 'include'}", f"-I{torch / 'include/torch/csrc/api/include'}"]

    def compiled(source: Path) -> Path:
        made = folder / f"{source.stem}.o"
        _call("g++", *FLAGS, *headers, "-c", source, "-o", made)
        return made

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        objects = list(threads.map(compiled, sorted(HERE.glob("*.cpp"))))
    libraries = [f"-L{torch / 'lib'}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{torch / 'lib'}"]
    _call("g++", "-shared", *objects, *libraries, "-o", out)


def _call(*command: object) -> None:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the simulated CUDA device does not compile:\n{done.stderr}")

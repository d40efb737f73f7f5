"""Nothing that others wrote is run: no pickle where files are read, no objects between ranks."""

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "mics_fn"

# These run what they read, or may. The lab sends calls to processes that it started itself, through
# pipes and folders that only this user can write to.
MODULES = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
OWN = "lab/ranks.py"
# Reads pickles by a machine of Python's own, which here finds no class: see `stand_in`.
READS = "init/files.py"
OBJECTS = {f"{verb}_object" for verb in ("all_gather", "gather", "scatter", "broadcast")}
OBJECTS |= {f"{verb}_object_list" for verb in ("broadcast", "scatter", "send", "recv")}


def found_in(source: str, own: bool = False) -> Iterator[tuple[int, str]]:
    """What a file has of these, by line."""
    for part in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(part, ast.Import):
            names = [alias.name for alias in part.names]
        elif isinstance(part, ast.ImportFrom):
            names = [f"{part.module}", *(alias.name for alias in part.names)]
        elif isinstance(part, ast.Attribute):
            names = [part.attr]
        elif isinstance(part, ast.Constant) and part.value in MODULES:
            names = [part.value]  # for importlib
        line = getattr(part, "lineno", 0)
        for name in names:
            if name in OBJECTS or (name.partition(".")[0] in MODULES and not own):
                yield line, name
        if isinstance(part, ast.Call) and ast.unparse(part.func).startswith("torch."):
            what, last = ast.unparse(part.func), ast.unparse(part.func).rpartition(".")[2]
            safe = {k.arg: ast.unparse(k.value) for k in part.keywords}.get("weights_only")
            if last == "load" and (safe != "True" or "jit" in what):
                yield line, ast.unparse(part)


def stand_in(source: str) -> Iterator[tuple[int, str]]:
    """What a file has of `pickle` besides opcodes and a machine that finds and calls nothing."""
    for part in ast.walk(ast.parse(source)):
        if isinstance(part, ast.Attribute) and ast.unparse(part.value) == "pickle":
            names = [] if part.attr.isupper() or part.attr == "_Unpickler" else [part.attr]
            yield from ((part.lineno, name) for name in names)
        if isinstance(part, ast.Call) and ast.unparse(part.func) == "pickle._Unpickler":
            yield part.lineno, ast.unparse(part)
        if isinstance(part, ast.ClassDef) and "pickle._Unpickler" in map(ast.unparse, part.bases):
            own = {each.name: each for each in part.body if isinstance(each, ast.FunctionDef)}
            for name in ("find_class", "persistent_load"):
                if name not in own or "super" in ast.unparse(own[name]):
                    yield part.lineno, f"{part.name} has not its own {name}"


def test_no_file_runs_what_it_reads():
    wrong = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name, source = path.relative_to(PACKAGE).as_posix(), path.read_text()
        found = stand_in(source) if name == READS else found_in(source, own=name.startswith(OWN))
        wrong += [f"mics_fn/{name}:{line}: {what}" for line, what in found]
    assert not wrong, "\n".join(["", *wrong])


SEEN = """
import pickle
from pickle import loads
importlib.import_module('pickle')
torch.load(path)
torch.load(path, weights_only=safe)
torch.jit.load(path, weights_only=True)
dist.all_gather_object(found, value)
from torch.distributed import broadcast_object_list
"""
SEEN_THERE = [
    "pickle.loads(data)",
    "pickle._Unpickler(file).load()",
    "class A(pickle._Unpickler):\n def persistent_load(self, x): return x",
    "class A(pickle._Unpickler):\n def find_class(self, x): super().find_class(x)",
]


def test_the_rules_see():
    assert all(list(found_in(line)) for line in SEEN.strip().splitlines())
    assert all(list(stand_in(source)) for source in SEEN_THERE)
    assert not list(found_in("torch.load(path, weights_only=True)"))

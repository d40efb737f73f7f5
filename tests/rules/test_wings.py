"""The wings of the package: which file may import what, and where data moves."""

import ast
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch

import mics_fn

PACKAGE = Path(__file__).parents[2] / "mics_fn"
PATHS = {
    path.relative_to(PACKAGE).with_suffix("").as_posix(): path
    for path in sorted(PACKAGE.rglob("*.py"))
}

# Bottom to top. Wings of one row do not know each other.
FLOORS = [
    ["schedules"],
    ["groups"],
    ["collectives"],
    ["offload"],
    ["shards"],
    ["deferred", "optim", "init"],
    ["inspection", "faults"],
    ["checkpoint"],
    ["train"],
    ["testing"],
    ["lab", "notebook"],
]
WINGS = [wing for row in FLOORS for wing in row]
FACES = [f"{wing}/__init__" for wing in WINGS]
# Files, which import only each other.
GROUND = [
    "errors",
    "checks",
    "tree",
    "store",
    "threads",
    "spans",
]
# The only files that reach private names of torch.
TORCH_DOORS = ["_torch"]
GROUND += [*TORCH_DOORS, "_version"]
DOORS = ["__init__", "__main__"]  # what users see; nothing imports them

# What a wing or a file imports from outside, Python's own library aside.
OUTSIDE = {
    "errors": [],
    "_version": [],
    "checks": [],
    "store": [],
    "threads": [],
    "spans": ["torch.distributed"],
    "tree": ["optree"],
    "_torch": ["torch", "torch.distributed"],
    "schedules": [],
    "groups": ["torch", "torch.distributed"],
    "faults": ["torch", "torch.distributed"],
    "collectives": ["torch", "torch.distributed"],
    "inspection": ["torch"],
    "checkpoint": ["torch", "torch.distributed", "safetensors"],
    "train": ["torch", "tqdm"],
    "testing": ["torch", "torch.distributed"],
    "lab": ["torch", "torch.distributed", "matplotlib", "tqdm"],
    "notebook": ["torch", "IPython", "ipyparallel"],
    "__init__": [],
    "__main__": [],
}

# What moves data. Making groups, and asking for ranks, does not.
MOVES_DATA = re.compile(
    r"(all_gather|all_reduce|all_to_all|broadcast|reduce|reduce_scatter|gather|scatter|barrier"
    r"|monitored_barrier|i?send|i?recv|send_object_list|recv_object_list|batch_isend_irecv)"
    r"(_\w+)?"
)


class Import(NamedTuple):
    """One name that a file imports."""

    module: str  # as written, or the submodule that the name is
    name: str  # empty where a whole module is meant
    line: int


@cache
def files() -> dict[str, ast.Module]:
    """Every file by its path inside the package, without `.py`."""
    return {name: ast.parse(path.read_text()) for name, path in PATHS.items()}


def wing_of(file: str) -> str:
    return file.split("/")[0]


def floor_of(file: str) -> int:
    """The row of a file's wing; the ground is below all, the doors are above."""
    own = wing_of(file)
    if own in GROUND or own in DOORS:
        return -1 if own in GROUND else len(FLOORS)
    return next(floor for floor, row in enumerate(FLOORS) if own in row)


def file_of(module: str) -> str | None:
    """The file of a module of this package; None if it is none."""
    if module.partition(".")[0] != "mics_fn":
        return None
    inner = module.removeprefix("mics_fn").removeprefix(".").replace(".", "/")
    return next((f for f in (inner, f"{inner}/__init__".lstrip("/")) if f in files()), None)


@cache
def imports(file: str) -> list[Import]:
    """All that a file imports, wherever in it."""
    return list(_imports(file))


def _imports(file: str) -> Iterator[Import]:
    for part in ast.walk(files()[file]):
        if isinstance(part, ast.Import):
            yield from (Import(alias.name, "", part.lineno) for alias in part.names)
        elif isinstance(part, ast.ImportFrom):
            assert part.level == 0, f"{file}:{part.lineno}: relative import"
            for alias in part.names:
                inner = f"{part.module}.{alias.name}"
                if f"{file_of(inner)}" in FACES and file != "__init__":
                    yield from names_used(file, inner, alias.asname or alias.name)
                    continue
                if inner == "torch.distributed" or file_of(inner) is not None:
                    yield Import(inner, "", part.lineno)
                else:
                    yield Import(f"{part.module}", alias.name, part.lineno)
        elif isinstance(part, ast.Attribute) and ast.unparse(part) == "torch.distributed":
            yield Import("torch.distributed", "", part.lineno)


def names_used(file: str, wing: str, called: str) -> Iterator[Import]:
    """The names of a face that a file uses as attributes of the wing."""
    for part in ast.walk(files()[file]):
        if isinstance(part, ast.Attribute) and ast.unparse(part.value) == called:
            yield Import(wing, part.attr, part.lineno)


def refuse(wrong: list[str]) -> None:
    """Fail with all that is wrong, a line each."""
    assert not wrong, "\n".join(["", *wrong])


def test_every_file_has_a_wing():
    refuse([file for file in files() if wing_of(file) not in [*GROUND, *WINGS, *DOORS]])


def test_imports_run_down():
    wrong = []
    for file in files():
        for module, name, line in imports(file):
            other = file_of(module)
            if other is None or wing_of(other) == wing_of(file):
                continue
            ground = wing_of(file) in GROUND and wing_of(other) in GROUND
            user = wing_of(file) in FLOORS[-1] and other == "__init__"
            if not ground and not user and floor_of(other) >= floor_of(file):
                wrong.append(f"mics_fn/{file}.py:{line}: {module} {name}")
    refuse(wrong)


# The core, and what research on schedules and memory adds to it.
WITHOUT_FAULTS = ["groups", "collectives", "shards", "optim", "schedules"]
WITHOUT_FAULTS += ["deferred", "offload", "inspection"]


def test_what_is_done_about_faults_is_beside_the_core():
    """It fills the hooks of groups as `mics_fn` is imported; nothing that it watches knows it."""
    wrong = []
    for file in [file for file in files() if wing_of(file) in [*GROUND, *WITHOUT_FAULTS]]:
        for module, name, line in imports(file):
            if module.startswith("mics_fn.faults") or name == "faults":
                wrong.append(f"mics_fn/{file}.py:{line}: {module} {name}")
    refuse(wrong)
    assert all(wing in WINGS for wing in [*WITHOUT_FAULTS, "faults"])


def test_another_wing_is_known_by_its_face():
    wrong = []
    for file in files():
        for module, name, line in imports(file):
            other = file_of(module)
            if other is None or wing_of(other) in [*GROUND, *DOORS, wing_of(file)]:
                continue
            if file == "__init__" and other.endswith("/__init__") and not name:
                continue  # users see the whole wing
            shown = names_of_face(wing_of(other))
            through = module == f"mics_fn.{wing_of(other)}" and name in shown
            if not through and not (name == "" and other.count("/") == 1 and is_shown(other)):
                wrong.append(f"mics_fn/{file}.py:{line}: {module} {name}")
    refuse(wrong)


def is_shown(file: str) -> bool:
    """Whether a face offers a whole file, as a name with names in it."""
    return file.split("/")[-1] in names_of_face(wing_of(file))


@cache
def names_of_face(wing: str) -> list[str]:
    """What the `__init__` of a wing imports from its files, or defines."""
    page = files()[f"{wing}/__init__"]
    imports = (part.names for part in page.body if isinstance(part, ast.ImportFrom))
    own = [part.name for part in page.body if isinstance(part, ast.ClassDef | ast.FunctionDef)]
    loaded = {part.id for part in ast.walk(page) if isinstance(part, ast.Name)}
    shown = [alias.asname or alias.name for alias in chain.from_iterable(imports)]
    return own + [name for name in shown if name not in loaded]


def test_a_face_shows_what_others_use_and_no_more():
    used: dict[str, set[str]] = {wing: set() for wing in WINGS}
    for file in files():
        for module, name, _ in imports(file):
            other = file_of(module)
            whole = file == "__init__" and not name and other == f"{wing_of(other or '')}/__init__"
            if other is None or wing_of(other) not in WINGS or whole:
                continue
            if wing_of(other) != wing_of(file):
                used[wing_of(other)].add(name or module.rpartition(".")[2])
    there = [wing for wing in WINGS if f"{wing}/__init__" in files() and wing != "lab"]
    for wing in there:  # what users find there is in the table of the package's docstring
        used[wing] |= set(re.findall(rf"`{wing}\.(\w+)`", mics_fn.__doc__ or ""))
    wrong = []
    for wing in there:
        page = importlib.import_module(f"mics_fn.{wing}").__doc__ or ""
        explained = set(re.findall(r"`(\w+)`", page)) & set(names_of_face(wing))
        wrong += [
            f"mics_fn/{wing}/__init__.py: {name}"
            for name in sorted(set(names_of_face(wing)) ^ (used[wing] | explained))
        ]
    refuse(wrong)


def test_a_file_imports_from_outside_only_what_its_wing_may():
    wrong = []
    for file in files():
        for module, _, line in imports(file):
            top = module.partition(".")[0]
            if top != "mics_fn" and top not in sys.stdlib_module_names:
                what = "torch.distributed" if module.startswith("torch.distributed") else top
                if what not in OUTSIDE.get(wing_of(file), ["torch"]):
                    wrong.append(f"mics_fn/{file}.py:{line}: {module}")
    refuse(wrong)


def test_no_file_imports_itself_by_way_of_others():
    refuse(circle(arrows()))


def test_no_file_bears_the_name_of_a_public_function():
    # `import mics_fn.optim.chain` would give the function.
    found = set()
    for file in files():
        for public in public_functions():
            wing, _, name = public.rpartition(".")
            same = file == f"{wing}/{name}" if wing else file.split("/")[-1] == name
            if same and wing_of(file) != "lab":
                found.add(file)
    refuse([f"mics_fn/{file}.py" for file in found])


def public_functions() -> list[str]:
    """Every function that the docstring of the package or a face names, such as `optim.chain`."""
    found = [name for name, value in vars(mics_fn).items() if inspect.isfunction(value)]
    for wing in WINGS:
        if f"{wing}/__init__" in files() and wing != "lab":
            face = importlib.import_module(f"mics_fn.{wing}")
            shown = ((name, getattr(face, name, None)) for name in names_of_face(wing))
            found += [f"{wing}.{name}" for name, value in shown if inspect.isfunction(value)]
    return found


# What is private to classes of torch, as far as these can be asked.
OF_TORCH = set(dir(torch.Tensor)) | set(dir(torch._ops.OpOverload))
OF_TORCH |= set(dir(torch.autograd.function.BackwardCFunction)) | set(dir(torch.optim.Adam))
OF_PYTHON = {"_asdict", "_current_frames", "_fields", "_make", "_replace"}  # all documented
OF_PYTHON.add("_Unpickler")  # not documented; `test_unpickling.py` says who may use it, and how


def test_only_doors_reach_private_names_of_torch():
    inner = {name for tree in files().values() for name in private_names(tree)}
    wrong = []
    for file in set(files()) - {*TORCH_DOORS}:
        for part in ast.walk(files()[file]):
            found = []
            if isinstance(part, ast.Attribute) and is_foreign(part, inner):
                found = [ast.unparse(part)]
            elif isinstance(part, ast.ImportFrom):
                names = [f"{part.module}.{alias.name}" for alias in part.names]
                found = [text for text in names if re.match(r"torch(\.\w+)*\._[^_]", text)]
            wrong += [f"mics_fn/{file}.py:{getattr(part, 'lineno', 0)}: {text}" for text in found]
    refuse(wrong)


def private_names(tree: ast.Module) -> Iterator[str]:
    """The names with an underscore that a file gives to attributes."""
    for part in ast.walk(tree):
        if isinstance(part, ast.ClassDef):
            members = [x for x in part.body if isinstance(x, ast.FunctionDef | ast.ClassDef)]
            yield from (member.name for member in members)
            fields = [x.target for x in part.body if isinstance(x, ast.AnnAssign)]
            yield from (name.id for name in fields if isinstance(name, ast.Name))
        elif isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store):
            yield part.attr
        elif isinstance(part, ast.Constant) and re.fullmatch(r"_[a-z]\w*", str(part.value)):
            yield f"{part.value}"  # of `object.__setattr__`


def is_foreign(part: ast.Attribute, inner: set[str]) -> bool:
    """Whether an attribute is private and belongs to torch, or at least not to this package.

    Names of ops are public: `aten._to_copy` is what a handler of ops has to name.
    """
    text, name = ast.unparse(part), part.attr
    root = text.partition(".")[0]
    if not re.match("_[^_]", name) or name in OF_PYTHON or text == f"aten.{name}":
        return False
    if root in ("os", "threading", "atexit") or text == "inner._socket":  # of Python's own
        return False
    return name not in inner or (root != "self" and name in OF_TORCH)


def test_data_collectives_are_called_in_one_file():
    wrong = []
    for file in files():
        if file not in ("collectives/levels", *TORCH_DOORS) and wing_of(file) != "lab":
            wrong += [f"mics_fn/{file}.py:{line}: {what}" for what, line in data_collectives(file)]
    refuse(wrong)


def data_collectives(file: str) -> Iterator[tuple[str, int]]:
    """Where a file names what moves data, or imports a module made of such."""
    doors = {"torch.distributed", "_torch"}
    for part in ast.walk(files()[file]):
        if isinstance(part, ast.Import):
            doors |= {a.asname or a.name for a in part.names if "distributed" in a.name}
        if isinstance(part, ast.ImportFrom) and "torch.distributed" in f"{part.module}":
            for alias in part.names:
                text = f"{part.module}.{alias.name}"
                if moves_data(alias.name) or re.search(r"\b(nn|_functional_collectives)\b", text):
                    yield text, part.lineno
    attributes = (part for part in ast.walk(files()[file]) if isinstance(part, ast.Attribute))
    for part in attributes:
        if ast.unparse(part.value) in doors and moves_data(part.attr):
            yield ast.unparse(part), part.lineno


def moves_data(name: str) -> bool:
    return MOVES_DATA.fullmatch(name) is not None


# Figures


@cache
def arrows() -> dict[str, set[str]]:
    """The files that each file imports; what comes through a face, from where it is defined."""
    return {
        file: {
            defined(other, name)
            for module, name, _ in imports(file)
            if (other := file_of(module)) is not None
        }
        - {file}
        for file in files()
        if not file.endswith("/__init__")
    }


def defined(file: str, name: str) -> str:
    """The file that a name comes from, if `file` is a face that passes it on."""
    if file.endswith("/__init__"):
        for module, passed, _ in imports(file):
            other = file_of(module)
            if other is not None and passed == name:
                return other
    return file


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Files that import each other in a circle; none if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def depth(graph: dict[str, set[str]]) -> int:
    """How many files the longest chain of imports has."""
    longest: dict[str, int] = {}
    for file in TopologicalSorter(graph).static_order():
        longest[file] = 1 + max((longest[other] for other in graph.get(file, ())), default=0)
    return max(longest.values())

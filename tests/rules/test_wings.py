"""The wings of the package: which file may import what, and where data moves."""

import ast
import importlib
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
    """The row of a file's wing, of which each has one; ground is below all, doors are above."""
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


def test_a_file_imports_what_it_may():
    rules = (runs_down, goes_through_a_face, is_known_outside)
    refuse(
        [
            f"mics_fn/{file}.py:{line}: {module} {name}: not, as it should, {rule.__name__}"
            for file in files()
            for module, name, line in imports(file)
            for rule in rules
            if not rule(file, module, name)
        ]
    )
    assert all(floor_of(file) is not None for file in files())  # each has a wing


def runs_down(file: str, module: str, name: str) -> bool:
    other = file_of(module)
    if other is None or wing_of(other) == wing_of(file):
        return True
    ground = wing_of(file) in GROUND and wing_of(other) in GROUND
    user = wing_of(file) in FLOORS[-1] and other == "__init__"
    return ground or user or floor_of(other) < floor_of(file)


def goes_through_a_face(file: str, module: str, name: str) -> bool:
    other = file_of(module)
    if other is None or wing_of(other) in [*GROUND, *DOORS, wing_of(file)]:
        return True
    if file == "__init__" and other.endswith("/__init__") and not name:
        return True  # users see the whole wing
    if module == f"mics_fn.{wing_of(other)}" and name in names_of_face(wing_of(other)):
        return True
    return name == "" and other.count("/") == 1 and is_shown(other)


def is_known_outside(file: str, module: str, name: str) -> bool:
    top = module.partition(".")[0]
    if top == "mics_fn" or top in sys.stdlib_module_names:
        return True
    what = "torch.distributed" if module.startswith("torch.distributed") else top
    return what in OUTSIDE.get(wing_of(file), ["torch"])


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
    wrong = []
    for wing in [wing for wing in WINGS if wing != "lab"]:
        # What users find there is in the table of the package's docstring, or on the wing's page.
        used[wing] |= set(re.findall(rf"`{wing}\.(\w+)`", mics_fn.__doc__ or ""))
        page, shown = importlib.import_module(f"mics_fn.{wing}").__doc__, set(names_of_face(wing))
        used[wing] |= set(re.findall(r"`(\w+)`", f"{page}")) & shown
        wrong += [f"mics_fn/{wing}/__init__.py: {name}" for name in shown ^ used[wing]]
    refuse(wrong)


def test_no_file_imports_itself_by_way_of_others():
    refuse(circle(arrows()))


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
            found = [f"{module}.{name}" for module, name in names_from(part)]
            found = [text for text in found if re.match(r"torch(\.\w+)*\._[^_]", text)]
            if isinstance(part, ast.Attribute) and is_foreign(part, inner):
                found = [ast.unparse(part)]
            wrong += [f"mics_fn/{file}.py:{getattr(part, 'lineno', 0)}: {text}" for text in found]
    refuse(wrong)


def names_from(part: ast.AST) -> list[tuple[str, str]]:
    """The modules and names of a `from` import; none of anything else."""
    if not isinstance(part, ast.ImportFrom):
        return []
    return [(f"{part.module}", alias.name) for alias in part.names]


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
    parts = list(ast.walk(files()[file]))
    for part in parts:
        if isinstance(part, ast.Import):
            doors |= {a.asname or a.name for a in part.names if "distributed" in a.name}
        for module, name in names_from(part):
            text = f"{module}.{name}"
            inner = re.search(r"\b(nn|_functional_collectives)\b", text)
            if "torch.distributed" in module and (moves_data(name) or inner):
                yield text, getattr(part, "lineno", 0)
    for part in (part for part in parts if isinstance(part, ast.Attribute)):
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

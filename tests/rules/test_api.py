"""The rules of the package as a whole: its names, its docstrings, its sizes, its import."""

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import reduce
from pathlib import Path
from types import ModuleType

from test_wings import files, refuse

import mics_fn

ROOT = Path(__file__).parents[2]

MAX_FUNCTION_LINES = 60  # without its docstring
USUAL_FUNCTION_LINES = 35


def table() -> dict[str, str]:
    """What each name in the package's docstring sends, in words; empty where it sends nothing.

    This table says which names of the namespaces are public.
    """
    rows = re.findall(r"^  `([\w.]+)` - (.*)$", mics_fn.__doc__ or "", flags=re.MULTILINE)
    assert len(rows) == len(dict(rows)), "a name is listed twice"
    return {name: " ".join(text.split(" - ")[1:]) for name, text in rows}


def errors_listed() -> list[str]:
    """The names on the page of errors."""
    return re.findall(r"^  `(\w+)` - .*$", mics_fn.errors.__doc__ or "", flags=re.MULTILINE)


def listed() -> list[str]:
    """The public names, and the namespaces."""
    return [*table(), *(f"errors.{name}" for name in errors_listed())]


def public_names() -> dict[str, object]:
    """What the table and the page of errors list, namespaces aside."""
    found = {name: reduce(getattr, name.split("."), mics_fn) for name in listed()}
    return {name: x for name, x in found.items() if not isinstance(x, ModuleType)}


def public_functions() -> dict[str, Callable]:
    return {name: fn for name, fn in public_names().items() if inspect.isfunction(fn)}


def trainer_methods() -> dict[str, Callable]:
    methods = inspect.getmembers(mics_fn.Trainer, inspect.isfunction)
    return {f"Trainer.{k}": v for k, v in methods if k[0] != "_"}


# Names and docstrings


def test_the_table_lists_the_names_of_the_package_and_of_its_namespaces():
    assert sorted(name for name in table() if "." not in name) == dir(mics_fn)
    parts = [name.rpartition(".") for name in table()]
    refuse([x for space, _, x in parts if space and x not in shown(getattr(mics_fn, space))])


def test_the_page_of_errors_lists_all_of_them():
    kinds = inspect.getmembers(mics_fn.errors, inspect.isclass)
    own = {name for name, kind in kinds if issubclass(kind, mics_fn.MicsError)}
    assert set(errors_listed()) == own
    assert len(own) <= 14


def shown(module: ModuleType) -> set[str]:
    """A face's `__all__`; of a file, what is defined in it."""
    own = (name for name, x in vars(module).items() if inspect.getmodule(x) is module)
    return set(getattr(module, "__all__", own))


def test_every_public_name_has_a_docstring_and_so_have_its_methods():
    every = dict(public_names())
    for name, value in public_names().items():
        for key, item in vars(value).items() if inspect.isclass(value) else ():
            item = item.__func__ if isinstance(item, classmethod | staticmethod) else item
            if key[0] != "_" and (inspect.isfunction(item) or isinstance(item, property)):
                every[f"{name}.{key}"] = item
    docs = {name: f"{value.__doc__ or ''}" for name, value in every.items()}
    # Python writes a signature where a dataclass or a NamedTuple has no text of its own.
    refuse([name for name, doc in docs.items() if not doc or doc.startswith(f"{name}(")])


def sections(fn: Callable) -> dict[str, str]:
    """A docstring's sections by name, each with its text."""
    heads = "Args|Returns|Communication|Memory|Raises|Example|References"
    parts = re.split(rf"^({heads}):", inspect.getdoc(fn) or "", flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def parsed(fn: Callable) -> ast.FunctionDef:
    source = inspect.getsource(inspect.unwrap(fn))
    indent = len(source) - len(source.lstrip())
    lines = [line[indent:] for line in source.splitlines()]
    found = ast.parse("\n".join(lines)).body[0]
    assert isinstance(found, ast.FunctionDef)
    return found


def missing_sections(fn: Callable) -> list[str]:
    """What its docstring should say and does not."""
    found, signature = sections(fn), inspect.signature(fn)
    given = [
        name
        for name, parameter in signature.parameters.items()
        if name != "self" and parameter.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    missing = []
    if given:
        lines = re.findall(r"^ +([\w, ]+):", found.get("Args", ""), flags=re.MULTILINE)
        listed = {name for line in lines for name in re.split(r", *", line)}
        missing += [
            "Args" if "Args" not in found else f"Args: {n}" for n in given if n not in listed
        ]
    if signature.return_annotation not in (None, "None") and "Returns" not in found:
        missing.append("Returns")
    raises = any(isinstance(part, ast.Raise) for part in ast.walk(parsed(fn)))
    if raises and "Raises" not in found:
        missing.append("Raises")
    return list(dict.fromkeys(missing))


def test_public_functions_and_methods_of_trainer_say_what_they_take_and_give():
    wrong = []
    for name, fn in (public_functions() | trainer_methods()).items():
        missing = missing_sections(fn)
        if name in public_functions() and ">>>" not in sections(fn).get("Example", ""):
            missing.append("Example: >>>")
        wrong += [f"{name}: no {', '.join(missing)}"] if missing else []
    refuse(wrong)


def test_what_sends_says_so_and_nothing_else_does():
    """In the table and in a section of its docstring; no section says that there is nothing."""
    wrong = []
    for name, fn in (public_functions() | trainer_methods()).items():
        found = sections(fn)
        nothing = [k for k in ("Communication", "Memory") if is_nothing(found.get(k, ""))]
        wrong += [f"{name}: {k}: none; leave the section out" for k in nothing]
        if not nothing and name in table() and bool(table()[name]) != ("Communication" in found):
            said = "has no section" if table()[name] else "has a section Communication"
            wrong.append(f"{name}: the table has {table()[name] or 'nothing'!r}, the text {said}")
    refuse(wrong)


def is_nothing(text: str) -> bool:
    return re.fullmatch(r"none( here)?\.?", text.strip()) is not None


# Sizes and style


def test_functions_are_short_and_mostly_near_35_lines():
    every = [(name, fn, n) for name in files() for fn, n in functions(name)]
    assert sum(n > USUAL_FUNCTION_LINES for _, _, n in every) <= 0.02 * len(every)
    long = [each for each in every if each[2] > MAX_FUNCTION_LINES]
    refuse([f"mics_fn/{name}.py:{fn.lineno}: {fn.name}, {n} lines" for name, fn, n in long])


def functions(name: str) -> Iterator[tuple[ast.FunctionDef, int]]:
    """Functions of a file with their lengths in lines, docstring aside."""
    for part in ast.walk(files()[name]):
        if isinstance(part, ast.FunctionDef):
            first = part.body[0]
            doc = ast.get_docstring(part) is not None
            skipped = (first.end_lineno or 0) - first.lineno + 1 if doc else 0
            yield part, (part.end_lineno or 0) - part.lineno + 1 - skipped


def test_nothing_is_checked_by_assert():
    """`python -O` would drop the check."""
    every = [(name, part) for name in files() for part in ast.walk(files()[name])]
    refuse([f"mics_fn/{x}.py:{part.lineno}" for x, part in every if isinstance(part, ast.Assert)])


# Import

IMPORT = """
import argparse, importlib.abc, sys

BLOCKED = {"IPython", "hypothesis", "ipykernel", "matplotlib", "nbclient", "pytest", "tqdm"}

class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocker())
import optree, torch

def refuse(*args, **kwargs):
    raise SystemExit("argv was parsed")

argparse.ArgumentParser.parse_args = argparse.ArgumentParser.parse_known_args = refuse
sys.argv = ["prog", "--no-such-flag"]
before = set(sys.modules)
import mics_fn

new = {name.partition(".")[0] for name in set(sys.modules) - before}
outside = new - {"mics_fn", "torch", "optree"} - set(sys.stdlib_module_names)
lab = [name for name in sys.modules if name.startswith(("mics_fn.lab", "mics_fn.__main__"))]
print(sorted(outside), lab, sorted(BLOCKED & set(sys.modules)), sys.argv)
print(torch.distributed.is_initialized(), torch.cuda.is_initialized())
"""


def test_import_needs_torch_and_optree_alone_and_does_nothing(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", IMPORT],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "RANK": "0", "WORLD_SIZE": "2"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[] [] [] ['prog', '--no-such-flag']", "False False"]
    assert done.stderr == ""
    assert not list(tmp_path.iterdir())

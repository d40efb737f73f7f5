"""Budgets of what a reader has to read; they may only fall.

A capability that is new raises those that it needs, by what it costs, in the commit that adds it.
`pytest -s tests/rules/test_budgets.py` prints all figures beside their budgets.
"""

import ast
import io
import re
import sys
import threading
import tokenize
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from cases import Layout, groups_of
from test_api import table
from test_wings import DOORS, PATHS, arrows, depth, files, wing_of

import mics_fn as mf

# Lines are lines of code: without docstrings, comments and blanks. Optimizers of whole matrices,
# models in parts, compiled regions, what an abort may leave, and plans may take so many of them
# beside the rest; of the lab, each has a bench, ABORTS the doctor's questions about GPUs, and PLANS
# all but pictures of timelines and groups without processes.
MATRICES, PARTS, REGIONS, ABORTS, PLANS = 449, 578, 248, 459, 1_301
BUDGETS = {
    "lines": 18_408 + MATRICES + PARTS + REGIONS + ABORTS + PLANS,
    "lines without lab": 16_202
    + MATRICES
    - 76
    + PARTS
    - 46
    + REGIONS
    - 12
    + ABORTS
    - 381
    + PLANS
    - 1_128,
    "lines of the core": 6_001 + 349 + 46 + 23,
    "lines of the longest file": 486,
    "files": 102,
    "percent of lines that import": 7.4,
    "files in the longest chain of imports": 14,
    "class names of several classes": 0,
    "file names in several wings": 0,
    "names with words that another word replaces": 0,
    "public names": 106,
}
# No name has one of these words; in their place are placed, fetch, store, pending, heartbeat,
# StoreThread, GroupState, agree, flat, plan, independent, outer, rebuild, rejoin. What a model has
# not trained on is `held_out` in all of the field.
REPLACED = {
    *("elsewhere", "away", "far", "apart", "held", "hold", "stored", "come", "coming", "came"),
    *("bring", "brought", "arrive", "arrival", "arriving", "late", "limited", "errand", "clerk"),
    *("sign", "beat", "beats", "look", "looked", "looks", "hear", "heard", "tick", "life", "gone"),
    *("tell", "telling", "told", "news", "settle", "settled", "settling", "habit", "again"),
    *("returning", "retiring", "lay", "laying", "laid", "lying", "lies"),
}
# Of one call on 4 ranks in 2 partition groups, after a first one. Functions are within 2 %: a rank
# that waits for another runs a few more.
FLOWS = {
    "gather of one leaf": (12, 55),
    "opt_step with both hops": (19, 158),
    "Trainer.step": (29, 287),
    "checkpoint.save": (19, 190),
    "make_groups": (14, 112),
}  # files, functions
ALIKE = "gather of one leaf", "opt_step with both hops", "Trainer.step"  # on all ranks


def code_lines(name: str) -> set[int]:
    """Numbers of the lines of a file that hold code."""
    source, text = PATHS[name].read_text(), set[int]()
    for part in ast.walk(files()[name]):
        if isinstance(part, ast.Expr) and isinstance(getattr(part.value, "value", None), str):
            text |= set(range(part.lineno, (part.end_lineno or 0) + 1))
    blank = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in (*blank, tokenize.ENDMARKER):
            found |= set(range(token.start[0], token.end[0] + 1))
    return found - text


def import_lines(name: str) -> int:
    parts = (x for x in ast.walk(files()[name]) if isinstance(x, (ast.Import, ast.ImportFrom)))
    return sum((x.end_lineno or 0) - x.lineno + 1 for x in parts)


def replaced() -> set[str]:
    """Names of classes, functions, arguments, fields and variables with such words."""
    found = set[str]()
    for part in (x for name in files() for x in ast.walk(files()[name])):
        stored = isinstance(getattr(part, "ctx", None), ast.Store)
        names = (getattr(part, key, None) for key in ("name", "arg", *("id", "attr")[: 2 * stored]))
        found |= {x for x in names if isinstance(x, str)}
    return {
        name
        for name in found
        if REPLACED & {x.lower() for x in re.findall("[A-Z]?[a-z]+", name.replace("held_out", ""))}
    }


def is_core(name: str) -> bool:
    """Whether a file is one of those that a reader of the four verbs reads."""
    wing, stem = wing_of(name), Path(name).stem
    if wing == "optim":
        return stem in ("__init__", "flat", "optimizers", "state")
    return (
        wing in ("groups", "shards")
        or (wing == "collectives" and stem not in ("codec", "sent_codes"))
        or "/" not in name
    )


def figures() -> dict[str, float]:
    lines = {name: len(code_lines(name)) for name in files()}
    own = {file: x for file, x in arrows().items() if wing_of(file) not in ("lab", *DOORS)}
    classes = Counter(
        x.name for name in files() for x in files()[name].body if isinstance(x, ast.ClassDef)
    )
    stems = Counter(stem for _, stem in {(wing_of(x), Path(x).name) for x in files()})
    return {
        "lines": sum(lines.values()),
        "lines without lab": sum(n for name, n in lines.items() if wing_of(name) != "lab"),
        "lines of the core": sum(n for name, n in lines.items() if is_core(name)),
        "lines of the longest file": max(lines.values()),
        "files": len(lines),
        "percent of lines that import": 100 * sum(map(import_lines, files())) / sum(lines.values()),
        "files in the longest chain of imports": depth(own),
        "class names of several classes": sum(n > 1 for n in classes.values()),
        "file names in several wings": sum(
            n > 1 for stem, n in stems.items() if stem not in ("__init__", "__main__")
        ),
        "names with words that another word replaces": len(replaced()),
        "public names": len(table()),
    }


def test_the_package_is_within_its_budgets():
    found = figures()
    for name, budget in BUDGETS.items():
        print(f"{name}: {found[name]:.1f} of {budget}")
    assert {name: found[name] for name in BUDGETS if found[name] > BUDGETS[name]} == {}


ROOT = Path(mf.__file__).parent


@contextmanager
def calls() -> Iterator[list[tuple[Path, str, int]]]:
    """All calls of functions of the package, on all threads: file, name and line."""
    found: list[tuple[Path, str, int]] = []

    def watch(frame: Any, event: str, arg: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(f"{ROOT}"):
            found.append((Path(code.co_filename), code.co_qualname, code.co_firstlineno))

    threading.setprofile(watch)
    sys.setprofile(watch)
    try:
        yield found
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # pyright: ignore[reportArgumentType]


def flows_of_rank(folder: str) -> dict[str, tuple[int, int]]:
    """Files and functions of the package that each flow runs.

    Of several runs the one with the fewest, because a rank that waits for others runs more.
    """

    def counted(flow: Callable[[int], Any], runs: int = 30) -> tuple[int, int]:
        found: list[tuple[int, int]] = []
        for number in range(runs):
            with calls() as made:
                flow(number)
            found.append((len({file for file, _, _ in made}), len(set(made))))
        return min(files for files, _ in found), min(functions for _, functions in found)

    torch.manual_seed(0)
    groups, full = groups_of(Layout((2, 2), 2)), {"w": torch.randn(8, 8)}
    state = mf.init_state(mf.shard(full, groups), mf.optim.adamw(1e-2))

    def step(number: int) -> None:
        nonlocal state
        grads = mf.reduce_grads({"w": torch.ones(8, 8)}, groups, like=state.params)
        state = mf.opt_step(state, grads, donate=True)

    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
    trainer = mf.Trainer(
        model, mf.optim.adamw(1e-2), groups, loss=lambda model, x: model(x).square().mean()
    )
    batch, made = torch.randn(4, 8), list[Any]()
    for _ in range(3):
        trainer.step(batch)
        step(0)
    mf.gather(state.params, groups)
    found = {
        "gather of one leaf": counted(lambda _: mf.gather(state.params, groups)),
        "opt_step with both hops": counted(step),
        "Trainer.step": counted(lambda _: trainer.step(batch)),
        "checkpoint.save": counted(
            lambda number: mf.checkpoint.save(folder, trainer.state, groups, step=number), 5
        ),
        "make_groups": counted(lambda _: made.append(mf.make_groups(2, device="cpu")), 5),
    }
    for each in made:
        each.close()
    return found


def test_a_flow_runs_few_files_and_functions(ranks: Callable, tmp_path: Path):
    found = ranks(4).run(flows_of_rank, f"{tmp_path}")
    for name, budget in FLOWS.items():
        # Of the rank that waited least; in the others the first rank does more.
        of_ranks = min if name in ALIKE else max
        numbers = tuple(of_ranks(each[name][k] for each in found) for k in range(2))
        print(f"{name}: {numbers} of {budget}")
        assert numbers[0] <= budget[0], f"{name}: files"
        assert numbers[1] <= 1.02 * budget[1], f"{name}: functions"


# The page of the core.


def step_of_rank() -> list[str]:
    """The calls of a step as `file.function` of shards, and as `wing.function` of others."""
    torch.manual_seed(0)
    groups, full = groups_of(Layout((2, 2), 2)), {"w": torch.randn(8, 8)}
    with calls() as found:
        params = mf.shard(full, groups)
        state = mf.init_state(params, mf.optim.adamw(1e-2))
        grads = torch.func.grad(lambda shards: mf.gather(shards, groups)["w"].sum())(params)
        mf.opt_step(state, mf.reduce_grads(grads, groups))
    wings = [(path.relative_to(ROOT).parts[0], path.stem, name) for path, name, _ in found]
    return [f"{stem if wing == 'shards' else wing}.{name}" for wing, stem, name in wings]


def test_a_bucket_goes_the_way_that_the_page_of_shards_says(ranks: Callable):
    page = re.search(r"^One bucket on its way.*?(?=^Where)", f"{mf.shards.__doc__}", re.S | re.M)
    named = re.findall(r"`(\w+\.\w+)`", page[0] if page else "")
    assert len(named) > 12
    for ran in ranks(4).run(step_of_rank):
        remaining = iter(ran)
        assert [name for name in named if name not in remaining] == []

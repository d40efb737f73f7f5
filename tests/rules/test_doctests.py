"""Every example in a docstring, as a test of its own.

Examples are written as a reader would type them after `from mics_fn import *` and `import torch`.
"""

import doctest
import importlib
import io
import pkgutil
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

import mics_fn

FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
PUBLIC = {
    name: value
    for name, value in vars(mics_fn).items()
    if not name.startswith("_") and not isinstance(value, ModuleType)
}


def examples() -> Iterator[doctest.DocTest]:
    """All docstrings with examples; names of their own module go before public ones."""
    finder = doctest.DocTestFinder()
    for found in pkgutil.walk_packages(mics_fn.__path__, "mics_fn."):
        module = importlib.import_module(found.name)
        names = {**PUBLIC, "torch": torch, **vars(module)}
        yield from (test for test in finder.find(module, found.name, globs=names) if test.examples)


@pytest.mark.parametrize("example", list(examples()), ids=lambda example: example.name)
def test_an_example_gives_what_it_shows(example: doctest.DocTest):
    shown = io.StringIO()
    runner = doctest.DocTestRunner(optionflags=FLAGS)
    failed, tried = runner.run(example, out=shown.write, clear_globs=False)
    assert tried
    assert not failed, shown.getvalue()

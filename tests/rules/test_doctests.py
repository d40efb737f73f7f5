"""Every example in a docstring, as a test of its own.

Examples are written as a reader would type them after `from mics_fn import *` and `import torch`.
"""

import doctest
import importlib
import io
import pkgutil
from collections.abc import Iterator

import pytest
import torch

import mics_fn

FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
PUBLIC = {name: getattr(mics_fn, name) for name in mics_fn.__all__}  # and so the namespaces


def examples() -> Iterator[doctest.DocTest]:
    """All docstrings with examples; names of their own module go before public ones."""
    finder = doctest.DocTestFinder()
    inner = [found.name for found in pkgutil.walk_packages(mics_fn.__path__, "mics_fn.")]
    for name in ["mics_fn", *inner]:
        module = importlib.import_module(name)
        names = {**PUBLIC, "torch": torch, **vars(module)}
        yield from (test for test in finder.find(module, name, globs=names) if test.examples)


# Each of these starts ranks in processes of their own.
STARTS = {"mics_fn.notebook", "mics_fn.notebook.cluster.start"}
CASES = [
    pytest.param(x, id=x.name, marks=[pytest.mark.thorough] * (x.name in STARTS))
    for x in examples()
]


@pytest.mark.parametrize("example", CASES)
def test_an_example_gives_what_it_shows(example: doctest.DocTest):
    shown = io.StringIO()
    runner = doctest.DocTestRunner(optionflags=FLAGS)
    failed, tried = runner.run(example, out=shown.write, clear_globs=False)
    assert tried
    assert not failed, shown.getvalue()

"""Each mistake that `tests/support/planting.py` plants can be planted, and its tests are there."""

import pytest
from planting import ROOT, planted, wings


@pytest.mark.parametrize("wing", wings())
def test_each_mistake_can_be_planted(wing: str):
    mistakes = planted(wing)
    assert len(mistakes) >= 10
    assert len({each.what for each in mistakes}) == len(mistakes)
    for each in mistakes:
        source = (ROOT / "mics_fn" / each.file).read_text()
        assert source.count(each.old) == 1, each.what
        compile(source.replace(each.old, each.new), each.file, "exec")
        assert (ROOT / "tests" / each.tests.split()[0].split("::")[0]).exists(), each.what

"""Errors cross processes, as pickles, with their texts and all their fields."""

import pickle
from collections.abc import Iterator

import pytest

from mics_fn import errors
from mics_fn.lab.ranks import RankError, RankFailure

LOST = errors.PeerFailed("rank 1 failed", 1, "raised", step=3, operation="save", leaf="w")
FAILURES = {1: RankFailure("ValueError", "no", "Traceback:\n  f()\nValueError: no")}


def kinds_under(kind: type[errors.MicsError]) -> Iterator[type[errors.MicsError]]:
    for below in kind.__subclasses__():
        yield below
        yield from kinds_under(below)


def examples() -> Iterator[errors.MicsError]:
    """One of each public kind with its text alone, and those that have fields with all of them."""
    for kind in sorted(set(kinds_under(errors.MicsError)), key=lambda kind: kind.__name__):
        if kind.__module__ == errors.__name__:
            yield kind("what failed")
    yield LOST
    yield errors.PeerFileError(LOST, "/scratch/1", "w")
    yield errors.NonFiniteError("not finite", "w", (1, 2))
    yield errors.FileError("full", "/steps/7", "w", damaged=False)
    yield RankError("1 of 2 ranks failed", FAILURES)


@pytest.mark.parametrize("error", list(examples()), ids=lambda error: type(error).__name__)
def test_an_error_crosses_processes_whole(error: errors.MicsError):
    error.add_note("seen in step 3")
    found = pickle.loads(pickle.dumps(error))
    assert type(found) is type(error)
    assert (str(found), repr(found), found.args) == (str(error), repr(error), error.args)
    assert found.__dict__ == error.__dict__
    assert found.__notes__ == ["seen in step 3"]

"""One rank's collectives under a schedule, against those of a run before: the same, or refused."""

import pytest
from covering import examples
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from mics_fn.errors import DesyncError
from mics_fn.schedules import Channel, Learned, Run, on_demand


class LeftError(Exception):
    """The rank leaves its schedule."""


class Leaving(Channel):
    """Of two ranks, whose runs are taken one after the other."""

    def leave(self, number, step, text):
        raise LeftError


def collectives(program, run):
    """The fetches and reductions of a program of uses (a bucket) and reductions (None)."""
    found = []
    try:
        for step in program:
            if step is None:
                run.complete(0)
                run.reduce(0)
                found.append("reduce")
            else:
                found += [str(a) for a in run.use((step,)) if a.kind == "fetch"]
        run.end()
    except LeftError:
        return found, True
    run.settle()
    return found, False


def until_the_last_fetch(found):
    last = max((i for i, each in enumerate(found) if each != "reduce"), default=-1)
    return found[: last + 1]


PROGRAMS = st.lists(st.sampled_from([None, 0, 1, 2]), max_size=10)
GONE = st.sets(st.integers(0, 2), max_size=2)
NEW = st.lists(st.integers(0, 10), max_size=2)


@examples(50, 200)
@given(PROGRAMS, GONE, NEW, st.sampled_from([0, 8, None]), st.integers(0, 2))
def test_a_rank_follows_exactly_if_its_collectives_are_those_of_the_others(
    program, gone, new, live_bytes, prefetch
):
    """In a later run one rank lacks the reductions `gone`, and has others at `new` places."""
    store, policy = HashStore(), on_demand(live_bytes=live_bytes, prefetch=prefetch)
    channels = [Leaving(store, "key", (0, 1), rank, 1.0, 2) for rank in (0, 1)]
    learned = [Learned(), Learned()]

    def go(rank, program):
        return collectives(program, Run(learned[rank], policy, [8] * 3, channels[rank], str))

    want: list[str] = []
    for _ in range(3):
        (want, left), other = go(0, program), go(1, program)
        assert other == (want, left)
        assert not left
    lost = [i for n, i in enumerate(i for i, s in enumerate(program) if s is None) if n in gone]
    odd = [step for i, step in enumerate(program) if i not in lost]
    for at in new:
        odd.insert(at, None)
    found, left = go(1, odd)
    if left:
        assert found == want[: len(found)], "it leaves before it starts anything else"
        assert until_the_last_fetch(want)[: len(found) + 1] != found
    else:
        assert until_the_last_fetch(found) == until_the_last_fetch(want)


def test_a_rank_without_others_follows_whatever_it_reduces():
    learned, channel = Learned(), Channel()
    for program in ([0, 1], [0, 1], [0, None, 1], [None, 0, 1]):
        run = Run(learned, on_demand(live_bytes=0, prefetch=0), [8] * 2, channel, str)
        collectives(program, run)
    assert run.following


@examples(50, 200)
@given(st.integers(0, 3), st.integers(0, 6), st.integers(0, 6))
def test_a_rank_may_start_some_more_or_fewer_reductions(slack, here, there):
    """Of two ranks that follow one schedule; numbers further apart than `slack` are refused."""
    store, policy = HashStore(), on_demand(live_bytes=0, prefetch=0)
    channels = [Channel(store, "key", (0, 1), rank, 1.0, 2) for rank in (0, 1)]
    learned = [Learned(), Learned()]

    def go(rank, reductions):
        run = Run(learned[rank], policy, [8] * 2, channels[rank], str)
        run.slack = slack
        collectives([0, *[None] * reductions, 1], run)

    for rank in (0, 1):
        go(rank, 0)
    go(0, here)
    if abs(here - there) <= slack:
        go(1, there)
        assert learned[1].last.following
    else:
        with pytest.raises(DesyncError, match=f"reductions before it: {there}"):
            go(1, there)

"""What a rank compares of its runs: the same on two ranks exactly if their fetches are."""

import pytest
from covering import examples
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from mics_fn.errors import DesyncError
from mics_fn.schedules import Channel, Learned, Run, on_demand


class Noting(Channel):
    """Of a rank alone, which notes what it would compare."""

    def __init__(self):
        super().__init__()
        self.said: list[str] = []

    def compare(self, text, meanwhile=lambda: None):
        self.said.append(text)


def collectives(program, run):
    """The fetches and reductions of a program of uses (a bucket) and reductions (None)."""
    found = []
    for step in program:
        if step is None:
            run.complete(0)
            run.reduce(0)
            found.append("reduce")
        else:
            found += [f"fetch {i}" for kind, i in run.use((step,)) if kind == "fetch"]
    run.end()
    return found


def fetches(found):
    """Each fetch, and how many reductions come before it."""
    return [(each, found[:i].count("reduce")) for i, each in enumerate(found) if each != "reduce"]


PROGRAMS = st.lists(st.sampled_from([None, 0, 1, 2]), max_size=10)
GONE = st.sets(st.integers(0, 2), max_size=2)
NEW = st.lists(st.integers(0, 10), max_size=2)


@examples(50, 200)
@given(PROGRAMS, GONE, NEW, st.sampled_from([0, 8, None]), st.integers(0, 2))
def test_what_is_compared_differs_where_fetches_or_reductions_before_them_do(
    program, gone, new, live_bytes, prefetch
):
    """In a later run one rank lacks the reductions `gone`, and has others at `new` places."""
    lost = [i for n, i in enumerate(i for i, s in enumerate(program) if s is None) if n in gone]
    odd = [step for i, step in enumerate(program) if i not in lost]
    for at in new:
        odd.insert(at, None)
    policy, found, said = on_demand(live_bytes=live_bytes, prefetch=prefetch), [], []
    for last in (program, odd):
        learned, channel = Learned(), Noting()
        for each in (program, program, last):
            channel.said.clear()
            run = Run(learned, policy, [8] * 3, channel, str)
            here = collectives(each, run)
        found.append(fetches(here))  # noqa: F821
        said.append(channel.said)
    for each, of in zip(said, found, strict=True):
        assert each[-1] == "a run ends"
        assert len(each) == len(of) + 1
    for *fetch, one, other in zip(*found, *said, strict=False):
        assert (fetch[0] == fetch[1]) == (one == other)


def test_a_rank_without_others_follows_whatever_it_reduces():
    learned, channel = Learned(), Channel()
    for program in ([0, 1], [0, 1], [0, None, 1], [None, 0, 1]):
        run = Run(learned, on_demand(live_bytes=0, prefetch=0), [8] * 2, channel, str)
        collectives(program, run)
    assert run.following


@pytest.mark.parametrize("odd", [[0, 1, 2], [0, None, 1], [1, 0], [0]], ids=str)
def test_ranks_whose_first_runs_differ_are_told(odd):
    store, policy = HashStore(), on_demand(live_bytes=0, prefetch=0)
    channels = [Channel(store, "key", (0, 1), rank, 1.0, 2) for rank in (0, 1)]

    def go(rank, program):
        collectives(program, Run(Learned(), policy, [8] * 3, channels[rank], str))

    go(0, [0, 1])
    with pytest.raises(DesyncError, match="defer: ranks use parameters in different orders"):
        go(1, odd)

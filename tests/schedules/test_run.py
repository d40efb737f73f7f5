"""A run follows its schedule whatever it reduces."""

from mics_fn.schedules import Learned, Run, on_demand


def collectives(program, run):
    """The fetches and reductions of a program of uses (a bucket) and reductions (None)."""
    found = []
    for step in program:
        if step is None:
            run.complete(0)
            found.append("reduce")
        else:
            found += [f"fetch {i}" for kind, i in run.use((step,)) if kind == "fetch"]
    run.end()
    return found


def test_a_rank_without_others_follows_whatever_it_reduces():
    learned = Learned()
    for program in ([0, 1], [0, 1], [0, None, 1], [None, 0, 1]):
        run = Run(learned, on_demand(live_bytes=0, prefetch=0), [8] * 2, [], str)
        collectives(program, run)
    assert run.following

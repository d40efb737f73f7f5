"""A run follows its schedule whatever it reduces."""

from mics_fn.schedules import Learned, Run, on_demand


def test_a_rank_without_others_follows_whatever_it_reduces():
    learned = Learned()
    for program in ([0, 1], [0, 1], [0, None, 1], [None, 0, 1]):
        run = Run(learned, on_demand(live_bytes=0, prefetch=0), [8] * 2, [], str)
        for step in program:  # a use of a bucket, or a reduction
            if step is None:
                run.note("reduce", 0)
            else:
                run.use((step,))
        run.end()
    assert run.following

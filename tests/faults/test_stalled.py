"""Two ranks that wait for each other, against a simulation of all that they will ever do."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from mics_fn.faults.order import deadlocked
from mics_fn.store import Stuck

PAIR = (0, 1)


class Rank:
    """Runs a program of "a" (issue a collective on group a) and "wait" (for all that it issued)."""

    def __init__(self, program):
        self.program, self.at, self.issued = program, 0, Counter()

    def stuck(self, other):
        return [
            Stuck(group, number, PAIR, group)
            for group in sorted(self.issued)
            for number in range(other.issued[group] + 1, self.issued[group] + 1)
        ]

    def blocked(self, other):
        waits = self.at < len(self.program) and self.program[self.at] == "wait"
        return waits and bool(self.stuck(other))

    def step(self):
        if self.program[self.at] != "wait":
            self.issued[self.program[self.at]] += 1
        self.at += 1


@given(
    st.lists(st.lists(st.sampled_from(["a", "b", "wait"]), max_size=8), min_size=2, max_size=2),
    st.lists(st.integers(0, 2), max_size=40),
)
def test_a_deadlock_is_found_exactly_where_there_is_one(programs, turns):
    ranks = [Rank([*program, "wait"]) for program in programs]
    notes: list = [None, None]
    verdicts = []

    def go(i):
        """One step, or a look at the other's last note, which may be outdated."""
        me, other = ranks[i], ranks[1 - i]
        if me.blocked(other):
            stuck = me.stuck(other)
            notes[i] = stuck, Counter(me.issued)
            note = notes[1 - i]
            verdicts.append(note is not None and deadlocked(i, notes[i], 1 - i, note))
            return verdicts[-1]
        if me.at < len(me.program):
            me.step()
            return True
        return False

    for turn in turns:
        if turn < 2:
            go(turn)
    for _ in range(40):
        go(0)
        go(1)
    both_wait = all(me.blocked(ranks[1 - i]) for i, me in enumerate(ranks))
    assert any(verdicts) == both_wait

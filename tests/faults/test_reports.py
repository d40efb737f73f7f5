"""What one rank tells is found by all others at their next look, which is one call else."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_order import Counting

from mics_fn.errors import DesyncError
from mics_fn.faults import order
from mics_fn.faults.order import JobChannel, deadlocked
from mics_fn.store import Channel, Stuck

N = 6


def job(partition=N):
    """A store and the channel of each rank."""
    store: Any = Counting()
    parts = [range(i, i + partition) for i in range(0, N, partition)]
    return store, [JobChannel(store, "key", part, rank, 1.0, N) for part in parts for rank in part]


def found_by(channels):
    """The text that each rank finds at its next look, if any."""
    texts = []
    for channel in channels:
        try:
            channel.poll_peers()
            texts.append(None)
        except DesyncError as error:
            texts.append(str(error))
    return texts


@pytest.mark.parametrize("partition", [1, 2, N])
def test_a_look_without_news_is_one_call_and_a_report_is_found_by_all(partition):
    for reporter in range(N):
        store, channels = job(partition)
        for channel in channels * 2:
            store.asked.clear()
            channel.poll_peers()
            assert store.asked.total() == 1
        channels[reporter].report("what happened")
        assert found_by(channels) == found_by(channels) == ["what happened"] * N
    Channel().poll_peers()
    Channel().glance()


def test_a_note_of_a_wait_is_found_by_those_that_wait_for_it(monkeypatch):
    store, channels = job(partition=2)

    def poll(rank, stuck, **counts):
        monkeypatch.setattr(order, "made", lambda: counts)
        channels[rank].poll_peers([stuck])

    here, there = Stuck("a", 3, (0, 1), "a reduction"), Stuck("b", 5, (0, 1), "a gather")
    before = Stuck("c", 1, (0, 1), "another reduction")
    poll(1, before, a=2, b=4, c=1)
    for _ in range(3):
        store.asked.clear()
        poll(0, here, a=3, b=4, c=1)
    assert store.asked.total() == 1, "nobody has told anything since"
    with pytest.raises(DesyncError, match="rank 0: waits for a reduction(.|\n)*rank 1: waits for"):
        poll(1, there, a=2, b=5, c=1)
    text = str(found_by(channels[:1])[0])
    assert "rank 1: waits for a gather" in text
    assert found_by(channels) == [text] * N


def test_a_note_that_an_earlier_process_left_says_nothing_of_later_groups(monkeypatch):
    _, channels = job(partition=2)
    for rank, counts, stuck in ((1, {"old": 1}, "old"), (0, {"new": 3}, "new")):
        monkeypatch.setattr(order, "made", lambda counts=counts: counts)
        channels[rank].poll_peers([Stuck(stuck, 3, (0, 1), "a reduction")])
    monkeypatch.setattr(order, "made", lambda: {"new": 2})
    channels[1].poll_peers([Stuck("new", 2, (0, 1), "a gather")])
    assert found_by(channels) == [None] * N


# Two ranks that wait for each other, against a simulation of all that they will ever do.

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

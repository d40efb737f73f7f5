"""What one rank tells is found by all others at their next look, which is one call else."""

from typing import Any

import pytest
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from mics_fn.errors import DesyncError
from mics_fn.schedules import Channel, Stuck

N = 6


class Counting:
    """A store that counts what it is asked."""

    def __init__(self):
        self.store, self.calls = HashStore(), 0

    def __getattr__(self, name):
        self.calls += 1
        return getattr(self.store, name)


class Program:
    """A run of which nothing is known but how far it is."""

    def __init__(self, number, at=0):
        self.number, self.at = number, at

    def step_text(self, k, reduced):
        return f"did step {k}" if k < self.at else None

    def last_step(self):
        return f"step {self.at}"


def job(partition=N):
    """A store and the channel of each rank, of one run."""
    store: Any = Counting()
    parts = [range(i, i + partition) for i in range(0, N, partition)]
    channels = [Channel(store, "key", part, rank, 1.0, N) for part in parts for rank in part]
    programs = [Program(channel.begin_run(Program(0))) for channel in channels]
    for channel, program in zip(channels, programs, strict=True):
        channel._recent = [program]
    return store, channels, programs


def found_by(channels):
    """The text that each rank finds at its next look, if any."""
    texts = []
    for channel in channels:
        try:
            channel.look()
            texts.append(None)
        except DesyncError as error:
            texts.append(str(error))
    return texts


@pytest.mark.parametrize("partition", [1, 2, N])
def test_a_look_without_news_is_one_call_and_a_report_is_found_by_all(partition):
    for reporter in range(N):
        store, channels, _ = job(partition)
        for channel in channels * 2:
            store.calls = 0
            channel.look()
            assert store.calls == 1
        channels[reporter].report("what happened")
        assert found_by(channels) == found_by(channels) == ["what happened"] * N
    Channel().look()
    Channel().glance()


def test_what_some_ranks_refuse_is_raised_by_the_others_until_these_go_on():
    _, channels, _ = job(partition=2)
    for channel in channels[:2]:
        channel.job.refuse("another tree")
    assert found_by(channels) == found_by(channels) == [None] * 2 + ["another tree"] * (N - 2)
    for channel in channels[:2]:
        channel.job.go_on()
    assert found_by(channels) == [None] * N
    for channel in channels:
        channel.job.refuse("each its own")
    assert found_by(channels) == [None] * N, "all of them have raised it"


@pytest.mark.parametrize("known_before", [False, True])
def test_a_rank_that_left_is_found_once_others_are_where_it_left(known_before):
    _, channels, programs = job()
    assert found_by(channels) == [None] * N
    channels[1].announce_leave(1, (3, None), "did something else")
    for k in (0, 3):
        for program in programs:
            program.at = k
        if known_before:
            assert found_by(channels) == [None] * N, "they may leave there as well"
    programs[1].at, programs[2].at = 3, 4
    text = str(found_by(channels[2:3])[0])
    assert "rank 1: did something else" in text
    assert "rank 2: did step 3" in text
    assert found_by(channels) == [text] * N


def test_a_rank_that_left_a_later_run_is_found_when_others_begin_it():
    _, channels, programs = job()
    channels[1].announce_leave(2, (0, None), "did something else")
    assert found_by(channels) == [None] * N
    for channel in channels:
        channel.begin_run(Program(2, at=1))
    assert "rank 0: did step 0" in str(found_by(channels[:1])[0])


def test_a_note_of_a_wait_is_found_by_those_that_wait_for_it():
    store, channels, _ = job(partition=2)
    here, there = Stuck("a", 3, (0, 1), "a reduction"), Stuck("b", 5, (0, 1), "a gather")
    before = Stuck("c", 1, (0, 1), "another reduction")
    channels[1].look([before], {"a": 2, "b": 4, "c": 1})
    for _ in range(3):
        store.calls = 0
        channels[0].look([here], {"a": 3, "b": 4, "c": 1})
    assert store.calls == 1, "nobody has told anything since"
    with pytest.raises(DesyncError, match="rank 0: waits for a reduction(.|\n)*rank 1: waits for"):
        channels[1].look([there], {"a": 2, "b": 5, "c": 1})
    text = str(found_by(channels[:1])[0])
    assert "rank 1: waits for a gather" in text
    assert found_by(channels) == [text] * N

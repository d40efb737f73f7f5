"""The calls of a communicator: guessed alike, compared before data moves, silent in a pattern."""

import json
import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from covering import examples
from hypothesis import example, given
from hypothesis import strategies as st
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

import mics_fn as mf
from mics_fn.errors import CollectiveError, DesyncError
from mics_fn.faults.order import CallPattern, JobChannel, OrderedCalls
from mics_fn.store import poll

N = 3


class Counting:
    """A store that counts what it is asked, and the calls that ranks compared through it.

    Each rank compares a call once. How often one that leaves its habit asks before it could say so
    depends on what it has read by then, so that is not among them.
    """

    def __init__(self):
        self.store, self.asked, self.compared = HashStore(), Counter(), Counter()

    def __getattr__(self, name):
        self.asked[name] += 1
        return getattr(self.store, name)

    def compare_set(self, key, *values):
        self.asked["compare_set"] += 1
        number = key.rpartition("/")[-1]
        if "/calls/" in key and number != "left":
            self.compared[int(number)] += 1
        return self.store.compare_set(key, *values)


class Rank(threading.Thread):
    """Makes calls, each of which ends once all ranks have made theirs, unless an error comes."""

    def __init__(self, rank, store, programs, made, timeout_s=20.0):
        super().__init__(daemon=True)
        self.rank, self.programs, self.made = rank, programs, made
        self.channel = JobChannel(store, "key", range(N), rank, timeout_s, N)
        self.calls = OrderedCalls(self.channel, "all", range(N))
        self.error: Any = None
        self.ahead = 0  # calls that are made before the first of them is waited for

    def run(self):
        try:
            for i, verb in enumerate(self.programs[self.rank]):
                self.calls.add((verb, "", "", 8), lambda: None)
                self.made[self.rank].append(verb)
                self.wait(i - self.ahead)
            self.wait(len(self.programs[self.rank]) - 1)
        except (DesyncError, CollectiveError) as error:
            self.error = error

    def wait(self, i):
        while any(len(made) <= i for made in self.made):
            self.channel.poll_peers()
            time.sleep(1e-4)


def run(programs, ahead=0, timeout_s=20.0, store=None):
    """What each rank made, its error, and what the store was asked."""
    store, made = store or Counting(), [[] for _ in range(N)]
    ranks = [Rank(rank, store, programs, made, timeout_s) for rank in range(N)]
    for rank in ranks:
        rank.ahead = ahead
        rank.start()
    for rank in ranks:
        rank.join(60.0)
        assert not rank.is_alive()
    return made, [rank.error for rank in ranks], store


def misses(sequence):
    """At which entries of a sequence there was no guess, and at which it was wrong."""
    pattern, unknown, wrong = CallPattern(), [], []
    for i, entry in enumerate(sequence):
        if pattern.guess is None:
            unknown.append(i)
        elif pattern.guess != entry:
            wrong.append(i)
        pattern.add(entry)
    return unknown, wrong


@examples(50, 200)
@given(st.text("abc", max_size=60), st.text("abcd", min_size=1, max_size=6))
def test_what_repeats_is_guessed_whatever_was_before(before, step):
    unknown, wrong = misses(before + step * 40)
    assert max([0, *unknown, *wrong]) < len(before) + 20 * len(step)


STEP = "ghhr"  # a long step may have equal parts: so many micro-steps, and then its end


@pytest.mark.parametrize("micro_steps", [1, 40])
@pytest.mark.parametrize(
    "at",
    [{*range(10, 200, 10)}, {10, 30, 70, 150}, {37, 41, 42, 120}],
    ids=["each", "growing", "odd"],
)
def test_a_rare_event_costs_a_few_wrong_guesses_and_steps_after_it_none(micro_steps, at):
    sequence, events = list[str](), list[int]()
    for step in range(200):
        sequence += [*STEP * micro_steps, "end"]
        if step in at:
            events.append(len(sequence))
            sequence += ["eval", "g", "log"]
    unknown, wrong = misses(sequence)
    learned = 3 * len(STEP) * micro_steps
    assert len([i for i in wrong if i > learned]) <= 6 * len(at)
    assert len(unknown) <= 30
    if len(at) == 19:
        assert max(wrong) < events[4], "what comes at equal distances is guessed, too"


def test_a_sequence_without_a_pattern_is_compared_without_a_wait():
    draw = random.Random(0)
    unknown, wrong = misses(draw.choices("abcdefgh", k=1000))
    assert len(wrong) < 30


def test_old_entries_are_forgotten_and_a_step_that_goes_on_is_guessed():
    unknown, wrong = misses([*range(20)] * 2000)
    assert (unknown, wrong) == ([*range(21)], [])


@pytest.mark.parametrize(("step", "ahead"), [("abcde", 0), ("aab", 4), ("abacab", 0)])
def test_a_step_that_repeats_sends_nothing(step, ahead):
    made, errors, store = run([step * 12] * N, ahead)
    assert errors == [None] * N
    assert made == [list(step * 12)] * N
    assert max(store.compared) < 3 * len(step), "from the third time on"
    assert set(store.compared.values()) == {N}
    assert store.asked["set"] == 0


@given(
    st.text("ab", min_size=1, max_size=4),
    st.integers(1, 5),
    st.text("abc", max_size=3),
    st.integers(0, N - 1),
    st.sampled_from(["more", "fewer", "other"]),
    st.sampled_from([0, 2]),
)
@examples(40, 200)
@example("baa", 1, "aca", 1, "more", 2)  # one rank leaves its habit behind where the others do
def test_different_calls_never_meet(step, times, odd, rank, kind, ahead):
    before, after = step * times, step * 3
    usual = before + after
    changed = {
        "more": before + odd + after,
        "fewer": before + after[len(odd) :],
        "other": before + odd + after[len(odd) :],
    }[kind]
    length = min(len(usual), len(changed))
    programs = [(changed if r == rank else usual)[:length] for r in range(N)]
    made, errors, _ = run(programs, ahead)
    for calls in zip(*made, strict=False):
        assert len(set(calls)) == 1, "else bytes of one call would come to another"
    if len(set(programs)) == 1:
        assert errors == [None] * N
    else:
        first = next(i for i in range(length) if changed[i] != usual[i])
        assert all(isinstance(error, DesyncError) for error in errors)
        assert len({str(error) for error in errors}) == 1
        assert f"call {first} over 'all' of ranks 0-2: ranks differ in it" in str(errors[0])
        assert f"rank {rank}: {changed[first]}: , 8 bytes" in str(errors[0])
        assert all(len(each) <= first + 1 + ahead for each in made)


class Slow(Counting):
    """A store in which who left first at call 3 says so right after another left at call 4."""

    def compare_set(self, key, expected, desired):
        left = key.endswith("/left")
        first = json.loads(desired)[0] if left or key.endswith("/3") else None
        if (left and first == 3) or (key.endswith("/3") and first == 1):  # rank 1 is never first
            self.until(lambda: self.store.check([key]), 5)
        found = super().compare_set(key, expected, desired)
        if left and first == 4:
            self.until(lambda: self.store.get(key).decode() != desired, 0.5)
        return found

    def until(self, done, seconds):
        poll(done, 1, time.monotonic() + seconds)


def test_who_says_late_that_it_left_takes_no_place_of_a_later_call():
    """The third rank would go on, and the others wait for it until the end of their time."""
    programs = ["abbaabbaabb", "abbabbaabba", "abbaabbaabb"]
    made, errors, _ = run(programs, 2, store=Slow())
    assert all(isinstance(error, DesyncError) for error in errors), errors
    assert "call 4 over 'all' of ranks 0-2: ranks differ in it" in str(errors[0])


def test_a_call_at_which_all_left_is_not_taken_for_news_after_many_others():
    """Where all leave together nobody says so: what was said last stays, of a call of long ago."""
    store: Any = HashStore()
    channel = JobChannel(store, "key", (0, 1), 0, 1.0, 2)
    calls = OrderedCalls(channel, "all", (0, 1))
    store.set(f"{calls.key}/left", json.dumps([3, 1, "a run ends"]))
    for first, number in ((3, 30), (2000, 3000)):  # answered, and so long ago that all were there
        calls._acknowledged.extend(range(first, first + 20))
        calls.number = number
        calls.read()
    store.set(f"{calls.key}/left", json.dumps([2990, 1, "a run ends"]))
    with pytest.raises(DesyncError):
        calls.read()


def test_ranks_may_differ_in_the_order_of_calls_on_different_communicators():
    """Both leave a habit of one communicator, and wait there for each other's answer."""
    store: Any = HashStore()
    last = threading.Barrier(2)

    def go(rank):
        channel = JobChannel(store, "key", (0, 1), rank, 10.0, 2)
        both = [OrderedCalls(channel, name, (0, 1)) for name in "xy"]
        for calls in both * 4:
            calls.add(("usual", "", "", 8), lambda: None)
        last.wait(10.0)
        for calls in both if rank else reversed(both):
            calls.add(("unusual", "", "", 8), lambda: None)
        return True

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(go, (0, 1), timeout=30.0)) == [True, True]


def test_a_rank_that_never_answers_is_a_late_one():
    _, errors, _ = run(["ababab" + "x", "ababab", "ababab"], timeout_s=0.3)
    assert isinstance(errors[0], CollectiveError)
    assert "rank 0: x: , 8 bytes\n  asked: ranks 0-2" in str(errors[0])
    assert errors[1:] == [None, None]


def test_a_call_at_which_another_rank_left_is_compared_by_whoever_has_read_of_it():
    """Rank 0 moves data once rank 1 has read that it left; rank 1 still expects the guess."""
    store = HashStore()
    channels = [JobChannel(store, "key", range(2), rank, 20.0, 2) for rank in range(2)]
    first, second = (OrderedCalls(channel, "all", range(2)) for channel in channels)
    for _ in range(4):
        with ThreadPoolExecutor(2) as pool:
            for calls in (first, second):
                pool.submit(calls.add, ("a", "", "", 8), lambda: None)
    assert first._pattern.guess == second._pattern.guess == ("a", "", "", 8)
    with ThreadPoolExecutor(1) as pool:
        moves = pool.submit(first.add, ("b", "", "", 16), lambda: None)
        assert poll(lambda: store.check(["key/calls/all/0/left"]), 1, time.monotonic() + 10)
        channels[1].poll_peers()
        moves.result(10)
    with pytest.raises(DesyncError, match="call 4 over 'all' of ranks 0, 1: ranks differ"):
        second.add(("a", "", "", 8), lambda: None)


def written(events: Sequence[int]) -> list[int]:
    """What this rank writes to the store of the job in each step, and in what follows it."""
    torch.manual_seed(0)
    groups, count = mf.make_groups(2, timeout_s=60.0), Counter[str]()
    store = type(groups.state.channel.store)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))
    loss = lambda model, x: model(x).square().mean()  # noqa: E731
    trainer = mf.Trainer(model, mf.optim.adamw(1e-2), groups, loss=loss, bucket_bytes=200)
    x, found = torch.randn(4, 8), list[int]()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("set", "compare_set", "add"):
            whole = getattr(store, name)

            def counted(self: Any, *given: Any, whole: Any = whole, name: str = name) -> Any:
                writes = given[1:] != (0,)  # to add 0 is to read
                if writes and threading.current_thread() is threading.main_thread():
                    count[name] += 1
                return whole(self, *given)

            patch.setattr(store, name, counted)
        for step in range(60):
            trainer.step(x)
            if step in events:
                trainer.eval(x)
            found.append(count.total())
            count.clear()
    return found


def test_what_repeats_writes_nothing_and_a_rare_event_a_few_entries(ranks):
    """Evaluations at growing intervals: each is written, and a few wrong guesses after it."""
    events = [8, 20, 38]
    for found in ranks(4).run(written, events):
        later = found[5:]
        assert sum(later) <= 20 * len(events), str(found)
        assert later.count(0) >= len(later) - 4 * len(events), str(found)


def parts_of_one_bucket(verb: str) -> str:
    """The error of ranks that come with two parts of one bucket, both of which were compared."""
    groups = mf.make_groups(2, timeout_s=20)
    shards = mf.shard({"v": torch.ones(40), "w": torch.ones(30)}, groups)

    def call(key: str) -> None:
        part = {key: shards[key]}
        if verb == "gather":
            mf.gather(part, groups)
        elif verb == "reduce_grads":
            mf.reduce_grads({key: torch.ones(shards[key].shape)}, groups, like=part)
        else:
            total = mf.GradSum()
            with mf.defer(part, groups, mf.on_demand(), into=total) as full:
                total.backward(full[key].sum())
            total.grads()

    for key in ("v", "w", "v", "w"):
        call(key)
    with pytest.raises(DesyncError) as error:
        call("vw"[groups.position])
    groups.close()
    return str(error.value)


@pytest.mark.parametrize("verb", ["gather", "reduce_grads", "defer"])
def test_parts_of_one_bucket_are_not_taken_for_each_other(ranks, verb):
    """Else a rank would take the zeros that stand for leaves which the other one has not got."""
    for text in ranks(2).run(parts_of_one_bucket, verb):
        assert "ranks differ in it" in text
        assert "without leaves (1,)" in text

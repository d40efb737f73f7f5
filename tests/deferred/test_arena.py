"""Memory that is reused: which buffer is taken, how many there are, and what waits for what."""

from typing import Any

import pytest
import torch
from covering import examples
from hypothesis import given
from hypothesis import strategies as st

from mics_fn import _torch, schedules
from mics_fn.deferred.memory import Arena, Ring, lease_sizes
from mics_fn.groups import Buffers

CPU, F32 = torch.device("cpu"), torch.float32


class Event:
    """An event of a device on which nothing is ever over."""

    def query(self) -> bool:
        raise AssertionError("the host asks whether an event is over")

    synchronize = wait = query


@pytest.fixture
def queued(monkeypatch):
    """The CPU as a device whose work is queued: the events that its stream has waited for."""
    waited: list[Event] = []
    monkeypatch.setattr(_torch, "is_async", lambda device: True)
    monkeypatch.setattr(_torch, "with_index", lambda device: device)
    monkeypatch.setattr(_torch, "current_stream", lambda device: "stream")
    monkeypatch.setattr(_torch, "record", lambda device: Event())
    monkeypatch.setattr(_torch, "wait", lambda device, event: waited.append(event))
    return waited


def events(buffers: Buffers) -> list[Any]:
    return [each.event for each in buffers._free]


# Buffers.


def test_buffers_come_back_and_are_few():
    buffers = Buffers()
    sizes = [(8,), (2, 32), (16,)]
    given = [buffers.take(size, F32, CPU) for size in sizes]
    for tensor in given:
        buffers.give(tensor)
    memory = [tensor.data_ptr() for tensor in given]
    buffers.give(buffers.take((0, 3), F32, CPU))  # nothing is taken for nothing
    assert buffers.take((60,), F32, CPU).data_ptr() == memory[1]
    assert buffers.take((8,), torch.float64, CPU).data_ptr() == memory[2], "the smallest that fits"
    assert buffers.waiting_bytes == 32
    assert buffers.take((9,), F32, CPU).data_ptr() not in memory
    assert buffers.waiting_bytes == 0, "the new one takes the place of one that is too small"


def test_buffers_that_nobody_takes_any_more_are_let_go():
    buffers = Buffers()
    for n in (100, 60):  # of a model that is gone, and of the next one
        for _ in range(40):
            buffers.give(buffers.take((n,), F32, CPU, exact=True))
    assert buffers.waiting_bytes == 4 * 160, "nothing was made since"
    buffers.give(buffers.take((30,), F32, CPU, exact=True))
    assert buffers.waiting_bytes == 4 * 90
    assert buffers.made == 3


@pytest.mark.parametrize("exact", [False, True])
def test_buffers_are_taken_in_the_order_in_which_they_came_back(queued, exact):
    """Each waits for its own event, and nobody asks whether it is over."""
    buffers = Buffers()
    taken = [buffers.take((6,), F32, CPU, exact=exact) for _ in range(4)]
    assert (queued, buffers.made) == ([], 4)
    for place in (2, 0, 3, 1):
        buffers.give(taken[place])
    left = events(buffers)
    again = [buffers.take((6,), F32, CPU, exact=exact).data_ptr() for _ in range(4)]
    assert again == [taken[place].data_ptr() for place in (2, 0, 3, 1)]
    assert (queued, buffers.made) == (left, 4)


def test_what_is_let_go_is_waited_for(queued):
    buffers = Buffers()
    buffers.give(buffers.take((6,), F32, CPU))
    (event,) = events(buffers)
    buffers.take((7,), F32, CPU)
    assert queued == [event]


@examples(30, 100)
@given(st.lists(st.tuples(st.integers(1, 60), st.integers(0, 3)), max_size=60))
def test_there_are_never_more_buffers_than_were_in_use_at_once(steps):
    buffers, live, most = Buffers(), [], 0
    for numel, give in steps:
        live.append(buffers.take((numel,), F32, CPU))
        assert len({x.untyped_storage().data_ptr() for x in live}) == len(live)
        most = max(most, len(live))
        for _ in range(min(give, len(live))):
            buffers.give(live.pop(0))
        assert len(live) + len(buffers._free) <= most
        assert buffers.waiting_bytes <= most * 4 * max(n for n, _ in steps)


# The arena.


@st.composite
def plans(draw):
    """A schedule of a forward and a backward pass over buckets of some sizes."""
    units = draw(st.lists(st.integers(1, 9), min_size=2, max_size=12))
    if draw(st.booleans()):
        units = [4] * len(units)
    sizes = [64 * n for n in units]
    order = range(len(sizes))
    record = [schedules.Action("use", (i,)) for i in (*order, *reversed(order))]
    budget, ahead = draw(st.integers(0, sum(sizes))), draw(st.integers(0, 4))
    return schedules.plan(
        schedules.Schedule(tuple(record)), sizes, live_bytes=budget, prefetch=ahead
    ), sizes


@examples(30, 100)
@given(plans())
def test_a_plan_keeps_what_it_has_live_at_once(planned):
    """Step by step in the places of the plan: all buckets are whole, and one buffer has them."""
    schedule, sizes = planned
    starts, needs = schedules.offsets(schedule, sizes, [None] * len(sizes))
    pool = Buffers()
    arena = Arena(pool, needs[0], CPU)
    for _ in range(2):
        live, places = {}, iter(starts)
        for number, action in enumerate(schedule.actions):
            index = action.buckets[0]
            if action.kind == "fetch":
                live[index] = arena.take(sizes[index] // 4, F32, next(places)), number
                live[index][0].fill_(number)
            elif action.kind == "drop":
                tensor, number = live.pop(index)
                assert tensor.nbytes == sizes[index]
                assert (tensor == number).all(), "another bucket was written into it"
                arena.give(tensor)
        assert not live
    kept, plan = pool.waiting_bytes, schedule.peak_bytes(sizes)
    assert pool.made == 1
    assert plan <= kept == needs[0] < 1.5 * plan
    if len(set(sizes)) == 1 or plan == sum(sizes):
        assert kept == plan


def test_pools_of_a_plan_have_their_own_places():
    schedule = schedules.Schedule.parse("fetch 0; fetch 1; fetch 2; use 0+1+2; drop 0; fetch 3")
    starts, needs = schedules.offsets(schedule, [8, 4, 2, 6, 0], ["a", "b", "a", "a", "b"])
    assert needs == (10, 4, 10, 10, 4)
    assert (starts[:3], starts[3] + 6 <= 10) == ((0, 0, 8), True)


# Two micro-steps of a GPT with a budget of two buckets.
GPT_RUN = """
fetch 0; fetch 1; fetch 2; use 0; drop 0; fetch 3; use 1; drop 1; fetch 4; use 2; drop 2; fetch 5
use 3; drop 3; fetch 6; use 4; drop 4; fetch 7; use 5; drop 5; fetch 8; use 6; use 7; use 8; drop 8
fetch 5; use 7; drop 7; fetch 4; use 6; drop 6; fetch 3; use 5; drop 5; fetch 2; use 4; drop 4
fetch 1; use 3; drop 3; fetch 0; use 2; use 1; use 0; drop 0; fetch 3; use 1; drop 1; fetch 4
use 2; drop 2; fetch 5; use 3; drop 3; fetch 6; use 4; drop 4; fetch 7; use 5; drop 5; fetch 8
use 6; use 7; use 8; drop 8; fetch 5; use 7; drop 7; fetch 4; use 6; drop 6; fetch 3; use 5; drop 5
fetch 2; use 4; drop 4; fetch 1; use 3; drop 3; fetch 0; use 2; drop 2; use 1; drop 1; use 0; drop 0
"""
GPT_SIZES = [2437120, 2106368, 2104320, 2107392, 2106368, 2104320, 2107392, 2106368, 2366464]


def test_a_run_of_a_gpt_takes_what_it_has_live_at_once():
    schedule = schedules.Schedule.parse(GPT_RUN)
    _, needs = schedules.offsets(schedule, GPT_SIZES, [None] * len(GPT_SIZES))
    assert max(needs) == schedule.peak_bytes(GPT_SIZES)


def test_what_has_no_place_lies_in_a_gap_or_alone():
    pool = Buffers()
    arena = Arena(pool, 64, CPU)
    first, second, _ = (arena.take(4, F32, at) for at in (0, 16, 32))
    base = first.data_ptr()
    arena.give(second)
    arena.give(first)
    assert arena.take(8, F32).data_ptr() == base, "free parts that touch are one gap"
    assert arena.take(4, F32).data_ptr() == base + 48
    alone = arena.take(1, F32)
    assert not base <= alone.data_ptr() < base + 64
    arena.give(alone)
    assert (pool.made, pool.waiting_bytes) == (2, 4)
    for nbytes in (64, 0):
        pool.provide(nbytes, CPU)
        assert pool.waiting_bytes == nbytes


def test_arenas_that_are_used_at_one_time_are_apart():
    pool = Buffers()
    one, two = (Arena(pool, nbytes, CPU) for nbytes in (64, 48))
    a, b = one.take(4, F32, 0), two.take(4, F32, 0)
    assert a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr()
    one.give(a)
    two.give(b)
    assert (pool.made, pool.waiting_bytes) == (2, 112)
    assert Arena(pool, 60, CPU).take(4, F32, 0).data_ptr() == a.data_ptr(), "the next run has it"
    assert pool.made == 2


def test_a_write_beside_a_tensor_is_no_change_of_it():
    arena = Arena(Buffers(), 64, CPU)
    first, second = arena.take(4, F32, 0), arena.take(4, F32, 16)
    version = first._version
    second.fill_(1.0)
    assert first._version == version


def test_who_takes_a_part_waits_for_all_that_lay_there(queued, monkeypatch):
    """And for nothing else; the next user of all of it waits for what nobody has waited for."""
    made: list[Event] = []
    monkeypatch.setattr(_torch, "record", lambda device: made.append(Event()) or made[-1])
    pool = Buffers()
    arena = Arena(pool, 64, CPU)
    parts = [arena.take(4, F32, at) for at in (0, 16, 32, 48)]
    assert queued == []
    for part in parts[:3]:
        arena.give(part)
    wide = arena.take(6, F32, 8)  # of the first half of the first, and all of the second
    low = arena.take(2, F32, 0)
    assert queued == [made[0], made[1], made[0]]
    for part in (wide, low, parts[3]):
        arena.give(part)
    _, _, third, fourth, fifth, sixth, whole = made
    assert queued[3:] == [fifth, fourth, third, sixth]
    again = Arena(pool, 64, CPU).take(4, F32, 0)
    assert queued[7:] == [whole]
    assert again.data_ptr() == low.data_ptr()


def test_an_arena_that_is_left_waits_for_its_parts(queued):
    """As after an error, when a transfer still writes to one of them."""
    pool = Buffers()
    arena = Arena(pool, 64, CPU)
    first, _ = arena.take(4, F32, 0), arena.take(4, F32, 16)
    arena.give(first)
    ((_, _, event),) = [part for part in arena._free if part[0] == 0]
    del arena
    assert queued == [event]
    assert pool.waiting_bytes == 0


# The ring.

sizes_of_leases = st.tuples(st.integers(1, 3000), st.integers(0, 3000))


@examples(30, 100)
@given(st.lists(sizes_of_leases, max_size=30), st.integers(1, 4), st.integers(0, 20_000))
def test_leases_are_apart_and_bounded_and_waited_for_in_order(asked, count, capacity):
    ring, over, lent = Ring(), [], {}
    asked = [lease_sizes(sizes) for sizes in asked]
    capacity = max(capacity, *map(sum, asked), 0)
    for i, sizes in enumerate(asked):
        lease = lent[i] = ring.lend(sizes, capacity, count, CPU)
        lease.until = lambda i=i: over.append(i)
        for part in (lease.first, lease.second):
            part.fill_(i % 251)
        for j in over:
            lent.pop(j, None)
        assert (lease.first.nbytes, lease.second.nbytes) == sizes
        assert len(lent) <= count
        for j, each in lent.items():
            assert (each.first == j % 251).all()
            assert (each.second == j % 251).all()
        assert ring.nbytes == capacity
    assert over == sorted(over), "in order"
    assert ring.made == bool(asked)


def test_leases_that_fit_do_not_wait():
    """Equal leases fill a ring exactly, round after round."""
    ring, sizes, waited = Ring(), (1024, 512), []
    for i in range(9):
        lease = ring.lend(sizes, 3 * sum(sizes), 3, CPU)
        assert waited == list(range(i - 2))
        lease.until = lambda i=i: waited.append(i)


def test_a_ring_grows_when_nobody_uses_it_any_more():
    ring, waited = Ring(), []
    for i in range(2):
        ring.lend((512, 0), 2048, 3, CPU).until = lambda i=i: waited.append(i)
    ring.lend((512, 0), 2048, 3, CPU)
    assert (waited, ring.made) == ([], 1)
    ring.lend((512, 0), 4096, 9, CPU)
    assert (waited, ring.made, ring.nbytes) == ([0, 1], 2, 4096)

"""Schedules as values: text, checks, bytes; and plans, against twins that try everything."""

from collections.abc import Sequence
from functools import cache
from itertools import combinations, pairwise
from typing import NamedTuple

import pytest
from covering import examples
from hypothesis import given
from hypothesis import strategies as st

from mics_fn.errors import PlanError
from mics_fn.schedules.schedule import Action, Learned, Run, Schedule, on_demand, plan

BUCKETS = 6

numbers = st.integers(0, BUCKETS - 1)
several = st.sets(numbers, min_size=1, max_size=3).map(lambda found: tuple(sorted(found)))
uses = st.builds(Action, st.just("use"), numbers.map(lambda bucket: (bucket,)) | several)
singles = st.builds(
    Action, st.sampled_from(["fetch", "drop", "reduce"]), numbers.map(lambda bucket: (bucket,))
)
reduces = singles.filter(lambda action: action.kind == "reduce")
records = st.lists(uses | uses | reduces, max_size=30).map(lambda found: Schedule(tuple(found)))
anything = st.lists(uses | singles, max_size=60).map(lambda found: Schedule(tuple(found)))


class Case(NamedTuple):
    """What a plan is made from."""

    record: Schedule
    sizes: list[int]
    live_bytes: int | None
    prefetch: int

    def plan(self) -> Schedule:
        live_bytes, prefetch = self.live_bytes, self.prefetch
        return plan(self.record, self.sizes, live_bytes=live_bytes, prefetch=prefetch)


all_sizes = st.lists(st.integers(0, 9), min_size=BUCKETS, max_size=BUCKETS)
budgets = st.none() | st.integers(0, 25)
cases = st.builds(Case, records, all_sizes, budgets, st.integers(0, 4))


def replay(schedule: Schedule, sizes: Sequence[int]) -> tuple[int, int, int]:
    """Play a schedule to its end: peak and fetched bytes, and most buckets that waited at once."""
    live: list[int] = []
    fresh: set[int] = set()  # not used since their fetch
    peak = fetched = ahead = 0
    for kind, buckets in schedule.actions:
        if kind == "fetch":
            live += buckets
            fresh.update(buckets)
            fetched += sizes[buckets[0]]
        elif kind == "drop":
            live.remove(buckets[0])
        elif kind == "use":
            assert set(buckets) <= set(live)
            fresh -= set(buckets)
            ahead = max(ahead, len(fresh))
        assert len(live) == len(set(live))
        peak = max(peak, sum(sizes[bucket] for bucket in live))
    assert live == []
    return peak, fetched, ahead


def fewest_fetches(uses: Sequence[tuple[int, ...]], room: int) -> int:
    """By trying everything: before a fetch any buckets may go that its use does not need."""

    @cache
    def best(k: int, live: frozenset[int]) -> int:
        if k == len(uses):
            return 0
        needed = frozenset(uses[k])
        missing = len(needed - live)
        if not missing:
            return best(k + 1, live)
        spare = max(0, room - len(needed))  # a use may need more than there is room for
        kept = [keep for n in range(spare + 1) for keep in combinations(live - needed, n)]
        return missing + min(best(k + 1, needed | set(keep)) for keep in kept)

    return best(0, frozenset())


@examples(40, 100)
@given(cases)
def test_a_plan_does_what_was_recorded_and_passes_its_check(case: Case) -> None:
    planned, record, sizes = case.plan(), case.record, case.sizes
    happened = (action for action in planned.actions if action.kind in ("use", "reduce"))
    assert tuple(happened) == record.actions
    assert (planned.uses, planned.reduces) == (record.uses, record.reduces)
    assert case._replace(record=planned).plan() == planned
    planned.check(sizes, live_bytes=case.live_bytes)
    peak, fetched, ahead = replay(planned, sizes)
    assert (planned.peak_bytes(sizes), planned.fetched_bytes(sizes)) == (peak, fetched)
    assert ahead <= case.prefetch
    if case.live_bytes is not None:
        needs = [sum(sizes[bucket] for bucket in buckets) for buckets in record.uses]
        assert peak <= max([case.live_bytes + (max(sizes) if case.prefetch else 0), *needs])


@examples(40, 100)
@given(st.lists(st.sets(st.integers(0, 4), min_size=1, max_size=3), max_size=11), st.integers(0, 5))
def test_no_plan_on_demand_has_fewer_fetches(found: list[set[int]], room: int) -> None:
    record = Schedule(tuple(Action("use", tuple(sorted(buckets))) for buckets in found))
    planned = plan(record, [7] * 5, live_bytes=7 * room, prefetch=0)
    assert len(planned.fetches) == fewest_fetches(record.uses, room)


@examples(40, 100)
@given(cases)
def test_fetching_ahead_only_moves_fetches_or_saves_them(case: Case) -> None:
    found = [case._replace(prefetch=prefetch).plan().fetches for prefetch in range(4)]
    for fewer, more in pairwise(found):
        left = iter(fewer)
        assert all(bucket in left for bucket in more)  # in the same order


READ = {
    "each goes right after its last use": (
        ("use 0; use 1; use 2; use 0", [8, 8, 16], 16, 0),
        "fetch 0; use 0; drop 0; fetch 1; use 1; drop 1; fetch 2; use 2; drop 2; "
        "fetch 0; use 0\ndrop 0",
    ),
    "bucket 0 is kept, though as many are on their way as may be": (
        ("use 0; use 1; use 2; use 1; use 0", [8, 8, 8], 16, 1),
        "fetch 0; fetch 1; use 0; fetch 2; use 1; use 2; drop 2; use 1; drop 1; use 0; drop 0",
    ),
    "an empty bucket is not dropped for room": (
        ("use 0; use 1; use 2; use 1; use 0", [0, 8, 8], 8, 0),
        "fetch 0; use 0; fetch 1; use 1; drop 1; fetch 2; use 2; drop 2; fetch 1; use 1; drop 1\n"
        "use 0; drop 0",
    ),
}


@pytest.mark.parametrize(("made_from", "planned"), READ.values(), ids=READ)
def test_a_plan_as_it_reads(made_from: tuple[str, list[int], int, int], planned: str):
    text, sizes, live_bytes, prefetch = made_from
    assert str(Case(Schedule.parse(text), sizes, live_bytes, prefetch).plan()) == planned


def test_a_mark_is_text_and_has_no_bucket():
    text = "use 0; use 1; backward; use 1; reduce 1; use 0; backward; reduce 0"
    schedule = Schedule.parse(text)
    assert str(schedule) == text
    assert schedule.backwards == (2, 4)
    assert schedule.uses == ((0,), (1,), (1,), (0,))
    assert "backward" not in str(schedule.unmarked)
    planned = plan(schedule, [8, 8], live_bytes=0)
    assert planned.backwards == (2, 4)
    assert planned.unmarked == plan(schedule.unmarked, [8, 8], live_bytes=0)
    with pytest.raises(PlanError, match="'backward 1'"):
        Schedule.parse("backward 1")


@examples(40, 100)
@given(anything)
def test_text_and_value_say_the_same(schedule: Schedule) -> None:
    read = Schedule.parse(str(schedule))
    assert read == schedule
    assert hash(read) == hash(schedule)
    assert all(len(line) <= 100 for line in str(schedule).splitlines())


def test_parse_takes_comments_blanks_and_line_ends():
    text = "  # a step\n\nfetch 0;;fetch\t1 ;  # both; drop 0\r\n use 0 + 1\ndrop 007"
    assert str(Schedule.parse(text)) == "fetch 0; fetch 1; use 0+1; drop 7"
    assert Schedule.parse(" ;\n# nothing") == Schedule(())


@pytest.mark.parametrize("part", ["fetch", "load 3", "fetch 1+2", "use 1+", "use 1 2"])
def test_parse_names_what_it_cannot_read(part: str):
    with pytest.raises(PlanError, match="expected fetch, drop or reduce and one bucket"):
        Schedule.parse(f"fetch 0; use 0\nreduce 0; {part}; drop 0")


@examples(40, 100)
@given(cases.filter(lambda case: case.record.uses), st.data())
def test_a_fetch_less_or_a_drop_more_is_refused(case: Case, data: st.DataObject) -> None:
    actions = list(case.plan().actions)
    if data.draw(st.booleans()):
        fetches = [i for i, action in enumerate(actions) if action.kind == "fetch"]
        del actions[data.draw(st.sampled_from(fetches))]
    else:
        place = data.draw(st.integers(0, len(actions)))
        actions.insert(place, Action("drop", (data.draw(numbers),)))
    with pytest.raises(PlanError, match=r"Schedule\.check: actions\["):
        Schedule(tuple(actions)).check(case.sizes)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("use 0; reduce 0", "actions[0] is 'use 0'\n  bucket 0 is not live; fetch it"),
        ("fetch 1; use 1; fetch 1", "actions[2] is 'fetch 1'\n  bucket 1 is live; drop it before"),
        ("fetch 2; use 2+3", "actions[1] is 'use 2+3'\n  bucket 3 has no size; there are 3 sizes"),
        ("fetch 0; fetch 1; fetch 2", "actions[2] is 'fetch 2'\n  24 bytes would be live"),
    ],
)
def test_check_names_what_cannot_be_done(text: str, shown: str):
    with pytest.raises(PlanError) as caught:
        Schedule.parse(text).check([8, 8, 8], live_bytes=8)
    assert f"Schedule.check: {shown}" in str(caught.value)


def test_a_rank_without_others_follows_whatever_it_reduces():
    learned = Learned()
    for program in ([0, 1], [0, 1], [0, None, 1], [None, 0, 1]):
        run = Run(learned, on_demand(live_bytes=0, prefetch=0), [8] * 2, [])
        for step in program:  # a use of a bucket, or a reduction
            if step is None:
                run.note("reduce", 0)
            else:
                run.use((step,))
        run.end()
    assert run.following

"""Marks of backward passes: in texts, plans and records; runs pass them by."""

from typing import Any

import pytest
import torch
from cases import Layout, groups_of, random

import mics_fn as mf

ALONE, PAIR = Layout((1,), 1), Layout((2,), 2)
TEXT = "use 0; use 1; backward; use 1; reduce 1; use 0; backward; reduce 0"


def test_a_mark_is_text_and_has_no_bucket():
    schedule = mf.schedules.Schedule.parse(TEXT)
    assert str(schedule) == TEXT
    assert schedule.backwards == (2, 4)
    assert schedule.uses == ((0,), (1,), (1,), (0,))
    assert "backward" not in str(schedule.unmarked)
    assert schedule.unmarked.unmarked == schedule.unmarked
    assert schedule.unmarked.marked_at([2, 5]) == schedule
    planned = mf.schedules.plan(schedule, [8, 8], live_bytes=0)
    assert planned.backwards == (2, 4)
    planned.check([8, 8])
    assert planned.unmarked == mf.schedules.plan(schedule.unmarked, [8, 8], live_bytes=0)
    assert planned.peak_bytes([8, 8]) == planned.unmarked.peak_bytes([8, 8])
    assert mf.schedules.first_difference([planned, planned.unmarked]) == ""
    with pytest.raises(mf.errors.PlanError, match="'backward 1'"):
        mf.schedules.Schedule.parse("backward 1")
    with pytest.raises(mf.errors.PlanError):
        mf.schedules.Schedule((mf.schedules.Action("backward", (1,)),))


def loss_fn(full: Any, x: Any) -> Any:
    return ((x @ full["a"]).tanh() @ full["b"]).square().mean()


def records(layout: Layout) -> None:
    """Without data, in a real step, and for a planner; a schedule with marks is followed."""
    groups = groups_of(layout)
    shards = mf.shard(
        {"a": random(1, 3, 4), "b": random(2, 4, 2)}, groups, bucket=lambda path: path
    )
    x, seen = random(3, 5, 3), []
    how: Any
    for how in ({}, {"groups": groups}):
        found = mf.record(loss_fn, shards, x, mark_backward=True, **how)
        assert found.backwards == (2,)
        assert found.unmarked == mf.record(loss_fn, shards, x, **how)

    def plan(record: mf.schedules.Schedule, sizes: Any) -> mf.schedules.Schedule:
        seen.append(record)
        return mf.schedules.plan(record, sizes, live_bytes=0)

    fixed = mf.schedules.plan(found, mf.bucket_sizes(shards, groups), live_bytes=0)
    for schedule, passes in ((mf.on_demand(live_bytes=0, plan=plan), 2), (fixed, 1)):
        for step in range(2):
            total = mf.GradSum(micro_steps=passes)
            with (run := mf.defer(shards, groups, schedule, into=total)) as full:
                for _ in range(passes):
                    total.backward(loss_fn(full, x))
            assert run.following is (step > 0 or schedule is fixed)
            assert torch.isfinite(mf.optim.global_norm(total.grads(), groups))
    assert [len(each.backwards) for each in seen] == [2]
    assert seen[0].backwards[0] == 2


@pytest.mark.parametrize("layout", [ALONE, PAIR], ids=str)
def test_records_with_marks(ranks, layout):
    ranks(layout.world_size).run(records, layout)

"""Marks of backward passes: in texts, plans and records; runs pass them by."""

from typing import Any

import pytest
import torch
from cases import Layout, groups_of, random

import mics_fn as mf

PAIR = Layout((2,), 2)
TEXT = "use 0; use 1; backward; use 1; reduce 1; use 0; backward; reduce 0"


def test_a_mark_is_text_and_has_no_bucket():
    schedule = mf.schedules.Schedule.parse(TEXT)
    assert str(schedule) == TEXT
    assert schedule.backwards == (2, 4)
    assert schedule.uses == ((0,), (1,), (1,), (0,))
    assert "backward" not in str(schedule.unmarked)
    assert schedule.unmarked.unmarked == schedule.unmarked
    planned = mf.schedules.plan(schedule, [8, 8], live_bytes=0)
    assert planned.backwards == (2, 4)
    assert planned.unmarked == mf.schedules.plan(schedule.unmarked, [8, 8], live_bytes=0)
    with pytest.raises(mf.errors.PlanError, match="'backward 1'"):
        mf.schedules.Schedule.parse("backward 1")


def loss_fn(full: Any, x: Any) -> Any:
    return ((x @ full["a"]).tanh() @ full["b"]).square().mean()


def records() -> None:
    """Without data, and for a planner; a schedule with marks is followed."""
    groups, seen = groups_of(PAIR), []
    full = {"a": random(1, 3, 4), "b": random(2, 4, 2)}
    shards, x = mf.shard(full, groups, bucket=lambda path: path), random(3, 5, 3)
    found = mf.record(loss_fn, shards, x, mark_backward=True)
    assert found.backwards == (2,)
    assert found.unmarked == mf.record(loss_fn, shards, x)

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
    assert [(len(each.backwards), each.backwards[0]) for each in seen] == [(2, 2)]


def test_records_with_marks(ranks):
    ranks(2).run(records)

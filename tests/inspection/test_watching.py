"""What a step does, as profilers, the log and timelines show it; and that it costs nothing else."""

import io
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import Layout, groups_of, random
from costs import cut_of
from torch import nn
from torch.profiler import ProfilerActivity, profile

import mics_fn as mf
from mics_fn import spans
from mics_fn.deferred.memory import LEAST_RING
from mics_fn.inspection.watching import Timeline
from mics_fn.lab.report import memory_formula
from mics_fn.schedules.schedule import Schedule

DIM, DEPTH = 16, 4
NODE = 2
BUCKET_BYTES = 1100  # one layer
TWO, TWO_REPLICAS, TWO_LEVELS = Layout((2,), 2), Layout((2, 2), 2), Layout((2, 2), 4)


def loss_of(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def trainer_of(groups: mf.Groups, optimizer: Any = None, **options: Any) -> mf.Trainer:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(DEPTH)))
    options = {"loss": loss_of, "bucket_bytes": BUCKET_BYTES, "live_bytes": 0} | options
    return mf.Trainer(model, optimizer or mf.optim.adamw(0.1), groups, **options)


def stepped(groups: mf.Groups, **options: Any) -> mf.Trainer:
    """A trainer after two steps, which have taught it the order of use."""
    trainer = trainer_of(groups, **options)
    for _ in range(2):
        trainer.step(batch_of())
    return trainer


def batch_of(rows: int = 4) -> torch.Tensor:
    return random(dist.get_rank() if dist.is_initialized() else 0, rows, DIM)


def ranges_of(profiler: Any) -> list[str]:
    """The ranges of a trace in the order in which they began, the outer ones first."""
    found = [event for event in profiler.events() if event.name.startswith("mics/")]
    found.sort(key=lambda event: (event.time_range.start, -event.time_range.end, event.id))
    return [event.name.removeprefix("mics/") for event in found]


def told_by(schedule: Schedule, *kinds: str) -> list[str]:
    """The twin: what a schedule says, in the words of a trace."""
    names = {"reduce": "hop1"}
    return [
        f"{names.get(kind, kind)} {'+'.join(f'{i}' for i in buckets)}"
        for kind, buckets in schedule.actions
        if kind in kinds
    ]


def short(name: str) -> str:
    """A range without its leaves: "fetch 3"."""
    return name.partition(":")[0].replace("bucket ", "")


# Traces


def traced(layout: Layout, options: Any = ()) -> dict[str, Any]:
    trainer = stepped(groups_of(layout), **dict(options))
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        trainer.step(batch_of())
    policy: Any = trainer.schedule
    return {"ranges": ranges_of(profiler), "schedule": policy.schedule}


def test_a_trace_reads_like_the_schedule(ranks):
    for found in ranks(2).run(traced, TWO, {"live_bytes": 2 * BUCKET_BYTES, "accumulate": 2}):
        begun = [short(name) for name in found["ranges"] if " over " not in name]
        for kinds in (("fetch", "use", "drop"), ("use", "reduce")):
            wanted = told_by(found["schedule"], *kinds)
            kept = {text.partition(" ")[0] for text in wanted}
            seen = [text for text in begun if text.partition(" ")[0] in kept]
            assert len(wanted) > 4 * DEPTH
            assert seen == wanted, "\n".join(found["ranges"])
        others = {"wait", "pack", "opt_step", "opt", "step"}
        assert {text.partition(" ")[0] for text in begun} - others == {
            "fetch",
            "use",
            "drop",
            "hop1",
        }
        assert (begun[0], begun[-2]) == ("step 3", "opt_step 3")


# Timelines


def timed(layout: Layout, options: Any) -> dict[str, Any]:
    groups = groups_of(layout)
    trainer, twin = (stepped(groups, **options) for _ in range(2))
    groups.traffic.clear()
    with mf.inspection.watch() as watched:
        trainer.step(batch_of())
    ledger = dict(groups.traffic.sent_bytes)
    twin.step(batch_of())
    seen, params = trainer.last_step, [each.params().values() for each in (trainer, twin)]
    equal = all(map(torch.equal, *params))
    trainer.step(batch_of())
    return {
        "ledger": ledger,
        "timeline": seen.timeline(),
        "whole": watched.timeline(),
        "equal": equal and not hasattr(trainer, "last_step"),  # nobody has watched that one
    }


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        (TWO_LEVELS, {"live_bytes": 2 * BUCKET_BYTES, "accumulate": 2}),
        (TWO_REPLICAS, {"guard": mf.optim.Guard(max_norm=1.0), "faults": mf.FaultPolicy(1)}),
        (Layout((2,), 1), {"deterministic": True}),
    ],
    ids=["two levels", "compared and clipped", "ddp"],
)
@pytest.mark.short("two levels", "compared and clipped")
def test_a_timeline_has_the_bytes_of_the_ledger_and_changes_no_number(layout, options, ranks):
    for found in ranks(layout.world_size).run(timed, layout, options):
        timeline: Timeline = found["timeline"]
        assert found["equal"]
        assert timeline.sent_bytes() == found["ledger"]
        assert timeline.name == "step 3"
        assert timeline.events == tuple(sorted(timeline.events, key=lambda e: (e.start_s, e.end_s)))
        for event in timeline.events:
            assert 0 <= event.start_s <= event.end_s <= timeline.seconds, event
        assert timeline.events[-1].kind == "opt" or "faults" in options
        assert len(found["whole"].events) == len(timeline.events)
        lines = str(timeline).splitlines()
        assert all(len(line) <= 100 for line in lines)
        assert lines[0].startswith("step 3: ")


def test_nobody_has_watched():
    trainer = trainer_of(mf.make_groups(1))
    fix = "nobody has watched that step: with mf.inspection.watch"
    with pytest.raises(AttributeError, match=fix):
        trainer.last_step.memory()
    with mf.inspection.watch() as watched, mf.inspection.watch():
        trainer.step(batch_of())
    assert trainer.last_step.timeline().events[-1].kind == "opt"
    assert watched.memory().shards > 0
    trainer.step(batch_of())
    with pytest.raises(AttributeError, match=fix):
        trainer.last_step.timeline()
    assert spans.watchers == []


def test_an_error_in_a_step_leaves_nothing_open():
    def loss(model: Any, x: torch.Tensor) -> torch.Tensor:
        if not ok:
            raise ValueError("of the user")
        return loss_of(model, x)

    with mf.make_groups(1) as groups:
        trainer = trainer_of(groups, loss=loss, live_bytes=None, precision="compute=bf16")
        for ok in (True, False, True):
            with profile(activities=[ProfilerActivity.CPU]) as profiler, mf.inspection.watch():
                if ok:
                    trainer.step(batch_of().bfloat16())
                else:
                    with pytest.raises(ValueError, match="of the user"):
                        trainer.step(batch_of().bfloat16())
                    assert not hasattr(trainer, "last_step")  # nor that of an earlier step
            assert ranges_of(profiler)[0].startswith("step ")
    assert spans.watchers == []


# Memory


def held(layout: Layout, live_bytes: int | None, accumulate: int) -> tuple[Any, dict[str, float]]:
    # Memory of groups that served before may be larger.
    topology = mf.groups.Topology(layout.sizes)
    with mf.make_groups(layout.partition_size, topology=topology) as groups:
        trainer = trainer_of(groups, live_bytes=live_bytes, accumulate=accumulate)
        for _ in range(3):
            with mf.inspection.watch():
                trainer.step(batch_of())
        found, sizes = trainer.last_step, [x.gather.size for x in groups.hierarchy.route.levels]
    buckets = list({leaf.bucket: None for leaf in trainer.state.params.values()})
    place = "fsdp" if layout.partition_size < layout.world_size else "zero3"
    cut = cut_of(place, layout.world_size, NODE)
    how: dict[str, Any] = {"live_bytes": live_bytes, "num_replicas": groups.num_replicas}
    formula = memory_formula(buckets, cut, sizes, micro_steps=accumulate, **how)
    return found.memory(), formula


@pytest.mark.parametrize(
    ("layout", "live_bytes", "accumulate"),
    [(TWO, 2 * BUCKET_BYTES, 1), (TWO_REPLICAS, 0, 2), (TWO_REPLICAS, None, 1)],
    ids=str,
)
@pytest.mark.short("2x2-p2-0-2")
def test_the_memory_of_a_step_is_that_of_the_formula(layout, live_bytes, accumulate, ranks):
    for found, formula in ranks(layout.world_size).run(held, layout, live_bytes, accumulate):
        assert found.shards + found.moments == pytest.approx(formula["states"], abs=64)
        if live_bytes:  # a budget that is no multiple of a bucket leaves some of it
            assert formula["parameters"] - 1088 < found.gathered <= formula["parameters"]
        else:
            assert found.gathered == formula["parameters"]
        assert found.gradients_in_reductions == max(LEAST_RING, formula["hops"])
        assert found.gradient_shards == formula["sums"]
        assert 0 < found.gradients_in_full <= formula["in full"]
        rows = dict(line.rsplit("  ", 1) for line in str(found).splitlines())
        assert {name.strip() for name in rows} >= {"shards", "gathered", "total"}


# The log


@contextmanager
def logging_as(level: str) -> Iterator[io.StringIO]:
    """What the log writes, if the variable has this value."""
    kept, stderr = (list(spans.LOG.handlers), spans.LOG.level, spans.LOG.propagate), sys.stderr
    sys.stderr = io.StringIO()
    try:
        spans.set_up({spans.VARIABLE: level})
        yield sys.stderr
    finally:
        sys.stderr = stderr
        spans.LOG.handlers[:] = kept[0]
        spans.LOG.setLevel(kept[1])
        spans.LOG.propagate = kept[2]


def logged(layout: Layout, level: str, folder: str) -> str:
    groups = groups_of(layout)
    trainer = stepped(groups)
    with logging_as(level) as written:
        trainer.step(batch_of())
        mf.checkpoint.save(folder, trainer.state, groups, step=3)
    return written.getvalue()


def test_the_log_tells_with_the_rank(ranks, tmp_path):
    for rank, text in enumerate(ranks(2).run(logged, TWO, "debug", str(tmp_path / "a"))):
        lines = text.splitlines()
        assert all(line.startswith(f"[mics_fn] rank {rank}: ") for line in lines)
        told = {line.partition("debug: ")[2] for line in lines}
        fetch = "fetch bucket 0: 0.weight ... (2 leaves)"
        assert {"step 3", fetch, f"{fetch} over gather rank"} < told
        assert ("saved step 3 in" in text) == (rank == 0)
    first, second = ranks(2).run(logged, TWO, "INFO", str(tmp_path / "b"))
    assert first.startswith("[mics_fn] rank 0: info: saved step 3 in ")
    assert (first.count("\n"), second) == (1, "")


def test_the_log_is_quiet_by_default_and_refuses_what_it_does_not_know():
    assert any(isinstance(handler, logging.NullHandler) for handler in spans.LOG.handlers)
    with logging_as("") as written:
        spans.LOG.warning("nobody hears this")
    assert written.getvalue() == ""
    with pytest.raises(ValueError, match="Unknown level: 'LOUD'"):
        spans.set_up({spans.VARIABLE: "loud"})

"""When each bucket is fetched, used, dropped and reduced: schedules as values, without torch.

A *bucket* holds leaves that are gathered together; here it is a number with a size in bytes. A
`Schedule` is a tuple of `Action`s, such as `fetch 1` or `drop 0`, with a text form that `parse`
reads. The uses and reductions of a run are its *record*. A *plan* adds fetches and drops to it, and
it knows all later uses, so it drops the bucket whose next use is farthest ahead (Belady).

  >>> record = Schedule.parse("use 0; use 1; use 2; reduce 2; use 1; reduce 1; use 0; reduce 0")
  >>> planned = plan(record, sizes=[8, 8, 8], live_bytes=8, prefetch=1)
  >>> print(planned)
  fetch 0; fetch 1; use 0; drop 0; fetch 2; use 1; use 2; drop 2; reduce 2; fetch 0; use 1
  drop 1; reduce 1; use 0; drop 0; reduce 0
  >>> planned.peak_bytes([8, 8, 8]), planned.fetched_bytes([8, 8, 8])
  (16, 32)

How much stays gathered is one number, the budget `live_bytes` of a *policy*:

| `live_bytes` | gathered at once, at most | each bucket is fetched |
|---|---|---|
| `None` | all | once per step, for all of its micro-steps: the traffic of ZeRO-2 |
| between | that, and one bucket on its way | again after it had to be dropped |
| 0 | one bucket: the memory of ZeRO-3 | again after each use of others, and never ahead |

One bucket means the bytes of the largest one, and what a single op needs is always live. With a
budget of one bucket, the next one is fetched while that one is in use. No schedule changes results.

The first run of `on_demand` records the order of use, and later runs follow the plan made from it;
from the second run on, `str(policy.schedule)` shows it. `Schedule.check` refuses what cannot be
run. `record(loss_fn, shards, batch)` finds the uses without data or ranks, also of a model on meta,
and `bucket_sizes` gives the sizes. `mark_backward=True` marks where backward begins, and the
records that a function for `plan=` gets are marked so. An edited text runs as `defer(shards,
groups, Schedule.parse(text))`, and a rule of your own as `on_demand(plan=function)`;
`tests/recipes` has several, such as that of FSDP2.

`keep_all()` starts all fetches at once and drops nothing before the run ends; `Trainer` takes it if
everything fits, but lets a bucket go in the last backward pass once its gradients are complete,
unless an earlier step has used it after that. No fetch then depends on what the model does. Models
whose order of use depends on the data, such as loops over experts, need it (`live_bytes=None` for
`Trainer`) if ranks of a partition group have different data. So do models in which only some ranks
find a gradient for a bucket that is reduced before a later fetch.

If the order of use changes, a warning says so once: this run continues by fetching on demand, and
the next one follows what it did. If ranks of a partition group use buckets in different orders,
they would hang, so a `DesyncError` names ranks, buckets and leaves. See [Note: the same order of
use] in `schedule.py` for how they find out.

Start reading at `schedule.py`: the value, the plan, and where fetched buckets lie in one piece of
memory; then policies, and runs, which follow or record a schedule and teach the next one.
To add a policy, write a function from a record and sizes to a schedule; the wing `deferred` moves
the data, and asks a `Run` what to fetch and drop.
"""

from mics_fn.schedules.schedule import (
    Action,
    Learned,
    OnDemand,
    Run,
    Schedule,
    keep_all,
    offsets,
    on_demand,
    plan,
)

__all__ = ["Action", "Schedule", "plan"]

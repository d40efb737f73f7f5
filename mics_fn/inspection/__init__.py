"""What a person asks at a prompt: one leaf by its path, all leaves, and what a step does when.

`summary` shows what a tree of shards or a `TrainState` holds on this rank, and communicates
nothing. `get` gives one leaf in full on every rank: after small messages, each rank receives p - 1
times the leaf's largest piece. `set` gives a copy of the value with one leaf replaced; the ranks
compare a digest of what they are about to set. All three take paths as errors write them.

A *leaf* is a piece of a bucket (trained or frozen), a replicated tensor, a buffer, or a number. Its
*path* joins keys, indexes and fields by dots, as torch names parameters: `params.h.0.w`,
`opt.moments.exp_avg.h.0.w`. Where a path means no leaf, the error names the nearest ones. `get` and
`set` must be called by all ranks, and every call is compared between them first: at a prompt, ranks
differ easily.

Example:
  >>> groups = make_groups(1)
  >>> values = {"w": torch.ones(2, 3), "b": torch.zeros(3)}
  >>> state = init_state(shard(values, groups), optim.sgd(0.1))
  >>> print(summary(state, groups))
  path      shape   dtype    kind     bucket  groups               here  full
  params.b  (3,)    float32  trained       0  n=1 p=1 levels=none  12 B  12 B
  params.w  (2, 3)  float32  trained       0  n=1 p=1 levels=none  24 B  24 B
  2 leaves of 9 elements: 36 B here and 12 B of padding, 36 B in full
  >>> get(set(state, "params.b", 7.0, groups), "b", groups)
  tensor([7., 7., 7.])

**What a step does.** `watch` writes down what happens on this rank, and a `Trainer` keeps what was
seen of its last step:

    with mf.inspection.watch():
        trainer.step(batch)
    print(trainer.last_step.timeline())  # events in order: at, took, sent, what, over, leaves
    print(trainer.last_step.memory())  # the most bytes by kind

In a notebook a timeline shows itself: a lane for what computes, in which waits are yellow and a
pale ground is time without one, and a lane for each communicator, with the numbers of buckets.
(A use in a step is the moment in which buckets are made ready; computing with them is the ground.)
`one.beside(other)` is a `Chart` of both on one axis of time, and `save_trace("step.json")` of
either writes a file for https://ui.perfetto.dev.

A loop written by hand is watched in the same way: `with inspection.watch() as watched:`, and then
`watched.timeline()`. Watch a step after the second one, which follows a schedule. On the CPU times
are those of the host's clock. On an accelerator they are those of the device, by events on its
streams that are read after the block, so a watched step has no wait that others lack; the lane
"wait" is then the time in which the stream that computes stood still. The bytes of a timeline are
those of `groups.traffic`.

**In a trace.** Under `torch.profiler` every fetch, hop, drop, wait and update is a range named
"mics/" and what it does, so a trace reads like the schedule:

    with torch.profiler.profile() as profiler:  # of CPU and CUDA
        trainer.step(batch)
    profiler.export_chrome_trace("step.json")

Open the file at https://ui.perfetto.dev or in chrome://tracing, and search for "mics/". For the use
of bucket 1 it shows `mics/drop bucket 0: ...`, `mics/fetch bucket 2: ...` and in it the level that
was issued at once, `mics/fetch bucket 2: ... over gather node`; then `mics/use bucket 1: ...` and
in it `mics/wait fetch bucket 1: ...` if the bucket was not there. Hop 1 begins with `mics/pack`.
Further levels of a transfer, such as `mics/hop2 bucket 5: ... over replicas`, are where the host
issued them. On CUDA the same names stand above the kernels of the streams. `emit_nvtx` gives them
to Nsight. One file per rank: put the rank into its name.

**In a log.** `MICS_FN_LOG=debug` writes the same to stderr, a line each that begins with the rank;
with `info` only resets and saves. Programs configure the logger `mics_fn` as any other.

While nobody profiles, watches or logs, each of these places costs a look, 0.1 to 0.3 us of host
time: 231 of them in a step of 20 buckets and two micro-steps.

Start reading at `access.py`: it has both verbs, and the functions below them in the order in which
they are called. It lists the leaves of a value, finds the one that a path means, lets the ranks
agree, and draws the table of all. `watching.py` collects what [Note: spans] in `mics_fn.spans`
describes, and has what it gives. To add a fact of each leaf to the table, add a field to
`SummaryRow`, its column to `_HEAD`, and its value to `_row`. To add a verb about a leaf, take
`leaves_of` and `Leaves.agreed`, so that ranks which differ raise instead of hanging.

`summary` returns a `Summary`, which prints as a table. `watch` gives a `Watched`: its `timeline()`
is a `Timeline` of each `Event`, its `memory()` a `StepMemory`. `chart.py` draws: to give a kind of
event a color of its own, add it to `_COLORS`.
"""

from mics_fn.inspection.access import Summary, get, set, summary
from mics_fn.inspection.chart import Chart
from mics_fn.inspection.watching import Event, StepMemory, Timeline, Watched, watch

__all__ = ["watch"]

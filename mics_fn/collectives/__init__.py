"""How bytes move: hierarchical collectives in flight, and what ranks compare before them.

If a partition group of p ranks spans nodes, a gather crosses nodes first and then stays inside the
node. With k ranks per node, (p-k)/p of the bytes enter a node, not (p-1)/p. Gradients take the same
way back: reduce-scattered inside the node, then across nodes (*hop 1*). Once per step the shards
are all-reduced over the replicas (*hop 2*), on 1/p of the bytes.

Both hops are means, so a gradient is that of the loss averaged over ranks (`mean_over=` of
`make_groups` sets over how many). Give all ranks equally many samples, so that it is the mean over
samples. In float16 a mean is scaled before and after the sum, so that it neither overflows nor
vanishes; on the CPU the parts of hop 1 are added in float32.

A started collective is a `Pending`, which issues level after level and is waited for later:

  >>> groups = make_groups(1)
  >>> pending = start_all_gather(groups.hierarchy.route, torch.ones(3))
  >>> pending.wait().shape
  torch.Size([1, 3])

Every rank must call the same verbs in the same order. Trees, layouts, groups and schedules are
compared when they are new (tens of bytes per leaf, once per tree), and an error names ranks and
paths that differ. The order of fetches is watched, as `schedules` describes; the order of calls is
not, but with gloo, ranks that wait for each other in different collectives raise after about two
seconds. There is one process per rank, and nothing here is safe to call from several threads.

| | gloo, on the CPU | NCCL, on CUDA |
|---|---|---|
| state | every test runs on it, with 1 to 8 ranks as real processes | not yet run on several GPUs |
| gathers | exchanges of chunks, in place (6) | torch's all-gather, one per level, in place |
| fetches ahead | run while the model computes (1) | all levels at once, on the stream of gathers |
| hop 1 | an all-to-all and a local sum (2) | torch's reduce-scatter, on another side stream |
| hops and backward | overlap (3) | the same |
| buffers | reused from step to step | the same, ordered by events, without `record_stream` |
| waiting | the host polls, bounded by `timeout_s` (4) | streams wait, the host does not (5) |

(1) The next level starts when an op needs another bucket. (2) gloo's own reduce-scatter sends twice
the bytes. (3) With a schedule, hop 1 of a bucket runs while backward goes on, and into a `GradSum`
hop 2 of the last pass does so too. (4) So Ctrl-C works at once. (5) `timeout_s` is the limit of
NCCL's watchdog. (6) gloo's own all-gather allocates twice the size of its result in each call, so
only small ones are left to it. All this is tested on Linux with Python 3.11.

Start reading at `pending.py`, with its two notes, then `hierarchical.py`, and `levels.py`, the only
file that calls what moves data; `means.py` has the arithmetic, `agreement.py` what ranks compare,
and `sources.py` which memory must not be overwritten yet. To add a collective, write a generator
that yields one `Collective` per level with the bytes that it sends, list its communicators in the
same order, and give both to a `Pending`. To compare something new between ranks, use `agree` for a
tree and `same_call` for a call. What each `Pending` does is compared as well, before it moves data:
see [Note: the same calls] in `schedules.calls`.
"""

from mics_fn.collectives.agreement import (
    agree,
    check_replicas,
    check_same,
    checksum,
    collect_all,
    collect_bytes,
    in_step,
    same_call,
)
from mics_fn.collectives.hierarchical import (
    scatter_comms,
    scatter_steps,
    spare_numel,
    start_all_gather,
    start_fetch,
    start_reduce_scatter,
)
from mics_fn.collectives.levels import (
    broadcast,
    collect,
    mean_comms,
    mean_over_ranks,
    mean_steps,
    send_from,
    start_collect,
    start_mean,
)
from mics_fn.collectives.pending import Pending, Steps, push_all, wait_all, wait_until
from mics_fn.collectives.sources import finish_readers

__all__ = [
    "Pending",
    "Steps",
    "agree",
    "broadcast",
    "check_replicas",
    "check_same",
    "checksum",
    "collect",
    "collect_all",
    "collect_bytes",
    "finish_readers",
    "in_step",
    "mean_comms",
    "mean_over_ranks",
    "mean_steps",
    "push_all",
    "same_call",
    "scatter_comms",
    "scatter_steps",
    "send_from",
    "spare_numel",
    "start_all_gather",
    "start_collect",
    "start_fetch",
    "start_mean",
    "start_reduce_scatter",
    "wait_all",
    "wait_until",
]

"""How bytes move: hierarchical collectives in flight, and what ranks compare before them.

If a partition group of p ranks spans nodes, a gather crosses nodes first and then stays inside the
node. With k ranks per node, (p-k)/p of the bytes enter a node, not (p-1)/p. Gradients take the same
way back: reduce-scattered inside the node, then across nodes (*hop 1*). Once per step the shards
are all-reduced over the replicas (*hop 2*), on 1/p of the bytes.

Both hops are means, so a gradient is that of the loss averaged over ranks (`mean_over=` of
`make_groups` sets over how many). Where ranks count unlike numbers of samples or tokens, `weighted`
or `weight=` of a `Trainer` makes it the mean over these. In float16 a mean is scaled before and
after the sum, so that it neither overflows nor vanishes; on the CPU the parts of hop 1 are added in
float32.

A started collective is a `Pending`, which issues level after level and is waited for later:

  >>> groups = make_groups(1)
  >>> pending = levels.start_all_gather(groups.hierarchy.route, torch.ones(3))
  >>> pending.wait().shape
  torch.Size([1, 3])

Every rank must call the same verbs in the same order. Trees, layouts, groups and schedules are
compared when they are new (a digest of 32 bytes per tree), and an error names ranks and
paths that differ. Ranks also compare all calls on each communicator before data moves: see [Note:
the same calls] in `faults.order`.
There is one process per rank. A second thread that uses groups at the same time is refused: see
[Note: one thread at a time] in `groups.communicator`.

| | gloo, on the CPU | NCCL, on CUDA |
|---|---|---|
| state | every test runs on it, with 1 to 8 ranks as real processes | not yet run on several GPUs |
| gathers | exchanges of chunks, in place (6) | torch's all-gather, one per level, in place |
| fetches ahead | run while the model computes (1) | all levels at once, on the stream of gathers |
| hop 1 | an all-to-all and a local sum (2) | torch's reduce-scatter, on another side stream |
| hops and backward | overlap (3) | the same |
| buffers | reused from step to step | the same, ordered by events, without `record_stream` |
| waiting | the host sleeps, bounded by `timeout_s` (4) | streams wait, the host does not (5) |

(1) The next level starts when an op needs another bucket. (2) gloo's own reduce-scatter sends twice
the bytes. (3) With a schedule, hop 1 of a bucket runs while backward goes on, and into a `GradSum`
hop 2 of the last pass does so too. (4) It looks up 20 times per second, so Ctrl-C works. (5)
`timeout_s` is the limit of NCCL's watchdog. (6) gloo's own all-gather allocates twice the size of
its result in each call, so only small ones among more than two ranks are left to it. All this is
tested on Linux with Python 3.11.

What travels need not be the values: a `Wire` is a `Codec` and the innermost level on which codes
are sent. They have a quarter or an eighth of the bytes of float32. See `codec.py`.
`summary` shows which leaves send codes, and `groups.traffic` the bytes that they take: `python -m
mics_fn bench bytes --precision "hop2=int8[256]"` prints them beside their formulas.

What codes do to a loss depends on how stable training is. With the demo's model, text and 60 steps,
the mean of the last 30 losses (one rank's samples) differs from that of float32 with the same seed,
in percent, by

    learning rate: seed         1e-3: 0      1      2   3e-4: 0      1      2
    hop2=int8[256]                 0.00  +1.92  -0.01     +0.01  +0.01      -
    hop2=fp8[256]                 +0.02  +0.02  +0.30         -      -      -
    hop2=int4[64]                 -4.21  -0.86  +0.33     +0.18  +0.27  +0.24
    gather=int8, hop1=int8@node   +0.07  -0.24  +5.11      0.00  -0.01   0.00
    float32, 1e-3 of noise            -  -0.55  +0.18         -      -      -
    float32, 1e-6 of noise         0.00  +0.11      -         -      -      -

where noise changes each parameter at the start by so much of itself times a normal number. At 1e-3,
the demo's default without a warm-up, runs leave that of float32 within a few steps and stay apart,
to either side; the figures of these few runs bound nothing there. In the runs at 3e-4 int8 is
within 0.02 % and int4 within 0.3 %; with p = 2 and seed 0, int4 on gathers alone is at + 0.15 % and
on hop 1 alone at + 0.02 %. A run beside float32 (the mean over ranks, `--partition-size 4`
for codes in gathers and hop 1): `python -m mics_fn demo --precision "hop2=int4[64]" --lr 3e-4`.

Start reading at `levels.py`, the only file that calls what moves data: gathers, then hop 1, then
hop 2, a page each. Each is started as a `Pending`, whose page is `pending.py`, with its notes: a
collective in flight, and which memory must not be overwritten yet. Collectives of a user's own on
`Groups.communicators` are at the end of `levels.py`. `codec.py` makes codes and says where they
travel, `sent_codes.py` sends them, and nothing else here knows of it. `agreement.py` is what ranks
compare, and blocks of work that all leave if one fails.

  >>> for name, comm in groups.communicators.items():
  ...     print(name, comm.ranks, all_gather(comm, torch.ones(1)).shape)
  partition (0,) torch.Size([1, 1])
  replicas (0,) torch.Size([1, 1])

To add a collective here, write a generator that yields one `Collective` per level with the bytes
that it sends, list its communicators in the same order, and give both to a `Pending`. To compare
something new between ranks, use `agree` for a tree and `together` for a call.
"""

from mics_fn._torch import needs_derivative
from mics_fn.checks import refuse_derivative
from mics_fn.collectives import levels
from mics_fn.collectives.agreement import (
    Exchange,
    agree,
    collect_bytes,
    collect_values,
    decoded_error,
    encoded_error,
    refuse_unequal,
    report_outside,
    together,
)
from mics_fn.collectives.codec import SHORT_NAMES, Codec, Wire, check_level, checksum
from mics_fn.collectives.levels import all_gather, start, weighted
from mics_fn.collectives.pending import Pending, Steps, Task, finish_readers, push_all
from mics_fn.collectives.sent_codes import SentCodes, mean_bytes

__all__ = ["Codec", "all_gather", "start"]

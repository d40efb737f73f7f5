"""Who takes part: rank arithmetic, launchers, process groups and placements. It moves no data.

A *partition group* is p ranks that together hold one replica of the model: parameters and optimizer
state are sharded over the smallest group that holds them, not over all n ranks of the job. The job
is n/p complete replicas. Ranks with the same place in each partition group hold the same shard and
form a *replication group*. If a partition group spans nodes it has several *levels*, one per kind
of link, named outermost (slowest) first: "rack", "node", "rank". All of this follows from two
numbers and a `Topology`, without processes:

  >>> print(plan_groups(Topology((4, 2)), partition_size=4))
  8 ranks = node 4 x rank 2
    partition groups (2 of 4): 0-3 | 4-7
    levels of each, outermost first: node 2 x rank 2
    replication groups (4 of 2): 0, 4 | 1, 5 | 2, 6 | 3, 7

`init_distributed` starts torch.distributed from what the launcher wrote into the environment, and
chooses the device: an accelerator where the process sees one. Ranks compare the UUIDs of what they
chose, so that two on one GPU, or one without any, are named before anything waits for them.
Without a launcher, every verb works on one rank. `make_groups` then creates the
process groups of such a plan. It takes the size of a node from the launcher (or `node_size=`), and
every rank checks that all found the same. A partition group is a node unless `partition_size=` says
otherwise: on four machines with 8 GPUs, `make_groups(partition_size=16)` makes two replicas of two
nodes each. The result is a frozen `Groups`, a value that every verb takes:

  >>> with make_groups() as groups:
  ...     groups.hierarchy
  Hierarchy(none, chunk 0 of 1)

A block that ends closes its groups, which on NCCL all ranks do together. One that an exception
leaves abandons them instead: that waits for nobody, and ranks that wait for this one hear why; see
[Note: leaving by an error] in `communicator`. What is done about failures, and which ranks may
come back after one, is on the page of the wing `faults`: a rank must not leave the block by an
exception that is not a failure.

Models in parts: name the dimension of a `DeviceMesh` over which leaves are cut, by tensor or expert
parallelism, and that of a pipeline's stages. The groups then cover all parts, so that norms,
verdicts, comparisons, failures, `reset` and saves are of all of them; see [Note: models in parts]
in `groups.py`.

- of DTensors, as `parallelize_module` makes them: `make_groups(p, mesh=mesh["dp", "tp"],
  model="tp")`; with cut leaves and collectives of its own also `cut="*.up.*: 0; *.down.weight: 1"`;
- dense leaves on `make_groups(p)` and experts, by path, on `make_groups(p, mesh=mesh["dp", "ep"],
  model="ep", cut="*: 0", mean_over=n)`;
- stages of a pipeline on `make_groups(p, mesh=mesh, stages="pp")`, with the verbs: schedules are
  torch's;
- ranks that share a sequence are data-parallel ones, and `weight=` counts their valid tokens.

The ranks of all parts get the batch of their data-parallel place. What each part has a copy of
needs equal gradients in all of them, as DTensors give: hop 2 takes their mean, and the first step
of a `Trainer` raises if they differ. Experts get tokens of other ranks: with `mean_over=n` their
gradient is a mean over n ranks, those of the dense leaves. If the other ranks of the world are a
job of their own, pass `whole=True`.

For reductions of your own, `groups.without_replicas()` are groups of this rank's replica alone, and
`groups.communicators` has each communicator by its purpose, on which `collectives` runs them.

*Which partition size?* The smallest that fits, from the ranks of a machine up: below that, no less
is sent between machines. A rank holds 16 bytes per parameter over p (parameters, gradients, two
moments), the gathered parameters (`live_bytes`, or 2 bytes each in bf16), and activations. With 4
machines of 8 GPUs, a slow network and M bytes of parameters, of which 7 billion:

  | p | states | into each machine in a step | with 8 micro-steps | for models |
  |---|---|---|---|---|
  | 8, the default | 14.0 GB | 1.5 M | 1.5 M | that fit: hop 2 alone crosses the network |
  | 16 | 7.0 GB | 1.5 M | 5.0 M | that do not fit into one machine |
  | 32 | 3.5 GB | 1.5 M | 6.75 M | that need all four |

A `Hierarchy` is one partition group as the verbs inside it need it: a `Route` (levels, and this
rank's place in each), `Pools` of memory that is reused, and a `Channel` for messages. A *placement*
says over how many ranks of it parameters and gradients stay sharded; see `placement.py`.

Start reading at `topology.py`, with [Note: chunk order]. `groups.py` and `communicator.py` are the
values. `make.py` makes groups, with `startup.py` (launchers, devices, and how
ranks meet before any group exists). To add a launcher, add a row of its names to `startup.py`, and
its cases to `tests/groups/test_launcher.py`. To add a placement, add a row to `PLACEMENTS` in
`placement.py`, and its formula to `tests/deferred/test_placement.py`.
"""

from mics_fn.groups import communicator, placement, startup
from mics_fn.groups.communicator import (
    Comm,
    GroupState,
    Watch,
    announce_all,
    any_aborted,
    hooks,
    rejoin_error,
    reports,
    reports_step,
    withdraw_all,
)
from mics_fn.groups.groups import Buffers, Groups, Hierarchy, Home, Route, current, require_replicas
from mics_fn.groups.make import complete, imagined, make_groups
from mics_fn.groups.startup import Meeting, init_distributed, nccl_problems, read_launch
from mics_fn.groups.topology import Topology, fold_ranks, plan_groups, valid_partition_sizes

__all__ = ["Topology", "plan_groups"]

"""MiCS sharded data-parallel training as plain functions on values.

A model is a pytree of *shards*: of every tensor each rank keeps a piece, 1/p of it. A verb takes
values and returns values, so that all of it composes with `torch.func`. There are no hooks and no
wrapped modules.

n ranks form n/p *partition groups* of p ranks, each of which holds the model once. Ranks with the
same place in each of them form a *replication group* of r = n/p ranks. M is the size in bytes of
the full parameters. A gather of parameters stays inside a partition group, level by level, and so
does *hop 1*, which reduce-scatters gradients in every micro-step. *Hop 2* averages the shards of
gradients over the replication group, once per step.

Example:
  >>> groups = make_groups()  # without a launcher a world of one rank
  >>> state = init_state(shard({"w": torch.ones(3)}, groups), optim.sgd(0.1))
  >>> loss = lambda shards: gather(shards, groups)["w"].square().sum()
  >>> grads = torch.func.grad(loss)(state.params)
  >>> state = opt_step(state, reduce_grads(grads, groups))
  >>> unshard(state.params, groups)
  {'w': tensor([0.8000, 0.8000, 0.8000])}

All names follow, as `name` - what it is - what a rank sends. Where the last part is missing it
sends nothing. `from mics_fn import *` takes all those without a dot but `compile` and `set`, which
would hide Python's own. "Digests" are 32 bytes for a new tree, and 8 per leaf where values are
compared.

Ranks and groups:
  `init_distributed` - starts torch.distributed as the launcher says, chooses the device - its start
  `make_groups` - makes the process groups of this rank - small messages through torch's store
  `Groups` - this rank's process groups; a `with` block closes them
  `reset` - new groups in the place of those that an error ended - small messages through the store
  `groups` - the namespace of who takes part
  `groups.plan_groups` - which ranks form which group, for any world, without processes
  `groups.Topology` - how ranks are wired: sizes, slowest link first
  `StopRequest` - a signal, such as SIGTERM, ends all ranks after the same step - bytes
  `collectives` - the namespace of collectives of one's own, on these communicators
  `collectives.all_gather` - the tensor of each rank of a communicator - its tensor, size - 1 times
  `collectives.start` - any collective, with the waits and errors of those here - what it sends
  `collectives.Codec` - float values as 8 or 4 bits with a scale per block; has a text
  `placement` - the namespace of where parameters, gradients and states live
  `placement.place` - cuts parameters and gradients over fewer ranks: "zero2", "hpz", or your own
  `placement.fixed_order` - reductions that add up in the order of ranks - hop 2 in two collectives

Models as shards:
  `shard` - pytree of tensors to pytree of shards - digests
  `init_model` - a model made as shards, bit for bit as in full, never held in full - digests
  `load_shards` - shards from files, of which a rank reads its own part - digests
  `Precision` - dtypes of parameters and gradients, and codecs that are sent, by path; has a text
  `shards` - the namespace of what a rank holds
  `shards.map` - an elementwise function of all trained leaves
  `shards.as_dtensors` - parts of this rank as the DTensors of a model, for `functional_call`
  `shards.Sharded` - a leaf: this rank's piece of a trained tensor

Full parameters:
  `gather` - shards to full tensors; its gradient is hop 1 - (p-1)/p M, and as much for the gradient
  `unshard` - gathers to plain tensors of their own memory - (p-1)/p M
  `defer` - full parameters that are fetched at the op that uses them - (p-1)/p M per fetch of all

Schedules of fetches:
  `on_demand` - a policy: fetch what an op needs, then ahead - about 100 bytes per unforeseen fetch
  `keep_all` - a policy: fetch everything at once and keep it - each bucket once per run
  `record` - the order in which a loss uses buckets, without data
  `bucket_sizes` - bytes of each bucket, by the numbers that schedules use
  `schedules` - the namespace of when buckets are fetched
  `schedules.Schedule` - fetches, uses, drops and reductions in order, as a value with a text
  `schedules.Action` - one of them
  `schedules.plan` - adds fetches and drops to a record, for a budget

Before a cluster is rented:
  `plan` - partition sizes, placements and budgets for a model on a cluster, ranked, with reasons
  `simulate` - what a step of a schedule does on a cluster: when, in which memory, over which links
  `Hardware` - a cluster as a value: how ranks are wired, links and devices; has a text

Gradients:
  `GradSum` - gradients of a step, reduced while backward runs - hop 1 per pass, hop 2 in the last
  `reduce_grads` - the hops that a gradient still owes - hop 1, hop 2, or both
  `scatter_grads` - hop 1: full gradients to shards - (p-1)/p M
  `sync_replicas` - hop 2: averages shards over replicas - 2(r-1)/r M/p
  `weighted` - a loss whose mean over ranks and micro-steps is exact for any counts - 8 bytes

Steps:
  `TrainState` - step, parameters, optimizer state and buffers as one value
  `init_state` - the state before the first step - with groups= 32 bytes, to compare options
  `opt_step` - state and gradients to the next state - what a transform in it sends, 40 bytes once
  `move` - the same state elsewhere: on the device, in host memory, in files
  `optim` - the namespace of what is done with gradients
  `same_step` - a state whose ranks are at one step, if need be from a replica - 8 bytes
  `same_replicas` - a state whose replicas hold the same bits - 8 bytes per leaf
  `optim.Transform` - an optimizer as pure functions
  `optim.sgd` - stochastic gradient descent
  `optim.adam` - Adam with an L2 penalty
  `optim.adamw` - Adam with decoupled weight decay
  `optim.lion` - Lion
  `optim.muon` - Muon, on matrices that lie whole on one rank each
  `optim.matrixwise` - an optimizer of whole matrices of one's own
  `optim.relayout` - a state with leaves in other buckets, such as whole ones - all of it, once
  `optim.from_torch` - an elementwise torch.optim class, Muon or Adafactor as a `Transform`
  `optim.chain` - transforms one after the other
  `optim.clip_by_global_norm` - scales gradients to a norm, in a chain - 8 bytes per step
  `optim.clip_by_value` - clamps gradients, in a chain
  `optim.by_path` - other transforms for some leaves, by patterns of their paths
  `optim.from_update` - an elementwise optimizer of one's own, from `init` and `update`
  `optim.global_norm` - L2 norm of a whole tree, each element once - 8 bytes
  `optim.leaf_norms` - L2 norm of each leaf - 8 bytes per leaf, in one all-gather
  `optim.inner` - inner product of two trees - 8 bytes
  `optim.warmup_cosine` - such a function: a linear warmup, then half a cosine
  `optim.Guard` - before the update: unscale, refuse a step, clip - `judge` at most 16 bytes
  `optim.norm_spike` - a watch for gradients far above those before
  `optim.static_scale` - a scale that stays
  `optim.dynamic_scale` - a scale that falls at overflows and grows again, for float16

Where leaves live:
  `where` - places of parameters, gradients and states, as a value with a text
  `offload` - the namespace of places, and of tensors in files or kept as codes

Training loops:
  `Trainer` - a short loop around the verbs - a step: gathers by schedule, hop 1s, one hop 2
  `Checkpoints` - saves a `Trainer` every so many steps; a new one goes on - as `start_save`
  `FaultPolicy` - how a `Trainer` compares replicas and writes steps
  `compile_blocks` - a copy of a module with submodules as regions of `torch.compile`
  `compile` - `torch.compile` of a function that takes deferred parameters
  `sampler` - torch's `DistributedSampler` over the ranks of groups - small messages
  `replicas` - the namespace of when replicas become one
  `replicas.every_step` - a policy: hop 2 in every step, as in MiCS
  `replicas.local_sgd` - parameters averaged every H steps - a run with it: hop 2 every H steps
  `replicas.diloco` - an outer optimizer every H steps - a run with it: hop 2 every H steps
  `replicas.reduced_by` - hop 2 by a function of one's own in every step - what that sends

Checkpoints:
  `checkpoint` - the namespace of states on disk
  `checkpoint.save` - writes a state as a step, all ranks together - small messages
  `checkpoint.start_save` - copies a state, and writes it while training goes on - small messages
  `checkpoint.load` - a state for any number of ranks, bit for bit - small messages
  `checkpoint.steps` - the committed steps of a folder
  `checkpoint.latest` - the newest of them
  `checkpoint.verify` - compares every value of a step with its checksum
  `checkpoint.save_pretrained` - a directory that transformers loads - (p-1)/p M in one replica
  `checkpoint.save_dcp` - one that torch.distributed.checkpoint loads - (p-1)/p M in one replica

Looking inside:
  `get` - one leaf in full, by path - small messages, p-1 times its largest piece
  `set` - the same tree or state with one leaf replaced - small messages and a digest
  `summary` - what a tree or state holds, leaf by leaf
  `inspection` - the namespace of what people at a prompt ask
  `inspection.watch` - a block in which all that happens on this rank is written down
  `tree` - the namespace of pytrees
  `tree.node` - makes a dataclass a pytree node, for optree and torch

Notebooks:
  `notebook` - the namespace of cells that run on ranks
  `notebook.start` - ranks that the cells of a notebook drive - the start of ranks, small messages

Faults on purpose:
  `testing` - the namespace of faults, for tests of jobs
  `testing.inject` - a fault on one rank, at one step, in one operation

Errors:
  `MicsError` - base of every error here
  `errors` - the namespace of all of them, which are listed on its page
"""

from typing import TYPE_CHECKING, Any

from mics_fn import (
    checkpoint,
    collectives,
    errors,
    groups,
    inspection,
    notebook,
    offload,
    optim,
    schedules,
    shards,
    testing,
    tree,
)
from mics_fn._version import __version__ as __version__
from mics_fn.collectives import weighted
from mics_fn.deferred import GradSum, bucket_sizes, defer, record
from mics_fn.errors import MicsError
from mics_fn.faults import StopRequest, reset, same_replicas, same_step
from mics_fn.groups import Groups, init_distributed, make_groups, placement
from mics_fn.init import init_model, load_shards
from mics_fn.inspection import get, summary
from mics_fn.inspection import set as set
from mics_fn.offload import where
from mics_fn.optim import TrainState, init_state, move, opt_step
from mics_fn.schedules import keep_all, on_demand
from mics_fn.shards import (
    Precision,
    gather,
    reduce_grads,
    scatter_grads,
    shard,
    sync_replicas,
    unshard,
)
from mics_fn.train import Checkpoints, FaultPolicy, Trainer, compile_blocks, replicas, sampler
from mics_fn.train import compile as compile

if TYPE_CHECKING:  # training needs none of them, so they are imported where they are used
    from mics_fn.lab import Hardware, plan, simulate

# And `compile` and `set`, which `from mics_fn import *` leaves out: they would hide Python's own.
__all__ = ["Checkpoints", "FaultPolicy", "GradSum", "Groups", "Hardware", "MicsError", "Precision"]
__all__ += ["TrainState", "Trainer", "bucket_sizes", "checkpoint", "collectives", "compile_blocks"]
__all__ += ["gather", "get", "groups", "init_distributed", "init_model", "init_state", "inspection"]
__all__ += ["keep_all", "load_shards", "make_groups", "move", "notebook", "offload", "on_demand"]
__all__ += ["opt_step", "optim", "placement", "plan", "record", "reduce_grads", "replicas", "reset"]
__all__ += ["StopRequest", "defer", "errors", "same_replicas", "same_step", "simulate"]
__all__ += ["sampler", "scatter_grads", "schedules", "shard", "shards", "summary", "sync_replicas"]
__all__ += ["testing", "tree", "unshard", "weighted", "where"]


def __getattr__(name: str) -> Any:
    if name not in ("Hardware", "plan", "simulate"):
        raise AttributeError(f"module 'mics_fn' has no attribute {name!r}")
    from mics_fn import lab

    return getattr(lab, name)


def __dir__() -> list[str]:
    """The public names; of its submodules only those that are namespaces."""
    return sorted([*__all__, "compile", "set"])

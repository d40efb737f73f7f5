"""MiCS sharded data-parallel training as plain functions on values."""

from mics_fn import errors, groups, inspection, optim, schedules, shards, tree
from mics_fn.deferred import GradSum, bucket_sizes, defer, record
from mics_fn.errors import MicsError
from mics_fn.groups import Groups, init_distributed, make_groups, placement
from mics_fn.init import init_model, load_shards
from mics_fn.inspection import get, summary
from mics_fn.inspection import set as set
from mics_fn.optim import TrainState, init_state, opt_step
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
from mics_fn.train import StepMetrics, Trainer, replicas, sampler

__all__ = [
    "GradSum",
    "Groups",
    "MicsError",
    "Precision",
    "StepMetrics",
    "TrainState",
    "Trainer",
    "bucket_sizes",
    "defer",
    "errors",
    "gather",
    "get",
    "groups",
    "init_distributed",
    "init_model",
    "init_state",
    "inspection",
    "keep_all",
    "load_shards",
    "make_groups",
    "on_demand",
    "opt_step",
    "optim",
    "placement",
    "record",
    "reduce_grads",
    "replicas",
    "sampler",
    "scatter_grads",
    "schedules",
    "shard",
    "shards",
    "summary",
    "sync_replicas",
    "tree",
    "unshard",
]  # and `set`, which `from mics_fn import *` leaves out: it would hide Python's own


def __dir__() -> list[str]:
    """The public names; of its submodules only those that are namespaces."""
    return sorted([*__all__, "set"])

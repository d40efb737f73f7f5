"""How bytes move: hierarchical collectives under way, and what ranks agree on before."""

from mics_fn.collectives.agreement import (
    agree,
    check_replicas,
    check_same,
    checksum,
    collect_all,
    in_step,
    same_call,
)
from mics_fn.collectives.hierarchical import (
    broadcast,
    collect,
    mean_comms,
    mean_over_ranks,
    mean_steps,
    scatter_comms,
    scatter_steps,
    start_all_gather,
    start_fetch,
    start_mean,
    start_reduce_scatter,
)
from mics_fn.collectives.pending import Pending, Steps, push_all, wait_all, wait_until

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
    "in_step",
    "mean_comms",
    "mean_over_ranks",
    "mean_steps",
    "push_all",
    "same_call",
    "scatter_comms",
    "scatter_steps",
    "start_all_gather",
    "start_fetch",
    "start_mean",
    "start_reduce_scatter",
    "wait_all",
    "wait_until",
]

"""Who takes part: rank arithmetic, launchers, process groups, placements. Moves no data."""

from mics_fn.groups import placement
from mics_fn.groups.buffers import Buffers
from mics_fn.groups.communicator import MOST_FULL, Comm, Hierarchy, Life
from mics_fn.groups.distributed import init_distributed
from mics_fn.groups.environment import read_launch
from mics_fn.groups.make import Groups, make_groups
from mics_fn.groups.replica import OF_STEPS, alone
from mics_fn.groups.topology import Plan, Topology, fold_ranks, plan_groups, valid_partition_sizes

__all__ = [
    "Buffers",
    "Comm",
    "Groups",
    "Hierarchy",
    "Life",
    "MOST_FULL",
    "OF_STEPS",
    "Plan",
    "Topology",
    "alone",
    "fold_ranks",
    "init_distributed",
    "make_groups",
    "placement",
    "plan_groups",
    "read_launch",
    "valid_partition_sizes",
]

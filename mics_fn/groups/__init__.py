"""Who takes part: rank arithmetic, launchers, process groups, placements. Moves no data."""

from mics_fn.groups import placement
from mics_fn.groups.buffers import Buffers
from mics_fn.groups.communicator import Comm, Life
from mics_fn.groups.distributed import init_distributed
from mics_fn.groups.environment import read_launch
from mics_fn.groups.groups import Groups, Home
from mics_fn.groups.hierarchy import MOST_FULL, Hierarchy, Route
from mics_fn.groups.make import make_groups
from mics_fn.groups.topology import Plan, Topology, fold_ranks, plan_groups, valid_partition_sizes

__all__ = [
    "Buffers",
    "Comm",
    "Groups",
    "Hierarchy",
    "Home",
    "Life",
    "MOST_FULL",
    "Plan",
    "Route",
    "Topology",
    "fold_ranks",
    "init_distributed",
    "make_groups",
    "placement",
    "plan_groups",
    "read_launch",
    "valid_partition_sizes",
]

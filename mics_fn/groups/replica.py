"""One replica as a world of its own.

[Note: a replica alone] Where replicas go apart, no verb asks for it. The steps are given groups
that end where the replica ends: their replication group is one rank, so hop 2 is none, as in any
world that holds one replica.
"""

from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from mics_fn.errors import GroupsError, message
from mics_fn.groups.communicator import Comm
from mics_fn.groups.make import Groups
from mics_fn.groups.topology import Plan, Topology

# One replica's groups by those of all, and all of the former. A replica's groups refer to nothing
# that this keeps, so that both forget.
_ALONE: WeakKeyDictionary[Groups, Groups] = WeakKeyDictionary()
OF_STEPS: WeakSet[Groups] = WeakSet()


def alone(groups: Any) -> Groups:
    """The groups of this rank's replica, a world of its own. See [Note: a replica alone]."""
    if not isinstance(groups, Groups):
        text = f"ReplicaSync.groups: got {type(groups).__name__}, expected Groups"
        raise GroupsError(message(text, fix="pass what make_groups gave"))
    if groups.num_replicas == 1:
        return groups
    found = _ALONE.get(groups)
    if found is None:
        plan, own = groups.plan, groups.plan.partition_group(groups.position)
        home = {"timeout_s": groups.timeout_s, "traffic": groups.traffic, "life": groups.life}
        found = _ALONE[groups] = replace(
            groups,
            plan=Plan(Topology(plan.level_sizes or (1,), plan.level_names), plan.partition_size),
            ranks=tuple(groups.ranks[position] for position in own),
            position=own.index(groups.position),
            replicas=Comm("replicas", (groups.rank,), 0, None, **home),
            agreed=set(),
        )
        OF_STEPS.add(found)
    return found

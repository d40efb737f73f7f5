"""One replica as a world of its own, and what must hold before replicas are merged.

[Note: a replica alone] Where replicas go apart, no verb asks for it. The steps are given groups
that end where the replica ends: their replication group is one rank, so hop 2 is none, as in any
world that holds one replica.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch

from mics_fn import tree
from mics_fn.agreement import checksum, collect_all, collect_bytes
from mics_fn.errors import DesyncError, GroupsError, PlanError, message, name_ranks
from mics_fn.gather import check_shards
from mics_fn.groups import Comm, Groups
from mics_fn.leaf import Sharded, homes_of, is_leaf
from mics_fn.linear import replicas_of, uses_of
from mics_fn.topology import Plan, Topology
from mics_fn.tree import Tree

# One replica's groups by those of all, and all of the former. A replica's groups refer to nothing
# that this keeps, so that both forget.
_ALONE: WeakKeyDictionary[Groups, Groups] = WeakKeyDictionary()
_OF_STEPS: WeakSet[Groups] = WeakSet()


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
        _OF_STEPS.add(found)
    return found


def homes_with_replicas(verb: str, params: Tree, groups: Any) -> list[Groups]:
    """The groups of each leaf of a tree of shards, checked before anything is changed or sent."""
    leaves, _ = tree.flatten(params, is_leaf)
    check_shards(verb, params, leaves)
    homes = homes_of(verb, "groups", groups, params)
    if any(home in _OF_STEPS for home in dict.fromkeys(homes)):
        text = f"{verb}: these are the groups of the steps, in which no other replica is"
        raise PlanError(message(text, fix="pass the groups that the tree was sharded with"))
    for use in uses_of(verb, leaves, homes):
        replicas_of(use)
    return homes


def check_policy(verb: str, policy: str, homes: Sequence[Groups]) -> None:
    """Raise on every rank unless all have the same policy: others would merge without them."""
    for home in dict.fromkeys(homes):
        ranks: dict[str, list[int]] = {}
        for rank, name in collect_bytes(home, policy.encode()).items():
            ranks.setdefault(name.decode(), []).append(rank)
        if len(ranks) > 1:
            lines = [f"{name_ranks(who)}: {name}" for name, who in ranks.items()]
            fix = "make the same one on every rank"
            raise DesyncError(message(f"{verb}: ranks have different policies", lines, fix=fix))


def check_equal(verb: str, params: Tree, homes: Sequence[Groups]) -> None:
    """Raise on every rank unless replicas hold the same bits: what starts apart would stay so.

    Communication: 8 bytes a leaf, over the partition group and over the replication group.
    """
    leaves, _ = tree.flatten(params, is_leaf)
    for home in dict.fromkeys(homes):
        mine = [
            i for i, leaf in enumerate(leaves) if homes[i] is home and isinstance(leaf, Sharded)
        ]
        if home.num_replicas == 1 or not mine or leaves[mine[0]].data.is_meta:
            continue
        found = collect_all(home, torch.stack([checksum(leaves[i].data) for i in mine]))
        first = [found[rank] for rank in home.ranks[: home.partition_size]]
        differs = {
            rank: (found[rank] != first[place % home.partition_size]).nonzero().flatten().tolist()
            for place, rank in enumerate(home.ranks)
        }
        odd = [rank for rank, at in differs.items() if at]
        if odd:
            path = tree.paths(params, "params", is_leaf)[mine[min(differs[odd[0]])]]
            lines = [f"first difference: {path}", f"{name_ranks(odd)}: not as in the first replica"]
            fix = "start with what shard gave, or with sync_replicas(params, groups)"
            raise DesyncError(message(f"{verb}: replicas hold different values", lines, fix=fix))

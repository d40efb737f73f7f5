"""Process groups of MiCS as one frozen value: who shares a replica, who holds the same shard."""

from collections import deque
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import TracebackType

import torch

from mics_fn.errors import message
from mics_fn.groups.communicator import Comm, Life, Traffic
from mics_fn.groups.hierarchy import Hierarchy
from mics_fn.groups.topology import Plan, Topology, fold_ranks


@dataclass(frozen=True, eq=False, repr=False)
class Groups:
    """The process groups of one data-parallel job, as this rank sees them; made by `make_groups`.

    A context manager: leaving it closes the groups. Printing, comparing and closing never
    communicate.
    """

    plan: Plan  # in positions
    ranks: tuple[int, ...]  # global rank of each position
    rank: int  # this one, global
    position: int  # this one in `ranks`
    hierarchy: Hierarchy
    flat: Hierarchy  # the same ranks and chunk order in one level
    partition: Comm  # control messages inside the partition group
    replicas: Comm  # hop 2
    device: torch.device
    timeout_s: float
    traffic: Traffic
    life: Life
    mean_over: int | None = None  # ranks that a mean of gradients is over; None: those of the job
    apart: bool = False  # whether other replicas of the job step on their own; see `replica`
    agreed: set = field(default_factory=set)  # digests of trees that ranks agreed on before

    @property
    def world_size(self) -> int:
        """Ranks of the job."""
        return len(self.ranks)

    @property
    def partition_size(self) -> int:
        """Ranks that share one replica."""
        return self.plan.partition_size

    @property
    def num_replicas(self) -> int:
        """Complete replicas."""
        return self.plan.num_replicas

    @cached_property
    def stacked_ranks(self) -> list[int]:
        """Global ranks, one partition group after the other, each in the order of `partition`."""
        p, own = self.partition_size, self.plan.partition_groups
        home = own[self.position // self.partition_size]
        places = [home.index(self.ranks.index(rank)) for rank in self.partition.ranks]
        return [
            self.ranks[start * p + place] for start in range(self.num_replicas) for place in places
        ]

    @cached_property
    def replica(self) -> "Groups":
        """The groups of this rank's replica, as a world of its own.

        [Note: a replica alone] Where replicas go apart, no verb asks for it. The steps are given
        groups that end where the replica ends: their replication group is one rank, so hop 2 is
        none, as in any world that holds one replica.
        """
        if self.num_replicas == 1:
            return self
        plan, own = self.plan, self.plan.partition_group(self.position)
        return replace(
            self,
            plan=Plan(Topology(plan.level_sizes or (1,), plan.level_names), plan.partition_size),
            ranks=tuple(self.ranks[position] for position in own),
            position=own.index(self.position),
            replicas=replace(self.replicas, ranks=(self.rank,), rank=0, group=None, queue=deque()),
            apart=True,
            agreed=set(),
        )

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self.life.closed

    def close(self) -> None:
        """Destroy the process groups; what uses them later raises GroupsError. Again: no effect."""
        self.life.close()

    def __enter__(self) -> "Groups":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def describe(self) -> str:
        """The facts that are the same on every rank, for digests."""
        route = self.hierarchy.route
        text = f"n={self.world_size} p={self.partition_size} levels={route.facts}"
        if self.mean_over is not None:
            text += f" mean over {self.mean_over}"
        if self.replicas.fixed_order and not route.levels:
            text += " in fixed order"
        return text

    def __repr__(self) -> str:
        state = ", closed" if self.closed else ""
        return f"Groups({self.describe()}, rank {self.rank}, {self.device}{state})"

    def __str__(self) -> str:
        shared, p, route = (
            fold_ranks(self.partition.ranks),
            self.partition_size,
            self.hierarchy.route,
        )
        none = "" if route.levels else " none"
        lines = [f"this is rank {self.rank}, which keeps chunk {route.chunk} of {p}"]
        lines += [f"partition group: {shared}; levels outermost first:{none}"]
        lines += [
            f"  {level.name} {level.gather.size}: {fold_ranks(level.gather.ranks)}"
            for level in route.levels
        ]
        lines += [f"replication group: {fold_ranks(self.replicas.ranks)}"]
        counted = (
            "1 partition group"
            if self.num_replicas == 1
            else f"{self.num_replicas} partition groups"
        )
        state = ", closed" if self.closed else ""
        head = f"n = {self.world_size} in {counted} of p = {p}, on {self.device}{state}"
        return message(head, lines)


Home = Groups | Hierarchy  # what the verbs take

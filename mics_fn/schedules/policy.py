"""Policies: how a schedule is made from a record, and what is remembered between runs."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mics_fn import checks
from mics_fn.schedules.schedule import Schedule, plan

Planner = Callable[[Schedule, Sequence[int]], Schedule]


@dataclass(eq=False)
class Learned:
    """What earlier runs of one tree under one policy found out."""

    schedule: Schedule | None = None  # what the next run follows
    order: tuple[int, ...] | None = None  # of reductions; the same on all ranks of the job
    firsts: tuple[int, ...] | None = None  # order of first uses; the same on all ranks of the job
    offsets: tuple[Any, Any] = (None, None)  # what they were found for, and the `Offsets`
    last: Any = None  # the last `Run`, which has perhaps not settled yet
    warned: bool = False  # whether the warning of a changed order of use was given
    missed: set[int] = field(default_factory=set)  # buckets that got no gradient in some pass
    recomputes: bool | None = None  # `Graph.recomputes` of a loss; None before the first one
    said: bool = False  # whether the warning of parameters that nobody trains was given
    again: set[int] = field(default_factory=set)  # buckets used after `Run.let_go` of them

    @property
    def facts(self) -> str:
        """What must be the same on all ranks; empty if nothing was learned."""
        if self.schedule is None and self.order is None:
            return ""
        return f"{self.schedule}; {self.order}; {self.firsts}"

    def carry_over(self, *, forget: bool) -> None:
        """Prepare for new groups, whose runs count from 1; a run that an error ended is left out.

        Args:
          forget: whether to forget all that ranks must have in common.
        """
        self.last = None
        if forget:
            self.schedule = self.order = self.firsts = self.recomputes = None
            self.missed, self.again = set(), set()


@dataclass(eq=False)
class OnDemand:
    """A policy, and what it remembers of each tree; made by `on_demand` and `keep_all`.

    Keep one policy for each program: training and evaluation use parameters in different orders.

    Args:
      live_bytes: budget for buckets that stay live; None for no limit.
      prefetch: how many buckets may be fetched ahead of their use.
      planner: makes a schedule from a record and the sizes of buckets; None for `schedules.plan`.
      at_once: whether a run fetches everything when it begins.
      lets_go: whether the last pass drops a bucket once its gradients are complete.
      learned: what runs have found out, by tree.

    Raises:
      PlanError: a number is negative or not an int, or `planner` is not a function.

    Example:
      >>> policy = OnDemand(live_bytes=8, prefetch=1)
      >>> print(policy.plan(Schedule.parse("use 0; use 1; use 0"), sizes=[8, 8]))
      fetch 0; fetch 1; use 0; use 1; drop 1; use 0; drop 0
      >>> policy.describe()
      'on_demand(live_bytes=8, prefetch=1)'
    """

    live_bytes: int | None
    prefetch: int
    planner: Planner | None = None
    at_once: bool = False
    lets_go: bool = False
    learned: dict[Hashable, Learned] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        fix = "on_demand(live_bytes=) also takes a text such as '512MiB'"
        checks.integer("OnDemand", "live_bytes", self.live_bytes, 0, optional=True, fix=fix)
        checks.integer("OnDemand", "prefetch", self.prefetch, 0, fix="0 fetches nothing ahead")
        fix = "pass a function such as schedules.plan"
        plans = "from a record and sizes to a Schedule"
        checks.function("OnDemand", "planner", self.planner, plans, fix)

    @property
    def schedule(self) -> Schedule | None:
        """What the next run of the tree that was seen last will follow; None if not known yet."""
        found = [each.schedule for each in self.learned.values() if each.schedule is not None]
        return found[-1] if found else None

    def plan(self, record: Schedule, sizes: Sequence[int]) -> Schedule:
        """A schedule for a record."""
        if self.planner is not None:
            planned = self.planner(record, sizes)
            planned.check(sizes)
            return planned.unmarked
        return plan(record.unmarked, sizes, live_bytes=self.live_bytes, prefetch=self.prefetch)

    def describe(self) -> str:
        """The facts that must be the same on every rank."""
        if self.at_once:
            return "keep_all()"
        # Functions cannot be compared between ranks; the fetches that they plan are.
        own = "" if self.planner is None else ", plan=a function"
        return f"on_demand(live_bytes={self.live_bytes}, prefetch={self.prefetch}{own})"


def on_demand(
    *, live_bytes: float | str | None = None, prefetch: int = 4, plan: Planner | None = None
) -> OnDemand:
    """A policy that fetches buckets when an op needs them, and ahead once their order is known.

    The first run fetches a bucket at its first use and records the order of use; later runs follow
    the plan that was made from it. `Trainer` uses this policy if it has a budget.

    Args:
      live_bytes: how many bytes of gathered buckets stay live. With None all stay, and each bucket
        is fetched once per run, as in ZeRO-2; with 0 one bucket is live at a time, as in ZeRO-3.
        What a single op needs is always allowed, and one more bucket that is fetched ahead. A text
        such as "512MiB" or "1GB" is a number of bytes, too.
      prefetch: how many buckets may be fetched ahead of their use, once the order is known.
      plan: makes a schedule from a record and the sizes of buckets in bytes, instead of
        `mics_fn.schedules.plan`. A record has the marks of backward passes that a `GradSum` runs.

    Returns:
      An `OnDemand`, for `defer` and `Trainer`. It remembers what it learned.

    Communication: in a run without a schedule and in the first that follows one, a few messages of
      about a hundred bytes to the store of torch.distributed before each fetch.

    Raises:
      PlanError: a number is negative or not a number, or `plan` is not a function.

    Example:
      >>> groups = make_groups(1)
      >>> policy = on_demand(live_bytes=0)
      >>> shards = shard({"w": torch.ones(2), "b": torch.ones(3)}, groups, bucket_bytes=8)
      >>> def loss_fn(shards):
      ...     with defer(shards, groups, policy) as full:
      ...         return full["w"].sum() * full["b"].sum()
      >>> for _ in range(2):
      ...     grads = torch.func.grad(loss_fn)(shards)
      >>> print(policy.schedule)
      fetch 1; fetch 0; use 1; drop 1; use 0; drop 0; reduce 0; reduce 1

    References: MiCS, Zhang et al., VLDB 2022, arXiv:2205.00119, section 4; Belady, IBM Systems
      Journal, 1966.
    """
    budget = None if live_bytes is None else checks.nbytes("on_demand", "live_bytes", live_bytes)
    return OnDemand(budget, prefetch, plan)


def keep_all() -> OnDemand:
    """A policy that starts to fetch all buckets at once and keeps them until the end of the run.

    Buckets arrive in the order in which the first run used them, while the model computes with
    those that are there. Because no fetch depends on what the model does, ranks may use different
    parameters.

    Returns:
      An `OnDemand`, for `defer` and `Trainer`.

    Communication: each run gathers each bucket once.

    Memory: each run holds the full parameters.

    Example:
      >>> groups = make_groups(1)
      >>> shards = shard([torch.ones(2)], groups)
      >>> with defer(shards, groups, keep_all()) as full:
      ...     full[0] + 1
      tensor([2., 2.])
    """
    return OnDemand(None, 0, at_once=True)

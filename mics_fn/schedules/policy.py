"""Policies: what makes a schedule from what was recorded, and what it remembers between runs."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mics_fn.errors import PlanError, message
from mics_fn.schedules.planning import plan
from mics_fn.schedules.schedule import Schedule

Planner = Callable[[Schedule, Sequence[int]], Schedule]


@dataclass(eq=False)
class Learned:
    """What earlier runs found out about one tree under one policy."""

    schedule: Schedule | None = None  # what the next run follows
    order: tuple[int, ...] | None = None  # of reductions; the same on all ranks of the job
    firsts: tuple[int, ...] | None = None  # order of first uses, the same on every rank
    passes: int | None = None  # backward passes of a run
    last: Any = None  # the last `Run`; its record may be new
    warned: bool = False  # that the order of use changed
    missed: set[int] = field(default_factory=set)  # buckets that some pass gave no gradient
    recomputes: bool | None = None  # whether losses do, as `Graph` says; None before the first
    said: bool = False  # the warning that the loss uses parameters which nobody trains


@dataclass(eq=False)
class OnDemand:
    """A policy: buckets are fetched where they are needed, and ahead once their order is known.

    Made by `on_demand`. It remembers what it learned of each tree, so keep one for each program:
    training and evaluation use parameters in different orders.
    """

    live_bytes: int | None
    prefetch: int
    planner: Planner | None = None
    at_once: bool = False  # fetch everything when gathered
    learned: dict[Hashable, Learned] = field(default_factory=dict, repr=False)

    @property
    def schedule(self) -> Schedule | None:
        """What the next run will follow, of the tree that was learned last; None before."""
        found = [each.schedule for each in self.learned.values() if each.schedule is not None]
        return found[-1] if found else None

    def plan(self, record: Schedule, sizes: Sequence[int]) -> Schedule:
        """A schedule for what was recorded."""
        if self.planner is not None:
            planned = self.planner(record, sizes)
            planned.check(sizes)
            return planned
        return plan(record, sizes, live_bytes=self.live_bytes, prefetch=self.prefetch)

    def describe(self) -> str:
        """The facts that must be the same on every rank."""
        if self.at_once:
            return "keep_all()"
        # Functions do not compare between ranks; what they plan does, once it is planned.
        own = "" if self.planner is None else ", plan=a function"
        return f"on_demand(live_bytes={self.live_bytes}, prefetch={self.prefetch}{own})"


def on_demand(
    *, live_bytes: int | None = None, prefetch: int = 4, plan: Planner | None = None
) -> OnDemand:
    """The policy of `Trainer`: fetch at first touch, then ahead, under a budget of live bytes.

    Args:
      live_bytes: how many bytes of gathered buckets stay live; None for all (each bucket is
        fetched once a run: ZeRO-2's traffic), 0 for one at a time (ZeRO-3's memory), and all
        between. What a single op needs is always allowed, and a bucket more for fetching ahead.
      prefetch: buckets that may be on their way ahead of their use, once the order is known.
      plan: makes a schedule from a recorded one and the buckets' sizes in bytes, instead of
        `mics_fn.schedules.plan`.

    Returns:
      An `OnDemand`, for `defer` and `Trainer`. It remembers what it saw.

    Communication: a run with it sends, before each fetch that no schedule foresaw, one message of
      about a hundred bytes to the store of torch.distributed.

    Raises:
      PlanError: a number is negative.

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
    for name, value in (("live_bytes", live_bytes), ("prefetch", prefetch)):
        if value is not None and value < 0:
            fix = "0 keeps one bucket; None keeps all" if name == "live_bytes" else "give 0 or more"
            raise PlanError(message(f"on_demand: {name}={value}", fix=fix))
    return OnDemand(live_bytes, prefetch, plan)


def keep_all() -> OnDemand:
    """A policy that fetches every bucket at once, and keeps all to the end of the run.

    Nothing waits before the first use, and buckets that come later arrive meanwhile, in the order
    in which the first run used them. As no fetch depends on what the model does, ranks may use
    different parameters.

    Returns:
      An `OnDemand`, for `defer` and `Trainer`.

    Communication: a run with it gathers each bucket once.

    Memory: a run with it holds the full parameters.

    Example:
      >>> groups = make_groups(1)
      >>> shards = shard([torch.ones(2)], groups)
      >>> with defer(shards, groups, keep_all()) as full:
      ...     full[0] + 1
      tensor([2., 2.])
    """
    return OnDemand(None, 0, at_once=True)

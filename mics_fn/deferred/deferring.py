"""`defer`: full parameters that are fetched at the ops that use them, under a schedule."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any
from weakref import WeakMethod

from mics_fn import _torch, checks, tree
from mics_fn.deferred.autograd import fetch_all
from mics_fn.deferred.grad_sum import GradSum
from mics_fn.deferred.live import LiveBuckets, sizes_of
from mics_fn.deferred.tensor import from_dynamo
from mics_fn.errors import PlanError, TreeError, message
from mics_fn.groups import require_replicas, tell_all
from mics_fn.schedules import Channel, Learned, OnDemand, Schedule, joined
from mics_fn.shards import (
    Opened,
    Sharded,
    check_leaves,
    grouped,
    is_leaf,
    needs_derivative,
    open_shards,
    put,
    with_parts,
)
from mics_fn.tree import Tree


class DeferredParams:
    """One run of a model over deferred parameters; made by `defer`.

    Args:
      params: the tree of deferred tensors.
      live: the buckets behind it.
      pending: says whether a derivative is still to be taken when the `with` block ends.
    """

    def __init__(self, params: Tree, live: LiveBuckets, pending: Callable[[], bool]) -> None:
        self.params = params
        self._live, self._pending = live, pending

    @property
    def following(self) -> bool:
        """Whether this run has followed its schedule so far."""
        return self._live.run.following

    @property
    def record(self) -> Schedule:
        """What this run has used and reduced so far, in order, as a schedule without fetches."""
        return self._live.run.record

    @property
    def marked(self) -> Schedule:
        """`record`, with the mark `backward` where the backward pass begins."""
        return self._live.run.marked

    def close(self) -> None:
        """End the run: its buckets are dropped, and using its tensors is an error from then on.

        All ranks must close the same runs in the same order. A second call has no effect.

        Raises:
          DesyncError: another rank used other buckets in this run.
        """
        self._live.close()

    def __enter__(self) -> Tree:
        return self.params

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self._live.abandon()
            refused = from_dynamo(error)
            tell_all(refused or error)
            if refused is not None:
                raise refused from error
        elif not self._pending():
            self.close()


def defer(
    shards: Tree, groups: Any, schedule: Schedule | OnDemand, *, into: GradSum | None = None
) -> DeferredParams:
    """Full parameters that are fetched at the ops that use them, in forward and in backward.

    They are tensors without data, unless nothing has to be fetched for them. Autograd saves them
    instead of the weights, so that nothing holds a gathered weight from one use to the next.

    Args:
      shards: tree of shards.
      groups: `Groups` or a `Hierarchy`, a prefix pytree of these, or a function from path to one;
        `into` needs `Groups`.
      schedule: a policy (`on_demand`, `keep_all`), which remembers the order of use, or a fixed
        `Schedule`.
      into: a `GradSum` that takes the gradients, which then are not in the result of backward.

    Returns:
      The run, a context manager whose value is the tree of deferred tensors: `with defer(shards,
      groups, policy) as full:`. The run ends with the block, and its tensors cannot be used any
      more. Without a block, `.params` is the tree and `close()` ends the run. If a derivative is
      still to be taken when the block ends, as inside a function that `torch.func.grad`
      differentiates, the run goes on until the graph of that derivative is gone.

    Communication: each bucket is gathered as often as the schedule fetches it, and its
      reduce-scatter starts when its gradients are complete. The ranks compare a tree or schedule
      that is new to the groups once (32 bytes). A fetch that is not in the schedule, or of the
      first run that follows it, sends a few messages of about a hundred bytes to the store of
      torch.distributed.

    Memory: the buckets that the schedule keeps live.

    Raises:
      PlanError: the groups are not those that the tree was sharded with, or the schedule does not
        fit the tree.
      DesyncError: ranks have different trees or schedules, or use buckets in different orders, or
        some reduce many more than others before a fetch.
      LeafError: an op writes to a deferred parameter; `into` or `linearize` inside torch.func. On
        the CPU, under `keep_all` a parameter that this rank holds in full is a plain tensor, which
        keeps its value after the run: there a write is an error at the end of the run.
      GroupsError: a deferred parameter is used after the end of its run; `into` with a hierarchy.
      TreeError: `into` is in use by another run.

    Example:
      >>> groups = make_groups(1)
      >>> shards = shard({"w": torch.ones(2)}, groups)
      >>> total = GradSum()
      >>> with defer(shards, groups, on_demand(live_bytes=0), into=total) as full:
      ...     total.backward(full["w"].square().sum())
      >>> total.grads()["w"].data
      tensor([2., 2.])

    References: MiCS, Zhang et al., VLDB 2022, arXiv:2205.00119, sections 3.3 and 4.
    """
    text = described(schedule)
    opened = open_shards("defer", shards, groups)
    expected = "a GradSum"
    checks.instance("defer", "into", into, GradSum | None, expected, "make one: total = GradSum()")
    if into is not None:  # a hierarchy would leave out hop 2
        require_replicas("defer(into=)", opened.homes)
    opened.agree(text)
    channel = joined([use.hierarchy.channel for use in opened.uses])
    policy, learned = _memory_of(schedule, opened, channel)
    pending = into is None and needs_derivative(opened.pieces)
    closes = not pending and not _torch.inside_torch_func()
    live = LiveBuckets(opened.uses, opened.names, learned, policy, channel, into, closes=closes)
    full = opened.data
    if into is not None:
        given = iter(into.expect(opened, live.run, WeakMethod(live.let_go)))
        pairs = zip(opened.leaves, full, strict=True)
        full = [next(given) if isinstance(leaf, Sharded) else x for leaf, x in pairs]
    put(full, opened.uses, fetch_all(live, full))
    live.start()
    return DeferredParams(opened.build(full), live, lambda: pending and not live.run.passes)


def bucket_sizes(
    shards: Tree, groups: Any = None, *, partition_size: int | None = None
) -> list[int]:
    """Bytes that each bucket of a tree takes while it is live, in the order of bucket numbers.

    Args:
      shards: tree of shards.
      groups: as for `defer`; they matter only with a placement that keeps copies.
      partition_size: the sizes in partition groups of so many ranks, to plan for them elsewhere.

    Returns:
      One number per bucket; 0 if this rank holds it in full already, because the group has one rank
      or the placement keeps a copy.

    Raises:
      TreeError, LeafError: there is no tree, or a leaf is not a shard.
      PlanError: `partition_size` is not an int of at least 1, or comes with groups.

    Example:
      >>> shards = shard([torch.ones(6)], make_groups(1))
      >>> bucket_sizes(shards), bucket_sizes(shards, partition_size=2)
      ([0], [32])
    """
    if partition_size is not None:
        return _sizes_for(shards, groups, partition_size)
    if groups is not None:
        return sizes_of(open_shards("bucket_sizes", shards, groups).uses)
    if shards is None:
        raise TreeError(message("bucket_sizes: shards is None", fix="pass a tree of shards"))
    leaves, _ = tree.flatten(shards, is_leaf)
    check_leaves("bucket_sizes", shards, leaves, "shards")
    return sizes_of(grouped(leaves, [None] * len(leaves)))


def _sizes_for(shards: Tree, groups: Any, parts: int) -> list[int]:
    """`bucket_sizes` in partition groups of so many ranks."""
    if type(parts) is not int or parts < 1:
        text = f"bucket_sizes: partition_size={parts!r}"
        raise PlanError(message(text, fix="pass the number of ranks that share a replica"))
    if groups is not None:
        text = "bucket_sizes: groups and partition_size= are both given"
        raise PlanError(message(text, fix="pass groups, or the size of others without them"))
    leaves, _ = tree.flatten(shards, is_leaf)
    check_leaves("bucket_sizes", shards, leaves, "shards")
    uses = grouped(leaves, [None] * len(leaves))
    return sizes_of([replace(use, bucket=with_parts(use.bucket, parts)) for use in uses])


def described(schedule: Any) -> str:
    """A schedule or policy as text, which must be the same on every rank.

    Raises:
      PlanError: it is neither.
    """
    if isinstance(schedule, OnDemand):
        return schedule.describe()
    if not isinstance(schedule, Schedule):
        text = f"defer: schedule={schedule!r:.60} is neither a schedule nor a policy"
        raise PlanError(message(text, fix="pass a Schedule, on_demand(...) or keep_all()"))
    return str(schedule)


def _memory_of(
    schedule: Schedule | OnDemand, opened: Opened, channel: Channel
) -> tuple[OnDemand, Learned]:
    """The policy for `schedule=`, and what it has learned about this tree.

    Raises:
      PlanError: a schedule names buckets that the tree lacks, or uses one that is not live.
    """
    uses: Sequence[Any] = opened.uses
    key = tuple((use.bucket, use.missing, use.route.hold, use.away) for use in uses)
    if isinstance(schedule, OnDemand):
        return schedule, schedule.learned.setdefault(key, Learned())
    given = schedule
    if (given, key) not in channel.fixed:
        sizes = sizes_of(uses)
        schedule.check(sizes)
        schedule = schedule.unmarked
        # If the model uses other buckets, they are fetched on demand within the same memory.
        policy = OnDemand(schedule.peak_bytes(sizes), 0, lambda record, sizes: schedule)
        order = tuple(dict.fromkeys(schedule.reduces))
        whole = sorted(order) == [i for i, use in enumerate(uses) if use.bucket.trainable]
        channel.fixed[given, key] = policy, Learned(schedule, order if whole else None)
    return channel.fixed[given, key]

"""Means of whole tensors, such as hop 2, and what all ranks get from one of them.

[Note: weighted means] Both hops are means, so the gradient of a step is that of the mean of the
losses over ranks and micro-steps. Where each loss is itself a mean, over a number of tokens that
differs, that is a mean of means. With the sum of a micro-step over its tokens divided by the mean
number of tokens, it is the sum over all tokens by their number. That divisor is known before the
loss, so it is one small message beside the gathers, and everything behind it, from the dtype on the
wire to the limit of a guard, sees a gradient of the usual size.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mics_fn import checks
from mics_fn.collectives.codec import Codec
from mics_fn.collectives.coded import coded_mean_steps
from mics_fn.collectives.levels import mean_in_order, moves, reduce_all, send_from
from mics_fn.collectives.pending import Pending, Steps, What
from mics_fn.errors import GroupsError
from mics_fn.groups import Comm, Groups


def start_mean(
    comm: Comm,
    tensor: Tensor,
    wire: torch.dtype | Codec | None = None,
    what: What = ("", "mean", ""),
) -> Pending:
    """Start to average a tensor over a communicator, in place.

    Args:
      comm: the communicator.
      tensor: contiguous.
      wire: the dtype that is sent, or a codec; None takes the dtype of `tensor`.
      what: as for `Pending`.

    Communication: one all-reduce, in which each of r ranks sends 2(r - 1)/r of the tensor's bytes
      in `wire`. With a codec an all-to-all and an all-gather of codes, which send 2(r - 1) times
      those of 1/r of the elements, rounded up to a block.
    """
    comms, steps = mean_comms(comm, tensor, wire), mean_steps(comm, tensor, wire)
    return Pending(steps, comms, keep=(tensor,), device=tensor.device, what=what)


def mean_comms(comm: Comm, tensor: Tensor, wire: torch.dtype | Codec | None = None) -> list[Comm]:
    """The communicators that `mean_steps` uses, in order: none, the given one, or two."""
    if comm.size == 1 or not moves(tensor):
        return []
    if isinstance(wire, Codec):  # the next codes are exchanged while these are decoded
        return [comm, comm.second or comm]
    return [comm, comm] if comm.fixed_order else [comm]


def mean_steps(
    comm: Comm,
    tensor: Tensor,
    wire: torch.dtype | Codec | None = None,
    spare: Tensor | None = None,
) -> Steps:
    """Average a contiguous tensor over a communicator, in place; see `start_mean`.

    Args:
      comm, tensor, wire: as there.
      spare: memory for a copy in `wire`, of the shape of `tensor`; for codes 1D, uint8, of
        `mean_bytes`. None allocates it if needed.
    """
    comms = mean_comms(comm, tensor, wire)
    if isinstance(wire, Codec):
        if comms:
            yield from coded_mean_steps(comms, tensor, wire, spare)
    elif len(comms) > 1:
        yield from mean_in_order(comm, tensor, wire or tensor.dtype)
    elif comms:
        yield from reduce_all(comm, tensor, wire or tensor.dtype, spare)
    return tensor


def mean_over_ranks(groups: Groups, tensor: Tensor) -> Tensor:
    """Average a small tensor over all ranks, in place: in partition groups, then over replicas."""
    return start_mean_over_ranks(groups, tensor).wait()


def start_mean_over_ranks(groups: Groups, tensor: Tensor, name: str = "") -> Pending:
    """Start `mean_over_ranks`; with a name the ledger has its bytes under that."""
    both = [groups.partition, groups.replicas]
    both = [replace(comm, name=name) for comm in both] if name else both

    def steps() -> Steps:
        for comm in both:
            yield from mean_steps(comm, tensor)
        return tensor

    comms = [each for comm in both for each in mean_comms(comm, tensor)]
    what = ("", name or "mean over all ranks", "")
    return Pending(steps(), comms, keep=(tensor,), device=tensor.device, what=what)


def weighted(loss_sum: Tensor, count: Any, groups: Groups) -> Tensor:
    """A loss for the verbs whose mean over ranks and micro-steps is exact for any counts.

    See [Note: weighted means].

    Args:
      loss_sum: 0-dim tensor, the sum of this rank's losses over its tokens (or samples, or whatever
        it counts) in one micro-step.
      count: how many there are: a number, or a tensor on any device, for which the host does not
        wait. With several micro-steps the counts of all of them, as a sequence or a 1D tensor, in
        each call. A rank or a micro-step may have none, if its `loss_sum` is 0 then; if no rank has
        any, the loss is NaN or infinite.
      groups: those that the gradients are averaged over; `groups.without_replicas()` while replicas
        step on their own.

    Returns:
      `loss_sum` by the mean count per rank and micro-step, at least in float32. It has derivatives
      in every way that `loss_sum` has, also inside of torch.func; counts have none.

    Communication: 8 bytes over the partition group and the replication group.

    Example:
      >>> groups = make_groups(1)
      >>> shards = shard({"w": torch.ones(2)}, groups)
      >>> def loss_fn(shards, tokens):
      ...     return weighted((gather(shards, groups)["w"] * tokens).sum(), len(tokens), groups)
      >>> torch.func.grad(loss_fn)(shards, torch.tensor([1.0, 5.0]))["w"].data
      tensor([0.5000, 2.5000])
    """
    fix = "pass what make_groups gave; of a placement, the groups of all ranks"
    checks.instance("weighted", "groups", groups, Groups, "Groups", fix, GroupsError)
    counts = list(count) if isinstance(count, list | tuple) else [count]
    parts = [torch.as_tensor(x, dtype=torch.float64, device=groups.device) for x in counts]
    mean = _MeanOfCounts.apply(groups, torch.stack([x.detach().mean() for x in parts]).mean())
    return loss_sum / mean.to(torch.promote_types(loss_sum.dtype, torch.float32))  # pyright: ignore


class _MeanOfCounts(torch.autograd.Function):
    """`mean_over_ranks` of what has no derivative, inside of torch.func too."""

    @staticmethod
    def forward(groups: Groups, count: Tensor) -> Tensor:  # pyright: ignore
        return mean_over_ranks(groups, count.contiguous().clone())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple:  # pyright: ignore
        return None, None

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Any:  # pyright: ignore
        return None

    @staticmethod
    def vmap(info: Any, in_dims: tuple, groups: Groups, count: Tensor) -> tuple:  # pyright: ignore
        return _MeanOfCounts.apply(groups, count), in_dims[1]


def broadcast(groups: Groups, tensor: Tensor, source_rank: int) -> None:
    """Overwrite `tensor` on all ranks with that of the source: over replicas, then inside them."""
    place = groups.ranks.index(source_rank) % groups.partition_size
    row = groups.position % groups.partition_size == place
    hops = [(groups.replicas, source_rank)] if row else []
    own = groups.plan.partition_groups[groups.position // groups.partition_size]
    hops.append((groups.partition, groups.ranks[own[place]]))
    for comm, source in hops:
        send_from(comm, tensor, source)

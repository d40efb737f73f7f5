"""Means of whole tensors, such as hop 2, and what all ranks get from one of them."""

import torch
from torch import Tensor

from mics_fn.collectives.codec import Codec
from mics_fn.collectives.coded import coded_mean_steps
from mics_fn.collectives.levels import mean_in_order, moves, reduce_all, send_from
from mics_fn.collectives.pending import Pending, Steps, What
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
    for comm in (groups.partition, groups.replicas):
        start_mean(comm, tensor, what=("", "mean over all ranks", "")).wait()
    return tensor


def broadcast(groups: Groups, tensor: Tensor, source_rank: int) -> None:
    """Overwrite `tensor` on all ranks with that of the source: over replicas, then inside them."""
    place = groups.ranks.index(source_rank) % groups.partition_size
    row = groups.position % groups.partition_size == place
    hops = [(groups.replicas, source_rank)] if row else []
    own = groups.plan.partition_groups[groups.position // groups.partition_size]
    hops.append((groups.partition, groups.ranks[own[place]]))
    for comm, source in hops:
        send_from(comm, tensor, source)

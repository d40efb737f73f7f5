"""What users call: collectives of their own, and weights of losses.

Collectives on the communicators of groups are as safe as those of this library. Waits for them are
bounded, and Ctrl-C works there. A rank that fails is named. Ranks compare the name and the size of
a call before it moves data. It has its place in the order of its communicator, and runs on its
stream.

[Note: weighted means] Both hops are means, so the gradient of a step is that of the mean of the
losses over ranks and micro-steps. Where each loss is itself a mean, over a number of tokens that
differs, that is a mean of means. With the sum of a micro-step over its tokens divided by the mean
number of tokens, it is the sum over all tokens by their number. That divisor is known before the
loss, so it is one small message beside the gathers, and everything behind it, from the dtype on the
wire to the limit of a guard, sees a gradient of the usual size.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mics_fn import checks
from mics_fn.checks import refuse_derivative
from mics_fn.collectives import levels
from mics_fn.collectives.pending import Collective, Pending, Steps
from mics_fn.errors import CollectiveError, GroupsError, LeafError
from mics_fn.groups import Comm, Groups

_ISSUE = "pass functools.partial of a function of torch.distributed, with its tensors"
_FIX = "call it in torch.no_grad() and outside of torch.func; gather and sync_replicas have one"


def all_gather(comm: Comm, tensor: Tensor, *, name: str = "own all-gather") -> Tensor:
    """The tensor of each rank of a communicator, stacked in its order.

    Args:
      comm: one of `Groups.communicators`; all of its ranks make the call.
      tensor: of any dtype, with the same shape and dtype on all ranks.
      name: for errors; ranks compare it.

    Returns:
      A new tensor (comm.size, *shape). With one rank it is a copy.

    Communication: one all-gather: this rank sends its tensor to the size - 1 others.

    Memory: the result.

    Raises:
      LeafError: `tensor` is not a tensor with data, or a derivative of the result is needed, which
        does not exist.
      GroupsError: the groups of `comm` are closed or have failed.
      DesyncError: ranks make different calls, or give tensors of different sizes.
      CollectiveError, PeerFailed: as every collective.

    Example:
      >>> groups = make_groups(1)
      >>> collectives.all_gather(groups.communicators["replicas"], torch.ones(2))
      tensor([[1., 1.]])
    """
    checks.instance("all_gather", "name", name, str, "a text")
    _check("all_gather", comm, [tensor])
    flat = tensor.detach().contiguous().view(-1)
    if comm.size == 1 or not flat.numel():
        return flat.expand(comm.size, -1).clone().view(comm.size, *tensor.shape)
    raw = flat.view(torch.uint8)
    out = raw.new_empty(comm.size, raw.numel())

    def steps() -> Steps:
        yield levels.all_gather(comm, out, raw)
        return out

    what = "", name, str(tensor.dtype)
    Pending(steps(), [comm], keep=(raw, out), device=raw.device, what=what).wait()
    return out.view(-1).view(tensor.dtype).view(comm.size, *tensor.shape)


def start(
    comm: Comm,
    issue: Callable[..., Any],
    tensors: Sequence[Tensor],
    *,
    name: str,
    sent_bytes: int,
) -> Pending:
    """Start a collective of one's own, and return at once; `wait()` gives the last of `tensors`.

    Args:
      comm: one of `Groups.communicators`, with several ranks, which all make the call.
      issue: called as `issue(group=, async_op=)`, maybe later; it gives what functions of
        torch.distributed give. `functools.partial(dist.all_reduce, x)` is one.
      tensors: all that it reads or writes, which are kept until then. The first one has the same
        size on all ranks, which compare it.
      name: for errors; ranks compare it.
      sent_bytes: what this rank sends, for the ledger `Groups.traffic`.

    Returns:
      A `Pending`. All ranks wait for theirs in the same order.

    Communication: what `issue` sends.

    Raises:
      LeafError: `tensors` are not tensors with data, or a derivative of the result is needed, which
        does not exist.
      GroupsError: `comm` has one rank, or its groups are closed.
      CollectiveError: `issue` gave nothing to wait for; `wait` raises it.
      DesyncError, CollectiveError, PeerFailed: as every collective.

    Example:
      >>> import functools, torch.distributed as dist
      >>> groups, x = make_groups(1), torch.ones(2)
      >>> for comm in groups.communicators.values():
      ...     if comm.size > 1:
      ...         sum_of = functools.partial(dist.all_reduce, x)
      ...         collectives.start(comm, sum_of, [x], name="sum", sent_bytes=x.nbytes).wait()
    """
    checks.function("start", "issue", issue, "that starts the collective", _ISSUE, optional=False)
    checks.instance("start", "name", name, str, "a text")
    checks.integer("start", "sent_bytes", sent_bytes, 0)
    tensors = list(tensors)
    _check("start", comm, tensors)
    comm.process_group()  # raises where there is none

    def call(**how: Any) -> Any:
        work = issue(**how)
        if how["async_op"] and not hasattr(work, "is_completed"):
            text = f"start: {name!r} gave {type(work).__name__}, and nothing to wait for"
            fix = "return what a function of torch.distributed gives for async_op=True"
            raise CollectiveError(text, fix=fix)
        return work

    def steps() -> Steps:
        yield Collective(comm, name, sent_bytes, call)
        return tensors[-1]

    device, what = tensors[0].device, ("", name, "")
    return Pending(steps(), [comm], keep=tensors, device=device, what=what)


def _check(verb: str, comm: Comm, tensors: Sequence[Any]) -> None:
    comm.check_open()
    for i, x in enumerate(tensors):
        if not isinstance(x, Tensor) or x.is_meta:
            got = "on meta, without data" if isinstance(x, Tensor) else type(x).__name__
            text = f"{verb}: tensor {i} is {got}"
            raise LeafError(text, fix="pass tensors of the device of the groups")
    refuse_derivative(verb, tensors, _FIX)


# Weights of losses.


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
    if not isinstance(groups, Groups):
        checks.refuse("weighted", "groups", groups, "Groups", fix, GroupsError)
    counts = list(count) if isinstance(count, list | tuple) else [count]
    parts = [torch.as_tensor(x, dtype=torch.float64, device=groups.device) for x in counts]
    mean = _MeanOfCounts.apply(groups, torch.stack([x.detach().mean() for x in parts]).mean())
    return loss_sum / mean.to(torch.promote_types(loss_sum.dtype, torch.float32))  # pyright: ignore


class _MeanOfCounts(torch.autograd.Function):
    """`mean_over_ranks` of what has no derivative, inside of torch.func too."""

    @staticmethod
    def forward(groups: Groups, count: Tensor) -> Tensor:  # pyright: ignore
        return levels.mean_over_ranks(groups, count.contiguous().clone())

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

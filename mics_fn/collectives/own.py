"""Collectives of a user's own on the communicators of groups, as safe as those of this library.

Waits for them are bounded, and Ctrl-C works there. A rank that fails is named. Ranks compare the
name and the size of a call before it moves data. It has its place in the order of its communicator,
and runs on its stream.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mics_fn import checks
from mics_fn.checks import refuse_derivative
from mics_fn.collectives import levels
from mics_fn.collectives.pending import Collective, Pending, Steps
from mics_fn.errors import CollectiveError, LeafError
from mics_fn.groups import Comm

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

"""`Collective`: one collective on one communicator, and the error if it fails."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from mics_fn import _torch_profiler
from mics_fn.errors import CollectiveError, CollectiveTimeoutError, first_line, message, name_ranks
from mics_fn.groups import Comm
from mics_fn.schedules import Stuck


class Collective:
    """One collective on one communicator: what a step of a `Pending` yields, to have it issued.

    Args:
      comm: the communicator.
      op: its name, for error texts.
      nbytes_sent: what this rank sends.
      call: issues it; takes `group` and `async_op` as torch.distributed does.
    """

    def __init__(self, comm: Comm, op: str, nbytes_sent: int, call: Callable[..., Any]) -> None:
        self.comm, self.op = comm, op
        self.nbytes_sent, self._call = nbytes_sent, call

    def issue(self, *, async_op: bool) -> None:
        """Issue it; without `async_op` it is queued on the current stream as any other op."""
        self.comm.traffic.add(self.comm.name, self.nbytes_sent)
        group = self.comm.process_group()
        try:
            with _torch_profiler.unrecorded(async_op):
                self.work = self._call(group=group, async_op=async_op)
        except (RuntimeError, ValueError) as error:
            raise self._failed(error, wait=False) from error
        self.comm.calls.issued += 1

    def done(self) -> bool:
        """Whether it has finished (or failed), without waiting."""
        return self.work.is_completed()

    def finish(self) -> None:
        """Let go of one that is done, or raise if it failed."""
        try:
            self.work.wait()
        except RuntimeError as error:
            raise self._failed(error, wait=True) from error

    def late(self) -> CollectiveTimeoutError:
        """The error to raise if it does not finish in time."""
        return CollectiveTimeoutError(
            message(
                f"{self.op} over '{self.comm.name}' did not finish in {self.comm.timeout_s:g} s",
                [f"waiting: rank {dist.get_rank()} of {name_ranks(self.comm.ranks)}"],
                fix="look for a rank that stopped, or that calls other verbs",
            )
        )

    def _failed(self, error: Exception, *, wait: bool) -> Exception:
        """What to raise; it may wait for a moment to learn which rank was the cause."""
        first = first_line(error)
        own = CollectiveError(
            message(
                f"{self.op} over '{self.comm.name}' failed: {first}",
                [f"on rank {dist.get_rank()}; its group is {name_ranks(self.comm.ranks)}"],
                fix="look at the other ranks' errors, then make new groups: these are broken",
            )
        )
        comm, number = self.comm, self.comm.calls.issued if wait else self.comm.calls.issued + 1
        call = Stuck(comm.calls.key, number, comm.ranks, f"{self.op} over '{comm.name}'")
        return comm.life.explained(own, wait=wait, call=call)

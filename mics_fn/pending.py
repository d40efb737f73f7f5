"""Collectives under way: bounded waits, several levels after each other, several buckets at once.

[Note: order on a communicator] Every rank must issue the collectives of one communicator in the
same order. A multi-level collective therefore advances only where the program says so, inside
`wait` or `wait_all`, and `wait_all` never lets a later bucket start a level before an earlier one
has: buckets follow each other through the levels like a pipeline.

[Note: buffers in flight] On CUDA each collective runs on a side stream that first waits for the
current one; `wait` makes the current stream wait for it, and no host waits. Every tensor that a
collective reads or writes is referenced by its `Pending` until then, so that no allocator hands it
out too early; `record_stream` is never needed.
"""

import time
import warnings
from collections.abc import Callable, Generator, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mics_fn.errors import CollectiveError, CollectiveTimeoutError, message, name_ranks
from mics_fn.groups import Comm

Steps = Generator["Issued", None, Tensor]

_SHORTEST_SLEEP_S, _LONGEST_SLEEP_S = 5e-5, 5e-3


class Issued:
    """One collective on one communicator, under way."""

    def __init__(self, comm: Comm, op: str, nbytes_sent: int, call: Callable[..., Any]) -> None:
        self.comm, self.op = comm, op
        comm.traffic.add(comm.name, nbytes_sent)
        group = comm.process_group()
        try:
            self.work = call(group=group, async_op=True)
        except (RuntimeError, ValueError) as error:
            raise self._failed(error) from error

    def done(self) -> bool:
        """Whether it has finished (or failed), without waiting."""
        return self.work.is_completed()

    def poll(self, until: Callable[[], bool] | None = None) -> None:
        """Wait on the host, sleeping between looks, so that an interrupt is heard at once.

        Args:
          until: what to wait for instead of this collective's own end.
        """
        started = time.monotonic()
        while not (until or self.done)():
            waited = time.monotonic() - started
            # In proportion to the wait, so that looking costs little time and little delay.
            time.sleep(min(_LONGEST_SLEEP_S, max(_SHORTEST_SLEEP_S, waited / 25)))
            if waited > self.comm.timeout_s:
                raise CollectiveTimeoutError(
                    message(
                        f"{self.op} over '{self.comm.name}' did not finish in "
                        f"{self.comm.timeout_s:g} s",
                        [f"waiting: rank {dist.get_rank()} of {name_ranks(self.comm.ranks)}"],
                        fix="look for a rank that stopped, or took another way through the program",
                    )
                )
        if until is None:
            self.order()

    def order(self) -> None:
        """On CUDA make the current stream wait for it; on the host raise if it failed."""
        try:
            self.work.wait()
        except RuntimeError as error:
            raise self._failed(error) from error

    def _failed(self, error: Exception) -> CollectiveError:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return CollectiveError(
            message(
                f"{self.op} over '{self.comm.name}' failed: {first}",
                [f"on rank {dist.get_rank()}; its group is {name_ranks(self.comm.ranks)}"],
                fix="look at the other ranks' errors, then make new groups: these are out of step",
            )
        )


class Pending:
    """A collective under way, over all its levels; it keeps its buffers alive until `wait`.

    Args:
      steps: generator that issues one level after the other and returns the result.
      keep: every tensor that it reads or writes.
      device: where they live.
      purpose: 'gather' or 'reduce'; each has its own stream on CUDA.
    """

    def __init__(
        self, steps: Steps, *, keep: Sequence[Tensor], device: torch.device, purpose: str
    ) -> None:
        self._steps, self._keep = steps, keep
        self._issued: Issued | None = None
        self._result: Tensor | None = None
        self._event: Any = None
        self._device, self._on_stream = device, device.type == "cuda"
        self.level = 0  # levels issued so far
        if not self._on_stream:
            self._advance()
            return
        side, current = _side_stream(device, purpose), torch.cuda.current_stream(device)
        side.wait_stream(current)  # the inputs, and the last reader of recycled memory
        with torch.cuda.stream(side):
            self._advance()
            while not self.finished:
                self._advance()
            self._event = side.record_event()

    def _advance(self) -> None:
        issued, self._issued = self._issued, None  # nothing is left of one that fails here
        if issued is not None:
            issued.order() if self._on_stream else issued.poll()
        try:
            self._issued = next(self._steps)
            self.level += 1
        except StopIteration as stop:
            self._result = stop.value

    @property
    def finished(self) -> bool:
        """Whether nothing is left to issue or to wait for on the host."""
        return self._issued is None

    def wait(self) -> Tensor:
        """The result, ready for the current stream. Waiting again returns it again."""
        while not self.finished:
            self._advance()
        if self._event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)
            self._event = None
        self._keep = ()
        if self._result is None:
            raise CollectiveError("this collective failed before; its result does not exist")
        return self._result

    def __del__(self) -> None:
        # Buffers must outlive the transfer even when nobody wants the result.
        if getattr(self, "_issued", None) is not None:
            warnings.warn("a collective was dropped before wait()", ResourceWarning, stacklevel=2)
        elif getattr(self, "_event", None) is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)


def wait_all(pendings: Sequence[Pending]) -> list[Tensor]:
    """Finish several collectives, each level of one overlapping other levels of the next.

    See [Note: order on a communicator].
    """
    while waiting := [pending for pending in pendings if not pending.finished]:
        first = waiting[0]._issued
        if first is not None:
            first.poll(until=lambda: any(_may_advance(waiting)))
        for i in range(len(waiting)):
            if _may_advance(waiting)[i]:
                waiting[i]._advance()
    return [pending.wait() for pending in pendings]


def _may_advance(waiting: Sequence[Pending]) -> list[bool]:
    """Which have finished their level, and stay behind the one before them."""
    clear = [True]
    clear += [a.finished or a.level > b.level for a, b in pairwise(waiting)]
    return [
        ok and pending._issued is not None and pending._issued.done()
        for ok, pending in zip(clear, waiting, strict=True)
    ]


@cache
def _side_stream(device: torch.device, purpose: str) -> Any:
    # Reductions are what the next step waits for, so they go first where both want the device.
    return torch.cuda.Stream(device, priority=-1 if purpose == "reduce" else 0)

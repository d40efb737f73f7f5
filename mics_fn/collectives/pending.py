"""`Pending`: a collective in flight, with several levels, bounded waits, and others beside it.

[Note: order on a communicator] Every rank must issue the collectives of one communicator in the
same order. A `Pending` therefore enters the queue of each communicator that it will use when it is
started, and issues a level only when it is the first in that queue. So the order on every
communicator is the order in which collectives were started, which the program decides. *When* a
level is issued may depend on timing: a wait for any collective advances all of them.

[Note: buffers in flight] On CUDA each collective runs on a side stream, which first waits for the
current stream; `wait` makes the current stream wait for the side stream, and the host does not
wait. Until then the `Pending` references every tensor that its collectives read or write, so that
no allocator hands out their memory too early, and `record_stream` is not needed.
"""

import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mics_fn.errors import CollectiveError, CollectiveTimeoutError, message, name_ranks
from mics_fn.groups import Comm, Life
from mics_fn.schedules import Stuck

Steps = Generator["Issued", None, Tensor]

_SHORTEST_SLEEP_S, _LONGEST_SLEEP_S = 5e-5, 5e-3
_STALL_S = 1.0  # a wait without progress reads what other ranks wrote each time this has passed
_ISSUED: Counter[str] = Counter()  # collectives by process group; see [Note: waiting in two places]


class Issued:
    """One collective on one communicator, in flight."""

    def __init__(self, comm: Comm, op: str, nbytes_sent: int, call: Callable[..., Any]) -> None:
        self.comm, self.op = comm, op
        comm.traffic.add(comm.name, nbytes_sent)
        group = comm.process_group()
        try:
            self.work = call(group=group, async_op=True)
        except (RuntimeError, ValueError) as error:
            raise self._failed(error) from error
        self._group = group.group_name
        _ISSUED[self._group] += 1
        self._number = _ISSUED[self._group]

    def stuck(self) -> Stuck:
        """A description of this collective for the other ranks."""
        text = f"{self.op} over '{self.comm.name}'"
        return Stuck(self._group, self._number, self.comm.ranks, text)

    def done(self) -> bool:
        """Whether it has finished (or failed), without waiting."""
        return self.work.is_completed()

    def order(self) -> None:
        """Make the current stream wait for it (on CUDA), or raise if it failed (on the host)."""
        try:
            self.work.wait()
        except RuntimeError as error:
            raise self._failed(error) from error

    def late(self) -> CollectiveTimeoutError:
        """The error to raise if it does not finish in time."""
        return CollectiveTimeoutError(
            message(
                f"{self.op} over '{self.comm.name}' did not finish in {self.comm.timeout_s:g} s",
                [f"waiting: rank {dist.get_rank()} of {name_ranks(self.comm.ranks)}"],
                fix="look for a rank that stopped, or that calls other verbs",
            )
        )

    def _failed(self, error: Exception) -> CollectiveError:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return CollectiveError(
            message(
                f"{self.op} over '{self.comm.name}' failed: {first}",
                [f"on rank {dist.get_rank()}; its group is {name_ranks(self.comm.ranks)}"],
                fix="look at the other ranks' errors, then make new groups: these are broken",
            )
        )


class Pending:
    """A collective in flight over all of its levels; it keeps its buffers alive until `wait`.

    Args:
      steps: a generator that issues one level after the other and returns the result.
      comms: the communicator of each collective that `steps` will issue, in order.
      keep: every tensor that these read or write.
      device: where the tensors live.
      purpose: 'gather' or 'reduce'; each has its own stream on CUDA.
    """

    def __init__(
        self,
        steps: Steps,
        comms: Sequence[Comm],
        *,
        keep: Sequence[Tensor],
        device: torch.device,
        purpose: str,
    ) -> None:
        self._steps, self._comms, self._keep = steps, comms, keep
        self._issued: Issued | None = None
        self._result: Tensor | None = None
        self._event: Any = None
        self._device = device
        self.finished = False  # whether the host has nothing left to issue or to wait for
        self.level = 0  # number of collectives issued so far
        for comm in comms:
            comm.queue.append(self)
        if device.type == "cuda":
            self._run_on_stream(_side_stream(device, purpose))
            return
        self.push()
        if not self.finished:  # else nobody would look at it again, and its result would stay
            comms[0].life.active.append(self)

    def _run_on_stream(self, side: Any) -> None:
        # The inputs must be complete, and earlier readers of the output done.
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            while not self.finished:
                if self._issued is not None:
                    self._issued.order()
                self._advance()
            self._event = side.record_event()

    def push(self) -> bool:
        """Advance as far as possible without waiting; returns whether anything changed."""
        moved = False
        while not self.finished and (self._issued is None or self._issued.done()):
            if self.level < len(self._comms) and self._comms[self.level].queue[0] is not self:
                break  # see [Note: order on a communicator]
            if self._issued is not None:
                issued, self._issued = self._issued, None
                self._guard(issued.order)
            self._advance()
            moved = True
        return moved

    def _advance(self) -> None:
        """Issue the next level, or finish."""
        try:
            self._issued = self._guard(self._steps.__next__)
            self._comms[self.level].queue.popleft()
            self.level += 1
        except StopIteration as stop:
            self._result = stop.value
            self.finished = True

    def _guard(self, step: Callable[[], Any]) -> Any:
        """Run a step; if it fails, leave every queue, so that no other collective waits for it."""
        try:
            return step()
        except StopIteration:
            raise
        except BaseException:
            self._abandon()
            raise

    def _abandon(self) -> None:
        self.finished, self._issued = True, None
        for comm in self._comms[self.level :]:
            comm.queue.remove(self)

    @property
    def stuck(self) -> Stuck | None:
        """The collective that is in flight and not done, if any."""
        issued = self._issued
        return None if issued is None or issued.done() else issued.stuck()

    def check_time(self, waited_s: float) -> None:
        """Give up and raise if the collective in flight has exceeded its timeout."""
        issued = self._issued
        if issued is not None and waited_s > issued.comm.timeout_s:
            self._abandon()
            raise issued.late()

    def passed(self, levels: int) -> bool:
        """Whether so many levels are done, without waiting."""
        return self.finished or self.level > levels

    def wait(self) -> Tensor:
        """Wait for the result, ready for the current stream; a second call returns it again."""
        if not self.finished:
            wait_until(self._comms[0].life, lambda: self.finished)
        if self._event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)
            self._event = None
        self._keep = ()
        if self._result is None:
            raise CollectiveError("this collective failed before; its result does not exist")
        return self._result

    def __del__(self) -> None:
        # Buffers must outlive the transfer even if nobody waits for the result.
        if getattr(self, "_event", None) is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)


def push_all(life: Life) -> bool:
    """Advance every collective in flight without waiting; returns whether anything changed."""
    if not life.active:
        return False
    moved = False
    for pending in list(life.active):
        moved |= pending.push()
    life.active[:] = [pending for pending in life.active if not pending.finished]
    return moved


def wait_until(life: Life, done: Callable[[], bool]) -> None:
    """Advance all collectives until `done()`, and sleep in between, so that Ctrl-C works at once.

    Raises:
      CollectiveTimeoutError: there was no progress for the timeout of a collective in flight.
      DesyncError: ranks wait for each other, or some of them left the schedule.
    """
    since = stalled = time.monotonic()
    looked = False
    try:
        while True:
            if push_all(life):
                since = stalled = time.monotonic()
            if done():
                return
            if not life.active:
                raise CollectiveError("this wait cannot end: the collective failed before")
            now = time.monotonic()
            if now - stalled > _STALL_S:
                stalled, looked = now, True
                life.look([s for pending in life.active if (s := pending.stuck)], _ISSUED)
            for pending in life.active:
                pending.check_time(now - since)
            # Sleep in proportion to the wait so far, so that polling costs little time and delay.
            time.sleep(min(_LONGEST_SLEEP_S, max(_SHORTEST_SLEEP_S, (now - since) / 25)))
    finally:
        if looked:
            life.moved()


def wait_all(pendings: Sequence[Pending]) -> list[Tensor]:
    """Wait for several collectives, whose levels overlap; returns their results in order."""
    return [pending.wait() for pending in pendings]


@cache
def _side_stream(device: torch.device, purpose: str) -> Any:
    # The next step waits for reductions, so they have priority on the device.
    return torch.cuda.Stream(device, priority=-1 if purpose == "reduce" else 0)

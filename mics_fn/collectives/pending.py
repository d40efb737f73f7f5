"""`Pending`: a collective in flight, with several levels, bounded waits, and others beside it.

[Note: order on a communicator] Every rank must issue the collectives of one communicator in the
same order. A `Pending` therefore enters the queue of each communicator that it will use when it is
started, and issues a level only when it is the first in that queue. So the order on every
communicator is the order in which collectives were started, which the program decides. *When* a
level is issued may depend on timing: a wait for any collective advances all of them.

[Note: streams] On an accelerator the host issues all levels at once and never waits. Each
communicator has a stream of its own, so that only what the program orders is in order: hop 1 of one
bucket runs beside hop 2 of another. The first stream waits for the stream of the caller, each
further one for that of the level before; what a collective computes between two levels runs on the
stream of the level before. `wait` makes the current stream wait for the last one. Until then the
`Pending` references every tensor that its collectives read or write, so that no allocator hands out
their memory too early, and `record_stream` is not needed.

[Note: memory that is still sent] A gather reads this rank's chunk until it is done, and the other
ranks may need what it sends although this one does not: a bucket that was fetched ahead is perhaps
never used here. So a verb that writes into the memory of shards waits for such gathers first. All
ranks have started them by then, or will in their own order, so it waits no longer than a use would.
In a steady step there are none, because the end of a run has waited for all of them.

[Note: waits] A host that waits sleeps on what is in flight before the level that it waits for, and
wakes up as soon as that is done. It looks up from time to time all the same: for Ctrl-C, for what
other ranks say of failures, and, where others are under way, for those that have come a level
further. A `Task` is issued like a collective, in the order of a queue of its own. So a fetch that
begins with a file waits as any other does.
"""

import time
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn
from weakref import WeakSet, ref

import torch
import torch.distributed as dist
from torch import Tensor

from mics_fn import _torch, spans
from mics_fn.errors import CollectiveError, first_line, name_ranks
from mics_fn.groups import Comm, GroupState
from mics_fn.store import Stuck, call_text
from mics_fn.threads import Job, give_way

Steps = Generator["Collective", None, Tensor]
What = tuple[str, str, Hashable]  # the verb or "", what it does, and to what: a bucket or ""

# What a `Pending` is at a time: its next level waits for its turn, or is in flight, or it is over.
QUEUED, IN_FLIGHT, DONE, FAILED = "queued", "in flight", "done", "failed"
_UNDER_WAY = QUEUED, IN_FLIGHT


class Pending:
    """A collective in flight over all of its levels; it keeps its buffers alive until `wait`.

    Args:
      steps: a generator that issues one level after the other and returns the result.
      comms: the communicator of each collective that `steps` will issue, in order.
      keep: every tensor that these read or write; the first has the same size on all ranks.
      device: where the tensors live.
      what: the verb, what it does and to what; all ranks compare it.
      reads: memory that other ranks may still need; see [Note: memory that is still sent].

    Raises:
      DesyncError: ranks are about to do different things; see `faults.order`.
      GroupsError: the groups were closed or have failed, or another thread uses them.

    Example:
      >>> route = make_groups(1).hierarchy.route
      >>> pending = collectives.levels.start_all_gather(route, torch.ones(3))
      >>> pending.wait().shape, pending.state
      (torch.Size([1, 3]), 'done')
    """

    def __init__(
        self,
        steps: Steps,
        comms: Sequence[Comm],
        *,
        keep: Sequence[Tensor],
        device: torch.device,
        what: What,
        reads: Tensor | None = None,
    ) -> None:
        self._call = (*what, keep[0].nbytes)
        if spans.observers:
            spans.calling(call_text(self._call), keep[:1], comms)
        self._steps, self._comms, self._keep = steps, comms, list[Any](keep)
        self._device, self._on_device = device, _torch.is_async(device)
        self.state = QUEUED
        self.level = 0  # number of collectives issued so far
        self._collective: Any = None  # that is in flight
        self._work: Any = None  # of it
        self._flight: Any = spans.UNSEEN
        self._numbers: list[int] = []  # of this call over each of `comms`
        self.ready: torch.Event | None = None  # on an accelerator: over once the result is there
        self.reads = reads if comms else None
        with self._span(parts=bool(comms)) if spans.seen() else spans.UNSEEN:
            self._start()
        if reads is not None and comms:
            _READERS.add(self)

    # It starts, with all that it can do at once.

    def _start(self) -> None:
        """Compare the call between ranks, queue it, and advance it as far as possible."""
        if not self._comms:
            self.push()
            self.ready = _torch.record(self._device) if self._on_device else None
            return
        state, queued = self._comms[0].state, False
        self._comms[0].check_open()
        state.turns.enter()
        state.call = self._call
        try:
            for comm in self._comms:
                comm.calls.add(self._call, partial(push_all, comm.state))
                self._numbers.append(comm.calls.number)
            queued = True
            for comm in self._comms:
                comm.queue.append(self)
            if self._on_device:
                self._run_on_streams(state)
                return
            self.push()
            if self.state in _UNDER_WAY:  # else its result would be kept
                state.active.append(self)
        except BaseException as error:
            if queued:  # the others think that it was started
                self._fail(error)
            raise
        finally:
            state.turns.exit()

    def _run_on_streams(self, state: GroupState) -> None:
        """See [Note: streams]."""
        if state.standing:  # no wait on the host would find out
            state.watch.check(self.stuck)
        with _torch.keep_stream(self._device):
            _torch.follow(self._comms[0].stream(self._device), self._device)
            while self.state is QUEUED:
                self._issue()
            self.ready = state.ready = _torch.record(self._device)

    # It advances: whoever waits for any collective pushes all of them.

    def push(self) -> bool:
        """Advance as far as possible without waiting; returns whether anything changed."""
        comms, moved = self._comms, False
        try:
            while self.state in _UNDER_WAY:
                if self.state is QUEUED:
                    if self.level < len(comms) and comms[self.level].queue[0] is not self:
                        break  # see [Note: order on a communicator]
                    self._issue()
                elif not self._work.is_completed():
                    break
                else:
                    try:
                        self._work.wait()
                    except RuntimeError as error:
                        number = self._numbers[self.level - 1]
                        raise self._collective.failed(error, number, wait=True) from error
                    if self._flight is not spans.UNSEEN:
                        self._flight.stop()
                    self._collective = self._work = None
                    self.state = QUEUED
                moved = True
            return moved
        except BaseException as error:
            self._fail(error)
            raise

    def _issue(self) -> None:
        """Compute what is between two levels, and issue the next one; behind the last one, end."""
        try:
            with _torch.without_torch_func():  # whoever waits may be inside; what was started not
                collective = next(self._steps)
        except StopIteration as stop:
            self._result, self.state = stop.value, DONE
            return
        comm, self._flight = collective.comm, spans.UNSEEN
        if spans.observers:
            spans.calling(f"{collective.op} ({call_text(self._call)})", self._keep[:1], [comm])
        if self._on_device:
            _torch.follow(comm.stream(self._device), self._device)
            self._keep.append(collective)  # with the tensors that only it refers to
        if spans.seen():
            facts = {"nbytes": collective.nbytes_sent, "lasts": not self._on_device}
            self._flight = self._span(comm.name, **facts)
        with self._flight:
            work = collective.issue(self._numbers[self.level], async_op=not self._on_device)
        comm.queue.popleft()
        self.level += 1
        if not self._on_device:
            self._collective, self._work, self.state = collective, work, IN_FLIGHT

    # It is waited for: bounded, and open to Ctrl-C.

    def wait(self) -> Tensor:
        """Wait for the result, ready for the current stream; a second call returns it again.

        Raises:
          CollectiveError: there was no progress for the timeout of a collective in flight.
          GroupsError: its groups were closed or have failed, or another thread uses them.
          DesyncError: ranks wait for each other, or some of them left the schedule.
          PeerFailed: a rank has failed without which this cannot end.
        """
        if not self.finished:
            self.wait_for(len(self._comms))
        if self.ready is not None:
            with self._waiting():
                _torch.wait(self._device, self.ready)
        self._keep.clear()
        if self.state is FAILED:
            raise CollectiveError("this collective failed before; its result does not exist")
        return self._result

    def wait_for(self, levels: int) -> None:
        """Wait until so many levels are done."""
        while not self.passed(levels):
            with self._waiting():  # of those that are seen, each is for one level
                _await(self, min(levels, self._passed + 1) if spans.seen() else levels)

    def passed(self, levels: int) -> bool:
        """Whether so many levels are done, without waiting."""
        return self.level > levels or self.state not in _UNDER_WAY

    @property
    def _passed(self) -> int:
        """How many levels are done."""
        return self.level - (self.state is IN_FLIGHT)

    @property
    def finished(self) -> bool:
        """Whether the host has nothing left to issue or to wait for."""
        return self.state not in _UNDER_WAY

    def __del__(self) -> None:
        # Buffers must outlive the transfer even if nobody waits for the result.
        if getattr(self, "_keep", None) and self.ready is not None:
            _torch.wait(self._device, self.ready)

    # It fails: what other ranks and errors say of it.

    def _fail(self, error: BaseException) -> None:
        """Give it up, and with it its groups: see [Note: failed groups] in `communicator`."""
        self.state, self._collective, self._work = FAILED, None, None
        for comm in self._comms:
            if self in comm.queue:
                comm.queue.remove(self)
        if self._comms:
            self._comms[0].state.fail(error)

    @property
    def stuck(self) -> list[Stuck]:
        """The calls that have to be done before this one is, for the other ranks."""
        op = self._collective.op if self.state is IN_FLIGHT else "a call"
        what = f"({call_text(self._call)})"
        waited = list(zip(self._comms, self._numbers, strict=True))[self._passed :]
        return [
            Stuck(comm.calls.key, number, comm.ranks, f"{op} over '{comm.name}' {what}")
            for comm, number in waited
        ]

    def check_time(self, waited_s: float) -> None:
        """Give up and raise if the collective in flight has exceeded its timeout."""
        if self.state is IN_FLIGHT and waited_s > self._collective.comm.timeout_s:
            state = self._collective.comm.state
            error = state.watch.timeout_error(self._collective.timed_out(), self.stuck)
            self._fail(error)
            raise error

    # It is watched; see [Note: spans] in `spans`.

    def _span(self, level: str = "", **facts: Any) -> Any:
        """All of it, or one of its levels."""
        kind, about = spans.kind_of(self._call[1], level), self._call[2]
        return spans.Span(kind, about, level=level, device=self._device, **facts)

    def _waiting(self) -> Any:
        """A wait for what it does now."""
        if not spans.seen():
            return spans.UNSEEN
        waited = self._comms[self._passed :] or self._comms[-1:]  # the next level, or the last one
        level = waited[0].name if waited else ""
        return spans.Span("wait", self._span(level), device=self._device)


def push_all(state: GroupState) -> bool:
    """Advance every collective in flight without waiting; returns whether anything changed."""
    if not state.active:
        return False
    moved = False
    state.turns.enter()
    try:
        for pending in list(state.active):
            moved |= pending.push()
        state.active[:] = [pending for pending in state.active if not pending.finished]
    finally:
        state.turns.exit()
    return moved


# How long a wait sleeps if nothing wakes it up: alone, and while others may have to advance.
_ALONE, _BESIDE = timedelta(milliseconds=50), timedelta(milliseconds=2)
# A wait without progress reads what other ranks wrote each time the first has passed. One store
# answers all ranks, so the more there are, the less often each of them asks.
_STALL_S, _STALL_S_PER_RANK = 0.25, 1e-4


def _await(pending: Pending, levels: int) -> None:
    """Advance all collectives until one has passed so many levels."""
    state = pending._comms[0].state
    pending._comms[0].check_open()
    state.turns.enter()
    since = stalled = time.monotonic()
    patience = max(_STALL_S, _STALL_S_PER_RANK * len(state.ranks))
    try:
        while True:
            if push_all(state):
                since = stalled = time.monotonic()
            if pending.passed(levels):
                return
            if not state.active:
                raise CollectiveError("this wait cannot end: the collective failed before")
            now = time.monotonic()
            if state.standing:
                state.watch.check(pending.stuck, now - since)
            if now - stalled > patience:
                stalled = now
                state.watch.check(pending.stuck, 0.0)  # others may ask where this rank waits
                state.channel.poll_peers(pending.stuck)
            give_way(now - since)
            for each in state.active:
                each.check_time(now - since)
            _sleep(pending, _ALONE if len(state.active) == 1 else _BESIDE)
    finally:
        state.turns.exit()


def _sleep(pending: Pending, most: timedelta) -> None:
    """Sleep until what a collective waits for first is done, or so long; see [Note: waits]."""
    first = pending
    while first.state is QUEUED and (ahead := first._comms[first.level].queue[0]) is not first:
        first = ahead
    if first.state is not IN_FLIGHT:
        time.sleep(_BESIDE.total_seconds())
        return
    with suppress(RuntimeError):  # of time that is up; another one is raised once it has ended
        first._work.wait(most)


# What a level is: one collective on one communicator, and the error if it fails.


@dataclass(eq=False)
class Collective:
    """One collective on one communicator: what a step of a `Pending` yields, to have it issued.

    Args:
      comm: the communicator.
      op: its name, for error texts.
      call: issues it; takes `group` and `async_op` as torch.distributed does.
      nbytes_sent: what this rank sends.
    """

    comm: Comm
    op: str
    call: Callable[..., Any]
    nbytes_sent: int = 0

    def issue(self, number: int, *, async_op: bool) -> Any:
        """Issue it and return its work; without `async_op` it is queued as any other op."""
        comm = self.comm
        comm.state.traffic.add(comm.name, self.nbytes_sent)
        group = comm.process_group()
        try:
            with _torch.unrecorded(async_op):
                work = self.call(group=group, async_op=async_op)
        except (RuntimeError, ValueError) as error:
            # NCCL says here, too, that an earlier collective lost its peer: at an all-to-all in a
            # plain RuntimeError.
            lost = isinstance(error, dist.DistBackendError) or "NCCL" in str(error)
            raise self.failed(error, number, wait=lost) from error
        comm.calls.issued += 1
        return work

    def timed_out(self) -> CollectiveError:
        """The error to raise if it does not finish in time."""
        comm, fix = self.comm, "look for a rank that stopped, or that calls other verbs"
        text = f"{self.op} over '{comm.name}' did not finish in {comm.timeout_s:g} s"
        lines = [f"waiting: rank {comm.state.rank} of {name_ranks(comm.ranks)}"]
        return CollectiveError(text, lines, fix if comm.size > 1 else "look at the disk")

    def failed(self, error: Exception, number: int, *, wait: bool) -> Exception:
        """What to raise; it may wait for a moment to learn which rank was the cause."""
        comm = self.comm
        text = f"{self.op} over '{comm.name}'"
        lines = [f"on rank {comm.state.rank}; its group is {name_ranks(comm.ranks)}"]
        fix = "look at the other ranks' errors, then make new groups: these are broken"
        own = CollectiveError(f"{text} failed: {first_line(error)}", lines, fix)
        call = Stuck(comm.calls.key, number, comm.ranks, text)
        return comm.state.watch.explained(own, wait=wait, call=call)


# Those that read memory which others write, so that nobody overwrites it.

_READERS: WeakSet[Pending] = WeakSet()


def finish_readers(written: Sequence[Tensor]) -> None:
    """Wait for gathers that still read memory; see [Note: memory that is still sent]."""
    storages: set[int] = set()
    for pending in list(_READERS):
        state = pending._comms[0].state
        has_ended = pending.finished and pending.ready is None
        if has_ended or state.closed or state.failed is not None:
            continue
        storages = storages or set(map(_memory_of, written))
        if _memory_of(pending.reads) in storages:
            pending.wait()


def _memory_of(tensor: Any) -> int:
    """What a tensor lies in: its storage, or its part of a file, which it names `extent`."""
    extent = getattr(tensor, "extent", None)
    return _torch.storage_id(tensor) if extent is None else id(extent)


# `Task`: what a rank does by itself before a collective, such as reading what it is to send.

Work = Callable[[Tensor], Iterator[object]]  # does one part after the other on this memory


class Task(Collective):
    """A copy in parts, made by a thread; or by the host, if it is queued on a stream.

    Args:
      comm: of this rank alone, whose queue and stream it uses.
      op: its name, for error texts.
      call: given the memory to fill, does one part of the work after the other.
    """

    def to(self, memory: Tensor) -> "Task":
        """The same task, which fills this memory."""
        self._job = Job(partial(_fill, self.call, memory, ref(self)))
        return self

    def issue(self, number: int, *, async_op: bool) -> Any:
        """Begin; without `async_op` the host does it now, and what it queues is on this stream."""
        self.comm.check_open()
        if async_op:
            self._job.begin(f"mics_fn {self.op}")
        else:
            self._job.run()
            self.wait()
        return self

    def is_completed(self) -> bool:
        """Whether it has ended, without waiting."""
        return self._job.done.is_set()

    def wait(self, timeout: timedelta | None = None) -> None:
        """Raise what it has raised, once it has ended; or wait for so long."""
        if timeout is None:
            self._job.result()
        else:
            self._job.done.wait(timeout.total_seconds())

    def failed(self, error: Exception, number: int, *, wait: bool) -> NoReturn:
        """Raise its own error, of which no other rank is the cause."""
        raise error


def _fill(work: Work, memory: Tensor, task: ref[Task]) -> None:
    """Do part after part until all are done, or nobody waits for the task any more."""
    # In inference mode what lies elsewhere could not be cut; leaving it records derivatives.
    with torch.inference_mode(mode=False), torch.no_grad():
        place = memory.storage_offset(), memory.size(), memory.stride()
        made = torch.empty(0, dtype=memory.dtype, device=memory.device)  # which may be written
        for _ in work(made.set_(memory.untyped_storage(), *place)):
            if task() is None:
                return

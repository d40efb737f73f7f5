"""`GroupState`: the process groups of one `Groups`, what is in flight on them, and their two ends.

[Note: leaving by an error] To destroy a group of NCCL is collective, and the destructor of one of
gloo waits for what is under way. So a rank that left by an error would wait for the others, which
wait for it, and its traceback would be lost. It abandons its groups instead: it writes down why,
which all other ranks read within about a second, and aborts its groups. Aborting frees
memory, for which a device waits for all of its kernels, those of other groups too, and NCCL may
wait for other ranks of the node. So each group is aborted on a thread of its own, all at once, and
this rank goes on after `_PATIENCE_S` in any case. To close groups while an exception is handled, as
in a `finally`, or after an error that this rank has told and not withdrawn, is to leave by it.

[Note: failed groups] After a collective that failed, or that one rank gave up, ranks no longer know
what the others have sent, and the next one might mix its bytes with theirs. So the first such error
ends the groups: each later use of them raises at once, and says what to call. An error of the
program does not end them, because what is in flight can still be completed.

[Note: forks] A process that is forked from a rank has its connections, but none of the threads that
serve them, and what it sent to the store would be taken for words of the rank. So at a fork all
groups fail in the child, which never destructs them either.
"""

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch.distributed as dist

from mics_fn import _device, _torch
from mics_fn.errors import CollectiveError, GroupsError, MicsError
from mics_fn.groups import peers
from mics_fn.schedules import Channel
from mics_fn.store import LEFT, Stuck, call_text
from mics_fn.threads import start

_PATIENCE_S = 0.5  # how long a rank that leaves by an error waits for its groups to be aborted
_IDLE_S = 0.25  # a wait that long without progress asks whether it can still end
_GRACE_S = 5.0  # after which groups on a device are aborted if their rank has not heard why
_LEARN_S = 1.0  # how long a collective that failed waits to learn which rank was the cause


@dataclass(eq=False)
class GroupState:
    """State shared by all communicators of one `Groups`: what is in flight, and what to destroy."""

    ranks: tuple[int, ...] = ()  # global ranks of the job
    rank: int = 0  # this rank, global
    key: str = ""  # prefix of the keys of these groups in the store
    whole: bool = True  # False if ranks outside the job may hold parts of the same model
    on_device: bool = False  # whether collectives are done by an accelerator, not by the host
    closed: bool = False
    forked: bool = False  # whether this process is a fork of the one that made them
    heartbeat_s: float = 60.0  # a rank that gives no sign for that long has failed
    timeout_s: float = 600.0  # and one that makes no call for that long while others wait for it
    rejoining: bool = False  # whether this process takes a lost rank's place, until `reset`
    processes: Mapping[int, str] = field(default_factory=dict)  # by rank, if the ranks compared it
    failed: str | None = None  # why they are finished; see [Note: failed groups]
    owned: list[dist.ProcessGroup] = field(default_factory=list)  # in the order of creation
    # Calls that drop all other references to them.
    forgets: list[Callable[[], None]] = field(default_factory=list)
    active: list[Any] = field(default_factory=list)  # `Pending`s in flight, oldest first
    step: int | None = None  # the optimizer step under way, for errors
    call: Any = None  # the last call, as `Calls` describes it
    _failed_s: float = 0.0  # seconds since a rank failed; counted only on an accelerator
    aborted: bool = False  # whether collectives in flight on an accelerator were ended
    unraised: BaseException | None = None  # why they failed, if no call of this rank raised it
    # What other ranks said of failures, by rank, first things first; the monitor sets it.
    standing: Mapping[int | None, peers.Failure] = field(default_factory=dict)
    announced: peers.Failure | None = None  # what this rank said of itself last
    stands: bool = False  # whether it has not withdrawn that
    channel: Channel = field(default_factory=Channel)  # of this rank's partition group
    # Of the monitor: tell a failure; make one final (False if it was withdrawn); withdraw that of
    # this rank (False if another rank has given up because of it); look at once, which returns
    # whether some rank gives no sign at present.
    report: Callable[[peers.Failure], None] = lambda failure: None
    make_final: Callable[[peers.Failure], bool] = lambda failure: True
    retract: Callable[[], bool] = lambda: True
    listen: Callable[[], bool] = bool
    on_close: Callable[[], None] = lambda: None  # of the monitor
    recipe: Any = None  # makes groups like these; see `make`
    follows: Any = None  # gives what took the place of these groups in a `reset`
    turns: peers.Turns = field(default_factory=peers.Turns)
    ready: Any = None  # on an accelerator, the event behind the last collective
    # Called by the monitor at each tick, with its store and whether there is news in it.
    listeners: list[Callable[[Any, bool], None]] = field(default_factory=list)
    stops: int = 0  # number of `StopRequest`s so far
    saves: int = 0  # number of checkpoints that were begun on these groups
    works: int = 0  # number of `Parts` so far
    layouts: dict[Any, Any] = field(default_factory=dict)  # of trees; see `shards.opened`
    endings: list[Callable[[], None]] = field(default_factory=list)  # what `close` waits for

    def __post_init__(self) -> None:
        self.idle = peers.Idle(self.ranks, self.rank)
        # The exception that is handled as these groups begin, which is not the reason of their end.
        self.amid = id(sys.exception())
        # Calls by communicator when this rank raised, of the last times; others may be behind.
        self._raised_at: deque[Mapping[str, int]] = deque(maxlen=64)

    @property
    def job(self) -> Any:
        """The channel, on which all ranks of the groups report errors; see `faults.order`."""
        return self.channel

    def fresh(self) -> "GroupState":
        """A new life of the same ranks."""
        kept = {"whole": self.whole, "on_device": self.on_device, "heartbeat_s": self.heartbeat_s}
        return GroupState(self.ranks, self.rank, **kept, timeout_s=self.timeout_s)

    def own(self, group: dist.ProcessGroup) -> None:
        """Take over a process group, which `close` will destroy."""
        self.owned.append(group)
        OPEN.add(self)

    def notify(self, store: Any, changed: bool) -> None:
        """Let those listen who wait for news; called by the monitor at each tick."""
        for listener in list(self.listeners):
            listener(store, changed)

    def fail(self, error: BaseException, *, raised: bool = True) -> None:
        """Note why no collective on these groups can end any more; the first reason stays.

        Args:
          error: why.
          raised: whether a call of this rank raises it; else the next one does.
        """
        if self.failed is None:  # the error itself would keep all that its traceback refers to
            self.failed = f"{type(error).__name__}: {error}".partition("\n")[0]
            self.unraised = None if raised else error

    def check(
        self,
        stuck: Sequence[Stuck] = (),
        idle_s: float = _IDLE_S,
        missing: Sequence[int] = (),
        *,
        made: bool = False,
    ) -> None:
        """Raise if a rank has failed without which a wait cannot end; see [Note: no torn step].

        Args:
          stuck: calls that have to be done.
          idle_s: for how long there was no progress.
          missing: ranks that are waited for, whatever they have called.
          made: whether `stuck` waits for calls, and not until these are issued.

        Raises:
          PeerFailed: another rank failed.
          DesyncError: ranks have told why they fail.
        """
        self.idle.waits(stuck, missing)
        if not self.standing or idle_s < _IDLE_S:
            return
        for failure in list(self.standing.values()):
            if failure.rank == self.rank and not failure.final:
                continue  # the next call withdraws it
            lacks = failure.lacks(stuck, missing, made=made) and not self._shares(failure)
            if lacks or idle_s > self.heartbeat_s:
                self._give_up(failure, stuck[0].text if stuck else "")

    def _shares(self, failure: peers.Failure) -> bool:
        """Return whether this rank raised the same error, so that the other one may continue."""
        if failure.final or self.announced is None:
            return False
        both = {failure.kind, self.announced.kind} == {"interrupted"}
        return both or any(peers.same_place(made, failure.made or {}) for made in self._raised_at)

    def _give_up(self, failure: peers.Failure, waits: str) -> None:
        """Raise the error of a failure, unless it was withdrawn meanwhile."""
        if self.failed is None:
            self.job.raise_reported()
        if not failure.final and not self.make_final(failure):
            return
        raise self.finish(self.first(failure).error(waits))

    def timeout_error(self, error: Exception, stuck: Sequence[Stuck] = ()) -> Exception:
        """The error of a wait beyond `timeout_s`: of the rank that is behind, if one is known.

        Args:
          error: to raise if none is.
          stuck: what this rank waits for; by default all that it has called.
        """
        store: Any = self.job.store
        failure = None if store is None else self.idle.behind(store, self.key, stuck)
        if failure is None:
            self.fail(error)
            return error
        self.report(failure)
        self.standing = {**self.standing, failure.rank: failure}
        return self.finish(failure.error(stuck[0].text if stuck else ""))

    def first(self, failure: peers.Failure) -> peers.Failure:
        """Return the first of the failures that led to this one."""
        seen = set[int | None]()
        while failure.because is not None and failure.rank not in seen:
            seen.add(failure.rank)
            failure = self.standing.get(failure.because if failure.because >= 0 else None, failure)
        return failure

    def explained(self, error: Exception, *, wait: bool, call: Stuck | None = None) -> Exception:
        """The error of a collective that failed: of the rank that caused it, if that is known.

        Args:
          error: to raise if it is not known.
          wait: whether to wait for up to a second to learn of it; longer while some rank gives no
            sign, of which `heartbeat_s` will tell.
          call: what failed; some rank may have closed its groups without a part in it.
        """
        began = time.monotonic()
        deadline = began + _LEARN_S * wait
        try:
            self.job.raise_reported()
        except MicsError as reported:
            return reported
        while len(self.ranks) > 1 and not self.closed:
            failure = next((each for each in self.standing.values() if each.final), None)
            if failure is not None:
                error = self.first(failure).error(str(error).partition("\n")[0])
                break
            closing = None if call is None else self.job.closed(call)
            if closing is not None:
                error = closing
                break
            silent, now = wait and self.listen(), time.monotonic()
            if now > deadline and not (silent and now < began + self.heartbeat_s + _LEARN_S):
                break
            time.sleep(0.02)
        return self.finish(error)

    def finish(self, error: Any) -> Any:
        """Report an error that ends these groups, and return it."""
        self.fail(error)
        self.announce(error, final=True)
        return error

    def announce(self, error: BaseException, *, final: bool, kind: str = "") -> None:
        """Tell the other ranks of an error of this one.

        Args:
          error: the error.
          final: whether these groups are finished; else the next call on them withdraws it.
          kind: of the failure; "" by the type of the error.
        """
        if self.announced is not None and self.announced.final:
            return
        calls = self.channel.calls
        made = {each.key: each.number for each in calls}
        counts = {"made": made, "issued": {each.key: each.issued for each in calls}}
        operation, leaf = "", ""
        if self.call is not None:
            operation, leaf = call_text(self.call), str(self.call[2])
        known = {"step": self.step, "operation": operation, "leaf": leaf, **counts}
        failure = peers.failure_of(error, self.rank, final=final, **known)
        did = "left its groups" if final else "failed"
        text = f"rank {self.rank} {did}: {failure.text}"
        if isinstance(error, SystemExit):
            text = f"rank {self.rank} exited, and its groups were still open"
        self.announced = replace(failure, text=text, kind=kind or failure.kind)
        self.job.raised = self.stands = not final
        self._raised_at.append(counts["made"])
        self.report(self.announced)

    def abandon(self, error: BaseException | None) -> None:
        """Give up the process groups without the other ranks; see [Note: leaving by an error].

        Args:
          error: why; ranks of the job that wait for this one raise an error that names it. None if
            they have been told.
        """
        if self.forked:
            return self._let_go()
        if error is not None:  # first: what is aborted fails elsewhere
            peers.quietly(partial(self.announce, error, final=True))
        tasks = self.on_close, self.job.depart(LEFT)
        if self.on_device and not self.aborted:
            _device.drain(_PATIENCE_S)
        threads = [*self._abort(), *map(_started, tasks)]
        self._let_go()
        deadline = time.monotonic() + _PATIENCE_S
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return None

    def close(self, error: BaseException | None = None) -> None:
        """Destroy the owned process groups, newest first; a second call has no effect.

        Args:
          error: that is handled meanwhile; see [Note: leaving by an error].
        """
        in_order = isinstance(error, GeneratorExit | SystemExit) and not getattr(error, "code", 0)
        if in_order or id(error) == self.amid:
            error = None
        if self.closed:
            return
        if self.stands and self.announced is not None and len(self.ranks) > 1:
            self.make_final(self.announced)
            self.abandon(None)
        elif error is not None or self.failed is not None:
            self.abandon(error or GroupsError(self.failed or ""))
        else:
            for ending in list(self.endings):
                ending()
            self._end("closed its groups", dist.destroy_process_group, _PATIENCE_S)

    def retire(self) -> None:
        """Give up the process groups, as all ranks do; see [Note: retired groups] in `peers`."""
        self._end("called reset", peers.discard, 0.0)

    def _end(self, how: str, end: Callable[[dist.ProcessGroup], None], patience_s: float) -> None:
        """Abort or destroy the process groups; a thread frees the rest."""
        tidy = self.job.depart(how)
        groups = [group for group in self.owned if _torch.is_alive(group)]
        self._let_go()
        peers.quietly(self.on_close)
        if end is peers.discard and self.on_device and not self.aborted:
            _device.drain(_GRACE_S)
            _device.lose_queued()
        for i in reversed(range(len(groups))):
            end(groups[i])
        self.failed = None
        # These refer to what is to be freed.
        self.channel = Channel()
        self.report, self.make_final, self.listen, self.on_close = quiet, bool, bool, quiet
        self.retract = lambda: True
        if groups:
            thread = threading.Thread(target=peers.free, args=(groups, tidy), daemon=True)
            start(thread).join(patience_s)

    def _abort(self) -> list[threading.Thread]:
        """Abort each process group on a thread; see [Note: aborted collectives] in `_device`."""
        if self.on_device and not self.aborted:
            self.aborted = True
            _device.lose_queued()
        groups = [group for group in self.owned if _torch.is_alive(group)]
        return [peers.abort(group) for group in groups]

    def pass_time(self, passed_s: float) -> None:
        """Count the time without a call; called by the monitor at each tick."""
        calls = {calls.key: (calls.number, calls.issued) for calls in list(self.job.calls)}
        self.idle.pass_time(calls, passed_s)

    def overdue(self, store: Any) -> peers.Failure | None:
        """The rank that is behind, if this one's device has waited for `timeout_s`.

        If none is, the groups have failed: a host that waits for a device finds that out nowhere.
        """
        waits = self.on_device and self.idle.seconds > self.timeout_s and self.failed is None
        if not waits or self.ready is None or self.ready.query():
            return None
        failure = self.idle.behind(store, self.key)
        if failure is None:
            text = f"the device of rank {self.rank} waits for a collective for {self.timeout_s:g} s"
            self.fail(CollectiveError(text), raised=False)
            self._abort()
        return failure

    def end_blocked_waits(self, passed_s: float) -> None:
        """Abort the groups of an accelerator once a rank, or a collective, has failed.

        A host that waits for a device is in C++, and hears nothing until collectives there end.
        Those in flight have `_GRACE_S` to end by themselves.

        Args:
          passed_s: since this was called last.
        """
        final = self.failed is not None or any(each.final for each in self.standing.values())
        if not self.on_device or self.aborted or not final:
            self._failed_s = 0.0
            return
        self._failed_s += passed_s
        if self._failed_s > _GRACE_S:
            if self.failed is None:
                failure = self.first(next(iter(self.standing.values())))
                self.fail(failure.error("a result of its device"), raised=False)
            self._abort()

    def _let_go(self) -> None:
        self.closed = True
        self.active.clear()
        self.owned.clear()
        OPEN.discard(self)
        while self.forgets:
            self.forgets.pop()()


OPEN: set[GroupState] = set()  # what owns process groups, until it is closed


def quiet(*announced: Any) -> None:
    """Do nothing, in the place of a function that reported to others."""


def end_in_fork(error: Exception) -> None:
    """Let all open groups fail in a process that was forked from a rank."""
    for state in OPEN:
        state.fail(error)
        state.forked, state.turns = True, peers.Turns()
        state.active.clear()
    OPEN.clear()


def never_destruct() -> None:
    """Keep torch from destructing open groups of gloo, which would wait for the other ranks."""
    for group in [group for state in OPEN for group in state.owned]:
        if _torch.is_alive(group) and dist.get_backend(group) == "gloo":
            _torch.never_destruct(group)


def _started(task: Callable[[], None]) -> threading.Thread:
    return start(threading.Thread(target=peers.quietly, args=(task,), daemon=True))


# Errors of a program, of which the other ranks hear.


@contextmanager
def reports_step(state: GroupState, step: int) -> Iterator[None]:
    """Context of the step with this number; its error is reported to the other ranks."""
    state.step = step
    with reports(BaseException):
        yield


def announce_all(error: BaseException, *, final: bool = False, kind: str = "") -> None:
    """Report an error of this rank to the ranks of all open groups, as `GroupState.announce`."""
    for state in list(OPEN):
        peers.quietly(partial(state.announce, error, final=final, kind=kind))


@contextmanager
def reports(kind: type[BaseException]) -> Iterator[None]:
    """Context whose errors of a class are reported, even if the program catches them."""
    try:
        yield
    except kind as error:
        announce_all(error)
        raise


def withdraw_all(goes_on: GroupState | None = None) -> None:
    """Withdraw the report of `announce_all`, because this rank continues.

    Args:
      goes_on: the life of the groups on which it makes its next call; None if there are none.

    Raises:
      PeerFailed: another rank of these groups has given up because of it.
    """
    for state in list(OPEN):
        announced = state.announced
        if announced is None or announced.final or state.retract():
            state.stands = False
            continue
        state.announced = replace(announced, final=True)
        state.fail(announced.error(""))
        if state is goes_on:
            raise announced.error("")


# What a process that was forked from a rank may do, such as a worker of a loader.

NO_FORK = "use groups in the process that made them only; the workers of a loader need none"

_inherited: list[Any] = []  # in a fork of a rank: the store of the rank


def check_fork(what: str) -> None:
    """Raise GroupsError in a fork of a rank, which must not use the rank's store.

    Args:
      what: what was called.
    """
    if _inherited and dist.is_initialized() and _torch.default_store() is _inherited[0]:
        raise GroupsError(f"{what}: this process is a fork of a rank", fix=NO_FORK)


def _after_fork() -> None:
    end_in_fork(GroupsError("this process is a fork of a rank"))
    if dist.is_available() and dist.is_initialized():
        _inherited[:] = [_torch.default_store()]
        for kept in (*_torch.groups_named(None), *_inherited):
            _torch.never_destruct(kept)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)

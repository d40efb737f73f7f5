"""`GroupState`: the process groups of one `Groups`, what is in flight on them, and their two ends.

It knows nothing of why ranks fail. Whoever watches them puts a `Watch` in the place of the one that
does nothing, and functions into `hooks`; see `mics_fn.faults`. Without these all verbs work, and a
rank that is lost is found by `timeout_s`.

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

[Note: one thread at a time] A second thread that used communicators while a first one uses them
would issue collectives in between, in an order that other ranks do not have. It is refused. But
threads may take turns, as those do in which autograd runs backward on an accelerator, while the
first one waits for them. So a whole step keeps others from steps of their own, and only what issues
collectives or waits for them keeps others from all communicators.

[Note: retired groups] Collectives may still be under way on groups that ranks let go of, after an
error. gloo's destructor waits for them, without the lock of the interpreter. They end once every
rank has let go, for at least one of the ranks has nothing under way on a group, and those that wait
for it fail then. So a thread waits for it, one group after the other, in one order on all ranks.
"""

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakSet

import torch.distributed as dist

from mics_fn import _device, _torch, errors
from mics_fn.errors import GroupsError
from mics_fn.schedules import Channel
from mics_fn.store import LEFT, Store, Stuck
from mics_fn.threads import start

_PATIENCE_S = 0.5  # how long a rank that leaves by an error waits for its groups to be aborted
_GRACE_S = 5.0  # what is in flight on a device has to end, once all ranks let go of their groups

# `Turns`: which thread uses the communicators of some groups.


class Turns:
    """See [Note: one thread at a time]."""

    def __init__(self) -> None:
        self._use, self._step = threading.RLock(), threading.RLock()
        self._stepping = False  # in the thread that holds the second one

    def enter(self) -> None:
        """Begin to use the communicators, until `exit`.

        Raises:
          GroupsError: another thread uses them.
        """
        if not self._use.acquire(blocking=False):
            raise _refused()

    def exit(self) -> None:
        """End what `enter` began."""
        self._use.release()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """A block, such as an evaluation, during which no other thread may begin another one.

        Raises:
          GroupsError: another thread is in one.
        """
        if not self._step.acquire(blocking=False):
            raise _refused()
        try:
            yield
        finally:
            self._step.release()

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Such a block in which this thread may not begin another step, either.

        The gradients of the first one would be applied to parameters that the second has changed.

        Raises:
          GroupsError: this thread is in a step, or another one in a block.
        """
        with self.alone():
            if self._stepping:
                text = "a step begins inside of another one of the same groups"
                raise GroupsError(text, fix="let the loss compute, and step after it")
            self._stepping = True
            try:
                yield
            finally:
                self._stepping = False


def _refused() -> GroupsError:
    name = threading.current_thread().name
    text = f"thread {name!r} uses groups that another thread is using"
    return GroupsError(text, fix="call the verbs of one set of groups in one thread")


# How process groups are let go of that nobody uses any more.


def discard(group: dist.ProcessGroup) -> None:
    """Discard a process group without waiting for its collectives."""
    if dist.get_backend(group) == "gloo":
        dist.destroy_process_group(group)
    else:
        abort_group(group)


_ABORTS = WeakSet[threading.Thread]()


def abort_group(group: dist.ProcessGroup) -> threading.Thread:
    """Abort a process group on a thread, which is returned."""
    task = partial(quietly, partial(_torch.abort, group))
    _ABORTS.add(thread := start(threading.Thread(target=task, daemon=True)))
    return thread


def end_aborts(patience_s: float) -> None:
    """Wait for aborts at exit: a thread that returns from C++ after Python ends the process."""
    deadline = time.monotonic() + patience_s
    for thread in list(_ABORTS):
        thread.join(max(0.0, deadline - time.monotonic()))


def free(groups: list[dist.ProcessGroup], tidy: Callable[[], None]) -> None:
    """Destruct process groups to which nothing else refers, the oldest first.

    Args:
      groups: emptied.
      tidy: called before.
    """
    quietly(tidy)
    while groups:
        del groups[0]


def quietly(task: Callable[[], None]) -> None:
    """Call something that may fail because other ranks or the store are gone already."""
    with suppress(Exception):
        task()


# What ranks tell each other of an error.

_MOST_TEXT, _MOST_TRACE = 1_000, 8_000  # characters of an error that other ranks are told


@dataclass(frozen=True)
class Failure:
    """What is known of a rank that failed."""

    rank: int | None
    kind: str
    text: str  # what happened, in one line
    step: int | None = None
    operation: str = ""
    leaf: str = ""
    trace: str = ""
    made: dict[str, int] | None = None  # calls by communicator; None if it could not say
    issued: dict[str, int] | None = None  # those of them that were issued
    final: bool = True  # whether it cannot be withdrawn
    because: int | None = None  # it gave up because of this rank; -1: of the store
    file_error: list[str] | None = None  # of an `FileError`: file, leaf, and more of its text

    def lacks(self, stuck: Sequence[Stuck], missing: Sequence[int], *, made: bool) -> bool:
        """Whether this rank will never do a part of what another one waits for.

        Args:
          stuck: calls that have to be done, or heard of.
          missing: ranks that are waited for, whatever they have done before.
          made: whether it is enough to have made the calls, or whether they must be issued.
        """
        counts = self.made if made else self.issued
        if counts is None or self.rank is None or self.rank in missing:
            return True
        return any(
            self.rank in each.ranks and counts.get(each.group, 0) < each.number for each in stuck
        )

    def error(self, waits: str, *, ends: bool = True) -> errors.PeerFailed:
        """Return the PeerFailed of ranks that wait for this one; `ends`: of their groups, too."""
        at = "" if self.step is None else f"in step {self.step}"
        last = f"its last call: {self.operation}" if self.operation else ""
        own = f"this rank waits for {waits}" if waits and self.kind != "replaced" else ""
        path, leaf, *said = self.file_error or ["", ""]
        where = [*said[:-1], ", ".join(part for part in (at, last) if part), own]
        fix = "look at its own error, then call groups = mf.reset(groups) on all ranks"
        if self.kind in ("killed", "exited", "silent"):
            fix = "look at its own output; start it again, and call mf.reset(groups) or"
            fix += " trainer.reset() on all ranks; or start the job again"
        if self.kind == "replaced":
            fix = "end this process; the job goes on with the one that took its place"
        if self.kind == "stalled":
            fix = (
                "look what it does there, pass a larger timeout_s= if it may take so long, and call"
            )
            fix += " groups = mf.reset(groups) on all ranks"
        if said:
            also = "; then call groups = mf.reset(groups) on all ranks" if ends else ""
            fix = f"{said[-1]}{also}"
        found = errors.PeerFailed(
            errors.message(self.text, [line for line in where if line], fix),
            self.rank,
            self.kind,
            step=self.step,
            operation=self.operation or waits,
            leaf=self.leaf,
            remote_traceback=self.trace,
        )
        return errors.PeerFileError(found, path, leaf) if said else found


def failure_of(error: BaseException, rank: int, **known: Any) -> Failure:
    """Describe an error of this rank as a `Failure`."""
    first = f"{type(error).__name__}: {error}".partition("\n")[0][:_MOST_TEXT]
    kind = "interrupted" if isinstance(error, KeyboardInterrupt) else "raised"
    trace = "".join(traceback.format_exception(error))[-_MOST_TRACE:]
    because = None
    if isinstance(error, errors.PeerFailed):
        because = -1 if error.rank is None else error.rank
    file_error = None
    if isinstance(error, errors.FileError):
        said = [line.strip().removeprefix("fix: ") for line in str(error).split("\n")[1:]]
        file_error = [f"{error.path}", f"{error.leaf}", *said]
    return Failure(rank, kind, first, trace=trace, because=because, file_error=file_error, **known)


# What is asked and told of the other ranks.


class Watch:
    """What groups ask and tell of failures of ranks; this one knows of none.

    Args:
      state: of the groups.
    """

    def __init__(self, state: "GroupState") -> None:
        self.state = state

    def begin(self, meeting: Any) -> None:
        """Take the key and the members of a meeting, and begin to read what ranks say."""
        state = self.state
        state.epoch, state.members, state.key = meeting.epoch, meeting.members, meeting.key

    def check(self, *stuck: Any, **how: Any) -> None:
        """Raise if a rank has failed without which a wait cannot end."""

    def explained(self, error: Exception, **how: Any) -> Exception:
        """The error of a collective that failed: of the rank that caused it, if that is known."""
        return self.state.finish(error)

    def timeout_error(self, error: Exception, stuck: Sequence[Stuck] = ()) -> Exception:
        """The error of a wait beyond `timeout_s`: of the rank that is behind, if one is known."""
        return self.explained(error)

    def announce(self, error: BaseException, *, final: bool, kind: str = "") -> None:
        """Tell the other ranks of an error of this one."""

    def retract(self) -> Exception | None:
        """Withdraw what this rank has announced; the error if another one has given up by then."""

    def stands(self) -> bool:
        """Whether other ranks were told of an error that was not withdrawn; then it is final."""
        return False

    def close(self) -> None:
        """End, as this rank closes the groups."""


def _alone(
    store: Any, rank: int, world_size: int, timeout_s: float, lost: Callable[..., Exception]
) -> AbstractContextManager[tuple[Store, int | None]]:
    return nullcontext((store, None))


@dataclass
class Hooks:
    """What `mics_fn.faults` puts into groups; by default nothing."""

    # A block in which ranks meet before any groups exist: gives the store to meet in, and the
    # number of the start that this process comes back into. `lost` makes an error of the store.
    enter: Callable[..., AbstractContextManager[tuple[Store, int | None]]] = _alone
    # What ranks agreed on in this call of `make_groups`, in a process that comes back.
    agreed_before: Callable[[Sequence[int], int, float], Any] = lambda ranks, rank, timeout_s: None
    # Watch the ranks of groups that are about to be made; gives the store of their messages.
    join: Callable[["GroupState", float], Store] = lambda state, timeout_s: _torch.default_store()
    # Seconds without a sign of life after which a rank has failed, from the argument.
    limit_s: Callable[[float | None, int], float] = lambda given, ranks: given or 60.0
    # Compare states between ranks, for a call: at which step they are, and with which options.
    compare: Callable[[str, Any, Sequence[Any]], None] = lambda verb, state, homes: None


hooks = Hooks()  # of this process


@dataclass(eq=False)
class GroupState:
    """State shared by all communicators of one `Groups`: what is in flight, and what to destroy."""

    ranks: tuple[int, ...] = ()  # global ranks of the job
    rank: int = 0  # this rank, global
    key: str = ""  # prefix of the keys of these groups in the store
    epoch: int = 0  # in which their ranks have met; see [Note: the epoch of membership]
    members: Mapping[int, int] = field(default_factory=dict)  # rank -> since when its process is
    whole: bool = True  # False if ranks outside the job may hold parts of the same model
    on_device: bool = False  # whether collectives are done by an accelerator, not by the host
    closed: bool = False
    forked: bool = False  # whether this process is a fork of the one that made them
    heartbeat_s: float = 60.0  # a rank that gives no sign for that long has failed
    timeout_s: float = 600.0  # and one that makes no call for that long while others wait for it
    rejoining: bool = False  # whether this process takes a lost rank's place, until `reset`
    failed: str | None = None  # why they are finished; see [Note: failed groups]
    owned: list[dist.ProcessGroup] = field(default_factory=list)  # in the order of creation
    # Calls that drop all other references to them.
    forgets: list[Callable[[], None]] = field(default_factory=list)
    active: list[Any] = field(default_factory=list)  # `Pending`s in flight, oldest first
    step: int | None = None  # the optimizer step under way, for errors
    call: Any = None  # the last call, as `Calls` describes it
    aborted: bool = False  # whether collectives in flight on an accelerator were ended
    unraised: BaseException | None = None  # why they failed, if no call of this rank raised it
    # What other ranks said of failures, by rank, first things first; the monitor sets it.
    standing: Mapping[int | None, Failure] = field(default_factory=dict)
    channel: Channel = field(default_factory=Channel)  # of this rank's partition group
    recipe: Any = None  # makes groups like these; see `make`
    follows: Any = None  # gives what took the place of these groups in a `reset`
    turns: Turns = field(default_factory=Turns)
    ready: Any = None  # on an accelerator, the event behind the last collective
    # Called by the monitor at each tick, with its store and whether there is news in it.
    listeners: list[Callable[[Any, bool], None]] = field(default_factory=list)
    stops: int = 0  # number of `StopRequest`s so far
    saves: int = 0  # number of checkpoints that were begun on these groups
    works: int = 0  # number of `Parts` so far
    layouts: dict[Any, Any] = field(default_factory=dict)  # of trees; see `shards.opened`
    endings: list[Callable[[], None]] = field(default_factory=list)  # what `close` waits for

    def __post_init__(self) -> None:
        self.watch = Watch(self)
        # The exception that is handled as these groups begin, which is not the reason of their end.
        self.amid = id(sys.exception())

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

    def fail(self, error: BaseException, *, raised: bool = True) -> None:
        """Note why no collective on these groups can end any more; the first reason stays.

        Args:
          error: why.
          raised: whether a call of this rank raises it; else the next one does.
        """
        if self.failed is None:  # the error itself would keep all that its traceback refers to
            self.failed = f"{type(error).__name__}: {error}".partition("\n")[0]
            self.unraised = None if raised else error

    def finish(self, error: Any) -> Any:
        """Report an error that ends these groups, and return it."""
        self.fail(error)
        self.watch.announce(error, final=True)
        return error

    def abandon(self, error: BaseException | None) -> None:
        """Give up the process groups without the other ranks; see [Note: leaving by an error].

        Args:
          error: why; ranks of the job that wait for this one raise an error that names it. None if
            they have been told.
        """
        if self.forked:
            return self._let_go()
        if error is not None:  # first: what is aborted fails elsewhere
            quietly(partial(self.watch.announce, error, final=True))
        tasks = self.watch.close, self.job.depart(LEFT)
        if self.on_device and not self.aborted:
            _device.drain(_PATIENCE_S)
        threads = [*self.abort(), *map(_started, tasks)]
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
        if self.watch.stands():
            self.abandon(None)
        elif error is not None or self.failed is not None:
            self.abandon(error or GroupsError(self.failed or ""))
        else:
            for ending in list(self.endings):
                ending()
            self._end("closed its groups", dist.destroy_process_group, _PATIENCE_S)

    def retire(self) -> None:
        """Give up the process groups, as all ranks do; see [Note: retired groups]."""
        self._end("called reset", discard, 0.0)

    def _end(self, how: str, end: Callable[[dist.ProcessGroup], None], patience_s: float) -> None:
        """Abort or destroy the process groups; a thread frees the rest."""
        tidy = self.job.depart(how)
        groups = [group for group in self.owned if _torch.is_alive(group)]
        self._let_go()
        quietly(self.watch.close)
        if end is discard and self.on_device and not self.aborted:
            _device.drain(_GRACE_S)
            _device.lose_queued()
        for i in reversed(range(len(groups))):
            end(groups[i])
        self.failed = None
        # These refer to what is to be freed.
        self.channel, self.watch = Channel(), Watch(self)
        if groups:
            thread = threading.Thread(target=free, args=(groups, tidy), daemon=True)
            start(thread).join(patience_s)

    def abort(self) -> list[threading.Thread]:
        """Abort each process group on a thread; see [Note: aborted collectives] in `_device`."""
        if self.on_device and not self.aborted:
            self.aborted = True
            _device.lose_queued()
        groups = [group for group in self.owned if _torch.is_alive(group)]
        return [abort_group(group) for group in groups]

    def _let_go(self) -> None:
        self.closed = True
        self.active.clear()
        self.owned.clear()
        OPEN.discard(self)
        while self.forgets:
            self.forgets.pop()()


OPEN: set[GroupState] = set()  # what owns process groups, until it is closed


def end_in_fork(error: Exception) -> None:
    """Let all open groups fail in a process that was forked from a rank."""
    for state in OPEN:
        state.fail(error)
        state.forked, state.turns = True, Turns()
        state.active.clear()
    OPEN.clear()


def never_destruct() -> None:
    """Keep torch from destructing open groups of gloo, which would wait for the other ranks."""
    for group in [group for state in OPEN for group in state.owned]:
        if _torch.is_alive(group) and dist.get_backend(group) == "gloo":
            _torch.never_destruct(group)


def _started(task: Callable[[], None]) -> threading.Thread:
    return start(threading.Thread(target=quietly, args=(task,), daemon=True))


# Errors of a program, of which the other ranks hear.


@contextmanager
def reports_step(state: GroupState, step: int) -> Iterator[None]:
    """Context of the step with this number; its error is reported to the other ranks."""
    state.step = step
    with reports(BaseException):
        yield


def announce_all(error: BaseException, *, final: bool = False, kind: str = "") -> None:
    """Report an error of this rank to the ranks of all open groups, as `Watch.announce`."""
    for state in list(OPEN):
        quietly(partial(state.watch.announce, error, final=final, kind=kind))


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
      goes_on: the state of the groups on which it makes its next call; None if there are none.

    Raises:
      PeerFailed: another rank of these groups has given up because of it.
    """
    for state in list(OPEN):
        error = state.watch.retract()
        if error is not None and state is goes_on:
            raise error


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

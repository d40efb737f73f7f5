"""`Comm`, and `GroupState`: the process groups of one `Groups`, what is in flight, and their ends.

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
program does not end them, because what is in flight can still be completed; but one in a step does,
as other ranks may have taken it: see `optim.state`.

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
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist

from mics_fn import _torch, errors
from mics_fn.errors import GroupsError, name_ranks
from mics_fn.groups.topology import fold_ranks
from mics_fn.store import Calls, Channel, Store, Stuck
from mics_fn.threads import Job, ended

_PATIENCE_S = 0.5  # how long a rank that leaves by an error waits for its groups to be aborted
_GRACE_S = 5.0  # what is in flight on a device has to end, once all ranks let go of their groups

# `Turns`: which thread uses the communicators of some groups.


class Turns:
    """See [Note: one thread at a time]."""

    def __init__(self) -> None:
        self._use, self._step = threading.RLock(), threading.RLock()
        self.exit = self._use.release  # ends what `enter` began
        self._stepping = False  # in the thread that holds the second one

    def enter(self) -> None:
        """Begin to use the communicators, until `exit`.

        Raises:
          GroupsError: another thread uses them.
        """
        if not self._use.acquire(blocking=False):
            raise _refused()

    @contextmanager
    def alone(self, *, step: bool = False) -> Iterator[None]:
        """A block, such as an evaluation, during which no other thread may begin another one.

        Args:
          step: whether it is a step, in which this thread may not begin another block, either. The
            gradients of this one would be applied to parameters that the other one has changed. And
            hooks of backward run on another thread on an accelerator: so none of them can.

        Raises:
          GroupsError: another thread is in a block, or this one in a step.
        """
        if not self._step.acquire(blocking=False):
            raise _refused()
        before = self._stepping
        try:
            if before:
                what = "a step begins inside of another one" if step else "an evaluation in a step"
                fix = "let the loss and its backward compute, and call it after the step"
                raise GroupsError(f"{what} of the same groups", fix=fix)
            self._stepping = step or before
            yield
        finally:
            self._stepping = before
            self._step.release()


def _refused() -> GroupsError:
    text = f"thread {threading.current_thread().name!r} uses groups that another thread is using"
    return GroupsError(text, fix="call the verbs of one set of groups in one thread")


# How process groups are let go of that nobody uses any more.


_ABORTS = WeakSet[Job]()


def abort_group(group: dist.ProcessGroup) -> Job:
    """Abort a process group on a thread of its own."""
    job = Job(partial(_torch.abort, group)).begin("mics_fn abort")
    _ABORTS.add(job)
    return job


def end_aborts(patience_s: float) -> None:
    """Wait for aborts at exit: a thread that returns from C++ after Python ends the process."""
    ended(_ABORTS, patience_s)


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
        self.state.members, self.state.key = meeting.members, meeting.key

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


@dataclass
class Hooks:
    """What `mics_fn.faults` puts into groups; by default nothing."""

    # A block in which ranks meet before any groups exist: gives the store to meet in, and the
    # number of the start that this process comes back into. `lost` makes an error of the store.
    enter: Callable[..., AbstractContextManager[tuple[Store, int | None]]] = lambda store, *facts: (
        nullcontext((store, None))
    )
    # What ranks agreed on in this call of `make_groups`, in a process that comes back.
    agreed_before: Callable[[Sequence[int], int, float], Any] = lambda ranks, rank, timeout_s: None
    # Watch the ranks of groups that are about to be made; gives the store of their messages.
    join: Callable[["GroupState"], Store] = lambda state: _torch.default_store()
    # Seconds without a sign of life after which a rank has failed, from the argument.
    limit_s: Callable[[float | None, int], float] = lambda given, ranks: given or 60.0
    # Compare states between ranks, for a call: at which step they are, and with which options.
    compare: Callable[[str, Any, Sequence[Any]], None] = lambda verb, state, homes: None
    # Called with True before this process may give no sign of life for long, and with False after.
    busy: Callable[[bool], None] = lambda begins: None


hooks = Hooks()  # of this process


class Traffic:
    """The ledger of a `Groups`: calls and bytes that this rank sent, by purpose.

    Example:
      >>> traffic = Traffic()
      >>> traffic.add("gather node", 4096)
      >>> traffic.snapshot()
      {'gather node': (1, 4096)}
      >>> print(traffic)
      gather node: 4,096 bytes sent in 1 call
    """

    def __init__(self) -> None:
        self.calls, self.sent_bytes = Counter[str](), Counter[str]()

    def add(self, what: str, nbytes: int) -> None:
        """Record one call that sends `nbytes`."""
        self.calls[what] += 1
        self.sent_bytes[what] += nbytes

    def clear(self) -> None:
        """Forget everything, for example between two measured steps."""
        self.calls.clear()
        self.sent_bytes.clear()

    def snapshot(self) -> dict[str, tuple[int, int]]:
        """Purpose -> (calls, bytes sent) so far."""
        return {what: (calls, self.sent_bytes[what]) for what, calls in self.calls.items()}

    def __str__(self) -> str:
        lines = [
            f"{what}: {sent:,} bytes sent in {calls} call{'s' * (calls != 1)}"
            for what, (calls, sent) in self.snapshot().items()
        ]
        return "\n".join(lines) or "nothing sent"


_KEPT = ("ranks", "rank", "whole", "on_device", "heartbeat_s", "timeout_s")
_KEPT = (*_KEPT, "backend", "traffic", "recipe", "first")
SECOND = "replicas, second", "copies, second"  # communicators that `complete` of `make` connects


@dataclass(eq=False)
class GroupState:
    """State shared by all communicators of one `Groups`: what is in flight, and what to destroy."""

    ranks: tuple[int, ...] = ()  # global ranks of the job
    rank: int = 0  # this rank, global
    key: str = ""  # prefix of the keys of these groups in the store
    members: Mapping[int, int] = field(default_factory=dict)  # rank -> since when its process is
    whole: bool = True  # False if ranks outside the job may hold parts of the same model
    on_device: bool = False  # whether collectives are done by an accelerator, not by the host
    closed: bool = False
    heartbeat_s: float = 60.0  # a rank that gives no sign for that long has failed
    timeout_s: float = 600.0  # and one that makes no call for that long while others wait for it
    rejoining: bool = False  # whether this process takes a lost rank's place, until `reset`
    failed: str | None = None  # why they are finished; see [Note: failed groups]
    # By a name that is equal on its ranks, in the order of creation.
    owned: dict[str, dist.ProcessGroup] = field(default_factory=dict)
    completed: list[str] = field(default_factory=list)  # of `SECOND`, what this rank has asked for
    # Of a mesh, to be aborted with them; see [Note: groups of a mesh] in `bounded_group`.
    mesh_groups: list[dist.ProcessGroup] = field(default_factory=list)
    # Calls that drop references to them, of what is queued.
    forgets: list[Callable[[], None]] = field(default_factory=list)
    active: list[Any] = field(default_factory=list)  # `Pending`s in flight, oldest first
    step: int | None = None  # the optimizer step under way, for errors
    call: Any = None  # the last call, as `Calls` describes it
    aborted: bool = False  # whether collectives in flight on an accelerator were ended
    unraised: BaseException | None = None  # why they failed, if no call of this rank raised it
    # What other ranks said of failures, by rank, first things first; the monitor sets it. Each has
    # `text`, `kind` and `final`: whether it cannot be withdrawn.
    standing: Mapping[int | None, Any] = field(default_factory=dict)
    channel: Any = field(default_factory=Channel)  # of this rank's partition group
    backend: str = ""  # of the process groups
    traffic: Traffic = field(default_factory=Traffic)
    recipe: Any = None  # makes groups with another state; it refers to nothing of these
    first: str = ""  # the key of the first of all these groups, which a rank that comes back knows
    follows: Any = None  # what took the place of these groups in a `reset`, without placements
    turns: Turns = field(default_factory=Turns)
    ready: Any = None  # on an accelerator, the event behind the last collective
    # Called by the monitor at each tick, with its store.
    listeners: list[Callable[[Any], None]] = field(default_factory=list)
    stops: int = 0  # number of `StopRequest`s so far
    saves: int = 0  # number of checkpoints that were begun on these groups
    layouts: dict[Any, Any] = field(default_factory=dict)  # of trees; see `shards.opened`
    endings: list[Callable[[], Any]] = field(default_factory=list)  # what `close` waits for

    def __post_init__(self) -> None:
        self.watch = Watch(self)
        # The exception that is handled as these groups begin, which is not the reason of their end.
        self.amid = id(sys.exception())

    def fresh(self) -> "GroupState":
        """A new state of the same ranks, for groups that take the place of these."""
        return GroupState(**{name: getattr(self, name) for name in _KEPT})

    def own(self, name: str, group: dist.ProcessGroup) -> None:
        """Take over a process group, which `close` will destroy."""
        self.owned[name] = group
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
        if error is not None:  # first: what is aborted fails elsewhere
            quietly(partial(self.watch.announce, error, final=True))
        rest = [Job(self.watch.close), Job(self.channel.depart(""))]
        jobs = [*self.abort(_PATIENCE_S), *(job.begin("mics_fn abandon") for job in rest)]
        self.let_go()
        ended(jobs, _PATIENCE_S)

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
            self.end("closed its groups")

    def end(self, how: str, *, waits: bool = True) -> None:
        """Destroy the process groups, as all ranks do; a thread frees the rest.

        Args:
          how: what this rank did, for the others.
          waits: whether it is in order; else see [Note: retired groups].
        """
        tidy, groups = self.channel.depart(how), self.live()
        self.let_go()
        quietly(self.watch.close)
        if not waits:
            self._lose_queued(_GRACE_S)
            for group in self.mesh_groups:
                abort_group(group)
        for i in reversed(range(len(groups))):
            # That of gloo waits for nobody.
            alone = not waits and dist.get_backend(groups[i]) != "gloo"
            (abort_group if alone else dist.destroy_process_group)(groups[i])
        self.failed = None
        # These refer to what is to be freed.
        self.channel, self.watch = Channel(), Watch(self)
        if groups:
            job = Job(partial(free, groups, tidy)).begin("mics_fn free")
            ended([job], _PATIENCE_S if waits else 0.0)

    def abort(self, patience_s: float = 0.0) -> list[Job]:
        """Abort each process group on a thread; see [Note: aborted collectives] in `_torch`."""
        self._lose_queued(patience_s)
        mesh_groups, self.mesh_groups = self.mesh_groups, []
        return [abort_group(group) for group in (*self.live(), *mesh_groups)]

    def _lose_queued(self, patience_s: float) -> None:
        """Judge what is queued on a device, which has so much time to end, once."""
        if self.on_device and not self.aborted:
            self.aborted = True
            _torch.lose_queued(patience_s)

    def live(self) -> list[dist.ProcessGroup]:
        """The owned process groups that torch has not destroyed, oldest first."""
        return [group for group in self.owned.values() if group in _torch.LIVE_GROUPS]

    def listed(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """The purpose and the global ranks of each owned process group."""
        found = [(x.split("/")[-2], dist.get_process_group_ranks(y)) for x, y in self.owned.items()]
        return tuple((purpose, tuple(ranks)) for purpose, ranks in found)

    def let_go(self) -> None:
        """Drop all references to the process groups, which nothing uses any more."""
        self.closed = True
        self.active.clear()
        self.owned.clear()
        OPEN.discard(self)
        while self.forgets:
            self.forgets.pop()()


OPEN: set[GroupState] = set()  # what owns process groups, until it is closed


def any_aborted() -> bool:
    """Whether collectives of any open groups on an accelerator were aborted."""
    return any(state.aborted for state in list(OPEN))


def never_destruct() -> None:
    """Keep torch from destructing open groups of gloo, which would wait for the other ranks."""
    for group in [group for state in OPEN for group in state.live()]:
        if dist.get_backend(group) == "gloo":
            _torch.never_destruct(group)


# Errors of a program, of which the other ranks hear.


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


LAST_STEP: list[GroupState] = []  # whose step this process has begun last


def reports_step(state: GroupState, step: int) -> AbstractContextManager[None]:
    """Context of the step with this number; its error is reported to the other ranks."""
    state.step, LAST_STEP[:] = step, [state]
    return reports(BaseException)


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
    if not (dist.is_available() and dist.is_initialized()):
        return
    _inherited[:] = [_torch.default_store()]
    for kept in (*_torch.groups_named(None), *_inherited):
        _torch.never_destruct(kept)
    for state in list(OPEN):
        state.fail(GroupsError(f"this is a fork of rank {state.rank}; {NO_FORK}"))
        state.let_go()


os.register_at_fork(after_in_child=_after_fork)


# `Comm`: one communicator.


@dataclass(frozen=True, eq=False)
class Comm:
    """One communicator, as this rank sees it. With one rank it has no process group.

    Args:
      name: its purpose, such as "gather node" or "replicas".
      ranks: global ranks, in the order of the group.
      rank: this rank's place in `ranks`.
      group: the name of the process group among those of `state`; "" for one rank.
      timeout_s: bound in seconds of each wait.
      state: of the groups.
      queue: `Pending`s that will issue a collective on it, in the order in which they must do so.
      calls: what this rank has called on it; `faults.order` compares it between its ranks.
      fixed_order: whether reductions add up in the order of `ranks` on every backend.
      second: a communicator of the same ranks for the second collective of a mean of codes. The
        first one is on this communicator, so that the next mean can begin there meanwhile. It is
        connected once a tree is made whose gradients travel so; until then this one serves both.

    Example:
      >>> comm = make_groups(1).communicators["replicas"]
      >>> comm.name, comm.ranks, comm.rank, comm.size
      ('replicas', (0,), 0, 1)
    """

    name: str
    ranks: tuple[int, ...]
    rank: int
    group: str = field(repr=False)
    timeout_s: float
    state: GroupState = field(repr=False)
    queue: deque[Any] = field(default_factory=deque, repr=False)
    calls: Calls = field(default_factory=Calls, repr=False)
    fixed_order: bool = False
    second: "Comm | None" = field(default=None, repr=False)
    _streams: dict[torch.device, torch.Stream] = field(default_factory=dict, repr=False)

    @classmethod
    def of_one(cls, name: str, state: "GroupState | None" = None, timeout_s: float = 0.0) -> "Comm":
        """A communicator of this rank alone."""
        state = state or GroupState()
        return cls(name, (state.rank,), 0, "", timeout_s, state)

    @cached_property
    def size(self) -> int:
        """Ranks in it."""
        return len(self.ranks)

    @property
    def purpose(self) -> str:
        """Its name when its process group was named; several may have one name in the ledger."""
        return self.group.split("/")[-2] if self.group else self.name

    @property
    def connected(self) -> bool:
        """Whether it has a process group."""
        return self.group in self.state.owned

    def check_open(self) -> None:
        """Raise GroupsError if its groups were closed or failed, even if its size is 1.

        The first call after they failed while this rank waited for its device raises why.
        """
        state = self.state
        if state.failed is None and not state.closed:
            return
        if state.unraised is not None and not state.closed:
            unraised, state.unraised = state.unraised, None
            raise unraised
        what = f"'{self.name}' of ranks {fold_ranks(self.ranks)} is used after its groups"
        if state.failed is None:
            raise GroupsError(f"{what} were closed", fix="call make_groups again")
        fix = "call groups = mics_fn.reset(groups), or trainer.reset(), on all ranks"
        raise GroupsError(f"{what} have failed", [f"rank {state.rank}: {state.failed}"], fix)

    def check_done(self, device: torch.device) -> None:
        """Let the host wait for what is queued on an accelerator; raise if that may be no result.

        See [Note: aborted collectives] in `_torch`.
        """
        if self.size > 1 and _torch.is_async(device):
            _torch.current_stream(device).synchronize()
            self.check_open()

    def stream(self, device: torch.device) -> torch.Stream:
        """The stream of all its collectives on an accelerator, in the order they are issued in."""
        if device not in self._streams:
            self._streams[device] = _torch.own_stream(device)
        return self._streams[device]

    def process_group(self) -> dist.ProcessGroup:
        """The process group to communicate over.

        Raises:
          GroupsError: its groups are closed, torch.distributed is shut down, or its size is 1.
        """
        self.check_open()
        if self.state.rejoining:
            raise rejoin_error(f"'{self.name}' of {name_ranks(self.ranks)}", self.state.rank)
        if not self.group:
            what = f"'{self.name}' holds rank {self.ranks[0]} alone and has no process group"
            raise GroupsError(what, fix="skip communication where size is 1")
        group = self.state.owned[self.group]
        if group not in _torch.LIVE_GROUPS:
            what = f"'{self.name}' is used after torch.distributed was shut down"
            raise GroupsError(what, fix="close groups before that, and make new ones after init")
        return group


def rejoin_error(what: str, rank: int) -> errors.PeerFailed:
    """The error of a process that uses groups as if it had been there from the start."""
    text = f"{what}: rank {rank} was lost, and this process has taken its place"
    fix = "call trainer.reset(), or groups = mf.reset(groups), on all ranks; go on at state.step"
    return errors.PeerFailed(errors.message(text, fix=fix), rank, "returned")

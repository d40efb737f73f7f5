"""`Monitor`: the threads that tell other ranks that this one lives, and find out which do not.

[Note: signs of life] Each rank counts in the store, a few times per second, and reads the counts of
a few other ranks. A count that stands still for `heartbeat_s` is a rank that is silent:
stopped, or cut off, or gone with its host. It is measured anew from each meeting on. How long it
stands still is added up from the reader's own ticks, each of which adds no more than its length, so
a process that was stopped itself, or whose interpreter was held, accuses nobody. With its count a
rank writes which process it is. Those on its host see at their next tick that it is gone, so a rank
that is killed is named before the others know more than that some connection was closed. Nobody
else calls a rank killed, however silent it is. One that closes its groups writes that before it may
end, see [Note: ranks that have left] in `order`, so whoever accuses a rank looks for that first.
Who finds a failure writes it into the journal of each groups that the rank is in, see [Note: the
journal] in `journal`, and all ranks read it at their next tick.

Two threads do this. The store thread talks to the store, and may be stuck in it. The other one
ticks, and finds out that the store thread is stuck: then the store, or the rank that holds it, has
failed. They are at work while some groups of more than one rank are open in this process; where
none are, a count of 0 says that nobody has to wait for signs of it.

[Note: the last step] A signal reaches ranks at different instants, or only one of them, and none
may stop while others go on. So the rank that is asked writes that into the store. The monitor of
each rank answers with the number of the step that this rank has begun, whatever its main thread
does meanwhile, and the last step is the highest of these numbers. A rank that comes to the end of a
step after its monitor has answered reads the answers of all, and waits for those that are missing:
they do not depend on how far the others are, so this wait ends. Until some rank is asked, the end
of a step is a comparison in this process, without a message.

[Note: what is found again] Which ranks there are, and how they are wired, does not change by a
failure, so `reset` detects nothing. Ranks meet once, under a key that is new. There they compare
which groups they reset. What they have learned about the order of use is forgotten: a rank that was
behind may have learned less, and to learn it takes one run. No name is used twice, so a rank that
is already on the new groups never meets one that is still on the old ones. A rank that was lost
meets the others here, too, once it was started again: see [Note: rejoining].

[Note: rejoining] A rank that was killed is started again, with the same environment and the same
script. The store of the job, which outlives it, says which process had its number before, and what
the ranks have agreed on since. So `init_distributed` and `make_groups` ask nobody: they take from
the store what the first process had agreed on with the others, and give groups that are connected
to nobody. On these a comparison finds that all agree, as they did when the first process made it,
and whatever would move data raises. `reset` is where this process and the others meet: there all
get new groups, and the state that this rank lacks comes from a replica. The default group of torch
is not made again, as groups are made from its store alone, and never move data over it.

A launcher may have started all ranks again, with the store of their last start: so a process that
finds a rank's earlier process there waits for a sign of life of some other rank, and starts anew if
there is none. torchrun says in the environment that it always starts all.

In the store it registers before anything else, so that a process of its rank which was only frozen
finds out at its first word that it was replaced, and says no other. What the lost process had
written for a meeting that came to no end is taken back; see [Note: the epoch of membership] in
`groups.startup`.
"""

import atexit
import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any

from mics_fn import _torch, errors, tree
from mics_fn.faults import heartbeat
from mics_fn.faults.journal import Failure, Watcher, of_store, without_a_word
from mics_fn.groups import Groups, GroupState, Meeting, communicator, hooks, startup
from mics_fn.store import Store, StoreLost, later, poll, value_of
from mics_fn.threads import Job, Latch, start


def store_host(store: Any) -> tuple[int | None, str]:
    """The rank that holds a store, if a rank does, and the address of the store, if it has one."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    of_tcp = hasattr(store, "port")
    return None if agent or not of_tcp else 0, f"{store.host}:{store.port}" if of_tcp else ""


_PATIENCE_S = 0.5  # how long a rank that fails waits for the store
_LEAST_TICKS = 3  # without a sign of life, before a rank is taken for lost
_DOUBT_S = 0.6  # after a connection was closed, ranks that are silent for this long may be gone


class Monitor:
    """What watches the other ranks, for all groups of this process; see [Note: signs of life]."""

    def __init__(self) -> None:
        self._states: dict[GroupState, Watcher] = {}
        self._store_thread: Any = None
        self._store: Any = None  # that the store thread is connected to
        self._peers: dict[int, heartbeat.Peer] = {}
        self._count = self._rank = 0
        self._since = 0  # the epoch from which on this process is a member; 0 before it has entered
        self._last, self._last_s = "", 0.0  # the sign of life that it wrote last, and when
        self._changes = b""
        self._own: Any = None  # this process
        self._stop, self._wake = Latch(), SimpleQueue[None]()
        self._request: Job | None = None  # the tick that the store thread is at
        self._waited_s = 0.0  # how long it has been at it
        self._said = 0.0  # when this rank last said that it failed
        self._busy = False  # whether this process may give no sign of life for long

    # What groups call.

    def busy(self, begins: bool) -> None:
        """Say that this process compiles, and may keep its threads from any sign, or does no more.

        Until then its silence means nothing to others, which wait for it up to `timeout_s`.
        """
        self._busy = begins
        if self._states:
            self.bounded(self._write_heartbeat, None)

    def join(self, state: GroupState) -> heartbeat.BoundedStore:
        """Watch the ranks of groups that are about to be made; returns the store of their messages.

        Silence before they meet means nothing, and who has ended by then is found once more.
        """
        listen()
        store = _torch.default_store()
        if store is not self._store:  # of a torch.distributed that is new
            self._begin(store)
        thread = self._store_thread
        self._rank = state.rank
        state.watch = self._states[state] = Watcher(state, self)
        self._measure_anew(state)
        failed = partial(self._store_failed, state)
        try:  # to connect may take long, as it looks for names of hosts
            thread.answer(thread.ask(self._write_heartbeat), state.timeout_s)
        except StoreLost as lost:
            raise failed(lost) from None
        return heartbeat.BoundedStore(thread, state.timeout_s, failed, self._since)

    def begin(self, state: GroupState) -> None:
        """Begin to read the journal of groups, once all ranks have met."""
        self._measure_anew(state)
        self._wake.put(None)

    def _measure_anew(self, state: GroupState) -> None:
        state.standing = {}
        for rank, peer in list(self._peers.items()):
            if rank in state.ranks:
                peer.silent_s, peer.dead = 0.0, False

    def close(self, state: GroupState) -> None:
        """Stop watching for these groups, which this rank has closed."""
        if self._states.pop(state, None) is not None and not self._states:
            self.bounded(self._write_heartbeat, None)

    def end(self) -> None:
        """Stop the threads at exit: Python must not meet one that returns from C++."""
        if self._said and store_host(self._store)[0] == self._rank:  # others read why from it
            time.sleep(max(0.0, self._said + 2 * self._interval_s() - time.monotonic()))
        self._stop.set()
        self._wake.put(None)
        if self._store_thread is not None and self._store_thread.lost is None:
            self._store_thread.end(_PATIENCE_S)

    # What a `Watcher` calls.

    def say(self, call: Callable[[Any], Any]) -> None:
        """Let the store thread tell the other ranks of a failure, for a moment."""
        self._said = time.monotonic()
        self.bounded(call, None)

    def listen(self, ranks: Sequence[int]) -> bool:
        """Have the next tick at once; whether some rank may be found silent, for `explained`."""
        self._wake.put(None)
        peers = [self._peers[rank] for rank in ranks if rank in self._peers]
        return any(peer.count and peer.silent_s > _DOUBT_S for peer in peers)

    def bounded(self, call: Any, default: Any) -> Any:
        """What the store thread answers, or a default if it does not in time."""
        with suppress(Exception):
            return self._store_thread.answer(self._store_thread.ask(call), _PATIENCE_S)
        return default

    def _store_failed(self, state: GroupState, lost: StoreLost) -> errors.PeerFailed:
        """The error of a call to the store that has no end."""
        error = self._failure_of(lost).error("its store")
        state.fail(error)
        return error

    def _failure_of(self, lost: StoreLost) -> Failure:
        return of_store(self._rank, *store_host(self._store), lost)

    # The threads.

    def _begin(self, store: Any) -> None:
        self._stop.set()  # of a thread that watched with another store
        self.__init__()
        self._own, self._store = heartbeat.Process.own(), store
        self._store_thread = heartbeat.StoreThread(store)
        self._store_thread.before = self._confirm
        watch = partial(self._watch, self._stop, self._store_thread)
        start(threading.Thread(target=watch, name="mics_fn monitor", daemon=True))

    def _watch(self, stop: Latch, store_thread: heartbeat.StoreThread) -> None:
        last = time.monotonic()
        while not stop.is_set():
            with suppress(Empty):
                self._wake.get(timeout=self._interval_s())
            now = time.monotonic()
            passed_s, last = min(now - last, self._interval_s()), now
            if self._states and not stop.is_set():
                self._iterate(store_thread, passed_s)

    def _interval_s(self) -> float:
        return heartbeat.interval_s(
            max((len(state.ranks) for state in list(self._states)), default=1)
        )

    def _iterate(self, store_thread: heartbeat.StoreThread, passed_s: float) -> None:
        """Check all ranks once for failures."""
        request, self._waited_s = self._request, self._waited_s + passed_s
        if request is not None and not request.done.is_set():
            limit_s = min((state.heartbeat_s for state in list(self._states)), default=60.0)
            if store_thread.lost is None and store_thread.own and self._waited_s > limit_s:
                store_thread.lost = StoreLost(f"no answer for {limit_s:g} s", silent=True)
        for watch in list(self._states.values()):
            watch.pass_time(passed_s)
        if store_thread.lost is not None:
            failure = self._failure_of(store_thread.lost)
            for state in list(self._states):
                # One that was replaced is so whatever others have said.
                known = {} if failure.kind == "replaced" else state.standing
                state.standing = {**known, failure.rank: known.get(failure.rank, failure)}
        elif request is None or request.done.is_set():
            if request is not None and request.error is None:
                self._judge(request.value, passed_s)
            self._waited_s = 0.0
            self._request = store_thread.ask(self._exchange)
        for rank, peer in list(self._peers.items()):
            if not peer.dead and peer.has_ended():
                peer.dead = True
                self._accuse(rank, "killed", peer.since)

    def _judge(self, heartbeats: dict[int, str], passed_s: float) -> None:
        """Find the ranks that are silent."""
        for rank, said in heartbeats.items():
            peer = self._peers.setdefault(rank, heartbeat.Peer())
            peer.observe(said, self._own, passed_s)
            self._accuse(rank, "killed", peer.since - 1)  # an earlier process of it
            limits = [state.heartbeat_s for state in list(self._states) if rank in state.ranks]
            if limits and peer.count and not peer.dead and peer.is_silent(min(limits)):
                peer.dead = True
                self._accuse(rank, "silent", peer.since)

    def _accuse(self, rank: int, kind: str, until: int) -> None:
        """Say that the process that a rank had until an epoch has failed, in all of its groups."""
        failure, last = without_a_word(rank, kind), self._peers[rank].since
        for state, watch in list(self._states.items()):
            known = state.standing.get(rank)
            if rank not in state.ranks or (known is not None and known.final):
                continue
            if state.key and state.members.get(rank, 1) <= until:
                self._store_thread.ask(partial(watch.say, failure))
            elif not state.key and until == last:  # groups that are still to be made
                state.standing = {**state.standing, rank: failure}

    # On the store thread's thread.

    def _write_heartbeat(self, store: Any) -> None:
        """Write a sign of life; raises `Replaced` if another process has this one's place."""
        key, name = heartbeat.heartbeat_of(self._rank), self._own.name
        if not self._since:
            self._since, _ = heartbeat.register(store, key, name)
        self._count = self._count + 1 if self._states and not self._busy else 0
        self._last = heartbeat.claim(store, key, self._since, f"{self._count} {name}", self._last)
        self._last_s = time.monotonic()

    def _confirm(self, store: Any) -> None:
        """Confirm that this process is its rank, before it writes after it may have been frozen."""
        if self._last and time.monotonic() - self._last_s > 2 * self._interval_s():
            self._write_heartbeat(store)

    def _exchange(self, store: Any) -> dict[int, str]:
        """Write this rank's sign of life and read what others wrote; returns their signs."""
        if not self._states:  # the last ones were closed meanwhile
            return {}
        self._write_heartbeat(store)
        others = {
            x for each in list(self._states) for x in heartbeat.followed(each.rank, each.ranks)
        }
        known = [x for x in others if x in self._peers or store.check([heartbeat.heartbeat_of(x)])]
        if not self._changes:
            store.add(heartbeat.CHANGES, 0)
        changes, *said = store.multi_get([heartbeat.CHANGES, *map(heartbeat.heartbeat_of, known)])
        for watch in list(self._states.values()):
            watch.read(store, changed=changes != self._changes)
        self._changes = changes
        return {rank: text.decode() for rank, text in zip(known, said, strict=False)}


MONITOR = Monitor()  # of this process
os.register_at_fork(after_in_child=MONITOR.__init__)  # which has no threads, and no groups


# Errors that no block of the groups hears of, and the end of this process: other ranks are told.


def _shell() -> Any:
    """IPython's shell if this process has one."""
    shell = sys.modules.get("IPython")
    return None if shell is None else shell.get_ipython()


def limit_s(given: float | None, ranks: int) -> float:
    """Seconds of silence after which one of so many ranks has failed.

    By default 10 for people at a prompt, else 60; more where signs of life are too rare for that.

    Raises:
      PlanError: so few would take ranks for lost that are well.
    """
    every_s = heartbeat.interval_s(ranks)
    least_s = _LEAST_TICKS * every_s
    if given is None:
        return max(10.0 if hasattr(sys, "ps1") or _shell() is not None else 60.0, least_s)
    if given < least_s:
        text = f"make_groups: heartbeat_s={given!r} would take ranks for lost that are well"
        fix = f"pass at least {least_s:g}, as signs of life come every {every_s:g} s"
        raise errors.PlanError(text, fix=fix)
    return given


@cache
def listen() -> None:
    """Report errors to the other ranks that no block of the groups catches."""
    shell = _shell()
    if shell is not None:
        shell.events.register("post_run_cell", _after_cell)
        return
    before = sys.excepthook

    def announce_and_show(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        communicator.announce_all(error, final=not (hasattr(sys, "ps1") or sys.flags.interactive))
        before(kind, error, trace)

    sys.excepthook = announce_and_show


def _after_cell(result: Any) -> None:
    """Report the error of a cell; the next cell may continue."""
    if result.error_in_exec is not None:
        communicator.announce_all(result.error_in_exec)


@atexit.register
def _at_exit() -> None:
    """Report to the other ranks, and end a process that could not close its groups.

    Torch destructs them at exit. Those of NCCL abort then, but those of gloo would wait.
    """
    error = getattr(sys, "last_value", None)
    if error is None:
        communicator.announce_all(SystemExit(), final=True, kind="exited")
    else:
        communicator.announce_all(error, final=True)
        communicator.never_destruct()
    MONITOR.end()
    communicator.end_aborts(patience_s=5.0)


# `StopRequest`: a wish to stop, as before preemption, agreed on at the end of a step.

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopRequest:
    """A block in which signals do not end this process, but all ranks after the same step.

    Args:
      groups: their ranks stop together.
      signals: those that ask to stop; SIGTERM and SIGUSR1 by default. Outside of the main thread
        pass none. After the block, their previous handlers are back.

    Communication: none in a step, until some rank is asked to stop. Then each rank writes a few
      bytes to the store, and reads those of the others.

    Raises:
      ValueError, OSError: one of `signals` is not a signal that a process can handle.

    Example:
      >>> with make_groups(1) as groups, StopRequest(groups) as stop:
      ...     for step in range(1, 100):
      ...         if step == 3:
      ...             signal.raise_signal(signal.SIGTERM)
      ...         if stop.due():
      ...             break
      >>> step, stop.stopping
      (3, True)
    """

    def __init__(self, groups: Groups, signals: Iterable[int] = _SIGNALS) -> None:
        self.stopping = False  # whether all ranks stop after the step that has ended
        self._state, self._signals = groups.state, list(signals)
        self._timeout_s = groups.timeout_s
        self._state.stops += 1
        self._key = f"{self._state.key}/stop/{self._state.stops}"
        self._before: dict[int, Any] = {}
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._step = 1  # that this rank has begun
        self._wanted = False  # whether this rank was asked
        self._said: int | None = None  # what the monitor has answered
        self._last: int | None = None

    def ask(self) -> None:
        """Ask all ranks to stop, as a signal does; returns at once."""
        self._wanted = True

    def due(self) -> bool:
        """Whether to stop now; every rank calls it at the end of each step.

        Returns:
          True on all ranks after the same step, and from then on; `stopping` says the same.

        Communication: none until some rank is asked to stop; then once, through the store.

        Raises:
          PeerFailed: another rank failed meanwhile.
          CollectiveError: some rank does not answer.
        """
        if self.stopping:
            return True
        with self._lock:
            ended, self._step = self._step, self._step + 1
            if len(self._state.ranks) == 1 and self._wanted:
                self._said = self._last = ended
            if self._said is None:
                return False
        if self._last is None:
            self._last = self._agreed()
        self.stopping = ended >= self._last
        return self.stopping

    def _agreed(self) -> int:
        """The last step; see [Note: the last step]."""
        state, store = self._state, self._state.channel.store
        keys = {rank: f"{self._key}/{rank}" for rank in state.ranks}
        deadline = time.monotonic() + self._timeout_s
        check = partial(state.watch.check, (), missing=state.ranks)
        if not poll(lambda: store.check([*keys.values()]), len(keys), deadline, check):
            who = errors.name_ranks([rank for rank in keys if not store.check([keys[rank]])])
            what = f"StopRequest: {who} did not answer in {self._timeout_s:g} s"
            raise errors.CollectiveError(what, fix="enter a StopRequest on all ranks")
        return max(int(store.get(key)) for key in keys.values())

    def _listen(self, store: Any) -> None:
        """Called by the monitor at each tick, with its own connection to the store."""
        if self._said is not None:
            return
        if self._wanted:
            store.set(f"{self._key}/asked", "")
        elif not store.check([f"{self._key}/asked"]):
            return
        with self._lock:
            self._said = self._step
        store.set(f"{self._key}/{self._state.rank}", str(self._said))

    def _depart(self, store: Store) -> None:
        """Write the answers that others may ask for later; the last rank deletes the keys."""
        with self._lock:
            self._said = self._said or self._step
        store.set(f"{self._key}/{self._state.rank}", str(self._said))
        if store.add(f"{self._key}/left", 1) == len(self._state.ranks):
            for name in ("asked", "left", *self._state.ranks):
                later(store, "delete_key", f"{self._key}/{name}")

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a forked child, such as a worker of a loader
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self._wanted = True

    def __enter__(self) -> "StopRequest":
        self._state.listeners.append(self._listen)
        self._before = {each: signal.signal(each, self._signalled) for each in self._signals}
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        for number, before in self._before.items():
            signal.signal(number, signal.SIG_DFL if before is None else before)
        self._state.listeners.remove(self._listen)
        if len(self._state.ranks) > 1 and error is None and not self._state.closed:
            with suppress(errors.MicsError):  # a rank or the store is gone, and nobody will ask
                self._depart(self._state.channel.store)


# A process that takes the place of a rank that was lost, while the other ranks still hold theirs:
# what the start of ranks, and of groups, asks; see `groups.Hooks`.

_SIGN_S = 3.0  # in which a rank that lives writes signs of life; longer where these are rare
_POLLED = 64  # ranks that are asked for signs of life, at most about twice as many
_ATTEMPTS = 5  # to make groups, as ranks may be lost while others make them


@contextmanager
def entering(
    store: Any, rank: int, world_size: int, timeout_s: float, lost: Callable[..., Exception]
) -> Iterator[tuple[Store, int | None]]:
    """A block in which ranks meet before any groups exist.

    Yields:
      A store whose calls are bounded, and the number of the start that this process comes back
      into, if it takes a lost rank's place.
    """
    thread, part = heartbeat.StoreThread(store), None
    served = heartbeat.BoundedStore(thread, timeout_s, lost)
    try:
        start = joined(served, rank, world_size)
        if start is not None:
            own = heartbeat.StoreThread(_torch.default_part(startup.part_of_start(store, start)))
            part = heartbeat.BoundedStore(own, timeout_s, lost)
            if not some_rank_lives(part, rank, world_size):  # the whole job is started again
                own.end()
                start = part = None
        hooks.agreed_before = partial(_agreed_before, part, Counter())
        yield served, start
    finally:
        thread.end()


def joined(store: Any, rank: int, world_size: int) -> int | None:
    """Write down which process this rank is now.

    Args:
      store: of the job.
      rank: this rank.
      world_size: number of ranks.

    Returns:
      The number of the start that it comes back into; None if it is to start with the others.
    """
    store.since, before = heartbeat.register(
        store, f"mics_fn/process/{rank}", heartbeat.Process.own().name
    )
    ranks, verb = range(world_size), "init_distributed"
    start = startup.last_of(store, ranks, verb)
    begun = past(store, ranks, verb, start) is not None
    return start if before and begun and "TORCHELASTIC_RUN_ID" not in os.environ else None


def some_rank_lives(store: Any, rank: int, world_size: int) -> bool:
    """Whether another rank writes heartbeats; some are polled for a few seconds."""
    others = range(0, world_size, max(1, world_size // _POLLED))
    keys = [heartbeat.heartbeat_of(other) for other in others if other != rank]

    def heartbeats() -> list[bytes]:
        return [store.get(key) for key in keys if store.check([key])]

    first, limit_s = heartbeats(), max(_SIGN_S, _LEAST_TICKS * heartbeat.interval_s(world_size))
    return poll(lambda: heartbeats() != first, 1, time.monotonic() + limit_s)


def past(store: Store, ranks: Sequence[int], verb: str, call: int) -> Meeting | None:
    """What the n-th meeting of these ranks agreed on; None if there was none, or if it failed."""
    key = f"{startup.prefix_of(ranks, verb)}/{call}"
    verdict = json.loads(value_of(store, f"{key}/verdict") or '{"error": ""}')
    return None if "error" in verdict else Meeting(key, verdict["found"])


def _agreed_before(
    store: Any, calls: Counter[Sequence[int]], ranks: Sequence[int], rank: int, timeout_s: float
) -> Meeting | None:
    """The earlier agreement of these ranks, in a process that replaces a lost one."""
    if store is None or len(ranks) == 1:
        return None
    listen()
    calls[ranks] += 1
    heartbeat.register(store, heartbeat.heartbeat_of(rank), heartbeat.Process.own().name)
    return past(store, ranks, "make_groups", calls[ranks])


# New groups.


def reset(groups: Any) -> Any:
    """New groups among the same ranks, after an error has ended the old ones. All ranks call it.

    Ranks whose processes are gone are waited for: each may be started again, with the same
    environment and script, and call it, too. Until then its groups move no data.

    Shards, states, policies, guards and samplers remain valid, and what holds the old groups, such
    as a part of an optimizer, goes on with the new ones. `same_step` compares the step
    of a state between ranks, and `Trainer.reset` does all that a `Trainer` needs.

    Args:
      groups: `Groups`, with or without a placement, or a pytree of them. They may have failed, or
        be closed. Where they are given to a verb afterwards, it uses the new ones.

    Returns:
      New groups in the same form. Use them in a `with` block, or close them.

    Communication: a few small messages through the store of torch.distributed, and the connections
      of the new groups. Nothing is detected again.

    Memory: that of the old groups is freed, once all ranks have called this.

    Raises:
      GroupsError: `groups` are not `Groups`, or a rank cannot connect.
      DesyncError: ranks reset other groups.
      CollectiveError: some rank did not call it within `timeout_s` of the groups.
      PeerFailed: the store of the job is lost; or ranks are lost again and again meanwhile.

    Example:
      >>> groups = make_groups(1)
      >>> groups = reset(groups)
      >>> groups
      Groups(n=1 p=1 levels=none, rank 0, cpu)
    """
    old = tree.flatten(groups)[0]
    if not old or not all(isinstance(home, Groups) for home in old):
        text = f"reset: got {type(groups).__name__}, expected Groups"
        raise errors.GroupsError(text, fix="pass what make_groups or place gave")
    return tree.map_leaves(replaced(old).__getitem__, groups)


def replaced(homes: Iterable[Groups]) -> Mapping[Groups, Groups]:
    """What takes the place of each of these groups; see `reset`.

    Those that share process groups, such as placements of the same groups, share the new ones.
    """
    homes = list(dict.fromkeys(homes))
    whose = {home.state: home for home in homes}
    communicator.check_fork("reset")
    for state, home in whose.items():
        base = _rebuilt(state, home.hierarchy.channel)
        state.follows = base
    return {home: home.state.follows.derived(home.derive) for home in homes}


def _rebuilt(state: GroupState, channel: Any) -> Groups:
    """Groups like those of a life, in the same place but without placements."""
    state.fail(errors.GroupsError("reset was called"))
    state.watch.stands()  # others need not ask whether this rank goes on
    if channel.key == state.first:  # which one that comes back looks for
        channel.kept = f"{channel.key}/verdict"
    state.channel.depart("called reset")
    for learned in channel.learned:
        learned.forget()
    # One that comes back knows the first groups alone, and these may have been reset since.
    key = "" if state.rejoining else channel.key
    for _ in range(_ATTEMPTS - 1):
        with suppress(errors.GroupsError, errors.PeerFailed):
            return _remade(state, key)
    return _remade(state, key)


def _remade(old: GroupState, mine: str) -> Groups:
    """New groups, once all ranks have met, who compare the key of the old ones."""
    state, deadline = old.fresh(), time.monotonic() + old.timeout_s
    store = None
    try:
        if len(old.ranks) > 1:
            store = MONITOR.join(state)
            wait: Any = {"verb": "reset", "timeout_s": old.timeout_s, "deadline": deadline}
            own = [mine, *old.completed]
            meeting = startup.meet(store, old.ranks, old.rank, own, _judged, **wait)
            state.watch.begin(meeting)
            state.completed = meeting.verdict
        old.end("called reset", waits=False)
        return old.recipe(state, store, deadline)
    except BaseException:
        state.watch.close()
        raise


def _judged(found: Mapping[int, Sequence[str]]) -> list[str]:
    """Compare which groups the ranks reset, of which each has some communicators completed.

    Raises:
      DesyncError: they reset other groups.
    """
    keys = {rank: key for rank, (key, *_) in found.items() if key}
    if len(set(keys.values())) > 1:
        what = "reset: ranks reset different groups"
        raise errors.disagreement(what, keys, "reset them in one order on all ranks")
    return sorted({name for _, *completed in found.values() for name in completed})

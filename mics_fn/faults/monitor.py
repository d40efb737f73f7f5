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
"""

import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any

from mics_fn import _torch, errors
from mics_fn.faults import heartbeat
from mics_fn.faults.heartbeat import BoundedStore, Peers, Process, StoreThread, heartbeat_of
from mics_fn.faults.journal import Failure, Watcher, of_store, without_a_word
from mics_fn.groups import Groups, GroupState, announce_all, end_aborts, never_destruct
from mics_fn.store import CHANGES, Store, StoreLost, claim, later, poll
from mics_fn.threads import Job, Latch, start

_PATIENCE_S = 0.5  # how long a rank that fails waits for the store
_DOUBT_S = 0.6  # after a connection was closed, ranks that are silent for this long may be gone


class Monitor:
    """What watches the other ranks, for all groups of this process; see [Note: signs of life]."""

    def __init__(self) -> None:
        self._states: dict[GroupState, Watcher] = {}
        self._store_thread: Any = None
        self._store: Any = None  # that the store thread is connected to
        self._peers = Peers()
        self._count = self._rank = 0
        self._since = 0  # the epoch from which on this process is a member; 0 before it has entered
        self._last, self._last_s = "", 0.0  # the sign of life that it wrote last, and when
        self._changes = b""
        self._own: Any = None  # this process
        self._stop, self._wake = Latch(), SimpleQueue[None]()
        self._request: Job | None = None  # the tick that the store thread is at
        self._waited_s = 0.0  # how long it has been at it
        self._said = 0.0  # when this rank last said that it failed
        self._reread = False  # whether the journals are to be read, whatever the news

    # What groups call.

    def join(self, state: GroupState, timeout_s: float, *, waits: bool = False) -> BoundedStore:
        """Watch the ranks of groups; returns the store for their messages.

        Args:
          life: of the groups.
          timeout_s: bound in seconds of each call to the store.
          waits: whether ranks that are gone may come back.
        """
        store = _torch.default_store()
        if store is not self._store:  # of a torch.distributed that is new
            self._begin(store)
        thread = self._store_thread
        self._rank = state.rank
        state.standing = {} if waits else self._ended_of(dict.fromkeys(state.ranks))
        state.watch = self._states[state] = Watcher(state, self)
        failed = partial(self._store_failed, state)
        try:  # to connect may take long, as it looks for names of hosts
            thread.answer(thread.ask(self._write_heartbeat), timeout_s)
        except StoreLost as lost:
            raise failed(lost) from None
        return BoundedStore(thread, timeout_s, failed, self._since)

    def check_store(self, state: GroupState) -> None:
        """Raise PeerFailed if the store is gone, without which these ranks cannot meet."""
        thread = self._store_thread
        if thread is not None and thread.lost is not None and len(state.ranks) > 1:
            raise self._store_failed(state, thread.lost)

    def begin(self, state: GroupState) -> None:
        """Begin to read the journal of groups, once all ranks have met."""
        state.standing = self._ended_of(dict.fromkeys(state.ranks, 1) | {**state.members})
        for failure in state.standing.values():
            self._store_thread.ask(partial(self._states[state].say, failure))
        self._wake.put(None)

    def _ended_of(self, members: Mapping[int, int | None]) -> dict[int | None, Failure]:
        """The failures of those that have ended, of ranks which meet; see `Peers.anew`."""
        return {rank: without_a_word(rank, "killed") for rank in self._peers.anew(members)}

    def close(self, state: GroupState) -> None:
        """Stop watching for these groups, which this rank has closed."""
        if self._states.pop(state, None) is not None and not self._states:
            self.bounded(self._write_heartbeat, None)

    def linger(self) -> None:
        """Keep the store open for a moment, if this rank hosts it, for others to read."""
        if self._said and _torch.store_host(self._store)[0] == self._rank:
            time.sleep(max(0.0, self._said + 2 * self._interval_s() - time.monotonic()))

    def end(self) -> None:
        """Stop the threads at exit: Python must not meet one that returns from C++."""
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
        self._reread = True
        self._wake.put(None)
        return bool(self._peers.silent(ranks, _DOUBT_S))

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
        return of_store(self._rank, *_torch.store_host(self._store), lost)

    # The threads.

    def _begin(self, store: Any) -> None:
        self._stop.set()  # of a thread that watched with another store
        self.__init__()
        self._own, self._store, self._store_thread = Process.own(), store, StoreThread(store)
        self._store_thread.before = self._confirm
        watch = partial(self._watch, self._stop, self._store_thread)
        start(threading.Thread(target=watch, name="mics_fn monitor", daemon=True))

    def _watch(self, stop: Latch, store_thread: StoreThread) -> None:
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

    def _iterate(self, store_thread: StoreThread, passed_s: float) -> None:
        """Check all ranks once for failures."""
        request, self._waited_s = self._request, self._waited_s + passed_s
        if request is not None and not request.done.is_set():
            limit_s = min((state.heartbeat_s for state in list(self._states)), default=60.0)
            if store_thread.lost is None and store_thread.own and self._waited_s > limit_s:
                store_thread.lost = StoreLost(f"no answer for {limit_s:g} s", silent=True)
        for watch in list(self._states.values()):
            watch.pass_time(passed_s)
        if store_thread.lost is not None:
            self._all_fail(self._failure_of(store_thread.lost))
        elif request is None or request.done.is_set():
            if request is not None and request.error is None:
                self._judge(request.value, passed_s)
            self._waited_s = 0.0
            self._request = store_thread.ask(self._exchange)
        for rank in self._peers.ended():
            self._accuse(rank, "killed", self._peers[rank].since)

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

    def _all_fail(self, failure: Failure) -> None:
        for state in list(self._states):
            if failure.kind == "replaced":  # whatever others have said
                state.standing = {failure.rank: failure}
            elif failure.rank not in state.standing:
                state.standing = {**state.standing, failure.rank: failure}

    # On the store thread's thread.

    def _write_heartbeat(self, store: Any) -> None:
        """Write a sign of life; raises `Replaced` if another process has this one's place."""
        key, name = heartbeat_of(self._rank), self._own.name
        if not self._since:
            self._since, _ = heartbeat.register(store, key, name)
        self._count = self._count + 1 if self._states else 0
        self._last = claim(store, key, self._since, f"{self._count} {name}", self._last)
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
        others = dict[int, None]()
        for state in list(self._states):
            others.update(dict.fromkeys(heartbeat.followed(state.rank, state.ranks)))
        known = [x for x in others if x in self._peers or store.check([heartbeat_of(x)])]
        if not self._changes:
            store.add(CHANGES, 0)
        changes, *said = store.multi_get([CHANGES, *map(heartbeat_of, known)])
        reread, self._reread = self._reread, False
        for watch in list(self._states.values()):
            watch.read(store, changed=reread or changes != self._changes)
        self._changes = changes
        return {rank: text.decode() for rank, text in zip(known, said, strict=False)}


monitor = Monitor()  # of this process


def _forget() -> None:
    """Begin anew in a forked child: it has no threads, and no groups."""
    monitor.__init__()


os.register_at_fork(after_in_child=_forget)


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
    least = heartbeat.least_s(ranks)
    if given is not None and given < least:
        text = f"make_groups: heartbeat_s={given!r} would take ranks for lost that are well"
        every = f"signs of life come every {heartbeat.interval_s(ranks):g} s"
        raise errors.PlanError(text, fix=f"pass at least {least:g}, as {every}")
    if given is not None:
        return given
    usual = 10.0 if hasattr(sys, "ps1") or _shell() is not None else 60.0
    return max(usual, least)


def watched(state: GroupState, timeout_s: float) -> Store:
    """Watch the ranks of groups that are about to be made; returns the store of their messages."""
    listen()
    return monitor.join(state, timeout_s)


@cache
def listen() -> None:
    """Report errors to the other ranks that no block of the groups catches."""
    shell = _shell()
    if shell is not None:
        shell.events.register("post_run_cell", _after_cell)
        return
    before = sys.excepthook

    def announce_and_show(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        announce_all(error, final=not (hasattr(sys, "ps1") or sys.flags.interactive))
        before(kind, error, trace)

    sys.excepthook = announce_and_show


def _after_cell(result: Any) -> None:
    """Report the error of a cell; the next cell may continue."""
    if result.error_in_exec is not None:
        announce_all(result.error_in_exec)


@atexit.register
def _at_exit() -> None:
    """Report to the other ranks, and end a process that could not close its groups.

    Torch destructs them at exit. Those of NCCL abort then, but those of gloo would wait.
    """
    error = getattr(sys, "last_value", None)
    if error is None:
        announce_all(SystemExit(), final=True, kind="exited")
    else:
        announce_all(error, final=True)
        never_destruct()
    monitor.linger()
    monitor.end()
    end_aborts(patience_s=5.0)


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
        self._state, self._signals = groups.state, [int(each) for each in signals]
        self._timeout_s = groups.timeout_s
        self._state.stops += 1
        self._key = f"{self._state.key}/stop/{self._state.stops}"
        self._before: dict[int, Any] = {}
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._step = 1  # that this rank has begun
        self._wanted = False  # whether this rank was asked
        self._said: int | None = None  # what the monitor has answered
        self._new = True  # whether the monitor has not looked yet
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
            alone = len(self._state.ranks) == 1
            if self._said is None and not (alone and self._wanted):
                self._step += 1
                return False
        if self._last is None:
            self._last = self._step if alone else self._agreed()
        self.stopping = self._step >= self._last
        self._step += 1
        return self.stopping

    def _agreed(self) -> int:
        """The last step; see [Note: the last step]."""
        state, store = self._state, self._state.channel.store
        keys = {rank: f"{self._key}/{rank}" for rank in state.ranks}
        deadline = time.monotonic() + self._timeout_s

        def check(idle_s: float) -> None:
            state.watch.check((), idle_s, state.ranks)

        if not poll(lambda: store.check([*keys.values()]), len(keys), deadline, check):
            who = errors.name_ranks([rank for rank in keys if not store.check([keys[rank]])])
            what = f"StopRequest: {who} did not answer in {self._timeout_s:g} s"
            fix = "look for a rank that stopped, or that is not in a StopRequest of its own"
            raise errors.CollectiveError(what, fix=fix)
        return max(int(store.get(key)) for key in keys.values())

    def _listen(self, store: Any, changed: bool) -> None:
        """Called by the monitor at each tick, with its own connection to the store."""
        if self._said is not None:
            return
        asked, changed, self._new = f"{self._key}/asked", changed or self._new, False
        if self._wanted:
            store.set(asked, "")
            store.add(CHANGES, 1)
        elif not (changed and store.check([asked])):
            return
        with self._lock:
            self._said = self._step
        store.set(f"{self._key}/{self._state.rank}", str(self._said))

    def _depart(self, store: Store) -> None:
        """Write the answers that others may ask for later; the last rank deletes the keys."""
        with self._lock:
            said, self._said = self._said, self._said or self._step
        if said is None:
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

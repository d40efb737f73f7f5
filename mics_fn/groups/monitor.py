"""`Monitor`: the threads that tell other ranks that this one lives, and find out which ones do not.

[Note: signs of life] Each rank counts in the store, a few times per second, and reads the counts of
a few other ranks. A count that stands still for `heartbeat_s` is a rank that is silent: stopped, or
cut off, or gone with its host. It is measured anew from each meeting on. How long it stands still
is added up from the reader's own ticks, each of which adds no more than its length, so a process
that was stopped itself, or whose interpreter was held, accuses nobody. With its count a rank writes
which process it is. Those on its host see at their next tick that it is gone, so a rank that is
killed is named before the others know more than that some connection was closed. Nobody else calls
a rank killed, however silent it is. One that closes its groups writes that before it may end, so
whoever sees that a process is gone reads what it wrote last before it accuses that rank. Who finds
a failure writes it into the journal of each groups that the rank is in, see [Note: the journal] in
`peers`, and all ranks read it at their next tick.

Two threads do this. The store thread talks to the store, and may be stuck in it. The other one
ticks, and finds out that the store thread is stuck: then the store, or the rank that holds it, has
failed. They run while some groups of more than one rank are open in this process.

[Note: outlived] A launcher that is killed cannot end its ranks, and they would train on, with
nobody to stop them or to start them again. So each rank notices at a tick of its monitor that its
parent is another process, tells the other ranks, and ends at once, whatever it computes or waits
for. Only what a launcher has started is ended so: a shell or a kernel may go and leave a program
alone.
"""

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch.distributed as dist

from mics_fn import _torch
from mics_fn.errors import GroupsError, PeerFailed
from mics_fn.groups import peers
from mics_fn.groups.environment import read_launch
from mics_fn.groups.group_state import GroupState, announce_all, never_destruct
from mics_fn.groups.store_thread import BoundedStore, StoreLost, StoreThread
from mics_fn.store import CHANGES
from mics_fn.threads import Bell, Job, Latch, start

# The launcher of this process, and what becomes of a rank that has outlived it.


def was_launched(env: Mapping[str, str]) -> bool:
    """Whether the parent of a process with this environment is a launcher of several ranks.

    Ranks that a shell has started have the variables of torchrun, too, but no run of it.

    >>> was_launched({"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"})
    True
    >>> was_launched({"RANK": "0", "WORLD_SIZE": "2"}), was_launched({})
    (False, False)
    """
    if "TORCHELASTIC_RUN_ID" in env:
        return True
    try:
        launch = read_launch(env)
    except GroupsError:
        return False
    return launch is not None and launch.source != "torchrun"


class Launcher:
    """The parent of this process, if it is a launcher; see [Note: outlived]."""

    def __init__(self) -> None:
        self._pid = os.getppid() if was_launched(os.environ) else None

    def check(self, states: Sequence[GroupState]) -> None:
        """End this process if it is gone; called at each tick of the monitor."""
        if self._pid is None or not states or os.getppid() == self._pid:
            return
        text = f"the launcher of rank {states[0].rank} (process {self._pid}) is gone"
        error = GroupsError(text, fix="start the job again")
        announce_all(error, final=True, kind="exited")
        monitor.linger()
        sys.stderr.write(f"{error}\n")
        sys.stderr.flush()
        os._exit(1)


launcher = Launcher()

_PATIENCE_S = 0.5  # how long a rank that fails waits for the store
_PARTING_S = 3.0  # the same of a rank that closes its groups; else it would look killed at its end
_DOUBT_S = 0.6  # after a connection was closed, ranks that are silent for this long may be gone


class Monitor:
    """What watches the other ranks, for all groups of this process; see [Note: signs of life]."""

    def __init__(self) -> None:
        self._states: dict[GroupState, peers.Journal] = {}
        self._store_thread: StoreThread | None = None
        self._store: Any = None  # that the store thread is connected to
        self._peers = peers.Peers()
        self._number = self._rank = 0
        self._changes = ""
        self._host: tuple[int | None, str] = None, ""  # of the store: the rank, and the address
        self._own = peers.Process("", 0, "")
        self._stop, self._wake = Latch(), Bell()
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
        plain = isinstance(store, dist.Store)  # pyright: ignore[reportPrivateImportUsage]
        if plain and self._store is not None and store is not self._store:
            self._states.clear()  # groups of a torch.distributed that was shut down
            self._store_thread = None
        if self._store_thread is not None and self._store_thread.lost is not None:
            self._reconnect(self._store_thread)
        elif self._store_thread is None:
            self._store_thread, self._store = StoreThread(store), store if plain else None
            self._begin(self._store_thread)
        elif not self._states:
            self._begin(self._store_thread)
        self._rank, self._host = state.rank, _torch.store_host(store)
        state.report, state.retract = partial(self._report, state), partial(self._retract, state)
        state.make_final = partial(self._make_final, state)
        state.listen, state.on_close = partial(self._listen, state), partial(self.close, state)
        state.standing = {} if waits else self._ended_of(dict.fromkeys(state.ranks, ""))
        self._states[state] = peers.Journal("")
        failed = partial(self._store_failed, state)
        try:  # to connect may take long, as it looks for names of hosts
            self._store_thread.answer(self._store_thread.ask(self._write_heartbeat), timeout_s)
        except StoreLost as lost:
            raise failed(lost) from None
        return BoundedStore(self._store_thread, store, timeout_s, failed)

    @property
    def process(self) -> str:
        """The name of this process, as others know it; once some groups have joined."""
        return self._own.name

    def check_store(self, state: GroupState) -> None:
        """Raise PeerFailed if the store is gone, without which these ranks cannot meet.

        If it only gave no answer, what it could not be told is said again.
        """
        lost = None if self._store_thread is None else self._store_thread.lost
        if self._store_thread is None or lost is None or len(state.ranks) == 1:
            return
        if not lost.silent:
            raise self._store_failed(state, lost)
        self._reconnect(self._store_thread)

    def _reconnect(self, store_thread: StoreThread) -> None:
        """Reconnect to a store, and repeat the messages that it may have lost."""
        store_thread.renew()
        self._begin(store_thread)
        for state, journal in self._states.items():
            if state.announced is not None and state.key:
                store_thread.ask(partial(peers.said_to_all, journal, failure=state.announced))

    def dead(self, ranks: Sequence[int]) -> list[int]:
        """Return the ranks whose processes have ended and were not replaced."""
        return self._peers.dead(ranks)

    def name(self, state: GroupState, key: str, processes: Mapping[int, str] | None = None) -> None:
        """Give groups the key that all ranks agreed on, and their processes if these are known."""
        if processes is not None:  # they have met again, whatever was known of them before
            state.standing = self._ended_of(processes)
        journal = self._states[state] = peers.Journal(key)
        state.key, state.processes = key, dict(processes or {})
        for failure in state.standing.values():
            self._ask(partial(self._say_and_see, state, journal, failure))
        self._wake.ring()

    def _ended_of(self, processes: Mapping[int, str]) -> dict[int | None, peers.Failure]:
        """The failures of those that have ended, of ranks which meet; see `Peers.anew`."""
        return {rank: peers.without_a_word(rank, "killed") for rank in self._peers.anew(processes)}

    def close(self, state: GroupState) -> None:
        """Stop watching for these groups, which this rank has closed."""
        if self._states.pop(state, None) is None or self._states:
            return
        self._stop.set()
        self._wake.ring()
        self._bounded(partial(self._write_heartbeat, status=peers.PARKED), None, _PARTING_S)

    def linger(self) -> None:
        """Keep the store open for a moment, if this rank hosts it, for others to read."""
        if self._said and self._host[0] == self._rank:
            time.sleep(max(0.0, self._said + 2 * self._interval_s() - time.monotonic()))

    def end(self) -> None:
        """Stop the threads at exit: Python must not meet one that returns from C++."""
        self._stop.set()
        self._wake.ring()
        if self._store_thread is not None and self._store_thread.lost is None:
            self._store_thread.end_now(_PATIENCE_S)

    # What `GroupState` calls.

    def _report(self, state: GroupState, failure: peers.Failure) -> None:
        journal = self._states.get(state)
        if journal is not None and state.key:
            self._said = time.monotonic()
            self._bounded(partial(peers.said_to_all, journal, failure=failure), None)

    def _retract(self, state: GroupState) -> bool:
        """Withdraw this rank's error report; return False if another rank has given up."""
        journal = self._states.get(state)
        if journal is None or not self._bounded(
            partial(peers.withdrawn, journal, rank=state.rank), True
        ):
            return journal is None
        state.standing = journal.standing
        return True

    def _make_final(self, state: GroupState, failure: peers.Failure) -> bool:
        """Make a failure final; returns False if it was withdrawn before."""
        journal = self._states.get(state)
        if journal is None:
            return True
        return self._bounded(partial(journal.make_final, rank=failure.rank), True)

    def _listen(self, state: GroupState) -> bool:
        """Have the next tick at once; whether some rank may be found silent, for `explained`."""
        self._reread = True
        self._wake.ring()
        return bool(self._peers.silent(state.ranks, _DOUBT_S))

    def _ask(self, call: Callable[[Any], Any]) -> None:
        if self._store_thread is not None:
            self._store_thread.ask(call)

    def _bounded(self, call: Any, default: Any, patience_s: float = _PATIENCE_S) -> Any:
        """What the store thread answers, or a default if it does not in time."""
        store_thread = self._store_thread
        if store_thread is None:
            return default
        try:
            return store_thread.answer(store_thread.ask(call), patience_s)
        except Exception:
            return default

    def _store_failed(self, state: GroupState, lost: StoreLost) -> PeerFailed:
        """The error of a call to the store that has no end."""
        error = peers.of_store(*self._host, lost).error("its store")
        state.fail(error)
        return error

    # The threads.

    def _begin(self, store_thread: StoreThread) -> None:
        self._stop.set()  # of a thread that watched with a store that was lost
        self._peers, self._own = peers.Peers(), peers.Process.own()
        self._stop, self._request, self._changes = Latch(), None, ""
        watch = partial(self._watch, self._stop, store_thread)
        start(threading.Thread(target=watch, name="mics_fn monitor", daemon=True))

    def _watch(self, stop: Latch, store_thread: StoreThread) -> None:
        last = time.monotonic()
        while not stop.is_set():
            self._wake.wait(self._interval_s())
            now = time.monotonic()
            passed_s, last = min(now - last, self._interval_s()), now
            if stop.is_set():
                break
            self._iterate(store_thread, passed_s)

    def _interval_s(self) -> float:
        return peers.interval_s(max((len(state.ranks) for state in list(self._states)), default=1))

    def _iterate(self, store_thread: StoreThread, passed_s: float) -> None:
        """Check all ranks once for failures."""
        launcher.check(list(self._states))
        request, self._waited_s = self._request, self._waited_s + passed_s
        if request is not None and not request.done.is_set():
            limit_s = min((state.heartbeat_s for state in list(self._states)), default=60.0)
            if store_thread.lost is None and store_thread.connected and self._waited_s > limit_s:
                store_thread.lost = StoreLost(f"no answer for {limit_s:g} s", silent=True)
        for state in list(self._states):
            state.pass_time(passed_s)
            state.end_blocked_waits(passed_s)
        if store_thread.lost is not None:
            self._all_fail(peers.of_store(*self._host, store_thread.lost))
        elif request is None or request.done.is_set():
            if request is not None and request.error is None:
                self._judge(request.value, passed_s)
            self._waited_s = 0.0
            self._request = store_thread.ask(self._exchange)
        dead = self._peers.ended()
        if dead:
            store_thread.ask(partial(self._ended, dead))

    def _judge(self, heartbeats: dict[int, str], passed_s: float) -> None:
        """Find the ranks that are silent."""
        for rank, heartbeat in heartbeats.items():
            peer = self._peers.setdefault(rank, peers.Peer())
            before = peer.observe(heartbeat, self._own, passed_s)
            if before:  # another process has taken its place
                self._accuse(rank, "killed", before)
            limits = [state.heartbeat_s for state in list(self._states) if rank in state.ranks]
            excused = peer.parked or peer.dead or not limits
            if not excused and peer.is_silent(min(limits)):
                peer.dead = True
                self._accuse(rank, "silent")

    def _accuse(self, rank: int, kind: str, process: str = "") -> None:
        """Say that a rank has failed, in the journals of all groups that its process is in."""
        failure, parked = peers.without_a_word(rank, kind), self._peers[rank].parked
        process = process or self._peers[rank].name
        for state, journal in list(self._states.items()):
            now = state.processes.get(rank, process)  # it may have come back into these groups
            if rank not in state.ranks or (parked and state.key) or now != process:
                continue
            if state.key:
                self._ask(partial(self._say_and_see, state, journal, failure))
            else:  # groups that are still to be made
                state.standing = {**state.standing, rank: failure}

    def _say_and_see(
        self, state: GroupState, journal: peers.Journal, what: peers.Failure, store: Any
    ) -> None:
        peers.said_to_all(journal, store, failure=what)
        state.standing = journal.standing

    def _all_fail(self, failure: peers.Failure) -> None:
        for state in list(self._states):
            if failure.rank not in state.standing:
                state.standing = {**state.standing, failure.rank: failure}

    # On the store thread's thread.

    def _ended(self, ranks: Sequence[int], store: Any) -> None:
        """Report ranks whose processes ended before they closed their groups.

        Those that left in order come last, as they may have done so because of the others.
        """
        for rank in ranks:
            self._peers[rank].parts(store.get(peers.heartbeat_of(rank)).decode())
        for rank in sorted(ranks, key=lambda rank: self._peers[rank].parked):
            self._accuse(rank, "killed")

    def _write_heartbeat(self, store: Any, status: str = "open") -> None:
        self._number += 1
        own = self._own
        text = f"{self._number} {status} {own.host} {own.pid} {own.started}"
        store.set(peers.heartbeat_of(self._rank), text)

    def _exchange(self, store: Any) -> dict[int, str]:
        """Write this rank's sign of life and read what others wrote; returns their signs."""
        self._write_heartbeat(store)
        others = dict[int, None]()
        for state in list(self._states):
            others.update(dict.fromkeys(peers.followed(state.rank, state.ranks)))
        known = [x for x in others if x in self._peers or store.check([peers.heartbeat_of(x)])]
        reread, self._reread = self._reread, False
        if not self._changes:
            store.add(CHANGES, 0)
        before = [(state, state.processes) for state in list(self._states)]  # signs are read
        changes, *heartbeats = store.multi_get([CHANGES, *map(peers.heartbeat_of, known)])
        found = {rank: x.decode() for rank, x in zip(known, heartbeats, strict=True)}
        new = reread or changes.decode() != self._changes
        for state, journal in list(self._states.items()):
            if new and state.key:
                journal.read(store)
                state.standing = journal.standing
            state.notify(store, new)
            if state.key and not state.closed:
                state.idle.exchange(store, state)
                overdue = state.overdue(store)
                if overdue is not None:
                    self._say_and_see(state, journal, overdue, store)
        self._changes = changes.decode()
        for state, rank in (
            (state, rank) for state, met in before for rank in peers.replaced(met, found)
        ):
            if state in self._states and rank not in state.standing:
                failure = peers.without_a_word(rank, "killed")
                self._say_and_see(state, self._states[state], failure, store)
        return found


monitor = Monitor()  # of this process


def _forget() -> None:
    """Begin anew in a forked child: it has no threads, no groups, and no launcher as its parent."""
    launcher._pid = None
    monitor.__init__()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


# Errors that no block of the groups hears of, and the end of this process: other ranks are told.


def _shell() -> Any:
    """IPython's shell if this process has one."""
    shell = sys.modules.get("IPython")
    return None if shell is None else shell.get_ipython()


def limit_by_default(ranks: int) -> float:
    """Seconds of silence after which one of so many ranks has failed.

    10 for people at a prompt, else 60; more where signs of life are too rare for that.
    """
    usual = 10.0 if hasattr(sys, "ps1") or _shell() is not None else 60.0
    return max(usual, peers.least_limit_s(ranks))


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
    peers.end_aborts(patience_s=5.0)

"""`Monitor`: the threads that tell other ranks that this one lives, and find out which ones do not.

[Note: signs of life] Each rank counts in the store, a few times per second, and reads the counts of
a few other ranks. A count that stands still for `heartbeat_s` is a rank that is silent: stopped, or
cut off. How long it stands still is added up from the reader's own ticks, each of which adds no
more than its length, so a process that was stopped itself, or whose interpreter was held, accuses
nobody. With its count a rank writes which process it is. Those on its host see at their next tick
that it is gone, so a rank that is killed is named before the others know more than that some
connection was closed. Whoever finds a failure writes it into the journal of each groups that the
rank is in, see [Note: the journal] in `peers`, and all ranks read it at their next tick.

Two threads do this. The clerk talks to the store, and may be stuck in it. The other one ticks, and
finds out that the clerk is stuck: then the store, or the rank that holds it, has failed. They run
while some groups of more than one rank are open in this process.
"""

import os
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist

from mics_fn import _torch
from mics_fn.errors import PeerFailed
from mics_fn.groups.clerk import Clerk, Served, StoreLost, Task
from mics_fn.groups.launcher import launcher
from mics_fn.groups.life import Life
from mics_fn.groups.peers import Failure, Journal, without_a_word
from mics_fn.groups.signs import PARKED, Near, Peer, Process, followed
from mics_fn.schedules import NEWS

_TICK_S = 0.25
_RANKS_PER_TICK = 64  # one store serves all ranks, so that many more of them tick less often
_PATIENCE_S = 0.5  # how long a rank that fails or closes its groups waits for the store
_GONE_S = 0.6  # a rank is gone that is silent for so long, alone, after a connection was closed
_BEAT = "mics_fn/beat"


class Monitor:
    """What watches the other ranks, for all groups of this process; see [Note: signs of life]."""

    def __init__(self) -> None:
        self._lives: dict[Life, Journal] = {}
        self._clerk: Clerk | None = None
        self._store: Any = None  # that the clerk is connected to
        self._peers: dict[int, Peer] = {}
        self._near = Near()
        self._beats = self._rank = 0
        self._news = ""
        self._host: tuple[int | None, str] = None, ""  # of the store: the rank, and the address
        self._own = Process("", 0, "")
        self._stop, self._wake = threading.Event(), threading.Event()
        self._task: Task | None = None  # the tick that the clerk is at
        self._waited_s = 0.0  # for it
        self._said = 0.0  # when this rank has said that it failed
        self._again = False  # whether the journals are to be read, whatever the news

    # What groups call.

    def join(self, life: Life, timeout_s: float) -> Served:
        """Watch the ranks of groups; returns the store for their messages.

        Args:
          life: of the groups.
          timeout_s: bound in seconds of each call to the store.
        """
        store = _torch.default_store()
        plain = isinstance(store, dist.Store)  # pyright: ignore[reportPrivateImportUsage]
        if plain and self._store is not None and store is not self._store:
            self._lives.clear()  # groups of a torch.distributed that was shut down
            self._clerk = None
        if self._clerk is None or self._clerk.lost is not None:
            self._clerk, self._store = Clerk(store), store if plain else None
            self._begin(self._clerk)
        elif not self._lives:
            self._begin(self._clerk)
        self._rank, self._host = life.rank, _torch.store_host(store)
        life.report, life.settle = partial(self._report, life), partial(self._settle, life)
        life.listen, life.left = partial(self._listen, life), partial(self.leave, life)
        life.retract = partial(self._retract, life)
        gone = [rank for rank in life.ranks if self._is_gone(rank)]
        life.standing = {rank: without_a_word(rank, "killed") for rank in gone}
        self._lives[life] = Journal("")
        failed = partial(self._store_failed, life)
        try:  # to connect may take long, as it looks for names of hosts
            self._clerk.answer(self._clerk.ask(self._beat), timeout_s)
        except StoreLost as lost:
            raise failed(lost) from None
        return Served(self._clerk, store, timeout_s, failed)

    def name(self, life: Life, key: str) -> None:
        """Give groups their key in the store, once all ranks have agreed on one."""
        life.key = key
        journal = self._lives[life] = Journal(key)
        for failure in life.standing.values():
            self._ask(partial(self._say_and_read, life, journal, failure))
        self._wake.set()

    def leave(self, life: Life) -> None:
        """Watch no more for these groups, which this rank has closed."""
        if self._lives.pop(life, None) is None or self._lives:
            return
        self._stop.set()
        self._wake.set()
        self._bounded(partial(self._beat, state=PARKED), None)

    def linger(self) -> None:
        """Keep the store for a moment, if this rank holds it, for others to read what it said."""
        if self._said and self._host[0] == self._rank:
            time.sleep(max(0.0, self._said + 2 * self._tick_s() - time.monotonic()))

    def end(self) -> None:
        """End the threads with the process: Python must not meet one that comes back from C++."""
        self._stop.set()
        self._wake.set()
        if self._clerk is not None and self._clerk.lost is None:
            self._clerk.end_now(_PATIENCE_S)

    # What `Life` calls.

    def _report(self, life: Life, failure: Failure) -> None:
        journal = self._lives.get(life)
        if journal is not None and life.key:
            self._said = time.monotonic()
            self._bounded(partial(_said, journal, failure=failure), None)

    def _retract(self, life: Life) -> bool:
        """Withdraw what this rank has said of an error; False if another one has given up."""
        journal = self._lives.get(life)
        if journal is None or not self._bounded(partial(_withdrawn, journal, rank=life.rank), True):
            return journal is None
        life.standing = journal.standing
        return True

    def _settle(self, life: Life, failure: Failure) -> bool:
        """Whether a failure is final now."""
        journal = self._lives.get(life)
        if journal is None:
            return True
        return self._bounded(partial(journal.settle, rank=failure.rank), True)

    def _listen(self, life: Life) -> None:
        """Have the next tick at once, and find who is gone on another host, for `explained`."""
        self._again = True
        self._wake.set()
        peers = [(rank, self._peers[rank]) for rank in life.ranks if rank in self._peers]
        silent = [rank for rank, peer in peers if peer.silent_s > _GONE_S and not peer.parked]
        if len(silent) == 1 and not self._peers[silent[0]].gone:
            self._peers[silent[0]].gone = True
            self._accuse(silent[0], "killed")

    def _ask(self, call: Callable[[Any], Any]) -> None:
        if self._clerk is not None:
            self._clerk.ask(call)

    def _bounded(self, call: Callable[[Any], Any], default: Any) -> Any:
        """What the clerk answers, or a default if it does not in time."""
        clerk = self._clerk
        if clerk is None:
            return default
        try:
            return clerk.answer(clerk.ask(call), _PATIENCE_S)
        except Exception:
            return default

    def _store_failed(self, life: Life, lost: StoreLost) -> PeerFailed:
        """The error of a call to the store that has no end."""
        error = self._of_store(lost).error("its store")
        life.fail(error)
        return error

    def _of_store(self, lost: StoreLost) -> Failure:
        """The failure of the rank that holds the store, or of the store if no rank does."""
        rank, address = self._host
        who = "the store" if rank is None else f"rank {rank}, which holds the store,"
        what = "gives no answer" if lost.silent else f"is gone: {lost}"
        kind = "silent" if lost.silent else "killed"
        return Failure(rank, kind, f"{who}{' at ' if address else ''}{address} {what}")

    # The threads.

    def _begin(self, clerk: Clerk) -> None:
        self._stop.set()  # of a thread that watched with a store that was lost
        self._peers, self._near, self._own = {}, Near(), Process.own()
        self._stop, self._task, self._news = threading.Event(), None, ""
        watch = partial(self._watch, self._stop, clerk)
        threading.Thread(target=watch, name="mics_fn monitor", daemon=True).start()

    def _is_gone(self, rank: int) -> bool:
        peer = self._peers.get(rank)
        return peer is not None and peer.gone and not peer.parked

    def _watch(self, stop: threading.Event, clerk: Clerk) -> None:
        last, near = time.monotonic(), self._near
        while not stop.is_set():
            self._wake.wait(self._tick_s())
            self._wake.clear()
            now = time.monotonic()
            passed_s, last = min(now - last, self._tick_s()), now
            if stop.is_set():
                break
            self._tick(clerk, passed_s)
        near.forget()

    def _tick_s(self) -> float:
        most = max((len(life.ranks) for life in list(self._lives)), default=1)
        return _TICK_S * max(1.0, most / _RANKS_PER_TICK)

    def _tick(self, clerk: Clerk, passed_s: float) -> None:
        """One look at all that may have failed."""
        launcher.look(list(self._lives))
        task, self._waited_s = self._task, self._waited_s + passed_s
        if task is not None and not task.done.is_set():
            limit_s = min((life.heartbeat_s for life in list(self._lives)), default=60.0)
            if clerk.lost is None and clerk.connected and self._waited_s > limit_s:
                clerk.lost = StoreLost(f"no answer for {limit_s:g} s", silent=True)
        for life in list(self._lives):
            life.end_blocked_waits(passed_s)
        if clerk.lost is not None:
            self._all_fail(self._of_store(clerk.lost))
        elif task is None or task.done.is_set():
            if task is not None and task.error is None:
                self._judge(task.value, passed_s)
            self._waited_s = 0.0
            self._task = clerk.ask(self._exchange)
        for rank in self._near.ended():
            if not self._peers[rank].gone:
                self._peers[rank].gone = True
                self._accuse(rank, "killed")

    def _judge(self, beats: dict[int, str], passed_s: float) -> None:
        """Find the ranks that are silent."""
        for rank, beat in beats.items():
            peer = self._peers.setdefault(rank, Peer())
            process = peer.heard(beat, self._own, passed_s)
            if process is not None:
                self._near.add(rank, process)
            limits = [life.heartbeat_s for life in list(self._lives) if rank in life.ranks]
            if limits and not peer.parked and not peer.gone and peer.is_silent(min(limits)):
                peer.gone = True
                self._accuse(rank, "silent")

    def _accuse(self, rank: int, kind: str) -> None:
        """Say that a rank has failed, in the journals of all groups that it is in."""
        failure, parked = without_a_word(rank, kind), self._peers[rank].parked
        for life, journal in list(self._lives.items()):
            if rank not in life.ranks or (parked and life.key):
                continue
            if life.key:
                self._ask(partial(self._say_and_read, life, journal, failure))
            else:  # groups that are still to be made
                life.standing = {**life.standing, rank: failure}

    def _say_and_read(self, life: Life, journal: Journal, failure: Failure, store: Any) -> None:
        _said(journal, store, failure=failure)
        life.standing = journal.standing

    def _all_fail(self, failure: Failure) -> None:
        for life in list(self._lives):
            if failure.rank not in life.standing:
                life.standing = {**life.standing, failure.rank: failure}

    # On the clerk's thread.

    def _beat(self, store: Any, state: str = "open") -> None:
        self._beats += 1
        own = self._own
        text = f"{self._beats} {state} {own.host} {own.pid} {own.started}"
        store.set(f"{_BEAT}/{self._rank}", text)

    def _exchange(self, store: Any) -> dict[int, str]:
        """Write this rank's sign of life and read what others wrote; returns their signs."""
        self._beat(store)
        others = dict[int, None]()
        for life in list(self._lives):
            others.update(dict.fromkeys(followed(life.rank, life.ranks)))
        known = [rank for rank in others if self._peers.get(rank) or store.check([_beat_of(rank)])]
        again, self._again = self._again, False
        if not self._news:
            store.add(NEWS, 0)
        news, *beats = store.multi_get([NEWS, *map(_beat_of, known)])
        new = again or news.decode() != self._news
        for life, journal in list(self._lives.items()):
            if new and life.key:
                journal.read(store)
                life.standing = journal.standing
            life.hear(store, new)
        self._news = news.decode()
        return {rank: beat.decode() for rank, beat in zip(known, beats, strict=True)}


def _beat_of(rank: int) -> str:
    return f"{_BEAT}/{rank}"


def _said(journal: Journal, store: Any, failure: Failure) -> None:
    if journal.say(store, failure):
        store.add(NEWS, 1)  # all ranks read it


def _withdrawn(journal: Journal, store: Any, rank: int) -> bool:
    try:
        return journal.withdraw(store, rank)
    finally:
        store.add(NEWS, 1)


monitor = Monitor()  # of this process


def _forget() -> None:
    """In a forked child there are no threads, and the groups are those of the parent."""
    monitor.__init__()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)

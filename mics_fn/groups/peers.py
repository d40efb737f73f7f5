"""`Failure`: what is known of a rank that failed; the `Journal` in which all ranks read of it.

[Note: the journal] The first failure wins, an exception that is caught may be withdrawn, and a rank
that waits may have given up before that. All ranks must come to the same end, so what they say is
one list in the store: each entry is appended by `compare_set` at the first free number, so a writer
has read all that was written before it. What comes first counts: a withdrawal after some rank gave
up is void, and so is giving up after a withdrawal.

[Note: no torn step] A rank that raised in step k + 1 has finished step k, which a slower rank may
still be in: it must finish it too. So a rank says how many collectives it had issued on each
communicator, and others go on waiting for one that it did issue. A rank that gives up says the same
of itself, so that those who wait for it give up as well.

[Note: one thread at a time] A second thread that used communicators while a first one uses them
would issue collectives in between, in an order that other ranks do not have. It is refused. But
threads may take turns, as those do in which autograd runs backward on an accelerator, while the
first one waits for them. So a whole step keeps others from steps of their own, and only what issues
collectives or waits for them keeps others from all communicators.

[Note: retired groups] Collectives may still be under way on groups that ranks let go of, after an
error. gloo's destructor waits for them, without the lock of the interpreter. They end once every
rank has let go, for at least one of the ranks has nothing under way on a group, and those that wait
for it fail then. So a thread waits for it, one group after the other, in one order on all ranks.

[Note: a rank that makes no call] A rank may give signs of life and make no call: its loader hangs,
it is in a debugger, or its loop has ended before those of the others, who wait for it. Nothing says
whether it will go on, so it has `timeout_s`, as any rank that is slow. Each rank that has made no
call for `heartbeat_s`, or half of `timeout_s` if that is less, writes how many calls it has made,
for which others it waits, and where its main thread is. A rank that waits follows those for whom it
waits, and for whom these wait in turn, up to ranks that wait for nobody and lack such a call. Of
these the one with the fewest calls is behind. The first of the others names it in a warning, and
after `timeout_s` all do in their error.
"""

import faulthandler
import json
import os
import re
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch.distributed as dist

from mics_fn import _torch, errors
from mics_fn.groups.store_thread import StoreLost
from mics_fn.spans import LOG
from mics_fn.store import CHANGES, Store, Stuck, call_text
from mics_fn.threads import start

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
                raise errors.GroupsError(text, fix="let the loss compute, and step after it")
            self._stepping = True
            try:
                yield
            finally:
                self._stepping = False


def _refused() -> errors.GroupsError:
    name = threading.current_thread().name
    text = f"thread {name!r} uses groups that another thread is using"
    return errors.GroupsError(text, fix="call the verbs of one set of groups in one thread")


# How process groups are let go of that nobody uses any more.


def discard(group: dist.ProcessGroup) -> None:
    """Discard a process group without waiting for its collectives."""
    if dist.get_backend(group) == "gloo":
        dist.destroy_process_group(group)
    else:
        abort(group)


_ABORTS = WeakSet[threading.Thread]()


def abort(group: dist.ProcessGroup) -> threading.Thread:
    """Abort a process group on a thread, which is returned."""
    task = partial(quietly, partial(_torch.abort, group))
    _ABORTS.add(thread := start(threading.Thread(target=task, daemon=True)))
    return thread


def end_aborts(patience_s: float) -> None:
    """Wait for aborts at exit: a thread that comes back from C++ after Python ends the process."""
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
        own = f"this rank waits for {waits}" if waits else ""
        path, leaf, *said = self.file_error or ["", ""]
        where = [*said[:-1], ", ".join(part for part in (at, last) if part), own]
        fix = "look at its own error, then call groups = mf.reset(groups) on all ranks"
        if self.kind in ("killed", "exited", "silent"):
            fix = "look at its own output; start it again, and call mf.reset(groups) or"
            fix += " trainer.reset() on all ranks; or start the job again"
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


def without_a_word(rank: int, kind: str) -> Failure:
    """The failure of a rank that could not say so itself."""
    what = "gone: its process ended without a word"
    if kind == "silent":
        what = "silent: it is stopped, cut off, or something holds its interpreter"
    return Failure(rank, kind, f"rank {rank} is {what}")


def of_store(rank: int | None, address: str, lost: StoreLost) -> Failure:
    """The failure of the rank that holds the store, or of the store if no rank does."""
    who = "the store" if rank is None else f"rank {rank}, which holds the store,"
    what = "gives no answer" if lost.silent else f"is gone: {lost}"
    kind = "silent" if lost.silent else "killed"
    return Failure(rank, kind, f"{who}{' at ' if address else ''}{address} {what}")


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


class Journal:
    """Log of failures that the ranks of some groups share; see [Note: the journal].

    Only the store thread calls what takes a store.

    Args:
      key: prefix of its keys, which no other groups of the job use.
    """

    def __init__(self, key: str) -> None:
        self._key = f"{key}/failed"
        self._read = 0  # entries read
        self.standing: dict[int | None, Failure] = {}  # by rank, in the order of the entries

    def read(self, store: Any) -> None:
        """Read new entries."""
        while store.check([self._at()]):
            self._take(store.get(self._at()))

    def say(self, store: Any, failure: Failure) -> bool:
        """Append a failure, unless the same stands; returns whether it was appended."""
        self.read(store)
        while (known := self.standing.get(failure.rank)) is None or not known.final:
            if known is not None and not failure.final:
                return False
            if self._append(store, {"fails": asdict(failure)}):
                return True
        return False

    def withdraw(self, store: Any, rank: int) -> bool:
        """Withdraw a rank's own failure; return False if another rank gave up because of it."""
        self.read(store)
        while (known := self.standing.get(rank)) is not None:
            if known.final:
                return False
            self._append(store, {"withdraws": rank})
        return True

    def make_final(self, store: Any, rank: int | None) -> bool:
        """Make a failure final; False if it was withdrawn before."""
        self.read(store)
        while (known := self.standing.get(rank)) is not None:
            if known.final:
                return True
            self._append(store, {"settles": rank})
        return False

    def _at(self) -> str:
        return f"{self._key}/{self._read}"

    def _append(self, store: Any, entry: dict[str, Any]) -> bool:
        mine = json.dumps(entry)
        found = store.compare_set(self._at(), "", mine)
        self._take(found)
        return found.decode() == mine

    def _take(self, found: bytes) -> None:
        self._read += 1
        # Whoever wrote it had read all that was written before, so it can be taken as it stands.
        entry, standing = json.loads(found), dict(self.standing)
        if "withdraws" in entry:
            del standing[entry["withdraws"]]
        elif "settles" in entry:
            standing[entry["settles"]] = replace(standing[entry["settles"]], final=True)
        else:
            failure = Failure(**entry["fails"])
            first = standing.get(failure.rank, failure)  # it may have said why before
            standing[failure.rank] = replace(
                first,
                final=failure.final,
                made=failure.made or first.made,
                issued=failure.issued or first.issued,
            )
        self.standing = standing


def said_to_all(journal: Journal, store: Any, failure: Failure) -> None:
    """Append a failure, and have all ranks read it."""
    if journal.say(store, failure):
        store.add(CHANGES, 1)


def withdrawn(journal: Journal, store: Any, rank: int) -> bool:
    """`Journal.withdraw`, and have all ranks read it."""
    try:
        return journal.withdraw(store, rank)
    finally:
        store.add(CHANGES, 1)


def same_place(mine: Mapping[str, int], theirs: Mapping[str, int]) -> bool:
    """Whether two ranks have made equally many calls on each communicator that both are in."""
    return all(theirs[key] == made for key, made in mine.items() if key in theirs)


# Signs of life of another rank: what it wrote last, and its process if that is on this host.

PARKED = "closed"  # what a rank writes none of whose groups are open
_TICK_S = 0.25
_RANKS_PER_TICK = 64  # one store serves all ranks, so that many more of them tick less often
_LEAST_TICKS = 3  # without a sign of life, before a rank is taken for lost


def interval_s(ranks: int) -> float:
    """Seconds between two signs of life of a rank, in a job of so many."""
    return _TICK_S * max(1.0, ranks / _RANKS_PER_TICK)


def least_limit_s(ranks: int) -> float:
    """The least `heartbeat_s` that is no alarm for a rank which is well, in a job of so many."""
    return _LEAST_TICKS * interval_s(ranks)


def check_limits(timeout_s: float, heartbeat_s: float | None, ranks: int) -> None:
    """Raise PlanError unless these are seconds above 0, and enough for a job of so many ranks."""
    given = {"timeout_s": timeout_s} | ({} if heartbeat_s is None else {"heartbeat_s": heartbeat_s})
    for name, limit in given.items():
        if not isinstance(limit, int | float) or limit is True or not 0 < limit < 1e8:
            raise errors.PlanError(
                f"{name}={limit!r} is not a time limit", fix="pass seconds above 0"
            )
    least = least_limit_s(ranks)
    if heartbeat_s is not None and heartbeat_s < least:
        text = f"heartbeat_s={heartbeat_s!r} would take ranks for lost that are well"
        lines = [f"signs of life come every {interval_s(ranks):g} s"]
        raise errors.PlanError(text, lines, f"pass at least {least:g}")


@dataclass(frozen=True)
class Process:
    """A process, as others on its host can find it."""

    host: str  # one boot of a machine, and one space of process numbers in it
    pid: int
    started: str  # in clock ticks since the boot; another process of this number has another one

    @classmethod
    def own(cls) -> "Process":
        """This process; its host is unknown where it cannot see what others run there."""
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            host = f"{boot}/{os.readlink('/proc/self/ns/pid')}"
            hides = not _stat(1)[0]  # as /proc may hide the processes of other users
            return cls("" if hides else host, os.getpid(), _stat(os.getpid())[1])
        except OSError:
            return cls("", os.getpid(), "")

    @property
    def name(self) -> str:
        """A text that no other process of the job has."""
        return f"{self.host} {self.pid} {self.started}"

    def has_ended(self) -> bool:
        """Whether it has ended; only asked on its own host."""
        return _stat(self.pid)[1] != self.started

    def is_ready(self) -> bool:
        """Whether it computes, or waits for a processor; only asked on its own host."""
        return _stat(self.pid) == ("R", self.started)


def _stat(pid: int) -> tuple[str, str]:
    """The state of a process, and when it was started; "" if it has ended."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return "", ""
    return (fields[0], fields[19]) if fields[0] not in "ZX" else ("", "")


def followed(rank: int, ranks: Sequence[int], most: int = 16) -> list[int]:
    """The ranks that a rank follows: all of a few, else those next to it on both sides.

    >>> followed(1, range(4)), followed(0, range(100), most=4)
    ([0, 2, 3], [98, 99, 1, 2])
    """
    if rank not in ranks or len(ranks) <= most:
        return [other for other in ranks if other != rank]
    at, half = ranks.index(rank), most // 2
    return [ranks[(at + i) % len(ranks)] for i in range(-half, half + 1) if i]


def heartbeat_of(rank: int) -> str:
    """The key under which a rank writes signs of life."""
    return f"mics_fn/beat/{rank}"


def name_in(heartbeat: str) -> str:
    """The name of the process that wrote a sign of life."""
    return heartbeat.split(" ", 2)[2]


def replaced(processes: Mapping[int, str], heartbeats: Mapping[int, str]) -> list[int]:
    """Return the ranks whose heartbeats come from another process than the one given.

    >>> replaced({0: "host 7 1", 1: "host 8 1"}, {0: "3 open host 7 1", 1: "1 open host 9 2"})
    [1]
    """
    both = [rank for rank in processes if heartbeats.get(rank)]
    return [rank for rank in both if name_in(heartbeats[rank]) != processes[rank]]


class Peer:
    """What is known of another rank."""

    def __init__(self) -> None:
        self.heartbeat = ""  # what it wrote last
        self.name = ""  # of the process that wrote it
        self.process: Process | None = None  # if it is on this host
        self.silent_s = 0.0
        self.dead = False
        self.parked = True  # whether none of its groups are open, as far as is known

    def observe(self, heartbeat: str, own: Process, interval_s: float) -> str:
        """Take note of what it wrote, read at least a tick after the last time.

        Returns:
          the name of its process before, if another one took its place.
        """
        if heartbeat == self.heartbeat or not heartbeat:
            self.silent_s += interval_s
            return ""
        before, self.name = self.name, name_in(heartbeat)
        _, status, host, pid, started = heartbeat.split(" ")
        self.process = Process(host, int(pid), started) if host and host == own.host else None
        self.heartbeat, self.silent_s = heartbeat, 0.0
        self.parked, self.dead = status == PARKED, False
        return before if before != self.name else ""

    def parts(self, heartbeat: str) -> None:
        """Take note of what it wrote last, once its process has ended."""
        if name_in(heartbeat) == self.name:
            self.parked = heartbeat.split(" ", 2)[1] == PARKED

    def is_silent(self, limit_s: float) -> bool:
        """Whether it has failed; one that waits for a processor is given twice the time."""
        waits = self.process is not None and self.process.is_ready()
        return self.silent_s > limit_s * (2 if waits else 1)


class Peers(dict[int, Peer]):
    """What is known of other ranks, by rank."""

    def ended(self) -> list[int]:
        """Mark the ranks whose processes on this host have ended as gone; return the new ones."""
        ended = []
        for rank, peer in list(self.items()):
            if not peer.dead and peer.process is not None and peer.process.has_ended():
                peer.dead = True
                ended.append(rank)
        return ended

    def dead(self, ranks: Iterable[int]) -> list[int]:
        """Those of these ranks that are gone, and had not closed their groups before."""
        return [x for x in ranks if x in self and self[x].dead and not self[x].parked]

    def anew(self, processes: Mapping[int, str]) -> list[int]:
        """Measure signs of life anew, as these ranks meet: silence before it means nothing.

        Args:
          processes: of the ranks that meet, by rank; "" for the last one that was heard of.

        Returns:
          Those of them whose process was seen to end, with open groups.
        """
        dead = []
        for rank, process in processes.items():
            peer = self.get(rank, Peer())
            ended = peer.process is not None and peer.process.has_ended() and not peer.parked
            if ended and process in ("", peer.name):
                dead.append(rank)
            elif not ended:
                peer.silent_s, peer.dead = 0.0, False
        return dead

    def silent(self, ranks: Iterable[int], limit_s: float) -> list[int]:
        """Those of these ranks with open groups that gave no sign for so long."""
        known = [rank for rank in ranks if rank in self and not self[rank].parked]
        return [rank for rank in known if self[rank].silent_s > limit_s]


# `Idle`: for how long a rank has made no call, where it is, and which rank the others wait for.

_WAITS_S = 1.5  # a wait that was noted longer ago has ended
_FRAMES = 12  # of the main thread, the innermost first
_OTHERS = (
    os.path.dirname(os.__file__),
    "site-packages",
    os.path.dirname(os.path.dirname(__file__)),
)

Counts = Mapping[str, tuple[int, int]]  # by communicator, how many calls were made and issued


class Idle:
    """What one rank has done on some groups, and since when nothing; see the note of this page.

    Args:
      ranks: of the groups.
      rank: this one.
    """

    def __init__(self, ranks: Sequence[int], rank: int) -> None:
        self._ranks, self._rank = ranks, rank
        self.seconds = 0.0  # without a call, by the ticks of the monitor
        self._counts: Counts = {}
        self._waits: tuple[float, Sequence[Stuck], Sequence[int]] = (0.0, (), ())
        self._warned_of, self._warned = "", False

    def waits(self, stuck: Sequence[Stuck], missing: Sequence[int] = ()) -> None:
        """Note what this rank waits for: calls, or ranks whatever they have called."""
        if stuck or missing:
            self._waits = time.monotonic(), stuck, missing

    def pass_time(self, counts: Counts, passed_s: float) -> None:
        """Count the time since the last call; called at each tick."""
        same = counts == self._counts
        self.seconds = self.seconds + passed_s if same else 0.0
        self._counts, self._warned = counts, self._warned and same

    def exchange(self, store: Any, state: Any) -> None:
        """Write where this rank is if that is of interest, and warn of one that is behind."""
        limit_s = min(state.heartbeat_s, state.timeout_s / 2)
        text = self._text(state.step, state.call) if self.seconds > limit_s else ""
        if text != self._warned_of:
            self._warned_of = text
            store.set(f"{state.key}/idle/{self._rank}", text)
        if self._warned or self.seconds < limit_s + 4 * interval_s(len(self._ranks)):
            return
        self._warned = True
        failure = self.behind(store, state.key)
        if failure and self._rank == next(rank for rank in self._ranks if rank != failure.rank):
            text = f"{failure.text}; others wait for it up to timeout_s={state.timeout_s:g}"
            LOG.warning(errors.message(text, [failure.trace.replace("\n", " < ")]))

    def _text(self, step: int | None, call: Any) -> str:
        since, stuck, missing = self._waits
        waits = [[each.group, each.number, each.ranks] for each in stuck]
        waits = [*waits, ["", 0, missing]] if time.monotonic() - since < _WAITS_S else []
        operation, leaf = ("", "") if call is None else (call_text(call), str(call[2]))
        at, frames = main_thread()
        said = {"counts": self._counts, "waits": waits, "step": step, "operation": operation}
        return json.dumps(said | {"leaf": leaf, "at": at, "frames": frames})

    def behind(self, store: Store, key: str, stuck: Iterable[Stuck] = ()) -> Failure | None:
        """The failure of the rank that this one waits for in the end, if that makes no call.

        Args:
          store: of the job.
          key: of the groups.
          stuck: what this rank waits for; by default all that it has called.
        """
        done = self._counts.items()
        waits: list[Any] = [[each.group, each.number, each.ranks] for each in stuck]
        waits = waits or [[group, made, self._ranks] for group, (made, _) in done]
        found, said = dict[int, Any](), dict[int, Any]({self._rank: {}})
        while waits:
            group, number, ranks = waits.pop()
            for rank in ranks:
                if rank not in said:
                    said[rank] = _read(store, f"{key}/idle/{rank}")
                    waits += said[rank].get("waits", ())
                there = said[rank]
                if there and not there["waits"] and _lacks(there["counts"], group, number):
                    found[rank] = there
        if not found:
            return None
        rank = min(found, key=lambda rank: sum(made for made, _ in found[rank]["counts"].values()))
        counts = found[rank]["counts"].items()
        text = f"rank {rank} is behind: it lives, but makes no call; it is {found[rank]['at']}"
        return Failure(
            rank,
            "stalled",
            text,
            step=found[rank]["step"],
            operation=found[rank]["operation"],
            leaf=found[rank]["leaf"],
            trace="\n".join(found[rank]["frames"]),
            made={group: made for group, (made, _) in counts},
            issued={group: issued for group, (_, issued) in counts},
        )


def _read(store: Store, key: str) -> dict[str, Any]:
    """What a rank wrote; nothing while it makes calls."""
    text = store.get(key).decode() if store.check([key]) else ""
    return json.loads(text) if text else {}


def _lacks(counts: Mapping[str, Sequence[int]], group: str, number: int) -> bool:
    """Whether a rank has not issued a call that another one waits for; "" is for any."""
    if not group:
        return True
    return group in counts and counts[group][1] < number


def main_thread() -> tuple[str, list[str]]:
    """Where the main thread of this process is: in words, and its frames, the innermost first.

    The main thread runs meanwhile: only faulthandler walks its frames without letting it go on.
    """
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        text = file.read().decode(errors="replace")
    ident = threading.main_thread().ident or 0
    own = re.search(rf"^\S.* 0x0*{ident:x}\b.*\n((?:  .*\n)*)", text, flags=re.MULTILINE)
    stack = re.findall(r'^  File "(.*)", line (\d+) in (.*)$', own[1] if own else "", re.MULTILINE)
    stack = stack[:_FRAMES]
    frames = [f"{os.path.basename(file)}:{line} in {name}" for file, line, name in stack]
    users = [
        text
        for (file, _, _), text in zip(stack, frames, strict=True)
        if not any(other in file for other in _OTHERS) and file[:1] != "<"
    ]
    inner = f"at {frames[0]}" if frames else "nowhere"
    return inner if users[:1] in ([], frames[:1]) else f"{inner}, called at {users[0]}", frames

"""Long work of all ranks that is done part by part; an error of one rank ends it on all of them.

[Note: parts] What ranks read, make and write by themselves may take minutes, and one of them may
fail in the first second, as its disk is full. It then writes a key into the store, of which the
monitors of the others hear at their next tick, and they leave their work before its next part. At
the end of the block all ranks compare how it went, so they raise at the same place: the groups stay
usable, and whatever the block has made goes with the error. Where parts send something, all ranks
go on to the last part, as the others wait for it there, but they do nothing else any more.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any, TypeVar

from mics_fn.collectives.agreement import collect_bytes, told_outside
from mics_fn.errors import DesyncError, MicsError, disagreement, message
from mics_fn.groups import Failure, Groups, Life, failure_of
from mics_fn.schedules import NEWS
from mics_fn.store import later

R = TypeVar("R")


class Parts:
    """What a block of work knows of the other ranks; made by `in_parts`.

    Args:
      homes: the groups whose ranks do it.
      sends: whether parts send something, so that all ranks have to come to the last one.
    """

    def __init__(self, homes: Sequence[Groups] = (), *, sends: bool = False) -> None:
        self._sends = sends
        self.error: Exception | None = None  # of this rank
        self.told = False  # whether another rank has failed
        self.left = False  # whether this rank has therefore left something out
        self._watches: list[_Watch] = []
        for life in dict.fromkeys(home.life for home in homes):
            if len(life.ranks) > 1:
                self._watches.append(_Watch(self, life))

    def part(self, work: Callable[[], R]) -> R | None:
        """Do one part by itself, which sends nothing.

        Returns:
          What it gives; None if some rank has failed and all go on to the last part.
        """
        self.hear()
        if self.left or self.error is not None:
            return None
        try:
            return work()
        except Exception as error:
            if not self._sends:
                raise
            self.fail(error)
            return None

    def hear(self) -> None:
        """Leave the block if another rank has failed; called where nothing is half done."""
        if self.told:
            self.left = True
            if not self._sends:
                raise _Left

    def fail(self, error: Exception) -> None:
        """Note the error of this rank, and have the others hear of it."""
        if self.error is None:
            self.error = error
            for watch in self._watches:
                watch.tell()

    def end(self) -> None:
        """Stop listening."""
        for watch in self._watches:
            watch.end()

    def tidy(self) -> None:
        """Remove what this rank has written in the store, once all have left the block."""
        for watch in self._watches:
            watch.tidy()


class _Left(MicsError):
    """Another rank has failed; it does not leave `in_parts`."""


class _Watch:
    """Tells the ranks of one `Life` that this one has failed, and hears whether others have."""

    def __init__(self, parts: Parts, life: Life) -> None:
        self._parts, self._life = parts, life
        life.works += 1
        self._key, self._new = f"{life.key}/parts/{life.works}", True
        self._wrote = False
        life.listeners.append(self._hear)

    def _hear(self, store: Any, news: bool) -> None:
        """Called by the monitor at each tick, with its own connection to the store."""
        news, self._new = news or self._new, False
        if news and store.check([self._key]):
            self._parts.told = True

    def tell(self) -> None:
        store = self._life.job.store
        if store is not None:
            self._wrote = True
            later(store, "set", self._key, "")
            later(store, "add", NEWS, 1)

    def end(self) -> None:
        self._life.listeners.remove(self._hear)

    def tidy(self) -> None:
        if self._wrote:
            later(self._life.job.store, "delete_key", self._key)


@contextmanager
def in_parts(what: str, groups: Sequence[Groups], *, sends: bool = False) -> Iterator[Parts]:
    """A block of work that is done part by part; if it raises on some ranks, all ranks raise.

    Args:
      what: the verb, for errors.
      groups: whose ranks do it.
      sends: whether its parts send something. Then what each rank does by itself is wrapped in
        `Parts.part`, which notes an error until the end of the block.

    Yields:
      A `Parts`. A block that sends nothing calls its `hear` or `part` now and then.

    Raises:
      PeerOffloadError: a file of another rank failed; it names the same file and leaf. The groups
        can be used afterwards.
      DesyncError: the block raised something else on other ranks. A rank on which the block raised
        gets that error instead.

    Communication: two small all-gathers over the partition group and over the replication group; a
      failure writes one key into the store.
    """
    homes = list(dict.fromkeys(groups))
    parts = Parts(homes, sends=sends)
    try:
        yield parts
    except _Left:
        pass
    except Exception as found:
        parts.fail(found)
    finally:
        parts.end()
    error, parts.error = parts.error, None
    try:
        if error is None or all(home.life.failed is None for home in homes):
            told = _compared(what, homes, error, left=parts.left)
            parts.tidy()
            error = error or told
        if error is not None:
            raise error
    finally:
        error = told = None  # else it would refer to itself, and keep what the block has made


def _compared(
    what: str, homes: Sequence[Groups], error: Exception | None, *, left: bool
) -> Exception | None:
    """The error of ranks that have none of their own, once all have said whether they have one."""
    found, lost = dict[int, Any](), list[Groups]()
    for home in homes:
        if home.partition_size * home.num_replicas > 1:
            said = None if error is None else asdict(failure_of(error, home.rank, final=False))
            mine = json.dumps({"failed": said, "left": left}).encode()
            answers = {rank: json.loads(x) for rank, x in collect_bytes(home, mine).items()}
            found |= answers
            lost += [home] if any(each["failed"] for each in answers.values()) else []
    failed = {r: Failure(**each["failed"]) for r, each in sorted(found.items()) if each["failed"]}
    if failed:
        verdict = _verdict(what, found, failed)
        for home in lost:
            told_outside(home, verdict)
        return verdict
    if any(each["left"] for each in found.values()):
        fix = "call the same verbs in the same order on every rank"
        return DesyncError(message(f"{what}: a rank has left it, as one failed elsewhere", fix=fix))
    return None


def _verdict(what: str, found: dict[int, Any], failed: dict[int, Failure]) -> Exception:
    """The error of the ranks that have none of their own: of a file, if one has failed."""
    for rank, failure in failed.items():
        if failure.stored is not None:
            text = f"{what}: rank {rank} failed: {failure.text}"
            return replace(failure, text=text).error("", ends=False)
    fix = "pass the same arguments on every rank, and files that every rank can read"
    texts = {rank: failed[rank].text if rank in failed else "" for rank in sorted(found)}
    return disagreement(f"{what}: ranks differ", texts, fix)

"""`PendingSave`: a save under way, and how its ranks come to one end; see [Note: no plan travels].

[Note: no plan travels] Each rank knows by arithmetic what it writes, so nobody collects plans. At
the start ranks compare digests, and the first rank makes the folder. Then each of them writes its
file and leaves a record of fixed size in the store; the first rank reads the records, writes the
manifest, commits, and says so. After the start this needs no collective, so a thread does it while
training goes on.
"""

import json
import math
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from mics_fn import points
from mics_fn.checkpoint.agreeing import Agreed
from mics_fn.checkpoint.directory import Folder
from mics_fn.checkpoint.disk import step_back
from mics_fn.checkpoint.manifest import Writer
from mics_fn.checkpoint.parts import Record, cannot_write
from mics_fn.checkpoint.together import retold, told
from mics_fn.errors import CheckpointError, CheckpointWriteError, message, name_ranks
from mics_fn.groups import Life, StopRequest
from mics_fn.log import LOG
from mics_fn.store import Store, later, poll
from mics_fn.threads import start

_GRACE_S = 5.0  # in which a rank that failed may still leave its record
_GONE = ("killed", "silent")  # failures of ranks that leave none
_WAIT_S = 0.1  # between two looks of whoever waits for a save


class PendingSave:
    """A save under way; made by `start_save`.

    Args:
      agreed: what is saved.
      write: writes this rank's file.
      follows: whether training goes on, and `due` is called after each step.
    """

    def __init__(
        self,
        agreed: Agreed,
        write: Callable[[], Record | BaseException],
        *,
        follows: bool = True,
    ) -> None:
        self.step = agreed.options.step
        self._agreed, self._write, self._life = agreed, write, agreed.home.life
        self._alone = agreed.home.world_size == 1
        self._store = cast(Store, self._life.job.store)
        self._life.saves += 1
        self._number = self._life.saves
        self._key = self._key_of(self._number)
        self._timeout_s = agreed.home.timeout_s
        self._path: Path | None = None
        self._error: BaseException | None = None
        self._told = not follows  # whether the program knows how it ended: it waits for itself
        self._stop = StopRequest(agreed.home, ()).__enter__() if follows else None
        self._life.endings.append(self.finish)
        self._place = os.path.realpath(agreed.folder.path)
        # A process that ends waits for this thread, as it is not a daemon.
        self._thread = threading.Thread(target=self._run, name="mics_fn save")
        _UNDER_WAY[self._place] = self
        try:
            start(self._thread)
        except RuntimeError:  # the system has no thread left, and the other ranks wait for this one
            self._run()

    @property
    def done(self) -> bool:
        """Whether it has ended on this rank; ranks may see that in different steps."""
        return not self._thread.is_alive()

    def due(self) -> bool:
        """Whether it has failed, and `wait` would raise; all ranks call it at the end of each step.

        Returns:
          True on all ranks after the same step, and from then on.

        Communication: none until it has failed; then once, through the store.
        """
        return self._stop is not None and self._stop.due()

    def wait(self) -> Path:
        """Wait until the step is committed.

        Returns:
          The folder of the step.

        Raises:
          CheckpointError: it failed, with one text on all ranks. Nothing has changed on the disk.
        """
        self.finish()
        self._told = True
        if self._error is not None:
            raise self._error
        return cast(Path, self._path)

    def settle(self) -> None:
        """Wait for its end; raise its error if nobody was told.

        If its groups are closed, other ranks may have heard something else: then it is logged.
        """
        self.finish()
        if not self._told and self._life.closed:
            self._told = True
            if self._error is not None:
                LOG.warning("step %d was not saved: %s", self.step, self._error)
        elif not self._told:
            self.wait()

    def finish(self) -> None:
        """Wait for its end."""
        self._join(math.inf)
        if _UNDER_WAY.get(self._place) is self and (self._told or self._error is None):
            del _UNDER_WAY[self._place]
        if self.finish in self._life.endings:
            self._life.endings.remove(self.finish)
            if self._stop is not None:
                self._stop.__exit__(None, None, None)

    def _join(self, limit_s: float) -> bool:
        """Wait for the end of the thread, so long at most; returns whether it has ended."""
        deadline = time.monotonic() + limit_s
        while self._thread.is_alive() and time.monotonic() < deadline:
            self._thread.join(_WAIT_S)
        return not self._thread.is_alive()

    def before_read(self, verb: str, *, raises: bool) -> None:
        """Wait for its end, for somebody who reads the folder; see `folder_to_read`."""
        if self._thread is threading.current_thread():
            return
        if not self._join(self._timeout_s):
            text = f"{verb}: step {self.step} in {self._place} is still being saved by this process"
            fix = "wait() for the save, or make its groups with a longer timeout_s"
            lines = [f"waited for {self._timeout_s:g} s, the timeout_s of its groups"]
            raise CheckpointError(message(text, lines, fix), self._place)
        if raises:
            settle(Path(self._place))
        elif self._error is not None and not self._told:
            LOG.warning("%s: step %d was not saved: %s", verb, self.step, self._error)

    # On the thread.

    def _run(self) -> None:
        if self._stop is not None:
            step_back()
        try:
            outcome = _outcome_of(self._write)
            self._path = self._end_alone(outcome) if self._alone else self._end(outcome)
        except BaseException as error:
            self._error = error
            if self._stop is not None:
                self._stop.ask()
        finally:
            self._agreed.folder.unlock()
            # Both refer to the state that was written, which the program may have replaced.
            self._write, self._agreed = _nothing, self._agreed.emptied()

    def _end_alone(self, outcome: Record | BaseException) -> Path:
        try:
            if isinstance(outcome, BaseException):
                raise outcome
            return self._committed([self._record(outcome)])
        except BaseException:
            self._agreed.folder.abandon()
            raise

    def _record(self, outcome: Record) -> list[Any]:
        agreed = self._agreed
        name = agreed.file.name if outcome.nbytes else ""
        return [name, outcome.nbytes, outcome.header, agreed.cells]

    def _end(self, outcome: Record | BaseException) -> Path:
        """Leave this rank's record, and wait for the word of the rank that commits."""
        home, store = self._agreed.home, self._store
        failed = isinstance(outcome, BaseException)
        mine = {"error": _told(outcome)} if failed else {"record": self._record(outcome)}
        store.set(f"{self._key}/{home.position}", json.dumps(mine))
        store.add(f"{self._key}/written", 1)
        if self._agreed.is_first:
            store.set(f"{self._key}/end", json.dumps(self._judged()))
            self._tidy()
        first = home.ranks[0]
        end = [f"{self._key}/end"]
        # The first rank waits for the others itself, so it may take as long as that again.
        what = f"the word of rank {first} that it is committed"
        self._await(lambda: store.check(end), what, lambda: [first], 2 * _GRACE_S)
        said = json.loads(store.get(f"{self._key}/end"))
        if "failed" in said:
            raise retold({int(rank): error for rank, error in said["failed"].items()})
        return Path(said["path"])

    def _judged(self) -> dict[str, Any]:
        """Commit once all files are written; what to tell the other ranks."""
        home, store = self._agreed.home, self._store
        try:
            n = home.world_size
            count = f"{self._key}/written"
            self._await(lambda: store.add(count, 0) >= n, "the files of all ranks", self._missing)
            found = [json.loads(store.get(f"{self._key}/{i}")) for i in range(n)]
            pairs = enumerate(found)
            failed = {home.ranks[i]: each["error"] for i, each in pairs if "error" in each}
            if failed:
                self._agreed.folder.abandon()
                return {"failed": failed}
            return {"path": str(self._committed([each["record"] for each in found]))}
        except BaseException as error:  # also of a program that ends this thread
            self._agreed.folder.abandon()
            return {"failed": {home.rank: _told(error)}}

    def _committed(self, records: list[list[Any]]) -> Path:
        agreed = self._agreed
        if points.observers:
            points.passing("save: commit", agreed.options.step)
        writers = [Writer(*record) for record in records]
        try:
            self._check_visible(writers)
            path = agreed.folder.commit(agreed.path, agreed.manifest(writers))
        except OSError as error:
            agreed.folder.abandon()
            if isinstance(error, CheckpointError):
                raise
            raise cannot_write(agreed.path, error) from error
        options = agreed.options
        try:
            agreed.folder.prune(options.step, options.keep, options.keep_every)
        except (OSError, CheckpointError) as error:  # the step is committed all the same
            LOG.warning("save: older steps in %s stay: %s", agreed.folder.path, error)
        LOG.info("saved step %d in %s", options.step, path)
        return path

    def _check_visible(self, writers: list[Writer]) -> None:
        """Refuse to commit files that this rank cannot see."""
        for position, writer in enumerate(writers):
            file = self._agreed.path / writer.file
            if writer.file and not (file.is_file() and file.stat().st_size == writer.nbytes):
                who = name_ranks([self._agreed.home.ranks[position]])
                text = f"save: {file} of {who} is not seen by rank {self._agreed.home.rank}"
                fix = "save to a folder that all ranks share"
                raise CheckpointWriteError(message(text, fix=fix), str(file))

    def _missing(self) -> list[int]:
        """The ranks that have left no record."""
        ranks = enumerate(self._agreed.home.ranks)
        return [rank for i, rank in ranks if not self._store.check([f"{self._key}/{i}"])]

    def _await(
        self,
        done: Callable[[], bool],
        what: str,
        missing: Callable[[], list[int]],
        grace_s: float = _GRACE_S,
    ) -> None:
        """Wait for other ranks, unless one of them has failed.

        Args:
          done: whether what is waited for is there.
          what: what is waited for, in words, for errors.
          missing: the ranks that are waited for; if one of them is gone, waiting is of no use.
          grace_s: how long to wait if another rank has failed, which may still write its file.
        """
        home, failed_s = self._agreed.home, list[float]()

        def check(idle_s: float) -> None:
            if not _has_failed(self._life):
                return
            failed_s.append(idle_s)
            gone = {x.rank: x for x in self._life.standing.values() if x.kind in _GONE}
            lost = [gone[rank].text for rank in missing() if rank in gone]
            if (lost and not done()) or idle_s - failed_s[0] > grace_s:
                raise self._lost(what, lost[0] if lost else _why(self._life))

        deadline = time.monotonic() + home.timeout_s
        if not poll(done, home.world_size, deadline, check):
            raise self._lost(what, f"nothing came within {home.timeout_s:g} s")

    def _lost(self, what: str, why: str) -> CheckpointWriteError:
        path = self._agreed.folder.path
        fix = "look at latest(), which tells whether the step counts, and save again"
        text = f"save: step {self.step} in {path} ended without {what}"
        return CheckpointWriteError(message(text, [why], fix), str(path))

    def _tidy(self) -> None:
        """Delete the messages that nobody reads any more: this rank's own reads are over."""
        for name in ("written", *range(self._agreed.home.world_size)):
            later(self._store, "delete_key", f"{self._key}/{name}")
        # All ranks have read the end of the save before this one, or they had not begun this one.
        later(self._store, "delete_key", f"{self._key_of(self._number - 1)}/end")

    def _key_of(self, number: int) -> str:
        """The key of the messages of a save; groups of one replica share the life of all."""
        return f"{self._life.key}/save/{self._agreed.home.ranks[0]}/{number}"


_UNDER_WAY: dict[str, PendingSave] = {}  # the last save of this process, by folder


def settle(path: Path) -> None:
    """Wait for the end of the last save to a folder; raise its error if nobody was told."""
    place = os.path.realpath(path)
    before = _UNDER_WAY.get(place)
    if before is not None:
        before.finish()  # Ctrl-C may end this wait, and the next save still has to wait
        _UNDER_WAY.pop(place, None)
        before.settle()


def folder_to_read(verb: str, path: str | os.PathLike[str], *, raises: bool = False) -> Folder:
    """The folder at a path, once the save to it that this process has under way has ended.

    Args:
      verb: for errors.
      path: the folder, by any of its names.
      raises: whether all ranks call this, so that a save that failed is raised if nobody was told;
        else it is logged, and the next save or load raises it.

    Raises:
      CheckpointError: the save did not end within the `timeout_s` of its groups, or failed.
    """
    pending = _UNDER_WAY.get(os.path.realpath(path))
    if pending is not None:
        pending.before_read(verb, raises=raises)
    return Folder(path)


def _leave_saves() -> None:
    """Forget the saves of the process that this one was forked from, which has their threads."""
    for each in _UNDER_WAY.values():
        if each._path is None and each._error is None:
            text = f"save: step {each.step} is saved by the process that this one was forked from"
            each._error = CheckpointError(message(text, fix="wait() for it there"), each._place)
    _UNDER_WAY.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_saves)


def _outcome_of(write: Callable[[], Record | BaseException]) -> Record | BaseException:
    """Call `write`; any error becomes its result, so that the other ranks are told of it."""
    try:
        return write()
    except BaseException as error:
        return error


def _nothing() -> Record:
    return Record(0, "")


def _told(error: Any) -> list[str] | None:
    return told(error if isinstance(error, Exception) else CheckpointError(f"save: {error!r}"))


def _has_failed(life: Life) -> bool:
    return life.failed is not None or any(each.final for each in life.standing.values())


def _why(life: Life) -> str:
    texts = [each.text for each in life.standing.values() if each.final]
    return texts[0] if texts else f"the groups have failed: {life.failed}"

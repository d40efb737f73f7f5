"""The folder of a job's checkpoints: which steps count, and how a new one comes to count.

[Note: commit] A step is written into a folder with a temporary name. Each writer waits until the
disk has its file; then the manifest is written, and the disk has that and the folder; then the
folder gets its name, which is one operation of the file system, and the disk has this too. So a
step that can be seen is whole, whatever was killed meanwhile, and what a killed job leaves has
another name and never matters. Where a store cannot rename a folder (`commit="file"`), files are
written where they stay: an empty file `BY_FILE` comes first, and `COMMITTED` last, without which a
step does not count. Such a store has to rename files, which safetensors asks for, too; it need not
be able to bring the names in a folder to the disk. What cannot be read for some other reason
counts, is never removed, and is an error of whoever loads it: no step is passed over in silence.

Which of the whole steps count is in [Note: branches] in `committed`. A step that a load refused, as
it was found to be damaged, does not count as one of those that are kept, and is not removed by that
process: where it would be, it gets a name that begins with `.refused-`, as somebody who looks at it
may find that it can be read.
"""

import errno
import fcntl
import os
import shutil
import socket
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Literal

from mics_fn.checkpoint.committed import (
    BY_FILE,
    COMMITTED,
    Attempt,
    attempts_in,
    divided,
    is_whole,
    next_name,
)
from mics_fn.checkpoint.disk import make_folder, sync_folder, write_file
from mics_fn.checkpoint.manifest import MAX_BYTES, MAX_LEAVES, Manifest, digest_of
from mics_fn.checkpoint.manifest import NAME as MANIFEST
from mics_fn.checkpoint.parts import cannot_write
from mics_fn.errors import CheckpointExists, CheckpointNotFound, message
from mics_fn.log import LOG

_LOCK = ".lock"
_SOON = ".committed"  # the name of `COMMITTED` while it is written
_LOCK_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
_LEAST = 2  # committed steps that pruning leaves
Commit = Literal["rename", "file"]
Overwrite = Literal["never", "newer"]


_LOCKS = set[int]()  # open files of this process that are locked
_REFUSED: dict[Path, tuple[int, int]] = {}  # folders of steps that a load here refused, and inodes


class Folder:
    """The folder in which a job keeps its checkpoints.

    Args:
      path: where; it need not exist.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.abspath(os.fspath(path)))
        self._lock: int | None = None
        self._begun: Path | None = None  # that is written into and not committed yet

    # What readers see.

    def committed(self) -> dict[int, Path]:
        """The folder of each committed step, oldest step first."""
        return divided(self._whole())[0]

    def find(self, step: int | None) -> tuple[int, Path]:
        """The folder of a step, or of the newest one.

        Raises:
          CheckpointNotFound: there is none.
        """
        steps, replaced = divided(self._whole())
        if steps and step is None:
            step = max(steps)
        if step in steps:
            return step, steps[step]
        kept = {each.step: each.path for each in sorted(replaced)}
        if step in kept:
            return step, kept[step]
        seen = sorted(os.listdir(self.path))[:8] if self.path.is_dir() else []
        lines = [f"committed steps: {', '.join(map(str, steps)) or 'none'}"]
        lines += [f"replaced steps: {', '.join(map(str, kept))}"] if kept else []
        lines += (
            [f"it has: {', '.join(seen)}"] if seen else [f"{self.path} is not a folder with files"]
        )
        what = "no committed checkpoint" if step is None else f"no committed step {step}"
        fix = "pass the folder that save was given, and one of its steps"
        raise CheckpointNotFound(
            message(f"load: {what} in {self.path}", lines, fix), str(self.path)
        )

    def _whole(self) -> list[Attempt]:
        return [each for each in attempts_in(self.path) if is_whole(each.path)]

    def refuse(self, path: Path) -> None:
        """Note that the folder of a step was found to be damaged: no save removes it."""
        _REFUSED[_real(path)] = _inode(path)

    def accept(self, path: Path) -> None:
        """Note that the folder of a step can be read after all."""
        _REFUSED.pop(_real(path), None)

    # What the one rank does that commits.

    def begin(self, step: int, overwrite: Overwrite, commit: Commit) -> Path:
        """Make the folder that writers write a step into.

        Raises:
          CheckpointExists: the step is committed already, or there are newer ones, or another job
            saves here.
          CheckpointWriteError: the folder cannot be made.
        """
        try:
            make_folder(self.path)
            self._take_lock()
            self._sweep()
            newer = [s for s in self.committed() if s >= step]
            if newer and overwrite == "never":
                what = f"save: step {step} would follow step {max(newer)} in {self.path}"
                fix = "save a later step, elsewhere, or with overwrite='newer', which replaces them"
                raise CheckpointExists(message(what, fix=fix), str(self.path))
            path = self._final(step)
            if commit == "rename":
                path = self.path / f".tmp-{path.name}-{uuid.uuid4().hex[:12]}"
            path.mkdir()
            self._begun = path
            if commit == "file":
                write_file(path / BY_FILE, b"")
                sync_folder(path)
            return path
        except OSError as error:
            self.unlock()
            if isinstance(error, CheckpointExists):
                raise
            raise cannot_write(self.path, error) from error

    def _final(self, step: int) -> Path:
        return self.path / next_name(attempts_in(self.path), step)

    def commit(self, path: Path, manifest: Manifest) -> Path:
        """Make a step count, whose files the disk has; see [Note: commit].

        Raises:
          OSError: a file cannot be written.
        """
        data = manifest.to_bytes()
        if len(data) > MAX_BYTES or len(manifest.tensors) > MAX_LEAVES:
            error = ValueError(f"{len(manifest.tensors)} tensors, {len(data)} bytes")
            raise cannot_write(path / MANIFEST, error, "no reader would take it")
        write_file(path / MANIFEST, data)
        sync_folder(path)
        final = path
        if manifest.commit == "file":
            write_file(path / _SOON, digest_of(data).encode())
            os.rename(path / _SOON, path / COMMITTED)
        else:
            final = self._final(manifest.step)
            os.rename(path, final)
            self._begun = final  # until the disk has the name, this may still fail
        sync_folder(final)
        sync_folder(self.path)
        self._begun = None
        _REFUSED.pop(_real(final), None)  # another one may have had this name
        return final

    def abandon(self) -> None:
        """Remove what was written of a step that does not count, and let other jobs save here."""
        if self._begun is not None:
            self._remove(self._begun)
            self._begun = None
        self.unlock()

    def prune(self, step: int, keep: int | None, keep_every: int | None) -> None:
        """Remove replaced and old steps after one was committed; at least two whole ones stay.

        Args:
          step: the one that was committed.
          keep: how many of the newest to keep; None keeps all.
          keep_every: steps that are a multiple of it are kept, too.
        """
        steps, replaced = divided(self._whole())
        good = [s for s in steps if not _is_refused(steps[s])]
        rest = sorted(
            (x for x in replaced if not _is_refused(x.path)), key=lambda x: (x.number, x.step)
        )
        lacking = max(0, _LEAST - len(good))
        spare = {each.path for each in rest[len(rest) - min(lacking, len(rest)) :]}
        gone = [each.path for each in replaced if each.path not in spare]
        stay = [path for path in gone if not self._let_go(path)]
        if stay:
            # Nor may those be removed that replace them, for else they would count again.
            text = "they are replaced and do not count, but old steps stay as well"
            LOG.warning("save: cannot remove %s; %s", ", ".join(map(str, stay)), text)
        elif keep is not None:
            kept = [s for s in good if s <= step][-max(keep, _LEAST) :]
            old = [s for s in steps if s < kept[0] and not (keep_every and s % keep_every == 0)]
            for path in (steps[s] for s in old):
                if not self._let_go(path):
                    LOG.warning("save: cannot remove %s", path)

    def _let_go(self, path: Path) -> bool:
        """Remove a step, or put it aside if a load refused it; False if it is still in the way."""
        if not _is_refused(path):
            return self._remove(path)
        aside = self.path / f".refused-{path.name}-{uuid.uuid4().hex[:12]}"
        with suppress(OSError):
            os.rename(path, aside)
            _REFUSED.pop(_real(path), None)
            LOG.warning("save: %s was found to be damaged, and is now %s", path, aside)
        return True

    def _remove(self, path: Path) -> bool:
        """Remove a folder of a step so that no part of it is ever taken for a step.

        Returns:
          Whether it does not count any more.
        """
        place = path
        with suppress(OSError):
            by_file = (path / BY_FILE).exists()
            if by_file:
                (path / COMMITTED).unlink(missing_ok=True)
            if not path.name.startswith("."):
                trash = self.path / f".old-{path.name}-{uuid.uuid4().hex[:12]}"
                try:  # at once, as other ranks may still write into it
                    os.rename(path, trash)
                    path = trash
                except OSError:
                    if not by_file:
                        raise
                    _empty(path)
            shutil.rmtree(path, ignore_errors=True)
        return not is_whole(place)

    def _sweep(self) -> None:
        """Remove what jobs left that were killed while they saved; none of them is saving now."""
        for name in os.listdir(self.path):
            if name.startswith((".tmp-step-", ".old-step-")):
                self._remove(self.path / name)
        for each in attempts_in(self.path):
            if not is_whole(each.path):
                self._remove(each.path)

    def _take_lock(self) -> None:
        """Keep other jobs from saving here; the lock ends with this process, however that ends."""
        self._lock = os.open(self.path / _LOCK, _LOCK_FLAGS, 0o644)
        try:
            # The other kind of lock ends as soon as anybody here closes that file.
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = os.pread(self._lock, 200, 0).decode(errors="replace") or "unknown"
            os.close(self._lock)
            self._lock = None
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                return  # a file system without locks
            what = f"save: another job saves to {self.path}: {owner}"
            fix = "give each job a folder of its own"
            raise CheckpointExists(message(what, fix=fix), str(self.path)) from None
        _LOCKS.add(self._lock)
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"host {socket.gethostname()}, process {os.getpid()}".encode(), 0)

    def unlock(self) -> None:
        """Let other jobs save here."""
        if self._lock is not None:
            _LOCKS.discard(self._lock)
            with suppress(OSError):  # also for a forked process that has not come to close it
                fcntl.flock(self._lock, fcntl.LOCK_UN)
            os.close(self._lock)
            self._lock = None


def _empty(path: Path) -> None:
    """Remove a folder that has no other name; `BY_FILE` goes last, or the rest would count."""
    for each in path.iterdir():
        if each.name != BY_FILE:
            each.unlink()
    (path / BY_FILE).unlink()
    try:
        path.rmdir()
    except OSError:  # another rank has written a file meanwhile
        write_file(path / BY_FILE, b"")
        raise


def _leave_locks() -> None:
    """Close the locks in a forked process, or they would last as long as that does."""
    for number in _LOCKS:
        os.close(number)
    _LOCKS.clear()


os.register_at_fork(after_in_child=_leave_locks)


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))


def _is_refused(path: Path) -> bool:
    return _REFUSED.get(_real(path)) == _inode(path)


def _inode(path: Path) -> tuple[int, int]:
    """What tells a folder from another one that later has its name."""
    try:
        found = os.stat(path)
    except OSError:
        return 0, 0
    return found.st_dev, found.st_ino

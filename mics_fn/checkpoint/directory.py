"""The folder of a job's checkpoints: which steps count, and how a new one comes to count.

[Note: commit] A step is written into a folder with a temporary name. Each writer waits until the
disk has its file; then the manifest is written, and the disk has that and the folder; then the
folder gets its name, which is one operation of the file system, and the disk has this too. So a
step that can be seen is whole, whatever was killed meanwhile, and what a killed job leaves has
another name and never matters. Where a store has no such rename (`commit="file"`), files are
written where they stay: an empty file `BY_FILE` comes first, and `COMMITTED` last, without all of
which a step does not count. What cannot be read for some other reason counts, is never removed, and
is an error of whoever loads it: no step is passed over in silence.

A step that is written again gets a name of its own, such as `step-00000120.2`, and the first one is
removed afterwards: at no instant is there none.
"""

import errno
import fcntl
import os
import re
import shutil
import socket
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

from mics_fn.checkpoint.disk import make_folder, sync_folder, write_file
from mics_fn.checkpoint.manifest import DIGEST_BYTES, MAX_BYTES, MAX_LEAVES, Manifest, digest_of
from mics_fn.checkpoint.manifest import NAME as MANIFEST
from mics_fn.checkpoint.parts import cannot_write
from mics_fn.errors import CheckpointExists, CheckpointNotFound, message

BY_FILE, COMMITTED = "BY_FILE", "COMMITTED"
_STEP = re.compile(r"step-(\d{8,16})(?:\.(\d{1,6}))?")
_LOCK = ".lock"
_LOCK_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
_LEAST = 2  # committed steps that pruning leaves
Commit = Literal["rename", "file"]
Overwrite = Literal["never", "newer"]


class Attempt(NamedTuple):
    """A folder of a step, and how often that step had been written before."""

    step: int
    number: int
    path: Path


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
        found: dict[int, Attempt] = {}
        for each in self._attempts():
            known = found.get(each.step)
            if (known is None or each.number > known.number) and _counts(each.path):
                found[each.step] = each
        return {step: found[step].path for step in sorted(found)}

    def find(self, step: int | None) -> tuple[int, Path]:
        """The folder of a step, or of the newest one.

        Raises:
          CheckpointNotFound: there is none.
        """
        steps = self.committed()
        if steps and step is None:
            step = max(steps)
        if step in steps:
            return step, steps[step]
        seen = sorted(os.listdir(self.path))[:8] if self.path.is_dir() else []
        lines = [f"committed steps: {', '.join(map(str, steps)) or 'none'}"]
        lines += (
            [f"it has: {', '.join(seen)}"] if seen else [f"{self.path} is not a folder with files"]
        )
        what = "no committed checkpoint" if step is None else f"no committed step {step}"
        fix = "pass the folder that save was given, and one of its steps"
        raise CheckpointNotFound(
            message(f"load: {what} in {self.path}", lines, fix), str(self.path)
        )

    def _attempts(self) -> list[Attempt]:
        try:
            names = os.listdir(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return []
        found = ((_STEP.fullmatch(name), self.path / name) for name in names)
        return [Attempt(int(m[1]), int(m[2] or 1), path) for m, path in found if m]

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
        before = [each.number for each in self._attempts() if each.step == step]
        number = max(before, default=0) + 1
        return self.path / (f"step-{step:08d}" + (f".{number}" if number > 1 else ""))

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
            write_file(path / COMMITTED, digest_of(data).encode())
        else:
            final = self._final(manifest.step)
            os.rename(path, final)
            self._begun = final  # until the disk has the name, this may still fail
        sync_folder(final)
        sync_folder(self.path)
        self._begun = None
        return final

    def abandon(self) -> None:
        """Remove what was written of a step that does not count, and let other jobs save here."""
        if self._begun is not None:
            self._remove(self._begun)
            self._begun = None
        self.unlock()

    def prune(self, step: int, keep: int | None, keep_every: int | None) -> None:
        """Remove steps after one was committed: those that it replaces, and old ones.

        Args:
          step: the one that was committed; newer ones are of a run that was rolled back.
          keep: how many of the newest to keep; None keeps all.
          keep_every: steps that are a multiple of it are kept, too.
        """
        steps = self.committed()
        last = steps[step]
        gone = [each.path for each in self._attempts() if each.step >= step and each.path != last]
        if keep is not None:
            old = sorted(s for s in steps if s <= step)[: -max(keep, _LEAST)]
            gone += [steps[s] for s in old if not keep_every or s % keep_every]
        for path in gone:
            self._remove(path)

    def _remove(self, path: Path) -> None:
        """Remove a folder of a step so that no part of it is ever taken for a step."""
        with suppress(OSError):
            if (path / BY_FILE).exists():
                (path / COMMITTED).unlink(missing_ok=True)
                for each in path.iterdir():  # that file goes last: without it the rest would count
                    if each.name != BY_FILE:
                        each.unlink()
            elif not path.name.startswith("."):
                trash = self.path / f".old-{path.name}-{uuid.uuid4().hex[:12]}"
                os.rename(path, trash)
                path = trash
            shutil.rmtree(path, ignore_errors=True)

    def _sweep(self) -> None:
        """Remove what jobs left that were killed while they saved; none of them is saving now."""
        for name in os.listdir(self.path):
            if name.startswith((".tmp-step-", ".old-step-")):
                self._remove(self.path / name)
        for each in self._attempts():
            if not _counts(each.path):
                self._remove(each.path)

    def _take_lock(self) -> None:
        """Keep other jobs from saving here; the lock ends with this process, however that ends."""
        self._lock = os.open(self.path / _LOCK, _LOCK_FLAGS, 0o644)
        try:
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = os.pread(self._lock, 200, 0).decode(errors="replace") or "unknown"
            os.close(self._lock)
            self._lock = None
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                return  # a file system without locks
            what = f"save: another job saves to {self.path}: {owner}"
            fix = "give each job a folder of its own"
            raise CheckpointExists(message(what, fix=fix), str(self.path)) from None
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"host {socket.gethostname()}, process {os.getpid()}".encode(), 0)

    def unlock(self) -> None:
        """Let other jobs save here."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _counts(path: Path) -> bool:
    """Whether a folder with the name of a step is committed."""
    try:
        # A link is not a step, but somebody made it, so loading it says so.
        names = [] if os.path.islink(path) else os.listdir(path)
    except (FileNotFoundError, NotADirectoryError):  # it was removed meanwhile, or is a file
        return False
    except OSError:
        return True
    if BY_FILE in names:
        return COMMITTED in names and _size(path / COMMITTED) >= DIGEST_BYTES
    return os.path.islink(path) or bool(names)


def _size(path: Path) -> int:
    try:
        return os.lstat(path).st_size
    except OSError:
        return DIGEST_BYTES  # unknown, so it counts

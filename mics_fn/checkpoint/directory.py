"""The folder of a job's checkpoints: which steps count, and how a new one comes to count.

[Note: commit] A step is written into a folder with a temporary name. Each writer waits until the
disk has its file; then the manifest is written, and the disk has that and the folder; then the
folder gets its name, which is one operation of the file system, and the disk has this too. So a
folder with the name of a step is whole, whatever was killed meanwhile, and what a killed job leaves
has another name and never matters. What cannot be read all the same counts, and is an error of
whoever loads it: no step is passed over in silence. Exports for other libraries come to be in the
same way, beside the path that they get.

[Note: branches] A run that goes back to an older step and saves from there leaves a branch behind.
The first step that it saves at or below one that is there already begins a new *branch*, and its
folder gets the number of the branch, in six digits, such as `step-00000003.000002`; so do all steps
after it. A step *replaces* every step of a lower branch from its own number on. As this follows
from names alone, the one operation that commits a step replaces the others too: they do not count
from then on, whatever is killed afterwards and whatever cannot be removed.

Replaced steps are removed as soon as two others count. So there are two whole steps at every
instant, if there were two before; `load(step=)` finds a replaced one while it is there.
"""

import errno
import fcntl
import hashlib
import importlib.util
import json
import os
import re
import shutil
import socket
import stat
import threading
import uuid
import zlib
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from math import inf
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from mics_fn.checkpoint import manifest
from mics_fn.errors import CheckpointNotFound, FileError, MicsError, first_line, message
from mics_fn.init import File
from mics_fn.shards import dtype_name
from mics_fn.spans import LOG
from mics_fn.threads import beside

# Durable files and folders: each write is followed by fsync.

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def make_folder(path: Path) -> None:
    """Make a folder and all above it, and wait until the disk has their names."""
    missing = [each for each in (path, *path.parents) if not each.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for each in missing:
        sync(each.parent)


def sync(path: Path) -> None:
    """Wait until the disk has a file, or the names in a folder.

    Some file systems that keep files in other places cannot be asked that of a folder.
    """
    number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(number)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(number)


def write_file(path: Path, data: bytes) -> None:
    """Write a new file, and wait until the disk has it."""
    number = os.open(path, _NEW, 0o644)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(number, rest) :]
        os.fsync(number)
    finally:
        os.close(number)


def finish_file(path: Path) -> None:
    """Let those read a file who may read its folder, and wait until the disk has it.

    Safetensors makes files that only their owner may read, whatever the umask says.
    """
    path.chmod(path.parent.stat().st_mode & 0o666)
    sync(path)


def publish(new: Path, path: Path) -> None:
    """Give a folder its name, before and after which the disk has all of it; [Note: commit].

    Until the disk has the name, this may still fail; then the folder is removed.
    """
    sync(new)
    os.rename(new, path)
    try:
        sync(path.parent)
    except BaseException:
        remove_folder(path)
        raise


def remove_folder(path: Path) -> bool:
    """Remove a folder, which first gets a name that no step has; returns whether that has gone."""
    hidden = path
    with suppress(OSError):
        if not path.name.startswith("."):
            hidden = path.with_name(f".old-{path.name}-{uuid.uuid4().hex[:12]}")
            os.rename(path, hidden)
        shutil.rmtree(hidden, ignore_errors=True)
    return not os.path.lexists(path)


@contextmanager
def write_errors(what: str, path: Path) -> Iterator[None]:
    """Raise errors of writing as a FileError that says which file could not be written."""
    try:
        yield
    except MicsError:
        raise
    except Exception as error:
        fix = "make room or give the right to write there, and save again; all else is as it was"
        kind = "" if isinstance(error, OSError) else f"{type(error).__name__}: "
        lines = [f"{kind}{first_line(error)}"]
        raise FileError(message(f"{what} {path}", lines, fix), str(path)) from error


# The file of a rank: native safetensors, whose slices the manifest lists.


def check_writable() -> None:
    """Raise FileError if safetensors, which writes files, is not installed."""
    if importlib.util.find_spec("safetensors") is None:
        text = "Checkpoints: saving needs the package safetensors"
        raise FileError(message(text, fix="pip install 'mics-fn[checkpoint]'"), "")


def write_part(path: Path, tensors: Mapping[manifest.Range, Tensor]) -> manifest.SavedFile:
    """Write a file, and wait until the disk has it; checksums are computed meanwhile.

    Args:
      path: where there is no file yet.
      tensors: the slices, dense and on the CPU.

    Raises:
      OSError, SafetensorError: it cannot be written.
    """
    import safetensors

    specs, nbytes, slices = {}, 0, list[manifest.Slice]()
    for name, x in tensors.items():
        dtype, count = manifest.in_file(x.dtype, x.numel())
        place = {"data_ptr": x.data_ptr(), "data_len": x.numel() * x.itemsize}
        specs[f"{name}"] = safetensors.TensorSpec(dtype=dtype_name(dtype), shape=[count], **place)
        nbytes += x.numel() * x.itemsize
    facts = os.statvfs(path.parent)
    if nbytes > (free := facts.f_bavail * facts.f_frsize):
        raise OSError(f"{nbytes} bytes are needed, {free} bytes are free")

    summed = beside(lambda: [zlib.crc32(memory_of(x)) for x in tensors.values()])
    try:
        safetensors.serialize_file(specs, path)
    finally:
        sums = summed()
    with open(path, "rb") as file:
        head = file.read(8)
        head += file.read(int.from_bytes(head, "little"))
    finish_file(path)
    size = path.stat().st_size
    if size != len(head) + nbytes:
        raise OSError(f"the file system kept {size} bytes of {len(head) + nbytes}")
    places = json.loads(head[8:])
    for name, crc in zip(tensors, sums, strict=True):
        start = len(head) + places[f"{name}"]["data_offsets"][0]
        slices.append(manifest.Slice(name, start, crc))
    header = hashlib.sha256(head).hexdigest()
    return manifest.SavedFile(path.name, size, len(head), header, slices)


def memory_of(x: Tensor) -> memoryview:
    """The bytes of a dense tensor on the CPU."""
    flat: Any = x.detach().as_strided((x.numel(),), (1,))  # one element has any stride
    return memoryview(flat.view(torch.uint8).numpy())


class PartFile:
    """A file of a step, open for reading.

    Args:
      folder: the folder of the step.
      record: what the manifest says of it.

    Raises:
      FileError: it is not the file that was saved.
    """

    def __init__(self, folder: Path, record: manifest.SavedFile) -> None:
        self.path = folder / record.name
        self._turn = threading.Lock()  # one thread reads, so that the system can read ahead
        with load_errors(self.path):
            self._file = open_file(self.path)
            try:
                if self._file.size != record.nbytes:
                    raise self._corrupt(f"it has {self._file.size} bytes, had {record.nbytes}")
                header = self._file.header(0, record.header_bytes)
                if hashlib.sha256(header).hexdigest() != record.header:
                    raise self._corrupt("its header is not the one that was saved")
            except BaseException:
                self._file.close()
                raise

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def read(self, part: manifest.Slice, out: memoryview) -> None:
        """Read a slice as a whole, and compare it.

        Raises:
          FileError: these are not the bytes that were saved.
        """
        name = f"{part.range}"
        with load_errors(self.path):
            with self._turn:
                self._file.read_into(out, part.offset, name)
            if zlib.crc32(out) != part.crc:
                raise self._corrupt("its values are not those that were saved", name)

    def _corrupt(self, how: str, leaf: str = "") -> FileError:
        lines = [f"{leaf}: {how}" if leaf else how]
        text = message(f"load: {self.path} is damaged", lines, _OLDER)
        return FileError(text, str(self.path), leaf, damaged=True)


# Files that cannot be read: whether that shows that they are damaged.

_OLDER = "load an older step, as on_corrupt='previous' does"
_AGAIN = "load it again; the file may be as it was saved"
# What the system says of a file that is not there, or is something else.
_EVIDENCE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO)


@contextmanager
def load_errors(path: Path) -> Iterator[None]:
    """Raise errors of reading a file as those of checkpoints, which say whether it is damaged.

    A file is damaged only if the error shows that it is not as it was saved. If the system could
    not read it, nothing is known of the file, and `load` does not go back to an older step.
    """
    try:
        yield
    except (OSError, FileError) as error:
        if isinstance(error, FileError) and error.damaged is not None:
            raise
        found = str(error).strip().splitlines() or [type(error).__name__]
        # The fix of `File` is that of weights, and its path is this one.
        found = [line.strip()[:500] for line in found if not line.startswith("  fix: ")]
        reason = error.__cause__ if isinstance(error, FileError) else error
        unknown = isinstance(reason, OSError) and reason.errno not in _EVIDENCE
        fix = _AGAIN if unknown else _OLDER
        text = message(f"load: {path} cannot be read", found, fix)
        leaf = getattr(error, "leaf", "")
        raise FileError(text, str(path), leaf, damaged=not unknown) from error


def open_file(path: Path) -> File:
    """Open a file of a step, which is a regular file in its folder."""
    if not stat.S_ISREG(os.lstat(path).st_mode):
        raise _not_opened(path, "it is not a regular file")
    return File("load", path)


def _not_opened(path: Path, why: str) -> FileError:
    fix = "load only checkpoints that you know, or copy the file itself"
    text = message(f"load: {path} is not opened: {why}", fix=fix)
    return FileError(text, str(path), damaged=True)


def manifest_in(path: Path, step: int) -> tuple[manifest.Manifest, str]:
    """The manifest of a step and its digest.

    Args:
      path: the folder of the step.
      step: which one it should be.

    Raises:
      FileError: it is missing, damaged, or of another step; or the system cannot read it.
    """
    if os.path.islink(path):
        raise _not_opened(path, "it is a symbolic link")
    with load_errors(path / manifest.NAME), closing(open_file(path / manifest.NAME)) as file:
        data = file.header(0, file.size, manifest.MAX_BYTES)
    found = manifest.read_manifest(data, str(path / manifest.NAME))
    if found.step != step:
        text = message(f"load: {path} holds step {found.step}", fix="keep the names of folders")
        raise FileError(text, str(path), damaged=True)
    return found, hashlib.sha256(data).hexdigest()


# Which steps of a folder count, by the names of their folders.

_STEP = re.compile(r"step-(\d{8,})(?:\.(\d{6,}))?")


class Attempt(NamedTuple):
    """A folder of a step; the first branch is 1, and is not named."""

    branch: int
    step: int
    path: Path


def attempts_in(folder: Path) -> list[Attempt]:
    """All steps in a folder: the highest branch first, newer steps before older ones.

    Raises:
      FileError: the folder is there, but cannot be read.
    """
    names = list[str]()
    with load_errors(folder), suppress(FileNotFoundError, NotADirectoryError):
        names = os.listdir(folder)
    attempts = list[Attempt]()
    for name in names:
        if found := _STEP.fullmatch(name):
            attempts.append(Attempt(int(found[2] or 1), int(found[1]), folder / name))
    return sorted(attempts, reverse=True)


def divided(attempts: list[Attempt]) -> tuple[dict[int, Path], dict[int, Path]]:
    """The folder of each step that counts, newest first, and of those that are replaced."""
    counting: dict[int, Path] = {}
    replaced: dict[int, Path] = {}
    lowest: float = inf
    for _, step, path in attempts:
        if step < lowest:
            counting[step], lowest = path, step
        else:
            replaced.setdefault(step, path)
    return counting, replaced


def next_name(attempts: list[Attempt], step: int) -> str:
    """The name of the folder of a step that is saved now; see [Note: branches]."""
    branch, newest, _ = attempts[0] if attempts else (1, -1, None)
    if newest >= step:
        branch += 1
    return f"step-{step:08d}" + (f".{branch:06d}" if branch > 1 else "")


_LOCK = ".lock"
_LOCK_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
_LEAST = 2  # steps that pruning leaves
Overwrite = Literal["never", "newer"]


class Folder:
    """The folder in which a job keeps its checkpoints.

    Args:
      path: where; it need not exist.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.abspath(os.fspath(path)))
        self._lock: int | None = None
        self._new: Path | None = None  # that is written into and not committed yet

    # What readers see.

    def committed(self) -> dict[int, Path]:
        """The folder of each committed step, newest step first."""
        return divided(attempts_in(self.path))[0]

    def find(self, step: int | None) -> tuple[int, Path]:
        """The folder of a step, or of the newest one.

        Raises:
          CheckpointNotFound: there is none.
        """
        counting, replaced = divided(attempts_in(self.path))
        if step is None:
            step = max(counting, default=None)
        every = replaced | counting
        if step in every:
            return step, every[step]
        names = sorted(os.listdir(self.path))[:8] if self.path.is_dir() else ["no folder"]
        lines = [f"committed steps: {', '.join(map(str, sorted(counting))) or 'none'}"]
        lines.append(f"it has: {', '.join(names)}")
        what = "no committed checkpoint" if step is None else f"no committed step {step}"
        fix = "pass the folder that save was given, and one of its steps"
        text = message(f"load: {what} in {self.path}", lines, fix)
        raise CheckpointNotFound(text, str(self.path))

    # What the one rank does that commits.

    def begin(self, step: int, overwrite: Overwrite) -> Path:
        """Make the folder that writers write a step into; `abandon` follows, whatever happens.

        Raises:
          FileError: the step is committed already, or there are newer ones, or another job
            saves here; or the folder cannot be made.
        """
        with write_errors("save: cannot write to", self.path):
            make_folder(self.path)
            self._take_lock()
            self._sweep()
            newest = max(self.committed(), default=-1)
            if newest >= step and overwrite == "never":
                what = f"save: step {step} would follow step {newest} in {self.path}"
                fix = "save a later step, elsewhere, or with overwrite='newer', which replaces them"
                raise FileError(message(what, fix=fix), str(self.path))
            self._new = self.path / f".tmp-step-{step:08d}-{uuid.uuid4().hex[:12]}"
            self._new.mkdir()
            return self._new

    def commit(self, found: manifest.Manifest) -> Path:
        """Commit a step whose files are on disk; see [Note: commit].

        Raises:
          OSError, ValueError: a file cannot be written, or would not be read.
        """
        data, new = found.to_bytes(), self._new
        if new is None:
            raise ValueError("this save has ended")
        if len(data) > manifest.MAX_BYTES:
            raise ValueError(f"no reader would take a manifest of {len(data)} bytes")
        write_file(new / manifest.NAME, data)
        path = self.path / next_name(attempts_in(self.path), found.step)
        publish(new, path)
        self._new = None
        return path

    def abandon(self) -> None:
        """Remove what was written of a step that does not count, and let other jobs save here."""
        if self._new is not None:
            remove_folder(self._new)
            self._new = None
        self._unlock()

    def prune(self, keep: int | None, keep_every: int | None) -> None:
        """Remove replaced and old steps after one was committed; at least two whole ones stay.

        Args:
          keep: how many of the newest to keep; None keeps all.
          keep_every: steps that are a multiple of it are kept, too.
        """
        attempts = attempts_in(self.path)
        counting, _ = divided(attempts)
        if len(counting) < _LEAST:
            return
        # Those first that are replaced: without what replaces them, they would count again.
        old = [each.path for each in attempts if each.path not in counting.values()]
        stay = [path for path in old if not remove_folder(path)]
        if not stay and keep is not None:
            old = list(counting.items())[max(keep, _LEAST) :]
            removed = [path for step, path in old if not keep_every or step % keep_every]
            stay = [path for path in removed if not remove_folder(path)]
        if stay:
            LOG.warning("save: cannot remove %s; old steps stay", ", ".join(map(str, stay)))

    def _sweep(self) -> None:
        """Remove what jobs left that were killed while they saved; none of them is saving now."""
        for name in os.listdir(self.path):
            if name.startswith((".tmp-step-", ".old-step-")):
                remove_folder(self.path / name)

    def _take_lock(self) -> None:
        """Keep other jobs from saving here; the lock ends with this process, however that ends.

        It is not one of `flock`, which a forked process would keep. Of one process there is one
        save at a time to a folder.
        """
        self._lock = os.open(self.path / _LOCK, _LOCK_FLAGS, 0o644)
        try:
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = os.pread(self._lock, 200, 0).decode(errors="replace") or "unknown"
            self._unlock()
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                return  # a file system without locks
            what = f"save: another job saves to {self.path}: {owner}"
            fix = "give each job a folder of its own"
            raise FileError(message(what, fix=fix), str(self.path)) from None
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"host {socket.gethostname()}, process {os.getpid()}".encode(), 0)

    def _unlock(self) -> None:
        """Let other jobs save here."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

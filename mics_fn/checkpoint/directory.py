"""The folder of a job's checkpoints: which steps count, and how a new one comes to count.

[Note: commit] A step is written into a folder with a temporary name. Each writer waits until the
disk has its file; then the manifest is written, and the disk has that and the folder; then the
folder gets its name, which is one operation of the file system, and the disk has this too. So a
folder with the name of a step is whole, whatever was killed meanwhile, and what a killed job leaves
has another name and never matters. What cannot be read all the same counts, and is an error of
whoever loads it: no step is passed over in silence. Exports for other libraries come to be in the
same way, beside the path that they get.

[Note: epochs] A job that was thought dead may live on beside its successor, and a job may be
started twice. So whoever writes to a folder *owns* it in an *epoch*, a number that is higher than
all before it. The file `.epoch-000002`, which says who took it, is made so that only one can make
it: by a `Trainer` that goes on from the folder, by the first save of any other process, and by a
save that goes back to an older step. The owner then gives another name to all folders that older
epochs are writing into, and only then looks which steps there are. Whoever saves makes such a
folder first, and looks then whether the epoch is still its own. So of two that do this at the same
time either the owner finds the folder, and the rename that would commit it fails, as what it
renames has gone; or the other one finds that it was replaced, and raises. Nothing can change
between the look and the commit, and nobody waits for a lock. All ranks of a job know its epoch, so
a process that takes the place of the first one goes on in it, and takes nothing back.

That needs a file system that makes a file exclusively, renames a folder as one operation, and lets
whoever lists a folder see what others did before. Local ones do; NFS does from version 3 on, as its
server does all three, and clients ask it when they open a folder. It was never tried on NFS.

A folder of a step has its epoch in its name if that is not the first one, such as
`step-00000003.000002`. A step *replaces* every step of a lower epoch from its own number on. As
this follows from names alone, the one operation that commits a step replaces the others too: they
do not count from then on, whatever is killed afterwards and whatever cannot be removed.

Replaced steps are removed as soon as two others count. So there are two whole steps at every
instant, if there were two before; `load(step=)` finds a replaced one while it is there.
"""

import errno
import hashlib
import json
import os
import re
import shutil
import socket
import threading
import time
import uuid
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from math import inf
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from mics_fn.checkpoint import manifest
from mics_fn.errors import CheckpointNotFound, FileError, MicsError, first_line, message
from mics_fn.init import File
from mics_fn.spans import LOG
from mics_fn.threads import Job

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


def write_file(path: Path, *parts: bytes | memoryview) -> None:
    """Write a new file, and wait until the disk has it."""
    number = os.open(path, _NEW, 0o666)
    try:
        for part in parts:
            rest = memoryview(part)
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
    """Give a folder a name that nobody uses, and remove it; returns whether its own has gone."""
    hidden = path
    with suppress(OSError):
        if not path.name.startswith(".old-"):
            hidden = path.with_name(f".old-{path.name.lstrip('.')}-{uuid.uuid4().hex[:12]}")
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


# The file of a rank: a safetensors file, whose slices the manifest lists.


def write_part(path: Path, tensors: Mapping[manifest.Range, Tensor]) -> manifest.SavedFile:
    """Write a file, and wait until the disk has it; checksums are computed meanwhile.

    Args:
      path: where there is no file yet.
      tensors: the slices, dense and on the CPU.

    Raises:
      OSError: it cannot be written.
    """
    header, places, end = dict[str, Any](), list[int](), 0
    for name, x in tensors.items():
        dtype, count = manifest.in_file(x.dtype, x.numel())
        places.append(end)
        end += x.numel() * x.itemsize
        facts = {"dtype": manifest.WORDS[dtype], "shape": [count]}
        header[f"{name}"] = facts | {"data_offsets": [places[-1], end]}
    disk = os.statvfs(path.parent)
    if end > (free := disk.f_bavail * disk.f_frsize):
        raise OSError(f"{end} bytes are needed, {free} bytes are free")
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    values = [memory_of(x) for x in tensors.values()]
    summed = Job(lambda: [zlib.crc32(each) for each in values]).begin("mics_fn sums")
    try:
        write_file(path, head, *values)
    finally:
        sums = summed.result()
    rows = zip(tensors, places, sums, strict=True)
    slices = [manifest.Slice(name, len(head) + at, crc) for name, at, crc in rows]
    digest = hashlib.sha256(head).hexdigest()
    return manifest.SavedFile(path.name, len(head) + end, len(head), digest, slices)


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
    """Open a file of a step, which lies in its folder."""
    for link in filter(os.path.islink, (path.parent, path)):
        fix = "load only checkpoints that you know, or copy the file itself"
        text = message(f"load: {link} is not opened: it is a symbolic link", fix=fix)
        raise FileError(text, str(link), damaged=True)
    return File("load", path)


def manifest_in(path: Path, step: int) -> tuple[manifest.Manifest, str]:
    """The manifest of a step and its digest.

    Args:
      path: the folder of the step.
      step: which one it should be.

    Raises:
      FileError: it is missing, damaged, or of another step; or the system cannot read it.
    """
    with load_errors(path / manifest.NAME), closing(open_file(path / manifest.NAME)) as file:
        data = file.header(0, file.size, manifest.MAX_BYTES)
    found = manifest.read_manifest(data, str(path / manifest.NAME))
    if found.step != step:
        text = message(f"load: {path} holds step {found.step}", fix="keep the names of folders")
        raise FileError(text, str(path), damaged=True)
    return found, hashlib.sha256(data).hexdigest()


# Which steps of a folder count, and whose it is, by names; see [Note: epochs].

_STEP = re.compile(r"step-(\d{8,})(?:\.(\d{6,}))?")
_OF_EPOCH = re.compile(r"\.(?:epoch|tmp)-(\d{6,})(?:-.*)?")
_LEAST = 2  # steps that pruning leaves
Overwrite = Literal["never", "newer"]


def divided(names: Iterable[str]) -> tuple[dict[int, str], list[tuple[int, str]]]:
    """The name of each step that counts, newest first, and those of all that are replaced."""
    found = [(int(x[2] or 1), int(x[1]), x[0]) for x in map(_STEP.fullmatch, names) if x]
    counting, replaced = dict[int, str](), list[tuple[int, str]]()
    for _, step, name in sorted(found, reverse=True):
        if step < min(counting, default=inf):
            counting[step] = name
        else:
            replaced.append((step, name))
    return counting, replaced


class Folder:
    """The folder in which a job keeps its checkpoints, as one writer or reader has it.

    Args:
      path: where; it need not exist.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.abspath(os.fspath(path)))
        self.epoch = 0  # in which this writer owns it; 0 if it never did
        self._new: Path | None = None  # that is written into and not committed yet

    def __fspath__(self) -> str:
        return str(self.path)

    # What readers see.

    def names(self) -> list[str]:
        """All names in it; none if it does not exist.

        Raises:
          FileError: it is there, but cannot be read.
        """
        with load_errors(self.path), suppress(FileNotFoundError, NotADirectoryError):
            return os.listdir(self.path)
        return []

    def committed(self) -> dict[int, Path]:
        """The folder of each committed step, newest step first."""
        return {step: self.path / name for step, name in divided(self.names())[0].items()}

    def find(self, step: int | None) -> tuple[int, Path]:
        """The folder of a step, or of the newest one.

        Raises:
          CheckpointNotFound: there is none.
        """
        names = self.names()
        counting, replaced = divided(names)
        if step is None:
            step = max(counting, default=None)
        every = dict(reversed(replaced)) | counting
        if step in every:
            return step, self.path / every[step]
        has = ", ".join(sorted(names)[:8]) if self.path.is_dir() else "no folder"
        lines = [f"committed steps: {', '.join(map(str, sorted(counting))) or 'none'}"]
        lines.append(f"it has: {has}")
        what = "no committed checkpoint" if step is None else f"no committed step {step}"
        fix = "pass the folder that save was given, and one of its steps"
        text = message(f"load: {what} in {self.path}", lines, fix)
        raise CheckpointNotFound(text, str(self.path))

    # Whose it is.

    def own(self, *, anew: bool = False) -> None:
        """Take the folder, unless this writer owns it; then remove what older epochs left.

        Args:
          anew: whether it begins a new epoch in any case.

        Raises:
          FileError: a newer writer has taken it.
        """
        make_folder(self.path)
        text = f"host {socket.gethostname()}, process {os.getpid()}, since {time.ctime()}"
        text += f", from step {max(self.committed(), default='none')} on"
        while anew or not self._epoch_file(self.epoch).exists():
            self.check_owned()
            newest = self._newest_epoch() + 1
            with suppress(FileExistsError), open(self._epoch_file(newest), "x") as file:
                self.epoch, anew = newest, False
                file.write(text)
        for name in self.names():
            found, path = _OF_EPOCH.fullmatch(name), self.path / name
            if name.startswith(".old-"):
                remove_folder(path)
            elif not found or int(found[1]) > self.epoch or path == self._epoch_file(self.epoch):
                continue
            elif not path.is_dir():
                path.unlink(missing_ok=True)
            elif not remove_folder(path):  # then the older job could still commit it
                raise OSError(f"{path} cannot be removed")

    def check_owned(self) -> None:
        """Raise FileError if a newer writer has taken the folder from this one."""
        newest = self._newest_epoch()
        if newest > self.epoch > 0:
            who = ["its owner is not known"]
            with suppress(OSError):
                who = [self._epoch_file(newest).read_text(errors="replace")[:300]]
            what = f"save: {self.path} has been taken over by another job"
            fix = "end this job, or give it a folder of its own; all that is committed stays"
            raise FileError(message(what, who, fix), str(self.path))

    def _epoch_file(self, epoch: int) -> Path:
        """The file that says who owns the folder in an epoch."""
        return self.path / f".epoch-{epoch:06d}"

    def _newest_epoch(self) -> int:
        names = self.names()
        steps = [int(x[2] or 1) for x in map(_STEP.fullmatch, names) if x]
        return max([*steps, *(int(x[1]) for x in map(_OF_EPOCH.fullmatch, names) if x)], default=0)

    # What the one rank does that commits.

    def begin(self, step: int, overwrite: Overwrite) -> Path:
        """Make the folder that writers write a step into; `abandon` follows, whatever happens.

        Raises:
          FileError: the step is committed already, or there are newer ones, or another job
            has taken the folder; or it cannot be made.
        """
        with write_errors("save: cannot write to", self.path):
            self.own(anew=self._goes_back(step, overwrite))
            self._goes_back(step, overwrite)  # whoever owned it may have committed one meanwhile
            name = f".tmp-{self.epoch:06d}-step-{step:08d}-{uuid.uuid4().hex[:12]}"
            self._new = self.path / name
            self._new.mkdir()
            self.check_owned()  # whoever takes the folder from now on finds the new one
            return self._new

    def _goes_back(self, step: int, overwrite: Overwrite) -> bool:
        """Whether a step that is there would be replaced; raises FileError if it may not."""
        newest = max(self.committed(), default=-1)
        if newest >= step and overwrite == "never":
            what = f"save: step {step} would follow step {newest} in {self.path}"
            fix = "save a later step, elsewhere, or with overwrite='newer', which replaces them"
            raise FileError(message(what, fix=fix), str(self.path))
        return newest >= step

    def commit(self, found: manifest.Manifest) -> Path:
        """Commit a step whose files are on disk; see [Note: commit].

        Raises:
          FileError: another job has taken the folder.
          OSError, ValueError: a file cannot be written, or would not be read.
        """
        data, new = found.to_bytes(), self._new
        if new is None:
            raise ValueError("this save has ended")
        if len(data) > manifest.MAX_BYTES:
            raise ValueError(f"no reader would take a manifest of {len(data)} bytes")
        epoch = f".{self.epoch:06d}" if self.epoch > 1 else ""
        path = self.path / f"step-{found.step:08d}{epoch}"
        try:
            write_file(new / manifest.NAME, data)
            publish(new, path)
        except OSError:
            self.check_owned()
            raise
        self._new = None
        return path

    def abandon(self) -> None:
        """Remove what was written of a step that does not count."""
        if self._new is not None:
            remove_folder(self._new)
            self._new = None

    def prune(self, keep: int | None, keep_every: int | None) -> None:
        """Remove replaced and old steps after one was committed; at least two whole ones stay.

        Args:
          keep: how many of the newest to keep; None keeps all.
          keep_every: steps that are a multiple of it are kept, too.
        """
        counting, replaced = divided(self.names())
        self.check_owned()  # after the look, so that no step of a newer epoch was seen
        if len(counting) < _LEAST:
            return
        old = list(counting.items())[max(keep, _LEAST) :] if keep is not None else []
        old = [(step, name) for step, name in old if not keep_every or step % keep_every]
        # Those first that are replaced: without what replaces them, they would count again.
        for _, name in (*replaced, *old):
            if not remove_folder(self.path / name):
                LOG.warning("save: cannot remove %s; old steps stay", self.path / name)
                return

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

Which of the whole steps count is in [Note: branches] in `directory`. A step that a load refused, as
it was found to be damaged, does not count as one of those that are kept, and is not removed by that
process: where it would be, it gets a name that begins with `.refused-`, as somebody who looks at it
may find that it can be read.

A file holds slices of flattened tensors under names such as `params.w[0:4096]`. Its metadata has
for each of them the CRC-32 of each block of 16 KiB, so that a reader of a part reads, and checks,
little more than that part. The manifest has the SHA-256 of the header, so no checksum can be
exchanged or left out.

[Note: branches] A run that goes back to an older step and saves from there leaves a branch behind.
The first step that it saves at or below one that is there already begins a new *branch*, and its
folder gets the number of the branch, in six digits, such as `step-00000003.000002`; so do all steps
after it. A step *replaces* every step of a lower branch from its own number on. As this follows
from names alone, the one operation that commits a step replaces the others too: they do not count
from then on, whatever is killed afterwards and whatever cannot be removed.

Replaced steps are removed as soon as two others count. Until then the newest of them stays, so that
there are two whole steps at every instant, if there were two before; `load(step=)` finds it.

[Note: all or nothing] The ranks write into a temporary directory beside the target. Every file is
synced before the ranks compare whether all went well; then the first rank writes what makes the
rest readable, syncs the directory, and renames it. So whoever sees the target sees all of it, after
a crash too. Whatever fails on one rank is the same error on all of them, and the temporary
directory is removed. A process that is killed may leave it behind: its name begins with a dot and
ends with `.tmp`, and it can be deleted.
"""

import errno
import fcntl
import hashlib
import importlib.util
import json
import os
import re
import secrets
import shutil
import socket
import stat
import threading
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from mics_fn import checks
from mics_fn.checkpoint.manifest import (
    BLOCK,
    MAX_BYTES,
    MAX_LEAVES,
    Manifest,
    SavedTensor,
    Slice,
    block_sums,
    digest_of,
    in_file,
    joined,
    read_manifest,
)
from mics_fn.checkpoint.manifest import NAME as MANIFEST
from mics_fn.collectives import collect_bytes
from mics_fn.errors import (
    CheckpointNotFound,
    FileError,
    first_line,
    message,
    rank_lines,
)
from mics_fn.groups import Groups
from mics_fn.init import File, with_texts
from mics_fn.shards import dtype_name
from mics_fn.spans import LOG
from mics_fn.threads import beside

# Durable files and folders: each write is followed by fsync.

_BEHIND = 19  # how nice a thread is that only writes
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def make_file(path: Path) -> int:
    """Make a new, empty file; returns who may read and write it, by the umask."""
    number = os.open(path, _NEW, 0o644)
    try:
        return stat.S_IMODE(os.fstat(number).st_mode)
    finally:
        os.close(number)


def make_folder(path: Path) -> None:
    """Make a folder and all above it, and wait until the disk has their names."""
    missing = [each for each in (path, *path.parents) if not each.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for each in missing:
        sync_folder(each.parent)


def sync_folder(path: Path) -> None:
    """Wait until the disk has the names in a folder, where the file system can be asked for that.

    Some that keep files in other places cannot; they have the name of a file once it is closed.
    """
    number = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
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


def step_back() -> None:
    """Lower the priority of this thread below those that compute, if the system can."""
    with suppress(AttributeError, OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _BEHIND)


# The files that writers write: native safetensors, with a checksum for each block of each
# tensor.

READ = 256 * BLOCK  # bytes that are read, and compared, at once
_OLDER = "load an older step, as on_corrupt='previous' does"
_AGAIN = "load it again; the file may be as it was saved"
# What the system says of a file that is not there, or is something else.
_EVIDENCE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO)


class FileRecord(NamedTuple):
    """Record of a file in the manifest."""

    nbytes: int
    header: str


def slice_name(name: str, part: Slice) -> str:
    """The name of a slice in its file."""
    return f"{name}[{part.start}:{part.stop}]"


def check_writable() -> None:
    """Raise FileError if safetensors, which writes files, is not installed."""
    if importlib.util.find_spec("safetensors") is None:
        text = "Checkpoints: saving needs the package safetensors"
        raise FileError(message(text, fix="pip install 'mics-fn[checkpoint]'"), "")


def write_part(path: Path, tensors: Mapping[str, Tensor]) -> FileRecord:
    """Write a file, and wait until the disk has it.

    Args:
      path: where there is no file yet.
      tensors: dense tensors on the CPU, by the names that they get.

    Raises:
      FileError: it cannot be written.
    """
    import safetensors

    needed = sum(x.numel() * x.itemsize for x in tensors.values())
    try:
        header, size = _written(safetensors, path, tensors)
        if size != len(header) + needed:
            raise OSError(f"the file system kept {size} bytes")
    except (OSError, safetensors.SafetensorError) as error:
        raise cannot_write(path, error, f"{needed} bytes") from error
    return FileRecord(size, hashlib.sha256(header).hexdigest())


def _written(library: Any, path: Path, tensors: Mapping[str, Tensor]) -> tuple[bytes, int]:
    """Write a file; gives its header and its size.

    Checksums stand in front of the values. They are computed while the library writes these, and
    then put into the place that it has left for them.
    """
    specs = {}
    for name, x in tensors.items():
        dtype, count = in_file(x.dtype, x.numel())
        shape = list(x.shape) if dtype == x.dtype else [count]
        place = {"data_ptr": x.data_ptr(), "data_len": x.numel() * x.itemsize}
        specs[name] = library.TensorSpec(dtype=dtype_name(dtype), shape=shape, **place)
    blank = {name: "0" * (8 * -(-x.numel() * x.itemsize // BLOCK)) for name, x in tensors.items()}
    mode = make_file(path)
    summed = beside(lambda: {name: block_sums(x) for name, x in tensors.items()})
    # It puts another file in the place of that one, which nobody else might read.
    library.serialize_file(specs, path, metadata=blank)
    sums = summed()
    with open(path, "r+b") as file:
        os.fchmod(file.fileno(), mode)
        head = file.read(8)
        text = file.read(int.from_bytes(head, "little"))
        facts = json.loads(text)
        facts["__metadata__"] |= sums
        filled = json.dumps(facts, separators=(",", ":"), ensure_ascii=False).encode()
        if len(filled) > len(text):
            raise OSError(f"the header needs {len(filled)} bytes and has {len(text)}")
        file.seek(len(head))
        file.write(filled.ljust(len(text)))
        file.flush()
        os.fsync(file.fileno())
        return head + filled.ljust(len(text)), os.fstat(file.fileno()).st_size


def cannot_write(path: Path, error: Exception, what: str = "") -> FileError:
    """The error of a file that cannot be written."""
    first = first_line(error)
    lines = [f"{what}: {first}" if what else first]
    fix = "make room or give the right to write there, and save again; older steps are as they were"
    return FileError(message(f"save: {path} cannot be written", lines, fix), str(path))


class PartFile:
    """A file of a checkpoint, open for reading.

    Args:
      folder: the folder of the step.
      name: the name of the file.
      record: what the manifest says of it.

    Raises:
      FileError: it is not the file that was saved.
    """

    def __init__(self, folder: Path, name: str, record: FileRecord) -> None:
        self.path = folder / name
        self._file = File("load", self.path)
        self._turn = threading.Lock()  # one thread reads, so that the system can read ahead
        try:
            self._open(record)
        except BaseException:
            self._file.close()
            raise

    def _open(self, record: FileRecord) -> None:
        file = self._file
        if file.size != record.nbytes:
            raise self._corrupt(f"it has {file.size} bytes, and had {record.nbytes}")
        length = int.from_bytes(file.read(0, 8), "little")
        if length > file.size - 8:
            raise self._corrupt("its header would be longer than the file")
        header = bytes(file.read(0, 8 + length))
        if hashlib.sha256(header).hexdigest() != record.header:
            raise self._corrupt("its header is not the one that was saved")
        self._entries, self._sums = with_texts(file)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def names(self) -> list[str]:
        """The names of all tensors in it."""
        return list(self._entries)

    def read(self, name: str, start: int, out: Tensor) -> None:
        """Fill a tensor with elements of a tensor of the file, once they are checked.

        Args:
          name: the name of that tensor in the file.
          start: the first element.
          out: 1D, dense, on the CPU.

        Raises:
          FileError: values or checksums are not those that were saved. Then `out` may have
            been written to.
        """
        entry, sums = self._entries.get(name), self._sums.get(name)
        size, stop = out.dtype.itemsize, start + len(out)
        dtype, count = in_file(out.dtype, stop)
        if entry is None or entry.dtype != dtype or count > entry.numel:
            raise self._corrupt("it is not in the file", name)
        end = entry.numel * dtype.itemsize
        if sums is None or len(sums) != 8 * -(-end // BLOCK):
            raise self._corrupt("its checksums are missing", name)
        memory: Any = out.view(torch.uint8).numpy()
        view, low, high = memoryview(memory), start * size, stop * size
        while low < high:
            block = low // BLOCK
            whole = high if high == end else high // BLOCK * BLOCK
            if low % BLOCK == 0 and low < whole:  # whole blocks come where they are wanted
                count = min(whole - low, READ)
                into = view[low - start * size : low - start * size + count]
                with self._turn:
                    self._file.read_into(into, entry.base + low, name)
                self._compare(name, into, sums, block)
            else:
                begin, until = block * BLOCK, min(end, (block + 1) * BLOCK)
                data = self._file.read(entry.base + begin, until - begin, name)
                self._compare(name, data, sums, block)
                count = min(until, high) - low
                at = low - start * size
                view[at : at + count] = data[low - begin : low - begin + count]
            low += count

    def _compare(self, name: str, data: memoryview | bytearray, sums: str, block: int) -> None:
        """Raise unless these are the bytes that were saved, from a block on."""
        until = block + -(-len(data) // BLOCK)
        try:
            right = zlib.crc32(data) == joined(sums[8 * block : 8 * until], len(data))
        except ValueError:  # checksums that are not numbers
            right = False
        if not right:
            raise self._corrupt("its values are not those that were saved", name)

    def expect(self, name: str, tensor: SavedTensor) -> None:
        """Raise unless the file has a tensor of the dtype and shape in the manifest."""
        entry = self._entries.get(name)
        wanted = in_file(tensor.dtype, tensor.numel)
        if entry is None or (entry.dtype, entry.numel) != wanted:
            raise self._corrupt("it is not in the file as the manifest says", name)

    def check(self, name: str) -> None:
        """Read a tensor of the file and compare it with its checksums."""
        entry = self._entries[name]
        step = READ // entry.dtype.itemsize
        for start in range(0, max(1, entry.numel), step):
            stop = min(entry.numel, start + step)
            self.read(name, start, torch.empty(stop - start, dtype=entry.dtype))

    def whole(self, name: str) -> Tensor:
        """A tensor of the file in full, in its shape."""
        if name not in self._entries:
            raise self._corrupt("it is not in the file", name)
        entry = self._entries[name]
        out = torch.empty(entry.numel, dtype=entry.dtype)
        self.read(name, 0, out)
        return out.view(entry.shape)

    def _corrupt(self, how: str, leaf: str = "") -> FileError:
        lines = [f"{leaf}: {how}" if leaf else how]
        text = f"load: {self.path} is damaged"
        return FileError(message(text, lines, _OLDER), str(self.path), leaf, damaged=True)


@contextmanager
def load_errors(path: Path) -> Iterator[None]:
    """Raise errors of reading a file as those of checkpoints, which say whether it is damaged."""
    try:
        yield
    except (OSError, FileError) as error:
        if isinstance(error, FileError) and error.damaged is not None:
            raise
        raise as_load_error(error, path) from error


def as_load_error(error: Exception, path: Path) -> FileError:
    """Return an error of reading a file as one of checkpoints, with its reason and its leaf.

    A file is damaged only if the error shows that it is not as it was saved. If the system could
    not read it, nothing is known of the file, and `load` does not go back to an older step.
    """
    found = str(error).strip().splitlines() or [type(error).__name__]
    if isinstance(error, FileError):  # its own fix is that of weights, and its path is this one
        found = [line.strip() for line in found if not line.startswith("  fix: ")]
    reason = error.__cause__ if isinstance(error, FileError) else error
    unknown = isinstance(reason, OSError) and reason.errno not in _EVIDENCE
    fix = _AGAIN if unknown else _OLDER
    text = message(f"load: {path} cannot be read", [line[:500] for line in found], fix)
    return FileError(text, str(path), getattr(error, "leaf", ""), damaged=not unknown)


# Which steps of a folder count, by the names of their folders.

BY_FILE, COMMITTED = "BY_FILE", "COMMITTED"
MAX_STEP = 10**16 - 1
_STEP = re.compile(r"step-(\d{8,16})(?:\.(\d{6,15}))?")


class Attempt(NamedTuple):
    """A folder of a step.

    Args:
      step: its number.
      number: of its branch; the first branch is 1, and is not named.
      path: the folder.
    """

    step: int
    number: int
    path: Path

    @classmethod
    def of(cls, path: Path) -> "Attempt | None":
        """The one of a folder with this path; None if the name is not that of a step."""
        found = _STEP.fullmatch(path.name)
        if found is None:
            return None
        return cls(int(found[1]), int(found[2] or 1), path)


def attempts_in(folder: Path) -> list[Attempt]:
    """All folders in a folder that have the name of a step, whether they count or not.

    Raises:
      FileError: the folder is there, but cannot be read.
    """
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        what, fix = f"checkpoint: {folder} cannot be read", "get the right to read it, or try again"
        raise FileError(message(what, [str(error)], fix), str(folder)) from error
    return [x for x in (Attempt.of(folder / name) for name in names) if x is not None]


def next_name(attempts: Iterable[Attempt], step: int) -> str:
    """The name of the folder of a step that is saved now; see [Note: branches]."""
    found = list(attempts)
    branch = max((each.number for each in found), default=1)
    if any(each.step >= step and each.number == branch for each in found):
        branch += 1
    return f"step-{step:08d}" + (f".{branch:06d}" if branch > 1 else "")


def divided(attempts: Iterable[Attempt]) -> tuple[dict[int, Path], list[Attempt]]:
    """The folder of each step that counts, oldest step first; and the steps that are replaced.

    Args:
      attempts: those that are whole.
    """
    by_step: dict[int, list[Attempt]] = {}
    for each in attempts:
        by_step.setdefault(each.step, []).append(each)
    counting: dict[int, Path] = {}
    replaced, branch = list[Attempt](), 0  # the highest one at this step or below
    for step in sorted(by_step):
        *older, newest = sorted(by_step[step], key=lambda each: each.number)
        if newest.number >= branch:
            counting[step] = newest.path
        else:
            older.append(newest)
        replaced += older
        branch = max(branch, newest.number)
    return counting, replaced


def is_whole(path: Path) -> bool:
    """Whether a folder with the name of a step was committed."""
    try:
        # A link is not a step, but somebody made it, so loading it says so.
        names = [] if os.path.islink(path) else os.listdir(path)
    except (FileNotFoundError, NotADirectoryError):  # it was removed meanwhile, or is a file
        return False
    except OSError:
        return True
    if BY_FILE in names:
        return COMMITTED in names  # it comes whole, so one that is cut was damaged later
    return os.path.islink(path) or bool(names)


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
          FileError: the step is committed already, or there are newer ones, or another job
            saves here.
          FileError: the folder cannot be made.
        """
        try:
            make_folder(self.path)
            self._take_lock()
            self._sweep()
            newer = [s for s in self.committed() if s >= step]
            if newer and overwrite == "never":
                what = f"save: step {step} would follow step {max(newer)} in {self.path}"
                fix = "save a later step, elsewhere, or with overwrite='newer', which replaces them"
                raise FileError(message(what, fix=fix), str(self.path))
            path = self._final(step)
            if commit == "rename":
                path = self.path / f".tmp-{path.name}-{uuid.uuid4().hex[:12]}"
            path.mkdir()
            self._begun = path
            if commit == "file":
                write_file(path / BY_FILE, b"")
                sync_folder(path)
            return path
        except FileError:
            self.unlock()
            raise
        except OSError as error:
            self.unlock()
            raise cannot_write(self.path, error) from error

    def _final(self, step: int) -> Path:
        return self.path / next_name(attempts_in(self.path), step)

    def commit(self, path: Path, manifest: Manifest) -> Path:
        """Commit a step whose files are on disk; see [Note: commit].

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
            raise FileError(message(what, fix=fix), str(self.path)) from None
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
    """Close the locks in a forked process, which would keep them for its life."""
    for number in _LOCKS:
        os.close(number)
    _LOCKS.clear()


os.register_at_fork(after_in_child=_leave_locks)


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))


def _is_refused(path: Path) -> bool:
    return _REFUSED.get(_real(path)) == _inode(path)


def _inode(path: Path) -> tuple[int, int]:
    """Identify a folder, also if another one later has its name."""
    try:
        found = os.stat(path)
    except OSError:
        return 0, 0
    return found.st_dev, found.st_ino


# A directory that several ranks write, and that appears under its name only when it is
# complete.

_FIX = "pass a path with enough room, on a file system that all ranks share and may write to"


def free_path(verb: str, path: str | os.PathLike) -> Path:
    """The absolute path of a directory that is still to be written.

    Raises:
      FileError: something is there that would be lost.
    """
    checks.path(verb, "path", path)
    real = Path(os.path.realpath(path))
    if os.path.lexists(real) and not (real.is_dir() and not any(real.iterdir())):
        what = "a directory that is not empty" if real.is_dir() else "a file"
        fix = "pass a new path, or move away what is there; nothing is overwritten"
        raise FileError(message(f"{verb}: {real} is {what}", fix=fix), str(real))
    return real


class NewDirectory:
    """A directory under way; see [Note: all or nothing].

    Args:
      verb: for errors.
      path: what it will be called.
      home: the ranks that write it, or wait until it is there.
    """

    def __init__(self, verb: str, path: Path, home: Groups) -> None:
        self.verb, self.path, self.home = verb, path, home
        self.folder = path  # the temporary one, as soon as it is known
        self.first = home.ranks[home.plan.partition_groups[0][0]]
        self.is_first = home.rank == self.first  # whether this rank does what is done once

    def together(self, work: Callable[[], str]) -> dict[int, str]:
        """Work that each rank does on its own; if it fails on some, all raise.

        Args:
          work: gives a text for the other ranks, and sends nothing.

        Returns:
          The text of each rank.

        Communication: two small all-gathers over the partition group and over the replication
          group.

        Raises:
          FileError: on every rank, with the ranks on which the work failed, and how.
        """
        text, wrong, cause = "", "", None
        try:
            text = work()
        except Exception as error:  # of any type, so that the other ranks do not wait for this one
            cause = error
            wrong = f"{type(error).__name__}: {error}".partition("\n")[0]
        sent = collect_bytes(self.home, json.dumps([text, wrong]).encode())
        found = {rank: json.loads(said) for rank, said in sent.items()}
        failed = {rank: wrong for rank, (_, wrong) in found.items() if wrong}
        if failed:
            what = f"{self.verb}: {self.path} was not written"
            raise FileError(message(what, rank_lines(failed), _FIX), str(self.path)) from cause
        return {rank: text for rank, (text, _) in found.items()}

    def begin(self) -> None:
        """Make the temporary directory, and send its name to all ranks."""

        def make() -> str:
            if not self.is_first:
                return ""
            name = f".{self.path.name}.{secrets.token_hex(4)}.tmp"
            self.path.parent.mkdir(parents=True, exist_ok=True)
            (self.path.parent / name).mkdir()
            self.folder = self.path.parent / name
            return name

        self.folder = self.path.parent / self.together(make)[self.first]

    def publish(self) -> None:
        """Give the directory its name."""

        def rename() -> str:
            if self.is_first:
                sync(self.folder)
                self.folder.rename(self.path)
                sync(self.path.parent)
            return ""

        self.together(rename)

    def remove(self) -> None:
        """Remove the temporary directory, if this rank has made it."""
        if self.is_first and self.folder != self.path:
            shutil.rmtree(self.folder, ignore_errors=True)


@contextmanager
def new_directory(verb: str, path: Path, home: Groups) -> Iterator[NewDirectory]:
    """A block in which ranks write a directory, which is there after it or not at all.

    Communication: as `NewDirectory.together`, twice.

    Raises:
      FileError: it could not be made or renamed; on every rank.
    """
    directory = NewDirectory(verb, path, home)
    try:
        directory.begin()
        yield directory
        directory.publish()
    except BaseException:
        directory.remove()
        raise


def sync(path: Path) -> None:
    """Wait until a file, or the names in a directory, would survive a loss of power."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


# The manifest of a step, and which files of a step are opened at all.


def manifest_in(path: Path, step: int) -> tuple[Manifest, str]:
    """The manifest of a step and its digest.

    Args:
      path: the folder of the step.
      step: which one it should be.

    Raises:
      FileError: it is missing, damaged, or of another step.
      FileError: the system cannot read it.
    """
    if os.path.islink(path):
        raise _not_opened(path, "it is a symbolic link")
    data = _content(path, MANIFEST)
    manifest, digest = read_manifest(data, str(path / MANIFEST)), digest_of(data)
    if manifest.step != step:
        text = f"load: {path} holds step {manifest.step}"
        raise FileError(message(text, fix="keep the names of folders"), str(path), damaged=True)
    if manifest.commit == "file" and _content(path, COMMITTED) != digest.encode():
        raise as_load_error(ValueError("it is not that of the manifest"), path / COMMITTED)
    first = manifest.commit == "file"
    if os.path.lexists(path / BY_FILE) != first or (first and _content(path, BY_FILE)):
        raise as_load_error(ValueError("it is not as it was written"), path / BY_FILE)
    return manifest, digest


def check_files(path: Path, names: Iterable[str]) -> None:
    """Refuse files of a step that are not regular files in its folder.

    Raises:
      FileError: one of them is a symbolic link, or something else.
      FileError: one of them is not there.
      FileError: the system cannot tell.
    """
    for name in names:
        with load_errors(path / name):
            regular = stat.S_ISREG(os.lstat(path / name).st_mode)
        if not regular:
            raise _not_opened(path / name, "it is not a regular file")


def _not_opened(path: Path, why: str) -> FileError:
    fix = "load only checkpoints that you know, or copy the file itself"
    text = message(f"load: {path} is not opened: {why}", fix=fix)
    return FileError(text, str(path), damaged=True)


def _content(path: Path, name: str) -> bytes:
    """A small file of a step, whole."""
    check_files(path, [name])
    with load_errors(path / name):
        file = File("load", path / name)
        try:
            return file.header(0, file.size, MAX_BYTES)
        finally:
            file.close()

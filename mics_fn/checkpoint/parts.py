"""The files that writers write: native safetensors, with a checksum for each block of each tensor.

A file holds slices of flattened tensors under names such as `params.w[0:4096]`. Its metadata has
for each of them the CRC-32 of each block of 16 KiB, so that a reader of a part reads, and checks,
little more than that part. The manifest has the SHA-256 of the header, so no checksum can be
exchanged or left out.
"""

import errno
import hashlib
import importlib.util
import json
import os
import threading
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mics_fn.checkpoint.disk import make_file
from mics_fn.checkpoint.layout import Slice, Stored, in_file
from mics_fn.checkpoint.sums import BLOCK, block_sums, joined
from mics_fn.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointFormatError,
    CheckpointWriteError,
    FileError,
    first_line,
    message,
)
from mics_fn.init import File, Limits, with_texts
from mics_fn.shards import dtype_name
from mics_fn.threads import beside

READ = 256 * BLOCK  # bytes that are read, and compared, at once
_LIMITS = Limits(trust=False, max_header_bytes=2**30, max_leaves=1_000_000)
_EXTRA = "pip install 'mics-fn[checkpoint]'"
_OLDER = "load an older step, as on_corrupt='previous' does"
_AGAIN = "load it again; the file may be as it was saved"
# What the system says of a file that is not there, or is something else.
_EVIDENCE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO)


class Record(NamedTuple):
    """What the manifest says of a file."""

    nbytes: int
    header: str


def slice_name(name: str, part: Slice) -> str:
    """The name of a slice in its file."""
    return f"{name}[{part.start}:{part.stop}]"


def check_writable() -> None:
    """Raise CheckpointWriteError if safetensors, which writes files, is not installed."""
    if importlib.util.find_spec("safetensors") is None:
        text = "Checkpoints: saving needs the package safetensors"
        raise CheckpointWriteError(message(text, fix=_EXTRA), "")


def write_part(path: Path, tensors: Mapping[str, Tensor]) -> Record:
    """Write a file, and wait until the disk has it.

    Args:
      path: where there is no file yet.
      tensors: dense tensors on the CPU, by the names that they get.

    Raises:
      CheckpointWriteError: it cannot be written, or safetensors is not installed.
    """
    try:
        import safetensors
    except ImportError as error:
        text = f"save: {path} needs the package safetensors"
        raise CheckpointWriteError(message(text, fix=_EXTRA), str(path)) from error
    needed = sum(x.numel() * x.itemsize for x in tensors.values())
    try:
        header, size = _written(safetensors, path, tensors)
        if size != len(header) + needed:
            raise OSError(f"the file system kept {size} bytes")
    except (OSError, safetensors.SafetensorError) as error:
        raise cannot_write(path, error, f"{needed} bytes") from error
    return Record(size, hashlib.sha256(header).hexdigest())


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


def cannot_write(path: Path, error: Exception, what: str = "") -> CheckpointWriteError:
    """The error of a file that cannot be written."""
    first = first_line(error)
    lines = [f"{what}: {first}" if what else first]
    fix = "make room or give the right to write there, and save again; older steps are as they were"
    return CheckpointWriteError(message(f"save: {path} cannot be written", lines, fix), str(path))


class Part:
    """A file of a checkpoint, open for reading.

    Args:
      folder: the folder of the step.
      name: the name of the file.
      record: what the manifest says of it.

    Raises:
      CheckpointFormatError: it is not the file that was saved.
    """

    def __init__(self, folder: Path, name: str, record: Record) -> None:
        self.path = folder / name
        self._file = File("load", self.path, _LIMITS)
        self._turn = threading.Lock()  # one thread reads, so that the system can read ahead
        try:
            self._open(record)
        except BaseException:
            self._file.close()
            raise

    def _open(self, record: Record) -> None:
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
          CheckpointCorrupt: values or checksums are not those that were saved. Then `out` may have
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

    def expect(self, name: str, tensor: Stored) -> None:
        """Raise unless the file has a tensor as the manifest says."""
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

    def _corrupt(self, how: str, leaf: str = "") -> CheckpointCorrupt:
        lines = [f"{leaf}: {how}" if leaf else how]
        text = f"load: {self.path} is damaged"
        return CheckpointCorrupt(message(text, lines, _OLDER), str(self.path), leaf)


def as_load_error(error: Exception, path: Path) -> CheckpointError:
    """An error of reading a file, as one of checkpoints: the same reason, and the same leaf.

    Only what shows that the file is not as it was saved is a CheckpointFormatError, on which `load`
    may go back to an older step. If the system could not read it, nothing is known of the file.
    """
    found = str(error).strip().splitlines() or [type(error).__name__]
    if isinstance(error, FileError):  # its own fix is that of weights, and its path is this one
        found = [line.strip() for line in found if not line.startswith("  fix: ")]
    reason = error if isinstance(error, OSError) else error.__cause__
    unknown = isinstance(reason, OSError) and reason.errno not in _EVIDENCE
    kind, fix = (CheckpointError, _AGAIN) if unknown else (CheckpointFormatError, _OLDER)
    text = message(f"load: {path} cannot be read", [line[:500] for line in found], fix)
    return kind(text, str(path), getattr(error, "leaf", ""))

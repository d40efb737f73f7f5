"""Which steps a folder has, and whether their files are as they were saved; without ranks."""

import os
import time
from dataclasses import dataclass, replace
from pathlib import Path

from mics_fn import checks
from mics_fn.checkpoint.layout import Stored, within
from mics_fn.checkpoint.manifest import Manifest
from mics_fn.checkpoint.opening import check_files, manifest_in
from mics_fn.checkpoint.parts import Part, Record, as_load_error, slice_name
from mics_fn.checkpoint.under_way import folder_to_read
from mics_fn.errors import CheckpointError, FileError, human_bytes
from mics_fn.threads import each

_READERS = 4


def steps(path: str | os.PathLike[str]) -> list[int]:
    """The committed steps in a folder, oldest first.

    Args:
      path: the folder that `save` was given.

    Returns:
      Their numbers; none for a folder that does not exist. A save of this process to it that is
      under way is waited for.

    Raises:
      CheckpointError: the folder cannot be read.
      PlanError: `path` is not a path.

    Example:
      >>> checkpoint.steps("no such folder")
      []
    """
    checks.path("steps", "path", path)
    return list(folder_to_read("steps", path).committed())


def latest(path: str | os.PathLike[str]) -> int | None:
    """The newest committed step in a folder; None if there is none.

    Args:
      path: the folder that `save` was given.

    Returns:
      Its number. A save of this process to it that is under way is waited for. A step that another
      process is writing, or whose save failed, is not committed.

    Raises:
      CheckpointError: the folder cannot be read.
      PlanError: `path` is not a path.

    Example:
      >>> checkpoint.latest("no such folder") is None
      True
    """
    checks.path("latest", "path", path)
    return max(folder_to_read("latest", path).committed(), default=None)


@dataclass(frozen=True)
class Verified:
    """A step whose files are as they were saved.

    Args:
      step: the number of the step.
      path: the folder of the step.
      files: number of files of values.
      tensors: number of tensors.
      nbytes: bytes of all files together.
      seconds: how long the comparison took.
    """

    step: int
    path: Path
    files: int
    tensors: int
    nbytes: int
    seconds: float

    def __str__(self) -> str:
        rate = human_bytes(self.nbytes / max(self.seconds, 1e-9))
        what = f"{self.tensors} tensors in {self.files} files, {human_bytes(self.nbytes)}"
        return f"step {self.step}: {what}, as they were saved ({rate} per second)"


def verify(path: str | os.PathLike[str], step: int | None = None) -> Verified:
    """Read all files of a step and compare every value with its checksum.

    Args:
      path: the folder that `save` was given.
      step: which one; default the newest committed one.

    Returns:
      What was compared. `python -m mics_fn verify DIR` prints it.

    Memory: 1 MiB for each of 4 files that are read at once.

    Raises:
      CheckpointNotFound: there is no such step.
      PlanError: `path` is not a path, or `step` not an int.
      CheckpointFormatError, CheckpointCorrupt, CheckpointSecurityError: something is not as it was
        saved, or a checksum is missing; the text names file and leaf.

    Example:
      >>> import tempfile
      >>> groups, folder = make_groups(1), tempfile.mkdtemp()
      >>> path = checkpoint.save(folder, shard([torch.ones(8)], groups), groups, step=3)
      >>> checkpoint.verify(folder).tensors
      1
    """
    checks.path("verify", "path", path)
    checks.integer("verify", "step", step, 0, optional=True, fix="None takes the newest one")
    started = time.perf_counter()
    number, place = folder_to_read("verify", path).find(step)
    manifest, _ = manifest_in(place, number)
    written = [i for i, writer in enumerate(manifest.writers) if writer.file]
    check_files(place, [manifest.writers[i].file for i in written])
    each(lambda i: _check_file(place, manifest, i), written, _READERS, "mics_fn verify")
    nbytes = sum(writer.nbytes for writer in manifest.writers)
    seconds = time.perf_counter() - started
    return Verified(number, place, len(written), len(manifest.tensors), nbytes, seconds)


def _check_file(place: Path, manifest: Manifest, number: int) -> None:
    writer = manifest.writers[number]
    try:
        part = Part(place, writer.file, Record(writer.nbytes, writer.header))
        try:
            for name, tensor in wanted_in(manifest, number).items():
                part.expect(name, tensor)
            for name in part.names():
                part.check(name)
        finally:
            part.close()
    except (OSError, FileError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise as_load_error(error, place / writer.file) from error


def wanted_in(manifest: Manifest, number: int) -> dict[str, Stored]:
    """All slices of the state that a file has, by the manifest: names, and what they are like."""
    found = {}
    for tensor in manifest.tensors:
        if tensor.line < 0:
            found[tensor.name] = tensor
            continue
        line = manifest.lines[tensor.line]
        part = within(tensor, line, manifest.cell(tensor.line, number))
        if part is not None:
            shape = (part.stop - part.start,)
            found[slice_name(tensor.name, part)] = replace(tensor, shape=shape)
    return found

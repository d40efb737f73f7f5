"""The manifest of a step, and which files of a step are opened at all."""

import os
import stat
from collections.abc import Iterable
from pathlib import Path

from mics_fn.checkpoint.committed import BY_FILE, COMMITTED
from mics_fn.checkpoint.manifest import MAX_BYTES, Manifest, digest_of, read_manifest
from mics_fn.checkpoint.manifest import NAME as MANIFEST
from mics_fn.checkpoint.parts import as_load_error
from mics_fn.errors import CheckpointFormatError, CheckpointSecurityError, FileError, message
from mics_fn.init import File, Limits

_LIMITS = Limits(trust=False, max_header_bytes=MAX_BYTES, max_leaves=0)


def manifest_in(path: Path, step: int) -> tuple[Manifest, str]:
    """The manifest of a step and its digest.

    Args:
      path: the folder of the step.
      step: which one it should be.

    Raises:
      CheckpointFormatError: it is missing, damaged, or of another step.
      CheckpointError: the system cannot read it.
    """
    if os.path.islink(path):
        raise _not_opened(path, "it is a symbolic link")
    data = _content(path, MANIFEST)
    manifest, digest = read_manifest(data, str(path / MANIFEST)), digest_of(data)
    if manifest.step != step:
        text = f"load: {path} holds step {manifest.step}"
        raise CheckpointFormatError(message(text, fix="keep the names of folders"), str(path))
    if manifest.commit == "file" and _content(path, COMMITTED) != digest.encode():
        raise as_load_error(ValueError("it is not that of the manifest"), path / COMMITTED)
    first = manifest.commit == "file"
    if os.path.lexists(path / BY_FILE) != first or (first and _content(path, BY_FILE)):
        raise as_load_error(ValueError("it is not as it was written"), path / BY_FILE)
    return manifest, digest


def check_files(path: Path, names: Iterable[str]) -> None:
    """Refuse files of a step that are not regular files in its folder.

    Raises:
      CheckpointSecurityError: one of them is a symbolic link, or something else.
      CheckpointFormatError: one of them is not there.
      CheckpointError: the system cannot tell.
    """
    for name in names:
        try:
            regular = stat.S_ISREG(os.lstat(path / name).st_mode)
        except OSError as error:
            raise as_load_error(error, path / name) from error
        if not regular:
            raise _not_opened(path / name, "it is not a regular file")


def _not_opened(path: Path, why: str) -> CheckpointSecurityError:
    fix = "load only checkpoints that you know, or copy the file itself"
    text = message(f"load: {path} is not opened: {why}", fix=fix)
    return CheckpointSecurityError(text, str(path))


def _content(path: Path, name: str) -> bytes:
    """A small file of a step, whole."""
    check_files(path, [name])
    try:
        file = File("load", path / name, _LIMITS)
        try:
            file.require_small(file.size)
            return bytes(file.read(0, file.size))
        finally:
            file.close()
    except (OSError, FileError) as error:
        raise as_load_error(error, path / name) from error

"""A directory that several ranks write, and that appears under its name only when it is complete.

[Note: all or nothing] The ranks write into a temporary directory beside the target. Every file is
synced before the ranks compare whether all went well; then the first rank writes what makes the
rest readable, syncs the directory, and renames it. So whoever sees the target sees all of it, after
a crash too. Whatever fails on one rank is the same error on all of them, and the temporary
directory is removed. A process that is killed may leave it behind: its name begins with a dot and
ends with `.tmp`, and it can be deleted.
"""

import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from mics_fn import checks
from mics_fn.collectives import collect_bytes
from mics_fn.errors import FileError, message, rank_lines
from mics_fn.groups import Groups

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
        """Make the temporary directory, and tell all ranks its name."""

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

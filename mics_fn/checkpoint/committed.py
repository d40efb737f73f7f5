"""Which steps of a folder count, by the names of their folders.

[Note: branches] A run that goes back to an older step and saves from there leaves a branch behind.
The first step that it saves at or below one that is there already begins a new *branch*, and its
folder gets the number of the branch, in six digits, such as `step-00000003.000002`; so do all steps
after it. A step *replaces* every step of a lower branch from its own number on. As this follows
from names alone, the one operation that commits a step replaces the others too: they do not count
from then on, whatever is killed afterwards and whatever cannot be removed.

Replaced steps are removed as soon as two others count. Until then the newest of them stays, so that
there are two whole steps at every instant, if there were two before; `load(step=)` finds it.

A folder of version 1.0 may hold a step that was written again under a shorter number, such as
`step-00000120.2`. It replaces only the step of the same number.
"""

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from mics_fn.errors import CheckpointError, message

BY_FILE, COMMITTED = "BY_FILE", "COMMITTED"
MAX_STEP = 10**16 - 1
_STEP = re.compile(r"step-(\d{8,16})(?:\.(\d{1,15}))?")
_DIGITS = 6  # of a branch, at least


class Attempt(NamedTuple):
    """A folder of a step.

    Args:
      step: its number.
      number: of its branch; the first branch is 1, and is not named.
      is_branch: whether the name says that this is a branch: it replaces later steps, too.
      path: the folder.
    """

    step: int
    number: int
    is_branch: bool
    path: Path

    @classmethod
    def of(cls, path: Path) -> "Attempt | None":
        """The one of a folder with this path; None if the name is not that of a step."""
        found = _STEP.fullmatch(path.name)
        if found is None:
            return None
        number = found[2] or "1"
        return cls(int(found[1]), int(number), len(number) >= _DIGITS, path)


def attempts_in(folder: Path) -> list[Attempt]:
    """All folders in a folder that have the name of a step, whether they count or not.

    Raises:
      CheckpointError: the folder is there, but cannot be read.
    """
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        what, fix = f"checkpoint: {folder} cannot be read", "get the right to read it, or try again"
        raise CheckpointError(message(what, [str(error)], fix), str(folder)) from error
    return [x for x in (Attempt.of(folder / name) for name in names) if x is not None]


def next_name(attempts: Iterable[Attempt], step: int) -> str:
    """The name of the folder of a step that is saved now; see [Note: branches]."""
    found = list(attempts)
    branch = max((each.number for each in found if each.is_branch), default=1)
    if any(each.step >= step and each.number >= branch for each in found):
        branch = max(each.number for each in found) + 1
    return f"step-{step:08d}" + (f".{branch:0{_DIGITS}d}" if branch > 1 else "")


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
        branch = max(branch, newest.number if newest.is_branch else 0)
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

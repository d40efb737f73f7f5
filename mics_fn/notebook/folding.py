"""What ranks printed and raised, as one text: equal parts once, others with the names of ranks."""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from mics_fn import errors
from mics_fn.errors import GroupsError, name_ranks

FOLLOWS = ("PeerFailed", "PeerOffloadError")  # errors of ranks that wait for another one
_ADDRESS = re.compile(r"0x[0-9a-f]+")
_CELL_FILE = re.compile(r"/ipykernel_\d+/")  # in the file name that warnings give to a cell
_BAR = re.compile(r"\d+%\|.*\| *\d")
_COLOR = re.compile(r"\x1b\[[0-9;]*m")
_FRAME = re.compile(r"^(File|Cell) ")
# Where IPython shows frames of: what calls the functions of a notebook; this library and below.
_CALLERS = re.compile(r"^File (<string>|\S*(/mics_fn/notebook/|/ipyparallel/)\S*)[:, ]")
_INSIDE = re.compile(r"^File (<string>|\S*/(mics_fn|ipyparallel|torch|optree)/\S*)[:, ]")


class Failed(NamedTuple):
    """What a rank raised in a cell."""

    kind: str  # the name of its type
    text: str
    trace: tuple[str, ...] = ()  # its traceback, as IPython shows it; () if there is none

    @property
    def line(self) -> str:
        """The type of the error and the first line of its text."""
        return f"{self.kind}: {self.text}".strip().partition("\n")[0].removesuffix(":")


class Refused(GroupsError):
    """What ranks were asked for and cannot do; IPython shows its text, which says what to do."""

    def _render_traceback_(self) -> list[str]:
        return [f"GroupsError: {self}"]


def labelled(texts: Mapping[int, str]) -> str:
    r"""Texts of ranks: one if all are equal, else each different one with the ranks that have it.

    >>> print(labelled({0: "same\n", 1: "same\n"}), end="")
    same
    >>> print(labelled({0: "3\n", 1: "4\n", 2: "3\n", 3: "4\n5\n"}), end="")
    ranks 0, 2: 3
    rank 1: 4
    rank 3:
      4
      5
    """
    holders: dict[str, list[int]] = {}
    for rank, text in sorted(texts.items()):
        holders.setdefault(text, []).append(rank)
    if len(holders) < 2:
        return next(iter(holders), "")
    parts = []
    for text, ranks in holders.items():
        lines = text.splitlines()
        if not lines:
            continue
        if len(lines) == 1:
            parts.append(f"{name_ranks(ranks)}: {lines[0]}")
        else:
            parts += [f"{name_ranks(ranks)}:", *(f"  {line}" for line in lines)]
    return "".join(f"{part}\n" for part in parts)


def comparable(text: str) -> str:
    r"""A text without what differs between ranks that do the same: bars, and numbers of processes.

    >>> comparable("warning\n 50%|#####     | 1/2 [00:01<00:01]\n")
    'warning\n'
    >>> comparable("/tmp/ipykernel_12/34.py:1: UserWarning: no")
    '/tmp/ipykernel_/34.py:1: UserWarning: no'
    """
    lines = (line for line in text.splitlines(keepends=True) if not _BAR.search(line))
    return _CELL_FILE.sub("/ipykernel_/", "".join(lines))


def more(shown: str, text: str) -> str:
    r"""What to write after `shown` so that `text` is there, whose last line may be another.

    >>> more("a\n", "a\nb"), more("a\n 50%", "a\n100%\nb")
    ('b', '\r100%\nb')
    """
    if text.startswith(shown):
        return text[len(shown) :]
    return "\r" + text[shown.rfind("\n") + 1 :]


def first_causes(failures: Mapping[int, Failed]) -> list[list[int]]:
    """Ranks that failed, those with the same error together; what others only followed comes last.

    >>> raised, told = Failed("ValueError", "no"), Failed("PeerFailed", "rank 2 failed")
    >>> first_causes({0: told, 1: told, 2: raised})
    [[2], [0, 1]]
    """
    same: dict[tuple[str, str], list[int]] = {}
    for rank, failed in sorted(failures.items()):
        text = failed.line if failed.kind in FOLLOWS else failed.text
        same.setdefault((failed.kind, _ADDRESS.sub("0x..", text)), []).append(rank)
    follows = [key for key in same if key[0] in FOLLOWS]
    begun = [key for key in same if key not in follows]
    return [same[key] for key in [*begun, *follows]]


def folded(failures: Mapping[int, Failed]) -> list[str]:
    """Lines that show one traceback for each error that ranks share, and one line for followers.

    >>> trace = ("Traceback:", "ValueError: no")
    >>> lost = Failed("PeerFailed", "rank 2 failed")
    >>> found = folded({0: lost, 1: lost, 2: Failed("ValueError", "no", trace)})
    >>> print(*found, sep="\\n")
    rank 2:
    Traceback:
    ValueError: no
    ranks 0, 1: PeerFailed: rank 2 failed
    """
    causes, lines = first_causes(failures), list[str]()
    for ranks in causes:
        failed = failures[ranks[0]]
        if failed.kind in FOLLOWS and ranks is not causes[0]:
            lines.append(f"{name_ranks(ranks)}: {failed.line}")
        elif failed.trace:
            lines += [f"{name_ranks(ranks)}:", *failed.trace]
        else:
            lines.append(f"{name_ranks(ranks)}: {failed.line}")
    return lines


def is_inside(file: str) -> bool:
    """Whether a file of code is one of this library or below, as `own_frames` sees it.

    >>> is_inside("/lib/mics_fn/shards/leaf.py"), is_inside("/tmp/ipykernel_1/2.py")
    (True, False)
    """
    return _INSIDE.match(f"File {file}:") is not None


def own_frames(failed: Failed) -> Failed:
    """A failure without the frames that are not the user's, where the error explains itself.

    >>> frame, code = "File /lib/mics_fn/shards/leaf.py:7, in f", "Cell In[1], line 1"
    >>> trace = ("LeafError  Traceback", code, "-> 1 f()", "", frame, "-> 7 raise", "", "LeafError")
    >>> own_frames(Failed("LeafError", "", trace)).trace
    ('LeafError  Traceback', 'Cell In[1], line 1', '-> 1 f()', '', 'LeafError')
    """
    inside = hasattr(errors, failed.kind) or failed.kind == KeyboardInterrupt.__name__
    dropped, kept, keep = _INSIDE if inside else _CALLERS, list[str](), True
    for line in failed.trace:
        text = _COLOR.sub("", line)
        if _FRAME.match(text):
            keep = not dropped.match(text)
        if keep:
            kept.append(line)
        keep = keep or not text.strip()  # a frame ends with an empty line
    return failed._replace(trace=tuple(kept))


def plain(lines: Sequence[str]) -> str:
    """Lines as one text without colors."""
    return _COLOR.sub("", "\n".join(lines))

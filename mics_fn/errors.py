"""The errors of this library, one type for each kind, and the form that their texts share.

  `MicsError` - the base of all
  `PlanError` - an argument out of its range, or sizes that do not fit together
  `LeafError` - a tree that does not match another, or a leaf of the wrong kind
  `DonatedError` - a value used after it was given away
  `DesyncError` - ranks that should agree do not
  `LostStateError` - a `DesyncError`: a state is that of no step
  `GroupsError` - groups used before they exist or after they closed
  `CollectiveError` - a collective that failed, or did not finish in time
  `PeerFailed` - which rank failed without which a wait cannot end, and how
  `NonFiniteError` - a gradient that is not finite, of a step that was not taken
  `FileError` - a file that cannot be read or written, is damaged, or does not fit
  `PeerFileError` - a `FileError` of another rank; a `PeerFailed`, too
  `CheckpointNotFound` - a `FileError`: there is no committed checkpoint
  `CellError` - a cell of a notebook that failed on some ranks

A text says what failed and where (the path in the tree), on which ranks, what was expected and what
was found, and how to mend it. All types derive from `MicsError`.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

T = TypeVar("T", bound=Hashable)


class MicsError(Exception):
    """The base of every error that mics_fn raises on purpose.

    Args:
      text: the headline, or the whole text.
      lines: details, which are indented below it.
      fix: what to do about it.

    Python unpickles an error by calling its class with the text alone, and then sets its fields.

    Example:
      >>> print(LeafError("shard: no leaf", ["params.w: got None"], fix="pass tensors"))
      shard: no leaf
        params.w: got None
        fix: pass tensors
    """

    def __init__(self, text: str = "", lines: Iterable[str] = (), fix: str = "") -> None:
        super().__init__(message(text, lines, fix))


class PlanError(MicsError, ValueError):
    """An argument out of its range, sizes that do not fit, or an optimizer of no use for shards."""


class LeafError(MicsError, ValueError):
    """A tree that does not match another, or a leaf of the wrong type, dtype, device or layout."""

    # This is not a TypeError, because torch takes a TypeError from a tensor's operator to mean "not
    # implemented": Python would then try another operator, `w = w + 1` for `w += 1`.


class DesyncError(MicsError, RuntimeError):
    """Ranks that should agree on a tree, a value or a group do not."""


class DonatedError(MicsError, RuntimeError):
    """A donated value is used again."""


class GroupsError(MicsError, RuntimeError):
    """Groups are used before they can exist, or after they were closed."""


class CollectiveError(MicsError, RuntimeError):
    """A collective that failed, or did not finish within `timeout_s`; its result does not exist."""


class PeerFailed(MicsError, RuntimeError):
    """Another rank failed, so a wait of this rank cannot end.

    Args:
      text: the whole text.
      rank: the global rank that failed; None if it is the store of the job, and no rank holds that.
      kind: "raised", "interrupted", "exited", "killed" (it is gone without a word), "silent",
        "stalled" (it lives, and made no call for `timeout_s` while others waited for it);
        "returned", if this process takes the place of a lost rank, and is to call `reset` first; or
        "replaced", if another process has taken the place of this one, which is to end.
      step: the optimizer step that it was in, as `StepMetrics` counts, where that is known.
      operation: the call that it had begun last; of a rank that could not say so, the call that
        waits for it.
      leaf: the bucket of that call, with the names of its leaves.
      remote_traceback: of its own error.
    """

    def __init__(
        self,
        text: str,
        rank: int | None = None,
        kind: str = "",
        *,
        step: int | None = None,
        operation: str = "",
        leaf: str = "",
        remote_traceback: str = "",
    ) -> None:
        super().__init__(text)
        self.rank, self.kind, self.step = rank, kind, step
        self.operation, self.leaf, self.remote_traceback = operation, leaf, remote_traceback


class CellError(MicsError, RuntimeError):
    """A cell of a notebook that failed on some ranks.

    Args:
      text: the whole text.
      errors: of each rank that failed, the type and the first line of its error.
      trace: the lines that IPython shows, in color.
    """

    def __init__(
        self, text: str, errors: Mapping[int, str] | None = None, trace: Sequence[str] = ()
    ) -> None:
        super().__init__(text)
        self.errors, self._trace = dict(errors or {}), list(trace)

    def _render_traceback_(self) -> list[str]:
        """What IPython shows in the place of a traceback of this process."""
        return self._trace or [str(self)]


class NonFiniteError(MicsError, FloatingPointError):
    """A gradient that is not finite, of a step that was not taken.

    Args:
      text: the whole text, the same on all ranks.
      leaf: the path of the first leaf that is not finite; "" if only the norm is not.
      ranks: on which it arose; none if it was finite on all of them, or if that is not known.
    """

    def __init__(self, text: str, leaf: str = "", ranks: Sequence[int] = ()) -> None:
        super().__init__(text)
        self.leaf, self.ranks = leaf, tuple(ranks)


class FileError(MicsError):
    """A file, scratch file or checkpoint that cannot be read or written, or that does not fit.

    What was committed before an error of a save has not changed.

    Args:
      text: the whole text; of a checkpoint the same on all ranks.
      path: the file or folder.
      leaf: the leaf that is meant; "" for the whole file.
      damaged: of a checkpoint, whether it is not what was saved, or leads out of its folder, so
        that an older step may be whole; None where that is not known.
    """

    def __init__(
        self, text: str, path: str = "", leaf: str = "", *, damaged: bool | None = None
    ) -> None:
        super().__init__(text)
        self.path, self.leaf, self.damaged = path, leaf, damaged


class PeerFileError(FileError, PeerFailed):
    """The `FileError` of another rank, which all ranks raise: it names the same file and leaf.

    Args:
      peer: the rank, and what it was at.
      path, leaf: as for `FileError`.
    """

    def __init__(self, peer: PeerFailed | str, path: str = "", leaf: str = "") -> None:
        super().__init__(str(peer), path, leaf)
        if isinstance(peer, PeerFailed):
            vars(self).update(vars(peer), leaf=leaf)


class CheckpointNotFound(FileError, FileNotFoundError):
    """There is no committed checkpoint, or none of the step that was asked for."""


class LostStateError(DesyncError):
    """A state that is of no step: a write of it was cut short, or ranks hold different steps.

    Or no replica holds some part of the newest state, as ranks were lost or are behind: then all
    ranks raise it, their groups are good, and they can go on from a state that was saved.
    """


def message(what: str, lines: Iterable[str] = (), fix: str = "") -> str:
    """One error text: a headline, indented details, and the fix."""
    out = [what, *(f"  {line}" for line in lines)]
    if fix:
        out.append(f"  fix: {fix}")
    return "\n".join(out)


def first_line(error: BaseException | None, empty: str = "") -> str:
    """The first line of an error's text; where it has none, `empty` or its type."""
    return (f"{error}".strip().splitlines() or [empty or type(error).__name__])[0]


def name_ranks(ranks: Sequence[int]) -> str:
    """Ranks as people write them; runs of three or more are folded.

    >>> name_ranks([3]), name_ranks([0, 1]), name_ranks([0, 1, 2, 3, 8])
    ('rank 3', 'ranks 0, 1', 'ranks 0-3, 8')
    """
    parts = [
        f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run))
        for run in runs_of(sorted(ranks))
    ]
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(parts)


def runs_of(numbers: Iterable[int]) -> list[list[int]]:
    """Numbers as lists of those that follow each other.

    >>> runs_of([0, 1, 2, 5])
    [[0, 1, 2], [5]]
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return runs


def name_some(names: Sequence[str]) -> str:
    """The first names of a list, and how many more there are.

    >>> name_some(["a", "b"]), name_some(["a", "b", "c", "d", "e"])
    ('a, b', 'a, b, c and 2 more')
    """
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more}"


def by_value(found: Mapping[int, T]) -> list[tuple[T, list[int]]]:
    """Group ranks by their values, the most frequent value first.

    >>> by_value({0: "a", 1: "b", 2: "b"})
    [('b', [1, 2]), ('a', [0])]
    """
    holders: dict[T, list[int]] = {}
    for rank, value in sorted(found.items()):
        holders.setdefault(value, []).append(rank)
    return sorted(holders.items(), key=lambda item: (-len(item[1]), item[1]))


def disagreement(
    what: str, found: Mapping[int, str], fix: str, first: Sequence[str] = ()
) -> DesyncError:
    """The error of ranks that should agree: who has what.

    Args:
      what: the headline.
      found: what each rank has.
      fix: what to do.
      first: lines before those of the ranks.

    >>> print(disagreement("shard: ranks differ", {0: "7", 1: "8"}, "pass the same number"))
    shard: ranks differ
      rank 0: 7
      rank 1: 8
      fix: pass the same number
    """
    return DesyncError(what, [*first, *rank_lines(found)], fix)


def rank_lines(found: Mapping[int, str]) -> list[str]:
    """Who has what, one line per value.

    >>> rank_lines({0: "a", 1: "b", 2: "b"})
    ['ranks 1, 2: b', 'rank 0: a']
    """
    return [f"{name_ranks(ranks)}: {text}".rstrip() for text, ranks in by_value(found)]


def human_bytes(nbytes: float) -> str:
    """Bytes with a suitable unit, in powers of 1,000 as link speeds are given.

    >>> human_bytes(0), human_bytes(999), human_bytes(3_500_000)
    ('0 B', '999 B', '3.50 MB')
    """
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes:.0f} B"

"""Run a cell on ranks: wait for all of them, show what they print, and end what cannot end.

[Note: no cell hangs] A cell ends when each of its ranks has ended it, or is gone. Ranks wait for
each other in collectives, so one that fails must not leave the others waiting:

- One that raises, is killed or has ended its cell is known to the others, see [Note: a cell is a
  unit] in `engine`; what waits for it raises `PeerFailed`.
- Where a rank failed, the others are interrupted after `_GRACE_S`: their cell cannot succeed, and
  they may wait for it in a way that this library does not know, such as a collective of torch.
- An interrupt of the kernel interrupts the ranks. Those that do not react to it, since they are
  inside C++, are left behind after `_REACT_S`: the kernel is free, and `restart()` ends them.
"""

import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mics_fn import errors
from mics_fn.errors import GroupsError, name_ranks

# What ranks printed and raised, as one text: equal parts once, others with the names of ranks.

FOLLOWS = ("PeerFailed", "PeerFileError")  # errors of ranks that wait for another one
_ADDRESS = re.compile(r"0x[0-9a-f]+")
_CELL_FILE = re.compile(r"/ipykernel_\d+/")  # in the file name that warnings give to a cell
_BAR = re.compile(r"\d+%\|.*\| *\d")
_COLOR = re.compile(r"\x1b\[[0-9;]*m")
_FRAME = re.compile(r"^(File|Cell) ")
# Where IPython shows frames of: what calls the functions of a notebook; this library and below.
_CALLERS = re.compile(r"^File (<string>|\S*(/mics_fn/notebook/|/ipyparallel/)\S*)[:, ]")
_INSIDE = re.compile(r"^File (<string>|\S*/(mics_fn|ipyparallel|torch|optree)/\S*)[:, ]")


class Failed(NamedTuple):
    """Error of a rank in a cell."""

    kind: str  # the name of its type
    text: str
    trace: tuple[str, ...] = ()  # its traceback, as IPython shows it; () if there is none

    @property
    def line(self) -> str:
        """Type of the error and the first line of its text."""
        return f"{self.kind}: {self.text}".strip().partition("\n")[0].removesuffix(":")


class Refused(GroupsError):
    """Error of a request that ranks cannot fulfil; IPython shows its text, with the fix."""

    def _render_traceback_(self) -> list[str]:
        return [f"GroupsError: {self}"]


def labelled(texts: Mapping[int, str]) -> str:
    r"""Merge texts of ranks: one if all are equal, else each different one with its ranks.

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
    r"""Remove from a text what differs between equal ranks: bars, and numbers of processes.

    >>> comparable("warning\n 50%|#####     | 1/2 [00:01<00:01]\n")
    'warning\n'
    >>> comparable("/tmp/ipykernel_12/34.py:1: UserWarning: no")
    '/tmp/ipykernel_/34.py:1: UserWarning: no'
    """
    lines = (line for line in text.splitlines(keepends=True) if not _BAR.search(line))
    return _CELL_FILE.sub("/ipykernel_/", "".join(lines))


def more(shown: str, text: str) -> str:
    r"""Return what to write after `shown` to get `text`, whose last line may differ.

    >>> more("a\n", "a\nb"), more("a\n 50%", "a\n100%\nb")
    ('b', '\r100%\nb')
    """
    if text.startswith(shown):
        return text[len(shown) :]
    return "\r" + text[shown.rfind("\n") + 1 :]


def first_causes(failures: Mapping[int, Failed]) -> list[list[int]]:
    """Group failed ranks by their errors; those that followed another rank are last.

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
    """Render one traceback for each error that ranks share, and one line for followers.

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
    """Return whether a file of code belongs to this library or below; see `own_frames`.

    >>> is_inside("/lib/mics_fn/shards/leaf.py"), is_inside("/tmp/ipykernel_1/2.py")
    (True, False)
    """
    return _INSIDE.match(f"File {file}:") is not None


def own_frames(failed: Failed) -> Failed:
    """Remove frames that are not the user's, where the error explains itself.

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
    """Join lines to one text without colors."""
    return _COLOR.sub("", "\n".join(lines))


_POLL_S = 0.02
_SHORT_S = 0.5  # a cell that is done by then is shown at once; else the first rank's text streams
_ASIDE_S = 1.0  # after which ranks that have ended the cell say so to those that have not
_GRACE_S = 5.0  # for ranks to hear of a failure of another one
_REACT_S = 4.5  # for ranks to react to an interrupt
_OUTPUT_S = 2.0  # for what was printed to come after the answer


@dataclass
class Outcome:
    """End of a cell, by rank."""

    values: dict[int, Any] = field(default_factory=dict)  # of ranks that ended it well
    failures: dict[int, Failed] = field(default_factory=dict)
    busy: list[int] = field(default_factory=list)  # ranks that do not react to an interrupt
    interrupted: bool = False  # whether the kernel was interrupted


class Cell:
    """Running cell.

    Args:
      sent: ipyparallel's result of each rank.
      others: ranks that take no part.
      ended: says which ranks are gone, and how.
      aside: lets a rank tell the others that it has ended the cell.
      interrupt: sends SIGINT to ranks.
    """

    def __init__(
        self,
        sent: Mapping[int, Any],
        others: Sequence[int],
        ended: Callable[[], Mapping[int, str]],
        aside: Callable[[int], None],
        interrupt: Callable[[Sequence[int]], None],
    ) -> None:
        self._sent, self._others = dict(sent), list(others)
        self._ended, self._aside, self._interrupt = ended, aside, interrupt
        self._first = min(self._sent)
        self._shown = {"stdout": "", "stderr": ""}  # what the first rank printed, so far
        self._told = set[int]()  # ranks that said that they have ended it
        self._begun = time.monotonic()
        self._since: float | None = (
            None  # when a rank was first seen to have ended, or to take no part
        )
        self._failed: float | None = None  # when a rank was first seen to have failed
        self._stopped: float | None = None  # when ranks were interrupted
        self.outcome = Outcome()

    def wait(self) -> Outcome:
        """Wait for all ranks, and show their output; bounded as [Note: no cell hangs] says."""
        while True:
            try:
                self._wait()
                break
            except KeyboardInterrupt:
                again, self.outcome.interrupted = self.outcome.interrupted, True
                self._stop()
                if again:
                    self.outcome.busy = self.running()
                    break
        self._collect()
        self._show()
        return self.outcome

    def running(self) -> list[int]:
        """Ranks that still run the cell."""
        gone = self._ended()
        return [rank for rank, sent in self._sent.items() if not sent.ready() and rank not in gone]

    def _wait(self) -> None:
        while running := self.running():
            self._sent[running[0]].wait(_POLL_S)
            now = time.monotonic()
            if now - self._begun > _SHORT_S:
                self._stream()
            self._let_others_know(running, now)
            self._end_what_cannot_succeed(now)
            if self._stopped is not None and now - self._stopped > _REACT_S:
                self.outcome.busy = self.running()
                return

    def _let_others_know(self, running: list[int], now: float) -> None:
        """Let idle ranks report that they are idle, if some ranks still run."""
        gone = self._ended()
        idle = [*self._others, *(rank for rank in self._sent if rank not in running)]
        idle = [rank for rank in idle if rank not in gone and rank not in self._told]
        if not idle:
            return
        self._since = self._since or now
        if now - self._since > _ASIDE_S:
            for rank in idle:
                self._aside(rank)
            self._told.update(idle)

    def _end_what_cannot_succeed(self, now: float) -> None:
        """Interrupt the other ranks, some time after one has failed."""
        gone = self._ended()
        failed = any(
            rank in gone or (sent.ready() and not sent.successful())
            for rank, sent in self._sent.items()
        )
        if failed:
            self._failed = self._failed or now
            if self._stopped is None and now - self._failed > _GRACE_S:
                self._stop()

    def _stop(self) -> None:
        self._interrupt(self.running())
        self._stopped = self._stopped or time.monotonic()

    def _collect(self) -> None:
        """Receive the values and the errors of all ranks."""
        gone, deadline = self._ended(), time.monotonic() + _OUTPUT_S
        for rank, sent in self._sent.items():
            if sent.ready():
                sent.wait_for_output(max(0.0, deadline - time.monotonic()))
                error = None if sent.successful() else sent.exception()
                if error is None:
                    self.outcome.values[rank] = sent.get()
                else:
                    self.outcome.failures[rank] = failed_of(error)
            elif rank in gone:
                self.outcome.failures[rank] = Failed("gone", gone[rank])
            else:
                text = "does not react to an interrupt, as it is inside C++ or stopped"
                self.outcome.failures[rank] = Failed("busy", text)

    def _text(self, name: str, rank: int) -> str:
        return getattr(self._sent[rank].metadata, name) or ""

    def _stream(self) -> None:
        """Show the new output of the first rank."""
        for name, stream in (("stdout", sys.stdout), ("stderr", sys.stderr)):
            text = self._text(name, self._first)
            stream.write(more(self._shown[name], text))
            stream.flush()
            self._shown[name] = text

    def _show(self) -> None:
        """Show the output of all ranks: once where equal."""
        texts = {name: self._texts(name) for name in ("stdout", "stderr")}
        different = any(len(set(found.values())) > 1 for found in texts.values())
        if different and any(self._shown.values()) and clear_output():
            self._shown = dict.fromkeys(self._shown, "")
        if not different:
            self._stream()
        else:
            for name, stream in (("stdout", sys.stdout), ("stderr", sys.stderr)):
                found = texts[name]
                if self._shown[name]:  # a terminal keeps what was streamed
                    found = {r: t for r, t in found.items() if t != found[self._first]}
                stream.write(labelled(found) if len(found) > 1 else _of_one(found))
                stream.flush()
        self._display()

    def _texts(self, name: str) -> dict[int, str]:
        """Return the output of each rank; bars are those of the first one."""
        first = self._text(name, self._first)
        found = {rank: comparable(self._text(name, rank)) for rank in self._sent}
        return {r: first if t == found[self._first] else t for r, t in found.items()}

    def _display(self) -> None:
        """Show pictures of the first rank, and the value of the last expression of the cell."""
        show = displayer()
        for content in self._sent[self._first].metadata.outputs:
            show(content)
        found = {rank: sent.metadata.execute_result for rank, sent in self._sent.items()}
        texts = {r: c["data"].get("text/plain", "") for r, c in found.items() if c}
        if not texts:
            return
        if len(texts) == len(self._sent) and len(set(texts.values())) == 1:
            show(found[self._first])
        else:
            lines = {rank: texts.get(rank, "") for rank in self._sent}
            sys.stdout.write(labelled(lines))


def failed_of(error: Any) -> Failed:
    """Convert an error of ipyparallel to that of the rank."""
    kind = getattr(error, "ename", None) or type(error).__name__
    text = getattr(error, "evalue", None)
    trace = getattr(error, "traceback", None)
    trace = trace if isinstance(trace, str) else "\n".join(trace or ())
    text = str(error) if text is None else text
    return own_frames(Failed(kind, text, tuple(trace.splitlines())))


def _of_one(found: Mapping[int, str]) -> str:
    return "".join(f"rank {rank}:\n{text}" for rank, text in found.items() if text)


def clear_output() -> bool:
    """Let the next output replace that of this cell; return False where that is not possible."""
    shell = shell_here()
    if getattr(shell, "kernel", None) is None:
        return False
    from IPython.display import clear_output

    clear_output(wait=True)
    return True


def displayer() -> Callable[[Mapping[str, Any]], None]:
    """Return the function that shows pictures and values of a rank."""
    if shell_here() is None:
        return lambda content: print(content["data"].get("text/plain", ""))
    from IPython.display import display

    def show(content: Mapping[str, Any]) -> None:
        display(content["data"], metadata=content.get("metadata", {}), raw=True)

    return show


def shell_here() -> Any:
    """Return IPython's shell if this process has one."""
    get = getattr(sys.modules.get("IPython"), "get_ipython", None)  # it may be half imported
    return None if get is None else get()

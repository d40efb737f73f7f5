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
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from mics_fn.errors import GroupsError, by_value, name_ranks

# What ranks printed and raised, as one text: equal parts once, others with the names of ranks.

FOLLOWS = ("PeerFailed", "PeerFileError")  # errors of ranks that wait for another one
_ADDRESS = re.compile(r"0x[0-9a-f]+")
_CELL_FILE = re.compile(r"/ipykernel_\d+/")  # in the file name that warnings give to a cell
_BAR = re.compile(r"\d+%\|.*\| *\d")
_COLOR = re.compile(r"\x1b\[[0-9;]*m")


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
    r"""Merge texts of ranks: each different one with its ranks.

    >>> print(labelled({0: "3\n", 1: "4\n", 2: "3\n", 3: "4\n5\n"}), end="")
    ranks 0, 2: 3
    rank 1: 4
    rank 3:
      4
      5
    """
    parts = []
    for text, ranks in sorted(by_value(texts), key=lambda found: found[1]):
        lines = text.splitlines()
        if len(lines) == 1:
            parts.append(f"{name_ranks(ranks)}: {lines[0]}\n")
        elif lines:
            parts.append(f"{name_ranks(ranks)}:\n{textwrap.indent(text.rstrip(), '  ')}\n")
    return "".join(parts)


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
    same: dict[tuple[str, str], list[int]] = {}
    for rank, failed in sorted(failures.items()):
        text = failed.line if failed.kind in FOLLOWS else failed.text
        same.setdefault((failed.kind, _ADDRESS.sub("0x..", text)), []).append(rank)
    causes = sorted(same.values(), key=lambda ranks: failures[ranks[0]].kind in FOLLOWS)
    lines = list[str]()
    for ranks in causes:
        failed = failures[ranks[0]]
        follows = failed.kind in FOLLOWS and ranks is not causes[0]
        if failed.trace and not follows:
            lines += [f"{name_ranks(ranks)}:", *failed.trace]
        else:
            lines.append(f"{name_ranks(ranks)}: {failed.line}")
    return lines


def plain(lines: Sequence[str]) -> str:
    """Join lines to one text without colors."""
    return _COLOR.sub("", "\n".join(lines))


_POLL_S = 0.02
_SHORT_S = 0.5  # a cell that is done by then is shown at once; else the first rank's text streams
_ASIDE_S = 1.0  # after which ranks that have ended the cell say so to those that have not
_GRACE_S = 5.0  # for ranks to hear of a failure of another one
_REACT_S = 4.5  # for ranks to react to an interrupt
_OUTPUT_S = 2.0  # for what was printed to come after the answer


class Outcome(NamedTuple):
    """End of a cell, by rank."""

    values: dict[int, Any]  # of ranks that ended it well
    failures: dict[int, Failed]
    interrupted: bool  # whether the kernel was interrupted

    @property
    def busy(self) -> list[int]:
        """Ranks that do not react to an interrupt."""
        return [rank for rank, failed in self.failures.items() if failed.kind == "busy"]


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
        self._reported = set[int]()  # ranks that said that they have ended it
        self._begun = time.monotonic()
        # When a rank was first seen idle, when one had failed, and when ranks were interrupted.
        self._idle: float | None = None
        self._failed: float | None = None
        self._stopped: float | None = None

    def wait(self) -> Outcome:
        """Wait for all ranks, and show their output; bounded as [Note: no cell hangs] says."""
        interrupts = 0
        while interrupts < 2:
            try:
                self._wait()
                break
            except KeyboardInterrupt:
                interrupts += 1
                self._stop()
        outcome = self._collect(interrupted=interrupts > 0)
        self._show()
        self._display()
        return outcome

    def running(self) -> list[int]:
        """Ranks that still run the cell."""
        ended = self._ended()
        return [x for x, sent in self._sent.items() if not sent.ready() and x not in ended]

    def _wait(self) -> None:
        while running := self.running():
            self._sent[running[0]].wait(_POLL_S)
            now = time.monotonic()
            if now - self._begun > _SHORT_S:
                for name in self._shown:
                    self._stream(name)
            self._let_others_know(running, now)
            self._end_what_cannot_succeed(now)
            if self._stopped is not None and now - self._stopped > _REACT_S:
                return

    def _let_others_know(self, running: list[int], now: float) -> None:
        """Let idle ranks report that they are idle, if some ranks still run."""
        ended = self._ended()
        idle = [*self._others, *(rank for rank in self._sent if rank not in running)]
        idle = [rank for rank in idle if rank not in ended and rank not in self._reported]
        if not idle:
            return
        self._idle = self._idle or now
        if now - self._idle > _ASIDE_S:
            for rank in idle:
                self._aside(rank)
            self._reported.update(idle)

    def _end_what_cannot_succeed(self, now: float) -> None:
        """Interrupt the other ranks, some time after one has failed."""
        ended = self._ended()
        failed = any(
            rank in ended or (sent.ready() and not sent.successful())
            for rank, sent in self._sent.items()
        )
        if failed:
            self._failed = self._failed or now
            if self._stopped is None and now - self._failed > _GRACE_S:
                self._stop()

    def _stop(self) -> None:
        self._interrupt(self.running())
        self._stopped = self._stopped or time.monotonic()

    def _collect(self, interrupted: bool) -> Outcome:
        """Receive the values and the errors of all ranks."""
        outcome = Outcome({}, {}, interrupted)
        ended, deadline = self._ended(), time.monotonic() + _OUTPUT_S
        for rank, sent in self._sent.items():
            if sent.ready():
                sent.wait_for_output(max(0.0, deadline - time.monotonic()))
                if sent.successful():
                    outcome.values[rank] = sent.get()
                else:
                    outcome.failures[rank] = failed_of(sent.exception())
            elif rank in ended:
                outcome.failures[rank] = Failed("gone", ended[rank])
            else:
                text = "does not react to an interrupt, as it is inside C++ or stopped"
                outcome.failures[rank] = Failed("busy", text)
        return outcome

    def _text(self, name: str, rank: int) -> str:
        return getattr(self._sent[rank].metadata, name) or ""

    def _stream(self, name: str) -> None:
        """Show the new output of the first rank."""
        text, stream = self._text(name, self._first), getattr(sys, name)
        stream.write(more(self._shown[name], text))
        stream.flush()
        self._shown[name] = text

    def _show(self) -> None:
        """Show the output of all ranks: once where equal; bars are those of the first rank."""
        for name in self._shown:
            texts = {rank: comparable(self._text(name, rank)) for rank in self._sent}
            others = {r: text for r, text in texts.items() if text != texts[self._first]}
            if others and not self._shown[name]:
                getattr(sys, name).write(labelled(texts))
            else:  # what was streamed stays
                self._stream(name)
                getattr(sys, name).write(labelled(others))

    def _display(self) -> None:
        """Show pictures of the first rank, and the value of the last expression of the cell."""
        show = displayer()
        for content in self._sent[self._first].metadata.outputs:
            show(content)
        found = {rank: sent.metadata.execute_result for rank, sent in self._sent.items()}
        texts = {r: c["data"].get("text/plain", "") if c else "" for r, c in found.items()}
        if len(set(texts.values())) > 1:
            sys.stdout.write(labelled(texts))
        elif found[self._first]:
            show(found[self._first])


def failed_of(error: Any) -> Failed:
    """Convert an error of ipyparallel to that of the rank."""
    kind = getattr(error, "ename", None) or type(error).__name__
    text = getattr(error, "evalue", None)
    trace = getattr(error, "traceback", None)
    trace = trace if isinstance(trace, str) else "\n".join(trace or ())
    text = str(error) if text is None else text
    return Failed(kind, text, tuple(trace.splitlines()))


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

"""`Timeline`: what happened in a step and when, as a value, a chart of text, and a picture."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from mics_fn import checks
from mics_fn.errors import human_bytes, message

_BAR = 22  # characters
_WIDTH = 100


class Event(NamedTuple):
    """One thing that happened.

    Args:
      kind: "fetch", "gather", "hop1" and "hop2" are transfers, one event for each of their levels;
        "use" is an op that needs buckets, "drop" frees one, "pack" puts gradients into one buffer,
        "opt" updates or clips runs of leaves, and "wait" is a wait of the host, on an accelerator
        of the stream that computes. Small collectives have other kinds.
      about: the leaves; for a wait what it was for.
      buckets: the numbers of the buckets.
      level: the communicator of a transfer, such as "gather node"; "" for anything else.
      sent_bytes: what this rank sent.
      start_s, end_s: when it began and ended, in seconds since the step began. On the CPU a
        transfer ends when this rank notices it, which is at its next use of a bucket or in a wait.
    """

    kind: str
    about: str
    buckets: tuple[int, ...]
    level: str
    sent_bytes: int
    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end_s - self.start_s


@dataclass(frozen=True, repr=False)
class Timeline:
    """What happened in a step on this rank, in the order in which it began; prints as a chart.

    Args:
      name: "step 12"; empty for a block that is not a step.
      events: the events in this order.
      seconds: the length of the step.
      memory: times in seconds, each with the bytes held from then on by kind; for `picture`.
      shown: the most rows that a chart has; None for all.
    """

    name: str
    events: tuple[Event, ...]
    seconds: float
    memory: tuple[tuple[float, dict[str, int]], ...] = ()
    shown: int | None = 80

    def sent_bytes(self) -> dict[str, int]:
        """What this rank sent, by communicator, as the ledger of the groups counts it."""
        found = Counter[str]()
        for event in self.events:
            if event.level:
                found[event.level] += event.sent_bytes
        return dict(found)

    def waited_s(self) -> dict[str, float]:
        """Seconds of waits, by the kind of what was waited for."""
        found: dict[str, float] = {}
        for event in self.events:
            if event.kind == "wait":
                kind = event.about.partition(" ")[0]
                found[kind] = found.get(kind, 0.0) + event.seconds
        return found

    def picture(self, path: str | Path | None = None) -> Any:
        """Draw it: one lane per communicator and per kind of work, and the memory below them.

        Args:
          path: the image to write, if any.

        Returns:
          A figure of matplotlib.

        Raises:
          ImportError: matplotlib is not installed.
          PlanError: `path` is not that of an image in a folder that exists.
        """
        if path is not None:
            checks.path("Timeline.picture", "path", path)
        try:
            from mics_fn.inspection.picture import check_file, draw
        except ImportError as error:
            text, fix = "Timeline.picture: it draws with matplotlib", "pip install matplotlib"
            raise ImportError(message(text, [str(error)], fix)) from error
        if path is not None:
            check_file("Timeline.picture", path)
        return draw(self, path)

    def __str__(self) -> str:
        lines = [_row(event, self.seconds) for event in self.events]
        if self.shown is not None and len(lines) > self.shown:
            first = self.shown // 2
            hidden = len(lines) - 2 * first
            lines[first : len(lines) - first] = [f"... {hidden} more ..."]
        bar = "when".ljust(_BAR)
        head = f"{'at ms':>7}  {'took':>7}  {'sent':>9}  {bar}  {'what':<13} {'over':<11} leaves"
        return "\n".join([self.summary(), head, *lines])

    __repr__ = __str__

    def summary(self) -> str:
        """One line: how long it took, what was sent, and what was waited for."""
        sent, waited = sum(self.sent_bytes().values()), self.waited_s()
        longest = sorted(waited.items(), key=lambda one: -one[1])
        parts = ", ".join(f"{kind} {_ms(s)}" for kind, s in longest)
        text = f"{self.name or 'block'}: {_ms(self.seconds)}, sent {human_bytes(sent)}, "
        return _cut(f"{text}waited {_ms(sum(waited.values()))}{f' ({parts})' if parts else ''}")


def _row(event: Event, seconds: float) -> str:
    sent = human_bytes(event.sent_bytes) if event.level else ""
    what, about = f"{event.kind} {_folded(event.buckets)}", event.about
    if event.kind == "wait":
        what, _, about = about.partition(": ")
        what = f"wait {what.replace('bucket ', '')}"
    bar = _bar(event, seconds)
    text = f"{1e3 * event.start_s:>7.2f}  {1e3 * event.seconds:>7.2f}  {sent:>9}  {bar}  "
    text += f"{what:<13} {event.level:<11} {about}"
    return _cut(text)


def _cut(text: str) -> str:
    return text if len(text) <= _WIDTH else f"{text[: _WIDTH - 3]}..."


def _bar(event: Event, seconds: float) -> str:
    """Where an event lies in the step, as text."""
    scale = _BAR / seconds if seconds else 0.0
    start = min(_BAR - 1, int(event.start_s * scale))
    stop = max(start + 1, min(_BAR, round(event.end_s * scale)))
    mark = "#" if event.kind == "wait" else "="
    return (" " * start + mark * (stop - start)).ljust(_BAR)


def _folded(numbers: Sequence[int]) -> str:
    """Numbers as a short text.

    >>> _folded([3]), _folded([0, 1, 2, 5])
    ('3', '0-2+5')
    """
    parts: list[list[int]] = []
    for n in numbers:
        if parts and parts[-1][-1] + 1 == n:
            parts[-1].append(n)
        else:
            parts.append([n])
    return "+".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else f"{p[0]}" for p in parts)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"

"""`watch`: what happens in a block, when, and in how much memory."""

import time
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mics_fn import _torch, spans
from mics_fn.errors import human_bytes
from mics_fn.inspection.chart import Chart
from mics_fn.spans import Span

# `StepMemory`: the memory of a step by kind.


class StepMemory(NamedTuple):
    """Peak bytes of each kind of data on this rank; prints as a table.

    They are sizes of tensors, padding included, and not of what an allocator keeps beside them.
    Activations are not counted.

    Args:
      shards: this rank's parameters; frozen and replicated ones too.
      moments: the state of the optimizer.
      buffers: the buffers of the model.
      gathered: buckets in full, and the copies that a placement keeps; in the last pass also their
        memory that gradients took over.
      gradients_in_full: gradients that wait to be packed.
      gradients_in_reductions: the memory in which a few buckets are reduced.
      gradient_shards: this rank's part of the gradients.
      total: the sum of all of these. The groups keep memory for the next step, so this is what a
        step takes, without activations.
    """

    shards: int
    moments: int
    buffers: int
    gathered: int
    gradients_in_full: int
    gradients_in_reductions: int
    gradient_shards: int
    total: int

    def __str__(self) -> str:
        rows = [(name.replace("_", " "), human_bytes(n)) for name, n in self._asdict().items()]
        return "\n".join(f"{name:<24}{nbytes:>10}" for name, nbytes in rows)


# `Timeline`: what happened in a step and when, as a value and a table of text.

_WIDTH = 100  # characters


class Event(NamedTuple):
    """Event of a step, such as a fetch or an update.

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
        """Duration of the event."""
        return self.end_s - self.start_s


@dataclass(frozen=True, repr=False)
class Timeline:
    """Events of a step on this rank, in the order of their starts; prints as a table.

    In a notebook it shows itself as a picture with a lane for what computes and one for each
    communicator, as a `Chart` does.

    Args:
      name: "step 12"; empty for a block that is not a step.
      events: the events in this order.
      seconds: the length of the step.
    """

    name: str
    events: tuple[Event, ...]
    seconds: float

    def sent_bytes(self) -> dict[str, int]:
        """Sum what this rank sent, by communicator, as the ledger of the groups does."""
        found = Counter[str]()
        for event in self.events:
            if event.level:
                found[event.level] += event.sent_bytes
        return dict(found)

    def waited_s(self) -> dict[str, float]:
        """Sum the seconds of waits, by the kind of what was waited for."""
        found = Counter[str]()
        for event in self.events:
            if event.kind == "wait":
                found[event.about.partition(" ")[0]] += event.seconds  # pyright: ignore
        return dict(found)

    def beside(self, *others: "Timeline") -> Chart:
        """Return a chart of this timeline above others, on one axis of time.

        Args:
          others: such as that of a simulation.
        """
        return Chart((self, *others))

    def save_trace(self, path: str | Path) -> None:
        """Write the events for https://ui.perfetto.dev or chrome://tracing.

        Args:
          path: the file, which is replaced.
        """
        self.beside().save_trace(path)

    def _repr_html_(self) -> str:
        return self.beside()._repr_html_()

    def __str__(self) -> str:
        sent, waited = sum(self.sent_bytes().values()), self.waited_s()
        longest = sorted(waited.items(), key=lambda one: -one[1])
        parts = ", ".join(f"{kind} {_ms(s)}" for kind, s in longest)
        text = f"{self.name or 'block'}: {_ms(self.seconds)}, sent {human_bytes(sent)}, "
        text += f"waited {_ms(sum(waited.values()))}{f' ({parts})' if parts else ''}"
        head = f"{'at ms':>7}  {'took':>7}  {'sent':>9}  {'what':<13} {'over':<11} leaves"
        return "\n".join([_cut(text), head, *map(_row, self.events)])

    __repr__ = __str__


def _row(event: Event) -> str:
    sent = human_bytes(event.sent_bytes) if event.level else ""
    what, about = f"{event.kind} {'+'.join(map(str, event.buckets))}", event.about
    if event.kind == "wait":
        what, _, about = about.partition(": ")
        what = f"wait {what.replace('bucket ', '')}"
    times = f"{1e3 * event.start_s:>7.2f}  {1e3 * event.seconds:>7.2f}"
    return _cut(f"{times}  {sent:>9}  {what:<13} {event.level:<11} {about}")


def _cut(text: str) -> str:
    return text if len(text) <= _WIDTH else f"{text[: _WIDTH - 3]}..."


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"


Time = float | torch.Event  # in seconds, or a mark of a device


class Watched:
    """Record of a block of `watch` on this rank, or of one step of a `Trainer` in the block.

    Args:
      name: "step 12", for one step.
    """

    def __init__(self, name: str = "") -> None:
        self._name, self._began = name, time.monotonic()
        self._ended: float | None = None
        self._seen: list[tuple[spans.Span, Time, Time]] = []  # with begin and end
        self._resident: dict[tuple[str, Hashable], int] = {}  # bytes now, by kind and holder
        self._sums, self._peaks = Counter[str](), Counter[str]()  # bytes by kind, now and at most
        self._marks: dict[torch.device, tuple[float, torch.Event]] = {}

    def timeline(self) -> Timeline:
        """Return the events, which print as a table.

        Communication: none. On an accelerator the host waits for the work of the block.
        """
        end = time.monotonic() if self._ended is None else self._ended
        events = [self._event(*seen) for seen in self._seen]
        ordered = tuple(sorted(events, key=lambda event: (event.start_s, event.end_s)))
        last = max([end - self._began, *(event.end_s for event in ordered)])
        return Timeline(self._name, ordered, last)

    def memory(self) -> StepMemory:
        """Return the peak bytes of each kind of data on this rank in the block."""
        kinds = [field.replace("_", " ") for field in StepMemory._fields[:-1]]
        peaks = [self._peaks[kind] for kind in kinds]
        return StepMemory(*peaks, total=sum(peaks))

    def begin(self, span: spans.Span) -> "Time | Watched":
        """Note the begin of a span; a step in a block is watched by itself, too."""
        if span.kind != "step" or self._name:
            return self._now(span)
        spans.watchers.append(step := Watched(span.text))
        return step

    def end(self, span: spans.Span, begun: Any) -> None:
        """Note the end of a span."""
        if isinstance(begun, Watched):
            begun._close()
            span.result = begun
        elif not span.parts and span.kind != "step":
            self._seen.append((span, begun, self._now(span)))

    def _close(self) -> None:
        spans.watchers.remove(self)
        self._ended = time.monotonic()

    def _now(self, span: spans.Span) -> Time:
        device = span.device
        if device is None or not _torch.is_async(device) or span.parts:
            return time.monotonic()
        if device not in self._marks:
            self._marks[device] = time.monotonic(), _torch.record(device, timed=True)
        return _torch.record(device, timed=True)

    def resident(self, kind: str, key: Hashable, nbytes: int) -> None:
        """Note how many bytes something holds from now on."""
        self._sums[kind] += nbytes - self._resident.get((kind, key), 0)
        self._resident[kind, key] = nbytes
        self._peaks[kind] = max(self._peaks[kind], self._sums[kind])

    def _event(self, span: spans.Span, begin: Time, end: Time) -> Event:
        wait = span.kind == "wait"
        about = spans.title(span.about)
        about = about if wait else about.partition(": ")[2] or about
        times = [self._seconds(at, span.device) - self._began for at in (begin, end)]
        numbers = _numbers(span.about)
        return Event(span.kind, about, numbers, span.level, span.nbytes, *times)

    def _seconds(self, at: Time, device: Any) -> float:
        """Convert a time to seconds; marks of a device count from the first one."""
        if isinstance(at, int | float):
            return at
        began, first = self._marks[device]
        first.synchronize()
        at.synchronize()
        return began + first.elapsed_time(at) / 1e3


def _numbers(about: Any) -> tuple[int, ...]:
    """The numbers of the buckets that a span is about."""
    if isinstance(about, Span):
        return _numbers(about.about)
    if isinstance(about, Sequence) and not isinstance(about, str):
        return tuple(n for each in about for n in _numbers(each))
    index = getattr(about, "index", None)
    return (index,) if isinstance(index, int) else ()


@contextmanager
def watch() -> Iterator[Watched]:
    """Record all that happens on this rank in a block.

    Returns:
      A `Watched`: its `timeline()` says what happened when, and its `memory()` how much memory it
      took by kind. The steps of a `Trainer` in the block are there one by one, too: the last one is
      `trainer.last_step`.

    Memory: a few hundred bytes per event.

    Example:
      >>> groups = make_groups(1)
      >>> loss = lambda model, x: model(x).square().mean()
      >>> trainer = Trainer(torch.nn.Linear(2, 1), optim.sgd(0.1), groups, loss=loss)
      >>> with inspection.watch():
      ...     _ = trainer.step(torch.ones(4, 2))
      >>> [event.kind for event in trainer.last_step.timeline().events]
      ['fetch', 'drop', 'opt']
      >>> trainer.last_step.memory().shards
      32
    """
    watched = Watched()
    spans.watchers.append(watched)
    try:
        yield watched
    finally:
        watched._close()

"""`watch`: what happens in a block, when, and in how much memory."""

import time
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from mics_fn import _device, spans
from mics_fn.errors import MicsError, message
from mics_fn.inspection.memory import StepMemory, memory_of
from mics_fn.inspection.timeline import Event, Timeline
from mics_fn.spans import Span


class _Seen(NamedTuple):
    """A span that has ended: on a device the marks at its ends, else times in seconds."""

    span: Span
    begin: float | torch.Event
    end: float | torch.Event


class Watched:
    """What happened on this rank in a block of `watch`, or in one step of a `Trainer` in it.

    Args:
      name: "step 12", for one step.
    """

    def __init__(self, name: str = "") -> None:
        self._name, self._began = name, time.monotonic()
        self._ended: float | None = None
        self._seen: list[_Seen] = []
        self._samples: list[tuple[float, str, Hashable, int]] = []
        self._marks: dict[torch.device, tuple[float, torch.Event]] = {}

    def timeline(self) -> Timeline:
        """What happened when, which prints as a chart and draws itself: see `Timeline`.

        Communication: none. On an accelerator the host waits for the work of the block.
        """
        end = time.monotonic() if self._ended is None else self._ended
        events = [self._event(seen) for seen in self._seen]
        curve = memory_of(self._samples).curve
        curve = tuple((at - self._began, held) for at, held in curve)
        ordered = tuple(sorted(events, key=lambda event: (event.start_s, event.end_s)))
        last = max([end - self._began, *(event.end_s for event in ordered)])
        return Timeline(self._name, ordered, last, curve)

    def memory(self) -> StepMemory:
        """The most bytes that each kind of data took on this rank in the block."""
        return memory_of(self._samples).most

    def _event(self, seen: _Seen) -> Event:
        span = seen.span
        wait = span.kind == "wait"
        about = spans.title(span.about)
        return Event(
            kind=span.kind,
            about=about if wait else about.partition(": ")[2] or about,
            buckets=spans.numbers(span.about),
            level=span.level,
            sent_bytes=span.nbytes,
            start_s=self._seconds(seen.begin, span.device) - self._began,
            end_s=self._seconds(seen.end, span.device) - self._began,
        )

    def _seconds(self, at: float | torch.Event, device: Any) -> float:
        """A time of the host; marks of a device are counted from its first one."""
        if isinstance(at, int | float):
            return at
        began, first = self._marks[device]
        return began + _device.seconds_between(first, at)


class _NotWatched(Watched):
    """Stands for a step that nobody has watched."""

    def timeline(self) -> Timeline:
        """Raises MicsError, which says how to watch."""
        raise self._error("timeline")

    def memory(self) -> StepMemory:
        """Raises MicsError, which says how to watch."""
        raise self._error("memory")

    def _error(self, what: str) -> MicsError:
        fix = "with mf.inspection.watch(): trainer.step(batch)"
        return MicsError(message(f"last_step.{what}: nobody has watched that step", fix=fix))


NOT_WATCHED: Watched = _NotWatched()


class _Watcher:
    """Writes down what it is told, for a block and for each step in it."""

    def __init__(self, whole: Watched) -> None:
        self._open = [whole]

    def begin(self, span: Span) -> float | torch.Event | Watched:
        if span.kind == "step":
            self._open.append(step := Watched(span.text))
            return step
        return self._now(span)

    def end(self, span: Span, begun: Any) -> None:
        if isinstance(begun, Watched):
            begun._ended = time.monotonic()
            self._open.remove(begun)
            span.result = begun
        elif not span.parts:
            seen = _Seen(span, begun, self._now(span))
            for each in self._open:
                each._seen.append(seen)

    def holds(self, kind: str, key: Hashable, nbytes: int) -> None:
        for each in self._open:
            each._samples.append((time.monotonic(), kind, key, nbytes))

    def _now(self, span: Span) -> float | torch.Event:
        device = span.device
        if device is None or not _device.is_async(device) or span.parts:
            return time.monotonic()
        for each in self._open:
            if device not in each._marks:
                each._marks[device] = time.monotonic(), _device.mark(device)
        return _device.mark(device)


@contextmanager
def watch() -> Iterator[Watched]:
    """A block in which all that happens on this rank is written down.

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
    watcher = _Watcher(watched)
    spans.watchers.append(watcher)
    try:
        yield watched
    finally:
        spans.watchers.remove(watcher)
        watched._ended = time.monotonic()

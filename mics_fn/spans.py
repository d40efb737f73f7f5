"""Spans: ranges of a program's work, shown to profilers, to the log and to those who watch.

[Note: spans] Few places begin a span: `Pending` (collectives, their levels, and waits for them),
`LiveBuckets` (uses and drops), `Reduction` (packing), the steps of optimizers and of `Trainer`.
Three kinds of readers see it. A profiler of torch gets a range, whose name is that of the span with
"mics/" before it. The logger gets a line at its beginning, or for a wait at its end, if it is
enabled for DEBUG. A `Watcher` is called at both ends. Its text is made only if somebody reads it;
while nobody does, a span costs one call of `span`, which gives the same object each time.

The text says what is done and to what: "fetch bucket 3: layers.0.w1 ... (4 leaves)", for one of
its levels with "over gather node" behind it. It is plain ASCII, since torch leaves other names out
of the traces that it writes.

A span may last longer than its block: a collective is issued in the block and done later, which
only watchers are told, as ranges of a thread have to be nested. Watchers are also told the memory
that is held for a purpose, by `holds`.
"""

import logging
import time
from collections.abc import Hashable, Sequence
from types import TracebackType
from typing import Any, Protocol

from mics_fn import _torch_profiler
from mics_fn.log import LOG

# What a collective does, as `Pending` says it, by the kind of the span.
_KINDS = {"hop 1": "hop1", "hop 2": "hop2", "reduction": "hop1"}
_QUIET = ("use", "pack")  # what the log leaves out
HOP_2 = "replicas"  # the communicator of hop 2, also where it follows hop 1 in one call


class Watcher(Protocol):
    """What is told of spans and of memory."""

    def begin(self, span: "Span") -> Any:
        """A span begins now; what this gives is given back at its end."""
        ...

    def end(self, span: "Span", begun: Any) -> None:
        """A span ends now: where device work is meant, what was queued until now."""
        ...

    def holds(self, kind: str, key: Hashable, nbytes: int) -> None:
        """So many bytes are held from now on for a purpose, by what has this key; 0 for none."""
        ...


watchers: list[Watcher] = []


class Span:
    """One range of work, from the beginning of a `with` block to its end, or to `stop`.

    Args:
      kind: "fetch", "gather", "hop1", "hop2", "use", "drop", "wait", "pack", "opt", "step", or in
        words what another collective does.
      about: to what it is done: a bucket, several, or a text; for a wait the span that it is for.
      level: the communicator, for one level of a collective.
      nbytes: what this rank sends in it.
      device: the work is done by this device, in the order of its streams; None for the host.
      lasts: whether watchers are told the end by `stop`, and not at the end of the block.
      parts: whether spans of its own say when it happens, so that watchers need not count it.
    """

    def __init__(
        self,
        kind: str,
        about: Any = "",
        *,
        level: str = "",
        nbytes: int = 0,
        device: Any = None,
        lasts: bool = False,
        parts: bool = False,
    ) -> None:
        self.kind, self.about, self.level, self.nbytes = kind, about, level, nbytes
        self.device, self.parts, self._lasts = device, parts, lasts
        self._begun: list[tuple[Watcher, Any]] = []
        self._record: Any = None
        self._since = 0.0
        self.result: Any = None  # what a watcher has made of a step

    @property
    def text(self) -> str:
        """What is done, and to what."""
        what = f"{self.kind} {title(self.about)}".rstrip()
        return f"{what} over {self.level}" if self.level else what

    def __enter__(self) -> "Span":
        if _torch_profiler.profiling():
            self._record = _torch_profiler.enter(f"mics/{self.text}")
        if LOG.isEnabledFor(logging.DEBUG):
            self._since = time.monotonic()
            if self.kind not in ("wait", *_QUIET):
                LOG.debug("%s", self.text)
        self._begun = [(watcher, watcher.begin(self)) for watcher in watchers]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._lasts or error is not None:
            self.stop()
        if self.kind == "wait" and self._since:
            LOG.debug("%s: %.1f ms", self.text, 1e3 * (time.monotonic() - self._since))
        if self._record is not None:
            record, self._record = self._record, None
            _torch_profiler.leave(record)

    def stop(self) -> None:
        """Tell watchers the end, once."""
        begun, self._begun = self._begun, []
        for watcher, mine in begun:
            watcher.end(self, mine)


class _Unseen:
    """A span that nobody sees."""

    result = None

    def __enter__(self) -> "_Unseen":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def stop(self) -> None:
        """Do nothing."""


UNSEEN = _Unseen()


def span(kind: str, about: Any = "", **facts: Any) -> Span | _Unseen:
    """A span if somebody sees it; arguments as for `Span`.

    >>> span("drop", "bucket 0") is UNSEEN
    True
    """
    return Span(kind, about, **facts) if seen() else UNSEEN


def seen() -> bool:
    """Whether somebody sees spans now."""
    return bool(watchers) or _torch_profiler.profiling() or LOG.isEnabledFor(logging.DEBUG)


def kind_of(does: str, level: str = "") -> str:
    """The kind of a collective, by what it does and over which communicator.

    >>> kind_of("reduction in pass 1 of 2"), kind_of("fetch"), kind_of("hop 1", "replicas")
    ('hop1', 'fetch', 'hop2')
    """
    kind = _KINDS.get(does) or _KINDS.get(does.partition(" ")[0]) or does
    return "hop2" if kind == "hop1" and level == HOP_2 else kind


def holds(kind: str, key: Hashable, nbytes: int) -> None:
    """Tell watchers how much memory something holds for a purpose."""
    for watcher in watchers:
        watcher.holds(kind, key, nbytes)


def title(about: Any) -> str:
    """What a span is about, as text.

    >>> title(Span("fetch", "bucket 2: w")), title(["bucket 0: w", "bucket 1: b"]), title(3)
    ('fetch bucket 2: w', 'bucket 0: w + bucket 1: b', '3')
    """
    if isinstance(about, Span):
        return f"{about.kind} {title(about.about)}".rstrip()
    if isinstance(about, Sequence) and not isinstance(about, str):
        if len(about) == 1 or len(about) < 3:
            return " + ".join(map(title, about))
        return f"{title(about[0])} + {len(about) - 1} more"
    return about if isinstance(about, str) else getattr(about, "title", f"{about}")


def numbers(about: Any) -> tuple[int, ...]:
    """The numbers of the buckets that a span is about."""
    if isinstance(about, Span):
        return numbers(about.about)
    if isinstance(about, Sequence) and not isinstance(about, str):
        return tuple(n for each in about for n in numbers(each))
    index = getattr(about, "index", None)
    return (index,) if isinstance(index, int) else ()

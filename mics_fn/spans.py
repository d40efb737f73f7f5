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
that is held for a purpose, by `resident`.

A program configures it as any logger of Python's `logging`. With `MICS_FN_LOG=debug` (or `info`,
`warning`, `error`) in the environment of a rank, it writes lines to stderr that begin with the
rank: resets and saves from `info` on, each fetch, hop, drop, wait and update of an optimizer at
`debug`.

[Note: points] The library says where it is: `start` and `build` of groups, of shards and of a
`Trainer`; `step` where `Trainer.step` begins; each collective as it is started, in the words of
`store.call_text` and with the names of its communicators; each of its levels as it is issued,
such as "all-reduce (...) over 'replicas'"; `opt_step`; `commit`, from which on the memory of a
state is written, once its gradients have come and are accepted; "offload: write" and "offload:
read", with the names of leaves, where data of a scratch file are about to be moved; "save" where a
checkpoint begins, "save: write" before each rank's file, "save: commit" on the rank that commits
it, and "load". `testing.inject` makes faults there. While nobody observes, a point costs one look
at an empty list.
"""

import logging
import os
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch.distributed as dist

from mics_fn import _torch

# The logger `mics_fn`: quiet, unless somebody configures it or `MICS_FN_LOG` does.

VARIABLE = "MICS_FN_LOG"

LOG = logging.getLogger("mics_fn")
LOG.addHandler(logging.NullHandler())  # else Python would write warnings of it to stderr


class _OnRank(logging.Formatter):
    """Lines that begin with the rank, which is known only once torch.distributed has started."""

    def format(self, record: logging.LogRecord) -> str:
        started = dist.is_available() and dist.is_initialized()
        rank = f"rank {dist.get_rank()}: " if started else ""
        return f"[mics_fn] {rank}{record.levelname.lower()}: {super().format(record)}"


def set_up(environ: Mapping[str, str]) -> None:
    """Write to stderr what a variable of the environment asks for; called once, at the import.

    >>> set_up({})
    """
    level = environ.get(VARIABLE, "").upper()
    if level:
        LOG.setLevel(level)
        handler = logging.StreamHandler()
        handler.setFormatter(_OnRank("%(message)s"))
        LOG.addHandler(handler)
        LOG.propagate = False  # the root's handlers would write each line once more


set_up(os.environ)


# Points that a program passes, where observers may look or act; there are none by default.


class Point(NamedTuple):
    """One point, as it is passed.

    Args:
      name: what happens there.
      step: the step that begins or is written, as `StepMetrics` counts; None elsewhere.
      tensors: what is sent or written.
      comms: the communicators of a collective.
    """

    name: str
    step: int | None = None
    tensors: Sequence[Any] = ()
    comms: Sequence[Any] = ()


observers: list[Callable[[Point], None]] = []  # called at each point, in this order


def passing(*facts: Any) -> None:
    """Show a point, given as the arguments of `Point`, to all observers, which may raise."""
    for observe in list(observers):
        observe(Point(*facts))


def calling(text: str, tensors: Sequence[Any], comms: Sequence[Any]) -> None:
    """Show the start of a collective.

    >>> observers.append(lambda point: print(point.name))
    >>> calling("gather: gather of bucket 0 (w), 8 bytes", (), ())
    gather: gather of bucket 0 (w), 8 bytes
    >>> del observers[:]
    """
    over = ", ".join(f"'{comm.name}'" for comm in comms)
    passing(f"{text} over {over}" if over else text, None, tensors, comms)


# What a collective does, as `Pending` says it, by the kind of the span.
_KINDS = {"hop 1": "hop1", "hop 2": "hop2", "reduction": "hop1"}
_QUIET = ("use", "pack")  # what the log leaves out
# The communicators of hop 2, also where it follows hop 1 in one call.
HOP_2 = ("replicas", "copies")


# Each has `begin(span)`, `end(span, begun)` with what that gave, and
# `resident(kind, key, nbytes)`. A span of device work ends at what was queued until now; memory is
# resident from now on.
watchers: list[Any] = []

seen = partial(_torch.is_read, watchers, LOG)  # whether somebody sees spans now


@dataclass(eq=False)
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

    kind: str
    about: Any = ""
    _: KW_ONLY
    level: str = ""
    nbytes: int = 0
    device: Any = None
    lasts: bool = False
    parts: bool = False
    result: Any = field(default=None, init=False)  # what a watcher has made of a step
    _begun: list[Any] = field(default_factory=list, init=False)
    _record: Any = field(default=None, init=False)
    _since: float = field(default=0.0, init=False)

    @property
    def text(self) -> str:
        """What is done, and to what."""
        what = f"{self.kind} {title(self.about)}".rstrip()
        return f"{what} over {self.level}" if self.level else what

    def __enter__(self) -> "Span":
        self._record = _torch.enter_range(f"mics/{self.text}")
        if LOG.isEnabledFor(logging.DEBUG):
            self._since = time.monotonic()
            if self.kind not in ("wait", *_QUIET):
                LOG.debug("%s", self.text)
        self._begun = [(watcher, watcher.begin(self)) for watcher in watchers]
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if not self.lasts or error is not None:
            self.stop()
        if self.kind == "wait" and self._since:
            LOG.debug("%s: %.1f ms", self.text, 1e3 * (time.monotonic() - self._since))
        if self._record is not None:
            record, self._record = self._record, None
            _torch.exit_range(record)

    def stop(self) -> None:
        """Tell watchers the end, once."""
        begun, self._begun = self._begun, []
        for watcher, mine in begun:
            watcher.end(self, mine)


UNSEEN: Any = nullcontext()  # a span that nobody sees
UNSEEN.result = None


def span(kind: str, about: Any = "", **facts: Any) -> Any:
    """A span if somebody sees it; arguments as for `Span`.

    >>> span("drop", "bucket 0") is UNSEEN
    True
    """
    return Span(kind, about, **facts) if seen() else UNSEEN


def kind_of(does: str, level: str = "") -> str:
    """The kind of a collective, by what it does and over which communicator.

    >>> kind_of("reduction in pass 1 of 2"), kind_of("fetch"), kind_of("hop 1", "replicas")
    ('hop1', 'fetch', 'hop2')
    """
    kind = _KINDS.get(does) or _KINDS.get(does.partition(" ")[0]) or does
    return "hop2" if kind == "hop1" and level in HOP_2 else kind


def resident(kind: str, key: Hashable, nbytes: int) -> None:
    """Tell watchers how much memory something holds for a purpose."""
    for watcher in watchers:
        watcher.resident(kind, key, nbytes)


def title(about: Any) -> str:
    """What a span is about, as text.

    >>> title(Span("fetch", "bucket 2: w")), title(["bucket 0: w", "bucket 1: b"]), title(3)
    ('fetch bucket 2: w', 'bucket 0: w + bucket 1: b', '3')
    """
    if isinstance(about, Span):
        return f"{about.kind} {title(about.about)}".rstrip()
    if isinstance(about, Sequence) and not isinstance(about, str):
        if len(about) < 3:
            return " + ".join(map(title, about))
        return f"{title(about[0])} + {len(about) - 1} more"
    return about if isinstance(about, str) else getattr(about, "title", f"{about}")

"""The picture of a `Timeline`, by matplotlib."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

_COLOURS = {
    "fetch": "#1f77b4",
    "gather": "#1f77b4",
    "hop1": "#ff7f0e",
    "hop2": "#9467bd",
    "wait": "#d62728",
    "use": "#2ca02c",
    "drop": "#8c8c8c",
    "pack": "#bcbd22",
    "opt": "#17becf",
}
_OTHER = "#e377c2"
_MEMORY = ("#aec7e8", "#ffbb78", "#c5b0d5", "#98df8a")
_HOST = ("use", "wait", "pack", "opt", "drop")  # lanes below those of communicators
_LEAST = 2e-3  # of the step: narrower bars would not be seen
_CHARS = 120  # of a label, that would fill the whole step


def draw(timeline: Any, path: str | Path | None) -> Figure:
    """Draw one lane per communicator and per kind of work, and the memory below.

    Args:
      timeline: the `Timeline` to draw.
      path: the image to write, if any.
    """
    levels = list(dict.fromkeys(event.level for event in timeline.events if event.level))
    there = {event.kind for event in timeline.events if not event.level}
    lanes = [*levels, *(kind for kind in _HOST if kind in there)]
    lanes += sorted(there - {*_HOST})
    rows = {lane: i for i, lane in enumerate(lanes)}
    figure = Figure(figsize=(11, 2.6 + 0.36 * len(lanes)), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    ratios = [max(1.5, 0.36 * len(lanes)), 1.2]
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=ratios)
    for lane, row in rows.items():
        mine = [event for event in timeline.events if (event.level or event.kind) == lane]
        tracks = _tracks(mine)
        height = 0.76 / (1 + max(tracks, default=0))
        for event, track in zip(mine, tracks, strict=True):
            middle = row - 0.38 + height * (track + 0.5)
            _bar(top, event, middle, height, timeline.seconds)
    top.set_yticks(range(len(lanes)), lanes)
    top.set_ylim(len(lanes) - 0.4, -0.6)
    top.grid(axis="x", alpha=0.3)
    kinds = dict.fromkeys(event.kind for event in timeline.events)
    handles = [Patch(color=_COLOURS.get(kind, _OTHER), label=kind) for kind in kinds]
    where = {"loc": "lower left", "bbox_to_anchor": (0, 1.0), "ncols": max(1, len(handles))}
    top.legend(handles=handles, frameon=False, fontsize=8, **where)
    figure.suptitle(timeline.summary(), fontsize=10)
    _memory(bottom, timeline)
    if path is not None:
        figure.savefig(path)
    return figure


def _tracks(events: Sequence[Any]) -> list[int]:
    """Place events of one lane one below the other, so that none covers another."""
    ends: list[float] = []
    found = []
    for event in events:
        free = next((i for i, end in enumerate(ends) if end <= event.start_s), len(ends))
        ends[free : free + 1] = [event.end_s]
        found.append(free)
    return found


def _bar(axes: Any, event: Any, middle: float, height: float, seconds: float) -> None:
    """Draw one event, with the number of its bucket where there is room."""
    width = max(event.seconds, _LEAST * seconds)
    left, colour = 1e3 * event.start_s, _COLOURS.get(event.kind, _OTHER)
    axes.barh(middle, 1e3 * width, left=left, height=height, color=colour, alpha=0.8, linewidth=0)
    number = "+".join(map(str, event.buckets))
    for text in (f"{event.about.partition(' ')[0]} {number}" * (event.kind == "wait"), number):
        if text and len(text) <= event.seconds / seconds * _CHARS:
            at = left + 500 * event.seconds
            axes.text(at, middle, text, ha="center", va="center", fontsize=7, color="white")
            return


def _memory(axes: Any, timeline: Any) -> None:
    """Plot memory over time, stacked by kind."""
    axes.set_xlabel("ms since the step began")
    axes.set_ylabel("MB held")
    axes.set_xlim(0, 1e3 * (timeline.seconds or 1.0))
    axes.grid(alpha=0.3)
    if not timeline.memory:
        return
    times = [1e3 * at for at, _ in timeline.memory] + [1e3 * timeline.seconds]
    kinds = list(timeline.memory[-1][1])
    stacks = [[held[kind] / 1e6 for _, held in timeline.memory] for kind in kinds]
    stacks = [[*stack, stack[-1]] for stack in stacks]
    axes.stackplot(times, *stacks, labels=kinds, step="post", colors=_MEMORY)
    axes.legend(frameon=False, fontsize=8, ncols=2, loc="upper left")

"""`Chart`: timelines as a picture for notebooks, and as a file for viewers of traces.

A picture has a lane for what computes and one for each communicator, in rows where its transfers
overlap. Events that are too narrow to be seen are drawn as one, as pale as the part of the time
that they take, so that a picture stays small however many there are.
"""

import json
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from mics_fn.errors import human_bytes

# Those who see fewer colors can tell them apart, and black numbers can be read on all but the last.
_COLORS = {"use": "#009e73", "pack": "#cc79a7", "opt": "#8fa8f2", "wait": "#f0e442"}
_COLORS |= {"fetch": "#56b4e9", "gather": "#56b4e9", "hop1": "#e69f00", "hop2": "#e8743b"}
_COLORS |= {"other": "#a8a8a8", "not waiting": "#d9efe6", "drop": "#555555"}
_LANES = {"compute": 0, "gather": 1, "reduce": 2, "replicas": 3, "copies": 3}  # by the first word
_LEFT, _WIDTH, _ROW, _LANE = 104, 880, 16, 60  # pixels: of all lanes, and at most of one
# A lane of a picture has at most so many rows, whose last one has what overlaps more; narrow events
# are joined until it has so many bytes; and sums of times may differ by so many seconds.
_ROWS, _LIMIT, _NOISE = 16, 250_000, 1e-12


class Chart(NamedTuple):
    """Timelines one above the other on one axis of time; in a notebook it shows itself.

    Args:
      timelines: such as that of a simulation and that of the step itself.
    """

    timelines: tuple[Any, ...]

    def svg(self) -> str:
        """Return the picture, which needs no other file; its rectangles have tooltips."""
        narrow = 1.0  # pixels
        while len((text := _drawn(self.timelines, narrow)).encode()) > _LIMIT and narrow < _WIDTH:
            narrow *= 2
        return text

    def save_trace(self, path: str | Path) -> None:
        """Write a trace for https://ui.perfetto.dev or chrome://tracing, a process per timeline.

        Args:
          path: the file, which is replaced.
        """
        found = list[dict[str, Any]]()
        for pid, each in enumerate(self.timelines, 1):
            rows: list[Any] = [(_title(each), 0, [])]  # that of the process
            rows += [(x, i, row) for x, of in _lanes(each.events) for i, row in enumerate(of)]
            for tid, (name, i, row) in enumerate(rows):
                place = {"pid": pid, "tid": tid}
                named = {"name": "thread_name" if tid else "process_name", "ph": "M"}
                found.append(named | place | {"args": {"name": f"{name} ({i + 1})" if i else name}})
                found += [_complete(event) | place for event in row]
        Path(path).write_text(json.dumps({"traceEvents": found, "displayTimeUnit": "ms"}))

    def __repr__(self) -> str:
        return "\n\n".join(map(str, self.timelines))

    def _repr_html_(self) -> str:
        return f'<div style="overflow-x: auto">{self.svg()}</div>'


def _lanes(events: Sequence[Any], most: int | None = None) -> list[tuple[str, list[list[Any]]]]:
    """The rows of each lane, those of one kind in the order of their first events."""
    lanes: dict[str, list[Any]] = {"compute": []}
    for event in events:
        lanes.setdefault(event.level or "compute", []).append(event)
    names = sorted(lanes, key=lambda name: _LANES.get(name.partition(" ")[0], len(_LANES)))
    return [(name, _rows(lanes[name], most or len(events), name == "compute")) for name in names]


def _rows(events: Sequence[Any], most: int, nested: bool) -> list[list[Any]]:
    """Rows of events that do not overlap, unless one lies in another where they may be nested."""
    rows: list[tuple[list[Any], list[float]]] = [([], [])]  # with the ends of what is under way
    for event in sorted(events, key=lambda each: (each.start_s, -each.end_s)):
        for row in rows:
            while row[1] and row[1][-1] <= event.start_s + _NOISE:
                row[1].pop()
            if not row[1] or (nested and event.end_s <= row[1][-1] + _NOISE):
                break
        else:
            rows += [([], [])][: most - len(rows)]
            row = rows[-1]
        row[0].append(event)
        row[1].append(event.end_s)
    return [row for row, _ in rows]


def _complete(event: Any) -> dict[str, Any]:
    """An event of a trace; times are rounded, and not durations, so that rows stay in order."""
    begin, end = (round(1e9 * at) for at in (event.start_s, event.end_s))
    times = {"ph": "X", "ts": begin / 1e3, "dur": max(0, end - begin) / 1e3}
    return {"name": _name(event), "cat": event.kind, "args": event._asdict()} | times


def _drawn(timelines: Sequence[Any], narrow: float) -> str:
    """The picture, in which events narrower than so many pixels are joined."""
    ends = [x for each in timelines for x in (each.seconds, *(e.end_s for e in each.events))]
    last = max([0.0, *ends]) or 1e-3
    scale, parts, y = _WIDTH / last, list[str](), 26.0
    for each in timelines:
        parts.append(_words(8, y - 7, _title(each), 'font-weight="bold"'))
        for name, rows in _lanes(each.events, _ROWS):
            row = min(_ROW, _LANE / len(rows))
            ground = _COLORS["not waiting"] if name == "compute" else "#eeeeee"
            parts.append(_rect((_LEFT, y, scale * each.seconds, row * len(rows)), ground))
            parts.append(_words(8, y + row * len(rows) / 2 + 4, name[:17]))
            parts += _lane(_marks(rows, narrow / scale), scale, y, row)
            y += row * len(rows) + 4
        y += 26
    kinds = {event.kind for each in timelines for event in each.events}
    parts += [*_axis(last, scale, y - 26), *_legend({*kinds, "not waiting"}, y - 2)]
    size = f'width="{_LEFT + _WIDTH + 24}" height="{y + 20:.0f}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size='
    return "\n".join([f'{head}"11"><rect {size} fill="#ffffff"/>', *parts, "</svg>"])


def _marks(rows: Sequence[Sequence[Any]], narrow: float) -> list[tuple[int, list[Any]]]:
    """Rectangles by row: an event, or several of a kind that are short, and near by each other."""
    found = list[tuple[int, list[Any]]]()
    for number, row in enumerate(rows):
        last: dict[str, tuple[list[Any], float]] = {}
        for event in row:
            events, end = last.get(event.kind, ([], 0.0))
            if not events or max(event.seconds, event.start_s - end) >= narrow:
                found.append((number, events := []))
            events.append(event)
            if event.seconds < narrow:
                last[event.kind] = events, max(end, event.end_s)
    return found


def _lane(marks: Sequence[tuple[int, list[Any]]], *place: float) -> Iterator[str]:
    """The rectangles, and above them the numbers of buckets where there is room."""
    (scale, top, height), words, used = place, list[str](), dict[int, float]()
    for row, events in marks:
        first, text = events[0], "+".join(map(str, events[0].buckets))
        seconds = max(0, max(event.end_s for event in events) - first.start_s)
        x, y, width = _LEFT + scale * first.start_s, top + row * height, scale * seconds
        over = f" over {first.level}, {human_bytes(first.sent_bytes)}" if first.level else ""
        tip, more = f"{_name(first)[:60]}{over}: {first.about[:150]}", ""
        if len(events) > 1:
            busy, text = sum(max(0, event.seconds) for event in events), ""
            tip = f"{len(events)} of {first.kind}, {1e3 * busy:.3f} ms in all"
            more = f'fill-opacity="{min(1, 0.2 + busy / (seconds or 1)):.2f}"'
        elif width > 4:  # what is next to it is seen to be another
            more = 'stroke="#ffffff" stroke-width="0.6"'
        tip += f"; at {1e3 * first.start_s:.3f} ms, took {1e3 * seconds:.3f} ms"
        inset, color = 0.2 * height * (first.kind == "wait"), _COLORS.get(first.kind, "#a8a8a8")
        size = x, y + inset, max(0.5, width), height - 2 * inset
        yield _rect(size, color, f"<title>{_text(tip)}</title>", more)
        middle, half = x + width / 2, 3.1 * len(text)
        if text and max(x, used.get(row, 0)) < middle - half - 1 and height > 9:
            words.append(_words(middle, y + height / 2 + 4, text))
            used[row] = middle + half
    yield f'<g text-anchor="middle" pointer-events="none">{"".join(words)}</g>'


def _axis(last: float, scale: float, y: float) -> Iterator[str]:
    """Lines at round numbers of milliseconds."""
    steps = (k * 10.0**power for power in range(-9, 12) for k in (1, 2, 5))
    step = next(step for step in steps if 10 * step >= 1e3 * last)
    for i in range(int(1e3 * last / step + 1e-9) + 1):
        x = _LEFT + scale * i * step / 1e3
        yield _rect((x, 24, 0.5, y - 20), "#000000", more='opacity="0.3" pointer-events="none"')
        yield _words(x, y + 14, f"{i * step:,.10g} ms", 'text-anchor="middle"')


def _legend(kinds: set[str], y: float) -> Iterator[str]:
    kinds = {kind if kind in _COLORS else "other" for kind in kinds}
    for i, kind in enumerate(kind for kind in _COLORS if kind in kinds):
        yield _rect((_LEFT + 90 * i, y, 12, 12), _COLORS[kind])
        yield _words(_LEFT + 90 * i + 17, y + 10, kind)


def _rect(size: Sequence[float], fill: str, inner: str = "", more: str = "") -> str:
    where = 'x="{:.2f}" y="{:.2f}" width="{:.2f}" height="{:.2f}"'.format(*size)
    return f'<rect {where} fill="{fill}" {more}>{inner}</rect>'


def _words(x: float, y: float, text: str, more: str = "") -> str:
    return f'<text x="{x:.2f}" y="{y:.2f}" {more}>{_text(text)}</text>'


def _text(text: str) -> str:
    """Text as XML may have it; characters that it may not have are replaced."""
    return escape("".join(char if char.isprintable() else "\ufffd" for char in text))


def _title(timeline: Any) -> str:
    return f"{timeline}".partition("\n")[0]


def _name(event: Any) -> str:
    return f"{event.kind} {'+'.join(map(str, event.buckets))}".rstrip()

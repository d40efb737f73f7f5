"""The picture and the trace of a timeline show each event where and when it was."""

import json
import random
import re
import time
from collections import Counter
from itertools import pairwise
from typing import Any, NamedTuple
from xml.etree import ElementTree

import pytest
from test_watching import TWO_LEVELS, batch_of, groups_of, stepped

import mics_fn as mf
from mics_fn.inspection import Event, Timeline

NUMBER = r"(-?[\d.,e-]+)"
COMMS = ["reduce rank", "replicas", "gather node", "step totals", "gather rank", "reduce node"]
SORTED = ["compute", "gather node", "gather rank", "reduce rank", "reduce node", "replicas"]
SORTED.append("step totals")
TRANSFERS = {"gather": "fetch", "reduce": "hop1", "replicas": "hop2", "step": "step totals"}
RIGHT = 104 + 880  # where the longest timeline ends
ROUNDED = 0.0051  # of a pixel: coordinates have two digits


class Box(NamedTuple):
    x: float
    y: float
    width: float
    height: float
    title: str

    @property
    def end(self) -> float:
        return self.x + self.width

    def lies_in(self, other: "Box") -> bool:
        return (
            other.y - ROUNDED <= self.y
            and self.y + self.height <= other.y + other.height + 3 * ROUNDED
        )


class Picture:
    """What a reader sees: rectangles of events by lane, and the axis that says where a ms is."""

    def __init__(self, svg: str) -> None:
        tree = ElementTree.fromstring(svg)
        assert not {part.tag.rpartition("}")[2] for part in tree.iter()} - {
            *("svg", "rect", "title", "text", "g")
        }
        found = list(tree.iter("{http://www.w3.org/2000/svg}text"))
        words = [(x.text or "", float(x.get("x", 0)), float(x.get("y", 0))) for x in found]
        ticks = [
            (float(t.split()[0].replace(",", "")), x)
            for t, x, _ in words
            if re.fullmatch(f"{NUMBER} ms", t)
        ]
        self.ticks = [ms for ms, _ in ticks]
        (_, self.left), (ms, x) = ticks[0], ticks[-1]
        self.per_ms = (x - self.left) / ms if ms else 0.0
        self.boxes, self.grounds = list[Box](), list[Box]()
        for part in tree.iter("{http://www.w3.org/2000/svg}rect"):
            x, y, *size = (float(part.get(key, 0)) for key in ("x", "y", "width", "height"))
            box = Box(x, y, *size, title="".join(part.itertext()))
            if box.title:
                self.boxes.append(box)
            elif part.get("fill") in ("#eeeeee", "#d9efe6") and box.height > 12:
                self.grounds.append(box)
        middles = {round(box.y + box.height / 2 + 4, 1): box for box in self.grounds}
        named = [(t, middles.get(round(y, 1))) for t, x, y in words if x == 8]
        self.lanes = [(text, box) for text, box in named if box is not None]
        self.titles = [text for text, box in named if box is None]
        self.numbers = [(text, x, y) for text, x, y in words if re.fullmatch(r"[\d+]+", text)]

    def place(self, seconds: float) -> float:
        return self.left + self.per_ms * 1e3 * seconds


def event(about: str, level: str, start_s: float, seconds: float, **facts: Any) -> Event:
    kind = TRANSFERS[level.partition(" ")[0]] if level else "use"
    facts = {"kind": kind, "buckets": (3,), "sent_bytes": 4000 * bool(level)} | facts
    return Event(about=about, level=level, start_s=start_s, end_s=start_s + seconds, **facts)


def drawn_up(seed: int, per_comm: int, longest_s: float = 0.01) -> Timeline:
    """A timeline whose transfers overlap now and then, and whose uses have waits in them."""
    chance, found = random.Random(seed), list[Event]()
    for number, level in enumerate(COMMS):
        at = number * longest_s  # that of a rank is first reduced over
        for i in range(per_comm):
            at += chance.random() * longest_s
            length = chance.uniform(0.3, 1) * longest_s
            found.append(event(f"<leaf{number}.{i}&>", level, at, length, buckets=(i,)))
    at = 0.0
    for i in range(per_comm):
        length = chance.uniform(0.5, 1) * longest_s
        found.append(event(f"<leaf.{i}&>", "", at, length, buckets=(i,)))
        waited = f"fetch bucket {i}: é<w.{i}&>"
        found.append(event(waited, "", at, length / 2, kind="wait", buckets=(i,)))
        at += length + chance.choice([0, 1e-3])
    found.sort(key=lambda each: (each.start_s, each.end_s))
    return Timeline("step <3> & more", tuple(found), max(each.end_s for each in found))


@pytest.mark.parametrize("seed", range(3))
def test_each_event_has_its_rectangle_where_and_when_it_was(seed):
    timeline = drawn_up(seed, 8)
    picture = Picture(timeline.beside().svg())
    assert picture.titles == [str(timeline).splitlines()[0]]
    assert [name for name, _ in picture.lanes] == SORTED
    lanes, found = dict(picture.lanes), dict[str, Box]()
    for each in timeline.events:
        (box,) = (box for box in picture.boxes if f": {each.about};" in box.title)
        found[each.about] = box
        assert box.x == pytest.approx(picture.place(each.start_s), abs=2 * ROUNDED)
        assert box.end == pytest.approx(picture.place(each.end_s), abs=4 * ROUNDED)
        assert box.lies_in(lanes[each.level or "compute"])
        assert f"{each.kind} {each.buckets[0]}" in box.title
        assert f"at {1e3 * each.start_s:.3f} ms, took {1e3 * each.seconds:.3f} ms" in box.title
        assert (f"over {each.level}, 4.00 kB" in box.title) == bool(each.level)
    assert len(found) == len(picture.boxes) == len(timeline.events)
    for a, b in pairwise(picture.grounds):
        assert a.y + a.height < b.y
        assert a.end == pytest.approx(picture.place(timeline.seconds), abs=2 * ROUNDED)
    for a, b in pairwise(sorted(picture.boxes, key=lambda box: (box.y, box.x))):
        assert a.y != b.y or a.end <= b.x + 2 * ROUNDED  # rows; waits are inset
    of_box = Counter[str]()
    for text, x, y in picture.numbers:
        (box,) = (
            box
            for box in picture.boxes
            if box.x < x < box.end and box.y < y < box.y + box.height and "wait" not in box.title
        )
        assert re.search(rf" {text}( over|:)", box.title)
        of_box[box.title] += 1
    assert max(of_box.values()) == 1
    assert len(of_box) > len(timeline.events) / 2


def test_colors_are_by_kind_as_the_legend_says():
    svg = drawn_up(0, 4).beside().svg()
    found = dict[str, set[str]]()
    for color, kind in re.findall(r'fill="(#\w+)" [^>]*><title>(\w+)', svg):
        found.setdefault(kind.replace("step", "other"), set()).add(color)
    legend = re.findall(r'fill="(#\w+)" ></rect>\n<text [^>]*>([a-z ]+\d?)</text>\n', svg[-2000:])
    told = {kind: {color} for color, kind in legend}
    assert found == {kind: told[kind] for kind in found}
    assert len(set().union(*found.values())) == len(found) == 6
    assert set(told) - set(found) == {"not waiting"}


def test_ticks_are_round_and_few():
    for seconds in (3e-9, 1e-3, 0.0029, 0.09, 0.1, 7.3, 4000.0):
        picture = Picture(Timeline("", (), seconds).beside().svg())
        steps = {round(b - a, 12) for a, b in pairwise(picture.ticks)}
        assert re.match(r"[125]\.000e", f"{steps.pop():.3e}")
        assert not steps
        assert 4 <= len(picture.ticks) - 1 <= 10
        assert picture.place(seconds) == pytest.approx(RIGHT, abs=0.01)
        assert picture.ticks[0] == 0


def test_timelines_lie_one_above_the_other_on_one_axis():
    short, long = drawn_up(0, 2), drawn_up(1, 6)
    chart = short.beside(long, Timeline("empty", (), 0.0))
    picture = Picture(chart.svg())
    assert picture.titles == [str(each).splitlines()[0] for each in chart.timelines]
    assert [name for name, _ in picture.lanes] == [*SORTED, *SORTED, "compute"]
    ends = [box.end for _, box in picture.lanes]
    wanted = [short.seconds] * 7 + [long.seconds] * 7 + [0]
    assert ends == pytest.approx([picture.place(s) for s in wanted], abs=2 * ROUNDED)
    assert max(ends) == pytest.approx(RIGHT, abs=0.01)
    tops = [box.y for _, box in picture.lanes]
    assert tops == sorted(tops)
    html = chart._repr_html_()
    assert chart.svg() in html
    assert not re.search("script|href|url|import|@", html)
    assert (
        repr(chart)
        == f"{short}\n\n{long}\n\nempty: 0.00 ms, sent 0 B, waited 0.00 ms\n"
        + (str(long).splitlines()[1])
    )


@pytest.mark.parametrize(
    "events",
    [
        (),
        (event("zero", "", 0.0, 0.0),),
        (event("back", "gather rank", 1e-3, -1e-9), event("b", "", 2e-3, -1e-9)),
        (event("h.0.\x00\x1b\ud800\uffff.w", "", 0.0, 1e-3, kind="\x07<&"),),
        (event("层.重み.é", "reduce <&> of a very long name", 0.0, 1e-3, kind="hop1"),),
        (event("a" * 5000, "", 0.0, 1e-3, buckets=tuple(range(9999))),),
    ],
    ids=["none", "zero", "negative", "signs", "unicode", "long"],
)
def test_what_is_odd_is_drawn_too(events, tmp_path):
    for seconds in (0.0, 2e-3):
        timeline = Timeline("", events, seconds)
        assert len(timeline.beside().svg()) < 5000
        picture = Picture(timeline._repr_html_().partition(">")[2].removesuffix("</div>"))
        assert len(picture.boxes) == len(events)
        assert all(0 < box.width < 900 for box in picture.boxes)
        assert all(100 < box.x < 1000 for box in picture.boxes)
        timeline.save_trace(tmp_path / "trace.json")
        read = json.loads((tmp_path / "trace.json").read_bytes())["traceEvents"]
        complete = [row for row in read if row["ph"] == "X"]
        assert [row["args"]["about"] for row in complete] == [e.about for e in by_lane(events)]
        assert all(row["dur"] >= 0 for row in complete)


def by_lane(events: Any) -> list[Event]:
    return sorted(events, key=lambda each: bool(each.level))


@pytest.mark.parametrize("step_s", [1e-5, 0.01])
def test_thousands_of_events_stay_small_and_none_is_lost(step_s):
    timeline = drawn_up(0, 3000, step_s)
    many = [event(f"deep {i}", "gather node", 1e-6 * i, 1.0) for i in range(200)]
    timeline = Timeline("big", (*timeline.events, *many), 60.0)
    began = time.process_time()
    svg = timeline.beside(timeline).svg()
    assert len(svg.encode()) < 300_000
    assert time.process_time() - began < 10
    picture, counts = Picture(svg), Counter[str]()
    lanes = [box for _, box in picture.lanes]
    for lane in lanes:
        tops = {box.y for box in picture.boxes if box.lies_in(lane)}
        assert (lane.height < 61, len(tops) <= 16) == (True, True)
    for box in picture.boxes:
        assert any(box.lies_in(lane) for lane in lanes)
        several = re.match(rf"(\d+) of (\w+).*, {NUMBER} ms in all; at", box.title)
        kind = several[2] if several else box.title.partition(" ")[0]
        counts[kind] += int(several[1]) if several else 1
        at, took = re.findall(rf"{NUMBER} ms", box.title)[-2:]
        assert box.x == pytest.approx(picture.place(float(at) / 1e3), abs=0.02)
        assert box.width == pytest.approx(max(0.5, picture.per_ms * float(took)), abs=0.02)
    wanted = Counter(each.kind.split()[0] for each in timeline.events)
    assert counts == {kind: 2 * n for kind, n in wanted.items()}


def test_narrow_neighbors_are_joined_and_as_pale_as_they_are_sparse():
    near = [event(f"{i}", "", 1e-3 * i, 1e-4) for i in range(10)]
    later = event("later", "", 0.5, 1e-4)
    wide = event("wide", "", 0.6, 0.1)
    svg = Timeline("", (*near, later, wide), 10.0).beside().svg()
    joined, alone, last = Picture(svg).boxes
    assert joined.title == "10 of use, 1.000 ms in all; at 0.000 ms, took 9.100 ms"
    assert 'fill-opacity="0.31"' in svg  # 0.2, so that it can be seen, and 1 / 9.1
    assert ("later" in alone.title, "wide" in last.title) == (True, True)


def test_the_noise_of_sums_of_times_opens_no_row():
    """As in a simulation, whose transfers follow each other."""
    follow, at = list[Event](), 0.1
    for i in range(50):
        follow.append(Event("fetch", f"{i}", (i,), "gather node", 8, at, at + 0.1))
        at = 0.1 + 0.1 * (i + 1)
    assert any(a.end_s > b.start_s for a, b in pairwise(follow))
    boxes = Picture(Timeline("", tuple(follow), 6.0).beside().svg()).boxes
    assert len({box.y for box in boxes}) == 1


# Traces


def test_a_trace_has_each_event_and_rows_that_nest(tmp_path):
    timelines = drawn_up(0, 30), drawn_up(1, 5)
    timelines[0].beside(timelines[1]).save_trace(f"{tmp_path / 'two.json'}")
    read = json.loads((tmp_path / "two.json").read_text())["traceEvents"]
    names = {
        (row["name"], row["pid"], row["tid"]): row["args"]["name"]
        for row in read
        if row["ph"] == "M"
    }
    for pid, timeline in enumerate(timelines, 1):
        assert names["process_name", pid, 0] == str(timeline).splitlines()[0]
        rows = [row for row in read if row["ph"] == "X" and row["pid"] == pid]
        assert len(rows) == len(timeline.events)
        of = {row["args"]["about"]: row for row in rows}
        for each in timeline.events:
            row = of[each.about]
            assert row["ts"] == pytest.approx(1e6 * each.start_s, abs=5.1e-4)
            assert row["ts"] + row["dur"] == pytest.approx(1e6 * each.end_s, abs=5.1e-4)
            lane = names["thread_name", pid, row["tid"]]
            assert re.sub(r" \(\d+\)$", "", lane) == (each.level or "compute")
            assert (row["name"], row["cat"]) == (f"{each.kind} {each.buckets[0]}", each.kind)
            assert Event(**row["args"])._replace(buckets=each.buckets) == each
            assert tuple(row["args"]["buckets"]) == each.buckets
        for a in rows:  # those of a thread are one after the other, or one in the other
            for b in rows:
                if a is not b and a["tid"] == b["tid"] and begin(a) <= begin(b):
                    end, inner = a["ts"] + a["dur"], b["ts"] + b["dur"]
                    assert end <= b["ts"] + 1e-6 or inner <= end + 1e-6


def begin(row: dict[str, Any]) -> tuple[float, float]:
    return row["ts"], -row["dur"]


# A step


def shown() -> tuple[Timeline, str]:
    trainer = stepped(groups_of(TWO_LEVELS), accumulate=2)
    with mf.inspection.watch():
        trainer.step(batch_of())
    timeline = trainer.last_step.timeline()
    return timeline, timeline._repr_html_()


def test_a_step_shows_itself(ranks):
    for timeline, html in ranks(4).run(shown):
        picture = Picture(html.partition(">")[2].removesuffix("</div>"))
        assert [name for name, _ in picture.lanes] == [x for x in SORTED if x != "replicas"]
        assert picture.titles[0].startswith("step 3: ")
        for each in timeline.events:
            if picture.per_ms * 1e3 * each.seconds > 1.1:
                at = f"at {1e3 * each.start_s:.3f} ms, took {1e3 * each.seconds:.3f} ms"
                assert any(at in b.title and b.title.startswith(each.kind) for b in picture.boxes)

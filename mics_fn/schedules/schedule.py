"""`Schedule`: the order in which one step fetches, uses, drops and reduces its buckets, as a value.

A bucket is a number here, and its size a number of bytes. An `Action` is a kind and the buckets
that it concerns: `fetch` gathers a bucket (an all-gather), `use` is an op that needs its buckets
live, `drop` frees a bucket, and `reduce` averages its gradients into shards (a reduce-scatter).
`backward`, of no bucket, marks where a backward pass begins, for whoever plans; runs pass it by. A
`Schedule` is a tuple of actions, from the first use in forward to the last reduction in backward,
over all micro-steps. In its text form, actions are separated by ";" or a new line:
    fetch 0; fetch 1; use 0; use 0+1; drop 1; reduce 1; drop 0; reduce 0  # a comment
The record of a run is a schedule that has uses and reductions only; `plan` adds the rest.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, zip_longest
from typing import Any, Literal, NamedTuple, cast

from mics_fn import checks
from mics_fn.errors import PlanError, message, name_ranks

Kind = Literal["fetch", "use", "drop", "reduce", "backward"]
Uses = Sequence[tuple[int, ...]]  # the buckets of each use

_COLLECTIVE = ("fetch", "reduce")  # ranks must issue these in the same order
_CHANGE = {"fetch": 1, "use": 0, "drop": -1, "reduce": 0}  # times the size: of live bytes
_TEXT = re.compile(rf"({'|'.join(_CHANGE)})\s+([0-9]+(?:\s*\+\s*[0-9]+)*)")
_MARK = "backward"
_EXPECTED = (
    "expected fetch, drop or reduce and one bucket, use and ascending buckets, or backward alone"
)
_WRITE = "write it as in 'use 1+2; drop 1'"
_LINE_CHARS = 92  # of `str`, so that an indented text fits in 100


class _Fields(NamedTuple):
    kind: Kind
    buckets: tuple[int, ...]


class Action(_Fields):
    """One step of a schedule; its `str` is its text, such as "fetch 3" or "use 1+2".

    Args:
      kind: "fetch", "use", "drop", "reduce" or "backward".
      buckets: a single one; of a use one or more, ascending; of backward none.

    Raises:
      PlanError: there is no such kind, or it cannot have these buckets.
    """

    __slots__ = ()

    def __new__(cls, kind: Kind, buckets: tuple[int, ...]) -> "Action":
        if not _fit(kind, buckets):
            what = f"Action: {checks.given('kind', kind)}, {checks.given('buckets', buckets)}"
            fix = "write it as in Action('use', (1, 2)) or Action('fetch', (0,))"
            raise PlanError(message(what, [_EXPECTED], fix))
        return super().__new__(cls, kind, buckets)

    def __str__(self) -> str:
        return f"{self.kind} {'+'.join(map(str, self.buckets))}".rstrip()


@dataclass(frozen=True, repr=False)
class Schedule:
    """Actions in order, compared and hashed by value. `str` gives its text, and `parse` reads it.

    Raises:
      PlanError: these are not actions.

    Example:
      >>> Schedule.parse("fetch 0; fetch 1; use 0+1  # a comment")
      Schedule(3 actions, 2 buckets)
    """

    actions: tuple[Action, ...]  # given as any iterable

    def __post_init__(self) -> None:
        fix = "give a list of Action, or read a text with Schedule.parse(text)"
        checks.instance("Schedule", "actions", self.actions, Iterable, "actions in order", fix)
        object.__setattr__(self, "actions", tuple(self.actions))
        for i, action in enumerate(self.actions):
            if not isinstance(action, Action) or not _fit(*action):
                what = f"Schedule: actions[{i}] is {action!r}"
                raise PlanError(message(what, [_EXPECTED], fix))

    @classmethod
    def parse(cls, text: str) -> "Schedule":
        """Read the text form; `parse(str(schedule))` equals `schedule`.

        Raises:
          PlanError: a part is not an action; names its line and its number. Or `text` is not a
            text.
        """
        checks.instance("Schedule.parse", "text", text, str, "a text", _WRITE)
        actions: list[Action] = []
        for line, whole in enumerate(text.split("\n"), 1):
            for part in filter(None, map(str.strip, whole.partition("#")[0].split(";"))):
                action = _action(part)
                if action is None:
                    what = f"Schedule.parse: line {line}: actions[{len(actions)}] is {part!r}"
                    raise PlanError(message(what, [_EXPECTED], _WRITE))
                actions.append(action)
        return cls(tuple(actions))

    @property
    def uses(self) -> tuple[tuple[int, ...], ...]:
        """The buckets of each use, in order."""
        return tuple(action.buckets for action in self.actions if action.kind == "use")

    @property
    def fetches(self) -> tuple[int, ...]:
        """The bucket of each fetch, in order."""
        return tuple(action.buckets[0] for action in self.actions if action.kind == "fetch")

    @property
    def reduces(self) -> tuple[int, ...]:
        """The bucket of each reduction, in order."""
        return tuple(action.buckets[0] for action in self.actions if action.kind == "reduce")

    @property
    def backwards(self) -> tuple[int, ...]:
        """For each backward pass that is marked, how many uses come before it."""
        found, uses = [], 0
        for action in self.actions:
            uses += action.kind == "use"
            if action.kind == _MARK:
                found.append(uses)
        return tuple(found)

    @property
    def unmarked(self) -> "Schedule":
        """The schedule without marks of backward passes."""
        if not any(action.kind == _MARK for action in self.actions):
            return self
        return Schedule(tuple(action for action in self.actions if action.kind != _MARK))

    def marked_at(self, places: Sequence[int]) -> "Schedule":
        """The schedule with a mark of a backward pass before each of these actions, by number."""
        found = list(self.actions)
        for place in sorted(places, reverse=True):
            found.insert(place, Action(_MARK, ()))
        return Schedule(tuple(found))

    def fetched_bytes(self, sizes: Sequence[int]) -> int:
        """Bytes of full buckets over all fetches."""
        check_buckets("Schedule.fetched_bytes", self, sizes)
        return sum(sizes[bucket] for bucket in self.fetches)

    def peak_bytes(self, sizes: Sequence[int]) -> int:
        """The most bytes that are live at once; a bucket is live from its fetch to its drop."""
        check_buckets("Schedule.peak_bytes", self, sizes)
        actions = self.unmarked.actions
        changes = (_CHANGE[kind] * sizes[buckets[0]] for kind, buckets in actions)
        return max(accumulate(changes, initial=0))

    def check(self, sizes: Sequence[int], *, live_bytes: int | None = None) -> None:
        """Refuse a schedule that cannot be run.

        Args:
          sizes: bytes of each bucket.
          live_bytes: as given to `plan`: so many bytes and the largest bucket may be live at once,
            or what one use needs if that is more. None sets no limit.

        Raises:
          PlanError: a bucket is used or dropped that is not live, or fetched although it is live,
            or too many bytes are live.
        """
        check_buckets("Schedule.check", self, sizes)
        needs = (sum(sizes[bucket] for bucket in buckets) for buckets in self.uses)
        limit = sum(sizes) if live_bytes is None else live_bytes + max(sizes, default=0)
        most = max([limit, *needs])
        live: set[int] = set()
        nbytes = 0
        for i, action in enumerate(self.actions):
            if action.kind == _MARK:
                continue
            change, first = _CHANGE[action.kind], action.buckets[0]
            nbytes += change * sizes[first]
            wrong = []
            if action.kind in ("use", "drop"):
                missing = (b for b in action.buckets if b not in live)
                wrong = [f"bucket {b} is not live; fetch it" for b in missing]
            elif action.kind == "fetch":
                if first in live:
                    wrong.append(f"bucket {first} is live; drop it before")
                if nbytes > most:
                    wrong.append(f"{nbytes} bytes would be live, of at most {most}")
            if wrong:
                raise PlanError(message(f"Schedule.check: actions[{i}] is '{action}'", wrong))
            if change:
                live.symmetric_difference_update(action.buckets)

    def __str__(self) -> str:
        lines: list[str] = []
        for action in map(str, self.actions):
            if lines and len(lines[-1]) + len(action) + 2 <= _LINE_CHARS:
                lines[-1] += f"; {action}"
            else:
                lines.append(action)
        return "\n".join(lines)

    def __repr__(self) -> str:
        buckets = {bucket for action in self.actions for bucket in action.buckets}
        return f"Schedule({len(self.actions)} actions, {len(buckets)} buckets)"


def first_difference(schedules: Sequence[Schedule]) -> str:
    """The first place at which ranks would issue different collectives, as text.

    Args:
      schedules: one per rank, from rank 0 on.

    Returns:
      The place and what each rank does there; empty if all ranks fetch and reduce in one order.

    Raises:
      PlanError: these are not schedules.

    Example:
      >>> first_difference([Schedule.parse("fetch 0; use 0"), Schedule.parse("fetch 1")])
      'collective 0: fetch 0 on rank 0, fetch 1 on rank 1'
    """
    listed = isinstance(schedules, Sequence) and not isinstance(schedules, str)
    if not listed or not all(isinstance(each, Schedule) for each in schedules):
        fix = "read texts with Schedule.parse"
        checks.refuse("first_difference", "schedules", schedules, "a Schedule per rank", fix)
    issued = [[str(a) for a in schedule.actions if a.kind in _COLLECTIVE] for schedule in schedules]
    for number, texts in enumerate(zip_longest(*issued, fillvalue="none")):
        if len(set(texts)) > 1:
            ranks = {t: [i for i, u in enumerate(texts) if u == t] for t in dict.fromkeys(texts)}
            parts = [f"{text} on {name_ranks(who)}" for text, who in ranks.items()]
            return f"collective {number}: {', '.join(parts)}"
    return ""


def _action(text: str) -> Action | None:
    """The action with this text; None if there is none."""
    if text == _MARK:
        return Action(_MARK, ())
    if found := _TEXT.fullmatch(text):
        kind, buckets = cast(Kind, found[1]), tuple(map(int, found[2].split("+")))
        if _fit(kind, buckets):
            return Action(kind, buckets)
    return None


def _fit(kind: Any, buckets: Any) -> bool:
    """Whether an action of this kind can have these buckets."""
    if type(buckets) is not tuple or any(type(i) is not int or i < 0 for i in buckets):
        return False
    if kind == "use":
        return bool(buckets) and all(a < b for a, b in pairwise(buckets))
    return len(buckets) == (kind != _MARK) and kind in (*_COLLECTIVE, "drop", _MARK)


def check_buckets(where: str, schedule: Schedule, sizes: Sequence[int]) -> None:
    """Raise PlanError if a bucket has no size; `where` is the function, for the text."""
    fix = "read a text with Schedule.parse"
    checks.instance(where, "record", schedule, Schedule, "a Schedule", fix)
    if not isinstance(sizes, Sequence) or any(type(n) is not int or n < 0 for n in sizes):
        fix = "pass what bucket_sizes(shards, groups) gave"
        checks.refuse(where, "sizes", sizes, "a list with an int of at least 0 per bucket", fix)
    for i, action in enumerate(schedule.actions):
        if action.buckets and action.buckets[-1] >= len(sizes):  # they ascend
            why = f"bucket {action.buckets[-1]} has no size; there are {len(sizes)} sizes"
            raise PlanError(message(f"{where}: actions[{i}] is '{action}'", [why]))

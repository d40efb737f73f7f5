"""`Idle`: for how long a rank has made no call, where it is, and which rank the others wait for.

[Note: a rank that makes no call] A rank may give signs of life and make no call: its loader hangs,
it is in a debugger, or its loop has ended before those of the others, who wait for it. Nothing says
whether it will go on, so it has `timeout_s`, as any rank that is slow. Each rank that has made no
call for `heartbeat_s`, or half of `timeout_s` if that is less, writes how many calls it has made,
for which others it waits, and where its main thread is. A rank that waits follows those for whom it
waits, and for whom these wait in turn, up to ranks that wait for nobody and lack such a call. Of
these the one with the fewest calls is behind. The first of the others names it in a warning, and
after `timeout_s` all do in their error.
"""

import faulthandler
import json
import os
import re
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mics_fn.errors import message
from mics_fn.groups.peers import Failure
from mics_fn.groups.signs import tick_s
from mics_fn.log import LOG
from mics_fn.schedules import Stuck, call_text
from mics_fn.store import Store

_WAITS_S = 1.5  # a wait that was noted longer ago has ended
_FRAMES = 12  # of the main thread, the innermost first
_OTHERS = (
    os.path.dirname(os.__file__),
    "site-packages",
    os.path.dirname(os.path.dirname(__file__)),
)

Counts = Mapping[str, tuple[int, int]]  # by communicator, how many calls were made and issued


class Idle:
    """What one rank has done on some groups, and since when nothing; see the note of this page.

    Args:
      ranks: of the groups.
      rank: this one.
    """

    def __init__(self, ranks: Sequence[int], rank: int) -> None:
        self._ranks, self._rank = ranks, rank
        self.seconds = 0.0  # without a call, by the ticks of the monitor
        self._counts: Counts = {}
        self._waits: tuple[float, Sequence[Stuck], Sequence[int]] = (0.0, (), ())
        self._told, self._warned = "", False

    def waits(self, stuck: Sequence[Stuck], missing: Sequence[int] = ()) -> None:
        """Note what this rank waits for: calls, or ranks whatever they have called."""
        if stuck or missing:
            self._waits = time.monotonic(), stuck, missing

    def pass_time(self, counts: Counts, passed_s: float) -> None:
        """Count the time since the last call; called at each tick."""
        same = counts == self._counts
        self.seconds = self.seconds + passed_s if same else 0.0
        self._counts, self._warned = counts, self._warned and same

    def exchange(self, store: Any, life: Any) -> None:
        """Write where this rank is if that is of interest, and warn of one that is behind."""
        limit_s = min(life.heartbeat_s, life.timeout_s / 2)
        text = self._text(life.step, life.call) if self.seconds > limit_s else ""
        if text != self._told:
            self._told = text
            store.set(f"{life.key}/idle/{self._rank}", text)
        if self._warned or self.seconds < limit_s + 4 * tick_s(len(self._ranks)):
            return
        self._warned = True
        failure = self.behind(store, life.key)
        if failure and self._rank == next(rank for rank in self._ranks if rank != failure.rank):
            text = f"{failure.text}; others wait for it up to timeout_s={life.timeout_s:g}"
            LOG.warning(message(text, [failure.trace.replace("\n", " < ")]))

    def _text(self, step: int | None, call: Any) -> str:
        since, stuck, missing = self._waits
        waits = [[each.group, each.number, each.ranks] for each in stuck]
        waits = [*waits, ["", 0, missing]] if time.monotonic() - since < _WAITS_S else []
        operation, leaf = ("", "") if call is None else (call_text(call), str(call[2]))
        at, frames = main_thread()
        said = {"counts": self._counts, "waits": waits, "step": step, "operation": operation}
        return json.dumps(said | {"leaf": leaf, "at": at, "frames": frames})

    def behind(self, store: Store, key: str, stuck: Iterable[Stuck] = ()) -> Failure | None:
        """The failure of the rank that this one waits for in the end, if that makes no call.

        Args:
          store: of the job.
          key: of the groups.
          stuck: what this rank waits for; by default all that it has called.
        """
        done = self._counts.items()
        waits: list[Any] = [[each.group, each.number, each.ranks] for each in stuck]
        waits = waits or [[group, made, self._ranks] for group, (made, _) in done]
        found, said = dict[int, Any](), dict[int, Any]({self._rank: {}})
        while waits:
            group, number, ranks = waits.pop()
            for rank in ranks:
                if rank not in said:
                    said[rank] = _read(store, f"{key}/idle/{rank}")
                    waits += said[rank].get("waits", ())
                there = said[rank]
                if there and not there["waits"] and _lacks(there["counts"], group, number):
                    found[rank] = there
        if not found:
            return None
        rank = min(found, key=lambda rank: sum(made for made, _ in found[rank]["counts"].values()))
        counts = found[rank]["counts"].items()
        text = f"rank {rank} is behind: it lives, but makes no call; it is {found[rank]['at']}"
        return Failure(
            rank,
            "stalled",
            text,
            step=found[rank]["step"],
            operation=found[rank]["operation"],
            leaf=found[rank]["leaf"],
            trace="\n".join(found[rank]["frames"]),
            made={group: made for group, (made, _) in counts},
            issued={group: issued for group, (_, issued) in counts},
        )


def _read(store: Store, key: str) -> dict[str, Any]:
    """What a rank wrote; nothing while it makes calls."""
    text = store.get(key).decode() if store.check([key]) else ""
    return json.loads(text) if text else {}


def _lacks(counts: Mapping[str, Sequence[int]], group: str, number: int) -> bool:
    """Whether a rank has not issued a call that another one waits for; "" is for any."""
    if not group:
        return True
    return group in counts and counts[group][1] < number


def main_thread() -> tuple[str, list[str]]:
    """Where the main thread of this process is: in words, and its frames, the innermost first.

    The main thread runs meanwhile: only faulthandler walks its frames without letting it go on.
    """
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        text = file.read().decode(errors="replace")
    ident = threading.main_thread().ident or 0
    own = re.search(rf"^\S.* 0x0*{ident:x}\b.*\n((?:  .*\n)*)", text, flags=re.MULTILINE)
    stack = re.findall(r'^  File "(.*)", line (\d+) in (.*)$', own[1] if own else "", re.MULTILINE)
    stack = stack[:_FRAMES]
    frames = [f"{os.path.basename(file)}:{line} in {name}" for file, line, name in stack]
    users = [
        text
        for (file, _, _), text in zip(stack, frames, strict=True)
        if not any(other in file for other in _OTHERS) and file[:1] != "<"
    ]
    inner = f"at {frames[0]}" if frames else "nowhere"
    return inner if users[:1] in ([], frames[:1]) else f"{inner}, called at {users[0]}", frames

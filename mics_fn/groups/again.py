"""`Again`: makes groups once more, under another key and for another life."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from mics_fn.errors import GroupsError, message, name_ranks
from mics_fn.groups.communicator import Maker, Traffic
from mics_fn.groups.groups import Groups
from mics_fn.groups.life import Life
from mics_fn.groups.monitor import monitor
from mics_fn.groups.rendezvous import Judge, meet
from mics_fn.groups.returning import returning
from mics_fn.groups.topology import Plan
from mics_fn.log import LOG
from mics_fn.schedules import Channel

Create = Callable[[Plan, Maker], Groups]

_SAY_S = 2.0  # after so many seconds of waiting the first rank says for whom


@dataclass(frozen=True)
class Again:
    """What makes groups once more; it refers to nothing of those before.

    Args:
      like: a maker of such groups.
      plan: theirs.
      create: makes groups of a plan.
      first: the key of the first of all these groups, which a rank that comes back also knows.
    """

    like: Maker
    plan: Plan
    create: Create
    first: str

    @classmethod
    def of(cls, maker: Maker, plan: Plan, create: Create) -> "Again":
        """What makes the groups of a maker once more."""
        fresh = {"store": None, "traffic": Traffic(), "channel": Channel()}
        life = _alike(maker.life)
        return cls(replace(maker, life=life, **fresh), plan, create, maker.life.key)

    def __call__(self, mine: Any, judge: Judge, ready: Callable[[], None]) -> tuple[Groups, Any]:
        """The groups, and what the judge found.

        Args:
          mine, judge: as for `meet`.
          ready: called once all ranks have met.

        Raises:
          CollectiveTimeoutError, DesyncError, GroupsError, PeerFailed: as `make_groups`.
        """
        like = self.like
        life, deadline = _alike(like.life), time.monotonic() + like.timeout_s
        store, found = None, None
        try:
            if len(like.ranks) > 1:
                store, found = _met(life, like, mine, judge)
            ready()
            maker = replace(like, deadline=deadline, store=store, life=life)
            groups = self.create(self.plan, maker)
        except BaseException:
            life.left()
            raise
        groups.life.again = replace(groups.life.again, first=self.first)
        return groups, found


def _met(life: Life, like: Maker, mine: Any, judge: Judge) -> tuple[Any, Any]:
    """The store, and what the judge found, once all ranks have come; lost ones may come back."""
    store = monitor.join(life, like.timeout_s, waits=True)
    returning.take_over(store, like.ranks, like.rank, "reset")
    wait = {"timeout_s": like.timeout_s, "check": _Awaited(life)}
    facts, both = [monitor.process, mine], partial(_judged, judge)
    key, (processes, found) = meet(store, like.ranks, like.rank, facts, both, verb="reset", **wait)
    by_rank = dict(zip(like.ranks, processes, strict=True))
    if by_rank[like.rank] != monitor.process:
        text = f"reset: the ranks met a process of rank {like.rank} that has ended since"
        raise GroupsError(message(text, fix="call reset again on all ranks"))
    monitor.name(life, key, by_rank)
    return store, found


def _judged(judge: Judge, found: Mapping[int, Any]) -> tuple[list[str], Any]:
    """The process of each rank, and what the judge finds."""
    mine = judge({rank: facts for rank, (_, facts) in found.items()})
    return [process for process, _ in found.values()], mine


class _Awaited:
    """Says once, on the first rank, which ranks are waited for that have ended."""

    def __init__(self, life: Life) -> None:
        self._life = life if life.ranks[0] == life.rank else None

    def __call__(self, idle_s: float) -> None:
        gone = monitor.gone(self._life.ranks) if self._life and idle_s > _SAY_S else []
        if gone:
            LOG.info("reset waits for %s to be started again", name_ranks(gone))
            self._life = None


def _alike(life: Life) -> Life:
    """A new life of the same ranks."""
    kept = {"whole": life.whole, "on_device": life.on_device, "heartbeat_s": life.heartbeat_s}
    return Life(life.ranks, life.rank, **kept, timeout_s=life.timeout_s)

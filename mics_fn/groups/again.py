"""`Again`: makes groups once more, under another key and for another life."""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from mics_fn.groups.communicator import Maker, Traffic
from mics_fn.groups.groups import Groups
from mics_fn.groups.life import Life
from mics_fn.groups.monitor import monitor
from mics_fn.groups.rendezvous import Judge, meet
from mics_fn.schedules import Channel

Again = Callable[[Any, Judge, Callable[[], None]], tuple[Groups, Any]]


def again(maker: Maker, create: Callable[[Maker], Groups]) -> Again:
    """What makes the groups of a maker again; it refers to nothing of the first ones.

    Args:
      maker: of the first ones.
      create: makes groups.
    """
    like = replace(maker, store=None, life=_like(maker.life), traffic=Traffic(), channel=Channel())

    def make(mine: Any, judge: Judge, ready: Callable[[], None]) -> tuple[Groups, Any]:
        """The groups, and what the judge found.

        Args:
          mine, judge: as for `meet`.
          ready: called once all ranks have met.

        Raises:
          CollectiveTimeoutError, DesyncError, GroupsError, PeerFailed: as `make_groups`.
        """
        life, deadline = _like(like.life), time.monotonic() + like.timeout_s
        store, found = None, None
        try:
            if len(like.ranks) > 1:
                store = monitor.join(life, like.timeout_s)
                wait = {"timeout_s": like.timeout_s, "check": partial(life.check, ())}
                key, found = meet(store, like.ranks, like.rank, mine, judge, verb="reset", **wait)
                monitor.name(life, key)
            ready()
            return create(replace(like, deadline=deadline, store=store, life=life)), found
        except BaseException:
            life.left()
            raise

    return make


def _like(life: Life) -> Life:
    """A new life of the same ranks."""
    kept = {"whole": life.whole, "on_device": life.on_device, "heartbeat_s": life.heartbeat_s}
    return Life(life.ranks, life.rank, **kept)

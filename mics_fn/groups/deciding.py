"""`Decider`: what a rank does while it waits in a round of `Rounds`; see [Note: rounds] there."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mics_fn.errors import CollectiveTimeoutError, GroupsError, message, name_ranks
from mics_fn.groups.choosing import Far, chosen
from mics_fn.groups.monitor import monitor
from mics_fn.groups.signs import Process, beat_of
from mics_fn.groups.topology import Plan
from mics_fn.log import LOG
from mics_fn.schedules import NEWS
from mics_fn.store import later, looked_up

_LOOK_S = 0.1  # between two looks of whoever decides, in a job of up to 100 ranks
_SAY_S = 2.0  # after so many seconds of waiting a rank says for whom


@dataclass(eq=False)
class Decider:
    """Looks whether a round can be decided, and decides it, if nobody else does.

    Args:
      store: of the job.
      key: of the round.
      process: the name of this process.
      plan: of the whole job.
      newest: gives the newest round that has begun.
      ranks: global ranks of the whole job, by position.
      rank: this rank.
      members: the ranks that went on in the last round.
      patience_s: for how many seconds those of them that are lost are waited for.
      heartbeat_s: a rank that gives no sign of life for so many seconds is lost.
      last: the key of the last round.
    """

    store: Any
    key: str
    process: str
    plan: Plan
    newest: Callable[[], int]
    ranks: Sequence[int]
    rank: int
    members: Sequence[int]
    patience_s: float
    heartbeat_s: float
    last: str
    _looked_s: float = -1.0
    _said: bool = False
    # The last sign of life of each rank, and when it was first seen.
    _beats: dict[int, tuple[bytes, float]] = field(default_factory=dict)

    def __call__(self, idle_s: float) -> None:
        """Look, a few times per second; called with the seconds waited so far.

        Raises:
          GroupsError: the ranks of the last round have closed their groups or ended.
        """
        pause_s = _LOOK_S * max(1.0, len(self.ranks) / 100)
        if self._looked_s >= 0 and idle_s < self._looked_s + pause_s:
            return
        self._looked_s = idle_s
        if self.store.check([ended_of(self.last, rank) for rank in self.members]):
            text = f"reset: the job has ended without rank {self.rank}"
            lines = [f"{name_ranks(self.members)} took the last steps, and ended without an error"]
            raise GroupsError(message(text, lines, "there is nothing left to do for this rank"))
        if idle_s > _SAY_S and not self._said:
            self._said = True
            self._say()
        if self._is_mine():
            self._decide(idle_s)

    def _is_mine(self) -> bool:
        """Whether this rank decides: it was the first to ask, or those before it are lost."""
        key, mine = f"{self.key}/decides", self._mine
        who = self.store.compare_set(key, "", mine).decode()
        if who == mine:
            return True
        rank, process = json.loads(who)
        if rank != self.rank and not self._has_ended(rank, process):
            return False
        return self.store.compare_set(key, who, mine).decode() == mine

    @property
    def _mine(self) -> str:
        return json.dumps([self.rank, self.process])

    def _decide(self, idle_s: float) -> None:
        """Decide the round, unless somebody has to be waited for."""
        here, members = self._here(), list(self.ranks)
        if len(here) < len(members):
            missing = [rank for rank in self.members if rank not in here]
            if len(self._lost(missing)) < len(missing):
                return
            if missing and idle_s < self.patience_s:
                return
            far = {rank: ticket[1] for rank, ticket in here.items()}
            members = going_on(self.ranks, self.plan, far)
        if not members:
            return
        tickets = [(rank, here[rank]) for rank in members]
        verdict = {"tickets": tickets, "newest": self.newest()}
        self.store.compare_set(f"{self.key}/verdict", "", json.dumps(verdict))
        self.store.add(NEWS, 1)
        if len(members) < len(self.ranks):
            rest = [rank for rank in self.ranks if rank not in members]
            text = "reset: %s go on without %s, for whom they give the samples"
            LOG.info(text, name_ranks(members), name_ranks(rest))

    def _here(self) -> dict[int, list[Any]]:
        """The tickets of this round, without those of processes that have ended since."""
        tickets = tickets_of(self.store, self.key, self.ranks)
        return {r: ticket for r, ticket in tickets.items() if not self._has_ended(r, ticket[0])}

    def _has_ended(self, rank: int, name: str) -> bool:
        """Whether a process that was in this round has ended or gives no sign of life any more.

        What was known of it before does not count: it may have been stopped for a while.
        """
        process, own = Process.named(name), Process.named(self.process)
        near = process.host == own.host and process.host != ""
        return (near and process.is_gone()) or self._is_silent(rank)

    def _lost(self, ranks: Sequence[int]) -> list[int]:
        """Those of these ranks that have ended, or give no sign of life."""
        gone = set(monitor.gone(ranks))
        return [rank for rank in ranks if self._is_silent(rank) or rank in gone]

    def _is_silent(self, rank: int) -> bool:
        """Whether a rank has given no sign of life since this one began to look at it."""
        key, now = beat_of(rank), time.monotonic()
        beat = self.store.get(key) if self.store.check([key]) else b""
        if self._beats.get(rank, (None,))[0] != beat:
            self._beats[rank] = (beat, now)
        return now - self._beats[rank][1] > self.heartbeat_s

    def _lacks(self) -> tuple[list[int], list[int]]:
        """The ranks that wait in this round, and those that do not."""
        here = self._here()
        return list(here), [rank for rank in self.ranks if rank not in here]

    def _say(self) -> None:
        """Log for whom this rank waits: as the first of those that wait, or as a spare."""
        here, lacks = self._lacks()
        if self.rank in here[:1] or self.rank not in self.members:
            LOG.info("reset: rank %d waits for %s", self.rank, name_ranks(lacks))

    def late(self, timeout_s: float) -> CollectiveTimeoutError:
        """The error of a rank that cannot go on, as others did not come in time."""
        _, lacks = self._lacks()
        text = f"reset: rank {self.rank} cannot go on: {name_ranks(lacks)} did not call it"
        p, r = self.plan.partition_size, self.plan.num_replicas
        rule = f"whole partition groups of {p} go on, as many as divide {r}, which hold all parts"
        fix = "call trainer.reset() on all ranks that live, and start lost ones again"
        return CollectiveTimeoutError(message(f"{text} within {timeout_s:g} s", [rule], fix))

    def leave(self) -> None:
        """Take the ticket back, after an error; whoever counted on it hears that it is void."""
        later(self.store, "delete_key", f"{self.key}/here/{self.rank}")
        later(self.store, "compare_set", f"{self.key}/decides", self._mine, "")
        void(self.store, self.key, self.rank)


def tickets_of(store: Any, key: str, ranks: Sequence[int]) -> dict[int, list[Any]]:
    """The tickets of a round, by rank."""
    said = {rank: looked_up(store, f"{key}/here/{rank}") for rank in ranks}
    return {rank: json.loads(text) for rank, text in said.items() if text}


def going_on(ranks: Sequence[int], plan: Plan, far: Mapping[int, Far]) -> list[int]:
    """The ranks that go on, of those that are there; see `chosen`.

    Args:
      ranks: global ranks of the whole job, by position.
      plan: of the whole job.
      far: how far those have come that are there, by rank.
    """
    place = {rank: i for i, rank in enumerate(ranks)}
    found = {place[rank]: (number, calls) for rank, (number, calls) in far.items()}
    return [ranks[i] for i in chosen(found, plan.partition_size, plan.num_replicas)]


def void(store: Any, key: str, rank: int) -> None:
    """Tell the ranks that make groups of this round that one of them will not make its own."""
    text = f"rank {rank} could not make its groups"
    later(store, "compare_set", f"{groups_of(key)}/not made", "", text)


def ended_of(key: str, rank: int) -> str:
    """The key that says that a rank of a round has ended without an error."""
    return f"{key}/ended/{rank}"


def groups_of(key: str) -> str:
    """The key of the groups of a round, below which nothing is once all have left them."""
    return f"{key}/groups"

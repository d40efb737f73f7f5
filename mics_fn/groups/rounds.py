"""`Rounds`: those replicas that are there go on without the lost ones, until these return.

[Note: rounds] Each time that ranks meet after a fault is a round, numbered from 1. A rank that
calls `reset` writes a ticket into the first round that was not decided yet: which process it is,
and how far it has come. One of those that wait, the first to ask for it, decides for all by a
single entry in the store. If all ranks of the job are there, all go on. If a rank is missing that
took part in the last round and still gives signs of life, it is waited for. If those that are
missing are lost, they are waited for `patience_s`, as their launcher may start them again; then
some of the others go on without them: see [Note: who goes on] in `choosing`. Whoever is there and
does not go on waits in the next round. If whoever decides is lost, another one takes its place.

[Note: back at full strength] While some ranks go on alone, the monitor of the first of them looks
for tickets of the next round, whenever there is news in the store. If more replicas could go on
together with these, it asks all ranks to end the same step, see [Note: the last step] in
`stopping`, and they meet those that wait. A step sends nothing for it.

[Note: the newest round] A rank that waited holds an old state, which must not be taken for the
newest one if all that went on without it are lost. So the first rank of a round writes down that
this round has begun, before any step in it can end, and only a rank that took part in the newest
round that has begun holds a state. If none does, the state is lost, as if all ranks were.
"""

import atexit
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from mics_fn.errors import PeerFailed, message
from mics_fn.groups.again import alike
from mics_fn.groups.choosing import Far
from mics_fn.groups.deciding import Decider, ended_of, going_on, groups_of, tickets_of, void
from mics_fn.groups.groups import Groups
from mics_fn.groups.life import Life, quiet
from mics_fn.groups.monitor import monitor
from mics_fn.groups.rendezvous import Judge
from mics_fn.groups.stopping import StopRequest
from mics_fn.groups.topology import Plan, Topology
from mics_fn.schedules import NEWS
from mics_fn.store import later, poll

_numbers = Counter[str]()  # of `Rounds`, by the groups that they began with


class Rounds:
    """Groups of those replicas that are there, again and again; see [Note: rounds].

    Args:
      home: groups of all ranks of the job. All of them make as many `Rounds` of them.
      patience_s: for how many seconds lost ranks are waited for.
    """

    def __init__(self, home: Groups, patience_s: float) -> None:
        self._again, self._patience_s = home.life.again, patience_s
        self.ranks, self._rank = home.ranks, home.rank
        self._plan = home.plan
        first = home.life.again.first
        _numbers[first] += 1
        # Not below the key of any groups: what is there is deleted once all ranks have left them.
        self._key = f"mics_fn/rounds/{first}/{_numbers[first]}"
        self.number = 0  # of the last round that is known to be decided
        self.newest = 0  # the newest round that had begun when that one was decided
        self._members = home.ranks  # of the last round
        self._stop: StopRequest | None = None
        self._from = 0  # the number of calls before the first step of this round
        self._asked = False
        # Whether to look for ranks that wait although there is no news of them, as at first.
        self._look = True
        self._at_exit: Callable[[], None] = quiet  # tells those that wait that all is done

    def __call__(
        self, mine: Any, judge: Judge, ready: Callable[[], None], *, far: Far
    ) -> tuple[Groups, Any]:
        """Groups of those that go on, once this rank is one of them, and what the judge found.

        Args:
          mine: the facts of this rank, in a form that JSON keeps.
          judge: gets those of the ranks that go on, by rank, on each of them.
          ready: called once a round was decided.
          far: the newest round that this rank took part in, and how many calls it has behind it.

        Raises:
          CollectiveTimeoutError: ranks did not come within `timeout_s`, without which it cannot go
            on.
          GroupsError: the others have closed their groups, or a rank cannot connect.
          PeerFailed: the store is lost.
        """
        like, store, key = self._again.like, None, ""
        life = alike(like.life)
        try:
            store = monitor.join(life, like.timeout_s, waits=True)
            tickets = self._met(store, [monitor.process, far, mine], ready)
            life.ranks = members = tuple(tickets)
            key = self._key_of(self.number)
            monitor.name(
                life, groups_of(key), {rank: ticket[0] for rank, ticket in tickets.items()}
            )
            found = judge({rank: ticket[2] for rank, ticket in tickets.items()})
            limit = {"deadline": time.monotonic() + like.timeout_s, "store": store, "life": life}
            maker = replace(like, ranks=members, **limit)
            groups = self._again.create(self._plan_of(members), maker)
        except BaseException:
            if key:
                void(store, key, self._rank)
            life.left()
            raise
        return groups, found

    def begun(self, home: Groups, calls: int) -> None:
        """Called once the ranks of a round are at one step: see [Note: the newest round].

        Args:
          home: their groups.
          calls: how many calls they have behind them.
        """
        self._asked, self._stop, self._from, self._look = False, None, calls, True
        atexit.unregister(self._at_exit)
        life, key = home.life, self._key_of(self.number)
        store: Any = life.job.store
        if store is None:
            return
        first = life.rank == life.ranks[0]
        if first:
            store.set(f"{key}/begun", "")
        if len(life.ranks) < len(self.ranks):
            say = partial(
                _say_that_it_ended, life, partial(later, store, "set", ended_of(key, life.rank))
            )
            life.endings.append(say)
            self._at_exit = atexit.register(say)
            if first:
                life.listeners.append(self._looks_for_more)
            self._stop = StopRequest(home, signals=()).__enter__()

    def due(self, calls: int) -> bool:
        """Whether others wait to go on with these; on all ranks behind the same call.

        Args:
          calls: how many calls this rank has behind it.

        Communication: none, until some rank waits; then as `StopRequest.due`.
        """
        self._asked = self._asked or (self._stop is not None and self._stop.due(calls - self._from))
        return self._asked

    def check(self) -> None:
        """Raise PeerFailed if others wait to go on with these."""
        if self._asked:
            text = "Trainer.step: ranks that were lost have come back, and wait for the others"
            fix = "call trainer.reset() on all ranks; go on at state.step"
            raise PeerFailed(message(text, fix=fix), None, "returned")

    # How a round is decided.

    def _key_of(self, number: int) -> str:
        return f"{self._key}/{number}"

    def _plan_of(self, members: Sequence[int]) -> Plan:
        """The groups of those that go on: whole partition groups, next to each other."""
        plan, p = self._plan, self._plan.partition_size
        if len(members) == len(self.ranks):
            return plan
        wired = Topology((len(members) // p, *plan.level_sizes), ("replica", *plan.level_names))
        return Plan(wired, p)

    def _met(
        self, store: Any, ticket: list[Any], ready: Callable[[], None]
    ) -> dict[int, list[Any]]:
        """The tickets of those that go on, once this rank is one of them; goes through rounds."""
        deadline = time.monotonic() + self._again.like.timeout_s
        while True:
            while self._take(store):  # rounds that were decided without this rank
                pass
            key = self._key_of(self.number + 1)
            decider = self._decider(store, key, ticket)
            try:
                store.set(f"{key}/here/{self._rank}", json.dumps(ticket))
                store.add(NEWS, 1)
                decided = partial(store.check, [f"{key}/verdict"])
                if not poll(decided, len(self.ranks), deadline, decider):
                    raise decider.late(self._again.like.timeout_s)
            except BaseException:
                decider.leave()
                raise
            ready()
            ready = quiet
            tickets = self._take(store)
            if tickets.get(self._rank, [""])[0] == ticket[0]:
                return tickets

    def _take(self, store: Any) -> dict[int, list[Any]]:
        """The tickets of the next round, if it was decided, which is then the last one."""
        key = f"{self._key_of(self.number + 1)}/verdict"
        if not store.check([key]):
            return {}
        verdict = json.loads(store.get(key))
        self.number, self.newest = self.number + 1, verdict["newest"]
        tickets: dict[int, list[Any]] = dict(verdict["tickets"])
        self._members = tuple(tickets)
        return tickets

    def _decider(self, store: Any, key: str, ticket: list[Any]) -> Decider:
        """What this rank does while it waits in a round."""
        life = self._again.like.life
        last = self._key_of(self.number)
        newest = partial(self._newest, store)
        waits = {"patience_s": self._patience_s, "heartbeat_s": life.heartbeat_s, "last": last}
        who = {"ranks": self.ranks, "rank": self._rank, "members": self._members}
        return Decider(store, key, ticket[0], self._plan, newest=newest, **who, **waits)

    def _newest(self, store: Any) -> int:
        """The newest round that has begun; 0 is what was before the first one."""
        numbers = range(self.number, 0, -1)
        begun = (number for number in numbers if store.check([f"{self._key_of(number)}/begun"]))
        return next(begun, 0)

    def _looks_for_more(self, store: Any, news: bool) -> None:
        """Called by the monitor: ask for the end of a step if more replicas can go on."""
        if self._asked or self._stop is None or not (news or self._look):
            return
        self._look = False
        others = [rank for rank in self.ranks if rank not in self._members]
        waiting = tickets_of(store, self._key_of(self.number + 1), others)
        far: dict[int, Far] = dict.fromkeys(self._members, (self.number, 0))
        far |= dict.fromkeys(waiting, (-1, 0))
        if len(going_on(self.ranks, self._plan, far)) > len(self._members):
            self._stop.ask()


def _say_that_it_ended(life: Life, say: Callable[[str], None]) -> None:
    """Say that this rank ended in order, so that nobody waits for it; nothing after an error."""
    if life.failed is None and getattr(sys, "last_value", None) is None:
        say("")

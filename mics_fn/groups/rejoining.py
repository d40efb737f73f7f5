"""`reset`: new groups in the place of those that have failed, among ranks of the same numbers.

[Note: what is found again] Which ranks there are, and how they are wired, does not change by a
failure, so `reset` detects nothing. Ranks meet once, under a key that is new. There they compare
which groups they reset, and what they have learned about the order of use: a rank that was behind
may have learned less, and then all forget it. No name is used twice, so a rank that is already on
the new groups never meets one that is still on the old ones. A rank that was lost meets the others
here, too, once it was started again: see [Note: coming back] in `rendezvous`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from mics_fn import tree
from mics_fn.errors import GroupsError, PeerFailed, disagreement, first_line
from mics_fn.groups.communicator import Comm
from mics_fn.groups.group_state import GroupState, check_fork
from mics_fn.groups.groups import Groups, Hierarchy, Pools
from mics_fn.groups.monitor import monitor
from mics_fn.groups.rendezvous import Judge
from mics_fn.schedules import Channel
from mics_fn.spans import LOG

_ATTEMPTS = 5  # to make groups, as ranks may be lost while others make them


def reset(groups: Any) -> Any:
    """New groups among the same ranks, after an error has ended the old ones. All ranks call it.

    Ranks whose processes are gone are waited for: each may be started again, with the same
    environment and script, and call it, too. Until then its groups move no data.

    Shards, states, policies, guards and samplers remain valid, and what holds the old groups, such
    as a part of an optimizer, goes on with the new ones. `optim.same_step` compares the step
    of a state between ranks, and `Trainer.reset` does all that a `Trainer` needs.

    Args:
      groups: `Groups`, with or without a placement, or a pytree of them. They may have failed, or
        be closed. Where they are given to a verb afterwards, it uses the new ones.

    Returns:
      New groups in the same form. Use them in a `with` block, or close them.

    Communication: a few small messages through the store of torch.distributed, and the connections
      of the new groups. Nothing is detected again.

    Memory: that of the old groups is freed, once all ranks have called this.

    Raises:
      GroupsError: `groups` are not `Groups`, or a rank cannot connect.
      DesyncError: ranks reset other groups.
      CollectiveError: some rank did not call it within `timeout_s` of the groups.
      PeerFailed: the store of the job is lost; or ranks are lost again and again meanwhile.

    Example:
      >>> groups = make_groups(1)
      >>> groups = reset(groups)
      >>> groups
      Groups(n=1 p=1 levels=none, rank 0, cpu)
    """
    old = tree.flatten(groups)[0]
    wrong = [type(home).__name__ for home in old if not isinstance(home, Groups)]
    if wrong or not old:
        text = f"reset: got {wrong[0] if wrong else 'no groups'}, expected Groups"
        raise GroupsError(text, fix="pass what make_groups or place gave")
    return tree.map_leaves(replaced(old).__getitem__, groups)


def replaced(homes: Iterable[Groups]) -> Mapping[Groups, Groups]:
    """What takes the place of each of these groups; see `reset`.

    Those that share process groups, such as placements of the same groups, share the new ones.
    """
    homes = list(dict.fromkeys(homes))
    whose = {home.life: home for home in homes}
    for life, home in whose.items():
        life.follows = _Rebuilder(home, len(whose) == 1).like
    return {home: home.life.follows(home) for home in homes}


def current(home: Any) -> Any:
    """What has taken the place of groups in a `reset`, as often as there was one; else the same."""
    while isinstance(home, Groups) and home.life.follows is not None:
        home = home.life.follows(home)
    return home


@dataclass(eq=False)
class _Rebuilder:
    """New groups for those of one life, and their parts by name.

    Args:
      home: some groups of that life.
      alone: whether no others are reset at the same time. If there are, their ranks may be others,
        so nobody knows whether all ranks have learned the same.
    """

    home: Groups
    alone: bool

    def __post_init__(self) -> None:
        home, channel = self.home, self.home.hierarchy.channel
        check_fork("reset")
        self.base = _rebuilt(home.life, channel, self.alone)
        routes = self.base.hierarchy.route, self.base.flat.route
        comms = [comm for route in routes for comm in route.comms]
        comms += [self.base.partition, self.base.replicas]
        self._comms = {comm.name: comm for comm in comms}
        self._groups: dict[Groups, Groups] = {}
        self._hierarchies: dict[Hierarchy, Hierarchy] = {}
        # Pools and digests, which placements share, by those before.
        self._fresh: dict[int, Any] = {}

    def like(self, old: Groups) -> Groups:
        """The new groups in the placement of old ones."""
        if old not in self._groups:
            self._groups[old] = self._like(old)
        return self._groups[old]

    def _like(self, old: Groups) -> Groups:
        base, replicas = self.base, self._comm(old.replicas)
        if old.apart:  # see `Groups.replica`
            replicas = Comm.of_one(old.replicas.name, old.rank, base.life)
        return replace(
            old,
            hierarchy=self._hierarchy(old.hierarchy),
            flat=self._hierarchy(old.flat),
            partition=self._comm(old.partition),
            replicas=replicas,
            life=base.life,
            agreed=self._fresh.setdefault(id(old.agreed), set()),
        )

    def _hierarchy(self, old: Hierarchy) -> Hierarchy:
        if old not in self._hierarchies:
            levels = tuple(
                replace(level, gather=self._comm(level.gather), reduce=self._comm(level.reduce))
                for level in old.route.levels
            )
            self._hierarchies[old] = replace(
                old,
                route=replace(old.route, levels=levels),
                partition=self._comm(old.partition),
                channel=self.base.hierarchy.channel,
                pools=self._fresh.setdefault(id(old.pools), Pools()),
                agreed=self._fresh.setdefault(id(old.agreed), set()),
            )
        return self._hierarchies[old]

    def _comm(self, old: Comm) -> Comm:
        new = self._comms[old.name]
        kept = {"traffic": old.traffic, "fixed_order": old.fixed_order}
        second = None if new.second is None else replace(new.second, **kept)
        return replace(new, **kept, second=second)


def _rebuilt(life: GroupState, channel: Channel, alone: bool) -> Groups:
    """Groups like those of a life, in the same place but without placements."""
    monitor.check_store(life)
    life.fail(GroupsError("reset was called"))
    if life.told is not None:
        life.settle(life.told)  # others that wait for this rank need not ask whether it goes on
    if channel.job.key == life.again.first:  # which one that comes back looks for
        channel.job.kept = f"{channel.job.key}/verdict"
    life.depart("called reset")
    # One that comes back knows the first groups alone, and these may have been reset since.
    key = "" if life.returning else channel.job.key
    base, equal = _met([key, channel.seen.digest()], life, partial(_judged, alone))
    channel.seen.carry_over(forget=equal is False)
    if equal is not False:
        now = base.hierarchy.channel
        now.fixed, now.seen = channel.fixed, channel.seen
    return base


def _met(mine: Any, life: GroupState, judge: Judge) -> tuple[Groups, Any]:
    """New groups, and what the judge found; tries again if a rank is lost meanwhile."""
    for attempt in reversed(range(_ATTEMPTS)):
        try:
            return life.again(mine, judge, life.retire)
        except (GroupsError, PeerFailed) as error:
            if not attempt:
                raise
            monitor.check_store(life)
            LOG.info("reset: tries again after %s", first_line(error))
    raise GroupsError("reset: no attempt was left")


def _judged(alone: bool, found: Mapping[int, Any]) -> bool:
    """Whether ranks have learned the same; raises DesyncError if they reset other groups."""
    keys = {rank: str(mine[0]) for rank, mine in found.items() if mine[0]}
    if len(set(keys.values())) > 1:
        fix = "reset the same groups on all ranks, in the same order"
        raise disagreement("reset: ranks reset different groups", keys, fix)
    return alone and len({mine[1] for mine in found.values()}) < 2

"""`reset`: new groups in the place of those that have failed, among ranks of the same numbers.

[Note: what is found again] Which ranks there are, and how they are wired, does not change by a
failure, so `reset` detects nothing. Ranks meet once, under a key that is new. There they compare
which groups they reset. What they have learned about the order of use is forgotten: a rank that was
behind may have learned less, and to learn it takes one run. No name is used twice, so a rank that
is already on the new groups never meets one that is still on the old ones. A rank that was lost
meets the others here, too, once it was started again: see [Note: coming back] in `rendezvous`.
"""

import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from mics_fn import tree
from mics_fn.errors import GroupsError, PeerFailed, disagreement, first_line, name_ranks
from mics_fn.groups.group_state import GroupState, check_fork
from mics_fn.groups.groups import Groups
from mics_fn.groups.monitor import monitor
from mics_fn.groups.rendezvous import meet, rejoining
from mics_fn.spans import LOG

_SAY_S = 2.0  # after so many seconds of waiting the first rank says for whom
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
    whose = {home.state: home for home in homes}
    check_fork("reset")
    for state, home in whose.items():
        base = _rebuilt(state, home.hierarchy.channel)
        state.follows = partial(_like, base)
    return {home: home.state.follows(home) for home in homes}


def _like(base: Groups, old: Groups) -> Groups:
    """New groups in the placement of old ones."""
    return base.derived(old.derive)


def current(home: Any) -> Any:
    """What has taken the place of groups in a `reset`, as often as there was one; else the same."""
    while isinstance(home, Groups) and home.state.follows is not None:
        home = home.state.follows(home)
    return home


def _rebuilt(state: GroupState, channel: Any) -> Groups:
    """Groups like those of a life, in the same place but without placements."""
    monitor.check_store(state)
    state.fail(GroupsError("reset was called"))
    if state.announced is not None:
        state.make_final(state.announced)  # others need not ask whether this rank goes on
    if channel.key == state.recipe.first:  # which one that comes back looks for
        channel.kept = f"{channel.key}/verdict"
    state.job.depart("called reset")
    for learned in channel.learned:
        learned.forget()
    # One that comes back knows the first groups alone, and these may have been reset since.
    key = "" if state.rejoining else channel.key
    for attempt in reversed(range(_ATTEMPTS)):
        try:
            return _remade(state, key)
        except (GroupsError, PeerFailed) as error:
            if not attempt:
                raise
            monitor.check_store(state)
            LOG.info("reset: tries again after %s", first_line(error))
    raise GroupsError("reset: no attempt was left")


def _remade(old: GroupState, mine: str) -> Groups:
    """New groups, once all ranks have met, who compare the key of the old ones."""
    recipe, like = old.recipe, old.recipe.maker
    state, deadline = like.state.fresh(), time.monotonic() + like.timeout_s
    store = None
    try:
        if len(like.ranks) > 1:
            store = monitor.join(state, like.timeout_s, waits=True)
            rejoining.take_over(store, like.ranks, like.rank, "reset")
            key, processes = meet(
                store,
                like.ranks,
                like.rank,
                [monitor.process, mine],
                _judged,
                verb="reset",
                timeout_s=like.timeout_s,
                check=_Awaited(state),
            )
            by_rank = dict(zip(like.ranks, processes, strict=True))
            if by_rank[like.rank] != monitor.process:
                text = f"reset: the ranks met a process of rank {like.rank} that has ended since"
                raise GroupsError(text, fix="call reset again on all ranks")
            monitor.name(state, key, by_rank)
        old.retire()
        groups = recipe.create(replace(like, deadline=deadline, store=store, state=state))
    except BaseException:
        state.on_close()
        raise
    groups.state.recipe = replace(groups.state.recipe, first=recipe.first)
    return groups


class _Awaited:
    """Says once, on the first rank, which ranks are waited for that have ended."""

    def __init__(self, state: GroupState) -> None:
        self._state = state if state.ranks[0] == state.rank else None

    def __call__(self, idle_s: float) -> None:
        dead = monitor.dead(self._state.ranks) if self._state and idle_s > _SAY_S else []
        if dead:
            LOG.info("reset waits for %s to be started again", name_ranks(dead))
            self._state = None


def _judged(found: Mapping[int, Any]) -> list[str]:
    """The process of each rank.

    Raises:
      DesyncError: they reset other groups.
    """
    keys = {rank: str(key) for rank, (_, key) in found.items() if key}
    if len(set(keys.values())) > 1:
        fix = "reset the same groups on all ranks, in the same order"
        raise disagreement("reset: ranks reset different groups", keys, fix)
    return [process for process, _ in found.values()]

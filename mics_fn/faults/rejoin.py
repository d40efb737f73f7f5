"""`reset`: new groups in the place of those that have failed, among ranks of the same numbers.

[Note: what is found again] Which ranks there are, and how they are wired, does not change by a
failure, so `reset` detects nothing. Ranks meet once, under a key that is new. There they compare
which groups they reset. What they have learned about the order of use is forgotten: a rank that was
behind may have learned less, and to learn it takes one run. No name is used twice, so a rank that
is already on the new groups never meets one that is still on the old ones. A rank that was lost
meets the others here, too, once it was started again: see [Note: rejoining].

[Note: rejoining] A rank that was killed is started again, with the same environment and the same
script. The store of the job, which outlives it, says which process had its number before, and what
the ranks have agreed on since. So `init_distributed` and `make_groups` ask nobody: they take from
the store what the first process had agreed on with the others, and give groups that are connected
to nobody. On these a comparison finds that all agree, as they did when the first process made it,
and whatever would move data raises. `reset` is where this process and the others meet: there all
get new groups, and the state that this rank lacks comes from a replica. The default group of torch
is not made again, as groups are made from its store alone, and never move data over it.

A launcher may also have ended all ranks and started all of them again, with the same store. Then
nobody is there to come back to, and they meet as at any start. So a process looks whether some
other rank still gives signs of life, for a few seconds at most; torchrun, which says so in the
environment, always starts all.

In the store it registers before anything else, so that a process of its rank which was only frozen
finds out at its first word that it was replaced, and says no other. What the lost process had
written for a meeting that came to no end is taken back; see [Note: the epoch of membership] in
`groups.startup`.
"""

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from mics_fn import _torch, tree
from mics_fn.errors import GroupsError, PeerFailed, disagreement, first_line
from mics_fn.faults.heartbeat import (
    BoundedStore,
    Process,
    StoreThread,
    heartbeat_of,
    least_s,
    register,
)
from mics_fn.faults.monitor import listen, monitor
from mics_fn.groups import Groups, GroupState, Meeting, check_fork, hooks, startup
from mics_fn.store import Store, poll, value_of
from mics_fn.threads import bounded

_SIGN_S = 3.0  # in which a rank that lives writes signs of life; longer where these are rare
_LOOKED_AT = 64  # how many ranks are looked at, at least
_ATTEMPTS = 5  # to make groups, as ranks may be lost while others make them


# A process that takes the place of a rank that was lost, while the other ranks still hold theirs:
# what the start of ranks, and of groups, asks; see `groups.Hooks`.


@contextmanager
def entering(
    store: Any, rank: int, world_size: int, timeout_s: float, lost: Callable[..., Exception]
) -> Iterator[tuple[Store, int | None]]:
    """A block in which ranks meet before any groups exist.

    Yields:
      A store whose calls are bounded, and the number of the start that this process comes back
      into, if it takes a lost rank's place.
    """

    def others_live(start: int) -> bool:
        other = StoreThread(_torch.default_part(startup.part_of_start(store, start)))
        try:
            return some_rank_lives(BoundedStore(other, timeout_s, lost), rank, world_size)
        finally:
            other.end()

    store_thread = StoreThread(store)
    served = BoundedStore(store_thread, timeout_s, lost)
    try:
        start = joined(served, rank, world_size, others_live)
        hooks.agreed_before = partial(_agreed_before, None if start is None else Counter())
        yield served, start
    finally:
        store_thread.end()


def joined(
    store: Any, rank: int, world_size: int, others_live: Callable[[int], bool]
) -> int | None:
    """Write down which process this rank is now.

    Args:
      store: of the job.
      rank: this rank.
      world_size: number of ranks.
      others_live: whether some other rank gives signs of life, after the n-th start of the job.

    Returns:
      The number of the start that it comes back into; None if it is to start with the others.
    """
    store.since, before = register(store, f"mics_fn/process/{rank}", Process.own().name)
    if not before or "TORCHELASTIC_RUN_ID" in os.environ:
        return None
    ranks, verb = range(world_size), "init_distributed"
    start = startup.last_of(store, ranks, verb)
    begun = past(store, ranks, verb, start) is not None
    return start if begun and others_live(start) else None


def past(store: Store, ranks: Sequence[int], verb: str, call: int) -> Meeting | None:
    """What the n-th meeting of these ranks agreed on; None if there was none, or if it failed."""
    key = f"{startup.prefix_of(ranks, verb)}/{call}"
    verdict = json.loads(value_of(store, f"{key}/verdict") or '{"error": ""}')
    return None if "error" in verdict else Meeting(key, verdict["found"])


def some_rank_lives(store: Any, rank: int, world_size: int) -> bool:
    """Return whether another rank writes heartbeats; some are polled for a few seconds."""
    others = range(0, world_size, max(1, world_size // _LOOKED_AT))
    keys = [heartbeat_of(other) for other in others if other != rank]

    def heartbeats() -> list[bytes]:
        return [store.get(key) for key in keys if store.check([key])]

    first, limit_s = heartbeats(), max(_SIGN_S, least_s(world_size))
    return poll(lambda: heartbeats() != first, 1, time.monotonic() + limit_s)


def _agreed_before(
    calls: Counter[Sequence[int]] | None, ranks: Sequence[int], rank: int, timeout_s: float
) -> Meeting | None:
    """The earlier agreement of these ranks, in a process that replaces a lost one."""
    if calls is None or len(ranks) == 1:
        return None
    listen()
    calls[ranks] += 1
    store = _torch.default_store()

    def ask() -> Meeting | None:
        register(store, heartbeat_of(rank), Process.own().name)
        return past(store, ranks, "make_groups", calls[ranks])

    try:
        return bounded(ask, time.monotonic() + timeout_s)
    except (RuntimeError, TimeoutError) as error:
        text = f"make_groups: rank {rank} cannot reach the store that the other ranks use"
        lines = [first_line(error, f"no answer within {timeout_s:g} s")]
        raise GroupsError(text, lines, "start the job again") from error


# New groups.


def reset(groups: Any) -> Any:
    """New groups among the same ranks, after an error has ended the old ones. All ranks call it.

    Ranks whose processes are gone are waited for: each may be started again, with the same
    environment and script, and call it, too. Until then its groups move no data.

    Shards, states, policies, guards and samplers remain valid, and what holds the old groups, such
    as a part of an optimizer, goes on with the new ones. `same_step` compares the step
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


def _rebuilt(state: GroupState, channel: Any) -> Groups:
    """Groups like those of a life, in the same place but without placements."""
    monitor.check_store(state)
    state.fail(GroupsError("reset was called"))
    state.watch.stands()  # others need not ask whether this rank goes on
    if channel.key == state.first:  # which one that comes back looks for
        channel.kept = f"{channel.key}/verdict"
    state.channel.depart("called reset")
    for learned in channel.learned:
        learned.forget()
    # One that comes back knows the first groups alone, and these may have been reset since.
    key = "" if state.rejoining else channel.key
    for _ in range(_ATTEMPTS - 1):
        try:
            return _remade(state, key)
        except (GroupsError, PeerFailed):
            monitor.check_store(state)
    return _remade(state, key)


def _remade(old: GroupState, mine: str) -> Groups:
    """New groups, once all ranks have met, who compare the key of the old ones."""
    state, deadline = old.fresh(), time.monotonic() + old.timeout_s
    store = None
    try:
        if len(old.ranks) > 1:
            store = monitor.join(state, old.timeout_s, waits=True)
            wait: Any = {"verb": "reset", "timeout_s": old.timeout_s, "deadline": deadline}
            meeting = startup.meet(store, old.ranks, old.rank, mine, _judged, **wait)
            state.watch.begin(meeting)
        old.end("called reset", waits=False)
        return old.recipe(state, store, deadline)
    except BaseException:
        state.watch.close()
        raise


def _judged(found: Mapping[int, str]) -> None:
    """Compare which groups the ranks reset.

    Raises:
      DesyncError: they reset other groups.
    """
    keys = {rank: key for rank, key in found.items() if key}
    if len(set(keys.values())) > 1:
        fix = "reset the same groups on all ranks, in the same order"
        raise disagreement("reset: ranks reset different groups", keys, fix)

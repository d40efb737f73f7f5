"""A `Trainer` on new groups: what it keeps, and how ranks get to one step again.

[Note: one step again] A step that some rank has completed was sent by all of them, so a rank may be
behind by what it had not written yet: parameters and optimizer state, or, if the step was refused,
only the scale and the watch of the guard. Ranks compare both numbers, that of steps and that of
steps with those that were refused. One that is behind takes what it lacks from a rank that is not.
Replicas that are apart have states of their own, so each of them must be at one step by itself.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mics_fn import tree
from mics_fn.collectives import collect_bytes
from mics_fn.errors import TornStepError, message, rank_lines
from mics_fn.groups import Groups, replaced
from mics_fn.optim import Guard, same_step
from mics_fn.shards import is_leaf
from mics_fn.tree import Tree

_SCALE = ("value", "credits", "good_steps", "overflows")  # what changes in a `LossScale`


def on_new_groups(groups: Any, params: Tree, home: Groups) -> tuple[Any, Groups]:
    """The groups of a `Trainer` made anew, in the same form; and the first of them.

    Args:
      groups: as for `shard`.
      params: the tree of shards.
      home: the first of these groups.

    Communication: that of `reset`.
    """
    form = {"what": "groups", "is_leaf": is_leaf, "is_value": lambda v: isinstance(v, Groups)}
    found = tree.spread(groups, params, **form)
    new = replaced([home, *found])
    if callable(groups):
        paths = tree.paths(params, is_leaf=is_leaf)
        by_path = {path: new[each] for path, each in zip(paths, found, strict=True)}
        return by_path.__getitem__, new[home]
    return tree.map_leaves(new.__getitem__, groups), new[home]


def at_one_step(trainer: Any, *, heal: bool) -> tuple[Any, Any, Guard]:
    """State, sync state and guard of a `Trainer`, once all ranks are at one step.

    Args:
      trainer: it, on new groups.
      heal: whether a rank that is behind takes what it lacks from a replica.

    Raises:
      TornStepError: see `Trainer.reset`.
    """
    state, sync_state, guard = trainer.state, trainer.sync_state, trainer.guard
    home, words = trainer._home, _words(state, sync_state, guard)
    found = {rank: json.loads(text) for rank, text in collect_bytes(home, words).items()}
    taken = {rank: (said[0], said[1]) for rank, said in found.items()}
    if trainer.replica_sync.apart:
        _check_apart(taken, home)
        return state, sync_state, guard
    state = same_step(state, trainer.groups, heal=heal)
    if len({calls for calls, _ in taken.values()}) > 1:
        if not heal:
            raise _torn(taken)
        last = found[max(taken, key=lambda rank: taken[rank])]
        if sync_state.step < last[0]:
            sync_state, guard = replace(sync_state, step=last[0]), _told(guard, *last[2:])
    return state, sync_state, guard


def _check_apart(taken: Mapping[int, tuple[int, int]], home: Groups) -> None:
    """Raise TornStepError unless all ranks merge at one step, and each replica is at one step."""
    p, ranks = home.partition_size, home.stacked_ranks
    for start in range(0, len(ranks), p):
        if len({taken[rank] for rank in ranks[start : start + p]}) > 1:
            raise _torn(taken)
    if len({calls for calls, _ in taken.values()}) > 1:
        raise _torn(taken)


def _words(state: Any, sync_state: Any, guard: Guard) -> bytes:
    """Both numbers of steps and the guard's, as JSON, which keeps every bit of them."""
    scale = [getattr(guard.scale, name) for name in _SCALE]
    norms = guard.spike and guard.spike.norms
    return json.dumps([sync_state.step, state.step, scale, norms]).encode()


def _told(guard: Guard, scale: list[Any], norms: list[float] | None) -> Guard:
    """The guard with what another rank's has found."""
    spike = guard.spike and replace(guard.spike, norms=tuple(norms or ()))
    changed = replace(guard.scale, **dict(zip(_SCALE, scale, strict=True)))
    return replace(guard, scale=changed, spike=spike)


def _torn(taken: Mapping[int, tuple[int, int]]) -> TornStepError:
    texts = {rank: f"step {step}, in {calls} calls" for rank, (calls, step) in taken.items()}
    fix = "pass heal=True, or go back to a state that all ranks have saved"
    return TornStepError(
        message("Trainer.reset: ranks are at different steps", rank_lines(texts), fix)
    )

"""A `Trainer` on new groups: what it keeps, and how ranks get to one step again.

[Note: one step again] A step that some rank has completed was sent by all of them, so a rank may be
behind by what it had not written yet: parameters and optimizer state, or, if the step was refused,
only the scale and the watch of the guard. Ranks compare both numbers, that of steps and that of
steps with those that were refused. One that is behind takes what it lacks from a rank that is not.
Replicas that are apart have states of their own. If one of them is behind, for it the steps that
the others have taken count as refused; and a merge that has failed is made again. If a rank has no
state, or the ranks of a replica are at different steps, nobody holds what is missing.
Ranks that come back have nothing; see [Note: replicas are checkpoints] in `rejoining`.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mics_fn import checks, tree
from mics_fn.collectives import collect_bytes
from mics_fn.errors import CollectiveError, LostStateError, PeerFailed, name_ranks
from mics_fn.groups import Groups, replaced
from mics_fn.log import LOG
from mics_fn.optim import same_step
from mics_fn.shards import is_leaf
from mics_fn.train.guarding import with_numbers
from mics_fn.train.passes import Epochs
from mics_fn.train.rejoining import (
    Said,
    refuse_apart,
    refuse_own_state,
    rejoin,
    told_by_all,
    torn,
)
from mics_fn.train.syncing import has_own_state
from mics_fn.train.writing import merge
from mics_fn.tree import Tree

_ATTEMPTS = 5  # as a rank may be lost while another one is healed


def renew(trainer: Any, *, heal: bool) -> None:
    """Put a `Trainer` on new groups, at one step; tries again if a rank is lost meanwhile.

    Where no replica holds what a rank lacks, all go back to the newest step that was saved.

    Args:
      trainer: the `Trainer`.
      heal: whether a rank that is behind takes what it lacks from a replica.

    Raises:
      LostStateError, TornStepError: see `Trainer.reset`.
    """
    checks.flag("Trainer.reset", "heal", heal)
    member, params = trainer.member, trainer.state.params
    for attempt in reversed(range(_ATTEMPTS)):
        trainer.groups, member.home = on_new_groups(trainer.groups, params, member.home)
        member.compared = False
        try:
            at_one_step(trainer, heal=heal)
            _go_on_in_data(member.home, trainer.epochs)
        except (CollectiveError, PeerFailed):
            if not attempt:
                raise
        except LostStateError:  # whoever goes on puts a saved state here; the next step compares it
            member.lost, member.ready, member.merges = False, None, False
            if trainer.checkpoint.begin(trainer):
                return
            raise
        else:
            member.compared = True
            trainer.checkpoint.reset(trainer)
            return


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


def at_one_step(trainer: Any, *, heal: bool) -> None:
    """Bring state, sync state and guard of a `Trainer` to one step on all ranks.

    Args:
      trainer: the `Trainer`, on new groups.
      heal: whether a rank that is behind takes what it lacks from a replica.

    Raises:
      TornStepError: see `Trainer.reset`.
    """
    home, found = trainer.member.home, told_by_all(trainer)
    if trainer.replica_sync.apart:
        refuse_apart(home, found)
        _merged(trainer, found, heal=heal)
        return
    if has_own_state(trainer.replica_sync, trainer.sync_state):
        refuse_own_state(home, found, trainer.replica_sync.name)
    if any(said.lost or said.ready for said in found.values()):
        rejoin(trainer, found, heal=heal)
        return
    trainer.state = same_step(trainer.state, trainer.groups, heal=heal)
    if len({said.calls for said in found.values()}) > 1:
        if not heal:
            raise torn(found)
        last = max(found.values(), key=lambda said: said.at)
        if trainer.sync_state.step < last.calls:
            trainer.epochs.took()  # the batch of the step that failed here is used, after all
            trainer.sync_state = replace(trainer.sync_state, step=last.calls)
            trainer.guard = with_numbers(trainer.guard, last.scale, last.norms)


def _go_on_in_data(home: Groups, epochs: Epochs) -> None:
    """Let all ranks go on in the pass that an error has ended; see [Note: going on in a pass].

    Communication: two small all-gathers over each of the two groups.
    """
    said = collect_bytes(home, json.dumps(epochs.place).encode()).values()
    places = [place for place in map(json.loads, said) if place is not None]
    if places:
        epochs.repeat(max(places, key=lambda place: place[:2]), home.device)


def _merged(trainer: Any, found: Mapping[int, Said], *, heal: bool) -> None:
    """Bring replicas that are apart to one call; see [Note: one step again].

    Communication: that of a merge, if one is left to do.
    """
    member, last = trainer.member, max(found.values(), key=lambda said: said.at)
    mine = found[member.home.rank]
    behind = [rank for rank in found if found[rank].calls < last.calls]
    if behind and not heal:
        raise torn(found)
    if mine.calls < last.calls:
        trainer.epochs.took()
        trainer.sync_state = replace(trainer.sync_state, step=last.calls)
        trainer.guard = with_numbers(trainer.guard, last.scale, last.norms)
        trainer.state = replace(trainer.state, step=last.step)
    if behind and member.home.position == 0:
        text = "reset: replicas are apart, and %s did not take what steps the others have taken"
        LOG.warning(text, name_ranks(behind))
    member.merges = last.merges
    merge(trainer)

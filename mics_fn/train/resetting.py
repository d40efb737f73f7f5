"""A `Trainer` on new groups: what it keeps, and how ranks get to one step again.

[Note: one step again] A step that some rank has completed was sent by all of them, so a rank may be
behind by what it had not written yet: parameters and optimizer state, or, if the step was refused,
only the scale and the watch of the guard. Ranks compare both numbers, that of steps and that of
steps with those that were refused. One that is behind takes what it lacks from a rank that is not.
Replicas that are independent have states of their own. If one of them is behind, for it the steps
that the others have taken count as refused; and a merge that has failed is made again. If a rank
has no state, or the ranks of a replica are at different steps, nobody holds what is missing.
Ranks that come back have nothing; see [Note: replicas are checkpoints] in `resetting`.

[Note: replicas are checkpoints] Every rank of a replication group holds the same shards and the
same optimizer state. So a rank that was killed and comes back, or a whole partition group of them,
takes its part from one that still has it: each part travels once, over the links of hop 2. No step
is lost as long as one rank of each replication group holds the newest state. If none does, all
ranks raise LostStateError on groups that are good, and can go on from a state that was saved.

Leaves that are not trained do not travel: a rank that comes back has made them again, as its script
says. So they are compared between replicas, and all ranks raise if they are not the same.

[Note: steps written together] A rank that is killed in the last collectives of a step may have let
some ranks finish it and others not, and the newest state may then be nowhere in full. With
`recoverable=True` every rank says, before it writes a step, that it has all that it needs to do so,
and writes only once all have said it. If one is killed meanwhile, each of the others either has
written the step or can do so later, on new groups, from what it has kept.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mics_fn import checks, errors, tree
from mics_fn.collectives import collect_bytes
from mics_fn.faults import Comparison, from_replica, replaced, same_step
from mics_fn.groups import Groups, reports
from mics_fn.schedules import OnDemand
from mics_fn.shards import any_lost, reclaimed
from mics_fn.spans import LOG
from mics_fn.train.given import compare_options, homes_by_leaf, with_homes
from mics_fn.train.plain import guard_numbers, with_numbers
from mics_fn.train.replicas import has_own_state
from mics_fn.train.stepping import merge, write
from mics_fn.tree import Tree

# Ranks that lack the newest state take it from their replicas, as those that come back do.

_POLICY = ("live_bytes", "prefetch", "at_once", "lets_go")


@dataclass(frozen=True)
class Said:
    """Report of a rank on new groups; JSON keeps every bit of it."""

    calls: int  # steps, including those that were refused
    step: int
    scale: list[Any]
    norms: list[float] | None
    back: bool  # whether its state is that of a process that has just begun
    cut: bool  # whether its state is lost, as a write of it was cut short
    ready: bool  # whether it has kept what it needs to write one more step
    merges: bool  # whether a merge of replicas is left to do of its last step
    passes: list[Any]  # what `DataPasses.report` gave
    policies: list[list[Any] | None]  # for training and evaluation

    @property
    def at(self) -> tuple[int, int]:
        """Return the position of its pass."""
        return self.calls, self.step

    @property
    def lost(self) -> bool:
        """Whether it has no state."""
        return self.back or self.cut


def reported_by_all(trainer: Any) -> dict[int, Said]:
    """Exchange the reports of all ranks, by global rank.

    Communication: two small all-gathers over each of the two groups.
    """
    policies = trainer.schedule, trainer.eval_schedule
    mine = [
        trainer.sync_state.step,
        trainer.state.step,
        *guard_numbers(trainer.guard),
        trainer.member.lost,
        any_lost((trainer.state, trainer.sync_state)),
        trainer.member.ready is not None,
        trainer.member.merges,
        trainer.passes.report(),
        [_limits(policy) for policy in policies],
    ]
    said = collect_bytes(trainer.member.home, json.dumps(mine).encode())
    return {rank: Said(*json.loads(text)) for rank, text in said.items()}


def _limits(policy: Any) -> list[Any] | None:
    """The numbers of a policy that a rank may have taken from its own machine."""
    if not isinstance(policy, OnDemand) or policy.planner is not None:
        return None
    return [getattr(policy, name) for name in _POLICY]


def rejoin(trainer: Any, found: Mapping[int, Said], *, heal: bool) -> None:
    """Bring all ranks to the newest state that some have, if some are lost or ready to write.

    Args:
      trainer: the `Trainer`, on new groups; its state, guard and place in the data are replaced.
      found: what each rank says.
      heal: whether ranks may take what they lack.

    Raises:
      LostStateError, DesyncError: on all ranks; see `Trainer.reset`.
    """
    member, whole = trainer.member, [rank for rank in found if not found[rank].lost]
    home = member.home
    if not whole:
        raise _lost(found, "no rank has a whole state")
    newest = max(found[rank].at for rank in whole)
    ready = [rank for rank in whole if found[rank].ready and found[rank].calls == newest[0] - 1]
    if home.rank in ready:
        write(trainer, member.ready)
    member.ready = None
    have = [rank for rank in whole if rank in ready or found[rank].at == newest]
    needy = [rank for rank in home.ranks if rank not in have]
    if needy:
        if not heal:
            raise torn(found)
        _take(trainer, found, have, needy)
    trainer.state = same_step(trainer.state, trainer.groups)


def _take(trainer: Any, found: Mapping[int, Said], have: Sequence[int], needy: list[int]) -> None:
    """Let some ranks take state, guard and position in the data from those that have them."""
    member, lost = trainer.member, [rank for rank in needy if found[rank].lost]
    home = member.home
    groups = trainer.groups
    homes = {} if callable(groups) else dict.fromkeys(tree.flatten(groups)[0])
    if list(homes) != [home]:
        raise _lost(found, "leaves live on several groups, whose replicas are other ranks")
    sources: dict[int, int] = {}
    for place in range(home.partition_size):
        ranks = home.ranks[place :: home.partition_size]
        holders = [rank for rank in ranks if rank in have]
        takers = [rank for rank in ranks if rank in needy]
        if takers and not holders:
            part = f"part {place + 1} of {home.partition_size}"
            raise _lost(found, f"no rank with {part} has all of it")
        sources |= dict.fromkeys(takers, holders[0])
    guide = max((found[rank] for rank in have), key=lambda said: said.at)
    mine, own = found[home.rank], reclaimed(trainer.state)
    behind = trainer.sync_state.step < guide.calls or mine.lost
    guard = trainer.guard
    if behind:
        guard = with_numbers(guard, guide.scale, guide.norms)
    if lost:
        compare_options(trainer, own.params, trainer.groups, guard)
    if home.position == 0:
        pairs = ", ".join(f"rank {to} from rank {source}" for to, source in sources.items())
        without = f"{errors.name_ranks(lost)} had no state; " if lost else ""
        LOG.info("reset: %sall go on at step %d; state of %s", without, guide.step, pairs)
    source = next((sources[rank] for rank in home.replicas.ranks if rank in sources), None)
    takes = home.rank in sources
    state = from_replica(own, home, source, takes=takes, in_place=mine.lost)
    if takes:
        trainer.ahead, trainer.guard, member.masked = state, guard, None
        trainer.sync_state = replace(trainer.sync_state, step=guide.calls)
    if member.lost:
        trainer.passes.take(guide.passes)
        trainer.schedule = _with_limits(trainer.schedule, guide.policies[0])
        trainer.eval_schedule = _with_limits(trainer.eval_schedule, guide.policies[1])
        member.lost = False
    if lost:
        with reports(errors.FileError):  # leaves may lie in files
            compared = Comparison("Trainer.reset", trainer.state, home, [], moments=False)
        compared.finish("raise")


def _with_limits(policy: Any, limits: list[Any] | None) -> Any:
    """A policy with the numbers of another rank's, so that both plan the same."""
    mine = _limits(policy)
    if mine is None or limits is None or mine == limits:
        return policy
    return OnDemand(**dict(zip(_POLICY, limits, strict=True)))


def refuse_independent(home: Groups, found: Mapping[int, Said]) -> None:
    """Raise LostStateError if replicas with states of their own lack a part of one."""
    p, newest, why = home.partition_size, max(said.calls for said in found.values()), ""
    replicas = [home.stacked_ranks[start : start + p] for start in range(0, len(found), p)]
    places = [{(found[rank].at, found[rank].merges) for rank in ranks} for ranks in replicas]
    if any(said.lost for said in found.values()):
        why = "replicas are independent, so each has a state of its own"
    elif any(len(each) > 1 for each in places):
        why = "replicas are independent, and ranks of one are at different steps"
    elif len({said.merges for said in found.values() if said.calls == newest}) > 1:
        why = "only some ranks have merged after the last step"
    if why:
        raise _lost(found, why)


def refuse_own_state(found: Mapping[int, Said], name: str) -> None:
    """Raise LostStateError if a rank lacks what hop 2 keeps on that rank alone."""
    newest = max(said.at for said in found.values())
    if any(said.lost or (said.at != newest and not said.ready) for said in found.values()):
        raise _lost(found, f"{name} keeps a state on each rank that no other one has")


def _lost(found: Mapping[int, Said], why: str) -> errors.LostStateError:
    """Return the error of a state that no rank holds, with the saves to resume from."""
    lost = any(said.lost for said in found.values())
    what = "the state that a lost rank had" if lost else "the newest state"
    newest = max(said.step for said in found.values())
    fix = f"put a state in its place that all ranks have saved, of step {newest} or before"
    fix += "; with checkpoint= the Trainer goes back to the newest by itself"
    return errors.LostStateError(
        f"Trainer.reset: no replica holds {what}: {why}", _places(found), fix
    )


def torn(found: Mapping[int, Said]) -> errors.LostStateError:
    """Return the error of ranks that are at different steps."""
    fix = "pass heal=True, or go back to a state that all ranks have saved"
    return errors.LostStateError("Trainer.reset: ranks are at different steps", _places(found), fix)


def _places(found: Mapping[int, Said]) -> list[str]:
    """Return the lines that say at which step each rank is."""
    texts = {}
    for rank, said in found.items():
        merges = ", before its merge" if said.merges else ""
        texts[rank] = f"step {said.step}, in {said.calls} calls{merges}"
        if said.back:
            texts[rank] = "came back without a state"
        if said.cut:
            texts[rank] = "was cut short while it wrote a step"
    return errors.rank_lines(texts)


_ATTEMPTS = 5  # as a rank may be lost while another one is healed


def renew(trainer: Any, *, heal: bool) -> None:
    """Put a `Trainer` on new groups, at one step; tries again if a rank is lost meanwhile.

    Where no replica holds what a rank lacks, all go back to the newest step that was saved.

    Args:
      trainer: the `Trainer`.
      heal: whether a rank that is behind takes what it lacks from a replica.

    Raises:
      LostStateError: see `Trainer.reset`.
    """
    checks.flag("Trainer.reset", "heal", heal)
    member, params = trainer.member, trainer.state.params
    for attempt in reversed(range(_ATTEMPTS)):
        trainer.groups, member.home = on_new_groups(trainer.groups, params, member.home)
        member.compared = False
        try:
            at_one_step(trainer, heal=heal)
        except (errors.CollectiveError, errors.PeerFailed):
            if not attempt:
                raise
        except (
            errors.LostStateError
        ):  # whoever goes on puts a saved state here; the next step compares it
            member.lost, member.ready, member.merges = False, None, False
            if trainer.checkpoint is not None and trainer.checkpoint.begin(trainer):
                return
            raise
        else:
            member.compared = True
            if trainer.checkpoint is not None:
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
    new = replaced([home, *homes_by_leaf(groups, params)])
    return with_homes(groups, params, new), new[home]


def at_one_step(trainer: Any, *, heal: bool) -> None:
    """Bring state, sync state and guard of a `Trainer` to one step on all ranks.

    Args:
      trainer: the `Trainer`, on new groups.
      heal: whether a rank that is behind takes what it lacks from a replica.

    Raises:
      LostStateError: see `Trainer.reset`.
    """
    home, found = trainer.member.home, reported_by_all(trainer)
    if trainer.replica_sync.independent:
        refuse_independent(home, found)
        _merged(trainer, found, heal=heal)
    else:
        if has_own_state(trainer.replica_sync, trainer.sync_state):
            refuse_own_state(found, trainer.replica_sync.name)
        _aligned(trainer, found, heal=heal)
    if any(said.passes[0] for said in found.values()):
        trainer.passes.go_on(trainer.sync_state.step)


def _aligned(trainer: Any, found: Mapping[int, Said], *, heal: bool) -> None:
    """Align replicas that step together; see [Note: one step again]."""
    if any(said.lost or said.ready for said in found.values()):
        rejoin(trainer, found, heal=heal)
        return
    trainer.state = same_step(trainer.state, trainer.groups, heal=heal)
    if len({said.calls for said in found.values()}) > 1:
        if not heal:
            raise torn(found)
        _count_as(trainer, max(found.values(), key=lambda said: said.at))


def _count_as(trainer: Any, last: Said) -> None:
    """Count calls and what the guard found as the rank that is furthest."""
    if trainer.sync_state.step < last.calls:
        trainer.sync_state = replace(trainer.sync_state, step=last.calls)
        trainer.guard = with_numbers(trainer.guard, last.scale, last.norms)


def _merged(trainer: Any, found: Mapping[int, Said], *, heal: bool) -> None:
    """Align independent replicas on one call; see [Note: one step again].

    Communication: that of a merge, if one is left to do.
    """
    member, last = trainer.member, max(found.values(), key=lambda said: said.at)
    behind = [rank for rank in found if found[rank].calls < last.calls]
    if behind and not heal:
        raise torn(found)
    if member.home.rank in behind:
        _count_as(trainer, last)
        trainer.state = replace(trainer.state, step=last.step)
    if behind and member.home.position == 0:
        text = "reset: replicas are independent, and %s did not take all steps of the others"
        LOG.warning(text, errors.name_ranks(behind))
    member.merges = last.merges
    merge(trainer)

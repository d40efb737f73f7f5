"""`Trainer(elastic=)`: replicas go on without those that are lost, and with them once they return.

Who goes on is decided in `Rounds`, see [Note: rounds] in `groups.rounds`. Whose samples they take
is arithmetic, see [Note: the same step on fewer ranks] in `shares`. Here both meet a `Trainer`.
"""

import logging
from functools import partial
from typing import Any

from mics_fn.errors import MicsError, PlanError, first_line, message
from mics_fn.groups import Groups, Rounds
from mics_fn.schedules import Schedule
from mics_fn.train.member import Member

_log = logging.getLogger("mics_fn")
PATIENCE_S = 15.0  # for which lost ranks are waited for: some launchers take as long


def rounds_for(trainer: Any, elastic: bool | float) -> Rounds | None:
    """What decides which ranks go on; None if all have to.

    Args:
      trainer: the `Trainer`, with its groups and options.
      elastic: the argument of `Trainer`.

    Raises:
      PlanError: with these groups or options, replicas cannot go on without others.
    """
    if elastic is False:
        return None
    patience_s = PATIENCE_S if elastic is True else elastic
    if not isinstance(patience_s, int | float) or not 0 < patience_s < 1e8:
        text = f"Trainer: elastic={elastic!r}, expected True, False or a number above 0"
        raise PlanError(
            message(text, fix="pass the seconds to wait for lost ranks, or True for 15")
        )
    home, text, fix = trainer.member.home, "", ""
    if trainer.replica_sync.apart:
        text = f"replica_sync={trainer.replica_sync.name} lets replicas be apart"
        fix = "leave replica_sync out: replicas then hold the same state"
    elif trainer.replica_sync.reduce is not None:
        text = f"replica_sync={trainer.replica_sync.name} may keep a state on each rank"
        fix = "leave hop2 out: what a rank keeps for itself is lost with it"
    elif not isinstance(trainer.groups, Groups):
        text, fix = "leaves live on several groups", "pass one Groups for all leaves"
    elif not home.life.whole or home.mean_over is not None:
        text = "ranks outside of these groups take part in the model"
        fix = "use it where the groups are the whole job; else pass whole=True to make_groups"
    elif isinstance(trainer.schedule, Schedule):
        text = "schedule= is fixed, for steps of one number of micro-steps"
        fix = "leave schedule= out, or pass a policy"
    if text:
        raise PlanError(message(f"Trainer: {text}, with elastic=", fix=fix))
    return Rounds(home, float(patience_s)) if home.world_size > 1 else None


def end_saves(trainer: Any) -> None:
    """Wait for a save under way, as another rank may be the one that commits the next one."""
    if trainer.member.rounds is None or trainer.member.lost:
        return
    try:
        trainer.checkpoint.close()
    except MicsError as error:
        first = first_line(error)
        _log.warning("reset: a save under way has failed: %s", first)


def meet_for(member: Member, calls: int) -> Any:
    """What makes groups of those that go on, as for `replaced`; None for those of all ranks.

    Args:
      member: this rank.
      calls: the number of steps that it has done, including those that were refused.
    """
    if member.rounds is None:
        return None
    far = (-1, 0) if member.lost else (member.round, calls + (member.ready is not None))
    return partial(member.rounds, far=far)


def check_newest(trainer: Any) -> None:
    """Mark this rank as lost if others went on without it; see [Note: the newest round]."""
    member = trainer.member
    if member.rounds is not None and member.round < member.rounds.newest and not member.lost:
        member.lost, member.ready = True, None
        trainer.epochs.go_on(None)


def begun(member: Member, calls: int) -> None:
    """Note that all ranks of a round are at one step, after so many calls, or that it is lost."""
    if member.rounds is not None:
        member.rounds.begun(member.home, calls)
        member.round = member.rounds.number

"""At which step ranks are: compared on new groups, and mended from a replica.

[Note: one step] A rank that was interrupted may be a step behind the others. Its shards must not be
mixed with theirs: every number would stay finite, and the result would be the state of no step. So
the first `opt_step` with gradients that come from new groups compares `state.step` over them before
anything is written, and with it the options of the optimizer. `Trainer` compares both earlier.
"""

from typing import Any

import torch
from torch import Tensor

from mics_fn import _torch, checks, tree
from mics_fn.collectives import collect_all, send_from
from mics_fn.errors import TornStepError, message, rank_lines
from mics_fn.groups import Groups
from mics_fn.offload import read
from mics_fn.optim.handing import in_new_memory
from mics_fn.optim.moving import as_before
from mics_fn.optim.options import OPTIONS, optimizer_facts, same_options
from mics_fn.shards import any_lost, names, open_shards, reclaimed

_SEEN = "steps"  # in `Groups.agreed`: their ranks were at one step
_NO_STEP = -1  # of a rank without a state


def same_step(state: Any, groups: Any, *, heal: bool = False) -> Any:
    """The same state, once all ranks are known to be at one step.

    Args:
      state: a `TrainState`.
      groups: those of its parameters, with all replicas.
      heal: let ranks that are behind, or whose state is lost as a write of it was cut short, take
        trained leaves, optimizer state and buffers from a replica that is not. Frozen leaves stay
        as each rank has them; `same_replicas` compares these, too.

    Returns:
      The state; a new one on ranks that were behind.

    Communication: 8 bytes over the partition group and over the replication group. To heal, each
      replication group that has ranks behind sends the state of one rank to the others.

    Memory: to heal, a second copy of the state on ranks that are behind.

    Raises:
      TornStepError: on all ranks, if they are at different steps. With `heal` only if no rank has
        some part of the newest state, or if leaves live on several groups.
      PlanError: `state` is not a `TrainState`, or `heal` is not a bool.

    Example:
      >>> groups = make_groups(1)
      >>> state = init_state(shard({"w": torch.ones(2)}, groups), optim.sgd(0.1))
      >>> optim.same_step(state, groups) is state
      True
    """
    require_state("same_step", state)
    checks.flag("same_step", "heal", heal)
    lost = any_lost((state.params, state.opt))  # by a write that was cut short
    given, state = state, reclaimed(state)
    opened = open_shards("same_step", state.params, groups, root="state.params").require_replicas()
    homes = [home for home in dict.fromkeys(opened.homes) if isinstance(home, Groups)]
    for home in homes:
        steps = _steps(_NO_STEP if lost else state.step, home)
        if len(set(steps.values())) > 1 or max(steps.values()) == _NO_STEP:
            if not heal or len(homes) > 1 or _lost(steps, home):
                raise _torn("same_step", steps, home)
            given = _healed(state, steps, home)
            home.agreed.add(_SEEN)
    return given


def require_state(verb: str, state: Any) -> None:
    """Raise PlanError unless a value has what a `TrainState` has."""
    if not all(hasattr(state, name) for name in ("step", "params", "opt", "transform")):
        fix = "pass what init_state or opt_step gave; the state comes first"
        checks.refuse(verb, "state", state, "a TrainState", fix)


def compare_once(state: Any, home: Any) -> None:
    """Compare step and optimizer between the ranks of groups, unless that was done on them before.

    Args:
      state: a `TrainState`.
      home: the groups.

    Communication: 8 bytes for the step, and 32 for the options.

    Raises:
      TornStepError: on all ranks, if they are at different steps.
      DesyncError: on all ranks, if they have other options; see `same_options`.
    """
    if not isinstance(home, Groups) or home.world_size == 1 or {_SEEN, OPTIONS} <= home.agreed:
        return
    with _torch.without_torch_func():
        if _SEEN not in home.agreed:
            steps = _steps(state.step, home)
            if len(set(steps.values())) > 1:
                raise _torn("opt_step", steps, home)
        if OPTIONS not in home.agreed:
            facts = optimizer_facts("opt_step", state.transform, names(state.params), several=False)
            same_options("opt_step", facts, [home])


def _steps(step: int, home: Groups) -> dict[int, int]:
    """The step of each rank, by global rank."""
    mine = torch.tensor(step, dtype=torch.int64, device=home.device)
    steps = {rank: int(other) for rank, other in collect_all(home, mine).items()}
    if len(set(steps.values())) == 1:
        home.agreed.add(_SEEN)
    return steps


def _torn(verb: str, steps: dict[int, int], home: Groups) -> TornStepError:
    said = {rank: f"step {step}" if step >= 0 else "lost" for rank, step in steps.items()}
    lines = rank_lines(said)
    fix = "optim.same_step(state, groups, heal=True) takes the newer state from a replica"
    if _lost(steps, home):
        fix = "no replica has all of the newest state: go back to one that all ranks have saved"
    return TornStepError(message(f"{verb}: ranks are at different steps", lines, fix))


def _lost(steps: dict[int, int], home: Groups) -> bool:
    """Whether no rank has some part of the newest state."""
    p, newest = home.partition_size, max(steps.values())
    parts = [[steps[rank] for rank in home.ranks[place::p]] for place in range(p)]
    return newest == _NO_STEP or any(newest not in part for part in parts)


def _healed(state: Any, steps: dict[int, int], home: Groups) -> Any:
    newest, ranks = max(steps.values()), home.replicas.ranks
    if all(steps[rank] == newest for rank in ranks):
        return state
    source = next(rank for rank in ranks if steps[rank] == newest)
    return replaced_from(state, home, source, behind=steps[home.rank] < newest)


def replaced_from(state: Any, home: Groups, source: int, *, behind: bool) -> Any:
    """The state that one rank of the replication group has, on all of them.

    Args:
      state: a `TrainState`.
      home: the groups.
      source: global rank.
      behind: whether this rank has other values. It gets them in new memory; on the other ranks
        the same bits arrive where they are already.
    """
    before = state
    if behind:
        state = in_new_memory(state)
    leaves, spec = tree.flatten(state)
    plain = [i for i, x in enumerate(leaves) if isinstance(x, int | float)]
    numbers = torch.tensor([leaves[i] for i in plain], dtype=torch.float64, device=home.device)
    with torch.no_grad():
        send_from(home.replicas, numbers, source)
        for i, number in zip(plain, numbers.tolist(), strict=True):
            leaves[i] = type(leaves[i])(number)
        for x in leaves:
            if isinstance(x, Tensor) and x.numel():
                sent = read(x.detach()).to(home.device).contiguous()
                send_from(home.replicas, sent.view(-1).view(torch.uint8), source)
                if behind and sent.data_ptr() != x.data_ptr():
                    x.copy_(sent)
    return as_before(spec.unflatten(leaves), before)

"""`guarded_step`: gradients are judged while the states of the step that they decide come."""

from typing import Any, TypeVar

from mics_fn import checks
from mics_fn.optim.guard import Guard, Verdict
from mics_fn.optim.late import Late, Refused, has_to_come
from mics_fn.optim.state import TrainState, opt_step
from mics_fn.optim.steps import compare_once, require_state
from mics_fn.shards import Arriving
from mics_fn.tree import Tree

P = TypeVar("P")  # a tree of shards


def guarded_step(
    state: TrainState[P], grads: Tree | Arriving, guard: Guard, groups: Any, *, donate: bool = False
) -> tuple[TrainState[P], Verdict]:
    """`Guard.judge`, and `opt_step` if the step is accepted, in one call.

    States that lie in files, or on the host beside a device, begin to come before the guard waits
    for hop 2 and for the norm: as many of their first blocks as `host_bytes` holds. A step that is
    refused drops them, and writes nothing.

    Args:
      state: as for `opt_step`.
      grads: as for `Guard.judge`, with the structure of `state.params`.
      guard: judges them.
      groups: as for `Guard.judge`.
      donate: write into the memory of `state` and of `grads`, neither of which can be used
        afterwards; of a step that is refused `state` stays valid.

    Returns:
      The next state, or `state` itself if the step is refused; and the `Verdict`, whose `next` is
      the guard for the next step. The bits are those of the two calls.

    Communication: that of `Guard.judge` and of `opt_step`.

    Memory: that of both.

    Raises:
      NonFiniteError: on all ranks, with `on_nonfinite="raise"`; the state is as it was.
      PlanError: `state` is not a `TrainState`, or `guard` not a `Guard`, or `donate` not a bool.
      TreeError, LeafError, GroupsError, OptimizerError, DonatedError, TornStepError, OffloadError:
        as `opt_step` and `Guard.judge`.

    Example:
      >>> groups, guard = make_groups(1), optim.Guard(max_norm=1.0, on_nonfinite="skip")
      >>> state = init_state(shard({"w": torch.ones(2)}, groups), optim.sgd(0.5))
      >>> for value in (1.0, float("nan")):
      ...     grads = reduce_grads({"w": torch.full((2,), value)}, groups)
      ...     state, verdict = optim.guarded_step(state, grads, guard, groups)
      ...     print(state.step, state.params["w"].data, verdict.accept)
      1 tensor([0.6464, 0.6464]) True
      1 tensor([0.6464, 0.6464]) False
    """
    require_state("guarded_step", state)
    fix = "the order is guarded_step(state, grads, guard, groups)"
    checks.instance("guarded_step", "guard", guard, Guard, "a Guard", fix)
    checks.flag("guarded_step", "donate", donate)
    found: list[Verdict] = []

    def judged() -> Tree | Arriving:
        found.append(guard.judge(grads, groups, donate))
        if not found[0].accept:
            raise Refused
        return found[0].grads

    late = Late(grads, judged)
    # On every rank first, since not every rank may have a part of what is elsewhere.
    compare_once(state, late.arrival().home)
    try:
        given = late if has_to_come(state.params, state.opt) else judged()
        return opt_step(state, given, donate=donate), found[0]
    except Refused:
        return state, found[0]

"""`chain`: transforms in sequence, as clipping before an optimizer."""

from typing import Any

from mics_fn.errors import OptimizerError
from mics_fn.optim.coming import Coming, settled
from mics_fn.optim.flat import Unpacked, unpacked
from mics_fn.optim.late import Late, has_to_come
from mics_fn.optim.moving import as_before
from mics_fn.optim.options import chained
from mics_fn.optim.transform import Optimizer, Transform, as_transform, check_own, step_of
from mics_fn.tree import Tree


def chain(*transforms: Optimizer) -> Transform:
    """Transforms in sequence: each gets the updates of the one before it as gradients.

    Args:
      transforms: at least one; the last one takes the step.

    Returns:
      One `Transform`, whose state is the tuple of their states.

    Raises:
      OptimizerError: no transform was given, or one has no `init` and `update`.

    Example:
      >>> groups = make_groups(1)
      >>> optimizer = chain(optim.clip_by_global_norm(1.0, groups), optim.adamw(1e-3))
    """
    parts = [as_transform(part) for part in transforms]
    if not parts:
        raise OptimizerError("chain: needs at least one transform")

    def init(params: Tree) -> tuple:
        return tuple(part.init(params) for part in parts)

    def check(states: Any) -> None:
        fits = type(states) is tuple and len(states) == len(parts)
        check_own(fits, f"a chain of {len(parts)}", states)

    def before_last(grads: Tree, states: tuple, params: Tree) -> tuple[Tree, list]:
        new = []
        for part, state in zip(parts[:-1], states[:-1], strict=True):
            grads, state = part.update(grads, state, params)
            new.append(state)
        return grads, new

    def update(grads: Tree, states: tuple, params: Tree) -> tuple[Tree, tuple]:
        check(states)
        grads, new = before_last(grads, states, params)
        grads, last = parts[-1].update(grads, states[-1], params)
        return grads, (*new, last)

    def step_unpacked(
        grads: Unpacked, states: tuple, params: Unpacked, donate: bool
    ) -> tuple[Unpacked, tuple]:
        check(states)
        new: list[Any] = []

        def made() -> Tree:
            given, found = before_last(settled(grads).closed(), states, params.closed())
            new.extend(as_before(found, list(states[:-1])))
            return given

        # See [Note: states come first] in `late`. What the others have in files comes through the
        # same memory, and so before.
        late = has_to_come(params, states[-1]) and not has_to_come([], states[:-1])
        late = late and parts[-1].step_unpacked is not None
        given = Coming.of(Late(grads.closed(), made).arrival()) if late else unpacked(made())
        after, last = step_of(parts[-1], given, states[-1], params, donate)
        return after, (*new, last)

    def step(grads: Tree, states: tuple, params: Tree, donate: bool) -> tuple[Tree, tuple]:
        after, new = step_unpacked(unpacked(grads), states, unpacked(params), donate)
        return after.closed(), new

    return Transform(init, update, step, step_unpacked, chained(parts))

"""Optimizers, and parts of optimizers, as pure functions over trees of shards."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mics_fn import tree
from mics_fn.errors import OptimizerError, message
from mics_fn.optim.columns import map_columns
from mics_fn.optim.flat import Unpacked, unpacked
from mics_fn.optim.options import chained
from mics_fn.shards import names, needs_derivative
from mics_fn.tree import Tree

# A learning rate, or a function from the step, counted from 0, to one. A tensor may be
# differentiated by.
Rate = float | Tensor | Callable[[int], float | Tensor]
Facts = Callable[[Sequence[str]], Mapping[str, str]]  # see `Transform`
Mask = Callable[[str], bool]  # from the path of a leaf to whether it is selected


class Transform(NamedTuple):
    """An optimizer, or a part of one, as pure functions.

    Args:
      init: `init(params) -> state`.
      update: `update(grads, state, params) -> (updates, state)`; updates are to be added to the
        parameters.
      step: `step(grads, state, params, donate) -> (params, state)`, which adds the updates itself;
        with `donate` it may write into the memory of `state` and `params`.
      step_unpacked: `step` from `Unpacked` gradients and parameters to `Unpacked` parameters, if it
        has one, for a caller who has taken the trees apart already.
      facts: from the paths of the trained leaves to texts of its options by name, for ranks to
        compare. Without it they compare nothing, and say so.
    """

    init: Callable[[Tree], Any]
    update: Callable[[Tree, Any, Tree], tuple[Tree, Any]]
    step: Callable[[Tree, Any, Tree, bool], tuple[Tree, Any]]
    step_unpacked: Callable[[Unpacked, Any, Unpacked, bool], tuple[Unpacked, Any]] | None = None
    facts: Facts | None = None


def from_update(
    init: Callable[[Tree], Any],
    update: Callable[..., tuple[Tree, Any]],
    facts: Facts | None = None,
) -> Transform:
    """A `Transform` from its `init` and `update`; its step adds the updates to the parameters.

    Example:
      >>> plain = from_update(lambda params: (), lambda grads, state, params: (grads, state))
    """

    def step(grads: Tree, state: Any, params: Tree, donate: bool) -> tuple[Tree, Any]:
        updates, state = update(grads, state, params)
        return map_columns(lambda p, u: p.add_(u), params, updates, donate=donate), state

    return Transform(init, update, step, facts=facts)


def from_step(
    init: Callable[[Tree], Any],
    step_unpacked: Callable[..., tuple[Unpacked, Any]],
    facts: Facts | None = None,
) -> Transform:
    """A `Transform` whose updates are the new parameters minus the old ones."""

    def step(grads: Tree, state: Any, params: Tree, donate: bool) -> tuple[Tree, Any]:
        new, state = step_unpacked(unpacked(grads), state, unpacked(params), donate)
        return new.closed(), state

    def update(grads: Tree, state: Any, params: Tree) -> tuple[Tree, Any]:
        new, state = step(grads, state, params, False)
        own = not needs_derivative(tree.flatten((new, params))[0])
        return map_columns(lambda n, p: n.sub_(p), new, params, donate=own), state

    return Transform(init, update, step, step_unpacked, facts)


def chain(*transforms: Any) -> Transform:
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

    def before_last(grads: Tree, states: tuple, params: Tree) -> tuple[Tree, list]:
        new = []
        for part, state in zip(parts[:-1], states, strict=False):
            grads, state = part.update(grads, state, params)
            new.append(state)
        return grads, new

    def update(grads: Tree, states: tuple, params: Tree) -> tuple[Tree, tuple]:
        grads, new = before_last(grads, states, params)
        grads, last = parts[-1].update(grads, states[-1], params)
        return grads, (*new, last)

    def step(grads: Tree, states: tuple, params: Tree, donate: bool) -> tuple[Tree, tuple]:
        grads, new = before_last(grads, states, params)
        params, last = parts[-1].step(grads, states[-1], params, donate)
        return params, (*new, last)

    return Transform(init, update, step, facts=chained(parts))


def rate_at(lr: Rate, step: int) -> float | Tensor:
    """The learning rate of a step."""
    return lr(step) if callable(lr) else lr


def decay_keys(mask: Mask | None, params: Unpacked) -> list[bool] | None:
    """Whether each piece decays, in the order of the tree; None if all do."""
    return None if mask is None else [bool(mask(path)) for path in params.paths]


def as_transform(optimizer: Any) -> Transform:
    """A `Transform` from an optimizer of this or of another library.

    Args:
      optimizer: a `Transform`, or an object with `init` and `update` as optax and torchopt define
        them. Such an object gets this rank's pieces as a dict from path to 1D tensor.

    Raises:
      OptimizerError: it has no `init` and `update`.
    """
    if isinstance(optimizer, Transform):
        return optimizer
    if isinstance(optimizer, torch.optim.Optimizer) or not (
        callable(getattr(optimizer, "init", None)) and callable(getattr(optimizer, "update", None))
    ):
        name = type(optimizer).__name__
        fix = "pass a Transform, e.g. adamw(1e-3) or from_torch(torch.optim.RMSprop, lr=1e-3)"
        raise OptimizerError(message(f"{name} is not an optimizer of init and update", fix=fix))
    takes = inspect.signature(optimizer.update).parameters
    options = {"inplace": False} if "inplace" in takes else {}
    by_name = "params" in takes and takes["params"].kind is inspect.Parameter.KEYWORD_ONLY

    def update(grads: Tree, state: Any, params: Tree) -> tuple[Tree, Any]:
        if by_name:
            updates, state = optimizer.update(
                _plain(grads), state, params=_plain(params), **options
            )
        else:
            updates, state = optimizer.update(_plain(grads), state, _plain(params), **options)
        return tree.flatten(grads)[1].unflatten([updates[path] for path in names(grads)]), state

    return from_update(lambda params: optimizer.init(_plain(params)), update)


def _plain(shards: Tree) -> dict[str, Tensor]:
    return dict(zip(names(shards), tree.flatten(shards)[0], strict=True))

"""Optimizers as pairs of pure functions over trees of shards, and `opt_step`."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from mics_fn import _torch, tree
from mics_fn.columns import map_columns
from mics_fn.errors import LeafError, OptimizerError, TreeError, message
from mics_fn.leaf import Sharded, dtype_name, is_leaf, names, needs_derivative
from mics_fn.leaf import donate as mark_donated
from mics_fn.tree import Tree

Schedule = Callable[[int], float]  # step, counted from 0 -> learning rate
Rate = float | Tensor | Callable[[int], float | Tensor]  # a tensor may be differentiated by
Mask = Callable[[str], bool]  # path of a leaf -> whether it is meant


class Transform(NamedTuple):
    """An optimizer, or a part of one, as pure functions.

    Args:
      init: `init(params) -> state`.
      update: `update(grads, state, params) -> (updates, state)`; updates are to be added to the
        parameters.
      step: `step(grads, state, params, donate) -> (params, state)`, the same with the addition
        fused in; with `donate` it may write into `state` and `params`.
    """

    init: Callable[[Tree], Any]
    update: Callable[[Tree, Any, Tree], tuple[Tree, Any]]
    step: Callable[[Tree, Any, Tree, bool], tuple[Tree, Any]]


@tree.node
@dataclass(frozen=True)
class TrainState:
    """All that a training run carries from step to step.

    Args:
      step: optimizer steps done.
      params: tree of shards.
      opt: the transform's state.
      buffers: what a model carries besides parameters (BatchNorm's statistics), by name; full
        tensors.
      transform: the optimizer.
    """

    step: int
    params: Tree
    opt: Any
    buffers: dict[str, Tensor]
    transform: Transform = tree.static()


def init_state(
    params: Tree, optimizer: Any, *, buffers: dict[str, Tensor] | None = None
) -> TrainState:
    """The state before the first step.

    Args:
      params: tree of shards.
      optimizer: a `Transform`, or anything with `init(params)` and `update(grads, state, params)`.
      buffers: full tensors by name, for models that have some.

    Returns:
      A `TrainState` at step 0.

    Communication: none.

    Memory: the optimizer's state, of this rank's shards only.

    Raises:
      OptimizerError: `optimizer` is neither.

    Example:
      >>> groups = make_groups(1)
      >>> init_state(shard({"w": torch.ones(2)}, groups), sgd(0.1)).step
      0
    """
    transform = as_transform(optimizer)
    return TrainState(0, params, transform.init(params), dict(buffers or {}), transform)


def opt_step(state: TrainState, grads: Tree, *, donate: bool = False) -> TrainState:
    """The next state.

    Args:
      state: the state that the gradients were taken at.
      grads: tree of shards with the structure of `state.params`, both hops done (see
        `reduce_grads`).
      donate: update in the buffers of `state`, which cannot be used again: doing so raises and
        names the value. What else lies in those buffers, such as leaves of another tree, stays.

    Returns:
      A new `TrainState`, one step on. It has derivatives where one is asked for: inside torch.func,
      or where gradients, state or learning rate require one and grad mode is on. `sgd`, `adam`,
      `adamw`, `lion`, clipping by value and optimizers of `init` and `update` have them, by a
      tensor `lr` too: each rank that of its shards, which add up over the partition group.
      Parameters that are leaves are constants unless the gradients require a derivative.

    Communication: none, but what a transform was given groups for.

    Memory: a second copy of the state; none with `donate`.

    Raises:
      TreeError: `grads` does not match `state.params`, or owes hop 1.
      DonatedError: `state` was donated before.
      OptimizerError: a derivative is asked for with `donate`, or of another torch optimizer.

    Example:
      >>> groups = make_groups(1)
      >>> state = init_state(shard({"w": torch.ones(2)}, groups), sgd(0.1))
      >>> grads = reduce_grads({"w": torch.ones(2)}, groups)
      >>> opt_step(state, grads).params["w"].data
      tensor([0.9000, 0.9000])
    """
    variables = _check_grads(state.params, grads)
    # Leaves that somebody made variables: a step is no function of them unless gradients are.
    start = tree.map_leaves(Tensor.detach, state.params) if variables else state.params
    params, opt = state.transform.step(grads, state.opt, start, donate)
    if donate:
        to = f"opt_step at step {state.step}"
        mark_donated(state.params, "params", to, keep=params)
        mark_donated(state.opt, "opt", to, keep=opt)
        # torch's optimizers write through Parameters, which count versions of their own; whoever
        # saved or gathered the old values must see that they are gone.
        increment_version(tree.flatten(params)[0])
        if variables:
            params = tree.map_leaves(Tensor.requires_grad_, params)
    return TrainState(state.step + 1, params, opt, state.buffers, state.transform)


def _check_grads(params: Tree, grads: Tree) -> bool:
    """Check that they fit; whether parameters are leaves that require gradients, and no more is."""
    want, spec = tree.flatten(params, is_leaf)
    got, other = tree.flatten(grads, is_leaf)
    if spec != other:
        where = tree.first_mismatch(params, grads, "grads", is_leaf)
        fix = "differentiate with respect to state.params"
        raise TreeError(
            message("opt_step: the gradients' tree differs from the parameters'", [where], fix=fix)
        )
    variables = derived = False
    for i, (a, b) in enumerate(zip(want, got, strict=True)):
        if isinstance(a, Sharded):
            if not (isinstance(b, Sharded) and _alike(a, b)):
                raise _mismatch(tree.paths(params, "grads", is_leaf)[i], a, b)
            if a.data.requires_grad or b.data.requires_grad:
                variables = True
                derived = derived or b.data.requires_grad or not a.data.is_leaf
    return variables and not derived and not _torch.inside_torch_func()


def _alike(a: Sharded, b: Sharded) -> bool:
    x, y = a.data, b.data
    same = a.slot == b.slot and a.bucket == b.bucket
    return same and x.shape == y.shape and x.device == y.device


def _mismatch(path: str, param: Sharded, grad: Any) -> TreeError | LeafError:
    """What to say of a gradient that does not fit its parameter."""
    what, fix = "does not match its parameter", "pass like=state.params to reduce_grads"
    lines = [f"expected {param}", f"got {grad if is_leaf(grad) else type(grad).__name__}"]
    if isinstance(grad, Tensor):
        fix = "do both hops first: reduce_grads(grads, groups, like=state.params)"
    elif isinstance(grad, Sharded) and grad.data.device != param.data.device:
        text = f"opt_step: {path} is on {grad.data.device}, its parameter on {param.data.device}"
        return LeafError(message(text, fix="move it to the parameter's device"))
    elif isinstance(grad, Sharded) and grad.shape == param.shape:
        lines = [f"it lies at {_place(grad)}, the parameter at {_place(param)}"]
    return TreeError(message(f"opt_step: {path} {what}", lines, fix=fix))


def _place(leaf: Sharded) -> str:
    bucket = leaf.bucket
    size = f"{bucket.numel} x {dtype_name(bucket.dtype)}"
    return f"{bucket.offsets[leaf.slot]} of bucket {bucket.index} ({size})"


def from_update(init: Callable[[Tree], Any], update: Callable[..., tuple[Tree, Any]]) -> Transform:
    """A `Transform` from its `init` and `update`; parameters are changed by adding the updates.

    Example:
      >>> plain = from_update(lambda params: (), lambda grads, state, params: (grads, state))
    """

    def step(grads: Tree, state: Any, params: Tree, donate: bool) -> tuple[Tree, Any]:
        updates, state = update(grads, state, params)
        return map_columns(lambda p, u: p.add_(u), params, updates, donate=donate), state

    return Transform(init, update, step)


def from_step(init: Callable[[Tree], Any], step: Callable[..., tuple[Tree, Any]]) -> Transform:
    """A `Transform` from its `init` and fused `step`; its updates are new minus old parameters."""

    def update(grads: Tree, state: Any, params: Tree) -> tuple[Tree, Any]:
        new, state = step(grads, state, params, False)
        own = not needs_derivative(tree.flatten((new, params))[0])
        return map_columns(lambda n, p: n.sub_(p), new, params, donate=own), state

    return Transform(init, update, step)


def chain(*transforms: Any) -> Transform:
    """Transforms one after the other: each gets the updates of the one before as gradients.

    Args:
      transforms: at least one; the last one's fused step is used.

    Returns:
      One `Transform`, whose state is the tuple of their states.

    Communication: that of its parts.

    Memory: that of its parts.

    Raises:
      OptimizerError: none was given.

    Example:
      >>> groups = make_groups(1)
      >>> optimizer = chain(clip_by_global_norm(1.0, groups), adamw(1e-3))
    """
    parts = [as_transform(part) for part in transforms]
    if not parts:
        raise OptimizerError("chain: needs at least one transform")

    def init(params: Tree) -> tuple:
        return tuple(part.init(params) for part in parts)

    def through(grads: Tree, states: tuple, params: Tree) -> tuple[Tree, list]:
        new = []
        for part, state in zip(parts[:-1], states, strict=False):
            grads, state = part.update(grads, state, params)
            new.append(state)
        return grads, new

    def update(grads: Tree, states: tuple, params: Tree) -> tuple[Tree, tuple]:
        grads, new = through(grads, states, params)
        grads, last = parts[-1].update(grads, states[-1], params)
        return grads, (*new, last)

    def step(grads: Tree, states: tuple, params: Tree, donate: bool) -> tuple[Tree, tuple]:
        grads, new = through(grads, states, params)
        params, last = parts[-1].step(grads, states[-1], params, donate)
        return params, (*new, last)

    return Transform(init, update, step)


def rate_at(lr: Rate, step: int) -> float | Tensor:
    """The learning rate of a step."""
    return lr(step) if callable(lr) else lr


def decay_keys(mask: Mask | None, params: Tree) -> list[bool] | None:
    """For each piece whether it decays; None if all do."""
    return None if mask is None else [bool(mask(path)) for path in names(params)]


def as_transform(optimizer: Any) -> Transform:
    """A `Transform` from anything that is shaped like one.

    Args:
      optimizer: a `Transform`, or an object with `init` and `update` as optax and torchopt have
        them. Such a one is given this rank's pieces as a dict from path to 1D tensor.

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
        raise OptimizerError(message(f"{name} is no optimizer of init and update", fix=fix))
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

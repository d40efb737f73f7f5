"""Optimizers by classes of torch: an object of one is made for each step, and dropped afterwards.

It is made around the parameters and the state that the pytree carries, and imports `torch._dynamo`,
a second and 80 MB of each process; kernels and functions do not. Elementwise classes step on
columns, others on whole tensors, each of which lies on one rank.
"""

from typing import Any

import torch
from torch import Tensor

from mics_fn import _torch
from mics_fn.errors import PlanError
from mics_fn.optim import optimizers
from mics_fn.optim.matrices import Kept, MatrixStep, Matrixwise
from mics_fn.optim.optimizers import Mask, Rate, Transform, check_rule, rate_at

_NAMES = "SGD Adam AdamW RMSprop Adagrad Adadelta Adamax NAdam RAdam ASGD Rprop"
ELEMENTWISE = tuple(getattr(torch.optim, name) for name in _NAMES.split())
WHOLE = torch.optim.Adafactor, torch.optim.Muon  # they work on one whole tensor at a time
# They need sums over all parameters, or sparse gradients.
REFUSED = torch.optim.LBFGS, torch.optim.SparseAdam


def from_torch(
    cls: type[torch.optim.Optimizer],
    *,
    lr: Rate | None = None,
    decay_mask: Mask | None = None,
    elementwise: bool = False,
    **options: Any,
) -> Transform:
    """Make a pure transform over shards of an elementwise `torch.optim` class.

    Args:
      cls: the optimizer class: SGD, Adam, AdamW, RMSprop, Adagrad, Adadelta, Adamax, NAdam, RAdam,
        ASGD or Rprop; any other one with `elementwise=True`. Muon and Adafactor take whole leaves,
        which `whole=` of `shard` lays on one rank each.
      lr: learning rate, or a function of the step (counted from 0); default the class's own.
      decay_mask: whether a leaf is decayed, by its path; default all are.
      elementwise: whether a class that torch does not have is elementwise: what it does to an
        element depends on no other element. Nothing looks whether that is so, and where it is not,
        numbers depend on how parameters are cut. It has `_init_group`, and keeps tensors alone,
        which begin with the same number for each element.
      options: the class's other arguments, which it checks itself.

    Returns:
      A `Transform` whose state is a pytree; no optimizer object is kept. It has no derivatives:
      `sgd`, `adam`, `adamw` and `lion` have.

    Memory: the state that the class keeps, for this rank's shards.

    Raises:
      PlanError: the class is not, or not known to be, elementwise.

    Example:
      >>> optimizer = from_torch(torch.optim.RMSprop, lr=1e-2, momentum=0.9)
    """
    if lr is not None:
        check_rule("from_torch", lr)
    if cls in WHOLE:
        return _of_whole(cls, lr, decay_mask, options)
    if cls in REFUSED or not (cls in ELEMENTWISE or elementwise):
        name = getattr(cls, "__name__", type(cls).__name__)
        text = f"from_torch: {name} is not known to be elementwise, and a shard is a flat piece"
        fix = f"use one of {_NAMES}; or elementwise=True, if a class of your own is"
        raise PlanError(text, fix=fix)
    with _torch.without_torch_func():
        moments, scalars = _names_of(cls, options if lr is None else {**options, "lr": 1e-2})

    def begins(name: str, like: Tensor) -> Tensor:
        given = options if lr is None else {**options, "lr": lr(0) if callable(lr) else lr}
        home = torch.device("cpu") if like.is_meta else like.device
        value = torch.zeros(1, dtype=like.dtype, device=home)
        with torch.no_grad():
            optimizer, param = _object_on(cls, given, value)
        found = optimizer.state[param].get(name)
        return value if found is None else found

    def rule(*given: Any) -> dict[str, Tensor]:
        *columns, now = given
        if now.live:
            name = f"from_torch({cls.__name__})"
            text = f"opt_step: {name} has no derivative, and here one is asked for"
            fix = "use sgd, adam, adamw or lion, or call it under torch.no_grad()"
            raise PlanError(text, fix=fix)
        own = options if now.rate is None else {**options, "lr": now.rate}
        own = own if now.decays else {**own, "weight_decay": 0.0}
        return _step_object(cls, own, moments, columns, now)

    facts = {**options, "lr": lr, "decay_mask": decay_mask}
    verb = f"{cls.__module__}.{cls.__qualname__}"
    return optimizers.by_rule(verb, rule, facts, moments, scalars, begins)


def _of_whole(
    cls: Any, lr: Rate | None, decay_mask: Mask | None, options: dict[str, Any]
) -> Transform:
    """Make a `Transform` of a class that works on one whole tensor at a time."""
    verb = f"{cls.__module__}.{cls.__qualname__}"

    def at(count: int) -> MatrixStep:
        own = options if lr is None else {**options, "lr": rate_at(verb, lr, count)}

        def step(path: str, matrix: Tensor, grad: Tensor, kept: Kept) -> None:
            decays = decay_mask is None or decay_mask(path)
            param = _with_grad(matrix, grad)
            optimizer = cls([param], **(own if decays else {**own, "weight_decay": 0.0}))
            optimizer.state[param] = dict(kept)
            optimizer.step()
            kept.update({name: optimizer.state[param][name] for name in kept})

        return step

    def init(matrix: Tensor) -> Kept:
        own = options if lr is None else {**options, "lr": rate_at(verb, lr, 0)}
        optimizer, param = _object_on(cls, own, matrix)
        return {name: x for name, x in optimizer.state[param].items() if isinstance(x, Tensor)}

    facts = {"optimizer": verb, **options, "lr": lr, "decay_mask": decay_mask}
    return Matrixwise(verb, init, at, None).transform(facts)


def _names_of(cls: Any, options: dict[str, Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The moments and scalars of a class, by a step on two elements, which checks its arguments."""
    optimizer, param = _object_on(cls, options, torch.tensor([0.0, 1.0]))
    first = {name: x.clone() for name, x in optimizer.state[param].items() if x is not None}
    optimizer.step()
    kept = {name: value for name, value in optimizer.state[param].items() if value is not None}
    for name, value in kept.items():
        fits = isinstance(value, Tensor) and value.shape in (param.shape, ())
        begins = first.get(name, torch.zeros(())).unique().numel() == 1
        known = name in first or issubclass(cls, torch.optim.SGD)
        if not (fits and begins and known):
            text = f"from_torch: {cls.__name__} cannot be used: it keeps {name!r}"
            fix = "let _init_group make it, as a tensor of 0 dims or of the parameter's shape, "
            raise PlanError(text, fix=f"{fix}with equal elements")
    moments = tuple(name for name, value in kept.items() if value.ndim)
    return moments, tuple(name for name in kept if name not in moments)


def _object_on(cls: Any, options: dict[str, Any], value: Tensor) -> tuple[Any, Tensor]:
    """An object of a class before its first step on one parameter."""
    param = _with_grad(value, torch.ones_like(value))
    optimizer = cls([param], **options)
    for group in optimizer.param_groups:
        _torch.optimizer_init_group(optimizer, group)
    return optimizer, param


def _step_object(
    cls: Any, options: Any, names: Any, columns: Any, now: optimizers.Now
) -> dict[str, Tensor]:
    """Step in place on columns by an object of a class; gives the new scalars."""
    pieces, *moments, grads = columns
    params = list(map(_with_grad, pieces, grads))
    if issubclass(cls, torch.optim.SGD):
        # It begins with the first gradient, which zeros and no dampening give, too.
        options = {**options, "dampening": 0.0} if now.first else options
        options = {**options, "fused": False} if optimizers.fused_skips(params) else options
    optimizer = cls(params, **options)
    # One copy of each scalar for every column, made together.
    scalars = [x.repeat(len(params)).unbind() for x in now.scalars.values()]
    for param, *kept in zip(params, *moments, *scalars, strict=True):
        optimizer.state[param] = dict(zip((*names, *now.scalars), kept, strict=True))
    optimizer.step()
    for name, targets in zip(names, moments, strict=True):
        for param, target in zip(params, targets, strict=True):
            found = optimizer.state[param][name]
            if found is not target:
                target.copy_(found)
    return {name: optimizer.state[params[0]][name] for name in now.scalars}


def _with_grad(piece: Tensor, grad: Tensor) -> Tensor:
    param = piece.detach()  # another tensor object on the same memory, which gets the gradient
    param.grad = grad
    return param

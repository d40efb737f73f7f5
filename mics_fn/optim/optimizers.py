"""Optimizers by name, and a learning rate that rises and falls.

The arithmetic of `sgd`, `adam` and `adamw` is that of torch's kernels, which step on lists of
tensors in one call; where a derivative is asked for it is that of torch's functions. `from_torch`
makes an object of an elementwise class for each step, around the parameters and the state that the
pytree carries, and drops it afterwards. Such an object imports `torch._dynamo`, a second and 80 MB
of each process; kernels and functions do not.

[Note: masked steps] On an accelerator a step whose gradient may not be finite is launched before
the host knows: torch's fused kernels read a number of the device, `found_inf`, and write nothing if
it is 1. So the host need not wait for the norm in each step. It reads the number a step later, and
takes back what only the host has, the counts of steps. It is 1 as well if collectives were aborted
before the last of them was done, so that an abort leaves the state before the step, whole.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.adam import adam as _torch_adam
from torch.optim.sgd import sgd as _torch_sgd

from mics_fn import _torch, checks, tree
from mics_fn.errors import PlanError
from mics_fn.offload import read
from mics_fn.optim import flat, transform
from mics_fn.optim.columns import Column, Columns, map_columns, updating
from mics_fn.optim.flat import FlatShards, Unpacked
from mics_fn.optim.transform import Mask, Rate, Transform
from mics_fn.shards import needs_derivative
from mics_fn.tree import Tree

_TENSORS = attrgetter("tensors")

# What optimizers keep, and how they step on columns.


class OptimizerState(NamedTuple):
    """What an optimizer keeps from step to step.

    Args:
      count: steps done.
      moments: by torch's names, what it keeps for each element: `FlatShards` of the parameters'
        tree.
      scalars: by name, what torch keeps for each parameter: 0-dim tensors, equal for all leaves.
    """

    count: int
    moments: dict[str, FlatShards]
    scalars: dict[str, Tensor]


class _Now(NamedTuple):
    """What a rule is given besides columns.

    Args:
      scalars: those of the state before the step.
      first: whether it is the first step.
      rate: the learning rate; None for the default of a class.
      decays: whether these columns decay.
      live: whether a derivative is asked for.
    """

    scalars: dict[str, Tensor]
    first: bool
    rate: Any
    decays: bool
    live: bool


# A rule writes to columns and gives the new scalars. It takes the parameters, each of the moments
# and the gradients as lists of tensors, and then `_Now`.
Rule = Callable[..., dict[str, Tensor]]


def _by_rule(
    verb: str,
    rule: Rule,
    options: dict[str, Any],
    moments: tuple[str, ...],
    scalars: tuple[str, ...] = (),
    init: Callable[[Tree], OptimizerState] | None = None,
) -> Transform:
    """Make a `Transform` of a rule; by default what it keeps begins with zeros.

    Args:
      verb: its name.
      rule: what it does to columns.
      options: by name, with `lr` and `decay_mask`.
      moments, scalars: the names of what it keeps.
      init: as for `Transform`.
    """
    lr, mask = options["lr"], options["decay_mask"]

    def zeros(params: Tree) -> OptimizerState:
        pieces = flat.unpacked(params).pieces
        here = bool(pieces) and not pieces[0].is_meta and not _torch.inside_torch_func()
        zero = torch.zeros((), device=pieces[0].device if here else "cpu")
        kept = {name: flat.zeros(params, name) for name in moments}
        return OptimizerState(0, kept, dict.fromkeys(scalars, zero))

    def step(
        grads: Unpacked, state: OptimizerState, params: Unpacked, donate: bool
    ) -> tuple[Unpacked, OptimizerState]:
        own = isinstance(state, OptimizerState)
        if not own or {*state.moments, *state.scalars} != {*moments, *scalars}:
            raise transform.of_another(verb, state)
        keys, rate = None, lr
        if mask is not None:
            keys = [
                checks.answer(verb, f"decay_mask({path!r})", mask(path)) for path in params.paths
            ]
        if callable(lr):
            rate, fix = lr(state.count), "let the function of the step give a rate for every step"
            transform.check_rate(verb, f"lr({state.count})", rate, fix)
        targets = [params, *state.moments.values()]
        work = Columns(targets, [grads], keys, by=[rate], donate=donate)
        now = _Now(state.scalars, state.count == 0, rate, True, work.live)
        after = _step_columns(rule, work, now)
        if after is None:
            # A rank that holds no element has to count steps nevertheless.
            device = params.pieces[0].device if params.pieces else torch.device("cpu")
            after = rule(*[[torch.zeros(1, device=device)]] * (2 + len(moments)), now)
        params, *kept = work.targets()
        kept = dict(zip(state.moments, kept, strict=True))
        return params, OptimizerState(state.count + 1, kept, after)

    def update(grads: Tree, state: Any, params: Tree) -> tuple[Tree, Any]:
        found, state = step(flat.unpacked(grads), state, flat.unpacked(params), False)
        new = found.shards
        own = not needs_derivative(tree.flatten((new, params))[0])
        return map_columns(lambda n, p: n.sub_(p), new, params, donate=own), state

    masked = verb in ("sgd", "adam", "adamw")  # by torch's fused kernels
    return Transform(init or zeros, update, step, {"optimizer": verb, **options}, masked)


def _step_columns(rule: Rule, work: Columns, now: _Now) -> dict[str, Tensor] | None:
    """Apply a rule to all columns; gives the new scalars, or None if there are no columns."""
    after = None
    for block in work.blocks:
        by_key: dict[Any, list[Column]] = {}
        for column in block:
            key = column.key, column.tensors[0].dtype  # kernels take tensors of one dtype
            by_key.setdefault(key, []).append(column)
        for (decays, _), found in by_key.items():
            given = map(list, zip(*map(_TENSORS, found), strict=True))
            with updating(found):  # torch updates all of them in one call
                after = rule(*given, now._replace(decays=decays is not False))
    return after


def _fused_skips(params: Iterable[Tensor]) -> bool:
    """Whether torch's fused SGD would skip most elements: pytorch issue 191763."""
    return any(p.itemsize == 2 and p.is_cpu for p in params)


# Optimizers by functions on columns: fused kernels of torch, or ops that have derivatives.


def sgd(
    lr: Rate,
    *,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    decay_mask: Mask | None = None,
) -> Transform:
    """Stochastic gradient descent, by torch's fused `SGD`.

    Args:
      lr: learning rate, a number or a 0-dim tensor, or a function of the step.
      momentum: how much of the running sum of gradients remains after a step.
      nesterov: take the gradient one step ahead (Nesterov's momentum).
      weight_decay: L2 penalty: this times the parameter is added to its gradient.
      decay_mask: whether a leaf is decayed, by its path; default all are.

    Returns:
      A `Transform`.

    Memory: one more copy of the shards with momentum, else none.

    Raises:
      PlanError: an option is out of its range, or of the wrong type.

    Example:
      >>> optimizer = sgd(0.1, momentum=0.9, nesterov=True)
    """
    options = {"momentum": momentum, "weight_decay": weight_decay}
    transform.check_rule("sgd", lr, **options)
    checks.choice("sgd", "nesterov", nesterov, True, False)

    def rule(params: list, *given: Any) -> dict[str, Tensor]:
        *buffers, grads, now = given
        _torch_sgd(
            params,
            grads,
            buffers[0] if buffers else [None] * len(params),  # zeros at first
            fused=not now.live and not _fused_skips(params),
            foreach=False,
            found_inf=transform.FOUND_INF.get(),
            weight_decay=weight_decay if now.decays else 0.0,
            momentum=momentum,
            lr=now.rate,
            dampening=0.0,
            nesterov=nesterov,
            maximize=False,
        )
        return {}

    options |= {"nesterov": nesterov, "lr": lr, "decay_mask": decay_mask}
    return _by_rule("sgd", rule, options, ("momentum_buffer",) if momentum else ())


def adam(
    lr: Rate,
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decay_mask: Mask | None = None,
) -> Transform:
    """Adam (Kingma and Ba, arXiv:1412.6980) with an L2 penalty, by torch's fused `Adam`.

    Args:
      lr: learning rate, a number or a 0-dim tensor, or a function of the step.
      betas: how much of the running mean, and of the running square, remains after a step.
      eps: added to the denominator.
      weight_decay: L2 penalty: this times the parameter is added to its gradient.
      decay_mask: whether a leaf is decayed, by its path; default all are.

    Returns:
      A `Transform`.

    Memory: two more copies of the shards.

    Raises:
      PlanError: an option is out of its range, or of the wrong type.

    Example:
      >>> optimizer = adam(1e-3)
    """
    return _adam("adam", lr, betas, eps, weight_decay, decay_mask)


def adamw(
    lr: Rate,
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    decay_mask: Mask | None = None,
) -> Transform:
    """Adam with decoupled weight decay (arXiv:1711.05101), by torch's fused `AdamW`.

    Args:
      lr: learning rate, a number or a 0-dim tensor, or a function of the step.
      betas: how much of the running mean, and of the running square, remains after a step.
      eps: added to the denominator.
      weight_decay: each step multiplies parameters by 1 - lr * weight_decay.
      decay_mask: whether a leaf is decayed, by its path; default all are.

    Returns:
      A `Transform`.

    Memory: two more copies of the shards.

    Raises:
      PlanError: an option is out of its range, or of the wrong type.

    Example:
      >>> optimizer = adamw(1e-3, decay_mask=lambda path: "bias" not in path)
    """
    return _adam("adamw", lr, betas, eps, weight_decay, decay_mask)


def _adam(
    verb: str,
    lr: Rate,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decay_mask: Mask | None,
) -> Transform:
    options = {"betas": betas, "eps": eps, "weight_decay": weight_decay}
    transform.check_rule(verb, lr, **options)
    decoupled = verb == "adamw"

    def rule(params: list, means: list, squares: list, grads: list, now: _Now) -> dict[str, Tensor]:
        decay, count, before = weight_decay if now.decays else 0.0, len(params), now.scalars["step"]
        own: Any = {"beta1": betas[0], "beta2": betas[1], "eps": eps, "weight_decay": decay}
        own |= {"lr": now.rate, "amsgrad": False, "maximize": False}
        if not now.live:  # the kernel, without the host's time of torch's function around it
            step, found_inf = before.to(params[0].device) + 1, transform.FOUND_INF.get()
            update = _torch.fused_adamw if decoupled else _torch.fused_adam
            update(params, grads, means, squares, [], [step] * count, found_inf=found_inf, **own)
            return {"step": step if found_inf is None else step - found_inf}
        # What torch computes from a count in float32 would have no more digits than that.
        steps = list(before.double().repeat(count).unbind())
        own |= {"foreach": False, "differentiable": True, "decoupled_weight_decay": decoupled}
        _torch_adam(params, grads, means, squares, [], steps, **own)
        return {"step": steps[0].to(before.dtype)}

    options |= {"lr": lr, "decay_mask": decay_mask}
    return _by_rule(verb, rule, options, ("exp_avg", "exp_avg_sq"), ("step",))


def lion(
    lr: Rate,
    *,
    betas: tuple[float, float] = (0.9, 0.99),
    weight_decay: float = 0.0,
    decay_mask: Mask | None = None,
) -> Transform:
    """Lion (Chen et al., arXiv:2302.06675): steps along the sign of an interpolated gradient.

    Args:
      lr: learning rate, a number or a 0-dim tensor, or a function of the step.
      betas: weight of the running mean in the interpolation whose sign is taken, and how much of
        the running mean remains after a step.
      weight_decay: each step multiplies parameters by 1 - lr * weight_decay.
      decay_mask: whether a leaf is decayed, by its path; default all are.

    Returns:
      A `Transform`.

    Memory: one more copy of the shards.

    Raises:
      PlanError: an option is out of its range, or of the wrong type.

    Example:
      >>> optimizer = lion(1e-4, weight_decay=0.1)
    """
    options: dict[str, Any] = {"betas": betas, "weight_decay": weight_decay}
    transform.check_rule("lion", lr, **options)

    def rule(params: list, means: list, grads: list, now: _Now) -> dict[str, Tensor]:
        for p, m, g in zip(params, means, grads, strict=True):
            if now.decays:
                p.mul_(1 - now.rate * weight_decay)
            p.sub_(torch.lerp(m, g, 1 - betas[0]).sign_().mul_(now.rate))
            m.lerp_(g, 1 - betas[1])
        return {}

    return _by_rule("lion", rule, options | {"lr": lr, "decay_mask": decay_mask}, ("exp_avg",))


# Any elementwise class of torch, by an object that is made for each step.

_NAMES = "SGD Adam AdamW RMSprop Adagrad Adadelta Adamax NAdam RAdam ASGD Rprop"
ELEMENTWISE = tuple(getattr(torch.optim, name) for name in _NAMES.split())
# They need whole matrices, sums over all parameters, or sparse gradients.
REFUSED = torch.optim.Adafactor, torch.optim.Muon, torch.optim.LBFGS, torch.optim.SparseAdam


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
        ASGD or Rprop; any other one with `elementwise=True`.
      lr: learning rate, or a function of the step (counted from 0); default the class's own.
      decay_mask: whether a leaf is decayed, by its path; default all are.
      elementwise: whether a class that torch does not have is elementwise: what it does to an
        element depends on no other element. Nothing looks whether that is so, and where it is not,
        numbers depend on how parameters are cut. It has `_init_group`, and keeps tensors alone.
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
        transform.check_rule("from_torch", lr)
    checks.flag("from_torch", "elementwise", elementwise)
    if cls in REFUSED or not (cls in ELEMENTWISE or elementwise):
        name = getattr(cls, "__name__", type(cls).__name__)
        fix = f"use one of {', '.join(each.__name__ for each in ELEMENTWISE)}"
        if cls not in REFUSED:
            fix += "; or pass elementwise=True if it steps element by element"
        text = f"from_torch: {name} is not known to be elementwise, and a shard is a flat piece"
        raise PlanError(text, fix=fix)
    with _torch.without_torch_func():
        moments, scalars = _names_of(cls, options if lr is None else {**options, "lr": 1e-2})

    def check(live: bool) -> None:
        if live:
            name = f"from_torch({cls.__name__})"
            text = f"opt_step: {name} has no derivative, and here one is asked for"
            fix = "use sgd, adam, adamw or lion, or call it under torch.no_grad()"
            raise PlanError(text, fix=fix)

    def init(params: Tree) -> OptimizerState:
        check(_torch.inside_torch_func())
        rate = lr(0) if callable(lr) else lr
        given = options if lr is None else {**options, "lr": rate}
        with torch.no_grad():
            return _begin(cls, given, moments, scalars, params)

    def rule(*given: Any) -> dict[str, Tensor]:
        *columns, now = given
        check(now.live)
        own = options if now.rate is None else {**options, "lr": now.rate}
        own = own if now.decays else {**own, "weight_decay": 0.0}
        return _step_object(cls, own, moments, columns, now)

    facts, verb = (
        {**options, "lr": lr, "decay_mask": decay_mask},
        f"{cls.__module__}.{cls.__qualname__}",
    )
    return _by_rule(verb, rule, facts, moments, scalars, init)


def _names_of(cls: Any, options: dict[str, Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The moments and scalars of a class, by a step on two elements, which checks its arguments."""
    param = torch.nn.Parameter(torch.zeros(2))
    param.grad = torch.ones(2)
    optimizer = cls([param], **options)
    first = set(_begun_in(optimizer, param))
    optimizer.step()
    kept = {name: value for name, value in optimizer.state[param].items() if value is not None}
    for name, value in kept.items():
        fits = isinstance(value, Tensor) and value.shape in (param.shape, ())
        if not fits or (name not in first and not issubclass(cls, torch.optim.SGD)):
            text = f"from_torch: {cls.__name__} cannot be used: it keeps {name!r}"
            fix = "let _init_group make it, as a tensor of 0 dims or of the parameter's shape"
            raise PlanError(text, fix=fix)
    moments = tuple(name for name, value in kept.items() if value.ndim)
    return moments, tuple(name for name in kept if name not in moments)


def _begin(
    cls: Any,
    options: dict[str, Any],
    names: tuple[str, ...],
    scalars: tuple[str, ...],
    params: Tree,
) -> OptimizerState:
    """Make the state before the first step, each moment run by run."""
    found = flat.unpacked(params)
    layout = found.layout()
    hollow = not found.pieces or found.pieces[0].is_meta
    home = torch.device("cpu") if hollow else found.pieces[0].device
    single = _begun(cls, options, torch.zeros(1, device=home))
    wholes: dict[str, list[Tensor]] = {name: [] for name in names}
    for r, run in enumerate(layout.runs):
        x = flat.whole_run(run, found.pieces)
        x = flat.joined(run, [found.pieces[i] for i in run.members]) if x is None else read(x)
        begun = {} if x.is_meta or not wholes else _begun(cls, options, x)
        for name, mine in wholes.items():
            begins = begun.pop(name, None)
            begins = torch.zeros_like(x) if begins is None else begins
            mine.append(flat.made(layout, r, begins, name))
    moments = {name: flat.with_wholes(layout, mine) for name, mine in wholes.items()}
    return OptimizerState(0, moments, {name: single[name] for name in scalars})


def _begun(cls: Any, options: dict[str, Any], value: Tensor) -> dict[str, Any]:
    """Make what an optimizer keeps for a parameter before its first step."""
    param = _with_grad(value, value)
    return _begun_in(cls([param], **options), param)


def _begun_in(optimizer: torch.optim.Optimizer, param: Tensor) -> dict[str, Any]:
    for group in optimizer.param_groups:
        _torch.optimizer_init_group(optimizer, group)
    return optimizer.state[param]


def _step_object(
    cls: Any, options: dict[str, Any], names: tuple[str, ...], columns: Sequence[list], now: _Now
) -> dict[str, Tensor]:
    """Step in place on columns by an object of a class; gives the new scalars."""
    pieces, *moments, grads = columns
    params = list(map(_with_grad, pieces, grads))
    if issubclass(cls, torch.optim.SGD):
        # It begins with the first gradient, which zeros and no dampening give, too.
        options = {**options, "dampening": 0.0} if now.first else options
        options = {**options, "fused": False} if _fused_skips(params) else options
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


def warmup_cosine(
    peak: float, warmup_steps: int, total_steps: int, floor: float = 0.0
) -> Callable[[int], float]:
    """A learning rate that rises linearly to `peak`, then falls along half a cosine to `floor`.

    Args:
      peak: the highest rate, reached at step `warmup_steps` - 1.
      warmup_steps: how many steps the rise takes.
      total_steps: the first step at which the rate has reached `floor`.
      floor: the lowest rate.

    Returns:
      A function from the step, counted from 0, to the rate, which optimizers take as `lr`.

    Raises:
      PlanError: the warmup leaves no step to fall in.

    Example:
      >>> lr = warmup_cosine(1.0, 2, 6)
      >>> [round(lr(step), 3) for step in range(7)]
      [0.5, 1.0, 1.0, 0.854, 0.5, 0.146, 0.0]
    """
    if not 0 <= warmup_steps < total_steps:
        text = f"warmup_cosine: warmup_steps={warmup_steps}, total_steps={total_steps}"
        why = "the rate would never fall: the warmup is a part of the whole"
        raise PlanError(text, [why], "the order is peak, warmup_steps, total_steps, floor")

    def lr(step: int) -> float:
        if step < warmup_steps:
            return peak * (step + 1) / warmup_steps
        done = min(1.0, (step - warmup_steps) / (total_steps - warmup_steps))
        return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * done))

    return lr

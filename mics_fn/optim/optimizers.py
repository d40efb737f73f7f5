"""Optimizers by name, and a learning rate that rises and falls.

The arithmetic is torch's: for each step a `torch.optim` object is made around the parameters and
the state that the pytree carries, and dropped afterwards. Only elementwise optimizers can work on
flat pieces of parameters: those of torch that are, by name, and what a caller says is one.

[Note: masked steps] On an accelerator a step whose gradient may not be finite is launched before
the host knows: torch's fused kernels read a number of the device, `found_inf`, and write nothing if
it is 1. So the host need not wait for the norm in each step. It reads the number a step later, and
takes back what only the host has, the counts of steps. It is 1 as well if collectives were aborted
before the last of them was done, so that an abort leaves the state before the step, whole.
"""

import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from inspect import Parameter, signature
from itertools import chain
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor
from torch.optim.adam import adam as _adam

from mics_fn import _torch, checks
from mics_fn.errors import PlanError
from mics_fn.offload import read
from mics_fn.optim.columns import Column, columns, updating
from mics_fn.optim.comparing import facts_from
from mics_fn.optim.flat import (
    FlatShards,
    Unpacked,
    joined,
    made,
    unpacked,
    whole_run,
    with_wholes,
    zeros,
)
from mics_fn.optim.transform import (
    Mask,
    Rate,
    Transform,
    check_mask,
    check_own,
    check_rule,
    decay_keys,
    found_inf,
    from_step,
    rate_at,
)
from mics_fn.tree import Tree

# torch's own optimizers as pure transforms over shards.

# Options of Adam with which most of a step's time would go into making an object for it.
_FUSED_ADAM = {"lr", "betas", "eps", "weight_decay", "fused"}
# Their state begins with zeros, and torch's code for them has derivatives by the rate too.
DIFFERENTIABLE = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
ELEMENTWISE = (
    *DIFFERENTIABLE,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.ASGD,
    torch.optim.Rprop,
)
_WHOLE = "it needs whole matrices, and a shard is a flat piece"
REFUSED = {
    torch.optim.Adafactor: _WHOLE,
    torch.optim.Muon: _WHOLE,
    torch.optim.LBFGS: "it takes inner products over all parameters, and calls the loss again",
    torch.optim.SparseAdam: "it needs sparse gradients, and gathered gradients are dense",
}


class OptimizerNames(NamedTuple):
    """The names of what an optimizer class keeps; its first step makes those in `late`."""

    moments: tuple[str, ...]
    scalars: tuple[str, ...]
    late: tuple[str, ...]

    def fits(self, state: Any) -> bool:
        """Whether a state has these names."""
        return set(state.moments) == set(self.moments) and set(state.scalars) == set(self.scalars)


class TorchState(NamedTuple):
    """State of a torch optimizer.

    Args:
      count: steps done.
      moments: by name, what the class keeps for each element: `FlatShards` of the parameters' tree.
      scalars: by name, what it keeps for each parameter: 0-dim tensors, the same for all leaves.
    """

    count: int
    moments: dict[str, FlatShards]
    scalars: dict[str, Tensor]


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
      options: the class's other arguments.

    Returns:
      A `Transform` whose state is a pytree; no optimizer object is kept.

    Memory: the state that the class keeps, for this rank's shards.

    Raises:
      PlanError: the class is not, or not known to be, elementwise; or an option is not one of
        its own, is NaN, or no bool where the class has one. What else it refuses it raises itself.

    Example:
      >>> optimizer = from_torch(torch.optim.RMSprop, lr=1e-2, momentum=0.9)
    """
    if lr is not None:
        check_rule("from_torch", lr, None)
    check_mask("from_torch", decay_mask)
    checks.choice("from_torch", "elementwise", elementwise, True, False)
    _check_class(cls, elementwise)
    known: Mapping[str, Parameter] = signature(cls).parameters
    if all(each.kind is not Parameter.VAR_KEYWORD for each in known.values()):
        checks.options("from_torch", options, known, PlanError)
    for name, value in options.items():
        if isinstance(value, float):
            checks.number("from_torch", name, value)
        if name in known and cls.__module__.partition(".")[0] == "torch":
            _check_flag(name, value, known[name])
    return torch_rule("from_torch", cls, lr, decay_mask, options)


def _check_class(cls: Any, elementwise: bool) -> None:
    """Raise PlanError for a class that cannot step on flat pieces, or of which none knows."""
    fix = f"use an elementwise one: {', '.join(known.__name__ for known in ELEMENTWISE)}"
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        reason = "it is not a class of torch.optim.Optimizer"
    elif cls in REFUSED:
        reason = REFUSED[cls]
    elif cls in ELEMENTWISE or elementwise:
        return
    else:
        reason = "it is not known to be elementwise, and a shard is a flat piece"
        fix = "pass elementwise=True if what it does to an element depends on no other element"
    name = getattr(cls, "__name__", type(cls).__name__)
    raise PlanError(f"from_torch: {name} cannot be used: {reason}", fix=fix)


def _kind_of(verb: str, cls: Any, options: dict[str, Any]) -> OptimizerNames:
    """What a class keeps, by a step on two elements; its arguments are checked by it, too."""
    param = torch.nn.Parameter(torch.zeros(2))
    param.grad = torch.ones(2)
    optimizer = cls([param], **options)
    begun = _begun_in(optimizer, param)
    first = {name for name, value in begun.items() if isinstance(value, Tensor)}
    optimizer.step()
    kept = {name: value for name, value in optimizer.state[param].items() if value is not None}
    for name, value in kept.items():
        if not isinstance(value, Tensor) or value.shape not in (param.shape, ()):
            text = f"{verb}: {cls.__name__} cannot be used: it keeps {name!r}, which is neither"
            text = f"{text} a tensor with the shape of the parameter nor one without dimensions"
            raise PlanError(text, fix="let _init_group make it such a tensor")
    moments = tuple(name for name, value in kept.items() if value.ndim)
    scalars = tuple(name for name in kept if name not in moments)
    if unset := [name for name in scalars if name not in first]:
        text = f"{verb}: {cls.__name__} cannot be used: its first step makes {unset[0]!r}"
        raise PlanError(text, fix="let _init_group make it")
    return OptimizerNames(moments, scalars, tuple(name for name in kept if name not in first))


def _check_flag(name: str, value: Any, known: Parameter) -> None:
    """Raise PlanError for what is not a bool where torch expects one and does not look."""
    if isinstance(known.default, bool):
        checks.choice("from_torch", name, value, True, False)
    elif known.default is None and bool in get_args(known.annotation):
        checks.choice("from_torch", name, value, True, False, None)


def torch_rule(
    verb: str, cls: Any, lr: Rate | None, decay_mask: Mask | None, options: dict[str, Any]
) -> Transform:
    """`from_torch` for a verb of any name, whose options were looked at."""

    def at(step: int) -> dict[str, Any]:
        return options if lr is None else {**options, "lr": rate_at(verb, lr, step)}

    with _torch.without_torch_func():
        kind = _kind_of(verb, cls, _without_rate(at(0)))

    def init(params: Tree) -> TorchState:
        if _torch.inside_torch_func():
            return _init_to_differentiate(cls, kind, params)
        with torch.no_grad():
            return _init(cls, _without_rate(at(0)), kind, params)

    def step(
        grads: Unpacked, state: TorchState, params: Unpacked, donate: bool
    ) -> tuple[Unpacked, TorchState]:
        fits = isinstance(state, TorchState) and kind.fits(state)
        check_own(fits, f"torch.optim.{cls.__name__} with these options", state)
        targets = [params, *state.moments.values()]
        keys = decay_keys(verb, decay_mask, params)
        now = at(state.count)
        by = [now.get("lr")]
        work = columns(targets, [grads], keys, by=by, donate=donate)
        take = _live_step if work.live else _step
        scalars, stepped = state.scalars, False
        for block in work.blocks:
            for decays, found in _by_key(block).items():
                given = {**now, "weight_decay": 0.0} if decays is False else now
                mine, stepped = [column.tensors for column in found], True
                with updating(found):  # torch updates all of them in one call
                    scalars = take(cls, given, kind, mine, state)
        if not stepped:
            scalars = take(cls, now, kind, [_nothing(params, kind)], state)
        params, *kept = work.targets()
        moments = dict(zip(state.moments, kept, strict=True))
        return params, TorchState(state.count + 1, moments, scalars)

    def masked(state: TorchState) -> bool:
        # What torch makes itself in the first step would be made in one that is not taken, too.
        return isinstance(state, TorchState) and (state.count > 0 or not kind.late)

    kind_of = f"{cls.__module__}.{cls.__qualname__}"
    facts = facts_from(kind_of, {**options, "lr": lr, "decay_mask": decay_mask})
    fused = cls in DIFFERENTIABLE and options.get("fused") is True
    return from_step(init, step, facts, masked if fused else None)


def _by_key(block: Iterable[Column]) -> dict[Hashable, list[Column]]:
    """Columns by whether they decay."""
    found: dict[Hashable, list[Column]] = {}
    for column in block:
        found.setdefault(column.key, []).append(column)
    return found


def _init(cls: Any, options: dict[str, Any], kind: OptimizerNames, params: Tree) -> TorchState:
    found = unpacked(params)
    layout = found.layout()
    hollow = not found.pieces or found.pieces[0].is_meta
    home = torch.device("cpu") if hollow else found.pieces[0].device
    scalars = _begun(cls, options, torch.zeros(1, device=home))
    wholes: dict[str, list[Tensor]] = {name: [] for name in kind.moments}
    for r, run in enumerate(layout.runs):
        x = whole_run(run, found.pieces)
        x = joined(run, [found.pieces[i] for i in run.members]) if x is None else read(x)
        begun = {} if x.is_meta or not wholes else _begun(cls, options, x)
        for name, mine in wholes.items():
            late = name in kind.late or x.is_meta
            begins = torch.zeros_like(x) if late else begun.pop(name)
            mine.append(made(layout, r, begins, name))
    moments = {name: with_wholes(layout, mine) for name, mine in wholes.items()}
    return TorchState(0, moments, {name: scalars[name] for name in kind.scalars})


def _begun(cls: Any, options: dict[str, Any], value: Tensor) -> dict[str, Any]:
    """What an optimizer keeps for a parameter before its first step."""
    param = _with_grad(value, value)
    return _begun_in(cls([param], **options), param)


def _begun_in(optimizer: torch.optim.Optimizer, param: Tensor) -> dict[str, Any]:
    for group in optimizer.param_groups:
        _torch.optimizer_init_group(optimizer, group)
    return optimizer.state[param]


def _step(
    cls: Any,
    options: dict[str, Any],
    kind: OptimizerNames,
    mine: list[tuple[Tensor, ...]],
    state: TorchState,
) -> dict[str, Tensor]:
    """Let torch step in place on columns of (parameter, *moments, gradient); gives new scalars."""
    count = len(mine)
    # One copy of each scalar for every column, made together.
    scalars = [scalar.repeat(count).unbind() for scalar in state.scalars.values()]
    if _is_fused_adam(cls, options):
        values, means, squares, grads = map(list, zip(*mine, strict=True))
        (steps,) = map(list, scalars)
        given = {name: options[name] for name in ("lr", "weight_decay", "eps", "fused")}
        given |= dict(zip(("beta1", "beta2"), options["betas"], strict=True))
        given |= {"amsgrad": False, "maximize": False, "found_inf": found_inf()}
        given["decoupled_weight_decay"] = cls is torch.optim.AdamW
        _adam(values, grads, means, squares, [], steps, **given)
        return dict.fromkeys(kind.scalars, steps[0])
    params = [_with_grad(piece, grad) for piece, *_, grad in mine]
    if cls is torch.optim.SGD and any(p.itemsize == 2 and p.is_cpu for p in params):
        # On the CPU torch's fused SGD skips most 16-bit elements: pytorch issue 191763.
        options = {**options, "fused": False}
    optimizer = cls(params, **options)
    names = (*kind.moments, *state.scalars)
    kept = [column[1:-1] for column in mine]
    for param, targets, *own in zip(params, kept, *scalars, strict=True):
        optimizer.state[param] = dict(zip(names, (*targets, *own), strict=True))
        if state.count == 0:
            for name in kind.late:  # torch makes these itself
                del optimizer.state[param][name]
    if found_inf() is not None:
        vars(optimizer)["found_inf"] = found_inf()
    optimizer.step()
    for param, targets in zip(params, kept, strict=True):
        found = optimizer.state[param]
        for name, target in zip(kind.moments, targets, strict=True):
            if found[name] is not target:
                target.copy_(found[name])
    return {name: optimizer.state[params[0]][name] for name in kind.scalars}


def _is_fused_adam(cls: Any, options: dict[str, Any]) -> bool:
    """Whether torch's function for a step does the same as an object that is made for it."""
    if cls not in (torch.optim.Adam, torch.optim.AdamW) or set(options) != _FUSED_ADAM:
        return False
    rate = options["lr"]  # the object checks it
    return options["fused"] is True and isinstance(rate, int | float) and rate >= 0


def _live_step(
    cls: Any,
    options: dict[str, Any],
    kind: OptimizerNames,
    mine: list[tuple[Tensor, ...]],
    state: TorchState,
) -> dict[str, Tensor]:
    """`_step` by torch's differentiable ops, on copies that are not leaves of autograd."""
    _check_differentiable(cls)
    options = {**options, "differentiable": True, "foreach": False, "fused": False}
    if cls is torch.optim.SGD and state.count == 0:
        # torch would begin with a detached gradient; zeros and no dampening give the same.
        options = {**options, "dampening": 0.0}
    scalars = state.scalars
    for param, *targets, grad in mine:
        param.grad = grad
        optimizer = cls([param], **options)
        # What torch computes from a count in float32 would have no more digits than that.
        own = {name: scalar.double() for name, scalar in state.scalars.items()}
        optimizer.state[param] = {**dict(zip(kind.moments, targets, strict=True)), **own}
        optimizer.step()
        made = optimizer.state[param]
        scalars = {name: made[name].to(x.dtype) for name, x in state.scalars.items()}
        param.grad = None
    return scalars


def _init_to_differentiate(cls: Any, kind: OptimizerNames, params: Tree) -> TorchState:
    """The state inside torch.func, for the optimizers whose state begins with zeros."""
    _check_differentiable(cls)
    moments = {name: zeros(params, name) for name in kind.moments}
    return TorchState(0, moments, {name: torch.zeros(()) for name in kind.scalars})


def _check_differentiable(cls: Any) -> None:
    if cls not in DIFFERENTIABLE:
        text = f"opt_step: from_torch({cls.__name__}) has no derivative, and here one is asked for"
        raise PlanError(text, fix="use sgd, adam, adamw or lion, or call it under torch.no_grad()")


def _without_rate(options: dict[str, Any]) -> dict[str, Any]:
    """Options to try a class with, in which a rate to differentiate by becomes a number."""
    live = isinstance(options.get("lr"), Tensor)
    return {**options, "lr": 1e-2} if live else options


def _nothing(params: Unpacked, kind: OptimizerNames) -> tuple[Tensor, ...]:
    """A column for a rank that holds no element, and has to count steps nevertheless."""
    device = params.pieces[0].device if params.pieces else torch.device("cpu")
    return (torch.zeros(1, device=device),) * (2 + len(kind.moments))


def _with_grad(piece: Tensor, grad: Tensor) -> Tensor:
    param = piece.detach()  # another tensor object on the same memory, which gets the gradient
    param.grad = grad
    return param


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
    check_rule("sgd", lr, decay_mask, momentum=momentum, weight_decay=weight_decay)
    checks.choice("sgd", "nesterov", nesterov, True, False)
    options = {"momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay}
    return torch_rule("sgd", torch.optim.SGD, lr, decay_mask, {**options, "fused": True})


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
    options = {"betas": betas, "eps": eps, "weight_decay": weight_decay}
    check_rule("adam", lr, decay_mask, **options)
    return torch_rule("adam", torch.optim.Adam, lr, decay_mask, {**options, "fused": True})


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
    options = {"betas": betas, "eps": eps, "weight_decay": weight_decay}
    check_rule("adamw", lr, decay_mask, **options)
    return torch_rule("adamw", torch.optim.AdamW, lr, decay_mask, {**options, "fused": True})


class LionState(NamedTuple):
    """State of `lion`: the number of steps done, and the running mean of gradients."""

    count: int
    mean: FlatShards


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
    check_rule("lion", lr, decay_mask, betas=betas, weight_decay=weight_decay)

    def init(params: Tree) -> LionState:
        return LionState(0, zeros(params, "mean"))

    def step(
        grads: Unpacked, state: LionState, params: Unpacked, donate: bool
    ) -> tuple[Unpacked, LionState]:
        check_own(isinstance(state, LionState), "lion", state)
        rate, keys = rate_at("lion", lr, state.count), decay_keys("lion", decay_mask, params)
        work = columns([params, state.mean], [grads], keys, by=[rate], donate=donate)
        for column in chain.from_iterable(work.blocks):
            p, m, g = column.tensors
            with updating([column]):
                if column.key is not False:
                    p.mul_(1 - rate * weight_decay)
                p.sub_(torch.lerp(m, g, 1 - betas[0]).sign_().mul_(rate))
                m.lerp_(g, 1 - betas[1])
        params, mean = work.targets()
        return params, LionState(state.count + 1, mean)

    given = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "decay_mask": decay_mask}
    return from_step(init, step, facts_from("lion", given))


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
      PlanError: a number is out of its range, or the warmup leaves no step to fall in.

    Example:
      >>> lr = warmup_cosine(1.0, 2, 6)
      >>> [round(lr(step), 3) for step in range(7)]
      [0.5, 1.0, 1.0, 0.854, 0.5, 0.146, 0.0]
    """
    verb, fix = "warmup_cosine", "the order is peak, warmup_steps, total_steps, floor"
    checks.number(verb, "peak", peak, least=0, fix=fix)
    checks.number(verb, "floor", floor, least=0, most=peak, fix=fix)
    for name, steps in (("warmup_steps", warmup_steps), ("total_steps", total_steps)):
        checks.integer(verb, name, steps, 0, fix=fix)
    if total_steps <= warmup_steps:
        text = f"{verb}: warmup_steps={warmup_steps}, total_steps={total_steps}"
        raise PlanError(text, ["the rate would never fall: the warmup is a part of the whole"], fix)

    def lr(step: int) -> float:
        if step < warmup_steps:
            return peak * (step + 1) / warmup_steps
        done = min(1.0, (step - warmup_steps) / (total_steps - warmup_steps))
        return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * done))

    return lr

"""Optimizers by name, and a learning rate that rises and falls."""

import math
from collections.abc import Callable
from contextlib import suppress
from itertools import chain
from operator import index
from typing import NamedTuple

import torch

from mics_fn import checks
from mics_fn.errors import OptimizerError, message
from mics_fn.optim.column import updating
from mics_fn.optim.columns import columns
from mics_fn.optim.flat import FlatShards, Unpacked, zeros
from mics_fn.optim.options import facts_from
from mics_fn.optim.torch_optim import torch_rule
from mics_fn.optim.transform import (
    Mask,
    Rate,
    Transform,
    check_own,
    check_rule,
    decay_keys,
    from_step,
    rate_at,
)
from mics_fn.tree import Tree


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
      OptimizerError: an option is out of its range, or of the wrong type.

    Example:
      >>> optimizer = sgd(0.1, momentum=0.9, nesterov=True)
    """
    check_rule("sgd", lr, decay_mask, momentum=momentum, weight_decay=weight_decay)
    checks.choice("sgd", "nesterov", nesterov, True, False, kind=OptimizerError)
    if nesterov and not momentum:
        text = f"sgd: nesterov=True with momentum={momentum}"
        raise OptimizerError(message(text, fix="pass momentum= above 0, such as 0.9"))
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
      OptimizerError: an option is out of its range, or of the wrong type.

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
      OptimizerError: an option is out of its range, or of the wrong type.

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
      OptimizerError: an option is out of its range, or of the wrong type.

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
      OptimizerError: a number is out of its range, or the warmup leaves no step to fall in.

    Example:
      >>> lr = warmup_cosine(1.0, 2, 6)
      >>> [round(lr(step), 3) for step in range(7)]
      [0.5, 1.0, 1.0, 0.854, 0.5, 0.146, 0.0]
    """
    verb, fix = "warmup_cosine", "the order is peak, warmup_steps, total_steps, floor"
    checks.number(verb, "peak", peak, least=0, fix=fix, kind=OptimizerError)
    checks.number(verb, "floor", floor, least=0, most=peak, fix=fix, kind=OptimizerError)
    for name, steps in (("warmup_steps", warmup_steps), ("total_steps", total_steps)):
        checks.integer(verb, name, steps, 0, fix=fix, kind=OptimizerError)
    if total_steps <= warmup_steps:
        text = f"{verb}: warmup_steps={warmup_steps}, total_steps={total_steps}"
        lines = ["the rate would never fall: the warmup is a part of the whole"]
        raise OptimizerError(message(text, lines, fix))

    def lr(step: int) -> float:
        fix = "pass the step, counted from 0"
        with suppress(TypeError):
            step = index(step)  # an integer of a tensor or of numpy is one, too
        checks.integer(f"the rate of {verb}", "step", step, 0, fix=fix, kind=OptimizerError)
        if step < warmup_steps:
            return peak * (step + 1) / warmup_steps
        done = min(1.0, (step - warmup_steps) / (total_steps - warmup_steps))
        return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * done))

    return lr

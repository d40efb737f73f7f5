"""Optimizers by name, and a learning rate that rises and falls."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from mics_fn.optim.columns import columns
from mics_fn.optim.flat import FlatShards, Unpacked, zeros
from mics_fn.optim.options import facts_from
from mics_fn.optim.torch_optim import from_torch
from mics_fn.optim.transform import Mask, Rate, Transform, decay_keys, from_step, rate_at
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

    Example:
      >>> optimizer = sgd(0.1, momentum=0.9, nesterov=True)
    """
    options = {"momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay}
    return from_torch(torch.optim.SGD, lr=lr, decay_mask=decay_mask, fused=True, **options)


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

    Example:
      >>> optimizer = adam(1e-3)
    """
    options = {"betas": betas, "eps": eps, "weight_decay": weight_decay}
    return from_torch(torch.optim.Adam, lr=lr, decay_mask=decay_mask, fused=True, **options)


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

    Example:
      >>> optimizer = adamw(1e-3, decay_mask=lambda path: "bias" not in path)
    """
    options = {"betas": betas, "eps": eps, "weight_decay": weight_decay}
    return from_torch(torch.optim.AdamW, lr=lr, decay_mask=decay_mask, fused=True, **options)


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

    Example:
      >>> optimizer = lion(1e-4, weight_decay=0.1)
    """

    def init(params: Tree) -> LionState:
        return LionState(0, zeros(params))

    def step(
        grads: Unpacked, state: LionState, params: Unpacked, donate: bool
    ) -> tuple[Unpacked, LionState]:
        rate, keys = rate_at(lr, state.count), decay_keys(decay_mask, params)
        work = columns([params, state.mean], [grads], keys, by=[rate], donate=donate)
        for decays, (p, m, g) in work.found:
            if decays is not False:
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

    Example:
      >>> lr = warmup_cosine(1.0, 2, 6)
      >>> [round(lr(step), 3) for step in range(7)]
      [0.5, 1.0, 1.0, 0.854, 0.5, 0.146, 0.0]
    """

    def lr(step: int) -> float:
        if step < warmup_steps:
            return peak * (step + 1) / warmup_steps
        done = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
        return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * done))

    return lr

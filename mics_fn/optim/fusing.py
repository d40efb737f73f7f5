"""Optimizers whose arithmetic does not depend on where an element lies in memory.

On the CPU, torch's fused kernels compute the last few elements of a tensor one by one, and those
round in another way than elements in the vectors before them. So the bits of a step depend on where
a tensor ends, which is where a shard ends. torch's other kernels have no such difference.
"""

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from mics_fn.optim.transform import Optimizer, Transform, as_transform

_UNFUSED: ContextVar[bool] = ContextVar("unfused", default=False)


def unfused(optimizer: Optimizer) -> Transform:
    """The same optimizer without torch's fused kernels, whose bits depend on how shards are cut.

    Args:
      optimizer: a `Transform`, or an object with `init` and `update`. Only what torch computes
        changes; an optimizer that is not elementwise stays so.

    Returns:
      A `Transform` with the same state, so a state may go from one to the other. On the CPU it
      takes several passes over memory instead of one.

    Example:
      >>> optimizer = unfused(optim.adamw(1e-3))
    """
    inner = as_transform(optimizer)

    def around(fn: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            token = _UNFUSED.set(True)
            try:
                return fn(*args)
            finally:
                _UNFUSED.reset(token)

        return call

    unpacked = inner.step_unpacked
    return inner._replace(
        update=around(inner.update),
        step=around(inner.step),
        step_unpacked=None if unpacked is None else around(unpacked),
    )


def kernels(options: dict[str, Any]) -> dict[str, Any]:
    """Options of a torch optimizer, without fused kernels inside of `unfused`."""
    return {**options, "fused": False} if _UNFUSED.get() and options.get("fused") else options

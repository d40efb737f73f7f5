"""Limits on gradients: a factor and a clamp, in one pass.

Gradients that arrive bucket by bucket are limited when a step takes them. Of what lies elsewhere
one bucket at a time is on the device then, and no limit is written to host memory or to a file.
"""

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from mics_fn import tree
from mics_fn.optim.columns import in_chunks, map_columns
from mics_fn.shards import Arrival, Arriving, Sharded, is_leaf
from mics_fn.tree import Tree


def limited(
    grads: Tree | Arriving,
    factor: Tensor | float = 1.0,
    max_value: float | None = None,
    *,
    donate: bool = False,
) -> Any:
    """Gradients times a factor, then clamped, in one pass; all clipping is done here.

    Args:
      grads: tree of shards, or `Arriving`.
      factor: a float, or a 0-dim float64 tensor, for which the host does not wait.
      max_value: elements are clamped to [-max_value, max_value].
      donate: write into the chunks of `grads`, which cannot be used afterwards.

    Returns:
      The limited gradients; `grads` itself if the factor is 1 and there is no `max_value`.

    Memory: a copy of the shards; with `donate` only of those that do not lie in whole chunks.

    Raises:
      OptimizerError: `donate` where a derivative is asked for.
    """

    if not isinstance(factor, Tensor) and factor == 1.0 and max_value is None:
        return grads

    if isinstance(grads, Arriving):
        return Limited(grads, factor, max_value)

    def limit(grad: Tensor) -> None:
        if not isinstance(factor, Tensor):
            if factor != 1.0:
                grad.mul_(factor)
        elif grad.itemsize < 4:
            # A factor in float16 would be off by up to 1e-3, or be 0.
            grad.copy_(grad.float().mul_(factor.float()))
        else:
            grad.mul_(factor.to(grad.dtype))
        if max_value is not None:
            grad.clamp_min_(-max_value).clamp_max_(max_value)  # clamp_ has no rule for vmap

    return map_columns(limit, in_chunks(grads) if donate else grads, donate=donate)


@dataclass(frozen=True, eq=False)
class Limited:
    """Gradients times a factor, then clamped, once a step takes them.

    Args:
      given: the gradients.
      factor, max_value: as for `limited`.
    """

    given: Arriving
    factor: Tensor | float
    max_value: float | None

    def arrival(self) -> Arrival:
        """The limited gradients, in new memory."""
        found = self.given.arrival()
        leaves = [x for x in tree.flatten(found.like, is_leaf)[0] if isinstance(x, Sharded)]

        def take(place: int) -> list[Tensor]:
            pairs = zip(found.order[place], found.take(place), strict=True)
            held = [Sharded(x.detach(), leaves[i].bucket, leaves[i].slot) for i, x in pairs]
            return [x.data for x in limited(held, self.factor, self.max_value)]

        whole: Any = lambda: limited(found.whole(), self.factor, self.max_value)  # noqa: E731
        return replace(found, take=take, whole=whole)

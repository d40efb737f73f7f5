"""What an optimizer of torch keeps, and whether it can work on shards, found out by trying it."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from mics_fn import _torch
from mics_fn.errors import OptimizerError, message

_WHOLE = "it needs whole matrices, and a shard is a flat piece"
REFUSED = {
    "Adafactor": _WHOLE,
    "Muon": _WHOLE,
    "LBFGS": "it calls the loss several times a step and takes inner products over all parameters",
    "SparseAdam": "it needs sparse gradients, and gathered gradients are dense",
}


class Kind(NamedTuple):
    """The names of what an optimizer class keeps; its first step makes those in `late`."""

    moments: tuple[str, ...]
    scalars: tuple[str, ...]
    late: tuple[str, ...]

    def fits(self, state: Any) -> bool:
        """Whether a state has these names."""
        return set(state.moments) == set(self.moments) and set(state.scalars) == set(self.scalars)


def examined(verb: str, cls: Any, options: dict[str, Any]) -> Kind:
    """Try a class on a tiny parameter: what it keeps, and whether it is elementwise."""
    name = getattr(cls, "__name__", type(cls).__name__)
    reason = REFUSED.get(name)
    if reason is None and not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        reason = "it is not a class of torch.optim.Optimizer"
    if reason is None and not hasattr(cls, "_init_group"):
        reason = "its state cannot be made before the first step (it has no _init_group)"
    if reason is None:
        try:
            whole, kind = _trial(cls, options, lambda value: [value])
        except (TypeError, ValueError, RuntimeError, IndexError) as error:
            text, lines = f"{verb}: {name} refuses its arguments", str(error).splitlines()[:1]
            fix = f"pass what torch.optim.{name} takes"
            raise OptimizerError(message(text, lines, fix)) from error
        else:
            pieces, _ = _trial(cls, options, lambda value: list(value.flatten().split([7, 0, 17])))
            if torch.allclose(whole, pieces, rtol=1e-5, atol=1e-7):
                return kind
            reason = (
                "it is not elementwise: its steps differ between a matrix and flat pieces of it"
            )
    fix = "use an elementwise one: SGD, Adam, AdamW, RMSprop, Adagrad, Adadelta, NAdam, RAdam, ..."
    raise OptimizerError(message(f"{verb}: {name} cannot be used: {reason}", fix=fix))


def _trial(cls: Any, options: dict[str, Any], cut: Any) -> tuple[Tensor, Kind]:
    """Three steps on a small matrix, cut into parts: the flat values after them, and the state."""
    random = torch.Generator().manual_seed(0)
    value = torch.randn(4, 6, generator=random)
    params = [torch.nn.Parameter(part.clone()) for part in cut(value)]
    grads = [torch.randn(4, 6, generator=random) for _ in range(3)]
    optimizer = cls(params, **options)
    first: dict[str, Any] = {}
    for step, grad in enumerate(grads):
        for param, part in zip(params, cut(grad), strict=True):
            param.grad = part.clone()
        if step == 0:
            for group in optimizer.param_groups:
                _torch.optimizer_init_group(optimizer, group)
            first = dict(optimizer.state[params[0]])
        optimizer.step()
    kept = {k: v for k, v in optimizer.state[params[0]].items() if isinstance(v, Tensor)}
    kind = Kind(
        moments=tuple(k for k, v in kept.items() if v.shape == params[0].shape),
        scalars=tuple(k for k, v in kept.items() if v.shape != params[0].shape),
        late=tuple(k for k in kept if not isinstance(first.get(k), Tensor)),
    )
    return torch.cat([param.detach().flatten() for param in params]), kind

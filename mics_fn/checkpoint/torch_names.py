"""What an optimizer keeps, under the names that torch gives it in a state dict.

`torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`, flattened as torchtitan does,
has `state.<parameter>.<moment>` for tensors and `param_groups.<parameter>.<option>` for options.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from mics_fn.checkpoint.exported import Saved, saved
from mics_fn.errors import OptimizerError, message
from mics_fn.optim import by_leaf
from mics_fn.shards import Sharded

OPTIMIZER = "optimizer."


def optimizer_leaves(
    verb: str, opt: Any, params: Sequence[Saved]
) -> tuple[dict[str, Any], list[Saved]]:
    """The moments and scalars of each trained leaf, by name; and how they are written.

    Args:
      verb: for errors.
      opt: the field `opt` of a `TrainState`.
      params: the parameters that are written; others are left out.

    Raises:
      OptimizerError: it is not, or does not contain, one optimizer made by `from_torch`.
    """
    found = list(_torch_states(opt))
    if len(found) != 1:
        what = f"{verb}: the state has {len(found)} optimizers that torch has names for, expected 1"
        fix = "use adamw, adam, sgd or from_torch, alone or in a chain; or pass state.params"
        raise OptimizerError(message(what, fix=fix))
    values: dict[str, Any] = {}
    leaves: list[Saved] = []
    moments = {name: by_leaf(moment) for name, moment in found[0].moments.items()}
    for number, (kind, of) in enumerate([*moments.items(), *found[0].scalars.items()], start=1):
        for param in params:
            leaf = of if isinstance(of, Tensor) else of.get(param.key)
            trained = isinstance(next(iter(moments.values()), {}).get(param.key), Sharded)
            if trained and (leaf is of or isinstance(leaf, Sharded)):
                name = f"{OPTIMIZER}state.{param.name}.{kind}"
                values[name] = leaf
                leaves.append(saved(verb, name, name, leaf, tree=number))
    return values, leaves


def _torch_states(opt: Any) -> Iterator[Any]:
    """The states of torch's optimizers in a state, which may be that of a chain."""
    if isinstance(getattr(opt, "moments", None), dict):
        yield opt
    elif isinstance(opt, tuple):
        for part in opt:
            yield from _torch_states(part)


def group_options(params: Sequence[Saved], options: Mapping[str, Any] | None) -> dict[str, Any]:
    """The options of the optimizer for each parameter, by name; frozen ones have them, too.

    >>> group_options([], {"lr": 0.1})
    {}
    """
    return {
        f"{OPTIMIZER}param_groups.{param.name}.{key}": value
        for param in params
        for key, value in (options or {}).items()
        if key != "params"
    }

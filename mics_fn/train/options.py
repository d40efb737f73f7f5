"""What is compared for a `Trainer`: options that change numbers, and every K steps replicas."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from mics_fn import points
from mics_fn.optim import Comparison, Guard, optimizer_facts, same_options, versions
from mics_fn.shards import homes_of, names
from mics_fn.train.guarding import SCALE
from mics_fn.tree import Tree


def compare_options(trainer: Any, params: Tree, groups: Any, guard: Guard) -> None:
    """Compare the options of a `Trainer` between ranks.

    Args:
      trainer: the `Trainer`, with its state.
      params: the tree of shards that it trains.
      groups: as for `shard`.
      guard: the guard to compare, which need not be that of the trainer yet.

    Communication: that of `same_options`.

    Raises:
      DesyncError: ranks have other options.
    """
    homes = list(dict.fromkeys(homes_of("Trainer", groups, params)))
    several = any(home.partition_size * home.num_replicas > 1 for home in homes)
    facts = _facts(trainer, names(params), several) | {
        "deterministic": f"{trainer.deterministic}",
        "recoverable": f"{trainer.recoverable}",
        "placement": "; ".join(home.describe() for home in homes),
    }
    held = [f.name for f in fields(guard) if f.repr]  # the others change from step to step
    facts |= _under("guard ", {name: f"{getattr(guard, name)}" for name in held})
    same_options("Trainer", facts, homes)


def lasting_options(trainer: Any) -> dict[str, str]:
    """The options that a run which goes on must share, and the versions, as texts by name.

    Where ranks are and what they hold at a time may differ: that changes only how sums are rounded.
    """
    guard, scale = trainer.guard, trainer.guard.scale
    changes = {*SCALE} if scale.kind == "dynamic" else {*SCALE} - {"value"}
    fixed = [f.name for f in fields(scale) if f.name not in changes]
    rest = [f.name for f in fields(guard) if f.name != "scale" and f.repr]
    facts = _facts(trainer, names(trainer.state.params), several=False)
    facts |= _under("guard ", {name: f"{getattr(guard, name)}" for name in rest})
    facts |= _under("guard scale ", {name: f"{getattr(scale, name)}" for name in fixed})
    return {**facts, **versions()}


def _facts(trainer: Any, paths: Sequence[str], several: bool) -> dict[str, str]:
    """The options that ranks and later runs must share."""
    transform, sync = trainer.state.transform, trainer.replica_sync
    facts = {
        "accumulate": f"{trainer.accumulate}",
        "grad_dtype": f"{trainer.grad_dtype}",
        "precision": f"{trainer.precision}" or "as given",
        "replica_sync": sync.name,
    }
    facts |= {"weight": "a function"} if trainer.weight is not None else {}
    facts |= _under("", optimizer_facts("Trainer", transform, paths, several))
    return facts if sync.facts is None else facts | _under("outer ", sync.facts(paths))


def _under(head: str, facts: Mapping[str, str]) -> dict[str, str]:
    return {f"{head}{name}": text for name, text in facts.items()}


def start_comparison(trainer: Any, buffers: Sequence[str]) -> Comparison | None:
    """Start to compare replicas if it is due before this step; None if it is not.

    Replicas that are apart are equal after a merge alone, and only in their parameters.

    Args:
      trainer: the `Trainer`, with its state.
      buffers: the names of those that are averaged over ranks.

    Communication: that of `same_replicas`.
    """
    if points.observers:
        points.passing("step", trainer.state.step + 1)
    sync, step, every = trainer.replica_sync, trainer.sync_state.step, trainer.check_replicas
    if sync.apart:
        every = -(-every // sync.every) * sync.every
    if not every or not step or step % every:
        return None
    names, whole = ([], False) if sync.apart else (buffers, True)
    return Comparison("Trainer", trainer.state, trainer.groups, names, moments=whole)

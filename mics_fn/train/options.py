"""What ranks compare for a `Trainer`: options that change numbers, and every K steps replicas."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from mics_fn import points
from mics_fn.optim import Comparison, optimizer_facts, same_options
from mics_fn.shards import homes_of, names
from mics_fn.tree import Tree


def compare_options(trainer: Any, params: Tree, groups: Any) -> None:
    """Compare the options of a `Trainer` between ranks.

    Args:
      trainer: it, with its state.
      params: its tree of shards.
      groups: as for `shard`.

    Communication: that of `same_options`.

    Raises:
      DesyncError: ranks have other options.
    """
    homes, paths = list(dict.fromkeys(homes_of("Trainer", groups, params))), names(params)
    several = any(home.partition_size * home.num_replicas > 1 for home in homes)
    transform, sync, guard = trainer.state.transform, trainer.replica_sync, trainer.guard
    facts = {
        "accumulate": f"{trainer.accumulate}",
        "deterministic": f"{trainer.deterministic}",
        "grad_dtype": f"{trainer.grad_dtype}",
        "precision": f"{trainer.precision}" or "as given",
        "replica_sync": sync.name,
        "placement": "; ".join(home.describe() for home in homes),
    }
    facts |= _under("", optimizer_facts("Trainer", transform, paths, several))
    facts |= _under("guard ", {f.name: f"{getattr(guard, f.name)}" for f in fields(guard)})
    if sync.facts is not None:
        facts |= _under("outer ", sync.facts(paths))
    same_options("Trainer", facts, homes)


def _under(head: str, facts: Mapping[str, str]) -> dict[str, str]:
    return {f"{head}{name}": text for name, text in facts.items()}


def start_comparison(trainer: Any, buffers: Sequence[str]) -> Comparison | None:
    """Start to compare replicas if it is due before this step; None if it is not.

    Replicas that are apart are equal after a merge alone, and only in their parameters.

    Args:
      trainer: it, with its state.
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

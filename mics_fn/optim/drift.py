"""Whether replicas still hold the same bits, which nothing later in training would show.

[Note: drift] Every step adds the same update to each replica, so one that differs, by a bit that
flipped or by a rule that some ranks did not apply, differs for ever, and the loss hardly shows it.
So a sum of 64 bits of each run of parameters, moments, averaged buffers and leaves that do not
train is compared between replicas. It is collected from all ranks, so that all of them know who
differs, and only then sums of single leaves follow, to name the first one.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from mics_fn import checks, tree
from mics_fn.collectives import Pending, checksum, collect_all, start_collect
from mics_fn.errors import DesyncError, by_value, message, name_ranks
from mics_fn.groups import Groups
from mics_fn.optim.flat import FlatShards, by_leaf, unpacked
from mics_fn.optim.runs import joined, split, whole_run
from mics_fn.optim.steps import replaced_from, require_state
from mics_fn.shards import Fixed, Nothing, Sharded, checksum_of, homes_of, is_leaf

_ODD = 2862933555777941757  # multiplies a sum before the next one is added

Action = Literal["raise", "heal"]


def same_replicas(state: Any, groups: Any, *, on_drift: Action = "raise") -> Any:
    """The same state, once all replicas are known to hold the same bits.

    Args:
      state: a `TrainState`.
      groups: those of its parameters, with all replicas.
      on_drift: "heal" gives ranks that differ the state of those that most replicas agree with; of
        two replicas, that of the first.

    Returns:
      The state; a new one on ranks that differed and were healed.

    Communication: 8 bytes per run of leaves in a bucket, of parameters and of each moment, over the
      partition group and over the replication group. To heal, the states of ranks that differ.

    Memory: to heal, a second copy of the state on ranks that differ.

    Raises:
      DesyncError: on all ranks of the groups of the first leaf that differs, naming it, and which
        ranks have what; with "heal" only if it is not trained, or leaves live on several groups.
      PlanError: `state` is not a `TrainState`, or `on_drift` is something else.

    Example:
      >>> groups = make_groups(1)
      >>> state = init_state(shard({"w": torch.ones(2)}, groups), optim.sgd(0.1))
      >>> optim.same_replicas(state, groups) is state
      True
    """
    require_state("same_replicas", state)
    checks.choice("same_replicas", "on_drift", on_drift, "raise", "heal")
    return Comparison("same_replicas", state, groups, list(state.buffers)).finish(on_drift)


class Comparison:
    """A comparison of replicas under way; `finish` tells what it found.

    Args:
      verb: the call, for errors.
      state: a `TrainState`, which must not change before `finish`.
      groups: as for `same_replicas`.
      buffers: the names of those that are equal on all ranks.
      moments: whether the state of the optimizer is compared too.
    """

    def __init__(
        self, verb: str, state: Any, groups: Any, buffers: Sequence[str], *, moments: bool = True
    ) -> None:
        self._verb, self._state, self._moments = verb, state, moments
        self._buffers = {name: state.buffers[name] for name in buffers}
        owners = homes_of(verb, groups, state.params)
        homes = dict.fromkeys(owners)
        self._parts: list[Comparison] = []
        self._home = next(iter(homes), None)
        self._pending: Pending | None = None
        if len(homes) > 1:
            for i, home in enumerate(homes):
                part, own = _part(state, owners, home), [] if i else buffers
                self._parts.append(Comparison(verb, part, home, own, moments=moments))
        elif isinstance(self._home, Groups) and self._home.num_replicas > 1:
            self._home.partition.check_open()
            comms = [self._home.partition, self._home.replicas]
            sums = [x.to(self._home.device) for x in self._sums()]
            self._pending = start_collect(comms, torch.stack(sums))

    def finish(self, on_drift: Action) -> Any:
        """The state, as `same_replicas` gives it."""
        home = self._home
        for part in self._parts:
            part.finish("raise")  # what one rank lacks, several groups would have to give
        if self._pending is None or not isinstance(home, Groups):
            return self._state
        table = self._pending.wait().view(home.world_size, -1).tolist()
        rows = dict(zip(home.stacked_ranks, map(tuple, table), strict=True))
        places = [home.ranks[place :: home.partition_size] for place in range(home.partition_size)]
        if all(len({rows[rank] for rank in ranks}) == 1 for ranks in places):
            return self._state
        error, trained = self._error(home, places)
        if on_drift == "raise" or not trained:
            raise error
        votes = by_value({rank: rows[rank] for rank in home.replicas.ranks})
        (right, ranks), *others = votes
        if not others:
            return self._state
        return replaced_from(self._state, home, ranks[0], behind=rows[home.rank] != right)

    def _sums(self) -> list[Tensor]:
        """A sum for each run of parameters and moments, each buffer, each leaf without training."""
        found = unpacked(self._state.params)
        sums: list[Tensor] = []
        for run in found.runs():
            pieces = [found.pieces[i] for i in run.members]
            if not any(run.sizes[::2]):  # a sum does not depend on where a rank has them in memory
                whole = whole_run(run, found.pieces)
                pieces = [joined(run, pieces) if whole is None else whole]
            sums.append(_sum(pieces))
        sums += [checksum_of(leaf.data) for leaf in found.leaves if isinstance(leaf, Fixed)]
        for leaf in self._opt():
            if isinstance(leaf, FlatShards):
                for run, whole in zip(leaf.layout.runs, leaf.wholes, strict=True):
                    sums.append(_sum(split(run, whole) if any(run.sizes[::2]) else [whole]))
            else:
                sums.append(checksum(leaf))
        sums += [checksum(x) for x in self._buffers.values()]
        return [*sums, torch.tensor(self._state.step)]

    def _opt(self) -> list[Any]:
        opt = self._state.opt if self._moments else ()
        leaves, _ = tree.flatten(opt, lambda x: isinstance(x, FlatShards))
        return [x for x in leaves if isinstance(x, FlatShards | Tensor)]

    def _error(self, home: Groups, places: Sequence[Sequence[int]]) -> tuple[DesyncError, bool]:
        """The error that names the first leaf that differs, and whether it is trained."""
        opt = by_leaf(self._state.opt) if self._moments else ()
        parts = {"params": self._state.params, "opt": opt, "buffers": self._buffers}
        leaves, paths = [], []
        for root, part in parts.items():
            leaves += tree.flatten(part, is_leaf)[0]
            paths += tree.paths(part, f"state.{root}", is_leaf)
        data = [getattr(leaf, "data", leaf) for leaf in leaves]
        kept = [i for i, x in enumerate(data) if isinstance(x, Tensor)]
        sums = [torch.tensor(self._state.step), *(checksum_of(data[i]).cpu() for i in kept)]
        found = collect_all(home, torch.stack(sums).to(home.device))
        rows = {rank: row.tolist() for rank, row in found.items()}
        at = next(i for i in range(len(sums)) if any(_differ(rows, ranks, i) for ranks in places))
        lines = [f"first difference: {paths[kept[at - 1]] if at else 'state.step'}"]
        for ranks in places:
            if _differ(rows, ranks, at):
                lines += _who({rank: rows[rank][at] for rank in ranks})
        trained = at == 0 or isinstance(leaves[kept[at - 1]], Sharded | Tensor)
        fix = "find what differs between these ranks, or pass on_drift='heal'"
        if not trained:
            fix = "start all ranks with the same leaves that are not trained"
        return DesyncError(
            message(f"{self._verb}: replicas have drifted apart", lines, fix)
        ), trained


def _part(state: Any, owners: Sequence[Any], home: Any) -> Any:
    """The state with only those leaves that live on some groups; `owners` has those of each."""
    leaves, spec = tree.flatten(state.params, is_leaf)
    mine = [leaf for leaf, owner in zip(leaves, owners, strict=True) if owner is home]
    others = {x.bucket for x in leaves if isinstance(x, Sharded)}
    others -= {x.bucket for x in mine if isinstance(x, Sharded)}

    def kept(leaf: Any) -> Any:
        return Nothing() if isinstance(leaf, Sharded) and leaf.bucket in others else leaf

    params = [x if owner is home else Nothing() for x, owner in zip(leaves, owners, strict=True)]
    moments, form = tree.flatten(by_leaf(state.opt), is_leaf)
    opt = form.unflatten([kept(leaf) for leaf in moments])
    return replace(state, params=spec.unflatten(params), opt=opt)


def _differ(rows: dict[int, list[int]], ranks: Sequence[int], at: int) -> bool:
    return len({rows[rank][at] for rank in ranks}) > 1


def _who(values: dict[int, int]) -> list[str]:
    """Which ranks of a replication group hold the same bits, and which are odd."""
    first, *others = by_value(values)
    odd = len(first[1]) > 1
    lines = [
        f"{name_ranks(first[1])}: the same bits" if odd else f"{name_ranks(first[1])}: own bits"
    ]
    return [*lines, *(f"{name_ranks(x)}: {'odd' if odd else 'other bits'}" for _, x in others)]


def _sum(pieces: Sequence[Tensor]) -> Tensor:
    total = checksum(pieces[0])
    for piece in pieces[1:]:
        total = total * _ODD + checksum(piece)
    return total

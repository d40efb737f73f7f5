"""Which leaf of a gradient is not finite, and on which ranks that arose.

[Note: where it arose] This is looked for only once the norm is known not to be finite, which all
ranks know alike. They agree on the first leaf, in the order of the tree, whose reduced gradient is
not finite. Then each says what its own gradient of that leaf was before hop 1 mixed them; see
[Note: before hop 1] in `shards.origins`.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from mics_fn import tree
from mics_fn.collectives import collect, collect_bytes
from mics_fn.errors import by_value, name_ranks
from mics_fn.groups import Home
from mics_fn.optim.flat import by_leaf
from mics_fn.shards import Arriving, Sharded, homes_of, is_leaf, kind_of, origins_of
from mics_fn.tree import Tree


class NonFinite(NamedTuple):
    """A gradient that is not finite.

    Args:
      leaf: its path; "" if only the norm is not finite.
      ranks: on which it arose; none if it was finite on all of them, or if that is not known.
      text: all of this in words.
    """

    leaf: str
    ranks: tuple[int, ...]
    text: str


def find_nonfinite(
    grads: Tree | Arriving, groups: Any, loss: torch.Tensor | None = None
) -> NonFinite:
    """Where a gradient is not finite, the same on all ranks.

    Args:
      grads: tree of shards, or `Arriving`, both hops done, whose norm is not finite on some rank.
      groups: as for `shard`.
      loss: this rank's, if that is known.

    Communication: over each partition group and each replication group 8 bytes, then a text of each
      rank.
    """
    grads = by_leaf(grads.arrival().whole() if isinstance(grads, Arriving) else grads)
    leaves, homes = tree.flatten(grads, is_leaf)[0], homes_of("Guard.judge", groups, grads)
    at = _first(leaves, list(dict.fromkeys(homes)))
    losses = _said(homes, "" if loss is None else kind_of(loss))
    at_loss, ranks = _odd(losses)
    if at == len(leaves):
        text = "every gradient is finite, but their norm exceeds float32"
        if at_loss:
            text = f"the loss is {at_loss}; every gradient is finite"
        return NonFinite("", ranks, text)
    path, leaf, home = tree.paths(grads, "grads", is_leaf)[at], leaves[at], homes[at]
    kinds = origins_of(leaf.bucket)
    if len(home.ranks) == 1:  # it reduced nothing
        here = kind_of(leaf.data)
    else:
        here = kinds[leaf.slot] if kinds else ""
    said = _said(homes, here)
    where, odd = _odd(said)
    if where:
        return NonFinite(path, odd, f"{path} is {where}")
    if all(said.values()):
        return NonFinite(path, (), f"{path} is finite on each rank, but not after the reduction")
    if at_loss:
        return NonFinite(path, ranks, f"{path} is not finite; the loss is {at_loss}")
    why = "nobody looked at gradients before they were reduced; from the next step on a guard does"
    return NonFinite(path, (), f"{path} is not finite; it is not known on which rank, since {why}")


def _said(homes: Iterable[Any], here: str) -> dict[int, str]:
    """What each rank says, by global rank."""
    homes = list(dict.fromkeys(homes))
    said = {homes[0].life.rank: here}
    for each in homes:
        for text in collect_bytes(each, json.dumps(said).encode()).values():
            said |= {int(rank): kind for rank, kind in json.loads(text).items()}
    return said


def _odd(said: Mapping[int, str]) -> tuple[str, tuple[int, ...]]:
    """Which ranks have something that is not finite, in words and as numbers."""
    odd = {rank: kind for rank, kind in said.items() if kind in ("NaN", "infinite")}
    text = ", ".join(f"{kind} on {name_ranks(ranks)}" for kind, ranks in by_value(odd))
    return text, tuple(sorted(odd))


def _first(leaves: Sequence[Any], homes: Sequence[Home]) -> int:
    """The number of the first leaf that is not finite on some rank; that of leaves if none is."""
    held = (i for i, x in enumerate(leaves) if isinstance(x, Sharded) and x.data.numel())
    mine = next((i for i in held if kind_of(leaves[i].data) != "finite"), len(leaves))
    first = torch.tensor(mine, device=homes[0].device)
    for home in homes:
        for comm in (home.partition, home.replicas):
            first = collect(comm, first, "leaf that is not finite").amin(0)
    return int(first)

"""Checks of batches under `vmap`: ranks must have equally many rows, and row k must match.

[Note: rows of ranks] A map between ranks adds up row k of all ranks. That is right if ranks batch
samples, whole models or directions. But `jacfwd`, `hessian`, and `jacrev` of a function that gives
shards batch a basis of this rank's own pieces: row k is a different direction on each rank, and the
result would be the derivative in the direction of their sum. The missing rows cannot be added from
inside `vmap`, so this raises an error. It is recognised by its values, at the first map that
receives tangents or cotangents in parts: on every rank each row has at most one nonzero element, no
two rows have the same one, and several ranks have an element in the same row. A basis that ranks
share, each vector of which was cut by `shard`, has the element of each row on one rank only, so it
passes the check.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mics_fn import _torch
from mics_fn.collectives import collect
from mics_fn.errors import LeafError, disagreement, message, rank_lines
from mics_fn.groups import Comm
from mics_fn.shards.leaf import LOCAL_BASIS, SHARED_BASIS

_MOST_DIMS = 16  # of a batch, which has one dim for each enclosing vmap


def in_front(info: Any, in_dims: Sequence[int | None], data: Sequence[Any]) -> list[Any]:
    """Move the batch dim of each value to the front, in the vmap rule of an autograd function."""
    found = []
    for value, dim in zip(data, in_dims, strict=True):
        if value is not None and dim is None:
            value = value.expand(info.batch_size, *value.shape)
        elif value is not None:
            value = value.movedim(dim, 0)
        found.append(value)
    return found


def check_rows(name: str, levels: int | None, dealt: Sequence[tuple[Any, Sequence[Any]]]) -> None:
    """Raise on every rank unless the rows of a batch match. See [Note: rows of ranks].

    Args:
      name: the name of the map.
      levels: how many `vmap` enclose a tangent or cotangent; None for a value itself.
      dealt: each use of a bucket with its values, which are plain tensors, one per member.

    Raises:
      LeafError: the rows are a basis of each rank's own pieces.
      DesyncError: ranks have different numbers of rows.

    Communication: none without a batch. Else 136 bytes in each group that the map connects, and one
      byte per row for tangents in parts that look like a basis. The host waits for both.
    """
    first = _first_of(name, dealt)
    if first is None:
        return
    batch, device = first
    met: dict[Comm, list[Tensor]] = {}
    for use, values in dealt:
        comm = use.home.replicas if name == "mean" else use.home.partition
        met.setdefault(comm, []).extend(v for v in values if v is not None)
    in_parts = levels if levels and name in ("gather", "own") else 0
    for comm, values in met.items():
        if comm.size > 1:
            rows = [_own_rows(values, dim, batch) for dim in range(in_parts)]
            _compare(name, comm, batch, rows, device)


def _first_of(name: str, dealt: Sequence[tuple[Any, Sequence[Any]]]) -> Any:
    """Shape of the batch and device of the values; None if nothing is batched."""
    for use, values in dealt:
        slots = [slot for slot, i in enumerate(use.index) if i is not None]
        for slot, value in zip(slots, values, strict=True):
            if value is not None:
                own = len(use.bucket.shapes[slot]) if name == "scatter" else 1
                plain = value.ndim == own or _torch.has_no_data(value)
                return None if plain else (tuple(value.shape[: value.ndim - own]), value.device)
    return None


def _own_rows(values: Sequence[Tensor], dim: int, batch: Sequence[int]) -> Tensor | None:
    """Which rows along a dim of the batch have a nonzero element, if they look like a basis.

    None if a row has two elements, or if two rows have the same one.
    """
    found = [torch.zeros(batch[dim], 0, dtype=torch.bool)]
    for value in values:
        rows = value.movedim(dim, 0).ne(0)
        found.append(rows.flatten(1, -2).any(1) if len(batch) > 1 else rows)
    table = torch.cat([each.to(found[-1].device) for each in found], 1)
    if bool((table.sum(0) > 1).any() | (table.sum(1) > 1).any()):
        return None
    return table.any(1)


def _compare(
    name: str,
    comm: Comm,
    batch: Sequence[int],
    rows: Sequence[Tensor | None],
    device: torch.device,
) -> None:
    """Compare the shapes of batches in one group, and the rows that look like a basis."""
    looks = [int(r is not None) << d for d, r in enumerate(rows)]
    mine = [sum(looks), len(batch), *batch[: _MOST_DIMS - 1]]
    mine += [0] * (_MOST_DIMS + 1 - len(mine))
    sent = torch.tensor(mine, dtype=torch.int64, device=device)
    found = collect(comm, sent, "shape of a batch").tolist()
    shapes = [f"batch {tuple(theirs[2 : 2 + theirs[1]])}" for theirs in found]
    if len(set(shapes)) > 1:
        text = f"{name}: ranks have batches of different shapes under vmap"
        by_rank = dict(zip(comm.ranks, shapes, strict=True))
        if rows:
            raise LeafError(message(text, [*rank_lines(by_rank), LOCAL_BASIS], SHARED_BASIS))
        raise disagreement(text, by_rank, "give all ranks batches of one shape")
    for d, own in enumerate(rows):
        if own is not None and all(theirs[0] >> d & 1 for theirs in found):
            shared = collect(comm, own.to(torch.uint8), "rows of a batch").sum(0)
            if bool((shared > 1).any()):
                text = "torch.func: row k of a batch under vmap is another direction on each rank"
                raise LeafError(message(text, [LOCAL_BASIS], SHARED_BASIS))

"""A state that ranks take from a replica, in as few bytes as it has.

Ranks that need nothing send nothing, but for those that are asked: in each round a rank of a
replication group hands its part of the state to one other rank, and all make the same calls.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mics_fn import tree
from mics_fn.collectives import collect_all, hand_over
from mics_fn.errors import DesyncError, message, name_ranks
from mics_fn.groups import Groups
from mics_fn.offload import read
from mics_fn.optim.columns import fresh
from mics_fn.optim.moving import as_before, room_for
from mics_fn.tree import digest

_PARCEL_BYTES = 2**24  # that are sent at once, and copied for it


def handed_over(state: Any, home: Groups, sources: Mapping[int, int], *, in_place: bool) -> Any:
    """The same state on all ranks of each replication group, from those that have it.

    Args:
      state: a `TrainState`, of equal structure and sizes on the ranks of a replication group.
      home: the groups.
      sources: the rank that hands it over, by the rank that takes it; of all replication groups.
      in_place: whether a rank that takes one may do so in the memory of its own.

    Returns:
      A new state on ranks that take one, else the same.

    Communication: each part that is taken travels once, from its source.

    Memory: a parcel of 16 MiB on each side, and without `in_place` a second copy of the state where
      one is taken.

    Raises:
      DesyncError: on all ranks, if states of a replication group have other sizes.
    """
    taken, before = home.rank in sources, state
    if taken:
        state = room_for(state) if in_place else in_new_memory(state)
    leaves, spec = tree.flatten(state)
    plain = [i for i, x in enumerate(leaves) if isinstance(x, int | float)]
    numbers = torch.tensor([leaves[i] for i in plain], dtype=torch.float64, device=home.device)
    sent = [numbers, *(x.detach() for x in leaves if isinstance(x, Tensor) and x.numel())]
    _check_equal(sent, home)
    with torch.no_grad():
        for pairs in _rounds(sources, home.replicas.ranks):
            for parcel in _parcels(sent):
                _send(parcel, home, pairs)
    if not taken:
        return state
    for i, number in zip(plain, numbers.tolist(), strict=True):
        leaves[i] = type(leaves[i])(number)
    return as_before(spec.unflatten(leaves), before)


def in_new_memory(state: Any) -> Any:
    """A state to write another one into: a copy, without what is in files or is codes."""
    state = room_for(state)
    opt, buffers = tree.map_leaves(_copied, (state.opt, state.buffers))
    return replace(state, params=fresh(state.params), opt=opt, buffers=buffers)


def _check_equal(sent: list[Tensor], home: Groups) -> None:
    """Raise DesyncError on all ranks unless equal parts have equal sizes."""
    mine = digest(f"{tuple(x.shape)} {x.dtype}" for x in sent)
    said = torch.tensor(list(mine), dtype=torch.uint8, device=home.device)
    found = {rank: bytes(x.tolist()) for rank, x in collect_all(home, said).items()}
    for place in range(home.partition_size):
        ranks = home.ranks[place :: home.partition_size]
        if len({found[rank] for rank in ranks}) > 1:
            text = f"reset: {name_ranks(ranks)} hold states of different sizes"
            fix = "start the rank that came back with the same script and the same options"
            raise DesyncError(message(text, fix=fix))


def _rounds(sources: Mapping[int, int], ranks: tuple[int, ...]) -> Iterator[dict[int, int]]:
    """The pairs of one replication group, in rounds in which a rank sends once at most."""
    left = {taker: source for taker, source in sources.items() if taker in ranks}
    while left:
        pairs = {source: taker for taker, source in reversed(left.items())}
        yield {taker: source for source, taker in pairs.items()}
        for taker in pairs.values():
            del left[taker]


def _parcels(sent: list[Tensor]) -> Iterator[list[tuple[Tensor, Tensor, slice]]]:
    """Parts of tensors with their bytes, in runs that are sent at once."""
    run, room = [], _PARCEL_BYTES
    for x in sent:
        flat, at = read(x).contiguous().view(-1).view(torch.uint8), 0
        while at < flat.numel():
            stop = min(flat.numel(), at + room)
            run.append((x, flat, slice(at, stop)))
            room, at = room - (stop - at), stop
            if not room:
                yield run
                run, room = [], _PARCEL_BYTES
    if run:
        yield run


def _send(
    parcel: list[tuple[Tensor, Tensor, slice]], home: Groups, pairs: Mapping[int, int]
) -> None:
    """Hand over one parcel, and write it where it is taken."""
    count = sum(part.stop - part.start for _, _, part in parcel)
    asked = home.rank in pairs.values()
    parts = [flat[part] for _, flat, part in parcel] if asked else []
    data = torch.cat(parts).to(home.device) if asked else None
    got = hand_over(home.replicas, data, count, pairs, home.device)
    if got is None:
        return
    for x, flat, part in parcel:
        piece, got = got[: part.stop - part.start], got[part.stop - part.start :]
        flat[part].copy_(piece)
        if flat.data_ptr() != x.data_ptr() and part.stop == flat.numel():
            x.copy_(flat.view(x.dtype).view(x.shape))


def _copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf

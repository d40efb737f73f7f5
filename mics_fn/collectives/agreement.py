"""What ranks must agree on before data moves: the tree, and the values that replicas start from.

Ranks that disagree on a shape or an order get wrong numbers or abort, with no error that names
anything. So each new tree is compared once, by a digest; only on a difference is the whole text
exchanged, to say where and who.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor

from mics_fn.collectives.hierarchical import collect
from mics_fn.errors import DesyncError, message, name_ranks
from mics_fn.groups import Groups, Hierarchy
from mics_fn.tree import digest, flatten

_BLOCK = 2**20  # elements hashed at once


def agree(groups: Groups | Hierarchy, what: str, facts: Sequence[tuple[str, str]]) -> None:
    """Compare (path, description) pairs between all ranks of `groups`; once per content.

    Args:
      groups: whose ranks must agree; those of the partition group if it is a hierarchy.
      what: the verb and the tree, for errors.
      facts: one pair a leaf, in tree order.

    Raises:
      DesyncError: on every rank, naming ranks and the first path at which they differ.

    Communication: first time for these facts one all-gather of 32 bytes over the partition group
      and one over the replication group; none later.
    """
    mine = digest(f"{path}\n{text}" for path, text in facts)
    alone = groups.partition.size == 1 and (
        isinstance(groups, Hierarchy) or groups.num_replicas == 1
    )
    if alone or (what, mine) in groups.agreed:
        return
    sent = torch.tensor(list(mine), dtype=torch.uint8, device=groups.device)
    found = {rank: bytes(other.tolist()) for rank, other in collect_all(groups, sent).items()}
    if len(set(found.values())) > 1:
        raise DesyncError(_difference(groups, what, facts))
    groups.agreed.add((what, mine))


def _difference(groups: Groups | Hierarchy, what: str, facts: Sequence[tuple[str, str]]) -> str:
    """The text that names the first path at which ranks differ, the same on every rank."""
    sent = collect_bytes(groups, json.dumps(list(facts)).encode())
    of_rank = {rank: [tuple(pair) for pair in json.loads(text)] for rank, text in sent.items()}
    nothing = ("(no more leaves)", "")
    seen: dict[tuple[str, str], list[int]] = {}
    for i in range(max(map(len, of_rank.values()))):
        seen = {}
        for rank, pairs in of_rank.items():
            seen.setdefault(pairs[i] if i < len(pairs) else nothing, []).append(rank)
        if len(seen) > 1:
            break
    groups_of_ranks = sorted(seen.items(), key=lambda item: (-len(item[1]), item[1]))
    lines = [f"first difference: {groups_of_ranks[0][0][0]}"]
    lines += [
        f"{name_ranks(ranks)}: {path} {text}".rstrip() for (path, text), ranks in groups_of_ranks
    ]
    fix = "build the same tree on every rank: same keys in the same order, same shapes and dtypes"
    return message(f"{what}: ranks disagree on the tree", lines, fix=fix)


def check_replicas(
    groups: Groups, what: str, paths: Sequence[str], tensors: Sequence[Tensor]
) -> None:
    """Compare full values between all ranks of `groups`, by a digest of their bits.

    Args:
      groups: whose ranks must hold the same values.
      what: the verb, for errors.
      paths: one a tensor.
      tensors: full values, the same shapes and dtypes everywhere.

    Raises:
      DesyncError: on every rank, naming the first path whose value differs and who holds what.

    Communication: 8 bytes a tensor, over the partition group and over the replication group.
    """
    if groups.world_size == 1 or not tensors:
        return
    sums = torch.stack([checksum(tensor) for tensor in tensors]).to(groups.device)
    found = collect_all(groups, sums)
    table = torch.stack(list(found.values()))  # (rank, tensor)
    differs = (table != table[0]).any(0).nonzero().flatten().tolist()
    if not differs:
        return
    seen: dict[int, list[int]] = {}
    for rank, row in found.items():
        seen.setdefault(int(row[differs[0]]), []).append(rank)
    holders = sorted(seen.values(), key=lambda ranks: (-len(ranks), ranks))
    lines = [
        f"first difference: {paths[differs[0]]} ({len(differs)} of {len(paths)} leaves differ)"
    ]
    lines += [
        f"{name_ranks(ranks)}: value {'ABCDEFGH'[min(i, 7)]}" for i, ranks in enumerate(holders)
    ]
    fix = "seed every rank alike, load the same checkpoint, or pass replicas='broadcast'"
    raise DesyncError(message(f"{what}: ranks hold different values", lines, fix=fix))


def checksum(tensor: Tensor) -> Tensor:
    """64 bits that depend on every bit of a tensor and on its place; on its device, no host sync.

    >>> a, b = torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0])
    >>> bool(checksum(a) == checksum(a.clone())), bool(checksum(a) == checksum(b))
    (True, False)
    """
    flat = tensor.detach().resolve_neg().contiguous().view(-1)
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = flat.view(kinds[flat.dtype.itemsize])
    total = torch.tensor(flat.numel(), dtype=torch.int64, device=flat.device)
    for block in bits.split(_BLOCK):
        # Odd weights are invertible modulo 2**64, so that no single changed value goes unseen.
        total = (
            total * 6364136223846793005 + (block.long() * _weights(flat.device)[: len(block)]).sum()
        )
    return total


@cache
def _weights(device: torch.device) -> Tensor:
    return torch.arange(_BLOCK, dtype=torch.int64, device=device) * 2862933555777941756 + 1


def collect_all(groups: Groups | Hierarchy, tensor: Tensor) -> dict[int, Tensor]:
    """One small tensor of each rank of `groups`, by global rank."""
    found = collect(groups.partition, tensor)
    if isinstance(groups, Hierarchy):
        return dict(zip(groups.partition.ranks, found, strict=True))
    return dict(
        zip(_rank_order(groups), collect(groups.replicas, found).flatten(0, 1), strict=True)
    )


def _rank_order(groups: Groups) -> list[int]:
    """Global ranks, one partition group after the other, each in the order of its control comm."""
    p = groups.partition_size
    home = groups.plan.partition_groups[groups.position // p]
    places = [home.index(groups.ranks.index(rank)) for rank in groups.partition.ranks]
    return [
        groups.ranks[start * p + place] for start in range(groups.num_replicas) for place in places
    ]


def collect_bytes(groups: Groups | Hierarchy, data: bytes) -> dict[int, bytes]:
    """A byte string of each rank of `groups`, by global rank; lengths may differ."""
    device = groups.device
    length = torch.tensor([len(data)], dtype=torch.int64, device=device)
    lengths = {rank: int(n) for rank, n in collect_all(groups, length).items()}
    padded = torch.zeros(max(*lengths.values(), 1), dtype=torch.uint8, device=device)
    padded[: len(data)] = torch.tensor(list(data), dtype=torch.uint8)
    found = collect_all(groups, padded)
    return {rank: bytes(found[rank][:n].tolist()) for rank, n in lengths.items()}


@contextmanager
def in_step(what: str, groups: Any, fact: str) -> Iterator[None]:
    """A block of work that sends nothing, and must go well on all ranks.

    Args:
      what: the verb, for errors.
      groups: one or a tree; those of a function are not known yet, and not told.
      fact: what all ranks must have been given.

    Raises:
      DesyncError: ranks have other facts, or the block raised on some; on the ranks where it did
        not. The others raise what it raised.

    Communication: two small all-gathers over the partition group and over the replication group.
    """
    homes = dict.fromkeys(home for home in flatten(groups)[0] if isinstance(home, Groups))
    try:
        yield
    except Exception as error:
        for home in homes:
            with suppress(DesyncError):
                _compare(home, what, f"{type(error).__name__}: {error}".splitlines()[0])
        raise
    for home in homes:
        _compare(home, what, fact)


def _compare(groups: Groups, what: str, fact: str) -> None:
    if groups.world_size == 1:
        return
    seen: dict[bytes, list[int]] = {}
    for rank, text in collect_bytes(groups, fact.encode()).items():
        seen.setdefault(text, []).append(rank)
    if len(seen) > 1:
        lines = [f"{name_ranks(ranks)}: {text.decode()}" for text, ranks in seen.items()]
        fix = "call it with the same arguments on every rank, where all reach the same files"
        raise DesyncError(message(f"{what}: ranks differ", lines, fix=fix))


def same_call(verb: str, homes: Sequence[Any], text: str, error: Exception | None = None) -> None:
    """Return only where all ranks say the same and none of them has an error.

    Args:
      verb: the call, for errors.
      homes: `Groups` or `Hierarchy`s whose ranks make it.
      text: what this rank is about to do.
      error: what keeps this rank from it; then it returns, for the caller to raise that.

    Raises:
      DesyncError: on every rank that has no error of its own.

    Communication: two all-gathers over each partition group, and over each replication group of
      `Groups`: 8 bytes, and the longest text.
    """
    wrong = "" if error is None else f"{type(error).__name__}: {error}".partition("\n")[0]
    said = json.dumps([text, wrong]).encode()
    found: dict[int, bytes] = {}
    for home in homes:
        found |= collect_bytes(home, said)
    if error is not None:
        return
    calls: dict[str, list[int]] = {}
    failed: dict[str, list[int]] = {}
    for rank, answer in sorted(found.items()):
        own, wrong = json.loads(answer)
        (failed if wrong else calls).setdefault(wrong or own, []).append(rank)
    if failed:
        lines = [f"{name_ranks(ranks)}: {wrong}" for wrong, ranks in failed.items()]
        fix = "see what these ranks raise; nothing was changed on any rank"
        raise DesyncError(message(f"{verb}: it failed on other ranks", lines, fix))
    if len(calls) > 1:
        lines = [f"{name_ranks(ranks)}: {own}" for own, ranks in calls.items()]
        fix = f"call {verb} with the same arguments on every rank"
        raise DesyncError(message(f"{verb}: ranks differ in what they ask for", lines, fix))


def check_policy(verb: str, policy: str, homes: Sequence[Groups]) -> None:
    """Raise on every rank unless all have the same policy: others would merge without them."""
    for home in dict.fromkeys(homes):
        ranks: dict[str, list[int]] = {}
        for rank, name in collect_bytes(home, policy.encode()).items():
            ranks.setdefault(name.decode(), []).append(rank)
        if len(ranks) > 1:
            lines = [f"{name_ranks(who)}: {name}" for name, who in ranks.items()]
            fix = "make the same one on every rank"
            raise DesyncError(message(f"{verb}: ranks have different policies", lines, fix=fix))

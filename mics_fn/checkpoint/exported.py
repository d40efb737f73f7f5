"""Parameters on their way into files of others: in what order, and on which rank.

Others keep whole tensors, while a rank has a piece of each. So the leaves are dealt to files of
bounded size, and the files to the ranks of the first partition group. They gather what the files of
one *round* need, one bucket after the other; each keeps what belongs to its file and drops the
rest. Then all write at once. Other replicas do not take part, since between two synchronisations
their values may be their own.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from os import PathLike
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mics_fn import _torch, checks, tree
from mics_fn.checkpoint.extras import savable
from mics_fn.collectives import agree
from mics_fn.errors import GroupsError, LeafError, TreeError, message
from mics_fn.groups import Groups
from mics_fn.shards import (
    Nothing,
    check_dtype,
    check_tensor,
    is_leaf,
    open_shards,
    require_groups,
    unshard,
)

Names = Callable[[str], str | None]


class Saved(NamedTuple):
    """A tensor that is written, whole and once."""

    name: str  # in the file
    key: str  # in the parameters, of the leaf that has its data
    shape: tuple[int, ...]
    dtype: torch.dtype  # in the file
    bucket: int  # its number; -1 for a tensor that every rank has in full
    tree: int = 0  # of several trees with the same buckets
    also: tuple[str, ...] = ()  # its other names, if it is tied

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return prod(self.shape) * self.dtype.itemsize


def one_job(verb: str, groups: Any) -> Groups:
    """The groups, which must be those of all leaves, open, and not in a transform of torch.func.

    Raises:
      GroupsError, LeafError: they are not.
    """
    require_groups(verb, groups)
    if not isinstance(groups, Groups):
        fix = "pass the Groups of make_groups; save leaves on other groups in another directory"
        what = f"{verb}: groups is {type(groups).__name__}, expected one Groups for all leaves"
        raise GroupsError(message(what, fix=fix))
    if _torch.inside_torch_func():
        raise LeafError(message(f"{verb}: cannot be used inside torch.func", fix="call it outside"))
    groups.partition.check_open()
    return groups


def saved_leaves(
    verb: str, params: Any, groups: Groups, names: Names | None, dtype: torch.dtype | None
) -> list[Saved]:
    """What is written of parameters, in the order of their buckets.

    Args:
      verb: for errors.
      params: shards by name; and tensors that every rank has in full, such as buffers.
      groups: as for `gather`.
      names: gives the name in the file for a name of a parameter, or None to leave it out.
      dtype: the dtype of floating-point tensors in the file; None for that of the shards.

    Raises:
      TreeError: these are not shards by name, none is left, or two get the same name.
      PlanError, DonatedError: as `gather`.
    """
    if not isinstance(params, Mapping) or not all(
        isinstance(key, str) and (is_leaf(value) or isinstance(value, Tensor))
        for key, value in params.items()
    ):
        fix = "pass a dict such as state.params of init_model or load_shards"
        raise TreeError(message(f"{verb}: params are not shards by name", fix=fix))
    fix = "pass a function such as lambda name: f'model.{name}'"
    checks.function(verb, "names", names, "from a parameter's name to that in the file", fix)
    if dtype is not None:
        check_dtype(verb, "dtype", dtype)
    shards = {key: value for key, value in params.items() if is_leaf(value)}
    opened = open_shards(verb, shards, groups, root="params")
    keys = tree.flatten({key: key for key in shards})[0]
    owner = {key: keys[at] for key, at in zip(keys, opened.owner, strict=True)}
    rename = names or (lambda name: name)
    found: dict[str, Saved] = {}  # by the leaf with the data, so that tied ones are written once
    key_of: dict[str, str] = {}  # by the name in the file
    for key, value in params.items():  # of tied names the first one, as a module lists them
        own, name = owner.get(key, key), rename(key)
        if name is None or isinstance(value, Nothing):
            continue
        checks.instance(verb, "names(...)", name, str, "a str or None")
        if key_of.setdefault(name, key) != key:
            what = f"{verb}: params.{key_of[name]} and params.{key} would both be {name!r}"
            raise TreeError(message(what, fix="let names= give each its own name, or None"))
        if own in found:
            found[own] = found[own]._replace(also=(*found[own].also, name))
        else:
            found[own] = saved(verb, name, own, params[own], dtype)
    if not found:
        raise TreeError(message(f"{verb}: there is no leaf to write", fix="pass parameters"))
    return sorted(found.values(), key=lambda leaf: leaf.bucket)


def saved(
    verb: str, name: str, key: str, leaf: Any, dtype: torch.dtype | None = None, tree: int = 0
) -> Saved:
    """How a leaf is written: a shard, or a tensor that every rank has in full.

    Raises:
      LeafError: it is a piece in another dtype than its bucket, so that gathering it would round;
        or a tensor that could not be loaded as a shard.
    """
    data = leaf.data if is_leaf(leaf) else leaf
    if data is leaf:
        where = f"params.{key}"
        check_tensor(verb, where, savable(verb, where, data), data.device)
    bucket = getattr(leaf, "bucket", None)
    if bucket is not None and data.dtype != bucket.dtype:
        what = f"{verb}: {key} is {data.dtype} in a bucket of {bucket.dtype}"
        raise LeafError(message(what, fix="write it from a tree that was sharded in that dtype"))
    kind = dtype if dtype is not None and data.dtype.is_floating_point else data.dtype
    number = -1 if bucket is None else bucket.index
    return Saved(name, key, tuple(leaf.shape), kind, number, tree)


def same_leaves(verb: str, groups: Groups, path: str | PathLike, leaves: Sequence[Saved]) -> None:
    """Compare what ranks are about to write, and where.

    Communication: 32 bytes.

    Raises:
      DesyncError: on every rank, with the first leaf that differs.
    """
    # Even if these were compared before, another rank may now come with different ones.
    groups.agreed.difference_update([seen for seen in groups.agreed if seen[0] == verb])
    facts = [(f"params.{leaf.key}", f"{leaf.name!r} {leaf.shape} {leaf.dtype}") for leaf in leaves]
    agree(groups, verb, [("path", os.path.abspath(path)), *facts])


def in_files(verb: str, leaves: Sequence[Saved], max_file_bytes: float | str) -> list[list[Saved]]:
    """Leaves by file, each of at most so many bytes; a leaf that is larger has its own.

    Raises:
      PlanError: `max_file_bytes` is not a positive number.
    """
    most = checks.nbytes(verb, "max_file_bytes", max_file_bytes, 1)
    files: list[list[Saved]] = [[]]
    room = most
    for leaf in leaves:
        if files[-1] and leaf.nbytes > room:
            files.append([])
            room = most
        files[-1].append(leaf)
        room -= leaf.nbytes
    return files


class Part(NamedTuple):
    """What this rank writes in a round."""

    file: int | None  # its number; None if this rank writes none
    tensors: dict[str, Any]  # by name in the file, contiguous and on the CPU


@torch.no_grad()
def rounds(
    params: Mapping[str, Any], groups: Groups, files: Sequence[Sequence[Saved]]
) -> Iterator[Part]:
    """What this rank writes, round after round; all ranks have the same number of rounds.

    Communication: in the first partition group, an all-gather of each bucket once per round in
      which it is needed; no other rank sends anything.

    Memory: the tensors of one file, and a bucket twice. What a round gave is freed by the next.
    """
    writers = groups.plan.partition_groups[0]
    here = writers.index(groups.position) if groups.position in writers else None
    for start in range(0, len(files), len(writers)):
        batch = files[start : start + len(writers)]
        if here is None:
            yield Part(None, {})
            continue
        mine = set(batch[here]) if here < len(batch) else set()
        kept: dict[str, Tensor] = {}
        for leaves in _by_bucket([leaf for file in batch for leaf in file]):
            kept |= _gathered(params, groups, leaves, mine)
        yield Part(start + here if mine else None, kept)
        kept.clear()  # so that nobody holds two files


def _gathered(
    params: Mapping[str, Any], groups: Groups, leaves: Sequence[Saved], mine: set[Saved]
) -> dict[str, Tensor]:
    """The leaves of a bucket that belong to this rank's file, by name in it."""
    shards = {leaf.key: params[leaf.key] for leaf in leaves if is_leaf(params[leaf.key])}
    full = unshard(shards, groups.hierarchy)
    found: dict[str, Tensor] = {}
    for leaf in leaves:
        if leaf in mine:
            given = params[leaf.key]  # if it is whole, its memory may be that of others
            whole = full.pop(leaf.key, given)
            found[leaf.name] = _on_cpu(whole, leaf.dtype, copy=whole is given)
    return found


def _by_bucket(leaves: Sequence[Saved]) -> list[list[Saved]]:
    found: dict[tuple[int, int], list[Saved]] = {}
    for leaf in leaves:
        found.setdefault((leaf.tree, leaf.bucket), []).append(leaf)
    return list(found.values())


def _on_cpu(whole: Any, dtype: torch.dtype, *, copy: bool) -> Tensor:
    return whole.detach().to(device="cpu", dtype=dtype, copy=copy).contiguous()

"""`shard`: a pytree of tensors becomes one of shards. See [Note: kinds of leaves] in `leaf`."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mics_fn import _torch, tree
from mics_fn.agreement import agree, check_replicas
from mics_fn.collectives import broadcast
from mics_fn.errors import LeafError, PlanError, message
from mics_fn.flat import pack_full, split_chunk
from mics_fn.groups import Groups
from mics_fn.layout import BUCKET_BYTES, Bucket, LeafSpec, plan_buckets
from mics_fn.leaf import Fixed, Leaf, Nothing, Sharded, Tied, dtype_name, is_leaf
from mics_fn.linear import require_groups
from mics_fn.tree import Tree


def shard(
    params: Tree,
    groups: Any,
    *,
    replicas: Literal["check", "broadcast"] = "check",
    source_rank: int | None = None,
    frozen: Callable[[str], bool] | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    order: Callable[[str], object] | None = None,
) -> Tree:
    """Cut a pytree of tensors in shards: this rank keeps 1/p of every float leaf.

    Args:
      params: any pytree of tensors; meta tensors give shards of shape only. `nn.Parameter`s with
        `requires_grad=False` are frozen. Non-float leaves are replicated. A tensor that occurs
        twice (same memory) stays one shard.
      groups: `Groups`, or a prefix pytree of them, or a function from path to `Groups`.
      replicas: 'check' compares a digest of the values between ranks, 'broadcast' takes those of
        `source_rank`.
      source_rank: global rank whose values count with 'broadcast'; default the first of the groups.
      frozen: further leaves to freeze, by path (written from the root `''`).
      bucket_bytes: the most that travels in one collective, a single larger leaf excepted.
      order: sort key of a path, for the order of leaves in buckets; default by path, numbers as
        numbers.

    Returns:
      The same tree with `Sharded` leaves; `Fixed` where nothing is trained, `Tied` where a tensor
      occurs again.

    Communication: a digest of tree and values (tens of bytes a leaf); with 'broadcast', every float
      bucket once.

    Memory: this rank's shards (1/p of the floats), and one bucket while cutting.

    Raises:
      LeafError: a leaf is no dense tensor, or lies on another device than its groups.
      DesyncError: ranks disagree on the tree, or hold different values.
      TreeError, PlanError: `groups` is no prefix of `params`; a tied leaf lives on two groups.

    Example:
      >>> groups = make_groups(1)
      >>> shards = shard({"w": torch.ones(2, 3), "steps": torch.tensor(7)}, groups)
      >>> shards
      {'steps': Fixed(shape=(), int64, replicated), 'w': Sharded(shape=(2, 3), float32, here 6 of
      6)}

    References: MiCS, Zhang et al., VLDB 2022, arXiv:2205.00119, section 3.2.
    """
    require_groups("shard", "groups", groups)
    leaves, spec = tree.flatten(params)
    paths = tree.paths(params)
    homes: list[Groups] = tree.spread(
        groups, params, what="groups", is_value=lambda value: isinstance(value, Groups)
    )
    for leaf, path, home in zip(leaves, paths, homes, strict=True):
        home.partition.check_open()
        _check_leaf(leaf, path, home)
    owners = _owners(leaves)
    _check_ties(owners, paths, homes)
    still = [_is_frozen(leaf, path, frozen) for leaf, path in zip(leaves, paths, strict=True)]
    floats = [i for i, t in enumerate(leaves) if t.is_floating_point() and owners[i] == i]
    specs = [_leaf_spec(leaves[i], paths[i], homes[i], homes, not still[i]) for i in floats]
    slots = dict(
        zip(floats, plan_buckets(specs, bucket_bytes=bucket_bytes, order=order), strict=True)
    )
    _agree_on(leaves, paths, homes, owners, slots)
    own = [i for i in range(len(leaves)) if owners[i] == i and not leaves[i].is_meta]
    if replicas == "check":
        for home in dict.fromkeys(homes):
            mine = [i for i in own if homes[i] is home]
            check_replicas(home, "shard", [paths[i] for i in mine], [leaves[i] for i in mine])
    elif replicas != "broadcast":
        raise PlanError(f"shard: replicas={replicas!r}, expected 'check' or 'broadcast'")
    source = source_rank if replicas == "broadcast" else None
    out = _cut(leaves, homes, slots, replicas == "broadcast", source)
    for i, leaf in enumerate(leaves):
        if owners[i] != i:
            out[i] = Tied(*slots[owners[i]])
        elif i not in slots:
            out[i] = Fixed(_replicated(leaf, homes[i], replicas == "broadcast", source))
    shards = spec.unflatten([out[i] for i in range(len(leaves))])
    return tree.replace_none(shards, Nothing(), is_leaf)


def _cut(
    leaves: Sequence[Tensor],
    homes: Sequence[Groups],
    slots: dict[int, tuple[Bucket, int]],
    sent: bool,
    source: int | None,
) -> dict[int, Leaf]:
    """Each bucket's chunk of this rank, as leaves; a bucket is whole only while it is cut."""
    members: dict[Bucket, dict[int, int]] = {}
    for i, (bucket, slot) in slots.items():
        members.setdefault(bucket, {})[slot] = i
    out: dict[int, Leaf] = {}
    for bucket, by_slot in members.items():
        index = [by_slot[slot] for slot in range(len(by_slot))]
        home, device = homes[index[0]], leaves[index[0]].device
        with torch.no_grad():
            full = pack_full(bucket, [leaves[i].detach() for i in index], device=device)
            if sent and device.type != "meta":
                broadcast(home, full, home.ranks[0] if source is None else source)
            # A storage of its own, so that in-place updates and `whole_chunk` know its bounds.
            chunk = full.view(bucket.parts, -1)[home.hierarchy.chunk].clone()
        kind = Sharded if bucket.trainable else Fixed
        pieces = split_chunk(bucket, home.hierarchy.chunk, chunk)
        out.update(
            {
                i: kind(p, bucket, slot)
                for slot, (i, p) in enumerate(zip(index, pieces, strict=True))
            }
        )
    return out


def _replicated(leaf: Tensor, home: Groups, sent: bool, source: int | None) -> Tensor:
    value = leaf.detach().clone(memory_format=torch.contiguous_format)
    if sent and not value.is_meta and value.numel():
        broadcast(home, value, home.ranks[0] if source is None else source)
    return value


def _check_leaf(leaf: Any, path: str, home: Groups) -> None:
    where = f"params{path}"
    if not isinstance(leaf, Tensor):
        raise LeafError(
            message(
                f"shard: {where} is {type(leaf).__name__}, expected torch.Tensor",
                fix="convert it with torch.as_tensor, or leave it out of the tree",
            )
        )
    if leaf.layout != torch.strided or leaf.is_complex() or leaf.is_nested or leaf.is_quantized:
        kind = f"{leaf.layout}, {leaf.dtype}".replace("torch.", "")
        raise LeafError(message(f"shard: {where} is {kind}", fix="pass a dense real tensor"))
    if type(leaf) not in (Tensor, nn.Parameter) and _torch.is_dtensor(leaf):
        raise LeafError(message(f"shard: {where} is a DTensor", fix="pass its full_tensor()"))
    if not leaf.is_meta and leaf.device != home.device:
        raise LeafError(
            message(
                f"shard: {where} is on {leaf.device}, its groups are on {home.device}",
                fix=f"move it with .to({str(home.device)!r}), "
                f"or make groups with device={str(leaf.device)!r}",
            )
        )


def _is_frozen(leaf: Tensor, path: str, frozen: Callable[[str], bool] | None) -> bool:
    by_flag = isinstance(leaf, nn.Parameter) and not leaf.requires_grad
    return by_flag or (frozen is not None and bool(frozen(path)))


def _owners(leaves: Sequence[Tensor]) -> list[int]:
    """For each leaf the first that is the same tensor: one object, or one memory seen alike."""
    first: dict[Any, int] = {}
    owners = []
    for i, leaf in enumerate(leaves):
        key: Any = id(leaf) if leaf.is_floating_point() else (i, "no ties between integers")
        if leaf.is_floating_point() and leaf.numel() and not leaf.is_meta:
            view = (leaf.storage_offset(), tuple(leaf.shape), leaf.stride(), leaf.dtype)
            key = (_torch.storage_id(leaf), *view)
        owners.append(first.setdefault(key, i))
    return owners


def _check_ties(owners: Sequence[int], paths: Sequence[str], homes: Sequence[Groups]) -> None:
    for i, owner in enumerate(owners):
        if homes[i] is not homes[owner]:
            raise PlanError(
                message(
                    f"shard: params{paths[i]} is tied to params{paths[owner]}, but on other groups",
                    [f"{homes[owner].describe()} against {homes[i].describe()}"],
                    fix="give tied leaves the same groups, or clone one of them",
                )
            )


def _leaf_spec(
    leaf: Tensor, path: str, home: Groups, homes: Sequence[Groups], trainable: bool
) -> LeafSpec:
    place = next(i for i, other in enumerate(homes) if other is home)
    return LeafSpec(
        path, tuple(leaf.shape), leaf.dtype, home.partition_size, trainable, (place, leaf.is_meta)
    )


def _agree_on(
    leaves: Sequence[Tensor],
    paths: Sequence[str],
    homes: Sequence[Groups],
    owners: Sequence[int],
    slots: dict[int, tuple[Bucket, int]],
) -> None:
    """Compare paths, shapes, dtypes, groups and layout between the ranks of each groups."""
    for home in dict.fromkeys(homes):
        facts = [("groups", home.describe())]
        for i, leaf in enumerate(leaves):
            if homes[i] is home:
                text = f"{tuple(leaf.shape)} {dtype_name(leaf.dtype)}"
                if owners[i] != i:
                    text += f" tied to params{paths[owners[i]]}"
                elif i in slots:
                    bucket, slot = slots[i]
                    text += "" if bucket.trainable else " frozen"
                    text += f" at {bucket.offsets[slot]} of bucket {bucket.index}"
                facts.append((f"params{paths[i]}", text))
        agree(home, "shard", facts)

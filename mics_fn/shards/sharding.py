"""`shard`: a pytree of tensors becomes one of shards. See [Note: kinds of leaves] in `leaf`."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from mics_fn import tree
from mics_fn.collectives import agree, broadcast, check_replicas
from mics_fn.errors import PlanError, TreeError, message, name_ranks
from mics_fn.groups import Groups
from mics_fn.shards.bucket import BUCKET_BYTES, Bucket, LeafSpec, plan_buckets
from mics_fn.shards.leaf import (
    Fixed,
    Leaf,
    Nothing,
    Sharded,
    Tied,
    check_tensor,
    dtype_name,
    is_leaf,
    refuse_computed,
)
from mics_fn.shards.memory import owners_of, refuse_overlaps
from mics_fn.shards.opened import require_groups
from mics_fn.shards.pack import pack_full, split_chunk
from mics_fn.shards.precision import Precision, precision_of
from mics_fn.tree import Tree


def shard(
    params: Tree,
    groups: Any,
    *,
    replicas: Literal["check", "broadcast"] = "check",
    source_rank: int | None = None,
    frozen: Callable[[str], bool] | None = None,
    precision: Precision | str | None = None,
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
      precision: a `Precision` or its text: the dtype of the shards, and those in which `gather`
        sends and gives full tensors and gradients are reduced; default the tensors' own.
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
      LeafError: a leaf is no dense tensor, lies on another device than its groups, overlaps with
        another in memory, or is computed from what is differentiated: only gather has a derivative.
      DesyncError: ranks disagree on the tree, or hold different values.
      TreeError, PlanError: `groups` is no prefix of `params`; a tied leaf lives on two groups.

    Example:
      >>> groups = make_groups(1)
      >>> for leaf in shard([torch.ones(2, 3), torch.tensor(7)], groups):
      ...     print(leaf)
      Sharded(shape=(2, 3), float32, here 6 of 6)
      Fixed(shape=(), int64, replicated)

    References: MiCS, Zhang et al., VLDB 2022, arXiv:2205.00119, section 3.2.
    """
    require_groups("shard", groups)
    if replicas not in ("check", "broadcast"):
        raise PlanError(f"shard: replicas={replicas!r}, expected 'check' or 'broadcast'")
    if source_rank is not None and replicas == "check":
        fix = "pass replicas='broadcast' to take its values"
        raise PlanError(message(f"shard: source_rank={source_rank} has no effect", fix=fix))
    if params is None:
        raise TreeError(message("shard: params is None", fix="pass a pytree of tensors"))
    layout = Layout(frozen, precision_of(precision), bucket_bytes, order)
    plan = _plan("shard", "params", params, groups, layout)
    refuse_computed("shard", plan.paths, plan.leaves)
    trained = [plan.paths[i] for i, (bucket, _) in plan.slots.items() if bucket.trainable]
    refuse_overlaps("shard", dict(zip(plan.paths, plan.leaves, strict=True)), trained)
    _agree_on(plan)
    if replicas == "check":
        _check_values(plan)
    sources = {
        home: _source(home, source_rank) if replicas == "broadcast" else None
        for home in dict.fromkeys(plan.homes)
    }
    return _assemble(plan, sources)


def layout_of(
    verb: str,
    root: str,
    values: Tree,
    groups: Any,
    *,
    frozen: Callable[[str], bool] | None = None,
    precision: Precision | str | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    order: Callable[[str], object] | None = None,
) -> Tree:
    """Shards without data, laid out as `shard` would lay out these tensors, and agreed on.

    Communication: as `shard`, without values.
    """
    require_groups(verb, groups)
    layout = Layout(frozen, precision_of(precision), bucket_bytes, order)
    plan = _plan(verb, root, values, groups, layout)
    _agree_on(plan)
    meta = [torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") for leaf in plan.leaves]
    return _assemble(plan._replace(leaves=meta), dict.fromkeys(plan.homes))


def _assemble(plan: "_Plan", sources: dict[Groups, int | None]) -> Tree:
    out = _cut(plan, sources)
    for i, leaf in enumerate(plan.leaves):
        if plan.owners[i] != i:
            out[i] = Tied(*plan.slots[plan.owners[i]])
        elif i not in plan.slots:
            out[i] = Fixed(_replicated(leaf, plan.homes[i], sources[plan.homes[i]]))
    shards = plan.spec.unflatten([out[i] for i in range(len(plan.leaves))])
    return tree.replace_none(shards, Nothing(), is_leaf)


class Layout(NamedTuple):
    """How leaves become buckets: the options of `shard`."""

    frozen: Callable[[str], bool] | None = None
    precision: Precision = Precision()
    bucket_bytes: int = BUCKET_BYTES
    order: Callable[[str], object] | None = None


class _Plan(NamedTuple):
    """The leaves of a tree, and what becomes of each."""

    verb: str
    spec: Any
    leaves: list[Tensor]
    paths: list[str]  # from the name of the tree
    homes: list[Groups]
    owners: list[int]  # the first leaf that is the same tensor
    slots: dict[int, tuple[Bucket, int]]  # of float leaves that own their data


def _plan(
    verb: str,
    root: str,
    params: Tree,
    groups: Any,
    layout: Layout,
) -> _Plan:
    leaves, spec = tree.flatten(params, is_leaf)
    bare, paths = tree.paths(params, "", is_leaf), tree.paths(params, root, is_leaf)
    for pattern in layout.precision.unmatched(bare):
        text = f"{verb}: precision: the pattern {pattern!r} matches no leaf"
        warnings.warn(text, stacklevel=4)
    homes: list[Groups] = tree.spread(
        groups,
        params,
        what="groups",
        is_leaf=is_leaf,
        is_value=lambda value: isinstance(value, Groups),
    )
    for leaf, path, home in zip(leaves, paths, homes, strict=True):
        home.partition.check_open()
        check_tensor(verb, path, leaf, home.device)
    owners = owners_of(leaves)
    _check_ties(verb, owners, paths, homes)
    places = {home: place for place, home in enumerate(dict.fromkeys(homes))}
    floats = [i for i, t in enumerate(leaves) if t.is_floating_point() and owners[i] == i]
    dtypes = {i: layout.precision.dtypes(bare[i], leaves[i].dtype) for i in floats}
    specs = [
        LeafSpec(
            path=bare[i],
            shape=tuple(leaves[i].shape),
            dtype=dtypes[i].param,
            parts=homes[i].partition_size,
            trainable=not _is_frozen(leaves[i], bare[i], layout.frozen),
            place=(places[homes[i]], leaves[i].is_meta),
            travel=dtypes[i][1:],
        )
        for i in floats
    ]
    slots = plan_buckets(specs, bucket_bytes=layout.bucket_bytes, order=layout.order)
    by_leaf = dict(zip(floats, slots, strict=True))
    return _Plan(verb, spec, leaves, paths, homes, owners, by_leaf)


def _check_values(plan: _Plan) -> None:
    for home in dict.fromkeys(plan.homes):
        mine = [
            i
            for i, leaf in enumerate(plan.leaves)
            if plan.homes[i] is home and plan.owners[i] == i and not leaf.is_meta
        ]
        paths = [plan.paths[i] for i in mine]
        check_replicas(home, plan.verb, paths, [plan.leaves[i] for i in mine])


def _source(home: Groups, source_rank: int | None) -> int:
    """The rank of `home` whose values count."""
    if source_rank is None:
        return home.ranks[0]
    if source_rank not in home.ranks:
        text = f"shard: source_rank={source_rank} is not one of {name_ranks(home.ranks)}"
        raise PlanError(message(text, fix="name a global rank of the groups"))
    return source_rank


def _cut(plan: _Plan, sources: dict[Groups, int | None]) -> dict[int, Leaf]:
    """Each bucket's chunk of this rank, as leaves; a bucket is whole only while it is cut."""
    members: dict[Bucket, dict[int, int]] = {}
    for i, (bucket, slot) in plan.slots.items():
        members.setdefault(bucket, {})[slot] = i
    out: dict[int, Leaf] = {}
    for bucket, by_slot in members.items():
        index = [by_slot[slot] for slot in range(len(by_slot))]
        home, device = plan.homes[index[0]], plan.leaves[index[0]].device
        source = sources[home]
        with torch.no_grad():
            full = pack_full(bucket, [plan.leaves[i].detach() for i in index], device=device)
            if source is not None and not full.is_meta:
                broadcast(home, full, source)
            # A storage of its own, so that in-place updates and `whole_chunk` know its bounds.
            chunk = full.view(bucket.parts, -1)[home.hierarchy.route.chunk].clone()
        kind = Sharded if bucket.trainable else Fixed
        pieces = zip(index, split_chunk(bucket, home.hierarchy.route.chunk, chunk), strict=True)
        out.update({i: kind(piece, bucket, slot) for slot, (i, piece) in enumerate(pieces)})
    return out


def _replicated(leaf: Tensor, home: Groups, source: int | None) -> Tensor:
    value = leaf.detach().clone(memory_format=torch.contiguous_format)
    if source is not None and not value.is_meta and value.numel():
        broadcast(home, value, source)
    return value


def _is_frozen(leaf: Tensor, path: str, frozen: Callable[[str], bool] | None) -> bool:
    by_flag = isinstance(leaf, nn.Parameter) and not leaf.requires_grad
    return by_flag or (frozen is not None and bool(frozen(path)))


def _check_ties(
    verb: str, owners: Sequence[int], paths: Sequence[str], homes: Sequence[Groups]
) -> None:
    for i, owner in enumerate(owners):
        if homes[i] is not homes[owner]:
            raise PlanError(
                message(
                    f"{verb}: {paths[i]} is tied to {paths[owner]}, but on other groups",
                    [f"{homes[owner].describe()} against {homes[i].describe()}"],
                    fix="give tied leaves the same groups, or clone one of them",
                )
            )


def _agree_on(plan: _Plan) -> None:
    """Compare paths, shapes, dtypes, groups and layout between the ranks of each groups."""
    for home in dict.fromkeys(plan.homes):
        facts = [("groups", home.describe())]
        for i, leaf in enumerate(plan.leaves):
            if plan.homes[i] is home:
                text = f"{tuple(leaf.shape)} {dtype_name(leaf.dtype)}"
                text += " meta" if leaf.is_meta else ""
                if plan.owners[i] != i:
                    text += f" tied to {plan.paths[plan.owners[i]]}"
                elif i in plan.slots:
                    bucket, slot = plan.slots[i]
                    text += "" if bucket.trainable else " frozen"
                    travel = (bucket.dtype, bucket.compute, bucket.reduce, bucket.accumulate)
                    if len({leaf.dtype, *travel}) > 1:
                        text += f" as {'/'.join(map(dtype_name, travel))}"
                    text += f" at {bucket.offsets[slot]} of bucket {bucket.index}"
                facts.append((plan.paths[i], text))
        agree(home, plan.verb, facts)

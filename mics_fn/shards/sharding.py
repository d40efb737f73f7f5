"""`shard`: a pytree of tensors becomes a tree of shards. See [Note: kinds of leaves] in `leaf`."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from mics_fn import points, tree
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
    """Cut a pytree of tensors into shards: this rank keeps 1/p of every float leaf.

    Args:
      params: any pytree of tensors. Meta tensors give shards without values. An `nn.Parameter` with
        `requires_grad=False` is frozen. Leaves that are not floats are replicated. A tensor that
        occurs twice (in the same memory) becomes one shard, and stays tied.
      groups: `Groups`, or a prefix pytree of them, or a function from path to `Groups`.
      replicas: 'check' compares a digest of the values between ranks; 'broadcast' takes the values
        of `source_rank`.
      source_rank: the global rank whose values 'broadcast' sends; default the first of the groups.
      frozen: says which further leaves are frozen, by path (which begins with `''`).
      precision: a `Precision` or its text, which gives the dtypes of shards, of full tensors, and
        of gradients while they are reduced; default the tensors' own.
      bucket_bytes: the largest size of a bucket; only a single larger leaf may exceed it.
      order: sort key of a path, for the order of leaves in buckets. By default numbers in paths
        compare as numbers.

    Returns:
      The same tree with `Sharded` leaves, `Fixed` ones for tensors that are not trained, and `Tied`
      ones for tensors that occurred before.

    Communication: a digest of the tree and the values (tens of bytes per leaf); with 'broadcast'
      also every float bucket, once.

    Memory: this rank's shards (1/p of the floats), and one full bucket while it is cut.

    Raises:
      LeafError: a leaf is not a dense tensor, is on another device than its groups, overlaps with
        another one in memory, or was computed under autograd: only `gather` has a derivative.
      DesyncError: ranks disagree on the tree, or hold different values.
      TreeError: `groups` is not a prefix of `params`.
      PlanError: a tied leaf lives on two groups, or an option has no effect.

    Example:
      >>> groups = make_groups(1)
      >>> for leaf in shard([torch.ones(2, 3), torch.tensor(7)], groups):
      ...     print(leaf)
      Sharded(shape=(2, 3), float32, here 6 of 6)
      Fixed(shape=(), int64, replicated)

    References: MiCS, Zhang et al., VLDB 2022, arXiv:2205.00119, section 3.2.
    """
    require_groups("shard", groups)
    if points.observers:
        points.passing("build: shard")
    if replicas not in ("check", "broadcast"):
        raise PlanError(f"shard: replicas={replicas!r}, expected 'check' or 'broadcast'")
    if source_rank is not None and replicas == "check":
        fix = "pass replicas='broadcast' to take its values"
        raise PlanError(message(f"shard: source_rank={source_rank} has no effect", fix=fix))
    if params is None:
        raise TreeError(message("shard: params is None", fix="pass a pytree of tensors"))
    options = _Options(frozen, precision_of(precision), bucket_bytes, order)
    layout = _lay_out("shard", "params", params, groups, options)
    refuse_computed("shard", layout.paths, layout.leaves)
    trained = [layout.paths[i] for i, (bucket, _) in layout.slots.items() if bucket.trainable]
    refuse_overlaps("shard", dict(zip(layout.paths, layout.leaves, strict=True)), trained)
    _agree_on(layout)
    if replicas == "check":
        _check_values(layout)
    sources = {
        home: _source(home, source_rank) if replicas == "broadcast" else None
        for home in dict.fromkeys(layout.homes)
    }
    return _assemble(layout, sources)


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
    """Shards on meta, laid out as `shard` would lay out these tensors.

    Communication: a digest of the tree, to compare it between ranks.
    """
    require_groups(verb, groups)
    options = _Options(frozen, precision_of(precision), bucket_bytes, order)
    layout = _lay_out(verb, root, values, groups, options)
    _agree_on(layout)
    meta = [torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") for leaf in layout.leaves]
    return _assemble(layout._replace(leaves=meta), dict.fromkeys(layout.homes))


def _assemble(layout: "_Layout", sources: dict[Groups, int | None]) -> Tree:
    out = _cut(layout, sources)
    for i, leaf in enumerate(layout.leaves):
        if layout.owners[i] != i:
            out[i] = Tied(*layout.slots[layout.owners[i]])
        elif i not in layout.slots:
            out[i] = Fixed(_replicated(leaf, layout.homes[i], sources[layout.homes[i]]))
    shards = layout.spec.unflatten([out[i] for i in range(len(layout.leaves))])
    return tree.replace_none(shards, Nothing(), is_leaf)


class _Options(NamedTuple):
    """The options of `shard` that say how leaves become buckets."""

    frozen: Callable[[str], bool] | None = None
    precision: Precision = Precision()
    bucket_bytes: int = BUCKET_BYTES
    order: Callable[[str], object] | None = None


class _Layout(NamedTuple):
    """The leaves of a tree, and where each of them will lie."""

    verb: str
    spec: Any
    leaves: list[Tensor]
    paths: list[str]  # beginning with the name of the tree
    homes: list[Groups]
    owners: list[int]  # for each leaf the first one that is the same tensor
    slots: dict[int, tuple[Bucket, int]]  # for the float leaves that own their data


def _lay_out(verb: str, root: str, params: Tree, groups: Any, options: _Options) -> _Layout:
    """Check the tensors of a tree, and decide where each of them will lie."""
    leaves, spec = tree.flatten(params, is_leaf)
    bare, paths = tree.paths(params, "", is_leaf), tree.paths(params, root, is_leaf)
    for pattern in options.precision.unmatched(bare):
        text = f"{verb}: precision: the pattern {pattern!r} matches no leaf"
        warnings.warn(text, stacklevel=4)
    homes = _groups_of(params, groups)
    for leaf, path, home in zip(leaves, paths, homes, strict=True):
        check_tensor(verb, path, leaf, home.device)
    owners = owners_of(leaves)
    _check_ties(verb, owners, paths, homes)
    numbers = {home: number for number, home in enumerate(dict.fromkeys(homes))}
    floats = [i for i, t in enumerate(leaves) if t.is_floating_point() and owners[i] == i]
    dtypes = {i: options.precision.dtypes(bare[i], leaves[i].dtype) for i in floats}
    specs = [
        LeafSpec(
            path=bare[i],
            shape=tuple(leaves[i].shape),
            dtype=dtypes[i].param,
            parts=homes[i].partition_size,
            trainable=not _is_frozen(leaves[i], bare[i], options.frozen),
            group=(numbers[homes[i]], leaves[i].is_meta),
            travel=dtypes[i][1:],
        )
        for i in floats
    ]
    slots = plan_buckets(specs, bucket_bytes=options.bucket_bytes, order=options.order)
    by_leaf = dict(zip(floats, slots, strict=True))
    return _Layout(verb, spec, leaves, paths, homes, owners, by_leaf)


def _groups_of(params: Tree, groups: Any) -> list[Groups]:
    """The groups of each leaf; raises if any are closed."""
    found = tree.spread(
        groups, params, what="groups", is_leaf=is_leaf, is_value=lambda v: isinstance(v, Groups)
    )
    for home in dict.fromkeys(found):
        home.partition.check_open()
    return found


def _check_values(layout: _Layout) -> None:
    """Raise DesyncError unless ranks hold the same values; see `check_replicas`."""
    for home in dict.fromkeys(layout.homes):
        mine = [
            i
            for i, leaf in enumerate(layout.leaves)
            if layout.homes[i] is home and layout.owners[i] == i and not leaf.is_meta
        ]
        paths = [layout.paths[i] for i in mine]
        check_replicas(home, layout.verb, paths, [layout.leaves[i] for i in mine])


def _source(home: Groups, source_rank: int | None) -> int:
    """The rank of these groups whose values are sent to the others."""
    if source_rank is None:
        return home.ranks[0]
    if source_rank not in home.ranks:
        text = f"shard: source_rank={source_rank} is not one of {name_ranks(home.ranks)}"
        raise PlanError(message(text, fix="name a global rank of the groups"))
    return source_rank


def _cut(layout: _Layout, sources: dict[Groups, int | None]) -> dict[int, Leaf]:
    """This rank's chunk of each bucket, as leaves; one bucket at a time is in memory in full."""
    members: dict[Bucket, dict[int, int]] = {}
    for i, (bucket, slot) in layout.slots.items():
        members.setdefault(bucket, {})[slot] = i
    out: dict[int, Leaf] = {}
    for bucket, by_slot in members.items():
        index = [by_slot[slot] for slot in range(len(by_slot))]
        home, device = layout.homes[index[0]], layout.leaves[index[0]].device
        source = sources[home]
        with torch.no_grad():
            full = pack_full(bucket, [layout.leaves[i].detach() for i in index], device=device)
            if source is not None and not full.is_meta:
                broadcast(home, full, source)
            # Each chunk gets its own storage, so that `whole_chunk` can recognise its pieces.
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


def _agree_on(layout: _Layout) -> None:
    """Compare paths, shapes, dtypes, groups and layout between ranks."""
    for home in dict.fromkeys(layout.homes):
        facts = [("groups", home.describe())]
        for i, leaf in enumerate(layout.leaves):
            if layout.homes[i] is home:
                text = f"{tuple(leaf.shape)} {dtype_name(leaf.dtype)}"
                text += " meta" if leaf.is_meta else ""
                if layout.owners[i] != i:
                    text += f" tied to {layout.paths[layout.owners[i]]}"
                elif i in layout.slots:
                    bucket, slot = layout.slots[i]
                    text += "" if bucket.trainable else " frozen"
                    travel = (bucket.dtype, bucket.compute, bucket.reduce, bucket.accumulate)
                    if len({leaf.dtype, *travel}) > 1:
                        text += f" as {'/'.join(map(dtype_name, travel))}"
                    text += f" at {bucket.offsets[slot]} of bucket {bucket.index}"
                facts.append((layout.paths[i], text))
        agree(home, layout.verb, facts)

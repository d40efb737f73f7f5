"""The verbs on shards: `shard`, `gather`, `reduce_grads` and `map`.

A full value is what every rank has a copy of, and a shard is one value held in parts. For what
`shard` makes see [Note: kinds of leaves] in `leaf`, and for gradients [Note: adjoint] in `linear`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypedDict, TypeVar, Unpack, overload

import torch
from torch import Tensor, nn

from mics_fn import _torch, checks, collectives, spans, tree
from mics_fn.collectives import SHORT_NAMES, Codec
from mics_fn.errors import LeafError, PlanError, name_ranks
from mics_fn.groups import Groups, Home, complete, require_replicas
from mics_fn.offload import DEVICE, Where, place_tensor, placed_like
from mics_fn.shards import pack
from mics_fn.shards.bucket import BUCKET_BYTES, Bucket, Formats, LeafSpec, Precision, plan_buckets
from mics_fn.shards.leaf import (
    Fixed,
    Leaf,
    Nothing,
    Sharded,
    Tied,
    dtype_name,
    is_leaf,
    mark_reduced,
    owners_of,
    reduction_groups,
    refuse_overlaps,
)
from mics_fn.shards.linear import apply, as_part, deal, put
from mics_fn.shards.opened import (
    BucketUse,
    GroupsTree,
    Opened,
    check_leaves,
    compare_values,
    homes_of,
    open_shards,
    values_up_to,
)
from mics_fn.tree import Tree

# What may become shards.

# Floats are trained or frozen, and the others are replicated.
_WHOLE = (f"{prefix}int{bits}" for prefix in ("", "u") for bits in (8, 16, 32, 64))
_DTYPES = {*SHORT_NAMES, torch.bool, *(getattr(torch, name) for name in _WHOLE)}


def refuse_computed(verb: str, paths: Sequence[str], tensors: Sequence[Tensor]) -> None:
    """Raise LeafError for a tensor whose connection to the graph of autograd would be lost.

    A leaf of autograd, such as an `nn.Parameter`, has no such connection: its values are read, and
    it gets no gradient.
    """
    for path, x in zip(paths, tensors, strict=True):
        computed = x.requires_grad and not x.is_leaf and torch.is_grad_enabled()
        if x.is_floating_point() and (computed or _torch.is_wrapped(x)):
            text = f"{verb}: {path} is computed from a tensor that would not get its gradient"
            fix = f"{verb} outside, and differentiate through gather; or pass its detach()"
            raise LeafError(text, fix=fix)


def check_tensor(verb: str, where: str, leaf: Any, device: torch.device) -> None:
    """Raise LeafError unless a leaf is a tensor that can be sharded on this device."""
    kind, wrong = type(leaf).__name__, ""
    if not isinstance(leaf, Tensor):
        wrong = f"{kind}, expected torch.Tensor"
        fix = "pass tensors, as dict(model.named_parameters()); a Trainer takes the module itself"
    elif leaf.layout != torch.strided or leaf.is_nested or leaf.dtype not in _DTYPES:
        wrong = f"{leaf.layout}, {leaf.dtype}".replace("torch.", "")
        fix = f"pass a dense tensor of {', '.join(SHORT_NAMES.values())}, bool or whole numbers"
    elif _torch.is_wrapper(leaf):
        wrong = f"{kind}, which keeps its values in other tensors"
        fix = "pass a plain tensor, as its clone() or dequantize() may be, or leave it out"
    elif not leaf.is_meta and leaf.device != device:
        wrong = f"on {leaf.device}, its groups are on {device}"
        fix = f"move it with .to('{device}'), or make groups with device='{leaf.device}'"
    if wrong:
        raise LeafError(f"{verb}: {where} is {wrong}", fix=fix)  # pyright: ignore
    hooks = _torch.hooks_of(leaf) if leaf.is_leaf else ()
    if hooks:
        text = f"{verb}: {where} has hooks ({', '.join(hooks)}), which nothing would call"
        fix = "remove them; to change gradients, chain a Transform before the optimizer"
        raise LeafError(text, fix=fix)


# The options of `shard`, which other verbs hand on.


class LayoutOptions(TypedDict, total=False):
    """Options of `shard` that say how leaves become buckets; other verbs take them, too."""

    frozen: Callable[[str], bool] | None
    precision: Precision | str | None
    bucket_bytes: float | str
    order: Callable[[str], object] | None
    bucket: Callable[[str], object] | None
    where: Where | str | None
    whole: Callable[[str], bool] | None


K = TypeVar("K")
T = TypeVar("T")


# Where the chunks of new shards go: `where=` of the verbs that make some.


def place_chunk(
    home: Home,
    bucket: Bucket,
    flat: Tensor,
    places: Sequence[str],
    names: Sequence[str],
    host_bytes: int,
) -> list[Tensor]:
    """Cut a chunk into its pieces, by slot, each in its place.

    Args:
      home: the groups of the bucket.
      bucket: the bucket.
      flat: this rank's chunk, in memory of its own.
      places: one per slot, as the device of the groups sees them.
      names: paths of the leaves, for errors.
      host_bytes: of the `Where` that the places come from.

    Raises:
      FileError: a file cannot be made or written.
      LeafError: a value is not finite, and is to be kept as codes.
    """
    chunk, device = home.hierarchy.route.chunk, home.device
    empty = _torch.has_no_data(flat) or not flat.numel()
    if bucket.codes is not None and not empty:
        return pack.coded_pieces(bucket, chunk, flat, names)
    if empty or set(places) == {DEVICE}:
        return pack.split_chunk(bucket, chunk, flat)
    if len(set(places)) == 1:  # so that they are parts of one tensor there, too
        title = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        flat = place_tensor(flat, places[0], device, host_bytes, title)
        return pack.split_chunk(bucket, chunk, flat)
    own = [piece.clone() for piece in pack.split_chunk(bucket, chunk, flat)]
    return [
        place_tensor(x, place, device, host_bytes, name) if x.numel() else x
        for x, place, name in zip(own, places, names, strict=True)
    ]


# The layout of a tree that is about to be cut: what decides it, and how ranks compare it.


class Layout(NamedTuple):
    """The leaves of a tree, and where each of them will lie."""

    verb: str
    spec: Any
    leaves: list[Tensor]
    paths: list[str]  # beginning with the name of the tree
    homes: list[Groups]
    owners: list[int]  # for each leaf the first one that is the same tensor
    slots: dict[int, tuple[Bucket, int]]  # for the float leaves that own their data
    places: list[str]  # where their pieces will lie
    host_bytes: int  # through which data of files travel


def layout_for(verb: str, root: str, params: Tree, groups: Any, options: LayoutOptions) -> Layout:
    """Check the tensors of a tree and the options of `shard`, and decide where each will lie."""
    for name in options.keys() - LayoutOptions.__annotations__.keys():
        raise TypeError(f"{verb}() got an unexpected keyword argument {name!r}")
    frozen, order, bucket = (options.get(name) for name in ("frozen", "order", "bucket"))
    whole = options.get("whole")
    chosen, where = Precision.parse(options.get("precision")), Where.parse(options.get("where"))
    given = options.get("bucket_bytes", BUCKET_BYTES)
    nbytes = checks.nbytes(verb, "bucket_bytes", given, 1)
    homes = homes_of(verb, groups, params, root, Groups)
    leaves, spec = tree.flatten(params, is_leaf)
    tree.refuse_equal_paths(verb, tree.replace_none(params, Nothing(), is_leaf), root, is_leaf)
    bare = tree.paths(params, "", is_leaf)
    paths = [tree.join(root, path) for path in bare]
    dims = [dim_of(verb, *each) for each in zip(paths, bare, leaves, homes, strict=True)]
    homes = [x.copies if dim is None else x for x, dim in zip(homes, dims, strict=True)]
    leaves = [_torch.local_of(leaf) for leaf in leaves]
    checks.check_matched(f"{verb}: precision", chosen.patterns, bare)
    checks.check_matched(f"{verb}: where", where.patterns, bare)
    for leaf, path, home in zip(leaves, paths, homes, strict=True):
        check_tensor(verb, path, leaf, home.device)
    owners, numbers = owners_of(leaves), {home: k for k, home in enumerate(dict.fromkeys(homes))}
    specs: dict[int, LeafSpec] = {}
    for i, (leaf, path, home) in enumerate(zip(leaves, bare, homes, strict=True)):
        if home is not homes[owners[i]]:
            text = f"{verb}: {paths[i]} is tied to {paths[owners[i]]}, but on other groups"
            lines = [f"{homes[owners[i]].describe()} against {home.describe()}"]
            raise PlanError(text, lines, "give tied leaves the same groups, or clone one of them")
        if leaf.is_floating_point() and owners[i] == i:
            trained = not isinstance(leaf, nn.Parameter) or leaf.requires_grad
            if frozen is not None:
                trained &= not checks.answer(verb, f"frozen({path!r})", frozen(path))
            formats = chosen.formats(path, leaf.dtype, leaf.numel(), trained)
            _check_formats(verb, paths[i], formats, home, trained)
            own = whole is not None and checks.answer(verb, f"whole({path!r})", whole(path))
            facts = formats, home.partition_size, trained, (numbers[home], leaf.is_meta)
            more = {"whole": trained and own, "cut": dims[i]}
            specs[i] = LeafSpec(path, tuple(leaf.shape), *facts, **more)
    slots = plan_buckets(list(specs.values()), bucket_bytes=nbytes, order=order, bucket=bucket)
    pairs = zip(bare, homes, strict=True)
    places = [where.at(path, "params", home.device) for path, home in pairs]
    by_leaf = dict(zip(specs, slots, strict=True))
    for i, (made, _) in by_leaf.items():
        pack.check_kept_place(verb, made, places[i])
    return Layout(verb, spec, leaves, paths, homes, owners, by_leaf, places, where.host_bytes)


def dim_of(verb: str, path: str, bare: str, leaf: Any, home: Groups) -> int | None:
    """The dim along which a leaf is cut over the parts of its model; None if it is a copy.

    Raises:
      LeafError: a DTensor lies on other ranks than the parts, or is not cut evenly along one dim.
    """
    model = home.model
    if not _torch.is_dtensor(leaf):
        dim = None if model is None else model.cut(bare)
        if dim is not None and not 0 <= dim < getattr(leaf, "ndim", 0):
            shape = tuple(getattr(leaf, "shape", ()))
            text = f"{verb}: {path} of {shape} has no dim {dim}, along which it is cut"
            raise LeafError(text, fix="say the right one in make_groups(cut=)")
        if dim is None and home.copies is not home and home.hierarchy.route.grad_factor != 1.0:
            fix = "give such leaves groups of their own, over all of these ranks"
            raise LeafError(f"{verb}: {path} is a copy on groups with mean_over=", fix=fix)
        return dim
    places = [x for x in leaf.placements if not x.is_replicate()]
    ranks = leaf.device_mesh.mesh.flatten().tolist()
    fix = "distribute it over one dimension of the mesh, named in make_groups(mesh=, model=)"
    if model is None or ranks != [*model.parts.ranks]:
        text = f"{verb}: {path} is a DTensor on {name_ranks(ranks)}, which are not the parts"
        raise LeafError(f"{text} of its groups", fix=fix)
    if any(type(x).__name__ != "Shard" for x in places) or len(places) > 1:
        text = f"{verb}: {path} is a DTensor with placements {leaf.placements}"
        raise LeafError(text, fix="redistribute it to Shard(dim) or Replicate()")
    if not places:
        return None
    dim = places[0].dim % leaf.dim()
    if leaf.shape[dim] % len(ranks):
        text = f"{verb}: {path} of {tuple(leaf.shape)} is cut unevenly along dim {dim}"
        raise LeafError(text, fix=f"pad it to a multiple of {len(ranks)}")
    return dim


def _check_formats(verb: str, path: str, formats: Formats, home: Groups, trained: bool) -> None:
    """Raise PlanError for a leaf that cannot be kept or sent as its formats say."""
    if trained and formats.codes is not None:
        text = f"{verb}: leaves that are trained cannot be kept as codes: updates would be lost"
        fix = "name them in frozen=, or give param= behind a pattern that leaves them out"
        raise PlanError(text, [f"{path}: param={formats.codes}"], fix)
    for wire in filter(None, (formats.gather, formats.hop1)):
        collectives.check_level(wire, home.hierarchy.route.names)


def agree_on(layout: Layout) -> None:
    """Compare paths, shapes, dtypes, groups and layout between ranks."""
    for home in dict.fromkeys(layout.homes):
        facts = [("groups", home.describe())]
        for i, leaf in enumerate(layout.leaves):
            if layout.homes[i] is home:
                text = f"{tuple(leaf.shape)} {leaf.dtype}".replace("torch.", "")
                text += " meta" if leaf.is_meta else ""
                if layout.owners[i] != i:
                    text += f" tied to {layout.paths[layout.owners[i]]}"
                elif i in layout.slots:
                    bucket, slot = layout.slots[i]
                    text += "" if bucket.trainable else " frozen"
                    text += f" cut along dim {bucket.cut[slot]}" if bucket.cut else ""
                    if f"{bucket.formats}" != SHORT_NAMES[leaf.dtype]:
                        text += f" as {bucket.formats}"
                    text += f" at {bucket.offsets[slot]} of bucket {bucket.index}"
                    if layout.places[i] != DEVICE:
                        text += f" on {layout.places[i].partition(':')[0]}"
                facts.append((layout.paths[i], text))
        collectives.agree(home, layout.verb, facts)
        own = (bucket for i, (bucket, _) in layout.slots.items() if layout.homes[i] is home)
        if home.replicas.second and any(isinstance(bucket.hop2, Codec) for bucket in own):
            complete(home.replicas.second, home.device)


@overload
def shard(
    params: Mapping[K, Tensor], groups: GroupsTree, **options: Unpack[LayoutOptions]
) -> dict[K, Sharded]: ...
@overload
def shard(
    params: list[Tensor], groups: GroupsTree, **options: Unpack[LayoutOptions]
) -> list[Sharded]: ...
@overload
def shard(params: T, groups: GroupsTree, **options: Unpack[LayoutOptions]) -> T: ...
def shard(params: Tree, groups: Any, **options: Unpack[LayoutOptions]) -> Tree:
    """Cut a pytree of tensors into shards: this rank keeps 1/p of every float leaf.

    Args:
      params: any pytree of tensors. Meta tensors give shards without values. An `nn.Parameter` with
        `requires_grad=False` is frozen. Leaves that are not floats are replicated. A tensor that
        occurs twice (in the same memory) becomes one shard, and stays tied.
      groups: `Groups`, or a prefix pytree of them, or a function from path to `Groups`.
      frozen: says which further leaves are frozen, by path, such as `h.0.bias`.
      precision: a `Precision` or its text, which gives the dtypes of shards, of full tensors, and
        of gradients while they are reduced; default the tensors' own. Frozen leaves may be kept as
        codes, as in "*base*: param=int4[64]".
      bucket_bytes: the largest size of a bucket; only a single larger leaf may exceed it. A text
        such as "16MiB" is a number of bytes, too.
      order: sort key of a path, for the order of leaves in buckets. By default numbers in paths
        compare as numbers.
      bucket: key of a path, for the borders of buckets: neighbours in `order` share one only if
        their keys are equal, as with `lambda path: path.split(".")[1]` for one per layer.
        `bucket_bytes` bounds them in any case.
      where: the places where float leaves live, by `params=` of a `Where` or its text; default the
        device. Those elsewhere are brought where they are gathered. Leaves are in the same buckets
        for all places; those of one bucket should have one place, or each is brought by itself.
      whole: says which leaves one rank of a partition group keeps in full, by path, and the others
        nothing of: that of a `Transform` whose arithmetic needs whole matrices, as `muon`.

    Returns:
      The same tree with `Sharded` leaves, `Fixed` ones for tensors that are not trained, and `Tied`
      ones for tensors that occurred before.

    Communication: a digest of the tree and the values (tens of bytes per leaf).

    Memory: this rank's shards (1/p of the floats), and one full bucket while it is cut.

    Raises:
      LeafError: a leaf is not a dense tensor, is on another device than its groups, overlaps with
        another one in memory, or was computed under autograd: only `gather` has a derivative.
      DesyncError: ranks disagree on the tree, or hold different values.
      LeafError: `groups` is not a prefix of `params`, or two leaves have the same path.
      PlanError: a tied leaf lives on two groups, an option has no effect or is not what it should
        be, or a pattern matches no leaf.
      FileError: with `where`, a file cannot be made or written on some rank; on all of them, with
        the same text, which names the rank.

    Example:
      >>> groups = make_groups(1)
      >>> for leaf in shard([torch.ones(2, 3), torch.tensor(7)], groups):
      ...     print(leaf)
      Sharded(shape=(2, 3), float32, here 6 of 6)
      Fixed(shape=(), int64, replicated)

    References: MiCS, Zhang et al., VLDB 2022, arXiv:2205.00119, section 3.2.
    """
    if spans.observers:
        spans.passing("build: shard")
    layout = layout_for("shard", "params", params, groups, options)
    refuse_computed("shard", layout.paths, layout.leaves)
    trained = [layout.paths[i] for i, (bucket, _) in layout.slots.items() if bucket.trainable]
    refuse_overlaps("shard", dict(zip(layout.paths, layout.leaves, strict=True)), trained)
    for home in dict.fromkeys(layout.homes):
        # Ranks may have compared two trees before, and come with one of them each.
        home.agreed.difference_update([seen for seen in home.agreed if seen[0] == "shard"])
    agree_on(layout)
    values = [None if layout.owners[i] != i else x for i, x in enumerate(layout.leaves)]
    fix = "use the same seed or checkpoint on every rank"
    compare_values("shard", layout.homes, layout.paths, values, fix, whole=True)
    slots = layout.slots.items()
    if not any(bucket.codes or layout.places[i] != DEVICE for i, (bucket, _) in slots):
        return _assemble(layout)
    # A disk may be full on one rank alone, or what codes cannot hold may lie in its part.
    with collectives.together("shard", layout.homes) as exchange:
        return _assemble(layout, exchange)


def layout_of(
    verb: str, root: str, values: Tree, groups: Any, **options: Unpack[LayoutOptions]
) -> Tree:
    """Shards on meta, laid out as `shard` would lay out these tensors.

    Communication: a digest of the tree, to compare it between ranks.
    """
    layout = layout_for(verb, root, values, groups, options)
    agree_on(layout)
    meta = [torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") for leaf in layout.leaves]
    return _assemble(layout._replace(leaves=meta))


def _assemble(layout: Layout, exchange: collectives.Exchange | None = None) -> Tree:
    out = _cut(layout, exchange)
    for i, leaf in enumerate(layout.leaves):
        if layout.owners[i] != i:
            out[i] = Tied(*layout.slots[layout.owners[i]])
        elif i not in layout.slots:
            out[i] = Fixed(leaf.detach().clone(memory_format=torch.contiguous_format))
    shards = layout.spec.unflatten([out[i] for i in range(len(layout.leaves))])
    return tree.replace_none(shards, Nothing(), is_leaf)


def _cut(layout: Layout, exchange: collectives.Exchange | None) -> dict[int, Any]:
    """This rank's chunk of each bucket, as leaves; one bucket at a time is in memory in full.

    Where this rank has failed, which `exchange` says at the end, there are no leaves.
    """
    members: dict[Bucket, dict[int, int]] = {}
    for i, (bucket, slot) in layout.slots.items():
        members.setdefault(bucket, {})[slot] = i
    out: dict[int, Any] = {}
    for bucket, by_slot in members.items():
        index = [by_slot[slot] for slot in range(len(by_slot))]
        home, device = layout.homes[index[0]], layout.leaves[index[0]].device
        with torch.no_grad():
            # Each chunk gets its own storage, so that `whole_chunk` can recognise its pieces; and
            # before the bucket in full, whose memory then serves the next bucket as well.
            chunk = torch.empty(bucket.chunk, dtype=bucket.dtype, device=device)
            full = pack.pack_full(bucket, [layout.leaves[i].detach() for i in index], device=device)
            chunk.copy_(full.view(bucket.parts, -1)[home.hierarchy.route.chunk])
            del full
        kind = Sharded if bucket.trainable else Fixed
        places, names = zip(*((layout.places[i], layout.paths[i]) for i in index), strict=True)
        given = (home, bucket, chunk, places, names, layout.host_bytes)
        place = partial(place_chunk, *given)
        placed = place() if exchange is None else exchange.part(place)
        pieces = zip(index, placed or [None] * len(index), strict=True)
        out.update({i: kind(piece, bucket, slot) for slot, (i, piece) in enumerate(pieces)})  # pyright: ignore
    return out


# `gather` and `unshard`: shards become full tensors. For the gradient see [Note: adjoint].


@overload
def gather(shards: Mapping[K, Leaf], hierarchy: GroupsTree) -> dict[K, Tensor]: ...
@overload
def gather(shards: list[Sharded], hierarchy: GroupsTree) -> list[Tensor]: ...
@overload
def gather(shards: T, hierarchy: GroupsTree) -> T: ...
def gather(shards: Tree, hierarchy: Any) -> Tree:
    """Rebuild full tensors from shards now. It is differentiable, and its VJP is hop 1.

    `defer` gives the same values in tensors that are fetched at the op that uses them.

    Args:
      shards: tree of shards (`Sharded`, `Fixed`, `Tied` leaves).
      hierarchy: the groups, as of `shard`, which gather level by level; `groups.flat` does so at
        once, over all ranks. Or a prefix pytree of these, or a function from path to one.

    Returns:
      The tree with tensors of the full shapes, which are for reading. Those of one bucket are views
      of one buffer, and tied leaves are one tensor. The gradient of a function of them is a tree of
      shards, averaged over the partition group. No raw collective is left to differentiate, so
      grad, vjp, jvp, vmap(grad), jacrev of full values and their compositions work. If p > 1,
      `jacfwd` and `hessian` over shards and `jacrev` of shards do not: they differentiate along
      directions that lie in one rank's piece alone. A Hessian is
      `vmap(lambda v: jvp(grad(loss), (shards,), (v,))[1])` over a stack of directions, each of
      which was cut by `shard`. Instead of `linearize` use `jvp`.

      A plain `loss.backward()` has nothing to differentiate by, as torch says ("element 0 of
      tensors does not require grad"): use `torch.func.grad`, or `defer` with a `GradSum`, or make
      the pieces leaves of autograd, `leaf.data.requires_grad_()`, which then have `leaf.data.grad`.

    Communication: one all-gather per level and bucket, in which each rank receives (p - 1)/p of the
      full bytes; the VJP is one reduce-scatter per level and bucket. None if p = 1. The ranks
      compare a tree that is new to the groups once: 32 bytes to each other rank of its group.

    Memory: the full tree, until the caller drops it. The VJP needs at most four buffers of the size
      of a bucket. If p = 1 full tensors are views of the shards and take no memory.

    Raises:
      PlanError: the groups are not those that the tree was sharded with.
      DonatedError: a shard was donated earlier.
      DesyncError: ranks gather different trees.
      LeafError: in `torch.func.linearize`, or in `jacfwd`, `hessian` or `jacrev` of shards.

    Example:
      >>> groups = make_groups(1)
      >>> shards = shard({"w": torch.ones(2)}, groups)
      >>> loss_fn = lambda s: gather(s, groups.hierarchy)["w"].square().sum()
      >>> torch.func.grad(loss_fn)(shards)["w"].data
      tensor([2., 2.])

    References: MiCS, Zhang et al., VLDB 2022, arXiv:2205.00119, section 3.3.
    """
    opened = open_shards("gather", shards, hierarchy).agree()
    return opened.build(_gathered(opened.data, opened.uses))


def as_dtensors(full: Tree, like: Tree) -> Tree:
    """The DTensors of a model, from this rank's parts as `gather`, `unshard` or `defer` gives them.

    Args:
      full: tree of this rank's parts.
      like: the same tree of the model's own, such as `dict(model.named_parameters())`. Values are
        not read; what is no DTensor there stays as it is in `full`.

    Returns:
      The tree, which `functional_call` of such a model takes. Nothing is fetched or copied. Its
      gradients go on to a `defer(into=GradSum)`, or to pieces that are leaves of autograd.

    Raises:
      LeafError: inside `torch.func`, since DTensors do not go through it; or the trees differ, or a
        part has another shape than that of the model.

    Example:
      >>> as_dtensors({"norm": torch.ones(2)}, {"norm": torch.zeros(2)})
      {'norm': tensor([1., 1.])}
    """
    if _torch.inside_torch_func():
        fix = "differentiate by defer(into=GradSum) and its backward, outside of torch.func"
        raise LeafError("as_dtensors: DTensors do not go through torch.func", fix=fix)
    leaves, spec = tree.flatten(full)
    models, expected = tree.flatten(like)
    if spec != expected:
        raise LeafError(f"as_dtensors: {tree.first_mismatch(like, full, 'full')}, as in like")
    for i, x in enumerate(models):
        if _torch.is_dtensor(x):
            part = _torch.local_of(x).shape
            if leaves[i].shape != part:
                text = f"as_dtensors: {tree.paths(full, 'full')[i]} is of {tuple(leaves[i].shape)}"
                fix = "pass parts of this rank, as gather gives them, and the model they are of"
                raise LeafError(f"{text}, and the model's part of {tuple(part)}", fix=fix)
            leaves[i] = _torch.as_dtensor(leaves[i], x.device_mesh, x.placements)
    return spec.unflatten(leaves)


def _gathered(data: Sequence[Any], uses: Sequence[BucketUse]) -> list[Any]:
    """One full tensor per leaf of the tree, from the data of each leaf."""
    full, trained, frozen = list(data), list[BucketUse](), list[BucketUse]()
    for use in uses:
        if not use.crosses_ranks:
            _view_local(use, full)
        elif use.bucket.trainable:
            trained.append(use)
        else:
            frozen.append(use)
    put(full, trained, apply("gather", trained, data))
    with torch.no_grad():  # frozen leaves get no gradient
        put(full, frozen, apply("gather", frozen, data))
    return full


def _view_local(use: BucketUse, data: list[Any]) -> None:
    """View as full tensors what one rank holds the whole of."""
    compute = use.bucket.compute
    for i, shape in zip(use.members, use.by_member(use.bucket.shapes), strict=True):
        piece = data[i]
        if use.placed:
            piece = pack.fetched_to(piece, use.hierarchy.device, compute)
        data[i] = piece.to(compute).reshape((*piece.shape[:-1], *shape))


@overload
def unshard(
    shards: Mapping[K, Leaf], hierarchy: GroupsTree, *, model: bool = False
) -> dict[K, Tensor]: ...
@overload
def unshard(shards: list[Sharded], hierarchy: GroupsTree, *, model: bool = ...) -> list[Tensor]: ...
@overload
def unshard(shards: T, hierarchy: GroupsTree, *, model: bool = False) -> T: ...
def unshard(shards: Tree, hierarchy: Any, *, model: bool = False) -> Tree:
    """Gather into tensors that own their memory, one bucket at a time, for export.

    Args:
      shards: tree of shards.
      hierarchy: as for `gather`.
      model: whether leaves of a model in parts are joined; else each rank gets its own parts.

    Returns:
      The tree with full tensors in the dtypes of the shards. Each has its own storage; tied leaves
      are one tensor.

    Communication: as for `gather`; with `model` an all-gather of each leaf that is cut over the
      parts of the model.

    On an accelerator the host waits, so that nothing leaves which an abort of collectives has torn.

    Memory: the full tree and one bucket; with `model` the largest leaf once more.

    Raises:
      GroupsError: with `model`, it is given a hierarchy, which knows no other parts.
      LeafError, PlanError, DonatedError, DesyncError: as `gather`.

    Example:
      >>> groups = make_groups(1)
      >>> unshard(shard([torch.arange(3.0)], groups), groups.hierarchy)
      [tensor([0., 1., 2.])]
    """
    opened = open_shards("unshard", shards, hierarchy).agree()
    if model:
        require_replicas("unshard(model=True)", opened.homes)
    data = opened.data
    whole = [isinstance(leaf, Fixed) and leaf.bucket is None for leaf in opened.leaves]
    out = [data[i].clone() if is_whole else None for i, is_whole in enumerate(whole)]
    for use in opened.uses:
        full = _gathered(data, [replace(use, bucket=use.bucket.exact)])
        for i in use.members:
            if model and use.bucket.cut:
                out[i] = join_parts(use.home, opened.leaves[i], full[i])
            else:
                out[i] = full[i].clone(memory_format=torch.contiguous_format)
    for use in opened.uses[-1:]:
        use.home.partition.check_done(use.home.device)  # for nobody judges what leaves
    return opened.build(out)


def join_parts(home: Any, leaf: Any, part: Tensor) -> Tensor:
    """A leaf of the whole model, in memory of its own, of which this rank has a part in full.

    Communication: an all-gather over the parts of the model.
    """
    found = collectives.all_gather(home.model.parts, part)
    dim = leaf.bucket.cut[leaf.slot]
    return found.movedim(0, dim).flatten(dim, dim + 1).contiguous()


# Both hops of the gradients, which are means: hop 1 in partition groups, hop 2 over replicas.


def reduce_grads(grads: Tree, groups: Any, *, like: Tree | None = None) -> Tree:
    """Do the hops that gradients still need: both for full tensors, hop 2 for `Sharded` leaves.

    Args:
      grads: gradients, as a tree of full tensors, or of shards as `torch.func.grad` through
        `gather` gives them, or of both.
      groups: as for `shard`.
      like: the shards that the gradients belong to. It is needed with full tensors if the
        parameters have tied or frozen leaves or were sharded with other options than the default.

    Returns:
      A tree of shards: the gradient of the loss averaged over all ranks.

    Communication: hop 1 is one reduce-scatter per level and bucket, (p - 1)/p of the full bytes.
      Hop 2 is one all-reduce per bucket over the r replicas, 2(r - 1)/r of the shard's bytes.

    Memory: as for `scatter_grads`, and a copy of the shards in hop 2.

    Raises:
      LeafError: the structure or a shape differs from `like`.
      LeafError: there is a gradient for an integer leaf, or its dtype or device differs from the
        leaf's.

    Example:
      >>> groups = make_groups(1)
      >>> reduce_grads({"w": torch.ones(3)}, groups)
      {'w': Sharded(shape=(3,), float32, here 3 of 3)}

    References: MiCS, Zhang et al., VLDB 2022, arXiv:2205.00119, section 3.4 (2-hop gradient
      synchronisation).
    """
    leaves, _ = tree.flatten(grads, is_leaf)
    if like is not None or any(isinstance(leaf, Tensor) for leaf in leaves):
        grads = _scattered("reduce_grads", grads, groups, like)
    return _mean_over_replicas("reduce_grads", grads, groups)


def scatter_grads(grads: Tree, groups: Any, *, like: Tree | None = None) -> Tree:
    """Hop 1: average full gradients over the partition group; each rank keeps its shard.

    Args:
      grads: tree of full tensors, with None for leaves that have no gradient. `Sharded` leaves stay
        as they are.
      groups: as for `shard`.
      like: as for `reduce_grads`. Without it the layout is computed from the gradients, and
        compared between ranks.

    Returns:
      A tree of shards. Missing gradients become zeros, and gradients of tied leaves are added.

    Communication: one reduce-scatter per level and bucket, (p - 1)/p of the full bytes; none if
      p = 1.

    Memory: at most four buffers of the size of a bucket, which are kept for the next call. If p = 1
      none, since shards are views of the gradients.

    Raises: the errors of `reduce_grads`.

    Example:
      >>> groups = make_groups(1)
      >>> scatter_grads([torch.ones(2, 2)], groups)[0].data
      tensor([1., 1., 1., 1.])
    """
    return _scattered("scatter_grads", grads, groups, like)


def _scattered(verb: str, grads: Tree, groups: Any, like: Tree | None) -> Tree:
    """Do hop 1 of the full gradients among `grads`, as shards that lie as those of `like` do."""
    if like is not None:
        check_leaves(verb, like, tree.flatten(like, is_leaf)[0], "like")
    else:
        like = layout_of(verb, "grads", tree.map_leaves(pack.dense, grads, is_leaf=is_leaf), groups)
    opened = open_shards(verb, like, groups, root="grads")
    given = values_up_to(opened.spec, opened.given, grads, f"{verb}: grads")
    full, sent, out = _full_grads(opened, given), list[BucketUse](), list[Any](opened.leaves)
    for use in opened.trained:
        done = [i for i in use.members if isinstance(given[i], Sharded)]
        if done and len(done) < len(use.members):
            text = (
                f"{verb}: {opened.path(done[0])} is reduced already, others of its bucket are not"
            )
            raise LeafError(text, fix="reduce a bucket's gradients together")
        if not done and use.crosses_ranks:
            sent.append(use)
            continue
        for i in use.members:
            out[i] = given[i] if done else _local(full[i], out[i], use.home.device)
    for use, values in deal(sent, apply("scatter", sent, full)):
        for i, piece in zip(use.members, values, strict=True):
            out[i] = Sharded(piece, use.bucket, opened.leaves[i].slot)
    return opened.spec.unflatten(out)


def _full_grads(opened: Opened, given: Sequence[Any]) -> list[Tensor | None]:
    """One full gradient per leaf, checked; those of tied leaves are added to their owner's."""
    full: list[Tensor | None] = [None] * len(given)
    for i, (grad, owner) in enumerate(zip(given, opened.layout.owner, strict=True)):
        slot: Any = opened.leaves[owner]
        if grad is None or is_leaf(grad):
            continue
        grad = pack.dense(grad)
        wrong = _misfit(slot, grad)
        if wrong or not slot.dtype.is_floating_point:
            text = f"{opened.verb}: {opened.path(i)} {wrong or 'is of a leaf without gradients'}"
            raise LeafError(text, fix="give the gradient of the full parameter")
        if isinstance(slot, Sharded):
            before = full[owner]
            full[owner] = grad if before is None else before + grad
    return full


def _misfit(leaf: Any, value: Any) -> str:
    """Why a value cannot be a full gradient of a leaf, perhaps with dims of a batch; "" if it can.

    Its dtype is that of the leaf, or that of its computation.
    """
    allowed = (leaf.dtype, leaf.bucket.compute if leaf.bucket else leaf.dtype)
    got = type(value).__name__
    if isinstance(value, Tensor):
        if value.shape[value.ndim - len(leaf.shape) :] == leaf.shape and value.dtype in allowed:
            return ""
        got = f"{dtype_name(value.dtype)} of shape {tuple(value.shape)}"
    dtypes = " or ".join([dtype_name(dtype) for dtype in dict.fromkeys(allowed)])
    return f"is {got}, expected {dtypes} of shape {leaf.shape}"


def _local(grad: Tensor | None, slot: Sharded, device: torch.device) -> Sharded:
    """Hop 1 in a group of one rank, which is the gradient itself."""
    if grad is None:
        grad = torch.zeros(slot.shape, dtype=slot.dtype, device=device)
    batch, numel = grad.shape[: grad.ndim - len(slot.shape)], slot.bucket.numels[slot.slot]
    return Sharded(grad.reshape((*batch, numel)).to(slot.dtype), slot.bucket, slot.slot)


def sync_replicas(grads: Tree, groups: Any, *, exact: bool = False) -> Tree:
    """Hop 2: average shards of gradients over the replication group.

    Args:
      grads: tree of shards, hop 1 done.
      groups: as for `shard`.
      exact: send the dtype of the shards instead of that of reductions, as parameters need it.

    Returns:
      The averaged tree, its pieces where those of `grads` lie; if r = 1 the given tree itself.
      Averaging twice changes nothing.

    Communication: one all-reduce per bucket over r replicas, 2(r - 1)/r of the shard's bytes; none
      if r = 1. Where `hop2` of the precision is a codec, an all-to-all and an all-gather of codes.

    Memory: a copy of the shards.

    Raises:
      LeafError: a leaf is not a shard.
      DonatedError: the tree was donated earlier.

    Example:
      >>> groups = make_groups(1)
      >>> sync_replicas(shard([torch.ones(2)], groups), groups)[0].data
      tensor([1., 1.])

    References: MiCS, Zhang et al., VLDB 2022, arXiv:2205.00119, section 3.4.
    """
    return _mean_over_replicas("sync_replicas", grads, groups, exact=exact)


def _mean_over_replicas(verb: str, grads: Tree, groups: Any, *, exact: bool = False) -> Tree:
    opened = open_shards(verb, grads, groups, root="grads")
    require_replicas(verb, opened.layout.homes)
    sent = {
        i: x for i, x in enumerate(opened.uses) if x.bucket.trainable and x.home.replicas.size > 1
    }
    if not sent:
        if opened.leaves:
            mark_reduced(opened.leaves, opened.layout.homes[0])
        return grads
    uses = [replace(x, bucket=x.bucket.exact) if exact else x for x in sent.values()]
    made = dict[int, Sequence[Tensor]]()
    for i, (use, new) in zip(sent, deal(uses, apply("mean", uses, opened.data)), strict=True):
        made[i] = placed_like(new, [opened.data[m] for m in use.members]) if use.placed else new
    return opened.rebuild(made)


# `map`: an elementwise function of this rank's pieces.


def map(fn: Callable[..., Tensor], shards: Tree, *rest: Tree) -> Tree:
    """Apply an elementwise function to every trained leaf of a tree of shards.

    Each rank calls it with its own pieces, so it must not mix elements: `x / x.norm()` would divide
    by the norm of a piece. `optim.leaf_norms` gives norms of whole leaves, to be passed as `rest`.
    So pass every number that is differentiated: its derivative is the sum over all pieces, of which
    a rank that only closes over it would see its own.

    Args:
      fn: `fn(piece, *others)` gives a tensor like `piece`: 1D, maybe empty, of the same dtype.
      shards: tree of shards. Frozen, replicated and tied leaves stay as they are.
      rest: trees of the same structure; in place of a shard they may have a number or a tensor of
        one element, which `fn` gets as it is. A single number serves all leaves.

    Returns:
      The tree with what `fn` gave, in memory of its own if `fn` made new tensors. It is
      differentiated as `fn` is. What lay in files or on the host does so again, except where a
      derivative is asked for, which would end at a file.

    Raises:
      LeafError: a leaf of `shards` is not a shard, or `fn` gave something else than a tensor like
        the piece.
      LeafError: `shards` is None, or a tree of `rest` has another structure, or leaves
        that are cut in another way.

    Example:
      >>> groups = make_groups(1)
      >>> params = shard({"b": torch.ones(2), "w": torch.ones(2)}, groups)
      >>> shards.map(lambda x, y, c: x + c * y, params, params, {"b": 1.0, "w": 2.0})["w"].data
      tensor([3., 3.])
    """
    leaves, spec = tree.flatten(shards, is_leaf)
    check_leaves("map", shards, leaves, "shards")
    others = [_matched(shards, leaves, spec, other, f"rest[{i}]") for i, other in enumerate(rest)]
    trained = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Sharded)]
    own, made = [leaves[i].data for i in trained], list[Tensor]()
    for i, piece in zip(trained, own, strict=True):
        found: Any = fn(piece, *(other[i] for other in others))
        same = isinstance(found, Tensor) and found.shape == piece.shape
        if not same or (found.dtype, found.device) != (piece.dtype, piece.device):
            path = tree.paths(shards, "shards", is_leaf)[i]
            text = f"map: the function gave {_kind(found)} for {path}"
            fix = "let it give one element for each, and cast it back with .to(piece.dtype)"
            raise LeafError(text, [f"expected {_kind(piece)}"], fix)
        made.append(found)
    out: list[Any] = list(leaves)
    for i, data in zip(trained, placed_like(made, own), strict=True):
        out[i] = Sharded(data, leaves[i].bucket, leaves[i].slot)
    mark_reduced(out, reduction_groups(leaves))
    return spec.unflatten(out)


def _matched(shards: Tree, leaves: Sequence[Any], spec: Any, other: Tree, root: str) -> list[Any]:
    """One value per leaf of the tree: a piece, a number, or a tensor of one element."""
    given = [other] * len(leaves)
    if not _is_number(other):
        given = values_up_to(spec, shards, other, f"map: {root}")
    for i, (leaf, value) in enumerate(zip(leaves, given, strict=True)):
        if not isinstance(leaf, Sharded):
            continue
        if isinstance(value, Sharded) and (value.bucket, value.slot) == (leaf.bucket, leaf.slot):
            given[i] = value.data
        elif _is_number(value):
            given[i] = as_part(value, leaf.bucket.parts)
        else:
            got = f"{tree.paths(shards, root, is_leaf)[i]} is {_kind(value)}"
            text = f"map: {got}, expected shards that are cut in the same way, or a number"
            raise LeafError(text, fix="pass shards that were sharded together")
    return given


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)


def _kind(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    where = "" if value.device.type == "cpu" else f" on {value.device}"
    return f"a tensor of {tuple(value.shape)}, {dtype_name(value.dtype)}{where}"

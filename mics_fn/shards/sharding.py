"""`shard`: a pytree of tensors becomes a tree of shards. See [Note: kinds of leaves] in `leaf`."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, TypedDict, TypeVar, Unpack, overload

import torch
from torch import Tensor, nn

from mics_fn import _torch, checks, collectives, spans, tree
from mics_fn.collectives import SHORT_NAMES
from mics_fn.errors import LeafError, PlanError, name_ranks
from mics_fn.groups import Groups, Home
from mics_fn.offload import DEVICE, Where, place_tensor
from mics_fn.shards.bucket import BUCKET_BYTES, Bucket, Formats, LeafSpec, Precision, plan_buckets
from mics_fn.shards.leaf import (
    Fixed,
    Nothing,
    Sharded,
    Tied,
    is_leaf,
    owners_of,
    refuse_overlaps,
)
from mics_fn.shards.opened import GroupsTree, compare_values, homes_of
from mics_fn.shards.pack import check_kept_place, coded_pieces, pack_full, split_chunk
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
            text = f"{verb}: {path} is computed from a tensor that requires a gradient, which would"
            text += " not get it"
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
    elif type(leaf).__name__ == "DTensor":
        wrong = "a DTensor"
        fix = (
            "of a tensor parallel model pass its to_local(), with groups of the data-parallel part "
            "of the mesh: make_groups(mesh=mesh['dp']); else its full_tensor()"
        )
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
        return coded_pieces(bucket, chunk, flat, names)
    if empty or set(places) == {DEVICE}:
        return split_chunk(bucket, chunk, flat)
    if len(set(places)) == 1:  # so that they are parts of one tensor there, too
        title = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        flat = place_tensor(flat, places[0], device, host_bytes, title)
        return split_chunk(bucket, chunk, flat)
    own = [piece.clone() for piece in split_chunk(bucket, chunk, flat)]
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
    chosen, where = Precision.parse(options.get("precision")), Where.parse(options.get("where"))
    given = options.get("bucket_bytes", BUCKET_BYTES)
    nbytes = checks.nbytes(verb, "bucket_bytes", given, 1)
    homes = homes_of(verb, groups, params, root, Groups)
    leaves, spec = tree.flatten(params, is_leaf)
    tree.refuse_equal_paths(verb, tree.replace_none(params, Nothing(), is_leaf), root, is_leaf)
    bare = tree.paths(params, "", is_leaf)
    paths = [tree.join(root, path) for path in bare]
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
            facts = formats, home.partition_size, trained, (numbers[home], leaf.is_meta)
            specs[i] = LeafSpec(path, tuple(leaf.shape), *facts)
    slots = plan_buckets(list(specs.values()), bucket_bytes=nbytes, order=order, bucket=bucket)
    pairs = zip(bare, homes, strict=True)
    places = [where.at(path, "params", home.device) for path, home in pairs]
    by_leaf = dict(zip(specs, slots, strict=True))
    for i, (made, _) in by_leaf.items():
        check_kept_place(verb, made, places[i])
    return Layout(verb, spec, leaves, paths, homes, owners, by_leaf, places, where.host_bytes)


def _check_formats(verb: str, path: str, formats: Formats, home: Groups, trained: bool) -> None:
    """Raise PlanError for a leaf that cannot be kept or sent as its formats say."""
    if trained and formats.codes is not None:
        text = f"{verb}: leaves that are trained cannot be kept as codes: updates would be lost"
        fix = "name them in frozen=, or give param= behind a pattern that leaves them out"
        raise PlanError(text, [f"{path}: param={formats.codes}"], fix)
    for wire in filter(None, (formats.gather, formats.hop1)):
        collectives.check_level(wire, home.plan.topology.names)


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
                    if f"{bucket.formats}" != SHORT_NAMES[leaf.dtype]:
                        text += f" as {bucket.formats}"
                    text += f" at {bucket.offsets[slot]} of bucket {bucket.index}"
                    if layout.places[i] != DEVICE:
                        text += f" on {layout.places[i].partition(':')[0]}"
                facts.append((layout.paths[i], text))
        collectives.agree(home, layout.verb, facts)


class ShardOptions(LayoutOptions, total=False):
    """All options of `shard`."""

    replicas: Literal["check", "broadcast"]
    source_rank: int | None


K = TypeVar("K")
T = TypeVar("T")


@overload
def shard(
    params: Mapping[K, Tensor], groups: GroupsTree, **options: Unpack[ShardOptions]
) -> dict[K, Sharded]: ...
@overload
def shard(
    params: list[Tensor], groups: GroupsTree, **options: Unpack[ShardOptions]
) -> list[Sharded]: ...
@overload
def shard(params: T, groups: GroupsTree, **options: Unpack[ShardOptions]) -> T: ...
def shard(
    params: Tree,
    groups: Any,
    *,
    replicas: Literal["check", "broadcast"] = "check",
    source_rank: int | None = None,
    frozen: Callable[[str], bool] | None = None,
    precision: Precision | str | None = None,
    bucket_bytes: float | str = BUCKET_BYTES,
    order: Callable[[str], object] | None = None,
    bucket: Callable[[str], object] | None = None,
    where: Where | str | None = None,
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
    checks.choice("shard", "replicas", replicas, "check", "broadcast")
    how: Any = {"precision": precision, "bucket_bytes": bucket_bytes, "where": where}
    how |= {"frozen": frozen, "order": order, "bucket": bucket}
    layout = layout_for("shard", "params", params, groups, how)
    refuse_computed("shard", layout.paths, layout.leaves)
    trained = [layout.paths[i] for i, (bucket, _) in layout.slots.items() if bucket.trainable]
    refuse_overlaps("shard", dict(zip(layout.paths, layout.leaves, strict=True)), trained)
    for home in dict.fromkeys(layout.homes):
        # Ranks may have compared two trees before, and come with one of them each.
        home.agreed.difference_update([seen for seen in home.agreed if seen[0] == "shard"])
    agree_on(layout)
    sources: dict[Groups, int] = {}
    if replicas == "check":
        values = [None if layout.owners[i] != i else x for i, x in enumerate(layout.leaves)]
        fix = "use the same seed or checkpoint on every rank, or pass replicas='broadcast'"
        compare_values("shard", layout.homes, layout.paths, values, fix, whole=True)
    for home in dict.fromkeys(layout.homes) if replicas == "broadcast" else ():
        sources[home] = home.ranks[0] if source_rank is None else source_rank
        if sources[home] not in home.ranks:
            text = f"shard: source_rank={source_rank} is not one of {name_ranks(home.ranks)}"
            raise PlanError(text, fix="name a global rank of the groups")
    slots = layout.slots.items()
    if not any(bucket.codes or layout.places[i] != DEVICE for i, (bucket, _) in slots):
        return _assemble(layout, sources)
    # A disk may be full on one rank alone, or what codes cannot hold may lie in its part.
    with collectives.together("shard", layout.homes) as exchange:
        return _assemble(layout, sources, exchange)


def layout_of(
    verb: str, root: str, values: Tree, groups: Any, **options: Unpack[LayoutOptions]
) -> Tree:
    """Shards on meta, laid out as `shard` would lay out these tensors.

    Communication: a digest of the tree, to compare it between ranks.
    """
    layout = layout_for(verb, root, values, groups, options)
    agree_on(layout)
    meta = [torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") for leaf in layout.leaves]
    return _assemble(layout._replace(leaves=meta), {})


def _assemble(
    layout: Layout, sources: Mapping[Groups, int], exchange: collectives.Exchange | None = None
) -> Tree:
    out = _cut(layout, sources, exchange)
    for i, (leaf, home) in enumerate(zip(layout.leaves, layout.homes, strict=True)):
        if layout.owners[i] != i:
            out[i] = Tied(*layout.slots[layout.owners[i]])
        elif i not in layout.slots:
            value = leaf.detach().clone(memory_format=torch.contiguous_format)
            if home in sources and not value.is_meta and value.numel():
                collectives.levels.broadcast(home, value, sources[home])
            out[i] = Fixed(value)
    shards = layout.spec.unflatten([out[i] for i in range(len(layout.leaves))])
    return tree.replace_none(shards, Nothing(), is_leaf)


def _cut(
    layout: Layout, sources: Mapping[Groups, int], exchange: collectives.Exchange | None
) -> dict[int, Any]:
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
            full = pack_full(bucket, [layout.leaves[i].detach() for i in index], device=device)
            if home in sources and not full.is_meta:
                collectives.levels.broadcast(home, full, sources[home])
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

"""`get` and `set`: one leaf of a sharded value by its path, for people at a prompt."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mics_fn import _torch
from mics_fn.collectives import checksum, start_all_gather
from mics_fn.errors import LeafError, PlanError, message
from mics_fn.groups import Hierarchy, require_replicas
from mics_fn.inspection.paths import Leaves, leaves_of
from mics_fn.offload import is_coded, laid_like
from mics_fn.optim import replaced
from mics_fn.shards import (
    Bucket,
    Fixed,
    brought,
    check_finite,
    coded_pieces,
    dtype_name,
    grouped,
    has_codes,
    is_leaf,
    pack_chunk,
    pieces,
    same_tensor,
    split_chunk,
    whole_chunk,
)
from mics_fn.tree import Tree

# This file defines `set`, so its code cannot use the builtin of that name.


@torch.no_grad()
def get(shards: Tree, path: str, groups: Any) -> Any:
    """One leaf in full, by its path, on every rank.

    Args:
      shards: tree of shards (parameters, gradients, moments), or a `TrainState`.
      path: as errors and `summary` write it: `params.layers.0.w`, and in a `TrainState` also
        `opt.moments.exp_avg.layers.0.w` and `buffers.norm.running_mean`. The name of a parameter or
        buffer, `layers.0.w`, is enough.
      groups: as for `gather`; for a `TrainState` those of its parameters.

    Returns:
      The tensor in the dtype of the shards, in memory of its own, without a gradient. A tied leaf
      gives the tensor of its owner. What is not a shard comes as this rank has it: replicated
      tensors, buffers and 0-dim tensors as copies, numbers as they are, and None for a leaf that is
      None.

    Communication: what each rank asks for (a few hundred bytes), then one all-gather per level, of
      this leaf alone: each rank receives p - 1 times the leaf's largest piece, because shorter
      pieces are padded. The rest of the bucket does not travel. All ranks must call it.

    Memory: the tensor, and p times its largest piece.

    Raises:
      TreeError: no leaf has this path, or several have it; the nearest paths are named.
      LeafError: the call is inside torch.func; or the leaf is a tensor of an optimizer that keeps
        pieces in its own way, so that the full tensor is not known.
      PlanError: the groups are not those that the tree was sharded with.
      DonatedError: the value was given away earlier.
      DesyncError: the ranks ask for different leaves, or another rank has one of these errors.

    Example:
      >>> groups = make_groups(1)
      >>> state = init_state(shard({"h.0.w": torch.ones(2)}, groups), optim.adam(0.1))
      >>> get(state, "h.0.w", groups), get(state, "opt.moments.exp_avg.h.0.w", groups)
      (tensor([1., 1.]), tensor([0., 0.]))
    """
    found = leaves_of("get", shards, groups)

    def look() -> tuple[str, int]:
        at = found.find(path)
        return _described(found, at), at

    _, at = found.agreed(look)
    leaf = found.all[at]
    bucket = _bucket_of(leaf)
    if bucket is not None:
        return _gathered(leaf, bucket, found.homes[at].hierarchy)
    value = leaf.data if is_leaf(leaf) else leaf
    return value.detach().clone() if isinstance(value, Tensor) else value


@torch.no_grad()
def set(shards: Tree, path: str, value: Any, groups: Any) -> Tree:
    """A copy of the tree or state in which one leaf is replaced; the given one does not change.

    Args:
      shards: as for `get`.
      path: as for `get`.
      value: a tensor of the leaf's full shape, the same on every rank, which is cast to the leaf's
        dtype; or a number, with which the leaf is filled.
      groups: as for `shard`; for a `TrainState` those of its parameters.

    Returns:
      The new tree or `TrainState`. A tensor that is tied changes under all its names. The leaves of
      other buckets are the same objects as before, so if one of the two values is donated later,
      the other loses what they share.

    Communication: what each rank sets, with a digest of the value (a few hundred bytes). All ranks
      must call it.

    Memory: this rank's chunk of the leaf's bucket, a second time.

    Raises:
      LeafError: the value has another shape, its numbers do not fit the leaf's dtype (fractions for
        integers, numbers out of range, True for a number) or its codes (what is not finite, or is
        negative in a second moment), or the leaf holds no data.
      DesyncError: the ranks give different values or paths, or another rank has such an error.
      GroupsError: a hierarchy was given, which does not reach the replicas.
      TreeError, PlanError, DonatedError: as `get`.

    Example:
      >>> groups = make_groups(1)
      >>> params = shard({"w": torch.ones(2), "b": torch.ones(1)}, groups)
      >>> new = set(params, "params.w", torch.tensor([3.0, 4.0]), groups)
      >>> get(new, "w", groups), get(params, "w", groups)
      (tensor([3., 4.]), tensor([1., 1.]))
    """
    found = leaves_of("set", shards, groups)
    require_replicas("set", found.groups)

    def look() -> tuple[str, int, Any]:
        at = found.find(path)
        where = _described(found, at)
        new = _fitting(f"set: {found.paths[at]}", found.all[at], value)
        text = repr(value)
        if isinstance(value, Tensor):
            text = f"values of digest {int(checksum(new)) % 2**64:016x}"
        return f"{where} = {text}", at, new

    _, at, new = found.agreed(look)
    changed = _replaced(found, at, new)
    by_id = {id(found.all[i]): leaf for i, leaf in changed.items()}
    out = [changed.get(i, leaf) for i, leaf in enumerate(found.all)]
    for i, own in enumerate(found.paths):
        if own is None:  # else the optimizer's trees would keep the old frozen tensor in memory
            out[i] = by_id.get(id(out[i]), out[i])
    return replaced(shards, found.spec.unflatten(found.all), found.spec.unflatten(out))


def _bucket_of(leaf: Any) -> Bucket | None:
    """The bucket of a piece; None for a leaf that is whole on this rank or is not a tensor."""
    return getattr(leaf, "bucket", None)


def _described(found: Leaves, at: int) -> str:
    """A leaf as a text that is the same on every rank, after checks that it can be gathered.

    Raises:
      LeafError, PlanError: as `get`.
    """
    leaf, where = found.all[at], f"{found.verb}: {found.paths[at]}"
    if not is_leaf(leaf) and not isinstance(leaf, Tensor):
        return f"{found.paths[at]}, {type(leaf).__name__}"
    if isinstance(leaf, Tensor) and leaf.ndim and found.in_optimizer(at):
        text = f"{where} is a plain tensor of shape {tuple(leaf.shape)}"
        why = "an optimizer from outside mics_fn may keep pieces in such tensors, of unknown leaves"
        raise LeafError(message(text, [why], fix="read this rank's own tensor from state.opt"))
    bucket = _bucket_of(leaf)
    if bucket is None:
        shape, dtype = tuple(getattr(leaf, "shape", ())), getattr(leaf, "dtype", None)
        return f"{found.paths[at]}, {shape} {dtype}"
    route, data, slot = found.homes[at].hierarchy.route, leaf.data, getattr(leaf, "slot", 0)
    here = pieces(bucket, min(route.chunk, bucket.parts - 1))[slot].length
    if route.size != bucket.parts or data.shape != (here,):
        text = f"{where} is one of {bucket.parts} pieces, here of shape {tuple(data.shape)}; "
        text += f"these groups have {route.size} parts"
        raise PlanError(message(text, fix="pass the groups that the tree was sharded with"))
    place = f"at {bucket.offsets[slot]} of {bucket.numel}, in {bucket.parts} parts"
    return f"{found.paths[at]}, {leaf.shape} {dtype_name(data.dtype)} {place}"


def _gathered(leaf: Any, bucket: Bucket, hierarchy: Hierarchy) -> Tensor:
    """One leaf in full; each piece is padded to the length of the longest one."""
    slot, sent = leaf.slot, brought(leaf.data.detach(), hierarchy.device)
    start, stop = bucket.offsets[slot], bucket.offsets[slot] + bucket.numels[slot]
    bounds = [(i * bucket.chunk, (i + 1) * bucket.chunk) for i in range(bucket.parts)]
    lengths = [max(0, min(high, stop) - max(low, start)) for low, high in bounds]
    if len(sent) < max(lengths):
        sent = torch.cat([sent, sent.new_zeros(max(lengths) - len(sent))])
    found = start_all_gather(hierarchy.route, sent, what=("get", "gather", bucket)).wait()
    return torch.cat([found[i, :length] for i, length in enumerate(lengths)]).view(leaf.shape)


def _fitting(where: str, leaf: Any, value: Any) -> Any:
    """The value that the full leaf will have: a tensor of its shape and dtype, or a number."""
    held = leaf.data if is_leaf(leaf) else leaf
    is_number = isinstance(value, int | float)
    if isinstance(value, bool) and isinstance(held, Tensor) and held.dtype != torch.bool:
        text = f"{where}: the value is {value}, and the leaf has dtype {dtype_name(held.dtype)}"
        raise LeafError(message(text, fix=f"pass {int(value)} to fill the leaf with that number"))
    if isinstance(held, int | float) and is_number:
        if not isinstance(value, (int, float) if type(held) is float else type(held)):
            raise LeafError(f"{where} is {type(held).__name__}, got {value!r}")
        return type(held)(value)
    if not isinstance(held, Tensor) or _torch.has_no_data(held):
        raise LeafError(f"{where} holds no data: {leaf!r}")
    if is_number:
        value = _number(where, value).expand(leaf.shape)
    if not isinstance(value, Tensor) or value.layout != torch.strided or _torch.is_dtensor(value):
        got = str(value.layout) if isinstance(value, Tensor) else type(value).__name__
        fix = "pass a plain tensor of the full shape, or a number to fill the leaf with"
        raise LeafError(message(f"{where}: the value is {got}", fix=fix))
    if tuple(value.shape) != tuple(leaf.shape) or _torch.has_no_data(value):
        got = f"got {tuple(value.shape)}" + (" without data" if _torch.has_no_data(value) else "")
        fix = "pass the full tensor, or a number to fill the leaf with"
        lines = [f"expected {tuple(leaf.shape)}", got]
        raise LeafError(message(f"{where}: a value of another shape", lines, fix))
    moved = value.detach().to(held.device)
    if has_codes(held):
        check_finite(where, leaf.bucket.codes, moved)
    elif is_coded(held):
        _check_moment(where, held, moved)
    cast = moved.to(held.dtype) if torch.can_cast(moved.dtype, held.dtype) else None
    if cast is None or not _survives(moved, cast):
        lines = [f"expected {dtype_name(held.dtype)}", f"got {dtype_name(value.dtype)}"]
        fix = "pass values that the leaf's dtype can hold"
        raise LeafError(message(f"{where}: the value does not fit its dtype", lines, fix))
    return cast


def _check_moment(where: str, held: Any, values: Tensor) -> None:
    """Raise LeafError if the codes of a moment cannot hold these values: its block would be NaN."""
    codec, root = held.codes.codec, held.codes.root
    good = values.isfinite() & (values >= 0) if root else values.isfinite()
    if not bool(good.all()):
        what = "negative or not finite" if root else "not finite"
        fix = "pass finite numbers of at least 0" if root else "pass finite numbers"
        text = f"{where} has a value that is {what}, which state={codec} cannot hold"
        raise LeafError(message(text, fix=fix))


def _number(where: str, value: int | float) -> Tensor:
    kinds = {bool: torch.bool, int: torch.int64, float: torch.float64}  # the widest of each kind
    kind = next(kinds[cls] for cls in kinds if isinstance(value, cls))
    try:
        return torch.tensor(value, dtype=kind)
    except (RuntimeError, OverflowError, ValueError) as error:
        raise LeafError(f"{where}: {value!r} is out of range") from error


def _survives(moved: Tensor, cast: Tensor) -> bool:
    """Whether a cast kept integers equal and finite numbers finite; it may round fractions."""
    if not cast.is_floating_point():
        return torch.equal(cast.to(moved.dtype), moved)
    wide = cast.float() if cast.itemsize == 1 else cast  # 8-bit floats have few ops of their own
    return bool((wide.isfinite() | ~moved.isfinite()).all())


def _replaced(found: Leaves, at: int, value: Any) -> dict[int, Any]:
    """The leaves that change, by index; for a piece all of its bucket, which gets a new chunk."""
    leaf = found.all[at]
    if _bucket_of(leaf) is None:
        if isinstance(value, Tensor):  # since the caller may write to this one
            value = value.clone(memory_format=torch.contiguous_format)
        if isinstance(leaf, Tensor):  # a buffer may have several names
            alike = (i for i, x in enumerate(found.all) if same_tensor(x, leaf))
            return dict.fromkeys([at, *alike], value)
        return {at: Fixed(value) if is_leaf(leaf) else value}
    places, slot = found.shards, leaf.slot
    uses = grouped([found.all[i] for i in places], [found.homes[i] for i in places])
    use = next(use for use in uses if places.index(at) in use.members)
    members = [places[i] for i in use.members]
    # The dtype of pieces may not be that of their bucket: sums of gradients are wider.
    bucket, chunk = replace(use.bucket, dtype=leaf.data.dtype), use.route.chunk
    data = use.by_slot([found.all[i].data for i in members])
    flat, device = whole_chunk(bucket, chunk, data), leaf.data.device
    flat = pack_chunk(bucket, chunk, data, device=device) if flat is None else flat.clone()
    views, piece = split_chunk(bucket, chunk, flat), pieces(bucket, chunk)[slot]
    views[slot].copy_(value.reshape(-1)[piece.origin : piece.origin + piece.length])
    if has_codes(leaf.data):
        paths = [found.paths[i] or "" for i in members]
        names = [path or "" for path in use.by_slot(paths)]
        laid = use.by_member(coded_pieces(use.bucket, chunk, flat, names))
    else:
        laid = laid_like(use.by_member(views), [found.all[i].data for i in members])
    pairs = zip(members, laid, strict=True)
    return {i: type(leaf)(view, found.all[i].bucket, found.all[i].slot) for i, view in pairs}
